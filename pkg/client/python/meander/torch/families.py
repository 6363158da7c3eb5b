"""The pipelines of diffusers that a worker computes: a class each, of what its files say and its network takes.

Formulas are those of diffusers 0.42 (diffusers/pipelines/*/pipeline_*.py), in the order in which the pipelines compute
them.

To add one: a subclass of Family here, its line in FAMILIES, and its tiny checkpoint in the tests, which compare it with
the pipeline itself. A wrong sign or a swapped height and width still makes smooth images: nothing but parity shows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .family import Family, Prompt, Size, pack
from .faults import Fault
from .folder import Folder

if TYPE_CHECKING:
    import torch

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

# Those of blocks that attend to the video, and then to the prompt.
_CROSS_ATTENTION = tuple(f"attn{i}.{name}" for i in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0"))


class Standardized(Family):
    """Families whose VAE takes videos, [n, c, F, H, W]: their latents have mean 0 and deviation 1 in each channel.

    The VAE computes frame after frame, with what it keeps of the frames before in itself: one call at a time.
    """

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
        """Mean and inverse deviation of the VAE's channels, as the pipelines round them."""
        c = self.vae.config
        return z.new_tensor(c.latents_mean).view(1, -1, 1, 1, 1), 1.0 / z.new_tensor(c.latents_std).view(1, -1, 1, 1, 1)


class QwenImage(Standardized):
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
    """Tokens that CLIP reads of a prompt."""

    def __init__(self, folder: Folder):
        super().__init__(folder)
        self.edge_limit = int(self.config.get("pos_embed_max_size") or 96)
        self.has_t5 = bool(folder.named_class("text_encoder_3"))
        self.t5_tokens = self.max_tokens  # also the rows of zeros without T5
        if not self.has_t5:
            self.max_tokens = self.clip_tokens

    def default_size(self) -> tuple[int, int]:
        edge = int(self.config.get("sample_size", 128)) * self.scale
        return edge, edge

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


class Flux2(Family):
    """FLUX.2. A prompt is [512, 3 D]: layers 10, 20 and 30 of Mistral 3 over a chat, padded. Guidance is an input.

    The 2x2 latents of a token are normalised together, by the running statistics of a batch norm in the VAE.
    """

    slug, guidance, packed_by_network, mu = "flux2", 4.0, 4, "flux2"
    parts = {
        "transformer": ("diffusers", "Flux2Transformer2DModel"),
        "vae": ("diffusers", "AutoencoderKLFlux2"),
        "text_encoder": ("transformers", "Mistral3ForConditionalGeneration"),
    }
    lora_targets = (
        *_JOINT_ATTENTION,
        "attn.to_qkv_mlp_proj",
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
    )

    def width(self) -> int:
        return int(self.config.get("joint_attention_dim", 15360))

    def takes_guidance(self) -> bool:
        return bool(self.config.get("guidance_embeds", True))

    def count(self, prompt: Prompt) -> tuple[int, int]:
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        chat = format_input([prompt.text(0)], system_message=self.pipe.system_message)
        ids = self.pipe.tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
        return len(ids[0]), self.max_tokens

    def encode_one(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        embeds, _ = self.pipe.encode_prompt([prompt.text(0)], device=self.encoders, max_sequence_length=self.max_tokens)
        return {"prompt_embeds": embeds[0]}

    def velocity(self, x, t, rows, size, guidance):  # type: ignore[no-untyped-def]
        import torch

        embeds = self.stack(rows, "prompt_embeds")
        _, h, w = self.latent_grid(size)
        one, tokens, lines, columns = (
            torch.arange(n, device=self.device) for n in (1, embeds.shape[1], h // 2, w // 2)
        )
        return self.transformer(
            hidden_states=x.to(self.dtype),
            timestep=t.to(self.dtype) / 1000,
            guidance=guidance if self.takes_guidance() else None,
            encoder_hidden_states=embeds,
            txt_ids=torch.cartesian_prod(one, one, one, tokens),
            img_ids=torch.cartesian_prod(one, lines, columns, one),
            return_dict=False,
        )[0]

    def decode(self, x, size):  # type: ignore[no-untyped-def]
        mean, deviation = self._statistics()
        z = self.grid_of(x.to(self.vae.dtype) * deviation + mean, size)
        return self.vae.decode(z[:, :, 0], return_dict=False)[0]

    def encode_media(self, media, size):  # type: ignore[no-untyped-def]
        mean, deviation = self._statistics()
        z = self.vae.encode(media.to(self.vae.dtype)).latent_dist.mode()
        return ((pack(z[:, :, None], self.patch) - mean) / deviation).float()

    def _statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and deviation [C] of the channels of a token."""
        bn, dtype = self.vae.bn, self.vae.dtype
        return bn.running_mean.to(dtype), (bn.running_var + self.vae.config.batch_norm_eps).sqrt().to(dtype)


class Wan(Standardized):
    """Wan 2.1 and Wan 2.2, videos from text (arXiv 2503.20314). A prompt is UMT5's [512, 4096], without a mask.

    The text is cleaned with ftfy, cut to 512 tokens and followed by zeros. Wan 2.2 5B takes a time for each token, all
    of them equal where there is no first image. Wan 2.2 A14B has two transformers: transformer_2 computes the states
    below sigma = boundary_ratio. The VAE is float32 in every dtype, as the model cards want it.
    """

    slug, true_cfg_scale, grid, packages, edge_limit = "wan", 5.0, "scheduler", ("ftfy",), 1024
    frames, fps = 81, 16.0
    parts = {
        "transformer": ("diffusers", "WanTransformer3DModel"),
        "transformer_2": ("diffusers", "WanTransformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLWan"),
        "text_encoder": ("transformers", "UMT5EncoderModel"),
    }
    optional = ("transformer_2",)
    lora_targets = _CROSS_ATTENTION

    def __init__(self, folder: Folder):
        super().__init__(folder)
        self.boundary_ratio = self._boundary_ratio()
        self.boundary = self.boundary_ratio * 1000 or None  # t = 1000 sigma
        z = int(self.vae_config.get("z_dim", 16))
        self.check_transformer(in_channels=z, out_channels=z, patch_size=list(self.patch))
        self.temporal = int(self.vae_config.get("scale_factor_temporal", 4))
        self.edge_limit = int(self.config.get("rope_max_seq_len", 1024))
        self.time_of_tokens = bool(folder.index.get("expand_timesteps"))
        if self.time_of_tokens:
            self.frames, self.fps = 121, 24.0

    def _boundary_ratio(self) -> float:
        """The sigma below which transformer_2 computes; 0: there is none."""
        ratio = self.folder.index.get("boundary_ratio")
        two = bool(self.folder.named_class("transformer_2"))
        if not two and ratio is None:
            return 0.0
        if not two or not isinstance(ratio, float) or not 0 < ratio < 1:
            raise Fault(
                "config",
                f"model_index.json: boundary_ratio: {ratio!r}; must be a number between 0 and 1 beside transformer_2, "
                "else absent",
            )
        own = [k for k, v in self.folder.read("transformer_2", "config.json").items() if self.config.get(k) != v]
        if own := [k for k in own if not k.startswith("_")]:
            raise Fault("config", f"transformer_2/config.json: {own[0]}: must be that of transformer/config.json")
        return ratio

    def pixels_per_latent(self) -> int:
        return int(self.vae_config.get("scale_factor_spatial", 8))

    def width(self) -> int:
        return int(self.config.get("text_dim", 4096))

    def default_size(self) -> tuple[int, int]:
        return (704, 1280) if self.time_of_tokens else (480, 832)

    def load_part(self, part: str, dtype: torch.dtype) -> torch.nn.Module:
        import torch

        return super().load_part(part, torch.float32 if part == "vae" else dtype)

    def count(self, prompt: Prompt) -> tuple[int, int]:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return len(self.pipe.tokenizer(prompt_clean(prompt.text(0))).input_ids), self.max_tokens

    def encode_one(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        embeds, _ = self.pipe.encode_prompt(
            [prompt.text(0)],
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_tokens,
            device=self.encoders,
        )
        return {"prompt_embeds": embeds[0]}

    def velocity(self, x, t, rows, size, guidance):  # type: ignore[no-untyped-def]
        late = [self.boundary is not None and at < self.boundary for at in t.tolist()]
        v = x.new_empty(x.shape)
        for second, network in enumerate(self.networks.values()):
            if of := [i for i, is_late in enumerate(late) if is_late == bool(second)]:
                v[of] = self._evaluate(network, x[of], t[of], [rows[i] for i in of], size).to(v.dtype)
        return v

    def _evaluate(self, network, x, t, rows, size):  # type: ignore[no-untyped-def]
        """The velocity of one of the transformers."""
        v = network(
            hidden_states=self.grid_of(x, size).to(self.dtype),
            timestep=t[:, None].expand(-1, x.shape[1]) if self.time_of_tokens else t,
            encoder_hidden_states=self.stack(rows, "prompt_embeds"),
            return_dict=False,
        )[0]
        return pack(v, self.patch)


class HunyuanVideo(Family):
    """HunyuanVideo (arXiv 2412.03603). A prompt is Llama's [256, 4096] over a template, its mask, CLIP's pooled [768].

    Guidance is an input; the network takes it times 1000. The pipeline gives both encoders the same text.
    """

    slug, guidance, frames, fps, temporal, max_tokens = "hunyuan-video", 6.0, 129, 24.0, 4, 256
    conditioning = ("prompt_embeds", "prompt_attention_mask", "pooled_prompt_embeds")
    masks = {"prompt_embeds": "prompt_attention_mask"}
    parts = {
        "transformer": ("diffusers", "HunyuanVideoTransformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLHunyuanVideo"),
        "text_encoder": ("transformers", "LlamaModel"),
        "text_encoder_2": ("transformers", "CLIPTextModel"),
    }
    tokenizers = ("tokenizer", "tokenizer_2")
    lora_targets = _JOINT_ATTENTION

    def __init__(self, folder: Folder):
        super().__init__(folder)
        z = int(self.vae_config.get("latent_channels", 16))
        self.check_transformer(in_channels=z, out_channels=z, patch_size=2, patch_size_t=1, image_condition_type=None)
        self.temporal = int(self.vae_config.get("temporal_compression_ratio", 4))

    def pixels_per_latent(self) -> int:
        return int(self.vae_config.get("spatial_compression_ratio", 8))

    def width(self) -> int:
        return int(self.config.get("text_embed_dim", 4096))

    def conditioning_elements(self) -> int:
        return self.max_tokens * (self.width() + 1) + int(self.config.get("pooled_projection_dim", 768))

    def default_size(self) -> tuple[int, int]:
        return 720, 1280

    def takes_guidance(self) -> bool:
        return bool(self.config.get("guidance_embeds", True))

    def count(self, prompt: Prompt) -> tuple[int, int]:
        from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE as template

        ids = self.pipe.tokenizer(template["template"].format(prompt.text(0))).input_ids
        return len(ids) - template["crop_start"], self.max_tokens

    def encode_one(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        embeds, pooled, mask = self.pipe.encode_prompt(
            [prompt.text(0)], device=self.encoders, max_sequence_length=self.max_tokens
        )
        return {"prompt_embeds": embeds[0], "prompt_attention_mask": mask[0], "pooled_prompt_embeds": pooled[0]}

    def velocity(self, x, t, rows, size, guidance):  # type: ignore[no-untyped-def]
        v = self.transformer(
            hidden_states=self.grid_of(x, size).to(self.dtype),
            timestep=t,
            encoder_hidden_states=self.stack(rows, "prompt_embeds"),
            encoder_attention_mask=self.stack(rows, "prompt_attention_mask"),
            pooled_projections=self.stack(rows, "pooled_prompt_embeds"),
            guidance=guidance.to(self.dtype) * 1000.0 if self.takes_guidance() else None,
            return_dict=False,
        )[0]
        return pack(v, self.patch)

    def decode(self, x, size):  # type: ignore[no-untyped-def]
        z = self.grid_of(x, size).to(self.vae.dtype) / self.vae.config.scaling_factor
        return self.vae.decode(z, return_dict=False)[0][0].transpose(0, 1)

    def encode_media(self, media, size):  # type: ignore[no-untyped-def]
        z = self.vae.encode(media.to(self.vae.dtype).transpose(0, 1)[None]).latent_dist.mode()
        return pack((z * self.vae.config.scaling_factor).float(), self.patch)


class LTX(Standardized):
    """LTX-Video (arXiv 2501.00103). A prompt is T5's [128, 4096] and its mask. Positions depend on the frames a second.

    A VAE that takes a time of decoding is given 0, as the pipeline does where no other is asked for: it adds no noise.
    """

    slug, true_cfg_scale, frames, fps, temporal, max_tokens = "ltx", 3.0, 161, 25.0, 8, 128
    patch = (1, 1, 1)
    conditioning = ("prompt_embeds", "prompt_attention_mask")
    masks = {"prompt_embeds": "prompt_attention_mask"}
    parts = {
        "transformer": ("diffusers", "LTXVideoTransformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLLTXVideo"),
        "text_encoder": ("transformers", "T5EncoderModel"),
    }
    lora_targets = _CROSS_ATTENTION

    def __init__(self, folder: Folder):
        super().__init__(folder)
        z = int(self.vae_config.get("latent_channels", 128))
        self.check_transformer(in_channels=z, out_channels=z, patch_size=1, patch_size_t=1)
        self.temporal = self._compression("temporal", "patch_size_t", 1)
        self.fps = float(self.settings.get("fps", self.fps))

    def pixels_per_latent(self) -> int:
        return self._compression("spatial", "patch_size", 4)

    def _compression(self, axis: str, patch: str, default: int) -> int:
        """Pixels or frames in a latent along an axis, as the VAE counts them."""
        c = self.vae_config
        halved = sum(map(bool, c.get("spatio_temporal_scaling", (True, True, True, False))))
        return int(c.get(f"{axis}_compression_ratio") or int(c.get(patch, default)) * 2**halved)

    def width(self) -> int:
        return int(self.config.get("caption_channels", 4096))

    def conditioning_elements(self) -> int:
        return self.max_tokens * (self.width() + 1)

    def default_size(self) -> tuple[int, int]:
        return 512, 704

    def encode_one(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        embeds, mask, _, _ = self.pipe.encode_prompt(
            [prompt.text(0)],
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_tokens,
            device=self.encoders,
        )
        return {"prompt_embeds": embeds[0], "prompt_attention_mask": mask[0]}

    def velocity(self, x, t, rows, size, guidance):  # type: ignore[no-untyped-def]
        f, h, w = self.latent_grid(size)
        return self.transformer(
            hidden_states=x.to(self.dtype),
            encoder_hidden_states=self.stack(rows, "prompt_embeds"),
            timestep=t,
            encoder_attention_mask=self.stack(rows, "prompt_attention_mask"),
            num_frames=f,
            height=h,
            width=w,
            rope_interpolation_scale=(self.temporal / self.fps, self.scale, self.scale),
            return_dict=False,
        )[0]

    def decode(self, x, size):  # type: ignore[no-untyped-def]
        z = self.scale_back(self.grid_of(x, size)).to(self.vae.dtype)
        at = z.new_zeros(1) if self.vae.config.timestep_conditioning else None
        return self.vae.decode(z, at, return_dict=False)[0][0].transpose(0, 1)

    def _statistics(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, deviation = (b.view(1, -1, 1, 1, 1).to(z) for b in (self.vae.latents_mean, self.vae.latents_std))
        return mean, self.vae.config.scaling_factor / deviation


FAMILIES: dict[str, type[Family]] = {
    "QwenImagePipeline": QwenImage,
    "StableDiffusion3Pipeline": StableDiffusion3,
    "FluxPipeline": Flux,
    "ZImagePipeline": ZImage,
    "Flux2Pipeline": Flux2,
    "WanPipeline": Wan,
    "HunyuanVideoPipeline": HunyuanVideo,
    "LTXPipeline": LTX,
}


def find(folder: Folder) -> Family:
    """Returns the family of a folder. Fault of class config: its class is none of FAMILIES."""
    family = FAMILIES.get(folder.class_name)
    if family is None:
        raise Fault(
            "config", f"model_index.json: _class_name: {folder.class_name!r}; must be one of {', '.join(FAMILIES)}"
        )
    return family(folder)
