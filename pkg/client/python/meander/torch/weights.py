"""Versions of the network's weights: adapters beside the base, and whole replacements of it.

A velocity names its version, and the base, named "", gives its bits again after any of them: an adapter is computed
beside the weights and never merged into them, and a replacement is copied in while the base's own weights are kept.

Several hosts share a worker, and one that was killed never unloads. So a version that finds no room takes that of the
one that was used longest ago, of any host: that one loads it again when a velocity says that it is not there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import memory
from .faults import Fault

_log = logging.getLogger("meander.torch")

MAX_ADAPTERS = 4
"""Adapters that are resident at most; one more takes the place of another."""
MAX_WHOLE = 2
"""Replacements of whole networks that are resident at most; one more takes the place of another."""


@dataclass
class Low:
    """One low-rank product of a linear layer: y += scale * B (A x), with A f32 [rank, in] and B f32 [out, rank]."""

    a: torch.Tensor
    """A."""
    b: torch.Tensor
    """B."""
    scale: float


class Weights:
    """The versions that are resident, of networks by what begins their names. Not for two threads at once."""

    def __init__(self, networks: dict[str, torch.nn.Module], compiled: bool = False):
        self.networks, self.compiled = networks, compiled
        self.device = next(next(iter(networks.values())).parameters()).device
        self.layers = {
            start + n: m
            for start, network in networks.items()
            for n, m in network.named_modules()
            if isinstance(m, torch.nn.Linear)
        }
        self.linear = {n: list(m.weight.shape) for n, m in self.layers.items()}
        """[out, in] of each linear layer."""
        self.tensors = {n: list(t.shape) for n, t in self._state().items()}
        """Shape of each tensor of the networks, by its name in diffusers."""
        # Versions in the order of their use, the one that was used longest ago first.
        self._adapters: dict[str, dict[str, list[Low]]] = {}
        self._free: list[
            dict[str, list[Low]]
        ] = []  # of an adapter that was unloaded: overwritten by one of equal shapes
        self._active: dict[str, list[Low]] = {}
        self._hooked: set[str] = set()
        self._whole: dict[str, dict[str, torch.Tensor]] = {}
        self._base: dict[str, torch.Tensor] | None = None  # once a replacement has come
        self._resident: str | None = ""  # the replacement in the network; None: a copy broke off

    def has(self, version: str) -> bool:
        """Whether a version is resident, beside the base."""
        return version in self._adapters or version in self._whole

    def use(self, version: str) -> bool:
        """Whether a version is resident, beside the base; one that is counts as used now, and is the last to go."""
        kept: dict[str, Any]
        for kept in (self._adapters, self._whole):
            if version in kept:
                kept[version] = kept.pop(version)
                return True
        return False

    def load_adapter(self, version: str, modules: list[Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Makes an adapter resident: modules [{name, scale, rank}], tensors NAME.A [rank, in] and NAME.B [out, rank].

        The k-th entry of a name, from 0, has the tensors NAME.A.k and NAME.B.k for k > 0, and all are added. scale is
        what the product is multiplied by: alpha / rank, or alpha / sqrt(rank), is resolved already.
        Fault of class weights: an unknown layer, a wrong shape, or a tensor too many.
        """
        if self.use(version):
            return
        wanted, used = self._parse(modules, tensors), set()
        for name, products in wanted.items():
            for k in range(len(products)):
                used |= {_key(name, "A", k), _key(name, "B", k)}
        if extra := sorted(set(tensors) - used):
            raise Fault("weights", f"tensors: {extra[0]!r} and {len(extra) - 1} more belong to no entry of modules")
        while len(self._adapters) >= MAX_ADAPTERS:
            self._evict(next(iter(self._adapters)), version)
        new = wanted.keys() - self._hooked
        for name in new:
            self._hook(name)
        if new and self.compiled:
            torch._dynamo.reset()  # what was compiled has no such hooks
        self._adapters[version] = self._place(wanted)

    def load_whole(self, version: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Makes a replacement of the network resident: all its parameters by name, in any dtype.

        They are kept in the network's dtype on the CPU, and the base beside them; one is copied in when a velocity
        names the version, so a GPU holds one network at a time. Fault of class weights: a name that is missing or
        unknown, a wrong shape, or too little memory, even in place of all the others.
        """
        if self.use(version):
            return
        needed = {start + n for start, network in self.networks.items() for n, _ in network.named_parameters()}
        if missing := sorted(needed - set(tensors)):
            raise Fault(
                "weights",
                f"tensors: {missing[0]!r} and {len(missing) - 1} more are missing; must be all of the network's",
            )
        if unknown := sorted(set(tensors) - set(self.tensors)):
            raise Fault("weights", f"tensors: {unknown[0]!r} and {len(unknown) - 1} more are unknown to the network")
        own, staged = self._state(), {}
        for name, tensor in tensors.items():
            if list(tensor.shape) != self.tensors[name]:
                raise Fault("weights", f"{name}: shape {list(tensor.shape)}; must be {self.tensors[name]}")
        self._make_room(version, {name: own[name] for name in tensors}, own)
        if self._base is None:  # at once, so that another worker's check sees it taken
            self._base = {n: t.detach().to("cpu", copy=True) for n, t in own.items()}
        for name, tensor in tensors.items():
            staged[name] = torch.empty(tensor.shape, dtype=own[name].dtype).copy_(tensor)
        self._whole[version] = staged

    def unload(self, version: str) -> None:
        """Gives the place of a version back; its adapter's memory stays for the next one of equal shapes."""
        if (adapter := self._adapters.pop(version, None)) is not None:
            self._free = [adapter]
            if self._active is adapter:
                self._active = {}
        if self._whole.pop(version, None) is not None and self._resident == version:
            self._resident = None  # the next velocity copies what it needs

    def select(self, version: str) -> None:
        """Makes the network compute a version, "" for the base. Fault of class weights: it is not resident."""
        if version and not self.use(version):
            raise Fault("weights", f"not loaded: weights {version:.80}; load it first")
        self._active = self._adapters.get(version, {})
        whole = version if version in self._whole else ""
        if whole == self._resident:
            return
        own, base = self._state(), self._base or {}  # kept when the first version came
        self._resident = None  # what breaks off in the middle is copied again
        source = {**base, **self._whole.get(whole, {})}
        for name, tensor in own.items():
            tensor.copy_(source[name])
        self._resident = whole

    def _state(self) -> dict[str, torch.Tensor]:
        """The tensors of the networks themselves."""
        return {start + n: t for start, network in self.networks.items() for n, t in network.state_dict().items()}

    def _evict(self, version: str, by: str) -> None:
        _log.info("weights %.12s take the place of %.12s", by, version)
        self.unload(version)

    def _make_room(self, version: str, whole: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> None:
        """Unloads as many replacements as another one needs the room of, the one that was used longest ago first.

        Fault of class weights: it, with the base where that is not kept yet, needs more than is free even then; none
        is unloaded.
        """
        needs = [tensor_bytes(whole), tensor_bytes(base) if self._base is None else 0]
        others = list(self._whole)
        count = max(0, len(others) + 1 - MAX_WHOLE)
        if (free := memory.free_bytes()) is not None:
            free += sum(tensor_bytes(self._whole[v]) for v in others[:count])
            while sum(needs) > free and count < len(others):
                free += tensor_bytes(self._whole[others[count]])
                count += 1
            if sum(needs) > free:
                kept = f", and {memory.size(needs[1])} to keep the checkpoint beside it" if needs[1] else ""
                raise Fault(
                    "weights",
                    f"main memory for version {version[:12]}: {memory.size(needs[0])}{kept}; must be within the "
                    f"{memory.size(free)} that are free: give the worker more (a container's limit counts) and push "
                    "the version again, or push an adapter",
                )
        for other in others[:count]:
            self._evict(other, version)

    def _parse(self, modules: list[Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Low]]:
        """The products as they came, checked against the network."""
        out: dict[str, list[Low]] = {}
        if not modules:
            raise Fault("weights", "modules: none; an adapter must have at least one")
        for i, m in enumerate(modules):
            where = f"modules[{i}]"
            if not isinstance(m, dict) or set(m) != {"name", "scale", "rank"}:
                raise Fault("weights", f"{where}: must be a map of name, scale, rank")
            name, scale, rank = m["name"], m["scale"], m["rank"]
            if name not in self.linear:
                raise Fault("weights", f"{where}: name: {name!r:.200}; must be a linear layer of the network")
            if isinstance(scale, bool) or not isinstance(scale, int | float) or scale - scale != 0:
                raise Fault("weights", f"{where}: scale: {scale!r:.80}; must be a finite number")
            if type(rank) is not int or rank < 1:
                raise Fault("weights", f"{where}: rank: {rank!r:.80}; must be at least 1")
            (rows, columns), k = self.linear[name], len(out.setdefault(name, []))
            pair: list[torch.Tensor] = []
            for letter, shape in (("A", [rank, columns]), ("B", [rows, rank])):
                tensor = tensors.get(_key(name, letter, k))
                if tensor is None or list(tensor.shape) != shape or tensor.dtype != torch.float32:
                    is_ = "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                    raise Fault("weights", f"{_key(name, letter, k)}: {is_}; must be f32 {shape}")
                pair.append(tensor)
            out[name].append(Low(pair[0], pair[1], float(scale)))
        return out

    def _place(self, wanted: dict[str, list[Low]]) -> dict[str, list[Low]]:
        """Puts the products on the device: over those of an unloaded adapter of equal layers and ranks, else anew."""

        def shapes(adapter: dict[str, list[Low]]) -> dict[str, list[torch.Size]]:
            return {n: [p.a.shape for p in ps] for n, ps in adapter.items()}

        free = next((f for f in self._free if shapes(f) == shapes(wanted)), None)
        self._free = []
        if free is None:
            return {
                n: [Low(p.a.to(self.device, copy=True), p.b.to(self.device, copy=True), p.scale) for p in ps]
                for n, ps in wanted.items()
            }
        for name, products in wanted.items():
            for old, new in zip(free[name], products, strict=True):
                old.a.copy_(new.a)
                old.b.copy_(new.b)
                old.scale = new.scale
        return free

    def _hook(self, name: str) -> None:
        """Adds the active products of a layer to what it computes; without any its output is left as it is."""

        def add(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
            products = self._active.get(name)
            return add_products(products, inputs[0], output) if products else None

        self.layers[name].register_forward_hook(add)
        self._hooked.add(name)


def add_products(products: list[Low], x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Returns what a layer computes of x with products added, in float32 and then in the dtype of its output."""
    x, y = x.float(), output.float()
    for p in products:
        y = y + p.scale * torch.nn.functional.linear(torch.nn.functional.linear(x, p.a), p.b)
    return y.to(output.dtype)


def _key(name: str, letter: str, k: int) -> str:
    return f"{name}.{letter}" + (f".{k}" if k else "")


def tensor_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """The bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors.values())
