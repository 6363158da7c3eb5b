"""The pipelines of diffusers that a worker computes: a class each, of what its files say and its network takes.

A family is known from configuration files alone (card) until the engine gives it the loaded pipeline (attach). Formulas
are those of diffusers 0.42 (diffusers/pipelines/*/pipeline_*.py), in the order in which the pipelines compute them.

To add one: a subclass of Family here, its line in FAMILIES, and its tiny checkpoint in the tests, which compare it with
the pipeline itself. A wrong sign or a swapped height and width still makes smooth images: nothing but parity shows it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .faults import Fault
from .folder import Folder

if TYPE_CHECKING:
    import torch

TOKENIZERS = frozenset(
    {
        "CLIPTokenizer",
        "CLIPTokenizerFast",
        "T5Tokenizer",
        "T5TokenizerFast",
        "Qwen2Tokenizer",
        "Qwen2TokenizerFast",
        "PreTrainedTokenizerFast",
        "TokenizersBackend",
    }
)
"""Tokenizers of transformers that a folder may name."""

# Linear layers of blocks in which image and text attend to each other.
_JOINT_ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
_FLOW_SOLVERS = ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler")


@dataclass(frozen=True)
class Size:
    """The size of a sample: frames (1 for images), and pixels."""

    frames: int
    height: int
    width: int


@dataclass(frozen=True)
class Prompt:
    """The texts of one prompt, one for each place that the family has for them; those not given are the first."""

    texts: tuple[str, ...]

    def text(self, place: int) -> str:
        return self.texts[place] if place < len(self.texts) else self.texts[0]


def pack(z: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """Returns the tokens [n, S, c pt ph pw] of a latent grid [n, c, F, H, W], rows first, channels (c, pt, ph, pw)."""
    n, c, f, h, w = z.shape
    t, y, x = patch
    z = z.reshape(n, c, f // t, t, h // y, y, w // x, x).permute(0, 2, 4, 6, 1, 3, 5, 7)
    return z.reshape(n, (f // t) * (h // y) * (w // x), c * t * y * x)


def unpack(s: torch.Tensor, patch: tuple[int, int, int], grid: tuple[int, int, int]) -> torch.Tensor:
    """Returns the latent grid [n, c, F, H, W] of tokens: the inverse of pack, for a grid (F, H, W)."""
    n, _, width = s.shape
    (t, y, x), (f, h, w) = patch, grid
    c = width // (t * y * x)
    s = s.reshape(n, f // t, h // y, w // x, c, t, y, x).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return s.reshape(n, c, f, h, w)


class Family:
    """What the pipelines have in common. A subclass sets the facts and defines encode_one and velocity."""

    slug = ""
    parts: dict[str, tuple[str, str]] = {}  # the networks: library and class, the only one that is loaded
    tokenizers: tuple[str, ...] = ("tokenizer",)
    optional: tuple[str, ...] = ()  # parts that a folder may go without
    conditioning: tuple[str, ...] = ("prompt_embeds",)
    unpadded = False  # prompt_embeds is as long as the prompt: readers that pad it need a mask
    patch = (1, 2, 2)
    temporal = 1
    steps, true_cfg_scale, guidance = 50, 1.0, 0.0  # defaults of the pipeline's call
    cfg_rule, negative_prompt, grid = "plain", "", "linspace"
    max_tokens, prompts = 512, 1
    packed_by_network = 1  # tokens of the latent grid in a token of the network
    edge_limit: int | None = None  # tokens of a side at most
    lora_targets: tuple[str, ...] = ()  # linear layers that a trainer adapts: ends of their names

    def __init__(self, folder: Folder):
        self.folder = folder
        self.config = folder.read("transformer", "config.json")
        self.vae_config = folder.read("vae", "config.json")
        self.scheduler_config = folder.read("scheduler", "scheduler_config.json")
        self.settings = folder.read_optional("meander.json")
        self.channels = int(self.config.get("in_channels", 16 * self.packed_by_network)) // self.packed_by_network
        self.scale = self.pixels_per_latent()

    # What configuration files say.

    def pixels_per_latent(self) -> int:
        return 2 ** (len(self.vae_config.get("block_out_channels", [0] * 4)) - 1)

    def width(self) -> int:
        """Channels of a token of prompt_embeds."""
        return int(self.config.get("joint_attention_dim", 4096))

    def conditioning_elements(self) -> int:
        """Elements of the tensors of one prompt at most."""
        return self.max_tokens * self.width()

    def default_edge(self) -> int:
        return 128 * self.scale

    def card(self) -> dict[str, Any]:
        """What a host must know, from configuration files alone; the protocol names the keys.

        true_cfg_scale is meander's: a velocity is neg + g (pos - neg), without guidance for g of at most 1.
        """
        s, edge = self.settings, self.default_edge()
        return {
            "class": self.folder.class_name,
            "family": self.slug,
            "latent": {
                "channels": self.channels,
                "patch": list(self.patch),
                "scale": self.scale,
                "temporal": self.temporal,
            },
            "size": {"frames": 1, "height": int(s.get("height", edge)), "width": int(s.get("width", edge))},
            "steps": int(s.get("num_inference_steps", self.steps)),
            "true_cfg_scale": float(s.get("true_cfg_scale", self.true_cfg_scale)),
            "guidance": float(s.get("guidance_scale", self.guidance)) if self.takes_guidance() else 0.0,
            "cfg_rule": self.cfg_rule,
            "negative_prompt": self.negative_prompt,
            "conditioning": [{"name": name, "mask": self.mask_of(name)} for name in self.conditioning],
            "max_prompt_tokens": self.max_tokens,
            "prompts": self.prompts,
            "max_pixels": self.max_pixels(),
            "conditioning_bytes": 4 * self.conditioning_elements(),
            "conditioning_token_bytes": 4 * self.width(),
            "grid": self.sigma_grid(),
            "mu": "linear" if self.scheduler_config.get("use_dynamic_shifting") else "none",
            "frames_rule": self.temporal,
        }

    def mask_of(self, name: str) -> str:
        """The name of the mask of a tensor, empty where every position counts."""
        return f"{name}_mask" if self.unpadded and name == "prompt_embeds" else ""

    def takes_guidance(self) -> bool:
        """Whether the guidance scale is an input of the network."""
        return False

    def max_pixels(self) -> int:
        default = int(self.settings.get("height", 0)) * int(self.settings.get("width", 0))
        return max(2048 * 2048, default)

    def sigma_grid(self) -> str:
        """Which sigmas the pipeline takes before it shifts them: see the table of the protocol."""
        c = self.scheduler_config
        return "uni_flow" if c.get("_class_name") in _FLOW_SOLVERS and c.get("use_flow_sigmas") else self.grid

    def check(self) -> dict[str, int]:
        """Returns the bytes of the weights of each part. Fault of class config: a part that may not be loaded."""
        there = [p for p in self.parts if self.folder.named_class(p) or p not in self.optional]
        sizes = {part: self.check_part(part) for part in there}
        for part in self.tokenizers:
            named = self.folder.named_class(part)
            if not (named in TOKENIZERS or (not named and part in self.optional)):
                raise Fault(
                    "config",
                    f"model_index.json: {part}: {named or 'none'}; must be one of {', '.join(sorted(TOKENIZERS))}",
                )
            if named:
                self.folder.check_tokenizer(part)
        return sizes

    def check_part(self, part: str) -> int:
        """Returns the bytes of the weights of a network. Fault of class config: it may not be loaded."""
        library, name = self.parts[part]
        if (named := self.folder.named_class(part)) != name:
            raise Fault(
                "config", f"model_index.json: {part}: {named or 'none'}; must be {name} for {self.folder.class_name}"
            )
        return self.folder.check_weights(part, library)

    def load_part(self, part: str, dtype: torch.dtype) -> torch.nn.Module:
        """Returns a network of the folder in a dtype, on the CPU and without gradients, by the class of parts alone."""
        library, name = self.parts[part]
        network = getattr(importlib.import_module(library), name).from_pretrained(
            str(self.folder.path / part), dtype=dtype, local_files_only=True, use_safetensors=True
        )
        return network.eval().requires_grad_(False)

    # What the loaded pipeline computes.

    def attach(self, pipe: Any, encoders: torch.device) -> None:
        """Takes the pipeline, whose text encoders are on the device encoders."""
        self.pipe, self.vae, self.encoders = pipe, pipe.vae, encoders
        self.attach_transformer(pipe.transformer)

    def attach_transformer(self, transformer: torch.nn.Module) -> None:
        """Takes the transformer where it is, which is all that velocity needs; before a trainer adapts it."""
        self.transformer = transformer
        parameter = next(transformer.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype

    def latent_grid(self, size: Size) -> tuple[int, int, int]:
        """Returns (F, H, W) of the latent of a size. Fault of class latents: no such size, with what is allowed."""
        rows, columns = self.scale * self.patch[1], self.scale * self.patch[2]
        f, h, w = size.frames, size.height, size.width
        if f < 1 or (f - 1) % self.temporal or (self.temporal == 1 and f != 1):
            raise Fault(
                "latents",
                f"frames: {f}; must be {'1' if self.temporal == 1 else f'1 more than a multiple of {self.temporal}'}",
            )
        if h < 1 or w < 1 or h % rows or w % columns:
            raise Fault("latents", f"height x width: {h} x {w}; must be positive multiples of {rows} x {columns}")
        if h * w > self.max_pixels():
            raise Fault("latents", f"height x width: {h} x {w}; must be at most {self.max_pixels()} pixels")
        if self.edge_limit is not None and max(h // rows, w // columns) > self.edge_limit:
            raise Fault(
                "latents",
                f"height x width: {h} x {w}; must be at most {self.edge_limit * rows} x {self.edge_limit * columns}",
            )
        return (f - 1) // self.temporal + 1, h // self.scale, w // self.scale

    def latent_shape(self, size: Size) -> tuple[int, int]:
        """Returns (S, C) of the latents of a size."""
        f, h, w = self.latent_grid(size)
        t, y, x = self.patch
        return (f // t) * (h // y) * (w // x), self.channels * t * y * x

    def grid_of(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        """Returns tokens x [n, S, C] as the latent grid [n, c, F, H, W]."""
        return unpack(x, self.patch, self.latent_grid(size))

    def count(self, prompt: Prompt) -> tuple[int, int]:
        """Returns the tokens of a prompt, with the template of the pipeline, and how many it may have."""
        return len(self.pipe.tokenizer(prompt.text(0)).input_ids), self.max_tokens

    def encode(self, prompt: Prompt, truncate: bool) -> tuple[dict[str, torch.Tensor], int]:
        """Returns the tensors of one prompt, named as in conditioning and without batch axis, and the tokens cut off.

        Prompts are encoded one at a time: beside others an encoder pads, and bits would depend on them. Fault of class
        prompt: too many tokens, unless truncate. CLIP's cut at 77 is none where T5 reads the same prompt.
        """
        n, limit = self.count(prompt)
        if n > limit and not truncate:
            raise Fault("prompt", f"prompt: {n} tokens; must be at most {limit}, or ask for truncation")
        return self.encode_one(prompt), max(0, n - limit)

    def encode_one(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def velocity(
        self, x: torch.Tensor, t: torch.Tensor, rows: list[dict[str, torch.Tensor]], size: Size, guidance: torch.Tensor
    ) -> torch.Tensor:
        """Returns eps - x0 [n, S, C] of states x f32 [n, S, C] at t = 1000 sigma f32 [n].

        rows are the conditionings; guidance, f32 [n], is the input of a network that takes it.
        """
        raise NotImplementedError

    def stack(self, rows: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
        """Returns a tensor of equal shape of all rows, [n, ...], as the network takes it."""
        import torch

        return torch.stack([row[name] for row in rows]).to(self.device, self.dtype)

    def decode(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        """Returns pixels [F, 3, H, W] in about -1..1 of latents x f32 [1, S, C]."""
        z = self.scale_back(self.grid_of(x, size).to(self.vae.dtype))
        return self.vae.decode(z[:, :, 0], return_dict=False)[0]

    def encode_media(self, media: torch.Tensor, size: Size) -> torch.Tensor:
        """Returns latents [1, S, C] of pixels f32 [F, 3, H, W] in -1..1: the mean of the VAE's distribution."""
        z = self.vae.encode(media.to(self.vae.dtype)).latent_dist.mode()
        return pack(self.scale_in(z[:, :, None]).float(), self.patch)

    def scale_in(self, z: torch.Tensor) -> torch.Tensor:
        """Latents of the VAE as the network sees them."""
        return (z - (self.vae.config.shift_factor or 0.0)) * self.vae.config.scaling_factor

    def scale_back(self, z: torch.Tensor) -> torch.Tensor:
        """The inverse of scale_in."""
        return z / self.vae.config.scaling_factor + (self.vae.config.shift_factor or 0.0)


class QwenImage(Family):
    """Qwen-Image (arXiv 2508.02324). A prompt is [L, 3584], without the template's first 34 tokens."""

    slug, cfg_rule, negative_prompt, true_cfg_scale, packed_by_network = "qwen-image", "rescaled", " ", 4.0, 4
    unpadded = True
    lora_targets = (*_JOINT_ATTENTION, "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")
    parts = {
        "transformer": ("diffusers", "QwenImageTransformer2DModel"),
        "vae": ("diffusers", "AutoencoderKLQwenImage"),
        "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration"),
    }

    def __init__(self, folder: Folder):
        super().__init__(folder)
        if self.config.get("guidance_embeds"):
            raise Fault(
                "config",
                "transformer/config.json: guidance_embeds: true; must be false, diffusers computes no such Qwen-Image",
            )

    def pixels_per_latent(self) -> int:
        return 2 ** len(self.vae_config.get("temperal_downsample", [0] * 3))

    def width(self) -> int:
        return int(self.config.get("joint_attention_dim", 3584))

    def count(self, prompt: Prompt) -> tuple[int, int]:
        ids = self.pipe.tokenizer(self.pipe.prompt_template_encode.format(prompt.text(0))).input_ids
        return len(ids) - self.pipe.prompt_template_encode_start_idx, self.max_tokens

    def encode_one(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        embeds, _ = self.pipe.encode_prompt([prompt.text(0)], device=self.encoders, max_sequence_length=self.max_tokens)
        return {"prompt_embeds": embeds[0]}

    def velocity(self, x, t, rows, size, guidance):  # type: ignore[no-untyped-def]
        # Prompts of unequal length are padded to the longest, and a mask keeps their padding out of attention.
        lengths = [len(row["prompt_embeds"]) for row in rows]
        embeds = x.new_zeros(len(rows), max(lengths), rows[0]["prompt_embeds"].shape[-1], dtype=self.dtype)
        mask = x.new_zeros(len(rows), max(lengths), dtype=bool)
        for i, row in enumerate(rows):
            embeds[i, : lengths[i]], mask[i, : lengths[i]] = row["prompt_embeds"].to(self.device), True
        _, h, w = self.latent_grid(size)
        return self.transformer(
            hidden_states=x.to(self.dtype),
            timestep=t.to(self.dtype) / 1000,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=None if min(lengths) == max(lengths) else mask,
            img_shapes=[[(1, h // 2, w // 2)]] * len(rows),
            return_dict=False,
        )[0]

    def decode(self, x, size):  # type: ignore[no-untyped-def]
        z = self.scale_back(self.grid_of(x, size).to(self.vae.dtype))
        return self.vae.decode(z, return_dict=False)[0][0].transpose(0, 1)

    def encode_media(self, media, size):  # type: ignore[no-untyped-def]
        z = self.vae.encode(media.to(self.vae.dtype).transpose(0, 1)[None]).latent_dist.mode()
        return pack(self.scale_in(z).float(), self.patch)

    def scale_in(self, z):  # type: ignore[no-untyped-def]
        mean, inverse = self._statistics(z)
        return (z - mean) * inverse

    def scale_back(self, z):  # type: ignore[no-untyped-def]
        mean, inverse = self._statistics(z)
        return z / inverse + mean

    def _statistics(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and inverse deviation of the VAE's channels, as the pipeline rounds them."""
        c = self.vae.config
        return z.new_tensor(c.latents_mean).view(1, -1, 1, 1, 1), 1.0 / z.new_tensor(c.latents_std).view(1, -1, 1, 1, 1)


class StableDiffusion3(Family):
    """Stable Diffusion 3 and 3.5 (arXiv 2403.03206). A prompt is [77 + 256, 4096], of CLIP and T5, and pooled [2048].

    The encoders attend to their padding, so there are no masks. A folder without text_encoder_3 has zeros for T5, and
    CLIP's 77 tokens are then the limit.
    """

    slug, steps, true_cfg_scale, max_tokens, prompts, grid = "sd3", 28, 7.0, 256, 3, "scheduler"
    conditioning = ("prompt_embeds", "pooled_prompt_embeds")
    parts = {
        "transformer": ("diffusers", "SD3Transformer2DModel"),
        "vae": ("diffusers", "AutoencoderKL"),
        "text_encoder": ("transformers", "CLIPTextModelWithProjection"),
        "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
        "text_encoder_3": ("transformers", "T5EncoderModel"),
    }
    tokenizers, optional = ("tokenizer", "tokenizer_2", "tokenizer_3"), ("text_encoder_3", "tokenizer_3")
    lora_targets = _JOINT_ATTENTION
    clip_tokens = 77

    def __init__(self, folder: Folder):
        super().__init__(folder)
        self.edge_limit = int(self.config.get("pos_embed_max_size") or 96)
        self.has_t5 = bool(folder.named_class("text_encoder_3"))
        self.t5_tokens = self.max_tokens  # also the rows of zeros without T5
        if not self.has_t5:
            self.max_tokens = self.clip_tokens

    def default_edge(self) -> int:
        return int(self.config.get("sample_size", 128)) * self.scale

    def conditioning_elements(self) -> int:
        return (self.clip_tokens + self.t5_tokens) * self.width() + int(self.config.get("pooled_projection_dim", 2048))

    def count(self, prompt: Prompt) -> tuple[int, int]:
        if self.has_t5:
            return len(self.pipe.tokenizer_3(prompt.text(2)).input_ids), self.max_tokens
        return max(
            len(t(prompt.text(i)).input_ids) for i, t in enumerate((self.pipe.tokenizer, self.pipe.tokenizer_2))
        ), self.max_tokens

    def encode_one(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            *([prompt.text(i)] for i in range(3)),
            device=self.encoders,
            do_classifier_free_guidance=False,
            max_sequence_length=self.t5_tokens,
        )
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

    def velocity(self, x, t, rows, size, guidance):  # type: ignore[no-untyped-def]
        v = self.transformer(
            hidden_states=self.grid_of(x, size)[:, :, 0].to(self.dtype),
            timestep=t,
            encoder_hidden_states=self.stack(rows, "prompt_embeds"),
            pooled_projections=self.stack(rows, "pooled_prompt_embeds"),
            return_dict=False,
        )[0]
        return pack(v[:, :, None], self.patch)


class Flux(Family):
    """FLUX.1. A prompt is T5's [512, 4096] and CLIP's pooled [768]. Guidance is an input of dev; schnell has none.

    The network multiplies time and guidance by 1000 in its own dtype, so both go in as the pipeline gives them.
    """

    slug, steps, guidance, prompts, packed_by_network = "flux1", 28, 3.5, 2, 4
    conditioning = ("prompt_embeds", "pooled_prompt_embeds")
    parts = {
        "transformer": ("diffusers", "FluxTransformer2DModel"),
        "vae": ("diffusers", "AutoencoderKL"),
        "text_encoder": ("transformers", "CLIPTextModel"),
        "text_encoder_2": ("transformers", "T5EncoderModel"),
    }
    tokenizers = ("tokenizer", "tokenizer_2")
    lora_targets = (*_JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")

    def takes_guidance(self) -> bool:
        return bool(self.config.get("guidance_embeds", False))

    def conditioning_elements(self) -> int:
        return super().conditioning_elements() + int(self.config.get("pooled_projection_dim", 768))

    def count(self, prompt: Prompt) -> tuple[int, int]:
        return len(self.pipe.tokenizer_2(prompt.text(1)).input_ids), self.max_tokens

    def encode_one(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        embeds, pooled, _ = self.pipe.encode_prompt(
            [prompt.text(0)], [prompt.text(1)], device=self.encoders, max_sequence_length=self.max_tokens
        )
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

    def velocity(self, x, t, rows, size, guidance):  # type: ignore[no-untyped-def]
        embeds = self.stack(rows, "prompt_embeds")
        return self.transformer(
            hidden_states=x.to(self.dtype),
            timestep=t.to(self.dtype) / 1000,
            guidance=guidance if self.takes_guidance() else None,
            pooled_projections=self.stack(rows, "pooled_prompt_embeds"),
            encoder_hidden_states=embeds,
            txt_ids=embeds.new_zeros(embeds.shape[1], 3),
            img_ids=self.image_ids(size),
            return_dict=False,
        )[0]

    def image_ids(self, size: Size) -> torch.Tensor:
        """Returns (0, row, column) of each token, [S, 3], in the network's dtype."""
        import torch

        _, h, w = self.latent_grid(size)
        ids = torch.zeros(h // 2, w // 2, 3, device=self.device)
        ids[..., 1] += torch.arange(h // 2, device=self.device)[:, None]
        ids[..., 2] += torch.arange(w // 2, device=self.device)
        return ids.reshape(-1, 3).to(self.dtype)


class ZImage(Family):
    """Z-Image (arXiv 2511.22699). A prompt is [L, 2560]: the second last layer of Qwen3 over a chat with thinking on.

    The network returns x0 - eps and its time runs from 0 at pure noise to 1, so v = -network(x, 1 - sigma). The
    pipeline's guidance is pos + g (pos - neg): the true_cfg_scale of the card is 1 + g, 6 for its default of 5.
    """

    slug, true_cfg_scale, unpadded = "z-image", 1 + 5.0, True
    lora_targets = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")
    parts = {
        "transformer": ("diffusers", "ZImageTransformer2DModel"),
        "vae": ("diffusers", "AutoencoderKL"),
        "text_encoder": ("transformers", "Qwen3Model"),
    }

    def __init__(self, folder: Folder):
        super().__init__(folder)
        self.edge_limit = min(list(self.config.get("axes_lens", (1024, 512, 512)))[1:])

    def width(self) -> int:
        return int(self.config.get("cap_feat_dim", 2560))

    def count(self, prompt: Prompt) -> tuple[int, int]:
        chat = [{"role": "user", "content": prompt.text(0)}]
        text = self.pipe.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return len(self.pipe.tokenizer(text).input_ids), self.max_tokens

    def encode_one(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        embeds, _ = self.pipe.encode_prompt(
            [prompt.text(0)],
            device=self.encoders,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_tokens,
        )
        return {"prompt_embeds": embeds[0]}

    def velocity(self, x, t, rows, size, guidance):  # type: ignore[no-untyped-def]
        import torch

        z = self.grid_of(x, size).to(self.dtype)
        embeds = [row["prompt_embeds"].to(self.device, self.dtype) for row in rows]
        out = self.transformer(list(z.unbind(0)), (1000 - t) / 1000, embeds, return_dict=False)[0]
        return pack(-torch.stack([o.float() for o in out]), self.patch)


FAMILIES: dict[str, type[Family]] = {
    "QwenImagePipeline": QwenImage,
    "StableDiffusion3Pipeline": StableDiffusion3,
    "FluxPipeline": Flux,
    "ZImagePipeline": ZImage,
}


def find(folder: Folder) -> Family:
    """Returns the family of a folder. Fault of class config: its class is none of FAMILIES."""
    family = FAMILIES.get(folder.class_name)
    if family is None:
        raise Fault(
            "config", f"model_index.json: _class_name: {folder.class_name!r}; must be one of {', '.join(FAMILIES)}"
        )
    return family(folder)
