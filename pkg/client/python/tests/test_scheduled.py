"""Worked numbers of scheduled sampling; those of the Go package pkg/scheduled, too."""

import json
import math
import pathlib

import numpy as np
import pytest

from meander import scheduled

ROOT = pathlib.Path(__file__).parents[4]
SPEC = json.loads((ROOT / "pkg/scheduled/testdata/spec.json").read_text())
ROLLS = json.loads((ROOT / "pkg/scheduled/testdata/rolls.json").read_text())["rolls"]
NOISE = json.loads((ROOT / "schemas/testdata/noise.json").read_text())


def close(got, want, tol):
    np.testing.assert_allclose(got, want, rtol=0, atol=tol)


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=[c.get("name", str(i)) for i, c in enumerate(cases)])


@named(SPEC["ramps"])
def test_probability(case):
    for step, want in case["want"].items():
        close(scheduled.probability(int(step), **case["settings"]), want, 6e-7)


def test_probability_refuses():
    for bad in (
        {"probability": 1.5}, {"prob_start": -0.1}, {"prob_end": math.nan}, {"ramp_steps": -1},
        {"ramp_shape": "sudden"}, {"compat": "other"}
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            scheduled.probability(0, **bad)


def test_plans_have_the_bits_of_the_contract():
    """Probability and plan of schemas/testdata/noise.json, to the bit."""
    for case in NOISE["scheduled"]:
        ramp = {k: None if v is None else float.fromhex(v) for k, v in case["ramp"].items() if k.startswith("prob")}
        p = scheduled.probability(
            case["step"], **ramp, ramp_steps=case["ramp"]["ramp_steps"], start_step=case["ramp"]["start_step"],
            ramp_shape=case["ramp"]["ramp_shape"]
        )
        assert p.hex() == case["probability"]
        seed, n = int(case["seed"]), case["timesteps"]
        bases = [scheduled.draw_timestep(seed, case["step"], i, n) for i in range(len(case["drawn_timesteps"]))]
        assert bases == case["drawn_timesteps"]
        given = [float.fromhex(t) for t in case["given_timesteps"]]
        planned = scheduled.plan(seed, case["step"], given, n, case["max_step_offset"], case["strategy"], p)
        assert [[s.base, s.source, s.offset, s.reason] for s in planned] == case["samples"]


@named(SPEC["offsets"])
def test_offset_shares(case):
    shares = scheduled.offset_shares(case["strategy"], case["m"])
    close(shares, case["shares"], 6e-7)
    close((shares * np.arange(case["m"] + 1)).sum(), case["mean"], 6e-7)
    drawn = [s.offset for s in scheduled.plan(7, 0, np.zeros(20000), 1000, case["m"], case["strategy"])]
    close(np.bincount(drawn, minlength=case["m"] + 1) / 20000, shares, 0.015)


def test_rolled_share_and_forwards():
    for case in SPEC["rolled"]:
        close(case["p"] * (1 - scheduled.offset_shares("uniform", case["m"])[0]), case["share"], 6e-10)
    for case in SPEC["forwards"]:
        reflexflow = scheduled.reflexflow_on(None, case["m"], case["prediction"])
        close(
            scheduled.expected_forwards(case["batch"], case["p"], "uniform", case["m"], reflexflow), case["forwards"],
            1e-12
        )


def test_plan_edges():
    t = [0, 623.4, 999]
    assert all(s.reason == "disabled" and s.source == s.base for s in scheduled.plan(1, 0, t, 1000, 0))
    assert all(s.reason == "masked" and s.offset == 0 for s in scheduled.plan(1, 0, t * 50, 1000, 4, probability=0))
    always = scheduled.plan(1, 0, t * 50, 1000, 10)
    assert not any(s.reason == "masked" for s in always)
    assert {s.reason for s in always if s.base == 999} == {"zero_offset", "clipped"}
    assert [s.base for s in always[:3]] == [0, 623, 999] and always[1].timestep == 623.4
    assert max(s.source for s in always) == 999
    for bad in (
        {"max_step_offset": 1000}, {"max_step_offset": -1}, {"probability": 1.1}, {"probability": math.nan},
        {"strategy": "late"}
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            scheduled.plan(1, 0, t, 1000, **{"max_step_offset": 4, **bad})
    for bad in ([-1], [1000], [math.nan]):
        with pytest.raises(ValueError, match="timesteps"):
            scheduled.plan(1, 0, bad, 1000, 4)


def test_metrics():
    planned = scheduled.plan(1, 0, [0, 500, 999], 1000, 10)
    m = scheduled.plan_metrics(planned, 1.0, True, 1, [0.5, 1.5])
    rolled = [s for s in planned if not s.reason]
    assert m["scheduled_sampling/rolled_fraction"] == len(rolled) / 3
    assert m["scheduled_sampling/extra_forwards"] == 3 + len(rolled) + sum(s.source - s.base for s in rolled)
    assert m[
        "scheduled_sampling/offset_max"
    ] == max(s.offset for s in planned) and m["scheduled_sampling/drift_l2"] == 1


def levels_of(case):
    if case["prediction"] == "flow_prediction":
        return scheduled.Levels.flow(case["timesteps"])
    abar = scheduled.linear_alphas_cumprod(case["timesteps"], case["beta_first"], case["beta_last"])
    return scheduled.Levels.variance_preserving(case["prediction"], abar)


def model_of(case, levels):
    """scale*x + shift, or a share of the prediction that is right."""
    x0, noise, share = np.array(case["x0"]), np.array(case["noise"]), case["model"].get("true")
    if share is None:
        return lambda x, t: case["model"].get("scale", 0) * x + case["model"].get("shift", 0)

    def right(x, t):
        u, a = levels.at(t)
        return share * {
            "flow_prediction": noise - x0, "epsilon": noise, "v_prediction": a * noise - u * x0
        }[case["prediction"]]

    return right


@named(SPEC["rolls"] + ROLLS)
def test_roll(case):
    levels = levels_of(case)
    x = scheduled.noised(case["x0"], case["noise"], levels.at(case["source"]))
    close(x, case["states"][0], case["tolerance"])
    steps = list(
        scheduled.roll(
            levels, case["sampler"], x, case["source"], case["target"], model_of(case, levels), case["order"],
            case.get("compat", "exact")
        )
    )
    assert len(steps) == case["source"] - case["target"]
    for step, want in zip(steps, case["states"][1:]):
        if want is not None:
            close(step.latent, want, case["tolerance"])
    if "teacher" in case:
        teacher = scheduled.noised(case["x0"], case["noise"], levels.at(case["target"]))
        close(teacher, case["teacher"], case["tolerance"])
        assert scheduled.drift(steps[-1].latent, teacher) < 0.01
    growth, u = 1.0, levels.at(case["source"])[0]
    for step in steps:
        if case.get("compat", "exact") == "exact":
            assert step.level[0] < u, "noise must fall"
            u = step.level[0]
        else:
            growth *= step.level[0] / levels.at(step.at)[0]
    if "growth" in case:
        close(growth if case.get("compat") else u / levels.at(case["source"])[0], case["growth"], 6e-10)


@pytest.mark.parametrize("prediction", scheduled.PREDICTIONS)
@pytest.mark.parametrize(
    "sampler,order",
    [
        ("euler", 0), ("dpm", 1), ("dpm", 2), ("dpm", 3),
        *[(name, n) for name in ("unipc", "unip") for n in range(1, 10)], ("rk4", 4)
    ]
)
def test_a_perfect_model_lands_on_the_teacher(prediction, sampler, order):
    rng = np.random.default_rng(3)
    case = {
        "prediction": prediction, "timesteps": 100, "beta_first": 1e-3, "beta_last": 0.1, "x0": rng.normal(size=8),
        "noise": rng.normal(size=8), "model": {"true": 1}
    }
    levels = levels_of(case)
    for source, target in ((99, 90), (50, 40), (10, 0), (1, 0), (99, 0), (29, 27), (7, 7)):
        if order > 6 and source - target > 10:
            continue  # orders that high amplify their own rounding
        x, u = scheduled.noised(case["x0"], case["noise"], levels.at(source)), levels.at(source)[0]
        for step in scheduled.roll(levels, sampler, x, source, target, model_of(case, levels), order):
            assert step.level[0] < u, "noise must fall"
            x, u = step.latent, step.level[0]
        close(x, scheduled.noised(case["x0"], case["noise"], levels.at(target)), 1e-9)


def test_levels():
    table = SPEC["levels"]
    levels = scheduled.Levels.variance_preserving(
        "epsilon", scheduled.linear_alphas_cumprod(table["timesteps"], table["beta_first"], table["beta_last"])
    )
    for t, want in table["at"].items():
        close(levels.at(int(t)), want, 6e-10)
    flow = scheduled.Levels.flow(1000)
    mirrored = np.linspace(1, 0.001, 1000)
    close(
        [
            flow.sigma(600, mirrored), flow.sigma(600, mirrored, "simpletuner"),
            flow.sigma(600, mirrored[:600], "simpletuner")
        ],
        [600 / 999, 0.4, 600 / 999], 1e-12
    )


@pytest.mark.parametrize("n,lost", [(100, [29, 57, 58]), (1000, []), (1024, [])])
def test_simpletuner_loses_places(n, lost):
    """int(t/N*N) is not t for some: the step then ends where it began."""
    levels = scheduled.Levels.variance_preserving("epsilon", scheduled.linear_alphas_cumprod(n))
    stays = []
    for t in range(1, n - 1):
        (step,) = scheduled.roll(levels, "euler", [1.0], t, t - 1, lambda x, t: x, compat="simpletuner")
        assert step.level in (levels.at(t), levels.at(t + 1))
        stays += [t] if step.level == levels.at(t) else []
    assert stays == lost


LIBRARY = json.loads((ROOT / "pkg/scheduled/testdata/simpletuner.json").read_text())["rolls"]


def test_simpletuners_library():
    """Its rollouts, up to the orders that it computes with all digits; the others are refused."""
    for case in LIBRARY:
        abar = scheduled.linear_alphas_cumprod(case["timesteps"], case["beta_first"], case["beta_last"])
        if case["zero_snr"]:
            abar = scheduled.zero_snr(abar)
        levels = scheduled.Levels.variance_preserving(case["prediction"], abar)
        x = scheduled.noised(case["x0"], case["noise"], levels.at(case["source"]))
        rolling = scheduled.roll(
            levels, case["sampler"], x, case["source"], case["target"], model_of(case, levels), case["order"],
            "simpletuner")
        if case["order"] > {"unipc": 3, "unip": 6}.get(case["sampler"], 9):
            with pytest.raises(ValueError, match=f"order: {case['order']}; must be at most"):
                next(rolling)
            continue
        for step, want in zip(rolling, case["states"][1:]):
            close(step.latent, want, 1e-11)


def test_roll_refuses():
    levels = scheduled.Levels.flow(10)
    for bad, field in (
        ({"sampler": "rk4", "compat": "simpletuner"}, "rk4"), ({"sampler": "heun"}, "sampler"),
        ({"sampler": "dpm", "order": 4}, "order"),
        ({"sampler": "rk4", "order": 2}, "order"), ({"source": 10}, "source"), ({"target": 6}, "target"),
    ):
        with pytest.raises(ValueError, match=field):
            list(
                scheduled.roll(
                    **{"levels": levels, "sampler": "euler", "x": [0.0], "source": 5, "target": 3, "model": None, **bad}
                )
            )


def test_reflexflow():
    s = SPEC["reflexflow"]
    batch = {k: [s[k]] for k in ("pred", "target", "noisy", "x0", "clean", "biased")}
    for alpha, want in s["weights"].items():
        close(scheduled.reflexflow_weights([s["clean"]], [s["biased"]], float(alpha)), [want], 1e-12)
    close(np.abs(scheduled.reflexflow_weights([s["clean"]], [s["biased"]]) - 1).mean(), s["mean_change"], 1e-12)
    for case in s["cases"]:
        out = scheduled.reflexflow(**batch, alpha=case["alpha"], beta1=case["beta1"], beta2=case["beta2"])
        close([out["fc"][0], out["loss"]], [case["fc"], case["loss"]], 6e-10)
        close([out["adr"][0], out["reflexflow/exposure_l1"]], [s["adr"], s["exposure"]], 6e-10)
    close(10 * out["adr"][0], s["adr_beta1"], 6e-10)
    null = scheduled.reflexflow(**batch, alpha=None, beta1=None, beta2=None)
    close(null["loss"], 0.025, 1e-12)


def test_reflexflow_parts():
    s = SPEC["reflexflow"]
    batch = {k: np.array([s[k], s[k]]) for k in ("pred", "target", "noisy", "x0", "clean", "biased")}
    batch["biased"][1] = batch["clean"][1]  # did not roll
    out = scheduled.reflexflow(**batch)
    close(out["fc"], [0.031875, 0.025], 1e-12)
    assert out["adr"][0] == out["adr"][1] > 0
    close(out["loss"], out["losses"].mean(), 1e-15)
    masked = scheduled.reflexflow(**batch, mask=np.array([[1, 0, 0, 0]] * 2))
    close(masked["fc"], [0.04 * 1.5 / 4, 0.01], 1e-12)
    close(masked["adr"], out["adr"], 0)
    huber = scheduled.reflexflow(**batch, losses=np.ones((2, 4)))
    close(huber["fc"], [4.5 / 4, 1], 1e-12)
    without = scheduled.reflexflow(batch["pred"], batch["target"], batch["noisy"], batch["x0"], beta2=0.5)
    close(without["fc"], [0.0125, 0.0125], 1e-12)
    e = np.random.default_rng(1).normal(size=(1, 65536))
    close(np.abs(scheduled.reflexflow_weights(e, np.zeros_like(e)) - 1).mean(), 1.52587890625e-05, 1e-18)
    close(scheduled.anti_drift([[1.0, 0]], [[0.0, 0]], [[2.0, 0]]), 4, 1e-12)
    for bad in (
        {"biased": None}, {"alpha": math.inf}, {"beta1": -1.0}, {"beta2": -1.0}, {"pred": [[math.nan] * 4] * 2},
        {"x0": [[1.0]] * 2}
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            scheduled.reflexflow(**{**batch, **bad})
    assert [scheduled.reflexflow_on(*a) for a in (
        (None, 4, "flow_prediction"), (None, 0, "flow_prediction"), (True, 0, "flow_prediction"),
        (False, 4, "flow_prediction"), (True, 4, "epsilon"))
    ] == [True, False, True, False, False]


def test_reflexflow_keeps_the_gradient():
    """Of tensors it is a loss: the gradient is that of finite differences, and the numbers are those of numpy."""
    torch = pytest.importorskip("torch", reason="no torch: pip install torch")
    draw = np.random.default_rng(3)
    batch = {k: draw.normal(size=(3, 2, 4)) for k in ("pred", "target", "noisy", "x0", "clean", "biased")}
    batch["biased"][1] = batch["clean"][1]  # did not roll
    batch["mask"] = draw.integers(0, 2, (3, 2, 4))
    tensors = {k: torch.tensor(v, requires_grad=k != "mask") for k, v in batch.items()}
    out, want = scheduled.reflexflow(**tensors), scheduled.reflexflow(**batch)
    assert out.keys() == want.keys()
    for k in want:
        close(out[k].detach().numpy(), want[k], 1e-13)
        assert not k.startswith("reflexflow/") or not out[k].requires_grad
    out["loss"].backward()
    assert tensors["clean"].grad is None and tensors["biased"].grad is None and not out["weights"].requires_grad
    for name in ("pred", "target", "noisy", "x0"):
        for at in np.ndindex(3, 2, 4):
            h, ends = 1e-6, []
            for step in (h, -h):
                moved = batch[name].copy()
                moved[at] += step
                ends.append(scheduled.reflexflow(**{**batch, name: moved})["loss"])
            close(tensors[name].grad[at].item(), (ends[0] - ends[1]) / (2 * h), 1e-6)
    zero = torch.zeros(2, 4, requires_grad=True)
    scheduled.reflexflow(zero, *(torch.zeros(2, 4),) * 3)["loss"].backward()
    assert torch.isfinite(zero.grad).all()
    half = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    scheduled.reflexflow(half, *(np.zeros((2, 4)),) * 3)["loss"].backward()
    assert half.grad.dtype == torch.bfloat16 and half.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="pred: has NaN"):
        scheduled.reflexflow(half * math.nan, *(np.zeros((2, 4)),) * 3)
