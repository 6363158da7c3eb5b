"""Tiny folders of pipelines that no family of meander.torch knows: see tiny.py."""

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    DDPMScheduler,
    EulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxTransformer2DModel,
    IFSuperResolutionPipeline,
    PNDMScheduler,
    QwenImageEditPipeline,
    QwenImageTransformer2DModel,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from tiny import clip, dynamic, t5, tokenizer, vae, wide
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

VISION = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]


def unet(width: int, **more) -> torch.nn.Module:
    return wide(
        UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 32),
            layers_per_block=1,
            in_channels=4,
            out_channels=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=width,
            norm_num_groups=8,
            attention_head_dim=8,
            **more,
        )
    )


def small_vae(**more) -> torch.nn.Module:
    return wide(
        AutoencoderKL(
            block_out_channels=[16, 16],
            down_block_types=["DownEncoderBlock2D"] * 2,
            up_block_types=["UpDecoderBlock2D"] * 2,
            latent_channels=4,
            norm_num_groups=4,
            **more,
        )
    )


BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}

QWEN_NETWORK = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
# Of FLUX, and of what is made after it.
FLUX_LIKE = {
    "in_channels": 64,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "axes_dims_rope": (4, 6, 6),
}
FLUX_NETWORK = {**FLUX_LIKE, "pooled_projection_dim": 32, "guidance_embeds": True}


def sd15() -> StableDiffusionPipeline:
    return StableDiffusionPipeline(
        unet=unet(32),
        vae=small_vae(),
        text_encoder=clip(CLIPTextModel, 32),
        tokenizer=tokenizer("clip", 77),
        scheduler=PNDMScheduler(**BETAS, skip_prk_steps=True, set_alpha_to_one=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def inpaint() -> StableDiffusionInpaintPipeline:
    return StableDiffusionInpaintPipeline(**sd15().components, requires_safety_checker=False)


def sdxl() -> StableDiffusionXLPipeline:
    return StableDiffusionXLPipeline(
        unet=unet(
            64,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=80,
            transformer_layers_per_block=1,
            use_linear_projection=True,
        ),
        vae=small_vae(),
        text_encoder=clip(CLIPTextModel, 32),
        text_encoder_2=clip(CLIPTextModelWithProjection, 32),
        tokenizer=tokenizer("clip", 77),
        tokenizer_2=tokenizer("clip", 77),
        scheduler=EulerDiscreteScheduler(**BETAS, timestep_spacing="leading"),
    )


def qwen_edit() -> QwenImageEditPipeline:
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    words = tokenizer("qwen", 1024)
    words.add_special_tokens({"additional_special_tokens": VISION})
    ids = {name: words.convert_tokens_to_ids(name) for name in VISION}
    encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": 400,
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 4096,
                "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 32,
                "fullatt_block_indexes": [0],
            },
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
        )
    )
    images = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56)
    processor = Qwen2VLProcessor(images, words, Qwen2VLVideoProcessor(), chat_template=words.chat_template)
    return QwenImageEditPipeline(
        transformer=wide(QwenImageTransformer2DModel(**QWEN_NETWORK)),
        vae=wide(
            AutoencoderKLQwenImage(
                base_dim=8,
                z_dim=16,
                dim_mult=[1, 1, 1, 1, 1],
                num_res_blocks=1,
                temperal_downsample=[False, True, True, False],
                latents_mean=[0.0] * 16,
                latents_std=[1.0] * 16,
            )
        ),
        text_encoder=encoder,
        tokenizer=words,
        processor=processor,
        scheduler=dynamic(),
    )


def kontext() -> FluxKontextPipeline:
    return FluxKontextPipeline(
        transformer=wide(FluxTransformer2DModel(**FLUX_NETWORK)),
        vae=vae(),
        text_encoder=clip(CLIPTextModel, 32),
        text_encoder_2=t5(),
        tokenizer=tokenizer("clip", 77),
        tokenizer_2=tokenizer("t5", 512),
        scheduler=dynamic(),
    )


def super_resolution() -> IFSuperResolutionPipeline:
    """Its network also gives a variance of each element."""
    noised = {"beta_schedule": "squaredcos_cap_v2"}
    network = UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(32, 64),
        in_channels=6,
        out_channels=6,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        cross_attention_dim=64,
        encoder_hid_dim=64,
        attention_head_dim=8,
        cross_attention_norm="group_norm",
        resnet_time_scale_shift="scale_shift",
        class_embed_type="timestep",
    )
    return IFSuperResolutionPipeline(
        tokenizer=tokenizer("t5", 512),
        text_encoder=t5(),
        unet=wide(network),
        scheduler=DDPMScheduler(**noised, variance_type="learned_range"),
        image_noising_scheduler=DDPMScheduler(**noised),
        safety_checker=None,
        feature_extractor=None,
        watermarker=None,
        requires_safety_checker=False,
    )


PIPELINES = {
    "super-resolution": (super_resolution, 16),
    "sd15": (sd15, 16),
    "inpaint": (inpaint, 16),
    "sdxl": (sdxl, 16),
    "qwen-edit": (qwen_edit, 64),
    "kontext": (kontext, 64),
}


def write(folder, *names):
    """Writes tiny folders, and returns them by name."""
    import json

    out = {}
    for name in names or PIPELINES:
        torch.manual_seed(1)
        build, edge = PIPELINES[name]
        pipe = build()
        out[name] = folder / name
        pipe.save_pretrained(out[name])
        settings = {"height": edge, "width": edge, "num_inference_steps": 4}
        (out[name] / "meander.json").write_text(json.dumps(settings))
    return out
