"""Updates of weights, as trainers tell them to those who look on: curves beside the rewards of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgpack
from nats.js import JetStreamContext
from nats.js.errors import APIError, NotFoundError

from ..data.events import PREFIX, TENANT, UPDATE, Event, fitting, name_of
from ..data.fields import UpdateNumbers

if TYPE_CHECKING:
    from typing_extensions import Unpack

_REFUSED = 10077  # the server's error for a subject that is taken, and for a full stream
NUMBERS = set(UpdateNumbers.__annotations__)
"""The numbers of an update."""
LEDGER = {"weights_before", "average_digest", "state", "settings", "code"}
"""What else an update may name, for `meander prove`."""


class Updates:
    """What a Client tells of updates."""

    js: JetStreamContext
    """JetStream of the connection."""

    async def update(
        self, /, run: str, lane: str, step: int, *, trainer: str = "main", tenant: str = TENANT,
        batches: Sequence[str] = (), batch_digest: str = "", policy_version: int = 0, weights_digest: str = "",
        evaluation: Mapping[str, float] | None = None, ledger: Mapping[str, Any] | None = None,
        **numbers: Unpack[UpdateNumbers],
    ) -> bool:
        """Tells an update of a lane's weights (update/1) to those who look on, and returns whether it is new: the first
        of a trainer's step counts, so a trainer that restarts tells its updates again without harm.

        step counts the trainer's updates from 1. trainer is a name where several learn from one run, tenant
        whose weights of the lane they are. numbers are those that there are, listed below; None and what none can be
        are left out: infinite ones, below 0 unless they are the loss or the KL (a grad_norm of -1 says that it is not
        known), a share above 1. ledger has, by their names in the contract, what `meander prove` walks back by:
        weights_before, average_digest, state, settings, code. batch_digest is Batch.digest().

        ValueError: a number that an update does not have, or a wrong step. EventError: the place of the update holds
        something else.
        """
        if step != int(step) or step < 0:
            raise ValueError(f"step: {step}; must be a whole number, at least 0")
        if unknown := sorted(numbers.keys() - NUMBERS):
            raise ValueError(f"{unknown[0]}: not a number of an update; it has {', '.join(sorted(NUMBERS))}")
        event: Event = {
            "v": 1, "run": name_of("run", run), "lane": name_of("lane", lane), "tenant": name_of("tenant", tenant),
            "trainer": name_of("trainer", trainer), "step": int(step), "batches": list(batches),
            "policy_version": int(policy_version), "weights_digest": weights_digest, "at": time.time_ns(),
            **{k: _number(k, v) for k, v in _known(numbers)},
        }  # fmt: skip
        if unknown := sorted((ledger or {}).keys() - LEDGER):
            raise ValueError(f"ledger: {unknown[0]}; must be of {', '.join(sorted(LEDGER))}")
        event |= {k: v for k, v in (ledger or {}).items() if v}
        if batch_digest:
            event["batch_digest"] = batch_digest
        if evaluation:
            known = {k: float(v) for k, v in sorted(evaluation.items()) if math.isfinite(v)}
            event["evaluation"] = [{"name": k, "value": v} for k, v in known.items()]
        subject = f"{PREFIX}update.{run}.{lane}.{tenant}.{trainer}.{int(step)}"
        try:
            await self.js.publish(
                subject, msgpack.packb(event),
                headers={"Mdr-Type": "update/1", "Content-Type": "application/msgpack"}
            )
            return True
        except APIError as e:
            if e.err_code != _REFUSED:
                raise
            try:
                stored = await self.js.get_last_msg("MDR_UPDATES", subject)
            except NotFoundError:
                raise e from None  # the stream is full
        fitting(stored.data or b"", UPDATE, subject, "run", "lane", "tenant", "trainer", "step")
        return False

    update.__doc__ = f"{update.__doc__}\n\n        {UpdateNumbers.__doc__}"


def _number(name: str, value: Any) -> Any:
    """A number as the event has it."""
    return int(value) if UPDATE[name].of is int else float(value)


def _known(numbers: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Those that there are, and that a reader takes."""
    there = [(k, v) for k, v in numbers.items() if v is not None and math.isfinite(v)]
    return [(k, v) for k, v in there if k in ("loss", "kl") or 0 <= v <= (1 if k == "clip_share" else math.inf)]
