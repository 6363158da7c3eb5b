"""The networks of Qwen-Image by vLLM-Omni's engine in this process: --network vllm-omni.

vLLM-Omni 0.30 pins diffusers 0.40, so it has an environment of its own: pip install 'meander-rl[omni]'. Its engine
loads the folder and gives the modules; what they are asked, and the protocol, is as with diffusers. One device, one
engine in a process: it has a group of torch.distributed, also where it is alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from .engine import Engine, is_out_of_memory
from .families import QwenImage
from .family import Settings
from .faults import Fault, first_sentence
from .folder import Folder
from .weights import Weights, add_products

NETWORK = "vllm-omni"
"""What --network calls it."""
_CLASS = "QwenImagePipeline"
_OFF = ("zero_cond_t", "use_layer3d_rope", "use_additional_t_cond")  # of editing, not compared with diffusers
_QUIET = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_PARTS = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_out": ("to_out.0",),
}
"""The layers of diffusers that one of vLLM-Omni computes, one below the other, where their names differ."""


class Omni(QwenImage):
    """Qwen-Image whose transformer is that of vLLM-Omni, in the pipeline of diffusers."""

    def __init__(self, folder: Folder):
        super().__init__(folder)
        if other := [n for n in _OFF if self.config.get(n)]:
            raise Fault("config", f"transformer/config.json: {other[0]}: true; must be false for {NETWORK}")
        self.flags = (f"{NETWORK}-{metadata.version(NETWORK)}",)

    def load_part(self, part: str, dtype: torch.dtype) -> torch.nn.Module:
        if part != "transformer":
            return super().load_part(part, dtype)
        data = importlib.import_module("vllm_omni.diffusion.data")
        engines = importlib.import_module("vllm_omni.diffusion.diffusion_engine")
        config = data.OmniDiffusionConfig.from_kwargs(
            model=str(self.folder.path), model_class_name=_CLASS, dtype=dtype, enforce_eager=True, num_gpus=1,
            fa_deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        try:
            config.enrich_config()
            # Not by make_engine, which makes an image of 512 x 512 as a test.
            self.worker: Any = engines.DiffusionEngine(config).executor.driver_worker.worker
        except Exception as e:
            if is_out_of_memory(e):
                raise
            raise Fault("config", f"{NETWORK} does not load it: {type(e).__name__}: {first_sentence(e)}") from e
        pipe = self.worker.model_runner.pipeline
        # Where its files lack a tensor it draws one, so these parts are loaded as for diffusers.
        pipe.text_encoder = pipe.vae = None
        network: torch.nn.Module = pipe.transformer.eval().requires_grad_(False)
        network.dtype = dtype
        return network

    def beside(self, embeds: torch.Tensor) -> dict[str, Any]:
        """The padded length of each row, which this network does not take from the mask."""
        return {"txt_seq_lens": [embeds.shape[1]] * len(embeds)}


class Fused(Weights):
    """Versions of the weights of vLLM-Omni's network, by the names of diffusers.

    A tensor of diffusers is some rows of one of its, so replacements are copied in, and adapters are added to the
    columns of an output. Nothing is loaded by vLLM-Omni's own loaders, which pass over names that they do not know.
    """

    def __init__(self, network: torch.nn.Module, folder: Folder):
        """Fault of class config: network, that of a folder, is not that of diffusers, or not that of its files."""
        modules = dict(network.named_modules())
        self.places = dict[str, tuple[torch.nn.Module, slice]]()
        """Module and rows of each layer of diffusers."""
        self.parameters = dict[str, torch.Tensor]()
        """Each parameter of diffusers: it shares the memory of the network's."""
        for name, p in network.named_parameters():
            layer, _, leaf = name.rpartition(".")
            path, _, last = layer.rpartition(".")
            parts = _PARTS.get(last, (last,))
            n = p.shape[0] // len(parts)
            for i, part in enumerate(parts):
                rows = slice(i * n, (i + 1) * n)
                self.places[f"{path}.{part}".lstrip(".")] = (modules[layer], rows)
                self.parameters[f"{path}.{part}.{leaf}".lstrip(".")] = p.detach()[rows]
        with torch.device("meta"):
            theirs = importlib.import_module("diffusers").QwenImageTransformer2DModel.from_config(
                folder.read("transformer", "config.json")
            )
        super().__init__({"": theirs})
        self.device = next(network.parameters()).device
        wanted = {n: list(t.shape) for n, t in theirs.state_dict().items()}
        if wrong := sorted(n for n in {*wanted, *self.tensors} if wanted.get(n) != self.tensors.get(n)):
            n = wrong[0]
            raise Fault(
                "config",
                f"transformer: {n}: {self.tensors.get(n, 'none')} in vLLM-Omni; must be {wanted.get(n, 'none')}, as in "
                f"diffusers ({len(wrong)} tensors differ): take the networks of diffusers, without --network",
            )
        if other := sorted(wanted.keys() ^ folder.tensors("transformer")):
            raise Fault(
                "config",
                f"transformer: {other[0]}: is missing or has no place in the network, as {len(other) - 1} more; must "
                "be the weights of transformer/config.json: copy the folder again",
            )

    def _state(self) -> dict[str, torch.Tensor]:
        return self.parameters

    def _hook(self, name: str) -> None:
        module, rows = self.places[name]

        def add(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
            if products := self._active.get(name):
                y = (output[0] if isinstance(output, tuple) else output)[..., rows]  # a view of it
                y.copy_(add_products(products, inputs[0], y))

        module.register_forward_hook(add)
        self._hooked.add(name)


class OmniEngine(Engine):
    """The networks of the folder of a family, by vLLM-Omni."""

    family: Omni

    def __init__(self, family: Omni, settings: Settings, say: Callable[[str], None] = lambda detail: None):
        """Loads the folder. Fault of class config: vLLM-Omni has no such device, or does not load it."""
        say("importing vLLM-Omni")
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        super().__init__(family, dataclasses.replace(settings, device=_device(settings.device)), say)
        self.weights = Fused(family.transformer, family.folder)
        context = importlib.import_module("vllm_omni.diffusion.forward_context").set_forward_context
        self._context: Callable[[], Any] = functools.partial(
            context, vllm_config=family.worker.vllm_config, omni_diffusion_config=family.worker.od_config
        )

    def within(self, compute: Callable[[], Any]) -> Any:
        with torch.inference_mode(), self._context():
            return compute()


def find(folder: Folder) -> Omni:
    """Returns the family of a folder. Fault of class config: vLLM-Omni is not installed, or does not have it here."""
    if importlib.util.find_spec("vllm_omni") is None:
        raise Fault("config", "packages: no vllm_omni; pip install 'meander-rl[omni]', in an environment of its own")
    if folder.class_name != _CLASS:
        raise Fault("config", f"model_index.json: _class_name: {folder.class_name:.80}; must be {_CLASS} for {NETWORK}")
    try:
        out = Omni(folder)
        out.card()
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as e:
        raise Fault("config", f"model: {folder.path}: a value of its config.json or meander.json: {e}") from e
    return out


def _device(name: str) -> str:
    """The device of vLLM-Omni's platform. Fault of class config: it has none, or not that of the name."""
    platform = importlib.import_module("vllm_omni.platforms").current_omni_platform
    if not platform.get_device_count():
        raise Fault("config", f"device: {name}; {NETWORK} has no platform for this machine: it needs a GPU")
    own = str(platform.get_torch_device(0))
    kind, _, _ = own.partition(":")
    if name not in ("auto", own, kind):
        other = name.removeprefix(f"{kind}:")
        hint = f"; for another set CUDA_VISIBLE_DEVICES={other}" if kind == "cuda" and other.isdecimal() else ""
        raise Fault("config", f"device: {name}; must be {own} or auto for {NETWORK}{hint}")
    return own
