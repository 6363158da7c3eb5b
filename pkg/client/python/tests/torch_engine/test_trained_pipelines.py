"""The trainer's whole pipelines against a worker's: one velocity, log-probs that agree, gradients with guidance."""

import dataclasses
import hashlib
import io
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

from PIL import Image  # noqa: E402

from meander import EventError, transition  # noqa: E402
from meander.data.batch import Batch, Group, Sample  # noqa: E402
from meander.torch.engine import Settings, make_engine  # noqa: E402
from meander.torch.folder import Folder  # noqa: E402
from meander.torch.server import Worker  # noqa: E402
from meander.torch.whole import Pipeline  # noqa: E402
from meander.train.learner import Learner  # noqa: E402
from meander.train.losses import DiffusionNFT, PPO  # noqa: E402
from meander.train.model import Network  # noqa: E402
from meander.train.rollouts import Rollouts  # noqa: E402

CLASSES = {  # with the transition and the trained steps of its samples
    "FluxKontextPipeline": ("sde", 2),
    "StableDiffusionPipeline": ("ddim", 3),
    "StableDiffusionXLControlNetPipeline": ("cps", 2),
    "StableDiffusionXLPipeline": ("ddim", 3),
    "WanImageToVideoPipeline": ("sde", 2),
}
STEPS, SCALE, PROMPTS = 4, 3.0, ("a red cat", "a blue sign on a mat")
PIXELS = np.random.default_rng(3).integers(0, 256, (16, 24, 3), dtype=np.uint8)


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


class Rollout:
    """Two groups of two samples, each velocity of them from a worker, one row a call."""

    def __init__(self, folder, dial, name):
        import zoo

        zoo.write(folder, name)
        family = Pipeline(Folder(folder), trust=True)
        worker = Worker(family, Settings("cpu", "f32"))
        worker.load(lambda say: make_engine(family, Settings("cpu", "f32", threads=1), say))
        assert worker.error is None, worker.error
        self.folder, self.client = folder, dial(name, worker=worker)
        self.card, self.engine = self.client.ready()["card"], worker.engine
        self.transition, self.trained = CLASSES[name]
        self.rng, self.file = np.random.default_rng(3), png(PIXELS)
        self.conditions = [
            {"name": c["name"], "type": "image", "ref": {"digest": hashlib.sha256(self.file).hexdigest()}}
            for c in self.card["pipeline"]["conditions"]
            if c["required"] or c["name"] == "image"
        ]
        # Calls of the network for guidance are one in a worker, which rounds otherwise: FLUX has it as an input.
        flux = name == "FluxKontextPipeline"
        self.scale, self.given = (1.0, {"guidance_scale": SCALE}) if flux else (SCALE, {})
        if self.card["max_frames"] > 1:
            self.scale, self.client.frames = 1.0, self.card["size"]["frames"]
        self.scales = [self.scale] * STEPS
        if name == "StableDiffusionPipeline":  # as with cfg_until
            self.scales[1:] = [1.0] * (STEPS - 1)
        self.groups = [self.group(g, prompt) for g, prompt in enumerate(PROMPTS)]

    def group(self, g, prompt):
        head = f"image 1 {PIXELS.shape[0]} {PIXELS.shape[1]} 0\n".encode()
        digest = hashlib.sha256(head + PIXELS.tobytes()).hexdigest()
        size, p = self.card["size"], self.card["pipeline"]
        if self.conditions:
            args = {"digest": digest, "type": "image", "frames": 1, "height": 16, "width": 24}
            self.client("condition", args, {"condition": PIXELS[None]})
        negative = any(a["name"] == "negative_prompt" for a in p["arguments"])
        recipe = {
            "prompts": [[prompt]], "truncate": False, "conditions": {c["name"]: [digest] for c in self.conditions},
            "arguments": self.given | ({"negative_prompt": "grey"} if negative else {}),
            "guidance": self.scale if p["guidance"] else 0.0, "steps": STEPS, **size,
        }  # fmt: skip
        handle = self.client("encode", recipe)[0]["items"][0]["handle"]
        run = self.engine.loaded.session(self.engine.recipes[handle])
        self.sigmas = [float(np.float32(s)) for s in run.grids[0].sigmas]
        std = run.grids[0].init()
        run.session.cancel()
        facts = {
            "uid": f"g{g}", "prompt": prompt, "negative_prompt": "grey", "true_cfg_scale": self.scale,
            "cfg_rule": "inside", "arguments": {n: str(v) for n, v in self.given.items()}, "cfg_scales": self.scales,
            "sigmas": self.sigmas, "noise_level": 0.9, "log_prob_kind": "density",
            "transitions": [self.transition] * self.trained + ["ode"] * (STEPS - self.trained), **size,
            "conditions": self.conditions, "policy_version_min": 0, "policy_version_max": 0, "weights_digest": "w",
            "sample_seed": 1, "noise_seed": 1, "initial_std": std if std != 1 else 0,
        }  # fmt: skip
        return Group({"uid": f"g{g}"}, [self.sample(facts, g, i, handle, std) for i in range(2)])

    def sample(self, facts, g, i, handle, std):
        s, c = self.engine.family.latent_shape(self.engine.recipes[handle].size)
        x = (std * self.rng.standard_normal((s, c))).astype(np.float32)
        member = {"sample_index": i, "advantage": 2.0 * i - 1, "reward": float(i), "status": "scored"}
        out = Sample(member, facts | {"latents_shape": [s, c], "content_digest": f"{g}.{i}"}, [])
        height, width = facts["height"], facts["width"]
        for k in range(STEPS):
            kind = facts["transitions"][k]
            kernel = transition.kernel(kind, 0.9 if kind != "ode" else 0, self.sigmas, k)
            scale = [0.0 if self.scales[k] == self.scale else self.scales[k]]
            v = self.client.velocity(x[None], self.sigmas[k : k + 1], [handle], height, width, guidance=scale)[0]
            noise = self.rng.standard_normal(x.shape)
            after = (kernel.mean(x, v) + kernel.noise_std * noise).astype(np.float32)
            out.steps.append({
                "step_index": k, "sigma": self.sigmas[k], "sigma_next": self.sigmas[k + 1], "transition": kind,
                "timestep": 1000 * self.sigmas[k], "noise_std": kernel.noise_std, "std_dev_t": kernel.std_dev_t,
                "log_prob": kernel.log_prob(x, v, after) if kind != "ode" else None,
                "latents": [kept(k, x), kept(k + 1, after)], "velocity": v,
            })  # fmt: skip
            x = after
        return out

    def network(self, **more):
        """A trainer's network, and the batch as it has it."""
        network = Network(self.folder, rank=2, alpha=4, seed=1, trust_class=True, **more)
        for c in self.conditions:
            assert network.whole.lacks(c)
            network.whole.read(c, self.file)
            assert not network.whole.lacks(c)
        return network, Rollouts(Batch(self.groups, "b", "7@1"), (), recipe=network.whole.recipe)


def kept(index, x):
    return {"index": index, "tensor": {"dtype": "F32", "shape": list(x.shape), "data": x.astype("<f4").tobytes()}}


@pytest.fixture(scope="module")
def made():
    return {}


@pytest.fixture
def rollout(made, dial, tmp_path_factory):
    """rollout(name) is the samples that a worker made with a class, once."""

    def get(name):
        torch.set_num_threads(1)
        if name not in made:
            made[name] = Rollout(tmp_path_factory.mktemp("trained") / name, dial, name)
        return made[name]

    return get


def velocities(network, batch, j=0):
    x, _, sigma, texts = batch.step(np.arange(batch.size), j, network.device)
    with torch.no_grad():
        return torch.cat([
            network.guided(x[i : i + 1], sigma[i : i + 1], batch.step(np.array([i]), j, network.device)[3], batch.frame,
                batch.rule)
            for i in range(batch.size)
        ])  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_the_first_ratio_is_one_and_the_adapter_learns(name, rollout):
    made = rollout(name)
    network, batch = made.network()
    for j in range(made.trained):
        own = torch.tensor(np.stack([s.steps[j]["velocity"] for g in made.groups for s in g.samples]))
        assert torch.equal(velocities(network, batch, j), own)
    learner = Learner(network, PPO(), lr=1e-2, micro_batch=1, beta=0.1)
    before, scored = velocities(network, batch), learner.score(batch, list(range(4)))[0]
    report = learner.update(batch)
    assert max(report.ratio_off) < 1e-12 and report.grad_norm > 0 and report.used == 4  # orders of float64 sums
    assert report.kl == [0.0] * made.trained
    assert float((velocities(network, batch) - before).norm() / before.norm()) > 1e-4
    new = learner.score(batch, list(range(4)))[0]
    assert ((new - scored) * batch.advantages).sum() > 0  # what was better than its group is likelier now
    with network.base():
        torch.testing.assert_close(velocities(network, batch), before, rtol=0, atol=0)
    off = np.abs(new - batch.log_probs).max(axis=0)
    bound = [float(learner._step(_shared(batch), np.arange(1), j, False).rounding) for j in range(made.trained)]
    assert all(o > b for o, b in zip(off, bound, strict=True)), "other weights are beyond roundings"


def _shared(batch):
    from meander.train.learner import _Shared, _Tally

    return _Shared(batch, batch.log_probs, np.ones_like(batch.log_probs), _Tally(batch, ()))


@pytest.mark.parametrize("name", CLASSES)
def test_rows_together_and_checkpointing_change_no_gradient(name, rollout):
    found = []
    for micro_batch, checkpointing in ((1, False), (4, True)):
        network, batch = rollout(name).network(checkpointing=checkpointing)
        report = Learner(network, PPO(), lr=1e-3, micro_batch=micro_batch).update(batch)
        assert max(o / b for o, b in zip(report.ratio_off, report.ratio_bound, strict=True)) < 1
        found.append(torch.cat([p.grad.flatten() for p in network.parameters()]))
    assert 0 < float(found[0].norm()) and float((found[1] - found[0]).norm()) < 1e-3 * float(found[0].norm())


@pytest.mark.parametrize("name", ["FluxKontextPipeline", "StableDiffusionPipeline"])
def test_text_encoders_are_in_memory_only_while_they_encode(name, rollout, monkeypatch):
    (network, batch), (fresh, _) = rollout(name).network(), rollout(name).network()
    whole, read = network.whole, []
    load = whole.family.load_part
    monkeypatch.setattr(whole.family, "load_part", lambda part, *of: read.append(part) or load(part, *of))
    learner = Learner(network, PPO(), lr=0.0, micro_batch=4)  # two rows of each prompt at once
    reports = [learner.update(batch) for _ in range(2)]
    encoders = sorted(n for n in whole.family.parts if n.startswith("text_encoder"))
    parts = [getattr(whole.family.pipe, n) for n in encoders]
    assert not read and encoders and all(p.is_meta for part in parts for p in part.parameters())
    assert reports[0].ratio_off == reports[1].ratio_off
    other = dataclasses.replace(batch.recipes[0], texts=("another text",))
    whole.encode([other])
    assert sorted(read) == encoders and all(p.is_meta for part in parts for p in part.parameters())
    x, _, sigma, _ = batch.step(np.arange(1), 0, network.device)
    with torch.no_grad():
        assert torch.equal(*(n.whole.velocity(x, sigma, [other]) for n in (network, fresh)))


def test_bf16_is_within_its_roundings_where_float32_has_other_weights(rollout):
    """The worker computes in float32, so a trainer in bf16 is off by the roundings of bf16, and far beyond float32's."""
    network, batch = rollout("FluxKontextPipeline").network(dtype=torch.bfloat16)
    report = Learner(network, PPO(), micro_batch=4).update(batch)
    assert max(o / b for o, b in zip(report.ratio_off, report.ratio_bound, strict=True)) < 1
    share = torch.finfo(torch.float32).eps / torch.finfo(torch.bfloat16).eps
    assert max(o / (b * share) for o, b in zip(report.ratio_off, report.ratio_bound, strict=True)) > 1


def test_a_forward_loss_noises_what_the_pipeline_decodes(rollout):
    """The last state of SD 1.5 has some noise left; its pipeline takes the state, scaled, for the clean one."""
    network, batch = rollout("StableDiffusionPipeline").network()
    clean, x, sigma, _ = batch.noised(np.arange(4), 1, network.device)
    last = batch.batch.samples[0].latents(STEPS)
    run = network.whole.loaded.session(batch.recipes[0])
    state = run.grids[0].state(torch.tensor(last), run.grids[0].last())
    run.session.cancel()
    assert batch.last > 0 and torch.allclose(clean[0], state, rtol=1e-6) and not np.allclose(clean[0], last, rtol=1e-3)
    report = Learner(network, DiffusionNFT(), micro_batch=2, beta=0.1).update(batch)
    assert report.grad_norm > 0 and math.isfinite(report.loss)


def test_what_is_wrong_is_named(rollout):
    made = rollout("StableDiffusionXLControlNetPipeline")
    network, batch = made.network()
    with pytest.raises(EventError, match="rule inside; must be trained with --generic"):
        Rollouts(batch.batch)
    t = made.groups[0].samples[0].trajectory
    with pytest.raises(EventError, match="conditions: image: missing; .*--model must be the folder"):
        network.whole.recipe(t | {"conditions": []})
    with pytest.raises(EventError, match="'colour'.*--model must be the folder"):
        network.whole.recipe(t | {"arguments": {"colour": "red"}})
    with pytest.raises(EventError, match="conditions: image: audio; must be an image, a mask or a video"):
        network.whole.read({**made.conditions[0], "type": "audio"}, b"")
    with pytest.raises(ValueError, match="--targets: UNet2DConditionModel: .*no_such"):
        Network(made.folder, targets=("no_such",), trust_class=True)
