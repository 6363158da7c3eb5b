"""Holds the functions of a trainer against the vectors: its losses with their gradients, log-probs, advantages,
schedules, guidance and noise.

    from meander.certify import suite, trainer
    for finding in trainer.judge(my_loss, suite.load()["losses/ppo"]):
        print(finding.says)
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import changes, fit, relations
from .formula import Values
from .report import Finding
from .suite import Floats, Set, gradient

_DIFFERENCES = 1e-6
"""What gradients by differences are off by at most, of those that the vectors do not have."""


def judge(
    function: Callable[..., Any], s: Set, dtype: str = "float64", given: Mapping[str, Any] = {}, name: str = "",
    arrays: str = "",
) -> list[Finding]:
    """What a function gives for the inputs that it names, against a set of vectors.

    Its parameters are inputs of the set. An input that it does not take has the value of given, or the neutral one; a
    choice that it does not take is found. arrays: torch, it gets tensors of dtype, and gradients are those of autograd;
    numpy, it gets float64, and gradients are by differences; by default torch, unless its module imports numpy alone.
    Cases for which it raises NotImplementedError are left out. ValueError: it cannot be called so.
    """
    if dtype not in s.tolerance:
        raise ValueError(f"--dtype: {dtype}; {s.title} has a tolerance for {', '.join(s.tolerance)} alone")
    name, arrays = name or getattr(function, "__name__", "the function"), arrays or _arrays(function)
    if arrays == "numpy" and dtype != "float64":
        raise ValueError(f"--dtype: {dtype}; {name} gets arrays of numpy, which are float64")
    taken, free = _taken(function, s, given, name)
    return _judged(_Called(function, taken, s, dtype, arrays), s, given, free, dtype, name)


def _arrays(function: Callable[..., Any]) -> str:
    """What arrays a function computes with, by the modules that its own has imported."""
    used = {getattr(v, "__name__", "").partition(".")[0] for v in getattr(function, "__globals__", {}).values()
            if inspect.ismodule(v)}  # fmt: skip
    has_torch = importlib.util.find_spec("torch") is not None
    return "torch" if has_torch and ("torch" in used or "numpy" not in used) else "numpy"


def _taken(function: Callable[..., Any], s: Set, given: Mapping[str, Any], name: str) -> tuple[list[str], list[str]]:
    """The inputs that a function takes, and the choices that it leaves open."""
    parameters = inspect.signature(function).parameters.values()
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p.default is p.empty for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    if foreign := [n for n, required in named.items() if required and n not in s.inputs]:
        raise ValueError(f"{name}: takes {', '.join(foreign)}; the inputs of {s.title} are {', '.join(s.inputs)}")
    if unknown := [n for n in given if n not in s.inputs]:
        raise ValueError(f"--with {unknown[0]}: no input of {s.title}, which are {', '.join(s.inputs)}")
    taken = [n for n in s.inputs if everything or n in named]
    absent = [n for n in s.inputs if n not in taken and n not in given]
    if lacks := [n for n in absent if not {"neutral", "choices"} & s.inputs[n].keys()]:
        raise ValueError(f"{name}: does not take {', '.join(lacks)}; name the value that it has by --with NAME=VALUE")
    return taken, [n for n in absent if "choices" in s.inputs[n]]


class _Called:
    """A function of a trainer, called with arrays of numpy."""

    def __init__(self, function: Callable[..., Any], taken: Sequence[str], s: Set, dtype: str, arrays: str):
        self.function, self.taken, self.set, self.dtype, self.notes = function, taken, s, dtype, set[str]()
        self.arrays = arrays

    def __call__(self, inputs: Values, by: Sequence[str] = ()) -> tuple[Floats, dict[str, Floats]]:
        """The value, and its gradient by those inputs that are taken."""
        by = [n for n in by if n in self.taken]
        if self.arrays == "numpy":
            return self._value(self.function(**{n: inputs[n] for n in self.taken})), self._differences(inputs, by)
        import torch

        kind = getattr(torch, self.dtype)

        def tensor(n: str) -> Any:
            x = inputs[n]
            return torch.tensor(x, dtype=kind, requires_grad=n in by) if isinstance(x, np.ndarray) else x

        arguments = {n: tensor(n) for n in self.taken}
        value = self._value(self.function(**arguments))
        if not isinstance(value, torch.Tensor):
            return value, self._differences(inputs, by)
        if by and value.requires_grad:
            value.backward()
        found = {n: arguments[n].grad for n in by}
        gradients = {n: np.zeros(inputs[n].shape) if g is None else g.double().numpy() for n, g in found.items()}
        return value.detach().double().numpy(), gradients

    def _value(self, out: Any) -> Any:
        """What is judged of what the function returns."""
        if isinstance(out, tuple):
            self.notes.add("the first of what it returns")
            out = out[0]
        out = out if hasattr(out, "requires_grad") else np.asarray(out, np.float64)
        if np.ndim(self.set.cases[0][1][self.set.returns]) == 0 and math.prod(out.shape) > 1:
            self.notes.add("the mean of what it returns")
            return out.mean()
        return out

    def _differences(self, inputs: Values, by: Sequence[str]) -> dict[str, Floats]:
        def value(n: str, x: Floats) -> Any:
            return self._value(self.function(**{k: (inputs | {n: x})[k] for k in self.taken}))

        self.notes |= {"gradients by differences"} if by else set()
        return {n: gradient(functools.partial(value, n), inputs[n]) for n in by}


def _judged(
    call: _Called, s: Set, given: Mapping[str, Any], free: Sequence[str], dtype: str, name: str
) -> list[Finding]:
    put = {n: said["neutral"] for n, said in s.inputs.items() if n not in call.taken and "neutral" in said}
    put |= given
    by = [k.removeprefix("gradient_") for k in s.cases[0][1] if k.startswith("gradient_")]
    inputs, got, wanted, lacks = list[Values](), list[dict[str, Floats]](), list[dict[str, Any]](), set[str]()
    for i, expected in s.cases:
        i = i | {n: np.zeros_like(i[n]) + v if isinstance(i[n], np.ndarray) else v for n, v in put.items()}
        try:
            value, gradients = call(i, by)
        except NotImplementedError as e:
            lacks.add(str(e))
            continue
        inputs.append(i)
        got.append({"": value} | gradients)
        wanted.append({"": expected[s.returns]} | {n: expected[f"gradient_{n}"] for n in by})
    if not inputs:
        return [Finding(name, s.title, "value", "not judged", f"it does not have {', '.join(sorted(lacks))}")]
    call.notes |= {f"without {what}, which it does not have" for what in lacks}
    findings, _ = compared(fit.ways([s], free, inputs), got, dtype, name, [] if put or free else wanted)
    findings += [Finding(name, s.title, f"gradient by {n}", "not judged", f"it does not take {n}")
                 for n in by if n not in call.taken]  # fmt: skip
    if call.notes:
        findings[0].says += f" ({', '.join(sorted(call.notes))})"
    return findings


def compared(
    ways: Sequence[changes.Way], got: Sequence[dict[str, Floats]], dtype: str, name: str,
    wanted: Sequence[dict[str, Any]] = (), most: int = 3,
) -> tuple[list[Finding], changes.Way]:
    """A finding of the value, one of each gradient under what explains the value, and one of each choice that is free;
    and the way in which the value is explained. wanted: what is expected, where formulas need not be asked."""
    way, fits, findings = ways[0], list[fit.Fit](), list[Finding]()
    for by in got[0]:
        measured = [g[by] for g in got]
        allowed = max(way.set.tolerance[dtype], _DIFFERENCES if by and not wanted else 0)
        offs = []
        for w in [way] if by else ways:
            want = [np.asarray(e[by]) for e in wanted] or w.numbers(by=by) or []
            offs.append((max(relations.difference(m, x) for m, x in zip(measured, want)), w, want))
            if offs[-1][0] <= allowed:
                break
        off, way, want = offs[-1] if offs[-1][0] <= allowed else offs[0]
        finding = Finding(name, way.set.title, f"gradient by {by}" if by else "value", "differs", "", off, allowed)
        findings.append(finding)
        if off <= allowed:
            finding.state, finding.says = "agrees", f"the formula, in {len(measured)} cases"
        elif any(np.isnan(m).any() or not np.isfinite(m).any() for m in measured):
            finding.state, finding.says = "unexplained", "not finite"
        elif by and not any(m.any() for m in measured):
            finding.says = f"0: nothing flows to {by}"
        else:
            near, rounded = max(allowed, _DIFFERENCES if by else 0), off <= way.set.tolerance.get("float32", 0)
            held = [f for f in fits if f.holds(by, measured, near)]
            fits = held or fits
            found = held or fit.explain([way] if by else ways, measured, near, by, 1 if rounded else most,
                                        fits[0].change if by and fits else changes.AS_IT_IS)  # fmt: skip
            says = ", or ".join([f.words for f in found if f.way is found[0].way][:4])
            says = says if says or rounded else _by_choice(way, got, near, by)
            finding.says = "that of its value: " * bool(held) + says
            if not says and rounded:
                finding.says = f"the formula as near as float32 has it, and it got {dtype}"
            elif not says:
                finding.state, finding.says = "unexplained", _worst(want, measured)
            elif not by and found:
                fits, way = found, found[0].way
    for n, c in way.choices.items():
        usual = way.set.inputs[n]["choices"][0]
        says = f"{c}, as was found" + (f"; the formula's source has {usual}" if c != usual else "")
        findings.append(Finding(name, way.set.title, n, "agrees" if c == usual else "differs", says))
    return findings, way


def _by_choice(way: changes.Way, got: Sequence[dict[str, Floats]], allowed: float, by: str) -> str:
    """What explains the cases with each value of a choice, where one explanation for all is not enough."""
    for name, what in way.set.inputs.items():
        rows = {c: [k for k, i in enumerate(way.inputs) if i[name] == c] for c in what.get("choices", ())}
        if not rows or min(map(len, rows.values())) < 2:
            continue  # one case is explained by too much
        parts = []
        for choice, of_these in rows.items():
            alone = changes.Way(way.set, [way.inputs[k] for k in of_these], way.choices)
            values, gradients = ([got[k][n] for k in of_these] for n in ("", by))
            found = fit.explain([alone], values, allowed, "", 1)
            if by and found:
                found = [f for f in found if f.holds(by, gradients, allowed)] or fit.explain(
                    [alone], gradients, allowed, by, 1, found[0].change)  # fmt: skip
            said = ", or ".join(f.words or "the formula" for f in found[:2])
            parts += [f"where {name} is {choice}: {said}"] if found else []
        if len(parts) == len(rows):
            return "; ".join(parts)
    return ""


def _worst(want: Sequence[Floats], measured: Sequence[Floats]) -> str:
    worst = max(range(len(want)), key=lambda k: relations.difference(measured[k], want[k]))
    if want[worst].size != measured[worst].size:
        return f"{measured[worst].size} numbers where there are {want[worst].size}"
    with np.errstate(invalid="ignore"):
        at = int(np.nan_to_num(np.abs(measured[worst].ravel() - want[worst].ravel()), nan=np.inf).argmax())
    return f"case {worst}: {measured[worst].ravel()[at]:.9g} where the formula has {want[worst].ravel()[at]:.9g}"
