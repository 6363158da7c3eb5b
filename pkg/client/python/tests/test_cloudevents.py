"""The attributes of CloudEvents, as the library `cloudevents` of the CNCF reads them."""

import asyncio

import msgpack
import pytest

import meander
from conftest import Up, announced, publish

http = pytest.importorskip(
    "cloudevents.core.bindings.http", reason="the library cloudevents (2 or newer) is not installed: pip has it"
)


def test_the_library_reads_each_kind_of_event(binary, tmp_path):
    up = Up(tmp_path, None, "--nats-cloudevents").start()

    async def read():
        await announced(up.url)
        async with meander.connect(up.url, cloudevents=True) as client:
            sub = await client.nc.subscribe("mdr.v1.>")
            await publish(client, "demo", "u")
            await client.update("demo", "synthetic", 1)
            seen = {}
            while "advantage" not in seen:
                m = await sub.next_msg(30)
                if not (m.headers or {}).get("ce-type"):
                    continue  # parts
                event = http.from_binary_event(http.HTTPMessage(dict(m.headers), m.data))
                kind, version = event.get_type().rsplit(".", 2)[1:]
                assert f"{kind}/{version[1:]}" == m.headers["Mdr-Type"] and event.get_specversion() == "1.0"
                if kind != "update":
                    assert event.get_id() == m.headers["Nats-Msg-Id"]
                assert event.get_subject() == m.subject.removeprefix("mdr.v1.") and event.get_time().tzinfo is not None
                assert event.get_source() == ("/meander-python" if kind in ("prompt", "update") else "/meander")
                assert event.get_datacontenttype() == "application/msgpack"
                msgpack.unpackb(m.data)
                seen[kind] = seen.get(kind, 0) + 1
            return seen

    try:
        seen = asyncio.run(asyncio.wait_for(read(), 60))
    finally:
        up.stop()
    assert seen["prompt"] == seen["update"] == 1
    assert seen.keys() >= {"group", "request", "step", "trajectory", "reward", "advantage"}
    assert seen["trajectory"] == 2 and seen["step"] == 8
