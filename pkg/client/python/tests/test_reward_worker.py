"""Workers of reward functions: what they read, answer and refuse, and how they end."""

import asyncio
import io
import math
import threading

import msgpack
import numpy as np
import pytest
from test_rewards import SAMPLES, Image

import meander
from meander.rewards import Busy, Fault, Reward, Score
from meander.rewards.worker import Worker, answers, read


def file(shown, form="PNG"):
    out = io.BytesIO()
    shown.save(out, form)
    return out.getvalue()


def request(prompt="x", shown=SAMPLES[0].image, **more):
    fields = {
        "v": 1, "name": "f", "prompt": prompt, "ground_truth": "", "params": {}, "image": file(shown),
        "image_format": "png"
    }
    return msgpack.packb({**fields, **more})


class Bright(Reward):
    """How bright an image is; some prompts are a fault of it."""

    name, extra, version = "bright", "images", "bright-1"

    def __init__(self):
        self.batches = []

    def score(self, samples):
        self.batches.append(len(samples))
        out = []
        for s in samples:
            if s.prompt == "poison":
                raise RuntimeError("the batch is lost")
            if s.prompt == "full":
                raise MemoryError("out of memory")
            known = {"busy": Busy("later"), "bad": ValueError("no such thing"), "nan": Score(math.nan), "plain": 0.5}
            out.append(known.get(s.prompt) or Score(float(np.mean(s.image)), s.prompt))
        return out


def test_an_error_is_that_of_its_sample():
    reward = Bright()
    grey = [Image.new("RGB", (8, 8), (v, v, v)) for v in (10, 20, 60)]
    requests = [request("a", grey[0]), request("poison"), request("full"), request("busy"), request("bad"),
        request("nan"), b"\xff",
                request(v=2), request(text="hello"), request(image=b"x"),
                request("b", image=file(grey[1], "JPEG"), image_format="jpeg"),
                request("c", frames=[file(g) for g in grey]), request(
                    image_format="gif", image=file(grey[0], "GIF")
                ), request(prompt=3), request("plain")]
    replies = asyncio.run(answers(reward, requests, batch=16))
    for reply in replies:
        assert reply["v"] == 1 and ("score" in reply) != ("error" in reply)
    scores = [r.get("score") for r in replies]
    assert [i for i, s in enumerate(scores) if s is not None] == [0, 10, 11]
    assert scores[0] == 10 and scores[10] == pytest.approx(20, abs=1) and scores[11] == 30  # the mean of the frames
    assert replies[11]["detail"] == "c"
    errors = [r.get("error", "") for r in replies]
    said = {1: "the batch is lost", 2: "out of memory", 3: "later", 4: "no such thing", 5: "nan", 6: "want a map",
        7: "v: 2", 8: "text",
            9: "identify", 12: "identify", 13: "prompt", 14: "must be Score"}  # fmt: skip
    for i, why in said.items():
        assert why in errors[i], (i, errors[i])
    assert [i for i, r in enumerate(replies) if r.get("retry")] == [2, 3]
    assert max(reward.batches) > 1
    reward.batches.clear()
    asyncio.run(answers(reward, [request("a")] * 5, batch=2))
    assert reward.batches == [2, 2, 1]


def test_a_worker_answers_what_came_before_it_was_stopped(run):
    """Requests that wait are scored together; those that came before the stop are answered."""

    class Slow(Bright):
        began, go = threading.Event(), threading.Event()

        def score(self, samples):
            self.began.set()
            assert self.go.wait(30)
            return super().score(samples)

    async def test(client, name):
        reward, stop, ready = Slow(), asyncio.Event(), asyncio.Event()
        worker = Worker(reward, batch=4)
        serving = asyncio.create_task(worker.serve(client, name, stop, ready.set))
        await ready.wait()
        async with meander.connect(client.nc.connected_url.geturl()) as other:
            subject = f"mdr.v1.score.{name}"
            first = asyncio.create_task(other.nc.request(subject, request("0"), timeout=30))
            await asyncio.to_thread(reward.began.wait, 30)
            rest = [asyncio.create_task(other.nc.request(subject, request(str(i)), timeout=30)) for i in range(1, 6)]
            while worker._queue.qsize() < 5:
                await asyncio.sleep(0.01)
            stop.set()
            reward.go.set()
            replies = [msgpack.unpackb(m.data) for m in await asyncio.gather(first, *rest)]
        await serving
        assert [r["detail"] for r in replies] == [str(i) for i in range(6)] and worker.scored == 6
        assert reward.batches == [1, 4, 1]

    run(test)


def test_conditions_reach_a_reward():
    red, mask = (Image.new("RGB", (8, 8), c) for c in ("red", "white"))
    film = io.BytesIO()
    red.save(film, "PNG", save_all=True, append_images=[mask, red])
    given = [("image", file(red)), ("image", file(mask)), ("mask", file(mask)), ("video", film.getvalue())]
    given.append(("audio", b""))
    (sample,) = read(request(conditions=[{"name": "x", "type": t, "file": f} for t, f in given]))
    seen = {t: [np.asarray(i)[0, 0].tolist() for i in images] for t, images in sample.conditions.items()}
    r, w = [255, 0, 0], [255, 255, 255]
    assert seen == {"image": [r, w], "mask": [w], "video": [w]}  # of a video the frame in the middle
    with pytest.raises(ValueError, match="condition of type mask: .*identify"):
        read(request(conditions=[{"name": "x", "type": "mask", "file": b"no"}]))
    assert read(request())[0].conditions == {}


def test_a_request_that_nobody_waits_for_is_not_computed(run):
    async def test(client, name):
        reward, stop, ready = Bright(), asyncio.Event(), asyncio.Event()
        serving = asyncio.create_task(Worker(reward, patience=0.0).serve(client, name, stop, ready.set))
        await ready.wait()
        async with meander.connect(client.nc.connected_url.geturl()) as other:
            reply = msgpack.unpackb((await other.nc.request(f"mdr.v1.score.{name}", request(), timeout=30)).data)
        stop.set()
        await serving
        assert reply["retry"] and "start more" in reply["error"] and not reward.batches

    run(test)


def test_a_worker_whose_device_is_lost_ends(run):
    """Its requests come again, elsewhere: else it would be the fastest to answer, with errors alone."""

    class Lost(Bright):
        def score(self, samples):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async def test(client, name):
        stop, ready = asyncio.Event(), asyncio.Event()
        serving = asyncio.create_task(Worker(Lost()).serve(client, name, stop, ready.set))
        await ready.wait()
        async with meander.connect(client.nc.connected_url.geturl()) as other:
            reply = msgpack.unpackb((await other.nc.request(f"mdr.v1.score.{name}", request(), timeout=30)).data)
        with pytest.raises(Fault, match="start this worker again"):
            await serving
        assert reply["retry"] and "illegal memory access" in reply["error"]

    run(test)
