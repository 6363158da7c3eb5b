"""Two trainers that learn from one run, each its stage: a language model and a painter."""

import asyncio
import contextlib
import json
import math
import re

import msgpack
import nats
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

import meander  # noqa: E402
from conftest import SIGNS, SUMS, Apart, announced  # noqa: E402
from meander.train.config import Config  # noqa: E402
from test_learning import ended, started, until, updates  # noqa: E402

SMALL = {"groups": 2, "group_size": 4, "rank": 4, "updates": 14, "beta": 0.01, "held_out": "", "gold": "", "stop": False}
PATIENCE = 900  # of a run in which much is killed, seconds
LANES = {"think": {"lane": "sums", "model": str(SUMS)}, "paint": {"lane": "signs", "model": str(SIGNS), "steps": 3}}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A file of prompts of two stages."""
    think = meander.stage("think", model="sums", text={"temperature": 1.5, "tokens_per_event": 8})
    paint = meander.stage("paint", 'a red sign that says "{think.text}"', model="signs")
    file, reward = tmp_path_factory.mktemp("asked") / "prompts.jsonl", {"name": "glyph", "stage": "paint"}
    file.write_text("".join(
        json.dumps({"prompt": f"{a}+{b}=?", "reward": [{**reward, "ground_truth": str(a + b)}],
                    **meander.stages(think, paint)}) + "\n"
        for a in range(20, 24) for b in range(30, 33)
    ))  # fmt: skip
    return file


def trainer(url, out, asked, stage):
    """One of both, as a process of its own."""
    more = {"prompts": str(asked), "beside": "think"} if stage == "paint" else {"prompts": ""}
    fields = SMALL | LANES[stage] | more | {"stage": stage, "run_name": out.name, "patience": float(PATIENCE)}
    return started(url, out / stage, **fields)


# What is said of how something was made, and not of what was made. After a crash the same weights have another version,
# which is in content_digest; weights_digest is compared.
HOW = {
    "attempt", "sampler", "timings", "steps", "trajectory_seq", "trajectory_seqs", "prompt_seq", "created", "deadline",
    "opened", "closed", "sample_started", "sample_finished", "scored", "duration_ns", "policy_version_min",
    "policy_version_max", "min_policy_version", "content_digest",
}  # fmt: skip


def what(event):
    """An event without how it was made."""
    if isinstance(event, dict):
        # Other metrics than the critic's are of time, and of versions.
        return {
            k: [m for m in v if m["name"].startswith("critic/")] if k == "metrics" else what(v)
            for k, v in event.items() if k not in HOW
        }  # fmt: skip
    return [what(v) for v in event] if isinstance(event, list) else event


async def subjects(client, stream, kind, stage="*"):
    """The subjects of a run's events; it asks again while the server is away."""
    filters = {
        "trajectory": f"mdr.v1.trajectory.r.*.*.{stage}", "reward": "mdr.v1.reward.*.r.>",
        "advantage": "mdr.v1.advantage.r.>", "batch": "mdr.v1.batch.r.>",
    }  # fmt: skip
    while True:
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
            return (await client.js.stream_info(stream, subjects_filter=filters[kind])).state.subjects or {}
        await asyncio.sleep(0.02)


async def stored(url):
    """All that is stored of what was made."""
    async with meander.connect(url) as client:
        return {
            subject: what(msgpack.unpackb((await client.js.get_last_msg(stream, subject)).data))
            for stream, kind in [
                ("MDR_TRAJECTORIES", "trajectory"), ("MDR_REWARDS", "reward"), ("MDR_ADVANTAGES", "advantage"),
                ("MDR_ADVANTAGES", "batch"),
            ]
            for subject in await subjects(client, stream, kind)
        }  # fmt: skip


async def killed_at_each_stage(apart, running, again):
    """Kills each program and each trainer when a trajectory of each stage is stored, and starts it again."""
    async with meander.connect(apart.url) as client:
        for stage in LANES:
            for name in [*apart.commands, *running]:
                seen = await subjects(client, "MDR_TRAJECTORIES", "trajectory", stage)
                while await subjects(client, "MDR_TRAJECTORIES", "trajectory", stage) == seen:
                    assert all(p.poll() is None for p in running.values()), f"the run ended before {name} was killed"
                    await asyncio.sleep(0.01)
                again(name) if name in running else apart.kill(name)


def learned(folder, asked, killed):
    """A run of both trainers on programs of its own: the updates of each, and what is stored."""
    with Apart(folder / "apart", sums=SUMS, signs=SIGNS) as apart:
        for lane in ("sums", "signs"):
            asyncio.run(announced(apart.url, lane))
        out = folder / "r"
        running = {stage: trainer(apart.url, out, asked, stage) for stage in LANES}

        def again(stage):
            running[stage].kill()
            running[stage].wait()
            running[stage] = trainer(apart.url, out, asked, stage)

        try:
            if killed:
                for stage in LANES:
                    asyncio.run(until(running[stage], out / stage, 1))
                    again(stage)
                asyncio.run(killed_at_each_stage(apart, running, again))
            for stage, process in running.items():
                ended(process, out / stage, PATIENCE)
        finally:
            for process in running.values():
                process.kill()
                process.wait()
        return {stage: updates(out / stage) for stage in LANES}, asyncio.run(stored(apart.url))


def test_both_learn_and_what_is_killed_goes_on(binary, tmp_path, asked):
    found = {name: learned(tmp_path / name, asked, name == "killed") for name in ("calm", "killed")}
    for stage in LANES:
        calm, killed = (found[name][0][stage] for name in ("calm", "killed"))
        assert [r["batch_digest"] for r in calm] == [r["batch_digest"] for r in killed]
        assert [r["adapter_digest"] for r in calm] == [r["adapter_digest"] for r in killed]
        assert len({r["adapter_digest"] for r in calm}) == SMALL["updates"], "each update moves the weights"
        for r in calm:
            assert max(x for x in r["ratio_off"] if not math.isnan(x)) < 1e-4 and r["behind"] == 0
    calm, killed = (found[name][1] for name in ("calm", "killed"))
    groups = SMALL["updates"] * SMALL["groups"]
    assert len(calm) == groups * (SMALL["group_size"] * 3 + 1) + SMALL["updates"] and calm.keys() == killed.keys()
    for subject, event in calm.items():
        assert event == killed[subject], subject


def beside(url, out, asked, publishes, usher, killed=()):
    """Two trainers of one run, of which one publishes. killed: (batch, who) of those that are killed when they have
    left out a batch, before they have told it. The updates of each trainer, and its alarms."""

    def begin(stage):
        other = next(s for s in LANES if s != stage)
        of = {"prompts": str(asked), "beside": other} if stage == publishes else {"prompts": ""}
        fields = SMALL | LANES[stage] | of | {"stage": stage, "run_name": out.name, "updates": 4, "patience": 200.0}
        return started(url, out / stage, **fields)

    def alarms(stage):
        log = out / stage / "log.jsonl"
        lines = log.read_text().splitlines() if log.exists() else ()
        return [r["text"] for r in map(json.loads, lines) if r["kind"] == "alarm"]

    async def answered():
        listening = asyncio.Event()
        async with meander.connect(url) as client:
            worker = asyncio.create_task(client.interact("usher", usher, listening.set))
            await listening.wait()
            running.update((stage, begin(stage)) for stage in LANES)
            for batch, stage in killed:
                while not any(batch in text for text in alarms(stage)):
                    assert running[stage].poll() is None
                    await asyncio.sleep(0.002)
                running[stage].kill()
                running[stage].wait()
                running[stage] = begin(stage)
            while any(p.poll() is None for p in running.values()):
                assert all(p.poll() in (None, 0) for p in running.values())
                await asyncio.sleep(0.05)
            worker.cancel()

    running = {}
    try:
        asyncio.run(asyncio.wait_for(answered(), 400))
        for stage, process in running.items():
            ended(process, out / stage)
    except AssertionError:
        raise AssertionError([(out / stage / "stderr").read_text()[-2000:] for stage in LANES]) from None
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return {stage: [(r["update"], r["batch"], r["batch_digest"], r["adapter_digest"]) for r in updates(out / stage)]
            for stage in LANES}, {stage: alarms(stage) for stage in LANES}  # fmt: skip


@pytest.fixture(scope="module")
def ushered(tmp_path_factory):
    """A file of prompts whose samples an usher may end before they are painted, and may fail."""
    think = meander.stage("think", model="sums", text={"temperature": 1.5, "tokens_per_event": 8})
    paint = meander.stage("paint", 'a red sign that says "{think.text}"', model="signs", num_inference_steps=3,
                          rollout={"sde_step_indices": [0, 1], "return_conditioning": True})  # fmt: skip
    file = tmp_path_factory.mktemp("ushered") / "prompts.jsonl"
    file.write_text("".join(
        json.dumps({"prompt": f"{a}+31=?", "reward": [{"name": "confidence"}],
                    **meander.stages(think, meander.stage("usher", interaction="usher"), paint)}) + "\n"
        for a in range(20, 28)
    ))  # fmt: skip
    return file


@pytest.mark.parametrize("publishes", LANES)
def test_a_batch_that_is_left_out_holds_up_none(lanes, tmp_path, ushered, publishes):
    """Of u000001 no sample is painted, so that painter leaves it out, and all of u000002 fail."""

    def usher(request):
        if request["uid"].startswith("u000002"):
            raise ValueError("no")
        return {"content": "go", "terminate": request["uid"].startswith("u000001")}

    def run(name, killed=()):
        return beside(lanes, tmp_path / f"{publishes}-{name}", ushered, publishes, usher, killed)

    found, alarms = run("calm")
    assert [x[:2] for x in found["paint"]] == [(1, "u000000"), (4, "u000003")]
    assert [x[:2] for x in found["think"]] == [(1, "u000000"), (2, "u000001"), (4, "u000003")]
    for stage, batches in (("paint", ("u000001", "u000002")), ("think", ("u000002",))):
        assert [b for b in batches for a in alarms[stage] if b in a] == list(batches), alarms
    again, _ = run("killed", [("u000001", "paint"), ("u000002", "think")])
    assert again == found


@pytest.mark.parametrize("fields, wrong", [
    ({"beside": "think"}, "--beside: needs --stage and --prompts"),
    ({"stage": "paint", "held_out": "x"}, "--held-out: measures images of one lane"),
    ({"stage": "paint", "checkpoint_every": 2}, "--checkpoint-every: 2; must be 1 beside other trainers"),
    ({"stage": "paint", "ahead": 1}, "--ahead: 1; must be 0 with --stage"),
    ({}, "--prompts: empty; must name a file"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(fields, wrong):
    with pytest.raises(ValueError, match=wrong):
        Config(**fields)


@pytest.mark.parametrize("stage, fields, wrong", [
    ("sky", {}, "--stage sky: is not there; must be one that prompt '.*' trains: think, paint"),
    ("think", {"loss": "gspo"}, "--loss: GSPO; must be ppo"),
    ("think", {"checkpointing": True}, "--checkpointing: set; must not be"),
    ("paint", {"beside": "think", "patience": 3.0}, "--beside think: waited 3 s for update 0 of its trainer, which the "
     "next batch is made with; no trainer think has begun: start meander-train --run paint --stage think"),
])  # fmt: skip
def test_a_stage_that_cannot_be_trained_is_refused(lanes, tmp_path, asked, stage, fields, wrong):
    lane = LANES.get(stage, LANES["paint"])
    process = started(lanes, tmp_path / stage, **(SMALL | lane | fields | {"stage": stage, "prompts": str(asked)}))
    assert process.wait(120) == 1
    err = (tmp_path / stage / "stderr").read_text()
    assert re.search(wrong, err), err
