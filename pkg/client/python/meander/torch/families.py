"""The pipelines of diffusers whose networks a worker calls itself, a class each: those that are faster so, or whose
samples other engines share. All others are whole pipelines.

Formulas are those of diffusers 0.42 (diffusers/pipelines/*/pipeline_*.py), in the order in which the pipelines compute
them. A wrong sign or a swapped height and width still makes smooth images: nothing but parity shows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .accounts import rounds
from .family import JOINT_ATTENTION, Family, Prompt
from .faults import Fault
from .folder import Folder

if TYPE_CHECKING:
    import torch


class QwenImage(Family):
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
            **self.beside(embeds),
        )[0]

    def beside(self, embeds: torch.Tensor) -> dict[str, Any]:
        """What the network is given besides by padded embeddings, [n, L, C]."""
        return {}


class Krea2(Family):
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


FAMILIES: dict[str, type[Family]] = {"QwenImagePipeline": QwenImage, "Krea2Pipeline": Krea2}
"""Families by the class that model_index.json names."""


def find(folder: Folder, generic: bool = False, trust: bool = False, own: str = "") -> Family:
    """Returns the family of a folder: own, FILE.py:NAME; one of FAMILIES; or the generic one, which generic asks for,
    whole timesteps need, and trust lets take classes that are not tested. Fault of class config: a class that is not
    computed, or configuration files that have values of another kind."""
    family = FAMILIES.get(folder.class_name)
    try:
        out: Family
        if own:
            from . import own as of_file

            out = of_file.load(own, folder, trust)
        elif generic or family is None or rounds(folder):
            from .whole import Pipeline

            out = Pipeline(folder, trust)
            out.flags = ("generic",) * generic + ("trust-class",) * trust
        else:
            out = family(folder)
        out.card()
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as e:
        raise Fault("config", f"model: {folder.path}: a value of its config.json or meander.json: {e}") from e
    return out
