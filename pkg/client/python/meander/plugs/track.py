"""Follows a run and logs it to TensorBoard, Weights & Biases or trackio, as its groups close.

    python -m meander.plugs.track RUN --to tensorboard=runs
    python -m meander.plugs.track RUN --to wandb=my-project --every 16
    python -m meander.plugs.track RUN --to trackio=my-project --once

A point has the means of --every groups; its step is the number of groups that have closed. Points do not depend on when
they are read: a second call logs the same ones, while all groups are stored. The best and the worst sample of a group
are shown every --samples points. It reads only: the rights of a viewer are enough.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nats.js.errors import NotFoundError

from ..client import access
from ..client.client import Client, connect
from ..data.events import ADVANTAGE, PREFIX, AnyEvent, Event, EventError, Gone, decode, fitting, medium
from ..client.tasks import together

_log = logging.getLogger(__name__)
_GONE = (EventError, Gone, NotFoundError)  # a part of a group is no longer stored, or not what its name says


class Sink(Protocol):
    """Where points go. step is the number of groups that have closed."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Logs numbers by name."""

    def show(self, rows: list[Event], step: int) -> None:
        """Logs samples: rows as of samples()."""

    def close(self) -> None:
        """Writes what is left."""


class TensorBoard:
    """Event files in a folder: of torch, or of tensorboardX without torch."""

    def __init__(self, folder: str, run: str):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            from tensorboardX import SummaryWriter
        self.board = SummaryWriter(os.path.join(folder or "runs", run))

    def log(self, values: dict[str, float], step: int) -> None:
        """Adds a point to each curve."""
        for name, value in values.items():
            self.board.add_scalar(name, value, step)
        self.board.flush()

    def show(self, rows: list[Event], step: int) -> None:
        """Adds images, and texts with what they were given."""
        for row in rows:
            place, said = row["place"], f"reward {row['reward']:.4g}, advantage {row['advantage']:.4g}: {row['prompt']}"
            if row["image"] is not None:
                self.board.add_image(f"samples/{place}", row["image"], step, dataformats="HWC")
            for name, pixels in row["conditions"]:
                self.board.add_image(f"samples/{place}/condition {name}", pixels, step, dataformats="HWC")
            self.board.add_text(f"samples/{place}", f"{said}\n\n{row['text']}", step)
        self.board.flush()

    def close(self) -> None:
        """Closes the files."""
        self.board.close()


class Tracker:
    """Weights & Biases, or trackio, which has the same calls."""

    def __init__(self, module: Any, project: str, run: str, **settings: Any):
        self.module, self.videos = module, tempfile.TemporaryDirectory(prefix="meander-track-")
        module.init(project=project or "meander", name=run, **settings)

    def log(self, values: dict[str, float], step: int) -> None:
        """Logs a point."""
        self.module.log(values, step=step)

    def show(self, rows: list[Event], step: int) -> None:
        """Logs images, videos as mp4, and texts; in W&B also a table."""
        for row in rows:
            place, said = row["place"], f"reward {row['reward']:.4g}, advantage {row['advantage']:.4g}: {row['prompt']}"
            shown = self.module.Image(
                row["image"], caption=said
            ) if row["image"] is not None else f"{said}\n\n{row['text']}"
            given = {
                f"samples/{place}/condition {name}": self.module.Image(pixels, caption=name)
                for name, pixels in row["conditions"]
            }
            if row.get("video"):
                path = os.path.join(self.videos.name, f"{place}-{step}.mp4")
                Path(path).write_bytes(row["video"])
                shown = self.module.Video(path, caption=said, format="mp4")
            if row["image"] is not None or self.module.__name__ == "trackio":
                self.module.log({f"samples/{place}": shown, **given}, step=step)
        if self.module.__name__ == "wandb":
            columns = ["uid", "sample_index", "prompt", "reward", "advantage", "policy_version", "text", "image"]
            data = [
                [*(row[c] for c in columns[:-1]), self.module.Image(row["image"]) if row["image"] is not None else None]
                for row in rows
            ]
            self.module.log({"samples/table": self.module.Table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        """Ends the run of the tracker."""
        self.module.finish()
        self.videos.cleanup()


def sink(to: str, run: str, flag: str = "--to") -> Sink:
    """The sink of a flag: NAME or NAME=PLACE, a folder of TensorBoard, else a project.

    ValueError: there is no such sink, or its package is not installed; it says what to install.
    """
    name, _, place = to.partition("=")
    try:
        if name == "tensorboard":
            return TensorBoard(place, run)
        if name == "wandb":
            import wandb

            return Tracker(wandb, place, run, id=run, resume="allow")
        if name == "trackio":
            import trackio

            return Tracker(trackio, place, run, resume="allow")
    except ImportError as e:
        package = {"tensorboard": "tensorboardX"}.get(name, name)
        raise ValueError(f"{flag}: {name} needs a package: pip install {package} ({e})") from None
    raise ValueError(f"{flag}: {to!r}; must be tensorboard, wandb or trackio, with =FOLDER or =PROJECT")


class Point:
    """The sums of some groups."""

    def __init__(self) -> None:
        self.groups = 0
        self.sums: dict[str, list[float]] = defaultdict(list)

    def add(self, group: Event, rewards: list[Event]) -> None:
        """Adds a group, and the rewards of its samples."""

        def add(name: str, value: float) -> None:
            self.sums[name].append(float(value))

        self.groups += 1
        kind = "val" if group.get("validation") else "reward"
        scored = [m["reward"] for m in group["members"] if m["reward"] is not None]
        if scored:
            add("policy/version", group["policy_version_max"])
        add("groups/complete", group["status"] == "complete")
        add("samples/not_scored", 1 - len(scored) / max(1, len(group["members"])))
        if group["closed"] > group["opened"] > 0:
            add("seconds/first_to_last_sample", (group["closed"] - group["opened"]) / 1e9)
        for m in group["members"]:
            if m.get("tokens") is not None:
                add("samples/tokens", m["tokens"])
        if scored:
            source = (group.get("metadata") or {}).get("data_source")
            for name in [f"{kind}/mean", *([f"{kind}/data_source/{source}"] if isinstance(source, str) else [])]:
                self.sums[name] += scored
            self.sums[f"{kind}/min"].append(min(scored))
            self.sums[f"{kind}/max"].append(max(scored))
        if len(scored) > 1:
            add(f"{kind}/std_in_group", statistics.pstdev(scored))
            add(f"{kind}/groups_without_variance", max(scored) == min(scored))
        for reward in rewards:
            for score in reward["scores"]:
                if score["value"] is not None:
                    add(f"score/{score['name']}" if kind == "reward" else f"val/score/{score['name']}", score["value"])

    def values(self) -> dict[str, float]:
        """The numbers of the point by name: means, but for the least and the largest."""
        of = {"min": min, "max": max}
        out = {
            n: of.get(n.rpartition("/")[2] if n.count("/") == 1 else "", statistics.fmean)(x)
            for n, x in self.sums.items() if x
        }
        return {n: v for n, v in sorted(out.items()) if math.isfinite(v)}


async def _rewards(client: Client, group: Event) -> list[Event]:
    """The rewards of the samples of a group, as far as they are stored."""

    async def one(i: int) -> Event | None:
        subject = f"{PREFIX}reward.*.{group['run']}.{group['batch']}.{group['uid']}.{i}"
        try:
            return decode((await client.js.get_last_msg("MDR_REWARDS", subject)).data or b"")
        except _GONE:
            return None

    found = await together(one(m["sample_index"]) for m in group["members"] if m["reward"] is not None)
    return [r for r in found if r is not None]


async def samples(client: Client, run: str, group: Event) -> list[Event]:
    """The best and the worst sample of a group, as rows: place (best or worst), uid, sample_index, prompt, reward,
    advantage, policy_version, text, image, uint8 [H, W, 3] or None, video, an mp4 or None, and conditions, pairs of a
    name and such pixels.
    What is no longer stored is left out."""
    scored = sorted((m for m in group["members"] if m["reward"] is not None), key=lambda m: m["reward"], reverse=True)
    rows = []
    for place, member in [("best", m) for m in scored[:1]] + [("worst", m) for m in scored[1:][-1:]]:
        try:
            rows.append({"place": place} | await _row(client, group.get("source_run") or run, group["uid"], member))
        except (*_GONE, OSError, ImportError) as e:  # no image, or no Pillow
            _log.warning("%s #%d is not shown: %s", group["uid"], member["sample_index"], e)
    return rows


async def _row(client: Client, run: str, uid: str, member: Event) -> Event:
    t = await client._trajectory(run, uid, member)
    image: npt.NDArray[np.uint8] | None = await client.pixels(t) if medium(t, "image") else None
    of_text = t.get("text")
    messages = of_text["settings"]["messages"] if of_text else []
    return {
        "uid": uid, "sample_index": member["sample_index"],
        "prompt": t["prompt"] or " ".join(m["content"] for m in messages),
        "reward": member["reward"], "advantage": member["advantage"] or 0.0, "policy_version": t["policy_version_max"],
        "text": (await client.text(t)).answer if of_text else "", "image": image, "video": await _video(client, t),
        "conditions": await client.conditions(t),
    }


async def _video(client: Client, t: AnyEvent) -> bytes | None:
    """The video of a sample as mp4, with its sound; None: it has none, or ffmpeg is not there, which is said once."""
    if not medium(t, "video"):
        return None
    program = shutil.which("ffmpeg")
    if program is None:
        _no_ffmpeg()
        return None
    sound = await client.medium(t, "audio") if medium(t, "audio") else None
    return await asyncio.to_thread(_mp4, program, await client.medium(t, "video"), sound)


@functools.cache
def _no_ffmpeg() -> None:
    _log.warning("videos are shown as the frame in the middle: mp4 needs the program ffmpeg in the PATH")


def _mp4(program: str, video: bytes, sound: bytes | None) -> bytes:
    """An mp4 of an animated PNG and a WAV, as the page of 'meander ui' makes it. OSError: ffmpeg made none."""
    with tempfile.TemporaryDirectory(prefix="meander-mp4-") as folder:
        arguments, out = [program, "-nostdin", "-v", "error", "-protocol_whitelist", "file"], f"{folder}/out.mp4"
        for kind, data in (("apng", video), ("wav", sound)):
            if data is not None:
                given = Path(folder, f"in.{kind}")
                given.write_bytes(data)
                arguments += ["-f", kind, "-i", str(given)]
        arguments += ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-c:v", "libx264", "-crf", "18", "-pix_fmt", "yuv420p"]
        done = subprocess.run(
            [*arguments, "-c:a", "aac", "-movflags", "+faststart", "-f", "mp4", out], capture_output=True, check=False
        )
        if done.returncode != 0:
            raise OSError(f"{program}: {done.stderr.decode(errors='replace').strip()[:300]}")
        return Path(out).read_bytes()


async def follow(client: Client, run: str, to: Sink, every: int = 8, samples_every: int = 8, once: bool = False) -> int:
    """Logs the groups of a run: those that have closed and, unless once, those that close, until it is cancelled.

    every: groups of a point. samples_every: points from one pair of samples to the next; 0: none are shown.
    Returns the number of groups. The last point of once has fewer groups where they do not come out even.
    """
    if once and not await _stored(client, run):
        return 0
    point, closed, points = Point(), 0, 0
    async for group, last in _results(client, run):
        end = once and last
        if group:
            closed += 1
            point.add(group, await _rewards(client, group))
        if point.groups == every or end and point.groups:
            to.log(point.values(), closed)
            if samples_every and points % samples_every == 0 and group:
                to.show(await samples(client, run, group), closed)
            point, points = Point(), points + 1
        if end:
            break
    return closed


async def _results(client: Client, run: str) -> AsyncIterator[tuple[Event | None, bool]]:
    """The results of groups, None for an event that is not valid, and whether it is the last one that is stored now."""
    async with contextlib.aclosing(client._messages(f"advantage.{run}.*", "MDR_ADVANTAGES")) as messages:
        async for m in messages:
            group = None
            try:
                group = fitting(m.data, ADVANTAGE, m.subject, "run", "uid")
            except EventError as e:  # the services take it off the stream, and the true one comes
                _log.warning("skipped %s: %s", m.subject, e)
            yield group, m.metadata.num_pending == 0


async def _stored(client: Client, run: str) -> int:
    """How many groups of a run have closed."""
    info = await client.js.stream_info("MDR_ADVANTAGES", subjects_filter=f"{PREFIX}advantage.{run}.*")
    return len(info.state.subjects or {})


def main(argv: list[str] | None = None) -> int:
    """The command line. The status is 1 after an error, which it prints in a line."""
    p = argparse.ArgumentParser(
        prog="meander-track", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("run", metavar="RUN")
    p.add_argument(
        "--to", action="append", required=True, metavar="SINK",
        help="tensorboard[=FOLDER], wandb[=PROJECT] or trackio[=PROJECT]; may be repeated"
    )
    p.add_argument("--every", type=int, default=8, metavar="N", help="groups of a point (8)")
    p.add_argument(
        "--samples", type=int, default=8, metavar="N", help="points from one pair of samples to the next; 0: none (8)"
    )
    p.add_argument(
        "--once", action="store_true", help="end after the groups that have closed, instead of waiting for more"
    )
    p.add_argument("--token", default=os.environ.get("MEANDER_NATS_TOKEN"), help="of its server (MEANDER_NATS_TOKEN)")
    access.add_flags(p)
    a = p.parse_args(argv)
    if a.every < 1 or a.samples < 0:
        p.error("--every: must be at least 1, and --samples 0")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        asyncio.run(_track(a))
    except KeyboardInterrupt:
        return 0
    except (ValueError, OSError) as e:  # of a flag, of the connection, or what the role may not do
        print(f"meander-track: {e}", file=sys.stderr)
        return 1
    return 0


class _All:
    """Several sinks as one."""

    def __init__(self, names: list[str], run: str):
        self.sinks = [sink(name, run) for name in names]

    def log(self, values: dict[str, float], step: int) -> None:
        for s in self.sinks:
            s.log(values, step)
        mean = values.get("reward/mean", values.get("val/mean", math.nan))
        print(
            f"{step} groups: reward {mean:.4g}, policy version {values.get('policy/version', math.nan):.4g}", flush=True
        )

    def show(self, rows: list[Event], step: int) -> None:
        for s in self.sinks:
            s.show(rows, step)

    def close(self) -> None:
        for s in self.sinks:
            s.close()


async def _track(a: argparse.Namespace) -> None:
    async with connect(**access.arguments(a, a.token)) as client:
        if a.once and not await _stored(client, a.run):
            raise ValueError(f"run {a.run}: no group has closed; 'meander runs ls' lists the runs that are stored")
        to = _All(a.to, a.run)
        try:
            await follow(client, a.run, to, a.every, a.samples, a.once)
        finally:
            to.close()


if __name__ == "__main__":
    sys.exit(main())
