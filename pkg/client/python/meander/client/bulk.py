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
_PENDING = re.compile(rb"\r\nNats-Num-Pending: (\d+)\r\n")
_SUBJECT = b"\r\nNats-Subject: "
_PLACE = re.compile(_SUBJECT + rb"(\S+)\r\nNats-Sequence: (\d+)\r\n")


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
    loop = asyncio.get_running_loop()
    inbox, whole = nc.new_inbox(), loop.create_future()

    def take(data: bytes, headers: bytes | None) -> None:
        headers = headers or b""
        # The server's own are behind those of the message.
        if place := _PLACE.match(headers, max(0, headers.rfind(_SUBJECT))):
            out.append(Stored(int(place[2]), place[1].decode(), data))
        elif not whole.done():
            whole.set_result(headers)

    status, sub = b"", await nc.subscribe(inbox)
    nc.bulk[sub._id] = take  # type: ignore[attr-defined]  # an answer has its own bound
    try:
        more = True
        while more:
            whole = loop.create_future()
            page = {"multi_last": filters, "batch": _MESSAGES, "max_bytes": _BYTES}
            if out:
                page["seq"] = out[-1].seq + 1
            await nc.publish(f"{api_prefix(nc)}.DIRECT.GET.{stream}", json.dumps(page).encode(), reply=inbox)
            had = -1
            while not whole.done() and len(out) > had:
                had = len(out)
                await asyncio.wait([whole], timeout=_WAIT)
            if not whole.done():
                break
            end = _STATUS.match(whole.result())
            status = end[1] if end else b"503"
            pending = _PENDING.search(whole.result())
            more = status == b"204" and pending is not None and pending[1] != b"0"
    finally:
        nc.bulk.pop(sub._id)  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            await sub.unsubscribe()
    if status == b"413" and len(filters) > 1:
        half = len(filters) // 2
        return await last_of_each(nc, stream, filters[:half]) + await last_of_each(nc, stream, filters[half:])
    return out
