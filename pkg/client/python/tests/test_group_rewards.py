"""Reward functions of one's own that rate whole groups: functions with the decorator, and as workers of a pipeline."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import uuid

import msgpack
import pytest
from conftest import ENVIRONMENT, Up, first

import meander
from meander.rewards import Busy, Preference, Reward, Score, scorer
from meander.rewards.worker import answers

Image = pytest.importorskip(
    "PIL.Image", reason="rewards score images: pip install 'meander-rl[images]' brings Pillow"
)


def png(shade):
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (shade, 0, 0)).save(file, "PNG")
    return {"image": file.getvalue(), "image_format": "png"}


def group(*members, size=0, **more):
    return msgpack.packb({
        "v": 1, "name": "x", "prompt": "a fox", "ground_truth": "", "params": {"k": "v"}, "image": b"",
        "image_format": "", "group_size": size or len(members), "members": list(members), **more,
    })  # fmt: skip


def asked(reward, *requests, fetch=None):
    return asyncio.run(answers(reward, requests, 8, fetch))


@scorer(group=True)
def reds(members):
    """How red each is."""
    return [m.image.getpixel((0, 0))[0] for m in members]


def test_a_function_sees_the_group_and_scores_are_of_the_samples_that_they_name():
    seen = []

    @scorer(group=True, name="see", version="v7")
    async def see(members):
        seen.append(members)
        return [Score(len(members), "seen"), ValueError("all black"), float("nan")]

    before = {"name": "image", "type": "image", "file": png(3)["image"]}
    missing = [{"sample_index": 1, "why": "trajectory failed: NaN"}]
    members = ({"sample_index": 0, **png(7), "conditions": [before]}, {"sample_index": 2, **png(9)},
               {"sample_index": 3, **png(1), "frames": [png(4)["image"], png(5)["image"]]})  # fmt: skip
    (reply,) = asked(see, group(*members, size=4, missing=missing, metadata={"tag": 5}))
    assert reply == {"v": 1, "scores": [
        {"sample_index": 0, "score": 3.0, "detail": "seen"}, {"sample_index": 2, "error": "all black"},
        {"sample_index": 3, "error": "the score is nan; must be a finite number"},
    ]}  # fmt: skip
    (g,) = seen
    assert [m.sample_index for m in g] == [0, 2, 3] and [m.image.getpixel((0, 0))[0] for m in g] == [7, 9, 1]
    assert g[0].conditions["image"][0].getpixel((0, 0))[0] == 3 and [len(m.frames) for m in g] == [0, 0, 2]
    assert (g.prompt, g.params, g.metadata, g.size) == ("a fox", {"k": "v"}, {"tag": 5}, 4)
    assert g.missing == {1: "trajectory failed: NaN"}
    assert (see.name, see.version) == ("see", "v7") and len(reds.version) == 16


def test_texts_and_preferences():
    @scorer(group=True)
    def longer(members):
        pairs = [(i, j) for i in range(len(members)) for j in range(i)]
        return [Preference(i, j, float(len(members[i].text) > len(members[j].text))) for i, j in pairs]

    texts = [{"sample_index": i, "text": t, "messages": [{"role": "user", "content": "?"}]}
             for i, t in ((1, "a"), (4, "abc"), (6, "ab"))]  # fmt: skip
    (reply,) = asked(longer, group(*texts, size=8))
    assert reply["preferences"] == [{"a": 4, "b": 1, "p": 1.0}, {"a": 6, "b": 1, "p": 1.0}, {"a": 6, "b": 4, "p": 0.0}]


@pytest.mark.parametrize("gives, says, again", [
    (lambda g: [1.0], "gives 1 scores for 2 samples", False), (lambda g: [1.0] * 3, "gives 3 scores", False),
    (lambda g: [], "gives 0 scores", False), (lambda g: [Preference(0, 2, 1.0)], "must be places of two members", False),
    (lambda g: [Preference(0, 0, 1.0)], "must be places of two members", False),
    (lambda g: {1: 0.5, 0: 1.0}, "gives a dict; must be a list", False), (lambda g: "01", "gives a str", False),
    (lambda g: {0.5, 1.0}, "gives a set", False), (lambda g: None, "NoneType", False),
    (lambda g: [Busy("later"), 1.0], "later", True), (lambda g: g.nothing, "AttributeError", False),
])  # fmt: skip
def test_a_wrong_answer_is_the_error_of_the_group(gives, says, again):
    two = group({"sample_index": 0, **png(1)}, {"sample_index": 1, **png(2)})
    (reply,) = asked(scorer(group=True, name="f")(gives), two)
    assert says in reply["error"] and reply["retry"] == again


def test_what_is_asked_in_the_other_way_is_said():
    class Red(Reward):
        name, extra, version = "red", "images", "1"

        def score(self, samples):
            return [Score(float(s.image.getpixel((0, 0))[0])) for s in samples]

    @scorer
    def red(sample):
        return sample.image.getpixel((0, 0))[0]

    one = msgpack.packb({"v": 1, "name": "x", "prompt": "", "params": {}, **png(8)})
    assert "whole groups: ask with --group-min" in asked(reds, one)[0]["error"]
    assert "leave out --group-min" in asked(Red(), group({"sample_index": 0, **png(1)}))[0]["error"]
    assert [r["score"] for reward in (Red(), red) for r in asked(reward, one)] == [8.0, 8.0]


def test_members_may_be_in_the_store():
    ref = {"bucket": "mdr-blobs", "digest": "ab", "size": 9}

    async def fetch(of, index=1):
        assert of == ref
        return msgpack.packb({"sample_index": index, **png(6)})

    request = group({"sample_index": 0, **png(1)}, {"sample_index": 1, "image": b"", "ref": ref})
    assert [s["score"] for s in asked(reds, request, fetch=fetch)[0]["scores"]] == [1.0, 6.0]
    (reply,) = asked(reds, request, fetch=lambda of: fetch(of, 5))
    assert "not the member 1" in reply["error"]


RANK = """
from meander.rewards import Score, scorer, serve

@scorer(group=True)
def rank(group):
    reds = [m.image.resize((1, 1)).getpixel((0, 0))[0] for m in group]
    return [Score(sorted(reds).index(x), f"{len(m.image.tobytes())} bytes") for x, m in zip(reds, group)]

serve(rank)
"""


@pytest.mark.parametrize("side, size", [(64, 6), (1024, 6)])
def test_a_pipeline_asks_a_program(binary, tmp_path, side, size):
    """A program rates the groups of a pipeline, also those that no message holds; one that is killed is waited for."""
    (tmp_path / "rank.py").write_text(RANK)
    up = Up(tmp_path, None).start()
    args = [sys.executable, str(tmp_path / "rank.py"), "--nats", up.url]
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    workers = []

    def work():
        workers.append(subprocess.Popen(args, env=env, stdout=subprocess.PIPE, text=True))
        assert "is loaded" in workers[-1].stdout.readline() and "nats:rank" in workers[-1].stdout.readline()

    async def test():
        async with meander.connect(up.url) as client:
            run, reward = "py" + uuid.uuid4().hex[:8], [{"name": "nats:rank", "group_min": 2}]
            for uid in ("one", "two"):
                if uid == "two":
                    workers[-1].kill()
                await client.publish(
                    run, "a red fox", uid=uid, group_size=size, seed=3, num_inference_steps=2, reward=reward,
                    height=side, width=side,
                )  # fmt: skip
                if uid == "two":
                    work()
            groups = {}
            async for g in client.stream_groups(run, timeout=60):
                groups[g.uid] = g
                if len(groups) == 2:
                    break
            for g in groups.values():
                assert g.advantage["status"] == "complete"
                assert len({s.member["reward"] for s in g.samples}) > 1, [s.member for s in g.samples]
                files = [io.BytesIO() for _ in g.samples]
                for s, file in zip(g.samples, files):
                    Image.fromarray(await client.pixels(s.trajectory)).save(file, "PNG")
                assert (sum(f.tell() for f in files) > 1 << 20) == (side > 64)  # what a message holds
            m = await client.js.get_last_msg("MDR_REWARDS", f"mdr.v1.reward.*.{run}.*.one.0")
            return msgpack.unpackb(m.data)["scores"][0]

    try:
        work()
        score = asyncio.run(test())
        assert score["members"] == size and score["detail"] == f"{3 * side * side} bytes"
        workers[-1].send_signal(signal.SIGTERM)
        assert workers[-1].wait(60) == 0
    finally:
        for w in workers:
            w.kill()
            w.wait()
        up.stop()
