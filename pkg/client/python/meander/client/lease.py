"""A lease: one trainer at a time has a lane. It is an entry of a bucket, which goes when its holder is silent. Who
takes it announces the lane's version again, with the next epoch, and pushes under that epoch: a process that had the
lease before, and was stopped meanwhile, is refused by the order of the versions whenever it wakes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import nats
from nats.js.errors import APIError, NotFoundError

from . import versions
from .cursor import Taken, entry_subject
from ..data.events import TENANT, Event, name_of
from .tasks import PATIENCE, retry_while_away

if TYPE_CHECKING:
    from .client import Client

_log = logging.getLogger("meander")

_BUCKET = "mdr-leases"
_EXPIRY = 20.0  # seconds, where an operator has made the bucket keep its entries for ever


class Held(ValueError):
    """Another trainer holds the lane."""


async def holder(client: Client, lane: str, tenant: str = TENANT) -> tuple[dict[str, Any] | None, int]:
    """Who has the lease of a tenant of a lane: holder, since and mark; None: no trainer has it. And the revision of
    that entry."""
    try:
        m = await client.js.get_last_msg(f"KV_{_BUCKET}", f"$KV.{_BUCKET}.{lane}.{tenant}")
    except NotFoundError:
        return None, 0
    if not m.data:  # the mark of one that was given back
        return None, m.seq or 0
    try:
        has = json.loads(m.data)
        return {"holder": str(has["holder"]), "since": float(has["since"]), "mark": str(has["mark"])}, m.seq or 0
    except (ValueError, KeyError, TypeError, OverflowError):
        return {"holder": "somebody unknown", "since": time.time(), "mark": ""}, m.seq or 0


async def check_free(client: Client, lane: str, tenant: str = TENANT) -> None:
    """Held: a trainer has the lane, or the tenant of it, to itself."""
    has, _ = await holder(client, lane, tenant)
    if has:
        of = lane if tenant == TENANT else f"{lane}.{tenant}"
        seconds = time.time() - has["since"]
        since = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        raise Held(
            f"lane {of}: {has['holder']} trains it, for {since}; wait until it has ended "
            f"({await _expiry(client):g} s after it was killed), train another lane, be another tenant of it, or "
            "follow its run"
        )


async def _expiry(client: Client) -> float:
    """For how many seconds of silence a lease lasts."""
    return (await client.js.stream_info(f"KV_{_BUCKET}")).config.max_age or _EXPIRY


class Lease:
    """The lease of a lane that samplers serve. holder says who has it; a process with the same holder may take it
    over. What is pushed with it (policy.push_policy and the others) is refused once another process has taken it. It is
    that of a tenant, main where none is given: each tenant's weights on the lane are trained on their own."""

    def __init__(self, client: Client, lane: str, holder: str, tenant: str = ""):
        self.client, self.lane, self.holder, self.tenant = client, lane, holder, name_of("tenant", tenant or TENANT)
        self.mark = secrets.token_hex(8)
        self.since = time.time()
        self.epoch = 0
        self.lost = ""  # who has taken it over

    async def take(self) -> None:
        """Takes the lease, also from a process that holds it under the same name, as one that died may. Held: another
        holder has it. NoPolicy: no sampler serves the lane."""
        await versions.begin(self.client, self.lane, self.tenant)
        while True:
            has, revision = await holder(self.client, self.lane, self.tenant)
            if has and has["holder"] != self.holder:
                await check_free(self.client, self.lane, self.tenant)
            elif await self._put(revision):
                break
        self.epoch = await self._raise_epoch()

    async def _put(self, revision: int, body: bytes | None = None) -> bool:
        """Writes the entry, which has that revision; False: it has another one. body: another than who has it."""
        if body is None:
            body = json.dumps({"holder": self.holder, "since": int(self.since), "mark": self.mark}).encode()
        headers = {"Nats-Expected-Last-Subject-Sequence": str(revision)} | ({} if body else {"KV-Operation": "DEL"})
        try:
            subject = entry_subject(self.client.nc, _BUCKET, f"{self.lane}.{self.tenant}")
            await self.client.js.publish(subject, body, headers=headers)
        except APIError as err:
            if err.err_code == versions.BEHIND:
                return False
            raise
        return True

    async def _raise_epoch(self) -> int:
        """Announces the lane's version again, with the next epoch, which it returns: a push that began before this,
        by whomever, comes too late."""
        while True:
            now, _ = await versions.last(self.client, self.lane, self.tenant)
            if await versions.store(self.client, now | {"epoch": now.get("epoch", 0) + 1}, now):
                return int(now.get("epoch", 0)) + 1

    def check(self) -> None:
        """Taken: another process has the lease now."""
        if self.lost:
            raise Taken(f"lane {self.lane}: {self.lost} trains it in another process now; "
                            "what this one made is not pushed")

    async def follow(self, now: Event) -> int:
        """The epoch under which a push follows the lane's newest version. Taken: another process has the lease now."""
        self._see((await holder(self.client, self.lane, self.tenant))[0], now)
        self.check()
        return self.epoch

    def _see(self, has: dict[str, Any] | None, now: Event) -> None:
        """Notes whether another process has taken the lease, also one that has given it back since."""
        if has and has["mark"] != self.mark:
            self.lost = has["holder"]
        elif now.get("epoch", 0) > self.epoch:
            self.lost = "another trainer"

    async def _renew(self) -> None:
        """Shows the server that the holder lives, and takes a lease that the server has lost again, unless another
        trainer had it meanwhile."""
        while True:
            expiry = _EXPIRY
            with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError, APIError):
                expiry = await _expiry(self.client)
                has, revision = await holder(self.client, self.lane, self.tenant)
                self._see(has, (await versions.last(self.client, self.lane, self.tenant))[0])
                if not self.lost:
                    await self._put(revision)  # or somebody was first, which is seen next time
                else:
                    _log.warning("lane %s: %s trains it in another process now", self.lane, self.lost)
                    return
            await asyncio.sleep(expiry / 8)

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator["Lease"]:
        """Holds the lease for a while. Held, NoPolicy: as take."""
        await retry_while_away(self.take, PATIENCE)
        renewing = asyncio.create_task(self._renew())
        try:
            yield self
        finally:
            renewing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await renewing
            with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError, APIError):
                has, revision = await holder(self.client, self.lane, self.tenant)
                if has and has["mark"] == self.mark:
                    await self._put(revision, b"")
