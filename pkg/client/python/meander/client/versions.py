"""The versions of a lane's weights as they are stored: their history has one order, the bucket the newest."""

from __future__ import annotations

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


async def last(client: Client, lane: str) -> tuple[Event, int]:
    """The newest policy of a lane, and the sequence of its message in the history."""
    try:
        m = await client.js.get_last_msg("MDR_POLICIES", f"{PREFIX}policy.{lane}.{TENANT}")
    except NotFoundError:
        raise NoPolicy(f"lane: {lane!r}; no sampler has announced a model on it") from None
    return decode(m.data or b""), m.seq or 0


async def store(client: Client, push: Event, after: Event) -> bool:
    """Puts a policy behind the one that it follows in the history, then into the bucket; False where the history has
    gone on, also by a trainer that has taken the lane meanwhile."""
    lane, body = push["lane"], msgpack.packb(push)
    current, sequence = await last(client, lane)
    if any(current.get(k) != after.get(k) for k in ("policy_version", "weights_digest", "epoch")):
        return False
    headers = {
        "Mdr-Type": "policy/1", "Content-Type": "application/msgpack",
        "Nats-Expected-Last-Subject-Sequence": str(sequence),
    }  # fmt: skip
    try:
        await client.js.publish(f"{PREFIX}policy.{lane}.{TENANT}", body, headers=headers)
    except APIError as err:
        if err.err_code == BEHIND:
            return False
        raise
    await update_bucket(client, lane)
    return True


async def update_bucket(client: Client, lane: str) -> None:
    """Copies the newest policy of a lane's history to the bucket."""
    kv = await client.js.key_value("mdr-policy")
    while True:
        try:
            entry = await kv.get(f"{lane}.{TENANT}")
            revision, value = entry.revision, entry.value
        except KeyNotFoundError:
            revision, value = 0, None
        newest = (await client.js.get_last_msg("MDR_POLICIES", f"{PREFIX}policy.{lane}.{TENANT}")).data or b""
        if newest == value:
            return
        try:
            await kv.update(f"{lane}.{TENANT}", newest, last=revision or 0)
        except APIError as err:
            if err.err_code != BEHIND:
                raise
