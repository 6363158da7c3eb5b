#!/usr/bin/env python3
"""Runs an example of the Python client that trains a model on a pipeline of its own, once a seed, and draws what it
learned.

    examples.py [--example grpo_sums.py] [--seeds 0 1 2] [--out FOLDER] [--meander bin/meander] [--engine vllm=URL]
            [--teacher ADAPTER] [--model FOLDER] [-- flags of the example]
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from learn import ROOT, TRAINERS, arguments, beside, pipeline  # noqa: E402
from learn import folder as model_folder  # noqa: E402

TEACHER_SEED = 0
SMOOTH = 5  # updates: a batch has other prompts each time
MODELS = {
    "grpo_sums.py": "sums", "distill_sums.py": "sums", "trl_sums.py": "sums", "verl_sums.py": "sums",
    "accelerate_signs.py": "signs"
}
TITLES = {
    "reward": f"reward of a batch, mean of {SMOOTH} updates", "entropy": "entropy of a token, nats",
    "norm": "norm of the gradient", "kl": "KL(student || teacher), nats a token",
}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, "learn-sums", 0)
    parser.add_argument("--example", choices=list(MODELS), default="grpo_sums.py")
    parser.add_argument(
        "--engine", default="",
        help="vllm=URL or sglang=URL: a server that draws the tokens, which takes adapters, or whole weights (--whole)"
    )
    parser.add_argument(
        "--teacher", type=Path,
        help="of distill_sums.py: the teacher's adapter of the model; default one that grpo_sums.py trains first"
    )
    parser.add_argument("--model", help="a folder, in place of the example's own model; named as that is")
    parser.add_argument("flags", nargs="*", help="of the example, behind --")
    args = parser.parse_args()
    model = args.model or MODELS[args.example]
    python = [sys.executable]
    flags = ["--model", model_folder(model), *args.flags]
    if MODELS[args.example] == "signs":
        python += ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
        flags = ["--held-out", str(ROOT / "deploy/learn/held_out.jsonl"), *flags]

    def train(name: str, seed: int, out: Path, flags: list[str], adapter: Path | None = None) -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        with pipeline(args.meander, out, model, args.engine) as url, teacher(args.meander, out, url, model, adapter):
            example = str(ROOT / "pkg/client/python/examples" / name)
            command = [*python, example, "--url", url, "--seed", str(seed), "--out", str(out), *flags]
            if code := subprocess.run(command, env=TRAINERS | {"TRL_EXPERIMENTAL_SILENCE": "1"}).returncode:
                sys.exit(code)

    distils = args.example == "distill_sums.py"
    if args.teacher and not distils:
        parser.error(f"--teacher: {args.teacher}; only distill_sums.py takes one")
    taught = args.teacher and args.teacher.resolve()
    for made in [args.out / "teacher", *(args.out / f"seed-{seed}" for seed in args.seeds)]:
        if taught and taught.is_relative_to(made.resolve()):
            parser.error(
                f"--teacher: {args.teacher} lies in {made}, which this run makes anew; copy it, or give another --out"
            )
    adapter = args.teacher
    if distils and adapter is None:
        train("grpo_sums.py", TEACHER_SEED, args.out / "teacher", flags[:2])
        adapter = args.out / "teacher/adapter"
    for seed in args.seeds:
        train(args.example, seed, args.out / f"seed-{seed}", flags, adapter)
    report(args.out, args.seeds)


@contextlib.contextmanager
def teacher(meander: str, out: Path, url: str, model: str, adapter: Path | None) -> Iterator[None]:
    """meander teacher with an adapter of the model, named teacher; it ends with the run. Without an adapter: none."""
    if adapter is None:
        yield
        return
    command = [
        meander, "teacher", "--nats", url, "--model", model_folder(model), "--adapter", str(adapter),
        "--name", "teacher"
    ]
    with beside(command, os.environ, out / "teacher.log") as process:
        while "answers on" not in (out / "teacher.log").read_text():
            if process.poll() is not None:
                sys.exit(f"meander teacher ended; see {out / 'teacher.log'}")
            time.sleep(0.1)
        yield


def report(out: Path, seeds: list[int]) -> None:
    """The curve, and the table of the examples' pages in deploy/bench."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    print("\n| seed | held out before | after | gained | updates | ratio, furthest turn | furthest token | seconds |")
    print("| --- " * 8 + "|")
    for seed in seeds:
        folder = out / f"seed-{seed}"
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        s = json.loads((folder / "summary.json").read_text())
        # TRL and verl have no ratio of the first pass to show.
        worst = [f"{max(r[k] for r in log):.1e}" if k in log[0] else "" for k in ("ratio_off", "furthest_token")]
        print(
            f"| {seed} | {s['before']:.3f} | {s['after']:.3f} | {s['after'] - s['before']:+.3f} | {s['updates']} | "
            f"{worst[0]} | {worst[1]} | {s['seconds']:.0f} |"
        )
        other = next(k for k in ("kl", "entropy", "norm") if all(k in r for r in log))
        for ax, key in zip(axes, ("reward", other), strict=True):
            values = [r[key] for r in log]
            mean = [sum(values[max(0, i + 1 - SMOOTH) : i + 1]) / min(i + 1, SMOOTH) for i in range(len(values))]
            (line,) = ax.plot(values, alpha=0.25)
            ax.plot(mean, color=line.get_color(), label=f"seed {seed}")
            ax.set(title=TITLES[key], xlabel="update")
            ax.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(out / "curve.png", dpi=110)
    print(f"\ncurve {out / 'curve.png'}")


if __name__ == "__main__":
    main()
