"""A batch as a stream of micro-batches, whose steps are read as they are wanted."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..client.tasks import PATIENCE, retry_while_away
from .events import EventError

if TYPE_CHECKING:
    from .batch import Batch, Sample


_PORTION = 1 << 20  # bytes of states, about, that are asked for at once where micro-batches have fewer


class Completing(Protocol):
    """What reads the steps of samples: a Client."""

    async def complete(self, samples: Sequence[Sample], logits: bool = False) -> None:
        """As of Client."""


class Micro:
    """The micro-batches of a batch: see Batch.micro."""

    def __init__(self, batch: Batch, n: int, rows: Sequence[int] | None, ahead: int, pin: bool):
        for what, value in (("n", n), ("ahead", ahead)):
            if value < 0:
                raise ValueError(f"{what}: {value}; must be at least 0")
        self.batch, self.ahead, self.pin = batch, ahead, pin
        chosen = list(range(batch.size)) if rows is None else [int(i) for i in rows]
        if n:
            self.pieces = [sorted(chosen[i : i + n]) for i in range(0, len(chosen), n)]
        else:
            of = batch["group_index"] if chosen else []
            self.pieces = [[i for i in chosen if of[i] == k] for k in dict.fromkeys(of[i] for i in chosen)]

    def __len__(self) -> int:
        return len(self.pieces)

    async def __aiter__(self) -> AsyncGenerator[Batch, None]:
        ready = collections.deque[asyncio.Task["list[Batch | EventError]"]]()
        portions = self._portions()
        try:
            while True:
                while len(ready) <= self.ahead and (pieces := next(portions, None)) is not None:
                    ready.append(asyncio.create_task(self._read(pieces)))
                if not ready:
                    return
                read = await ready.popleft()
                while read:  # what was given is not held
                    if isinstance(read[0], EventError):
                        raise read[0]
                    yield read.pop(0)  # type: ignore[misc]
        finally:
            for task in ready:
                task.cancel()
            await asyncio.gather(*ready, return_exceptions=True)

    def __iter__(self) -> Iterator[Batch]:
        if not self.batch.unread:
            yield from (self._made(rows, [self.batch.samples[i] for i in rows]) for rows in self.pieces)
            return
        if self.batch.thread is None:
            raise RuntimeError("micro: the steps are to be read: take `async for`, or a client of meander.sync")
        source = self.__aiter__()
        try:
            while (batch := self.batch.thread.run(_next(source))) is not None:
                yield batch
        finally:
            self.batch.thread.run(_close(source))

    def _portions(self) -> Iterator[list[Sequence[int]]]:
        """The pieces in parts that are read together."""
        part, size = list[Sequence[int]](), 0
        for rows in self.pieces:
            part.append(rows)
            size += sum(self.batch.samples[i].state_bytes for i in rows)
            if size >= _PORTION:
                yield part
                part, size = [], 0
        if part:
            yield part

    async def _read(self, pieces: Sequence[Sequence[int]]) -> list[Batch | EventError]:
        """The micro-batches of pieces, up to one that cannot be read."""
        samples = [[self.batch.samples[i] for i in rows] for rows in pieces]
        if self.batch.unread:
            samples = [[dataclasses.replace(s, conditioning={}) for s in some] for some in samples]
            if self.batch.source is None:
                raise RuntimeError("micro: the batch has no client that reads its steps")
            try:
                await retry_while_away(partial(self.batch.source.complete, sum(samples, [])), PATIENCE)
            except EventError as e:
                if len(pieces) == 1:
                    return [e]
                out = list["Batch | EventError"]()
                for rows in pieces:
                    out += await self._read([rows])
                    if isinstance(out[-1], EventError):
                        break
                return out
        return [self._made(rows, some) for rows, some in zip(pieces, samples, strict=True)]

    def _made(self, rows: Sequence[int], samples: Sequence[Sample]) -> Batch:
        whole, of = self.batch, self.batch["group_index"][list(rows)] if rows else []
        groups = [
            dataclasses.replace(whole.groups[k], samples=[s for s, g in zip(samples, of, strict=True) if g == k])
            for k in dict.fromkeys(of)
        ]
        out = whole.of_groups(groups, self.pin, rows)
        out.rows, out.last = np.array(rows, np.int64), rows is self.pieces[-1]
        return out


async def _next(source: AsyncGenerator[Batch, None]) -> Batch | None:
    return await anext(source, None)


async def _close(source: AsyncGenerator[Batch, None]) -> None:
    await source.aclose()
