"""Control of runs: to pause, resume and cancel them, to prune a sample, and to ask how they are doing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError
from nats.js.kv import KeyValue


async def keys(js: JetStreamContext, bucket: str) -> list[str]:
    """The keys of a bucket, removed ones too. (The library's own list reads all entries, and misses some that change while it looks.)"""
    prefix = f"$KV.{bucket}."
    info = await js.stream_info(f"KV_{bucket}", subjects_filter=prefix + ">")
    return sorted(subject.removeprefix(prefix) for subject in info.state.subjects or {})


class Controls:
    """What a Client can ask of a run. What intake accepts holds through restarts of everything.

    Each call returns intake's receipt, a control_receipt of the contract: `unchanged` says why nothing changed, where that
    is so, `status` how the run is doing. A refusal, of a run that is not there for instance, raises Refused. Without an
    answer in time the control is stored all the same, and TimeoutError says so.
    """

    js: JetStreamContext
    _ask: Callable[..., Awaitable[dict]]  # of the Client

    async def pause(self, run: str, reason: str = "", by: str = "python", timeout: float = 10) -> dict:
        """Lets a run wait: from the next step boundary on (see obeyed) no sampler takes steps of it."""
        return await self._control("pause", run, timeout, reason=reason, by=by)

    async def resume(self, run: str, reason: str = "", by: str = "python", timeout: float = 10) -> dict:
        """Lets a paused run go on, with the same bits as without the pause."""
        return await self._control("resume", run, timeout, reason=reason, by=by)

    async def cancel(self, run: str, uid: str = "", reason: str = "", by: str = "python", timeout: float = 10) -> dict:
        """Ends a run, or one group of it, for good: each group without a result gets one, with status cancelled."""
        return await self._control("cancel", run, timeout, uid=uid, reason=reason, by=by)

    async def prune(self, run: str, uid: str, sample_index: int, step_index: int = 0, reason: str = "", by: str = "python", timeout: float = 10) -> dict:
        """Ends one sample at the next step boundary from step_index on; its group closes without it."""
        return await self._control("prune", run, timeout, uid=uid, sample_index=sample_index, step_index=step_index, reason=reason, by=by)

    async def status(self, run: str, timeout: float = 10) -> dict:
        """How a run is doing: state (running, paused, cancelled or done), and the counts of a run_status."""
        return (await self._control("status", run, timeout, by="python"))["status"]

    async def obeyed(self, receipt: dict, timeout: float = 30) -> int:
        """Waits until no sampler that runs works any more on what a control, by its receipt, has stopped.

        Returns how many samplers there are. One that was killed counts until its entry goes, 20 s after its last word;
        TimeoutError names those that are waited for.
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

    async def samplers(self) -> list[dict]:
        """The samplers that run, each as it says that it is (presence/1)."""
        presence = await self.js.key_value("mdr-presence")
        entries = [await self._present(presence, key) for key in await keys(self.js, "mdr-presence")]
        return [p for p in entries if p.get("service") == "sampler"]

    async def _present(self, presence: KeyValue, key: str) -> dict:
        """The entry of a service that runs; empty when it has gone, or says nothing that can be read."""
        try:
            return dict(msgpack.unpackb((await presence.get(key)).value))
        except (KeyNotFoundError, ValueError, TypeError, msgpack.exceptions.UnpackException):
            return {}

    async def _control(self, action: str, run: str, timeout: float, **fields: Any) -> dict:
        event = {"v": 1, "run": run, "action": action, "at": time.time_ns(), **{k: v for k, v in fields.items() if v != ""}}
        return await self._ask(f"control.{run}", "control/1", msgpack.packb(event), timeout)
