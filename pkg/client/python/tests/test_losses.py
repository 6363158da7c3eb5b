"""Each loss on the worked examples that the Go package shares, and the registry."""

import json
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from meander import loss as reference  # noqa: E402
from meander.train import losses  # noqa: E402
from meander.train.config import Config  # noqa: E402
from meander.train.objective import Kernel  # noqa: E402

ROOT = pathlib.Path(__file__).parents[4]
VECTORS = json.loads((ROOT / "schemas/vectors/losses.json").read_text())
TAUGHT = {"loss": "diffusion_opd", "teacher": "t"}
EXAMPLES = {s["name"]: [c["inputs"] | {"want": c["expected"]} for c in s["cases"]] for s in VECTORS["sets"]}
STEPS = {"log_prob", "old", "advantages", "weights", "mean", "old_mean", "base", "noise_std", "step"}
NOISED = {"clean", "noise", "sigma", "velocity", "old_velocity", "advantages"}


def tensor(x):
    return torch.tensor(x, dtype=torch.float64)


def cases(name):
    return pytest.mark.parametrize("case", EXAMPLES[name])


def near(got, want):
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-9, atol=1e-12)


def holds(name, case, leaves, given, losses_of=lambda t: t):
    """Compares losses, their mean and its gradient with those of the example."""
    want, total = case["want"], given[0].mean()
    total.backward()
    near(losses_of(given[0]), want["losses"])
    near(total, want["loss"])
    assert {k.removeprefix("gradient_") for k in want if k.startswith("gradient_")} == leaves.keys(), name
    for key, leaf in leaves.items():
        near(leaf.grad, want[f"gradient_{key}"])


def plug(name, case, inputs):
    return losses.make(name, **{k: v for k, v in case.items() if k not in inputs | {"want"}})


@pytest.mark.parametrize(
    "name, case", [(name, c) for name in ("ppo", "grpo_guard", "flow_dppo") for c in EXAMPLES[name]]
)
def test_of_steps(name, case):
    log_prob, drift, leaves = tensor(case["log_prob"]).requires_grad_(), None, {}
    leaves["log_prob"] = log_prob
    n, step = case.get("noise_std", 1.0), case.get("step", 1.0)
    if "mean" in case:
        mean = tensor(case["mean"]).requires_grad_()
        drift = Kernel(1.0, 1.0, n, step, "density").divergence(mean, tensor(case["old_mean"]))[:, None]
        if name == "grpo_guard":
            leaves["mean"] = mean
    old, advantages, weights = (tensor(case[k])[:, None] for k in ("old", "advantages", "weights"))
    s = losses.Steps(log_prob[:, None], old, advantages, weights, tensor([n]), tensor([step]), advantages[:, 0], drift)
    given = plug(name, case, STEPS)(s)
    holds(name, case, leaves, given, lambda t: t[:, 0])
    if name != "flow_dppo":  # the float64 reference says the same
        args = [case[k] for k in ("log_prob", "old", "advantages")] + (
            [case["mean"], case["old_mean"], n, step] if drift is not None else []
        )
        want = getattr(reference, name)(*args, case["clip"], case["adv_clip_max"], case["weights"])
        near(given[0][:, 0], want["losses"])
        assert float(given[1]["clipped"].mean()) == pytest.approx(want["pg_clipfrac"])


@cases("gspo")
def test_gspo(case):
    log_prob, old = tensor(case["log_prob"]).requires_grad_(), tensor(case["old"])
    a = tensor(case["advantages"])[:, None].expand_as(old)
    given = plug("gspo", case, STEPS)(
        losses.Steps(log_prob, old, a, torch.ones_like(old), tensor([1.0]), tensor([1.0]), a[:, 0])
    )
    assert (given[0] == given[0][:, :1]).all(), "the steps of a trajectory have one ratio"
    holds("gspo", case, {"log_prob": log_prob}, given, lambda t: t[:, 0])


@cases("dpo")
def test_dpo(case):
    log_prob, base = tensor(case["log_prob"]).requires_grad_(), tensor(case["base"])
    one = torch.ones(base.numel(), 1, dtype=torch.float64)
    s = losses.Steps(
        log_prob.reshape(-1, 1), one, one, one, tensor([1.0]), tensor([1.0]), one[:, 0], None, base.reshape(-1, 1)
    )
    given = plug("dpo", case, STEPS)(s)
    holds("dpo", case, {"log_prob": log_prob}, given, lambda t: t[::2, 0])


@cases("diffusion_nft")
@pytest.mark.parametrize("estimator", ["flow_grpo", "diffusion_nft"])
def test_diffusion_nft(case, estimator):
    clean, noise, old = (tensor(case[k])[:, None] for k in ("clean", "noise", "old_velocity"))
    v, sigma, a = tensor(case["velocity"]).requires_grad_(), tensor(case["sigma"]), tensor(case["advantages"])
    if estimator == "diffusion_nft":  # what the estimator gives is the probability itself
        a = losses.probability(a, case["adv_clip_max"])
    s = sigma[:, None, None]
    noised = losses.Noised(v[:, None], old, clean, (1 - s) * clean + s * noise, sigma, a, estimator)
    holds("diffusion_nft", case, {"velocity": v}, plug("diffusion_nft", case, NOISED)(noised))


@cases("diffusion_opd")
def test_diffusion_opd(case):
    mean, n = tensor(case["mean"]).requires_grad_(), case["noise_std"]
    one = torch.ones(len(mean), 1, dtype=torch.float64)
    taught = Kernel(1.0, 1.0, n, 1.0, "density").divergence(mean, tensor(case["teacher_mean"]))[:, None]
    given = losses.make("diffusion_opd")(losses.Steps(one, one, one, one, one[0], one[0], one[:, 0], taught=taught))
    near(taught[:, 0], reference.image_kl(case["mean"], case["teacher_mean"], n))
    holds("diffusion_opd", case, {"mean": mean}, (given,), lambda t: t[:, 0])


def test_every_loss_has_examples_and_words():
    assert EXAMPLES.keys() - {"grpo_tokens"} == losses.LOSSES.keys()  # the loss of other trainers of texts
    assert all(kind.__doc__ and "arXiv" in kind.__doc__ for kind in losses.LOSSES.values())
    assert all(name in Config.__dataclass_fields__["loss"].metadata["help"] for name in losses.LOSSES)


def test_a_loss_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from meander.train.losses import Loss\n"
        "def half(s, share=0.5):\n    return -share * s.advantages * (s.log_prob - s.old).exp()\n"
        "class Drifting(Loss):\n    drift = True\n    def __call__(self, s):\n        return s.drift\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    one = torch.ones(2, 1, dtype=torch.float64)
    s = losses.Steps(one, one, one, one, tensor([1.0]), tensor([1.0]), one[:, 0], 2 * one)
    assert (losses.make("mine:half")(s) == -0.5).all() and (losses.make("mine:half", share=2.0)(s) == -2).all()
    drifting = losses.make("mine:Drifting")
    assert drifting.drift and not drifting.base and (drifting(s) == 2).all()
    for name, fault in (
        ("mine:none", "no attribute"), ("mine", "must be one of ppo"), ("nowhere:f", "No module"),
        ("mine:number", "must be a function of Steps")
    ):
        with pytest.raises(ValueError, match=f"--loss: '{name}'.*{fault}"):
            losses.make(name)
    with pytest.raises(ValueError, match=r"--loss-options: 'part': must be a setting of mine:half: share \(0.5\)"):
        losses.make("mine:half", part=1)


@pytest.mark.parametrize("fields, fault", [
    ({"loss": "gspo", "clip": 0.1}, r"--clip: must be a setting of gspo: clip_low \(0.0003\), clip_high \(0.0004\)"),
    ({"loss": "ppo", "loss_options": "mix_beta=1"}, "--loss-options: 'mix_beta': must be a setting of ppo"),
    ({"loss": "ppo", "loss_options": "clip"}, "'clip'; must be NAME=NUMBER"),
    ({"loss": "dpo", "loss_options": "dpo_beta=0"}, "--loss dpo: dpo_beta: 0.0; must be a finite number above 0"),
    ({"loss": "dpo", "micro_batch": 3}, "--micro-batch: 3; must be even"),
    ({"loss": "dpo", "group_size": 1}, "--group-size: 1; must be at least 2"),
    ({"loss": "diffusion_nft", "ahead": 1}, "without --ahead and --follow"),
    ({"loss": "ppo", "estimator": "diffusion_nft"}, "gives probabilities"),
    ({"loss": "diffusion_opd"}, "--teacher: empty; must be the name of a teacher with --loss diffusion_opd"),
    ({"teacher": "t"}, "--teacher: t; must be the name of a teacher with --loss diffusion_opd, .* and only there"),
    (TAUGHT | {"stage": "a"}, "--teacher: t; must be empty with --stage or a language model"),
    (TAUGHT | {"model": str(ROOT / "deploy/models/sums")}, "for texts see examples/distill_sums.py"),
    (TAUGHT | {"sde_type": "ode"}, "--loss diffusion_opd: needs log-probs, which --sde-type ode has none of"),
    (TAUGHT | {"teacher_substeps": 0}, "--teacher-substeps: 0; must be 1 to 100"),
    (TAUGHT | {"loss_options": "x=1"}, "'x': must be a setting of diffusion_opd: none"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(fields, fault):
    with pytest.raises(ValueError, match=fault):
        losses.of(Config(prompts="p", **fields))


def test_settings_reach_the_loss():
    assert losses.of(Config(prompts="p", loss="grpo_guard", clip=2e-6)) == losses.Guard(clip=2e-6)
    assert losses.of(
        Config(prompts="p", loss="diffusion_nft", adv_clip_max=1.0, loss_options="mix_beta=0.1")
    ) == losses.DiffusionNFT(0.1, adv_clip_max=1.0)


def windows(batches, **fields):
    c = Config(prompts="p", steps=6, sde_steps="0-4", **fields)
    return [c.window(b) for b in batches]


def test_windows():
    """MixGRPO's, as verl-omni has them."""
    assert windows(range(2)) == [[0, 1, 2, 3, 4]] * 2
    moved = windows(range(6), sde_window=2, sde_window_order="progressive", sde_shift=2)
    assert moved == [[0, 1], [0, 1], [2, 3], [2, 3], [3, 4], [3, 4]]
    drawn = windows(range(60), sde_window=2)
    assert drawn == windows(range(60), sde_window=2) != windows(range(60), sde_window=2, seed=3)
    assert {w[0] for w in drawn} == {0, 1, 2, 3} and all(w[1] == w[0] + 1 for w in drawn)
    for fields, fault in (
        ({"sde_window": 6}, "must be 1 to 5"), ({"sde_shift": 2, "sde_window": 2}, "needs --sde-window"),
        ({"sde_window_order": "x"}, "random or progressive")
    ):
        with pytest.raises(ValueError, match=fault):
            windows([0], **fields)


def test_learning_rate():
    def rates(**fields):
        return [Config(prompts="p", updates=6, lr=1.0, **fields).learning_rate(u) for u in range(6)]

    assert rates() == [1] * 6
    assert rates(warmup=2, lr_schedule="linear") == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert rates(lr_schedule="cosine") == pytest.approx([1, 0.9330127, 0.75, 0.5, 0.25, 0.0669873])
    for fields in ({"warmup": 6}, {"lr_schedule": "step"}):
        with pytest.raises(ValueError, match="--(warmup|lr-schedule)"):
            rates(**fields)
