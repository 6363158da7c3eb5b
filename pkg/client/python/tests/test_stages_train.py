"""Two trainers that learn from one run, each its stage: a language model and a painter."""

import asyncio
import json
import math
import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

import meander  # noqa: E402
from conftest import SIGNS, SUMS  # noqa: E402
from meander.train.config import Config  # noqa: E402
from test_learning import ended, started, until, updates  # noqa: E402

SMALL = {"groups": 2, "group_size": 4, "rank": 4, "updates": 3, "beta": 0.01, "held_out": "", "gold": ""}
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
    return started(url, out / stage, **(SMALL | LANES[stage] | more | {"stage": stage, "run_name": out.name}))


def test_both_learn_and_a_killed_one_goes_on(lanes, tmp_path, asked):
    found = {}
    for name, killed in (("calm", ()), ("killed", ("think", "paint"))):
        out = tmp_path / name
        running = {stage: trainer(lanes, out, asked, stage) for stage in LANES}
        for stage in killed:
            asyncio.run(until(running[stage], out / stage, 1))
            running[stage].kill()
            running[stage].wait()
            running[stage] = trainer(lanes, out, asked, stage)
        for stage, process in running.items():
            ended(process, out / stage)
        found[name] = {stage: updates(out / stage) for stage in LANES}
    for stage in LANES:
        calm, killed = (found[name][stage] for name in ("calm", "killed"))
        assert [r["batch_digest"] for r in calm] == [r["batch_digest"] for r in killed]
        assert [r["adapter_digest"] for r in calm] == [r["adapter_digest"] for r in killed]
        assert len({r["adapter_digest"] for r in calm}) == 3, "each update moves the weights"
        for r in calm:
            assert max(x for x in r["ratio_off"] if not math.isnan(x)) < 1e-4 and r["behind"] == 0


@pytest.mark.parametrize("fields, wrong", [
    ({"beside": "think"}, "--beside: needs --stage and --prompts"),
    ({"stage": "paint", "held_out": "x"}, "--held-out: measures images of one lane"),
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
])  # fmt: skip
def test_a_stage_that_cannot_be_trained_is_refused(lanes, tmp_path, asked, stage, fields, wrong):
    lane = LANES.get(stage, LANES["paint"])
    process = started(lanes, tmp_path / stage, **(SMALL | lane | fields | {"stage": stage, "prompts": str(asked)}))
    assert process.wait(120) == 1
    err = (tmp_path / stage / "stderr").read_text()
    assert re.search(wrong, err), err
