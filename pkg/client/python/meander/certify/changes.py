"""The ways in which a formula may be another one.

They are derived from the graph of its operations alone: an input, a part that has a name, or one place where it is used
may be negated, shifted, swapped with another of its shape or replaced by it, complemented, without effect or without
gradient; a setting may have no limit, be squared or be a number; a term, a factor, a limit, a root may be left out; an
operation may be another, over other axes, or turned around.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .formula import Altered, Graph, Node, Site, Term, Values, is_named, stopped, text_of, written
from .suite import Floats, Set, gradient

_NO_LIMIT = 1e9


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """Parts of a formula taken otherwise: words say how, at has what is taken instead, choices other choices by name.
    inner: 0 of an input, 1 of a part, 2 in one place, 3 of a part in one place that has no name."""

    words: str = ""
    at: Mapping[Site, Altered] = dataclasses.field(default_factory=dict)
    choices: Mapping[str, Callable[[str], str]] = dataclasses.field(default_factory=dict)
    inner: int = 0

    def __add__(self, other: Change) -> Change:
        at = dict(self.at)
        for site, how in other.at.items():
            at[site] = functools.partial(_both, at[site], how) if site in at else how
        words = "; ".join(w for w in (self.words, other.words) if w)
        return Change(words, at, {**self.choices, **other.choices}, max(self.inner, other.inner))


def _both(first: Altered, then: Altered, x: Any, now: Graph, held: Any) -> Any:
    return then(first(x, now, held), now, first(held, now, held))


AS_IT_IS = Change()
"""The formula as it is."""
REFUSED = (ValueError, IndexError, TypeError, KeyError, ZeroDivisionError, OverflowError)
"""What a formula raises of inputs that it cannot have."""


@dataclasses.dataclass
class Way:
    """What may have been measured: a set of vectors at inputs, with choices, and how many things are odd in it. graphs
    are those that were made."""

    set: Set
    inputs: Sequence[Values]
    choices: Values = dataclasses.field(default_factory=dict)
    odd: int = 0
    graphs: dict[tuple[Any, ...], Graph] = dataclasses.field(default_factory=dict, repr=False)

    def graph(self, case: int, change: Change = AS_IT_IS) -> Graph:
        """The formula of a case, with the choices of a change."""
        i = self.inputs[case]
        chosen = {n: how(i[n]) for n, how in change.choices.items()}
        key = (case, *sorted(chosen.items()))
        if key not in self.graphs:
            shapes = {n: said.get("shape", "") for n, said in self.set.inputs.items()}
            self.graphs[key] = Graph(self.set.function, i | chosen, shapes, case)
        return self.graphs[key]

    def numbers(
        self, change: Change = AS_IT_IS, by: str = "", along: Sequence[Floats] | None = None
    ) -> list[Floats] | None:
        """What the changed formula gives for each case: its value, or its gradient by an input, along some directions.
        None: it refuses such inputs."""
        out = []
        try:
            with np.errstate(all="ignore"):
                for k in range(len(self.inputs)):
                    g = self.graph(k, change)
                    if not by:
                        out.append(np.asarray(g.value(change.at)))
                        continue
                    held = g.values(change.at)
                    of = functools.partial(lambda g, held, x: g.value(change.at, {by: x}, held), g, held)
                    out.append(gradient(of, self.inputs[k][by], along[k] if along else None))
        except REFUSED:
            return None
        return out


def parts_of(way: Way) -> dict[str, Node]:
    """The parts of all graphs of a way, by text."""
    return {n.text: n for k in range(len(way.inputs)) for n in way.graph(k).nodes}


def gradient_changes(way: Way) -> Iterator[Change]:
    """The ways in which one part may have no gradient, everywhere or in one place, or all have one."""
    nodes = parts_of(way)
    if held := [n for n in nodes.values() if n.function is stopped]:
        names = [text_of(n.operands[0]) for n in held]
        yield Change(f"{', '.join(names)} have a gradient", {n.text: _now(t) for n, t in zip(held, names)})
    for n in nodes.values():
        yield Change(f"{n.label} has no gradient", {n.text: _held})
    for text, sites in _uses(nodes).items():
        for site in sites if len(sites) > 1 else ():
            yield Change(f"{text} has no gradient in {site[0]}", {site: _held})


def _uses(nodes: Mapping[str, Node]) -> dict[str, list[tuple[str, int]]]:
    """The places where each part is an operand."""
    uses: dict[str, list[tuple[str, int]]] = {}
    for n in nodes.values():
        for k, operand in enumerate(n.operands if n.function is not is_named else ()):
            if isinstance(operand, Term):
                uses.setdefault(operand.node.text, []).append((n.text, k))
    return uses


def changes(way: Way) -> Iterator[Change]:
    """The ways in which one part may be taken otherwise: inputs first, settings before arrays."""
    s, nodes = way.set, parts_of(way)
    inputs, order = [n for n in s.inputs if n in nodes], list(nodes)
    for name, said in s.inputs.items():
        if "choices" in said and name not in way.choices:
            yield from _choices(name, said["choices"], {str(i[name]) for i in way.inputs})
    whole = {n: nodes[n] for n in order if nodes[n].is_whole}
    same = {n: [m for m in whole if m != n and _alike(nodes[m], nodes[n])] for n in nodes}
    for name in sorted(inputs, key=lambda n: len(s.inputs[n].get("shape", ""))):
        yield from _taken(name, name, nodes[name], s.inputs[name], way)
    for a, b in itertools.permutations(inputs, 2):
        if b in same[a] and a < b:
            yield Change(f"{a} and {b} are swapped", {a: _given(b), b: _given(a)})
        if b in same[a]:
            yield Change(f"{b} stands for {a}", {a: _given(b)})
    for n in nodes.values():
        if n.text not in whole:
            yield from _operation(n)
        elif n.function is is_named:
            yield from _taken(n.label, n.text, n, {}, way, inner=1)
    for text, sites in _uses(nodes).items():
        for site in sites:
            place = f" in {site[0]}"
            for other in (m for m in same[text] if order.index(m) < order.index(site[0])):
                words, one = f"{other} stands for {text}{place}", {site: _now(other)}
                yield Change(words, one, inner=2 if text in whole else 3)  # type: ignore[arg-type]
            if len(sites) > 1 and text in whole:
                yield from _taken(text, site, nodes[text], s.inputs.get(text, {}), way, place, 2)
            elif len(sites) > 1:
                yield Change(f"{text} has the opposite sign{place}", {site: _negated}, inner=2)


def _choices(name: str, choices: Sequence[str], used: Iterable[str]) -> Iterator[Change]:
    for choice in choices:
        yield Change(f"{name} is {choice}", choices={name: lambda _, c=choice: c})  # type: ignore[misc]
    if len(set(used)) > 1:
        words = f"{name} is another: of {', '.join(choices)} the next"
        yield Change(words, choices={name: lambda c: choices[(choices.index(c) + 1) % len(choices)]})


def _alike(a: Node, b: Node) -> bool:
    return np.shape(a.value) == np.shape(b.value) and np.asarray(a.value).dtype == np.asarray(b.value).dtype


def _given(name: str) -> Altered:
    """An input as it was given, in place of another."""
    return lambda x, now, held: now.given[name]


def _now(name: str) -> Altered:
    """Another part as it is now."""
    return lambda x, now, held: now[name]


def _neutral(to: Any, x: Any, now: Graph, held: Any) -> Any:
    return np.full_like(x, to)


def _held(x: Any, now: Graph, held: Any) -> Any:
    return held


def _negated(x: Any, now: Graph, held: Any) -> Any:
    return -1 * x


def _taken(
    label: str, site: Site, node: Node, said: Mapping[str, Any], way: Way, place: str = "", inner: int = 0
) -> Iterator[Change]:
    """The ways in which an input or a named part may be taken otherwise, everywhere or in one place."""
    value, shape = np.asarray(node.value), said.get("shape", "[]" if np.ndim(node.value) == 0 else "[?")

    def put(words: str, f: Callable[[Any], Any]) -> Change:
        return Change(f"{label} {words}{place}", {site: lambda x, now, held: f(x)}, inner=inner)

    if "neutral" in said and not place:
        to = said["neutral"]
        yield put(f"has no effect, as if it were {to:g}", lambda x: np.zeros_like(x) + to)
    if shape[0] != "[":
        of_what = shape.removeprefix("index of ")
        most = 1 << 30 if of_what == shape else len(way.inputs[0][of_what]) - (2 if of_what == "sigmas" else 1)
        for more in (-1, 1):
            words = f"is one {'less' if more < 0 else 'more'}"
            yield put(words, lambda x, more=more: min(max(int(x) + more, 0), most))  # type: ignore[misc]
        return
    if value.dtype.kind == "b":
        return
    yield put("has the opposite sign", lambda x: -1 * x)
    yield put("is 0", lambda x: 0 * x)
    if value.ndim == 0:
        for words, f in _OTHERWISE.items() if said else itertools.islice(_OTHERWISE.items(), 3):
            yield put(words, lambda x, f=f: f(float(x)))  # type: ignore[misc]
        return
    for more in (-1, 1):
        words = f"is {'behind' if more > 0 else 'ahead'} by one place"
        yield put(words, lambda x, more=more: np.roll(x, more, axis=-1))  # type: ignore[misc]
        yield put(f"{words}, its end repeated", lambda x, more=more: np.take(  # type: ignore[misc]
            x, np.arange(x.shape[-1]) - more, axis=-1, mode="clip"))  # fmt: skip
    if np.isin(value, (0, 1)).all():
        yield put("is complemented", lambda x: 1 - x)


_OTHERWISE: dict[str, Callable[[float], float]] = {
    "is twice itself": lambda x: 2 * x, "is half itself": lambda x: x / 2, "is 1": lambda x: 1.0,
    "has no limit": lambda x: _NO_LIMIT, "is squared": lambda x: x * x, "is its root": math.sqrt,
    "is inverted": lambda x: 1 / x, "is one more": lambda x: x + 1, "is one less": lambda x: x - 1,
}  # fmt: skip
_LEFT_OUT: dict[str, tuple[Any, Any]] = {
    "add": (0, 0), "subtract": (0, 0), "multiply": (1, 1), "divide": (1, 1), "power": (None, 1),
    "maximum": (-np.inf, -np.inf), "minimum": (np.inf, np.inf), "bitwise_and": (True, True),
    "bitwise_or": (False, False),
}  # fmt: skip
"""What the operands of functions are where they have no effect."""
_OTHERS: dict[str, tuple[Callable[..., Any], ...]] = {
    "maximum": (np.minimum,), "minimum": (np.maximum,), "mean": (np.sum,), "sum": (np.mean,), "std": (np.var,),
    "multiply": (np.divide, np.add, np.subtract), "divide": (np.multiply,), "add": (np.subtract, np.multiply),
    "subtract": (np.add, np.multiply), "greater": (np.less,), "less": (np.greater,), "greater_equal": (np.less,),
    "less_equal": (np.greater,), "bitwise_and": (np.bitwise_or,), "bitwise_or": (np.bitwise_and,), "sin": (np.cos,),
    "cos": (np.sin,), "exp": (np.exp2, np.expm1), "log": (np.log1p,), "sqrt": (np.square,),
}  # fmt: skip
"""What may be written in place of a function."""


def _operation(n: Node) -> Iterator[Change]:
    """The ways in which an operation may be another one."""
    name, shown = getattr(n.function, "__name__", ""), [text_of(a) for a in n.operands]

    def instead(f: Callable[..., Any], words: str, inner: int = 1) -> Change:
        def of(x: Any, now: Graph, held: Any) -> Any:
            return f(*(now[a.node.text] if isinstance(a, Term) else a for a in n.operands))

        return Change(f"{n.text} is {words}", {n.text: of}, inner=inner)

    for k, (to, what) in enumerate(zip(_LEFT_OUT.get(name, ()), shown)):
        if to is not None:
            yield Change(f"{what} is left out of {n.text}", {(n.text, k): functools.partial(_neutral, to)}, inner=1)
    if n.function is stopped:
        return
    if len(shown) == 1 and not n.options and n.function is not np.negative:
        yield instead(lambda x: x, shown[0])
    if name == "where":
        yield instead(lambda _, a, b: a + 0 * b, shown[1])
        yield instead(lambda _, a, b: b + 0 * a, shown[2])
    for k, other in enumerate(_OTHERS.get(name, ())):
        words = written(other, shown, n.options)
        yield instead(lambda *of, f=other: f(*of, **n.options), words, 1 + bool(k))
    if n.options.get("axis") is not None:
        every = {k: v for k, v in n.options.items() if k != "axis"}
        yield instead(lambda x: n.function(x, **every), written(n.function, shown, every))
    if name in ("subtract", "divide", "power", "greater", "less"):
        yield instead(lambda a, b: n.function(b, a), written(n.function, shown[::-1]))
    for k, a in enumerate(n.operands if name in _LEFT_OUT else ()):
        for c in (a - 1, a + 1) if type(a) in (int, float) else ():
            words = written(n.function, [text_of(c) if j == k else t for j, t in enumerate(shown)])
            one: dict[Site, Altered] = {(n.text, k): lambda x, now, held, c=c: c}  # type: ignore[misc]
            yield Change(f"{n.text} is {words}", one, inner=1 if isinstance(n.value, int | np.integer) else 3)
    if name not in ("negative", "multiply", "divide"):
        yield Change(f"{n.text} has the opposite sign", {n.text: _negated}, inner=1)
