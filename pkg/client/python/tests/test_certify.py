"""The vectors by the formulas in Python, and what a certificate says of functions that are right and that are not."""

import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from meander.certify import adapters, fit, report, suite, trainer
from meander.certify.__main__ import main
from planted import PPO, SDE

SETS = suite.load()
TITLES = sorted(SETS)


@pytest.mark.parametrize("title", TITLES)
def test_the_formula_gives_the_vectors(title):
    s = SETS[title]
    assert s.formula and s.source and s.cases
    for inputs, expected in s.cases:
        assert inputs.keys() == s.inputs.keys(), title
        got, want = s.formula_of(inputs), np.asarray(expected[s.returns])
        off = np.abs(got - want).max()
        assert got.shape == want.shape and off <= s.tolerance["float64"] * max(1, np.abs(want).max()), (title, off)
        for name in (k.removeprefix("gradient_") for k in expected if k.startswith("gradient_")):
            want = expected["gradient_" + name]
            (got,) = fit.Way(s, [inputs]).numbers(by=name)
            # Differences of the fourth order are this far off where the loss is sharp.
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-7 * max(1, np.abs(want).max()), err_msg=title)


def test_every_formula_has_vectors():
    assert SETS.keys() == suite.FORMULAS.keys()


GRPO = """
def flow_grpo(rewards, std, ddof, epsilon):
    off = rewards - rewards.mean(axis=1, keepdims=True)
    if std == "none":
        return off
    s = rewards.std(axis=1, keepdims=True, ddof=int(ddof)) if std == "group" else rewards.std(ddof=int(ddof))
    return off / (s + epsilon)
"""

DPPO = """
def flow_dppo(log_prob, old, advantages, weights, mean, old_mean, noise_std, kl_mask_threshold):
    r = np.exp(log_prob - old)
    far = ((mean - old_mean) ** 2).mean(axis=1) / (2 * noise_std**2) >= kl_mask_threshold
    away = (r - 1) * advantages > 0
    return np.where(far & away, 0, -advantages * r * weights).mean()
"""
NFT = """
def diffusion_nft(clean, noise, sigma, velocity, old_velocity, advantages, mix_beta, adaptive_weight_min, adv_clip_max):
    r, s, losses = np.clip(advantages / adv_clip_max, -1, 1) / 2 + 0.5, sigma[:, None], 0
    x = (1 - s) * clean + s * noise
    for share, b in ((r, mix_beta), (1 - r, -mix_beta)):
        off = x - s * (b * velocity + (1 - b) * old_velocity) - clean
        losses = losses + share * (off**2).mean(axis=1) / np.maximum(abs(off).mean(axis=1), adaptive_weight_min)
    return (losses * adv_clip_max / mix_beta).mean()
"""


def judged(title, source, change=("", "")):
    assert change[0] in source, change
    made = {"np": np}
    exec(source.replace(*change), made)
    name = source.split("def ")[1].split("(")[0]
    return trainer.judge(made[name], SETS[title])


@pytest.mark.parametrize("title, source", [
    ("losses/ppo", PPO), ("transitions/sde", SDE), ("advantages/flow_grpo", GRPO), ("losses/flow_dppo", DPPO)
])
def test_what_is_right_agrees(title, source):
    found = judged(title, source)
    assert [f.state for f in found] == ["agrees"] * len(found), found
    assert not report.failed(found)


@pytest.mark.parametrize("title, source, change, says", [
    ("losses/ppo", PPO, ("losses.mean()", "losses.sum()"), "B (4, 3, 5, 6) times the formula"),
    ("losses/ppo", PPO, ("losses.mean()", "losses.mean() / 2"), "0.5 times the formula"),
    ("losses/ppo", PPO, ("return losses", "return -losses"), "the opposite sign"),
    ("losses/ppo", PPO, ("-a * r, -a *", "a * r, a *"), "advantages has the opposite sign"),
    ("losses/ppo", PPO, ("log_prob - old", "old - log_prob"), "log_prob and old are swapped"),
    ("losses/ppo", PPO, ("np.clip(r, 1 - clip, 1 + clip)", "r"), "clip has no limit"),
    ("losses/ppo", PPO, ("1 + clip", "1e9"), "1 + clip is left out of minimum(maximum(ratio, 1 - clip), 1 + clip)"),
    ("losses/ppo", PPO, (" * weights", " * np.roll(weights, 1)"), "weights is behind by one place"),
    ("losses/ppo", PPO, (" * weights", ""), "weights has no effect"),
    ("losses/ppo", PPO, ("np.maximum", "np.minimum"), "1 + clip)) is minimum(-A * ratio"),
    ("transitions/sde", SDE, (" - np.log(2 * np.pi) / 2", ""), "ln(2 pi)/2 is left out of -(next - mean)^2"),
    ("transitions/sde", SDE, (" - np.log(n)", ""), "log(noise_std) is left out of"),
    ("transitions/sde", SDE, ("(2 * n**2)", "n**2"), "2 is left out of 2 * noise_std^2"),
    (
        "transitions/sde", SDE, ("sigmas[step], sigmas[step + 1]", "sigmas[step + 1], sigmas[step + 2]"),
        "step is one more",
    ),
    ("transitions/sde", SDE, ("g * np.sqrt(-dt)", "g"), "sqrt(-dt) is left out of std_dev_t * sqrt(-dt)"),
    ("transitions/sde", SDE, ("* dt) + v", "* dt) - v"), "v has the opposite sign"),
    ("losses/ppo", PPO, ("1 - clip, 1 + clip", "1 - 1.3 * clip, 1 + 1.3 * clip"), "clip is 1.3 times itself"),
    ("losses/ppo", PPO, ("    r = np", "    clip = 0.15\n    r = np"), "clip is 0.15"),
    ("transitions/sde", SDE, ("g = noise_level", "g = 1.3 * noise_level"), "noise_level is 1.3 times itself"),
    ("transitions/sde", SDE, ("np.log(n)", "np.log2(n)"), "log(noise_std) is 1.443 times itself"),
    ("transitions/sde", SDE, ("(2 * n**2)", "(2 * n)"), "2 is left out of noise_std^2"),
    ("advantages/flow_grpo", GRPO, ("ddof=int(ddof)) if", "ddof=1 - int(ddof)) if"), "ddof is another"),
    ("advantages/flow_grpo", GRPO, (" + epsilon", ""), "epsilon is 0"),
    ("advantages/flow_grpo", GRPO, ("mean(axis=1, keepdims=True)", "mean()"), "mean(rewards, axis 1) is mean(rewards)"),
    ("losses/ppo", PPO, ("np.exp(", "np.exp2("), "exp(log_prob - old) is exp2(log_prob - old)"),
    ("losses/flow_dppo", DPPO, ("(r - 1) *", "np.maximum(r - 1, 0) *"), "advantages < 0 and ratio < 1 is left out of"),
    ("losses/flow_dppo", DPPO, ("far & away", "away"), "kl_mask_threshold is 0"),
    ("losses/flow_dppo", DPPO, ("far & away", "far"), "away is left out of"),
    ("losses/flow_dppo", DPPO, (">= kl", "< kl"), "divergence >= kl_mask_threshold is divergence < kl_mask_threshold"),
    ("losses/diffusion_nft", NFT, (", -1, 1)", ", -9, 9)"), "advantages stands for A in A / adv_clip_max"),
    ("losses/diffusion_nft", NFT, (" / mix_beta", ""), "mix_beta is left out of"),
    ("losses/diffusion_nft", NFT, ("/ 2 + 0.5", "+ 0.5"), "2 is left out of A / adv_clip_max / 2"),
    ("losses/diffusion_nft", NFT, ("(1 - r, -", "(r, -"), "r stands for 1 - r in (1 - r) * loss-"),
    ("losses/diffusion_nft", NFT, ("off**2).mean(axis=1)", "off**2).sum(axis=1)"), "N (3, 4, 5, 6) times the formula"),
    ("transitions/sde", SDE, ("sigmas[step + 1]", "sigmas[min(step + 2, len(sigmas) - 1)]"), "step + 1 is step + 2"),
    ("transitions/sde", SDE, ("noise_level * np.sqrt(", "noise_level * ("), "sqrt(sigma / (1 - where"),
    ("transitions/sde", SDE, ("(1 - sigma) / (2", "1 / (2"), "1 - sigma is left out of drift * (1 - sigma)"),
    ("transitions/sde", SDE, ("if sigma == 1 else sigma", "if sigma else sigma"), "sigmas[1]) is sigmas[1]"),
    ("transitions/sde", SDE, ("np.sqrt(-dt)", "np.sqrt(sigma)"), "sigma stands for -dt in sqrt(-dt)"),
])
def test_what_differs_is_told(title, source, change, says):
    found = judged(title, source, change)
    assert found[0].state == "differs" and says in found[0].says, found[0]
    if source != NFT:  # that one has a gradient where there is none
        assert all(f.state == "differs" for f in found if "gradient" in f.aspect), "it differs as the value does"
    assert report.failed(found)


def test_a_gradient_of_what_is_held_is_told():
    found = judged("losses/diffusion_nft", NFT)
    assert [f.state for f in found] == ["agrees", "differs"] and "off+, off- have a gradient" in found[1].says, found


def test_a_choice_that_a_function_does_not_take_is_found():
    """It differs where it is not that of the source."""
    told = {f.aspect: (f.state, f.says) for f in judged("transitions/sde", SDE)}
    assert told["log_prob_kind"] == ("agrees", "density, as was found") and told["reduce"][0] == "agrees"
    (value, kind, reduce) = judged("transitions/sde", SDE, ("log_prob.mean()", "log_prob.sum()"))
    assert (value.state, kind.state, reduce.state) == ("agrees", "agrees", "differs")
    assert reduce.says == "sum, as was found; the formula's source has mean"
    short = ("/ (2 * n**2) - np.log(n) - np.log(2 * np.pi) / 2", "")
    assert judged("transitions/sde", SDE, short)[1].says.startswith("squared, as was found")


def test_what_nothing_explains_is_said_so():
    (value, gradient) = judged("losses/ppo", PPO, ("np.exp(", "np.cosh("))
    assert value.state == gradient.state == "unexplained" and "where the formula has" in value.says


@pytest.mark.parametrize("source, fault", [
    ("def f(log_prob, old, advantages, clip): return 0", "does not take adv_clip_max"),
    ("def f(logp, old): return 0", "takes logp; the inputs of losses/ppo are log_prob"),
])
def test_refuses(source, fault):
    with pytest.raises(ValueError, match=fault):
        judged("losses/ppo", source)


def test_inputs_that_a_function_lacks_are_neutral_or_given():
    def ppo(log_prob, old, advantages):
        r = np.exp(log_prob - old)
        return np.maximum(-advantages * r, -advantages * np.clip(r, 0.9, 1.1)).mean()

    found = trainer.judge(ppo, SETS["losses/ppo"], given={"clip": 0.1, "adv_clip_max": 1e9})
    assert [f.state for f in found] == ["agrees", "agrees"], found
    with pytest.raises(ValueError, match="--with clop: no input of losses/ppo"):
        trainer.judge(ppo, SETS["losses/ppo"], given={"clop": 0.1})


def test_gradients_of_autograd():
    torch = pytest.importorskip("torch")

    def ppo(log_prob, old, advantages, weights, clip, adv_clip_max):
        a, r = advantages.clamp(-adv_clip_max, adv_clip_max), (log_prob - old).exp()
        return (torch.maximum(-a * r, -a * r.clamp(1 - clip, 1 + clip)) * weights).mean()

    assert [f.state for f in trainer.judge(ppo, SETS["losses/ppo"], arrays="torch")] == ["agrees", "agrees"]
    found = trainer.judge(ppo, SETS["losses/ppo"], "float32", arrays="torch")
    assert [f.state for f in found] == ["agrees", "agrees"] and 0 < found[0].off < 1e-6
    held = trainer.judge(lambda log_prob, **i: ppo(log_prob.detach(), **i), SETS["losses/ppo"], arrays="torch")
    assert held[0].state == "agrees" and held[1].says == "0: nothing flows to log_prob"


@pytest.mark.parametrize("change, says", [
    (("", ""), ""),
    (("per_token_logps - old_per_token_logps", "old_per_token_logps - per_token_logps"),
     "log_prob - old is old - log_prob"),
    (("1 + self.epsilon_high)", "1 + self.epsilon_low)"), "clip_low stands for clip_high"),
    (("per_token_loss + self.beta", "per_token_loss - self.beta"), "beta has the opposite sign"),
    (("(per_token_loss * mask).sum(-1) / mask", "per_token_loss.sum(-1) / mask"),
     "where reduce is sample_mean: mask is left out of"),
    (("mask = completion_mask if", "mask = completion_mask.roll(1, -1) if"), "mask is behind by one place"),
    (("self.max_completion_length)", "1)"), "where reduce is fixed_length: T (6, 7) times the formula"),
    (("coef_1 = torch.exp(log_importance_weights)", "coef_1 = torch.exp(log_importance_weights).detach()"),
     "log_prob - old has no gradient"),
])  # fmt: skip
def test_trl(change, says, monkeypatch):
    module = pytest.importorskip("trl.trainer.grpo_trainer")
    source = textwrap.dedent(inspect.getsource(module.GRPOTrainer._compute_loss))
    assert change[0] in source
    made = dict(vars(module))
    exec(source.replace(*change), made)
    monkeypatch.setattr(module.GRPOTrainer, "_compute_loss", made["_compute_loss"])
    ((name, title, function),) = adapters.trl()
    found = trainer.judge(function, SETS[title], name=name)
    if not says:
        assert [f.state for f in found] == ["agrees", "agrees"], found
    else:
        assert any(f.state == "differs" and says in f.says for f in found), found


def test_command(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("import numpy as np\n" + PPO.replace("losses.mean()", "losses.sum()"))
    assert main(["trainer", f"{tmp_path}/mine.py:ppo", "--format", "json"]) == 1
    lines = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
    assert [x["aspect"] for x in lines] == ["value", "gradient by log_prob"] and lines[0]["off"] > lines[0]["allowed"]
    (tmp_path / "mine.py").write_text("import numpy as np\n" + PPO)
    assert main(["trainer", f"{tmp_path}/mine.py:ppo", "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("| subject | about |")
    assert main(["trainer", f"{tmp_path}/mine.py:none"]) == 2
    assert "mine.py:none: must be one of ppo" in capsys.readouterr().err
    assert main(["engine", "openai=http://127.0.0.1:1/v1"]) == 2
    assert "http://127.0.0.1:1/v1" in capsys.readouterr().err
    assert main(["trainer", f"{tmp_path}/mine.py:ppo", "--as", "losses/none"]) == 2
    assert "must be one of" in capsys.readouterr().err
    assert main(["vectors"]) == 0 and "losses/ppo" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [60, 200])
def test_a_table_fits_the_terminal(columns):
    found = [report.Finding("mine", "losses/ppo", "gradient by log_prob", "differs", "said " * 40 + "last", 5.0, 1e-9)]
    lines = report.text(found, columns=columns).splitlines()
    assert max(map(len, lines)) <= columns and lines[0] == "mine" and lines[1].startswith("  losses/ppo  ")
    assert "said last [5.0e+00 of 1e-09]" in " ".join(" ".join(lines).split())


def test_the_guide(tmp_path):
    """The commands of the guide print what it says."""
    root = pathlib.Path(__file__).parents[4]
    blocks = re.findall(r"```(?:sh)?\n(.*?)```", (root / "deploy/guide/certify.md").read_text(), re.DOTALL)
    (tmp_path / "python").symlink_to(sys.executable)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": f"{root}/pkg/client/python:{':'.join(sys.path)}"}
    for commands, says in ((blocks[0], blocks[1]), (blocks[2], blocks[3])):
        out = subprocess.run(["sh", "-ec", commands], cwd=tmp_path, env=path, capture_output=True, text=True)
        assert out.returncode == 0 and out.stdout.startswith(says), out
