"""Measures what draws samples: seeds, noise, schedule, steps, log-probs, guidance and weights; what a batch, a pause,
an abort and a restart do to them.

An engine is an object with some of these; what it lacks is not judged. A row is a dict, what it tells of a sample:

    says = {}                               what it claims, by the names of settings: measurements are held against it
    images(prompts, seeds)                  rows: image, latents [T+1, ...], sigmas [T+1], timesteps [T]; velocities
                                            [T, ...], guided of positive and negative at scale; log_probs [T], NaN of
                                            steps that have none; seeds by name, where they are others
    texts(prompts, seeds, temperature, top_k)      rows: prompt, ids [n], log_probs [n]
    template(prompt)                        the bytes, text or ids that the row's prompt must be
    expected(row, weights)                  velocities [T, ...], or logits [n, V] of the tokens, by another program
    update(weights)                         serves weights 1 to says["weights"], default 1; 0: those at the start
    pause(call), abort(call), restart(call)        does so while call() works, and returns what it gives
    lacks = ()                              methods that it has and cannot use
"""

from __future__ import annotations

import difflib
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..maths import noise, transition
from . import fit, relations, suite, trainer
from .formula import Values
from .report import Finding
from .suite import Floats, Set

Row = dict[str, Any]
"""What an engine tells of a sample, by the names above."""
PROMPTS = ('a blue sign that says "4071"', 'a red sign that says "FOX"', "347+58=?", "612-274=?")
"""What is asked for, where an engine has no prompts of its own."""
SETTINGS = {"temperature": 0.8, "top_k": 5}
"""How texts are drawn."""
SAYINGS = (
    "transition", "noise_level", "log_prob_kind", "reduce", "guidance", "shift", "noise", "dtype", "tolerance",
    "weights",
)
"""What an engine may claim."""
_FIELDS = ("ids", "image", "latents", "velocities", "log_probs")
_TIMESTEPS = Set(
    "schedules", "timesteps", "1000 sigma", "flow matching", "timesteps", {"sigmas": {"shape": "[S]"}},
    dict.fromkeys(("float64", "float32", "bfloat16"), 1e-6), [], lambda sigmas: 1000 * sigmas[:-1],
)  # fmt: skip


def _texts(logits: Any, tokens: Any, reduce: str, **how: Any) -> Any:
    each = suite.token_log_probs(logits, tokens, **how)
    return each if reduce == "each" else np.sum(each) if reduce == "sum" else np.mean(each)


def differences(a: Row, b: Row) -> dict[str, float]:
    """How far two rows are from each other, in each field that both have."""
    both = [k for k in _FIELDS if k in a and k in b]
    return {k: relations.difference(*(np.nan_to_num(_flat(r[k])) for r in (a, b))) for k in both}


def _flat(x: Any) -> Floats:
    return np.asarray(x, np.float64).ravel()


def _draws(draw: Callable[[int], Any], n: int, count: int) -> dict[Any, Floats]:
    return {k: _flat(draw(n)) for k in range(count)}


def _philox(seed: int, n: int, count: int) -> dict[Any, Floats]:
    return {"x_T": _flat(noise.initial(seed, n))} | {f"step {k}": _flat(noise.step(seed, k, n)) for k in range(count)}


def _torch(seed: int, n: int, count: int, first: str = "float32") -> dict[Any, Floats]:
    import torch

    g = torch.Generator().manual_seed(seed)
    kinds = iter([getattr(torch, first)] + [torch.float32] * count)
    return _draws(lambda n: torch.randn(n, generator=g, dtype=next(kinds)).float(), n, count)


_GENERATORS: dict[str, Callable[[int, int, int], dict[Any, Floats]]] = {
    "philox": _philox, "numpy's PCG64": lambda seed, n, c: _draws(np.random.default_rng(seed).standard_normal, n, c),
    "numpy's MT19937": lambda seed, n, c: _draws(np.random.RandomState(seed % 2**32).standard_normal, n, c),
    **({
        "torch's CPU generator": _torch,
        "torch's CPU generator, x_T in bfloat16": lambda seed, n, c: _torch(seed, n, c, "bfloat16"),
    } if importlib.util.find_spec("torch") else {}),
}  # fmt: skip


def _found(z: Floats, stream: dict[Any, Floats], turn: int, place: str) -> str:
    """Which draw of a stream some noise is, in whatever order and times what; empty: none."""
    z = np.sort(z)
    for key, drawn in stream.items():
        for sign in (1, -1):
            d = np.sort(sign * drawn)
            factor = float(z @ d / (d @ d))
            if (np.abs(z - factor * d) <= 0.008 * (np.abs(z) + 0.25)).all() and factor > 0:
                when = ", in turn" if key in (turn, place) else f", draw {key} in the turn of {turn}"
                return when + (f", times {sign * factor:.4g}" if abs(sign * factor - 1) > 1e-3 else "")
    return ""


def _schedules(sigmas: Floats) -> Iterator[tuple[float, float, str, int]]:
    """How far sigmas are from schedules, of the shift that fits best: off, shift, grid and steps."""
    t, static = len(sigmas) - 1, suite.FORMULAS["schedules/static"]
    for n, at, grid, ends in itertools.product((t, t + 1), (0, 1), ("linspace", "scheduler"), (False, True)):
        if at + t > n + (n == t) or at and n == t:
            continue
        last = t + (n == t)

        def off(shift: float) -> float:
            made = static(n, shift, grid)
            if ends:
                made = np.append(1 - (1 - made[:-1]) * (1 - sigmas[t - 1]) / (1 - made[t - 1]), 0)
            return float(np.abs(made[at : at + last] - sigmas[:last]).max())

        low, high = 0.02, 50.0
        for _ in range(9):
            shifts = np.geomspace(low, high, 40)
            k = int(np.argmin([off(s) for s in shifts]))
            low, high = shifts[max(k - 1, 0)], shifts[min(k + 1, 39)]
        end = f" drawn to end at {sigmas[t - 1]:.4g}" if ends else ""
        yield off(shifts[k]), float(shifts[k]), grid + end + (", from its second" if at else ""), n


def judge(engine: Any, name: str) -> Iterator[Finding]:
    """What is measured of an engine, one finding after the other. ValueError: it is none."""
    if not (kinds := [kind for kind in _BOTH if getattr(engine, kind, None)]):
        raise ValueError(f"{name}: has neither images(prompts, seeds) nor texts(prompts, seeds, temperature, top_k)")
    for kind in kinds:
        yield from _Measured(engine, kind, name).findings()


class _Measured:
    """What an engine gives of one kind: rows of each prompt alone, and the same in one batch."""

    def __init__(self, engine: Any, kind: str, name: str):
        self.engine, self.kind, self.name = engine, kind, name
        self.says: dict[str, Any] = {"tolerance": 1e-5, "dtype": "float32", **getattr(engine, "says", {})}
        if unknown := [n for n in self.says if n not in SAYINGS]:
            raise ValueError(f"{name}: says {unknown[0]}; must be of {', '.join(SAYINGS)}")
        if self.says["dtype"] not in _TIMESTEPS.tolerance:
            raise ValueError(f"{name}: says dtype {self.says['dtype']}; must be of {', '.join(_TIMESTEPS.tolerance)}")
        self.prompts = list(getattr(engine, "prompts", PROMPTS))
        self.seeds = list(getattr(engine, "seeds", range(11, 11 + len(self.prompts))))
        self.rows = [self.ask(k) for k in range(len(self.prompts))]
        if nothing := [p for p, row in zip(self.prompts, self.rows) if not row]:
            raise ValueError(f"{name}: gave no sample of {nothing[0]!r}; its own log says why")
        self.batch, self.sets = self.all(self.seeds, self.prompts), suite.load()
        self.formula: tuple[Set, Values] | None = None
        self.explained = ""
        self.fixed: dict[str, int] = {}

    def all(self, seeds: Sequence[int], prompts: Sequence[str]) -> list[Row]:
        how = SETTINGS if self.kind == "texts" else {}
        rows = getattr(self.engine, self.kind)(list(prompts), list(seeds), **how)
        return [how | {k: v for k, v in row.items() if v is not None} for row in rows]

    def has(self, method: str) -> bool:
        return hasattr(self.engine, method) and method not in getattr(self.engine, "lacks", ())

    def ask(self, k: int) -> Row:
        return self.all([self.seeds[k]], [self.prompts[k]])[0]

    def finding(self, aspect: str, state: str, says: str, off: float | None = None, of: float | None = None) -> Finding:
        return Finding(self.name, self.kind, aspect, state, says, off, of)

    def findings(self) -> Iterator[Finding]:
        """What there is to say, in order."""
        for aspect, kinds, needs, measure in _MEASURES:
            lacks = [n for n in needs if n not in self.rows[0] and not self.has(n)]
            if self.kind in kinds and lacks:
                yield self.finding(aspect, "not judged", f"it does not give {', '.join(lacks)}")
            elif self.kind in kinds:
                try:
                    yield from measure(self)
                except (NotImplementedError, OSError) as why:
                    yield self.finding(aspect, "not judged", str(why))

    def alike(self, aspect: str, pairs: Sequence[tuple[Row, Row]], also: str = "") -> Finding:
        """Whether rows are the same in every number."""
        offs: dict[str, float] = {}
        for a, b in pairs:
            offs |= {k: max(off, offs.get(k, 0)) for k, off in differences(a, b).items()}
        worst, allowed = max(offs.values(), default=math.inf), self.says["tolerance"]
        state = "agrees" if worst == 0 else "measured" if worst <= allowed else "differs"
        moved = ", ".join(f"{k} {off:.1e} off" for k, off in offs.items() if off)
        return self.finding(aspect, state, (moved or f"every bit of {', '.join(offs)}") + also, worst, allowed)

    def seed(self) -> Iterator[Finding]:
        yield self.alike("a seed twice", [(self.rows[0], self.ask(0))])
        others = self.all([s + 100 for s in self.seeds], self.prompts)
        moved = [max(differences(a, b).values()) for a, b in zip(self.batch, others)]
        if self.kind == "images" and "latents" in self.rows[0] and not any(moved):
            x = _flat(self.rows[0]["latents"][0])
            of = ((s, g) for s in range(256) for g in _GENERATORS.values())
            self.fixed = next(({f"seed {s}": s} for s, g in of if _found(x, g(s, x.size, 2), 0, "x_T")), {})
        says = f"other samples for {sum(map(bool, moved))} of {len(moved)} prompts"
        yield self.finding("another seed", "agrees" if any(moved) else "differs", says)

    def batched(self) -> Iterator[Finding]:
        places = dict[tuple[int, int], list[str]]()
        for k, j in itertools.permutations(range(len(self.rows)), 2):
            moves = differences(self.rows[k], self.rows[j])
            same = differences(self.rows[j], self.batch[k])
            places[k, j] = [f for f, off in same.items() if not off and moves[f]]
        if any(differences(self.rows[0], self.ask(0)).values()):
            places = self.likeness()  # short rows may be the same by chance
        also = "".join(f"; row {k} is row {j} alone, by its {', '.join(of)}" for (k, j), of in places.items() if of)
        yield self.alike(f"alone, 1 of {len(self.rows)}", list(zip(self.rows, self.batch)), also)

    def likeness(self) -> dict[tuple[int, int], list[str]]:
        """Which row of a batch is most like which row alone, where a seed does not decide: by prompts, or by means."""
        if self.kind == "texts":
            prompts = [[r["prompt"] for r in of] for of in (self.batch, self.rows)]
            pairs = itertools.permutations(range(len(self.rows)), 2)
            return {(k, j): ["prompt"] for k, j in pairs if prompts[0][k] == prompts[1][j] != prompts[1][k]}
        every = range(len(self.prompts))
        alone = np.mean([[_flat(self.ask(k)["image"]) for k in every] for _ in range(16)], 0)
        batch = np.mean([[_flat(r["image"]) for r in self.all(self.seeds, self.prompts)] for _ in range(16)], 0)
        nearest = ((k, min(every, key=lambda j: relations.difference(batch[k], alone[j]))) for k in every)
        return {(k, j): ["mean image"] for k, j in nearest if j != k}

    def template(self) -> Iterator[Finding]:
        got, want = self.rows[0]["prompt"], self.engine.template(self.prompts[0])
        parts = difflib.SequenceMatcher(None, want, got, False).get_opcodes()
        moved = [f"{got[c:d]!r} in place of {want[a:b]!r} at {a}" for tag, a, b, c, d in parts if tag != "equal"]
        unit = "characters" if isinstance(got, str) else "bytes" if isinstance(got, bytes) else "ids"
        says = "; ".join(moved) or f"the same {len(want)} {unit}"
        yield self.finding("prompt", "differs" if moved else "agrees", says)

    def noise(self) -> Iterator[Finding]:
        """Its moments, whether any two are alike, and where it is from."""
        rows = [(f"row {k}", s, r) for k, (s, r) in enumerate(zip(self.seeds, self.rows))]
        rows += [(f"{name} of {len(rows)}", s, r) for (name, s, _), r in zip(rows, self.batch)]
        drawn = [(name, seed, row, self.drawn(row)) for name, seed, row in rows]
        alone = [(f"{name} {place}", z) for name, _, _, places in drawn[: len(self.rows)] for place, z in places]
        for what in ("x_T", "step"):
            if not (of := [z for name, z in alone if what in name]):
                continue
            z = np.concatenate(of)
            bound, variance = 5 * math.sqrt(2 / z.size), float((z**2).mean())
            says = f"variance {variance:.4f}, mean {z.mean():+.4f} of {z.size} numbers"
            state = "agrees" if abs(variance - 1) <= bound else "differs"
            yield self.finding(f"noise of {what}", state, says, abs(variance - 1), bound)
        unit, bound = [(name, z / np.linalg.norm(z)) for name, z in alone], 6 / math.sqrt(alone[0][1].size)
        most, pair = max((abs(float(a @ b)), f"{m} and {n}") for (m, a), (n, b) in itertools.combinations(unit, 2))
        state = "agrees" if most <= bound else "differs"
        yield self.finding("noise twice", state, f"{pair} correlate most", most, bound)
        by = _grouped((name, self.source(seed, row, places)) for name, seed, row, places in drawn)
        want, says = self.says.get("noise"), "; ".join(s + (f" ({', '.join(w)})" if by[1:] else "") for s, w in by)
        state = "measured" if not want else "agrees" if says == want else "differs"
        yield self.finding("noise is of", state, says + (f"; it says {want}" if state == "differs" else ""))

    def drawn(self, row: Row) -> list[tuple[str, Floats]]:
        """The first state, and the noise of each stochastic step, by its place."""
        out = [("x_T", _flat(row["latents"][0]))]
        known = "velocities" in row and "noise_level" in row | self.says
        for i in self.stochastic(row) if known else ():
            k = transition.kernel(self.says.get("transition", "sde"), self.level(row), row["sigmas"], i)
            off = _flat(row["latents"][i + 1]) - k.mean(_flat(row["latents"][i]), _flat(row["velocities"][i]))
            out += [(f"step {i}", off / k.noise_std)] if k.noise_std else []
        return out

    def source(self, seed: int, row: Row, places: Sequence[tuple[str, Floats]]) -> str:
        """Which generator drew the noise, by which seed and in which turn."""
        seeds = {"its seed": seed, **row.get("seeds", {}), **self.fixed}
        seeds |= {f"{n} {d:+d}": s + d for n, s in list(seeds.items()) for d in (1, -1, 2, -2, 3, -3) if s + d >= 0}
        ways, out = list(itertools.product(seeds.items(), _GENERATORS.items())), []
        for turn, (place, z) in enumerate(places):
            tried = (f"{label} of {of}{found}" for (of, s), (label, stream) in ways
                     if (found := _found(z, stream(s, z.size, len(places) + 2), turn, place)))  # fmt: skip
            out.append((place, next(tried, "no generator known here")))
        by = _grouped(out)
        return ", ".join(s + (f" in {', '.join(p)}" if by[1:] else "") for s, p in by)

    def stochastic(self, row: Row) -> list[int]:
        return [i for i, p in enumerate(row.get("log_probs", ())) if np.isfinite(p)]

    def level(self, row: Row) -> float:
        if (level := (self.says | row).get("noise_level")) is None:
            raise NotImplementedError("it does not say its noise_level")
        return float(level)

    def schedule(self) -> Iterator[Finding]:
        sigmas, said = np.asarray(self.rows[0]["sigmas"], np.float64), self.says.get("shift")
        tried = list(_schedules(sigmas))
        off, shift, grid, n = next((s for s in tried if s[0] <= 3e-7), min(tried))
        says = f"shift {shift:.5g} of {n} steps, {grid}, to {-math.log2(max(off, 2**-53)):.0f} bits"
        says = says if off <= 1e-3 else f"no shifted schedule; the nearest has {says}"
        right = off <= 3e-7 and n == len(sigmas) - 1 and abs(shift - (said or shift)) <= 1e-3 * shift
        state = "agrees" if right and said else "differs" if said or off <= 3e-7 and not right else "measured"
        yield self.finding("sigmas", state, says + (f"; it says {said:g}" if said and not right else ""), off, 3e-7)

    def timesteps(self) -> Iterator[Finding]:
        inputs = [{"sigmas": np.asarray(r["sigmas"], np.float64)} for r in self.rows]
        yield self.fitted("timesteps", [_TIMESTEPS], inputs, [_flat(r["timesteps"]) for r in self.rows])[0]

    def inputs(self, row: Row, of: Any, steps: Sequence[int]) -> list[Values]:
        """What a row is computed from: of some steps, with its velocities; or of its logits."""
        if self.kind == "images":
            sigmas = np.asarray(row["sigmas"], np.float64)
            return [{"x": _flat(row["latents"][i]), "v": _flat(of[i]), "next": _flat(row["latents"][i + 1]), "step": i,
                     "sigmas": sigmas, "noise_level": self.level(row) if self.stochastic(row) else 0.0}
                    for i in steps]  # fmt: skip
        how = {"top_p": 1.0, "min_p": 0.0} | {k: v for k, v in row.items() if k in _TOKENS.inputs}
        return [how | {"logits": np.asarray(of, np.float64).T, "tokens": _flat(row["ids"])}]

    def steps(self) -> Iterator[Finding]:
        """Steps without noise, which sigmas and velocities decide."""
        cases: list[Values] = []
        for r in self.rows:
            steps = [i for i in range(len(r["velocities"])) if i not in self.stochastic(r)]
            cases += self.inputs(r, r["velocities"], steps)
        if cases:
            after = [c["next"] for c in cases]
            yield self.fitted("steps without noise", [self.sets["transitions/ode"]], cases, after)[0]

    def told(self, row: Row, steps: Sequence[int]) -> list[Floats]:
        p = _flat(row["log_probs"])
        return [p[[i]] for i in steps] if self.kind == "images" else [p]

    @property
    def forms(self) -> list[Set]:
        """The formulas that log-probs may have."""
        steps = [s for s in self.sets.values() if s.kind == "transitions" and "reduce" in s.inputs]
        return steps if self.kind == "images" else [_TOKENS]

    def log_probs(self) -> Iterator[Finding]:
        of = [r["velocities"] if "velocities" in r else self.engine.expected(r, 0) for r in self.rows]
        out = list[Finding]()
        for most, by in itertools.product((1, 3), (0, -1, 1) if self.kind == "images" else (0,)):
            told, cases = list[Floats](), list[Values]()
            for r, v in zip(self.rows, of):
                steps = [i for i in self.stochastic(r) if 0 <= i + by < len(v)]
                told += self.told(r, steps)
                cases += self.inputs(r, v, [i + by for i in steps])
            found = self.fitted("log-probs", self.forms, cases, told, "transition", not by, min(most, 3 - bool(by)))
            if by and found[0].state == "agrees":
                found[0].state = "differs"
                found[0].says += f", of the step {'before' if by < 0 else 'after'}"
            out = found if found[0].state != "unexplained" or not out else out
            if out[0].state != "unexplained":
                break
        self.explained = out[0].says if out[0].state == "differs" else ""
        yield from out

    def guidance(self) -> Iterator[Finding]:
        cases, got = [], []
        for r, i in ((r, i) for r in self.rows[:2] for i in range(len(r["velocities"]))):
            sides = {n: np.asarray(r[n][i], np.float64) for n in ("positive", "negative", "velocities")}
            got.append(sides.pop("velocities"))
            cases.append(sides | {"scale": float(r["scale"]), "phi": float(r.get("phi", 0))})
        sets = [s for s in self.sets.values() if s.kind == "guidance" and ("phi" not in s.inputs or cases[0]["phi"])]
        yield from self.fitted("guidance", sets, cases, got, "guidance")

    def fitted(
        self, aspect: str, sets: Sequence[Set], cases: list[Values], measured: list[Floats], claim: str = "",
        keep: bool = False, most: int = 3,
    ) -> list[Finding]:
        """What numbers are, by the formulas of sets. claim: which of the sayings names one of these."""
        every = 1 + len(cases) * max(np.size(v) for v in cases[0].values()) // 2**16  # of the cases one
        said = self.says.get(claim) if claim else None
        free = sorted({n for s in sets for n, what in s.inputs.items() if "choices" in what and n not in self.says})
        given = {n: v for n, v in self.says.items() if any(n in s.inputs for s in sets)}
        ways = fit.ways(sets, free, [given | c for c in cases[::every]], said)
        got = [{"": m} for m in measured[::every]]
        out, way = trainer.compared(ways, got, self.says["dtype"], self.name, most=most)
        s, foreign = way.set, said not in (None, way.set.name)
        chosen = {n: v for n, v in given.items() if n in s.inputs} | way.choices
        if keep and out[0].state == "agrees":
            self.formula = s, chosen
        kinds = "".join(f", {n} {v}" for n, v in chosen.items() if "choices" in s.inputs[n] and len(s.inputs) > 3)
        out[0].says += f", of {s.title}{kinds}" + (f"; it says {said}" if foreign else "") if claim else ""
        out[0].state = "differs" if foreign and out[0].state == "agrees" else out[0].state
        for f in out:
            f.about, f.aspect = self.kind, aspect if f is out[0] else f"{aspect}: {f.aspect}"
        return out

    def drawing(self) -> Iterator[Finding]:
        """The temperatures by which tokens may have been drawn, within three deviations, and their ranks. Texts are
        drawn until they tell temperatures apart."""
        rows, near, grid = list(self.batch), np.array([0.1, 10]), np.geomspace(0.1, 10, 400)
        asked, k = float(rows[0]["temperature"]), int(rows[0]["top_k"])
        for begin, end in ((200, 500), (500, 1800)):
            for by in range(begin, end, 100):
                rows += self.all([s + by for s in self.seeds], self.prompts)
            z = np.concatenate([np.asarray(self.engine.expected(r, 0), np.float64) for r in rows])
            token = np.concatenate([_flat(r["ids"]).astype(int) for r in rows])[:, None]
            rank = (z > np.take_along_axis(z, token, 1)).sum(1)
            z = z - np.take_along_axis(z, token, 1)
            likely = {}
            for kept in {k, min(k, int(rank.max()) + 1)}:
                of = np.sort(z)[rank < kept, -kept:] if kept else z
                likely[kept] = np.array([-np.log(np.exp(of / one).sum(1)).sum() for one in grid])
            kept = max(likely, key=lambda n: likely[n].max() - (n != k) * 4.5)
            near = grid[likely[kept] >= likely[kept].max() - 4.5]
            if near[-1] < 1.3 * near[0]:
                break
        right = near[0] <= asked <= near[-1] and kept == k and not (k and rank.max() >= k)
        says = f"temperature {near[0]:.2f} to {near[-1]:.2f} where {asked:g} is asked for, ranks up to"
        says += f" {rank.max() + 1} of top_k {k}" + (f", as by top_k {kept}" if kept != k else "")
        yield self.finding("drawing", "agrees" if right else "differs", f"{says}, by {len(rank)} tokens")

    def weights(self) -> Iterator[Finding]:
        """What updates change, whether the first weights come back, and which ones what it tells is of."""
        asked, rows, before = (*range(1, 1 + int(self.says.get("weights", 1))), 0), {}, self.rows[0]
        for k in asked:
            self.engine.update(k)
            rows[k] = self.ask(0)
            if k:
                moved = differences(before, rows[k])
                says = ", ".join(f"{name} moves by {by:.1e}" for name, by in moved.items()).replace("inf", "its length")
                yield self.finding(f"update {k}", "agrees" if any(moved.values()) else "differs", says)
            before = rows[k]
        yield self.alike("update 0 again", [(self.rows[0], before)])
        for k in asked if self.has("expected") else ():
            held, allowed = {j: self.held(rows[k], j) for j in sorted(asked)}, 10 * self.says["tolerance"]
            if self.kind == "texts":
                yield from self.likely(rows[k], k, sorted(asked))
            for field in held[k]:
                off, j = min((by[field], j) for j, by in held.items())
                others = ", ".join(f"{i} {by[field]:.1e}" for i, by in held.items() if i != j)
                if off == math.inf and self.explained and field == "log-probs":
                    yield self.finding(f"weights {k}", "not judged", f"{field} that differ otherwise tell no weights")
                    continue
                state = "unexplained" if off > allowed else "agrees" if j == k else "differs"
                says = f"{field} of weights {j} (off by {others})" + (f", where {k} are served" if j != k else "")
                says = "of none of these weights; nearest are " * (state == "unexplained") + says
                yield self.finding(f"weights {k}", state, says, off, allowed)

    def likely(self, row: Row, served: int, asked: Sequence[int]) -> Iterator[Finding]:
        """The weights by which the ids of a row were drawn, where they are likelier by them than by all others."""
        said = {}
        for k in asked:
            z = np.asarray(self.engine.expected(row, k), np.float64) / float(row["temperature"])
            z = z - z.max(axis=1, keepdims=True)
            said[k] = float((np.take_along_axis(z, _flat(row["ids"]).astype(int)[:, None], 1)[:, 0]
                             - np.log(np.exp(z).sum(1))).sum())  # fmt: skip
        (best, first), (_, second) = sorted(said.items(), key=lambda kv: -kv[1])[:2]
        if first - second > 4.5:
            says = f"ids are drawn by weights {best}" + (f", where {served} are served" if best != served else "")
            yield self.finding(f"weights {served}", "agrees" if best == served else "differs",
                               f"{says}: the others are e^{first - second:.0f} times less likely")  # fmt: skip

    def held(self, row: Row, weights: int) -> dict[str, float]:
        """How far a row is from what another program has of it with some weights."""
        of, out = self.engine.expected(row, weights), dict[str, float]()
        if "velocities" in row:
            out["velocities"] = relations.difference(_flat(row["velocities"]), _flat(of))
        if not (self.formula or self.explained) or "log_probs" not in row:
            return out
        told, cases = self.told(row, self.stochastic(row)), self.inputs(row, of, self.stochastic(row))
        if self.formula:
            s, given = self.formula
            out["log-probs"] = max(relations.difference(p, s.formula_of(i | given)) for p, i in zip(told, cases))
        else:
            found = self.fitted("", self.forms, cases, told, "transition", most=1)[0]
            same = found.state == "agrees" or _told(found.says) & _told(self.explained)
            out["log-probs"] = 0.0 if same else math.inf
        return out

    def interrupted(self) -> Iterator[Finding]:
        for how in ("pause", "abort", "restart"):
            if not self.has(how):
                yield self.finding(how, "not judged", f"it has no {how}")
                continue
            got, whole = getattr(self.engine, how)(lambda: self.ask(0)), self.rows[0]
            field = next(k for k in ("log_probs", "ids", "latents", "image") if k in whole)
            n = len(got[field]) if got and field in got else 0
            if got and n == len(whole[field]):
                yield self.alike(f"during {how}", [(whole, got)])
            else:
                begun = {k: whole[k][: len(got[k])] for k in ("ids", "latents", "log_probs") if got and k in got}
                off = max(differences(begun, got or {}).values(), default=0.0)
                says = f"{n} of {len(whole[field])} of its {field}" + (f", {off:.1e} off its beginning" if off else "")
                yield self.finding(f"during {how}", "differs" if off else "measured", says)
            yield self.alike(f"after {how}", [(whole, self.ask(0))])


def _told(says: str) -> set[str]:
    """The explanations that a finding has."""
    return set(says.partition(", of ")[0].split(", or "))


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Each second of the pairs, with the first ones that have it."""
    out: dict[str, list[str]] = {}
    for first, second in pairs:
        out.setdefault(second, []).append(first)
    return list(out.items())


_BOTH = ("images", "texts")
_MEASURES: tuple[tuple[str, Sequence[str], Sequence[str], Callable[[_Measured], Iterator[Finding]]], ...] = (
    ("seed", _BOTH, (), _Measured.seed), ("batch", _BOTH, (), _Measured.batched),
    ("prompt", ("texts",), ("template", "prompt"), _Measured.template),
    ("noise", ("images",), ("latents",), _Measured.noise), ("sigmas", ("images",), ("sigmas",), _Measured.schedule),
    ("timesteps", ("images",), ("timesteps", "sigmas"), _Measured.timesteps),
    ("steps", ("images",), ("latents", "velocities", "sigmas"), _Measured.steps),
    ("guidance", ("images",), ("velocities", "positive", "negative", "scale"), _Measured.guidance),
    ("log-probs", ("images",), ("log_probs", "velocities", "latents"), _Measured.log_probs),
    ("log-probs", ("texts",), ("log_probs", "expected"), _Measured.log_probs),
    ("drawing", ("texts",), ("ids", "expected"), _Measured.drawing),
    ("weights", _BOTH, ("update",), _Measured.weights), ("interruptions", _BOTH, (), _Measured.interrupted),
)
_PROCESS = suite.load()["tokens/log_prob"]
_TOKENS = Set(
    "texts", "log_prob", _PROCESS.formula, _PROCESS.source, "log_probs", {
        **{k: v for k, v in _PROCESS.inputs.items() if k not in ("logits", "token")},
        "logits": {"shape": "[V,T]"}, "tokens": {"shape": "[T]"}, "reduce": {"choices": ["each", "sum", "mean"]},
    }, _PROCESS.tolerance, [], _texts,
)  # fmt: skip
