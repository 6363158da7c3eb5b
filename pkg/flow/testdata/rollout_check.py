#!/usr/bin/env python3
"""Independent implementation of stochastic Euler rollouts in plain Python, bit for bit.

    rollout_check.py            check every bit of the rollout.json beside this file
    rollout_check.py --write    write it anew

Noise and elementary functions come from schemas/testdata/noise_check.py. The model is
v(x, sigma) = x/2, which float32 computes exactly.
"""

import json
import math
import os
import struct
import sys

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(here, "..", "..", "..", "schemas", "testdata"))
sys.dont_write_bytecode = True
import noise_check as noise  # noqa: E402

HALF_LN_2PI = float.fromhex("0x1.d67f1c864beb4p-1")
HALF_PI = float.fromhex("0x1.921fb54442d18p+0")
f32 = noise.float32


def sincos(x):
    z = x * x
    return x + x * (z * noise.horner(noise.SIN, z)), 1.0 + z * noise.horner(noise.COS, z)


def sincos_quarter(a):
    if a > 0.5:
        cos, sin = sincos((1.0 - a) * HALF_PI)
        return sin, cos
    return sincos(a * HALF_PI)


def kernel(transition, a, sigmas, i):
    """A, B (float32), g, n of the step sigmas[i] to sigmas[i+1]."""
    s, p = sigmas[i], sigmas[i + 1]
    d = p - s
    if transition == "ode":
        return 1.0, f32(d), 0.0, 0.0
    if transition == "cps":
        sin, cos = sincos_quarter(a)
        n = p * sin
        keep = p * cos
        return f32((1.0 - p) + keep), f32(keep * (1.0 - s) - s * (1.0 - p)), n, n
    g = a
    if transition == "sde":
        g = a * math.sqrt(s / (1.0 - (sigmas[1] if 1.0 - s <= 1e-5 else s)))
    c = (g * g) / (2.0 * s)
    return f32(1.0 + c * d), f32(d * (1.0 + c * (1.0 - s))), g, g * math.sqrt(-d)


def round_to(dtype, x):
    if dtype == "F16":
        return struct.unpack("<e", struct.pack("<e", x))[0]
    if dtype == "BF16":
        u = struct.unpack("<I", struct.pack("<f", x))[0]
        u = (u + 0x7FFF + (u >> 16 & 1)) & 0xFFFF0000
        return struct.unpack("<f", struct.pack("<I", u))[0]
    return x


def log_prob_sum(kind, n, mean, after):
    lanes = [0.0] * 4
    for i, (m, y) in enumerate(zip(mean, after)):
        r = y - m
        lanes[i % 4] += r * r
    total = -((lanes[0] + lanes[1]) + (lanes[2] + lanes[3]))
    if kind != "squared":
        total /= 2.0 * (n * n)
    if kind == "density":
        total -= len(mean) * (noise.ln(n) + HALF_LN_2PI)
    return total


def rollout(case):
    sigmas = [float.fromhex(s) for s in case["sigmas"]]
    seed, storage = int(case["seed"]), case["storage"]
    x = [round_to(storage, e) for e in noise.normal(seed, noise.INITIAL, 0, case["elements"])]
    steps = []
    for i, transition in enumerate(case["transitions"]):
        a, b, g, n = kernel(transition, case["noise_level"], sigmas, i)
        mean = [f32(f32(a * e) + f32(b * (e / 2.0))) for e in x]
        step = {"std_dev_t": g.hex(), "noise_std": n.hex(), "log_prob_sum": None}
        after = mean
        if transition != "ode":
            std = f32(n)
            draws = noise.normal(seed, i, 0, len(x))
            after = [f32(m + f32(std * e)) for m, e in zip(mean, draws)]
        x = [round_to(storage, e) for e in after]
        if transition != "ode":
            step["log_prob_sum"] = log_prob_sum(case["log_prob_kind"], n, mean, x).hex()
        steps.append(step)
    return {"steps": steps, "latents": [e.hex() for e in x]}


def build():
    qwen = [f32(s) for s in (1.0, 0.92896963544178, 0.851484793987824, 0.673280860477811,
                             0.455497255504355, 0.183300541749145, 0.02, 0.0)]
    low = [f32(s) for s in (0.95, 0.5, 0.1, 0.0)]
    cases = []
    for transition, kind, a in (("sde", "density", 0.7), ("cps", "squared", 0.8), ("dance_sde", "scaled", 0.3),
                                ("cps", "density", 0.45), ("ode", "density", 0.0), ("sde", "squared", 1.2)):
        for storage in ("F32", "F16", "BF16"):
            for sigmas, elements in ((qwen, 15), (low, 64)):
                transitions = [transition] * (len(sigmas) - 1)
                if kind == "density" and transition == "cps":
                    transitions[-1] = "ode"
                if len(sigmas) == 8:
                    transitions[2] = "ode"
                if storage == "F32" and kind == "density" and transition == "sde":
                    elements = 1003  # enough that the order of the sum shows
                case = {"transitions": transitions, "noise_level": a, "log_prob_kind": kind, "storage": storage,
                        "seed": str(1000 + len(cases)), "elements": elements, "sigmas": [s.hex() for s in sigmas]}
                cases.append({**case, **rollout(case)})
    return {"about": "Euler rollouts of v = x/2, written by rollout_check.py --write; every float is hexadecimal and exact.",
            "cases": cases}


def main():
    path = os.path.join(here, "rollout.json")
    vectors = build()
    if sys.argv[1:] == ["--write"]:
        with open(path, "w") as f:
            f.write('{"about": %s,\n"cases": [\n' % json.dumps(vectors["about"]))
            f.write(",\n".join(json.dumps(c) for c in vectors["cases"]))
            f.write("\n]}\n")
        return 0
    with open(path) as f:
        stored = json.load(f)
    for i, (got, want) in enumerate(zip(vectors["cases"], stored["cases"])):
        if got != want:
            print("case %d differs: computed %s, stored %s" % (i, got, want))
            return 1
    if vectors != stored:
        print("the lists of cases differ")
        return 1
    print("rollout.json: %d rollouts agree" % len(stored["cases"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
