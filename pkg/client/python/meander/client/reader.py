"""Streams of trajectories, groups and batches, each with a cursor of its own."""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import nats
import numpy.typing as npt
from nats.aio.client import Client as NATS
from nats.aio.msg import Msg
from nats.js.client import JetStreamContext
from nats.js.errors import NotFoundError

from ..data.batch import Batch, Group, Keep, Ratio, Sample
from .control import status_text
from .cursor import Cursor, results
from ..data.events import ADVANTAGE, BATCH, GROUP, PREFIX, AnyEvent, Event, EventError, fitting
from ..data.staged import check_planned
from .tasks import PATIENCE, Wait, maybe_awaited, retry_while_away
from ..data.textbatch import batch_of, check_kind, lacking

if TYPE_CHECKING:
    from ..data.contract import Advantage, RunStatus

_log = logging.getLogger("meander")

_T = TypeVar("_T")

COUNTED = ("complete", "partial")
"""The statuses of groups that have advantages."""
EMPTY = ("raise", "give")
"""What becomes of a named batch of which no group counts."""

LogProbs = Callable[[Batch], npt.ArrayLike | Awaitable[npt.ArrayLike]]
"""A function, or coroutine function, of a batch: the log-probs of the trainer's policy, in the shape of those of the
batch."""


class EmptyBatch(RuntimeError):
    """No group of a named batch counts. left_out has the reason of each group by uid, cursor is where reading goes on
    behind the batch; under a name it goes on there by itself."""

    def __init__(self, message: str, left_out: Mapping[str, str] = {}, cursor: str = ""):
        super().__init__(message)
        self.left_out, self.cursor = dict(left_out), cursor


def why_not(advantage: AnyEvent) -> str:
    """Why a group does not count: its status; where it failed, with the first error in it."""
    errors = (*(m.get("error") for m in advantage["members"]), advantage.get("error"))
    more = [str(e) for e in errors if e][:1] if advantage["status"] == "failed" else []
    return ": ".join([f"status {advantage['status']}", *more])[:160]


def _parts(group: Group) -> list[Group]:
    """The groups of its stages; itself, of samples with one."""
    return list(group.stages.values()) or [group]


@dataclasses.dataclass
class Health:
    """What a reader has seen. left_out counts groups that are in no batch, and samples that have an advantage but
    nothing to train on, by the reason; faulty counts events by what is wrong with them."""

    groups: int = 0
    samples: int = 0
    """Samples of the groups that were read: those that have an advantage, and something to train on."""
    unscored: int = 0
    """Tokens of which the server that drew them gave no log-prob: response_mask leaves them out."""
    batches: int = 0
    """Batches that were made of them."""
    left_out: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faulty: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    first_ratio: Ratio | None = None
    """The ratio of the first batch, where the reader has log-probs to check it with."""
    waiting: int = 0
    """Results that are stored and have not been read yet."""
    last: float = 0
    """When the last result came: Unix seconds; 0: none yet."""
    waited: float = 0
    """Seconds that a reader of batches waited for results."""
    fetched: float = 0
    """Seconds that it took to fetch and decode what they name."""

    def __str__(self) -> str:
        parts = [
            f"{self.batches} batches, {self.groups} groups, {self.samples} samples read, {self.waiting} results waiting"
        ]
        for what, counter in (("left out", self.left_out), ("faulty", self.faulty)):
            parts += [f"{what}: {n} x {why}" for why, n in counter.most_common(3)]
        if self.unscored:
            parts.append(f"{self.unscored} tokens without a log-prob")
        if self.first_ratio is not None:
            parts.append(f"first ratio {self.first_ratio.max_abs:.2g} from 1")
        return "; ".join(parts)


class Source(Protocol):
    """What a reader needs of a Client."""

    nc: NATS
    """The connection."""
    js: JetStreamContext
    """JetStream of it."""
    mark: str
    """What the names of its durable consumers begin with; empty without roles."""

    async def status(self, run: str, timeout: float = 10) -> RunStatus:
        """As of Client."""

    async def group(
        self, run: str, uid: str, advantage: Advantage | None = None, *, logits: bool = False, whole: bool = True,
        stage: str = ""
    ) -> Group:
        """As of Client."""

    async def _results(self, run: str, uids: Sequence[str]) -> dict[str, Advantage]:
        """As of Client."""

    async def complete(self, samples: Sequence[Sample], logits: bool = False) -> None:
        """As of Client."""


async def check_stage(client: Source, run: str, stage: str) -> bool:
    """Whether a run has groups, by the newest of which a stage is checked. EventError: it does not train the stage."""
    subject = f"{PREFIX}group.{run}.*"
    try:
        ask = partial(client.js.get_last_msg, "MDR_GROUPS", subject)
        m = await retry_while_away(ask, PATIENCE)
    except NotFoundError:
        return False
    check_planned(fitting(m.data or b"", GROUP, m.subject or "", "run", "uid"), stage)
    return True


class _Reader:
    """What readers of groups and readers of batches share."""

    def __init__(
        self, client: Source, run: str, name: str, kind: str, after: str, shared: bool, keep: Keep | None, faults: str,
        timeout: float, follow: bool, logits: bool, empty: str = "", whole: bool = True, stage: str = "",
    ):
        if faults not in ("raise", "skip"):
            raise ValueError(f"faults: {faults!r}; must be raise or skip")
        self.empty = empty or ("raise" if faults == "raise" else "give")
        if self.empty not in EMPTY:
            raise ValueError(f"empty: {empty!r}; must be {' or '.join(EMPTY)}")
        self.client, self.run, self.keep, self.faults = client, run, keep, faults
        self.timeout, self.follow = timeout, follow
        self.cursor = Cursor(client.nc, run, name, results(run, kind), after, shared, client.mark)
        self.logits, self.whole, self.stage = logits, whole, stage
        self.health = Health()
        self.more: Callable[[], Awaitable[str]] | None = None  # what else to say while nothing comes
        self._unchecked = bool(stage) and faults == "raise"
        self._left: dict[str, str] = {}  # why groups and samples are left out, since the last batch

    async def _message(self) -> Msg | None:
        """Returns the next event; None at the end of the stored ones if the reader does not follow."""
        wait = Wait(self.timeout, self._nothing)
        while True:
            if not self.cursor.consumer:
                await retry_while_away(self.cursor.open, max(self.timeout, PATIENCE))
            if not self.follow and self.cursor.waiting == 0:
                return None
            if self._unchecked and await check_stage(self.client, self.run, self.stage):
                self._unchecked = False
            asked = time.monotonic()
            m = await self.cursor.next()
            self.health.waited += time.monotonic() - asked
            self.health.waiting = self.cursor.waiting
            if m is not None:
                self.health.last = time.time()
                return m
            await wait.check()

    async def _nothing(self, seconds: float) -> str:
        return f"run {self.run}: nothing came for {seconds:.3g} s; {await self._waits()}"

    async def _waits(self) -> str:
        """Says what a reader waits for, by the status of the run."""
        try:
            parts = [status_text(await self.client.status(self.run, timeout=2))]
        except (ValueError, TimeoutError, nats.errors.Error) as e:
            parts = [f"no word of how the run is doing: {str(e) or type(e).__name__}"]
        parts += [f"left out: {n} x {why}" for why, n in self.health.left_out.most_common(3)]
        return ", ".join(parts + [await self.more()] if self.more else parts)

    async def _group(self, run: str, uid: str, place: str, advantage: Advantage | None = None) -> Group | None:
        """Returns a group that counts; None for one that is left out, which is counted and logged."""
        try:
            named = {"stage": self.stage} if self.stage else {}
            read = partial(self.client.group, run, uid, advantage, logits=self.logits, whole=self.whole, **named)
            group = await retry_while_away(read, max(self.timeout, PATIENCE))
            group.cursor = place
            status = group.advantage["status"]
            why = "" if status in COUNTED else why_not(group.advantage)
            if not why and self.keep is not None:
                why = await maybe_awaited(self.keep(group))
            if not why:
                self._usable(group)
        except EventError as e:
            if self.faults == "raise":
                raise
            why = f"fault: {type(e).__name__}"
            _log.warning("group %s: %s", uid, e)
        if why:
            self._leave(uid, why)
            return None
        for g, x in ((g, s) for g in _parts(group) for s in g.samples if s.advantage is not None):
            if why := g.lacks(x):
                self._leave(f"{uid} #{x.member['sample_index']}", f"sample: {why}")
        if self.stage and not group.samples:
            self._leave(uid, f"no sample ran stage {self.stage!r}")
        self.health.groups += 1
        self.health.samples += len(group.trained)
        self.health.unscored += sum(s.text.unscored for g in _parts(group) for s in g.trained if s.text is not None)
        return group

    def _usable(self, group: Group) -> None:
        """Raises EventError for a group whose samples are not what the reader's arrays are made of."""

    def _leave(self, name: str, why: str) -> None:
        self.health.left_out[why] += 1
        self._left[name] = why
        _log.log(logging.WARNING if why.startswith("status failed") else logging.INFO, "%s is left out: %s", name, why)

    async def _dropped(self, event: Event, place: str) -> dict[str, str]:
        """Counts the groups of a batch that do not count, and returns why, by uid. EmptyBatch: all of them."""
        left: dict[str, str] = {}
        for uid in event.get("dropped") or ():
            subject = f"{PREFIX}advantage.{event['run']}.{uid}"
            ask = partial(self.client.js.get_last_msg, "MDR_ADVANTAGES", subject)
            try:
                m = await retry_while_away(ask, max(self.timeout, PATIENCE))
                left[uid] = why_not(fitting(m.data or b"", ADVANTAGE, subject, "run", "uid"))
            except (NotFoundError, EventError):
                left[uid] = "its result is no longer stored"
            self._leave(uid, left[uid])
        if not event["uids"] and self.empty == "raise":
            reasons = "; ".join(f"{n} x {why}" for why, n in collections.Counter(left.values()).most_common(3))
            what = f"run {event['run']}: batch {event['batch']}: none of its {len(left)} groups counts: {reasons}"
            raise EmptyBatch(what, left, place)
        return left

    def _garbage(self, m: Msg, e: EventError) -> None:
        # Whatever a stranger stored: the services take it off the stream, and its true event comes.
        self.health.faulty[str(e).removeprefix(m.subject + ": ")[:80]] += 1
        _log.warning("skipped %s", e)

    async def close(self) -> None:
        """Ends the reading; a named cursor stays."""
        await self.cursor.close()

    async def _next(self) -> tuple[int, Group | None] | None:
        """The next group, with its place in the stream; no group where there was none to read."""
        m = await self._message()
        if m is None:
            return None
        seq = m.metadata.sequence.stream
        try:
            advantage = fitting(m.data, ADVANTAGE, m.subject, "run", "uid")
        except EventError as e:
            self._garbage(m, e)
            return seq, None
        return seq, await self._group(advantage["run"], advantage["uid"], self.cursor.place(seq), advantage)


class Groups(_Reader):
    """Groups as they close. Iterating on, or done(), acknowledges the one before."""

    def __init__(self, client: Source, run: str, name: str, **options: Any):
        super().__init__(client, run, name, "advantage", **options)

    def __aiter__(self) -> AsyncIterator[Group]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Group]:
        try:
            while (read := await self._next()) is not None:
                seq, group = read
                if group is not None:
                    yield group
                await self.cursor.done(seq)
        finally:
            await self.close()

    async def done(self, group: Group) -> None:
        """Acknowledges the group and those before: it does not come again."""
        await self.cursor.done(int(group.cursor.partition("@")[0]))


class Batches(_Reader):
    """Batches of whole groups. Iterating on, or done(), acknowledges the one before."""

    def __init__(
        self, client: Source, run: str, name: str, groups: int, log_probs: LogProbs | None, tolerance: float,
        log_prob_kind: str, **options: Any,
    ):
        super().__init__(client, run, name, "advantage" if groups else "batch", **options)
        check_kind(log_prob_kind)
        if log_probs is not None and not self.whole:
            raise ValueError("log_probs: needs whole=True; of micro-batches, check(log_probs) does it")
        self.size, self.log_probs, self.tolerance, self.log_prob_kind = groups, log_probs, tolerance, log_prob_kind

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Batch]:
        try:
            while (read := await self._timed(self._fill() if self.size else self._whole())) is not None:
                seq, batch = read
                if batch is not None:
                    await self._check(batch)
                    self.health.batches += 1
                    yield batch
                await self.cursor.done(seq)
        finally:
            await self.close()

    async def _timed(self, reading: Awaitable[_T]) -> _T:
        """Counts what was not spent waiting as fetched."""
        began, waited = time.monotonic(), self.health.waited
        out = await reading
        self.health.fetched += time.monotonic() - began - (self.health.waited - waited)
        return out

    def _usable(self, group: Group) -> None:
        for s in (s for g in _parts(group) for s in g.trained):
            if s.text is not None and (why := lacking(s.text, self.log_prob_kind)):
                raise EventError(f"{group.uid} #{s.member['sample_index']}: {why}")

    async def _fill(self) -> tuple[int, Batch | None] | None:
        """As many groups as were asked for."""
        groups: list[Group] = []
        seq = 0
        while len(groups) < self.size:
            read = await self._next()
            if read is None:
                if groups:
                    _log.info(
                        "run %s: %d groups are left, too few for a batch of %d; they are not acknowledged", self.run,
                        len(groups), self.size
                    )
                return None
            seq, group = read
            if group is not None and not group.trained:
                if group.uid not in self._left:
                    self._leave(group.uid, "no sample with an advantage and something to train on")
            elif group is not None:
                groups.append(group)
        return seq, self._batch(groups, "", self.cursor.place(seq))

    async def _whole(self) -> tuple[int, Batch | None] | None:
        """A batch as its prompts named it. One whose groups are all left out has size 0. EmptyBatch: none counts."""
        m = await self._message()
        if m is None:
            return None
        seq = m.metadata.sequence.stream
        place = self.cursor.place(seq)
        try:
            event = fitting(m.data, BATCH, m.subject, "run", "batch")
        except EventError as e:
            self._garbage(m, e)
            return seq, None
        try:
            await self._dropped(event, place)
        except EmptyBatch:
            await self.cursor.done(seq)  # it is said once
            raise
        run, uids = event["run"], event["uids"]
        said = await retry_while_away(partial(self.client._results, run, uids), max(self.timeout, PATIENCE))
        groups = [g for uid in uids if (g := await self._group(run, uid, place, said.get(uid))) is not None]
        return seq, self._batch(groups, event["batch"], place)

    def _batch(self, groups: list[Group], name: str, place: str) -> Batch | None:
        """The groups as a batch; None where they are none, which is counted and said."""
        left, self._left = self._left, {}
        try:
            batch = batch_of(groups, name, place, self.log_prob_kind, self.client)
            batch.left_out = left
            return batch
        except EventError as e:
            if self.faults == "raise":
                raise
            self.health.left_out["fault: images and texts in one batch"] += len(groups)
            _log.warning("%s", e)
            return None

    async def _check(self, batch: Batch) -> None:
        """The ratio of the first batch must be 1: its log-probs, made again with the same weights, are those of the
        sampler."""
        if self.log_probs is None or self.health.first_ratio is not None or not batch.size:
            return
        new = await maybe_awaited(self.log_probs(batch))
        self.health.first_ratio = batch.check(new, self.tolerance)
        _log.info(
            "run %s: log-probs of the first batch agree, the ratio is %.3g from 1", self.run,
            self.health.first_ratio.max_abs
        )

    async def done(self, batch: Batch) -> None:
        """Acknowledges the batch and those before: it does not come again."""
        await self.cursor.done(int(batch.cursor.partition("@")[0]))
