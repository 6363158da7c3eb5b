"""A position among the results of a run, and how a reader continues from it after a crash."""

from __future__ import annotations

import asyncio
import calendar
import contextlib
import dataclasses
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timezone
from typing import Any

import nats
from nats.aio.client import Client as NATS
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import PubAck, RawStreamMsg
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from .._version import __version__
from ..data.events import PREFIX, Event, EventError, Gone, name_of
from .tasks import PATIENCE, retry_while_away

_log = logging.getLogger("meander")

STREAM = "MDR_ADVANTAGES"
"""The stream of results: those of groups and of batches."""
_PAUSE = 0.5  # of the time of the next try, before a server that is not ready is asked again
_SLICE = 2.0  # seconds that one request waits for what comes
_HOUR = 3600
_SHARED_WAIT, _HEARTBEAT = 60, 15  # seconds after which another process gets what one holds and says nothing of
CONSUMER_TAKEN = 10148
"""The server's error for a consumer that is there."""


class Taken(EventError):
    """Another process now reads under the same name."""


class NoStreams(ValueError):
    """No pipeline has been up on the server, so there is nothing to read."""


class CursorError(ValueError):
    """A cursor is from another store, or events after it are gone."""


def api_prefix(nc: NATS) -> str:
    """What the subjects of the JetStream API of a connection begin with."""
    return str(getattr(nc, "js_api", "$JS.API"))


def entry_subject(nc: NATS, bucket: str, key: str) -> str:
    """The subject on which to write a key of a bucket: a domain and an imported API have it below their own prefix."""
    prefix = api_prefix(nc)
    return f"{'' if prefix == '$JS.API' else prefix + '.'}$KV.{bucket}.{key}"


async def api(nc: NATS, subject: str, body: object = None) -> dict[str, Any]:
    """Makes a request of the JetStream API. NotFoundError, APIError: the server refuses it."""
    data = b"" if body is None else json.dumps(body).encode()
    reply = await nc.request(f"{api_prefix(nc)}.{subject}", data, timeout=5)
    answer = json.loads(reply.data)
    if "error" in answer:
        raise APIError.from_error(answer["error"])
    return dict(answer)


class PatientJetStream(JetStreamContext):
    """JetStream of a connection. A busy server, or one that starts again, is asked for a stored message up to four
    times: for 5, 10, 20 and 40 s; where it answers at once that it is not ready, after 5, 10 and 20 s. With cloudevents
    each event that it publishes has the attributes of CloudEvents."""

    def __init__(self, nc: NATS, cloudevents: bool = False):
        prefix = api_prefix(nc)
        super().__init__(nc, prefix=prefix)
        self._cloudevents = cloudevents
        self._slower = {seconds: nc.jetstream(timeout=seconds, prefix=prefix) for seconds in (10, 20, 40)}

    async def get_msg(self, *args: Any, **named: Any) -> RawStreamMsg:
        ask: Callable[..., Awaitable[RawStreamMsg]] = super().get_msg
        for seconds, slower in self._slower.items():
            try:
                return await ask(*args, **named)
            except asyncio.TimeoutError:
                pass
            except (ServiceUnavailableError, nats.errors.NoRespondersError):
                _log.warning("JetStream of the server is not ready or not on; asked again in %g s", seconds * _PAUSE)
                await asyncio.sleep(seconds * _PAUSE)
            ask = slower.get_msg
        return await ask(*args, **named)

    async def publish(self, subject: str, payload: bytes = b"", *args: Any, **named: Any) -> PubAck:
        """As the library's, with the attributes of an event. Headers are given by name."""
        headers = named.get("headers")
        if self._cloudevents and headers and "Mdr-Type" in headers:
            named["headers"] = {**_cloud_event(subject, headers), **headers}
        return await super().publish(subject, payload, *args, **named)


def _cloud_event(subject: str, headers: Mapping[str, str]) -> dict[str, str]:
    """The attributes of an event as the services write them: see CloudEvents in the guide."""
    kind, _, version = headers["Mdr-Type"].partition("/")
    return {
        "ce-specversion": "1.0", "ce-type": f"io.github.meander-rl.{kind}.v{version}", "ce-source": "/meander-python",
        "ce-id": headers.get("Nats-Msg-Id") or secrets.token_hex(16), "ce-subject": subject.removeprefix(PREFIX),
        "ce-time": datetime.now(timezone.utc).isoformat(), "ce-datacontenttype": headers["Content-Type"],
    }  # fmt: skip


def _nanoseconds(stamp: str) -> int:
    """Returns Unix nanoseconds of a time in the server's format, 2026-11-22T10:00:00.123456789Z."""
    m = re.fullmatch(r"(\d+-\d+-\d+T\d+:\d+:\d+)(?:\.(\d+))?Z", stamp)
    if m is None:
        raise EventError(f"time {stamp!r} of the server")
    return calendar.timegm(time.strptime(m[1], "%Y-%m-%dT%H:%M:%S")) * 10**9 + int((m[2] or "0").ljust(9, "0"))


@dataclasses.dataclass(frozen=True)
class Place:
    """A position: a sequence of the stream, and when the stream was created. A recreated stream counts from 1 again."""

    seq: int
    """The sequence of a message; 0 is before the first."""
    made: int
    """When the stream was created, Unix nanoseconds."""

    def __str__(self) -> str:
        return f"{self.seq}@{self.made}"


class Cursor:
    """The messages of one subject filter, in the order in which they were stored, each once.

    With a name the server keeps the position: acknowledged messages do not come again, to this process or a later one,
    and retention waits for the reader. A later process that opens the same name continues after the last acknowledged
    message, and this one gets Taken. shared: processes that open the same name share the messages; those of a dead
    process go to another. Without a name the caller keeps the position, and after says where to continue.
    """

    def __init__(
        self, nc: NATS, run: str, name: str, filter_subject: str, after: str = "", shared: bool = False,
        mark: str = "",
    ):
        for field, value in (("run", run), ("name", name)):
            if value or field != "name":
                name_of(field, value)
        if shared and (not name or after):
            raise ValueError("shared: needs a name, and no cursor to start after")
        self.nc, self.js, self.filter, self.name, self.after, self.shared = nc, PatientJetStream(
            nc), filter_subject, name, after, shared
        # A user who knows a consumer's name can change it; the mark keeps others from guessing the name. Older releases
        # had no mark.
        self.stems = [f"reader-{mark}-{run}-{name}-", f"reader-{run}-{name}-"] if mark else [f"reader-{run}-{name}-"]
        self.consumer = self.mark = ""  # its name, and what tells it apart from a later one of that name
        self.made = self.last = 0  # when the stream was created; the last sequence that came
        self.expected = 0  # sequence of the next message in this consumer
        self.waiting = 0  # how many more are stored
        self.floor = self.delivered = 0  # all up to this sequence is acknowledged, sent, as of the last inspection
        self.redelivered = 0
        self.in_flight: dict[int, Msg] = {}
        self._sub: Any = None
        self._beat: asyncio.Task[None] | None = None

    def place(self, seq: int) -> str:
        """Returns the cursor of a message that came."""
        return str(Place(seq, self.made))

    async def _info(self) -> dict[str, Any]:
        try:
            return await api(self.nc, f"STREAM.INFO.{STREAM}")
        except NotFoundError:
            url = self.nc.connected_url
            raise NoStreams(
                f"{self.filter}: no pipeline has been up on {url.netloc.rpartition('@')[2] if url else 'this server'}: "
                "start `meander up` there, or connect to the server of one; then read again"
            ) from None

    def _start(self, info: dict[str, Any]) -> int:
        """Returns the sequence after the cursor that the caller gave; 0 without one."""
        if not self.after:
            return 0
        m = re.fullmatch(r"(\d+)@(\d+)", self.after)
        if m is None:
            raise CursorError(f"after: {self.after!r}; must be the cursor of a batch or group that was read")
        seq, state = int(m[1]), info["state"]
        if int(m[2]) != self.made or seq > state["last_seq"]:
            raise CursorError(
                f"after: {self.after!r} is of another store than this one, which was made at {info['created']}; start "
                f"without it"
            )
        if seq + 1 < state["first_seq"]:
            raise CursorError(f"after: {seq + 1} to {state['first_seq'] - 1} are gone; what is left begins without it")
        return seq + 1

    async def open(self) -> None:
        """Finds or makes the consumer. Messages in flight are delivered again so that they can be acknowledged; they
        are not yielded again."""
        info = await self._info()
        self.made = _nanoseconds(info["created"])
        start = min(self.in_flight, default=self.last + 1) if self.last else self._start(info)
        if not self.name:
            made = await self._create("", start)
        elif self.shared:
            made = await self._join()
        else:
            made = await self._take(start)
        self.consumer, self.mark, self.expected, self.waiting = made["name"], made["config"]["description"], 1, made[
            "num_pending"]
        self._sub = await self.js.pull_subscribe_bind(consumer=self.consumer, stream=STREAM)
        if self.shared and self._beat is None:
            self._beat = asyncio.create_task(self._keep())
        for seq in [] if self.shared else sorted(self.in_flight):
            (m,) = await self._sub.fetch(1, timeout=5)
            if m.metadata.sequence.stream != seq:
                raise Gone(f"event {seq} of {STREAM}, which is in flight, is no longer stored")
            self.in_flight[seq], self.expected = m, self.expected + 1

    async def _create(self, name: str, start: int) -> dict[str, Any]:
        """Makes a consumer that starts at a sequence (0: at the beginning), and returns its info."""
        config: Event = {
            "filter_subject": self.filter, "ack_policy": "explicit" if self.name else "none", "max_deliver": -1,
            "replay_policy": "instant",
            "deliver_policy": "by_start_sequence" if start else "all",
            "description": "a reader of results, " + secrets.token_hex(8),
            "metadata": {"meander.version": __version__, "meander.owner": "client", "meander.schema": "advantage/1"},
        }
        if start:
            config["opt_start_seq"] = start
        if self.name:
            wait = _SHARED_WAIT if self.shared else _HOUR
            config |= {"durable_name": name, "ack_wait": wait * 10**9, "max_ack_pending": 1 << 20}
        else:
            name = "reader-" + secrets.token_hex(8)
            config["inactive_threshold"] = _HOUR * 10**9
        config["name"] = name
        body = {"stream_name": STREAM, "config": config, "action": "create"}
        return await api(self.nc, f"CONSUMER.CREATE.{STREAM}.{name}.{self.filter}", body)

    async def _join(self) -> dict[str, Any]:
        """Returns the consumer that processes share, and makes it if it is not there."""
        while True:
            for stem in self.stems:
                if (info := await self._find(stem + "shared")) is not None:
                    return info
            try:
                return await self._create(self.stems[0] + "shared", 0)
            except APIError as e:
                if e.err_code != CONSUMER_TAKEN:
                    raise

    async def _take(self, start: int) -> dict[str, Any]:
        """Makes a new consumer that continues where the name's last one was acknowledged, and removes that one.

        At every moment one of the two exists, so a process that dies here loses no position. In the new one, messages
        that the last process had in flight come at once and in order.
        """
        while True:
            names = [stem + slot for stem in self.stems for slot in "01"]
            old = {name: info for name in names if (info := await self._find(name)) is not None}
            if len(old) > 1:  # a process died before it removed the older one
                await self._drop(min(old, key=lambda name: _nanoseconds(old[name]["created"])))
                continue
            last = next(iter(old), "")
            begin = start
            if last and not begin:
                begin = old[last]["ack_floor"]["stream_seq"] + 1
            try:
                made = await self._create(names[1] if last == names[0] else names[0], begin)
            except APIError as e:
                if e.err_code == CONSUMER_TAKEN:
                    continue  # another process did it at the same moment
                raise
            if last:
                await self._drop(last)
            return made

    async def _find(self, name: str) -> dict[str, Any] | None:
        try:
            return await api(self.nc, f"CONSUMER.INFO.{STREAM}.{name}")
        except NotFoundError:
            return None

    async def _drop(self, name: str) -> None:
        with contextlib.suppress(NotFoundError):
            await api(self.nc, f"CONSUMER.DELETE.{STREAM}.{name}")

    async def next(self) -> Msg | None:
        """Returns the next message; None if none came for a while. It waits for a lost connection."""
        if self._sub is None:
            await self.open()
        try:
            (m,) = await self._sub.fetch(1, timeout=_SLICE)
        except (nats.errors.TimeoutError, asyncio.TimeoutError):
            await self._inspect()
            return None
        except (APIError, nats.errors.Error) as e:
            if self.nc.is_closed:
                raise
            _log.debug("reader %s: %s", self.consumer, e)
            await asyncio.sleep(0.2)
            await self._inspect()
            return None
        meta = m.metadata
        seq = meta.sequence.stream
        self.waiting = meta.num_pending
        if self.shared:
            self.redelivered += meta.num_delivered > 1
        elif seq <= self.last:  # once more, after a long time
            self.expected = meta.sequence.consumer + 1
            if seq in self.in_flight:
                self.in_flight[seq] = m
            return None
        elif meta.sequence.consumer != self.expected:
            await self._reopen("a message was lost on the way")
            return None
        else:
            self.expected += 1
        self.last = max(self.last, seq)
        self.in_flight[seq] = m
        return m

    async def _inspect(self) -> None:
        """Checks that the consumer exists, has sent nothing that did not arrive, and knows of all that it has sent;
        otherwise opens a new one. Taken: another process reads under this name."""
        try:
            info = await self._find(self.consumer)
        except (nats.errors.Error, asyncio.TimeoutError):
            return  # the server is away; the connection comes back
        if self.name and not self.shared and (info is None or info["config"].get("description") != self.mark):
            raise Taken(f"another process reads as {self.name} now, or the cursor was removed")
        if info is None:
            await self._reopen("its consumer is gone")
            return
        self.waiting, self.floor = info["num_pending"], info["ack_floor"]["stream_seq"]
        self.delivered = info["delivered"]["stream_seq"]
        sent = info["delivered"]["consumer_seq"]
        if not self.shared and sent >= self.expected:
            await self._reopen("a message was lost on the way")
        elif not self.shared and sent < self.expected - 1:
            await self._reopen("the server was killed, and has forgotten what it sent")  # it would take no word of it

    async def _reopen(self, why: str) -> None:
        _log.info("reader %s: %s; reads on behind %d", self.consumer, why, self.last)
        await retry_while_away(self.open, PATIENCE)

    async def done(self, upto: int) -> None:
        """Acknowledges the messages in flight up to a sequence, and waits until the server confirms."""
        seqs = sorted(s for s in self.in_flight if s <= upto)
        if seqs and self.name and not self.shared:
            await self._inspect()
        for seq in seqs:
            if self.name:
                await self._confirm(seq)
            del self.in_flight[seq]

    async def _confirm(self, seq: int) -> None:
        """Acknowledges one message, and repeats that until the server confirms. TimeoutError: it did not in time."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                await self.in_flight[seq].ack_sync(timeout=5)
                return
            except (nats.errors.TimeoutError, asyncio.TimeoutError, nats.errors.NoRespondersError) as e:
                await self._inspect()  # raises Taken
                if seq <= self.floor:
                    return  # its answer was lost
                if self.shared and self.delivered < seq:
                    _log.warning(
                        "reader %s: the server was killed, and has forgotten that it sent %d: it sends it again",
                        self.consumer, seq
                    )
                    return
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"the server did not confirm for {PATIENCE} s what was read up to {seq}: "
                        f"{str(e) or type(e).__name__}"
                    ) from None
                _log.warning(
                    "reader %s: no word that what was read up to %d is acknowledged; asking again", self.consumer, seq
                )
                await asyncio.sleep(0.5)

    async def acknowledged(self) -> str:
        """The cursor up to which all is acknowledged, as `after` takes it; with a name alone."""
        if self._sub is None:
            await self.open()
        info = await api(self.nc, f"CONSUMER.INFO.{STREAM}.{self.consumer}")
        return self.place(info["ack_floor"]["stream_seq"])

    async def advance(self, place: str) -> None:
        """Acknowledges all up to the cursor of another reader of the same results, which need not have come here.

        CursorError: it is of another store. Taken, TimeoutError: as next and done.
        """
        if self._sub is None:
            await self.open()
        seq, _, made = place.partition("@")
        if made != str(self.made):
            raise CursorError(f"{place!r} is of another store than this one")
        end = time.monotonic() + PATIENCE
        while self.last < int(seq):
            if await self.next() is None and time.monotonic() > end:
                raise TimeoutError(f"{place} did not come to {self.name} in {PATIENCE} s; it is not acknowledged")
        await self.done(int(seq))

    async def newest(self) -> int:
        """The sequence of the last result that is stored; 0 without any."""
        try:
            return (await self.js.get_last_msg(STREAM, self.filter)).seq or 0
        except NotFoundError:
            return 0

    async def _keep(self) -> None:
        """Tells the server that the messages in flight are still being worked on."""
        while True:
            await asyncio.sleep(_HEARTBEAT)
            for m in list(self.in_flight.values()):
                with contextlib.suppress(Exception):
                    await m.in_progress()

    async def close(self) -> None:
        """Ends the subscription. The server keeps the position of a reader with a name, and forgets that of others."""
        if self._beat is not None:
            self._beat.cancel()
        if self._sub is not None:
            with contextlib.suppress(Exception):
                await self._sub.unsubscribe()
        if not self.name and self.consumer and not self.nc.is_closed:
            with contextlib.suppress(Exception):
                await api(self.nc, f"CONSUMER.DELETE.{STREAM}.{self.consumer}")


def results(run: str, kind: str) -> str:
    """Returns the subject filter of a run's advantages or batches."""
    return f"{PREFIX}{kind}.{run}.*"
