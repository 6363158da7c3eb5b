"""Checkpoints of a few hundred thousand random weights, a folder for each family, from configuration classes alone.

Weights are drawn so that a velocity depends on every input (standard deviation 0.6/sqrt(fan-in), biases 0.1): with the
default initialisation such networks hardly see their prompt, and a test of it would pass whatever they do.

    python tiny.py FOLDER [NAME ...]    writes those of PIPELINES, or these of them
"""

import inspect
import json
import sys
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLLTXVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    LlamaConfig,
    LlamaModel,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

TEXTS = [
    "a red cat on a mat",
    "a blue sign that says hello",
    "0123456789",
    "the quick brown fox jumps over the lazy dog",
]
WORDS = 320
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
# Of messages whose content is a list, as FLUX.2's are.
PARTS_CHAT = (
    "<bos>{% for m in messages %}<|im_start|>{{ m.role }} {% for c in m.content %}{{ c.text }}{% endfor %}<|im_end|>"
    "{% endfor %}"
)


def tokenizer(kind: str, longest: int, texts: list[str] = TEXTS, words: int = WORDS) -> PreTrainedTokenizerFast:
    t = Tokenizer(models.BPE(unk_token="<unk>"))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=words,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    ends = {"clip": ("<bos> $A <eos>", [("<bos>", 2), ("<eos>", 1)]), "t5": ("$A <eos>", [("<eos>", 1)])}
    if kind in ends:
        t.post_processor = processors.TemplateProcessing(single=ends[kind][0], special_tokens=ends[kind][1])
    out = PreTrainedTokenizerFast(
        tokenizer_object=t,
        pad_token="<eos>" if kind == "clip" else "<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        model_max_length=longest,
    )
    if kind == "qwen":
        out.chat_template = CHAT
    if kind == "mistral":
        out.chat_template = PARTS_CHAT
    return out


def wide(network: torch.nn.Module) -> torch.nn.Module:
    """Draws the weights anew."""
    for name, p in network.named_parameters():
        if p.ndim >= 2:
            torch.nn.init.normal_(p, std=0.6 / p[0].numel() ** 0.5)
        elif name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.1)
    return network


def clip(cls: type, projection: int) -> torch.nn.Module:
    return cls(
        CLIPTextConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=77,
            projection_dim=projection,
            bos_token_id=2,
            eos_token_id=1,
            pad_token_id=1,
            hidden_act="gelu",
        )
    )


def t5() -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=WORDS, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
        )
    )


def vae() -> torch.nn.Module:
    return wide(
        AutoencoderKL(
            in_channels=3,
            out_channels=3,
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[16, 16, 32, 32],
            layers_per_block=1,
            latent_channels=16,
            norm_num_groups=4,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.0609,
            scaling_factor=1.5305,
        )
    )


def dynamic() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )


def sd3() -> StableDiffusion3Pipeline:
    network = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=16,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=64,
        pooled_projection_dim=64,
        out_channels=16,
        pos_embed_max_size=24,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=wide(network),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(),
        text_encoder=clip(CLIPTextModelWithProjection, 32),
        tokenizer=tokenizer("clip", 77),
        text_encoder_2=clip(CLIPTextModelWithProjection, 32),
        tokenizer_2=tokenizer("clip", 77),
        text_encoder_3=t5(),
        tokenizer_3=tokenizer("t5", 512),
    )


def flux1() -> FluxPipeline:
    network = FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    return FluxPipeline(
        transformer=wide(network),
        scheduler=dynamic(),
        vae=vae(),
        text_encoder=clip(CLIPTextModel, 32),
        tokenizer=tokenizer("clip", 77),
        text_encoder_2=t5(),
        tokenizer_2=tokenizer("t5", 512),
    )


def qwen3(layers: int, width: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=1024,
    )


def z_image() -> ZImagePipeline:
    network = ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=64,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=48,
        axes_dims=[4, 6, 6],
        axes_lens=[1024, 64, 64],
    )
    encoder = Qwen3Model(qwen3(3, 48))
    return ZImagePipeline(
        transformer=wide(network),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(),
        text_encoder=encoder,
        tokenizer=tokenizer("qwen", 1024),
    )


def qwen_text(words: int, layers: int, sections: list[int]) -> dict[str, object]:
    """The language part of a text encoder that sees, too; sections of its positions are of time, rows and columns."""
    return {
        "vocab_size": words,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "mrope_section": sections, "rope_theta": 10000.0},
    }


def qwen_image() -> QwenImagePipeline:
    network = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=48,
        axes_dims_rope=(4, 6, 6),
    )
    text = qwen_text(WORDS, layers=2, sections=[1, 2, 3])
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 48,
        "fullatt_block_indexes": [0],
    }
    encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
    return QwenImagePipeline(
        transformer=wide(network),
        scheduler=dynamic(),
        vae=qwen_vae(),
        text_encoder=encoder,
        tokenizer=tokenizer("qwen", 2048),
    )


def qwen_vae() -> torch.nn.Module:
    z = AutoencoderKLQwenImage(
        base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return wide(z)


def krea2(distilled: bool = False) -> Krea2Pipeline:
    """The template is text that the tokenizer knows, so that little of it is left behind the 34 tokens dropped."""
    network = Krea2Transformer2DModel(
        in_channels=64,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        timestep_embed_dim=32,
        text_hidden_dim=48,
        num_text_layers=3,
        text_num_attention_heads=4,
        text_num_key_value_heads=2,
        text_intermediate_size=96,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    text = {**qwen_text(1200, layers=4, sections=[2, 2, 2]), "head_dim": 12}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    template = (
        "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
        "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    )
    return Krea2Pipeline(
        transformer=wide(network),
        scheduler=dynamic(),
        vae=qwen_vae(),
        text_encoder=wide(Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision))),
        tokenizer=tokenizer("qwen", 2048, [*TEXTS, template] * 4, 1200),
        text_encoder_select_layers=(1, 2, 4),
        is_distilled=distilled,
    )


def flux2_network(text: int, guidance: bool) -> torch.nn.Module:
    network = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=128,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=text,
        timestep_guidance_channels=64,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance,
    )
    wide(network)
    for name, p in network.named_parameters():  # strong attention: a prompt is few of the 512 tokens
        if "modulation" in name:
            p.data.mul_(4)
    return network


def flux2_vae() -> torch.nn.Module:
    z = wide(
        AutoencoderKLFlux2(
            block_out_channels=(16, 16, 32, 32), layers_per_block=1, latent_channels=32, norm_num_groups=4
        )
    )
    torch.nn.init.normal_(z.bn.running_mean, std=0.5)
    torch.nn.init.uniform_(z.bn.running_var, 0.5, 2.0)
    return z


def flux2() -> Flux2Pipeline:
    text = {
        "model_type": "mistral",
        "vocab_size": WORDS,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 30,  # the pipeline takes layers 10, 20 and 30
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
    }
    encoder = wide(Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision)))
    return Flux2Pipeline(
        transformer=flux2_network(96, True),
        scheduler=dynamic(),
        vae=flux2_vae(),
        text_encoder=encoder,
        tokenizer=tokenizer("mistral", 1024),
    )


def flux2_klein() -> Flux2KleinPipeline:
    return Flux2KleinPipeline(
        transformer=flux2_network(3 * 48, False),
        scheduler=dynamic(),
        vae=flux2_vae(),
        text_encoder=wide(Qwen3ForCausalLM(qwen3(28, 48))),  # the pipeline takes layers 9, 18 and 27
        tokenizer=tokenizer("qwen", 1024),
    )


def umt5() -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config(vocab_size=WORDS, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4))


def wan_network(channels: int) -> torch.nn.Module:
    return wide(
        WanTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=16,
            in_channels=channels,
            out_channels=channels,
            text_dim=48,
            freq_dim=32,
            ffn_dim=96,
            num_layers=2,
        )
    )


def wan() -> WanPipeline:
    z = AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return WanPipeline(
        transformer=wan_network(16),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        vae=wide(z),
        text_encoder=umt5(),
        tokenizer=tokenizer("t5", 512),
    )


def wan_5b() -> WanPipeline:
    """Wan 2.2 5B: a time for each token, and a VAE with twice the edge."""
    z = AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=48,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.1 * (i % 5 - 2) for i in range(48)],
        latents_std=[0.5 + 0.1 * (i % 7) for i in range(48)],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )
    return WanPipeline(
        transformer=wan_network(48),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        vae=wide(z),
        text_encoder=umt5(),
        tokenizer=tokenizer("t5", 512),
        expand_timesteps=True,
    )


def wan_two() -> WanPipeline:
    """Wan 2.2 A14B: a second transformer below the boundary."""
    z = AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return WanPipeline(
        transformer=wan_network(16),
        transformer_2=wan_network(16),
        boundary_ratio=0.6,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        vae=wide(z),
        text_encoder=umt5(),
        tokenizer=tokenizer("t5", 512),
    )


def hunyuan_video() -> HunyuanVideoPipeline:
    """The tokenizer is trained on the template, so that little of it is left behind the 95 tokens that are dropped."""
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    words = 1200
    network = HunyuanVideoTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=48,
        pooled_projection_dim=32,
        rope_axes_dim=(4, 6, 6),
    )
    z = AutoencoderKLHunyuanVideo(
        block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4, scaling_factor=0.476986
    )
    encoder = LlamaModel(
        LlamaConfig(
            vocab_size=words,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=4,  # the pipeline takes the third last state
            num_attention_heads=4,
            max_position_embeddings=1024,
        )
    )
    return HunyuanVideoPipeline(
        transformer=wide(network),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=wide(z),
        text_encoder=wide(encoder),
        tokenizer=tokenizer("llama", 1024, [*TEXTS, DEFAULT_PROMPT_TEMPLATE["template"]] * 4, words),
        text_encoder_2=clip(CLIPTextModel, 32),
        tokenizer_2=tokenizer("clip", 77),
    )


def ltx() -> LTXPipeline:
    network = LTXVideoTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=4,
        attention_head_dim=16,
        cross_attention_dim=64,
        num_layers=2,
        caption_channels=64,
    )
    z = AutoencoderKLLTXVideo(
        latent_channels=16,
        block_out_channels=(8, 8, 16, 16),
        decoder_block_out_channels=(8, 8, 16, 16),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        scaling_factor=0.8,
    )
    torch.nn.init.normal_(z.latents_mean, std=0.5)
    torch.nn.init.uniform_(z.latents_std, 0.5, 2.0)
    return LTXPipeline(
        transformer=wide(network),
        scheduler=dynamic(),
        vae=wide(z),
        text_encoder=t5(),
        tokenizer=tokenizer("t5", 512),
    )


def ltx_noise() -> LTXPipeline:
    """The decoder is that of LTX-Video 0.9.1, which draws noise of its own."""
    pipe = ltx()
    z = AutoencoderKLLTXVideo(
        latent_channels=16,
        block_out_channels=(8, 8, 16, 16),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, True, False),
        decoder_spatio_temporal_scaling=(True, True, True),
        decoder_inject_noise=(True, True, True, False),
        upsample_residual=(True, True, True),
        upsample_factor=(2, 2, 2),
        timestep_conditioning=True,
        decoder_causal=False,
    )
    for name, p in wide(z).named_parameters():  # 0 by default
        if "per_channel_scale" in name:
            torch.nn.init.normal_(p, std=0.3)
    pipe.register_modules(vae=z)
    return pipe


PIPELINES = {
    "sd3": sd3,
    "flux1": flux1,
    "z-image": z_image,
    "qwen-image": qwen_image,
    "flux2": flux2,
    "flux2-klein": flux2_klein,
    "krea2": krea2,
    "wan": wan,
    "wan-5b": wan_5b,
    "wan-two": wan_two,
    "hunyuan-video": hunyuan_video,
    "ltx": ltx,
}


def write(folder: Path, names: tuple[str, ...] = tuple(PIPELINES)) -> dict[str, Path]:
    """Writes these checkpoints and returns their folders by name."""
    out = {}
    for i, name in enumerate(names):
        torch.manual_seed(i)
        pipe = PIPELINES[name]()
        pipe.save_pretrained(folder / name)
        out[name] = folder / name
        frames = {"frames": 9} if "num_frames" in inspect.signature(pipe.__call__).parameters else {}
        settings = {"height": 64, "width": 64, **frames}  # at which whole pipelines are tested, too
        (out[name] / "meander.json").write_text(json.dumps(settings))
    return out


if __name__ == "__main__":
    write(Path(sys.argv[1]), tuple(sys.argv[2:]) or tuple(PIPELINES))
