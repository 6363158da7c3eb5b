"""Reads what trainers save of a LoRA: which tensor is what, for which layer of a model, and what its configuration
says.

The names are those of lora_names.json, which the samplers read, too: what is refused here would be refused there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

Scaling = Callable[[str, int], float]
"""The scale of a module of a rank. ValueError: the configuration has another rank."""


class Rules:
    """lora_names.json."""

    def __init__(self) -> None:
        r = json.loads(Path(__file__).with_name("lora_names.json").read_text("utf-8"))
        self.suffixes: dict[str, str] = r["suffixes"]
        self.prefixes: list[str] = r["prefixes"]
        self.wrappers: list[str] = r["wrappers"]
        self.flat: list[str] = r["flat"]
        self.refused = [(re.compile(pattern), why) for pattern, why in r["refused"]]
        self.used: list[str] = r["used_fields"]
        self.harmless: dict[str, str] = r["fields_without_effect"]
        self.plain_inits: list[str] = r["plain_inits"]
        self.unsupported = re.compile(r["unsupported_pattern"])
        self.originals: list[list[str]] = r["originals"]
        self.swapped: list[list[str]] = r["swapped"]


@lru_cache(1)
def rules() -> Rules:
    """What is known of names, read once."""
    return Rules()


def split(tensor: str) -> tuple[str, str, set[str]]:
    """The module of a tensor, what the tensor is of it (A, B, alpha), and what was taken off the module's name.

    ValueError: it is no part of a LoRA, with the reason and what to do.
    """
    r = rules()
    module, off = tensor, set()
    for wrapper in r.wrappers:  # of parts of the network, and of the two factors
        if wrapper in module:
            module = module.replace(wrapper, "")
            off.add(wrapper)
    suffix = next((s for s in r.suffixes if module.endswith(s)), "")
    module = module.removesuffix(suffix)
    while prefix := next((p for p in r.prefixes if module.startswith(p)), ""):
        module = module.removeprefix(prefix)
        off.add(prefix)
    for pattern, why in r.refused:
        if pattern.search(tensor) or pattern.search(module):
            raise ValueError(f"{tensor}: {why}")
    if not suffix or not module:
        raise ValueError(f"{tensor}: no tensor of a LoRA")
    return module, r.suffixes[suffix], off


class Resolver:
    """Finds the modules of a model, by name, that the name of a module in a file means."""

    def __init__(self, modules: Iterable[str]):
        self.own = {name: name for name in modules}
        self.flat = {name.replace(".", "_"): name for name in self.own}

    def resolve(self, name: str) -> tuple[list[str], bool]:
        """The modules in the order of their rows, and whether the halves of the rows are swapped; none where the model
        has none."""
        r, known = rules(), self.own
        prefix = next((p for p in r.flat if name.startswith(p)), "")

        def spell(text: str) -> str:
            return text.replace(".", "_") if prefix else text

        if prefix:
            name, known = name.removeprefix(prefix), self.flat
        if name in known:
            return [known[name]], False
        for original, target, beside in r.swapped:
            if beside in self.own and spell(original) == name:
                return [known[spell(target)]] if spell(target) in known else [], True
        for original, *targets in r.originals:
            before, starred, after = spell(original).partition("*")
            star = name[len(before) : len(name) - len(after)]
            if name != before + star + after or bool(star) != bool(starred):
                continue
            found = [spell(t).replace("*", star, 1) for t in targets]
            if all(f in known for f in found):
                return [known[f] for f in found], False
        return [], False


def parse_config(text: bytes) -> Scaling | None:
    """The scaling that adapter_config.json defines; None where it is empty.

    ValueError: every setting that changes results and is not supported, by its name.
    """
    if not text:
        return None
    try:
        fields = json.loads(text)
    except ValueError as e:
        raise ValueError(f"adapter configuration: {e}") from None
    if not isinstance(fields, dict):
        raise ValueError("adapter configuration: must be an object")
    c = {k.removeprefix("transformer."): v for k, v in fields.items()}  # diffusers names the component
    r, faults = rules(), []
    if c.get("peft_type") not in (None, "", "LORA"):
        faults.append(f"peft_type: {c['peft_type']!r}; must be LORA")
    if not _is_number(c.get("lora_alpha")):
        faults.append("lora_alpha: missing; must be a number")
    if not (c.get("r") is None or _is_number(c["r"])):
        faults.append(f"r: {c['r']!r}; must be a number")
    if c.get("use_rslora") not in (None, False, True):
        faults.append(f"use_rslora: {c['use_rslora']!r}; must be true or false")
    if c.get("bias") not in (None, "", "none"):
        faults.append(f"bias: {c['bias']!r}; must be none")
    init = json.dumps(c["init_lora_weights"]) if "init_lora_weights" in c else ""
    if init not in r.plain_inits:
        faults.append(
            f"init_lora_weights: {init}; not supported: the weights beneath the adapter are changed too; save it as a "
            "plain LoRA, with PEFT's path_initial_model_for_weight_conversion"
        )
    for k in sorted(c):
        if c[k] not in (None, False, "", [], {}) and k not in r.harmless and k not in r.used:
            faults.append(
                f"{k}: not supported; must be unset: merge the adapter with PEFT's merge_and_unload, and push the "
                "transformer with --full (push_weights)"
            )
    tables: list[list[tuple[re.Pattern[str], float]]] = []
    for field in ("rank_pattern", "alpha_pattern"):
        try:
            tables.append(_patterns(c.get(field)))
        except ValueError as e:
            faults.append(f"{field}: {e}")
    if faults:
        raise ValueError("adapter configuration: " + "\n".join(faults))
    ranks, alphas = tables

    def scale(module: str, rank: int) -> float:
        of = _first(ranks, module, c.get("r") or 0)
        if of not in (0, rank):
            raise ValueError(f"rank {rank}; the adapter configuration has {of:g}")
        alpha = _first(alphas, module, c["lora_alpha"])
        return alpha / (math.sqrt(rank) if c.get("use_rslora") else rank)

    return scale


def _patterns(table: Any) -> list[tuple[re.Pattern[str], float]]:
    """The entries of rank_pattern or alpha_pattern in their order; the first that matches counts."""
    if table is None:
        return []
    if not isinstance(table, dict):
        raise ValueError(f"{table!r}; must be an object")
    out = []
    for key, value in table.items():
        if rules().unsupported.search(key):
            raise ValueError(f"{key!r}: a form of Python's regular expressions that is not supported")
        if not _is_number(value):
            raise ValueError(f"{key!r}: must be a number")
        try:
            out.append((re.compile(rf"(.*\.)?({key})$"), value))
        except re.error as e:
            raise ValueError(f"{key!r}: {e}") from None
    return out


def _first(table: list[tuple[re.Pattern[str], float]], module: str, otherwise: float) -> float:
    return next((value for pattern, value in table if pattern.match(module)), otherwise)


def _is_number(v: Any) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool)
