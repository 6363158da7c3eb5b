#!/usr/bin/env python3
"""A teacher of finer steps teaches signs to draw in four: on-policy distillation (--loss diffusion_opd), once a seed,
on a pipeline and with a teacher of its own.

    learn_distill.py [--seeds 6 7 8] [--updates 16] [--out FOLDER] [--meander bin/meander]

The teacher is the checkpoint itself, in five euler steps for each of the student's four: 20 in all. Test prompts are
looked at once, at the end. A run that has its result is not made again. MARGIN is what the mean over the seeds must
gain, by both readers, to count.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from learn import Found, beside, compare, folder, pipeline, records, train

MARGIN = 0.05
FLAGS = [
    "--loss", "diffusion_opd", "--teacher", "fine", "--teacher-substeps", "5", "--initial-noise", "per_sample",
    "--beta", "0", "--groups", "16", "--group-size", "4", "--minibatches", "8", "--lr", "4e-3", "--ema", "0",
    "--lr-schedule", "linear", "--eval-every", "8", "--test-steps", "20", "--variety", "0", "--hold-diversity", "0",
    "--sheet", "0", "--no-stop", "--kl-limit", "1", "--no-tensorboard", "--patience", "1800",
]  # fmt: skip


def main() -> None:
    compare(__doc__, "learn-distill-signs", 6, ["seed"], learn, report, updates=16)


def learn(program: str, out: Path, seed: int, _: str, updates: int) -> dict:
    with pipeline(program, out) as url:
        teacher = [program, "teacher", "--nats", url, "--model", folder("signs"), "--name", "fine"]
        with beside(teacher, os.environ, out / "teacher.log"):
            flags = [*FLAGS, "--updates", str(updates)]
            train(url, seed, out, "signs", [*flags, "--gold", "", "--test", ""])
            train(url, seed, out, "signs", flags)  # no update is left: it tests, with tesseract, too
    return {}


def report(found: Found, axes: Any) -> None:
    """The table and the curves of deploy/bench/learn-distill.md."""
    tests, divergences = ("base", "base, 20 steps", "last"), list[list[float]]()
    print("\n| seed | reader | student before | teacher, 20 steps | student after | gained | minutes |")
    print("| --- " * 7 + "|")
    gained: dict[str, list[float]] = {"glyph": [], "ocr": []}
    for _, seed, out, result in found:
        for reader, gains in gained.items():
            rates = [next(r["rates"][reader] for r in records(out, "test") if r["of"] == of) for of in tests]
            gains.append(rates[2] - rates[0])
            print(f"| {seed} | {reader} | " + " | ".join(f"{r:.3f}" for r in rates)
                  + f" | {gains[-1]:+.3f} | {result['seconds'] / 60:.0f} |")  # fmt: skip
        evaluated = [(r["update"], r["exact"]) for r in records(out, "evaluation")]
        axes[0].plot(*zip(*evaluated), "o-", label=f"seed {seed}")
        divergences.append([r["loss"] for r in records(out, "update")])
        axes[1].plot(range(1, len(divergences[-1]) + 1), divergences[-1], alpha=0.8)
    axes[0].set(title="right signs of validation prompts, four steps", xlabel="update", ylim=(0.5, 1))
    axes[1].set(title="KL(student || teacher), nats an element", xlabel="update")
    for ax in axes:
        ax.grid(alpha=0.3)
    means = {reader: sum(gains) / len(gains) for reader, gains in gained.items()}
    verdict = "learned" if min(means.values()) >= MARGIN else "not learned"
    print(f"\nmean gain of {len(found)} seeds: {means}; the margin is {MARGIN} by both readers: {verdict}")
    first, last = (sum(sum(d[s]) / len(d[s]) for d in divergences) / len(found) for s in (slice(3), slice(-3, None)))
    print(f"divergence {first:.5f} in the first three updates, {last:.5f} in the last three")


if __name__ == "__main__":
    main()
