"""Numbers computed in float64 by a plain reading of verl-omni's and Flow-GRPO's loss; those of the Go package, too."""

import json
import pathlib

import numpy as np
import pytest

from meander import loss

# What verl and verl-omni compute themselves; the Go package is tested with it, too.
VERL = json.loads((pathlib.Path(__file__).parents[2] / "policyloss/testdata/verl.json").read_text())

close = lambda got, want, tol=1e-12: np.testing.assert_allclose(got, want, rtol=tol, atol=tol)  # noqa: E731


def test_ppo():
    out = loss.ppo([-0.99995, -1.0003, -0.9997, -1.01], [-1] * 4, [1.2, -0.8, 6, 0])
    close(out["ratio"], [1.000050001250, 0.999700044996, 1.000300045005, 0.990049833749])
    close(out["losses"], [-1.200060001500, 0.799920000000, -5.000500000000, 0])
    close(out["loss"], -1.350160000375)
    close(out["ppo_kl"], 0.0024875)
    close([out["pg_clipfrac"], out["pg_clipfrac_higher"], out["pg_clipfrac_lower"]], [0.75, 0.25, 0.5])
    close([out["ratio_mean"], out["ratio_std"]], [0.99752498125, 0.00498950356], 1e-9)
    close(out["approx_kl"], 1.25228125e-05)


def test_middle_step():
    out = loss.ppo([-0.6657263713449176], [-0.6515271871029717], [1.5])
    close(out["ratio"], [0.9859011487311201])
    close(out["loss"], -1.4788517230966802)


def test_grpo_guard():
    mean = np.array([[0.75051, -0.18477, 0.032625, 1.72263]])
    noise = np.sqrt(2.170035e-05 / (2 * 7.38107142857155e-05))
    out = loss.grpo_guard(
        [-0.6657263713449176], [-0.6515271871029717], [1], mean, mean - np.sqrt(2.170035e-05), noise, 0.2
    )
    close(out["ratio"], [0.9945988887355316])
    close(out["loss"], -0.9945988887355316 / 0.2)


def test_kl():
    mean, ref = [[0.1, 0.2], [0.3, -0.1]], [[0.12, 0.2], [0.25, -0.1]]
    close(loss.image_kl(mean, ref, [0.5, 0.8]), [0.0004, 0.0009765625])
    close(loss.image_kl(mean, ref, np.array([0.5, 0.8]) * np.sqrt(0.1)), [0.004, 0.009765625])
    for kind, want in {"k1": -0.15, "abs": 0.15, "k2": 0.01125, "k3": 0.0118342427283}.items():
        close(loss.kl(kind, [-1.2], [-1.05]), [want])


def test_rollout_weights():
    old, rollout = [[-1, -1.1], [-0.9, -1.3]], [[-1.02, -1.05], [-1.2, -1]]
    close(loss.rollout_weights(old, rollout), [[1.020201340, 0.951229425], [1.349858808, 0.740818221]], 1e-9)
    close(loss.rollout_weights(old, rollout, "sequence"), [[0.970445533548] * 2, [1, 1]])
    close(loss.rollout_weights(old, rollout, "token", (0.9, 1.1)), [[1.020201340, 0.951229425], [0, 0]], 1e-9)


def cases(section):
    return pytest.mark.parametrize("case", VERL[section])


@cases("ppo")
def test_verl_ppo(case):
    want = case["want"]
    out = loss.ppo(
        case["log_prob"], case["old"], case["advantages"], case["clip"], case["adv_clip_max"], weights=case["weights"]
    )
    for key in want:
        close(out[key], want[key], 1e-7 if "clipfrac" in key else 1e-12)  # shares are float32 there


@cases("grpo_guard")
def test_verl_grpo_guard(case):
    want = case["want"]
    out = loss.grpo_guard(
        case["log_prob"], case["old"], case["advantages"], case["mean"], case["old_mean"],
        case["std_dev_t"] * case["step"] ** 0.5, case["step"],
        case["clip"], case["adv_clip_max"], case["weights"],
    )
    for key in want:
        close(out[key], want[key], 1e-7 if "clipfrac" in key else 1e-12)


@cases("image_kl")
def test_verl_image_kl(case):
    for std in (case["std"], np.ravel(case["std"])):  # [B, 1, 1] as schedulers have it, and [B]
        got = loss.image_kl(case["mean"], case["reference"], std)
        close(got, case["want"]["kl"])
        close(got.mean(), case["want"]["mean"])


@cases("kl")
def test_verl_kl(case):
    close(loss.kl(case["kind"], case["log_prob"], case["reference"]), case["want"])


@cases("correction")
def test_verl_rollout_weights(case):
    def parse(threshold):
        numbers = tuple(float(x) for x in threshold.split("_"))
        return numbers if len(numbers) > 1 else numbers[0]

    level = case["level"] or None
    got = loss.rollout_weights(
        case["old"], case["rollout"], level, parse(case["threshold"] or "2"), case["normalize"],
        [(r, parse(t)) for r, t in case["rejections"]]
    )
    close(got, case["want"])


@pytest.mark.parametrize(
    "call",
    [
        lambda: loss.ppo([], [], []),
        lambda: loss.ppo([1], [1, 2], [1]),
        lambda: loss.ppo([1], [1], [1], clip=-1),
        lambda: loss.ppo([1], [1], [1], adv_clip_max=0),
        lambda: loss.grpo_guard([1], [1], [1], [[1]], [[1]], 0, 1),
        lambda: loss.ppo([1], [1], [1], weights=[1, 1]),
        lambda: loss.ppo([1], [1], [np.nan]),
        lambda: loss.image_kl([[1]], [[1]], [0]),
        lambda: loss.image_kl([[1], [2], [3]], [[1], [2], [3]], [[1, 1, 1]]),
        lambda: loss.image_kl([[1], [2]], [[1], [2]], [1, 1, 1]),
        lambda: loss.kl("k4", [1], [1]),
        lambda: loss.rollout_weights([[1]], [[1]], "batch"),
        lambda: loss.rollout_weights([1], [1]),
        lambda: loss.rollout_weights([[1]], [[1]], threshold=0),
        lambda: loss.rollout_weights([[1]], [[1]], threshold=(2, 1)),
        lambda: loss.rollout_weights([[1]], [[1]], None, rejections=[("seq_max_k1", 2)]),
        lambda: loss.rollout_weights([[1]], [[1]], None, rejections=[("token_k1", 0.5)]),
        lambda: loss.rollout_weights([[1]], [[1]], None, rejections=[("token_k3", (0.5, 2))]),
    ],
)
def test_refuses(call):
    with pytest.raises(ValueError):
        call()
