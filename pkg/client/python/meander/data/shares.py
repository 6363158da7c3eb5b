"""Batches of a run that several readers share by their number, so that each reads the tensors of its part alone."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from .batch import Batch
from .events import ADVANTAGE, BATCH, Event, EventError, fitting
from ..client.reader import COUNTED, Source, _Reader, why_not
from ..client.tasks import together
from .textbatch import batch_of, check_kind, lacking


@dataclasses.dataclass(frozen=True)
class Part:
    """Which batches a reader makes, every one of `workers` from `worker` on, and which of their groups: every one of
    `world` from `rank` on."""

    rank: int = 0
    world: int = 1
    worker: int = 0
    workers: int = 1


@dataclasses.dataclass(frozen=True)
class Extent:
    """Where reading begins and ends: behind the cursor `after` (empty: at the beginning), with the result of sequence
    `until` (None: never), after `limit` batches (0: never)."""

    after: str = ""
    until: int | None = None
    limit: int = 0


_Named = tuple[str, str, Any]  # run, uid and, where it was read, the event of a group


class Shares(_Reader):
    """The batches of one part, in order; up to `prefetch` of them are read ahead. Nothing is acknowledged.

    Which group is in which batch follows from the stored results alone: readers of one extent, whose parts are all
    parts of a whole, get each group once, in whatever order and speed they read. size is the number of groups of a
    batch, and 0: as the prompts named it. A part without groups is a batch of size 0.
    EmptyBatch: no group of a named batch counts.
    """

    def __init__(
        self,
        client: Source,
        run: str,
        size: int,
        part: Part,
        extent: Extent,
        prefetch: int,
        log_prob_kind: str = "raw",
        **options: Any,
    ):
        check_kind(log_prob_kind)
        super().__init__(client, run, "", "advantage" if size else "batch", extent.after, False, follow=True, **options)
        self.size, self.part, self.extent, self.prefetch, self.log_prob_kind = (
            size,
            part,
            extent,
            prefetch,
            log_prob_kind,
        )
        self._seen = int(extent.after.partition("@")[0] or 0)

    async def __aiter__(self) -> AsyncIterator[Batch]:
        ready: asyncio.Queue[asyncio.Task[Batch] | None] = asyncio.Queue()
        room = asyncio.Semaphore(self.prefetch)
        ahead = asyncio.create_task(self._read_ahead(ready, room))
        batch: asyncio.Task[Batch] | None = None
        try:
            while (batch := await ready.get()) is not None:
                yield await batch
                room.release()
            await ahead
        finally:
            tasks: list[asyncio.Task[Any] | None] = [ahead, batch]
            while not ready.empty():
                tasks.append(ready.get_nowait())
            begun = [task for task in tasks if task is not None]
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)
            await self.close()

    async def _read_ahead(self, ready: asyncio.Queue[asyncio.Task[Batch] | None], room: asyncio.Semaphore) -> None:
        """Starts to read the batches of this part, as many as there is room for, and ends their queue with None."""
        try:
            with contextlib.suppress(StopAsyncIteration):
                plan = self._plan()
                while True:
                    event, place, groups = await anext(plan)
                    await room.acquire()
                    ready.put_nowait(asyncio.create_task(self._load(event, place, groups)))
        finally:
            ready.put_nowait(None)

    async def _plan(self) -> AsyncIterator[tuple[Event, str, list[_Named]]]:
        """Which groups of which batch are this part's: the last event of each, cursors and groups."""
        index, groups = 0, list[_Named]()
        while not (self.extent.limit and index == self.extent.limit) and (event := await self._event()) is not None:
            if not self.size:
                groups = [(event["run"], uid, None) for uid in sorted(event["uids"])]
            elif event["status"] in COUNTED:
                groups.append((event["run"], event["uid"], event))
            else:
                self._leave(event["uid"], why_not(event))
            if self.size and len(groups) < self.size:
                continue
            if index % self.part.workers == self.part.worker:
                yield event, self.cursor.place(self._seen), groups[self.part.rank :: self.part.world]
            index, groups = index + 1, []

    async def _event(self) -> Event | None:
        """The next result that is what it says; None at the end of the extent."""
        while self.extent.until is None or self._seen < self.extent.until:
            m = await self._message()
            if m is None:
                return None
            self._seen = m.metadata.sequence.stream
            if self.extent.until is not None and self._seen > self.extent.until:
                return None
            try:
                return (
                    fitting(m.data, ADVANTAGE, m.subject, "run", "uid")
                    if self.size
                    else fitting(m.data, BATCH, m.subject, "run", "batch")
                )
            except EventError as e:
                self._garbage(m, e)
        return None

    async def _load(self, event: Event, place: str, named: list[_Named]) -> Batch:
        left = {} if self.size else await self._dropped(event, place)
        found = await together(self._group(run, uid, place, event) for run, uid, event in named)
        groups = [g for g in found if g is not None and g.trained]
        for g in groups:
            for s in g.trained:
                if s.text is not None and (why := lacking(s.text, self.log_prob_kind)):
                    raise EventError(f"{g.uid} #{s.member['sample_index']}: {why}")
        self.health.batches += 1
        batch = batch_of(groups, "" if self.size else event["batch"], place, self.log_prob_kind, self.client)
        batch.left_out = left
        return batch
