"""What numbers are, where they are not what the formula gives.

Alternatives are derived from the inputs of a formula alone, everywhere or in one of the places where it uses them: an
array negated, shifted, swapped with another of its shape or replaced by it, left out, complemented, without gradient;
an index one off; a setting without effect, without limit, squared or halved; another choice. What is measured may also
be a multiple of the formula, or off by a constant: a factor or a constant that differs between cases is named by the
sizes and settings that it follows. The simplest that gives every number of every case is told, and all that are as
simple.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from .suite import Floats, Set, Values

Changed = Callable[[Values, Values], Values]
"""Gives inputs in place of others; the second argument has those without a gradient."""
Of = Callable[[Values, Changed], Floats]
"""What is compared, for inputs that are changed: the formula, or its gradient."""
_NO_LIMIT = 1e9
_HALF_LN_2_PI = 0.5 * math.log(2 * math.pi)


@dataclasses.dataclass(frozen=True)
class Change:
    """One input taken otherwise: words say how, of gives the inputs; extreme: the formula loses what it is about."""

    words: str
    of: Changed
    extreme: bool = False

    def __add__(self, other: Change) -> Change:
        return Change(f"{self.words}; {other.words}", lambda i, anchor: other.of(self.of(i, anchor), anchor))


AS_IT_IS = Change("", lambda i, anchor: i)
"""The inputs as they are."""


def near(got: Floats, want: Floats, tolerance: float) -> bool:
    """Whether two arrays have the same numbers of elements, and are as near as a tolerance allows."""
    return got.size == want.size and bool(difference(got, want) <= tolerance)


def difference(got: Floats, want: Floats) -> float:
    """The largest difference, as a share of the largest expected magnitude or of 1; infinite if it is no number."""
    if got.size != want.size:
        return math.inf
    with np.errstate(invalid="ignore"):
        off = float(np.abs(got.ravel() - want.ravel()).max(initial=0)) / max(1.0, float(np.abs(want).max(initial=0)))
    return off if off == off else math.inf


def explain(
    s: Set, inputs: Sequence[Values], measured: Sequence[Floats], tolerance: float, of: Of, pairs: bool = True,
    exact: float = -1,
) -> list[tuple[str, Change]]:
    """The simplest explanations of what was measured for each of the inputs; none: nothing gives these numbers. exact:
    the formula itself is one, within this tolerance."""
    base = _all(of, inputs, AS_IT_IS)
    assert base is not None
    if exact >= 0 and all(near(m, b, max(exact, tolerance)) for m, b in zip(measured, base)):
        return [("", AS_IT_IS)]
    for n, c in ((n, c) for n, said in s.inputs.items() for c in said.get("choices", ())):
        chosen = Change(f"{n} is {c}", lambda i, anchor, n=n, c=c: i | {n: c})  # type: ignore[misc]
        if any(i[n] != c for i in inputs) and _first(of, inputs, chosen, measured, tolerance):
            return [(chosen.words, chosen)]
    names = [quantities(s, i) for i in inputs]
    if words := _relation(measured, base, names, tolerance, True) or _shifted(measured, base, names, tolerance):
        return [(words.removesuffix("; "), AS_IT_IS)]
    singles: list[tuple[Change, list[Floats]]] = []
    for change in changes(s, inputs):
        found = _all(of, inputs, change)
        if found is not None and any(difference(f, b) > tolerance for f, b in zip(found, base)):
            singles.append((change, found))
    for fits in (_equal, _relation, _shifted):
        out = [
            (f"{words}{c.words}", c) for c, f in singles
            if not (c.extreme and fits is not _equal) and (words := fits(measured, f, names, tolerance)) is not None
        ]
        if out:
            return out
    plain = [c for c, _ in singles if not any(w in c.words for w in ("place", "stands for", "swapped"))]
    for a, b in itertools.combinations(plain, 2) if pairs else ():
        if _first(of, inputs, a + b, measured, tolerance):
            return [((a + b).words, a + b)]
    return []


def _all(of: Of, inputs: Iterable[Values], change: Change) -> list[Floats] | None:
    try:
        with np.errstate(all="ignore"):
            return [of(i, change.of) for i in inputs]
    except (ValueError, IndexError, ZeroDivisionError, OverflowError):
        return None  # the formula refuses such inputs


def _first(of: Of, inputs: Sequence[Values], change: Change, measured: Sequence[Floats], tolerance: float) -> bool:
    """Whether a change gives what was measured, case by case until one differs."""
    return all((f := _all(of, [i], change)) is not None and near(m, f[0], tolerance) for i, m in zip(inputs, measured))


def changes(s: Set, cases: Sequence[Values]) -> Iterator[Change]:
    """The ways in which one input may be taken otherwise."""
    arrays = {n: said["shape"] for n, (of, said) in s.uses.items() if said.get("shape", "").startswith("[") and of}
    bases = {n: of for n, (of, _) in s.uses.items()}

    def read(i: Values, name: str) -> Any:
        return i[name] if name in i else i[bases[name]] if bases[name] else 1.0

    def put(name: str, value: Callable[..., object]) -> Changed:
        return lambda i, anchor: i | {name: value(read(i, name), anchor)}

    for name, (of, said) in s.uses.items():
        shape, is_count = said.get("shape", ""), said.get("shape") in ("count", "index")
        choices = said.get("choices", [])
        for choice in choices if name not in s.inputs else ():
            yield Change(f"{name} is {choice}", put(name, lambda x, _, c=choice: c))
        if len(choices) > 1 and of:
            words = f"{name} is another: of {', '.join(choices)} the next"
            yield Change(words, put(name, lambda x, _, c=choices: c[(c.index(x) + 1) % len(c)]))
        if "neutral" in said:
            words = f"{name} has no effect, as if it were {said['neutral']:g}"
            yield Change(words, put(name, lambda x, _, to=said["neutral"]: np.zeros_like(x) + to))
        if shape.startswith("index of") or is_count:
            of_what = shape.removeprefix("index of ")
            most = 1 << 30 if is_count else len(cases[0][of_what]) - (2 if of_what == "sigmas" else 1)
            for by in (-1, 1):
                words = f"{name} is one {'less' if by < 0 else 'more'}"
                yield Change(words, put(name, lambda x, _, by=by, most=most: min(max(int(x) + by, 0), most)))
        if shape.startswith("["):
            yield Change(f"{name} has the opposite sign", put(name, lambda x, _: -1 * x))
        if shape == "[]":
            for words, f in _OTHERWISE.items():
                yield Change(f"{name} {words}", put(name, lambda x, _, f=f: f(float(x))), "limit" in words)
        elif shape.startswith("["):
            if of:
                yield Change(f"{name} has no gradient", put(name, lambda x, anchor, of=of: anchor[of]))
            for by in (-1, 1):
                words = f"{name} is {'behind' if by > 0 else 'ahead'} by one place"
                yield Change(words, put(name, lambda x, _, by=by: np.roll(x, by, axis=-1)))
                yield Change(f"{words}, its end repeated", put(name, lambda x, _, by=by: np.take(
                    x, np.arange(x.shape[-1]) - by, axis=-1, mode="clip")))  # fmt: skip
            if shape.startswith("[G,"):
                yield Change(f"all groups of {name} are one", put(name, lambda x, _: x.reshape(1, -1)))
            if all(np.isin(c[of], (0, 1)).all() for c in cases):
                yield Change(f"{name} is complemented", put(name, lambda x, _: 1 - x))
    for a, b in itertools.permutations(arrays, 2):
        if arrays[a] == arrays[b] and bases[a] != bases[b]:
            if a < b:
                yield Change(f"{a} and {b} are swapped", lambda i, _, a=a, b=b: i | {a: read(i, b), b: read(i, a)})  # type: ignore[misc]
            yield Change(f"{b} stands for {a}", put(a, lambda x, anchor, b=b: read(anchor, b)))


_OTHERWISE: dict[str, Callable[[float], float]] = {
    "is 0": lambda x: 0.0, "has no limit": lambda x: _NO_LIMIT, "is twice itself": lambda x: 2 * x,
    "is half itself": lambda x: x / 2, "is squared": lambda x: x * x, "is its root": math.sqrt,
    "is inverted": lambda x: 1 / x, "is one more": lambda x: x + 1, "is one less": lambda x: x - 1,
}  # fmt: skip


def quantities(s: Set, inputs: Values) -> dict[str, float]:
    """The sizes and settings of a case that a factor or a constant may follow, by name."""
    out = s.scale_of(inputs)
    for name, said in s.inputs.items():
        shape, x = said.get("shape", ""), inputs[name]
        if shape.startswith("[") and shape != "[]":
            out |= {axis: float(n) for axis, n in zip(shape[1:-1].split(","), np.shape(x)) if axis.isalpha()}
            if np.isin(x, (0, 1)).all():
                out[f"the sum of {name}"] = float(np.sum(x))
        elif shape == "[]" and x > 0:
            out[name] = float(x)
        elif shape.startswith("index of sigmas"):
            sigma, then = (float(v) for v in inputs["sigmas"][int(x) : int(x) + 2])
            out |= {"sigma": sigma, "sigma_next": then, "the step of sigma": sigma - then}
    for axis in [a for a in out if len(a) == 1 and out[a] > 1]:
        out[f"({axis} - 1) / {axis}"] = (out[axis] - 1) / out[axis]
    return {k: v for k, v in out.items() if v > 0 and v != 1}


def _equal(measured: Sequence[Floats], found: Sequence[Floats], _: object, tolerance: float) -> str | None:
    return "" if all(near(m, f, tolerance) for m, f in zip(measured, found)) else None


def _shifted(measured: Sequence[Floats], found: Sequence[Floats], _: object, tolerance: float) -> str | None:
    """Whether what was measured is one place off, in words."""
    for words, these, those in (("behind", slice(1, None), slice(-1)), ("ahead", slice(-1), slice(1, None))):
        off = [m.size != x.size or not x.ndim or m.size < 3 or not near(m[..., these], x[..., those], tolerance)
               for m, x in zip(measured, found)]  # fmt: skip
        if not any(off):
            return f"what is given is {words} by one place; "
    return None


def _relation(
    measured: Sequence[Floats], found: Sequence[Floats], names: Sequence[dict[str, float]], tolerance: float,
    free: bool = False,
) -> str | None:
    """The multiple or the offset of what was found that was measured, in words; "" if they are equal."""
    if any(m.size != f.size for m, f in zip(measured, found)):
        return None
    if _equal(measured, found, names, tolerance) is not None:
        return ""
    if all(np.abs(m).max() <= tolerance for m in measured) or not all(np.isfinite(f).all() for f in found):
        return None  # of 0 everything is a multiple
    pairs = [(m.ravel(), f.ravel()) for m, f in zip(measured, found)]
    factors = [float(m @ f / (f @ f)) if (f @ f) else 0.0 for m, f in pairs]
    if all(near(m, k * f, tolerance) for k, (m, f) in zip(factors, pairs)) and all(factors):
        certain = [k for k, (_, f) in zip(factors, pairs) if np.abs(f).max() > 1e3 * tolerance]
        names_of = [n for n, (_, f) in zip(names, pairs) if np.abs(f).max() > 1e3 * tolerance]
        if said := _named(certain, names_of, max(1e-6, 100 * tolerance), free and all(m.size > 2 for m, _ in pairs)):
            return said if said.endswith("sign; ") else f"{said} times the formula; "
    offsets = [float((m - f).mean()) for m, f in pairs]
    if all(near(m - d, f, tolerance) for d, (m, f) in zip(offsets, pairs)):
        return _offset(offsets, names, 10 * tolerance * max(1, *map(abs, offsets)))
    return None


def _named(factors: Sequence[float], names: Sequence[dict[str, float]], tolerance: float, free: bool) -> str | None:
    """A factor of each case in words; None: it follows nothing, unless it is free to."""
    if not factors:
        return None
    sign, sizes = "minus " if factors[0] < 0 else "", [abs(k) for k in factors]
    constant = all(abs(k - sizes[0]) <= tolerance * max(sizes[0], 1e-12) for k in sizes)
    if not all((k < 0) == (factors[0] < 0) and 1e-6 < abs(k) < 1e6 for k in factors):
        return None
    if constant and abs(sizes[0] - 1) <= tolerance:
        return "the opposite sign; " if sign else None
    if constant:
        return f"{sign}{sizes[0]:.6g}"
    labels, counts, values = _products(tuple(tuple(sorted(n.items())) for n in names))
    hits = np.flatnonzero((np.abs(values - sizes) <= tolerance * np.maximum(values, 1e-12)).all(axis=1))
    if hits.size:
        found = [labels[k] for k in hits if counts[k] == counts[hits[0]]]
        return f"{sign}{' or '.join(found[:3])} ({', '.join(f'{k:.4g}' for k in factors[:4])})"
    return f"a factor of each case ({', '.join(f'{k:.4g}' for k in factors[:4])})" if free else None


@functools.lru_cache(8)
def _products(cases: tuple[tuple[tuple[str, float], ...], ...]) -> tuple[list[str], list[int], Floats]:
    """What a factor may be: products of powers of at most two quantities that all cases have, with their words, how
    many they are of, and their values [products, cases]."""
    names, powers = [dict(c) for c in cases], {"": 1.0, "^2": 2.0, "^-1": -1.0, "^-2": -2.0, "^1/2": 0.5, "^-1/2": -0.5}
    labels, counts, values = list[str](), list[int](), list[list[float]]()
    for count in (1, 2):
        for of in itertools.combinations(sorted(set.intersection(*map(set, names))), count):
            for exponents in itertools.product(powers, repeat=count):
                for c in (1.0, 2.0, 0.5) if count == 1 else (1.0,):
                    labels.append(("" if c == 1 else f"{c:g} ") + " ".join(f"{k}{e}" for k, e in zip(of, exponents)))
                    counts.append(count)
                    values.append([c * math.prod(n[k] ** powers[e] for k, e in zip(of, exponents)) for n in names])
    return labels, counts, np.asarray(values).reshape(-1, len(names))


def _offset(offsets: Sequence[float], names: Sequence[dict[str, float]], tolerance: float) -> str | None:
    """What is added to each case, in words; None: it follows nothing."""
    common = sorted(set.intersection(*(set(n) for n in names)))
    multiples = ["", *(k for k in common if len(k) == 1)]
    for times, (a, k), b in itertools.product(multiples, [(0.0, "")] + [
        (a, k) for k in common for a in (1.0, -1.0, 0.5, -0.5)
    ], (0.0, 1.0, -1.0)):
        value = [
            (n[times] if times else 1.0) * ((a * math.log(n[k]) if k else 0.0) + b * _HALF_LN_2_PI) for n in names
        ]
        if (a or b) and all(abs(o - v) <= tolerance for o, v in zip(offsets, value)):
            parts = ([f"{a:+g} ln {k}"] if k else []) + ([f"{b:+g} ln(2 pi)/2"] if b else [])
            return f"the formula {f'+ {times} times ' if times else ''}{' '.join(parts)}; "
    if len(offsets) > 1 and all(abs(o - offsets[0]) <= tolerance for o in offsets):
        return f"the formula {offsets[0]:+.6g}; "
    return None

