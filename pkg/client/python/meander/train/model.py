"""The network that is trained: a transformer in the diffusers layout, frozen, with a LoRA (arXiv 2106.09685) on its
blocks."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import torch as safetensors

# The projections of a QwenImageTransformer2DModel block: 8 of attention and 4 of the feed-forward networks.
TARGETS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
)  # fmt: skip
FAMILY = "QwenImageTransformer2DModel"
_ADAPTER = "adapter"


class Network:
    """velocity(x, sigma, ...) of a checkpoint with an adapter; the adapter's parameters alone have gradients.

    The base is kept in dtype, the adapter in float32 as optimizers want it; states, velocities and all that is computed
    of them are float32. checkpointing recomputes each block in the backward pass, for networks whose activations do not
    fit.
    """

    def __init__(self, folder: str | Path, rank: int = 16, alpha: int = 16, targets: tuple[str, ...] = TARGETS, seed: int = 0, device: str = "cpu",
                 dtype: torch.dtype = torch.float32, checkpointing: bool = False):  # fmt: skip
        from diffusers import QwenImageTransformer2DModel
        from peft import LoraConfig

        self.folder, self.device = Path(folder), torch.device(device)
        config = self.folder / "transformer" / "config.json"
        if not config.is_file():
            raise ValueError(f"model: {folder}; must be a folder in the diffusers layout, with transformer/config.json")
        if (name := json.loads(config.read_text()).get("_class_name")) != FAMILY:
            raise ValueError(f"model: {folder} has a {name}; must have a {FAMILY}")
        self.transformer = QwenImageTransformer2DModel.from_pretrained(self.folder, subfolder="transformer", torch_dtype=dtype)
        self.transformer.requires_grad_(False)
        torch.manual_seed(seed)  # of the adapter's first matrices; the second ones begin at 0
        self.config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=list(targets))
        self.transformer.add_adapter(self.config, adapter_name=_ADAPTER)
        if checkpointing:
            self.transformer.enable_gradient_checkpointing()
        self.transformer.to(self.device)
        for p in self.parameters():
            p.data = p.data.float()
        self.transformer.train(checkpointing)  # there is no dropout: it switches checkpointing alone

    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for n, p in sorted(self.transformer.named_parameters()) if f".{_ADAPTER}." in n]

    def velocity(self, x: torch.Tensor, sigma: torch.Tensor, embeds: torch.Tensor, mask: torch.Tensor | None, grid: tuple[int, int]) -> torch.Tensor:
        """v of states x [B, S, C] at sigma [B], for embeddings [B, L, D] and their mask [B, L] (1: a token); grid is S
        in rows and columns."""
        dtype = self.transformer.dtype
        if mask is not None and bool(mask.all()):
            mask = None
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            v = self.transformer(
                hidden_states=x.to(dtype), timestep=sigma.to(dtype), encoder_hidden_states=embeds.to(dtype), encoder_hidden_states_mask=mask,
                img_shapes=[[(1, *grid)]] * len(x), return_dict=False)[0]  # fmt: skip
        return v.float()

    def guided(self, x: torch.Tensor, sigma: torch.Tensor, texts: "Texts", grid: tuple[int, int], scale: float, rule: str) -> torch.Tensor:
        """Returns v under classifier-free guidance with scale (1 and less: none), combined by rule: plain, rescaled to
        the length of the conditioned v token by token, or plain_clamped, shortened to that of the sample."""
        v = self.velocity(x, sigma, texts.embeds, texts.mask, grid)
        if scale <= 1 or texts.negative_embeds is None:
            return v
        away = self.velocity(x, sigma, texts.negative_embeds, texts.negative_mask, grid)
        out = away + scale * (v - away)
        if rule == "rescaled":
            out = out * (v.norm(dim=-1, keepdim=True) / out.norm(dim=-1, keepdim=True))
        elif rule == "plain_clamped":
            out = out * (v.flatten(1).norm(dim=-1) / out.flatten(1).norm(dim=-1)).clamp(max=1)[:, None, None]
        elif rule != "plain":
            raise ValueError(f"cfg_rule: {rule!r}; must be plain, rescaled or plain_clamped")
        return out

    @contextlib.contextmanager
    def base(self) -> Iterator[None]:
        """The network without its adapter: divergences are measured from it."""
        self.transformer.disable_adapters()
        try:
            yield
        finally:
            self.transformer.enable_adapters()

    @contextlib.contextmanager
    def holding(self, state: dict[str, torch.Tensor]) -> Iterator[None]:
        """The network with other weights of the adapter for a while, such as their running average."""
        own = self.state()
        self.load(state)
        try:
            yield
        finally:
            self.load(own)

    def state(self) -> dict[str, torch.Tensor]:
        """The adapter under PEFT's names, a copy, float32, on the CPU."""
        from peft.utils import get_peft_model_state_dict

        got = get_peft_model_state_dict(self.transformer, adapter_name=_ADAPTER)
        return {f"base_model.model.{k}": v.detach().float().cpu().clone().contiguous() for k, v in sorted(got.items())}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Loads the adapter of state(), all of it. ValueError: it is for another network."""
        from peft.utils import set_peft_model_state_dict

        mine = self.state()
        for name in sorted(mine.keys() | state.keys()):
            if name not in state or name not in mine:
                raise ValueError(f"adapter: {name} is {'missing' if name not in state else 'not of this network'}")
            if mine[name].shape != state[name].shape:
                raise ValueError(f"adapter: {name} has shape {list(state[name].shape)}; must be {list(mine[name].shape)}")
            if not torch.isfinite(state[name]).all():
                raise ValueError(f"adapter: {name} has NaN or infinity")
        set_peft_model_state_dict(self.transformer, {k.removeprefix("base_model.model."): v for k, v in state.items()}, adapter_name=_ADAPTER)

    def save(self, folder: Path, state: dict[str, torch.Tensor] | None = None) -> None:
        """Writes PEFT's folder: adapter_model.safetensors and adapter_config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(encoded(self.state() if state is None else state))
        (folder / "adapter_config.json").write_text(self.config_json())

    def config_json(self) -> str:
        config = copy.deepcopy(self.config).to_dict()
        plain = {k: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for k, v in config.items()}
        return json.dumps({**plain, "base_model_name_or_path": None}, indent=2, sort_keys=True, default=str) + "\n"


class Texts:
    """Encoded prompts of B samples: embeds [B, L, D] with mask [B, L], and where samples are guided those of their
    negative prompts."""

    def __init__(self, embeds: torch.Tensor, mask: torch.Tensor, negative_embeds: torch.Tensor | None = None, negative_mask: torch.Tensor | None = None):
        self.embeds, self.mask, self.negative_embeds, self.negative_mask = embeds, mask, negative_embeds, negative_mask


def encoded(state: dict[str, torch.Tensor]) -> bytes:
    """Returns the safetensors file of an adapter: equal weights give equal bytes."""
    return safetensors.save(state)


def digest(state: dict[str, torch.Tensor]) -> str:
    """Returns the SHA-256 of the adapter's file."""
    return hashlib.sha256(encoded(state)).hexdigest()
