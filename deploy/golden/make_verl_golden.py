#!/usr/bin/env python3
"""Record what verl and verl-omni make of random rewards and log-probs, in float64.

    python -m venv venv && venv/bin/pip install -r deploy/golden/verl-requirements.txt
    venv/bin/python deploy/golden/make_verl_golden.py --omni CHECKOUT pkg/estimator/testdata/verl.json \\
        pkg/client/policyloss/testdata/verl.json

CHECKOUT is one of verl-project/verl-omni, which is in no registry. The first file has the advantages of groups of every
size, of one too, and is read by the tests of pkg/estimator; the second has losses, divergences and importance weights,
and is read by those of pkg/client/policyloss and of the Python client.

Their functions compute in the dtype they are given, with float32 written out in a few places; widened() makes those
float64, so that what is compared is the formula and not its rounding, and leaves out the 1e-8 that verl adds to a count
of elements, which float32 loses. Rewards are multiples of 1/64, whose sums are exact, so that rewards that are equal
have a spread of exactly 0.
"""

import argparse
import contextlib
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import torch
import verl
from verl.trainer.ppo import core_algos as algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import torch_functional

SEED = 20251122


@contextlib.contextmanager
def widened():
    def masked_mean(values, mask, axis=None):
        return torch_functional.masked_sum(values, mask, axis) / mask.sum(axis=axis)

    narrow = torch.float32, np.float32, torch.Tensor.float, torch_functional.masked_mean
    torch.float32, np.float32, torch.Tensor.float, torch_functional.masked_mean = torch.float64, np.float64, torch.Tensor.double, masked_mean
    try:
        yield
    finally:
        torch.float32, np.float32, torch.Tensor.float, torch_functional.masked_mean = narrow


def batch(rng, least=1):
    """Groups of 1 to 5 rewards, at least two in all, some of them equal and some 0."""
    while True:
        groups = [rng.integers(-64, 129, rng.integers(least, 6)) / 64 for _ in range(rng.integers(1, 6))]
        if sum(map(len, groups)) > 1:
            break
    for g in groups:
        if rng.random() < 0.2:
            g[:] = g[0]
        if rng.random() < 0.2:
            g[0] = 0
    return groups


def tokens(values, columns):
    """Rewards as verl has them, [B, T]: all of it at the last step."""
    out = torch.zeros(len(values), columns)
    out[:, -1] = torch.tensor(values)
    return out


def split(rows, groups):
    rows, out = rows.tolist(), []
    for g in groups:
        out.append(rows[: len(g)])
        rows = rows[len(g):]
    return out


def results(groups, advantages, returns):
    """One column stands for all where all are the same; returns are there where they are not the advantages."""
    same = torch.equal(advantages, returns)
    if torch.equal(
        advantages, advantages[:, :1].expand_as(advantages)
    ) and torch.equal(returns, returns[:, :1].expand_as(returns)):
        advantages, returns = advantages[:, :1], returns[:, :1]
    out = [{"rewards": g.tolist(), "advantages": a} for g, a in zip(groups, split(advantages, groups))]
    for g, r in zip(out, split(returns, groups)):
        if not same:
            g["returns"] = r
    return out


# name, options of pkg/estimator, function of verl, its arguments.
ESTIMATORS = [
    ("grpo", {"std": "group"}, algos.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": True}),
    ("grpo", {"std": "none"}, algos.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}),
    (
        "grpo_passk", {"std": "group"}, algos.compute_grpo_passk_outcome_advantage,
        {"config": {"norm_adv_by_std_in_grpo": True}}
    ),
    (
        "grpo_passk", {"std": "none"}, algos.compute_grpo_passk_outcome_advantage,
        {"config": {"norm_adv_by_std_in_grpo": False}}
    ),
    ("rloo", {}, algos.compute_rloo_outcome_advantage, {}),
    ("rloo", {"singleton": "zero"}, algos.compute_rloo_vectorized_outcome_advantage, {}),
    ("opo", {}, algos.compute_opo_outcome_advantage, {}),
    ("gpg", {}, algos.compute_gpg_outcome_advantage, {}),
    (
        "reinforce_plus_plus", {"gamma": 1.0}, algos.compute_reinforce_plus_plus_outcome_advantage,
        {"config": SimpleNamespace(gamma=1.0)}
    ),
    (
        "reinforce_plus_plus", {"gamma": 0.9}, algos.compute_reinforce_plus_plus_outcome_advantage,
        {"config": SimpleNamespace(gamma=0.9)}
    ),
    ("reinforce_plus_plus_baseline", {}, algos.compute_reinforce_plus_plus_baseline_outcome_advantage, {}),
    ("gdpo", {"std": "group"}, algos.compute_gdpo_outcome_advantage, {"norm_adv_by_std_in_grpo": True}),
    ("gdpo", {"std": "none"}, algos.compute_gdpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}),
]


def estimate(rng, name, options, function, arguments):
    groups = batch(rng, least=2 if name == "grpo_passk" else 1)
    columns = int(rng.integers(1, 5))
    case = {"estimator": name, "columns": columns, **options}
    flat = np.concatenate(groups)
    mask = torch.ones(len(flat), columns)
    arguments = dict(arguments)
    if "reinforce_plus_plus" != name:
        arguments["index"] = np.repeat([f"uid{i}" for i in range(len(groups))], [len(g) for g in groups])
    scores = None
    if name == "gdpo":
        case["weights"] = (rng.integers(1, 9, rng.integers(1, 4)) / 4).tolist()
        scores = np.stack([np.concatenate(batch_like(rng, groups)) for _ in case["weights"]])
        keys = [f"reward{k}" for k in range(len(scores))]
        arguments["config"] = {"gdpo_reward_keys": keys, "gdpo_reward_weights": case["weights"]}
        arguments["non_tensor_batch"] = dict(zip(keys, scores))
        arguments["batch"] = {
            "prompts": torch.zeros(len(flat), 2),
            "attention_mask": torch.ones(len(flat), 2 + columns, dtype=torch.int64)
        }
    with widened():
        advantages, returns = function(tokens(flat, columns), response_mask=mask, **arguments)
    case["groups"] = results(groups, advantages, returns)
    if scores is not None:
        for g, s in zip(case["groups"], split(torch.tensor(scores.T), groups)):
            g["scores"] = s
    return case


def batch_like(rng, groups):
    out = [rng.integers(-64, 129, len(g)) / 64 for g in groups]
    for g in out:
        if rng.random() < 0.2:
            g[:] = g[0]
    return out


def diffusion(rng, omni, name, std):
    """verl-omni's own: the reward is copied over the columns before the spread is taken."""
    groups = batch(rng)
    flat = torch.tensor(np.concatenate(groups))
    uid = np.repeat([f"uid{i}" for i in range(len(groups))], [len(g) for g in groups])
    case = {"estimator": name, "std": std, "std_basis": "sample", "columns": 1}
    norm, overall = std != "none", std == "global"
    if name == "flow_grpo":
        case["columns"], case["std_basis"] = int(rng.integers(1, 5)), "expanded"
        rows = flat.unsqueeze(1).expand(-1, case["columns"])
        got, returns = omni.compute_flow_grpo_outcome_advantage(
            rows, uid, norm_adv_by_std_in_grpo=norm, global_std=overall
        )
    else:
        case["mode"] = str(rng.choice(["continuous", "positive_only", "negative_only", "one_only", "binary"]))
        case["adv_clip_max"] = float(rng.choice([1, 5]))
        with widened():
            a = omni.DiffusionNFTLoss._compute_group_advantages(flat, uid, norm, overall)
        got = omni.DiffusionNFTLoss._advantage_to_reward_prob(a, case["adv_clip_max"], case["mode"]).unsqueeze(1)
        returns = got
    case["groups"] = results(groups, got, returns)
    return case


def losses(rng, omni, guard):
    """The clipped losses; the single losses are those of batches of one."""
    n, clip = int(rng.integers(2, 7)), float(rng.choice([1e-4, 1e-3, 0.2]))
    config = SimpleNamespace(diffusion_loss=SimpleNamespace(clip_ratio=clip, adv_clip_max=float(rng.choice([1, 5]))))
    old = torch.tensor(rng.normal(-1, 0.1, n))
    new = old + torch.tensor(rng.normal(0, 2 * clip, n))
    advantages = torch.tensor(rng.normal(0, 3, n))
    weights = torch.tensor(rng.integers(0, 3, n) / 2) if rng.random() < 0.7 else None
    case = {
        "log_prob": new.tolist(), "old": old.tolist(), "advantages": advantages.tolist(), "clip": clip,
        "adv_clip_max": config.diffusion_loss.adv_clip_max, "weights": None if weights is None else weights.tolist(),
    }
    more, function = {}, omni.FlowGRPOLoss.compute_loss
    if guard:
        elements = (n, int(rng.integers(1, 4)), 2)
        mean = torch.tensor(rng.normal(0, 1, elements))
        before = mean + torch.tensor(rng.normal(0, 0.01, elements))
        std, step = float(rng.uniform(0.2, 1)), float(rng.uniform(0.01, 0.3))
        more = {
            "prev_sample_mean": mean, "old_prev_sample_mean": before, "std_dev_t": torch.tensor(std),
            "sqrt_dt": torch.tensor(step).sqrt()
        }
        function = omni.GRPOGuardLoss.compute_loss
        case |= {"mean": mean.tolist(), "old_mean": before.tolist(), "std_dev_t": std, "step": step}

    def call(rows):
        chosen = {k: v[rows] if v.ndim else v for k, v in more.items()}
        return function(
            old_log_prob=old[rows], log_prob=new[rows], advantages=advantages[rows], config=config,
            rollout_is_weights=None if weights is None else weights[rows], **chosen,
        )

    loss, metrics = call(slice(None))
    case["want"] = {"loss": loss.item(), "losses": [call(slice(i, i + 1))[0].item() for i in range(n)]}
    case["want"] |= {k.removeprefix("actor/"): v for k, v in metrics.items()}
    return case


def image_kl(rng, omni):
    shape = (int(rng.integers(1, 4)), int(rng.integers(1, 4)), 2)
    mean, reference = torch.tensor(rng.normal(0, 1, shape)), torch.tensor(rng.normal(0, 1, shape))
    std = torch.tensor(rng.uniform(0.1, 1, (shape[0], 1, 1)))

    def call(rows):
        return omni.KLLoss.compute_loss(
            prev_sample_mean=mean[rows], ref_prev_sample_mean=reference[rows], std_dev_t=std[rows]
        )[0].item()

    return {
        "mean": mean.tolist(), "reference": reference.tolist(), "std": std.tolist(),
        "want": {"mean": call(slice(None)), "kl": [call(slice(i, i + 1)) for i in range(shape[0])]},
    }


def kl(rng, kind, spread):
    new, reference = torch.tensor(rng.normal(-1, spread, 6)), torch.tensor(rng.normal(-1, spread, 6))
    return {
        "kind": kind, "log_prob": new.tolist(), "reference": reference.tolist(),
        "want": algos.kl_penalty(new, reference, kind).tolist()
    }


RULES = [
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3"
]
WEIGHT_METRICS = [
    "rollout_is_mean", "rollout_is_min", "rollout_is_max", "rollout_is_std", "rollout_is_eff_sample_size",
    "rollout_rs_masked_fraction"
]
GAP_METRICS = [
    "kl", "k3_kl", "training_ppl", "rollout_ppl", "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio", "chi2_token",
    "chi2_seq"
]


def correction(rng, spread):
    shape = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    old = torch.tensor(rng.normal(-1, 0.1, shape))
    rollout = old + torch.tensor(rng.normal(0, spread, shape))
    level = rng.choice(["token", "sequence", ""])
    rules = [str(r) for r in rng.choice(RULES, rng.integers(0 if level else 1, 3), replace=False)]
    if shape == (1, 1) and level:
        shape, old, rollout = (2, 1), old.repeat(2, 1), rollout.repeat(2, 1)
    case = {
        "old": old.tolist(), "rollout": rollout.tolist(), "level": str(level), "threshold": "", "normalize": False,
        "rejections": []
    }
    if level:
        case["threshold"] = str(rng.choice(["2.0", "1.1", "0.5_2.0", "0.8_1.25"]))
        case["normalize"] = bool(rng.random() < 0.5)
    for rule in rules:
        choices = ["0.5_2.0", "1.2"] if rule.endswith("k1") else ["0.02", "0.5"]
        case["rejections"].append([rule, str(rng.choice(choices))])
    try:
        with widened():
            weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
                old, rollout, torch.ones(shape), rollout_is=str(level) or None,
                rollout_is_threshold=case["threshold"] or None,
                rollout_is_batch_normalize=case["normalize"], rollout_rs=",".join(rules) or None,
                rollout_rs_threshold=",".join(t for _, t in case["rejections"]) or None,
            )
    except ZeroDivisionError:
        return None  # a band that leaves nothing: verl cannot say how large its sample is
    # As verl-omni folds the two together.
    effective = mask if weights is None else weights.batch[
        "rollout_is_weights"
    ] * mask if rules else weights.batch["rollout_is_weights"]
    case["want"] = effective.tolist()
    named = {k.removeprefix("rollout_corr/"): v for k, v in metrics.items()}
    keys = [k for k in WEIGHT_METRICS if k in named]
    if spread < 1:
        keys += GAP_METRICS
    case["metrics"] = {k: float(named[k]) for k in keys}
    return case


def write(path, provenance, sections):
    """One case a line."""
    with open(path, "w", encoding="utf-8") as f:
        f.write('{\n"provenance": ' + json.dumps(provenance))
        for name, cases in sections.items():
            f.write(f',\n"{name}": [\n' + ",\n".join(json.dumps(c) for c in cases) + "\n]")
        f.write("\n}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--omni", required=True, help="folder of a checkout of verl-omni")
    parser.add_argument("--commit", help="its commit, where git does not know")
    parser.add_argument("--cases", type=int, default=8, help="of each kind")
    parser.add_argument("estimator")
    parser.add_argument("policyloss")
    args = parser.parse_args()
    sys.path.insert(0, args.omni)
    from verl_omni.trainer.diffusion import diffusion_algos as omni

    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    rng = np.random.default_rng(SEED)
    commit = args.commit or subprocess.check_output(["git", "-C", args.omni, "rev-parse", "HEAD"], text=True).strip()
    provenance = {
        "script": "deploy/golden/make_verl_golden.py", "seed": SEED, "verl": verl.__version__, "verl-omni": commit,
        "torch": torch.__version__, "numpy": np.__version__,
    }
    n = range(args.cases)
    write(args.estimator, provenance, {"cases": [
        *(estimate(rng, *e) for e in ESTIMATORS for _ in n),
        *(
            diffusion(rng, omni, name, std) for name in ("flow_grpo", "diffusion_nft")
            for std in ("group", "global", "none") for _ in n
        ),
    ]})
    write(args.policyloss, provenance, {
        "ppo": [losses(rng, omni, False) for _ in n],
        "grpo_guard": [losses(rng, omni, True) for _ in n],
        "image_kl": [image_kl(rng, omni) for _ in n],
        "kl": [kl(rng, kind, spread) for kind in ("k1", "abs", "k2", "k3", "k3+") for spread in (0.5, 10.0)],
        "correction": [c for spread in (0.1, 0.5, 15.0) for _ in n if (c := correction(rng, spread))],
    })


if __name__ == "__main__":
    main()
