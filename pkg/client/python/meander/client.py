"""The client of a pipeline: NATS and msgpack, nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import math
import re
import time
from collections.abc import AsyncIterator

import msgpack
import nats
import numpy as np
from nats.js.errors import APIError, NotFoundError

from .control import Controls

_log = logging.getLogger("meander")

PREFIX = "mdr.v1."
MAX_EVENT = 8 << 20
_TOKEN = re.compile("[A-Za-z0-9_-]{1,64}")
_REFUSED = 10077  # the server's error for a subject that is taken, and for a full stream
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "U64": "<u8", "I32": "<i4", "U32": "<u4", "I16": "<i2", "U16": "<u2", "I8": "i1", "U8": "u1"}


class EventError(ValueError):
    """An event, or what it points to, is not what it says."""


class Refused(ValueError):
    """Intake refused a prompt or a control; code is the class of the reason."""

    def __init__(self, receipt: dict):
        super().__init__(receipt.get("error", ""))
        self.code = receipt.get("code", "")
        self.receipt = receipt


class Judged(ValueError):
    """The sample has a verdict of that name, another one: the first counts."""


@dataclasses.dataclass
class Sample:
    """One sample of a group: its place in the advantage event, its trajectory and the steps of the attempt that counts."""

    member: dict
    trajectory: dict | None
    steps: list[dict]

    @property
    def advantage(self) -> float | None:
        return self.member["advantage"]

    @property
    def trained(self) -> list[dict]:
        """The stochastic steps: those that have a log-prob."""
        return [s for s in self.steps if s["log_prob"] is not None]


@dataclasses.dataclass
class Group:
    """A closed group with all its samples, by sample_index."""

    advantage: dict
    samples: list[Sample]


def decode(data: bytes) -> dict:
    """One event. Extension types are no part of the contract."""
    if len(data) > MAX_EVENT:
        raise EventError(f"event of {len(data)} bytes; at most {MAX_EVENT} are read")
    event = msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_no_extension)
    if not isinstance(event, dict):
        raise EventError(f"event is a {type(event).__name__}; want a map")
    return event


def _finite(x: object) -> bool:
    """Whether all numbers of an event are finite, as the contract has them."""
    if isinstance(x, dict):
        return all(_finite(v) for v in x.values())
    if isinstance(x, list):
        return all(_finite(v) for v in x)
    return not isinstance(x, float) or math.isfinite(x)


def _no_extension(code: int, _data: bytes) -> None:
    raise EventError(f"msgpack extension {code}; events have none")


def tensor(t: dict) -> np.ndarray:
    """A tensor whose bytes are in the event (Client.load fetches the others). BF16 becomes float32."""
    data, shape = t["data"], tuple(t["shape"])
    if t["dtype"] == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    if t["dtype"] not in _DTYPES:
        raise EventError(f"dtype {t['dtype']!r}; want one of {', '.join(_DTYPES)}, BF16")
    return np.frombuffer(data, _DTYPES[t["dtype"]]).reshape(shape)


@contextlib.asynccontextmanager
async def connect(url: str = "nats://127.0.0.1:4222", token: str | None = None) -> AsyncIterator["Client"]:
    """A client of the pipeline behind a NATS server."""
    nc = await nats.connect(url, token=token, name="meander-python")
    try:
        yield Client(nc)
    finally:
        await nc.drain()


class Client(Controls):
    """Publishes prompts, verdicts and controls, and reads what the pipeline makes of them."""

    def __init__(self, nc: nats.NATS):
        self.nc = nc
        self.js = nc.jetstream()

    async def publish(self, run: str, prompt: str, timeout: float = 10, **fields) -> dict:
        """Stores a prompt and returns intake's receipt; fields are those of a Prompt, such as group_size=8.

        A refusal raises Refused. Without an answer in time the prompt is stored all the same, and TimeoutError says so,
        and what intake waits for, where nobody serves the prompt yet.
        """
        return await self._ask(f"prompt.{run}", "prompt/1", msgpack.packb({"v": 1, "prompt": prompt, **fields}), timeout)

    async def _ask(self, subject: str, kind: str, body: bytes, timeout: float) -> dict:
        """Stores an event that intake rules on, and returns its receipt."""
        inbox = self.nc.new_inbox()
        answers = await self.nc.subscribe(inbox)
        headers = {"Mdr-Reply": inbox, "Mdr-Type": kind, "Content-Type": "application/msgpack"}
        await self.js.publish(PREFIX + subject, body, headers=headers)
        waiting, end = "no intake answered in time", time.monotonic() + timeout
        try:
            while True:
                receipt = decode((await answers.next_msg(max(0.001, end - time.monotonic()))).data)
                if not receipt.get("waiting"):
                    break
                waiting = receipt["waiting"]  # another receipt says what became of it
        except nats.errors.TimeoutError:
            raise TimeoutError(f"{waiting}; the {kind.split('/')[0]} is stored") from None
        finally:
            with contextlib.suppress(Exception):
                await answers.unsubscribe()
        if not receipt["accepted"]:
            raise Refused(receipt)
        return receipt

    async def _events(self, subject: str) -> AsyncIterator[dict]:
        sub = await self.js.subscribe(subject, ordered_consumer=True)
        try:
            async for m in sub.messages:
                # Whatever a stranger stored: the services take it off the stream, and its true event comes.
                try:
                    event = decode(m.data)
                except (ValueError, msgpack.exceptions.UnpackException) as e:
                    _log.warning("skipped %s: %s", m.subject, e)
                    continue
                if _finite(event):
                    yield event
                else:
                    _log.warning("skipped %s: it has a number that is not finite", m.subject)
        finally:
            with contextlib.suppress(Exception):
                await sub.unsubscribe()

    def advantages(self, run: str) -> AsyncIterator[dict]:
        """The results of a run's groups, those stored first, then as they close."""
        return self._events(f"{PREFIX}advantage.{run}.*")

    def batches(self, run: str) -> AsyncIterator[dict]:
        """The batches of a run, those stored first, then as they close."""
        return self._events(f"{PREFIX}batch.{run}.*")

    def trajectories(self, run: str) -> AsyncIterator[dict]:
        """The trajectories of a run, those stored first, then as they are made."""
        return self._events(f"{PREFIX}trajectory.{run}.*.*")

    def steps(self, run: str) -> AsyncIterator[dict]:
        """The denoising steps of a run while they happen, of all attempts; parts of large tensors are left out."""
        return self._events(f"{PREFIX}step.{run}.*.*.*.*")

    async def group(self, run: str, uid: str) -> Group:
        """A closed group with its trajectories and steps. Digests are checked, and tensors are whole."""
        advantage = decode((await self.js.get_last_msg("MDR_ADVANTAGES", f"{PREFIX}advantage.{run}.{uid}")).data)
        source = advantage.get("source_run") or run
        samples = await asyncio.gather(*(self._sample(source, uid, m) for m in advantage["members"]))
        return Group(advantage, list(samples))

    async def _sample(self, run: str, uid: str, member: dict) -> Sample:
        try:
            m = await self.js.get_last_msg("MDR_TRAJECTORIES", f"{PREFIX}trajectory.{run}.{uid}.{member['sample_index']}")
        except NotFoundError:
            return Sample(member, None, [])
        trajectory = decode(m.data)
        steps = []
        for ref in trajectory["steps"]:
            m = await self.js.get_msg("MDR_STEPS", ref["seq"])
            if hashlib.sha256(m.data).hexdigest() != ref["digest"]:
                raise EventError(f"step {ref['seq']} of {uid} is not the one that the trajectory names")
            step = decode(m.data)
            for named in (step["latents"] or []) + (step["debug"] or []):
                await self._complete(named["tensor"], m.subject)
            if checkpoint := step.get("checkpoint"):
                await self._complete(checkpoint, m.subject)
            steps.append(step)
        return Sample(member, trajectory, steps)

    async def _complete(self, t: dict, subject: str) -> None:
        """Puts the bytes of a tensor that travelled apart into it."""
        if t.get("ref"):
            t["data"] = await self.blob(t["ref"])
        elif t.get("parts"):
            parts = t["parts"]
            pieces = []
            for k in range(parts["first"], parts["first"] + parts["count"]):
                pieces.append((await self.js.get_last_msg("MDR_STEPS", f"{subject}.{k}")).data)
            t["data"] = _checked(b"".join(pieces), parts)

    async def blob(self, ref: dict) -> bytes:
        """An object of the blob bucket, checked against its digest."""
        store = await self.js.object_store(ref["bucket"])
        return _checked((await store.get(ref["digest"])).data, ref)

    async def image(self, trajectory: dict) -> bytes:
        """The PNG file of a sample."""
        image = trajectory.get("image")
        if not image:
            raise EventError(f"sample {trajectory['sample_index']} has no image: it {trajectory['stop_reason']}")
        return image["data"] if image.get("data") else await self.blob(image["ref"])

    async def verdict(self, run: str, uid: str, sample_index: int, value: float | None, name: str = "external", error: str = "", comment: str = "", author: str = "", timeout: float = 10) -> None:
        """Gives a reward from outside: of the reward function external (name external) or external:NAME (name NAME).

        Without a value, error says why there is none. A malformed verdict raises ValueError. The first verdict of a sample
        and name counts: another raises Judged, the same once more is no error. One that is stored and malformed does not
        count; the reward service takes it away, which is waited for up to timeout seconds.
        """
        event = {"v": 1, "run": run, "uid": uid, "sample_index": sample_index, "name": name, "value": value, "at": time.time_ns()}
        for key, text in (("error", error), ("comment", comment), ("author", author)):
            if text:
                event[key] = text
        if value is not None:
            event["value"] = float(value)
        if fault := verdict_fault(event):
            raise ValueError(fault)
        subject = f"{PREFIX}verdict.{run}.{uid}.{sample_index}.{name}"
        late = time.monotonic() + timeout
        while True:
            try:
                # Without a message id: the subject keeps one verdict, and says so by an error.
                await self.js.publish(subject, msgpack.packb(event), headers={"Mdr-Type": "verdict/1", "Content-Type": "application/msgpack"})
                return
            except APIError as e:
                if e.err_code != _REFUSED:
                    raise
                first = await self._verdict(subject, e)
            if first is not None:
                if (first.get("value"), first.get("error", "")) == (event["value"], error):
                    return
                raise Judged(f"the sample has a verdict already: {first.get('error') if first.get('value') is None else first['value']}")
            if time.monotonic() > late:
                raise TimeoutError(f"{subject} holds a malformed verdict, and no reward service takes it away")
            await asyncio.sleep(0.05)

    async def _verdict(self, subject: str, refusal: APIError) -> dict | None:
        """The verdict on a subject; None when it is malformed, or gone."""
        try:
            m = await self.js.get_last_msg("MDR_VERDICTS", subject)
        except NotFoundError:
            if "per subject" in (refusal.description or ""):
                return None
            raise refusal from None  # the stream is full
        try:
            first = decode(m.data)
        except (ValueError, msgpack.exceptions.UnpackException):
            return None
        named = [str(first.get(field)) for field in ("run", "uid", "sample_index", "name")]
        return None if verdict_fault(first) or subject != f"{PREFIX}verdict." + ".".join(named) else first


def verdict_fault(event: dict) -> str:
    """What is wrong with a verdict, by the rules of its schema; empty when nothing is."""
    for field in ("run", "uid", "name"):
        if not _TOKEN.fullmatch(str(event.get(field))):
            return f"{field}: {event.get(field)!r}; must be 1 to 64 characters of A-Z a-z 0-9 _ -"
    index, value, error = event.get("sample_index"), event.get("value"), event.get("error", "")
    if type(index) is not int or not 0 <= index < 1024:
        return f"sample_index: {index!r}; must be between 0 and 1023"
    if value is None and not error:
        return "error: ''; must say why there is no value"
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
        return f"value: {value!r}; must be a finite number"
    if value is not None and error:
        return f"error: {error!r}; must be empty when there is a value"
    for field, most in (("error", 4096), ("comment", 4096), ("author", 256)):
        text = event.get(field, "")
        if not isinstance(text, str) or len(text.encode()) > most:
            return f"{field}: must be at most {most} bytes of UTF-8"
    return ""


def _checked(data: bytes, ref: dict) -> bytes:
    if len(data) != ref["size"] or hashlib.sha256(data).hexdigest() != ref["digest"]:
        raise EventError(f"{len(data)} bytes that are not those of digest {ref['digest']:.12}")
    return data
