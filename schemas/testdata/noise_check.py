#!/usr/bin/env python3
"""Independent implementation of noise.md in plain Python, and a check of noise.json.

    noise_check.py            check every bit of the noise.json beside this file
    noise_check.py --write    write it anew

Needs the standard library only. Python floats are IEEE binary64 and are never fused.
"""

import hashlib
import json
import math
import os
import struct
import sys

M32 = 0xFFFFFFFF
INITIAL = 0xFFFFFFFF

LN2 = float.fromhex("0x1.62e42fefa39efp-1")
SQRT2 = float.fromhex("0x1.6a09e667f3bcdp+0")
HALF_PI = float.fromhex("0x1.921fb54442d18p+0")
PI_2N32 = float.fromhex("0x1.921fb54442d18p-31")

# 1/21, 1/19, .. 1/3
LN = [float.fromhex(h) for h in (
    "0x1.8618618618618p-5", "0x1.af286bca1af28p-5", "0x1.e1e1e1e1e1e1ep-5", "0x1.1111111111111p-4",
    "0x1.3b13b13b13b14p-4", "0x1.745d1745d1746p-4", "0x1.c71c71c71c71cp-4", "0x1.2492492492492p-3",
    "0x1.999999999999ap-3", "0x1.5555555555555p-2")]
# -1/15!, 1/13!, .. -1/3!
SIN = [float.fromhex(h) for h in (
    "-0x1.ae7f3e733b81fp-41", "0x1.6124613a86d09p-33", "-0x1.ae64567f544e4p-26", "0x1.71de3a556c734p-19",
    "-0x1.a01a01a01a01ap-13", "0x1.1111111111111p-7", "-0x1.5555555555555p-3")]
# 1/16!, -1/14!, .. -1/2!
COS = [float.fromhex(h) for h in (
    "0x1.ae7f3e733b81fp-45", "-0x1.93974a8c07c9dp-37", "0x1.1eed8eff8d898p-29", "-0x1.27e4fb7789f5cp-22",
    "0x1.a01a01a01a01ap-16", "-0x1.6c16c16c16c17p-10", "0x1.5555555555555p-5", "-0x1.0000000000000p-1")]

# 1/14!, 1/13!, .. 1/2!, 1, 1
EXP = [float.fromhex(h) for h in (
    "0x1.93974a8c07c9dp-37", "0x1.6124613a86d09p-33", "0x1.1eed8eff8d898p-29", "0x1.ae64567f544e4p-26",
    "0x1.27e4fb7789f5cp-22", "0x1.71de3a556c734p-19", "0x1.a01a01a01a01ap-16", "0x1.a01a01a01a01ap-13",
    "0x1.6c16c16c16c17p-10", "0x1.1111111111111p-7", "0x1.5555555555555p-5", "0x1.5555555555555p-3",
    "0x1p-1", "0x1p+0", "0x1p+0")]
LN2_HI, LN2_LO = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")

# Known answers published with Random123 (kat_vectors, philox4x32 10).
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([M32] * 4, [M32] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
     [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


def philox(counter, key):
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & M32, (p0 >> 32) ^ c3 ^ k1, p0 & M32
        k0, k1 = (k0 + 0x9E3779B9) & M32, (k1 + 0xBB67AE85) & M32
    return [c0, c1, c2, c3]


def key_of(seed):
    return [seed & M32, seed >> 32]


def horner(coefficients, z):
    p = coefficients[0]
    for c in coefficients[1:]:
        p = p * z + c
    return p


def ln(x):
    m, e = math.frexp(x)  # m in [1/2, 1)
    m, e = m * 2.0, e - 1
    if m >= SQRT2:
        m, e = m * 0.5, e + 1
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    t = s + s
    return float(e) * LN2 + (t + t * (z * horner(LN, z)))


def exp(x):
    k = math.floor(x / LN2 + 0.5)
    r = (x - k * LN2_HI) - k * LN2_LO
    return math.ldexp(horner(EXP, r), k)


def float32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def parts(w0, w1):
    """u, quadrant and remaining angle of a pair of words."""
    u = (float(w0) + 0.5) * 2.0**-32
    q = ((w1 + (1 << 29)) & M32) >> 30
    d = (w1 - (q << 30)) & M32
    if d >= 1 << 31:
        d -= 1 << 32
    return u, q, float(2 * d + 1) * PI_2N32


def box_muller(w0, w1):
    u, q, x = parts(w0, w1)
    r = math.sqrt(-2.0 * ln(u))
    z = x * x
    s = x + x * (z * horner(SIN, z))
    c = 1.0 + z * horner(COS, z)
    cos, sin = [(c, s), (-s, c), (-c, -s), (s, -c)][q]
    return float32(r * cos), float32(r * sin)


def normal(seed, step, stream, count):
    out = []
    block = 0
    while len(out) < count:
        w = philox([block, step, stream, 0], key_of(seed))
        out += box_muller(w[0], w[1]) + box_muller(w[2], w[3])
        block += 1
    return out[:count]


def derive_seed(base, uid, index):
    base, uid = base.encode(), uid.encode()
    text = struct.pack("<Q", len(base)) + base + struct.pack("<Q", len(uid)) + uid + struct.pack("<Q", index)
    return struct.unpack("<Q", hashlib.sha256(text).digest()[:8])[0]


def path_seeds(base, uid, branches, leaf, steps):
    """The seeds of the noise of each step on the path to a leaf of a tree."""
    digits, rest = [], leaf
    for _, width in reversed(branches):
        rest, digit = divmod(rest, width)
        digits.insert(0, digit)
    seeds = []
    for step in range(steps):
        owner = 0
        for (at, width), digit in zip(branches, digits):
            owner = owner * width + (digit if at <= step else 0)
        seeds.append(derive_seed(base, uid, owner))
    return seeds


def window(size, lo, hi, strategy, iteration, iters_per_group, seed):
    def choose(draw, n):
        w = philox([draw, iteration, 1, 0], key_of(seed))
        return ((w[1] << 32 | w[0]) * n) >> 64

    start = lo
    if strategy == "random":
        start += choose(0, hi - size - lo + 1)
    elif strategy == "progressive":
        start = min(lo + iteration // iters_per_group * size, hi - size)
    else:
        steps = list(range(lo, hi))
        for i in range(size):
            j = i + choose(i, len(steps) - i)
            steps[i], steps[j] = steps[j], steps[i]
        return sorted(steps[:size])
    return list(range(start, start + size))


def probability(step, probability, prob_start, prob_end, ramp_steps, start_step, ramp_shape):
    start = probability if prob_start is None else prob_start
    end = probability if prob_end is None else prob_end
    if ramp_steps == 0 or step < start_step:
        return start if ramp_steps else probability
    q = min((step - start_step) / ramp_steps, 1.0)
    if ramp_shape == "cosine":
        if q > 0.5:
            z = ((1.0 - q) * HALF_PI) * ((1.0 - q) * HALF_PI)
            s = 1.0 + z * horner(COS, z)
        else:
            x = q * HALF_PI
            z = x * x
            s = x + x * (z * horner(SIN, z))
        q = s * s
    return end if q == 1.0 else min(max(start + (end - start) * q, 0.0), 1.0)


def scheduled(seed, step, index, timestep, n, m, strategy, p):
    """What a plan has for one sample: base, source, offset and why it does not roll."""
    w = philox([index, step, 2, 0], key_of(seed))
    base = int(timestep)
    if m == 0:
        return [base, base, 0, "disabled"]
    if not float((w[1] << 32 | w[0]) >> 11) * 2.0**-53 < p:
        return [base, base, 0, "masked"]
    draw = w[3] << 32 | w[2]
    u = float(draw >> 11) * 2.0**-53
    if strategy == "uniform":
        offset = draw * (m + 1) >> 64
    elif strategy == "biased_early":
        offset = round(u * u * m)
    else:
        offset = round((1.0 - u * u) * m)
    source = min(base + offset, n - 1)
    return [base, source, offset, "zero_offset" if offset == 0 else "clipped" if source == base else ""]


def drawn_timestep(seed, step, index, n):
    w = philox([index, step, 2, 1], key_of(seed))
    return (w[1] << 32 | w[0]) * n >> 64


def token(logits, temperature, top_k, top_p, min_p, seed, position):
    """The token at a position of a sequence, and what is recorded of it."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    top = logits[order[0]]

    def weights(t):
        xs = [(z - top) / t for z in logits]
        return [exp(x) if x > -700.0 else 0.0 for x in xs]

    def total(ids):
        t = 0.0
        for i in sorted(ids):
            t += w[i]
        return t

    w = weights(1.0)
    raw = total(range(len(logits)))
    lse = top + ln(raw)
    mean = 0.0
    for e, z in zip(w, logits):
        if e > 0:
            mean += e * (z - top)
    entropy = ln(raw) - mean / raw
    t, kept = 1.0, [i for i in order if logits[i] > -math.inf]
    if temperature == 0:
        kept = order[:1]
    else:
        t = temperature
        w = weights(t)
        if top_k > 0:
            kept = kept[:top_k]
        limit = math.inf
        if 0 < top_p < 1:
            if top_k > 0 and len(kept) == top_k:
                left = 0.0
                for i in kept:
                    left += w[i]
            else:
                left = total(range(len(logits)))
            limit = top_p * left
        mass, n = 0.0, 0
        while n < len(kept) and (n == 0 or (mass < limit and w[kept[n]] >= min_p)):
            mass += w[kept[n]]
            n += 1
        kept = kept[:n]
    kept.sort()
    mass = total(kept)
    if temperature == 0:
        drawn = kept[0]
    else:
        words = philox([0, position, 3, 0], key_of(seed))
        target = float((words[1] << 32 | words[0]) >> 11) * 2.0**-53 * mass
        cumulated, drawn = 0.0, kept[0]
        for i in kept:
            if w[i] == 0:
                continue
            drawn = i
            cumulated += w[i]
            if cumulated > target:
                break
    z = logits[drawn]
    numbers = {"logprob": z - lse, "lse": lse, "entropy": entropy, "processed": (z - top) / t - ln(mass), "processed_lse": top / t + ln(mass)}
    return {"token": drawn, "kept": kept, **{k: float32(v).hex() for k, v in numbers.items()}}


def hex32(words):
    return ["0x%08x" % w for w in words]


def digest(values):
    return hashlib.sha256(struct.pack("<%df" % len(values), *values)).hexdigest()


def build():
    philox_cases = list(KNOWN)
    for counter, key in (([1, 2, 3, 4], [5, 6]), ([0, INITIAL, 0, 0], [0x89ABCDEF, 0x01234567]), ([7, 0, 1, 0], [42, 0])):
        philox_cases.append((counter, key, philox(counter, key)))

    edges = (0, 1, 0x1FFFFFFF, 0x20000000, 0x3FFFFFFF, 0x40000000, 0x5FFFFFFF, 0x60000000, 0x7FFFFFFF, 0x80000000,
             0x9FFFFFFF, 0xA0000000, 0xB504F333, 0xB504F334, 0xDFFFFFFF, 0xE0000000, 0xFFFFFFFE, 0xFFFFFFFF)
    pairs = [(a, b) for a in edges for b in (0, 0x12345678, 0xFFFFFFFF)]
    pairs += [(0x89ABCDEF, b) for b in edges]
    box = []
    for w0, w1 in pairs:
        u, q, x = parts(w0, w1)
        box.append({"words": hex32([w0, w1]), "u": u.hex(), "quadrant": q, "angle": x.hex(),
                    "normals": [n.hex() for n in box_muller(w0, w1)]})

    seeds = (0, 1, 42, 0x0123456789ABCDEF, (1 << 64) - 1)
    normals = []
    for i, seed in enumerate(seeds):
        for step in (0, 1, 9, 999, INITIAL):
            for stream in (0, 1):
                count = (1, 2, 3, 4, 5, 7, 8, 11)[(i + step + 3 * stream) % 8]
                normals.append({"seed": str(seed), "step": step, "stream": stream,
                                "normals": [n.hex() for n in normal(seed, step, stream, count)]})
    long = []
    for seed, step, count in ((42, INITIAL, 20011), (0xFEDCBA9876543210, 3, 4098)):
        long.append({"seed": str(seed), "step": step, "stream": 0, "count": count,
                     "sha256": digest(normal(seed, step, 0, count))})

    sample_seeds = []
    for base, uid, index in (("seed:42", "a", 0), ("seed:42", "a", 1), ("seed:42", "a", 31), ("run:42", "a", 0),
                             ("run:demo", "cat-1", 0), ("run:demo-cat", "1", 0), ("run:demo", "cat-1", 1000000),
                             ("", "", 0), ("seed:-1", "\u00fc\u732b", 7), ("run:demo", "cat-1", (1 << 64) - 1)):
        sample_seeds.append({"base": base, "uid": uid, "sample_index": str(index),
                             "seed": str(derive_seed(base, uid, index))})

    windows = []
    for size, lo, hi, strategy, iteration, iters, seed in (
            (2, 0, 5, "random", 0, 1, 42), (2, 0, 5, "random", 1, 1, 42), (2, 0, 5, "random", 2, 1, 42),
            (2, 0, 5, "random", 0, 1, (1 << 64) - 1), (5, 0, 5, "random", 7, 1, 42), (1, 3, 4, "random", 0, 1, 0),
            (3, 10, 1000, "random", 4294967295, 1, 9), (2, 0, 5, "progressive", 0, 2, 0), (2, 0, 5, "progressive", 1, 2, 0),
            (2, 0, 5, "progressive", 2, 2, 0), (2, 0, 5, "progressive", 4, 2, 0), (2, 0, 5, "progressive", 4294967295, 2, 0),
            (3, 0, 9, "noncontiguous", 0, 1, 42), (3, 0, 9, "noncontiguous", 1, 1, 42), (4, 5, 9, "noncontiguous", 0, 1, 42),
            (6, 2, 50, "noncontiguous", 3, 1, 0x0123456789ABCDEF)):
        windows.append({"size": size, "lo": lo, "hi": hi, "strategy": strategy, "iteration": iteration,
                        "iters_per_group": iters, "seed": str(seed),
                        "indices": window(size, lo, hi, strategy, iteration, iters, seed)})

    trees = []
    for base, uid, branches, leaf, steps in (
            ("seed:42", "a", ((2, 2), (5, 2)), 3, 8), ("seed:42", "a", ((2, 2), (5, 2)), 1, 8), ("seed:42", "a", ((2, 2), (5, 2)), 0, 8),
            ("seed:7", "cat-1", ((0, 3), (1, 2), (6, 4)), 23, 10), ("seed:7", "cat-1", ((0, 3), (1, 2), (6, 4)), 12, 10),
            ("run:demo", "p1", ((3, 2), (4, 2), (5, 2)), 5, 6)):
        trees.append({"base": base, "uid": uid, "branches": [{"step_index": s, "width": w} for s, w in branches],
                      "leaf": leaf, "seeds": [str(s) for s in path_seeds(base, uid, branches, leaf, steps)]})

    plans = []
    for seed, step, n, m, strategy, shape, ramp_steps, start_step, p, start, end, count in (
            (42, 0, 1000, 4, "uniform", "linear", 0, 0, 1.0, None, None, 12), (42, 1, 1000, 4, "uniform", "linear", 0, 0, 0.5, None, None, 12),
            (42, 75, 1000, 10, "biased_early", "linear", 100, 50, 1.0, 0.0, 0.5, 12), (42, 75, 1000, 10, "biased_late", "cosine", 100, 50, 0.0, 0.1, 0.9, 12),
            (7, 125, 100, 99, "biased_late", "cosine", 100, 50, 1.0, 0.0, 1.0, 16), (7, 49, 100, 99, "uniform", "cosine", 100, 50, 1.0, 0.0, 1.0, 4),
            ((1 << 64) - 1, 4294967295, 1000, 999, "biased_early", "linear", 7, 0, 0.25, None, 0.75, 12), (0, 33, 2, 1, "uniform", "cosine", 100, 0, 1.0, 0.3, None, 16),
            (0x0123456789ABCDEF, 100, 1000, 0, "uniform", "cosine", 300, 1, 1.0, 1.0, 0.0, 3), (3, 9, 1000, 5, "biased_early", "linear", 0, 0, 0.0, None, None, 3), (5, 400, 1000, 5, "uniform", "linear", 100, 50, 0.5, 1.0, 0.3, 6)):
        ramp = {"probability": p, "prob_start": start, "prob_end": end, "ramp_steps": ramp_steps, "start_step": start_step, "ramp_shape": shape}
        chance = probability(step, **ramp)
        drawn = [drawn_timestep(seed, step, i, n) for i in range(count)]
        given = [float(n - 1) if i % 4 == 3 else t + 0.4 * (i % 2) if t < n - 1 else float(t) for i, t in enumerate(drawn)]
        plans.append({"seed": str(seed), "step": step, "timesteps": n, "max_step_offset": m, "strategy": strategy,
                      "ramp": {k: v if v is None or not k.startswith("prob") else v.hex() for k, v in ramp.items()},
                      "probability": chance.hex(), "drawn_timesteps": drawn, "given_timesteps": [float(t).hex() for t in given],
                      "samples": [scheduled(seed, step, i, t, n, m, strategy, chance) for i, t in enumerate(given)]})

    tokens = []
    for i, (count, temperature, top_k, top_p, min_p) in enumerate((
            (4, 1.0, 0, 1.0, 0.0), (4, 0.5, 0, 1.0, 0.0), (4, 0.0, 0, 1.0, 0.0), (40, 1.0, 0, 0.9, 0.0), (40, 0.7, 5, 1.0, 0.0),
            (40, 1.3, 20, 0.8, 0.0), (40, 1.0, 0, 1.0, 0.1), (40, 2.0, 7, 0.95, 0.02), (90, 1.0, 0, 0.999, 0.0), (90, 0.001, 0, 1.0, 0.0),
            (90, 1000.0, 1, 0.5, 0.0), (40, 1.0, 0, 1e-9, 0.0), (40, 1.0, 39, 0.99, 0.0))):
        logits = [float32(3.0 * v) for v in normal(i, 0, 0, count)]
        if i % 2:
            logits[3] = logits[1]  # a tie
        if i % 3 == 2:
            logits[0] = -math.inf  # a mask
        draws = [{"seed": str(seed), "position": position, **token(logits, temperature, top_k, top_p, min_p, seed, position)}
                 for seed, position in ((42, 0), (42, 1), ((1 << 64) - 1, 4294967295))]
        kept = [d.pop("kept") for d in draws][0]
        tokens.append({"logits": " ".join(z.hex() for z in logits), "temperature": temperature.hex(), "top_k": top_k, "top_p": top_p.hex(),
                       "min_p": min_p.hex(), "kept": len(kept), "draws": draws})

    return {
        "about": "Vectors of noise.md, written by noise_check.py --write. Numbers of 64 bits are decimal strings, "
                 "floats are hexadecimal; the first three philox cases are Random123's published known answers.",
        "philox": [{"counter": hex32(c), "key": hex32(k), "words": hex32(w)} for c, k, w in philox_cases],
        "box_muller": box,
        "normal": normals,
        "long": long,
        "sample_seed": sample_seeds,
        "tree": trees,
        "window": windows,
        "scheduled": plans,
        "token": tokens,
    }


def main():
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "noise.json")
    for counter, key, words in KNOWN:
        assert philox(counter, key) == words, "philox disagrees with Random123"
    vectors = build()
    if sys.argv[1:] == ["--write"]:
        with open(path, "w") as f:
            json.dump(vectors, f, indent=1)
            f.write("\n")
        return 0
    with open(path) as f:
        stored = json.load(f)
    bad = [k for k in sorted(vectors.keys() | stored.keys()) if vectors.get(k) != stored.get(k)]
    for k in bad:
        for i, (got, want) in enumerate(zip(vectors.get(k, []), stored.get(k, []))):
            if got != want:
                print("%s[%d]: computed %s, stored %s" % (k, i, got, want))
                break
        else:
            print("%s: lengths differ" % k)
    if bad:
        return 1
    print("noise.json: %d vectors agree" % sum(len(v) for v in stored.values() if isinstance(v, list)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
