"""Large messages and states: from the socket to the batch without a copy that is not needed."""

import asyncio
import gc
import pathlib
import ssl
import subprocess

import msgpack
import numpy as np
import pytest
from nats.aio.transport import TcpTransport

from meander.client import access, wire
from meander.data import events, memory
from meander.data.events import STEP, EventError, decode, fitting, payload_digest

GOLDEN = pathlib.Path(__file__).parents[4] / "schemas/testdata/golden"
HEADERS = b"NATS/1.0\r\nNats-Sequence: 7\r\n\r\n"
NAME = "mdr.v1.step.r.u.0.main.a.0"
DECOY = b"\xc6\x00\x01\x00\x01" + b"\xc4\x10" + events._MARK[:4]  # what a large state begins with, within another


def message(sid, payload):
    return b"HMSG _INBOX.a.b %d %d %d\r\n%b%b\r\n" % (sid, len(HEADERS), len(HEADERS) + len(payload), HEADERS, payload)


def bodies():
    rng = np.random.default_rng(0)
    return [rng.bytes(n) for n in (700_000, 10, 65_000, 100_000, 2_000_000, 0, 300_000)]


async def served(sent, context, use):
    """Calls use with a client's connection to a server that sends some bytes, piece by piece, and ends."""

    async def serve(_, writer):
        for piece in sent:
            writer.write(piece)
            await writer.drain()
        writer.close()

    servers, clients = context
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=servers)
    port = server.sockets[0].getsockname()[1]
    nc, transport = access._Connection(), TcpTransport()
    transport._io_reader, transport._io_writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=clients, limit=32768
    )
    nc._transport = transport
    try:
        return await use(nc, transport)
    finally:
        transport.close()
        server.close()


@pytest.fixture(scope="module")
def secured(binary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls") / "auth"
    subprocess.run([binary, "auth", "init", folder, "--tls-host", "127.0.0.1"], check=True, capture_output=True)
    servers = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    servers.load_cert_chain(folder / "tls/server.pem", folder / "tls/server-key.pem")
    return servers, ssl.create_default_context(cafile=folder / "tls/ca.pem")


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("piece", [1 << 30, 50_000])
def test_large_messages_from_a_socket(tls, piece, request, monkeypatch):
    """They are given whole and in order; what comes between them goes the way of the library, and what comes behind is
    taken again. Only a beginning of them passes through the library's stream."""
    context = request.getfixturevalue("secured") if tls else (None, None)
    want = bodies()
    data = b"".join((b"PING\r\n" if i == 2 else b"") + message(3, b) for i, b in enumerate(want))
    data += message(4, b"z" * 200_000) + message(3, b"end")
    straight, others = [], []
    receive = wire._receive

    async def counted(connection, view):
        straight.append(len(view))
        await receive(connection, view)

    async def queued(self, sid, subject, reply, data, headers):
        others.append((sid, len(data)))

    monkeypatch.setattr(wire, "_receive", counted)
    monkeypatch.setattr(access.NATS, "_process_msg", queued)

    async def use(nc, transport):
        taken, pings = [], []

        async def ping():
            pings.append(1)

        monkeypatch.setattr(nc, "_process_ping", ping)
        nc.bulk[3] = lambda data, headers: taken.append((headers, bytes(data)))
        before = transport._io_writer.transport.get_protocol()
        while not transport.at_eof():
            await nc._ps.parse(await transport.read(32768))
        assert taken == [(HEADERS, b) for b in [*want, b"end"]] and pings == [1] and others == [(4, 200_000)]
        assert transport._io_writer.transport.get_protocol() is before

    sent = [data[i : i + piece] for i in range(0, len(data), piece)]
    asyncio.run(asyncio.wait_for(served(sent, context, use), 50))
    assert len(straight) >= 3 and sum(straight) > 2_000_000


@pytest.mark.parametrize("tls", [False, True])
def test_a_connection_ends_in_a_large_message(tls, request):
    """It is an error of the connection, after which the library connects again; nothing is given."""
    context = request.getfixturevalue("secured") if tls else (None, None)

    async def use(nc, transport):
        taken = []
        nc.bulk[3] = lambda data, headers: taken.append(data)
        with pytest.raises(OSError):
            while not transport.at_eof():
                await nc._ps.parse(await transport.read(32768))
        assert taken == []

    asyncio.run(asyncio.wait_for(served([message(3, bytes(900_000))[:600_000]], context, use), 50))


def a_step(*sizes, decoy=b""):
    """A step with states of these sizes that begin with some bytes, encoded and as it was."""
    event = decode((GOLDEN / "step-sde.msgpack").read_bytes())
    rng, (one, *_) = np.random.default_rng(1), event["latents"]
    event["latents"] = [
        {**one, "index": i, "tensor": {**one["tensor"], "shape": [size], "dtype": "U8", "data":
            (decoy + rng.bytes(size))[:size]}} for i, size in enumerate(sizes)
    ]  # fmt: skip
    return msgpack.packb(event), event


@pytest.mark.parametrize("sizes", [(400_000,), (400_000, 70_000), (100, 70_000), (65_537,), (65_535,), (300_000, 9)])
def test_large_states_are_views_of_their_message(sizes):
    data, event = a_step(*sizes, decoy=DECOY if min(sizes) > 65_536 else b"")
    digest = payload_digest(data, event)
    for given in (data, memoryview(bytearray(data)).toreadonly()):
        got = fitting(given, STEP, NAME, digest=digest, known=NAME)
        assert got == event
        for kept, size in zip(got["latents"], sizes, strict=True):
            content = kept["tensor"]["data"]
            assert isinstance(content, memoryview) == (size > 65_536)
            if size > 65_536:
                assert np.shares_memory(np.frombuffer(content, np.uint8), np.frombuffer(given, np.uint8))
    end = data.rindex(event["latents"][-1]["tensor"]["data"]) + sizes[-1]
    for at in (0, 1, data.index(b"latents"), end - 1, end, len(data) - 1):  # one bit is another
        other = bytearray(data)
        other[at] ^= 1
        with pytest.raises(EventError):
            fitting(bytes(other), STEP, NAME, digest=digest, known=NAME)
    for other in (data[:-1], data[: len(data) // 2], data + b"x", data[:9] + data):
        with pytest.raises(EventError):
            fitting(other, STEP, NAME, digest=digest, known=NAME)


def test_what_looks_like_a_large_state():
    """A string or number that has the beginning of one is read as what it is."""
    data, event = a_step(100, 200_000, decoy=DECOY)
    assert fitting(data, STEP, NAME, digest=payload_digest(data, event), known=NAME) == event
    for text in ("\x00" * 9, "\u0181\x00\x01\x00\x01" * 20_000):  # U+0181 ends in 0x81; no UTF-8 has 0xc6 0x00
        event["weights_digest"] = text
        data = msgpack.packb(event)
        assert fitting(data, STEP, NAME, digest=payload_digest(data, event), known=NAME) == event
    event["sigma"] = np.frombuffer(b"\x3f\xc6\x00\x01\x00\x01\x00\x00", ">f8").item()  # a number of these bytes
    data = msgpack.packb(event)
    assert b"\xc6\x00\x01\x00\x01" in data
    assert fitting(data, STEP, NAME, digest=payload_digest(data, event), known=NAME) == event


def test_memory_is_used_again_when_nobody_has_it():
    size = 3 << 20
    first = memory.empty((3, 1 << 20))
    first[:] = 7
    at, row, view = first.ctypes.data, first[1, 5:9], first[2].view("<u4")
    for held in (first, view, row):  # each alone keeps it
        assert memory.empty((size,)).ctypes.data != at
        np.testing.assert_array_equal(np.asarray(held).view(np.uint8), 7)
        del held
    data = row.data[1:2]
    del first, view, row
    gc.collect()
    assert memory.empty((size,)).ctypes.data != at and data[0] == 7
    del data
    gc.collect()
    again = {memory.empty((size,)).ctypes.data for _ in range(3)}
    assert at in again or len(again) == 1
