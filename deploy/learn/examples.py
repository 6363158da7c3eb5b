#!/usr/bin/env python3
"""Runs an example of the Python client that trains a model on a pipeline of its own, once a seed, and draws what it
learned.

    examples.py [--example grpo_sums.py] [--seeds 0 1 2] [--out FOLDER] [--meander bin/meander] [--engine vllm=URL]
            [-- flags of the example]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from learn import ROOT, pipeline  # noqa: E402

SMOOTH = 5  # updates: a batch has other prompts each time
MODELS = {"grpo_sums.py": "sums", "trl_sums.py": "sums", "verl_sums.py": "sums", "accelerate_signs.py": "signs"}
TITLES = {"reward": f"reward of a batch, mean of {SMOOTH} updates", "entropy": "entropy of a token, nats", "norm": "norm of the gradient"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", choices=list(MODELS), default="grpo_sums.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("meander-out/learn-sums"))
    parser.add_argument("--meander", default="bin/meander")
    parser.add_argument("--engine", default="", help="vllm=URL or sglang=URL: a server that draws the tokens, started with --enable-lora")
    parser.add_argument("flags", nargs="*", help="of the example, behind --")
    args = parser.parse_args()
    model = MODELS[args.example]
    python = [sys.executable]
    flags = ["--model", str(ROOT / "deploy/models" / model), *args.flags]
    if model == "signs":
        python += ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
        flags = ["--held-out", str(ROOT / "deploy/learn/held_out.jsonl"), *flags]
    for seed in args.seeds:
        out = args.out / f"seed-{seed}"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        with pipeline(args.meander, out, model, args.engine) as url:
            example = str(ROOT / "pkg/client/python/examples" / args.example)
            command = [*python, example, "--url", url, "--seed", str(seed), "--out", str(out), *flags]
            env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
            if code := subprocess.run(command, env=env).returncode:
                sys.exit(code)
    report(args.out, args.seeds)


def report(out: Path, seeds: list[int]) -> None:
    """The curve, and the table of the examples' pages in deploy/bench."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    print("\n| seed | held out before | after | gained | updates | ratio, furthest turn | furthest token | seconds |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    for seed in seeds:
        folder = out / f"seed-{seed}"
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        s = json.loads((folder / "summary.json").read_text())
        # TRL and verl have no ratio of the first pass to show.
        worst = [f"{max(r[k] for r in log):.1e}" if k in log[0] else "" for k in ("ratio_off", "furthest_token")]
        print(f"| {seed} | {s['before']:.3f} | {s['after']:.3f} | {s['after'] - s['before']:+.3f} | {s['updates']} | {worst[0]} | {worst[1]} | {s['seconds']:.0f} |")
        for ax, key in zip(axes, ("reward", "entropy" if "entropy" in log[0] else "norm"), strict=True):
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
