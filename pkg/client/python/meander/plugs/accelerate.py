"""What a loop with Hugging Face's accelerate needs to hand its adapter to a lane, sharded or not. Batches for several
processes: meander.dataset."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from ..client import sync

if TYPE_CHECKING:
    from accelerate import Accelerator

PREFIX = "base_model.model."
"""What begins PEFT's names of an adapter's tensors."""


def gather_adapter(
    accelerator: Accelerator, model: torch.nn.Module, adapter: str = "default"
) -> dict[str, torch.Tensor]:
    """The LoRA of a model under PEFT's names: whole, float32, on the CPU. All processes call it together.

    model: as prepared by accelerate, under DDP, sharded by FSDP2 (fully_shard) or as it is; a PeftModel, or a model of
    diffusers or transformers with add_adapter. Only the adapter is gathered, one tensor at a time.

    ValueError: the model has no such adapter.
    """
    return gathered(adapter_parameters(accelerator.unwrap_model(model), adapter))


def adapter_parameters(model: torch.nn.Module, adapter: str = "default") -> dict[str, torch.nn.Parameter]:
    """The parameters of the LoRA of a model under PEFT's names, sorted; of a sharded model each is a DTensor.

    ValueError: the model has no such adapter.
    """
    from peft.utils import get_peft_model_state_dict

    own = {name: p for name, p in model.named_parameters() if "lora_" in name and f".{adapter}." in name}
    if not own:
        raise ValueError(f"adapter: {adapter!r}; the model has no LoRA of that name")
    named = get_peft_model_state_dict(model, state_dict=own, adapter_name=adapter)
    return {k if k.startswith(PREFIX) else PREFIX + k: p for k, p in sorted(named.items())}


def gathered(parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Copies of parameters: whole, float32, on the CPU. Of sharded ones all processes call it together."""
    return {k: whole(p.detach()).float().cpu().clone().contiguous() for k, p in parameters.items()}


def whole(t: torch.Tensor) -> torch.Tensor:
    """A tensor itself, or, if it is sharded (a DTensor), what all processes have of it, which call it together."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def save_adapter(
    accelerator: Accelerator, model: torch.nn.Module, folder: str | Path, adapter: str = "default"
) -> None:
    """Writes the LoRA of a model (gather_adapter) in PEFT's form, in the first process. All call it together."""
    state = gather_adapter(accelerator, model, adapter)
    if accelerator.is_main_process:
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(state, Path(folder) / "adapter_model.safetensors")
        config = accelerator.unwrap_model(model).peft_config[adapter].to_dict()
        plain = {k: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for k, v in config.items()}
        (Path(folder) / "adapter_config.json").write_text(json.dumps(plain, default=str))


def push_adapter(
    accelerator: Accelerator,
    model: torch.nn.Module,
    client: sync.Client | None,
    lane: str = "",
    adapter: str = "default",
    **options: Any,
) -> int:
    """Has a lane serve the LoRA of a model, waits until its samplers have answered, and returns the version. All
    processes call it together, and all get the version; the client is that of the first one, others may give None.

    options: those of meander.policy.push_policy.

    PolicyRefused: no sampler can use it; ValueError: as gather_adapter. An error of the first process is raised in all.
    """
    from accelerate.utils import broadcast_object_list

    outcome: list[Any] = [None]
    with tempfile.TemporaryDirectory() as folder:
        save_adapter(accelerator, model, folder, adapter)
        if accelerator.is_main_process:
            try:
                outcome = [_push(client, folder, lane, options)]
            except Exception as e:  # the others wait for word of it
                outcome = [e]
    version = broadcast_object_list(outcome)[0]
    if isinstance(version, Exception):
        raise version
    return int(version)


def _push(client: sync.Client | None, folder: str, lane: str, options: dict[str, Any]) -> int:
    if client is None:
        raise ValueError("client: None; the first process must have one")
    pushed = sync.policy.push_policy(client, folder, lane, **options)
    sync.policy.taken(client, pushed)
    return int(pushed["policy_version"])
