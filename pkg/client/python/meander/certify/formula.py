"""Formulas that can be computed with any part of them changed.

A formula is a function of numpy. It is traced once for each case: each operation is a node with its text, such as
`log_prob - old`. Any node, or one operand of a node, may be taken otherwise; what follows from it is computed anew.

    graph = Graph(lambda x, y: np.mean(x - y), {"x": x, "y": y})
    graph.value()
    graph.value({("x - y", 1): lambda y, now, held: -y})
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Site = str | tuple[str, int]
"""A node by its text, or one operand of it by its place."""
Altered = Callable[[Any, "Graph", Any], Any]
"""Gives what is taken instead, of a value, the graph that is being computed, and the value without a gradient."""
Changes = Mapping[Site, Altered]
"""What is taken instead at some sites."""
Values = dict[str, Any]
"""Numbers and arrays by name, and names of choices."""


class Constant(float):
    """A number that has a text of its own."""

    def __new__(cls, value: float, text: str) -> Constant:
        out = super().__new__(cls, value)
        out.text = text
        return out

    text: str


@dataclasses.dataclass(frozen=True)
class Node:
    """An operation: function of operands, which are terms or constants, with options such as an axis, and its value in
    the case. The text of a part that has a name is the name; of is what it stands for."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    options: dict[str, Any]
    text: str
    value: Any
    of: str = ""

    @property
    def label(self) -> str:
        """Its text, and what it stands for."""
        return f"{self.text} = {self.of}" if self.of else self.text

    @property
    def is_whole(self) -> bool:
        """Whether it is an input, or a part that has a name."""
        return self.function in (is_input, is_named)

    @functools.cached_property
    def reads(self) -> list[tuple[int, Any]]:
        """The node of each operand, or -1 and the constant."""
        return [(a.at, None) if isinstance(a, Term) else (-1, a) for a in self.operands]


class Term(np.lib.mixins.NDArrayOperatorsMixin):
    """A node in a formula that is traced; functions and methods of numpy take it."""

    def __init__(self, graph: Graph, at: int):
        self.graph, self.at = graph, at

    def __array_ufunc__(self, function: Any, method: str, *operands: Any, **options: Any) -> Any:
        return self.graph.add(function, operands, options) if method == "__call__" else NotImplemented

    def __array_function__(self, function: Any, types: Any, operands: Any, options: Any) -> Term:
        return self.graph.add(function, operands, options)

    def __getitem__(self, key: Any) -> Term:
        return self.graph.add(operator.getitem, (self, key), {})

    def __bool__(self) -> bool:
        raise TypeError("a formula decides by choices alone; numbers are chosen from by np.where")

    @property
    def node(self) -> Node:
        """What it is of its graph."""
        return self.graph.nodes[self.at]


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is one node of a formula, whatever it does."""

    def of(*operands: Any) -> Any:
        graph = next((a.graph for a in operands if isinstance(a, Term)), None)
        return graph.add(of, operands, {}) if graph else function(*operands)

    of.__name__ = function.__name__
    return of


def named(name: str, value: Any) -> Any:
    """A part of a formula by a name, by which it is spoken of."""
    if not isinstance(value, Term) or value.node.function is is_input:
        return value
    return value.graph.put(Node(is_named, (value,), {}, name, value.node.value, value.node.of or value.node.text))


def is_input(x: Any) -> Any:
    """The function of inputs."""
    return x


def is_named(x: Any) -> Any:
    """The function of parts that have a name."""
    return x


@traced
def stopped(x: Any) -> Any:
    """What has no gradient."""
    return x


class Graph:
    """A formula for a case of inputs. shapes: of inputs, such as [B,T]. By a text it gives what that node has now."""

    def __init__(self, formula: Callable[..., Any], inputs: Values, shapes: Mapping[str, str] = {}, case: int = 0):
        self.nodes: list[Node] = []
        self.index: dict[str, int] = {}
        self.case, self.shapes, self.inputs, self.given, self.now = case, shapes, inputs, inputs, list[Any]()
        numbers = {n: float(v) if shapes.get(n) == "[]" else v for n, v in inputs.items()}
        given = {n: v if isinstance(v, str) else self.put(Node(is_input, (v,), {}, n, v)) for n, v in numbers.items()}
        with np.errstate(all="ignore"):
            self.out = formula(**given).at

    def put(self, node: Node) -> Term:
        """A node; the one that is there, of the same text."""
        if node.text not in self.index:
            self.index[node.text] = len(self.nodes)
            self.nodes.append(node)
        return Term(self, self.index[node.text])

    def add(self, function: Callable[..., Any], operands: tuple[Any, ...], options: dict[str, Any]) -> Term:
        """The node of an operation."""
        text = written(function, [text_of(a) for a in operands], options)
        values = [a.node.value if isinstance(a, Term) else a for a in operands]
        return self.put(Node(function, operands, options, text, function(*values, **options)))

    def __getitem__(self, text: str) -> Any:
        return self.now[self.index[text]]

    @functools.cached_property
    def quantities(self) -> dict[str, float]:
        """The sizes, settings and named numbers of the case that a factor or a constant may follow, by name."""
        out = dict[str, float]()
        for n in (n for n in self.nodes if n.is_whole):
            said = self.shapes.get(n.text, "")
            if said.startswith("[") and said != "[]":
                axes = zip(said[1:-1].split(","), np.shape(n.value))
                out |= {axis: float(size) for axis, size in axes if axis.isalpha()}
                if np.isin(n.value, (0, 1)).all():
                    out[f"the sum of {n.text}"] = float(np.sum(n.value))
            elif np.ndim(n.value) == 0 and said in ("[]", ""):
                out["-" * bool(n.value < 0) + n.text] = abs(float(n.value))
        for axis in [a for a in out if len(a) == 1 and a.isupper() and out[a] > 1]:
            out[f"({axis} - 1) / {axis}"] = (out[axis] - 1) / out[axis]
        return {k: v for k, v in out.items() if v > 0 and v != 1}

    def places(self, changes: Changes) -> set[int]:
        """The nodes that are changed."""
        texts = (s if isinstance(s, str) else s[0] for s in changes)
        return {self.index[t] for t in texts if t in self.index}

    def value(self, changes: Changes = {}, inputs: Values = {}, held: Sequence[Any] | None = None) -> Any:
        """What the formula gives, with some parts changed and some inputs moved."""
        return self.values(changes, inputs, held)[self.out]

    def values(
        self, changes: Changes = {}, inputs: Values = {}, held: Sequence[Any] | None = None,
        base: Sequence[Any] | None = None, new: Changes | None = None,
    ) -> list[Any]:
        """The value of each node. held: those of the nodes where inputs do not move, for parts without a gradient.
        base: those by the changes without the new ones."""
        self.now = out = list(base or [n.value for n in self.nodes])
        self.given = self.inputs | inputs
        index, moved = self.index, bytearray(len(out))
        at_sites = self.places(changes)
        begun = (at_sites if new is None else self.places(new)) | {index[n] for n in inputs}
        for at in range(min(begun, default=len(out)), len(out)):
            n = self.nodes[at]
            if at not in begun:
                for r, _ in n.reads:
                    if r >= 0 and moved[r]:
                        break
                else:
                    continue
            moved[at] = 1
            operands = [out[r] if r >= 0 else a for r, a in n.reads]
            if at in at_sites:
                for k, (r, _) in enumerate(n.reads):
                    if how := changes.get((n.text, k)):
                        operands[k] = how(operands[k], self, held[r] if held and r >= 0 else operands[k])
            value = held[at] if held and n.function is stopped else n.function(*operands, **n.options)
            if n.function is is_input:
                value = inputs.get(n.text, value)
            if at in at_sites and (how := changes.get(n.text)):
                value = how(value, self, held[at] if held else value)
            out[at] = value
        return out


_INFIX = {
    "add": (" + ", 4), "subtract": (" - ", 4), "multiply": (" * ", 5), "divide": (" / ", 5), "power": ("^", 7),
    "greater": (" > ", 3), "less": (" < ", 3), "greater_equal": (" >= ", 3), "less_equal": (" <= ", 3),
    "bitwise_and": (" and ", 2), "bitwise_or": (" or ", 1),
}


def written(function: Callable[..., Any], operands: Sequence[str], options: Mapping[str, Any] = {}) -> str:
    """An operation as text."""
    name = getattr(function, "__name__", str(function))
    if name == "getitem":
        return f"{operands[0]}[{operands[1]}]"
    if name == "negative":
        return "-" + _within(operands[0], 6)
    if name in _INFIX:
        sign, level = _INFIX[name]
        right = level + (name in ("subtract", "divide", "power"))
        return _within(operands[0], level + (name == "power")) + sign + _within(operands[1], right)
    said = [f"{k} {v}" for k, v in options.items() if k != "keepdims"]
    return f"{name}({', '.join([*operands, *said])})"


def _within(text: str, level: int) -> str:
    """A text in brackets, where it binds less than what it stands in."""
    depth, bare = 0, ""
    for c in text:
        depth += (c in "([") - (c in ")]")
        bare += c if not depth else ""
    least = min((of for sign, of in _INFIX.values() if sign in bare), default=9)
    least = min(least, 6) if bare.startswith("-") else least
    return f"({text})" if least < level else text


def text_of(x: Any) -> str:
    """An operand as text."""
    if isinstance(x, Term):
        return x.node.text
    if isinstance(x, tuple):
        return ", ".join(":" if part == slice(None) else str(part) for part in x)
    return x.text if isinstance(x, Constant) else f"{x:g}" if isinstance(x, int | float) else str(x)
