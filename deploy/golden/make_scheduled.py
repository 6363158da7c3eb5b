#!/usr/bin/env python3
"""Record rollouts of scheduled sampling in float64, by formulas that walk a table the way the public sampler library
does.

    python3 deploy/golden/make_scheduled.py pkg/scheduled/testdata/rolls.json

Part of `make golden`; needs the standard library only. sample() is skrample 0.5's interface in plain Python: it steps
from entry k of a table of (u, a) to entry k + 1 and looks its history up at k - 1, k - 2. Over a table of falling noise
that is a rollout; over one of rising noise, the one that SimpleTuner hands it, latents get noisier. Systems are solved
by Gaussian elimination in fractions of the floats, and exponentials are the standard library's: nothing is shared with
pkg/scheduled. The script first checks itself against the worked numbers of spec.json, which lies beside its output.
"""

import json
import math
import os
import random
import sys
from fractions import Fraction

N_FLOW, N = 50, 100


def abar(n, first, last):
    out, p = [], 1.0
    for t in range(n):
        p *= 1 - (first + (last - first) * t / (n - 1))
        out.append(p)
    return out


def lam(entry):
    u, a = entry
    return math.inf if u == 0 else -math.inf if a == 0 else math.log(a) - math.log(u)


def solve(rows, b):
    rows = [[Fraction(x) for x in row] + [Fraction(y)] for row, y in zip(rows, b)]
    n = len(b)
    for i in range(n):
        p = max(range(i, n), key=lambda j: abs(rows[j][i]))
        rows[i], rows[p] = rows[p], rows[i]
        for j in range(n):
            if j != i:
                f = rows[j][i] / rows[i][i]
                rows[j] = [x - f * y for x, y in zip(rows[j], rows[i])]
    return [float(rows[i][n] / rows[i][i]) for i in range(n)]


def phi(k, g):
    """sum_j g^j/(j+k)!, exactly summed."""
    g = Fraction(g)
    return float(sum(g**j / math.factorial(j + k) for j in range(40 + int(8 * abs(g)))))


def uni_residual(m, points, h):
    """sum_k rho_k D_k of the (reach, estimate) points."""
    if not points:
        return 0.0
    b = [
        math.factorial(n) * phi(n + 1, -h) / phi(1, -h) if math.isfinite(h) else 1.0 for n in range(1, len(points) + 1)
    ]
    rho = solve([[r**n for r, _ in points] for n in range(len(points))], b)
    return sum(p * (e - m) / r for p, (r, e) in zip(rho, points))


def sample(name, order, table, k, x, m, previous):
    """One step from entry k with the estimate m; previous has (x, m), oldest first. Returns the new x and what to
    keep."""

    def entry(i):
        return table[i] if i < len(table) else (0.0, 1.0)

    def effective(i, known):
        return max(1, min(order, i + 1, known + 1, len(table) - i))

    def points(base, h, first, count):
        out = []
        for n in range(first, first + count):
            r = (lam(entry(k - n)) - base) / h
            if not math.isfinite(r):
                break
            out.append((r, previous[-n][1]))
        return out

    (u, a), (u1, a1) = entry(k), entry(k + 1)
    if name == "euler":
        return (u1 / u) * x + (a1 - a * u1 / u) * m, (x, m)
    if name == "unipc" and previous:
        u0, _ = entry(k - 1)
        base = lam(entry(k - 1))
        h = abs(lam((u, a)) - base)
        x0, m0 = previous[-1]
        extra = [] if math.isinf(h) else points(base, h, 2, effective(k - 1, len(previous) - 1) - 1)
        residual = uni_residual(m0, [*extra, (1.0, m)], h)
        x = u / u0 * x0 - a * math.expm1(-h) * (m0 + residual)
    h = abs(lam((u1, a1)) - lam((u, a)))
    e = math.expm1(-h)
    known = effective(k, len(previous)) - 1 if u1 > 0 else 0
    history = points(lam((u, a)), h, 1, known) if known else []
    final = u1 / u * x - a1 * e * m
    if name == "unipc":
        final -= a1 * e * uni_residual(m, history, h)
    elif len(history) == 1:
        r = -history[0][0]
        final -= 0.5 * a1 * e * (m - history[0][1]) / r
    elif history:
        r = -history[0][0]
        r2 = history[0][0] - history[1][0]
        d1, d1b = (m - history[0][1]) / r, (history[0][1] - history[1][1]) / r2
        f1, f2 = d1 + r / (r + r2) * (d1 - d1b), (d1 - d1b) / (r + r2)
        final -= a1 * (-h * phi(2, -h)) * f1 + a1 * (-h * phi(3, -h)) * f2
    return final, (x, m)


def estimate(prediction, entry, x, p):
    u, a = entry
    if prediction == "epsilon":
        return (x - u * p) / a
    return x - u * p if prediction == "flow_prediction" else a * x - u * p


def multistep(case, table, model):
    """Down the timesteps; exact walks the table of falling noise, simpletuner that of rising noise."""
    n = len(table)
    falling = table[::-1]
    x = table[case["source"]][1] * case["x0"][0] + table[case["source"]][0] * case["noise"][0]
    states, previous = [x], []
    for t in range(case["source"], case["target"], -1):
        if case["compat"] == "exact":
            m = estimate(case["prediction"], table[t], x, model(x))
            x, kept = sample(case["sampler"], case["order"], falling, n - 1 - t, x, m, previous)
        else:
            k = int(t / n * n)
            m = estimate(case["prediction"], table[k], x, model(x))
            x, kept = sample(case["sampler"], case["order"], table, k, x, m, previous)
        previous = [*previous, kept][-9:]
        states.append(x)
    return states


def runge_kutta(case, table, model):
    flow = case["prediction"] == "flow_prediction"

    def derivative(y, s):
        scale = 1.0 if flow else 1 / math.sqrt(1 + s * s)
        p = model(scale * y)
        return s * scale * scale * y + scale * p if case["prediction"] == "v_prediction" else p

    def clock(entry):
        return (entry[0], 1.0) if flow else (entry[0] / entry[1], entry[1])

    x = table[case["source"]][1] * case["x0"][0] + table[case["source"]][0] * case["noise"][0]
    states = [x]
    for t in range(case["source"], case["target"], -1):
        (s, scale), (s1, scale1) = clock(table[t]), clock(table[t - 1])
        y, d = x / scale, s1 - s
        k1 = derivative(y, s)
        k2 = derivative(y + d / 2 * k1, s + d / 2)
        k3 = derivative(y + d / 2 * k2, s + d / 2)
        k4 = derivative(y + d * k3, s1)
        x = scale1 * (y + d / 6 * (k1 + 2 * k2 + 2 * k3 + k4))
        states.append(x)
    return states


def affine(model):
    return lambda x: model["scale"] * x + model["shift"]


def check(spec):
    cases = [c for c in spec["rolls"] if c["prediction"] == "epsilon" and "true" not in c["model"]]
    for case in cases:
        table = [
            (math.sqrt(1 - v), math.sqrt(v)) for v in abar(case["timesteps"], case["beta_first"], case["beta_last"])
        ]
        states = multistep({"compat": "exact", **case}, table, affine(case["model"]))
        for got, want in zip(states, case["states"]):
            if abs(got - want[0]) > case["tolerance"]:
                sys.exit(f"{case['name']}: {got}, and the worked number is {want[0]}")
    if len(cases) < 5:
        sys.exit("spec.json lacks its worked rollouts")


def main():
    with open(os.path.join(os.path.dirname(sys.argv[1]), "spec.json")) as f:
        check(json.load(f))
    rng = random.Random(20251122)
    rolls = []
    samplers = [
        ("euler", 1), ("dpm", 1), ("dpm", 2), ("dpm", 3), ("unipc", 1), ("unipc", 2), ("unipc", 3), ("unipc", 4),
        ("rk4", 4)
    ]
    ways = {
        "flow_prediction": [("exact", 49, 44), ("exact", 20, 15), ("exact", 5, 0)],
        "epsilon": [
            ("exact", 99, 94), ("exact", 30, 26), ("exact", 5, 0), ("simpletuner", 30, 26), ("simpletuner", 99, 95),
            ("simpletuner", 4, 0)
        ],
        "v_prediction": [("exact", 99, 94), ("exact", 5, 0), ("simpletuner", 60, 56)],
    }
    # Then a table whose steps are long, and one where the share of timestep 1 is place 0.
    cases = [
        (prediction, N_FLOW if prediction == "flow_prediction" else N, (1e-3, 0.1), way, sampler)
        for prediction, where in ways.items() for way in where
        for sampler in samplers if way[0] == "exact" or sampler[0] != "rk4" and sampler != ("unipc", 4)
    ]
    cases += [("v_prediction", 5, (1e-9, 0.99999), ("exact", 4, 0), sampler) for sampler in samplers[:-1]]
    cases += [("epsilon", 49, (1e-3, 0.1), ("simpletuner", 4, 0), sampler) for sampler in samplers[:-2]]
    for prediction, n, betas, (compat, source, target), (sampler, order) in cases:
        case = {
            "name": f"{prediction}, {compat}, {sampler} {order}, {source} of {n} to {target}", "prediction": prediction,
            "timesteps": n,
            "x0": [rng.uniform(-1, 1)], "noise": [rng.uniform(-2, 2)], "source": source, "target": target,
            "sampler": sampler,
            "order": order, "compat": compat,
            "model": {"scale": rng.uniform(0.2, 0.9), "shift": rng.uniform(-0.5, 0.5)},
        }
        if prediction == "flow_prediction":
            table = [(t / (n - 1), 1 - t / (n - 1)) for t in range(n)]
        else:
            case["beta_first"], case["beta_last"] = betas
            table = [(math.sqrt(1 - v), math.sqrt(v)) for v in abar(n, *betas)]
        run = runge_kutta if sampler == "rk4" else multistep
        case["states"] = [[x] for x in run(case, table, affine(case["model"]))]
        case["tolerance"] = 1e-9 if order > 2 else 1e-11
        rolls.append(case)
    about = "Rollouts in float64 by deploy/golden/make_scheduled.py, seed 20251122; read as those of spec.json. The tolerance is what solving the conditions of order 3 and 4 over small steps leaves of a double."
    with open(sys.argv[1], "w") as f:
        lines = ",\n".join("  " + json.dumps(r) for r in rolls)
        f.write('{\n "about": %s,\n "rolls": [\n%s\n ]\n}\n' % (json.dumps(about), lines))


if __name__ == "__main__":
    main()
