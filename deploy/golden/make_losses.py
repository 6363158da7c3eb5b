"""Worked examples of the losses that train on a rollout, with their gradients: a plain reading of the formulas in
float64.

    python3 deploy/golden/make_losses.py schemas/vectors/losses.json

It needs nothing but Python. Each gradient is derived by hand, of the loss by what its name says, and held against
central differences before it is written. The file has the form of schemas/vectors/README.md.
"""

import json
import math
import random
import sys

SEED, CASES = 20261126, 4

STEPS = {"log_prob": "[B]", "old": "[B]", "advantages": "[B]", "weights": "[B]"}
MEANS = {"mean": "[B,N]", "old_mean": "[B,N]", "noise_std": "[]"}
CLIP = {"clip": "[]", "adv_clip_max": "[]"}
# A float32 log-prob of size 2 is off by 1e-7. Ratios are as far off; what divides by a step or multiplies by beta is off
# by as much more. In bfloat16 a ratio is off by 1 %, far beyond a clip of 1e-4: no tolerance makes sense there.
SETS = {
    "ppo": {
        "formula": "mean over B of w max(-A r, -A clamp(r, 1-clip, 1+clip)), r = exp(log_prob - old), A = advantages "
        "within +-adv_clip_max, w = weights", "source": "Flow-GRPO, arXiv 2505.05470, eq. 5; verl-omni FlowGRPOLoss",
        "inputs": STEPS | CLIP, "float32": 1e-5,
    },
    "grpo_guard": {
        "formula": "ppo with r = exp((log_prob - old + mean((mean - old_mean)^2) / (2 noise_std^2)) noise_std), the loss "
        "divided by step", "source": "GRPO-Guard, arXiv 2510.22319; verl-omni GRPOGuardLoss",
        "inputs": STEPS | MEANS | CLIP | {"step": "[]"}, "float32": 1e-4,
    },
    "flow_dppo": {
        "formula": "mean over B of -A r w, 0 where r moves away from 1 in A's direction and mean((mean - old_mean)^2) / "
        "(2 noise_std^2) >= kl_mask_threshold", "source": "Flow-DPPO, arXiv 2606.11025; verl-omni",
        "inputs": STEPS | MEANS | {"kl_mask_threshold": "[]"}, "float32": 1e-5,
    },
    "gspo": {
        "formula": "mean over B of max(-A r, -A clamp(r, 1-clip_low, 1+clip_high)), r = exp(mean over T of log_prob - "
        "old)", "source": "GSPO, arXiv 2507.18071, eq. 5",
        "inputs": {"log_prob": "[B,T]", "old": "[B,T]", "advantages": "[B]", "clip_low": "[]", "clip_high": "[]"},
        "float32": 1e-5,
    },
    "dpo": {
        "formula": "mean over B of -log sigmoid(dpo_beta ((log_prob - base)[0] - (log_prob - base)[1])), rows are [best, "
        "worst]", "source": "Diffusion-DPO, arXiv 2311.12908, on stored transitions as D3PO, arXiv 2311.13231",
        "inputs": {"log_prob": "[B,2]", "base": "[B,2]", "dpo_beta": "[]"}, "float32": 1e-3,
    },
    "diffusion_nft": {
        "formula": "mean over B of adv_clip_max / b (r E(v+) + (1-r) E(v-)), b = mix_beta, v+ = b v + (1-b) v_old, v- = "
        "(1+b) v_old - b v, r = advantages within +-adv_clip_max as 0 to 1, E(u) = mean((x_t - sigma u - x0)^2) / "
        "max(mean|x_t - sigma u - x0|, adaptive_weight_min), the divisor without gradient",
        "source": "DiffusionNFT, arXiv 2509.16117; verl-omni DiffusionNFTLoss",
        "inputs": {
            "clean": "[B,N]", "noise": "[B,N]", "sigma": "[B]", "velocity": "[B,N]", "old_velocity": "[B,N]",
            "advantages": "[B]", "mix_beta": "[]", "adaptive_weight_min": "[]", "adv_clip_max": "[]",
        }, "float32": 1e-4,
    },
    "diffusion_opd": {
        "formula": "mean over B of mean((mean - teacher_mean)^2) / (2 noise_std^2)",
        "source": "DiffusionOPD, arXiv 2605.15055; UniRL DiffusionOPD with add_kl_coefficient, verl-omni distill_kl",
        "inputs": {"mean": "[B,N]", "teacher_mean": "[B,N]", "noise_std": "[]"}, "float32": 1e-4,
    },
    "grpo_tokens": {
        "formula": "over the tokens of mask, l = -min(r A, clamp(r, 1-clip_low, 1+clip_high) A) + beta (exp(d) - d - 1), "
        "r = exp(log_prob - old), d = reference - log_prob. sample_mean: the mean over B of the mean over a row's tokens;"
        " token_mean: the mean over all tokens; fixed_length: the sum divided by B T",
        "source": "GRPO, arXiv 2402.03300, eq. 3; DAPO, arXiv 2503.14476; Dr. GRPO, arXiv 2503.20783. TRL: loss_type "
        "grpo, bnpo, dr_grpo; verl: seq-mean-token-mean, token-mean, seq-mean-token-sum-norm",
        "inputs": {
            "log_prob": "[B,T]", "old": "[B,T]", "reference": "[B,T]", "advantages": "[B]", "mask": "[B,T]",
            "clip_low": "[]", "clip_high": "[]", "beta": "[]", "reduce": ["sample_mean", "token_mean", "fixed_length"],
        }, "float32": 1e-5,
    },
}
# What an input is where a loss does not have it.
NEUTRAL = {"weights": 1, "mask": 1, "beta": 0}


def mean(xs):
    xs = list(xs)
    return sum(xs) / len(xs)


def clamp(x, low, high):
    return min(max(x, low), high)


def squares(a, b):
    return mean((x - y) ** 2 for x, y in zip(a, b))


def surrogate(ratio, a, low, high):
    """The loss, and its derivative by the ratio."""
    free, cut = -a * ratio, -a * clamp(ratio, low, high)
    return (free, -a) if free >= cut else (cut, 0.0)


def ppo(c):
    losses, gradient = [], []
    for lp, old, a, w in zip(c["log_prob"], c["old"], c["advantages"], c["weights"]):
        r = math.exp(lp - old)
        loss, slope = surrogate(r, clamp(a, -c["adv_clip_max"], c["adv_clip_max"]), 1 - c["clip"], 1 + c["clip"])
        losses.append(loss * w)
        gradient.append(slope * r * w / len(c["old"]))
    return {"losses": losses, "gradient_log_prob": gradient}


def grpo_guard(c):
    n, losses, by_log_prob, by_mean = c["noise_std"], [], [], []
    for lp, old, a, w, m, before in zip(
        c["log_prob"], c["old"], c["advantages"], c["weights"], c["mean"], c["old_mean"]
    ):
        r = math.exp((lp - old + squares(m, before) / (2 * n * n)) * n)
        loss, slope = surrogate(r, clamp(a, -c["adv_clip_max"], c["adv_clip_max"]), 1 - c["clip"], 1 + c["clip"])
        slope *= r * n * w / c["step"] / len(c["old"])
        losses.append(loss * w / c["step"])
        by_log_prob.append(slope)
        by_mean.append([slope * (x - y) / (n * n * len(m)) for x, y in zip(m, before)])
    return {"losses": losses, "gradient_log_prob": by_log_prob, "gradient_mean": by_mean}


def gspo(c):
    """One loss for a trajectory, whose log-probs are a row."""
    losses, gradient = [], []
    for lp, old, a in zip(c["log_prob"], c["old"], c["advantages"]):
        r = math.exp(mean(x - y for x, y in zip(lp, old)))
        loss, slope = surrogate(r, a, 1 - c["clip_low"], 1 + c["clip_high"])
        losses.append(loss)
        gradient.append([slope * r / len(lp) / len(c["old"])] * len(lp))
    return {"losses": losses, "gradient_log_prob": gradient}


def flow_dppo(c):
    losses, gradient = [], []
    for lp, old, a, w, m, before in zip(
        c["log_prob"], c["old"], c["advantages"], c["weights"], c["mean"], c["old_mean"]
    ):
        r = math.exp(lp - old)
        far = squares(m, before) / (2 * c["noise_std"] ** 2) >= c["kl_mask_threshold"]
        kept = 0.0 if far and (r > 1 and a > 0 or r < 1 and a < 0) else w
        losses.append(-a * r * kept)
        gradient.append(-a * r * kept / len(c["old"]))
    return {"losses": losses, "gradient_log_prob": gradient}


def dpo(c):
    """One loss for a pair, whose log-probs are [best, worst]."""
    losses, gradient = [], []
    for (best, worst), (base_best, base_worst) in zip(c["log_prob"], c["base"]):
        margin = c["dpo_beta"] * ((best - base_best) - (worst - base_worst))
        losses.append(math.log1p(math.exp(-abs(margin))) + max(-margin, 0.0))
        slope = -c["dpo_beta"] / (1 + math.exp(margin)) / len(c["base"])
        gradient.append([slope, -slope])
    return {"losses": losses, "gradient_log_prob": gradient}


def diffusion_nft(c, sizes=None):
    """sizes: the denominators, which have no gradient."""
    b, most, losses, gradient, found = c["mix_beta"], c["adv_clip_max"], [], [], []
    for x0, noise, s, v, old, a in zip(
        c["clean"], c["noise"], c["sigma"], c["velocity"], c["old_velocity"], c["advantages"]
    ):
        r = clamp(a, -most, most) / most / 2 + 0.5
        xt = [(1 - s) * x + s * e for x, e in zip(x0, noise)]
        loss, slopes = 0.0, [0.0] * len(x0)
        for share, sign in ((r, 1), (1 - r, -1)):
            off = [t - s * ((1 - sign * b) * y + sign * b * z) - x for x, t, y, z in zip(x0, xt, old, v)]
            size = max(mean(map(abs, off)), c["adaptive_weight_min"])
            found.append(size)
            size = sizes[len(found) - 1] if sizes else size
            loss += share * mean(d * d for d in off) / size * most / b
            for k, d in enumerate(off):
                slopes[k] += share * 2 * d * -s * sign * b / size / len(off) * most / b / len(c["clean"])
        losses.append(loss)
        gradient.append(slopes)
    return {"losses": losses, "gradient_velocity": gradient, "sizes": found}


def diffusion_opd(c):
    n, losses, gradient = c["noise_std"], [], []
    for m, of in zip(c["mean"], c["teacher_mean"]):
        losses.append(squares(m, of) / (2 * n * n))
        gradient.append([(x - y) / (n * n * len(m) * len(c["mean"])) for x, y in zip(m, of)])
    return {"losses": losses, "gradient_mean": gradient}


def grpo_tokens(c):
    """The loss alone: what it is the mean of depends on reduce."""
    rows, width = len(c["old"]), len(c["old"][0])
    counts = [sum(m) for m in c["mask"]]
    total, gradient = 0.0, []
    for b, a in enumerate(c["advantages"]):
        share = {
            "sample_mean": 1 / (rows * counts[b]), "token_mean": 1 / sum(counts), "fixed_length": 1 / (rows * width),
        }[c["reduce"]]
        row = []
        for lp, old, ref, m in zip(c["log_prob"][b], c["old"][b], c["reference"][b], c["mask"][b]):
            r, d = math.exp(lp - old), ref - lp
            loss, slope = surrogate(r, a, 1 - c["clip_low"], 1 + c["clip_high"])
            total += share * m * (loss + c["beta"] * (math.expm1(d) - d))
            row.append(share * m * (slope * r - c["beta"] * math.expm1(d)))
        gradient.append(row)
    return {"loss": total, "gradient_log_prob": gradient}


def total(want):
    return want["loss"] if "loss" in want else mean(want["losses"])


def check(loss, case, want):
    """Holds each gradient against central differences."""
    frozen = [want.pop("sizes")] if "sizes" in want else []

    def at(name, path, by):
        changed = json.loads(json.dumps(case))
        row = changed[name]
        for i in path[:-1]:
            row = row[i]
        row[path[-1]] += by
        return total(loss(changed, *frozen))

    for key, gradient in want.items():
        if not key.startswith("gradient_"):
            continue
        name = key.removeprefix("gradient_")
        paths = [[i] for i in range(len(gradient))] if isinstance(gradient[0], float) else [
            [i, k] for i, g in enumerate(gradient) for k in range(len(g))
        ]
        for path in paths:
            got, by = gradient, 1e-7
            for i in path:
                got = got[i]
            found = (at(name, path, by) - at(name, path, -by)) / (2 * by)
            assert abs(found - got) <= 1e-5 * max(1, abs(got)), (loss.__name__, key, path, found, got)


def examples(rng):
    def draw(spread, *shape):
        return [draw(spread, *shape[1:]) for _ in range(shape[0])] if shape else round(rng.gauss(0, spread), 8)

    def shifted(x, spread):
        return [shifted(y, spread) for y in x] if isinstance(x, list) else round(x + rng.gauss(0, spread), 8)

    for k in range(CASES):
        n, e = (4, 3, 5, 6)[k], 3 + k
        clip = (1e-4, 1e-3, 0.2, 0.2)[k]
        # The first case is on-policy: every ratio is 1, where a clipped loss has a gradient, too.
        move = 0.0 if k == 0 else 2 * clip
        old = draw(1, n)
        step = {
            "log_prob": shifted(old, move), "old": old, "advantages": draw(3, n),
            "weights": [1.0] * n if k % 2 else [1.0, 0.5, 0.0, 1.5, 0.75][:n],
        }
        before = draw(1, n, e)
        means = {
            "mean": shifted(before, 0.004 if k else 0.0), "old_mean": before, "noise_std": round(rng.uniform(0.2, 1), 6)
        }
        clipped = {"clip": clip, "adv_clip_max": 5.0 if k % 2 else 1.0}
        yield "ppo", ppo, step | clipped
        yield "grpo_guard", grpo_guard, step | means | clipped | {"step": round(rng.uniform(0.01, 0.3), 6)}
        yield "flow_dppo", flow_dppo, step | means | {"kl_mask_threshold": 1e-5}
        rows = draw(1, n, 1 + k)
        low, high = ((3e-4, 4e-4), (3e-4, 4e-4), (0.1, 0.2), (0.1, 0.2))[k]
        yield "gspo", gspo, {
            "log_prob": shifted(rows, 0.0 if k == 0 else 3 * high), "old": rows, "advantages": draw(1, n),
            "clip_low": low, "clip_high": high
        }
        beta = (2000.0, 2000.0, 100.0, 0.1)[k]
        pairs = draw(1, n, 2)
        yield "dpo", dpo, {"log_prob": shifted(pairs, 0.0 if k == 0 else 1 / beta), "base": pairs, "dpo_beta": beta}
        clean, then = draw(1, n, e), draw(1, n, e)
        nft = {
            "clean": clean, "noise": draw(1, n, e), "sigma": [round(rng.uniform(0.05, 1), 6) for _ in range(n)],
            "velocity": shifted(then, 0.1 if k else 0.0), "old_velocity": then, "advantages": draw(3, n),
            "mix_beta": (0.5, 0.1, 1.0, 0.5)[k], "adaptive_weight_min": 1e-5 if k < 3 else 2.0,
            "adv_clip_max": 5.0 if k % 2 else 1.0,
        }
        yield "diffusion_nft", diffusion_nft, nft
        yield "diffusion_opd", diffusion_opd, {
            "mean": nft["velocity"], "teacher_mean": then, "noise_std": means["noise_std"]
        }
    for k in range(6):
        rows, width = 3 + k % 2, 5 + k // 2
        old = draw(0.7, rows, width)
        yield "grpo_tokens", grpo_tokens, {
            "log_prob": shifted(old, 0.15), "old": old, "reference": shifted(old, 0.3), "advantages": draw(1, rows),
            # Rows end, and the middle of one was written by others.
            "mask": [[int(t < width - b - k % 3 and (b, t) != (1, 1)) for t in range(width)] for b in range(rows)],
            "clip_low": 0.1, "clip_high": (0.1, 0.2)[k % 2], "beta": (0.0, 0.04, 0.3)[(k + k // 3) % 3],
            "reduce": SETS["grpo_tokens"]["inputs"]["reduce"][k % 3],
        }
    for threshold in (1e-5, 1e-3):
        old, before = draw(1, 12), draw(1, 12, 4)
        yield "flow_dppo", flow_dppo, {
            "log_prob": shifted(old, 0.3), "old": old, "advantages": draw(2, 12), "weights": [1.0, 0.5, 1.5] * 4,
            # Divergences lie on both sides of the threshold.
            "mean": [shifted(row, threshold**0.5 * 0.2 * 1.5**i) for i, row in enumerate(before)], "old_mean": before,
            "noise_std": round(rng.uniform(0.2, 1), 6), "kl_mask_threshold": threshold,
        }


def main():
    cases = {}
    for name, loss, case in examples(random.Random(SEED)):
        want = loss(case)
        check(loss, case, want)
        cases.setdefault(name, []).append({"inputs": case, "expected": {"loss": total(want), **want}})
    about = {"kind": "losses", "about": f"written by deploy/golden/make_losses.py, seed {SEED}"}
    with open(sys.argv[1], "w", encoding="utf-8") as f:
        f.write(json.dumps(about)[:-1] + ', "sets": [')
        for i, (name, said) in enumerate(SETS.items()):
            inputs = {
                k: {"choices": v} if isinstance(v, list) else {"shape": v} | (
                    {"neutral": NEUTRAL[k]} if k in NEUTRAL else {}
                ) for k, v in said["inputs"].items()
            }
            head = {
                "name": name, "formula": said["formula"], "source": said["source"], "returns": "loss", "inputs": inputs,
                "tolerance": {"float64": 1e-9, "float32": said["float32"]},
            }
            f.write("," * (i > 0) + "\n" + json.dumps(head)[:-1] + ', "cases": [\n')
            f.write(",\n".join(json.dumps(c) for c in cases[name]) + "\n]}")
        f.write("\n]}\n")


if __name__ == "__main__":
    main()
