"""Samples of several stages: the builder of prompts, and what readers make of results."""

import numpy as np
import pytest
from test_tracks import _sample

import meander
from meander.data import staged
from meander.data.batch import Batch, Group, Sample
from meander.data.events import EventError
from meander.data.textbatch import batch_of
from meander.train import prompts
from meander.train.config import Config

THINK = meander.stage("think", model="sums", text={"max_new_tokens": 8})
PAINT = meander.stage("paint", 'a sign that says "{think.text}"', model="signs", steps=4, children=2)


def test_a_prompt_of_stages_has_the_fields_of_the_contract():
    judge = meander.stage("judge", "{think.text}", interaction="glyph_judge", images={"image": "paint"})
    draft = meander.stage("draft", frozen=True, credit={"glyph": 0.5}, rollout={"sde_steps": [0]})
    assert meander.stages(THINK, PAINT) == {"stages": [
        {"name": "think", "model": "sums", "text": {"max_new_tokens": 8}},
        {"name": "paint", "prompt": 'a sign that says "{think.text}"', "model": "signs", "num_inference_steps": 4,
         "children": 2},
    ]}  # fmt: skip
    assert meander.stages(judge, PAINT, draft, THINK, rounds=3) == {"stages": [
        {"name": "judge", "prompt": "{think.text}", "interaction": {"name": "glyph_judge"},
         "conditions": [{"name": "image", "stage": "paint"}]},
        PAINT,
        {"name": "draft", "frozen": True, "rollout": {"sde_step_indices": [0]},
         "credit": [{"reward": "glyph", "weight": 0.5}]},
        THINK,
    ], "rounds": 3}  # fmt: skip


@pytest.mark.parametrize("make, wrong", [
    (lambda: meander.stage("main"), "stage: 'main'; must be 1 to 32 characters"),
    (lambda: meander.stage("think-2"), "must not end in a number"),
    (lambda: meander.stage("a b"), "must be 1 to 32 characters"),
    (lambda: meander.stages(THINK, THINK), "stage think: must come at most once"),
    (lambda: meander.stages(PAINT, THINK), "stage paint: {think.text}: 'think'; must be one of the stages before it"),
    (lambda: meander.stages(meander.stage("a", "{prompt")), "a { alone"),
    (lambda: meander.stages(meander.stage("a", "{b}")), "must be {prompt}, {metadata.KEY} or {STAGE.text}"),
    (lambda: meander.stages(THINK, meander.stage("b", "{thonk.text}")), "'thonk'; must be one of think"),
    (
        lambda: meander.stages(THINK, meander.stage("b", images={"image": "c"})),
        "condition image: 'c'; must be one of think",
    ),
    (lambda: meander.stages(meander.stage("b", images={"image": "think"}), THINK), "a later stage needs rounds"),
])  # fmt: skip
def test_what_is_not_there_is_refused_before_it_is_sent(make, wrong):
    with pytest.raises(ValueError, match=wrong.replace("{", r"\{")):
        make()
    meander.stages(meander.stage("a", "{{b}} {prompt} {metadata.k}"))  # doubled braces are braces


def _advantage(**more):
    """The result of a group of four images, two of each text, in two rounds; the last image failed."""
    at = {"think": [0, 0, 2, 2], "paint": [0, 1, 2, 3], "judge": [0, 0, 0, 0]}
    members = [{
        "sample_index": i, "reward": r, "advantage": a, "status": s, "trajectory_seq": 0, "stages": [
            {"stage": name + token, "sample_index": at[name][i], "trajectory_seq": 100 * k + at[name][i] + 1}
            for token in ("", "-2") for k, name in enumerate(at)
        ],
    } for i, (r, a, s) in enumerate([
        (1.0, 1.0, "scored"), (0.0, -1.0, "scored"), (1.0, 0.5, "scored"), (None, None, "failed"),
    ])]  # fmt: skip
    credits = [{"stage": "think", "every": 2, "values": [-0.5, 0.5]},
               {"stage": "paint", "values": [0.7, -0.7, 0.0, None]}]  # fmt: skip
    return {"uid": "g", "status": "partial", "estimator": "flow_grpo", "members": members, "credits": credits, **more}


def test_a_stage_is_a_group_of_its_own():
    think, paint = (staged.view(_advantage(), name)["members"] for name in ("think", "paint"))
    assert [(m["sample_index"], m["round"], m["stage"], m["advantage"], m["reward"]) for m in think] == [
        (0, 1, "think", -0.5, 0.5), (0, 2, "think-2", -0.5, 0.5), (2, 1, "think", 0.5, 1.0), (2, 2, "think-2", 0.5, 1.0)
    ]
    assert [(m["advantage"], m["status"], m["trajectory_seq"]) for m in paint if m["round"] == 1] == [
        (0.7, "scored", 101), (-0.7, "scored", 102), (0.0, "scored", 103), (None, "failed", 104)
    ]
    assert staged.ran(_advantage()) == ["think", "paint", "judge"]
    assert staged.trained(_advantage()) == ["think", "paint"]


def test_a_sample_that_ended_before_a_stage_is_not_in_it():
    advantage = _advantage()
    for m in advantage["members"][:3]:
        m["stages"] = [r for r in m["stages"] if r["stage"] in ("think", "paint", "judge")]
        m["stages"] += [{"stage": "repaint", "sample_index": 1, "trajectory_seq": 7}] if m["sample_index"] == 1 else []
    advantage["credits"].append({"stage": "repaint", "values": [None, 0.0, None, None]})
    assert [(m["sample_index"], m["advantage"]) for m in staged.view(advantage, "repaint")["members"]] == [(1, 0.0)]
    advantage["credits"][-1]["values"][1] = None
    del advantage["members"][1]["stages"][-1]
    staged.check_trained(advantage, "repaint")  # it is trained, and ran for none
    assert staged.view(advantage, "repaint")["members"] == []


def test_tracks_of_a_stage_and_its_steps():
    advantage = _advantage()
    advantage["credits"] = [
        {"stage": "think", "every": 2, "values": [-0.5, 0.5], "steps": [
            {"stage": "think", "sample_index": 0, "advantages": [-1.0, 0.0]},
            {"stage": "think-2", "sample_index": 0, "advantages": [-0.5]}]},
        {"stage": "paint", "track": "video", "values": [1.0, 2.0, 3.0, None]},
        {"stage": "paint", "track": "sound", "values": [2.0, 0.0, 1.0, None]},
    ]  # fmt: skip
    assert staged.trained(advantage) == ["think", "paint"]
    think, paint = (staged.view(advantage, name) for name in ("think", "paint"))
    assert [m["step_advantages"] for m in think["members"]] == [[-1.0, 0.0], [-0.5], None, None]
    assert [m["advantage"] for m in paint["members"] if m["round"] == 1] == [1.5, 1.0, 2.0, None]
    assert think["credits"] == [] and [c["track"] for c in paint["credits"]] == ["video", "sound"]
    of = meander.stage("film", credit={("loudness", "sound"): 2, "glyph": 1})["credit"]
    assert of == [{"reward": "loudness", "track": "sound", "weight": 2.0}, {"reward": "glyph", "weight": 1.0}]


@pytest.mark.parametrize("name, wrong", [
    ("judge", "stage 'judge' is frozen or of an interaction, so it has no advantages; must be one of think, paint"),
    ("sky", "stage 'sky' is not there; must be one of think, paint"),
])  # fmt: skip
def test_a_stage_that_is_not_trained_is_named(name, wrong):
    with pytest.raises(EventError, match=wrong):
        staged.check_trained(_advantage(), name)
    with pytest.raises(EventError, match="its prompt has no stages"):
        staged.check_trained({"uid": "g", "members": []}, name)
    stages = [{"name": n, "kind": k} for n, k in (("think", "text"), ("paint", "image"), ("judge", "interaction"))]
    record = {"uid": "g", "group": {"stages": stages}}
    with pytest.raises(EventError, match=wrong):
        staged.check_planned(record, name)
    staged.check_planned(record, "paint")
    stages[1]["frozen"] = True
    with pytest.raises(EventError, match="'paint' is frozen .*; must be one of think$"):
        staged.check_planned(record, "paint")
    with pytest.raises(EventError, match="its prompt has no stages"):
        staged.check_planned({"uid": "g", "group": {}}, name)
    staged.check_planned({"uid": "g", "group": {}, "error": "refused"}, name)


@pytest.mark.parametrize("stages, settings, wrong", [
    ([THINK, PAINT], {"stage": "sky"}, "--stage sky: is not there; must be one that prompt 'x' trains: think, paint"),
    ([THINK, {**PAINT, "frozen": True}], {"stage": "paint"}, "--stage paint: is frozen .*; must be .* trains: think"),
    ([THINK, {"name": "judge", "interaction": {"name": "j"}}], {"stage": "judge"}, "--stage judge: .* of an interaction"),
    ([{**THINK, "frozen": True}, PAINT], {"stage": "paint", "beside": "think"}, "--beside think: is frozen"),
    ([], {"stage": "paint"}, "--stage paint: is not there; .* trains: none"),
    ([THINK, PAINT], {}, "--stage: empty; must name one that prompt 'x' trains: think, paint"),
])  # fmt: skip
def test_a_trainer_of_a_stage_that_prompts_do_not_train_does_not_begin(stages, settings, wrong):
    config = Config(prompts="p", held_out="", **settings)
    with pytest.raises(ValueError, match=wrong):
        prompts.check_stages(config, [{"prompt": "x", "stages": stages}])
    both = Config(prompts="p", held_out="", stage="paint", beside="think")
    prompts.check_stages(both, [{"prompt": "x", "stages": [THINK, PAINT]}])


def _group():
    rng = np.random.default_rng(3)
    of = staged.view(_advantage(), "paint")
    samples = []
    for m in of["members"]:
        sample, _ = _sample(m["sample_index"], rng)
        text = {"prompt_embeds": np.full((1 + m["sample_index"], 2), m["sample_index"], np.float32)}
        samples.append(Sample(m, {**sample.trajectory, "tracks": []}, sample.steps, text))
    advantage = _advantage()
    return Group(advantage, [Sample(m, None, []) for m in advantage["members"]], stages={"paint": Group(of, samples)})


def test_a_batch_gives_each_stage_its_arrays():
    batch = batch_of([_group()], "b", "7@1", "raw")
    assert isinstance(batch, meander.StagedBatch) and batch.stages == ["think", "paint"]
    assert batch["rewards"].tolist() == [1.0, 0.0, 1.0] and batch["advantages"].tolist() == [1.0, -1.0, 0.5]
    assert batch.credit("think").tolist() == [-0.5, -0.5, 0.5] and batch.credit("paint").tolist() == [0.7, -0.7, 0.0]
    paint = batch.stage("paint")
    assert type(paint) is Batch and paint.cursor == "7@1" and paint is batch.stage("paint")
    assert paint["sample_index"].tolist() == [0, 0, 1, 1, 2, 2] and paint["round"].tolist() == [1, 2, 1, 2, 1, 2]
    assert paint["advantages"][:, 0].tolist() == [0.7, 0.7, -0.7, -0.7, 0.0, 0.0]
    assert paint["latents"].shape == (6, 2, 4, 3) and paint.credits == []
    assert paint["prompt_embeds"][:, 0, 0].tolist() == [0, 0, 1, 1, 2, 2], "each sample has its own text"
    assert batch.digest() != batch_of([], "b", "", "raw").digest()
    with pytest.raises(KeyError, match="stage 'judge' is frozen or of an interaction"):
        batch.stage("judge")
    with pytest.raises(KeyError, match=r"stages have it: batch.stage\('paint'\)\['latents'\]"):
        batch["latents"]
    with pytest.raises(TypeError, match=r"stages have it: batch.stage\('paint'\).micro"):
        batch.micro(2)


def test_samples_with_and_without_stages_are_no_batch():
    plain, _ = _sample(0, np.random.default_rng(3))
    with pytest.raises(EventError, match="have stages, those of h none"):
        batch_of([_group(), Group({"uid": "h", "members": []}, [plain])], "b", "", "raw")
