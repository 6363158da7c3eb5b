"""Faults planted by a seed into two engines and two trainers, and what certify says of them.

    PYTHONPATH=. python tests/planted.py SEED [COUNT] [--together]

Each subject is right as it stands here. A fault is an edit of its source, with a number that the seed draws where it
has one, and what certify's words must match. certify knows neither the subjects nor the faults.
"""

import argparse
import itertools
import random
import re
import sys

import numpy as np

from meander.certify import engine, suite, trainer

SERVING = '''
    def update(self, weights):
        self.served = weights

    def pause(self, call):
        return call()

    def restart(self, call):
        return call()
'''
PAINTS = '''
class Paints:
    says = {"transition": "sde", "noise_level": 0.7, "log_prob_kind": "density", "reduce": "mean", "shift": 3.0,
            "noise": "numpy's PCG64 of its seed, in turn", "guidance": "plain", "weights": 2}
    served = before = count = 0

    def network(self, prompt, x, sigma, weights):
        key = np.resize(np.frombuffer(prompt.encode(), np.uint8), x.shape) / 128.0 - 0.8
        return np.tanh(x * (1 + 0.3 * weights) + key * sigma) - 0.2 * key

    def images(self, prompts, seeds):
        rows = [self.image(p, s) for p, s in zip(prompts, seeds)]
        return rows

    def image(self, prompt, seed, stop=8):
        rng, weights = np.random.default_rng(seed), self.served
        u = np.linspace(1, 1 / 8, 8)
        sigmas = np.append(3 * u / (1 + 2 * u), 0)
        timesteps = 1000 * sigmas[:-1]
        x = rng.standard_normal((32, 8)).astype(np.float32)
        row = {"latents": [x], "sigmas": sigmas, "timesteps": timesteps, "log_probs": [], "velocities": [],
               "positive": [], "negative": [], "scale": 3.0, "prompt_text": prompt}
        for i in range(stop):
            s, t = sigmas[i], sigmas[i + 1]
            positive, negative = self.network(prompt, x, s, weights), self.network("x", x, s, weights)
            v = negative + 3.0 * (positive - negative)
            log_prob = np.nan
            if i in (0, 2, 4):
                d, g = t - s, 0.7 * np.sqrt(s / (1 - min(s, sigmas[1])))
                n = g * np.sqrt(-d)
                mean = x * (1 + g**2 / (2 * s) * d) + v * (1 + g**2 * (1 - s) / (2 * s)) * d
                after = mean + n * rng.standard_normal(x.shape)
                log_prob = self.log_prob(row, i, x, v, after, mean, n, g, d)
            else:
                after = x + (t - s) * v
            row["log_probs"].append(log_prob)
            for name, value in (("positive", positive), ("negative", negative), ("velocities", v)):
                row[name].append(value.astype(np.float32))
            x = after.astype(np.float32)
            row["latents"].append(x)
        row["image"] = np.clip(x, -1, 1)
        return row

    def log_prob(self, row, i, x, v, after, mean, n, g, d):
        return np.mean(-((after - mean) ** 2) / (2 * n**2) - np.log(n) - np.log(2 * np.pi) / 2)

    def expected(self, row, weights):
        out = []
        for x, s in zip(row["latents"], row["sigmas"][:-1]):
            a, b = (PAINTS_NETWORK(self, p, x, s, weights) for p in (row["prompt_text"], "x"))
            out.append(b + 3.0 * (a - b))
        return out

    def abort(self, call):
        whole = call()
        return self.image(self.prompts[0], self.seeds[0], 3)

    prompts, seeds = ["a red fox", "a blue sign", "two cats", "rain"], [3, 14, 25, 36]
''' + SERVING
WRITES = '''
class Writes:
    says = {"log_prob_kind": "processed", "reduce": "each", "weights": 2}
    prompts, seeds = ["347+58=?", "12-7=?", "why?", "who is there?"], [3, 14, 25, 36]
    served = 0

    def render(self, prompt):
        return f"<user>\\n{prompt}</user>\\n<assistant>\\n"

    def logits(self, ids, weights):
        return TABLES[weights][ids[-1]] + 0.5 * TABLES[weights][ids[-2]][::-1]

    def texts(self, prompts, seeds, temperature, top_k):
        rows = [self.text(p, s, temperature, top_k) for p, s in zip(prompts, seeds)]
        return rows

    def text(self, prompt, seed, temperature, top_k, most=40):
        rng, written = np.random.default_rng(seed), self.render(prompt)
        ids, weights, log_probs = list(written.encode()), self.served, []
        begin = len(ids)
        for i in range(most):
            z = self.logits(ids, weights)
            y = z / temperature
            y = np.where(y < np.sort(y)[-top_k], -np.inf, y)
            p = np.exp(y - y.max())
            p = p / p.sum()
            token = int(np.searchsorted(np.cumsum(p), rng.random()))
            log_probs.append(self.log_prob(z, y, token, temperature))
            ids.append(token)
        return {"prompt": written, "ids": ids[begin:], "log_probs": log_probs, "temperature": temperature,
                "top_k": top_k}

    def log_prob(self, z, y, token, temperature):
        return y[token] - y.max() - np.log(np.exp(y - y.max()).sum())

    def expected(self, row, weights):
        ids, out = list(row["prompt"].encode()), []
        for token in row["ids"]:
            out.append(TABLES[weights][ids[-1]] + 0.5 * TABLES[weights][ids[-2]][::-1])
            ids.append(token)
        return out

    def template(self, prompt):
        return f"<user>\\n{prompt}</user>\\n<assistant>\\n"

    def abort(self, call):
        whole = call()
        return {k: v[:7] if k in ("ids", "log_probs") else v for k, v in whole.items()}

''' + SERVING


PPO = '''
def ppo(log_prob, old, advantages, weights, clip, adv_clip_max):
    a = np.clip(advantages, -adv_clip_max, adv_clip_max)
    r = np.exp(log_prob - old)
    losses = np.maximum(-a * r, -a * np.clip(r, 1 - clip, 1 + clip)) * weights
    return losses.mean()
'''
SDE = '''
def sde(x, v, next, sigmas, step, noise_level):
    sigma, then = sigmas[step], sigmas[step + 1]
    dt = then - sigma
    g = noise_level * np.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma)))
    mean = x * (1 + g**2 / (2 * sigma) * dt) + v * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
    n = g * np.sqrt(-dt)
    log_prob = -((next - mean) ** 2) / (2 * n**2) - np.log(n) - np.log(2 * np.pi) / 2
    return log_prob.mean()
'''
SUBJECTS = {"Paints": PAINTS, "Writes": WRITES, "ppo": PPO, "sde": SDE}
"""The sources: two engines, a loss and the log-prob of a step."""
FAULTS = {
    "Paints": [
        ("a sum where a mean is said", "np.mean(-((after", "np.sum(-((after", "reduce is sum"),
        ("no ln n", "- np.log(n) -", "-", r"log\(noise_std\) is left out of"),
        ("no constant", " - np.log(2 * np.pi) / 2)", ")", r"ln\(2 pi\)/2 is left out of"),
        ("no logarithms", " - np.log(n) - np.log(2 * np.pi) / 2)", ")", "log_prob_kind is scaled"),
        ("another factor", "np.mean(-((after", "{f} * np.mean(-((after", "{f} times the formula"),
        ("log-prob negated", "return np.mean(", "return -np.mean(", "the opposite sign"),
        ("another constant", "return np.mean(", "return {f} + np.mean(", r"the formula \+{f}"),
        ("the coefficient in place of the deviation", "(2 * n**2) - np.log(n)", "(2 * g**2) - np.log(g)",
         r"sqrt\(-dt\) is left out of"),
        ("the density of the step's own velocity negated", "((after - mean) ** 2)",
         "((after - (mean - 2 * v * d * (1 + g**2 * (1 - row['sigmas'][i]) / (2 * row['sigmas'][i])))) ** 2)",
         "v has the opposite sign"),
        ("log-probs one step late", "row[\"log_probs\"].append(log_prob)",
         "row[\"log_probs\"].append(row[\"last\"] if i else np.nan); row[\"last\"] = log_prob", "log-probs "),
        ("noise of another seed", "default_rng(seed)", "default_rng(seed + {k})", r"of its seed \+{k}"),
        ("noise that is longer", "n * rng.standard", "{f} * n * rng.standard", "times {f}"),
        ("x_T that is longer", "x = rng.standard_normal((32, 8))", "x = {f} * rng.standard_normal((32, 8))",
         "times {f} in x_T"),
        ("the same noise in each step", "n * rng.standard_normal", "n * np.random.default_rng(seed).standard_normal",
         "draw 0 in the turn of 1"),
        ("a draw is thrown away", "row = {{", "rng.standard_normal(x.shape); row = {{", "draw 2 in the turn of 1"),
        ("seeds have no effect", "default_rng(seed)", "default_rng(7)", "other samples for 0 of 4"),
        ("noise that no seed decides", "default_rng(seed)", "default_rng()", "a seed twice.*off"),
        ("another shift", "3 * u / (1 + 2 * u)", "{k} * u / (1 + ({k} - 1) * u)", "shift {k} of 8 steps"),
        ("a schedule that begins late", "u = np.linspace(1, 1 / 8, 8)", "u = np.linspace(1, 1 / 9, 9)[1:]",
         "of 9 steps, linspace, from its second"),
        ("timesteps one ahead", "1000 * sigmas[:-1]", "1000 * sigmas[1:]", "timesteps.*ahead by one"),
        ("timesteps in another unit", "1000 * sigmas[:-1]", "{f} * 1000 * sigmas[:-1]", "timesteps.*{f} times"),
        ("guidance without the negative one's share", "v = negative + 3.0", "v = positive + 3.0",
         "guidance.*scale is one more"),
        ("guidance swapped", "negative + 3.0 * (positive - negative)", "positive + 3.0 * (negative - positive)",
         "guidance.*swapped"),
        ("guidance of another rule", "v = negative + 3.0 * (positive - negative)",
         "c = negative + 3.0 * (positive - negative); "
         "v = c * (np.linalg.norm(positive) / np.linalg.norm(c)).clip(0, 1)",
         "of guidance/norm_clamped; it says plain"),
        ("steps of the next sigma", "after = x + (t - s) * v", "after = x + (sigmas[min(i + 2, 8)] - t) * v",
         "steps without noise.*(step is one more|ahead by one place)"),
        ("steps the wrong way", "after = x + (t - s) * v", "after = x - (t - s) * v",
         "steps without noise.*v has the opposite sign"),
        ("a batch shares its mean", "return rows",
         "m = np.mean([r[\"image\"] for r in rows], 0); "
         "[r.update(image=0.9 * r[\"image\"] + 0.1 * m) for r in rows]; return rows",
         r"alone, 1 of 4.*image \S+ off"),
        ("rows of a batch change places", "return rows", "return rows[-1:] + rows[:-1]", "row 1 is row 0 alone"),
        ("an update has no effect", "self.served = weights", "pass", "update 1.*image moves by 0"),
        ("an update takes effect one later", "self.served = weights", "self.served, self.before = self.before, weights",
         "weights 2.*of weights 1.*where 2 are served"),
        ("log-probs of the weights at the start", "return np.mean(-((after - mean) ** 2)",
         "s, p = row['sigmas'][i], row['prompt_text']; a, b = (self.network(q, x, s, 0) for q in (p, 'x')); "
         "v = b + 3.0 * (a - b); mean = x * (1 + g**2 / (2 * s) * d) + v * (1 + g**2 * (1 - s) / (2 * s)) * d\n"
         "        return np.mean(-((after - mean) ** 2)", "log-probs of weights 0.*where 1 are served"),
        ("weights are lost by a restart", "def restart(self, call):\n        return call()",
         "def restart(self, call):\n        self.served = 1; return call()", "during restart.*off"),
        ("an abort leaves weights", "whole = call()", "self.served = 1", "after abort.*off"),
        ("a pause draws anew", "def pause(self, call):\n        return call()",
         "def pause(self, call):\n        return self.image(self.prompts[0], self.seeds[0] + 1)", "during pause.*off"),
    ],
    "Writes": [
        ("temperature left out", "return y[token] - y.max() - np.log(np.exp(y - y.max()).sum())",
         "return z[token] - z.max() - np.log(np.exp(z - z.max()).sum())", "log_prob_kind is raw"),
        ("filters left out", "return y[token] - y.max() - np.log(np.exp(y - y.max()).sum())",
         "y = z / temperature; return y[token] - y.max() - np.log(np.exp(y - y.max()).sum())",
         "log_prob_kind is scaled"),
        ("in bits", "return y[token] - y.max() - np.log(np.exp(y - y.max()).sum())",
         "return (y[token] - y.max() - np.log(np.exp(y - y.max()).sum())) / np.log(2)", "1.4427 times the formula"),
        ("another factor",
         "return y[token]", "return {f} * y[token] - ({f} - 1) * (y.max() + np.log(np.exp(y - y.max()).sum()))",
         "{f} times the formula"),
        ("turned over", "return y[token] - y.max() - np.log(np.exp(y - y.max()).sum())",
         "return y.max() + np.log(np.exp(y - y.max()).sum()) - y[token]", "the opposite sign"),
        ("one token late", "\"log_probs\": log_probs,", "\"log_probs\": log_probs[-1:] + log_probs[:-1],",
         "log-probs.*(ahead|behind) by one place"),
        ("a sum", "\"log_probs\": log_probs,", "\"log_probs\": [sum(log_probs)],", "reduce is sum"),
        ("a mean", "\"log_probs\": log_probs,", "\"log_probs\": [sum(log_probs) / len(log_probs)],", "reduce is mean"),
        ("temperature twice in the log-prob",
         "return y[token]", "y = y / temperature; return y[token]", "temperature is squared"),
        ("temperature inverted", "y = z / temperature", "y = z * temperature",
         "temperature is inverted|drawing.*temperature [01]\\.[0-9]* to 1\\.[0-9]* where 0\\.8"),
        ("one token fewer is kept", "np.sort(y)[-top_k]", "np.sort(y)[1 - top_k]", "top_k is one less|as by top_k 4"),
        ("one token more is kept",
         "np.sort(y)[-top_k]", "np.sort(y)[-1 - top_k]", "top_k is one more|ranks up to 6 of top_k 5"),
        ("drawn at another temperature", "p = np.exp(y - y.max())", "p = np.exp({k} * (y - y.max()))",
         "drawing.*differs.*temperature"),
        ("a line break is missing", "</user>\\n", "</user>", "in place of '.n' at"),
        ("a space too many",
         "<assistant>\\n\"\n\n    def logits", "<assistant>\\n \"\n\n    def logits", "' ' in place of ''"),
        ("another role", "f\"<user>\\n{{prompt}}</user>\\n<assistant>\\n\"\n\n    def logits",
         "f\"<user>\\n{{prompt}}</user>\\n<system>\\n\"\n\n    def logits", "prompt.*in place of"),
        ("seeds have no effect", "default_rng(seed)", "default_rng(7)", "other samples for 0 of 4"),
        ("no seed decides", "default_rng(seed)", "default_rng()", "a seed twice.*off"),
        ("rows of a batch change places", "return rows", "return rows[-1:] + rows[:-1]", "row 1 is row 0 alone"),
        ("an update has no effect", "self.served = weights", "pass", "update 1.*ids moves by 0"),
        ("an update takes effect one later", "self.served = weights",
         "self.served, self.before = getattr(self, 'before', 0), weights",
         "weights 2.*(of|by) weights 1.*where 2 are served"),
        ("log-probs of the weights at the start", "log_probs.append(self.log_prob(z, y,",
         "z = self.logits(ids, 0); y = z / temperature; y = np.where(y < np.sort(y)[-top_k], -np.inf, y); "
         "log_probs.append(self.log_prob(z, y,", "log-probs of weights 0.*where 1 are served"),
        ("weights are lost by a restart", "def restart(self, call):\n        return call()",
         "def restart(self, call):\n        self.served = 1; return call()", "during restart.*off"),
        ("a pause draws anew", "def pause(self, call):\n        return call()",
         "def pause(self, call):\n        return self.text(self.prompts[0], self.seeds[0] + 1, 0.8, 5)",
         "during pause.*off"),
        ("a part of something else", "{{k: v[:7]", "{{k: v[1:8]", "during abort.*off its beginning"),
    ],
    "ppo": [
        ("a sum", "losses.mean()", "losses.sum()", "B .* times the formula|mean.* is sum"),
        ("another factor", "losses.mean()", "losses.mean() * {f}", "{f} times the formula"),
        ("turned over", "return losses", "return -losses", "the opposite sign"),
        ("advantages negated", "-a * r, -a *", "a * r, a *", "advantages has the opposite sign"),
        ("old minus new", "log_prob - old", "old - log_prob", "log_prob and old are swapped"),
        ("without clipping", "np.clip(r, 1 - clip, 1 + clip)", "r", "clip has no limit"),
        ("clipped below alone", "1 + clip)", "1e9)", r"1 \+ clip is left out of minimum"),
        ("clipped above alone", "1 - clip,", "-1e9,", "1 - clip is left out of maximum|1 is left out of 1 - clip"),
        ("twice the clip", "1 - clip, 1 + clip", "1 - 2 * clip, 1 + 2 * clip", "clip is twice itself"),
        ("weights one off", " * weights", " * np.roll(weights, 1)", "weights is behind by one place"),
        ("advantages one off",
         "np.clip(advantages,", "np.clip(np.roll(advantages, -1),", "advantages is ahead by one place"),
        ("without weights", " * weights", "", "weights has no effect"),
        ("no limit of advantages",
         "np.clip(advantages, -adv_clip_max, adv_clip_max)", "advantages", "adv_clip_max has no limit"),
        ("old is what is now", "log_prob - old", "log_prob - log_prob", "(old|log_prob) stands for"),
        ("the least", "np.maximum", "np.minimum", "maximum.* is minimum"),
    ],
    "sde": [
        ("a sum", "log_prob.mean()", "log_prob.sum()", "reduce.*sum, as was found"),
        ("another factor", "log_prob.mean()", "(log_prob.mean() * {f})", "{f} times the formula"),
        ("another constant", "log_prob.mean()", "(log_prob.mean() + {f})", r"the formula \+{f}"),
        ("turned over", "return log_prob", "return -log_prob", "the opposite sign"),
        ("no constant", " - np.log(2 * np.pi) / 2", "", r"ln\(2 pi\)/2 is left out of"),
        ("no ln n", " - np.log(n)", "", r"log\(noise_std\) is left out of"),
        ("twice the exponent", "(2 * n**2)", "n**2", r"2 is left out of 2 \* noise_std"),
        ("a step late", "sigmas[step], sigmas[step + 1]", "sigmas[step + 1], sigmas[step + 2]",
         "step is one more|sigmas is ahead by one place"),
        ("the coefficient in place of the deviation", "g * np.sqrt(-dt)", "g", r"sqrt\(-dt\) is left out of"),
        ("v negated", "* dt) + v", "* dt) - v", "v has the opposite sign"),
        ("x negated", "mean = x *", "mean = -x *", "x has the opposite sign"),
        ("the state before it", "(next - mean)", "(x - mean)", "(next|x) stands for (x|next)"),
        ("twice the level", "g = noise_level", "g = 2 * noise_level", "noise_level is twice itself"),
        ("the mean without noise",
         "mean = x * (1 + g**2 / (2 * sigma) * dt) + v * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt",
         "mean = x + v * dt", "drift.* is 0"),
        ("the coefficient in the logarithm", "np.log(n)", "np.log(g)", r"std_dev_t stands for noise_std in log"),
    ],
}  # fmt: skip
"""Of each subject its faults: a name, what is written in place of what, and what certify says."""


TOGETHER = {
    frozenset(("x negated", "v negated")): "next has the opposite sign",
    frozenset(("temperature inverted", "temperature twice in the log-prob")): "temperature is 1",
    frozenset(("no seed decides", "an update has no effect")): "ids are drawn by weights 0, where 1 are served",
    frozenset(("advantages negated", "turned over")): "the opposite sign; advantages has the opposite sign",
    frozenset(("advantages negated", "the least")): "the opposite sign",
    frozenset(("advantages negated", "turned over", "old is what is now")): "stands for",
    frozenset(("no limit of advantages", "turned over", "old is what is now")): "advantages stands for surrogate",
    frozenset(("no limit of advantages", "without weights", "old is what is now")): "advantages stands for surrogate",
    frozenset(("clipped below alone", "clipped above alone")): "clip has no limit",
    frozenset(("turned over", "the least")): "advantages has the opposite sign",
    frozenset(("without clipping", "advantages negated")): "the opposite sign",
}
"""Faults that together are something else, which must be said of them: their numbers are those of it."""
HIDES = {
    "old is what is now": {"without clipping", "clipped below alone", "clipped above alone", "twice the clip"},
    "without clipping": {"twice the clip", "clipped below alone", "clipped above alone"},
    "noise that no seed decides": {"a draw is thrown away"},
    "log-probs one step late": {"noise that is longer", "a draw is thrown away", "steps of the next sigma"},
    "the coefficient in place of the deviation": {"the coefficient in the logarithm"},
}
"""Faults behind which others change no number that could be looked at."""


def plant(subject, numbers, rng):
    """The source of a subject with some of its faults, and of each its name and what certify must say. None: they are
    edits of the same place, or one hides another."""
    source, faults = SUBJECTS[subject], []
    for number in numbers:
        name, old, new, says = FAULTS[subject][number]
        drawn = {"f": rng.choice((1.23, 1.57, 0.71, 2.26)), "k": rng.choice((2, 5))}
        if "{k}" in new and "seed" in new:
            drawn["k"] = rng.choice((1, 2, 3))
        new = re.sub(r"\{([fk])\}", lambda m: str(drawn[m[1]]), new)
        old, new = (s.replace("{{", "{").replace("}}", "}") for s in (old, new))
        if old not in source:
            return None
        source = source.replace(old, new, 1)
        faults.append((name, re.sub(r"\{([fk])\}", lambda m: re.escape(str(drawn[m[1]])), says)))
    names = {name for name, _ in faults}
    if any(names & HIDES.get(name, set()) for name in names):
        return None
    for several, says in TOGETHER.items():
        faults = [(n, f"{s}|{says}" if n in several <= names else s) for n, s in faults]
    return source, faults


def draws(subject, count, rng):
    """Faults that may be planted at once, drawn until they can be."""
    while True:
        if made := plant(subject, rng.sample(range(len(FAULTS[subject])), count), rng):
            return made


def judged(subject, source=""):
    """What certify says of a subject, or of another source of it."""
    rng, of = np.random.default_rng(5), {}
    exec(PAINTS, {"np": np}, of)
    of |= {"np": np, "PAINTS_NETWORK": of["Paints"].network}
    of["TABLES"] = [rng.standard_normal((128, 128)) for _ in range(3)]
    exec(source or SUBJECTS[subject], of)
    if subject in ("Paints", "Writes"):
        return list(engine.judge(of[subject](), subject))
    title = {"ppo": "losses/ppo", "sde": "transitions/sde"}[subject]
    return trainer.judge(of[subject], suite.load()[title])


def named(subject, source, faults):
    """The faults that certify does not name, with what it must say, and what it says beside agreement."""
    found = [f"{f.aspect} {f.state} {f.says}" for f in judged(subject, source) if f.state in ("differs", "unexplained")]
    return [(name, says) for name, says in faults if not any(re.search(says, f) for f in found)], found


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("seed", help="what decides the draw; 21-40: each of these; all: each fault once")
    options.add_argument("count", nargs="?", type=int, default=3, help="how many faults of each subject")
    options.add_argument("--together", action="store_true", help="all of a subject at once")
    options.add_argument("--subject", action="append", choices=FAULTS, help="of which subjects; default of all")
    o = options.parse_args()
    failed, (first, _, last) = 0, o.seed.partition("-")
    for seed, subject in itertools.product(range(int(first), int(last) + 1) if last else [first], o.subject or FAULTS):
        rng, every = random.Random(f"{seed}{subject}"), range(len(FAULTS[subject]))
        if o.together:
            planted = [draws(subject, o.count, rng)]
        else:
            planted = [plant(subject, [n], rng) for n in (every if seed == "all" else rng.sample(every, o.count))]
        for source, faults in planted:
            missed, found = named(subject, source, faults)
            failed += bool(missed)
            print(f"{'NOT NAMED' if missed else 'named'}: {seed} {subject}: {', '.join(name for name, _ in faults)}")
            print("".join(f"    must say {says!r} of: {name}\n" for name, says in missed), end="")
            print("".join(f"    {f}\n" for f in found[: 20 if missed else 3]), end="", flush=True)
    print(f"{failed} not named")
    sys.exit(failed > 0)
