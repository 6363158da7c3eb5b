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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TRAINERS = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""The environment of what trains."""


def main() -> None:
    own, theirs = flags()
    parser = arguments(__doc__, "learn", 2)
    parser.add_argument("--name", default="seed", help="of the runs' folders, NAME-SEED")
    parser.add_argument("--engine", default="", help="torch: a worker with this Python computes the sampler's network")
    parser.add_argument("--model", default="signs", help="one of deploy/models, or a folder of diffusers")
    args = parser.parse_args(own)
    for seed in args.seeds:
        out = args.out / f"{args.name}-{seed}"
        out.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with pipeline(args.meander, out, args.model, args.engine) as url:
            train(url, seed, out, args.model, theirs)
        note(out, time.monotonic() - began)
        print(f"\nseed {seed}: {time.monotonic() - began:.0f} s in all")
        for what, at in (("curve", "curve.png"), ("before", "before.png"), ("after", "after.png"), ("adapter", "best")):
            print(f"  {what:<7} {out / at}")


def arguments(about: str | None, name: str, seed: int) -> argparse.ArgumentParser:
    """The flags of all that learns here. A run that is stopped takes its pipeline and its trainers with it."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[seed])
    parser.add_argument("--out", type=Path, default=Path("meander-out") / name)
    parser.add_argument("--meander", default="bin/meander")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; start it again to go on"))
    return parser


Found = list[tuple[str, str, Path, dict[str, Any]]]
"""Of each run its kind, its seed, its folder and its result."""


def compare(
    about: str | None, name: str, seed: int, kinds: Iterable[str], run: Callable[[str, Path, int, str, int], dict],
    report: Callable[[Found, Any], None], updates: int = 24,
) -> None:
    """Runs of several kinds by equal seeds: run(program, out, seed, kind, updates) gives a result, of which the report
    prints a table and draws two curves. A run that has its result is not made again."""
    parser = arguments(about, name, seed)
    parser.add_argument("--kinds", nargs="+", choices=list(kinds), default=list(kinds))
    parser.add_argument("--updates", type=int, default=updates)
    args = parser.parse_args()
    for seed in args.seeds:
        for kind in args.kinds:
            out = args.out / f"{kind}-{seed}"
            if not (out / "result.json").exists():
                out.mkdir(parents=True, exist_ok=True)
                began = time.monotonic()
                result = run(args.meander, out, seed, kind, args.updates)
                result["seconds"] = sum(note(out, time.monotonic() - began))
                (out / "result.json").write_text(json.dumps(result) + "\n")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    folders = sorted(f.parent for f in args.out.glob("*/result.json"))
    report([(*f.name.rsplit("-", 1), f, json.loads((f / "result.json").read_text())) for f in folders], axes)
    axes[0].legend()
    figure.savefig(args.out / "curve.png", dpi=110)
    print(f"curve {args.out / 'curve.png'}")


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The records of a kind that a trainer wrote."""
    return [r for r in map(json.loads, (folder / "log.jsonl").read_text().splitlines()) if r["kind"] == kind]


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
    with beside(command, env, out / "up.log") as up:
        while True:
            if up.poll() is not None:
                sys.exit(f"meander up ended; see {out / 'up.log'}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield f"nats://127.0.0.1:{port}"


@contextlib.contextmanager
def beside(command: list[str], env: Mapping[str, str], log: Path | None = None) -> Iterator[subprocess.Popen]:
    """A process that ends with the block, and may write to a file."""
    with open(log, "a") if log else contextlib.nullcontext() as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=env)
    try:
        yield process
    finally:
        process.terminate()  # Ctrl-C is ignored by what a script starts in the background
        process.wait()


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
    if code := subprocess.run(command, env=TRAINERS).returncode:
        sys.exit(code)


def note(out: Path, seconds: float) -> list[float]:
    """Adds what a start of this took: of a run that was interrupted there are several."""
    path = out / "wall.json"
    all_of: list[float] = [*(json.loads(path.read_text()) if path.exists() else []), round(seconds, 1)]
    path.write_text(json.dumps(all_of) + "\n")
    return all_of


if __name__ == "__main__":
    main()
