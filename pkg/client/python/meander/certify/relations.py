"""How numbers follow from others: a factor, an offset, one place off; and what factors that differ follow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from .suite import Floats

Terms = tuple[tuple[str, str], ...]
"""A product of powers of quantities."""
Follows = tuple[float, Terms]
"""A number times such a product."""
Line = tuple[str, float, Sequence[float]]
"""How numbers are related: in words, of how many parts, and the factors of the cases."""


def near(got: Floats, want: Floats, tolerance: float) -> bool:
    """Whether two arrays have the same numbers of elements, and are as near as a tolerance allows."""
    return got.size == want.size and bool(difference(got, want) <= tolerance)


def difference(got: Floats, want: Floats) -> float:
    """The largest difference, as a share of the largest expected magnitude or of 1; infinite if one alone is finite."""
    if got.size != want.size:
        return math.inf
    if got.size == 1:
        a, b = got.item(), want.item()
        off = 0.0 if a == b else abs(a - b) / max(1.0, abs(b) if abs(b) < math.inf else 0)
    else:
        g, w = got.ravel(), want.ravel()
        with np.errstate(invalid="ignore"):
            off = float(np.where(g == w, 0, np.abs(g - w)).max(initial=0))
            off /= float(np.abs(w[np.isfinite(w)]).max(initial=1))
    return off if off == off else math.inf


_POWERS = {"": 1.0, "^2": 2.0, "^-1": -1.0, "^-2": -2.0, "^1/2": 0.5, "^-1/2": -0.5}


class Products:
    """What a factor may follow: 1, and products of powers of at most two quantities that all cases have."""

    def __init__(self, cases: Sequence[Mapping[str, float]]):
        names = sorted(set.intersection(*(set(c) for c in cases)))
        logs = np.log([[c[n] for n in names] for c in cases]).reshape(len(cases), -1)
        self.made, rows = list[Terms]([()]), [np.zeros(len(cases))]
        for count in (1, 2):
            for of in itertools.combinations(range(len(names)), count):
                for powers in itertools.product(_POWERS.items(), repeat=count):
                    self.made.append(tuple((names[n], sign) for n, (sign, _) in zip(of, powers)))
                    rows.append(np.sum([e * logs[:, n] for n, (_, e) in zip(of, powers)], axis=0))
        self.values = np.exp(rows)

    def row(self, terms: Terms) -> Floats:
        """The values of a product."""
        return np.asarray(self.values[self.made.index(terms)])

    def of(self, cases: Sequence[int] | None = None) -> tuple[list[Terms], Floats]:
        """The products that differ between some cases, and 1, with their values [products, cases]."""
        values = self.values if cases is None else self.values[:, cases]
        kept = np.flatnonzero(values.max(axis=1) > values.min(axis=1) * (1 + 1e-9))
        kept = np.append(0, kept[kept > 0])
        return [self.made[j] for j in kept], values[kept]

    def follow(self, factors: Floats, cases: Sequence[int], tolerance: float) -> list[Follows]:
        """What the factors of cases may follow, the simplest first."""
        made, values = self.of(cases)
        ratios = factors / values
        fits = np.flatnonzero((np.abs(ratios - ratios[:, :1]) <= tolerance * np.abs(ratios[:, :1])).all(axis=1))
        return [(float(ratios[j, 0]), made[j]) for j in fits]


Sizes = Callable[[], Products]
"""Gives what factors may follow."""


def relations(
    measured: Sequence[Floats], found: Sequence[Floats], sizes: Sizes, tolerance: float,
    every: bool,
) -> Iterator[Line]:
    """How what was measured follows from what was found: in words, of how many parts, and the factor of each case.
    every: not only as it is and negated."""
    ones = [1.0] * len(found)
    if any(m.size != f.size for m, f in zip(measured, found)):
        return
    if all(near(m, f, tolerance) for m, f in zip(measured, found)):
        yield "", 0, ones
        return
    if all(np.abs(m).max(initial=0) <= tolerance for m in measured):
        return  # of 0 everything is a multiple
    if all(near(m, -f, tolerance) for m, f in zip(measured, found)):
        yield "the opposite sign", 1, [-1.0] * len(found)
        return
    if not every:
        return
    sized, finite = all(f.size > 2 for f in found), all(np.isfinite(f).all() for f in [*found, *measured])
    line = (_of_rows if sized else _of_numbers)(measured, found, sizes, tolerance) if finite else None
    if line is not None:
        yield line
    for words, these, those in (("behind", slice(1, None), slice(-1)), ("ahead", slice(-1), slice(1, None))):
        rolled = sized and all(m.shape == f.shape and m.shape[-1] > 2 for m, f in zip(measured, found))
        if rolled and line is None:
            pairs = [(m[..., these], f[..., those]) for m, f in zip(measured, found)]
            if all(near(m, f, tolerance) for m, f in pairs):
                yield f"what is given is {words} by one place", 1, ones
            elif finite and (line := _of_rows(
                [m for m, _ in pairs], [f for _, f in pairs], sizes, tolerance
            )) is not None:  # fmt: skip
                yield f"what is given is {words} by one place; {line[0]}", 1 + line[1], line[2]


def _of_rows(
    measured: Sequence[Floats], found: Sequence[Floats], sizes: Sizes, tolerance: float
) -> Line | None:
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
    follows = sizes().follow(factors, certain, max(1e-6, 100 * tolerance))
    if not follows:
        words = "a factor of each case (" + ", ".join(f"{x:.4g}" for x in factors[:4]) + ") times the formula"
        return (words, 3, [k for k, *_ in lines]) if not offsets.any() else None
    if np.abs(offsets - offsets[0]).max() > 10 * tolerance * max(1, abs(float(offsets[0]))):
        return None
    return _told(follows, float(offsets[0]), sizes(), certain, [k for k, *_ in lines], max(1e-6, tolerance))


def _of_numbers(
    measured: Sequence[Floats], found: Sequence[Floats], sizes: Sizes, tolerance: float
) -> Line | None:
    """A line through the numbers of all cases, times what its factors may follow."""
    m, f = (np.concatenate([x.ravel() for x in of]) for of in (measured, found))
    if len(m) != len(measured) or len(m) < 2 or (np.abs(f) > 1e3 * tolerance).sum() < 2:
        return None
    made, values = sizes().of()
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
    return _told(follows, float(d[first]), sizes(), range(len(m)), list(k[first] * values[first]), max(1e-6, tolerance))


def searched(
    at: Callable[[float], list[Floats] | None], measured: Sequence[Floats], tolerance: float, scale: float, by: Terms
) -> list[Follows]:
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


def _told(
    follows: Sequence[Follows], d: float, sizes: Products, cases: Sequence[int], factors: Sequence[float],
    tolerance: float,
) -> Line | None:
    """A line in words: its sign, a number, the sizes that its factors follow, and its offset."""
    k, by = follows[0]
    if not 1e-6 < abs(k) < 1e6:
        return None
    is_sized, is_one = bool(by), abs(abs(k) - 1) <= tolerance
    words, parts = ["the opposite sign"] if k < 0 else [], float(k < 0) + is_sized
    if not is_one:
        words.append(f"{abs(k):.6g} times the formula")
        parts += length(k, tolerance)
    if is_sized:
        said = " or ".join(written_terms(other) for _, other in follows[:3] if len(other) == len(by))
        words.append(f"{said} ({', '.join(f'{x:.4g}' for x in sizes.row(by)[cases[:4]])}) times the formula")
    if abs(d) > tolerance:
        inside = length(d / k, tolerance) < length(d, tolerance) and not is_sized
        words.append(f"the formula {d / k:+.6g}" + ", before that" if inside else f"the formula {d:+.6g}")
        parts += length(d / k if inside else d, tolerance)
    return "; ".join(words), parts, factors


def length(x: float, tolerance: float) -> float:
    """How many parts a number counts for: one that has three digits is written, and another may be made of several."""
    return 1.0 if abs(x - float(f"{x:.3g}")) <= tolerance * abs(x) else 2.5




def written_terms(terms: Terms) -> str:
    """A product in words."""
    return " ".join(q + power for q, power in terms)


def product(terms: Terms, of: Mapping[str, float]) -> float:
    """The value of a product, by quantities."""
    return math.prod(of.get(q, 1.0) ** _POWERS[power] for q, power in terms)
