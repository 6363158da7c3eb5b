"""The network that is trained, frozen, with a LoRA (arXiv 2106.09685): the transformer of a family of meander.torch, or
its two, or what a whole pipeline steps with."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import torch as safetensors

from ..plugs import accelerate
from ..torch import families
from ..torch.engine import find_device
from ..torch.family import Family, Size
from ..torch.faults import Fault
from ..torch.folder import Folder
from ..torch.sessions import Recipe
from . import distributed
from .whole import Whole

_ADAPTER = "adapter"
_ATTENTION = (
    "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "to_qkv_mlp_proj",
)  # fmt: skip
"""Layers of networks that have no family to name others: of the sample, of texts beside it, and of both."""
_GROWTH = 4.0
"""Of roundings within a network: see relative_error."""


Row = dict[str, torch.Tensor]
"""The tensors of one encoded prompt, float32, named as in Family.conditioning: prompt_embeds [L, D], pooled [D]."""


@dataclasses.dataclass
class Texts:
    """Encoded prompts of n samples, with the guidance input float32 [n], and where samples are guided their negative
    prompts."""

    rows: list[Row]
    """One of each sample."""
    guidance: torch.Tensor
    negative: list[Row] = dataclasses.field(default_factory=list)
    scale: float = 1.0
    """That of classifier-free guidance, where there are negative prompts."""
    recipes: list[Recipe] = dataclasses.field(default_factory=list)
    """What a whole pipeline is called with, of each sample; there is nothing else then."""


class Network:
    """velocity(x, sigma, ...) of a checkpoint with an adapter; the adapter's parameters alone have gradients.

    The base is kept in dtype, the adapter in float32 as optimizers want it; states, velocities and all that is computed
    of them are float32. The network is called by its family, as a worker of the torch engine calls it, and an adapter
    is computed as there: in float32, beside layers of dtype. targets: ends of the names of linear layers; none: those
    of the family. Two transformers, each of which computes its own sigmas, are both loaded and both get one; an update
    leaves the one that its batch does not train. checkpointing recomputes each block in the backward pass, for networks
    whose activations do not fit. shard splits all parameters over the processes, for networks that do not fit: then all
    processes call velocity, its backward pass, state, load and save without a state together, equally often.

    A folder of another class, and with generic any, is computed as a whole pipeline, with its own guidance.
    """

    whole: Whole | None = None
    """The pipeline, where it is computed as a whole."""

    def __init__(
        self, folder: str | Path, rank: int = 16, alpha: int = 16, targets: tuple[str, ...] = (), seed: int = 0,
        device: str = "cpu", dtype: torch.dtype = torch.float32, checkpointing: bool = False, shard: bool = False,
        generic: bool = False, trust_class: bool = False,
    ):  # fmt: skip
        """ValueError: the folder is not computed, with what is wrong; shard, in one process or of an older torch."""
        from peft import LoraConfig

        if shard and torch.__version__ < (2, 8):  # FSDP of older ones wants one dtype, and fails on CPUs
            raise ValueError(f"--shard: torch {torch.__version__}; must be 2.8 or newer")
        if shard and distributed.world() == 1:
            raise ValueError(
                "--shard: one process; must be several, as of torchrun --nproc-per-node 4 -m meander.train"
            )
        try:
            self.device, self.shard = find_device(device), shard
        except Fault as e:
            raise ValueError(f"--{e}") from e
        self.family = self._load(folder, dtype, generic, trust_class)
        self.networks, self.family.device = self.family.networks, self.device
        torch.manual_seed(seed)  # of the adapter's first matrices; the second ones begin at 0
        modules = list(targets or self.family.lora_targets or _ATTENTION)
        self.config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=modules)
        for network in self.networks.values():
            self._adapt(network, checkpointing)
        for p in self.parameters():
            p.data = p.data.float()
        self.gradients = 1.0  # the factor of a loss for gradients that are sums over the processes
        for network in self.networks.values():
            if shard:
                self.gradients = distributed.shard(network, _blocks(network), self.device)
            else:
                network.to(self.device)
            network.train(checkpointing)  # there is no dropout: it switches checkpointing alone
        if self.whole:
            try:
                self.whole.admit(shard)
            except Fault as e:
                raise ValueError(f"--model: {folder}: {e}") from e

    def _load(self, folder: str | Path, dtype: torch.dtype, generic: bool, trust: bool) -> Family:
        """The family of a folder, with its networks. ValueError: what is wrong with it."""
        try:
            family = families.find(Folder(folder), generic, trust)
            if family.cfg_rule == "inside":
                self.whole = Whole(family.folder.path, str(self.device), dtype, trust, self.shard)
                return self.whole.family
            family.check_part("transformer")
            network = family.load_part("transformer", dtype)
        except Fault as e:
            raise ValueError(f"--model: {folder}: {e}") from e
        if not self.shard:  # else a block is moved as it is split: the whole may not fit
            network.to(self.device)
        family.attach_transformer(network)
        return family

    def _adapt(self, network: Any, checkpointing: bool) -> None:
        """Adds the adapter. ValueError: the network takes none, or cannot recompute its activations."""
        name = type(network).__name__
        if not hasattr(network, "add_adapter"):
            raise ValueError(f"--model: {name} of diffusers takes no adapters")
        try:
            network.add_adapter(self.config, adapter_name=_ADAPTER)
        except ValueError as e:
            raise ValueError(f"--targets: {name}: {e}") from e
        if checkpointing:
            try:
                network.enable_gradient_checkpointing()
            except ValueError as e:
                raise ValueError(f"--checkpointing: {e}") from e

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """All parameters, the frozen ones, too, by their names of the networks."""
        for start, network in self.networks.items():
            yield from ((start + name, p) for name, p in network.named_parameters())

    def parameters(self) -> list[torch.nn.Parameter]:
        """The adapter's, by their names in order: float32."""
        return [p for n, p in sorted(self.named_parameters()) if f".{_ADAPTER}." in n]

    def untrained(self) -> list[torch.nn.Parameter]:
        """The adapter's parameters in networks that no process has a gradient for. All processes call it together."""
        out = []
        for network in self.networks.values() if len(self.networks) > 1 else ():
            ours = [p for n, p in network.named_parameters() if f".{_ADAPTER}." in n]
            trained = torch.tensor(float(any(p.grad is not None for p in ours)))
            distributed.largest(trained)
            out += [] if trained else ours
        return out

    def velocity(
        self, x: torch.Tensor, sigma: torch.Tensor, rows: list[Row], size: Size, guidance: torch.Tensor
    ) -> torch.Tensor:
        """v float32 [n, S, C] of states x float32 [n, S, C] at sigma float32 [n], for the prompts of n rows.

        guidance float32 [n] is the input of a network that takes it; others leave it.
        """
        return self.family.velocity(x, sigma * 1000, rows, size, guidance).float()

    def guided(
        self, x: torch.Tensor, sigma: torch.Tensor, texts: Texts, size: Size, rule: str, rescale: float = 0
    ) -> torch.Tensor:
        """Returns v under the classifier-free guidance of the texts, combined by rule: plain, rescaled to the length of
        the conditioned v token by token, or plain_clamped, shortened to that of the sample. In the share rescale it is
        then brought to the standard deviation of the conditioned v (arXiv 2305.08891, section 3.4)."""
        if texts.recipes and self.whole:
            return self.whole.velocity(x, sigma, texts.recipes)
        v = self.velocity(x, sigma, texts.rows, size, texts.guidance)
        if not texts.negative:
            return v
        away = self.velocity(x, sigma, texts.negative, size, texts.guidance)
        out = away + texts.scale * (v - away)
        if rule == "rescaled":
            out = out * (v.norm(dim=-1, keepdim=True) / out.norm(dim=-1, keepdim=True))
        elif rule == "plain_clamped":
            out = out * (v.flatten(1).norm(dim=-1) / out.flatten(1).norm(dim=-1)).clamp(max=1)[:, None, None]
        elif rule != "plain":
            raise ValueError(f"cfg_rule: {rule!r}; must be plain, rescaled or plain_clamped")
        if rescale:
            own, of = (t.flatten(1).std(dim=1)[:, None, None] for t in (v, out))
            out = out * (rescale * own / of + (1 - rescale))
        return out

    def relative_error(self) -> float:
        """What roundings alone may make of an output of the network, in root mean squares: of each of its L layers one
        of the dtype, which add up as a random walk does, with a factor for the sums within a layer and between."""
        layers = max(sum(hasattr(m, "weight") for m in network.modules()) for network in self.networks.values())
        return _GROWTH * layers**0.5 * torch.finfo(self.family.dtype).eps / 2

    @contextlib.contextmanager
    def base(self) -> Iterator[None]:
        """The network without its adapter: divergences are measured from it."""
        for network in self.networks.values():
            network.disable_adapters()
        try:
            yield
        finally:
            for network in self.networks.values():
                network.enable_adapters()

    def state(self) -> dict[str, torch.Tensor]:
        """The adapter under PEFT's names, a copy, float32, on the CPU."""
        return accelerate.gathered(self._adapter())

    def _adapter(self) -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters under PEFT's names, in order."""
        found = {
            accelerate.PREFIX + start + name.removeprefix(accelerate.PREFIX): p
            for start, network in self.networks.items()
            for name, p in accelerate.adapter_parameters(network, _ADAPTER).items()
        }
        return dict(sorted(found.items()))

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Loads the adapter of state(), all of it. ValueError: it is for another network."""
        mine = self._adapter()
        for name in sorted(mine.keys() | state.keys()):
            if name not in state or name not in mine:
                raise ValueError(f"adapter: {name} is {'missing' if name not in state else 'not of this network'}")
            if mine[name].shape != state[name].shape:
                raise ValueError(
                    f"adapter: {name} has shape {list(state[name].shape)}; must be {list(mine[name].shape)}"
                )
            if not torch.isfinite(state[name]).all():
                raise ValueError(f"adapter: {name} has NaN or infinity")
        with torch.no_grad():
            for name, p in mine.items():
                p.copy_(distributed.part(state[name], p))

    def save(self, folder: Path, state: dict[str, torch.Tensor] | None = None) -> None:
        """Writes PEFT's folder: adapter_model.safetensors and adapter_config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(encoded(self.state() if state is None else state))
        (folder / "adapter_config.json").write_text(self.config_json())

    def config_json(self) -> str:
        """The text of adapter_config.json, as PEFT writes it, without the folder of the base."""
        config = copy.deepcopy(self.config).to_dict()
        plain = {k: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for k, v in config.items()}
        return json.dumps({**plain, "base_model_name_or_path": None}, indent=2, sort_keys=True, default=str) + "\n"


def _blocks(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that diffusers keeps whole when it splits a network, inner ones first. ValueError: it names none."""
    kind = type(transformer)
    names = {*(kind._no_split_modules or ()), *(kind._repeated_blocks or ())}
    found = [m for m in reversed(list(transformer.modules())) if type(m).__name__ in names]
    if not found:
        raise ValueError(
            f"--shard: {kind.__name__}; must be a network whose blocks diffusers names (_no_split_modules)"
        )
    return found


def encoded(state: dict[str, torch.Tensor]) -> bytes:
    """Returns the safetensors file of an adapter: equal weights give equal bytes."""
    return safetensors.save(state)


def digest(state: dict[str, torch.Tensor]) -> str:
    """Returns the SHA-256 of the adapter's file."""
    return hashlib.sha256(encoded(state)).hexdigest()
