"""Samples of several stages on a pipeline of two lanes: a writer, a painter, and a judge who speaks."""

import asyncio
import http.server
import importlib.util
import json
import threading

import numpy as np
import pytest
from conftest import ROOT, SIGNS, Up, announced

import meander
from meander.client import tasks
from meander.data.events import EventError
from meander.train import prompts

THINK = meander.stage("think", model="sums", text={"temperature": 1.5, "tokens_per_event": 8})
PAINT = {"model": "signs", "steps": 2, "rollout": {"return_conditioning": True}}
GLYPH = [{"name": "glyph", "ground_truth": "105"}]


def test_two_readers_read_one_run_each_its_stage(lanes, run):
    async def check(client, name):
        paint = meander.stage("paint", 'a red sign that says "{think.text}"', children=2, **PAINT)
        for uid in ("g0", "g1"):
            await client.publish(name, "47+58=?", timeout=60, uid=uid, seed=3, group_size=4, reward=GLYPH,
                                 batch={"id": "b", "groups": 2}, **meander.stages(THINK, paint))  # fmt: skip
        batch = await anext(aiter(client.batches(name, "both", timeout=60)))
        assert isinstance(batch, meander.StagedBatch) and batch.stages == ["think", "paint"] and batch.size == 8
        think, painted = batch.stage("think"), batch.stage("paint")
        assert think["sample_index"].tolist() == [0, 2] * 2 and painted["sample_index"].tolist() == [0, 1, 2, 3] * 2
        assert think["rewards"].tolist() == batch["rewards"].reshape(4, 2).mean(axis=1).tolist()
        assert think["prompt"].tolist() == ["47+58=?"] * 4
        wrote = np.repeat(think.texts, 2).tolist()
        assert painted["prompt"].tolist() == [f'a red sign that says "{text}"' for text in wrote]
        places = [wrote.index(text) for text in wrote]  # equal texts are encoded alike, and to the letter
        assert (painted["prompt_embeds"] == painted["prompt_embeds"][places]).all()
        for stage, whole in (("think", think), ("paint", painted)):
            reader = client.batches(name, f"of-{stage}", stage=stage, whole=stage == "think", timeout=60)
            alone = await anext(aiter(reader))
            assert type(alone) is type(whole) and (alone["advantages"] == whole["advantages"]).all()
            async for micro in alone.micro(3):
                rows = slice(None) if micro.rows is None else micro.rows
                if stage == "paint":
                    assert (micro["latents"] == whole["latents"][rows]).all()
                    longest = micro["prompt_embeds"].shape[1]
                    assert (micro["prompt_embeds"] == whole["prompt_embeds"][rows][:, :longest]).all()
        with pytest.raises(EventError, match="stage 'sky' is not there; must be one of think, paint"):
            await anext(aiter(client.batches(name, stage="sky", timeout=60)))

    run(check, lanes)


def test_each_text_has_a_tree_of_images(lanes, run):
    async def check(client, name):
        tree = {"branches": [{"step_index": 1, "width": 2}, {"step_index": 2, "width": 2}]}
        paint = meander.stage("paint", 'a red sign that says "{think.text}"', tree=tree, model="signs", steps=3)
        await client.publish(name, "47+58=?", timeout=60, uid="g", seed=3, group_size=8,
                             reward=[{"name": "jpeg_compressibility"}], batch={"id": "b", "groups": 1},
                             **meander.stages(THINK, paint))  # fmt: skip
        batch = await anext(aiter(client.batches(name, "both", timeout=60)))
        painted = batch.stage("paint")
        assert painted["sample_index"].tolist() == list(range(8)) and batch.stage("think")["sample_index"].tolist() == [0, 4]
        steps = [painted["step_indices"][i][painted.mask[i]].tolist() for i in range(8)]
        assert steps == [[0, 1, 2], [2], [1, 2], [2]] * 2  # each is taken once, by the lowest leaf behind it
        (g,) = batch.groups
        start = {s.member["sample_index"]: s.facts.get("start") for s in g.stages["paint"].samples}
        parents = [s and (s["branch"]["stage"], s["branch"]["sample_index"], s["step_index"]) for _, s in sorted(start.items())]
        assert parents == [p and ("paint", p[0] + root, p[1]) for root in (0, 4) for p in (None, (0, 2), (0, 1), (2, 2))]
        a, left, kept = painted["advantages"], painted["latents"], painted["next_latents"]
        rewards = painted["rewards"].reshape(2, 2, 2)
        for root, behind in ((0, rewards[0]), (4, rewards[1])):
            assert (left[root + 1, 0] == kept[root, 1]).all() and (left[root + 2, 0] == kept[root, 0]).all()
            first, second = behind.mean(axis=1)
            assert np.sign(a[root, 1]) == np.sign(first - second) and np.isclose(a[root, 1], -a[root + 2, 0])
            assert np.isclose(a[root, 2], -a[root + 1, 0]) and np.isclose(a[root + 2, 1], -a[root + 3, 0])
        assert np.isclose(a[0, 0], -a[4, 0]) and np.sign(a[0, 0]) == np.sign(rewards[0].mean() - rewards[1].mean())

    run(check, lanes)


@pytest.mark.parametrize("stage, wrong", [
    ("typo", "g: stage 'typo' is not there; must be one of think$"),
    ("paint", "g: stage 'paint' is frozen or of an interaction, so it has no advantages; must be one of think$"),
    ("judge", "g: stage 'judge' is frozen or of an interaction"),
])  # fmt: skip
def test_a_stage_that_is_not_trained_is_refused_before_a_group_closes(lanes, run, stage, wrong):
    """Its judge listens nowhere, so no sample ends: the record of the group says it, to both kinds of readers."""

    async def check(client, name):
        paint, judge = meander.stage("paint", frozen=True, **PAINT), meander.stage("judge", interaction="silent")
        await client.publish(name, "47+58=?", timeout=60, uid="g", reward=[{"name": "confidence"}],
                             **meander.stages(THINK, judge, paint))  # fmt: skip
        for read in (client.batches, client.stream_groups):
            with pytest.raises(EventError, match=wrong):
                await anext(aiter(read(name, stage=stage, timeout=60)))
        await client.cancel(name)

    run(check, lanes)


def test_a_reader_says_what_it_waits_for(lanes, run, monkeypatch, caplog):
    """No sample of the run has run the stage, and none will: the judge ends all of them."""
    monkeypatch.setattr(tasks, "SAY", 0.5)

    async def check(client, name):
        listening = asyncio.Event()
        usher = client.interact("usher", lambda r: {"content": "no", "terminate": True}, listening.set)
        worker = asyncio.create_task(usher)
        await listening.wait()
        paint = meander.stage("paint", '{think.text}', **PAINT)
        await client.publish(name, "47+58=?", timeout=60, uid="g", reward=[{"name": "confidence"}],
                             **meander.stages(THINK, meander.stage("judge", interaction="usher"), paint))  # fmt: skip
        reader = client.batches(name, stage="paint", groups=1, timeout=5)
        with pytest.raises(TimeoutError, match="nothing came for 5 s; .*left out: 1 x no sample ran stage 'paint'"):
            await anext(aiter(reader))
        worker.cancel()
        said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert any("nothing came" in s and "left out: 1 x no sample ran stage 'paint'" in s for s in said), said

    run(check, lanes)


async def _steps(client, name):
    found = await client.js.stream_info("MDR_STEPS", subjects_filter=f"mdr.v1.step.{name}.>")
    return len(found.state.subjects or {})


def test_steps_stay_until_both_readers_have_read_them(binary, tmp_path, run):
    """Each reader has a cursor of its own: a batch that one has not acknowledged comes again to it alone, whole."""
    up = Up(tmp_path, None, "--gc-every", "100ms", model=SIGNS).start()
    asyncio.run(announced(up.url))

    async def publish(client, name, batch):
        await client.publish(
            name, "a sign", timeout=60, uid="g" + batch, group_size=2, free_read_steps=True, seed=5,
            batch={"id": batch, "groups": 1}, reward=[{"name": "jpeg_compressibility"}],
            **meander.stages(meander.stage("draft", **PAINT), meander.stage("paint", **PAINT)),
        )  # fmt: skip

    def reader(client, name, stage):
        return client.batches(name, f"of-{stage}", stage=stage, timeout=60)

    async def check(client, name):
        draft, paint = (reader(client, name, stage) for stage in ("draft", "paint"))
        await asyncio.gather(draft.cursor.open(), paint.cursor.open())
        for of, batch in ((name, "b0"), (name, "b1"), (name + "x", "b")):
            await publish(client, of, batch)
        made = aiter(draft)
        first = [await anext(made) for _ in range(2)]
        await draft.done(first[1])
        other = reader(client, name + "x", "draft")
        await other.done(await anext(aiter(other)))
        while await _steps(client, name + "x"):  # a later result, so a look that frees its steps has seen all before
            await asyncio.sleep(0.05)
        assert await _steps(client, name) == 16
        before = await anext(aiter(paint))
        await paint.close()
        paint = reader(client, name, "paint")
        again = [await anext(b) for b in [aiter(paint)] for _ in range(2)]
        names = [b.name for b in first]  # in the order in which they closed
        assert [b.name for b in again] == names and sorted(names) == ["b0", "b1"]
        assert again[0].digest() == before.digest() and (again[0]["latents"] == before["latents"]).all()
        await paint.done(again[1])
        while await _steps(client, name):
            await asyncio.sleep(0.05)
        with pytest.raises(meander.Gone, match=f"g{names[0]}"):
            await anext(aiter(client.batches(name, "late", stage="draft", timeout=60)))
        assert draft.health.groups == 2 and paint.health.groups == 2

    try:
        run(check, up.url)
    finally:
        up.stop()


def _example():
    spec = importlib.util.spec_from_file_location("sign_judge", ROOT / "pkg/client/python/examples/sign_judge.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def _judged(client, name, answer, prompt):
    """What the stages of a prompt's samples said, by sample, with a judge of the name glyph_judge."""
    listening = asyncio.Event()
    worker = asyncio.create_task(client.interact("glyph_judge", answer, listening.set))
    await listening.wait()
    try:
        await client.publish(name, prompt.pop("prompt"), timeout=60, uid="g", seed=4, group_size=4, **prompt)
        result = await anext(client.advantages(name))
    finally:
        worker.cancel()
    group = await client.group(name, "g", result)
    said = {
        (s.facts["stage"], s.member["sample_index"]): s.text.answer if s.text else s.facts["text"]["turns"][0]["text"]
        for of in group.stages.values() for s in of.samples if s.facts.get("text")
    }  # fmt: skip
    return result, [[(r["stage"], said.get((r["stage"], r["sample_index"]), "")) for r in m["stages"]]
                    for m in result["members"]]  # fmt: skip


def test_a_judge_sees_the_sign_and_the_writer_tries_again(lanes, run):
    pytest.importorskip("PIL", reason="no Pillow: pip install pillow")

    async def check(client, name):
        (prompt,) = prompts.read(ROOT / "deploy/demo/judged.jsonl")
        result, samples = await _judged(client, name, _example().judge, prompt)
        assert result["status"] == "complete"
        for ran in samples:
            stages = [stage for stage, _ in ran]
            words = dict(ran)
            ended = words["judge"] == "right"
            assert stages == ["write", "paint", "judge"] + ([] if ended else ["rewrite", "repaint"])
            assert ended or words["judge"] in ("too low", "too high") or "characters" in words["judge"]
            assert not ended or words["write"] == "105"
        assert {len(ran) for ran in samples} == {3, 5}, "the seed has samples of both kinds"

    run(check, lanes)


def test_a_later_stage_has_the_samples_that_ran_it(lanes, run):
    """A judge ends all samples of one group, and two of the other: the rewriter's batch has the two that are left."""

    async def check(client, name):
        listening = asyncio.Event()
        worker = asyncio.create_task(client.interact(
            "usher", lambda r: {"content": "again", "terminate": r["uid"] == "none" or r["sample_index"] in (0, 3)},
            listening.set))  # fmt: skip
        await listening.wait()
        judge = meander.stage("judge", interaction="usher")
        rewrite = meander.stage("rewrite", "{prompt}{think.text}", **{k: v for k, v in THINK.items() if k in ("model", "text")},
                                credit={"confidence": 1.0})  # fmt: skip
        try:
            for uid in ("none", "some"):
                await client.publish(name, "47+58=?", timeout=60, uid=uid, seed=3, group_size=4,
                                     reward=[{"name": "confidence"}], batch={"id": "b", "groups": 2},
                                     **meander.stages(THINK, judge, rewrite))  # fmt: skip
            batch = await anext(aiter(client.batches(name, "both", timeout=60)))
        finally:
            worker.cancel()
        think, again = batch.stage("think"), batch.stage("rewrite")
        assert think.size == batch.size == 8 and again["uid"].tolist() == ["some"] * 2
        assert again["sample_index"].tolist() == [1, 2] and len(again.groups) == 2
        given = batch.credit("rewrite")
        assert np.flatnonzero(~np.isnan(given)).tolist() == [5, 6] and not np.isnan(batch.credit("think")).any()
        a, b = again["rewards"]
        want = (a - b) / 2 / (abs(a - b) / np.sqrt(2) + 1e-4) if a != b else 0  # flow_grpo over the two
        assert np.allclose(given[5:7], [want, -want], rtol=1e-9, atol=0)
        assert [again["advantages"][k][again.mask[k]][0] for k in (0, 1)] == given[5:7].tolist()
        alone = await anext(aiter(client.batches(name, "rewrite", stage="rewrite", timeout=60)))
        assert isinstance(alone, meander.TextBatch) and alone["sample_index"].tolist() == [1, 2]
        none = await client.group(name, "none", stage="rewrite")
        assert none.samples == [] and none.advantage["credits"] == []

    run(check, lanes)


def test_tokens_of_a_stage_have_returns_of_their_own(lanes, run):
    """reinforce_plus_plus with gamma below 1: each token is trained for its discounted return, whitened over the batch."""

    async def check(client, name):
        again = {k: v for k, v in THINK.items() if k in ("model", "text")}
        await client.publish(name, "47+58=?", timeout=60, uid="g", seed=3, group_size=4, reward=[{"name": "confidence"}],
                             batch={"id": "b", "groups": 1}, rounds=2,
                             advantage={"estimator": "reinforce_plus_plus", "gamma": 0.5},
                             stages=[THINK, meander.stage("sum", "{prompt}{think.text}", frozen=True, **again)])  # fmt: skip
        think = (await anext(aiter(client.batches(name, "t", stage="think", timeout=60))))
        lengths = think.mask.sum(axis=1)
        assert think.size == 8 and think["round"].tolist() == [1, 2] * 4
        returns = []
        for row in range(0, 8, 2):  # both rounds are one sequence
            n = lengths[row] + lengths[row + 1]
            returns.append(think["rewards"][row] * 0.5 ** np.arange(n - 1, -1, -1))
        every = np.concatenate(returns)
        want = (every - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8)
        got = np.concatenate([think["advantages"][row][think.mask[row]] for row in range(8)])
        assert np.allclose(got, want, rtol=1e-9, atol=1e-12), "the same formula in another order of summation"

    run(check, lanes)


class Says(http.server.BaseHTTPRequestHandler):
    """An OpenAI-compatible server that reads 0 on each sign."""

    def do_GET(self):
        self.give({"data": [{"id": "tiny"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        image, question = body["messages"][0]["content"]
        assert image["image_url"]["url"].startswith("data:image/png") and "number" in question["text"]
        self.give({"choices": [{"message": {"content": "0"}}]})

    def give(self, what):
        data = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_a_model_that_reads_signs_is_a_judge_of_three_rounds(lanes, run):
    pytest.importorskip("PIL", reason="no Pillow: pip install pillow")

    async def check(client, name):
        example = _example()
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Says) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            reader = example.Reader(f"http://127.0.0.1:{server.server_port}/v1")
            paint = meander.stage("paint", 'a red sign that says "{think.text}"', **PAINT)
            judge = meander.stage("judge", "{think.text}", interaction="glyph_judge", images={"image": "paint"})
            prompt = {"prompt": "47+58=?", "reward": GLYPH, **meander.stages(THINK, paint, judge, rounds=3)}
            _, samples = await _judged(client, name, lambda request: example.judge(request, reader), prompt)
            server.shutdown()
        for ran in samples:
            assert [s for s, _ in ran] == [f"{s}{r}" for r in ("", "-2", "-3") for s in ("think", "paint", "judge")]
            words = dict(ran)
            for r in ("", "-2", "-3"):
                assert (words["judge" + r] == "the sign says 0") == (words["think" + r] == "105")
        assert any(words == "the sign says 0" for ran in samples for _, words in ran)

    run(check, lanes)
