"""Training on samples without a stochastic step: on a small transformer, and on a pipeline of signs."""

import asyncio
import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

import meander  # noqa: E402
from meander.data.batch import Batch, Group, Sample  # noqa: E402
from meander.data.events import EventError  # noqa: E402
from meander.train import losses, prompts  # noqa: E402
from meander.train.alarms import RATIO, UNCHECKED, Alarms  # noqa: E402
from meander.train.config import Config  # noqa: E402
from meander.train.learner import Learner  # noqa: E402
from meander.train.losses import LOSSES, make  # noqa: E402
from meander.train.rollouts import Rollouts  # noqa: E402
from test_learning import config, trained  # noqa: E402
from test_train import S, C, FRAME, _kept, errors, folder, network, rolled  # noqa: E402, F401

VARIED = {"steps": 3, "reward": "jpeg_compressibility"}  # no two samples are equally good
SIGMAS = [1.0, 0.7, 0.4, 0.0]


def ode(net, *kept, **fields):
    """The batch of what made gives."""
    return Rollouts(Batch(made(net, *kept, **fields), "b", "7@1"))


def made(net, kept=(2, 3), dtype="F32", **fields):
    """Groups as a sampler with the weights of net makes them of ode steps by euler: the states kept are stored."""
    rng, groups = np.random.default_rng(5), []
    for g in rolled(net).batch.groups:
        samples = []
        for s in g.samples:
            t = s.trajectory | {"transitions": ["ode"] * 3, "latent_step_indices": sorted(kept), "solver": "euler",
                                "latents_dtype": dtype} | fields  # fmt: skip
            x = torch.tensor(rng.standard_normal((1, S, C)), dtype=torch.float32)
            rows, states = [{"prompt_embeds": torch.tensor(s.conditioning["prompt_embeds"])}], [x]
            with torch.no_grad():
                for a, b in zip(SIGMAS, SIGMAS[1:], strict=False):
                    x = x + (b - a) * net.velocity(x, torch.tensor([a]), rows, FRAME, torch.zeros(1))
                    states.append(x := x.to(torch.bfloat16).float() if dtype == "BF16" else x)
            steps = [{"step_index": i, "log_prob": None, "latents": []} for i in range(3)]
            for k in kept:
                steps[min(k, 2)]["latents"].append(_kept(k, states[k][0].numpy()))
            samples.append(Sample(s.member, t, steps, s.conditioning))
        groups.append(Group(g.advantage, samples))
    return groups


def moved(net):
    """The network with other weights."""
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.5 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    return net


def test_the_better_becomes_likelier_whatever_the_micro_batch(folder):  # noqa: F811
    states = []
    for size, minibatches in ((2, 1), (64, 1), (3, 2)):
        net = network(folder)
        batch = ode(net, (3,))
        before = errors(net, batch)
        assert batch.shape == (8, 0, S, C) and batch.advantages.shape == (8, 1) and batch.steps == batch.kernels == []
        report = Learner(net, make("diffusion_nft"), lr=3e-3, micro_batch=size, minibatches=minibatches).update(batch)
        assert report.used == 8 and report.grad_norm > 0 and report.kl == [] and batch.spread() > 0
        assert ((before - errors(net, batch)) * batch.advantages[:, 0]).sum() > 0
        states.append(net.state())
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_the_state_before_the_last_step_tells_other_weights(folder, dtype):  # noqa: F811
    """Roundings explain what is off under the weights that made the samples, and not what others give."""
    net = network(folder)
    batch = ode(net, dtype=dtype)
    same = Learner(net, make("diffusion_nft")).update(batch)
    other = Learner(moved(network(folder)), make("diffusion_nft")).update(batch)
    assert 0 < same.ratio_off[0] < same.ratio_bound[0] < other.ratio_off[0]
    record = {"behind": 0, "steps": [], "kl": [], "reader": 0.5, "zero_std": 0.0}
    for report, want in ((same, []), (other, [RATIO])):
        alarms = Alarms(Config(prompts="p", loss="diffusion_nft", sde_type="ode"))
        told = record | {"ratio_off": report.ratio_off, "ratio_bound": report.ratio_bound}
        assert [kind for kind, _ in alarms.update(told)] == want


@pytest.mark.parametrize(("kept", "fields", "known"), [
    ((3,), {}, False), ((2, 3), {"solver": "dpm"}, True), ((2, 3), {"solver": "heun"}, False), ((0, 1, 2, 3), {}, True),
    ((2, 3), {"solver": "unipc", "sigmas": [1.0, 0.7, 0.4, 0.1]}, False),
])  # fmt: skip
def test_what_cannot_be_checked_is_said(folder, kept, fields, known):  # noqa: F811
    net = network(folder)
    report = Learner(net, make("diffusion_nft")).update(ode(net, kept, **fields))
    assert math.isfinite(report.ratio_off[0]) == known
    record = {"behind": 0, "steps": [], "kl": [], "reader": 0.5, "zero_std": 0.0}
    record |= {"ratio_off": report.ratio_off, "ratio_bound": report.ratio_bound}
    found = Alarms(Config(prompts="p", loss="diffusion_nft", sde_type="ode")).update(record)
    assert [kind for kind, _ in found] == ([] if known else [UNCHECKED])


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "diffusion_nft"])
def test_losses_of_log_probs_refuse_it_by_name(folder, name):  # noqa: F811
    net = network(folder)
    with pytest.raises(ValueError, match="batch b: all steps of its samples are ode, so there are no log-probs"):
        Learner(net, make(name)).update(ode(net))
    with pytest.raises(ValueError, match=f"--loss {name}: needs log-probs, which --sde-type ode has none of"):
        losses.of(Config(prompts="p", loss=name, sde_type="ode"))
    given = [{"prompt": "a", "rollout": {"sde_step_indices": []}}]
    with pytest.raises(ValueError, match=f"--loss {name}: needs log-probs, and no step of prompt 'a': rollout"):
        prompts.check_rollouts(Config(prompts="p", loss=name), given, forward=False)


def test_a_batch_says_what_it_does_not_have(folder):  # noqa: F811
    batch = ode(network(folder)).batch
    assert batch.clean and batch["final_latents"].shape == (8, S, C) and batch["advantages"].shape == (8, 1)
    assert "log_probs" not in batch and "final_latents" in batch.torch()
    for use in (lambda: batch["log_probs"], lambda: batch.mask, lambda: batch.ratio([]), batch.dataproto):
        with pytest.raises(KeyError, match="all steps of these samples are ode"):
            use()
    groups = batch.groups
    other = made(network(folder), (2,))
    assert Batch(other).size == 0 and "no last latents (return_step_indices)" in other[0].lacks(other[0].samples[0])
    measured = Group(groups[0].advantage | {"validation": True}, groups[0].samples)
    assert measured.trained == [] and measured.lacks(measured.samples[0]) == "no stochastic step, in a validation"
    mixed = [groups[0], rolled(network(folder)).batch.groups[1]]
    with pytest.raises(ValueError, match="g1: stochastic steps, of other groups none"):
        Batch(mixed)
    groups[1].samples[0].trajectory["sigmas"] = [1.0, 0.6, 0.4, 0.0]
    with pytest.raises(EventError, match="its samples ran different schedules"):
        Rollouts(batch)


@pytest.mark.parametrize(("settings", "says"), [
    ({"initial_noise": "shared"}, "--initial-noise: shared; must be per_sample with --sde-type ode: samples would be"),
    ({"sde_steps": "0"}, "--sde-steps: 0; has no use with --sde-type ode"),
    ({"noise_level": 0.5}, "--noise-level: 0.5; has no use with --sde-type ode"),
    ({"kl_limit": 0.1}, "--kl-limit: 0.1; has no use with --sde-type ode"),
    ({"solver": "dmp"}, "--solver: 'dmp'; must be euler, heun, unipc, dpm or rk4"),
])  # fmt: skip
def test_settings_without_a_use_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        Config(prompts="p", loss="diffusion_nft", sde_type="ode", **settings)


def test_prompts_store_the_last_latents_alone():
    settings = Config(prompts="p", loss="diffusion_nft", sde_type="ode", solver="dpm")
    asked = prompts.training(settings, 0, [{"prompt": "a"}, {"prompt": "b"}], 0, 1, clean=True)
    assert [p["rollout"]["return_step_indices"] for p in asked] == [[3, 4], [4]]
    assert prompts.training(Config(prompts="p"), 0, [{"prompt": "a"}], 0, 1)[0]["rollout"]["sde_step_indices"] == [0, 1]
    assert asked[1]["rollout"] == {
        "sde_type": "ode", "solver": "dpm", "return_step_indices": [4], "return_conditioning": True
    }
    assert {p["initial_noise"] for p in asked} == {"per_sample"}
    given = [{"prompt": "a", "rollout": {"sde_type": "ode"}}]
    with pytest.raises(ValueError, match="--initial-noise: shared; must be per_sample, as no step of prompt 'a'"):
        prompts.check_rollouts(Config(prompts="p", loss="diffusion_nft"), given, forward=True)
    prompts.check_rollouts(settings, given, forward=True)
    own = [{"prompt": "a", "rollout": {"sde_type": "ode", "return_step_indices": [3]}}]
    with pytest.raises(ValueError, match=r"'a': rollout.return_step_indices: \[3\]; must have 4, the last latents"):
        prompts.check_rollouts(settings, own, forward=True)


@pytest.mark.parametrize("solver", ["euler", "dpm", "unipc", "heun"])
def test_a_pipeline_makes_what_is_trained_on(signs, tmp_path, solver):
    out = tmp_path / solver
    log = trained(signs, out, loss="diffusion_nft", sde_type="ode", solver=solver, updates=2, **VARIED)
    assert [r["behind"] for r in log] == [0, 0] and len({r["made_by"][0] for r in log}) == 2
    assert all(r["grad_norm"] > 0 and r["steps"] == r["kl"] == [] for r in log)
    for r in log:
        off, bound = r["ratio_off"][0], r["ratio_bound"][0]
        assert off is None if solver == "heun" else 0 < off < bound < 1e-6
    alarms = [json.loads(x)["alarm"] for x in (out / "log.jsonl").read_text().splitlines() if '"alarm"' in x]
    assert alarms == ([UNCHECKED] if solver == "heun" else [])

    async def stored():
        async with meander.connect(signs) as client:
            batch = await anext(aiter(client.batches(out.name, follow=False)))
            part = await anext(aiter(client.batches(out.name, follow=False, whole=False)))
            micro = [m async for m in part.micro(3)]
            np.testing.assert_array_equal(
                np.concatenate([m["final_latents"] for m in micro]), batch["final_latents"]
            )
            assert part.digest() == batch.digest()
            return [s.trajectory["latent_step_indices"] for s in batch.samples]

    assert asyncio.run(stored()) == [[2, 3]] * 4 + [[3]] * 4


def test_prompts_of_a_file_are_refused_before_anything_runs(signs, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a red sign", "rollout": {"sde_type": "ode"}}))
    for fields, says in (
        ({"prompts": str(file)}, "--loss ppo: needs log-probs, and no step of prompt 'a red sign': rollout"),
        ({"sde_type": "ode"}, "--loss ppo: needs log-probs, which --sde-type ode has none of"),
    ):
        with pytest.raises(ValueError, match=says):
            trained(signs, tmp_path / "refused", **fields)

    async def asked():
        async with meander.connect(signs) as client:
            return await client.js.stream_info("MDR_GROUPS", subjects_filter="mdr.v1.group.refused.*")

    assert not asyncio.run(asked()).state.subjects
    assert config(signs, tmp_path).loss == "ppo"
