"""Turns of several sessions at once: the calls of networks that they make are computed together where they fit.

Which axes of the arguments have the samples is not known of a network, but seen: they double where a session has two
samples in place of one. All other arguments must be equal.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

Call = tuple[Any, Any, Any]
"""A network, and its arguments by place and by name."""
Turn = Generator[list[Call], list[Any], torch.Tensor]
"""A turn of a session: it yields calls, is sent what they give, and returns velocities."""

_LIST = "list"
_MASKED, _MASK = "encoder_hidden_states", "encoder_hidden_states_mask"
"""Tokens that networks take in any number, and the mask that keeps padding out."""


class Together:
    """What is known of the networks of a pipeline."""

    def __init__(self) -> None:
        self._axes: dict[Any, tuple[Any, Any]] = {}
        self._same: dict[Any, Any] = {}
        self.calls = 0
        """Calls of networks that are several of sessions."""

    def learn(self, one: Turn, two: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the velocities of a turn of a session of one sample, and of one of two, and notes where their calls
        have them. ValueError: they are not the same calls."""
        sent: list[Any] = [None, None]
        while True:
            got = [_next(turn, value) for turn, value in zip((one, two), sent, strict=True)]
            if all(isinstance(g, _End) for g in got):
                return got[0].result, got[1].result
            if any(isinstance(g, _End) for g in got) or got[0][0][0] is not got[1][0][0]:
                raise ValueError("two samples make other calls than one")
            [a], [b] = got
            sent = [[network(*args, **kwargs)] for network, args, kwargs in (a, b)]
            axes = _axes_of(a[1:], b[1:]), _axes_of(sent[0][0], sent[1][0])
            if self._axes.setdefault(_kind(a), axes) != axes:
                raise ValueError("its calls have samples in more than one place")

    def run(self, turns: Sequence[tuple[int, Turn]]) -> list[torch.Tensor]:
        """The velocities of turns, each with the number of samples of its session."""
        results: list[Any] = [None] * len(turns)
        asked: dict[int, list[Call]] = {}

        def go(i: int, values: list[Any] | None) -> None:
            got = _next(turns[i][1], values)
            if isinstance(got, _End):
                results[i] = got.result
            else:
                asked[i] = got

        for i in range(len(turns)):
            go(i, None)
        while asked:
            groups: list[list[tuple[int, int, Call]]] = []
            for i, calls in asked.items():
                for k, call in enumerate(calls):
                    fitting = (g for g in groups if self._fit(g[0][2], call, turns[g[0][0]][0], turns[i][0]))
                    if (group := next(fitting, None)) is None:
                        groups.append(group := [])
                    group.append((i, k, call))
            given = {i: [None] * len(calls) for i, calls in asked.items()}
            for group in groups:
                outs = self._compute([call for *_, call in group], [turns[i][0] for i, *_ in group])
                for (i, k, _), out in zip(group, outs, strict=True):
                    given[i][k] = out
            asked = {}
            for i, values in given.items():
                go(i, values)
        return results

    def _fit(self, a: Call, b: Call, n: int, m: int) -> bool:
        """Whether calls of n and m samples may be one."""
        kind = _kind(a)
        return kind in self._axes and kind == _kind(b) and self._alike(a[1:], b[1:], self._axes[kind][0], n, m)

    def _alike(self, a: Any, b: Any, axes: Any, n: int, m: int, padded: bool = False) -> bool:
        if isinstance(a, torch.Tensor):
            if axes is None:
                return self._equal(a, b)
            skip = (axes, 1) if padded else (axes,)
            sizes = [[s for d, s in enumerate(t.shape) if d not in skip] for t in (a, b)]
            return sizes[0] == sizes[1] and a.shape[axes] * m == b.shape[axes] * n and a.dtype == b.dtype
        if axes == _LIST:
            return len(a) * m == len(b) * n
        if isinstance(a, dict):
            pad = _MASK in a and isinstance(a.get(_MASKED), torch.Tensor) and a[_MASKED].ndim == 3
            names = (_MASKED, _MASK) if pad else ()
            return all(self._alike(a[k], b[k], axes[k], n, m, k in names) for k in a)
        if isinstance(a, list | tuple):
            return len(a) == len(b) == len(axes) and all(
                self._alike(x, y, z, n, m) for x, y, z in zip(a, b, axes, strict=True)
            )
        return a is b or bool(a == b)

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
        takes, gives = self._axes[_kind(group[0])]
        args, kwargs = joined(_padded([call[1:] for call in group]), takes)
        return _parted(network(*args, **kwargs), gives, counts)


class _End:
    def __init__(self, result: Any):
        self.result = result


def _next(turn: Turn, values: Any) -> Any:
    """The next calls of a turn, or its end."""
    try:
        return turn.send(values)
    except StopIteration as e:
        return _End(e.value)


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
        if not differ:
            return None
        if len(differ) > 1 or two.shape[differ[0]] != 2 * one.shape[differ[0]]:
            raise ValueError(f"of {list(one.shape)} for one sample there is {list(two.shape)} for two")
        return differ[0]
    if isinstance(one, list | tuple):
        if one and len(two) == 2 * len(one):
            return _LIST
        return [_axes_of(a, b) for a, b in zip(one, two, strict=True)]
    if not isinstance(one, dict):
        return None
    axes = {k: _axes_of(v, two[k]) for k, v in one.items()}
    return axes | {_MASK: axes[_MASKED]} if {_MASK, _MASKED} <= axes.keys() else axes  # where padding makes one


def _padded(calls: list[Any]) -> list[Any]:
    """Calls with as many tokens of a prompt each, where they have a mask."""
    named = [kwargs for _, kwargs in calls]
    if not (isinstance(named[0].get(_MASKED), torch.Tensor) and _MASK in named[0]):
        return calls
    most = max(kwargs[_MASKED].shape[1] for kwargs in named)
    if all(kwargs[_MASKED].shape[1] == most for kwargs in named):
        return calls
    out = []
    for args, kwargs in calls:
        tokens, mask = kwargs[_MASKED], kwargs[_MASK]
        mask = tokens.new_ones(tokens.shape[:2], dtype=torch.bool) if mask is None else mask
        more = most - tokens.shape[1]
        pad = torch.nn.functional.pad
        out.append((args, {**kwargs, _MASKED: pad(tokens, (0, 0, 0, more)), _MASK: pad(mask, (0, more))}))
    return out


def repeated(one: Any, two: Any) -> Any:
    """Where the samples are in a value of one and in that of two equal ones; False: it is not known."""
    try:
        axes = _axes_of(one, two)
        return axes if _same(joined([one, one], axes), two) else False
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return False


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        a, b = [*a.items()], [*b.items()]
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def joined(values: list[Any], axes: Any) -> Any:
    """One value of those of several calls."""
    one = values[0]
    if isinstance(one, torch.Tensor):
        return one if axes is None else torch.cat(values, axes)
    if axes == _LIST:
        return [x for v in values for x in v]
    if isinstance(one, dict):
        return {k: joined([v[k] for v in values], axes[k]) for k in one}
    if isinstance(one, list | tuple):
        return type(one)(joined(list(vs), a) for *vs, a in zip(*values, axes, strict=True))
    return one


def _parted(v: Any, axes: Any, counts: list[int]) -> list[Any]:
    """The values of each call of one with all samples."""
    if isinstance(v, torch.Tensor):
        return [v] * len(counts) if axes is None else list(v.split(_sizes(v.shape[axes], counts), axes))
    if axes == _LIST:
        sizes = _sizes(len(v), counts)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [type(v)(v[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    if isinstance(v, dict):
        parts = {k: _parted(x, axes[k], counts) for k, x in v.items()}
        return [type(v)(**{k: p[i] for k, p in parts.items()}) for i in range(len(counts))]
    if isinstance(v, list | tuple):
        inner = [_parted(x, a, counts) for x, a in zip(v, axes, strict=True)]
        return [type(v)(p[i] for p in inner) for i in range(len(counts))]
    return [v] * len(counts)


def _sizes(total: int, counts: list[int]) -> list[int]:
    each = total // sum(counts)
    return [each * n for n in counts]
