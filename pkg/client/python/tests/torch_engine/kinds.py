"""Tiny folders of classes of pipelines of diffusers, of what a class says it is made of.

A class names its parts and their types; KINDS has the parts by the kind of pipeline, a row each, and a class takes
those of its kind that it names. So a new class of a known kind needs no line here.
"""

import inspect
import json
import re
from pathlib import Path

import diffusers
import tiny
import torch
import transformers
from diffusers.pipelines.ace_step.modeling_ace_step import (
    AceStepAudioTokenDetokenizer,
    AceStepAudioTokenizer,
    AceStepConditionEncoder,
)
from diffusers.pipelines.stable_audio_3 import StableAudio3DurationEmbedder
from parts import (
    ACE,
    ACE_POOL,
    ADAPTER,
    COGVIDEO,
    COGVIDEO_SCHEDULER,
    COGVIEW4,
    CROSS_FIRST,
    DC,
    DDIM,
    EULER,
    FLOW,
    GEMMA2,
    KONTEXT,
    LTX2,
    PIXART,
    QWEN_EDIT,
    SANA,
    SD,
    SDXL,
    T5,
    UMT5,
    WAN,
    bert,
    cogvideo,
    cogview4,
    clip_images,
    clip_vision,
    control_union,
    controlnet_of,
    deep_vae,
    network,
    of,
    qwen_text,
    shifting_vae,
    smol,
    t5_gemma,
    unet,
    wan_with_image,
)
from tiny import clip, t5, tokenizer, wide
from tiny_whole import FLUX_LIKE, FLUX_NETWORK, QWEN_NETWORK, small_vae

# fmt: off
KINDS = [
    ("^StableDiffusion3", {
        **of(tiny.sd3),
        "controlnet": lambda parts: wide(diffusers.SD3ControlNetModel.from_config({**parts["transformer"].config,
            "num_layers": 1, "extra_conditioning_channels": 0})),
    }, 64),
    ("^StableDiffusionXLInstruct", {
        **SDXL,
        "unet": lambda: wide(diffusers.UNet2DConditionModel.from_config({**SDXL["unet"]().config,
            "in_channels": 8})),
    }, 16),
    ("^StableDiffusionXLControlNetUnion", {**SDXL, "controlnet": control_union}, 16),
    ("^StableDiffusionXLAdapter", {
        **SDXL, "adapter": ADAPTER,
        "unet": lambda: wide(diffusers.UNet2DConditionModel.from_config({**SDXL["unet"]().config, **CROSS_FIRST})),
    }, 16),
    ("^StableDiffusionAdapter", {**SD, **DDIM, "adapter": ADAPTER, "unet": unet(**CROSS_FIRST)}, 16),
    ("^StableDiffusionXL", {**SDXL, "controlnet": controlnet_of("ControlNetModel")}, 16),
    ("^StableDiffusionInstruct", {**SD, **DDIM, "unet": unet(in_channels=8)}, 16),
    ("^StableDiffusionImageVariation", {
        **SD, **DDIM, "image_encoder": clip_vision(), "feature_extractor": clip_images,
    }, 16),
    ("^StableDiffusionUpscale", {
        **SD, **DDIM, "unet": unet(in_channels=7, num_class_embeds=1000),
        "low_res_scheduler": lambda: diffusers.DDPMScheduler(clip_sample=False),
    }, 16),
    ("^StableDiffusion", {**SD, **DDIM, "controlnet": controlnet_of("ControlNetModel")}, 16),
    ("^AnimateDiffSDXL", {
        **SDXL,
        "motion_adapter": network("MotionAdapter", block_out_channels=(16, 32), motion_layers_per_block=1,
            motion_norm_num_groups=2, motion_num_attention_heads=4, use_motion_mid_block=False),
    }, 16),
    ("^Marigold", {
        **SD, **DDIM, "unet": unet(in_channels=8), "default_denoising_steps": lambda: 4,
        "default_processing_resolution": lambda: 16, "prediction_type": lambda: "depth",
    }, 16),
    ("^QwenImageControlNetInpaint", {
        **QWEN_EDIT,
        "controlnet": network("QwenImageControlNetModel", **QWEN_NETWORK | {"num_layers": 1},
            extra_condition_channels=4),
    }, 64),
    ("^QwenImage(?!21)", {
        **QWEN_EDIT, "controlnet": network("QwenImageControlNetModel", **QWEN_NETWORK | {"num_layers": 1}),
    }, 64),
    ("^FluxFill|^VisualCloze", {
        **KONTEXT,
        "transformer": network("FluxTransformer2DModel", **FLUX_NETWORK | {"in_channels": 384, "out_channels": 64}),
    }, 64),
    ("^FluxControl(?!Net)", {
        **KONTEXT,
        "transformer": network("FluxTransformer2DModel", **FLUX_NETWORK | {"in_channels": 128, "out_channels": 64}),
    }, 64),
    ("^Flux(?!2|Prior)", {**KONTEXT, "controlnet": network("FluxControlNetModel", **FLUX_NETWORK)}, 64),
    ("^Flux2Klein", of(tiny.flux2_klein), 64),
    ("^Flux2", of(tiny.flux2), 64),
    ("^ZImage(?!Omni|Control)", of(tiny.z_image), 64),
    ("^Krea2", of(tiny.krea2), 64),
    ("^WanImageToVideo", {
        **of(tiny.wan), **FLOW, "transformer": network("WanTransformer3DModel", **WAN | {"in_channels": 36}),
        "transformer_2": None, "image_encoder": None,
    }, 16),
    ("^WanVACE", {
        **of(tiny.wan), **FLOW,
        "transformer": network("WanVACETransformer3DModel", **WAN, vace_layers=[0], vace_in_channels=96),
        "transformer_2": None,
    }, 16),
    ("^Wan(?!Animate)", {**of(tiny.wan), **FLOW, "transformer_2": None}, 16),
    ("^LTX(?!2)", {**of(tiny.ltx), **FLOW}, 64),
    ("^HunyuanVideoPipeline", of(tiny.hunyuan_video), 16),
    ("^HunyuanSkyreels", {
        **of(tiny.hunyuan_video),
        "transformer": network("HunyuanVideoTransformer3DModel", in_channels=32, out_channels=16,
            num_attention_heads=4, attention_head_dim=16, num_layers=2, num_single_layers=1, num_refiner_layers=1,
            text_embed_dim=48, pooled_projection_dim=32, rope_axes_dim=(4, 6, 6)),
    }, 16),
    ("^Chroma", {
        **T5, **FLOW, "vae": tiny.vae,
        "transformer": network("ChromaTransformer2DModel", **FLUX_LIKE, patch_size=1, approximator_hidden_dim=32,
            approximator_layers=1, approximator_num_channels=16),
    }, 64),
    ("^PixArt", {
        **T5, **DDIM, "vae": deep_vae,
        "transformer": network("PixArtTransformer2DModel", **PIXART | {"num_layers": 2}),
    }, 256),
    ("^AuraFlow", {
        **UMT5, **FLOW, "vae": small_vae,
        "transformer": network("AuraFlowTransformer2DModel", sample_size=32, patch_size=2, in_channels=4,
            num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8, num_attention_heads=4,
            caption_projection_dim=32, joint_attention_dim=48, out_channels=4, pos_embed_max_size=256),
    }, 16),
    ("^CogView3", {
        **T5, **COGVIDEO_SCHEDULER, "vae": small_vae,
        "transformer": network("CogView3PlusTransformer2DModel", patch_size=2, in_channels=4, num_layers=1,
            attention_head_dim=4, num_attention_heads=2, out_channels=4, text_embed_dim=64, time_embed_dim=8,
            condition_dim=2, pos_embed_max_size=8, sample_size=8),
    }, 16),
    ("^CogView4Control", {**COGVIEW4, "transformer": cogview4(in_channels=8)}, 16),
    ("^CogView4", COGVIEW4, 16),
    ("^CogVideoXImageToVideo", {
        **COGVIDEO, "transformer": cogvideo(in_channels=8, use_rotary_positional_embeddings=True,
            use_learned_positional_embeddings=True),
    }, 16),
    ("^CogVideoXFun", {**COGVIDEO, "transformer": cogvideo(in_channels=8)}, 16),
    ("^CogVideoX", COGVIDEO, 16),
    ("^Lumina2", {
        **GEMMA2, **FLOW, "vae": shifting_vae,
        "transformer": network("Lumina2Transformer2DModel", sample_size=4, patch_size=2, in_channels=4,
            hidden_size=8, num_layers=2, num_attention_heads=1, num_kv_heads=1, multiple_of=16,
            ffn_dim_multiplier=None, norm_eps=1e-05, scaling_factor=1.0, axes_dim_rope=[4, 2, 2], axes_lens=[512, 64,
            64], cap_feat_dim=32),
    }, 16),
    ("^Sana(PAG|ControlNet)?Pipeline", {
        **GEMMA2, **FLOW, "vae": network("AutoencoderDC", **DC),
        "transformer": network("SanaTransformer2DModel", **SANA),
        "controlnet": network("SanaControlNetModel", **{k: v for k, v in SANA.items() if k != "out_channels"}),
    }, 512),
    ("^Latte", {
        **T5, **DDIM, "vae": small_vae,
        "transformer": network("LatteTransformer3DModel", sample_size=8, num_layers=1, patch_size=2,
            attention_head_dim=8, num_attention_heads=3, caption_channels=64, in_channels=4, cross_attention_dim=24,
            out_channels=8, attention_bias=True, activation_fn="gelu-approximate", num_embeds_ada_norm=1000,
            norm_type="ada_norm_single", norm_elementwise_affine=False),
    }, 16),
    ("^Mochi", {
        **T5, **FLOW,
        "vae": network("AutoencoderKLMochi", latent_channels=12, out_channels=3, encoder_block_out_channels=(32, 32,
            32, 32), decoder_block_out_channels=(32, 32, 32, 32), layers_per_block=(1, 1, 1, 1, 1)),
        "transformer": network("MochiTransformer3DModel", patch_size=2, num_attention_heads=2, attention_head_dim=8,
            num_layers=2, pooled_projection_dim=16, in_channels=12, out_channels=None, qk_norm="rms_norm",
            text_embed_dim=64, time_embed_dim=4, activation_fn="swiglu", max_sequence_length=256),
    }, 16),
    ("^Allegro", {
        **T5, **EULER,
        "vae": network("AutoencoderKLAllegro", in_channels=3, out_channels=3,
            down_block_types=("AllegroDownBlock3D",) * 4, up_block_types=("AllegroUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2,
            temporal_compression_ratio=4),
        "transformer": network("AllegroTransformer3DModel", num_attention_heads=2, attention_head_dim=12,
            in_channels=4, out_channels=4, num_layers=1, cross_attention_dim=24, sample_width=8, sample_height=8,
            sample_frames=8, caption_channels=64),
    }, 16),
    ("^OvisImage", {
        "text_encoder": lambda: wide(transformers.Qwen3Model(tiny.qwen3(2, 48))),
        "tokenizer": lambda: tokenizer("qwen", 1024), **FLOW, "vae": tiny.vae,
        "transformer": network("OvisImageTransformer2DModel", **FLUX_LIKE | {"joint_attention_dim": 48},
            patch_size=1, out_channels=64),
    }, 64),
    ("^Bria(Pipeline)", {
        **T5, **FLOW, "vae": tiny.vae,
        "transformer": network("BriaTransformer2DModel", **FLUX_LIKE | {"axes_dims_rope": [0, 4, 12]}, patch_size=1,
            pooled_projection_dim=None),
    }, 64),
    ("^DD[IP]MPipeline", {
        "unet": network("UNet2DModel", sample_size=8, in_channels=3, out_channels=3, layers_per_block=1,
            block_out_channels=(8, 16), norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D")),
        "scheduler": lambda: diffusers.DDIMScheduler(clip_sample=False),
    }, 8),
    ("^DiT", {
        "transformer": network("DiTTransformer2DModel", sample_size=16, num_layers=2, patch_size=4,
            attention_head_dim=8, num_attention_heads=2, in_channels=4, out_channels=8, attention_bias=True,
            activation_fn="gelu-approximate", num_embeds_ada_norm=1000, norm_type="ada_norm_zero",
            norm_elementwise_affine=False),
        "vae": small_vae, **DDIM, "id2label": None,
    }, 32),
    ("^AnimateDiff(Pipeline|PAG|VideoToVideo|ControlNet)", {
        **SD, **DDIM,
        "motion_adapter": network("MotionAdapter", block_out_channels=(16, 32), motion_layers_per_block=1,
            motion_norm_num_groups=2, motion_num_attention_heads=4),
        "controlnet": controlnet_of("ControlNetModel"),
    }, 16),
    ("^StableVideo", {
        "unet": network("UNetSpatioTemporalConditionModel", block_out_channels=(32, 64), layers_per_block=1,
            sample_size=16, in_channels=8, out_channels=4, down_block_types=("CrossAttnDownBlockSpatioTemporal",
            "DownBlockSpatioTemporal"), up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            cross_attention_dim=32, num_attention_heads=8, projection_class_embeddings_input_dim=96,
            addition_time_embed_dim=32),
        "vae": network("AutoencoderKLTemporalDecoder", block_out_channels=[32, 32], in_channels=3, out_channels=3,
            down_block_types=["DownEncoderBlock2D"] * 2, latent_channels=4),
        "scheduler": lambda: diffusers.EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012,
            beta_schedule="scaled_linear", interpolation_type="linear", prediction_type="v_prediction",
            use_karras_sigmas=True, timestep_spacing="leading", timestep_type="continuous", sigma_min=0.002,
            sigma_max=700.0),
        "image_encoder": clip_vision(224), "feature_extractor": clip_images,
    }, 32),
    ("^LTX2(Pipeline|ImageToVideo|Condition|HDR|InContext)", LTX2, 32),
    ("^SkyReelsV2ImageToVideo", wan_with_image("SkyReelsV2Transformer3DModel"), 16),
    ("^SkyReelsV2(Pipeline|ImageToVideo)", {
        **UMT5, "vae": lambda: tiny.wan().vae,
        "scheduler": lambda: diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", flow_shift=8.0,
            use_flow_sigmas=True),
        "transformer": network("SkyReelsV2Transformer3DModel", **WAN),
    }, 16),
    ("^HunyuanDiT(PAG)?Pipeline", {
        "text_encoder": bert, "tokenizer": lambda: tokenizer("t5", 77), "text_encoder_2": t5,
        "tokenizer_2": lambda: tokenizer("t5", 256), **DDIM, "vae": deep_vae,
        "transformer": network("HunyuanDiT2DModel", sample_size=16, num_layers=2, patch_size=2, attention_head_dim=8,
            num_attention_heads=3, in_channels=4, cross_attention_dim=32, cross_attention_dim_t5=64,
            pooled_projection_dim=16, hidden_size=24),
    }, 1024),
    ("^LDMText", {
        **DDIM, "bert": lambda: clip(transformers.CLIPTextModel, 32), "tokenizer": SD["tokenizer"],
        "vqvae": small_vae, "unet": SD["unet"],
    }, 64),
    ("^AceStep", {
        "text_encoder": lambda: wide(transformers.Qwen3Model(tiny.qwen3(2, 32))),
        "tokenizer": lambda: tokenizer("qwen", 2048),
        "scheduler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
        "transformer": network("AceStepTransformer1DModel", **ACE, num_hidden_layers=2, in_channels=24,
            audio_acoustic_hidden_dim=8, patch_size=2, is_turbo=True),
        "condition_encoder": lambda: wide(AceStepConditionEncoder(**ACE, text_hidden_dim=32, timbre_hidden_dim=8,
            num_lyric_encoder_hidden_layers=2, num_timbre_encoder_hidden_layers=2)),
        "audio_tokenizer": lambda: wide(AceStepAudioTokenizer(**ACE_POOL, fsq_dim=32, fsq_input_levels=[4, 4, 4],
            fsq_input_num_quantizers=1)),
        "audio_token_detokenizer": lambda: wide(AceStepAudioTokenDetokenizer(**ACE_POOL)),
        "vae": network("AutoencoderOobleck", encoder_hidden_size=6, downsampling_ratios=[1, 2], decoder_channels=3,
            decoder_input_channels=8, audio_channels=2, channel_multiples=[2, 4], sampling_rate=4),
    }, 16),
    ("^StableAudio3", {
        "text_encoder": t5_gemma, "tokenizer": lambda: tokenizer("gemma", 64),
        "scheduler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
        "duration_embedder": lambda: wide(StableAudio3DurationEmbedder(output_dim=32, fourier_dim=16)),
        "vae": network("AutoencoderSAME", audio_channels=2, patch_size=2, encoder_channels=8, encoder_c_mults=(2,),
            encoder_strides=(2,), encoder_transformer_depths=(1,), latent_dim=8, use_differential_attention=False,
            dim_heads=4, ff_mult=2, sampling_rate=16),
        "transformer": network("StableAudio3DiTModel", io_channels=8, patch_size=1, embed_dim=32, depth=2,
            num_heads=4, cond_token_dim=32, global_cond_dim=32, local_add_cond_dim=5, timestep_features_dim=16,
            ff_mult=2, num_memory_tokens=3, use_differential_attention=False),
    }, 16),
    ("^SanaVideo|^SanaImageToVideo", {
        **GEMMA2, **FLOW, "vae": lambda: tiny.wan().vae,
        "transformer": network("SanaVideoTransformer3DModel", num_attention_heads=2, attention_head_dim=12,
            num_layers=2, num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24,
            caption_channels=32, sample_size=4, rope_max_seq_len=32),
    }, 32),
    ("^ChronoEdit", wan_with_image("ChronoEditTransformer3DModel"), 16),
    ("^LongCatImage", {
        **{n: QWEN_EDIT[n] for n in ("text_encoder", "tokenizer")}, "text_processor": QWEN_EDIT["processor"],
        **FLOW, "vae": tiny.vae,
        "transformer": network("LongCatImageTransformer2DModel", **FLUX_LIKE | {"joint_attention_dim": 32,
            "pooled_projection_dim": 32}),
    }, 64),
    ("^Kandinsky5(T2V|I2V)", {
        "text_encoder": QWEN_EDIT["text_encoder"], "tokenizer": QWEN_EDIT["processor"],
        "text_encoder_2": SD["text_encoder"], "tokenizer_2": SD["tokenizer"], **FLOW,
        "vae": lambda: tiny.hunyuan_video().vae,
        "transformer": network("Kandinsky5Transformer3DModel", in_visual_dim=16, in_text_dim=32, in_text_dim2=32,
            time_dim=16, out_visual_dim=16, model_dim=16, ff_dim=32, num_text_blocks=1, num_visual_blocks=1,
            axes_dims=(2, 2, 4), visual_cond=True),
    }, 32),
    ("^LucyEdit", {
        **of(tiny.wan), **FLOW, "transformer": network("WanTransformer3DModel", **WAN | {"in_channels": 32}),
        "transformer_2": None,
    }, 16),
    ("^HunyuanVideo15Pipeline", {
        **FLOW, "text_encoder": qwen_text, "tokenizer": lambda: tokenizer("qwen", 1108), "text_encoder_2": t5,
        "tokenizer_2": transformers.ByT5Tokenizer,
        "guider": lambda: diffusers.ClassifierFreeGuidance(guidance_scale=2.0),
        "vae": network("AutoencoderKLHunyuanVideo15", latent_channels=4, block_out_channels=(16, 16),
            layers_per_block=1, spatial_compression_ratio=4, temporal_compression_ratio=2,
            downsample_match_channel=False, upsample_match_channel=False),
        "transformer": network("HunyuanVideo15Transformer3DModel", in_channels=9, out_channels=4,
            num_attention_heads=2, attention_head_dim=8, num_layers=1, num_refiner_layers=1, mlp_ratio=2.0,
            patch_size=1, patch_size_t=1, text_embed_dim=32, text_embed_2_dim=64, image_embed_dim=12,
            rope_axes_dim=(2, 2, 4), target_size=16, task_type="t2v"),
    }, 16),
    ("^BriaFibo(Edit)?Pipeline", {
        **FLOW, "text_encoder": smol, "tokenizer": lambda: tokenizer("t5", 512), "vae": lambda: tiny.wan().vae,
        "transformer": network("BriaFiboTransformer2DModel", patch_size=1, in_channels=16, num_layers=1,
            num_single_layers=1, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=64,
            text_encoder_dim=32, pooled_projection_dim=None, axes_dims_rope=[0, 4, 4]),
    }, 32),
]
# fmt: on
NONE = {"safety_checker", "feature_extractor", "image_encoder", "watermarker", "id2label", "transformer_2"}
FRAMES = {"num_frames": 9, "video_length": 1, "video": 9, "conditioning_frames": 9}
FRAMES_OF = {"MochiPipeline": 7, "ChronoEditPipeline": 5}


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
