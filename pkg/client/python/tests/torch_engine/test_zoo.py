"""Pipelines of different kinds, by one builder, as a worker loads them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("diffusers")

import proofs
import torch
import zoo

from meander.torch import admission
from meander.torch.faults import Fault

CLASSES = [
    "StableDiffusionPipeline",
    "StableDiffusionXLControlNetPipeline",
    "PixArtSigmaPipeline",
    "FluxKontextPipeline",
    "ChromaPipeline",
    "WanImageToVideoPipeline",
    "CogVideoXPipeline",
    "AuraFlowPipeline",
]


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_without_a_line_of_its_own(tmp_path, name):
    """Its steps may be evaluated in any order, its Euler ends where the pipeline ends: check_decoder looks."""
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    try:
        row = zoo.look(name, tmp_path)
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
    assert row["access"] in ("exact", "after_previous")
    assert not row["notes"]


@pytest.mark.parametrize(
    ("name", "beside"), [("StableDiffusionXLPipeline", []), ("HunyuanVideoPipeline", ["true_cfg_scale"])]
)
def test_what_is_not_given_the_pipeline_is_not_given(tmp_path, name, beside):
    """A negative prompt that is absent is no empty one: SDXL has zeros for it, HunyuanVideo a scale that does nothing
    then."""
    zoo.write(tmp_path, name)
    engine = zoo.PipelineEngine(zoo.Pipeline(zoo.Folder(tmp_path), trust=True), zoo.Settings("cpu", "f32", threads=1))
    loaded = engine.loaded
    with torch.no_grad():
        admission.admit(loaded, lambda detail: None)
        assert engine.family.card()["pipeline"]["beside_negative"] == beside
        scales = dict.fromkeys(beside, 4.0)
        absent = admission.recipe_of(loaded)
        absent = replace(absent, guidance=4.0) if scales else absent
        empty = replace(absent, arguments=absent.arguments | {"negative_prompt": ""})
        assert proofs.end_of_diffusers(loaded, absent, **scales) <= zoo.MEDIA
        assert proofs.end_of_diffusers(loaded, empty, negative_prompt="", **scales) <= zoo.MEDIA
        assert proofs.end_of_diffusers(loaded, empty, **scales) > zoo.MEDIA

        # A trainer's recipe without guidance leaves that to the pipeline, too; 0 is given.
        default, zero = (
            loaded.session({"prompts": [["a"]], **given}).recipe for given in ({}, {"guidance": 0.0})
        )
    scale = engine.family.card()["pipeline"]["guidance"]
    assert scale not in loaded.call_of(default) and loaded.call_of(zero)[scale] == 0


def test_a_table_that_was_cut_off_goes_on(tmp_path):
    """Rows are taken from its file where the same code made them; one that was cut off within is left out."""
    rows = tmp_path / "rows.jsonl"
    lines = [{"class": "A", "code": zoo.code()}, {"class": "B", "code": "other"}, {"class": "C", "code": zoo.code()}]
    rows.write_text("\n".join(map(json.dumps, lines))[:-5])
    args = SimpleNamespace(rows=rows, resume=True, code=zoo.code())
    assert list(zoo.kept(args)) == ["A"] and rows.read_text().count("\n") == 1
    args.resume = False
    assert not zoo.kept(args) and not rows.read_text()


def test_a_class_of_no_known_kind(tmp_path):
    with pytest.raises(LookupError, match="no parts of its kind"):
        zoo.write(tmp_path, "ShapEPipeline")


def of(folder, name, **settings):
    """The engine of a tiny folder of a class, as diffusers saves it: without a meander.json, unless settings."""
    zoo.write(folder, name)
    (folder / "meander.json").write_text(json.dumps(settings))
    return zoo.PipelineEngine(zoo.Pipeline(zoo.Folder(folder), trust=True), zoo.Settings("cpu", "f32", threads=1))


@pytest.mark.parametrize(("name", "frames"), [("LTX2Pipeline", 121), ("ChronoEditPipeline", 5)])
def test_a_long_default_size_is_not_computed(tmp_path, name, frames):
    """The card is that of the default size, of which no network computes a state."""
    engine, seen = of(tmp_path, name), []
    network = engine.family.networks[""]
    network.register_forward_pre_hook(lambda _, args, kw: seen.append(kw["hidden_states"].numel()), with_kwargs=True)
    with torch.no_grad():
        admission.admit(engine.loaded, lambda detail: None)
    card = engine.family.card()
    assert card["size"]["frames"] == frames and card["size"]["width"] > 700
    at = card["pipeline"]["admitted"]
    assert at["height"] * at["width"] <= 96 * 96
    assert max(seen) * 8 < card["pipeline"]["tracks"][0]["elements"]


def test_a_default_of_frames_that_no_tokens_cover_is_less(tmp_path):
    """Allegro has 4 times the frames of its latents, and takes 1 more than a multiple of 4 as well."""
    zoo.write(tmp_path, "AllegroPipeline")
    (tmp_path / "meander.json").unlink()
    config = json.loads((tmp_path / "transformer/config.json").read_text())
    (tmp_path / "transformer/config.json").write_text(json.dumps(config | {"sample_frames": 22}))
    assert zoo.Pipeline(zoo.Folder(tmp_path)).size().frames == 85


def test_guidance_with_momentum_is_refused_whatever_the_default_is(tmp_path):
    """ACE-Step that is no turbo remembers what guidance added."""
    zoo.write(tmp_path, "AceStepPipeline")
    config = json.loads((tmp_path / "transformer/config.json").read_text())
    (tmp_path / "transformer/config.json").write_text(json.dumps(config | {"is_turbo": False}))
    settings = json.loads((tmp_path / "meander.json").read_text()) | {"guidance_scale": 1.0}
    (tmp_path / "meander.json").write_text(json.dumps(settings))
    engine = zoo.PipelineEngine(zoo.Pipeline(zoo.Folder(tmp_path)), zoo.Settings("cpu", "f32", threads=1))
    with torch.no_grad(), pytest.raises(Fault, match="steps with guidance_scale of 5 depend on those before"):
        admission.admit(engine.loaded, lambda detail: None)


def test_arguments_of_meander_json_are_those_of_calls_that_do_not_say_them(tmp_path):
    """CogVideoX of a short limit of tokens takes no more, and its pipeline's default is 226."""
    zoo.write(tmp_path, "CogVideoXPipeline")
    settings = json.loads((tmp_path / "meander.json").read_text())

    def engine(**arguments):
        (tmp_path / "meander.json").write_text(json.dumps(settings | {"arguments": arguments}))
        return zoo.PipelineEngine(zoo.Pipeline(zoo.Folder(tmp_path)), zoo.Settings("cpu", "f32", threads=1))

    loaded = engine(max_sequence_length=16).loaded
    card = {a["name"]: a["default"] for a in loaded.family.card()["pipeline"]["arguments"]}
    recipe = admission.recipe_of(loaded)
    assert card["max_sequence_length"] == loaded.call_of(recipe)["max_sequence_length"] == 16
    asked = loaded.recipe({"prompts": [["a"]], "arguments": {"max_sequence_length": 8}})
    assert loaded.call_of(asked)["max_sequence_length"] == 8 and asked.handle != recipe.handle
    with pytest.raises(Fault, match="max_sequence_length: 'x'; must be of type integer"):
        admission.recipe_of(engine(max_sequence_length="x").loaded)
    with pytest.raises(Fault, match="meander.json: arguments: max_sequence_length: 'x'; must be of type integer"):
        engine(max_sequence_length="x").family.check()
    with pytest.raises(Fault, match="meander.json: arguments: height"):
        engine(height=8).family.check()
