"""What numbers are, where they are not what a formula gives.

Alternatives are derived from the inputs of a formula alone, everywhere or in one of the places where it uses them: an
array negated, shifted, swapped with another of its shape or replaced by it, left out, complemented, without gradient;
an index one off; a setting without effect, without limit, squared or halved; another choice; a multiple of itself, or
one number in all cases. What is measured may also be a multiple of what these give, off by a constant, or one place
off: a factor or a constant that differs between cases is named by the sizes and settings that it follows. All of these
are fitted together, at most three changes at once, and the fewest that give every number of every case are told, and
all that are as few.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .suite import Floats, Set, Values

Changed = Callable[[Values, Values], Values]
"""Gives inputs in place of others; the second argument has those without a gradient."""
Of = Callable[[Set, Values, Changed], Floats]
"""What is compared, for a set and inputs that are changed: the formula, or its gradient."""
_Names = Callable[[], list[dict[str, float]]]
"""Gives the quantities of each case."""
_Terms = tuple[tuple[str, str], ...]
"""A product of powers of quantities."""
_Follows = tuple[float, _Terms]
"""A number times such a product."""
_Line = tuple[str, float, Sequence[float]]
"""How numbers are related: in words, of how many parts, and the factors of the cases."""
_NO_LIMIT = 1e9


@dataclasses.dataclass(frozen=True)
class Change:
    """One input taken otherwise: words say how, of gives the inputs."""

    words: str
    of: Changed

    def __add__(self, other: Change) -> Change:
        words = "; ".join(w for w in (self.words, other.words) if w)
        return Change(words, lambda i, anchor: other.of(self.of(i, anchor), anchor))


AS_IT_IS = Change("", lambda i, anchor: i)
"""The inputs as they are."""


@dataclasses.dataclass(frozen=True)
class Way:
    """What may have been measured: a set of vectors at inputs, with choices, and how many things are odd in it."""

    set: Set
    inputs: Sequence[Values]
    choices: Values = dataclasses.field(default_factory=dict)
    odd: int = 0


@dataclasses.dataclass(frozen=True)
class Fit:
    """An explanation: words; how many parts it has; its change, in which way; the factors of the cases."""

    words: str
    parts: float
    way: Way
    change: Change = AS_IT_IS
    factors: Sequence[float] = ()

    def holds(self, of: Of, measured: Sequence[Floats], tolerance: float) -> bool:
        """Whether it gives other numbers of the same cases, such as gradients."""
        found = _all(of, self.way, self.change)
        return found is not None and all(near(m, k * f, tolerance) for m, k, f in zip(measured, self.factors, found))


def ways(sets: Sequence[Set], free: Sequence[str], inputs: Sequence[Values], said: str | None = None) -> list[Way]:
    """The formulas that numbers may be of, with each value of the choices that are free. The first value is that of the
    source; others are odd, and a formula that is not the one that is said."""
    out = []
    for s in sets:
        of = [n for n in free if n in s.inputs]
        for chosen in itertools.product(*(s.inputs[n]["choices"] for n in of)):
            choice = dict(zip(of, chosen))
            odd = sum(c != s.inputs[n]["choices"][0] for n, c in choice.items()) + (said not in (None, s.name))
            out.append(Way(s, [{n: v for n, v in i.items() if n in s.inputs} | choice for i in inputs], choice, odd))
    return sorted(out, key=lambda w: w.odd)


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


def explain(ways: Sequence[Way], measured: Sequence[Floats], tolerance: float, of: Of, most: int = 3) -> list[Fit]:
    """The simplest explanations of what was measured, all as simple; none: nothing gives these numbers.

    Of a few changes at once every multiple, offset and shift is looked for; of most, equal numbers and the opposite
    sign alone. Multiples of one input are looked for where more than one change may be."""
    found, singles = list[Fit](), functools.cache(lambda k: _singles(ways[k], of, tolerance))
    names = functools.cache(lambda k: [quantities(ways[k].set, i) for i in ways[k].inputs])

    def least() -> float:
        return min((f.parts for f in found), default=math.inf)

    def tried(count: int) -> Iterator[tuple[int, Change]]:
        for k, way in enumerate(ways):
            if not count or count + way.odd <= 3:
                yield from ((k, c) for c in (_together(singles(k), count) if count else [AS_IT_IS]))

    for count in range(most + 1):
        for k, change in tried(count):
            found += _fits(ways[k], change, count, measured, tolerance, of, functools.partial(names, k))
        for k, change in tried(count - 1) if most > 1 and count in (1, 2) and least() > count else ():
            found += _multiples(ways[k], change, count - 1, measured, tolerance, of, functools.partial(names, k))
        if least() <= count + (count > 0):
            break
    return sorted((f for f in found if f.parts == least()), key=lambda f: -f.way.odd)


def _fits(
    way: Way, change: Change, count: int, measured: Sequence[Floats], tolerance: float, of: Of,
    names: _Names,
) -> Iterator[Fit]:
    """How what a change gives is related to what was measured."""
    if count > 2:
        first = _all(of, dataclasses.replace(way, inputs=way.inputs[:1]), change)
        if first is None or not any(near(measured[0], k * first[0], tolerance) for k in (1, -1)):
            return
    values = _all(of, way, change)
    if values is None:
        return
    for words, parts, factors in _relations(measured, values, names, tolerance, count < 3):
        yield Fit((Change(words, AS_IT_IS.of) + change).words, count + parts + way.odd, way, change, factors)


def _multiples(
    way: Way, change: Change, count: int, measured: Sequence[Floats], tolerance: float, of: Of, names: _Names
) -> Iterator[Fit]:
    """One input as a multiple of itself, which may follow sizes and settings, or as one number in all cases."""
    base = _all(of, way, change)
    for name, (bases, said) in way.set.uses.items():
        if base is None or not said.get("shape", "").startswith("["):
            continue
        read, is_number, same = _reader(way.set, name), said["shape"] == "[]", ((name, "^-1"),)

        def times(c: float, by: _Terms = (), name: str = name, read: Callable[[Values], Any] = read) -> Change:
            said = " ".join([f"{c:.4g}"] * (c != 1) + [_named(by)] * bool(by)) + " times itself"
            words = f"{name} is {f'{c:.4g}' if by == ((name, '^-1'),) else said}"
            return Change(words, lambda i, _: i | {
                name: c * read(i) * (_product(by, quantities(way.set, i)) if by else 1)})  # fmt: skip

        half = _all(of, way, change + times(0.5))
        if half is None or any(not h.size == b.size == m.size for h, b, m in zip(half, base, measured)):
            continue
        moves = [difference(h, b) if np.isfinite(h).all() else 0.0 for h, b in zip(half, base)]
        most = [k for k in sorted(range(len(base)), key=moves.__getitem__)[-6:] if moves[k] > 1e3 * tolerance]
        found = _linear([(measured[k].ravel(), half[k].ravel(), base[k].ravel()) for k in most], tolerance,
                        [names()[k] for k in most])  # fmt: skip
        if not found and is_number and not count:
            few = dataclasses.replace(way, inputs=[way.inputs[k] for k in most])
            for scale, by in [(1.0, ()), (max(map(read, few.inputs), default=0.0), same)][: 1 + bool(bases)]:
                near_to = [measured[k] for k in most]
                found += _searched(lambda c: _all(of, few, times(scale * c, by)), near_to, tolerance, scale, by)
            found += [(1.0, ((q, e),)) for q in sorted(set().union(*names())) for e in _POWERS] if not bases else []
        for c, by in found:
            one, length = times(c, by) + change, min(_length(c, max(1e-5, tolerance)), 1.5) if abs(c) != 1 else 0
            parts = count + way.odd + 0.25 + length + (c < 0) + len(by) * (by != same)
            fit = Fit(one.words, parts, way, change + times(c, by), [1.0] * len(base))
            if fit.holds(of, measured, tolerance):
                yield fit


def _linear(
    cases: Sequence[tuple[Floats, Floats, Floats]], tolerance: float, names: Sequence[dict[str, float]]
) -> list[_Follows]:
    """The multiples by which numbers follow that are linear in it; empty: they are not."""
    factors = []
    for measured, half, base in cases:
        d = 2 * (base - half)
        factors.append(1 + float((measured - base) @ d / (d @ d)))
        if not near(measured, base + (factors[-1] - 1) * d, tolerance) or not 1e-3 < abs(factors[-1]) < 1e3:
            return []
    own = max(1e-6, 100 * tolerance)
    found = _follow(np.array(factors), names, own)[:1] if factors else []
    return [(round(c) if abs(c - round(c)) < own else c, by) for c, by in found if not by or len(factors) > 2]


def _searched(
    at: Callable[[float], list[Floats] | None], measured: Sequence[Floats], tolerance: float, scale: float, by: _Terms
) -> list[_Follows]:
    """The multiple of a scale, between a twentieth and 20, that comes nearest, if it is near enough."""
    def off(log: float) -> float:
        found = at(math.exp(log))
        return max(map(difference, measured, found)) if found else math.inf

    for log in sorted(np.linspace(-3, 3, 49), key=off)[:3]:
        low, high = log - 0.125, log + 0.125
        for _ in range(60):
            third = (high - low) / 3
            low, high = (low, high - third) if off(low + third) < off(high - third) else (low + third, high)
        if off(low) <= tolerance:
            return [(scale * math.exp(low), by)]
    return []


def _singles(way: Way, of: Of, tolerance: float) -> list[Change]:
    """The changes that change any number."""
    base, out = _all(of, way, AS_IT_IS), []
    assert base is not None
    for change in changes(way.set, way.inputs, way.choices):
        found = _all(of, way, change)
        if found is not None and any(difference(f, b) > tolerance for f, b in zip(found, base)):
            out.append(change)
    return out


def _together(singles: Sequence[Change], count: int) -> Iterator[Change]:
    for several in itertools.combinations(singles, count):
        yield functools.reduce(Change.__add__, several)


def _all(of: Of, way: Way, change: Change) -> list[Floats] | None:
    try:
        with np.errstate(all="ignore"):
            return [of(way.set, i, change.of) for i in way.inputs]
    except (ValueError, IndexError, ZeroDivisionError, OverflowError):
        return None  # the formula refuses such inputs


def _reader(s: Set, name: str) -> Callable[[Values], Any]:
    """What stands in a place of a formula, by its inputs."""
    base = s.uses[name][0]
    return lambda i: i[name] if name in i else i[base] if base else 1.0


def changes(s: Set, cases: Sequence[Values], chosen: Iterable[str] = ()) -> Iterator[Change]:
    """The ways in which one input may be taken otherwise. chosen: choices that are tried as ways of their own."""
    arrays = {n: said["shape"] for n, (of, said) in s.uses.items() if said.get("shape", "").startswith("[") and of}
    bases = {n: of for n, (of, _) in s.uses.items()}

    def read(i: Values, name: str) -> Any:
        return i[name] if name in i else i[bases[name]] if bases[name] else 1.0

    def put(name: str, value: Callable[..., object]) -> Changed:
        return lambda i, anchor: i | {name: value(read(i, name), anchor)}

    for name, (of, said) in sorted(s.uses.items(), key=lambda use: len(use[1][1].get("shape", ""))):  # settings first
        shape, is_count = said.get("shape", ""), said.get("shape") in ("count", "index")
        choices = said.get("choices", []) if name not in chosen else []
        for choice in choices:
            yield Change(f"{name} is {choice}", put(name, lambda x, _, c=choice: c))
        if of and len({i[name] for i in cases} if choices else ()) > 1:
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
            for words, f in _OTHERWISE.items() if of else itertools.islice(_OTHERWISE.items(), 3):
                yield Change(f"{name} {words}", put(name, lambda x, _, f=f: f(float(x))))
        elif shape.startswith("["):
            yield Change(f"{name} is 0", put(name, lambda x, _: 0 * x))
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
                both = put(a, lambda x, anchor, b=b: read(anchor, b)), put(b, lambda x, anchor, a=a: read(anchor, a))
                yield Change(f"{a} and {b} are swapped", lambda i, _, f=both: f[1](f[0](i, i), i))  # type: ignore[misc]
            yield Change(f"{b} stands for {a}", put(a, lambda x, anchor, b=b: read(anchor, b)))


_OTHERWISE: dict[str, Callable[[float], float]] = {
    "is 0": lambda x: 0.0, "is twice itself": lambda x: 2 * x, "is half itself": lambda x: x / 2, "is 1": lambda x: 1.0,
    "has no limit": lambda x: _NO_LIMIT, "is squared": lambda x: x * x, "is its root": math.sqrt,
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


def _relations(
    measured: Sequence[Floats], found: Sequence[Floats], names: _Names, tolerance: float,
    every: bool,
) -> Iterator[tuple[str, float, Sequence[float]]]:
    """How what was measured follows from what was found: in words, of how many parts, and the factor of each case.
    every: not only as it is and negated."""
    ones = [1.0] * len(found)
    if any(m.size != f.size for m, f in zip(measured, found)):
        return
    if all(near(m, f, tolerance) for m, f in zip(measured, found)):
        yield "", 0, ones
        return
    if all(np.abs(m).max(initial=0) <= tolerance for m in measured) or not all(np.isfinite(f).all() for f in found):
        return  # of 0 everything is a multiple
    if all(near(m, -f, tolerance) for m, f in zip(measured, found)):
        yield "the opposite sign", 1, [-1.0] * len(found)
        return
    if not every:
        return
    sized = all(f.size > 2 for f in found)
    line = (_of_rows if sized else _of_numbers)(measured, found, names, tolerance)
    if line is not None:
        yield line
    for words, these, those in (("behind", slice(1, None), slice(-1)), ("ahead", slice(-1), slice(1, None))):
        rolled = sized and all(m.shape == f.shape and m.shape[-1] > 2 for m, f in zip(measured, found))
        if rolled and line is None:
            pairs = [(m[..., these], f[..., those]) for m, f in zip(measured, found)]
            if all(near(m, f, tolerance) for m, f in pairs):
                yield f"what is given is {words} by one place", 1, ones
            elif (line := _of_rows([m for m, _ in pairs], [f for _, f in pairs], names, tolerance)) is not None:
                yield f"what is given is {words} by one place; {line[0]}", 1 + line[1], line[2]


def _of_rows(
    measured: Sequence[Floats], found: Sequence[Floats], names: _Names, tolerance: float
) -> _Line | None:
    """A line through the numbers of each case, and what its factors and its offsets follow."""
    lines = []
    for m, f in zip(measured, found):
        centred, own = f.ravel() - f.mean(), max(tolerance, 1e-14)
        k = float(m.ravel() @ f.ravel() / (f.ravel() @ f.ravel())) if f.any() else 0.0
        d = 0.0
        if not near(m, k * f, own) and (spread := float(centred @ centred)) > 1e3 * own:
            k = float(centred @ m.ravel()) / spread
            d = float(m.mean() - k * f.mean())
        if not near(m, k * f + d, own):
            return None
        lines.append((k, d, float(np.abs(f).max())))
    if not all(k for k, *_ in lines):
        return None
    certain = [k for k, (*_, most) in enumerate(lines) if most > 1e3 * tolerance]
    factors, offsets = np.array([lines[k][0] for k in certain]), np.array([d for _, d, _ in lines])
    if not certain or not (np.sign(factors) == np.sign(factors[0])).all():
        return None
    of = [names()[k] for k in certain]
    follows = _follow(factors, of, max(1e-6, 100 * tolerance))
    if not follows:
        words = "a factor of each case (" + ", ".join(f"{x:.4g}" for x in factors[:4]) + ") times the formula"
        return (words, 3, [k for k, *_ in lines]) if not offsets.any() else None
    if np.abs(offsets - offsets[0]).max() > 10 * tolerance * max(1, abs(float(offsets[0]))):
        return None
    return _told(follows, float(offsets[0]), of, [k for k, *_ in lines], max(1e-6, tolerance))


def _of_numbers(
    measured: Sequence[Floats], found: Sequence[Floats], names: _Names, tolerance: float
) -> _Line | None:
    """A line through the numbers of all cases, times what its factors may follow."""
    m, f = (np.concatenate([x.ravel() for x in of]) for of in (measured, found))
    if len(m) != len(measured) or len(m) < 2 or (np.abs(f) > 1e3 * tolerance).sum() < 2:
        return None
    made, values = _products(_frozen(names()))
    at = values * f
    allowed = tolerance * max(1.0, float(np.abs(m).max()))
    k = (at @ m) / (at * at).sum(axis=1)
    fits, d = np.flatnonzero((np.abs(k[:, None] * at - m) <= allowed).all(axis=1)), np.zeros(len(k))
    if not fits.size and len(m) > 3:
        off = at - at.mean(axis=1, keepdims=True)
        spread = (off * off).sum(axis=1)
        k = np.where(spread > 1e4 * tolerance, off @ m / np.maximum(spread, 1e-30), 0)
        d = m.mean() - k * at.mean(axis=1)
        fits = np.flatnonzero((k != 0) & (np.abs(k[:, None] * at + d[:, None] - m) <= allowed).all(axis=1))
    if not fits.size:
        return None
    follows, first = [(float(k[j]), made[j]) for j in fits], fits[0]
    return _told(follows, float(d[first]), names(), list(k[first] * values[first]), max(1e-6, tolerance))


def _told(
    follows: Sequence[_Follows], d: float, names: Sequence[dict[str, float]], factors: Sequence[float],
    tolerance: float,
) -> _Line | None:
    """A line in words: its sign, a number, the sizes that its factors follow, and its offset."""
    k, by = follows[0]
    if not 1e-6 < abs(k) < 1e6:
        return None
    is_sized, is_one = bool(by), abs(abs(k) - 1) <= tolerance
    words, parts = ["the opposite sign"] if k < 0 else [], float(k < 0) + is_sized
    if not is_one:
        words.append(f"{abs(k):.6g} times the formula")
        parts += _length(k, tolerance)
    if is_sized:
        said = " or ".join(_named(other) for _, other in follows[:3] if len(other) == len(by))
        words.append(f"{said} ({', '.join(f'{_product(by, n):.4g}' for n in names[:4])}) times the formula")
    if abs(d) > tolerance:
        inside = _length(d / k, tolerance) < _length(d, tolerance) and not is_sized
        words.append(f"the formula {d / k:+.6g}" + ", before that" if inside else f"the formula {d:+.6g}")
        parts += _length(d / k if inside else d, tolerance)
    return "; ".join(words), parts, factors


def _length(x: float, tolerance: float) -> float:
    """How many parts a number counts for: one that has three digits is written, and another may be made of several."""
    return 1.0 if abs(x - float(f"{x:.3g}")) <= tolerance * abs(x) else 2.5


_POWERS = {"": 1.0, "^2": 2.0, "^-1": -1.0, "^-2": -2.0, "^1/2": 0.5, "^-1/2": -0.5}


def _named(terms: _Terms) -> str:
    return " ".join(q + power for q, power in terms)


def _product(terms: _Terms, of: Mapping[str, float]) -> float:
    return math.prod(of.get(q, 1.0) ** _POWERS[power] for q, power in terms)


def _follow(factors: Floats, names: Sequence[dict[str, float]], tolerance: float) -> list[_Follows]:
    """What the factors of cases may follow, the simplest first."""
    made, values = _products(_frozen(names))
    ratios = factors / values
    fits = np.flatnonzero((np.abs(ratios - ratios[:, :1]) <= tolerance * np.abs(ratios[:, :1])).all(axis=1))
    return [(float(ratios[j, 0]), made[j]) for j in fits]


_Frozen = tuple[tuple[tuple[str, float], ...], ...]


def _frozen(names: Sequence[dict[str, float]]) -> _Frozen:
    return tuple(tuple(sorted(n.items())) for n in names)


@functools.lru_cache(64)
def _products(cases: _Frozen) -> tuple[list[_Terms], Floats]:
    """What a factor may follow: 1, and products of powers of at most two quantities that all cases have and that differ
    between them, with their values [products, cases]."""
    names, made, values = [dict(c) for c in cases], list[_Terms]([()]), [[1.0] * len(cases)]
    for count in (1, 2):
        for of in itertools.combinations(sorted(set.intersection(*map(set, names))), count):
            for powers in itertools.product(_POWERS, repeat=count):
                terms = tuple(zip(of, powers))
                value = [_product(terms, n) for n in names]
                if max(value) > min(value) * (1 + 1e-9):
                    made.append(terms)
                    values.append(value)
    return made, np.asarray(values).reshape(-1, len(names))
