#!/usr/bin/env python3
"""Writes deploy/bench/learn from runs of learn.py: logs, the curve of all, sheets before and after, and the page with
the numbers.

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

`make learn` starts `meander up` with the model [signs](../../models/signs) and trains a LoRA by Flow-GRPO from the
stream alone. There are three sets: prompts to train on; 120 to validate on, which choose the adapter and say whether
diversity must be held; and the 120 held-out prompts of the model's card to test on, looked at once, at the end. Each
is sampled twice, at 4 ode steps without noise; the base at 20 steps, too, which is what training brings 4 steps near.

The reward is `glyph`; `diversity`, how far a sample is from the others of its group, is rewarded, too, while an
evaluation finds less than 90 % of the start's (`--hold-diversity`). Tesseract (`ocr`) is never rewarded; the kept
adapter is the best by it, among those of at least 80 % of the start's diversity. Diversity is the mean over 12 groups
of 8, sampled as in training. One standard error of a rate is about 0.03. A run stops when a reader is gamed; `make
learn-hacked` does not hold diversity and does not stop, to show it. `make learn-transfer` reads the kept adapters as
diffusers and peft draw them, outside meander.

    make learn SEEDS="{seeds}" && make learn-hacked && make learn-figures

![held-out rates, diversity, reward and divergence by update](curve.png)

On the prompts that chose the adapter: rates before, of the kept adapter and at the last update; diversity of the kept
and the last one as shares of the start's; how far the first ratio was off 1, at most, on-policy; minutes of all stages:

"""
COLUMNS = [
    "run", "updates", "kept at", "glyph", "kept", "last", "tesseract", "kept", "last", "diversity", "last", "ratio",
    "minutes",
]  # fmt: skip
UNTESTED = """
Of runs without a line here the adapter was chosen on the test's prompts themselves, which were the only held-out ones
then: what they gained is too good.
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
    page += _table(COLUMNS, _validated(runs)) + "\nOn the test's prompts:\n\n"
    page += _table(["run", "weights", "glyph", "tesseract", "diversity"], _tested(runs))
    if any(not _of(lines, "test") for lines in runs.values()):
        page += UNTESTED
    page += "\nSeconds by stage, sums over a run:\n\n" + _stages(runs)
    for name, lines in runs.items():
        page += f"\n## {name}\n\n"
        for a in (r for r in lines if r["kind"] == "alarm"):
            page += f"- update {a['update']}, {a['alarm']}: {a['text']}\n"
        page += "\nBefore, and the adapter that was kept; below each sign the text, in red what tesseract read "
        page += "instead.\n"
        page += f"\n![before]({name}/before.png)\n![after]({name}/after.png)\n"
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
    settings = {
        k: v
        for k, v in json.loads((folder / "config.json").read_text()).items()
        if k not in ("nats", "run", "meander", "model", "prompts", "held_out", "test", "out")
    }
    (to / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    updated = any(r["kind"] == "update" for r in lines)
    result = {
        "kept": records.load_checkpoint(folder)[1]["best"][1] if updated else 0,
        "minutes": round(sum(sum(r.get("seconds", {}).values()) for r in lines) / 60, 1),
    }
    (to / "result.json").write_text(json.dumps(result) + "\n")


def _of(lines: list[dict], kind: str) -> list[dict]:
    return [r for r in lines if r["kind"] == kind]


def _table(columns: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [columns, ["---"] * len(columns), *rows])


def _validated(runs: dict[str, list[dict]]) -> list[list[str]]:
    """The rows of the table of COLUMNS, and the means over the seeds."""
    rows, means = [], []
    for name, lines in runs.items():
        evaluations, updates = _of(lines, "evaluation"), _of(lines, "update")
        result = json.loads((BENCH / name / "result.json").read_text())
        first, last = evaluations[0], evaluations[-1]
        kept = next(e for e in evaluations if e["update"] == result["kept"])
        off = max((x for u in updates if u["behind"] == 0 for x in u["ratio_off"] if x is not None), default=0.0)
        rates = [e["rates"]["glyph"] for e in (first, kept, last)] + [e["gold"] for e in (first, kept, last)]
        shares = [e["diversity"] / first["diversity"] for e in (kept, last)]
        if name.startswith("seed-"):
            means.append(rates + shares)
        numbers = [*_numbers(rates + shares), f"{off:.1e}", str(result["minutes"])]
        rows.append([name, str(len(updates)), str(kept["update"]), *numbers])
    if len(means) > 1:
        mean = [sum(column) / len(means) for column in zip(*means, strict=True)]
        rows.append([f"mean of {len(means)} seeds", "", "", *_numbers(mean), "", ""])
    return rows


def _numbers(values: list[float]) -> list[str]:
    """Six rates and two shares."""
    return [f"{v:.3f}" for v in values[:6]] + [f"{v:.0%}" for v in values[6:]]


def _tested(runs: dict[str, list[dict]]) -> list[list[str]]:
    """What the test found of each run, and the means over the seeds."""
    rows, found = [], {}
    for name, lines in runs.items():
        for r in _of(lines, "test"):
            values = [r["rates"]["glyph"], r["gold"], r["diversity"]]
            rows.append([name, r["of"], *("" if v is None else f"{v:.3f}" for v in values)])
            if name.startswith("seed-"):
                found.setdefault(r["of"], []).append(values)
    for of, seeds in found.items():
        if len(seeds) > 1:
            columns = [[v for v in column if v is not None] for column in zip(*seeds, strict=True)]
            mean = [f"{sum(c) / len(c):.3f}" if c else "" for c in columns]
            rows.append([f"mean of {len(seeds)} seeds", of, *mean])
    return rows


def _stages(runs: dict[str, list[dict]]) -> str:
    names = list(dict.fromkeys(s for lines in runs.values() for r in lines for s in r.get("seconds", {})))
    out = "| run | " + " | ".join(names) + " |\n| --- " * 1 + "| --- " * len(names) + "|\n"
    for run, lines in runs.items():
        out += f"| {run} | " + " | ".join(
            f"{sum(r.get('seconds', {}).get(n, 0) for r in lines):.0f}" for n in names
        ) + " |\n"
    return out


if __name__ == "__main__":
    main()
