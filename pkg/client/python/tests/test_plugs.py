"""Functions of users, plain and async, wherever one is handed in."""

import asyncio
import functools

import msgpack
import pytest
from conftest import first, publish

import meander
from meander.rewards import Input, Reward, Score
from meander.rewards.worker import Worker


class Object:
    async def __call__(self, request):
        await asyncio.sleep(0)
        return {"content": request["said"]}


async def says(end, request):
    return {"content": request["said"] + end}


@pytest.mark.parametrize(
    "answer, content",
    [
        (lambda request: {"content": request["said"]}, "hi"),
        (functools.partial(says, ""), "hi"),
        (functools.partial(functools.partial(says), "!"), "hi!"),
        (Object(), "hi"),
        (Object().__call__, "hi"),
        (lambda request: asyncio.wrap_future(asyncio.run_coroutine_threadsafe(says("", request), LOOP[0]),
        loop=LOOP[0]), "hi"),
    ],
)  # fmt: skip
def test_an_interaction_may_be_async(run, answer, content):
    async def test(client, name):
        LOOP[:] = [asyncio.get_running_loop()]
        ready = asyncio.Event()

        async def listens():
            ready.set()

        serving = asyncio.create_task(client.interact(name, answer, listens))
        await ready.wait()
        m = await client.nc.request(f"mdr.v1.interact.{name}", msgpack.packb({"said": "hi"}), timeout=30)
        serving.cancel()
        assert msgpack.unpackb(m.data) == {"v": 1, "content": content}

    run(test)


LOOP = []


@pytest.mark.parametrize("answer, why", [
    (lambda r: None, "TypeError: the interaction gives NoneType; must be a dict"),
    (lambda r: {"metadata": object()}, "TypeError: can not serialize"),
    (functools.partial(says, 3), "TypeError"),
])  # fmt: skip
def test_an_interaction_that_answers_nothing_says_so(run, answer, why):
    async def test(client, name):
        ready = asyncio.Event()
        serving = asyncio.create_task(client.interact(name, answer, ready.set))
        await ready.wait()
        m = await client.nc.request(f"mdr.v1.interact.{name}", msgpack.packb({"said": "hi"}), timeout=30)
        serving.cancel()
        assert msgpack.unpackb(m.data)["error"].startswith(why)

    run(test)


class Counts(Reward):
    """The score is the number of things that the record of the prompt names."""

    name, extra, version = "counts", "images", "counts-1"

    async def score(self, samples):
        await asyncio.sleep(0)
        return [Score(sum(x["count"] for x in s.metadata["include"]) + s.ground_truth[1]) for s in samples]


def test_an_async_reward_gets_the_record_of_the_prompt(run):
    pytest.importorskip("PIL")
    record = {
        "tag": "position", "data_source": "geneval",
        "include": [{"class": "dog", "count": 1}, {"class": "tie", "count": 2, "position": ["right of", 0]}],
    }  # fmt: skip

    async def test(client, name):
        ready, stop = asyncio.Event(), asyncio.Event()
        serving = asyncio.create_task(Worker(Counts()).serve(client, name, stop, ready.set))
        await ready.wait()
        await client.publish(
            name, "a tie right of a dog", group_size=2, num_inference_steps=4, metadata=record,
            reward=[{"name": f"nats:{name}", "ground_truth": [1, 2.5, None]}],
        )
        group = await first(client.stream_groups(name, timeout=50))
        stop.set()
        await serving
        assert [s.member["reward"] for s in group.samples] == [5.5, 5.5]

    run(test)


def test_a_rule_of_a_reader_may_be_async(run):
    async def keep(group):
        await asyncio.sleep(0)
        return "" if group.uid == "b" else "not wanted"

    async def test(client, name):
        for uid in ("a", "b"):
            await publish(client, name, uid)
        reader = client.batches(name, groups=1, keep=keep, timeout=50)
        batch = await first(reader)
        assert [g.uid for g in batch.groups] == ["b"] and reader.health.left_out in ({}, {"not wanted": 1})

    run(test)


def test_stages_are_refused_by_name(url):
    """By the plugs of TRL and verl, whose samples are of one lane: before anything is published."""
    from meander.plugs.lane import Lane

    stages = meander.stages(meander.stage("think", model="sums"), meander.stage("paint", model="signs"))
    wrong = "fields.stages: think, paint; must be absent: this trainer asks one lane"
    with pytest.raises(ValueError, match=wrong):
        Lane("nats://127.0.0.1:1", "sums", "r", stages, 3, 5.0, {})
    lane = Lane(url, "", "plugs-stages", lambda _: stages, 3, 5.0, {})
    try:
        with pytest.raises(ValueError, match=wrong):
            lane.client.thread.run(lane.fields_of("a fox", {}))
    finally:
        lane.close()


def test_fields_of_a_lane_may_be_async(url):
    from meander.plugs.lane import Lane

    async def fields(prompt):
        return {"reward": [{"name": "synthetic"}], "metadata": {"asked": prompt}}

    lane = Lane(url, "", "py-lane", fields, 1, 30, {})
    try:
        out = lane.client.thread.run(lane.fields_of("a fox", {"top_k": 3}))
        assert out["metadata"] == {"asked": "a fox"} and out["text"] == {"top_k": 3}
    finally:
        lane.close()
