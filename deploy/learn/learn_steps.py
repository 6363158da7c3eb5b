#!/usr/bin/env python3
"""Flow-GRPO with and without rewards at a step: of each group of 16, the 8 samples go on after two of four steps whose
predictions have the rewards of the largest variance. Equal seeds, prompts and updates. Once a seed and a method, on a
pipeline of its own:

    learn_steps.py [--seeds 6 7 8] [--kinds all kept fewer] [--updates 16] [--out FOLDER] [--meander bin/meander]

fewer has groups of 12, which take as many evaluations as kept. Test prompts are looked at once, at the end. A run that
has its result is not made again. FEWER is the share of the sampler's evaluations that kept must save, at a mean test
reward over the seeds that is at most MARGIN below that of all.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import meander
from learn import HERE, Found, compare, pipeline, records, train
from meander.data.events import decode

FEWER, MARGIN = 0.20, 0.03
STEP, KEEP, GROUPS, STEPS = 2, 8, 8, 4
SIZES = {"all": 16, "kept": 16, "fewer": 12}
COMMON = [
    "--groups", str(GROUPS), "--steps", str(STEPS), "--eval-every", "100", "--test-steps", "0", "--variety", "0",
    "--hold-diversity", "0", "--sheet", "0", "--no-stop", "--no-tensorboard", "--patience", "1800", "--gold", "",
]  # fmt: skip


def main() -> None:
    compare(__doc__, "learn-steps", 6, SIZES, learn, report, updates=16)


def learn(program: str, out: Path, seed: int, method: str, updates: int) -> dict:
    rule: dict[str, Any] = {
        "reward": [{"name": "glyph", "at_steps": [STEP]}],
        "prune": {"step_index": STEP, "keep": KEEP, "keep_by": "spread"},
    }  # fmt: skip
    prompts = [{"prompt": p} | (rule if method == "kept" else {}) for p in lines("prompts.txt")]
    held = {
        flag: [{"prompt": json.loads(line)["prompt"], "reward": [{"name": "glyph"}]} for line in lines(name)[:n]]
        for flag, name, n in (("--test", "held_out.jsonl", 120), ("--held-out", "validation.jsonl", 8))
    }
    files = {"--prompts": prompts, **held}
    for flag, content in files.items():
        (out / f"{flag[2:]}.jsonl").write_text("".join(json.dumps(c) + "\n" for c in content))
    given = [x for flag in files for x in (flag, str(out / f"{flag[2:]}.jsonl"))]
    with pipeline(program, out) as url:
        size = SIZES[method]
        flags = [*COMMON, *given, "--updates", str(updates), "--group-size", str(size)]
        train(url, seed, out, "signs", [*flags, "--test", ""])
        train(url, seed, out, "signs", flags)  # no update is left: it tests
        saved = asyncio.run(saved_evaluations(url, out.name))
    return {"evaluations": updates * GROUPS * size * STEPS - saved, "saved": saved}


def lines(name: str) -> list[str]:
    return (HERE / name).read_text().splitlines()


async def saved_evaluations(url: str, run: str) -> int:
    """The evaluations that samples did not take because rewards at the step ended them."""
    async with meander.connect(url) as client:
        info = await client.js.stream_info("MDR_VERDICTS", subjects_filter=f"mdr.v1.selection.{run}.>")
        stored = [await client.js.get_last_msg("MDR_VERDICTS", s) for s in info.state.subjects or {}]
    return sum(decode(m.data or b"")["saved_evaluations"] for m in stored)


def report(found: Found, axes: Any) -> None:
    """The table and the curves of deploy/bench/learn-steps.md."""
    print("\n| method | seed | test reward before | after | gained | evaluations | saved |")
    print("| --- " * 7 + "|")
    after: dict[str, dict[str, float]] = {m: {} for m in SIZES}
    used: dict[str, int] = {}
    for method, seed, folder, result in found:
        base, last = (next(r["rates"] for r in records(folder, "test") if r["of"] == of) for of in ("base", "last"))
        used[method] = result["evaluations"]
        print(f"| {method} | {seed} | {base['glyph']:.3f} | {last['glyph']:.3f} | {last['glyph'] - base['glyph']:+.3f} "
              f"| {result['evaluations']} | {result['saved']} |")  # fmt: skip
        label, colour = method if not after[method] else None, f"C{list(SIZES).index(method)}"
        after[method][seed] = last["glyph"]
        full = [r["full"] for r in records(folder, "update")]
        axes[0].plot(range(1, len(full) + 1), full, color=colour, label=label, alpha=0.8)
        step = result["evaluations"] / len(full)
        axes[1].plot([step * (i + 1) for i in range(len(full))], full, color=colour, alpha=0.8)
    for ax, x in zip(axes, ("update", "evaluations of the sampler"), strict=True):
        ax.set(title="right signs of a training batch", xlabel=x)
        ax.grid(alpha=0.3)
    seeds = sorted(set.intersection(*(set(after[m]) for m in ("all", "kept"))), key=int)
    if seeds:
        means = {m: sum(of[s] for s in seeds) / len(seeds) for m, of in after.items() if set(seeds) <= set(of)}
        less, fewer = means["all"] - means["kept"], 1 - used["kept"] / used["all"]
        verdict = "yes" if fewer >= FEWER and less <= MARGIN else "no"
        print(f"\nseeds {', '.join(seeds)}: means {means}; kept {-less:+.3f} with {fewer:.0%} fewer evaluations: {verdict}")


if __name__ == "__main__":
    main()
