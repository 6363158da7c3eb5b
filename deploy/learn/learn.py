#!/usr/bin/env python3
"""Starts a pipeline, trains on its stream, and stops it: one run a seed, each in a store of its own.

    learn.py [--seeds 2 3 4] [--out FOLDER] [--name NAME] [--meander bin/meander] [--engine torch]
             [--model FOLDER] [-- flags of meander-train]

A run that was interrupted goes on when it is started again. Ends with the curve and the contact sheets before and
after.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main() -> None:
    own, theirs = flags()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2])
    parser.add_argument("--out", type=Path, default=Path("meander-out/learn"))
    parser.add_argument("--name", default="seed", help="of the runs' folders, NAME-SEED")
    parser.add_argument("--meander", default="bin/meander")
    parser.add_argument("--engine", default="", help="torch: a worker with this Python computes the sampler's network")
    parser.add_argument("--model", default="signs", help="one of deploy/models, or a folder of diffusers")
    args = parser.parse_args(own)
    # A run that is stopped takes its pipeline and its trainer with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; start it again to go on"))
    for seed in args.seeds:
        out = args.out / f"{args.name}-{seed}"
        out.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with pipeline(args.meander, out, args.model, args.engine) as url:
            train(url, seed, out, args.model, theirs)
        note(out, time.monotonic() - began)
        print(
            f"\nseed {seed}: {time.monotonic() - began:.0f} s in all\n  curve   {out / 'curve.png'}\n  before  {out / 'before.png'}\n  after   {out / 'after.png'}\n  adapter {out / 'best'}"
        )


def flags() -> tuple[list[str], list[str]]:
    """The arguments of the script, and those behind --, which are meander-train's."""
    own = sys.argv[1:]
    at = own.index("--") if "--" in own else len(own)
    return own[:at], own[at + 1 :]


@contextlib.contextmanager
def pipeline(meander: str, out: Path, model: str = "signs", engine: str = "") -> Iterator[str]:
    """meander up with a store in the folder and one of our models; it ends with the run."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # One thread for the sampler: the trainer has its turn when the sampler waits, and glyphs are read on the other
    # core.
    command = [
        meander, "up", "--listen", f"127.0.0.1:{port}", "--store", str(out / "store"), "--model",
        folder(model)
    ]
    if engine.startswith(("vllm=", "sglang=")):  # which get each adapter in a folder
        adapters = (out / "adapters").resolve()
        adapters.mkdir()
        command += ["--engine", engine, "--engine-adapters", str(adapters)]
    else:
        command += ["--batch", "16", "--workers", "1", "--threads", str(os.cpu_count() or 1)]
        command += ["--engine", engine] if engine else []
    # A worker has the packages that the trainer has. Its threads that wait take no processor from the trainer.
    env = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"MEANDER_PYTHON": sys.executable}
    with open(out / "up.log", "a") as log:
        up = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    try:
        while True:
            if up.poll() is not None:
                sys.exit(f"meander up ended; see {out / 'up.log'}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield f"nats://127.0.0.1:{port}"
    finally:
        up.terminate()  # Ctrl-C is ignored by what a script starts in the background
        up.wait()


def folder(model: str) -> str:
    """One of deploy/models by its name, or a folder."""
    return str(ROOT / "deploy/models" / model if "/" not in model else Path(model).resolve())


def train(url: str, seed: int, out: Path, model: str, flags: list[str]) -> None:
    command = [
        sys.executable, "-m", "meander.train", "--nats", url, "--seed", str(seed), "--out", str(out), "--run", out.name,
        "--model", folder(model),
        "--prompts", str(HERE / "prompts.txt"), "--held-out", str(HERE / "validation.jsonl"),
        "--test", str(HERE / "held_out.jsonl"), *flags,
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if code := subprocess.run(command, env=env).returncode:
        sys.exit(code)


def note(out: Path, seconds: float) -> None:
    """Adds what a start of this took: of a run that was interrupted there are several."""
    path = out / "wall.json"
    before = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*before, round(seconds, 1)]) + "\n")


if __name__ == "__main__":
    main()
