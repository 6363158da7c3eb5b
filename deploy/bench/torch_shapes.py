#!/usr/bin/env python3
"""Folders of the shapes of published models with random weights, for deploy/bench/gpu-torch.sh.

    torch_shapes.py FOLDER DEVICE NAME[=LAYERS]...

The transformer has the published width, heads and tokens, and all its layers unless =LAYERS says fewer; the VAE is that
of the model. Text encoders have the published width, one layer or two and few words: they run once for each prompt. The
weights are drawn on the device in bf16, as those of the tests are (tiny.py): a velocity depends on every input.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "pkg/client/python/tests/torch_engine"))

try:
    import tiny
    import torch
    from diffusers import (
        AutoencoderKL,
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import (
        CLIPTextConfig,
        CLIPTextModelWithProjection,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        T5Config,
        T5EncoderModel,
    )
except ImportError as e:
    sys.exit(f"torch_shapes.py: {e}; python3 -m pip install './pkg/client/python[torch]'")


def clip(width, heads):
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=tiny.WORDS, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=2,
            num_attention_heads=heads, max_position_embeddings=77, projection_dim=width, bos_token_id=2, eos_token_id=1,
            pad_token_id=1, hidden_act="gelu",
        )
    )  # fmt: skip


def sd35(layers=24):
    """SD3.5 medium, 2.5 billion parameters."""
    network = SD3Transformer2DModel(
        sample_size=128, patch_size=2, in_channels=16, num_layers=layers, attention_head_dim=64, num_attention_heads=24,
        joint_attention_dim=4096, caption_projection_dim=1536, pooled_projection_dim=2048, out_channels=16,
        pos_embed_max_size=384, dual_attention_layers=tuple(range(min(13, layers))), qk_norm="rms_norm",
    )  # fmt: skip
    vae = AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4, block_out_channels=[128, 256, 512, 512], layers_per_block=2,
        latent_channels=16, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0609, scaling_factor=1.5305,
    )  # fmt: skip
    t5 = T5Config(
        vocab_size=tiny.WORDS, d_model=4096, d_kv=64, d_ff=10240, num_layers=1, num_heads=64,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return StableDiffusion3Pipeline(
        transformer=tiny.wide(network), scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=tiny.wide(vae),
        text_encoder=clip(768, 12), tokenizer=tiny.tokenizer("clip", 77),
        text_encoder_2=clip(1280, 20), tokenizer_2=tiny.tokenizer("clip", 77),
        text_encoder_3=T5EncoderModel(t5), tokenizer_3=tiny.tokenizer("t5", 512),
    )  # fmt: skip


def qwen_image(layers=60):
    """Qwen-Image, 20 billion parameters, 0.34 billion a layer."""
    text = {
        "vocab_size": tiny.WORDS, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 1,
        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 3584,
        "fullatt_block_indexes": [0],
    }  # fmt: skip
    return QwenImagePipeline(
        transformer=tiny.wide(QwenImageTransformer2DModel(num_layers=layers)), scheduler=tiny.dynamic(),
        vae=tiny.wide(AutoencoderKLQwenImage()),
        text_encoder=Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)),
        tokenizer=tiny.tokenizer("qwen", 2048),
    )  # fmt: skip


SHAPES = {"sd35": sd35, "qwen-image": qwen_image}


def main(folder, device, *names):
    for name in names:
        shape, _, layers = name.partition("=")
        began = time.monotonic()
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            pipe = SHAPES[shape](*([int(layers)] if layers else []))
        torch.set_default_dtype(torch.float32)
        # Tables that networks compute of their configuration may stay in float32: they are weights of no file.
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                part.to(torch.bfloat16)
        pipe.save_pretrained(Path(folder) / name.replace("=", "-"))
        parameters = sum(p.numel() for p in pipe.transformer.parameters()) / 1e9
        print(f"{name}: a transformer of {parameters:.2f} billion parameters, made in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
