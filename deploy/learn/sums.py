#!/usr/bin/env python3
"""Runs an example of the Python client that trains sums on a pipeline of its own, once a seed, and draws what it
learned.

    sums.py [--example grpo_sums.py] [--seeds 0 1 2] [--out FOLDER] [--meander bin/meander] [--engine vllm=URL]
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

SMOOTH = 5  # updates: a batch has other problems each time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", choices=["grpo_sums.py", "trl_sums.py", "verl_sums.py"], default="grpo_sums.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("meander-out/learn-sums"))
    parser.add_argument("--meander", default="bin/meander")
    parser.add_argument("--engine", default="", help="vllm=URL or sglang=URL: a server that draws the tokens, started with --enable-lora")
    parser.add_argument("flags", nargs="*", help="of the example, behind --")
    args = parser.parse_args()
    for seed in args.seeds:
        out = args.out / f"seed-{seed}"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        with pipeline(args.meander, out, "sums", args.engine) as url:
            example = ROOT / "pkg/client/python/examples" / args.example
            command = [sys.executable, str(example), "--url", url, "--seed", str(seed), "--out", str(out),
                       "--model", str(ROOT / "deploy/models/sums"), *args.flags]  # fmt: skip
            env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
            if code := subprocess.run(command, env=env).returncode:
                sys.exit(code)
    report(args.out, args.seeds)


def report(out: Path, seeds: list[int]) -> None:
    """The curve, and the table of deploy/bench/learn-sums.md."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    print("\n| seed | held out before | after | gained | updates | ratio, furthest turn | furthest token | seconds |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    for seed in seeds:
        folder = out / f"seed-{seed}"
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        s = json.loads((folder / "summary.json").read_text())
        # TRL has no ratio of the first pass to show.
        worst = [f"{max(r[k] for r in log):.1e}" if k in log[0] else "" for k in ("ratio_off", "furthest_token")]
        print(f"| {seed} | {s['before']:.3f} | {s['after']:.3f} | {s['after'] - s['before']:+.3f} | {s['updates']} | {worst[0]} | {worst[1]} | {s['seconds']:.0f} |")
        for ax, key in zip(axes, ("reward", "entropy"), strict=True):
            values = [r[key] for r in log]
            mean = [sum(values[max(0, i + 1 - SMOOTH) : i + 1]) / min(i + 1, SMOOTH) for i in range(len(values))]
            (line,) = ax.plot(values, alpha=0.25)
            ax.plot(mean, color=line.get_color(), label=f"seed {seed}")
    for ax, title in zip(axes, (f"right answers of a batch, mean of {SMOOTH}", "entropy of a token, nats"), strict=True):
        ax.set(title=title, xlabel="update")
        ax.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(out / "curve.png", dpi=110)
    print(f"\ncurve {out / 'curve.png'}")


if __name__ == "__main__":
    main()
