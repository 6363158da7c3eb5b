"""Answers the requests for scores of a pipeline by a reward function, in batches."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import msgpack
from nats.aio.msg import Msg

from ..client import traces
from ..client.client import Client
from ..client.discovery import Work, discoverable
from ..data.events import PREFIX, Event, Maybe, decode, fault, tensor
from ..client.tasks import maybe_awaited
from .reward import Busy, Fault, Group, Input, Member, Preference, Reward, Score, Scored

if TYPE_CHECKING:
    from PIL import Image

_log = logging.getLogger(__name__)

_GATHER = 0.005  # seconds in which requests that come together become one batch
_HELD = 1024  # requests that wait here
_SIDE = 8192  # pixels a side of an image at most
_LONGEST = 4000  # characters of a detail or an error
_EVERY = 10.0  # seconds between lines of progress
_LOST = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "HIP error")  # of a GPU, in torch's words
_SAMPLE: Event = {
    "image": Maybe(bytes), "frames": Maybe([bytes]), "text": Maybe(str), "messages": Maybe([{}]),
    "conditions": Maybe([{"type": str, "file": bytes}]), "step_index": Maybe(int),
    "latents": Maybe({"dtype": str, "shape": [int], "data": bytes}),
}  # fmt: skip
_MEMBER: Event = {"sample_index": int, **_SAMPLE}
_REQUEST: Event = {
    "v": int, "prompt": str, "params": Maybe({}), "metadata": Maybe({}), "group_size": Maybe(int),
    "members": Maybe([{**_MEMBER, "ref": Maybe({})}]), "missing": Maybe([{"sample_index": int, "why": str}]), **_SAMPLE,
}  # fmt: skip
_Fetch = Callable[[Event], Awaitable[bytes]]


class _DeviceLost(Exception):
    """The device computes no more in this process."""


def _opened(what: str, file: bytes) -> Image.Image:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(file), formats=["PNG", "JPEG"])
        if max(image.size) > _SIDE:
            raise ValueError(f"{image.width}x{image.height}; must be at most {_SIDE} a side")
        image.seek(getattr(image, "n_frames", 1) // 2)
        return image.convert("RGB")
    except (OSError, EOFError, ValueError, SyntaxError, Image.DecompressionBombError) as e:
        raise ValueError(f"{what}: {e}") from None


def _conditions(sample: Event) -> dict[str, list[Image.Image]]:
    out: dict[str, list[Image.Image]] = {}
    for c in sample.get("conditions") or []:
        if c["type"] != "audio":
            out.setdefault(c["type"], []).append(_opened(f"condition of type {c['type']}", c["file"]))
    return out


def _request(data: bytes) -> Event:
    request = decode(data)
    if wrong := fault(request, _REQUEST):
        raise ValueError(wrong)
    if request["v"] != 1:
        raise ValueError(f"v: {request['v']}; must be 1: this worker is of another version of meander")
    truth = request.get("ground_truth")  # any value of JSON
    asked = {
        "ground_truth": "" if truth is None else truth, "metadata": request.get("metadata") or {},
        "params": {str(k): str(v) for k, v in (request.get("params") or {}).items()},
    }
    return {**request, **asked}


def read(data: bytes, trace: Mapping[str, str] | None = None) -> list[Input]:
    """The sample of a request with a trace context; of a video that comes with frames one for each of them. ValueError:
    it has no image, or is for a whole group."""
    request = _request(data)
    if request.get("group_size"):
        raise ValueError("asked for a whole group; this function scores samples one by one: leave out --group-min")
    latents = request.get("latents")
    if request.get("text") is not None or not request.get("image") and not latents:
        raise ValueError("the sample is a text; this function scores images")
    conditions, x = _conditions(request), tensor(latents) if latents else None
    return [
        Input(_opened("image", file) if file else None, request["prompt"],  # type: ignore[arg-type]
              request["ground_truth"], request["params"], request["metadata"], conditions, trace or {},
              request.get("step_index") or 0, x)
        for file in request.get("frames") or [request.get("image")]
    ]  # fmt: skip


def _member(m: Event) -> Member:
    image, frames = m.get("image"), [_opened("frame", f) for f in m.get("frames") or []]
    return Member(
        m["sample_index"], _opened("image", image) if image else None, frames, _conditions(m), m.get("text"),
        m.get("messages") or [],
    )  # fmt: skip


async def read_group(data: bytes, fetch: _Fetch | None = None, trace: Mapping[str, str] | None = None) -> Group:
    """The group of a request with a trace context. Members that are in the store are got by fetch. ValueError: it is
    for one sample."""
    request = await asyncio.to_thread(_request, data)
    if not (size := request.get("group_size")):
        raise ValueError("asked for one sample; this function rates whole groups: ask with --group-min NAME=2")
    members: list[Event] = []
    for m in request.get("members") or []:
        if ref := m.get("ref"):
            if fetch is None:
                raise ValueError("a member is in the store, and there is none")
            whole = decode(await fetch(ref))
            if (wrong := fault(whole, _MEMBER)) or whole["sample_index"] != m["sample_index"]:
                raise ValueError(f"blob {ref['digest']:.12}: not the member {m['sample_index']} {wrong}")
            m = whole
        members.append(m)
    return Group(
        await asyncio.to_thread(lambda: [_member(m) for m in members]), request["prompt"], request["ground_truth"],
        request["params"], request["metadata"], size,
        {m["sample_index"]: m["why"] for m in request.get("missing") or []}, trace,
    )  # fmt: skip


async def answers(
    reward: Reward, requests: Sequence[bytes | Msg], batch: int = 8, fetch: _Fetch | None = None
) -> list[Event]:
    """The replies to some requests, whose samples are scored up to `batch` together, and whose groups are rated one
    after the other. What is wrong with one of them is its own error. The score of a video is the mean over the frames
    that came. fetch gets a blob, for large groups."""
    if reward.group:
        return [await _rated(reward, r, fetch) for r in requests]
    all_ = await asyncio.to_thread(_read_all, requests)
    samples = [s for r in all_ if isinstance(r, list) for s in r]
    scores: list[Scored] = []
    for i in range(0, len(samples), batch):
        scores += await _scored(reward, samples[i : i + batch])
    left = iter(scores)
    return [_failure(r) if isinstance(r, Exception) else _reply([next(left) for _ in r]) for r in all_]


def _parts(request: bytes | Msg) -> tuple[bytes, Mapping[str, str]]:
    return (request, {}) if isinstance(request, bytes) else (request.data, traces.of(request.headers))


def _read_all(requests: Sequence[bytes | Msg]) -> list[list[Input] | Exception]:
    out: list[list[Input] | Exception] = []
    for request in requests:
        try:
            out.append(read(*_parts(request)))
        except Exception as e:
            out.append(e)
    return out


async def _rated(reward: Reward, request: bytes | Msg, fetch: _Fetch | None) -> Event:
    """The reply to a request for a whole group."""
    data, trace = _parts(request)
    try:
        group = await read_group(data, fetch, trace)
        answer = await maybe_awaited(await asyncio.to_thread(reward.rate, group))
        if isinstance(answer, (str, bytes, Mapping, Set)):  # which have another order, or none
            raise RuntimeError(f"{reward.name} gives a {type(answer).__name__}; must be a list, in the members' order")
        said = list(answer)
        if said and all(isinstance(x, Preference) for x in said):
            indexes = [m.sample_index for m in group]
            return {"v": 1, "preferences": [_preference(x, indexes) for x in said]}
        if len(said) != len(group):
            raise RuntimeError(f"{reward.name} gives {len(said)} scores for {len(group)} samples")
        return {"v": 1, "scores": [_member_score(m, x) for m, x in zip(group, said)]}
    except Exception as e:
        if _is_lost(e):
            raise _DeviceLost(str(e)) from None
        if not isinstance(e, (ValueError, Busy)):
            _log.warning("a group failed", exc_info=True)
        return _failure(e)


def _preference(x: Preference, indexes: Sequence[int]) -> Event:
    if not (0 <= x.a < len(indexes) and 0 <= x.b < len(indexes) and x.a != x.b):
        raise ValueError(f"{x}; a and b must be places of two members, 0 to {len(indexes) - 1}")
    return {"a": indexes[x.a], "b": indexes[x.b], "p": float(x.p)}


def _member_score(member: Member, said: Any) -> Event:
    at = {"sample_index": member.sample_index}
    try:
        if isinstance(said, Exception):
            raise said
        x = said if isinstance(said, Score) else Score(float(said))
        if not math.isfinite(x.value):
            raise ValueError(f"the score is {x.value}; must be a finite number")
        return {**at, "score": float(x.value), "detail": str(x.detail)[:_LONGEST]}
    except Busy:
        raise
    except Exception as e:
        return {**at, "error": _failure(e)["error"]}


def _is_lost(e: Exception) -> bool:
    return type(e).__name__ == "AcceleratorError" or any(words in str(e) for words in _LOST)


async def _scored(reward: Reward, samples: list[Input]) -> list[Scored]:
    """The scores of a batch; where it fails as a whole, of each sample alone."""
    try:
        out = list(await maybe_awaited(await asyncio.to_thread(reward.score, samples)))
        if len(out) != len(samples):
            raise RuntimeError(f"{type(reward).__name__} gives {len(out)} scores for {len(samples)} samples")
        if wrong := [x for x in out if not isinstance(x, (Score, Exception))]:
            raise TypeError(f"{type(reward).__name__} gives {type(wrong[0]).__name__}; must be Score, or an exception")
        return out
    except Exception as e:
        if _is_lost(e):
            raise _DeviceLost(str(e)) from None
        if not isinstance(e, (ValueError, Busy)):
            _log.warning("%d scored together failed", len(samples), exc_info=True)
        failed = e.with_traceback(None)  # its frames keep what the batch has computed
        failed.__cause__ = failed.__context__ = None
    if len(samples) == 1:
        return [failed]
    _log.warning("the samples of a batch of %d are scored one by one: %s", len(samples), failed)
    return [x for s in samples for x in await _scored(reward, [s])]


def _reply(scores: list[Scored]) -> Event:
    if failed := [x for x in scores if isinstance(x, Exception)]:
        return _failure(failed[0])
    good = [x for x in scores if isinstance(x, Score)]
    try:
        if wrong := [x.value for x in good if not math.isfinite(x.value)]:
            raise ValueError(f"the score is {wrong[0]}; must be a finite number")
        value = math.fsum(x.value for x in good) / len(good)
        return {"v": 1, "score": value, "detail": str(good[len(good) // 2].detail)[:_LONGEST]}
    except (TypeError, ValueError, OverflowError) as e:  # of a class that a user wrote
        return _failure(e)


def _failure(e: Exception) -> Event:
    what = str(e) if isinstance(e, (ValueError, Busy)) and str(e) else f"{type(e).__name__}: {e}"
    passes = isinstance(e, (Busy, MemoryError, _DeviceLost)) or type(e).__name__ == "OutOfMemoryError"
    return {"v": 1, "error": what[:_LONGEST], "retry": passes}


class Worker:
    """Serves a reward function. batch: samples that are scored together at most. patience: seconds after which a
    request is not computed, as its answer would be too late: the timeout of the reward service."""

    def __init__(self, reward: Reward, batch: int = 8, patience: float = 30.0):
        import PIL.Image  # what is not installed is said now, not by each sample

        assert PIL.Image
        self.reward, self.batch, self.patience = reward, batch, patience
        self.scored = self.failed = 0
        self._answered = Work()
        self._took = 0.0  # seconds of the last batch
        self._sum = 0.0
        self._fetch: _Fetch | None = None
        self._queue: asyncio.Queue[tuple[Msg, float]] = asyncio.Queue(_HELD)

    async def serve(
        self, client: Client, name: str, stop: asyncio.Event, ready: Callable[[], object] = lambda: None
    ) -> None:
        """Answers for nats:NAME until stop is set; requests that came before are answered first. ready is called when
        it listens.

        PermissionError: the role may not. ConnectionError: the server has closed the connection for good. Fault: the
        device is lost; what was asked is asked again elsewhere.
        """

        async def take(msg: Msg) -> None:
            await self._queue.put((msg, time.monotonic()))

        subject, self._fetch = f"{PREFIX}score.{name}", client.blob
        async with discoverable(client.nc, "scorer", name, f"scores samples as nats:{name}", subject) as self._answered:
            sub = await client.nc.subscribe(subject, queue=name, cb=take)
            await client.nc.flush()
            if f'permissions violation for subscription to "{subject}"'.lower() in str(client.nc.last_error).lower():
                raise PermissionError(f"no permission to answer for nats:{name}; the role scorer has it (meander auth)")
            await maybe_awaited(ready())
            stopped = asyncio.ensure_future(stop.wait())
            tasks: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(self._work()), asyncio.ensure_future(self._report(client))
            ]
            try:
                for done in (await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED))[0]:
                    done.result()
                await sub.drain()  # type: ignore[no-untyped-call]
                tasks.append(asyncio.ensure_future(self._queue.join()))
                for done in (await asyncio.wait([tasks[0], tasks[-1]], return_when=asyncio.FIRST_COMPLETED))[0]:
                    done.result()
            finally:
                self._say()
                for task in (stopped, *tasks):
                    task.cancel()
                await asyncio.gather(stopped, *tasks, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            taken = [await self._queue.get()]
            await asyncio.sleep(_GATHER)
            while len(taken) < self.batch and not self._queue.empty():
                taken.append(self._queue.get_nowait())
            began, lost = time.monotonic(), None
            late = [began - came + min(self._took, self.patience / 2) > self.patience for _, came in taken]
            asked = [m for (m, _), x in zip(taken, late) if not x]
            try:
                replies = iter(await answers(self.reward, asked, self.batch, self._fetch))
            except _DeviceLost as e:
                lost, replies = e, iter([_failure(e)] * len(asked))
            self._took = time.monotonic() - began if asked else self._took / 2
            for (msg, _), x in zip(taken, late):
                why = f"waited {self.patience:g} s for this worker: start more, or raise the timeout in scorers.yaml"
                reply = {"v": 1, "error": why, "retry": True} if x else next(replies)
                self._count(reply)
                self._answered.done(began, str(reply["error"]) if "error" in reply else None)
                with contextlib.suppress(Exception):  # the connection is lost: the service asks again
                    await msg.respond(msgpack.packb(reply))
                self._queue.task_done()
            if lost:
                raise Fault(f"the device computes no more: {lost}; start this worker again")

    def _count(self, reply: Event) -> None:
        if "error" not in reply:
            self.scored += 1
            self._sum += reply.get("score", 0.0)
        else:
            self.failed += 1

    async def _report(self, client: Client) -> None:
        """Says how it goes, and ends with the connection."""
        said, at = 0, time.monotonic()
        while True:
            await asyncio.sleep(_EVERY)
            if client.nc.is_closed:
                raise ConnectionError(f"the server has closed the connection: {client.nc.last_error}")
            now = time.monotonic()
            if (count := self.scored + self.failed) > said:
                self._say(f", {(count - said) / (now - at):.1f} a second")
            said, at = count, now

    def _say(self, more: str = "") -> None:
        mean = f", mean {self._sum / self.scored:.4g}" if self.scored and not self.reward.group else ""
        _log.info("%d scored%s, %d failed, %d wait%s", self.scored, mean, self.failed, self._queue.qsize(), more)
