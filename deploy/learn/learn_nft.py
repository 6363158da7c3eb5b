#!/usr/bin/env python3
"""Flow-GRPO beside DiffusionNFT on samples without a stochastic step: equal seeds, prompts, samples and updates. Once a
seed and a method, on a pipeline of its own:

    learn_nft.py [--seeds 6 7 8] [--methods flow-grpo nft-ode] [--updates 24] [--out FOLDER] [--meander bin/meander]

Test prompts are looked at once, at the end. A run that has its summary is not made again. MARGIN is the difference of
the means over the seeds that counts as one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from pathlib import Path

import meander
from learn import note, pipeline, train

MARGIN = 0.03
METHODS = {"flow-grpo": [], "nft-ode": ["--loss", "diffusion_nft", "--sde-type", "ode"]}
COMMON = [
    "--eval-every", "8", "--test-steps", "0", "--variety", "0", "--hold-diversity", "0", "--sheet", "0", "--no-stop",
    "--no-tensorboard", "--patience", "1800",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[6])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("meander-out/learn-nft"))
    parser.add_argument("--meander", default="bin/meander")
    args = parser.parse_args()
    # A run that is stopped takes its pipeline and its trainer with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; start it again for the runs that are left"))
    for seed in args.seeds:
        for method in args.methods:
            out = args.out / f"{method}-{seed}"
            if (out / "stored.json").exists():
                continue
            out.mkdir(parents=True, exist_ok=True)
            began = time.monotonic()
            with pipeline(args.meander, out) as url:
                flags = [*COMMON, "--updates", str(args.updates), *METHODS[method]]
                train(url, seed, out, "signs", [*flags, "--gold", "", "--test", ""])
                train(url, seed, out, "signs", flags)  # no update is left: it tests, with tesseract, too
                stored = asyncio.run(bytes_of(url, out.name))
            (out / "stored.json").write_text(json.dumps(stored) + "\n")
            note(out, time.monotonic() - began)
    report(args.out)


async def bytes_of(url: str, run: str) -> float:
    """The bytes of step events that a sample of the first batch stores."""
    async with meander.connect(url) as client:
        batch = await anext(aiter(client.batches(run, follow=False)))
        steps = [step["seq"] for s in batch.samples for step in s.facts["steps"]]
        stored = [await client.js.get_msg("MDR_STEPS", seq=seq) for seq in steps]
    return sum(len(m.data or b"") for m in stored) / batch.size


def report(out: Path) -> None:
    """The table and the curves of deploy/bench/learn-nft.md, of all runs that are there."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    print("\n| method | seed | glyph before | after | gained | tesseract before | after | bytes a sample | minutes |")
    print("| --- " * 9 + "|")
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    after: dict[str, dict[int, float]] = {m: {} for m in METHODS}
    for folder in sorted(f.parent for f in out.glob("*/stored.json")):
        method, seed = folder.name.rsplit("-", 1)
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        base, last = (next(r for r in log if r["kind"] == "test" and r["of"] == of) for of in ("base", "last"))
        rates = [(base["rates"][name], last["rates"][name]) for name in ("glyph", "ocr")]
        stored = json.loads((folder / "stored.json").read_text())
        minutes = sum(json.loads((folder / "wall.json").read_text())) / 60
        (before, gained), (other, others) = rates
        print(f"| {method} | {seed} | {before:.3f} | {gained:.3f} | {gained - before:+.3f} | {other:.3f} | {others:.3f} "
              f"| {stored:.0f} | {minutes:.0f} |")  # fmt: skip
        label, colour = method if not after[method] else None, f"C{list(METHODS).index(method)}"
        after[method][int(seed)] = gained
        evaluated = [(r["update"], r["exact"]) for r in log if r["kind"] == "evaluation"]
        axes[0].plot(*zip(*evaluated), "o-", color=colour, label=label)
        full = [r["full"] for r in log if r["kind"] == "update"]
        axes[1].plot(range(1, len(full) + 1), full, color=colour, alpha=0.8)
    for ax, title in zip(axes, ("right signs of validation prompts", "right signs of a training batch"), strict=True):
        ax.set(title=title, xlabel="update", ylim=(0.5, 1))
        ax.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(out / "curve.png", dpi=110)
    seeds = sorted(set.intersection(*(set(of) for of in after.values())))
    if seeds:
        means = {m: sum(of[s] for s in seeds) / len(seeds) for m, of in after.items()}
        more = means["nft-ode"] - means["flow-grpo"]
        verdict = "no difference" if abs(more) < MARGIN else "better" if more > 0 else "worse"
        print(f"\nseeds {seeds}: means {means}; nft-ode {more:+.3f}, the margin is {MARGIN}: {verdict}")
    print(f"curve {out / 'curve.png'}")


if __name__ == "__main__":
    main()
