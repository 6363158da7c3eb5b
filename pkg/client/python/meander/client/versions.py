"""The versions of a lane's weights as they are stored: their history has one order, the bucket the newest."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgpack
from nats.js.errors import APIError, KeyNotFoundError, NotFoundError

from ..data.events import PREFIX, TENANT, Event, decode

if TYPE_CHECKING:
    from .client import Client

BEHIND = 10071
"""The server's error for a subject that has another last message."""


class NoPolicy(ValueError):
    """No sampler has announced a model, or none on that lane."""


def key_of(p: Event) -> str:
    """The key of a policy's lane and tenant in buckets, and the end of its subject."""
    return f"{p['lane']}.{p['tenant']}"


async def last(client: Client, lane: str, tenant: str = TENANT) -> tuple[Event, int]:
    """The newest policy of a tenant of a lane, and the sequence of its message in the history."""
    try:
        m = await client.js.get_last_msg("MDR_POLICIES", f"{PREFIX}policy.{lane}.{tenant}")
    except NotFoundError:
        if tenant != TENANT:
            raise NoPolicy(f"tenant: {tenant!r}; has no weights on lane {lane!r}: its first push begins them") from None
        raise NoPolicy(f"lane: {lane!r}; no sampler has announced a model on it") from None
    return decode(m.data or b""), m.seq or 0


_MAX_TENANTS = 64
_OF_VERSION = ("adapter", "weights", "parent", "rollback", "rule", "epoch", "by", "note")


async def begin(client: Client, lane: str, tenant: str) -> None:
    """Gives a tenant of a lane its version 0, the lane's checkpoint, unless it has versions. NoPolicy: no sampler has
    announced the lane. ValueError: the lane takes no other weights, or has as many tenants as it may have."""
    try:
        await last(client, lane, tenant)
        return
    except NoPolicy:
        main, _ = await last(client, lane)
    if not main.get("modules") and not main.get("tensors"):
        raise ValueError(f"tenant: {tenant!r}; must be absent: the model {main['model']!r} of lane {lane!r} takes no "
                         "other weights")
    state = (await client.js.stream_info("MDR_POLICIES", subjects_filter=f"{PREFIX}policy.{lane}.*")).state
    if len(state.subjects or ()) > _MAX_TENANTS:
        raise ValueError(f"tenant: {tenant!r}; must be one of those that lane {lane!r} has, which are {_MAX_TENANTS}: "
                         "as many as it may have")
    first = {k: v for k, v in main.items() if k not in _OF_VERSION} | {
        "tenant": tenant, "policy_version": 0, "weights_digest": main.get("base_digest", ""),
        "announced": time.time_ns(),
    }
    await store(client, first, None)  # or another has just done so


async def store(client: Client, push: Event, after: Event | None) -> bool:
    """Puts a policy behind the one that it follows in the history, then into the bucket; None: it is the first. False
    where the history has gone on, also by a trainer that has taken the lane meanwhile."""
    of, body, sequence = key_of(push), msgpack.packb(push), 0
    current: Event = {}
    if after is not None:
        current, sequence = await last(client, push["lane"], push["tenant"])
    if after and any(current.get(k) != after.get(k) for k in ("policy_version", "weights_digest", "epoch")):
        return False
    headers = {
        "Mdr-Type": "policy/1", "Content-Type": "application/msgpack",
        "Nats-Expected-Last-Subject-Sequence": str(sequence),
    }  # fmt: skip
    try:
        await client.js.publish(f"{PREFIX}policy.{of}", body, headers=headers)
    except APIError as err:
        if err.err_code == BEHIND:
            return False
        raise
    await update_bucket(client, of)
    return True


async def update_bucket(client: Client, of: str) -> None:
    """Copies the newest policy of the history of a tenant of a lane to the bucket."""
    kv = await client.js.key_value("mdr-policy")
    while True:
        try:
            entry = await kv.get(of)
            revision, value = entry.revision, entry.value
        except KeyNotFoundError:
            revision, value = 0, None
        newest = (await client.js.get_last_msg("MDR_POLICIES", f"{PREFIX}policy.{of}")).data or b""
        if newest == value:
            return
        try:
            await kv.update(of, newest, last=revision or 0)
        except APIError as err:
            if err.err_code != BEHIND:
                raise
