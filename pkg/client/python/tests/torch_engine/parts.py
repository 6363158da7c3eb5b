"""Parts of tiny pipelines of many kinds: functions that make each, and those of a kind by the names of its parts."""

import inspect

import diffusers
import tiny
import transformers
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from tiny import WORDS, t5, tokenizer, umt5, wide
from tiny_whole import BETAS, PIPELINES, small_vae

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
COGVIDEO_SCHEDULER = {"scheduler": lambda: diffusers.CogVideoXDDIMScheduler(clip_sample=False)}
# fmt: off
COGVIDEO_VAE = {
    "down_block_types": ["CogVideoXDownBlock3D"] * 4, "up_block_types": ["CogVideoXUpBlock3D"] * 4,
    "block_out_channels": [8] * 4, "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2,
    "temporal_compression_ratio": 4,
}


def cogvideo(**config):
    """The network of CogVideoX."""
    return network("CogVideoXTransformer3DModel", **{
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 2,
        "text_embed_dim": 64, "num_layers": 1, "sample_width": 2, "sample_height": 2, "sample_frames": 9,
        "patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": 226, **config,
    })


def cogview4(**config):
    """The network of CogView4."""
    return network("CogView4Transformer2DModel", **{
        "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 4,
        "num_attention_heads": 4, "text_embed_dim": 32, "time_embed_dim": 8, "condition_dim": 4, **config,
    })


# fmt: on
COGVIDEO = {
    **T5,
    **COGVIDEO_SCHEDULER,
    "vae": network("AutoencoderKLCogVideoX", **COGVIDEO_VAE),
    "transformer": cogvideo(),
}
COGVIEW4 = {
    "text_encoder": glm,
    "tokenizer": lambda: tokenizer("t5", 512),
    **FLOW,
    "vae": small_vae,
    "transformer": cogview4(),
}

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
