#!/usr/bin/env python3
"""A teacher of finer steps teaches signs to draw in four: on-policy distillation (--loss diffusion_opd), once a seed, on
a pipeline and with a teacher of its own.

    learn_distill.py [--seeds 6 7 8] [--updates 24] [--substeps 5] [--out FOLDER] [--meander bin/meander] [-- flags of
                     meander-train]

The teacher is the checkpoint itself, in SUBSTEPS euler steps for each of the student's four. Test prompts are looked at
once, at the end. A run that has its summary is not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from learn import flags, folder, note, pipeline, train

MARGIN = 0.05
COMMON = [
    "--loss", "diffusion_opd", "--teacher", "fine", "--initial-noise", "per_sample", "--beta", "0",
    "--groups", "32", "--group-size", "4", "--eval-every", "6", "--variety", "0", "--hold-diversity", "0", "--sheet", "0",
    "--no-stop", "--kl-limit", "1", "--no-tensorboard", "--patience", "1800",
]  # fmt: skip


def main() -> None:
    own, theirs = flags()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[6])
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--substeps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("meander-out/learn-distill-signs"))
    parser.add_argument("--meander", default="bin/meander")
    args = parser.parse_args(own)
    # A run that is stopped takes its pipeline, its teacher and its trainer with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; start it again for the runs that are left"))
    for seed in args.seeds:
        out = args.out / f"seed-{seed}"
        if (out / "done").exists():
            continue
        out.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with pipeline(args.meander, out) as url, teacher(args.meander, url, out):
            own = [*COMMON, "--updates", str(args.updates), "--teacher-substeps", str(args.substeps), *theirs]
            train(url, seed, out, "signs", [*own, "--gold", "", "--test", ""])
            train(url, seed, out, "signs", own)  # no update is left: it tests, with tesseract, too
        note(out, time.monotonic() - began)
        (out / "done").touch()
    report(args.out, args.updates)


@contextlib.contextmanager
def teacher(meander: str, url: str, out: Path) -> Iterator[None]:
    """A teacher of signs; it ends with the run."""
    command = [meander, "teacher", "--nats", url, "--model", folder("signs"), "--name", "fine"]
    with open(out / "teacher.log", "a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def report(out: Path, updates: int) -> None:
    """The table and the curves of deploy/bench/learn-distill.md, of all runs that are there."""
    print(out, updates)


if __name__ == "__main__":
    main()
