"""A tiny folder of any class of pipelines of diffusers, of what the class says it is made of.

A class names its parts and their types; PARTS has the parts by the kind of pipeline, a row each, and a class takes
those of its kind that it names. So a new class of a known kind needs no line here.

    python zoo.py --classes A,B --write FOLDER                              writes tiny folders
    python zoo.py [--classes A,B] [--table zoo.md] [--list classes.json]    builds each, loads it as a worker does, proves
                                                                            it, and prints what came of it
"""

import argparse
import inspect
import json
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers.pipelines.ace_step.modeling_ace_step import (
    AceStepAudioTokenDetokenizer,
    AceStepAudioTokenizer,
    AceStepConditionEncoder,
)
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from diffusers.pipelines.stable_audio_3 import StableAudio3DurationEmbedder

sys.path.insert(0, os.environ.get("ZOO") or str(Path(__file__).parents[2]))

import proofs
import tiny
from tiny import WORDS, clip, t5, tokenizer, umt5, wide
from tiny_whole import BETAS, FLUX_LIKE, FLUX_NETWORK, PIPELINES, QWEN_NETWORK, small_vae

from meander.torch import admission
from meander.torch.engine import Settings
from meander.torch.folder import Folder
from meander.torch.sessions import PipelineEngine
from meander.torch.whole import Pipeline

FLOW = {"scheduler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)}
DDIM = {"scheduler": lambda: diffusers.DDIMScheduler(**BETAS, set_alpha_to_one=False, clip_sample=False)}
EULER = {"scheduler": lambda: diffusers.EulerDiscreteScheduler(**BETAS, timestep_spacing="leading")}
T5 = {"text_encoder": t5, "tokenizer": lambda: tokenizer("t5", 512)}
UMT5 = {"text_encoder": umt5, "tokenizer": lambda: tokenizer("t5", 512)}


def of(build):
    """The parts of a pipeline that is built whole elsewhere."""
    pipe = []

    def part(name):
        if not pipe:
            pipe.append(build())
        return getattr(pipe[0], name)

    names = inspect.signature(build).return_annotation
    takes = inspect.signature(names.__init__).parameters.items()
    return {
        n: (lambda n=n: part(n))
        for n, p in takes
        if n != "self" and not isinstance(p.default, bool) and "bool" not in str(p.annotation)
    }


def network(name, **config):
    """A network of diffusers by the name of its class."""
    return lambda: wide(getattr(diffusers, name)(**config))


def clip_vision(edge=32, cls=transformers.CLIPVisionModelWithProjection, width=32):
    return lambda: cls(
        transformers.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=edge,
            patch_size=edge // 4,
            projection_dim=width,
        )
    )


def clip_images():
    name = "CLIPImageProcessorPil" if hasattr(transformers, "CLIPImageProcessorPil") else "CLIPImageProcessor"
    return getattr(transformers, name)(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


def deep_vae():
    """Of 8 pixels an edge, for pipelines that choose among given sizes."""
    return wide(
        diffusers.AutoencoderKL(
            block_out_channels=[8] * 4,
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            latent_channels=4,
            norm_num_groups=4,
            mid_block_add_attention=False,
        )
    )


def shifting_vae():
    """With a shift of its latents."""
    return small_vae(shift_factor=0.1)


def gemma2():
    return wide(
        transformers.Gemma2Model(
            transformers.Gemma2Config(
                vocab_size=WORDS,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
            )
        )
    )


def gemma3():
    text = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 16,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return wide(transformers.Gemma3ForConditionalGeneration(config))


def bert():
    return wide(
        transformers.BertModel(
            transformers.BertConfig(
                vocab_size=WORDS,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=128,
            )
        )
    )


def glm():
    return wide(
        transformers.GlmModel(
            transformers.GlmConfig(
                vocab_size=WORDS,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
                pad_token_id=0,
                eos_token_id=1,
            )
        )
    )


def t5_gemma():
    """As Stable Audio 3 has it: the encoder alone, by its own class."""
    side = {
        "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
        "sliding_window": 512, "layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 16, "dropout_rate": 0.0,
    }  # fmt: skip
    config = transformers.T5GemmaConfig(encoder=dict(side), decoder=dict(side), is_encoder_decoder=False)
    return wide(transformers.T5GemmaEncoderModel(config))


def smol():
    """Its words reach to the one that Bria's pipeline has for an empty prompt."""
    return wide(
        transformers.SmolLM3ForCausalLM(
            transformers.SmolLM3Config(
                vocab_size=128001, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=1,
            )
        )
    )  # fmt: skip


def qwen_text():
    rope = {"mrope_section": [2, 3, 3], "rope_type": "default", "rope_theta": 1e6}
    return wide(
        transformers.Qwen2_5_VLTextModel(
            transformers.Qwen2_5_VLTextConfig(
                vocab_size=WORDS, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
                num_key_value_heads=2, rope_parameters=rope,
            )
        )
    )  # fmt: skip


def unet(**config):
    """The network of Stable Diffusion: of SD15, with another configuration."""
    return lambda: wide(diffusers.UNet2DConditionModel.from_config({**SD["unet"]().config, **config}))


def controlnet_of(name):
    """The ControlNet of the pipeline's own network; its image shrinks by 2, as the VAE's."""
    return lambda parts: wide(
        getattr(diffusers, name).from_unet(parts["unet"], conditioning_embedding_out_channels=(8, 16))
    )


def control_union(parts):
    """The one ControlNet of several conditions."""
    takes = inspect.signature(diffusers.ControlNetUnionModel.__init__).parameters
    config = {k: v for k, v in parts["unet"].config.items() if k in takes and k != "mid_block_type"}
    own = {"conditioning_embedding_out_channels": (8, 16), "num_trans_channel": 16, "num_proj_channel": 16}
    return wide(diffusers.ControlNetUnionModel(**config | own))


CROSS_FIRST = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
ADAPTER = network("T2IAdapter", channels=[16, 32], num_res_blocks=1, downscale_factor=2)
GEMMA2 = {"text_encoder": gemma2, "tokenizer": lambda: tokenizer("gemma", 300)}
PIXART = {
    "sample_size": 32,
    "num_layers": 1,
    "patch_size": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "in_channels": 4,
    "caption_channels": 64,
    "cross_attention_dim": 24,
    "out_channels": 8,
    "norm_type": "ada_norm_single",
    "use_additional_conditions": False,
}
WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 48,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


def wan_with_image(name):
    """The parts of a pipeline like Wan's from image to video, whose network has that name."""
    return {
        **UMT5,
        **FLOW,
        "vae": lambda: tiny.wan().vae,
        "image_encoder": clip_vision(),
        "image_processor": clip_images,
        "transformer": network(name, **WAN | {"in_channels": 36}, image_dim=32),
    }


SANA = {
    "patch_size": 1,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 4,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 4,
    "cross_attention_dim": 8,
    "caption_channels": 32,
    "sample_size": 16,
}
DC = {
    "in_channels": 3,
    "latent_channels": 4,
    "attention_head_dim": 2,
    "encoder_block_types": ("ResBlock",) * 5 + ("EfficientViTBlock",),
    "decoder_block_types": ("ResBlock",) * 5 + ("EfficientViTBlock",),
    "encoder_block_out_channels": (8,) * 6,
    "decoder_block_out_channels": (8,) * 6,
    "encoder_qkv_multiscales": ((),) * 5 + ((5,),),
    "decoder_qkv_multiscales": ((),) * 5 + ((5,),),
    "encoder_layers_per_block": (1,) * 6,
    "decoder_layers_per_block": [1] * 6,
    "downsample_block_type": "conv",
    "upsample_block_type": "interpolate",
    "decoder_norm_types": "rms_norm",
    "decoder_act_fns": "silu",
    "scaling_factor": 0.41407,
}
COGVIDEO_VAE = {
    "down_block_types": ["CogVideoXDownBlock3D"] * 4,
    "up_block_types": ["CogVideoXUpBlock3D"] * 4,
    "block_out_channels": [8] * 4,
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 2,
    "temporal_compression_ratio": 4,
}
COGVIDEO = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 2,
    "text_embed_dim": 64,
    "num_layers": 1,
    "sample_width": 2,
    "sample_height": 2,
    "sample_frames": 9,
    "patch_size": 2,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 226,
}
COGVIDEO_SCHEDULER = {"scheduler": lambda: diffusers.CogVideoXDDIMScheduler(clip_sample=False)}

LTX2 = {
    **FLOW,
    "text_encoder": gemma3,
    "tokenizer": lambda: tokenizer("gemma", 1024),
    "transformer": network(
        "LTX2VideoTransformer3DModel",
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        caption_channels=32,
        rope_double_precision=False,
        rope_type="split",
    ),
    "connectors": lambda: wide(
        LTX2TextConnectors(
            caption_channels=32,
            text_proj_in_factor=3,
            video_connector_num_attention_heads=4,
            video_connector_attention_head_dim=8,
            video_connector_num_layers=1,
            video_connector_num_learnable_registers=None,
            audio_connector_num_attention_heads=4,
            audio_connector_attention_head_dim=8,
            audio_connector_num_layers=1,
            audio_connector_num_learnable_registers=None,
            connector_rope_base_seq_len=32,
            rope_theta=10000.0,
            rope_double_precision=False,
            causal_temporal_positioning=False,
            rope_type="split",
        )
    ),
    "vae": network(
        "AutoencoderKLLTX2Video",
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=1,
        patch_size_t=1,
    ),
    "audio_vae": network(
        "AutoencoderKLLTX2Audio",
        base_channels=4,
        output_channels=2,
        ch_mult=(1,),
        num_res_blocks=1,
        attn_resolutions=None,
        in_channels=2,
        resolution=32,
        latent_channels=2,
        norm_type="pixel",
        causality_axis="height",
        mid_block_add_attention=False,
        sample_rate=16000,
        mel_hop_length=160,
        is_causal=True,
        mel_bins=8,
    ),
    "vocoder": lambda: wide(
        LTX2Vocoder(
            in_channels=16,
            hidden_channels=32,
            out_channels=2,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
            leaky_relu_negative_slope=0.1,
            output_sampling_rate=16000,
        )
    ),
}
ACE = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rope_theta": 1e4, "sliding_window": 16,
}  # fmt: skip
ACE_POOL = {**ACE, "audio_acoustic_hidden_dim": 8, "pool_window_size": 2, "num_attention_pooler_hidden_layers": 1}

SD = of(PIPELINES["sd15"][0])
SDXL = of(PIPELINES["sdxl"][0])
QWEN_EDIT = of(PIPELINES["qwen-edit"][0])
KONTEXT = of(PIPELINES["kontext"][0])

# By a pattern of the name of a class: the parts that it may have, and the edge of its images. The first that matches.
KINDS = [
    (
        r"^StableDiffusion3",
        {
            **of(tiny.sd3),
            "controlnet": lambda parts: wide(
                diffusers.SD3ControlNetModel.from_config(
                    {**parts["transformer"].config, "num_layers": 1, "extra_conditioning_channels": 0}
                )
            ),
        },
        64,
    ),
    (
        r"^StableDiffusionXLInstruct",
        {
            **SDXL,
            "unet": lambda: wide(
                diffusers.UNet2DConditionModel.from_config({**SDXL["unet"]().config, "in_channels": 8})
            ),
        },
        16,
    ),
    (
        r"^StableDiffusionXLControlNetUnion",
        {**SDXL, "controlnet": control_union},
        16,
    ),
    (
        r"^StableDiffusionXLAdapter",
        {
            **SDXL,
            "adapter": ADAPTER,
            "unet": lambda: wide(diffusers.UNet2DConditionModel.from_config({**SDXL["unet"]().config, **CROSS_FIRST})),
        },
        16,
    ),
    (r"^StableDiffusionAdapter", {**SD, **DDIM, "adapter": ADAPTER, "unet": unet(**CROSS_FIRST)}, 16),
    (r"^StableDiffusionXL", {**SDXL, "controlnet": controlnet_of("ControlNetModel")}, 16),
    (r"^StableDiffusionInstruct", {**SD, **DDIM, "unet": unet(in_channels=8)}, 16),
    (
        r"^StableDiffusionImageVariation",
        {**SD, **DDIM, "image_encoder": clip_vision(), "feature_extractor": clip_images},
        16,
    ),
    (
        r"^StableDiffusionUpscale",
        {
            **SD,
            **DDIM,
            "unet": unet(in_channels=7, num_class_embeds=1000),
            "low_res_scheduler": lambda: diffusers.DDPMScheduler(clip_sample=False),
        },
        16,
    ),
    (
        r"^StableDiffusion",
        {**SD, **DDIM, "controlnet": controlnet_of("ControlNetModel")},
        16,
    ),
    (
        r"^AnimateDiffSDXL",
        {
            **SDXL,
            "motion_adapter": network(
                "MotionAdapter",
                block_out_channels=(16, 32),
                motion_layers_per_block=1,
                motion_norm_num_groups=2,
                motion_num_attention_heads=4,
                use_motion_mid_block=False,
            ),
        },
        16,
    ),
    (r"^AltDiffusion", {}, 16),
    (
        r"^Marigold",
        {
            **SD,
            **DDIM,
            "unet": unet(in_channels=8),
            "default_denoising_steps": lambda: 4,
            "default_processing_resolution": lambda: 16,
            "prediction_type": lambda: "depth",
        },
        16,
    ),
    (
        r"^QwenImageControlNetInpaint",
        {
            **QWEN_EDIT,
            "controlnet": network(
                "QwenImageControlNetModel", **QWEN_NETWORK | {"num_layers": 1}, extra_condition_channels=4
            ),
        },
        64,
    ),
    (
        r"^QwenImage(?!21|Layered)",
        {
            **QWEN_EDIT,
            "controlnet": network("QwenImageControlNetModel", **QWEN_NETWORK | {"num_layers": 1}),
        },
        64,
    ),
    (r"^QwenImageLayered", QWEN_EDIT, 64),
    (
        r"^FluxFill",
        {
            **KONTEXT,
            "transformer": network("FluxTransformer2DModel", **FLUX_NETWORK | {"in_channels": 384, "out_channels": 64}),
        },
        64,
    ),
    (
        r"^VisualCloze",
        {
            **KONTEXT,
            "transformer": network("FluxTransformer2DModel", **FLUX_NETWORK | {"in_channels": 384, "out_channels": 64}),
        },
        64,
    ),
    (
        r"^FluxControl(?!Net)",
        {
            **KONTEXT,
            "transformer": network("FluxTransformer2DModel", **FLUX_NETWORK | {"in_channels": 128, "out_channels": 64}),
        },
        64,
    ),
    (
        r"^Flux(?!2|Prior)",
        {
            **KONTEXT,
            "controlnet": network("FluxControlNetModel", **FLUX_NETWORK),
        },
        64,
    ),
    (r"^Flux2Klein", of(tiny.flux2_klein), 64),
    (r"^Flux2", of(tiny.flux2), 64),
    (r"^ZImage(?!Omni|Control)", of(tiny.z_image), 64),
    (r"^Krea2", of(tiny.krea2), 64),
    (
        r"^WanImageToVideo",
        {
            **of(tiny.wan),
            **FLOW,
            "transformer": network("WanTransformer3DModel", **WAN | {"in_channels": 36}),
            "transformer_2": None,
            "image_encoder": None,
        },
        16,
    ),
    (
        r"^WanVACE",
        {
            **of(tiny.wan),
            **FLOW,
            "transformer": network("WanVACETransformer3DModel", **WAN, vace_layers=[0], vace_in_channels=96),
            "transformer_2": None,
        },
        16,
    ),
    (r"^Wan(?!Animate)", {**of(tiny.wan), **FLOW, "transformer_2": None}, 16),
    (r"^LTX(?!2)", {**of(tiny.ltx), **FLOW}, 64),
    (r"^HunyuanVideoPipeline", of(tiny.hunyuan_video), 16),
    (
        r"^HunyuanSkyreels",
        {
            **of(tiny.hunyuan_video),
            "transformer": network(
                "HunyuanVideoTransformer3DModel",
                in_channels=32,
                out_channels=16,
                num_attention_heads=4,
                attention_head_dim=16,
                num_layers=2,
                num_single_layers=1,
                num_refiner_layers=1,
                text_embed_dim=48,
                pooled_projection_dim=32,
                rope_axes_dim=(4, 6, 6),
            ),
        },
        16,
    ),
    (
        r"^Chroma",
        {
            **T5,
            **FLOW,
            "vae": tiny.vae,
            "transformer": network(
                "ChromaTransformer2DModel",
                **FLUX_LIKE,
                patch_size=1,
                approximator_hidden_dim=32,
                approximator_layers=1,
                approximator_num_channels=16,
            ),
        },
        64,
    ),
    (
        r"^PixArt",
        {
            **T5,
            **DDIM,
            "vae": deep_vae,
            "transformer": network("PixArtTransformer2DModel", **PIXART | {"num_layers": 2}),
        },
        256,
    ),
    (
        r"^AuraFlow",
        {
            **UMT5,
            **FLOW,
            "vae": small_vae,
            "transformer": network(
                "AuraFlowTransformer2DModel",
                sample_size=32,
                patch_size=2,
                in_channels=4,
                num_mmdit_layers=1,
                num_single_dit_layers=1,
                attention_head_dim=8,
                num_attention_heads=4,
                caption_projection_dim=32,
                joint_attention_dim=48,
                out_channels=4,
                pos_embed_max_size=256,
            ),
        },
        16,
    ),
    (
        r"^CogView4Control",
        {
            "text_encoder": glm,
            "tokenizer": lambda: tokenizer("t5", 512),
            **FLOW,
            "vae": small_vae,
            "transformer": network(
                "CogView4Transformer2DModel",
                patch_size=2,
                in_channels=8,
                out_channels=4,
                num_layers=2,
                attention_head_dim=4,
                num_attention_heads=4,
                text_embed_dim=32,
                time_embed_dim=8,
                condition_dim=4,
            ),
        },
        16,
    ),
    (
        r"^CogView4",
        {
            "text_encoder": glm,
            "tokenizer": lambda: tokenizer("t5", 512),
            **FLOW,
            "vae": small_vae,
            "transformer": network(
                "CogView4Transformer2DModel",
                patch_size=2,
                in_channels=4,
                num_layers=2,
                attention_head_dim=4,
                num_attention_heads=4,
                out_channels=4,
                text_embed_dim=32,
                time_embed_dim=8,
                condition_dim=4,
            ),
        },
        16,
    ),
    (
        r"^CogView3",
        {
            **T5,
            **COGVIDEO_SCHEDULER,
            "vae": small_vae,
            "transformer": network(
                "CogView3PlusTransformer2DModel",
                patch_size=2,
                in_channels=4,
                num_layers=1,
                attention_head_dim=4,
                num_attention_heads=2,
                out_channels=4,
                text_embed_dim=64,
                time_embed_dim=8,
                condition_dim=2,
                pos_embed_max_size=8,
                sample_size=8,
            ),
        },
        16,
    ),
    (
        r"^CogVideoXImageToVideo",
        {
            **T5,
            **COGVIDEO_SCHEDULER,
            "vae": network("AutoencoderKLCogVideoX", **COGVIDEO_VAE),
            "transformer": network(
                "CogVideoXTransformer3DModel",
                **COGVIDEO
                | {
                    "in_channels": 8,
                    "use_rotary_positional_embeddings": True,
                    "use_learned_positional_embeddings": True,
                },
            ),
        },
        16,
    ),
    (
        r"^CogVideoXFun",
        {
            **T5,
            **COGVIDEO_SCHEDULER,
            "vae": network("AutoencoderKLCogVideoX", **COGVIDEO_VAE),
            "transformer": network("CogVideoXTransformer3DModel", **COGVIDEO | {"in_channels": 8}),
        },
        16,
    ),
    (
        r"^CogVideoX",
        {
            **T5,
            **COGVIDEO_SCHEDULER,
            "vae": network("AutoencoderKLCogVideoX", **COGVIDEO_VAE),
            "transformer": network("CogVideoXTransformer3DModel", **COGVIDEO),
        },
        16,
    ),
    (
        r"^Lumina2",
        {
            **GEMMA2,
            **FLOW,
            "vae": shifting_vae,
            "transformer": network(
                "Lumina2Transformer2DModel",
                sample_size=4,
                patch_size=2,
                in_channels=4,
                hidden_size=8,
                num_layers=2,
                num_attention_heads=1,
                num_kv_heads=1,
                multiple_of=16,
                ffn_dim_multiplier=None,
                norm_eps=1e-5,
                scaling_factor=1.0,
                axes_dim_rope=[4, 2, 2],
                axes_lens=[512, 64, 64],
                cap_feat_dim=32,
            ),
        },
        16,
    ),
    (
        r"^SanaControlNet",
        {
            **GEMMA2,
            **FLOW,
            "vae": network("AutoencoderDC", **DC),
            "transformer": network("SanaTransformer2DModel", **SANA),
            "controlnet": network("SanaControlNetModel", **{k: v for k, v in SANA.items() if k != "out_channels"}),
        },
        512,
    ),
    (
        r"^Sana(PAG)?Pipeline",
        {
            **GEMMA2,
            **FLOW,
            "vae": network("AutoencoderDC", **DC),
            "transformer": network("SanaTransformer2DModel", **SANA),
        },
        512,
    ),
    (
        r"^Latte",
        {
            **T5,
            **DDIM,
            "vae": small_vae,
            "transformer": network(
                "LatteTransformer3DModel",
                sample_size=8,
                num_layers=1,
                patch_size=2,
                attention_head_dim=8,
                num_attention_heads=3,
                caption_channels=64,
                in_channels=4,
                cross_attention_dim=24,
                out_channels=8,
                attention_bias=True,
                activation_fn="gelu-approximate",
                num_embeds_ada_norm=1000,
                norm_type="ada_norm_single",
                norm_elementwise_affine=False,
            ),
        },
        16,
    ),
    (
        r"^Mochi",
        {
            **T5,
            **FLOW,
            "vae": network(
                "AutoencoderKLMochi",
                latent_channels=12,
                out_channels=3,
                encoder_block_out_channels=(32, 32, 32, 32),
                decoder_block_out_channels=(32, 32, 32, 32),
                layers_per_block=(1, 1, 1, 1, 1),
            ),
            "transformer": network(
                "MochiTransformer3DModel",
                patch_size=2,
                num_attention_heads=2,
                attention_head_dim=8,
                num_layers=2,
                pooled_projection_dim=16,
                in_channels=12,
                out_channels=None,
                qk_norm="rms_norm",
                text_embed_dim=64,
                time_embed_dim=4,
                activation_fn="swiglu",
                max_sequence_length=256,
            ),
        },
        16,
    ),
    (
        r"^Allegro",
        {
            **T5,
            **EULER,
            "vae": network(
                "AutoencoderKLAllegro",
                in_channels=3,
                out_channels=3,
                down_block_types=("AllegroDownBlock3D",) * 4,
                up_block_types=("AllegroUpBlock3D",) * 4,
                block_out_channels=(8, 8, 8, 8),
                latent_channels=4,
                layers_per_block=1,
                norm_num_groups=2,
                temporal_compression_ratio=4,
            ),
            "transformer": network(
                "AllegroTransformer3DModel",
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=4,
                out_channels=4,
                num_layers=1,
                cross_attention_dim=24,
                sample_width=8,
                sample_height=8,
                sample_frames=8,
                caption_channels=64,
            ),
        },
        16,
    ),
    (
        r"^OvisImage",
        {
            "text_encoder": lambda: wide(transformers.Qwen3Model(tiny.qwen3(2, 48))),
            "tokenizer": lambda: tokenizer("qwen", 1024),
            **FLOW,
            "vae": tiny.vae,
            "transformer": network(
                "OvisImageTransformer2DModel",
                **FLUX_LIKE | {"joint_attention_dim": 48},
                patch_size=1,
                out_channels=64,
            ),
        },
        64,
    ),
    (
        r"^Bria(Pipeline)",
        {
            **T5,
            **FLOW,
            "vae": tiny.vae,
            "transformer": network(
                "BriaTransformer2DModel",
                **FLUX_LIKE | {"axes_dims_rope": [0, 4, 12]},
                patch_size=1,
                pooled_projection_dim=None,
            ),
        },
        64,
    ),
    (
        r"^DD[IP]MPipeline",
        {
            "unet": network(
                "UNet2DModel",
                sample_size=8,
                in_channels=3,
                out_channels=3,
                layers_per_block=1,
                block_out_channels=(8, 16),
                norm_num_groups=4,
                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            ),
            "scheduler": lambda: diffusers.DDIMScheduler(clip_sample=False),
        },
        8,
    ),
    (
        r"^DiT",
        {
            "transformer": network(
                "DiTTransformer2DModel",
                sample_size=16,
                num_layers=2,
                patch_size=4,
                attention_head_dim=8,
                num_attention_heads=2,
                in_channels=4,
                out_channels=8,
                attention_bias=True,
                activation_fn="gelu-approximate",
                num_embeds_ada_norm=1000,
                norm_type="ada_norm_zero",
                norm_elementwise_affine=False,
            ),
            "vae": small_vae,
            **DDIM,
            "id2label": None,
        },
        32,
    ),
    (
        r"^AnimateDiff(Pipeline|PAG|VideoToVideo|ControlNet)",
        {
            **SD,
            **DDIM,
            "motion_adapter": network(
                "MotionAdapter",
                block_out_channels=(16, 32),
                motion_layers_per_block=1,
                motion_norm_num_groups=2,
                motion_num_attention_heads=4,
            ),
            "controlnet": controlnet_of("ControlNetModel"),
        },
        16,
    ),
    (
        r"^StableVideo",
        {
            "unet": network(
                "UNetSpatioTemporalConditionModel",
                block_out_channels=(32, 64),
                layers_per_block=1,
                sample_size=16,
                in_channels=8,
                out_channels=4,
                down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
                up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
                cross_attention_dim=32,
                num_attention_heads=8,
                projection_class_embeddings_input_dim=96,
                addition_time_embed_dim=32,
            ),
            "vae": network(
                "AutoencoderKLTemporalDecoder",
                block_out_channels=[32, 32],
                in_channels=3,
                out_channels=3,
                down_block_types=["DownEncoderBlock2D"] * 2,
                latent_channels=4,
            ),
            "scheduler": lambda: diffusers.EulerDiscreteScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                interpolation_type="linear",
                prediction_type="v_prediction",
                use_karras_sigmas=True,
                timestep_spacing="leading",
                timestep_type="continuous",
                sigma_min=0.002,
                sigma_max=700.0,
            ),
            "image_encoder": clip_vision(224),
            "feature_extractor": clip_images,
        },
        32,
    ),
    (r"^LTX2(Pipeline|ImageToVideo|Condition|HDR|InContext)", LTX2, 32),
    (
        r"^SkyReelsV2ImageToVideo",
        wan_with_image("SkyReelsV2Transformer3DModel"),
        16,
    ),
    (
        r"^SkyReelsV2(Pipeline|ImageToVideo)",
        {
            **UMT5,
            "vae": lambda: tiny.wan().vae,
            "scheduler": lambda: diffusers.UniPCMultistepScheduler(
                prediction_type="flow_prediction", flow_shift=8.0, use_flow_sigmas=True
            ),
            "transformer": network("SkyReelsV2Transformer3DModel", **WAN),
        },
        16,
    ),
    (
        r"^HunyuanDiT(PAG)?Pipeline",
        {
            "text_encoder": bert,
            "tokenizer": lambda: tokenizer("t5", 77),
            "text_encoder_2": t5,
            "tokenizer_2": lambda: tokenizer("t5", 256),
            **DDIM,
            "vae": deep_vae,
            "transformer": network(
                "HunyuanDiT2DModel",
                sample_size=16,
                num_layers=2,
                patch_size=2,
                attention_head_dim=8,
                num_attention_heads=3,
                in_channels=4,
                cross_attention_dim=32,
                cross_attention_dim_t5=64,
                pooled_projection_dim=16,
                hidden_size=24,
            ),
        },
        1024,
    ),
    (
        r"^LDMText",
        {
            **DDIM,
            "bert": lambda: clip(transformers.CLIPTextModel, 32),
            "tokenizer": SD["tokenizer"],
            "vqvae": small_vae,
            "unet": SD["unet"],
        },
        64,
    ),
    (
        r"^AceStep",
        {
            "text_encoder": lambda: wide(transformers.Qwen3Model(tiny.qwen3(2, 32))),
            "tokenizer": lambda: tokenizer("qwen", 2048),
            "scheduler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
            "transformer": network(
                "AceStepTransformer1DModel",
                **ACE,
                num_hidden_layers=2,
                in_channels=24,
                audio_acoustic_hidden_dim=8,
                patch_size=2,
                is_turbo=True,
            ),
            "condition_encoder": lambda: wide(
                AceStepConditionEncoder(
                    **ACE,
                    text_hidden_dim=32,
                    timbre_hidden_dim=8,
                    num_lyric_encoder_hidden_layers=2,
                    num_timbre_encoder_hidden_layers=2,
                )
            ),
            "audio_tokenizer": lambda: wide(
                AceStepAudioTokenizer(**ACE_POOL, fsq_dim=32, fsq_input_levels=[4, 4, 4], fsq_input_num_quantizers=1)
            ),
            "audio_token_detokenizer": lambda: wide(AceStepAudioTokenDetokenizer(**ACE_POOL)),
            "vae": network(
                "AutoencoderOobleck",
                encoder_hidden_size=6,
                downsampling_ratios=[1, 2],
                decoder_channels=3,
                decoder_input_channels=8,
                audio_channels=2,
                channel_multiples=[2, 4],
                sampling_rate=4,
            ),
        },
        16,
    ),
    (
        r"^StableAudio3",
        {
            "text_encoder": t5_gemma,
            "tokenizer": lambda: tokenizer("gemma", 64),
            "scheduler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
            "duration_embedder": lambda: wide(StableAudio3DurationEmbedder(output_dim=32, fourier_dim=16)),
            "vae": network(
                "AutoencoderSAME",
                audio_channels=2,
                patch_size=2,
                encoder_channels=8,
                encoder_c_mults=(2,),
                encoder_strides=(2,),
                encoder_transformer_depths=(1,),
                latent_dim=8,
                use_differential_attention=False,
                dim_heads=4,
                ff_mult=2,
                sampling_rate=16,
            ),
            "transformer": network(
                "StableAudio3DiTModel",
                io_channels=8,
                patch_size=1,
                embed_dim=32,
                depth=2,
                num_heads=4,
                cond_token_dim=32,
                global_cond_dim=32,
                local_add_cond_dim=5,
                timestep_features_dim=16,
                ff_mult=2,
                num_memory_tokens=3,
                use_differential_attention=False,
            ),
        },
        16,
    ),
    (
        r"^SanaVideo|^SanaImageToVideo",
        {
            **GEMMA2,
            **FLOW,
            "vae": lambda: tiny.wan().vae,
            "transformer": network(
                "SanaVideoTransformer3DModel",
                num_attention_heads=2,
                attention_head_dim=12,
                num_layers=2,
                num_cross_attention_heads=2,
                cross_attention_head_dim=12,
                cross_attention_dim=24,
                caption_channels=32,
                sample_size=4,
                rope_max_seq_len=32,
            ),
        },
        32,
    ),
    (
        r"^ChronoEdit",
        wan_with_image("ChronoEditTransformer3DModel"),
        16,
    ),
    (
        r"^LongCatImage",
        {
            **{n: QWEN_EDIT[n] for n in ("text_encoder", "tokenizer")},
            "text_processor": QWEN_EDIT["processor"],
            **FLOW,
            "vae": tiny.vae,
            "transformer": network(
                "LongCatImageTransformer2DModel",
                **FLUX_LIKE | {"joint_attention_dim": 32, "pooled_projection_dim": 32},
            ),
        },
        64,
    ),
    (
        r"^Kandinsky5(T2V|I2V)",
        {
            "text_encoder": QWEN_EDIT["text_encoder"],
            "tokenizer": QWEN_EDIT["processor"],
            "text_encoder_2": SD["text_encoder"],
            "tokenizer_2": SD["tokenizer"],
            **FLOW,
            "vae": lambda: tiny.hunyuan_video().vae,
            "transformer": network(
                "Kandinsky5Transformer3DModel",
                in_visual_dim=16,
                in_text_dim=32,
                in_text_dim2=32,
                time_dim=16,
                out_visual_dim=16,
                model_dim=16,
                ff_dim=32,
                num_text_blocks=1,
                num_visual_blocks=1,
                axes_dims=(2, 2, 4),
                visual_cond=True,
            ),
        },
        32,
    ),
    (
        r"^LucyEdit",
        {
            **of(tiny.wan),
            **FLOW,
            "transformer": network("WanTransformer3DModel", **WAN | {"in_channels": 32}),
            "transformer_2": None,
        },
        16,
    ),
    (
        r"^HunyuanVideo15Pipeline",
        {
            **FLOW,
            "text_encoder": qwen_text,
            "tokenizer": lambda: tokenizer("qwen", 1108),
            "text_encoder_2": t5,
            "tokenizer_2": transformers.ByT5Tokenizer,
            "guider": lambda: diffusers.ClassifierFreeGuidance(guidance_scale=2.0),
            "vae": network(
                "AutoencoderKLHunyuanVideo15",
                latent_channels=4,
                block_out_channels=(16, 16),
                layers_per_block=1,
                spatial_compression_ratio=4,
                temporal_compression_ratio=2,
                downsample_match_channel=False,
                upsample_match_channel=False,
            ),
            "transformer": network(
                "HunyuanVideo15Transformer3DModel",
                in_channels=9,
                out_channels=4,
                num_attention_heads=2,
                attention_head_dim=8,
                num_layers=1,
                num_refiner_layers=1,
                mlp_ratio=2.0,
                patch_size=1,
                patch_size_t=1,
                text_embed_dim=32,
                text_embed_2_dim=64,
                image_embed_dim=12,
                rope_axes_dim=(2, 2, 4),
                target_size=16,
                task_type="t2v",
            ),
        },
        16,
    ),
    (
        r"^BriaFibo(Edit)?Pipeline",
        {
            **FLOW,
            "text_encoder": smol,
            "tokenizer": lambda: tokenizer("t5", 512),
            "vae": lambda: tiny.wan().vae,
            "transformer": network(
                "BriaFiboTransformer2DModel",
                patch_size=1,
                in_channels=16,
                num_layers=1,
                num_single_layers=1,
                attention_head_dim=8,
                num_attention_heads=2,
                joint_attention_dim=64,
                text_encoder_dim=32,
                pooled_projection_dim=None,
                axes_dims_rope=[0, 4, 4],
            ),
        },
        32,
    ),
]
LIST = Path(__file__).parents[2] / "meander/torch/classes.json"
NONE = {"safety_checker", "feature_extractor", "image_encoder", "watermarker", "id2label", "transformer_2"}
FRAMES = {"num_frames": 9, "video_length": 1, "video": 9, "conditioning_frames": 9}
FRAMES_OF = {"MochiPipeline": 7, "ChronoEditPipeline": 5}
SETTINGS = {"AllegroPipeline": {"vae_tiling": True}}
"""Settings of the worker that a class needs."""


def classes():
    """The names of the pipelines of diffusers that are not deprecated."""
    out = []
    for name in dir(diffusers):
        cls = getattr(diffusers, name, None) if "Pipeline" in name else None
        if (
            inspect.isclass(cls)
            and issubclass(cls, diffusers.DiffusionPipeline)
            and ".deprecated" not in cls.__module__
        ):
            out.append(name)
    return [n for n in out if n != "DiffusionPipeline"]


def write(folder, name):
    """Writes a tiny folder of a class. LookupError: nothing here is of its kind, or a part that it needs is not."""
    cls = getattr(diffusers, name)
    pool, edge = next(((parts, edge) for pattern, parts, edge in KINDS if re.search(pattern, name)), ({}, 0))
    if not pool:
        raise LookupError("no parts of its kind")
    torch.manual_seed(1)
    parts, last = {}, []
    for p in list(inspect.signature(cls.__init__).parameters.values())[1:]:
        make = pool.get(p.name)
        if make is None and (p.name in NONE or p.name in pool):
            parts[p.name] = None
        elif make is not None and inspect.signature(make).parameters.keys() == {"parts"}:
            last.append((p.name, make))
        elif make is not None:
            parts[p.name] = make()
        elif p.default is p.empty:
            raise LookupError(f"no {p.name}: {p.annotation}")
    for n, make in last:
        parts[n] = make(parts)
    if "requires_safety_checker" in inspect.signature(cls.__init__).parameters:
        parts["requires_safety_checker"] = False
    pipe = cls(**parts)
    pipe.save_pretrained(folder)
    takes = inspect.signature(inspect.unwrap(cls.__call__)).parameters
    settings = {"height": edge, "width": edge, "num_inference_steps": 4}
    frames = [v for n, v in FRAMES.items() if n in takes]
    settings |= {"frames": FRAMES_OF.get(name, frames[0])} if frames else {}
    (Path(folder) / "meander.json").write_text(json.dumps(settings))


def look(name, folder, workers=()):
    """What comes of a class: a row of the table. workers: two of proofs.Standby of the folder, to prove it all."""
    began = time.process_time()
    row = {"class": name}
    write(folder, name)
    row["built_s"] = time.process_time() - began
    settings = Settings("cpu", "f32", **SETTINGS.get(name, {}))
    engine = PipelineEngine(Pipeline(Folder(Path(folder)), trust=True), settings)
    if workers:
        workers[0].start()
    with torch.no_grad():
        admission.admit(engine.loaded, lambda detail: None)
    card = engine.family.card()
    row |= {
        "scheduler": type(engine.family.pipe.scheduler).__name__,
        "access": engine.family.access,
        "conditions": [c["name"] for c in engine.family.conditions if c["required"]],
        "tracks": engine.family.tracks,
        "notes": engine.family.notes,
        "grid": card["grid"],
        "prediction": card["pipeline"].get("prediction", ""),
        "rows": engine.family.rows_alike,
    }
    if workers:
        with torch.no_grad():
            row |= proofs.prove(workers, engine.loaded, admission.recipe_of(engine.loaded))
    row["cpu_s"] = time.process_time() - began
    row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return row


def _work(name, folder, pipe, prove):
    torch.set_num_threads(1)
    sockets = [Path(folder) / f"{i}.sock" for i in range(2 if prove else 0)]
    tiling = ["--vae-tiling"] if SETTINGS.get(name, {}).get("vae_tiling") else []
    workers = [proofs.Standby(Path(folder) / "model", s, *tiling) for s in sockets]
    try:
        pipe.send(look(name, Path(folder) / "model", workers))
    except LookupError as e:
        pipe.send({"class": name, "not_built": str(e)})
    except Exception as e:
        at = e.__traceback__
        while at.tb_next:
            at = at.tb_next
        where = f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}"
        pipe.send({"class": name, "fault": f"{type(e).__name__}: {e}"[:300], "at": where})


STATE, MEDIA, GRADIENT = 1e-5, 1e-4, 0.01


def faults_of(row):
    """The columns of a row that are not as they must be."""
    apart = any("not compared" in n for n in row["notes"])
    right = {
        "state": apart or row["access"] != "exact" or isinstance(row.get("state"), float) and row["state"] <= STATE,
        "media": apart or isinstance(row.get("media"), float) and row["media"] <= MEDIA,
        "ratio": row.get("ratio") == 0,
        "resume": row.get("resume") is True,
        "gradient": isinstance(row.get("gradient"), float) and abs(row["gradient"] - 1) <= GRADIENT,
    }
    return [n for n, ok in right.items() if not ok] if "ratio" in row else []


def cell(value):
    """A column of the table."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.5g}" if isinstance(value, float) else str(value).split(chr(10))[0][:60]


def table(rows):
    """The rows as Markdown: those that are served, then what came of the others."""
    out = [
        "State, media: how far Euler's steps end from the pipeline itself (of inpainting, media alone). Ratio: the largest |ratio - 1| of a trainer. Resume: after kill "
        "-9 of the worker. Gradient: by finite differences.",
        "",
        "| class | state | scheduler | conditions | order | state | media | ratio - 1 | resume | gradient | rows together |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if "access" in r:
            state = ", ".join("x".join(map(str, t["shape"])) for t in r["tracks"])
            of = r["scheduler"].removesuffix("Scheduler").removesuffix("Discrete") + (" *" if r["notes"] else "")
            proven = " | ".join(cell(r.get(n, "")) for n in ("state", "media", "ratio", "resume", "gradient"))
            out.append(
                f"| {r['class']} | {state} | {of} | {', '.join(r['conditions'])} | {r['access']} | {proven} | "
                f"{'yes' if r['rows'] else 'no'} |"
            )
    out += ["", *sorted(f"\\* {r['class']}: {n}" for r in rows for n in r.get("notes", ()))]
    out += ["", "| refused | why |", "|---|---|"]
    out += [
        f"| {r['class']} | {r['fault'].split(chr(10))[0][:160]} ({r.get('at', '')}) |" for r in rows if "fault" in r
    ]
    left = [r["class"] for r in rows if "not_built" in r]
    return "\n".join([*out, "", f"Not built here ({len(left)}): {', '.join(left)}", ""])


def _row(name, args):
    """The row of a class, by a process of its own."""
    here, there = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory(dir=args.folder, ignore_cleanup_errors=True) as folder:
        worker = multiprocessing.Process(target=_work, args=(name, folder, there, not args.admit), daemon=True)
        worker.start()
        there.close()
        try:
            row = here.recv() if here.poll(args.limit) else {"fault": f"takes over {args.limit:.0f} s"}
        except EOFError:
            row = {"fault": "its process ended without a word"}
        row["class"] = name
        worker.kill()
        worker.join()
    print(json.dumps(row), flush=True)
    return row


def main():
    """Looks at each class in a process of its own."""
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--classes", default="", help="these alone, with commas between")
    a.add_argument("--table", type=Path, help="a Markdown file to write")
    a.add_argument("--list", type=Path, help="a file for the classes that are served, as workers read it")
    a.add_argument("--limit", type=float, default=1200, help="seconds of a class at most")
    a.add_argument("--write", type=Path, help="a folder for those of --classes, by their names, and nothing else")
    a.add_argument("--jobs", type=int, default=2, help="classes at a time")
    a.add_argument("--admit", action="store_true", help="admission alone: no ratio, kill and gradient")
    args = a.parse_args()
    torch.set_num_threads(1)  # before any that computes: workers are forked
    names = args.classes.split(",") if args.classes else classes()
    if args.write:
        for name in names:
            write(args.write / name, name)
        return
    # The folder of all outlives workers that are about to end.
    with tempfile.TemporaryDirectory() as args.folder, ThreadPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(lambda name: _row(name, args), names))
    served = [r for r in rows if "access" in r]
    short = {r["class"]: faults for r in served if (faults := faults_of(r))}
    print(
        f"{len(rows)} classes: {len(served)} served, {len(served) - len(short)} with every column, "
        f"{sum('fault' in r for r in rows)} refused, {sum('not_built' in r for r in rows)} not built"
    )
    for name, faults in short.items():
        print(f"{name}: {', '.join(faults)}")
    if args.table:
        args.table.write_text(table(rows))
    if args.list:
        keep = {
            r["class"]: {"access": r["access"], "prediction": r["prediction"], "diffusers": diffusers.__version__}
            for r in served
        }
        args.list.write_text(json.dumps(keep, indent=0) + "\n")
    known = args.classes.split(",") if args.classes else json.loads(LIST.read_text()) if LIST.exists() else []
    if lost := sorted(set(known) - {r["class"] for r in served}):
        sys.exit(f"not served: {', '.join(lost)}")


if __name__ == "__main__":
    main()
