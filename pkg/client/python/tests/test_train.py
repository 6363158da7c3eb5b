"""The parts of the trainer on a transformer of a few thousand weights: no pipeline, no download."""

import json
import math
import zlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

from meander.maths import loss as reference  # noqa: E402
from meander import tensorfile, transition  # noqa: E402
from meander.data.batch import Batch, Group, Sample  # noqa: E402
from meander.data.events import EventError  # noqa: E402
from meander.torch.family import Size  # noqa: E402
from meander.train import config, prompts, records  # noqa: E402
from meander.train.__main__ import table  # noqa: E402
from meander.train.alarms import COLLAPSE, FATAL, HACKING, NARROW, RATIO, Alarms  # noqa: E402
from meander.train.config import Config  # noqa: E402
from meander.train.learner import Learner  # noqa: E402
from meander.train.loop import Trainer, _merged  # noqa: E402
from meander.train.model import Network, Texts, digest  # noqa: E402
from meander.train.losses import GSPO, LOSSES, PPO, Guard, Steps, make  # noqa: E402
from meander.train.objective import Kernel, rms, velocity_off  # noqa: E402
from meander.train.rollouts import Rollouts  # noqa: E402

S, C, L, D = 8, 16, 5, 24
FRAME = Size(1, 32, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(patch_size=2, in_channels=C, out_channels=C // 4, num_layers=2,
        attention_head_dim=16, num_attention_heads=2,
                                        joint_attention_dim=D, axes_dims_rope=(4, 6, 6))
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path / "transformer")
    index = {"_class_name": "QwenImagePipeline", "transformer": ["diffusers", "QwenImageTransformer2DModel"]}
    write = {"model_index.json": index, "vae/config.json": {}, "scheduler/scheduler_config.json": {}}
    for name, content in write.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(json.dumps(content))
    return path


def network(folder, seed=1):
    return Network(folder, rank=2, alpha=2, seed=seed)


def rolled(net, groups=2, size=4, seed=0):
    """A batch as a sampler with the weights of net would make it: two sde steps, advantages of each group's own
    rewards."""
    rng = np.random.default_rng(seed)
    sigmas = [1.0, 0.7, 0.4, 0.0]
    out = []
    for g in range(groups):
        text = rng.standard_normal((L - g, D)).astype(np.float32)
        texts = {"prompt_embeds": text, "prompt_embeds_mask": np.ones(len(text), np.uint8)}
        rewards = rng.random(size)
        advantages = (rewards - rewards.mean()) / rewards.std(ddof=1)
        samples = []
        for i in range(size):
            t = {"uid": f"g{g}", "height": 32, "width": 64, "latents_shape": [S, C], "true_cfg_scale": 1.0,
                "cfg_rule": "plain", "log_prob_kind": "density",
                 "transitions": ["sde", "sde", "ode"], "noise_level": 0.8, "sigmas": sigmas, "policy_version_min": 3,
                 "policy_version_max": 3,
                 "prompt": "p", "negative_prompt": "", "weights_digest": "w", "sample_seed": 1, "noise_seed": 1,
                 "content_digest": f"{g}.{i}"}
            sample = Sample(
                {"sample_index": i, "advantage": float(advantages[i]), "reward": float(rewards[i]), "status": "scored"},
                t, [], texts
            )
            x = rng.standard_normal((S, C)).astype(np.float32)
            for k in range(2):
                kernel = transition.kernel("sde", 0.8, sigmas, k)
                rows = [{"prompt_embeds": torch.tensor(text)}]
                v = net.velocity(torch.tensor(x)[None], torch.tensor([sigmas[k]]), rows, FRAME, torch.zeros(1))
                v = v[0].detach().numpy()
                after = (kernel.mean(x, v) + kernel.noise_std * rng.standard_normal((S, C))).astype(np.float32)
                sample.steps.append({
                    "step_index": k, "sigma": sigmas[k], "sigma_next": sigmas[k + 1], "timestep": 1000 * sigmas[k],
                    "noise_std": kernel.noise_std,
                    "std_dev_t": kernel.std_dev_t, "log_prob": kernel.log_prob(x, v, after),
                    "latents": [_kept(k, x), _kept(k + 1, after)], "transition": "sde"})
                x = after
            samples.append(sample)
        out.append(Group({"uid": f"g{g}", "estimator": "flow_grpo"}, samples))
    return Rollouts(Batch(out, "b", "7@1"))


def _kept(index, x):
    return {"index": index, "tensor": {"dtype": "F32", "shape": [S, C], "data": x.astype("<f4").tobytes()}}


def test_ratio_is_one_before_a_step_and_not_after(folder):
    net = network(folder)
    batch = rolled(net)
    learner = Learner(net, PPO(), lr=1e-2, micro_batch=3)
    first = learner.update(batch)
    assert max(first.ratio_off) < 1e-6 and first.used == batch.size
    # of weights that have moved: what an adapter that did not arrive looks like
    assert learner.update(batch).ratio_off[0] > 1e-6


@pytest.mark.parametrize("kind", [PPO, Guard])
def test_loss_is_the_reference(folder, kind):
    net, other = network(folder), network(folder, seed=2)
    for p in other.parameters():
        p.data += 0.02
    batch = rolled(other)
    loss = kind(clip=1e-3, adv_clip_max=0.9)
    learner = Learner(net, loss)
    new, means = learner.score(batch, list(range(batch.size)))
    _, old_means = Learner(other, loss).score(batch, list(range(batch.size)))
    for j, kernel in enumerate(batch.kernels):
        args = [torch.tensor(a[:, j]) for a in (new, batch.log_probs, batch.advantages)]
        drift = kernel.divergence(means[:, j], old_means[:, j])
        n, step = (torch.tensor([x], dtype=torch.float64) for x in (kernel.noise_std, kernel.step))
        got, _ = loss(
            Steps(
                *(a[:, None] for a in args), torch.ones(batch.size, 1, dtype=torch.float64), n, step,
                torch.tensor(batch.rewards), drift[:, None]
            )
        )
        common = dict(clip=1e-3, adv_clip_max=0.9)
        if kind is PPO:
            want = reference.ppo(*args, **common)
        else:
            want = reference.grpo_guard(*args, means[:, j], old_means[:, j], kernel.noise_std, kernel.step, **common)
        np.testing.assert_allclose(got[:, 0].numpy(), want["losses"], rtol=1e-9)
    np.testing.assert_allclose(new, batch.batch.recompute_log_prob(_velocities(net, batch)), atol=2e-7)


def _velocities(net, batch):
    out = np.zeros(batch.batch["latents"].shape, np.float32)
    with torch.no_grad():
        for j in range(out.shape[1]):
            x, _, sigma, texts = batch.step(np.arange(batch.size), j, net.device)
            out[:, j] = net.guided(x, sigma, texts, batch.frame, 1.0, "plain").numpy()
    return out


class _Echo:
    """A network whose velocity is the embeddings."""

    guided = Network.guided

    def velocity(self, x, sigma, rows, size, guidance):
        return torch.stack([row["prompt_embeds"] for row in rows])


@pytest.mark.parametrize("rule, want", [
    ("plain", [[0, -1], [3, 4]]),
    ("rescaled", [[0, 0], [3, 4]]),
    ("plain_clamped", [[0, -math.sqrt(25 / 26)], [3 * math.sqrt(25 / 26), 4 * math.sqrt(25 / 26)]]),
])  # fmt: skip
def test_guidance_rules_are_those_of_the_sampler(rule, want):
    positive, negative = torch.tensor([[[0.0, 0], [3, 4]]]), torch.tensor([[[0.0, 1], [3, 4]]])
    texts = Texts([{"prompt_embeds": positive[0]}], torch.zeros(1), [{"prompt_embeds": negative[0]}], 2.0)
    got = _Echo().guided(positive, torch.ones(1), texts, FRAME, rule)
    torch.testing.assert_close(got, torch.tensor([want], dtype=torch.float32))
    with pytest.raises(ValueError, match="cfg_rule: 'zero_star'"):
        _Echo().guided(positive, torch.ones(1), texts, FRAME, "zero_star")


def test_guidance_is_rescaled_as_by_the_sampler():
    positive, negative = torch.tensor([[[0.5, -1, 0.75, 0.1]]]), torch.tensor([[[0.4, -0.6, 0.5, 0.3]]])
    texts = Texts([{"prompt_embeds": positive[0]}], torch.zeros(1), [{"prompt_embeds": negative[0]}], 4.0)
    got = _Echo().guided(positive, torch.ones(1), texts, FRAME, "plain", 0.7)
    # rescale_noise_cfg of diffusers in float64
    want = [[[0.5060306226573095, -1.3915842123076012, 0.9488074174824552, -0.3162691391608184]]]
    torch.testing.assert_close(got, torch.tensor(want))


def test_batches_hand_the_share_of_rescaling_to_the_network(folder):
    net = network(folder)
    whole = rolled(net)
    assert Rollouts(whole.batch).rescale == 0 and set(whole.batch["guidance_rescale"]) == {0.0}
    scores = []
    for share in (0.0, 0.7):
        for group in whole.batch.groups:
            for sample in group.samples:
                sample.trajectory |= {"true_cfg_scale": 2.0, "cfg_scales": [2.0] * 3, "guidance_rescale": share}
                sample.conditioning |= {
                    f"negative_{n}": v if n.endswith("mask") else v[::-1].copy()
                    for n, v in sample.conditioning.items() if n.startswith("prompt")
                }
        batch = Batch(whole.batch.groups, "b", "7@1")
        assert set(batch["guidance_rescale"]) == {share}
        scores.append(Learner(net, PPO()).score(Rollouts(batch), list(range(batch.size)))[0])
    assert (scores[0] != scores[1]).mean() > 0.9
    batch.samples[0].trajectory["guidance_rescale"] = 0.5
    with pytest.raises(EventError, match="differ in guidance_rescale"):
        Rollouts(batch)


def test_each_step_has_the_scale_that_the_trajectory_says(folder):
    net = network(folder)
    whole = rolled(net)
    assert set(Rollouts(whole.batch).scales) == {1.0} and (whole.batch["cfg_scales"] == 1).all()
    for group in whole.batch.groups:
        for sample in group.samples:
            sample.trajectory |= {"true_cfg_scale": 4.0, "cfg_from": 0.3, "cfg_scales": [1.0, 4.0, 4.0]}
            sample.conditioning |= {f"negative_{name}": value for name, value in sample.conditioning.items()}
    batch = Rollouts(Batch(whole.batch.groups, "b", "7@1"))
    assert batch.batch["cfg_scales"].tolist() == [[1.0, 4.0]] * batch.size
    assert set(batch.batch["cfg_from"]) == {0.3} and set(batch.batch["cfg_until"]) == {0.0}
    texts = [batch.step(np.arange(batch.size), j, net.device)[3] for j in range(2)]
    assert [(t.scale, len(t.negative)) for t in texts] == [(1.0, 0), (4.0, batch.size)]
    batch.batch.samples[0].trajectory["cfg_scales"] = [4.0] * 3
    with pytest.raises(EventError, match="differ in cfg_scales"):
        Rollouts(batch.batch)
    del batch.batch.samples[0].trajectory["cfg_scales"]
    with pytest.raises(EventError, match="cfg_scales: 0; must be those of the 3 steps"):
        Rollouts(Batch(whole.batch.groups, "b", "7@1"))


def test_samples_with_settings_that_the_trainer_does_not_use_are_refused(folder):
    batch = rolled(network(folder)).batch
    batch.samples[-1].trajectory["scheduled_sampling"] = {"probability": 1}
    with pytest.raises(EventError, match="setting scheduled_sampling=.* is not used by this trainer"):
        Rollouts(batch)


@pytest.mark.parametrize("field, value", [("cfg_scales", [2.0, 1.0, 1.0]), ("height", 64)])
def test_samples_of_several_sizes_or_scales_are_refused(folder, field, value):
    batch = rolled(network(folder)).batch
    batch.samples[-1].trajectory[field] = value
    with pytest.raises(ValueError, match=f"differ in {field}; must be equal"):
        Rollouts(batch)


def test_gradient_does_not_depend_on_micro_batches_and_points_at_the_reward(folder):
    states = []
    for size in (1, 3, 64):
        net = network(folder)
        batch = rolled(net)
        Learner(net, PPO(), lr=1e-2, micro_batch=size, beta=0.01).update(batch)
        states.append(net.state())
        new, _ = Learner(net, PPO()).score(batch, list(range(batch.size)))
        assert ((new - batch.log_probs) * batch.advantages).sum() > 0  # what was better than its group is likelier now
    for name, value in states[0].items():
        for other in states[1:]:
            torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-5)


def cleaned(batch):
    """The batch with the last latents of its samples, which forward losses noise again."""
    for sample in batch.batch.samples:
        x = sample.latents(2) * np.float32(0.5)
        sample.steps.append({"step_index": 2, "log_prob": None, "latents": [_kept(3, x)]})
    return batch


def taught(batch):
    """The batch with a teacher, whose velocities are drawn of the sample."""
    def teacher(micro):
        names = [f"{u} {i}".encode() for u, i in zip(micro["uid"], micro["sample_index"], strict=True)]
        draws = [np.random.default_rng(zlib.crc32(name)).normal(size=micro["latents"].shape[1:]) for name in names]
        return np.array(draws, np.float32), "t 00 on cpu"

    batch.teacher = teacher
    return batch


def errors(net, batch):
    """Of each sample, how far its velocities are from the one that leads to its noised latents, at all sigmas."""
    rows, out = np.arange(batch.size), np.zeros(batch.size)
    with torch.no_grad():
        for i in range(3):
            clean, x, sigma, texts = batch.noised(rows, i, net.device)
            v = net.guided(x, sigma, texts, batch.frame, 1.0, "plain")
            out += (x - sigma[:, None, None] * v - clean).square().mean(dim=(1, 2)).numpy()
    return out


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_makes_the_better_likelier_whatever_the_micro_batch(folder, name):
    states = []
    for size in (2, 64):
        net = network(folder)
        batch = taught(cleaned(rolled(net)))
        before = errors(net, batch)
        learner = Learner(net, make(name), lr=3e-3, micro_batch=size)
        report = learner.update(batch)
        assert learner.taught_by == "t 00 on cpu"
        assert max(report.ratio_off) < 1e-6 and all(
            math.isfinite(x) for x in (*report.figures.values(), report.loss, *report.kl)
        )
        assert report.figures.keys() == set(LOSSES[name].figures)
        states.append(net.state())
        moved = Learner(net, PPO()).score(batch, list(range(batch.size)))[0] - batch.log_probs
        if name == "dpo":
            best, worst = batch.pairs()[0::2], batch.pairs()[1::2]
            assert report.used == 4 and (moved[best] - moved[worst]).sum() > 0
            assert [
                batch.rewards[b] - batch.rewards[w] for b, w in zip(best, worst)
            ] == [np.ptp(r) for r in batch.by_group(batch.rewards)]
        elif name == "diffusion_opd":
            assert report.used == batch.size and learner.update(batch, behind=1).loss < report.loss
        elif name == "diffusion_nft":
            assert ((before - errors(net, batch)) * batch.advantages[:, 0]).sum() > 0
        else:
            assert (moved * batch.advantages).sum() > 0
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("micro", [3, 64])
def test_a_teacher_has_the_gradient_of_the_divergence_from_it(folder, micro):
    """The value is that of float64, of equal velocities: another micro-batch rounds those, to float32, otherwise."""
    net = network(folder)
    for p in net.parameters():
        p.data += 0.02
    batch, rows = taught(rolled(net)), np.arange(8)
    learner = Learner(net, make("diffusion_opd"), lr=0.0, micro_batch=micro, max_grad_norm=1e9)
    want, value, u = torch.zeros(()).double(), 0.0, torch.from_numpy(batch.teacher(batch.batch)[0])
    for j, kernel in enumerate(batch.kernels):
        x, _, sigma, texts = batch.step(rows, j, net.device)
        off = kernel.velocity * (learner._guided(batch, x, sigma, texts).double() - u[:, j].double())
        want = want + off.square().mean() / (2 * kernel.noise_std**2) / len(batch.kernels)
        mean, _, _ = learner._mean(batch, rows, j)
        teacher = kernel.state * x.double().numpy() + kernel.velocity * u[:, j].double().numpy()
        value += reference.image_kl(mean.detach().numpy(), teacher, kernel.noise_std).mean() / len(batch.kernels)
    slopes = torch.autograd.grad(want, net.parameters(), allow_unused=True, materialize_grads=True)
    batch.advantages[:] = 0  # it has no use for them
    report = learner.update(batch)
    assert value == pytest.approx(float(want.detach()), rel=1e-12)
    assert report.loss == pytest.approx(value, rel=1e-12 if micro == 64 else 1e-6)
    got, slopes = (torch.cat([g.flatten() for g in gs]) for gs in ([p.grad for p in net.parameters()], slopes))
    assert (got - slopes).norm() < 1e-5 * slopes.norm()


@pytest.mark.parametrize("kind", ["density", "scaled", "squared"])
@pytest.mark.parametrize("elements", [16, 65536])
@pytest.mark.parametrize(
    ("transition_of", "level", "step", "prediction", "guidance"),
    [("sde", 0.9, 0, "flow", 1.0), ("cps", 0.02, 2, "flow", 20.0), ("ddim", 1.0, 0, "epsilon", 7.5),
    ("ddim", 0.01, 2, "epsilon", 7.5), ("dance_sde", 1.0, 2, "sample", 1.0), ("cps", 1.0, 1, "v_prediction", 5.0)],
)
def test_roundings_explain_a_ratio(kind, elements, transition_of, level, step, prediction, guidance):
    """Outputs of a network with a relative error, guided: from almost no noise to a scale of 20."""
    sigmas, error = [0.99, 0.6, 0.05, 0.01], 1e-6
    t = transition.kernel(transition_of, level, sigmas, step)
    kernel = Kernel(t.x_coefficient, t.v_coefficient, t.noise_std, t.sigma - t.sigma_next, kind)
    draw = torch.Generator().manual_seed(elements + step)
    normal = lambda: torch.randn(64 if elements == 16 else 8, elements, generator=draw, dtype=torch.float64)  # noqa: E731
    x, data, noise = normal(), normal(), normal()

    def velocity(off):
        """Of the guided output of two passes, each with its error."""
        one, other = ({"flow": noise - data, "epsilon": noise, "sample": data}.get(prediction, noise - data) for _ in "ab")
        one, other = one + off * rms(one)[:, None] * normal(), other + off * rms(other)[:, None] * normal()
        out = guidance * one + (1 - guidance) * other
        if prediction == "epsilon":
            return out - (x - t.sigma * out) / (1 - t.sigma)
        return (x - (1 - t.sigma) * out) / t.sigma - out if prediction == "sample" else out

    v = velocity(0)
    mean = kernel.mean(x, v).float().double()
    after = (mean + t.noise_std * normal()).float()
    old = kernel.log_prob(mean, after)
    off = velocity_off(x, v, t.sigma, prediction, error * (2 * guidance - 1))
    bound = kernel.rounding(mean, off)
    assert (bound > 0).all()
    assert ((kernel.log_prob(kernel.mean(x, velocity(error)), after) - old).abs() <= bound).all()
    wrong = (kernel.log_prob(kernel.mean(x, velocity(100 * error)), after) - old).abs()
    assert (wrong > bound).any(), "other weights are seen"


def test_a_loss_of_trajectories_has_the_gradient_of_all_steps_at_once(folder):
    net, other = network(folder), network(folder, seed=2)
    for p in (*net.parameters(), *other.parameters()):
        p.data += 0.02
    batch = rolled(other)
    # nothing is clipped
    learner, rows = Learner(net, GSPO(0.5, 0.5), micro_batch=3, max_grad_norm=1e9), np.arange(batch.size)
    log_probs = torch.stack([k.log_prob(*learner._mean(batch, rows, j)[:2]) for j, k in enumerate(batch.kernels)], dim=1)
    ratio = (log_probs - torch.tensor(batch.log_probs)).mean(dim=1).exp()
    loss = -(ratio * torch.tensor(batch.advantages[:, 0])).mean()
    want = torch.autograd.grad(loss, net.parameters(), allow_unused=True, materialize_grads=True)
    report = learner.update(batch)
    assert report.figures == {"clipped": 0.0} and report.loss == pytest.approx(float(loss.detach()), abs=1e-8)
    got, want = (torch.cat([g.flatten() for g in grads]) for grads in ([p.grad for p in net.parameters()], want))
    assert (got - want).norm() < 1e-3 * want.norm()


@pytest.mark.parametrize("name", ["ppo", "dpo"])
def test_batches_of_one_update_are_one_large_batch(folder, name):
    whole = rolled(network(folder), groups=4).batch.groups
    net, again = network(folder), network(folder)
    Learner(net, make(name), ema=0.5).update(Rollouts(Batch(whole, "b", "7@1")))
    learner = Learner(again, make(name), ema=0.5)
    halves = [Rollouts(Batch(whole[i : i + 2], f"b{i}", "7@1")) for i in (0, 2)]
    start = digest(again.state())
    first = learner.update(halves[0], part=0, parts=2)
    assert first.grad_norm == 0 and digest(again.state()) == start and digest(learner.best()) == start
    assert learner.update(halves[1], part=1, parts=2).ratio_off[0] < 1e-6, "no step was taken between them"
    for key, value in net.state().items():
        torch.testing.assert_close(again.state()[key], value, rtol=1e-3, atol=1e-6)


def test_a_forward_loss_wants_the_weights_that_made_the_batch(folder):
    net = network(folder)
    batch = rolled(net)
    with pytest.raises(ValueError, match="batch b is 1 updates old"):
        Learner(net, make("diffusion_nft")).update(batch, behind=1)
    with pytest.raises(ValueError, match="latents 3 were not kept"):
        Learner(net, make("diffusion_nft")).update(batch)
    # With two steps of the optimizer the second one's velocities still are compared with those before the first.
    two = cleaned(batch)
    assert Learner(net, make("diffusion_nft"), minibatches=2, lr=3e-3).update(two).grad_norm > 0


def test_pairs_are_of_groups_with_a_better_and_a_worse_sample(folder):
    batch = rolled(network(folder), groups=3)
    batch.rewards = np.array([1.0, 0, 0, 1, 2, 2, 2, 2, 0, 3, 1, 0])
    assert batch.pairs() == [0, 2, 9, 11]


def test_older_batches_have_importance_weights(folder):
    net, older = network(folder), network(folder, seed=2)
    for p in older.parameters():
        p.data += 0.05
    batch = rolled(older)
    report = Learner(net, PPO()).update(batch, behind=1)
    new, _ = Learner(network(folder), PPO()).score(batch, list(range(batch.size)))
    assert report.weight == pytest.approx(np.minimum(np.exp(new - batch.log_probs), 2).mean(), rel=1e-6)
    assert report.weight != 1 and report.figures["clipped"] == 0  # the ratio is that of the step itself


@pytest.mark.parametrize("loss", ["ppo", "gspo", "diffusion_nft"])
def test_a_run_goes_on_to_the_bit(folder, tmp_path, loss):
    def begin():
        net = network(folder)
        return Learner(net, make(loss), lr=1e-2, ema=0.5), cleaned(rolled(net))

    whole, batch = begin()
    for _ in range(3):
        whole.update(batch)
    half, batch = begin()
    half.update(batch)
    records.save_checkpoint(tmp_path, half.network, half.state(), {"updated": 1})
    resumed, batch = begin()
    state, keep = records.load_checkpoint(tmp_path)
    resumed.load(state)
    for _ in range(2):
        resumed.update(batch)
    assert keep == {"updated": 1}
    assert digest(resumed.network.state()) == digest(whole.network.state())
    assert digest(resumed.best()) == digest(whole.best()) != digest(whole.network.state())


def test_wrong_adapters_are_refused_by_name(folder):
    net = network(folder)
    name = next(iter(net.state()))
    for change, fault in (
        (lambda s: s.pop(name), "is missing"),
        (lambda s: s.update(other=torch.zeros(1)), "not of this network"),
        (lambda s: s.update({name: torch.zeros(3, 3)}), "has shape"),
        (lambda s: s.update({name: s[name] * math.nan}), "NaN"),
    ):
        state = net.state()
        change(state)
        with pytest.raises(ValueError, match=fault):
            net.load(state)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_grad_norm": -1.0}, "--max-grad-norm: -1.0; must be above 0"),  # it would turn gradients round
        ({"alpha": 0}, "--alpha: 0; must be above 0"),
        ({"threads": 0}, "--threads: 0; must be above 0"),
        ({"beta": -1.0}, "--beta: -1.0; must be at least 0"),
        ({"sheet": -1}, "--sheet: -1; must be at least 0"),
        ({"ratio_factor": float("nan")}, "--ratio-factor: nan; must be a number"),
        ({"kl_limit": float("nan")}, "--kl-limit: nan; must be a number"),
        ({"adam_beta2": 1.5}, "--adam-beta2: 1.5; must be at least 0 and below 1"),
        ({"noise_level": 0.0}, "--noise-level: 0.0; must be above 0"),
        ({"sde_type": "off"}, "--sde-type: 'off'; must be sde, cps, dance_sde, ddim or ode"),
        ({"initial_noise": "none"}, "--initial-noise: 'none'; must be shared or per_sample"),
        ({"height": -8}, "--height: -8; must be above 0, or 0 for the default"),
        ({"dtype": "float99"}, "--dtype: 'float99'; must be one of float32, bfloat16"),
    ],
)
def test_settings_that_learn_nothing_are_refused(settings, says):
    with pytest.raises(ValueError) as e:
        Config(prompts="p", **settings)
    assert str(e.value) == says


def test_a_size_that_the_model_does_not_make_is_refused_before_anything_is_pushed(folder, tmp_path):
    (tmp_path / "p").write_text("a\n")
    settings = {"prompts": str(tmp_path / "p"), "model": str(folder), "out": str(tmp_path)}
    with pytest.raises(ValueError, match="--frames, --height, --width: height x width: 40 x 1024; must be positive"):
        Trainer(Config(**settings, height=40), None, None)


def test_prompts_are_drawn_the_same_and_each_once_an_epoch(tmp_path):
    (tmp_path / "p").write_text('a\n\n{"prompt": "b", "group_size": 2}\nc\nd\n')
    draw = prompts.Draw(prompts.read(tmp_path / "p"), 2, seed=5)
    epoch = [p["prompt"] for k in (0, 1) for p in draw.batch(k)]
    assert sorted(epoch) == ["a", "b", "c", "d"] and draw.epoch(1) == 0 and draw.epoch(2) == 1
    assert draw.batch(1) == prompts.Draw(draw.prompts, 2, seed=5).batch(1)
    config = Config(prompts="p", groups=2)
    asked = prompts.training(config, 3, draw.batch(3), 1, version=4)
    assert [p["uid"] for p in asked] == ["u000003-000", "u000003-001"] and asked[0]["min_policy_version"] == 4
    assert asked == prompts.training(config, 3, draw.batch(3), 1, version=4)
    sized = {"height": 64, "width": 96, "frames": 5, "true_cfg_scale_2": 3.0}
    config = Config(prompts="p", groups=2, height=64, width=96, frames=5, guidance_2=3.0)
    for of in prompts.training(config, 3, [{"prompt": "a"}], 1, 4), prompts.held_out(config, "h", [{"prompt": "a"}], 4):
        assert sized.items() <= of[0].items() and not sized.keys() & asked[0].keys()
    for settings, given in (({}, {}), ({"latents_dtype": "F32"}, {"latents_dtype": "F32"})):
        (of,) = prompts.training(Config(prompts="p", **settings), 3, [{"prompt": "a"}], 1, 4)
        assert {k: v for k, v in of["rollout"].items() if k == "latents_dtype"} == given, "the model's, unless asked"
        assert "free_read_steps" not in of
    (of,) = prompts.training(Config(prompts="p", free_read_steps=True), 3, [{"prompt": "a"}], 1, 4)
    assert of["free_read_steps"]
    (tmp_path / "p").write_text("{")
    with pytest.raises(ValueError, match=":1:"):
        prompts.read(tmp_path / "p")


@pytest.mark.parametrize("name, text, want", [
    ("p.txt", "\ufeff{red|blue} sign\r\nb\n", ["{red|blue} sign", "b"]),
    ("p.json", '["a", {"prompt": "b"}]', ["a", "b"]),
    ("p.jsonl", '{"prompt": "a"}\n"b"\n', ["a", "b"]),
    ("p.jsonl", '{\n "prompt": "a"\n}\n{\n "prompt": "b"\n}', ["a", "b"]),
    ("p.txt", 'a\n{"prompt": "b"}\n', "p.txt:2: JSON in a file of texts; name it .jsonl"),
    ("p.tsv", "Prompt\tNote\n", ".tsv is not read here"),
    ("p.csv", "prompt\na\n", ".csv is not read here"),
    ("p.yaml", "- a\n", ".yaml is not read here"),
    ("p.jsonl", '{"prompt": "a"}\n{"prompt": "a", "prompt": "b"}', "p.jsonl:2: prompt: must come at most once"),
    ("p.jsonl", '{"prompt": [{"role": "user"}]}', "p.jsonl:1: prompt: .*; must be a text"),
    ("p.jsonl", '{"prompt": "a"}\n7', "p.jsonl:2: prompt: 7; must be a text"),
    ("p.txt", "a\0b", "a zero byte"),
])  # fmt: skip
def test_a_file_of_prompts_is_read_as_what_it_is_or_refused(tmp_path, name, text, want):
    (tmp_path / name).write_text(text, encoding="utf-8")
    if isinstance(want, list):
        assert [p["prompt"] for p in prompts.read(tmp_path / name)] == want
        return
    with pytest.raises(ValueError, match=want):
        prompts.read(tmp_path / name)


def test_a_data_set_of_the_hub_is_refused_with_what_fetches_it():
    fetches = "'meander prompts hf://datasets/a/b/c.parquet --out prompts.jsonl' fetches it"
    with pytest.raises(ValueError, match=fetches):
        prompts.read("hf://datasets/a/b/c.parquet")


def test_prompts_are_the_same_where_all_that_they_ask_for_is():
    red, blue = ({"prompt": "make it red", "conditions": {"image": f}} for f in ("a.png", "b.png"))
    assert prompts.asked(red) != prompts.asked(blue) != prompts.asked({"prompt": "make it red"})
    assert prompts.asked(red) == prompts.asked(red | {"seed": 3, "reward": []})
    assert prompts.asked(red) != prompts.asked(red | {"arguments": {"strength": 0.5}})


def test_an_epoch_is_shuffled_once(monkeypatch):
    shuffled = []

    class Counted(prompts.random.Random):
        def sample(self, *args):
            shuffled.append(args)
            return super().sample(*args)

    monkeypatch.setattr(prompts.random, "Random", Counted)
    draw = prompts.Draw([{"prompt": str(i)} for i in range(100)], 8, seed=5)
    drawn = [p["prompt"] for k in range(50) for p in draw.batch(k)]
    assert len(shuffled) == 4 and sorted(drawn) == sorted(map(str, [*range(100)] * 4))


@pytest.mark.parametrize("name, behind", [("ppo", 1), *((name, 0) for name in LOSSES)])
def test_a_share_without_samples_adds_nothing(folder, name, behind):
    """That of a process beyond the number of groups."""
    net = network(folder)
    before = digest(net.state())
    report = Learner(net, make(name), lr=1e-2, minibatches=2, beta=0.1).update(Rollouts.without_samples("b", 2), behind)
    assert report.used == 0 and len(report.kl) == 2 and report.grad_norm == 0 and digest(net.state()) == before


def test_states_of_a_batch_are_held_once(folder):
    batch = rolled(network(folder)).batch
    before, after = batch["latents"], batch["next_latents"]
    assert np.shares_memory(before[:, 1], after[:, 0]) and (before[:, 1] == after[:, 0]).all()
    for i, sample in enumerate(batch.samples):
        for k, step in enumerate(sample.steps):
            for kept, of in zip(step["latents"], (before, after), strict=True):
                assert np.shares_memory(kept["tensor"]["data"], of[i, k])
    again = Batch(batch.groups, "b", "7@1")
    assert again.digest() == batch.digest()
    for sample in again.samples:
        sample.steps[0]["step_index"] = 7
        sample.steps[0]["latents"] = [_kept(7, np.ones((S, C))), _kept(8, np.zeros((S, C)))]
        sample.trajectory["transitions"], sample.trajectory["sigmas"] = ["sde"] * 9, [1 - i / 10 for i in range(10)]
    apart = Batch(again.groups, "b", "7@1")
    assert (apart["latents"][:, 0] == 1).all() and (apart["next_latents"][:, 0] == 0).all()


def test_a_file_of_tensors_is_that_of_safetensors():
    from safetensors.torch import save

    rng = torch.Generator().manual_seed(0)
    dtypes = {"b": torch.float32, "a": torch.bfloat16, "d": torch.float16, "c": torch.float64, "e": torch.float32}
    tensors = {f"{name}.ä": torch.randn(3, 5, generator=rng).to(dtype) for name, dtype in dtypes.items()}
    tensors["alpha"] = torch.tensor(2.0)
    assert tensorfile.encode(tensors) == save(tensors)
    assert tensorfile.encode({"x": np.ones((2, 3), ">f4").T}) == save({"x": torch.ones(3, 2)})
    for wrong in (torch.ones(2, dtype=torch.int64), [1.0], np.array("x")):
        with pytest.raises(ValueError, match="x: .*; must be a tensor of float64"):
            tensorfile.encode({"x": wrong})


def test_alarms():
    def update(**changed):
        return {
            "ratio_off": [1e-8, math.nan], "ratio_bound": [1e-7, 1e-6], "behind": 0,
            "steps": [0], "kl": [1e-4], "reader": 0.8, "zero_std": 0.1
        } | changed

    alarms = Alarms(Config(prompts="p"))
    assert alarms.update(update()) == []
    # A window that moves on is at a step of less noise, where the same change is a larger divergence.
    window = Alarms(Config(prompts="p"))
    assert window.update(update(steps=[1], kl=[1e-2])) == []
    assert [k for k, _ in window.update(update(kl=[1e-2]))] == [HACKING]
    assert [k for k, _ in alarms.update(update(ratio_off=[1e-8, 1e-5]))] == [RATIO]
    assert alarms.update(update(ratio_off=[1e-5, math.nan], behind=1)) == []  # older weights are elsewhere by right
    for _ in range(8):
        found = alarms.update(update(reader=0.5))
        if found:
            break
    assert [k for k, _ in found] == [COLLAPSE]

    def evaluation(exact, gold, diversity):
        return alarms.evaluated({"exact": exact, "gold": gold, "diversity": diversity})

    assert evaluation(0.7, 0.6, 0.14) == evaluation(0.9, 0.75, 0.13) == evaluation(0.9, 0.69, 0.13) == []
    (kind, text), = evaluation(0.95, 0.6, 0.13)
    assert kind == HACKING and "0.750" in text
    assert alarms.held() == 0
    assert "diversity" in evaluation(0.95, 0.75, 0.09)[0][1]
    assert alarms.held() == round(20 * (0.9 - 0.09 / 0.14), 3), "what is missing of 90 % of the start's is rewarded"
    assert evaluation(0.95, 0.75, 0.13) == [] and alarms.held() == 0
    # What is rewarded may come back: gaming alone, and steps that are too large, end a run.
    assert Config(prompts="p").stop and set(FATAL) == {HACKING, COLLAPSE}
    for held, kind in ((0.9, NARROW), (0.0, HACKING)):
        alarms = Alarms(Config(prompts="p", hold_diversity=held))
        alarms.evaluated({"exact": 0.7, "gold": 0.6, "diversity": 0.14})
        assert [k for k, _ in alarms.evaluated({"exact": 0.7, "gold": 0.6, "diversity": 0.1})] == [kind]


def test_a_log_cut_off_by_a_crash_goes_on(tmp_path):
    log = records.Records(tmp_path, tensorboard=False)
    log.begin(0)
    for n in (1, 2, 3):
        log.add({"kind": "update", "update": n, "kl": [0.1, math.nan], "seconds": {"push": 0.2}})
    with open(tmp_path / "log.jsonl", "a") as f:
        f.write('{"kind": "upd')
    again = records.Records(tmp_path, tensorboard=False)
    again.begin(1)
    assert [r["update"] for r in again.of("update")] == [1]
    again.add({"kind": "update", "update": 2})
    assert [json.loads(line)["update"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [1, 2]
    assert (tmp_path / "log.csv").read_text().splitlines()[0].split(",")[:2] == ["update", "kl/0"]


def test_settings_are_checked():
    freed = {"free_read_steps": True}
    for wrong in (
        {"groups": 0}, {"ema": 1.0}, {"prompts": ""}, {"minibatches": 99}, {"ahead": -1}, {"test": "t"},
        {"latents_dtype": "f32"}, {"cache_bytes": 0}, freed | {"checkpoint_every": 2}, freed | {"accumulate": 2},
    ):
        with pytest.raises(ValueError, match="--"):
            Config(**({"prompts": "p"} | wrong))
    for steps in ("4", "a", "", "2-1"):
        with pytest.raises(ValueError, match="sde-steps"):
            Config(prompts="p", sde_steps=steps).trained  # noqa: B018
    assert Config(prompts="p", sde_steps="0,2-3").trained == [0, 2, 3]


def test_several_batches_of_an_update_are_one_line():
    one = {
        "batch": "u0", "batch_digest": "a", "reward": 0.25, "samples": 4, "ratio_off": [1e-8, math.nan], "ratio_bound": [1e-7, 1e-6],
        "kl": [1.0, math.nan], "made_by": ["w"], "behind": 0, "steps": [0, 1]
    }
    two = one | {"batch": "u1", "batch_digest": "b", "reward": 0.75, "ratio_off": [2e-8, 1e-9], "ratio_bound": [1e-7, 2e-6], "kl": [3.0, 5.0]}
    assert _merged([one]) == one
    want = {
        "batch": "u0+u1", "batch_digest": "a+b", "reward": 0.5, "samples": 8, "ratio_off": [2e-8, 1e-9], "ratio_bound": [1e-7, 2e-6],
        "kl": [2.0, 5.0], "made_by": ["w"], "behind": 0, "steps": [0, 1]
    }
    assert _merged([one, two]) == want


def test_records_go_to_trackers_too(tmp_path):
    class Kept:
        def log(self, values, step):
            self.values, self.step = values, step

        def close(self):
            self.closed = True

    kept = Kept()
    log = records.Records(tmp_path, False, [kept])
    log.add({"kind": "update", "update": 3, "reward": 0.5, "kl": [0.1, math.nan], "batch": "u2"})
    log.close()
    assert (kept.values, kept.step, kept.closed) == ({"update/reward": 0.5, "update/kl/0": 0.1}, 3, True)
    with pytest.raises(ValueError, match="--track: 'file'; must be tensorboard, wandb or trackio"):
        Config(prompts="p", track="file", out=str(tmp_path)).trackers()


def test_a_run_keeps_its_name_where_it_is_tracked(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "sink", lambda to, name, flag: (to, name))
    names = [Config(prompts="p", track="wandb, trackio", out=str(tmp_path / out)).trackers() for out in "aab"]
    assert [to for to, _ in names[0]] == ["wandb", "trackio"] and names[0] == names[1], "it goes on"
    assert names[2][0][1] != names[0][0][1], "another run"
    assert not Config(prompts="p", out=str(tmp_path / "c")).trackers() and not (tmp_path / "c").exists()


def test_summary_is_a_table():
    def measured(update, glyph):
        return {"update": update, "rates": {"glyph": glyph, "ocr": 0.5}, "diversity": None}

    summary = {"updates": 9, "stopped": "hacking: so it is", "seconds": {"rollout": 12.3}, "waiting": 0.347}
    time = ["9 updates; seconds: rollout 12", "35% of the time of updates waits for rollouts"]
    assert table(summary).splitlines() == [*time, "stopped: hacking: so it is"]
    lines = table(
        summary | {"before": measured(0, 0.25), "best": measured(6, 0.75), "last": measured(9, 0.5)}
    ).splitlines()
    assert lines[0].split() == ["before", "best,", "6", "last,", "9"]
    measures = (("base", 0.25, 0.1), ("base, 20 steps", 0.5, None))
    tests = {of: {"rates": {"glyph": r}, "diversity": d} for of, r, d in measures}
    tested = table(summary | {"test": tests}).splitlines()
    assert tested[2].split() == ["glyph", "diversity"] and tested[4].split() == ["base,", "20", "steps", "0.500"]
    assert lines[1].split() == ["glyph", "0.250", "0.750", "0.500"] and len(lines) == 6 and max(map(len, lines)) < 60


def test_kernel_needs_one_schedule(folder):
    net = network(folder)
    batch = rolled(net)
    batch.batch.arrays["sigmas"][1, 0] = 0.9
    with pytest.raises(ValueError, match="schedules"):
        Rollouts(batch.batch)
    assert isinstance(batch.kernels[0], Kernel)
