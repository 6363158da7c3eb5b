"""The pipelines of diffusers that a worker computes: a class each, of what its files say and its network takes.

Formulas are those of diffusers 0.42 (diffusers/pipelines/*/pipeline_*.py), in the order in which the pipelines compute
them.

To add one: a subclass of Family here, or in videos.py, its line in FAMILIES, and its tiny checkpoint in the tests,
which compare it with the pipeline itself. A wrong sign or a swapped height and width still makes smooth images: nothing
but parity shows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .family import JOINT_ATTENTION, Family, Prompt, Standardized, pack
from .faults import Fault
from .folder import Folder
from .videos import LTX, HunyuanVideo, Wan

if TYPE_CHECKING:
    import torch


class QwenImage(Standardized):
    """Qwen-Image (arXiv 2508.02324). A prompt is [L, 3584], without the template's first 34 tokens."""

    slug, cfg_rule, negative_prompt, true_cfg_scale, packed_by_network = "qwen-image", "rescaled", " ", 4.0, 4
    unpadded, text_channels = True, ("joint_attention_dim", 3584)
    lora_targets = (*JOINT_ATTENTION, "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")
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

    def count(self, prompt: Prompt) -> tuple[int, int]:
        ids = self.pipe.tokenizer(self.pipe.prompt_template_encode.format(prompt.text(0))).input_ids
        return len(ids) - self.pipe.prompt_template_encode_start_idx, self.max_tokens

    def velocity(self, x, t, rows, size, guidance):  # type: ignore[no-untyped-def]
        embeds, mask = self.padded(rows)
        _, h, w = self.latent_grid(size)
        return self.transformer(
            hidden_states=x.to(self.dtype),
            timestep=t.to(self.dtype) / 1000,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, h // 2, w // 2)]] * len(rows),
            return_dict=False,
        )[0]


class StableDiffusion3(Family):
    """Stable Diffusion 3 and 3.5 (arXiv 2403.03206). A prompt is [77 + 256, 4096], of CLIP and T5, and pooled [2048].

    The encoders attend to their padding, so there are no masks. A folder without text_encoder_3 has zeros for T5, and
    CLIP's 77 tokens are then the limit.
    """

    slug, steps, true_cfg_scale, max_tokens, prompts, grid = "sd3", 28, 7.0, 256, 3, "scheduler"
    solver_sigmas, pooled_channels = True, 2048
    conditioning = ("prompt_embeds", "pooled_prompt_embeds")
    parts = {
        "transformer": ("diffusers", "SD3Transformer2DModel"),
        "vae": ("diffusers", "AutoencoderKL"),
        "text_encoder": ("transformers", "CLIPTextModelWithProjection"),
        "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
        "text_encoder_3": ("transformers", "T5EncoderModel"),
    }
    tokenizers, optional = ("tokenizer", "tokenizer_2", "tokenizer_3"), ("text_encoder_3", "tokenizer_3")
    lora_targets = JOINT_ATTENTION
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
        return super().conditioning_elements() + (self.clip_tokens + self.t5_tokens - self.max_tokens) * self.width()

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

    slug, steps, guidance, prompts, packed_by_network, solver_sigmas = "flux1", 28, 3.5, 2, 4, True
    guidance_embeds = False
    conditioning = encoder_gives = ("prompt_embeds", "pooled_prompt_embeds")
    parts = {
        "transformer": ("diffusers", "FluxTransformer2DModel"),
        "vae": ("diffusers", "AutoencoderKL"),
        "text_encoder": ("transformers", "CLIPTextModel"),
        "text_encoder_2": ("transformers", "T5EncoderModel"),
    }
    tokenizers = ("tokenizer", "tokenizer_2")
    lora_targets = (*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")

    def count(self, prompt: Prompt) -> tuple[int, int]:
        return len(self.pipe.tokenizer_2(prompt.text(1)).input_ids), self.max_tokens

    def velocity(self, x, t, rows, size, guidance):  # type: ignore[no-untyped-def]
        embeds = self.stack(rows, "prompt_embeds")
        return self.transformer(
            hidden_states=x.to(self.dtype),
            timestep=t.to(self.dtype) / 1000,
            guidance=guidance if self.takes_guidance() else None,
            pooled_projections=self.stack(rows, "pooled_prompt_embeds"),
            encoder_hidden_states=embeds,
            txt_ids=embeds.new_zeros(embeds.shape[1], 3),
            img_ids=self.positions(size).to(self.dtype),
            return_dict=False,
        )[0]


class ZImage(Family):
    """Z-Image (arXiv 2511.22699). A prompt is [L, 2560]: the second last layer of Qwen3 over a chat with thinking on.

    The network returns x0 - eps and its time runs from 0 at pure noise to 1, so v = -network(x, 1 - sigma). The
    pipeline's guidance is pos + g (pos - neg): the true_cfg_scale of the card is 1 + g, 6 for its default of 5.
    """

    slug, true_cfg_scale, unpadded, solver_sigmas, grid = "z-image", 1 + 5.0, True, None, "linspace_torch"
    text_channels, encoder_takes = ("cap_feat_dim", 2560), {"do_classifier_free_guidance": False}
    lora_targets = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")
    parts = {
        "transformer": ("diffusers", "ZImageTransformer2DModel"),
        "vae": ("diffusers", "AutoencoderKL"),
        "text_encoder": ("transformers", "Qwen3Model"),
    }

    def __init__(self, folder: Folder):
        super().__init__(folder)
        self.edge_limit = min(list(self.config.get("axes_lens", (1024, 512, 512)))[1:])

    def count(self, prompt: Prompt) -> tuple[int, int]:
        chat = [{"role": "user", "content": prompt.text(0)}]
        text = self.pipe.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return len(self.pipe.tokenizer(text).input_ids), self.max_tokens

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

    slug, guidance, packed_by_network, mu, solver_sigmas = "flux2", 4.0, 4, "flux2", True
    text_channels = ("joint_attention_dim", 15360)
    guidance_embeds: bool | None = True
    parts = {
        "transformer": ("diffusers", "Flux2Transformer2DModel"),
        "vae": ("diffusers", "AutoencoderKLFlux2"),
        "text_encoder": ("transformers", "Mistral3ForConditionalGeneration"),
    }
    lora_targets = (
        *JOINT_ATTENTION,
        "attn.to_qkv_mlp_proj",
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
    )

    def count(self, prompt: Prompt) -> tuple[int, int]:
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        chat = format_input([prompt.text(0)], system_message=self.pipe.system_message)
        ids = self.pipe.tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
        return len(ids[0]), self.max_tokens

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


class Flux2Klein(Flux2):
    """FLUX.2 klein. A prompt is [512, 3 D]: layers 9, 18 and 27 of Qwen3 over a chat with thinking off, padded.

    Guidance is classifier-free, against an empty prompt; the models that are distilled to 4 steps go without.
    """

    slug, true_cfg_scale, index_settings, guidance_embeds = "flux2-klein", 4.0, ("is_distilled",), None
    parts = {**Flux2.parts, "text_encoder": ("transformers", "Qwen3ForCausalLM")}

    def __init__(self, folder: Folder):
        super().__init__(folder)
        if folder.index.get("is_distilled"):
            self.true_cfg_scale, self.steps = 1.0, 4

    def count(self, prompt: Prompt) -> tuple[int, int]:
        text = self.pipe.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text(0)}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        return len(self.pipe.tokenizer(text).input_ids), self.max_tokens


class Krea2(Standardized):
    """Krea 2. A prompt is [L, 12 * 2560]: twelve layers of Qwen3-VL, without the template's first 34 tokens.

    The pipeline pads prompts to 512 tokens and masks the padding, here it is left away. Its guidance is
    pos + g (pos - neg): the true_cfg_scale of the card is 1 + g. The model that is distilled to 8 steps goes without
    guidance, and its sigmas are shifted alike at all sizes.
    """

    slug, steps, true_cfg_scale, packed_by_network, unpadded = "krea2", 28, 1 + 4.5, 4, True
    parts = {
        "transformer": ("diffusers", "Krea2Transformer2DModel"),
        "vae": ("diffusers", "AutoencoderKLQwenImage"),
        "text_encoder": ("transformers", "Qwen3VLModel"),
    }
    pipeline_settings, index_settings = ("text_encoder_select_layers",), ("is_distilled", "patch_size")
    lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    template_tokens, suffix_tokens = 34, 5
    """Tokens of the template before a prompt, which are dropped, and after it."""

    def __init__(self, folder: Folder):
        super().__init__(folder)
        self.layers = int(self.config.get("num_text_layers", 12))
        last = int(folder.read("text_encoder", "config.json").get("text_config", {}).get("num_hidden_layers", 36))
        chosen = folder.index.get("text_encoder_select_layers") or list(range(2, 36, 3))  # as the pipeline has it
        known = isinstance(chosen, list) and len(chosen) == self.layers
        if not known or not all(type(i) is int and 0 <= i <= last for i in chosen):
            raise Fault(
                "config",
                f"model_index.json: text_encoder_select_layers: {chosen!r:.80}; must be {self.layers} layers, from 0 "
                f"to {last}",
            )
        if (patch := folder.index.get("patch_size", 2)) != 2:
            raise Fault("config", f"model_index.json: patch_size: {patch!r:.80}; must be 2")
        if folder.index.get("is_distilled"):
            self.true_cfg_scale, self.steps, self.mu, self.mu_constant = 1.0, 8, "constant", 1.15

    def pixels_per_latent(self) -> int:
        return 2 ** len(self.vae_config.get("temperal_downsample", [0] * 3))

    def width(self) -> int:
        return int(self.config.get("num_text_layers", 12)) * int(self.config.get("text_hidden_dim", 2560))

    def count(self, prompt: Prompt) -> tuple[int, int]:
        ids = self.pipe.tokenizer(self.pipe.prompt_template_encode_prefix + prompt.text(0)).input_ids
        return len(ids) - self.template_tokens + self.suffix_tokens, self.max_tokens

    def encode_one(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        embeds, mask = self.pipe.encode_prompt(
            [prompt.text(0)], device=self.encoders, max_sequence_length=self.max_tokens
        )
        return {"prompt_embeds": embeds[0][mask[0]].flatten(1)}

    def velocity(self, x, t, rows, size, guidance):  # type: ignore[no-untyped-def]
        import torch

        embeds, mask = self.padded(rows)
        origin = torch.zeros(embeds.shape[1], 3, device=self.device)  # where the tokens of the prompt are
        return self.transformer(
            hidden_states=x.to(self.dtype),
            encoder_hidden_states=embeds.unflatten(-1, (self.layers, -1)),
            timestep=(t / 1000).to(self.dtype),
            position_ids=torch.cat([origin, self.positions(size)]),
            encoder_attention_mask=mask,
            return_dict=False,
        )[0]


FAMILIES: dict[str, type[Family]] = {
    "QwenImagePipeline": QwenImage,
    "StableDiffusion3Pipeline": StableDiffusion3,
    "FluxPipeline": Flux,
    "ZImagePipeline": ZImage,
    "Flux2Pipeline": Flux2,
    "Flux2KleinPipeline": Flux2Klein,
    "Krea2Pipeline": Krea2,
    "WanPipeline": Wan,
    "HunyuanVideoPipeline": HunyuanVideo,
    "LTXPipeline": LTX,
}


def find(folder: Folder, generic: bool = False, trust: bool = False, own: str = "") -> Family:
    """Returns the family of a folder: own, FILE.py:NAME; one of FAMILIES; or the generic one, which generic asks for
    and trust lets take classes that are not tested. Fault of class config: a class that is not computed, or configuration
    files that have values of another kind."""
    family = FAMILIES.get(folder.class_name)
    try:
        out: Family
        if own:
            from . import own as of_file

            out = of_file.load(own, folder, trust)
        elif generic or family is None:
            from .whole import Pipeline

            out = Pipeline(folder, trust)
            out.flags = ("generic",) * generic + ("trust-class",) * trust
        else:
            out = family(folder)
        out.card()
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as e:
        raise Fault("config", f"model: {folder.path}: a value of its config.json or meander.json: {e}") from e
    return out
