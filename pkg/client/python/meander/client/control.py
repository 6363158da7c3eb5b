"""Control of runs: pause, resume and cancel them, prune a sample, ask for their status."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgpack
from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError, NotFoundError
from nats.js.kv import KeyValue

from ..data.events import PREFIX, AnyEvent, name_of

if TYPE_CHECKING:
    from ..data.contract import ControlReceipt, Presence, RunStatus


class Refused(ValueError):
    """Intake refused a prompt or a control. code is the class of the reason, receipt the whole answer."""

    def __init__(self, receipt: AnyEvent):
        super().__init__(receipt.get("error", ""))
        self.code = receipt.get("code", "")
        self.receipt = receipt


def status_text(status: AnyEvent) -> str:
    """Says how a run is doing in one line, by its status."""
    said = {k: v for k, v in status.items() if isinstance(v, (str, int)) and k not in ("v", "run", "waits_for") and v}
    waits = [f"waiting for {status['waits_for']}"] if status.get("waits_for") else []
    return ", ".join(waits + [f"{k} {v}" for k, v in said.items()])


_log = logging.getLogger("meander")


async def keys(js: JetStreamContext, bucket: str) -> list[str]:
    """Returns the keys of a bucket, removed ones too. (The library's own list reads all entries, and misses some that
    change meanwhile.)"""
    prefix = f"$KV.{bucket}."
    info = await js.stream_info(f"KV_{bucket}", subjects_filter=prefix + ">")
    return sorted(subject.removeprefix(prefix) for subject in info.state.subjects or {})


class Controls:
    """The controls of a Client. What intake accepts stays in force when services or the server restart.

    Each call returns intake's receipt, a contract.ControlReceipt. `unchanged` says why nothing changed, if
    nothing did, and is logged; `status` is the state of the run.

    Refused: intake refuses the control, for example because there is no such run.
    TimeoutError: no answer in time. The control is stored anyway.
    """

    js: JetStreamContext
    """JetStream of the connection."""
    _ask: Callable[..., Awaitable[Any]]  # of the Client

    async def pause(self, run: str, reason: str = "", by: str = "python", timeout: float = 10) -> ControlReceipt:
        """Pauses a run: after the next step boundary (see obeyed) no sampler works on it."""
        return await self._control("pause", run, timeout, reason=reason, by=by)

    async def resume(self, run: str, reason: str = "", by: str = "python", timeout: float = 10) -> ControlReceipt:
        """Continues a paused run. Its samples have the same bits as without the pause."""
        return await self._control("resume", run, timeout, reason=reason, by=by)

    async def cancel(
        self, run: str, uid: str = "", reason: str = "", by: str = "python", timeout: float = 10
    ) -> ControlReceipt:
        """Ends a run, or one of its groups, for ever. Each group without a result gets the status cancelled."""
        return await self._control("cancel", run, timeout, uid=uid, reason=reason, by=by)

    async def prune(
        self, run: str, uid: str, sample_index: int, step_index: int = 0, reason: str = "", by: str = "python",
        timeout: float = 10
    ) -> ControlReceipt:
        """Ends one sample at the next step boundary from step_index on; its group closes without it."""
        return await self._control(
            "prune", run, timeout, uid=uid, sample_index=sample_index, step_index=step_index, reason=reason, by=by
        )

    async def status(self, run: str, timeout: float = 10) -> RunStatus:
        """The status of a run: state (running, paused, or what became of it: complete, partial, failed, mixed, stale,
        filtered, refused or cancelled), what an open one waits for (waits_for), and the counts of a run_status."""
        receipt: Any = await self._control("status", run, timeout, by="python")
        return receipt["status"]

    async def obeyed(self, receipt: AnyEvent, timeout: float = 30) -> int:
        """Waits until no running sampler works on what a control has stopped. receipt is that of the control.

        Returns the number of samplers. A killed sampler counts for 20 s after its last heartbeat. TimeoutError names
        the samplers that have not stopped.
        """
        end = time.monotonic() + timeout
        while True:
            samplers = await self.samplers()
            late = [p["instance"] for p in samplers if p.get("controls", 0) < receipt["seq"]]
            if not late:
                return len(samplers)
            if time.monotonic() > end:
                raise TimeoutError(f"{', '.join(late)}: no word that they have come to a step boundary")
            await asyncio.sleep(0.05)

    async def samplers(self) -> list[Presence]:
        """Returns the presence entries (presence/1) of the running samplers."""
        presence = await self.js.key_value("mdr-presence")
        entries = [await self._present(presence, key) for key in await keys(self.js, "mdr-presence")]
        return [p for p in entries if p.get("service") == "sampler"]

    async def _is_there(self, run: str) -> bool:
        """Whether anything is stored of a run that a control can be about. It asks, and stores nothing."""
        for stored, subject in (
            ("MDR_PROMPTS", f"{PREFIX}prompt.{run}"), ("MDR_GROUPS", f"{PREFIX}group.{run}.*"),
            ("KV_mdr-control", f"$KV.mdr-control.{run}"),
        ):
            try:
                info = await self.js.stream_info(stored, subjects_filter=subject)
            except NotFoundError:
                continue  # no pipeline has set it up
            if info.state.subjects:
                return True
        return False

    async def _present(self, presence: KeyValue, key: str) -> Any:
        """Returns the presence entry of a service; empty if the service has gone or the entry is malformed."""
        try:
            return dict(msgpack.unpackb((await presence.get(key)).value))
        except (KeyNotFoundError, ValueError, TypeError, msgpack.exceptions.UnpackException):
            return {}

    async def _control(self, action: str, run: str, timeout: float, **fields: Any) -> ControlReceipt:
        if not await self._is_there(name_of("run", run)):
            error = f"run: {run}; there is no such run, and nothing was stored"
            raise Refused({"accepted": False, "code": "invalid", "error": error, "run": run})
        event = {
            "v": 1, "run": run, "action": action, "at": time.time_ns(), **{k: v for k, v in fields.items() if v != ""}
        }
        receipt: ControlReceipt = await self._ask(f"control.{run}", "control/1", msgpack.packb(event), timeout)
        if receipt.get("unchanged"):
            _log.warning("%s of run %s: %s", action, run, receipt["unchanged"])
        return receipt
