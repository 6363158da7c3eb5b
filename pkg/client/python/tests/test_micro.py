"""A batch as a stream of micro-batches."""

import asyncio
import gc

import numpy as np
import pytest

import meander
from conftest import first, publish
from meander.client import access, bulk, wire as socket
from meander.data import micro

OPTIONS = dict(timeout=50)


async def batch_of(client, name, **fields):
    """A run of two groups of two samples, read whole and as a stream."""
    for k in range(2):
        await publish(client, name, f"u{k}", batch="b0", groups=2, **fields)
    return (await first(client.batches(name, **OPTIONS)), await first(client.batches(name, whole=False, **OPTIONS)))


@pytest.mark.parametrize(("dtype", "portion"), [("F32", 1 << 20), ("BF16", 1)])
def test_micro_batches_are_the_batch(run, dtype, portion, monkeypatch):
    """Their arrays are the rows of the whole batch, in the dtype that was stored, and nothing of them stays; whether
    several are read with one request or each with its own."""
    monkeypatch.setattr(micro, "_PORTION", portion)

    async def test(client, name):
        whole, stream = await batch_of(client, name, rollout={"latents_dtype": dtype})
        assert stream.digest() == whole.digest() and stream.unread and not whole.unread
        for key in ("log_probs", "sigmas", "next_sigmas", "timesteps", "step_indices", "advantages", "rewards", "mask"):
            np.testing.assert_array_equal(stream[key], whole[key], key)
        with pytest.raises(KeyError, match=r"latents: it is not read; micro\(n\) reads it"):
            stream["latents"]
        for n, rows, want in (
            (3, None, [[0, 1, 2], [3]]), (0, None, [[0, 1], [2, 3]]), (2, [3, 0], [[0, 3]]), (2, [], []),
        ):
            parts = stream.micro(n, rows)
            got = [m async for m in parts]
            assert [m.rows.tolist() for m in got] == want and len(parts) == len(want)
            for m in got:
                assert set(m) == set(whole)
                for key in whole:
                    if key != "group_index":
                        assert m[key].dtype.kind == whole[key].dtype.kind
                        np.testing.assert_array_equal(m[key], whole[key][m.rows], key)
            for other, m in zip(whole.micro(n, rows), got, strict=True):
                np.testing.assert_array_equal(other["latents"], m["latents"])
        gc.collect()
        assert all(s.unread and not s.steps for s in stream.samples)

    run(test)


def test_states_are_held_once_in_the_stored_dtype(run):
    async def test(client, name):
        whole, stream = await batch_of(client, name, rollout={"latents_dtype": "BF16"})
        micro = await first(stream.micro(4))
        for b in (whole, micro):
            assert b.states.dtype == "BF16" and b.states.held.dtype == np.uint16
            assert b.states.held.shape == (4, 3, *b["latents"].shape[2:])  # three states around two steps
            assert b["latents"].dtype == np.float32 and b["latents"] is not b["next_latents"]
            for i, s in enumerate(b.samples):  # the events have no bytes of their own
                of = [t["data"] for k, kept in s.kept().items() if k in (1, 2, 3) for t in kept]
                assert len(of) >= 3 and all(np.shares_memory(data, b.states.held[i]) for data in of)
                np.testing.assert_array_equal(s.latents(2), b["latents"][i, 1])

    run(test)


def test_without_asyncio(url, run):
    """The blocking client iterates over micro-batches; a reader that stops early leaves nothing behind."""

    async def publishes(client, name):
        whole, stream = await batch_of(client, name)
        with pytest.raises(RuntimeError, match="take `async for`, or a client of meander.sync"):
            next(iter(stream.micro(2)))
        return name, whole.digest()

    name, digest = run(publishes)
    with meander.sync.connect(url) as client:
        for batch in client.batches(name, whole=False, follow=False):
            assert batch.digest() == digest
            assert [m["rewards"].shape for m in batch.micro(3)] == [(3,), (1,)]
            for m in batch.micro(1):
                assert m.size == 1
                break


def test_what_is_gone_says_so(run):
    """A step that is no longer stored is named where its micro-batch is read, by the single read that follows a bulk
    one."""

    async def test(client, name):
        _, stream = await batch_of(client, name)
        seq = stream.samples[1].trajectory["steps"][1]["seq"]
        await client.js.delete_msg("MDR_STEPS", seq)
        got = []
        with pytest.raises(meander.Gone, match=f"sequence {seq} of MDR_STEPS is no longer stored"):
            async for m in stream.micro(1):
                got.append(m.rows.tolist())
        assert got == [[0]]

    run(test)


def test_many_messages_with_one_request(run, monkeypatch):
    """Pages, filters of too many subjects, and those that match nothing give what single reads give."""

    async def test(client, name):
        await batch_of(client, name)
        monkeypatch.setattr(bulk, "_MESSAGES", 3)
        filters = [f"mdr.v1.step.{name}.u{k}.>" for k in range(2)] + ["mdr.v1.step.nothing.>"]
        found = await bulk.last_of_each(client.nc, "MDR_STEPS", filters)
        assert len(found) == 16 and [m.seq for m in found] == sorted(m.seq for m in found)
        for m in found[:3]:
            assert (await client.js.get_msg("MDR_STEPS", m.seq)).data == m.data
        assert await bulk.last_of_each(client.nc, "MDR_STEPS", filters[2:]) == []
        for of in ("MDR_NOTHING", "MDR_STEPS"):  # no such stream, and filters that are none
            assert await bulk.last_of_each(client.nc, of, ["..", "a"]) == []

    run(test)


def test_messages_in_any_pieces(monkeypatch):
    """However the bytes of a connection arrive, each message is given once and whole, to who takes it, and what is not
    of a bulk answer goes the way of the library."""
    small = b"NATS/1.0\r\nNats-Sequence: 7\r\n\r\n"
    monkeypatch.setattr(socket, "_SMALL", 150)

    def message(sid, payload):
        return b"HMSG _INBOX.a.b %d %d %d\r\n%b%b\r\n" % (sid, len(small), len(small) + len(payload), small, payload)

    bodies = [b"x" * 40, b"", b"HMSG a 3 12 99\r\n", b"y" * 400, b"\r\n\r\n"]
    wire = b"".join(message(3, b) for b in bodies) + b"PING\r\n" + message(4, b"other") + message(3, b"end")
    wire += b"MSG _INBOX.a.b 3 2\r\nhi\r\n" + message(3, b"last")
    want = [*((small, b) for b in bodies), (small, b"end"), (None, b"hi"), (small, b"last")]

    async def test(pieces):
        nc, taken, others, pings = access._Connection(), [], [], []
        nc.bulk[3] = lambda data, headers: taken.append((headers, data))

        async def ping():
            pings.append(1)

        async def queued(self, sid, subject, reply, data, headers):
            others.append((sid, data))

        monkeypatch.setattr(nc, "_process_ping", ping)
        monkeypatch.setattr(access.NATS, "_process_msg", queued)
        for piece in pieces:
            await nc._ps.parse(piece)
        assert taken == want and others == [(4, b"other")] and pings == [1]
        assert nc.stats["in_msgs"] == len(want) and nc.stats["in_bytes"] == sum(len(b) for _, b in want)

    for size in (1, 2, 3, 7, 40, 64, 100, 333, len(wire)):
        asyncio.run(test(wire[i : i + size] for i in range(0, len(wire), size)))
    for at in range(len(wire)):
        asyncio.run(test((wire[:at], wire[at:])))


def test_options_are_checked(run):
    async def test(client, name):
        with pytest.raises(ValueError, match="log_probs: needs whole=True"):
            client.batches(name, log_probs=lambda b: b, whole=False)
        _, stream = await batch_of(client, name)
        for wrong in ({"n": -1}, {"ahead": -1}):
            with pytest.raises(ValueError, match="must be at least 0"):
                stream.micro(**wrong)

    run(test)
