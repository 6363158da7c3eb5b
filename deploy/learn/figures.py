#!/usr/bin/env python3
"""Writes deploy/bench/learn from runs of learn.py: logs, the curve of all, sheets before and after, and the page with the numbers.

    figures.py FOLDER...     folders NAME-SEED of learn.py; make learn-figures takes all of meander-out/learn

Runs that the page has already, and that are not among the folders, stay on it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from meander.train import records

BENCH = Path(__file__).resolve().parents[1] / "bench" / "learn"

HEAD = """# The loop closed: what the trainer learns on a processor

`make learn` starts `meander up` with the model [signs](../../models/signs), trains a LoRA by Flow-GRPO from the stream alone, and
evaluates on the 120 held-out prompts, 2 samples each, at 4 ode steps without noise. The reward is `glyph`; `diversity`, how far a sample is
from the others of its group, is rewarded, too, while an evaluation finds less than 90 % of the start's (`--hold-diversity`). Tesseract
(`ocr`) is never rewarded and chooses the adapter that is kept. Diversity is the mean over 12 groups of 8, sampled as in training. One
standard error of a rate is about 0.03.

The kept adapter is the best by tesseract among those of at least 80 % of the start's diversity, chosen on these same prompts. `make
learn-hacked` does not hold diversity: all samples come to look alike, then the reader that is rewarded is gamed, which the alarms say.

    make learn SEEDS="{seeds}" && make learn-hacked && make learn-figures

![held-out rates, diversity, reward and divergence by update](curve.png)

| run | updates | kept at | glyph before | after | tesseract before | after | diversity kept | largest first ratio off 1, on-policy | minutes of all stages |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def main() -> None:
    folders = {p.name: p for p in [*BENCH.glob("*-*"), *map(Path, sys.argv[1:])] if p.is_dir()}
    runs = {name: _lines(folders[name]) for name in sorted(folders)}
    runs = {name: lines for name, lines in runs.items() if any(r["kind"] == "evaluation" for r in lines)}
    if not runs:
        sys.exit("figures.py: no run with an evaluation; 'make learn' makes one")
    BENCH.mkdir(parents=True, exist_ok=True)
    records.curve(BENCH / "curve.png", runs, "signs, LoRA rank 16, Flow-GRPO on the stream")
    page = HEAD.replace("{seeds}", " ".join(name.removeprefix("seed-") for name in runs if name.startswith("seed-")))
    for name, lines in runs.items():
        if folders[name].parent != BENCH:
            _take(folders[name], lines)
        page += _row(name, lines)
    page += "\nSeconds by stage, sums over a run:\n\n" + _stages(runs)
    for name, lines in runs.items():
        page += f"\n## {name}\n\n"
        for a in (r for r in lines if r["kind"] == "alarm"):
            page += f"- update {a['update']}, {a['alarm']}: {a['text']}\n"
        page += f"\nBefore, and the adapter that was kept; below each sign the text, in red what tesseract read instead.\n\n![before]({name}/before.png)\n![after]({name}/after.png)\n"
    (BENCH / "README.md").write_text(page)
    print(BENCH / "README.md")


def _lines(folder: Path) -> list[dict]:
    path = folder / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _take(folder: Path, lines: list[dict]) -> None:
    """Copies what the page shows of a run: log, sheets, curve, settings, and which adapter was kept after how long."""
    to = BENCH / folder.name
    to.mkdir(exist_ok=True)
    for part in ("log.jsonl", "before.png", "after.png", "curve.png"):
        shutil.copy(folder / part, to / part)
    settings = {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k not in ("nats", "run", "meander", "model", "prompts", "held_out", "out")}
    (to / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    updated = any(r["kind"] == "update" for r in lines)
    result = {
        "kept": records.load_checkpoint(folder)[1]["best"][1] if updated else 0,
        "minutes": round(sum(sum(r.get("seconds", {}).values()) for r in lines) / 60, 1),
    }
    (to / "result.json").write_text(json.dumps(result) + "\n")


def _row(name: str, lines: list[dict]) -> str:
    evaluations, updates = ([r for r in lines if r["kind"] == kind] for kind in ("evaluation", "update"))
    first, result = evaluations[0], json.loads((BENCH / name / "result.json").read_text())
    kept = next(e for e in evaluations if e["update"] == result["kept"])
    off = max((x for u in updates if u["behind"] == 0 for x in u["ratio_off"] if x is not None), default=0.0)
    minutes = result["minutes"]
    return (f"| {name} | {len(updates)} | {kept['update']} | {first['rates']['glyph']:.3f} | {kept['rates']['glyph']:.3f} | {first['gold']:.3f} | {kept['gold']:.3f} "
            f"| {kept['diversity'] / first['diversity']:.0%} | {off:.1e} | {minutes} |\n")  # fmt: skip


def _stages(runs: dict[str, list[dict]]) -> str:
    names = list(dict.fromkeys(s for lines in runs.values() for r in lines for s in r.get("seconds", {})))
    out = "| run | " + " | ".join(names) + " |\n| --- " * 1 + "| --- " * len(names) + "|\n"
    for run, lines in runs.items():
        out += f"| {run} | " + " | ".join(f"{sum(r.get('seconds', {}).get(n, 0) for r in lines):.0f}" for n in names) + " |\n"
    return out


if __name__ == "__main__":
    main()
