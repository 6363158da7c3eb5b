"""Folders with other schedulers than a pipeline is published with, and folders that lack something: each is computed
with the levels of its scheduler, or refused in one sentence."""

import json
import shutil

import pytest

pytest.importorskip("diffusers")

import diffusers
import numpy as np
import torch

from meander.torch import canonical, families
from meander.torch.engine import Settings
from meander.torch.faults import Fault
from meander.torch.folder import Folder
from meander.torch.sessions import PipelineEngine

V_ZERO = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    import tiny_whole

    torch.set_num_threads(1)
    return tiny_whole.write(tmp_path_factory.mktemp("base"), "sd15")["sd15"]


@pytest.fixture
def folder(base, tmp_path):
    """folder(scheduler, **config) is a copy of SD 1.5 with another scheduler, its other settings as they are."""
    import tiny_whole

    def make(name, **config):
        out = tmp_path / "model"
        shutil.copytree(base, out)
        text = {"_class_name": name, **tiny_whole.BETAS, "skip_prk_steps": True, "set_alpha_to_one": False, **config}
        (out / "scheduler/scheduler_config.json").write_text(json.dumps(text))
        index = json.loads((out / "model_index.json").read_text())
        (out / "model_index.json").write_text(json.dumps(index | {"scheduler": ["diffusers", name]}))
        return out

    return make


def engine_of(path):
    family = families.find(Folder(path))
    family.check()
    engine = PipelineEngine(family, Settings("cpu", "f32", threads=1))
    with torch.no_grad():
        engine.check_decoder()
    return engine


@pytest.mark.parametrize(
    ("name", "config", "note"),
    [
        ("PNDMScheduler", {}, "computed as DDIMScheduler"),
        ("DPMSolverMultistepScheduler", {}, "first order"),
        ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}, "first order"),
        ("UniPCMultistepScheduler", {}, "computed as DPMSolverMultistepScheduler"),
        ("DEISMultistepScheduler", {}, "computed as DPMSolverMultistepScheduler"),
        ("EulerAncestralDiscreteScheduler", {"timestep_spacing": "linspace"}, "computed as EulerDiscreteScheduler"),
        ("HeunDiscreteScheduler", {"prediction_type": "v_prediction"}, "computed as EulerDiscreteScheduler"),
        ("DDIMScheduler", {"prediction_type": "sample"}, ""),
        ("EDMEulerScheduler", {}, ""),
        ("DDIMScheduler", V_ZERO, ""),
        ("EulerDiscreteScheduler", V_ZERO, ""),
        ("DDIMScheduler", {"timestep_spacing": "linspace", "set_alpha_to_one": True}, "do not end at the next"),
    ],
)
def test_samples_have_the_levels_of_the_scheduler(folder, name, config, note):
    """Euler's steps end where the pipeline does, which the test at the start holds, over the scheduler's own levels."""
    path = folder(name, **config)
    engine = engine_of(path)
    assert note in "; ".join(engine.family.notes) and (note or not engine.family.notes)
    own = getattr(diffusers, name).from_pretrained(path / "scheduler")
    run = engine.loaded.session({"prompts": [["a cat"]], "steps": 4, "guidance": 5.0})
    own.set_timesteps(4)
    times = list(dict.fromkeys(own.timesteps.double().tolist()))
    assert np.allclose(run.loop.as_subclass(torch.Tensor).double(), times)
    if hasattr(own, "sigmas"):
        levels = own.sigmas.double().unique().flip(0)  # Heun has each twice
        assert np.allclose(run.grids[0].sigmas, levels / (1 + levels), 0, 1e-6)
    run.session.cancel()


@pytest.mark.parametrize(
    ("name", "config", "why"),
    [
        ("LCMScheduler", {}, "_class_name: LCMScheduler; must be DDIM.* timesteps 999, 759, 499, 259"),
        ("TCDScheduler", {}, "_class_name: TCDScheduler; must be DDIMScheduler"),
        ("IPNDMScheduler", {}, "IPNDMScheduler; must be a scheduler whose levels of noise are known"),
        ("MagicScheduler", {}, "scheduler: MagicScheduler; must be a scheduler of diffusers"),
        ("DDIMScheduler", {"thresholding": True}, "thresholding: true; must be false"),
        ("DDIMScheduler", {"prediction_type": "magic"}, "prediction_type: magic; must be one of"),
        ("DDIMScheduler", {**V_ZERO, "prediction_type": "epsilon"}, "epsilon; must be v_prediction beside resc"),
        ("FlowMatchEulerDiscreteScheduler", {}, "fails in its own code, .*: .* no attribute 'init_noise_sigma'"),
    ],
)
def test_scheduler_is_refused_in_a_sentence(folder, name, config, why):
    with pytest.raises(Fault, match=why) as e:
        engine_of(folder(name, **config))
    assert e.value.kind == "config"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda p: shutil.rmtree(p / "vae"), "no .*/vae, which model_index.json names: copy the folder again"),
        (lambda p: shutil.rmtree(p / "tokenizer"), "no .*/tokenizer, which model_index.json names"),
        (lambda p: shutil.rmtree(p / "scheduler"), "no .*/scheduler, which model_index.json names"),
        ({"unet": [None, None]}, "unet: none; must be there: StableDiffusionPipeline needs it"),
        ({"unet": ["diffusers", "Magic"]}, "unet: Magic; no class of diffusers"),
        ({"unet": ["my_unet", "Mine"]}, "my_unet; must be diffusers or transformers: a folder's code is not run"),
    ],
)  # fmt: skip
def test_folder_without_a_part_is_refused_in_a_sentence(folder, change, why):
    path = folder("DDIMScheduler")
    if isinstance(change, dict):
        index = path / "model_index.json"
        index.write_text(json.dumps(json.loads(index.read_text()) | change))
    else:
        change(path)
    with pytest.raises(Fault, match=why):
        engine_of(path)


FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
        ("DPMSolverMultistepScheduler", FLOW | {"algorithm_type": "sde-dpmsolver++"}),
        ("UniPCMultistepScheduler", FLOW),
        ("DDIMScheduler", {"prediction_type": "sample"}),
        ("EulerAncestralDiscreteScheduler", {"prediction_type": "sample", "timestep_spacing": "trailing"}),
        ("HeunDiscreteScheduler", {"prediction_type": "v_prediction"}),
        ("EDMEulerScheduler", {}),
        ("EDMDPMSolverMultistepScheduler", {}),
    ],
)
def test_steps_are_eulers_in_canonical_coordinates(name, config):
    """Of the first order. Diffusers computes in float32, whose roundings grow with the largest state."""
    made = canonical.of_first_order(canonical.suited(getattr(diffusers, name)(**config)))
    made.set_timesteps(6)
    grid = canonical.Grid(made, made.timesteps)
    x = torch.randn(32, generator=torch.Generator().manual_seed(1))
    for k, t in enumerate(made.timesteps):
        p = grid.find(np.float32(grid.sigmas[k]))
        assert p.t == t
        out = torch.sin(3 * x + k)
        y = grid.canonical(x, p).double() + (grid.sigmas[k + 1] - grid.sigmas[k]) * grid.velocity(out, x, p).double()
        x = made.step(out, t, x, return_dict=False)[0]
        after = grid.last() if k == 5 else grid.find(grid.sigmas[k + 1])
        assert (grid.canonical(x, after) - y).abs().max() < 2e-6 * y.abs().max()


@pytest.mark.parametrize("name", ["DDIMScheduler", "EulerDiscreteScheduler"])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_predictions_are_one_velocity(name, prediction):
    """A network that knows the sample and the noise has the velocity eps - x0, by float64."""
    made = getattr(diffusers, name)(prediction_type=prediction)
    made.set_timesteps(6)
    grid, draw = canonical.Grid(made, made.timesteps), np.random.default_rng(1)
    x0, eps = torch.tensor(draw.standard_normal((2, 64)))
    for sigma in (*grid.sigmas[:-1], 0.31, 0.77):
        p = grid.find(sigma)
        x, scaled = p.a * x0 + p.b * eps, p.b / (p.a**2 + p.b**2) ** 0.5
        v = (1 - scaled**2) ** 0.5 * eps - scaled * x0
        out = {"epsilon": eps, "v_prediction": v, "sample": x0}[prediction]
        assert (grid.velocity(out, x, p).double() - (eps - x0)).abs().max() < 1e-6 * (1 + p.b / p.a)


def test_a_sigma_between_two_has_the_timestep_that_the_scheduler_rounds():
    made = diffusers.UniPCMultistepScheduler(**FLOW)
    made.set_timesteps(6)
    grid = canonical.Grid(made, made.timesteps)
    assert [float(grid.find(s).t) for s in (1.0, 0.6007195, 0.6003, 0.59999)] == [999, 600, 600, 599]
