"""The files of a training run: a log of every update as JSON lines, CSV and for TensorBoard, the curve, and
checkpoints."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..plugs.track import Sink
from .model import Network


class Records:
    """The files of a run. Every line is complete: after a crash the log continues at the checkpoint's update."""

    def __init__(self, folder: Path, tensorboard: bool, trackers: Sequence[Sink] = ()):
        self.folder, self.trackers = folder, trackers
        self.lines: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.board = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(str(folder / "tensorboard"))
            except ImportError:
                pass

    def begin(self, update: int) -> None:
        """Removes lines of updates after the checkpoint's."""
        self.lines = [r for r in self.read() if r["update"] <= update]
        text = "".join(json.dumps(r) + "\n" for r in self.lines)
        _replace(self.folder / "log.jsonl", text.encode())
        self._table()

    def read(self) -> list[dict[str, Any]]:
        """The complete lines of the log."""
        path = self.folder / "log.jsonl"
        out = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                out.append(json.loads(line))
            except json.JSONDecodeError:
                break  # the last line of a run that died
        return out

    def add(self, record: dict[str, Any]) -> None:
        """Appends a record, with null for NaN and infinity."""
        record = json.loads(json.dumps(record, default=float), parse_constant=lambda _: None)
        self.lines.append(record)
        with open(self.folder / "log.jsonl", "a") as f:
            f.write(json.dumps(record) + "\n")
        values = {f"{record['kind']}/{name}": value for name, value in _flat(record).items() if name != "update"}
        if self.board:
            for name, value in values.items():
                self.board.add_scalar(name, value, record["update"])
            self.board.flush()
        for tracker in self.trackers:
            tracker.log(values, record["update"])
        self._table()

    def close(self) -> None:
        """Ends what follows the run elsewhere."""
        for tracker in self.trackers:
            tracker.close()

    def _table(self) -> None:
        rows = [_flat(r) for r in self.lines if r["kind"] == "update"]
        if not rows:
            return
        names = list(dict.fromkeys(n for r in rows for n in r))
        with open(self.folder / "log.csv.new", "w", newline="") as f:
            w = csv.DictWriter(f, names)
            w.writeheader()
            w.writerows(rows)
        os.replace(self.folder / "log.csv.new", self.folder / "log.csv")

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The records of a kind: update, evaluation, test or alarm."""
        return [r for r in self.lines if r["kind"] == kind]


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record by name; those in lists and maps as name/part."""
    out: dict[str, float] = {}
    for name, v in record.items():
        if isinstance(v, list):
            v = dict(enumerate(v))
        if isinstance(v, dict):
            out |= _flat(v, f"{prefix}{name}/")
        elif isinstance(v, (int, float)) and not isinstance(v, bool):
            out[f"{prefix}{name}"] = v
    return out


def _replace(path: Path, data: bytes) -> None:
    """Writes a file so that a crash leaves the old one or the new one."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(new, path)


def save_checkpoint(folder: Path, network: Network, state: dict[str, Any], keep: dict[str, Any]) -> None:
    """Writes folder/checkpoint: all that a run continues from, and the adapter in PEFT's form. After a crash the folder
    still has a complete one."""
    new, now, old = folder / "checkpoint.new", folder / "checkpoint", folder / "checkpoint.old"
    shutil.rmtree(new, ignore_errors=True)
    network.save(new / "adapter", state["adapter"])
    torch.save({"learner": state, "keep": keep}, new / "state.pt")
    shutil.rmtree(old, ignore_errors=True)
    if now.exists():
        os.replace(now, old)
    os.replace(new, now)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns the state of the learner and what was kept beside it; None if the folder has no checkpoint."""
    for name in ("checkpoint", "checkpoint.old"):  # old: it died between the two renames
        if (path := folder / name / "state.pt").exists():
            got = torch.load(path, map_location="cpu", weights_only=True)
            return got["learner"], got["keep"]
    return None


def curve(path: Path, runs: dict[str, list[dict[str, Any]]], title: str) -> None:
    """Draws what was learned against updates: rates of both readers, diversity, training reward and divergence. runs:
    name to lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    figure.suptitle(title)
    colours, readers = pyplot.get_cmap("tab10"), dict[str, str]()  # readers: their style
    for k, (name, lines) in enumerate(runs.items()):
        evaluations, updates = ([r for r in lines if r["kind"] == kind] for kind in ("evaluation", "update"))
        at = [r["update"] for r in evaluations]
        for reader in evaluations[0]["rates"] if evaluations else ():
            style = readers.setdefault(reader, "s--" if readers else "o-")
            axes[0, 0].plot(at, [r["rates"][reader] for r in evaluations], style, color=colours(k))
        axes[0, 1].plot(
            at, [_share(r["diversity"], evaluations[0]["diversity"]) for r in evaluations], "o-", color=colours(k),
            label=name
        )
        x = [r["update"] for r in updates]
        axes[1, 0].plot(x, [r["reward"] for r in updates], color=colours(k), alpha=0.25)
        axes[1, 0].plot(x, _smooth([r["reward"] for r in updates], 10), color=colours(k), label=name)
        axes[1, 1].plot(
            x, [max((v for v in r["kl"] if v is not None), default=math.nan) for r in updates], color=colours(k),
            label=name
        )
    for reader, style in readers.items():
        axes[0, 0].plot([], [], style, color="grey", label=reader)
    for ax, label in zip(
        axes.flat,
        (
            "held-out samples read exactly", "diversity, share of the start's", "training reward (mean of 10)",
            "divergence from the base"
        )
    ):
        ax.set_title(label, fontsize=10)
        ax.set_xlabel("updates")
        ax.grid(alpha=0.3)
        if ax.lines:
            ax.legend(fontsize=8)
    axes[0, 0].set_ylim(top=1)
    axes[0, 1].set_ylim(bottom=0)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _share(x: float | None, start: float | None) -> float:
    return math.nan if x is None or not start else x / start


def _smooth(values: list[float], window: int) -> list[float]:
    return [
        sum(values[max(0, i - window + 1) : i + 1]) / len(values[max(0, i - window + 1) : i + 1])
        for i in range(len(values))
    ]
