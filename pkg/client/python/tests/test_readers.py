"""Readers of groups and batches against a real pipeline: whole, in order, each once, whatever dies."""

import asyncio
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import types
import urllib.parse

import msgpack
import nats
import numpy as np
import pytest

import meander

from meander.data.events import NUMBER, form
from conftest import ENVIRONMENT, Apart, Up, first, free_port, listens, publish
from meander import cursor


def velocities(batch):
    """Those of the sampler, which the prompts had it store."""
    return np.array([[meander.tensor(step["debug"][0]["tensor"]) for step in s.trained] for s in batch.samples])


def test_batch(run):
    async def test(client, name):
        for i in range(2):
            await publish(
                client, name, f"u{i}", "b", 2, seed=i, true_cfg_scale=2.0, rollout={"return_conditioning": True}
            )
        batch = await first(client.batches(name))
        assert batch.name == "b" and batch.size == 4 and list(batch["uid"]) == ["u0", "u0", "u1", "u1"]
        assert batch["latents"].shape == batch["next_latents"].shape == (4, 2, 16, 64)
        assert (batch["step_indices"] == [1, 2]).all() and batch["mask"].all() and batch["log_probs"].shape == (4, 2)
        assert (batch["next_latents"][:, 0] == batch["latents"][:, 1]).all()
        assert (
            batch["timesteps"] == np.float32(1000) * batch["sigmas"]
        ).all() and (batch["next_sigmas"] < batch["sigmas"]).all()
        assert (batch["advantages"] == [[s.advantage] * 2 for s in batch.samples]).all()
        for embeds in ("prompt_embeds", "negative_prompt_embeds"):
            assert batch[embeds].shape == (4, 1, 44) and (
                batch[embeds + "_mask"] == 1
            ).all() and batch.conditioning[embeds].shape == (2, 1, 44)
        assert (batch["prompt_embeds"] != batch["negative_prompt_embeds"]).any()
        again = await first(client.batches(name))
        assert again.digest() == batch.digest() and list(batch) == list(again)

        # The state behind a step is its mean and its noise; the log-prob is that of the event.
        for b, sample in enumerate(batch.samples):
            for w, step in enumerate(sample.trained):
                at = step["step_index"]
                noise = meander.noise.step(int(batch["sample_seed"][b]), at, 16 * 64).reshape(16, 64)
                mean = sample.kernel(at).mean(batch["latents"][b, w], velocities(batch)[b, w])
                assert np.abs(mean + batch["noise_std"][b, w] * noise - batch["next_latents"][b, w]).max() < 1e-5
        ratio = batch.check(batch.recompute_log_prob(velocities(batch)))
        assert ratio.max_abs < 1e-7 and set(ratio.per_step) == {1, 2}
        with pytest.raises(meander.RatioOff, match="step 2"):
            batch.check(batch.recompute_log_prob(velocities(batch) * 1.01))
        with pytest.raises(meander.RatioOff):
            batch.check(np.full((4, 2), np.nan))

        proto = batch.dataproto()
        assert proto["batch"]["all_latents"].shape == (4, 3, 16, 64) and (
            proto["batch"]["all_latents"][:, :2] == batch["latents"]
        ).all()
        assert {
            a.shape
            for k, a in proto["batch"].items()
            if k in ("all_timesteps", "rollout_log_probs", "response_mask", "advantages")
        } == {(4, 2)}
        assert list(proto["non_tensor_batch"]["uid"]) == list(batch["uid"])
        trajectory = batch.samples[0].trajectory
        assert (await client.pixels(trajectory)).shape == (64, 64, 3)
        assert (
            meander.noise.initial(trajectory["noise_seed"], 4) == meander.noise.normals(
                trajectory["noise_seed"], 0xFFFFFFFF, 4
            )
        ).all()

    pytest.importorskip("PIL", reason="decoding images needs Pillow")
    run(test)


def test_torch(run):
    torch = pytest.importorskip("torch", reason="tensors need torch, which is not installed here")

    async def test(client, name):
        await publish(client, name, "u", "b")
        batch = await first(client.batches(name))
        tensors = batch.torch()
        assert tensors["latents"].dtype == torch.float32 and tensors["mask"].dtype == torch.bool
        assert "uid" not in tensors
        assert [int(x) & (1 << 64) - 1 for x in tensors["sample_seed"]] == [int(x) for x in batch["sample_seed"]]

    run(test)


def test_groups_by_number(run):
    async def test(client, name):
        for i in range(5):
            await publish(client, name, f"u{i}")
        groups = []
        async for g in client.stream_groups(name, "all", timeout=30):
            groups.append(g.uid)
            if len(groups) == 5:
                break
        assert sorted(groups) == [f"u{i}" for i in range(5)]
        reader = client.batches(name, groups=2, follow=False)
        # one is left
        assert [list(dict.fromkeys(b["uid"])) async for b in reader] == [sorted(groups[:2]), sorted(groups[2:4])]
        assert reader.health.samples == 10 and reader.health.batches == 2
        assert reader.health.waited > 0 and reader.health.fetched > 0

    run(test)


def test_side_by_side(run):
    """Two readers of one run, each with a place of its own; a third, later, goes on where the first ended."""

    async def test(client, name):
        for i in range(4):
            await publish(client, name, f"u{i}", f"b{i}")

        async def read(reader, n):
            out = []
            async for batch in reader:
                out.append(batch.name)
                if len(out) == n:
                    await reader.done(batch)
                    return out

        fast, slow = await asyncio.gather(read(client.batches(name, "fast"), 4), read(client.batches(name, "slow"), 2))
        assert sorted(fast) == ["b0", "b1", "b2", "b3"] and slow == fast[:2]
        assert await read(client.batches(name, "slow"), 2) == fast[2:]
        with pytest.raises(TimeoutError, match="nothing came for 1 s; .*state complete"):
            await read(client.batches(name, "fast", timeout=1), 1)

    run(test)


READER = """
import asyncio, sys, meander

async def main(url, run, after):
    async with meander.connect(url) as client:
        reader = client.batches(run, "trainer", after=after)
        async for batch in reader:
            print(batch.name, batch.digest(), batch.cursor, flush=True)
            if sys.stdin.readline() == "":
                return

asyncio.run(main(*sys.argv[1:]))
"""


class Process:
    """A reader in a process of its own, which takes a batch for each line that it is told."""

    def __init__(self, url, run, after=""):
        self.p = subprocess.Popen(
            [sys.executable, "-c", READER, url, run, after], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def batch(self):
        return self.p.stdout.readline().split()

    def done(self):
        self.p.stdin.write("\n")
        self.p.stdin.flush()

    def kill(self):
        self.p.send_signal(signal.SIGKILL)
        self.p.wait()


def test_killed_and_resumed(run, url):
    """A process that is killed with a batch in hand: the next one gets that batch at once, and no batch before it."""

    async def test(client, name):
        for i in range(4):
            await publish(client, name, f"u{i}", f"b{i}")
        order = []
        async for e in client.batch_events(name):
            order.append(e["batch"])
            if len(order) == 4:
                break
        reader = Process(url, name)
        seen = [await asyncio.to_thread(reader.batch)]
        reader.done()
        seen.append(await asyncio.to_thread(reader.batch))  # in hand
        reader.kill()
        reader = Process(url, name)
        again = await asyncio.to_thread(reader.batch)
        assert again == seen[1]
        for _ in range(2):
            reader.done()
            seen.append(await asyncio.to_thread(reader.batch))
        assert [s[0] for s in seen] == order and len({s[1] for s in seen}) == 4
        reader.kill()
        # What a checkpoint says goes before what was acknowledged: on, and back.
        reader = Process(url, name, seen[3][2])
        pending = asyncio.create_task(asyncio.to_thread(reader.batch))
        await publish(client, name, "u4", "b4")
        assert (await pending)[0] == "b4"
        reader.kill()
        reader = Process(url, name, seen[0][2])
        assert await asyncio.to_thread(reader.batch) == seen[1]
        reader.kill()

    run(test)


def test_taken_over(run):
    """Who opens a name takes it; the one before is told, and acknowledges nothing any more."""

    async def test(client, name):
        for i in range(2):
            await publish(client, name, f"u{i}", f"b{i}")
        one, two = client.batches(name, "trainer"), client.batches(name, "trainer")
        batch = await anext(first_of := one.__aiter__())
        again = await anext(second_of := two.__aiter__())
        assert again.digest() == batch.digest()
        with pytest.raises(meander.Taken, match="another process reads as trainer"):
            await one.done(batch)
        with pytest.raises(meander.Taken):
            await anext(first_of)
        assert (await anext(second_of)).name != again.name

    run(test)


def test_shared(run):
    async def test(client, name):
        for i in range(6):
            await publish(client, name, f"u{i}")
        seen = []

        async def read():
            async for group in client.stream_groups(name, "workers", shared=True):
                seen.append(group.uid)
                await asyncio.sleep(0)

        workers = [asyncio.create_task(read()) for _ in range(3)]
        while len(seen) < 6:
            await asyncio.sleep(0.05)
        for w in workers:
            w.cancel()
        assert sorted(seen) == [f"u{i}" for i in range(6)]

    run(test)


def test_places_of_a_user(run):
    """The place of a user with a key has a name that others cannot guess. That of an older release goes on under it."""

    async def test(client, name):
        async def places():
            listed = await meander.cursor.api(client.nc, "CONSUMER.NAMES.MDR_ADVANTAGES")
            return {place for place in listed["consumers"] or [] if name in place}

        async def read(who, count):
            uids = []
            async for group in who.stream_groups(name, "trainer", timeout=60):
                uids.append(group.uid)
                if len(uids) == count:
                    return uids

        for i in range(4):
            await publish(client, name, f"u{i}")
        one, other = meander.Client(client.nc, "1f3c"), meander.Client(client.nc, "77ab")
        before = await read(client, 2)  # the first of them is acknowledged
        assert await places() == {f"reader-{name}-trainer-0"}
        after = await read(one, 3)
        assert after[0] == before[1] and sorted(before[:1] + after) == ["u0", "u1", "u2", "u3"]
        assert await places() == {f"reader-1f3c-{name}-trainer-0"}
        assert await read(other, 1) == before[:1]
        assert await places() == {f"reader-1f3c-{name}-trainer-0", f"reader-77ab-{name}-trainer-0"}

    run(test)


def test_cursors_of_elsewhere(run):
    async def test(client, name):
        await publish(client, name, "u", "b")
        batch = await first(client.batches(name))
        seq, made = batch.cursor.split("@")
        for after in ("nonsense", f"{seq}@{int(made) - 1}", f"{int(seq) + 10**6}@{made}"):
            with pytest.raises(ValueError, match="after: "):
                await first(client.batches(name, after=after))
        for bad in ({"name": "a.b"}, {"shared": True}, {"faults": "ignore"}):
            with pytest.raises(ValueError, match="must be|needs"):
                client.batches(name, **bad)

    run(test)


def test_a_server_on_which_no_pipeline_has_been_up():
    """Who reads before `meander up` hears what to do."""

    class Bare:
        connected_url = urllib.parse.urlsplit("nats://me:secret@10.0.0.7:4222")

        def jetstream(self, **_):
            return None

        async def request(self, *_, **__):
            error = {"code": 404, "err_code": 10059, "description": "stream not found"}
            return types.SimpleNamespace(data=json.dumps({"error": error}).encode())

    async def read():
        await anext(aiter(meander.Client(Bare()).batches("demo")))

    with pytest.raises(meander.NoStreams, match=r"no pipeline has been up on 10.0.0.7:4222: start `meander up`"):
        asyncio.run(read())


def test_strangers(run):
    """Whatever is on the subjects: readers skip it, say so, and go on."""

    async def test(client, name):
        async def store(subject, data):
            await client.js.publish(f"mdr.v1.{subject}", data)

        def event(kind, **fields):
            """An event whose other fields are 0, empty or absent."""
            zero = {int: 0, NUMBER: 0.0, str: "", bool: False}
            plain = {k: zero[of] for k, of in form(kind).items() if isinstance(of, (type, tuple))}
            return msgpack.packb(plain | fields)

        await store(f"batch.{name}.bytes", b"\xc1")
        await store(f"batch.{name}.deep", b"\x91" * 100_000)
        await store(
            f"batch.{name}.other",
            event("Batch", run=name, batch="another", groups=1, uids=["u"], samples=1, closed=1),
        )
        await store(
            f"batch.{name}.types",
            event("Batch", run=name, batch="types", groups="1", uids=[3], samples=None),
        )
        # Well formed, of groups that do not exist; and a group of which nothing is what it says.
        await store(
            f"batch.{name}.empty",
            event("Batch", run=name, batch="empty", groups=1, uids=["nobody"], samples=1, closed=1),
        )
        member = {"sample_index": 0, "reward": 1.0, "advantage": 1.0, "status": "scored", "trajectory_seq": 1 << 40}
        forged = event(
            "Advantage", run=name, uid="forged", batch="forged", status="complete", group_size=1, members=[member],
            closed=1
        )
        await store(f"advantage.{name}.forged", forged)
        await publish(client, name, "u", "b")
        reader = client.batches(name, faults="skip", timeout=30)
        async for batch in reader:
            if batch.size:
                break
            assert batch.name == "empty"
        assert batch.name == "b" and reader.health.faulty.total() == 4 and sum(
            reader.health.left_out.values()
        ) == 1, str(reader.health)
        groups = client.stream_groups(name, faults="skip", timeout=30)
        assert (await first(groups)).uid == "u" and groups.health.left_out
        with pytest.raises(meander.Gone, match="no longer stored"):
            await first(client.stream_groups(name))

    run(test)


def test_left_out(run):
    async def test(client, name):
        await publish(client, name, "old")
        await client.publish(
            name, "a red fox", uid="gone", group_size=2, num_inference_steps=2, reward=[{"name": "external"}]
        )
        await client.cancel(name, "gone")
        await publish(client, name, "new")
        closed = set()
        async for advantage in client.advantages(name):
            closed.add(advantage["uid"])
            if len(closed) == 3:
                break
        reader = client.stream_groups(name, keep=lambda g: "too old" if g.uid == "old" else "", follow=False)
        assert [g.uid async for g in reader] == ["new"] and reader.health.left_out == {
            "too old": 1, "status cancelled": 1
        }
        group = await client.group(name, "new")
        assert meander.fresh(min_policy_version=1)(group).startswith("policy version 0")
        assert "a span of 1" in meander.fresh(max_policy_span=0)(group)
        assert "s ago" in meander.fresh(max_age=1e-9)(group) and "weights" in meander.fresh(
            weights_digest="0" * 64
        )(group)
        assert meander.fresh(
            max_age=3600, max_policy_span=1, weights_digest=group.samples[0].trajectory["weights_digest"]
        )(group) == ""

    run(test)


def test_server_restart(binary, tmp_path, run):
    """The server is killed under a reader, and comes back: the reader goes on, and loses and repeats nothing."""
    up = Up(tmp_path).start()

    async def test(client, name):
        seen = []
        await publish(client, name, "u0", "b0")
        reader = client.batches(name, "trainer")
        async for batch in reader:
            seen.append(batch.name)
            if len(seen) == 1:
                up.stop(kill=True)
                up.start()
                async with meander.connect(up.url) as other:
                    await publish(other, name, "u1", "b1")
            else:
                break
        assert seen == ["b0", "b1"]

    try:
        run(test, up.url)
    finally:
        up.stop()


@pytest.mark.parametrize("shared", [False, True])
def test_a_server_that_has_forgotten_what_it_sent(run, shared):
    """As one does that is killed: what was read is acknowledged all the same, or sent again to those who share it."""

    async def test(client, name):
        await publish(client, name, "u0", "b0")
        reader = client.batches(name, "trainer", shared=shared)
        batches = aiter(reader)
        batch = await anext(batches)
        consumer = reader.cursor.consumer
        info = await cursor.api(client.nc, f"CONSUMER.INFO.{cursor.STREAM}.{consumer}")
        await cursor.api(client.nc, f"CONSUMER.DELETE.{cursor.STREAM}.{consumer}")
        config = info["config"]
        body = {"stream_name": cursor.STREAM, "config": config, "action": "create"}
        create = f"CONSUMER.CREATE.{cursor.STREAM}.{consumer}.{config['filter_subject']}"
        await cursor.api(client.nc, create, body)
        await asyncio.wait_for(reader.done(batch), 30)
        if shared:
            assert (await anext(batches)).name == "b0"
        else:
            assert await reader.cursor.acknowledged() == batch.cursor
            await publish(client, name, "u1", "b1")
            assert (await anext(batches)).name == "b1"

    run(test)


def test_prompts_for_a_server_that_is_away(binary, tmp_path, run):
    """It is killed, and comes back: a prompt that was published meanwhile makes a group, and has its receipt."""
    up = Up(tmp_path).start()

    async def test(client, name):
        up.stop(kill=True)
        asked = [asyncio.create_task(publish(client, name, u, timeout=50)) for u in ("a", "b")]
        await asyncio.sleep(0)
        up.start()
        assert [(await r)["uid"] for r in asked] == ["a", "b"]
        info = await client.js.stream_info("MDR_GROUPS", subjects_filter=f"mdr.v1.group.{name}.*")
        assert len(info.state.subjects) == 2

    try:
        run(test, up.url)
    finally:
        up.stop()


class Lost:
    """A subscription whose first message is lost with the connection."""

    def __init__(self, sub, nc):
        self.sub, self.nc, self.unsubscribe = sub, nc, sub.unsubscribe

    async def next_msg(self, timeout):
        m = await self.sub.next_msg(timeout)
        if self.nc.stats["reconnects"] == 0:
            self.nc.stats["reconnects"] = 1
            raise nats.errors.TimeoutError
        return m


def test_a_receipt_that_was_lost(run):
    """A prompt with a uid is published again, which changes nothing; one without is not: it would be a second group."""

    async def test(client, name):
        subscribe = client.nc.subscribe

        async def lost(subject, **named):
            sub = await subscribe(subject, **named)
            return sub if named else Lost(sub, client.nc)  # with a callback: of requests

        client.nc.subscribe = lost
        assert (await publish(client, name, "u"))["uid"] == "u"
        client.nc.stats["reconnects"] = 0
        with pytest.raises(TimeoutError, match="no intake answered in time; the prompt is stored"):
            await client.publish(name, "a red fox", group_size=2, num_inference_steps=4, timeout=2)
        client.nc.subscribe = subscribe
        info = await client.js.stream_info("MDR_GROUPS", subjects_filter=f"mdr.v1.group.{name}.*")
        assert len(info.state.subjects) == 2

    run(test)


def test_an_answer_to_a_ping_that_was_given_up(binary, tmp_path, run):
    """The server stands still for longer than a flush waits: the connection goes on all the same."""
    up = Up(tmp_path).start()

    async def test(client, name):
        up.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, up.process.pid, os.WSTOPPED | os.WNOWAIT)  # before that its threads may answer
        try:
            with pytest.raises(nats.errors.TimeoutError):
                await client.nc.flush(timeout=0.1)
        finally:
            up.process.send_signal(signal.SIGCONT)
        assert (await publish(client, name, "u", timeout=50))["accepted"]

    try:
        run(test, up.url)
    finally:
        up.stop()


def test_external_server(binary, tmp_path, run):
    """Services and server each a program of its own."""

    async def test(client, name):
        await publish(client, name, "u", "b")
        batch = await first(client.batches(name, "trainer", timeout=50))
        batch.check(batch.recompute_log_prob(velocities(batch)))

    with Apart(tmp_path, sampler="synthetic") as apart:
        run(test, apart.url)


class Stored(meander.Client):
    """A client of a store that has one object."""

    def __init__(self, data):
        self.data = data

    async def blob(self, ref):
        return meander.events.checked(self.data, ref)


def test_frames():
    """The frames of a video, and of an image its one; a file that is not what the event says is refused."""
    image = pytest.importorskip("PIL.Image", reason="decoding images needs Pillow")
    pixels = np.random.default_rng(3).integers(0, 256, (5, 6, 4, 3), np.uint8)
    file = io.BytesIO()
    pages = [image.fromarray(p) for p in pixels]
    pages[0].save(file, "PNG", save_all=True, append_images=pages[1:], duration=125)
    data, digest = file.getvalue(), hashlib.sha256(pixels.tobytes()).hexdigest()
    ref = {"bucket": "b", "digest": hashlib.sha256(data).hexdigest(), "size": len(data)}
    sample = {
        "uid": "u", "sample_index": 0, "stop_reason": "completed",
        "media": [{"kind": "video", "format": "apng", "frames": 5, "height": 6, "width": 4, "digest": digest, "ref": ref}],
    }
    assert (asyncio.run(Stored(data).frames(sample)) == pixels).all()
    for wrong in ({"frames": 4}, {"height": 4, "width": 6}, {"digest": "0" * 64}):
        with pytest.raises(meander.EventError):
            asyncio.run(Stored(data).frames(sample | {"media": [sample["media"][0] | wrong]}))
    file = io.BytesIO()
    pages[2].save(file, "PNG")
    digest = hashlib.sha256(pixels[2].tobytes()).hexdigest()
    one = {"kind": "image", "format": "png", "height": 6, "width": 4, "digest": digest, "data": file.getvalue()}
    still = sample | {"media": [one]}
    assert (asyncio.run(Stored(b"").frames(still)) == pixels[2:3]).all()
    with pytest.raises(meander.EventError, match="sample 0 has no video: it has image"):
        asyncio.run(Stored(b"").medium(still, "video"))


def test_a_batch_with_failed_groups_says_so(run):
    """What is missing in a named batch is counted by its reason; a batch of which nothing is there is an error."""

    async def publish_failing(client, name, uid, batch, groups):
        await client.publish(
            name, "a red fox", uid=uid, group_size=2, num_inference_steps=4, reward=[{"name": f"nats:{name}"}],
            batch={"id": batch, "groups": groups},
        )

    async def test(client, name):
        async def fails(msg):
            await msg.respond(msgpack.packb({"v": 1, "error": "no face in the image"}))

        await client.nc.subscribe(f"mdr.v1.score.{name}", cb=fails)
        await client.nc.flush()
        for uid in ("x", "y"):
            await publish_failing(client, name, uid, "none", 2)
        reader = client.batches(name, "trainer", timeout=50)
        with pytest.raises(meander.EmptyBatch, match="batch none: none of its 2 groups counts: 2 x status failed: "
        "no sample was scored; sample 0: .*no face") as e:
            await first(reader)
        assert set(e.value.left_out) == {"x", "y"} and reader.health.left_out.total() == 2
        await publish_failing(client, name, "z", "some", 2)
        await publish(client, name, "u", "some", 2)
        reader = client.batches(name, "trainer", timeout=50)  # what was said once does not come again
        batch = await first(reader)
        assert batch.name == "some" and set(batch["uid"]) == {"u"} and list(batch.left_out) == ["z"]
        ((why, count),) = reader.health.left_out.items()
        assert count == 1 and why.startswith("status failed: ") and "no face" in why
        given = client.batches(name, empty="give", timeout=50)
        batch = await first(given)
        assert batch.name == "none" and batch.size == 0 and set(batch.left_out) == {"x", "y"}
        assert (await first(client.batches(name, after=e.value.cursor, timeout=50))).name == "some"
        alone = client.batches(name, groups=2, timeout=1)
        with pytest.raises(TimeoutError, match="left out: 3 x status failed: .*no face"):
            await first(alone)
        with pytest.raises(ValueError, match="empty: 'no'; must be raise or give"):
            client.batches(name, empty="no")

    run(test)
