"""Worked examples of the losses that train on a rollout, with their gradients: a plain reading of the formulas in
float64.

    python3 deploy/golden/make_losses.py pkg/client/policyloss/testdata/losses.json

It needs nothing but Python. Each gradient is derived by hand, of the mean of the losses by what its name says, and held
against central differences before it is written. Tests of Go and Python read the file; so may a client in any language.
"""

import json
import math
import random
import sys

SEED, CASES = 20261126, 4


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


def check(loss, case, want):
    """Holds each gradient against central differences."""
    frozen = [want.pop("sizes")] if "sizes" in want else []

    def at(name, path, by):
        changed = json.loads(json.dumps(case))
        row = changed[name]
        for i in path[:-1]:
            row = row[i]
        row[path[-1]] += by
        return mean(loss(changed, *frozen)["losses"])

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

    n, e = 4, 3
    for k in range(CASES):
        clip = (1e-4, 1e-3, 0.2, 0.2)[k]
        # The first case is on-policy: every ratio is 1, where a clipped loss has a gradient, too.
        move = 0.0 if k == 0 else 2 * clip
        old = draw(1, n)
        step = {
            "log_prob": shifted(old, move), "old": old, "advantages": draw(3, n),
            "weights": [1.0] * n if k % 2 else [1.0, 0.5, 0.0, 1.5],
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
        yield "diffusion_nft", diffusion_nft, {
            "clean": clean, "noise": draw(1, n, e), "sigma": [round(rng.uniform(0.05, 1), 6) for _ in range(n)],
            "velocity": shifted(then, 0.1 if k else 0.0), "old_velocity": then, "advantages": draw(3, n),
            "mix_beta": (0.5, 0.1, 1.0, 0.5)[k], "adaptive_weight_min": 1e-5 if k < 3 else 2.0,
            "adv_clip_max": 5.0 if k % 2 else 1.0,
        }


def main():
    sections = {}
    for name, loss, case in examples(random.Random(SEED)):
        want = loss(case)
        check(loss, case, want)
        sections.setdefault(name, []).append(case | {"want": {"loss": mean(want["losses"]), **want}})
    with open(sys.argv[1], "w", encoding="utf-8") as f:
        f.write('{\n"provenance": ' + json.dumps({"script": "deploy/golden/make_losses.py", "seed": SEED}))
        for name, cases in sections.items():
            f.write(f',\n"{name}": [\n' + ",\n".join(json.dumps(c) for c in cases) + "\n]")
        f.write("\n}\n")


if __name__ == "__main__":
    main()
