"""Stands in for the CUDA libraries of torch, 2.7 GB, on a machine without a GPU: cuda_stubs.py FOLDER.

FOLDER has torch, installed without its dependencies. torch is linked against these libraries and does not start without
them, though it calls none. Each becomes a link to one small library, whose functions say their name and abort.
"""

import glob
import os
import subprocess
import sys


def main() -> None:
    folder = sys.argv[1]
    libs = glob.glob(f"{folder}/torch/lib/*.so*") + glob.glob(f"{folder}/torch/*.so")
    target = glob.glob(f"{folder}/nvidia/cu*/lib")[0]  # of the CUDA runtime, on the loader's path of torch
    present = {os.path.basename(path) for path in libs} | set(os.listdir(target))
    needed = {line.split("[")[1].rstrip("]") for line in output("readelf", "-d", *libs) if "(NEEDED)" in line}
    missing = sorted(
        name for name in needed - present if name.startswith(("libcu", "libnccl", "libnv")) and name != "libcuda.so.1"
    )
    undefined = symbols("--undefined-only", libs)
    defined = symbols("--defined-only", libs + glob.glob(f"{target}/libcudart.so.*"))
    prefixes = ("cu", "nccl", "nvrtc", "nvshmem")  # all that these libraries export begins so
    names = sorted(n for n in undefined - defined if n.startswith(prefixes))
    source = ["#include <stdio.h>", "#include <stdlib.h>"]
    source += [f'void {n}(void) {{ fputs("{n}: no CUDA here\\n", stderr); abort(); }}' for n in names]
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", f"{target}/libstub.so"], check=True, text=True,
        input="\n".join(source)
    )
    for name in missing:
        os.symlink("libstub.so", f"{target}/{name}")
    print(f"{len(names)} functions for {', '.join(missing)}")


def output(*command: str) -> list[str]:
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout.splitlines()


def symbols(which: str, libs: list[str]) -> set[str]:
    return {
        line.split()[-1].split("@")[0]
        for line in output("nm", "-D", which, *libs) if " " in line.strip() and not line.endswith(":")
    }


if __name__ == "__main__":
    main()
