"""Tracks of a state with advantages of their own, as the trainer has them."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

from meander.data.batch import Batch  # noqa: E402
from meander.data.micro import Micro  # noqa: E402
from meander.train import prompts  # noqa: E402
from meander.train.config import Config  # noqa: E402
from meander.train.learner import Learner  # noqa: E402
from meander.train.losses import LOSSES, PPO, make  # noqa: E402
from meander.train.rollouts import Rollouts  # noqa: E402
from test_train import C, S, cleaned, folder, network, rolled, taught  # noqa: E402, F401

TRACKS = [{"name": "video", "shape": [6, C], "elements": 6 * C}, {"name": "sound", "shape": [2, C], "elements": 2 * C}]
PLACES = {"video": slice(0, 6 * C), "sound": slice(6 * C, S * C)}


def tracked(whole, credits):
    """A batch whose states have two tracks. credits(group): the advantages of each, by name."""
    for k, g in enumerate(whole.batch.groups):
        for s in g.samples:
            s.trajectory["tracks"] = TRACKS
            for step in (step for step in s.steps if "velocity" in step):
                kernel = s.kernel(step["step_index"])
                x, after = (s.latents(step["step_index"] + i).reshape(-1) for i in (0, 1))
                step["tracks"] = []
                for t in TRACKS:
                    at = PLACES[t["name"]]
                    v = step["velocity"].reshape(-1)
                    lp = kernel.log_prob(x[at], v[at], after[at])
                    step["tracks"].append({**t, "log_prob": lp, "log_prob_sum": lp * t["elements"]})
        g.advantage["credits"] = [
            {"stage": "main", "track": name, "values": [float(a) for a in values]} for name, values in credits(k, g)
        ]
    return Rollouts(Batch(whole.batch.groups, "b", "7@1"))


def with_velocities(net, batch):
    """The batch, with the velocity of each step."""
    for s in batch.batch.samples:
        rows = [{"prompt_embeds": torch.tensor(s.conditioning["prompt_embeds"])}]
        for step in s.steps:
            x, sigma = torch.tensor(s.latents(step["step_index"]))[None], torch.tensor([step["sigma"]])
            step["velocity"] = net.velocity(x, sigma, rows, batch.frame, torch.zeros(1))[0].detach().numpy()
    return batch


def gradient(net, loss, batch, **settings):
    """That of one update, and its report."""
    report = Learner(net, loss, lr=0.0, max_grad_norm=1e9, **settings).update(batch)
    return torch.cat([p.grad.flatten() for p in net.parameters()]).double(), report


def alike(_, g):
    return [(t["name"], [s.advantage for s in g.samples]) for t in TRACKS]


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in ("dpo", "diffusion_nft")])
def test_tracks_with_the_advantages_of_the_whole_have_its_gradient(folder, name):  # noqa: F811
    """Before a step the ratio is 1, and the mean over all elements is that over the tracks, by their shares. What is
    left is of roundings: log-probs are float64, the network is float32."""
    net = network(folder)
    want, _ = gradient(net, make(name), taught(rolled(net)))
    got, report = gradient(net, make(name), taught(tracked(with_velocities(net, rolled(net)), alike)), micro_batch=3)
    assert len(report.ratio_off) == 4 and max(report.ratio_off) < 1e-6
    assert float((got - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize("name", ["ppo", "gspo", "diffusion_nft"])
def test_a_track_that_nothing_is_credited_to_has_no_gradient(folder, name):  # noqa: F811
    """Only the log-probs of the sound have one: it is that of a loss whose states are the sound alone, by its share."""
    net = network(folder)
    made = with_velocities(net, rolled(net))
    batch = tracked(cleaned(made) if name == "diffusion_nft" else made, lambda k, g: alike(k, g)[1:])
    assert (batch.advantages[:, 0::2] == 0).all() and (batch.advantages[:, 1::2] != 0).all()
    seen = []

    class Told(type(make(name))):
        def __call__(self, s):
            out = super().__call__(s)
            seen.append(s.advantages.abs().max())
            return out

    got, _ = gradient(net, Told(), batch)
    assert 0 in seen and max(seen) > 0 and float(got.norm()) > 0
    if name == "diffusion_nft":
        return  # an advantage of 0 is a probability of a half, so it has a gradient
    want = torch.zeros_like(got)
    for j, kernel in enumerate(batch.kernels):
        mean, after, _ = Learner(net, PPO())._mean(batch, np.arange(batch.size), j)
        lp = kernel.log_prob(mean.flatten(1)[:, PLACES["sound"]], after.flatten(1)[:, PLACES["sound"]])
        a = torch.tensor([s.advantage for s in batch.batch.samples])
        loss = -(a * lp).sum() / (2 * batch.size) / 4  # 2 steps, and a fourth of the elements
        found = torch.autograd.grad(loss, net.parameters(), allow_unused=True, materialize_grads=True)
        want += torch.cat([g.flatten() for g in found]).double()
    assert float((got - want).norm() / want.norm()) < 1e-5


def test_older_batches_have_weights_of_each_track(folder):  # noqa: F811
    net = network(folder)
    batch = tracked(with_velocities(net, rolled(net)), alike)
    _, report = gradient(net, PPO(), batch, beta=0.1)
    assert report.kl == [0.0, 0.0] and report.weight == 1
    learner = Learner(net, PPO(), lr=1e-2)
    learner.update(batch)
    report = learner.update(batch, behind=1)
    assert report.weight != 1 and abs(report.weight - 1) < 0.1


def test_log_probs_of_tracks_are_read_with_the_steps(folder, monkeypatch):  # noqa: F811
    """They are in the steps alone, so a batch whose steps are read by pieces has them piece by piece."""
    net = network(folder)
    whole = tracked(with_velocities(net, rolled(net)), alike)
    lazy = Rollouts(Batch(whole.batch.groups, "b", "7@1"))
    lazy.log_probs[:] = np.nan
    lazy.batch.unread = True
    monkeypatch.setattr(Batch, "micro", lambda self, n, rows: [
        Micro(whole.batch, n, rows, 1, False)._made(r, [whole.batch.samples[i] for i in r])
        for r in (rows[i : i + n] for i in range(0, len(rows), n))
    ])  # fmt: skip
    want, _ = gradient(net, PPO(), whole, micro_batch=3)
    got, report = gradient(net, PPO(), lazy, micro_batch=3)
    assert torch.equal(got, want) and (lazy.log_probs == whole.log_probs).all() and max(report.ratio_off) < 1e-6


def test_pairs_have_no_use_for_advantages_of_tracks(folder):  # noqa: F811
    net = network(folder)
    batch = tracked(with_velocities(net, rolled(net)), alike)
    with pytest.raises(ValueError, match="credit: tracks have advantages of their own, for which a loss of"):
        Learner(net, make("dpo")).update(batch)
    credit = [{"reward": "loudness", "track": "sound", "weight": 1}]
    config = Config(prompts="x", loss="dpo")
    with pytest.raises(ValueError, match="--loss dpo: prompt 'x': credit: tracks have advantages"):
        prompts.check_stages(config, [{"prompt": "x", "credit": credit}], pairs=True)
    staged = {"prompt": "x", "stages": json.loads(json.dumps([{"name": "a"}, {"name": "b", "credit": credit}]))}
    prompts.check_stages(Config(stage="a", loss="dpo"), [staged], pairs=True)
    with pytest.raises(ValueError, match="--loss dpo"):
        prompts.check_stages(Config(stage="b", loss="dpo"), [staged], pairs=True)
