"""Measures a policy by the pipeline that serves it: held-out prompts without noise, and how varied its samples are."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import re
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import nats.errors

from ..client.client import Client
from ..client.control import Refused
from ..data.events import decode
from ..client.tasks import means_away, retry_while_away, together
from . import prompts
from .config import Config

_PUBLISHED = 32  # prompts that wait for their receipts at once
_SILENCE = 30.0  # seconds after which the events are read from the beginning: the server may have been away
_QUOTED = re.compile('"([^"]*)"')


@dataclasses.dataclass
class Shown:
    """A held-out sample as the contact sheets show it."""

    wanted: str
    """The text that the prompt asks for, in quotes."""
    read: str
    """What the rewarded reader read."""
    right: bool
    """Whether it read what was wanted."""
    png: bytes
    """The image."""


@dataclasses.dataclass
class Evaluation:
    """Shares of held-out samples that are read exactly, by the rewarded reader and the gold one, and the diversity. Of
    a reward function that reads nothing it is the mean of its scores."""

    exact: float
    """That of the rewarded reader; gold is that of the gold reader, None without one."""
    gold: float | None
    rates: dict[str, float]
    """Those by the name of the reader."""
    diversity: float | None
    """The mean score of diversity; None: not measured."""
    shown: list[Shown]
    """Samples for a contact sheet."""
    samples: int
    """How many were read."""

    def record(self) -> dict[str, Any]:
        """The line of the log, without samples."""
        return {
            "exact": self.exact, "gold": self.gold, "rates": self.rates, "diversity": self.diversity,
            "samples": self.samples
        }


Progress = Callable[[int], contextlib.AbstractContextManager[Callable[[], object]]]
"""Of a number of samples: a context, and in it what is called with each."""


async def evaluate(
    client: Client, config: Config, held_out: list[dict[str, Any]], name: str, version: int, progress: Progress
) -> Evaluation:
    """Publishes the held-out prompts under the name and waits for their rewards; version is the least that may make
    them.

    progress(samples) is open while it waits, and what it gives is called with each sample.
    """
    # A run of its own: noise is drawn of seed and uid, and shall be the same in every evaluation.
    run = f"{config.run}-{name}"
    asked = prompts.held_out(config, "read", held_out, version)
    varied = prompts.variety(config, "vary", held_out, version) if config.variety else []
    expected, apart = len(asked) * config.eval_samples, 8 * len(varied)
    with progress(expected + apart) as seen:
        await publish(client, run, asked + varied, config.patience)
        rewards = await _rewards(client, config, run, "read", expected, seen)
        spaced = await _rewards(client, config, run, "vary", apart, seen) if varied else []
    rates = {}
    for k, reader in enumerate(asked[0]["reward"]):
        values = [r["scores"][k]["value"] for r in rewards]
        if None in values:
            raise RuntimeError(
                f"{reader['name']} gave no score to {values.count(None)} of {len(values)} samples: "
                f"{next(r['scores'][k]['error'] for r in rewards if r['scores'][k]['value'] is None)}"
            )
        says = any(r["scores"][k].get("exact") is not None for r in rewards)
        rates[reader["name"]] = _exact(rewards, k) if says else sum(values) / len(values)
    diversity = sum(r["reward"] for r in spaced) / apart if varied else None
    shown = [
        await retry_while_away(partial(_shown, client, run, r), config.patience)
        for r in _spaced(rewards, config.sheet)
    ]
    return Evaluation(rates[config.reader], rates.get(config.gold), rates, diversity, shown, len(rewards))


async def full_marks(client: Client, config: Config, batch: str, scored: int) -> dict[str, Any]:
    """What the rewarded reader gives a training batch: the share of the scored samples that it reads exactly, and its
    mean."""
    rewards = await _rewards(client, config, config.run, batch, scored, lambda: None, strict=False)
    return {"full": _exact(rewards, 0), "reader": sum(r["scores"][0]["value"] for r in rewards) / len(rewards)}


def _exact(rewards: list[dict[str, Any]], k: int) -> float:
    """The share that score k says is exact; of functions that do not say it, those of 1."""
    scores = [r["scores"][k] for r in rewards]
    return sum(s["exact"] if s.get("exact") is not None else s["value"] == 1 for s in scores) / len(scores)


async def publish(client: Client, run: str, bodies: list[dict[str, Any]], patience: float) -> None:
    """Publishes prompts, some side by side. A prompt that a trainer published before it died is published again without
    effect."""
    left = iter(bodies)

    async def some() -> None:
        for body in left:
            fields = {name: value for name, value in body.items() if name != "prompt"}
            try:
                await client.publish(run, body["prompt"], timeout=patience, **fields)
            except Refused as e:
                if e.code != "uid_conflict":  # it asked for older weights then
                    raise

    await together(some() for _ in range(_PUBLISHED))


async def _rewards(
    client: Client, config: Config, run: str, batch: str, count: int, seen: Callable[[], object], strict: bool = True
) -> list[dict[str, Any]]:
    """The rewards of a batch's samples, by uid and index, once all are there; strict: one without a reward is an
    error."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    end = time.monotonic() + config.patience
    while len(found) < count:
        if time.monotonic() > end:
            raise TimeoutError(
                f"run {run}, batch {batch}: {len(found)} of {count} samples have a reward, and none came for "
                f"{config.patience:g} s; are the sampler and the reward service up?"
            )
        stored = _stored_rewards(client, run, batch, min(_SILENCE, config.patience))
        async with contextlib.aclosing(stored) as events:
            async for r in events:
                if r["reward"] is None and not strict:
                    continue
                if r["reward"] is None:
                    raise RuntimeError(
                        f"sample {r['sample_index']} of {r['uid']} has no reward: {r.get('error') or r['status']}"
                    )
                if (r["uid"], r["sample_index"]) not in found:
                    seen()
                    end = time.monotonic() + config.patience
                found[r["uid"], r["sample_index"]] = r
                if len(found) == count:
                    break
    return [found[k] for k in sorted(found)]


async def _stored_rewards(
    client: Client, run: str, batch: str, silence: float
) -> AsyncGenerator[dict[str, Any], None]:
    """The rewards of a batch, from the first on, until none comes for so many seconds or the server is away."""
    try:
        # The server puts the partition in; the stream must be named, because no client publishes on these subjects.
        events = await client.js.subscribe(
            f"mdr.v1.reward.*.{run}.{batch}.*.*", stream="MDR_REWARDS", ordered_consumer=True
        )
        try:
            while True:
                yield decode((await events.next_msg(timeout=silence)).data)
        finally:
            await events.unsubscribe()
    except nats.errors.Error as e:
        if not means_away(e):
            raise
        await asyncio.sleep(0.2)


def _spaced(items: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    first = [r for r in items if r["sample_index"] == 0]
    n = min(count, len(first))
    return [first[i * len(first) // n] for i in range(n)]


async def _shown(client: Client, run: str, reward: dict[str, Any]) -> Shown:
    m = await client.js.get_last_msg(
        "MDR_TRAJECTORIES", f"mdr.v1.trajectory.{run}.{reward['uid']}.{reward['sample_index']}.main"
    )
    trajectory = decode(m.data or b"")
    score = reward["scores"][-1]
    quoted = _QUOTED.search(trajectory["prompt"])
    wanted = quoted.group(1) if quoted else trajectory["prompt"]
    return Shown(
        wanted, score.get("detail") or "", score.get("exact", score["value"] == 1), await client.medium(trajectory)
    )


def sheet(path: Path, shown: list[Shown], title: str, columns: int = 6) -> None:
    """A contact sheet: each sample under the text that was wanted, and what the last reader saw where it is another.
    Without samples there is none."""
    if not shown:
        return
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=13)
    images = [Image.open(io.BytesIO(s.png)).convert("RGB") for s in shown]
    scale = max(1, 160 // max(i.width for i in images))
    w, h = max(i.width for i in images) * scale + 12, max(i.height for i in images) * scale + 30
    rows = -(-len(images) // columns)
    out = Image.new("RGB", (w * min(columns, len(images)) + 12, h * rows + 36), "white")
    draw = ImageDraw.Draw(out)
    draw.text((12, 10), title, fill="black", font=font)
    for k, (s, image) in enumerate(zip(shown, images)):
        x, y = 12 + k % columns * w, 36 + k // columns * h
        out.paste(image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST), (x, y))
        text, tone = (s.wanted, "#1a7f37") if s.right else (f"{s.wanted}: {s.read or 'nothing'}", "#b42318")
        draw.text((x, y + image.height * scale + 4), text, fill=tone, font=font)
    out.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
