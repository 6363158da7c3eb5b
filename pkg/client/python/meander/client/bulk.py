"""Stored messages, many with one request: direct gets of the server (NATS ADR-31)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from nats.aio.client import Client as NATS

from .cursor import api_prefix

_MESSAGES, _BYTES = 1024, 8 << 20  # of one answer; the server matches no more subjects at once
_WAIT = 5.0  # seconds without a message after which an answer is given up
_STATUS = re.compile(rb"NATS/1\.0 (\d+)")
_FACTS = re.compile(rb"\r\n(Nats-(?:Sequence|Subject|Num-Pending)): (\S+)(?=\r\n)")


class Stored(NamedTuple):
    """A message of a stream."""

    seq: int
    """Its sequence."""
    subject: str
    """Its subject."""
    data: bytes
    """Its payload."""


async def last_of_each(nc: NATS, stream: str, filters: Sequence[str]) -> list[Stored]:
    """Returns the newest message of each subject that the filters match, by sequence.

    It returns those that the server gives at once: in a cluster one may lag, and a server that is away gives none. Ask
    for a missing one by its sequence.
    """
    out: list[Stored] = []
    inbox, whole, ended = nc.new_inbox(), asyncio.Event(), dict[bytes, bytes]()

    def take(data: bytes, headers: bytes | None) -> None:
        facts = dict(_FACTS.findall(headers or b""))  # the server's are behind those of the message
        if seq := facts.get(b"Nats-Sequence"):
            out.append(Stored(int(seq), facts[b"Nats-Subject"].decode(), data))
        else:
            status = _STATUS.match(headers or b"")
            ended.update({**facts, b"Status": status[1] if status else b"503"})
            whole.set()

    sub = await nc.subscribe(inbox)
    nc.bulk[sub._id] = take  # type: ignore[attr-defined]  # an answer has its own bound
    try:
        more = True
        while more:
            ended.clear()
            whole.clear()
            page = {"multi_last": filters, "batch": _MESSAGES, "max_bytes": _BYTES}
            if out:
                page["seq"] = out[-1].seq + 1
            await nc.publish(f"{api_prefix(nc)}.DIRECT.GET.{stream}", json.dumps(page).encode(), reply=inbox)
            while not ended:
                had = len(out)
                try:
                    await asyncio.wait_for(whole.wait(), _WAIT)
                except asyncio.TimeoutError:
                    if len(out) == had:
                        raise
            more = ended.get(b"Status") == b"204" and ended.get(b"Nats-Num-Pending", b"0") != b"0"
    except asyncio.TimeoutError:
        pass
    finally:
        nc.bulk.pop(sub._id)  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            await sub.unsubscribe()
    if ended.get(b"Status") == b"413" and len(filters) > 1:
        half = len(filters) // 2
        return await last_of_each(nc, stream, filters[:half]) + await last_of_each(nc, stream, filters[half:])
    return out
