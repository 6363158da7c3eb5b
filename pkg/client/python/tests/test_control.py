"""Control of runs, against a real pipeline."""

import asyncio

import pytest

import meander
from conftest import first


def test_pause_and_resume(run):
    async def test(client, name):
        await client.publish(
            name, "a red fox", uid="fox", group_size=2, num_inference_steps=100, height=256, width=256,
            reward=[{"name": "synthetic"}]
        )
        receipt = await client.pause(name, reason="lunch", by="lin")
        assert await client.obeyed(receipt) >= 1
        status = await client.status(name)
        assert (status["state"], status["by"], status["reason"]) == ("paused", "lin", "lunch")
        assert "paused" in (await client.pause(name))["unchanged"]
        await client.resume(name)
        assert (await first(client.advantages(name)))["status"] == "complete"

    run(test)


def test_cancel(run):
    async def test(client, name):
        await client.publish(name, "a red fox", uid="fox", group_size=2, reward=[{"name": "external"}])
        await client.publish(name, "a blue fox", uid="hen", group_size=2, reward=[{"name": "external"}])
        receipt = await client.cancel(name, "fox")
        assert (receipt["uid"], "unchanged" in receipt) == ("fox", False)
        assert (await first(client.advantages(name)))["status"] == "cancelled"
        await client.cancel(name)
        async for group in client.advantages(name):
            if group["uid"] == "hen":
                assert group["status"] == "cancelled"
                break
        assert (await client.status(name))["state"] == "cancelled"

    run(test)


def test_prune(run):
    async def test(client, name):
        prompt = {"group_size": 2, "num_inference_steps": 4, "reward": [{"name": "synthetic"}]}
        await client.publish(name, "a red fox", uid="hen", **prompt)
        await client.pause(name)
        await client.publish(name, "a red fox", uid="fox", **prompt)
        await client.prune(name, "fox", 1, step_index=3, reason="far off")
        await client.resume(name)
        group = {}
        async for group in client.advantages(name):
            if group["uid"] == "fox":
                break
        assert [m["status"] for m in group["members"]] == ["scored", "pruned"]

    run(test)


def test_branch_off(run):
    """Samples that rewards leave out are parts of a rollout: their own steps, and the parent that they went on from."""

    async def test(client, name):
        await client.publish(
            name, "a red fox", uid="fox", group_size=4, num_inference_steps=4,
            reward=[{"name": "synthetic", "at_steps": [2]}], prune={"step_index": 2, "keep": 1, "then": "branch"},
            batch={"id": "b", "groups": 1},
            advantage={"estimator": "reinforce_plus_plus", "std_basis": "expanded", "gamma": 0.5},
        )
        batch = await first(client.batches(name))
        starts = [s.facts.get("start") for s in batch.samples]
        best = starts.index(None)
        assert [s and s["branch"]["sample_index"] for s in starts] == [None if i == best else best for i in range(4)]
        steps = [s.member["step_advantages"] for s in batch.samples]
        assert [len(s) for s in steps] == [4] * 4
        assert all(a[: 4 if i == best else 2].tolist() == steps[i][0 if i == best else 2 :]
                   for i, a in enumerate(batch["advantages"]))  # fmt: skip
        assert batch["mask"].sum(axis=1).tolist() == [4 if i == best else 2 for i in range(4)]

    run(test)


def test_refused(run):
    async def test(client, name):
        with pytest.raises(meander.Refused, match="there is no such run"):
            await client.pause(name)
        await client.publish(
            name, "a red fox", uid="fox", group_size=1, num_inference_steps=2, reward=[{"name": "synthetic"}]
        )
        with pytest.raises(meander.Refused, match="uid: hen"):
            await client.cancel(name, "hen")

    run(test)


def test_asking_makes_nothing(run):
    async def test(client, name):
        async def stored():
            found = {}
            for stream in ("MDR_CONTROL", "MDR_DEAD", "MDR_PROMPTS", "MDR_GROUPS"):
                info = await client.js.stream_info(stream, subjects_filter=f"mdr.v1.*.{name}.>")
                more = await client.js.stream_info(stream, subjects_filter=f"mdr.v1.control.{name}")
                found |= (info.state.subjects or {}) | (more.state.subjects or {})
            return found

        for ask in (client.status, client.pause, client.resume, client.cancel):
            with pytest.raises(meander.Refused, match="there is no such run"):
                await ask(name)
        with pytest.raises(TimeoutError, match="there is no such run"):
            await first(client.batches(name, timeout=1))
        assert await stored() == {}
        await client.publish(name, "a red fox", uid="fox", group_size=1, num_inference_steps=2,
            reward=[{"name": "synthetic"}])
        assert (await first(client.advantages(name)))["status"] == "complete"
        status = await client.status(name)
        assert (status["state"], status["outcomes"]) == ("complete", [{"outcome": "complete", "groups": 1}])
        assert not [s for s in await stored() if ".control." in s]  # a question is not kept

    run(test)


def test_obeyed_says_who_is_late(run):
    async def test(client, name):
        await client.publish(
            name, "a red fox", uid="fox", group_size=1, num_inference_steps=2, reward=[{"name": "synthetic"}]
        )
        with pytest.raises(TimeoutError, match="sampler-"):
            await client.obeyed({"seq": 1 << 60}, timeout=0)
        await asyncio.wait_for(client.obeyed({"seq": 0}), 5)

    run(test)
