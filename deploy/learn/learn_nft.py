#!/usr/bin/env python3
"""Flow-GRPO beside DiffusionNFT on samples without a stochastic step: equal seeds, prompts, samples and updates. Once a
seed and a method, on a pipeline of its own:

    learn_nft.py [--seeds 6 7 8] [--kinds flow-grpo nft-ode] [--updates 24] [--out FOLDER] [--meander bin/meander]

Test prompts are looked at once, at the end. A run that has its result is not made again. MARGIN is the difference of
the means over the seeds that counts as one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import meander
from learn import Found, compare, pipeline, records, train

MARGIN = 0.03
METHODS = {"flow-grpo": [], "nft-ode": ["--loss", "diffusion_nft", "--sde-type", "ode"]}
COMMON = [
    "--eval-every", "8", "--test-steps", "0", "--variety", "0", "--hold-diversity", "0", "--sheet", "0", "--no-stop",
    "--no-tensorboard", "--patience", "1800",
]  # fmt: skip


def main() -> None:
    compare(__doc__, "learn-nft", 6, METHODS, learn, report)


def learn(program: str, out: Path, seed: int, method: str, updates: int) -> dict:
    with pipeline(program, out) as url:
        flags = [*COMMON, "--updates", str(updates), *METHODS[method]]
        train(url, seed, out, "signs", [*flags, "--gold", "", "--test", ""])
        train(url, seed, out, "signs", flags)  # no update is left: it tests, with tesseract, too
        return {"stored": asyncio.run(bytes_of(url, out.name))}


async def bytes_of(url: str, run: str) -> float:
    """The bytes of step events that a sample of the first batch stores."""
    async with meander.connect(url) as client:
        batch = await anext(aiter(client.batches(run, follow=False)))
        steps = [step["seq"] for s in batch.samples for step in s.facts["steps"]]
        stored = [await client.js.get_msg("MDR_STEPS", seq=seq) for seq in steps]
    return sum(len(m.data or b"") for m in stored) / batch.size


def report(found: Found, axes: Any) -> None:
    """The table and the curves of deploy/bench/learn-nft.md."""
    print("\n| method | seed | glyph before | after | gained | tesseract before | after | bytes a sample | minutes |")
    print("| --- " * 9 + "|")
    after: dict[str, dict[str, float]] = {m: {} for m in METHODS}
    for method, seed, folder, result in found:
        base, last = (next(r["rates"] for r in records(folder, "test") if r["of"] == of) for of in ("base", "last"))
        before, gained = base["glyph"], last["glyph"]
        print(f"| {method} | {seed} | {before:.3f} | {gained:.3f} | {gained - before:+.3f} | {base['ocr']:.3f} "
              f"| {last['ocr']:.3f} | {result['stored']:.0f} | {result['seconds'] / 60:.0f} |")  # fmt: skip
        label, colour = method if not after[method] else None, f"C{list(METHODS).index(method)}"
        after[method][seed] = gained
        evaluated = [(r["update"], r["exact"]) for r in records(folder, "evaluation")]
        axes[0].plot(*zip(*evaluated), "o-", color=colour, label=label)
        full = [r["full"] for r in records(folder, "update")]
        axes[1].plot(range(1, len(full) + 1), full, color=colour, alpha=0.8)
    for ax, title in zip(axes, ("right signs of validation prompts", "right signs of a training batch"), strict=True):
        ax.set(title=title, xlabel="update", ylim=(0.5, 1))
        ax.grid(alpha=0.3)
    seeds = sorted(set.intersection(*(set(of) for of in after.values())), key=int)
    if seeds:
        means = {m: sum(of[s] for s in seeds) / len(seeds) for m, of in after.items()}
        more = means["nft-ode"] - means["flow-grpo"]
        verdict = "no difference" if abs(more) < MARGIN else "better" if more > 0 else "worse"
        print(f"\nseeds {', '.join(seeds)}: means {means}; nft-ode {more:+.3f}, the margin is {MARGIN}: {verdict}")


if __name__ == "__main__":
    main()
