"""The pipelines of diffusers that make videos, as those of families."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from .family import JOINT_ATTENTION, Prompt, Standardized, pack
from .faults import Fault
from .folder import Folder

if TYPE_CHECKING:
    import torch

# Linear layers of blocks that attend to the video, and then to the prompt.
_CROSS_ATTENTION = tuple(f"attn{i}.{name}" for i in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0"))


class Wan(Standardized):
    """Wan 2.1 and Wan 2.2, videos from text (arXiv 2503.20314). A prompt is UMT5's [512, 4096], without a mask.

    The text is cleaned with ftfy, cut to 512 tokens and followed by zeros. Wan 2.2 5B takes a time for each token, all
    of them equal where there is no first image. Wan 2.2 A14B has two transformers: transformer_2 computes the states
    below sigma = boundary_ratio. The VAE is float32 in every dtype, as the model cards want it.
    """

    slug, true_cfg_scale, grid, packages, edge_limit = "wan", 5.0, "scheduler", ("ftfy",), 1024
    frames, fps, mu, solver_sigmas, text_channels = 81, 16.0, "none", True, ("text_dim", 4096)
    encoder_takes = {"do_classifier_free_guidance": False}
    parts = {
        "transformer": ("diffusers", "WanTransformer3DModel"),
        "transformer_2": ("diffusers", "WanTransformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLWan"),
        "text_encoder": ("transformers", "UMT5EncoderModel"),
    }
    optional, index_settings = ("transformer_2",), ("boundary_ratio", "expand_timesteps")
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

    def default_size(self) -> tuple[int, int]:
        return (704, 1280) if self.time_of_tokens else (480, 832)

    def count(self, prompt: Prompt) -> tuple[int, int]:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return len(self.pipe.tokenizer(prompt_clean(prompt.text(0))).input_ids), self.max_tokens

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


class HunyuanVideo(Standardized):
    """HunyuanVideo (arXiv 2412.03603). A prompt is Llama's [256, 4096] over a template, its mask, CLIP's pooled [768].

    Guidance is an input; the network takes it times 1000. The pipeline gives both encoders the same text.
    """

    slug, guidance, frames, fps, temporal, max_tokens, mu = "hunyuan-video", 6.0, 129, 24.0, 4, 256, "none"
    text_channels, guidance_embeds = ("text_embed_dim", 4096), True
    conditioning = ("prompt_embeds", "prompt_attention_mask", "pooled_prompt_embeds")
    encoder_gives = ("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask")
    masks = {"prompt_embeds": "prompt_attention_mask"}
    parts = {
        "transformer": ("diffusers", "HunyuanVideoTransformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLHunyuanVideo"),
        "text_encoder": ("transformers", "LlamaModel"),
        "text_encoder_2": ("transformers", "CLIPTextModel"),
    }
    tokenizers = ("tokenizer", "tokenizer_2")
    lora_targets = JOINT_ATTENTION

    def __init__(self, folder: Folder):
        super().__init__(folder)
        z = int(self.vae_config.get("latent_channels", 16))
        self.check_transformer(in_channels=z, out_channels=z, patch_size=2, patch_size_t=1, image_condition_type=None)
        self.temporal = int(self.vae_config.get("temporal_compression_ratio", 4))

    def pixels_per_latent(self) -> int:
        return int(self.vae_config.get("spatial_compression_ratio", 8))

    def default_size(self) -> tuple[int, int]:
        return 720, 1280

    def count(self, prompt: Prompt) -> tuple[int, int]:
        from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE as template

        ids = self.pipe.tokenizer(template["template"].format(prompt.text(0))).input_ids
        return len(ids) - template["crop_start"], self.max_tokens

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

    def scale_in(self, z):  # type: ignore[no-untyped-def]
        return z * self.vae.config.scaling_factor

    def scale_back(self, z):  # type: ignore[no-untyped-def]
        return z / self.vae.config.scaling_factor


class LTX(Standardized):
    """LTX-Video (arXiv 2501.00103). A prompt is T5's [128, 4096] and its mask. Positions depend on the frames a second.

    A VAE that takes a time of decoding is given 0, as the pipeline does where no other is asked for: it adds no noise.
    One whose decoder draws noise itself draws it of the latents, so that equal ones give equal pixels.
    """

    slug, true_cfg_scale, frames, fps, temporal, max_tokens = "ltx", 3.0, 161, 25.0, 8, 128
    patch = (1, 1, 1)
    text_channels, encoder_takes = ("caption_channels", 4096), {"do_classifier_free_guidance": False}
    conditioning = encoder_gives = ("prompt_embeds", "prompt_attention_mask")
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

    def default_size(self) -> tuple[int, int]:
        return 512, 704

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
        if any(self.vae.config.decoder_inject_noise):
            import torch

            drawn = hashlib.sha256(x.float().cpu().numpy().tobytes()).digest()
            torch.manual_seed(int.from_bytes(drawn[:8], "little", signed=True))
        return self.vae.decode(z, at, return_dict=False)[0][0].transpose(0, 1)

    def _statistics(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, deviation = (b.view(1, -1, 1, 1, 1).to(z) for b in (self.vae.latents_mean, self.vae.latents_std))
        return mean, self.vae.config.scaling_factor / deviation
