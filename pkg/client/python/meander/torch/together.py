"""Turns of several sessions at once: the calls of networks that they make are computed together where they fit.

Which axes of the arguments have the samples is not known of a network, but seen: they double where a session has two
samples in place of one. All other arguments must be equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch.utils import _pytree as trees

Call = tuple[Any, Any, Any]
"""A network, and its arguments by place and by name."""
Turn = Generator[list[Call], list[Any], torch.Tensor]
"""A turn of a session: it yields calls, is sent what they give, and returns velocities."""

_LIST, _SHARED = "list", "shared"
"""Where no axis has the samples: a list has as many items of each; all have one value."""
_MASKED, _MASK = "encoder_hidden_states", "encoder_hidden_states_mask"
"""Tokens that networks take in any number, and the mask that keeps padding out."""


class Layout:
    """Where the samples are in values of one kind, trees of tensors and lists."""

    def __init__(self, axes: Any):
        """axes: such a tree, with the axis of each tensor."""
        self._axes, self._tree = trees.tree_flatten(axes)

    def join(self, values: list[Any]) -> Any:
        """One value of those of several calls."""
        leaves = zip(self._axes, *map(self._tree.flatten_up_to, values), strict=True)
        return trees.tree_unflatten([_joined(vs, axis) for axis, *vs in leaves], self._tree)

    def part(self, v: Any, counts: list[int]) -> list[Any]:
        """The values of each call of one with all samples."""
        leaves = zip(self._axes, self._tree.flatten_up_to(v), strict=True)
        parts = zip(*(_parted(x, axis, counts) for axis, x in leaves), strict=True)
        return [trees.tree_unflatten([*part], self._tree) for part in parts]

    def leaves(self, a: Any, b: Any) -> list[tuple[Any, Any, Any]]:
        """The axes of two values, and what is there. ValueError: they are of other kinds."""
        return [*zip(self._axes, self._tree.flatten_up_to(a), self._tree.flatten_up_to(b), strict=True)]


class Together:
    """What is known of the networks of a pipeline."""

    def __init__(self) -> None:
        self._layouts: dict[Any, tuple[Layout, Layout]] = {}
        self._same: dict[Any, Any] = {}
        self.calls = 0
        """Calls of networks that are several of sessions."""

    def learn(self, one: Turn, two: Turn) -> None:
        """Notes where the calls have the samples of a turn of a session of one, and of one of two. ValueError: they are
        not the same calls."""
        for (a, out), (b, other) in zip(_recorded(one), _recorded(two), strict=True):
            if a[0] is not b[0]:
                raise ValueError("two samples make other calls than one")
            axes = _axes_of(a[1:], b[1:])
            if {_MASK, _MASKED} <= axes[1].keys():
                axes[1][_MASK] = axes[1][_MASKED]  # where padding makes one
            self._layouts[_kind(a)] = Layout(axes), Layout(_axes_of(out, other))

    def run(self, turns: Sequence[tuple[int, Turn]]) -> list[torch.Tensor]:
        """The velocities of turns, each with the number of samples of its session."""
        results: list[Any] = [None] * len(turns)
        sent: dict[int, Any] = dict.fromkeys(range(len(turns)))
        while sent:
            asked: list[tuple[int, Call]] = []  # a turn, and a call of it
            for i, values in sent.items():
                try:
                    asked += [(i, call) for call in turns[i][1].send(values)]
                except StopIteration as e:
                    results[i] = e.value
            groups: list[list[int]] = []  # of places in asked
            for k, (i, call) in enumerate(asked):
                firsts = ((g, *asked[g[0]]) for g in groups)
                fitting = (g for g, j, first in firsts if self._fit(first, call, turns[j][0], turns[i][0]))
                if (group := next(fitting, None)) is None:
                    groups.append(group := [])
                group.append(k)
            given: list[Any] = [None] * len(asked)
            for group in groups:
                outs = self._compute([asked[k][1] for k in group], [turns[asked[k][0]][0] for k in group])
                for k, out in zip(group, outs, strict=True):
                    given[k] = out
            sent = {}
            for (i, _), out in zip(asked, given, strict=True):
                sent.setdefault(i, []).append(out)
        return results

    def _fit(self, a: Call, b: Call, n: int, m: int) -> bool:
        """Whether calls of n and m samples may be one."""
        if (kind := _kind(a)) not in self._layouts or kind != _kind(b):
            return False
        try:
            leaves = self._layouts[kind][0].leaves(*_padded([a[1:], b[1:]]))
        except ValueError:  # lists of other lengths, not of samples
            return False
        return all(self._alike(x, y, axis, n, m) for axis, x, y in leaves)

    def _alike(self, a: Any, b: Any, axis: Any, n: int, m: int) -> bool:
        if axis == _LIST:
            return len(a) * m == len(b) * n
        if not isinstance(a, torch.Tensor):
            return a is b or bool(a == b)
        if axis == _SHARED:
            return self._equal(a, b)
        sizes, others = ([s for d, s in enumerate(t.shape) if d != axis] for t in (a, b))
        return sizes == others and a.shape[axis] * m == b.shape[axis] * n and a.dtype == b.dtype

    def _equal(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        if a is b or a.shape != b.shape or a.dtype != b.dtype:
            return a is b
        key = id(a), a._version, id(b), b._version
        if key not in self._same:  # what is compared on a GPU is waited for
            if len(self._same) > 256:
                self._same.clear()
            self._same[key] = a, b, torch.equal(a, b)
        return bool(self._same[key][2])

    def _compute(self, group: list[Call], counts: list[int]) -> list[Any]:
        """What the network gives for each call of a group."""
        network, args, kwargs = group[0]
        if len(group) == 1:
            return [network(*args, **kwargs)]
        self.calls += 1
        takes, gives = self._layouts[_kind(group[0])]
        args, kwargs = takes.join(_padded([call[1:] for call in group]))
        return gives.part(network(*args, **kwargs), counts)


def _recorded(turn: Turn) -> list[tuple[Call, Any]]:
    """The calls of a turn, with what they give."""
    made, outs = list[tuple[Call, Any]](), cast(Any, None)
    with contextlib.suppress(StopIteration):
        while True:
            calls = turn.send(outs)
            outs = [network(*args, **kwargs) for network, args, kwargs in calls]
            made += zip(calls, outs, strict=True)
    return made


def _kind(v: Any) -> Any:
    """What values must have in common so that the samples are in the same places."""
    if isinstance(v, torch.Tensor):
        return v.ndim
    if isinstance(v, dict):
        return tuple((k, _kind(x)) for k, x in v.items())
    if isinstance(v, tuple):
        return tuple(map(_kind, v))
    if isinstance(v, list):
        return list, tuple(dict.fromkeys(map(_kind, v)))
    return id(v) if isinstance(v, torch.nn.Module) else type(v)


def _axes_of(one: Any, two: Any) -> Any:
    """Where the samples are, by values of one and of two of them. ValueError: nowhere."""
    if isinstance(one, torch.Tensor):
        differ = [d for d, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
        if len(differ) > 1 or any(two.shape[d] != 2 * one.shape[d] for d in differ):
            raise ValueError(f"of {list(one.shape)} for one sample there is {list(two.shape)} for two")
        return differ[0] if differ else _SHARED
    if isinstance(one, list | tuple):
        if one and len(two) == 2 * len(one):
            return _LIST
        return type(one)(_axes_of(a, b) for a, b in zip(one, two, strict=True))
    return type(one)(**{k: _axes_of(v, two[k]) for k, v in one.items()}) if isinstance(one, dict) else _SHARED


def _padded(calls: list[Any]) -> list[Any]:
    """Calls with as many tokens of a prompt each, where they have a mask."""
    tokens = [kwargs.get(_MASKED) for _, kwargs in calls if _MASK in kwargs]
    if not all(isinstance(t, torch.Tensor) and t.ndim == 3 for t in tokens):
        return calls
    lengths, out, pad = {t.shape[1] for t in tokens}, [], torch.nn.functional.pad
    if len(lengths) < 2:
        return calls
    for (args, kwargs), t in zip(calls, tokens, strict=True):
        mask = t.new_ones(t.shape[:2], dtype=torch.bool) if kwargs[_MASK] is None else kwargs[_MASK]
        more = max(lengths) - t.shape[1]
        out.append((args, kwargs | {_MASKED: pad(t, (0, 0, 0, more)), _MASK: pad(mask, (0, more))}))
    return out


def repeated(one: Any, two: Any) -> Layout | None:
    """Where the samples are in a value of one and in that of two equal ones; None: it is not known."""
    try:
        layout = Layout(_axes_of(one, two))
        both = zip(trees.tree_leaves(layout.join([one, one])), trees.tree_leaves(two), strict=True)
        same = (torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b) for a, b in both)
        return layout if all(same) else None
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return None


def _joined(values: list[Any], axis: Any) -> Any:
    if axis == _LIST:
        return [x for v in values for x in v]
    return torch.cat(values, axis) if isinstance(values[0], torch.Tensor) and axis != _SHARED else values[0]


def _parted(v: Any, axis: Any, counts: list[int]) -> Any:
    """What each call has of a value."""
    if axis == _SHARED:
        return [v] * len(counts)
    each = (len(v) if axis == _LIST else v.shape[axis]) // sum(counts)
    sizes = [each * n for n in counts]
    if axis != _LIST:
        return v.split(sizes, axis)
    return [type(v)(v[end - size : end]) for end, size in zip(accumulate(sizes), sizes, strict=True)]
