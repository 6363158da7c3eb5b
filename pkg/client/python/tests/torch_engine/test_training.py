"""The trainer's network of each family against the worker's: one velocity, one guidance, log-probs that agree."""

from types import SimpleNamespace

import numpy as np
import pytest
from conftest import NAMES
from talk import latents

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

from meander import transition  # noqa: E402
from meander.plugs.accelerate import whole  # noqa: E402
from meander.data.batch import Batch, Group, Sample  # noqa: E402
from meander.train import distributed  # noqa: E402
from meander.train.learner import Learner  # noqa: E402
from meander.train.loop import Trainer  # noqa: E402
from meander.train.losses import PPO  # noqa: E402
from meander.train.model import Network, _blocks  # noqa: E402
from meander.train.rollouts import Rollouts  # noqa: E402

HEIGHT, WIDTH, SCALE = 64, 96, 4.5
SIGMAS = [1.0, 0.55, 0.3, 0.0]
PROMPTS = ("a red cat on a mat", "a blue sign")  # of unequal length, so that one of a batch is padded
TOLERANCE = 1e-5


def kept(index, x):
    return {"index": index, "tensor": {"dtype": "F32", "shape": list(x.shape), "data": x.astype("<f4").tobytes()}}


def stored(card, prefix, tensors):
    """Tensors of an encoded prompt as events have them: with a mask of ones where the card names one."""
    out = {prefix + name: value for name, value in tensors.items()}
    for c in card["conditioning"]:
        if c["mask"] and c["mask"] not in tensors:
            out[prefix + c["mask"]] = np.ones(len(tensors[c["name"]]), np.uint8)
    return out


def combine(rule, scale, v, away):
    """Classifier-free guidance, as the contract has it."""
    out = away + np.float32(scale) * (v - away)
    if rule == "rescaled":
        out = out * np.linalg.norm(v, axis=-1, keepdims=True) / np.linalg.norm(out, axis=-1, keepdims=True)
    return out


class Rollout:
    """Two groups of two samples with two sde steps, each velocity of them from a worker; the first one unguided."""

    def __init__(self, client):
        self.client, self.card, self.rng = client, client.ready()["card"], np.random.default_rng(3)
        self.scales = [1.0, SCALE, SCALE]  # as with cfg_from
        self.groups = [self.group(g, prompt) for g, prompt in enumerate(PROMPTS)]

    def group(self, g, prompt):
        (there, tensors, _), (away, others, _) = self.client.encode(prompt, self.card["negative_prompt"])
        texts = stored(self.card, "", tensors) | stored(self.card, "negative_", others)
        return Group({"uid": f"g{g}"}, [self.sample(2 * g + i, there, away, texts) for i in range(2)])

    def sample(self, n, there, away, texts):
        x = latents(self.card, 1, HEIGHT, WIDTH, seed=n)[0]
        guidance = self.card["guidance"]
        facts = {
            "uid": f"g{n // 2}", "height": HEIGHT, "width": WIDTH, "latents_shape": list(x.shape), "sigmas": SIGMAS,
            "guidance": guidance, "true_cfg_scale": SCALE, "cfg_rule": self.card["cfg_rule"], "cfg_scales": self.scales,
            "log_prob_kind": "density", "transitions": ["sde", "sde", "ode"], "noise_level": 0.8, "prompt": "p",
            "negative_prompt": "", "policy_version_min": 0, "policy_version_max": 0, "weights_digest": "w",
            "sample_seed": 1, "noise_seed": 1, "content_digest": f"{n}",
        }  # fmt: skip
        reward = float(n % 2)
        member = {"sample_index": n % 2, "advantage": 2 * reward - 1, "reward": reward, "status": "scored"}
        sample = Sample(member, facts, [], texts)
        for k in range(2):
            kernel, sigma = transition.kernel("sde", 0.8, SIGMAS, k), SIGMAS[k]
            v = self.client.velocity(np.stack([x, x]), [sigma] * 2, [there, away], HEIGHT, WIDTH, [guidance] * 2)
            scale = self.scales[k]
            v = combine(self.card["cfg_rule"], scale, v[0], v[1]) if scale > 1 else v[0]
            noise = self.rng.standard_normal(x.shape)
            after = (kernel.mean(x, v) + kernel.noise_std * noise).astype(np.float32)
            sample.steps.append({
                "step_index": k, "sigma": sigma, "sigma_next": SIGMAS[k + 1], "timestep": 1000 * sigma,
                "noise_std": kernel.noise_std, "std_dev_t": kernel.std_dev_t, "transition": "sde",
                "log_prob": kernel.log_prob(x, v, after), "latents": [kept(k, x), kept(k + 1, after)],
            })  # fmt: skip
            x = after
        return sample


@pytest.fixture(scope="module")
def made():
    return {}


@pytest.fixture
def rollout(made, dial):
    """rollout(name) is the groups that a family's worker made, once."""

    def get(name):
        if name not in made:
            made[name] = Rollout(dial(name)).groups
        return made[name]

    return get


def begin(folder, groups, dtype=torch.float32):
    network = Network(folder, rank=2, alpha=4, seed=1, dtype=dtype)
    return network, Rollouts(Batch(groups, "b", "7@1"), network.family.conditioning)


def velocities(network, batch):
    x, _, sigma, texts = batch.step(np.arange(batch.size), 0, network.device)
    with torch.no_grad():
        return network.guided(x, sigma, texts, batch.frame, batch.rule)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_ratio_is_one_and_the_adapter_learns(name, folders, rollout):
    network, batch = begin(folders[name], rollout(name))
    scored, _ = Learner(network, PPO()).score(batch, list(range(batch.size)))
    assert batch.batch.check(scored, TOLERANCE).max_abs <= TOLERANCE
    base = {n: p.detach().clone() for n, p in network.named_parameters() if not p.requires_grad}
    before = velocities(network, batch)
    learner = Learner(network, PPO(), lr=1e-2, micro_batch=3)
    report = learner.update(batch)
    assert max(report.ratio_off) <= TOLERANCE and report.grad_norm > 0 and report.used == batch.size
    trained = {n for n, p in network.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained and all(".adapter." in n for n in trained)
    assert all(torch.equal(p, base[n]) for n, p in network.named_parameters() if n in base)
    assert float((velocities(network, batch) - before).norm() / before.norm()) > 1e-4
    new, _ = learner.score(batch, list(range(batch.size)))
    assert ((new - scored) * batch.advantages).sum() > 0  # what was better than its group is likelier now
    with network.base():
        torch.testing.assert_close(velocities(network, batch), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_every_target_is_found(name, folders):
    network = Network(folders[name], rank=2)
    end = ".lora_A.adapter"
    for part in network.networks.values():
        found = {n.removesuffix(end) for n, _ in part.named_modules() if n.endswith(end)}
        for target in network.family.lora_targets:
            assert any(n.endswith(f".{target}") for n in found), target


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_computes_the_trained_adapter(name, folders, rollout, dial):
    network, batch = begin(folders[name], rollout(name))
    Learner(network, PPO(), lr=1e-2).update(batch)
    state, modules, tensors = network.state(), [], {}
    for key, a in state.items():
        if ".lora_A." in key:
            layer = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            modules.append({"name": layer, "scale": 2.0, "rank": 2})
            tensors[f"{layer}.A"], tensors[f"{layer}.B"] = a.numpy(), state[key.replace("lora_A", "lora_B")].numpy()
    client, version = dial(name), "a" * 64
    client("load", {"weights": version, "kind": "adapter", "modules": modules, "files": []}, tensors)
    rows = np.arange(batch.size)
    for step in range(2):
        x, _, sigma, texts = batch.step(rows, step, network.device)
        handles = [client("put", {}, {n: t.float().numpy() for n, t in row.items()})[0]["handle"] for row in texts.rows]
        got, base = (
            client.velocity(x.numpy(), sigma.tolist(), handles, HEIGHT, WIDTH, texts.guidance.tolist(), weights)
            for weights in (version, "")
        )
        with torch.no_grad():
            want = network.velocity(x, sigma, texts.rows, batch.frame, texts.guidance).numpy()
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < TOLERANCE
        assert np.linalg.norm(got - base) / np.linalg.norm(base) > 10 * TOLERANCE  # the adapter is seen
    client("unload", {"weights": version})


@pytest.mark.parametrize("name", NAMES)
def test_bf16_learns_too(name, folders, rollout):
    network, batch = begin(folders[name], rollout(name), torch.bfloat16)
    assert {part.dtype for part in network.networks.values()} == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in network.parameters())
    before = velocities(network, batch)
    report = Learner(network, PPO(), lr=1e-2).update(batch)
    assert report.grad_norm > 0 and not torch.equal(velocities(network, batch), before)


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_changes_no_gradient(name, folders, rollout):
    states = []
    for checkpointing in (False, True):
        network = Network(folders[name], rank=2, seed=1, checkpointing=checkpointing)
        assert {part.is_gradient_checkpointing for part in network.networks.values()} == {checkpointing}
        batch = Rollouts(Batch(rollout(name), "b"), network.family.conditioning)
        Learner(network, PPO(), lr=1e-2).update(batch)
        states.append(torch.cat([p.grad.flatten() for p in network.parameters()]))
    assert 0 <= float((states[1] - states[0]).norm()) < 1e-4 * float(states[0].norm())


@pytest.fixture
def alone():
    """A group of this process: it has all parts of a sharded network, and gathers them as one of several does."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_sharding_changes_no_gradient(name, dtype, folders, rollout, alone):
    found = []
    for shard in (False, True):
        network = Network(folders[name], rank=2, seed=1, dtype=dtype, checkpointing=dtype == torch.bfloat16)
        batch = Rollouts(Batch(rollout(name), "b"), network.family.conditioning)
        if shard:
            for part in network.networks.values():
                network.gradients = distributed.shard(part, _blocks(part), network.device)
            network.shard = True
        learner = Learner(network, PPO(), lr=1e-2, micro_batch=3, beta=0.1)
        learner.update(batch)
        found.append(
            [torch.cat([whole(p.grad).flatten() for p in network.parameters()]), learner.update(batch).grad_norm]
        )
    assert all(hasattr(p, "full_tensor") for _, p in network.named_parameters())
    assert 0 <= float((found[1][0] - found[0][0]).norm()) < 1e-4 * float(found[0][0].norm())
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4)


def test_older_torch_does_not_shard(folders, monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.7.1+cpu"))
    with pytest.raises(ValueError, match="--shard: torch 2.7.1.*; must be 2.8 or newer"):
        Network(folders["krea2"], shard=True)


def test_a_folder_without_a_family_is_refused(folders, tmp_path):
    with pytest.raises(ValueError, match="no model_index.json"):
        Network(tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "AuroraPipeline"}')
    with pytest.raises(ValueError, match="'AuroraPipeline'; must be a pipeline of diffusers"):
        Network(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_samples_of_the_model_are_taken(name, folders, rollout):
    network, batch = begin(folders[name], rollout(name))
    Trainer._check_model(SimpleNamespace(network=network, config=None), batch)


def test_samples_of_another_model_are_refused(folders, rollout):
    """Their conditioning has the names of this model's, so nothing else tells."""
    network, batch = begin(folders["qwen-image"], rollout("qwen-image"))
    network.family = Network(folders["krea2"], rank=2).family
    says = "a Krea2Pipeline with latents .*; the samples have .*: must be the folder that the samplers serve"
    with pytest.raises(ValueError, match=f"--model: tiny: .*{says}"):
        Trainer._check_model(SimpleNamespace(network=network, config=SimpleNamespace(model="tiny")), batch)


def test_batches_of_another_model_are_refused(rollout):
    with pytest.raises(ValueError, match="no pooled_prompt_embeds are stored"):
        Rollouts(Batch(rollout("krea2"), "b"), ("prompt_embeds", "pooled_prompt_embeds"))
