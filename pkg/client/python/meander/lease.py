"""A lease: one trainer at a time has a lane. For the server it is a consumer, of no use but its name, which goes when
its holder is silent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import nats
from nats.aio.client import Client as NATS
from nats.js.errors import APIError, NotFoundError

from .cursor import CONSUMER_TAKEN, PATIENCE, Taken, api
from .events import PREFIX
from .tasks import retry_while_away

_log = logging.getLogger("meander")

_STREAM = "MDR_POLICIES"


class Held(ValueError):
    """Another trainer holds the lane."""


class Lease:
    """The lease of a lane. holder says who has it; a process with the same holder may take it over. expiry is for how
    many seconds of silence it lasts."""

    def __init__(self, nc: NATS, lane: str, holder: str, expiry: float = 20.0):
        self.nc, self.lane, self.holder, self.expiry = nc, lane, holder, expiry
        self.name = f"trainer-of-{lane}"
        self.mark = secrets.token_hex(8)
        self.lost = ""  # who has taken it over

    async def take(self) -> None:
        """Takes the lease, also from a process that holds it under the same name, as one that died may. Held: another
        holder has it."""
        while True:
            try:
                await self._create()
                return
            except APIError as e:
                if e.err_code != CONSUMER_TAKEN:
                    raise
            has = await self.holder_now()
            if has and has["holder"] != self.holder:
                seconds = time.time() - has["since"]
                since = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
                raise Held(
                    f"lane {self.lane}: {has['holder']} trains it, for {since}; wait until it has ended "
                    f"({self.expiry:g} s after it was killed), train another lane, or follow its run"
                )
            with contextlib.suppress(NotFoundError):
                await api(self.nc, f"CONSUMER.DELETE.{_STREAM}.{self.name}")

    async def _create(self) -> None:
        subject = f"{PREFIX}policy.{self.lane}"
        description = json.dumps({"holder": self.holder, "since": int(time.time()), "mark": self.mark})
        config = {
            "name": self.name, "description": description, "filter_subject": subject, "deliver_policy": "new",
            "ack_policy": "none", "headers_only": True, "mem_storage": True,
            "inactive_threshold": int(self.expiry * 1e9),
        }
        body = {"stream_name": _STREAM, "config": config, "action": "create"}
        await api(self.nc, f"CONSUMER.CREATE.{_STREAM}.{self.name}.{subject}", body)

    async def holder_now(self) -> dict[str, Any] | None:
        """Who has the lease: holder, since and mark; None: no trainer has it."""
        try:
            info = await api(self.nc, f"CONSUMER.INFO.{_STREAM}.{self.name}")
        except NotFoundError:
            return None
        try:
            has = json.loads(info["config"].get("description", ""))
            return {"holder": str(has["holder"]), "since": float(has["since"]), "mark": str(has["mark"])}
        except (ValueError, KeyError, TypeError):
            return {"holder": "somebody unknown", "since": time.time(), "mark": ""}

    def check(self) -> None:
        """Taken: another process has the lease now."""
        if self.lost:
            raise Taken(f"lane {self.lane}: {self.lost} trains it in another process now")

    async def _renew(self) -> None:
        """Pulls, which shows the server that the holder lives, and takes a lease that the server has lost again."""
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{_STREAM}.{self.name}"
        pull = json.dumps({"batch": 1, "expires": int(self.expiry / 8 * 1e9)}).encode()
        while True:
            with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError, APIError):
                has = await self.holder_now()
                if has is None:
                    await self._create()
                elif has["mark"] != self.mark:
                    self.lost = has["holder"]
                    _log.warning("lane %s: %s trains it in another process now", self.lane, self.lost)
                    return
                else:
                    await self.nc.request(subject, pull, timeout=self.expiry / 4)
            await asyncio.sleep(self.expiry / 16)

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator["Lease"]:
        """Holds the lease for a while. Held: as take."""
        await retry_while_away(self.take, PATIENCE)
        renewing = asyncio.create_task(self._renew())
        try:
            yield self
        finally:
            renewing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await renewing
            with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError, APIError):
                if not self.lost and (has := await self.holder_now()) and has["mark"] == self.mark:
                    await api(self.nc, f"CONSUMER.DELETE.{_STREAM}.{self.name}")
