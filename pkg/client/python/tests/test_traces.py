"""The trace context of W3C, from a prompt to its result and to the workers."""

import asyncio
import sys
import types

import msgpack
import pytest

import meander
from conftest import publish
from meander.rewards.reward import Reward, Score
from meander.rewards.worker import Worker

pytest.importorskip("PIL")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
TRACE = {"traceparent": PARENT, "tracestate": "vendor=a", "baggage": "user=ann"}


class Seen(Reward):
    """Keeps the trace contexts that its samples come with."""

    name, version = "seen", "1"

    def __init__(self):
        self.traces = []

    def score(self, samples):
        self.traces += [dict(s.trace) for s in samples]
        return [Score(1.0) for _ in samples]


def test_a_prompt_its_result_and_its_worker_have_it(run):
    async def test(client, name):
        seen, stop, ready = Seen(), asyncio.Event(), asyncio.Event()
        serving = asyncio.create_task(Worker(seen).serve(client, name, stop, ready.set))
        await ready.wait()
        with meander.traced({"Traceparent": PARENT, "tracestate": "vendor=a", "baggage": "user=ann", "Host": "x"}):
            assert meander.trace_context() == TRACE
            await client.publish(name, "a fox", uid="u", group_size=2, num_inference_steps=2, reward=f"nats:{name}")
        assert meander.trace_context() == {}
        async for m in client._messages(f"advantage.{name}.u", "MDR_ADVANTAGES"):
            assert {k: m.headers.get(k) for k in TRACE} == TRACE
            break
        stop.set()
        await serving
        assert seen.traces == [TRACE, TRACE]

    run(test)


def test_a_worker_of_an_interaction_has_it(run):
    async def test(client, name):
        ready, seen = asyncio.Event(), []

        def answer(request):
            seen.append(meander.trace_context())
            return {"content": "go on"}

        serving = asyncio.create_task(client.interact(name, answer, ready.set, logits=False))
        await ready.wait()
        for headers in (TRACE, None):
            await client.nc.request(f"mdr.v1.interact.{name}", b'{"v": 1, "name": "x"}', headers=headers)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert seen == [TRACE, {}]

    run(test)


def test_a_span_of_opentelemetry_gives_it(monkeypatch):
    """As the library's API has it: propagate.inject fills a carrier."""
    fake = types.ModuleType("opentelemetry.propagate")
    fake.inject = lambda carrier: carrier.update({"traceparent": PARENT, "x-b3": "1"})
    for name, module in {"opentelemetry": fake, "opentelemetry.trace": fake, "opentelemetry.propagate": fake}.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert meander.trace_context() == {"traceparent": PARENT}


def test_a_span_of_the_real_opentelemetry_gives_it():
    trace = pytest.importorskip("opentelemetry.trace", reason="opentelemetry-api is not installed")
    of = trace.SpanContext(int(PARENT[3:35], 16), int(PARENT[36:52], 16), False, trace.TraceFlags(0))
    with trace.use_span(trace.NonRecordingSpan(of)):
        assert meander.trace_context() == {"traceparent": PARENT}


def test_one_that_is_none_is_said(run, caplog):
    async def test(client, name):
        with meander.traced({"traceparent": "00-0"}):
            receipt = await publish(client, name, "u")
        assert any("traceparent" in w for w in receipt["warnings"])

    run(test)


def test_requests_that_nothing_stores_have_it(run):
    """A dry prompt, and a request to a teacher."""

    async def test(client, name):
        seen = []

        async def answer(m):
            seen.append({k: v for k, v in (m.headers or {}).items() if k in TRACE})
            await m.respond(msgpack.packb({"accepted": True, "warnings": []}))

        await client.nc.subscribe(f"mdr.v1.dry.{name}", cb=answer)
        await client.nc.subscribe(f"mdr.v1.teacher.{name}", cb=answer)
        for expected in (TRACE, {}):
            with meander.traced(expected):
                await client.publish(name, "a fox", dry=True)
                with pytest.raises(meander.EventError):
                    await client.teacher_reply(name, name, "u", 0)
            assert seen == [expected, expected]
            seen.clear()

    run(test)
