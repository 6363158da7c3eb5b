#!/usr/bin/env python3
"""Writes deploy/bench/learn from runs of learn.py: logs, the curve of all, sheets before and after, and the page with the numbers.

    figures.py FOLDER...     folders NAME-SEED of learn.py; make learn-figures takes all of meander-out/learn
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
evaluates on the 120 held-out prompts, 2 samples each, at 4 ode steps without noise. The reward is `glyph`; tesseract (`ocr`) is never
rewarded and chooses the adapter that is kept. Diversity is the mean over 12 groups of 8, sampled as in training. One standard error of a
rate is about 0.03.

    make learn SEEDS="{seeds}" && make learn-figures

![held-out rates, diversity, reward and divergence by update](curve.png)

| run | updates | kept at | glyph before | after | tesseract before | after | diversity kept | largest first ratio off 1, on-policy | minutes |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def main() -> None:
    folders = [Path(p) for p in sys.argv[1:]]
    runs = {p.name: _lines(p) for p in folders}
    runs = {name: lines for name, lines in runs.items() if any(r["kind"] == "evaluation" for r in lines)}
    if not runs:
        sys.exit("figures.py: no run with an evaluation; 'make learn' makes one")
    BENCH.mkdir(parents=True, exist_ok=True)
    records.curve(BENCH / "curve.png", runs, "signs, LoRA rank 16, Flow-GRPO on the stream")
    page = HEAD.replace("{seeds}", " ".join(name.rpartition("-")[2] for name in runs))
    for p in folders:
        if p.name in runs:
            page += _row(p, runs[p.name])
            (BENCH / p.name).mkdir(exist_ok=True)
            for part in ("log.jsonl", "before.png", "after.png", "curve.png"):
                shutil.copy(p / part, BENCH / p.name / part)
            settings = {k: v for k, v in json.loads((p / "config.json").read_text()).items() if k not in ("nats", "meander", "model", "prompts", "held_out", "out")}
            (BENCH / p.name / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
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


def _row(folder: Path, lines: list[dict]) -> str:
    evaluations, updates = ([r for r in lines if r["kind"] == kind] for kind in ("evaluation", "update"))
    first = evaluations[0]
    kept = next(e for e in evaluations if e["update"] == records.load_checkpoint(folder)[1]["best"][1]) if updates else first
    off = max((x for u in updates if u["behind"] == 0 for x in u["ratio_off"] if x is not None), default=0.0)
    wall = folder / "wall.json"
    minutes = f"{sum(json.loads(wall.read_text())) / 60:.1f}" if wall.exists() else "not finished"
    return (f"| {folder.name} | {len(updates)} | {kept['update']} | {first['rates']['glyph']:.3f} | {kept['rates']['glyph']:.3f} | {first['gold']:.3f} | {kept['gold']:.3f} "
            f"| {kept['diversity'] / first['diversity']:.0%} | {off:.1e} | {minutes} |\n")  # fmt: skip


def _stages(runs: dict[str, list[dict]]) -> str:
    names = list(dict.fromkeys(s for lines in runs.values() for r in lines for s in r.get("seconds", {})))
    out = "| run | " + " | ".join(names) + " |\n| --- " * 1 + "| --- " * len(names) + "|\n"
    for run, lines in runs.items():
        out += f"| {run} | " + " | ".join(f"{sum(r.get('seconds', {}).get(n, 0) for r in lines):.0f}" for n in names) + " |\n"
    return out


if __name__ == "__main__":
    main()
