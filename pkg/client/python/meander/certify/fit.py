"""What numbers are, where they are not what a formula gives.

What is measured may be what the changed formula gives, a multiple of it, off by a constant, or one place off: a factor
or a constant that differs between cases is named by the sizes and settings that it follows. All of these are fitted
together, at most three changes at once, and the fewest that give every number of every case are told, and all that are
as few.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .changes import AS_IT_IS, REFUSED, Change, Way, changes, gradient_changes, parts_of
from .formula import Graph, Values
from .relations import Products, Terms, difference, length, near, product, relations, searched, written_terms
from .suite import Floats, Set


@dataclasses.dataclass(frozen=True)
class Fit:
    """An explanation: words; how many parts it has; its change, in which way; the factors of the cases."""

    words: str
    parts: float
    way: Way
    change: Change = AS_IT_IS
    factors: Sequence[float] = ()

    def holds(self, by: str, measured: Sequence[Floats], tolerance: float) -> bool:
        """Whether it gives other numbers of the same cases, such as gradients."""
        found = self.way.numbers(self.change, by)
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


def explain(
    ways: Sequence[Way], measured: Sequence[Floats], tolerance: float, by: str = "", most: int = 3,
    value: Change = AS_IT_IS,
) -> list[Fit]:
    """The simplest explanations of what was measured, all as simple; none: nothing gives these numbers. by: gradients
    by that input were measured, of what value says of the values: a part of it may have none, or one where it has none.
    They are looked for along three directions, and held to all of it."""
    if not by:
        return _Search(ways, measured, tolerance).found(most)
    rng = np.random.default_rng(1)
    along = [rng.standard_normal((3, *np.shape(i[by]))) for i in ways[0].inputs]
    of = [np.array([np.vdot(d, m) for d in a]) for a, m in zip(along, measured)]
    found = _Search(ways, of, tolerance, by, along, value).found(1)
    return [f for f in found if f.holds(by, measured, tolerance)]


_MOST = {2: 400, 3: 150}
"""So many changes are tried two and three at a time, of inputs first."""


class _Search:
    """Looks for the changes that give what was measured."""

    def __init__(
        self, ways: Sequence[Way], measured: Sequence[Floats], tolerance: float, by: str = "",
        along: Sequence[Floats] | None = None, base: Change = AS_IT_IS,
    ):  # fmt: skip
        self.ways, self.measured, self.tolerance, self.by, self.along = ways, measured, tolerance, by, along
        self.changed, self.sizes, self.base = functools.cache(self._changed), functools.cache(self._sizes), base

    def numbers(self, way: Way, change: Change) -> list[Floats] | None:
        return way.numbers(change, self.by, self.along)

    def _sizes(self, k: int) -> Products:
        return Products([self.ways[k].graph(case).quantities for case in range(len(self.ways[k].inputs))])

    def found(self, most: int) -> list[Fit]:
        """Of a few changes at once every multiple, offset and shift is looked for; of most equal numbers and the
        opposite sign alone. Multiples of one part are looked for beside one change of an input."""
        out, least = list[Fit](), math.inf
        for count in range(most + 1):
            for k, way in enumerate(self.ways):
                if count and count + way.odd > min(3, least):
                    continue
                for change in self.together(k, count):
                    out += self.fits(k, change, count)
                least = min((f.parts for f in out), default=math.inf)
                for change in self.together(k, count - 1) if most > 1 and count in (1, 2) and least > count else ():
                    out += self.multiples(k, change, count - 1)
            least = min((f.parts for f in out), default=math.inf)
            if least <= count + (count > 0):
                break
        least = least if most > 1 or least <= 2 else math.nan  # one change alone explains no more
        return sorted((f for f in out if f.parts == least), key=lambda f: -f.way.odd)

    def together(self, k: int, count: int) -> Iterator[Change]:
        """All changes of so many parts that may give what was measured. Of several none gives alone what another does,
        those of inner parts have to be right for the first cases, and three are of no part in one place alone."""
        changed = self.changed(k) if count else {}
        if count < 2:
            yield from (self.base + c for c in changed or [AS_IT_IS])
            return
        way, several = self.ways[k], [c for c, new in changed.items() if new and c.inner <= 4 - count]
        several = several[: _MOST[count]]
        if count == 2:
            yield from (a + b for a, b in itertools.combinations(several, 2) if not a.inner and not b.inner)
        choices, several = [AS_IT_IS, *(c for c in several if c.choices)], [c for c in several if not c.choices]

        def more(gs: list[Graph], before: Change, bases: list[list[Any]], begin: int, left: int) -> Iterator[Change]:
            for j in range(begin, len(several)):
                change = before + several[j]
                if count == 2 and left == 1 and not change.inner:
                    continue
                try:
                    values = [g.values(change.at, base=base, new=several[j].at) for g, base in zip(gs, bases)]
                except REFUSED:
                    continue
                if left > 1:
                    yield from more(gs, change, values, j + 1, left - 1)
                elif self.may_be([np.asarray(v[g.out]) for g, v in zip(gs, values)]):
                    yield change

        with np.errstate(all="ignore"):
            for first in choices:
                gs = [way.graph(k, first) for k in range(min(len(way.inputs), 3 if count == 2 else 1))]
                several.sort(key=lambda c: min(gs[0].places(c.at), default=0))  # late parts are changed most often
                yield from more(gs, first, [g.values() for g in gs], 0, count - bool(first.choices))

    def may_be(self, found: Sequence[Floats]) -> bool:
        """Whether the first cases are what was measured or its opposite; of three cases, whether they are on a line."""
        if len(found) < 3:
            return near(abs(self.measured[0]), abs(found[0]), self.tolerance)
        f, m = (np.concatenate([x.ravel() for x in of]) for of in (found, self.measured[: len(found)]))
        if f.size != m.size:
            return False
        off = f - f.mean()
        line = m.mean() + off * (off @ m / max(off @ off, 1e-30))
        return near(m, line, 10 * self.tolerance)

    def _changed(self, k: int) -> dict[Change, bool]:
        """The changes that change any number, and whether none before gives the same; of inner parts none that gives
        what one of inputs does."""
        base, out = self.numbers(self.ways[k], self.base), dict[Change, bool]()
        assert base is not None
        seen = {_key([-b for b in base]): 0}
        of = gradient_changes(self.ways[k]) if self.by else changes(self.ways[k])
        for change in sorted(of, key=lambda c: c.inner):
            found = self.numbers(self.ways[k], self.base + change)
            if found is None or not any(difference(f, b) > self.tolerance for f, b in zip(found, base)):
                continue
            key = _key(found)
            if not change.inner or seen.get(key, 1):
                out[change] = not change.inner or key not in seen
            seen.setdefault(key, change.inner)
        return out

    def fits(self, k: int, change: Change, count: int) -> Iterator[Fit]:
        """How what a change gives is related to what was measured."""
        way, every = self.ways[k], count < 3
        if (values := self.numbers(way, change)) is None:
            return
        sizes = functools.partial(self.sizes, k)
        for words, parts, factors in relations(self.measured, values, sizes, self.tolerance, every):
            yield Fit((Change(words) + change).words, count + parts + way.odd, way, change, factors)

    def multiples(self, k: int, change: Change, count: int) -> Iterator[Fit]:
        """One part as a multiple of itself, which may follow sizes and settings, or as one number in all cases."""
        way, own = self.ways[k], max(1e-6, 100 * self.tolerance)
        base = self.numbers(way, change)
        if base is None or change.inner:
            return
        for name, node in parts_of(way).items():
            said, same = way.set.inputs.get(name, {}), ((name, "^-1"),)
            if np.asarray(node.value).dtype.kind != "f" or said.get("shape", "[")[:1] != "[":
                continue
            if (solved := self.factors(way, change, base, name, 1 if count else 6)) is None:
                continue
            factors, most = solved
            usable = [j for j in most if 1e-3 < abs(factors[j]) < 1e3]
            found = self.sizes(k).follow(factors[most], most, own)[:1] if most and usable == most else []
            found = [(c, by) for c, by in found if not by or len(most) > 2]
            found = found or [(float(factors[j]), ()) for j in usable if not count]  # a curve may have it in some alone
            found = list({f"{c:.6g}": (round(c) if abs(c - round(c)) < own else c, by) for c, by in found}.values())
            if said.get("shape") == "[]" and not count and not any(by for _, by in found):
                few = dataclasses.replace(way, inputs=[way.inputs[j] for j in most], graphs={})
                near_to = [self.measured[j] for j in most]
                for scale, by in [(1.0, ()), (max((i[name] for i in few.inputs), default=0.0), same)]:
                    def at(c: float, scale: float = scale, by: Terms = by, few: Way = few, name: str = name) -> Any:
                        return self.numbers(few, _times(name, scale * c, by))

                    found += searched(at, near_to, self.tolerance, scale, by)
            for c, by in found:
                long = min(length(c, max(1e-5, self.tolerance)), 1.5) if abs(c) != 1 else 0
                parts = count + way.odd + 0.25 + long + (c < 0) + len(by) * (by != same)
                says = " ".join([f"{c:.4g}"] * (c != 1) + [written_terms(by)] * bool(by)) + " times itself"
                one = Change(f"{node.label} is {f'{c:.4g}' if by == same else says}") + _times(name, c, by)
                values = self.numbers(way, change + one)
                if values and all(near(m, v, self.tolerance) for m, v in zip(self.measured, values)):
                    yield Fit((one + change).words, parts, way, change + one, [1.0] * len(base))

    def factors(
        self, way: Way, change: Change, base: Sequence[Floats], name: str, steps: int
    ) -> tuple[Floats, list[int]] | None:
        """What multiple of a part each case has, by Newton's method, and the cases that it moves most. None: none."""
        c, h, most = np.ones(len(base)), np.full(len(base), -0.5), list[int]()
        f: Sequence[Floats] | None = base
        for step in range(steps):
            moved = self.numbers(way, change + Change(at={name: lambda x, now, held: x * (c + h)[now.case]}))
            if step:
                f = self.numbers(way, change + Change(at={name: lambda x, now, held: x * c[now.case]}))
            if moved is None or f is None or any(not a.size == b.size == m.size
                                                 for a, b, m in zip(f, moved, self.measured)):  # fmt: skip
                return None
            if not step:
                if name not in way.set.inputs and _key(moved) == _key([b / 2 for b in base]):
                    return None  # that is a multiple of all of it
                off = [difference(b, a) if np.isfinite(b).all() else 0.0 for a, b in zip(base, moved)]
                most = [j for j in sorted(range(len(base)), key=off.__getitem__)[-6:] if off[j] > 1e3 * self.tolerance]
            for j in most:
                d, r = (moved[j] - f[j]).ravel(), (self.measured[j] - f[j]).ravel()
                c[j] += h[j] * float(r @ d) / (float(d @ d) or math.inf)
            h = 1e-4 * c
        return c, most


def _times(name: str, c: float, by: Terms) -> Change:
    return Change(at={name: lambda x, now, held: x * c * (product(by, now.quantities) if by else 1)})


def _key(numbers: Sequence[Floats]) -> bytes:
    with np.errstate(all="ignore"):
        return b"".join(np.float32(n).tobytes() for n in numbers)
