"""The text encoders of a whole pipeline: on a device of their own, and what they give of a prompt, by its names."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as trees

if TYPE_CHECKING:
    from .whole import Pipeline

Cut = tuple[Any, int, int]
"""A tokenizer that cut a prompt, the tokens of that, and how many it may have."""
_ENCODED = ("embeds", "embeddings", "hidden_states", "mask")


def place(pipe: Any, device: torch.device, others: dict[str, Any]) -> None:
    """Moves the parts of a pipeline to a device, and others, by how their names begin, to theirs: what text encoders
    are called with is moved there, and what they give back."""
    if set(others.values()) == {device}:
        pipe.to(device)
        return
    networks = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    for name, part in networks.items():
        own = next((d for start, d in others.items() if name.startswith(start)), device)
        part.to(own)
        if name.startswith("text_encoder") and own != device:
            part.register_forward_pre_hook(lambda _, *given, to=own: moved(given, to), with_kwargs=True)
            part.register_forward_hook(lambda _, args, given: moved(given, device))
    fix(pipe, device)


def fix(pipe: Any, device: torch.device) -> None:
    """Has a pipeline say that it is on a device, whatever its parts are on: else it is that of the first."""
    here, kind = property(lambda self: device), type(pipe)
    pipe.__class__ = type(kind.__name__, (kind,), {"device": here, "_execution_device": here})


class Encoders:
    """The text encoders of a pipeline, which are read again from its folder when something is to be encoded."""

    def __init__(self, family: Pipeline):
        self._family, self.away = family, False
        parts = {name: part for name, part in family.pipe.components.items() if name in family.parts}
        self._parts = {name: part for name, part in parts.items() if name.startswith("text_encoder")}
        fix(family.pipe, family.device)
        for part in self._parts.values():
            for module in part.modules():
                module.register_forward_pre_hook(lambda *_: self.read())

    def read(self) -> None:
        """Has them in memory."""
        for name, part in self._parts.items() if self.away else ():
            read = self._family.load_part(name, self._family.dtype).to(self._family.encoders)
            for module, other in zip(part.modules(), read.modules(), strict=True):
                module._parameters, module._buffers = other._parameters, other._buffers
        self.away = False

    def free(self) -> None:
        """Gives their memory back."""
        for part in self._parts.values():
            part.to("meta")
        self.away = True


def moved(v: Any, device: torch.device) -> Any:
    """A value with its tensors on a device."""
    return trees.tree_map_only(torch.Tensor, lambda t: t.to(device), v)


@contextlib.contextmanager
def cuts() -> Iterator[list[Cut]]:
    """What is cut of prompts that are encoded meanwhile."""
    base: Any = importlib.import_module("transformers").PreTrainedTokenizerBase
    plain, found = base.__call__, list[Cut]()

    @functools.wraps(plain)
    def call(self: Any, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        cuts = kwargs.get("truncation") not in (None, False, "do_not_truncate")
        most = kwargs.get("max_length") or self.model_max_length
        special = {k: v for k, v in kwargs.items() if k == "add_special_tokens"}
        for one in (text if isinstance(text, list | tuple) else [text]) if cuts else ():
            n = len(plain(self, one, verbose=False, **special)["input_ids"]) if isinstance(one, str) else 0
            if n > most:
                found.append((self, n, most))
        return plain(self, text, *args, **kwargs)

    base.__call__ = call
    try:
        yield found
    finally:
        base.__call__ = plain


@functools.cache
def _named(function: Callable[..., Any]) -> list[tuple[int, int, list[str]]]:
    """The assignments of a function, by their first and last lines, with the names that they set."""
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError:  # there is no file of it
        return []
    found = []
    for node in ast.walk(ast.parse(textwrap.dedent("".join(lines)))):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and node.end_lineno:
            target = node.targets[0]
            names = [getattr(n, "id", "") for n in (target.elts if isinstance(target, ast.Tuple) else [target])]
            found.append((first + node.lineno - 1, first + node.end_lineno - 1, names))
    return found


def noting(method: Callable[..., Any], function: Any, notes: dict[str, torch.Tensor]) -> Any:
    """A method that encodes prompts, which notes what it gives for one sample, without an axis of samples, by the
    names that a function sets of it: prompt_embeds [L, D], negative_prompt_embeds, and masks. Where
    none is for L tokens, all of them count, and it is prompt_embeds_mask [L] of ones."""

    @functools.wraps(method)
    def noted(*args: Any, **kwargs: Any) -> Any:
        out, caller = method(*args, **kwargs), sys._getframe(1)
        if caller.f_code is not function.__code__:
            return out
        found = dict[str, torch.Tensor]()
        for first, last, names in _named(function):
            if first <= caller.f_lineno <= last:
                for name, value in zip(names, out if isinstance(out, tuple) else (out,), strict=False):
                    one = value[0] if isinstance(value, list | torch.Tensor) and len(value) == 1 else None
                    if name.endswith(_ENCODED) and isinstance(one, torch.Tensor) and 0 < one.ndim < 4:
                        found[name] = one.detach()
        lengths = [len(t) for name, t in found.items() if name.endswith("mask")]
        unmasked = {n: t for n, t in found.items() if t.ndim > 1 and len(t) not in lengths}
        notes.update(found | {f"{n}_mask": torch.ones(len(t)) for n, t in unmasked.items()})
        return out

    return noted
