"""Log-probs of stored samples under another model, a teacher or a reference, which `meander teacher` serves."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgpack
import nats.errors
import numpy as np
import numpy.typing as npt
from nats.aio.client import Client as NATS

from . import traces
from ..data.batch import Batch, Sample
from ..data.events import NUMBER, PREFIX, STAGE, TENSOR, AnyEvent, Event, EventError, Maybe, decode, fault, tensor
from .tasks import together
from ..data.textbatch import KINDS, TextBatch

_Array = npt.NDArray[Any]

_PATIENCE = 30  # seconds before the same is asked a second time, later twice as many: a request may be lost
_AT_ONCE = 16  # requests of a batch in flight
_PAUSE = 0.2  # seconds before a busy teacher is asked again
_TENSORS = (
    "log_probs", "processed_log_probs", "log_sum_exps", "entropies", "top_ids", "top_logits", "velocities",
)  # fmt: skip
_REPLY: Event = {
    "error": Maybe(str), "code": Maybe(str), "retry": Maybe(bool), "model": str, "weights_digest": str, "backend": str,
    "step_indices": Maybe([int]), "step_log_probs": Maybe([NUMBER]), "steps_left_out": Maybe([int]),
    "log_prob_kind": Maybe(str),
    **{name: Maybe(TENSOR) for name in _TENSORS},
}  # fmt: skip


class NoTeacher(LookupError):
    """No teacher of that name answers."""


class Unscored(ValueError):
    """A teacher gives a sample no log-probs. code is the class of the reason: unknown_sample, gone, unfit, invalid or
    failed."""

    def __init__(self, teacher: str, reply: Event):
        super().__init__(f"teacher {teacher}: {reply['error']}")
        self.code = str(reply.get("code", ""))


@dataclasses.dataclass
class TeacherReply:
    """What the model of a teacher gives a sample; weights_digest names its weights, backend what computed.

    Of a text of n tokens, 0 where a token was given: numbers [n] float32 by name, nats: log_probs are before
    temperature and filters, processed_log_probs after those of the sample (-inf where they leave the token out),
    log_sum_exps and entropies go with log_probs. top_ids [n, k] int32 and top_logits [n, k] float32 are the likeliest
    tokens, falling: top_logits - log_sum_exps[:, None] are log-probs.

    Of an image: steps has the log-prob of each stochastic step, by its index, of log_prob_kind; steps_left_out are
    those whose states were not kept. velocities [k, S, C] float32 are what these are computed with, in the order of
    steps, where substeps asked for them.
    """

    model: str
    weights_digest: str
    backend: str
    """What computed it, such as cpu."""
    numbers: dict[str, npt.NDArray[np.float32]]
    top_ids: npt.NDArray[np.int32] | None
    top_logits: npt.NDArray[np.float32] | None
    steps: dict[int, float]
    steps_left_out: list[int]
    log_prob_kind: str
    velocities: npt.NDArray[np.float32] | None = None


class Teachers:
    """The calls of a client that ask teachers."""

    if TYPE_CHECKING:
        nc: NATS

        async def load(self, t: Event, subject: str = "") -> None: ...

    async def teacher_reply(
        self, teacher: str, run: str, uid: str, sample_index: int, top_k: int = 0, timeout: float = 60,
        substeps: int = 0,
    ) -> TeacherReply:
        """Asks the teacher of that name for the log-probs of a stored sample under its model, of texts with the top_k
        likeliest tokens, of images with velocities: the mean ones of so many steps inside each step, where substeps is
        above 0.

        NoTeacher: none of that name answers. Unscored: it cannot score that sample. TimeoutError: no answer in time.
        """
        subject, end = f"{PREFIX}teacher.{teacher}", time.monotonic() + timeout
        body = msgpack.packb(
            {
                "v": 1, "name": teacher, "run": run, "uid": uid, "sample_index": int(sample_index), "stage": STAGE,
                "top_k": top_k, "substeps": substeps,
            }
        )
        patience = _PATIENCE / 2
        while True:
            patience *= 2
            try:
                wait = max(0.001, min(patience, end - time.monotonic()))
                m = await self.nc.request(subject, body, wait, headers=traces.trace_context() or None)
            except nats.errors.NoRespondersError:
                raise NoTeacher(
                    f"no teacher {teacher} answers on {subject}: `meander teacher --name {teacher} --model ...` "
                    f"starts one"
                ) from None
            except nats.errors.TimeoutError:
                if time.monotonic() < end:
                    continue
                raise TimeoutError(f"teacher {teacher}: no answer in {timeout:g} s") from None
            reply = decode(m.data)
            if wrong := fault(reply, _REPLY):
                raise EventError(f"teacher {teacher}: {wrong}")
            if not reply.get("retry"):
                break
            patience /= 2
            if time.monotonic() + _PAUSE > end:
                raise TimeoutError(f"teacher {teacher}: {reply['error']}, for {timeout:g} s")
            await asyncio.sleep(_PAUSE)
        if reply.get("error"):
            raise Unscored(teacher, reply)
        arrays: dict[str, _Array] = {}
        for name in _TENSORS:
            if reply.get(name):
                await self.load(reply[name])
                arrays[name] = tensor(reply[name])
        top_ids, top_logits, velocities = (arrays.pop(n, None) for n in ("top_ids", "top_logits", "velocities"))
        steps = dict(zip(reply.get("step_indices") or [], map(float, reply.get("step_log_probs") or []), strict=True))
        return TeacherReply(
            reply["model"], reply["weights_digest"], reply["backend"], arrays, top_ids, top_logits, steps,
            reply.get("steps_left_out") or [],
            reply.get("log_prob_kind") or "", velocities)  # fmt: skip

    async def teacher_replies(
        self, teacher: str, batch: Batch, timeout: float = 60, substeps: int = 0
    ) -> list[TeacherReply]:
        """What teacher_reply gives the samples of a whole batch, in their order.

        Errors are those of teacher_reply, with timeout for each sample; EventError: replicas of the teacher have
        different weights.
        """
        free = asyncio.Semaphore(_AT_ONCE)

        async def ask(t: AnyEvent) -> TeacherReply:
            async with free:
                return await self.teacher_reply(
                    teacher, t["run"], t["uid"], t["sample_index"], timeout=timeout, substeps=substeps
                )

        replies = await together(ask(s.trajectory) for s in batch.samples if s.trajectory)
        if len(digests := sorted({r.weights_digest for r in replies})) > 1:
            raise EventError(
                f"teacher {teacher}: replicas have different weights: {', '.join(d[:16] for d in digests)}"
            )
        return replies

    async def teacher_log_probs(self, teacher: str, batch: Batch, timeout: float = 60) -> npt.NDArray[np.float64]:
        """The log-probs of a whole batch under the model of a teacher: of the shape of batch["log_probs"], of the same
        kind and 0 in the same places, so that the two can be subtracted.

        Errors are those of teacher_replies; EventError: a state of a stochastic step was not kept.
        """
        replies = await self.teacher_replies(teacher, batch, timeout)
        out = np.zeros(batch["log_probs"].shape)
        for row, s, reply in zip(out, batch.samples, replies, strict=True):
            values = _answers(batch, s, reply) if isinstance(batch, TextBatch) else _steps(s, reply)
            row[: len(values)] = values
        return out

    async def teacher_velocities(
        self, teacher: str, batch: Batch, substeps: int = 1, timeout: float = 60
    ) -> npt.NDArray[np.float32]:
        """The velocities of a teacher in the trained steps of a whole batch of images: [B, W, S, C], as
        batch["latents"], 0 where mask is False. With 1 those at the states before the steps, with more the mean ones of
        so many steps inside each.

        Errors are those of teacher_log_probs.
        """
        return velocities(batch, await self.teacher_replies(teacher, batch, timeout, substeps))


def velocities(batch: Batch, replies: Sequence[TeacherReply]) -> npt.NDArray[np.float32]:
    """The velocities of replies to the samples of a batch: see teacher_velocities."""
    out = np.zeros(batch["latents"].shape, np.float32)
    for row, s, reply in zip(out, batch.samples, replies, strict=True):
        _steps(s, reply)
        found, places = reply.velocities, list(reply.steps)
        if found is None or found.shape != (len(places), *row.shape[1:]):
            raise EventError(
                f"{s.member['sample_index']}: velocities {None if found is None else list(found.shape)}; the teacher "
                f"must give {[len(places), *row.shape[1:]]}"
            )
        for w, step in enumerate(s.trained):
            row[w] = found[places.index(step["step_index"])]
    return out


def _answers(batch: TextBatch, sample: Sample, reply: TeacherReply) -> _Array:
    """What a reply says of the tokens behind the prompt."""
    if sample.text is None or (
        numbers := reply.numbers.get(KINDS[batch.log_prob_kind])
    ) is None or len(numbers) != len(sample.text.ids):
        raise EventError(f"{sample.member['sample_index']}: the teacher's numbers are not those of the sample's tokens")
    return numbers[sample.text.prompt_length :]


def _steps(sample: Sample, reply: TeacherReply) -> list[float]:
    """What a reply says of the stochastic steps."""
    indices = [s["step_index"] for s in sample.trained]
    if lacking := [i for i in indices if i not in reply.steps]:
        raise EventError(
            f"{sample.member['sample_index']}: no log-probs of the steps {lacking}: keep their states with "
            f"return_step_indices"
        )
    return [reply.steps[i] for i in indices]
