"""Messages of bulk answers as they arrive: small ones from what was read, large ones straight from the socket."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from nats.protocol.parser import AWAITING_CONTROL_LINE, CRLF_SIZE, Parser

from ..data.events import MAX_EVENT
from ..data.memory import empty

Take = Callable[[Any, "bytes | None"], None]
"""Gets the data of a message, bytes or a read-only view of them, and its raw headers."""
_SMALL = 64 << 10  # bytes of a message that waits for its end as it is; larger ones would be copied too often
_BULK = re.compile(rb"HMSG \S+ (\d{1,9}) (\d{1,9}) (\d{1,9})\r\n")


class BulkParser(Parser):
    """Gives messages to who takes them in bulk (nc.bulk). The library copies what is left of what was read twice for
    each message, a large one seven times, and makes an object of all headers. It gets other messages one by one, so
    that none of it is in the middle of a large one then."""

    async def parse(self, data: bytes = b"") -> None:
        """As the library's."""
        while self.nc.bulk:
            if self.state == AWAITING_CONTROL_LINE:
                data, self.buf = bytes(self.buf) + data, bytearray()
                data, waits = await self._taken(data)
                if waits:
                    self.buf = bytearray(data)
                    return
                end = data.find(b"\r\n") + CRLF_SIZE
            else:
                end = self.needed + CRLF_SIZE - len(self.buf)
            if not CRLF_SIZE <= end < len(data):
                break
            await super().parse(data[:end])
            data = data[end:]
        await super().parse(data)

    async def _taken(self, data: bytes) -> tuple[bytes, bool]:
        """What is left behind messages that are taken in bulk, and whether that waits for the end of such a one."""
        nc: Any = self.nc
        at = 0
        while (m := _BULK.match(data, at)) and (take := nc.bulk.get(int(m[1]))):
            body, end = m.end() + int(m[2]), m.end() + int(m[3])
            content: Any
            if end < body or end - body > MAX_EVENT:
                break  # no answer of ours
            if len(data) >= end + CRLF_SIZE:
                content = data[body:end]
            elif end - at < _SMALL or len(data) < body and body - at < _SMALL:
                return data[at:], True
            elif len(data) < body or not hasattr(nc._transport, "_io_writer"):
                break
            else:
                whole = empty((end + CRLF_SIZE - body,)).data
                whole[: len(data) - body] = data[body:]
                await _receive(nc._transport, whole[len(data) - body :])
                content = whole[:-CRLF_SIZE].toreadonly()
            take(content, data[m.end() : body])
            at = end + CRLF_SIZE
            nc.stats["in_msgs"] += 1
            nc.stats["in_bytes"] += end - body
        return data[at:], False


async def _receive(connection: Any, view: memoryview) -> None:
    """Fills a view with what comes next on a connection of the library. OSError: it ended before."""
    reader, transport = connection._io_reader, connection._io_writer.transport
    while view and reader._buffer:
        some = await reader.read(len(view))
        view[: len(some)] = some
        view = view[len(some) :]
    await reader.read(0)  # raises what ended the connection
    if view and reader.at_eof():
        raise ConnectionResetError("the connection ended in a message")
    if view:
        filling = _Filling(view, transport)
        transport.set_protocol(filling)
        try:
            await filling.full
        finally:
            if transport.get_protocol() is filling:
                transport.set_protocol(filling.before)


class _Filling(asyncio.BufferedProtocol):
    """The protocol of a transport until a view is full; what is not about that is left to the one before."""

    def __init__(self, view: memoryview, transport: Any):
        self.view, self.transport, self.before = view, transport, transport.get_protocol()
        self.rest = memoryview(bytearray(4096))  # for what a transport had read beyond the view
        self.full: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for name in ("pause_writing", "resume_writing"):
            setattr(self, name, getattr(self.before, name))

    def get_buffer(self, sizehint: int) -> Any:
        """Where to receive."""
        return self.view or self.rest

    def buffer_updated(self, nbytes: int) -> None:
        """Something was received."""
        if not self.view:
            return self.before.data_received(bytes(self.rest[:nbytes]))
        self.view = self.view[nbytes:]
        if not self.view:
            self.transport.set_protocol(self.before)
            if not self.full.done():
                self.full.set_result(None)

    def eof_received(self) -> Any:
        """The other side ended."""
        self._ended(None)
        return self.before.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection ended."""
        self._ended(exc)
        self.before.connection_lost(exc)

    def _ended(self, exc: Exception | None) -> None:
        if not self.full.done():
            self.full.set_exception(exc or ConnectionResetError("the connection ended in a message"))
