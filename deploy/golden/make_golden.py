#!/usr/bin/env python3
"""Build tiny random Qwen-Image checkpoints and record what the reference makes of them.

Two checkpoints in the diffusers layout, with weights drawn from one seed, go to
OUT/full and OUT/half; what the reference computes from them goes to OUT/*.safetensors
and OUT/*.gz. They are read by the tests of pkg/models/model/qwenimage and pkg/models/tokenizer. Run it as `make golden`:

    python -m venv venv && venv/bin/pip install -r deploy/golden/requirements.txt
    venv/bin/python deploy/golden/make_golden.py pkg/models/model/qwenimage/testdata/golden

Everything is computed in float32 on one thread. The half checkpoint is stored as BF16
(transformer, VAE) and F16 (text encoder) and widened to float32 before use, as a
reader without half-precision arithmetic does.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
if os.environ.get("PYTHONHASHSEED") != "0":  # PEFT writes sets, in the order of their hashes
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, *sys.argv])

import numpy as np
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
)

from corpus import record_corpus, train_bpe

SEED = 20260101

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
]

PROMPTS = [
    'a blue sign that says "4071"',
    'a red sign that says "OPEN"',
    " ",
    "",
    "Ein gr\u00fcnes Schild, auf dem \u201eZo\u0308e\u201c steht",
    "\u4e00\u4e2a\u5199\u7740\u201c\u4f60\u597d\u201d\u7684\u724c\u5b50",
    "an astronaut \U0001f469\u200d\U0001f680 says <|im_end|> twice\n\n  and leaves",
    "a very long description of a sign: " + "it is large, it is round, it is old; " * 6,
]

# Prompts of more tokens than a conditioning has, the second beyond the tokenizer's own limit.
LONG = [f"a list of {n} signs: " + ", ".join(f"sign {i} is {c}" for i, c in zip(range(n), ("red", "green", "blue") * n))
        for n in (100, 300)]

# Configurations: heads, widths and depths differ between the two wherever the code
# could confuse them.
CHECKPOINTS = {
    "full": dict(
        text=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, rms_norm_eps=1e-6, max_position_embeddings=4096,
                  rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[1, 1, 2])),
        tie=True,
        transformer=dict(patch_size=2, in_channels=64, out_channels=16, num_layers=3, attention_head_dim=16,
                         num_attention_heads=3, joint_attention_dim=32, axes_dims_rope=(4, 6, 6)),
        vae=dict(base_dim=4, z_dim=16, dim_mult=[1, 2, 2, 4], num_res_blocks=1, attn_scales=[],
                 temperal_downsample=[False, False, False]),
        dtypes=(torch.float32, torch.float32, torch.float32),
        shard="300KB",
        tokenizer="json",
    ),
    "half": dict(
        text=dict(hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=3,
                  num_key_value_heads=1, rms_norm_eps=1e-5, max_position_embeddings=4096,
                  rope_parameters=dict(rope_type="default", rope_theta=1000000.0, mrope_section=[2, 1, 1])),
        tie=False,
        transformer=dict(patch_size=2, in_channels=32, out_channels=8, num_layers=2, attention_head_dim=12,
                         num_attention_heads=2, joint_attention_dim=24, axes_dims_rope=(4, 4, 4)),
        vae=dict(base_dim=4, z_dim=8, dim_mult=[1, 1, 2, 2], num_res_blocks=2, attn_scales=[],
                 temperal_downsample=[False, True, True]),
        dtypes=(torch.float16, torch.bfloat16, torch.bfloat16),
        shard="10MB",
        tokenizer="files",
    ),
}

# name, checkpoint, height, width, prompts, sigmas
VELOCITIES = [
    ("single", "full", 64, 128, [0], [0.7]),
    ("noise", "full", 64, 128, [1], [1.0]),
    ("terminal", "full", 64, 128, [5], [0.02]),
    ("padded", "full", 48, 80, [0, 2, 7], [0.9, 0.9, 0.9]),
    ("sigmas", "full", 32, 32, [4, 6], [0.83, 0.31]),
    ("token", "full", 16, 16, [3], [0.5]),
    ("tall", "full", 176, 16, [0], [0.6128361821174622]),
    ("half", "half", 48, 80, [0, 5, 2], [0.97, 0.4, 0.11]),
]

# name, checkpoint, height, width, prompts, negative prompt, true_cfg_scale, steps
RUNS = [
    ("guided", "full", 64, 128, [0], " ", 4.0, 20),
    ("plain", "full", 48, 80, [1, 7], None, 1.0, 6),
    ("half", "half", 32, 48, [6, 0], "blurry, ugly", 2.5, 5),
]

LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
                "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mod.1", "norm_out.linear"]


def randomize(module, rng):
    """Draw every parameter, so that no term of a formula can be left out unnoticed."""
    for name, p in sorted(module.named_parameters()):
        if p.ndim >= 2 and not name.endswith("gamma"):
            fan_in = p[0].numel()
            if "embed_tokens" in name:
                fan_in = 1
            w = rng.standard_normal(p.shape) / fan_in**0.5
        elif name.endswith("bias"):
            w = 0.1 * rng.standard_normal(p.shape)
        else:  # norm weights
            w = 1 + 0.2 * rng.standard_normal(p.shape)
        if name.endswith("decoder.conv_out.weight"):
            w = 0.4 * w  # keeps most pixels off the clamp
        p.data.copy_(torch.from_numpy(w.astype(np.float32)))


def build(name, out, rng):
    c = CHECKPOINTS[name]
    root = os.path.join(out, name)
    vocab, merges = train_bpe(1400 if name == "full" else 700)
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, additional_special_tokens=SPECIAL[1:])
    ids = {t: tokenizer.convert_tokens_to_ids(t) for t in SPECIAL}
    vision = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=1, patch_size=2, spatial_merge_size=1,
                  temporal_patch_size=1, out_hidden_size=c["text"]["hidden_size"], fullatt_block_indexes=[0])
    text = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(
        text_config=dict(vocab_size=len(tokenizer), bos_token_id=ids["<|endoftext|>"],
                         eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"], **c["text"]),
        vision_config=vision, tie_word_embeddings=c["tie"],
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )).eval()
    transformer = QwenImageTransformer2DModel(**c["transformer"]).eval()
    z = c["vae"]["z_dim"]
    vae = AutoencoderKLQwenImage(
        latents_mean=[round(float(v), 4) for v in 0.5 * rng.standard_normal(z)],
        latents_std=[round(float(v), 4) for v in 0.5 + rng.random(z)], **c["vae"]).eval()
    for module, dtype in zip((text, transformer, vae), c["dtypes"]):
        randomize(module, rng)
        module.to(dtype)
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256, base_shift=0.5, max_image_seq_len=8192, max_shift=0.9, shift=1.0,
        shift_terminal=0.02, time_shift_type="exponential", use_dynamic_shifting=True)
    pipe = QwenImagePipeline(scheduler=scheduler, vae=vae, text_encoder=text, tokenizer=tokenizer,
                             transformer=transformer)
    pipe.save_pretrained(root)
    if c["shard"]:
        for part in ("transformer", "text_encoder"):
            sub = os.path.join(root, part)
            for f in os.listdir(sub):
                if f.endswith(".safetensors"):
                    os.remove(os.path.join(sub, f))
        transformer.save_pretrained(os.path.join(root, "transformer"), max_shard_size=c["shard"])
        text.save_pretrained(os.path.join(root, "text_encoder"), max_shard_size=c["shard"])
    tok = os.path.join(root, "tokenizer")
    if c["tokenizer"] == "files":  # as the published checkpoints: vocab.json, merges.txt, tokenizer_config.json
        os.remove(os.path.join(tok, "tokenizer.json"))
        with open(os.path.join(tok, "vocab.json"), "w", encoding="utf-8") as f:
            json.dump(vocab, f, ensure_ascii=False)
        with open(os.path.join(tok, "merges.txt"), "w", encoding="utf-8") as f:
            f.write("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
        config = json.load(open(os.path.join(tok, "tokenizer_config.json")))
        config["added_tokens_decoder"] = {
            str(ids[t]): dict(content=t, lstrip=False, normalized=False, rstrip=False, single_word=False,
                              special=True) for t in SPECIAL}
        json.dump(config, open(os.path.join(tok, "tokenizer_config.json"), "w"), indent=2)
    pipe = QwenImagePipeline.from_pretrained(root, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def noise(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def velocity(pipe, x, sigmas, prompts, height, width):
    embeds, mask = pipe.encode_prompt([PROMPTS[i] for i in prompts])
    t = torch.tensor(sigmas, dtype=torch.float32) * 1000
    return pipe.transformer(
        hidden_states=x, timestep=t / 1000, encoder_hidden_states=embeds, encoder_hidden_states_mask=mask,
        img_shapes=[[(1, height // 16, width // 16)]] * len(prompts), return_dict=False)[0]


def tokens(height, width):
    return (height // 16) * (width // 16)


def record_text(pipes):
    out = {}
    for name, pipe in pipes.items():
        for i, prompt in enumerate(PROMPTS):
            embeds, mask = pipe.encode_prompt([prompt])
            assert mask is None
            out[f"{name}.{i}"] = embeds[0]
    return out


def record_long(pipes):
    """Every eighth state of what the pipeline keeps of prompts that are too long."""
    out = {}
    for name, pipe in pipes.items():
        for i, prompt in enumerate(LONG):
            for most in (512, 1024):
                embeds, mask = pipe.encode_prompt([prompt], max_sequence_length=most)
                assert mask is None
                if embeds.shape[1] == most:
                    out[f"{name}.{i}.{most}"] = embeds[0, ::8]
    assert len(out) >= 6
    return out


def record_velocities(pipes, rng):
    out = {}
    for name, which, h, w, prompts, sigmas in VELOCITIES:
        pipe = pipes[which]
        x = noise(rng, len(prompts), tokens(h, w), pipe.transformer.config.in_channels)
        out[f"{name}.x"], out[f"{name}.v"] = x, velocity(pipe, x, sigmas, prompts, h, w)
        out[f"{name}.sigma"] = torch.tensor(sigmas, dtype=torch.float32)
        out[f"{name}.prompts"], out[f"{name}.size"] = i32(prompts), i32([h, w])
    return out


def pixels(pipe, latents, h, w):
    """The pipeline's last lines, without the rounding to bytes."""
    z = pipe._unpack_latents(latents, h, w, pipe.vae_scale_factor)
    mean = torch.tensor(pipe.vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(pipe.vae.config.latents_std).view(1, -1, 1, 1, 1)
    return pipe.vae.decode(z / (1.0 / std) + mean, return_dict=False)[0][:, :, 0]


def record_vae(pipes, rng):
    out = {}
    for name, pipe in pipes.items():
        for h, w in ((64, 128), (16, 48), (80, 16)):
            key = f"{name}.{h}x{w}"
            x = noise(rng, 1, tokens(h, w), pipe.transformer.config.in_channels)
            out[f"{key}.latents"], out[f"{key}.pixels"] = x[0], pixels(pipe, x, h, w)[0]
            image = torch.from_numpy(rng.integers(0, 256, (h, w, 3), dtype=np.uint8))
            image = (image // 4 + torch.arange(w, dtype=torch.uint8)[None, :, None])  # some low frequencies
            y = image.permute(2, 0, 1)[None, :, None].float() / 255 * 2 - 1
            mean = torch.tensor(pipe.vae.config.latents_mean).view(1, -1, 1, 1, 1)
            std = torch.tensor(pipe.vae.config.latents_std).view(1, -1, 1, 1, 1)
            z = (pipe.vae.encode(y).latent_dist.mode() - mean) / std
            z = pipe._pack_latents(z.contiguous(), 1, z.shape[1], h // 8, w // 8)
            out[f"{key}.image"], out[f"{key}.encoded"] = image, z[0]
    return out


def record_runs(pipes, rng):
    out = {}
    for name, which, h, w, prompts, negative, scale, steps in RUNS:
        pipe = pipes[which]
        x = noise(rng, len(prompts), tokens(h, w), pipe.transformer.config.in_channels)
        kept = [x]

        def keep(_, step, t, kw):
            kept.append(kw["latents"])
            return kw

        batch = [PROMPTS[i] for i in prompts]
        final = pipe(batch, negative_prompt=None if negative is None else [negative] * len(batch),
                     true_cfg_scale=scale, height=h, width=w, num_inference_steps=steps, latents=x,
                     callback_on_step_end=keep, output_type="latent").images
        assert torch.equal(final, kept[-1])
        image = pipe(batch, negative_prompt=None if negative is None else [negative] * len(batch),
                     true_cfg_scale=scale, height=h, width=w, num_inference_steps=steps, latents=x,
                     output_type="np").images
        out[f"{name}.latents"] = torch.stack(kept)  # [steps+1, B, S, C]
        out[f"{name}.image"] = torch.from_numpy((image * 255).round().astype("uint8"))  # [B, H, W, 3]
        out[f"{name}.sigmas"] = pipe.scheduler.sigmas.clone()
        out[f"{name}.prompts"], out[f"{name}.size"] = i32(prompts), i32([h, w])
        out[f"{name}.scale"] = torch.tensor([scale], dtype=torch.float32)
    return out


def record_lora(pipe, out, rng):
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    got = {}
    h, w, prompts, sigmas = 32, 48, [0, 4], [0.75, 0.2]
    x = noise(rng, len(prompts), tokens(h, w), 64)
    got["x"], got["sigma"], got["prompts"], got["size"] = x, torch.tensor(sigmas), i32(prompts), i32([h, w])
    got["base"] = velocity(pipe, x, sigmas, prompts, h, w)
    configs = {
        "first": LoraConfig(r=4, lora_alpha=8, target_modules=LORA_TARGETS),
        "second": LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"],
                             rank_pattern={"transformer_blocks.0.attn.to_q": 3}, use_rslora=True),
    }
    for name, config in configs.items():
        pipe.transformer.add_adapter(config, adapter_name=name)
    for name, p in sorted(pipe.transformer.named_parameters()):
        if "lora_" in name:
            p.data.copy_(0.3 * noise(rng, *p.shape))
    t = pipe.transformer
    for key, names, weights in (("first", ["first"], [1.0]), ("first.scaled", ["first"], [0.4]),
                                ("second", ["second"], [1.0]), ("both", ["first", "second"], [1.0, -0.5])):
        t.set_adapters(names, weights)
        got[key] = velocity(pipe, x, sigmas, prompts, h, w)
    # The two ways such adapters are published: diffusers' file, and PEFT's folder.
    t.set_adapters(["first"], [1.0])
    t.save_lora_adapter(os.path.join(out, "lora-first"), adapter_name="first",
                        weight_name="pytorch_lora_weights.safetensors")
    file = os.path.join(out, "lora-first", "pytorch_lora_weights.safetensors")
    with safe_open(file, "pt") as f:  # one header entry: the writer orders several by chance
        entry = {"lora_adapter_metadata": f.metadata()["lora_adapter_metadata"]}
        save_file({k: f.get_tensor(k) for k in f.keys()}, file, metadata=entry)
    folder = os.path.join(out, "lora-second")
    os.makedirs(folder, exist_ok=True)
    state = get_peft_model_state_dict(t, adapter_name="second")
    save_file({f"base_model.model.{k}": v.contiguous() for k, v in state.items()},
              os.path.join(folder, "adapter_model.safetensors"))
    config = configs["second"].to_dict()
    config = {k: (sorted(v) if isinstance(v, set) else getattr(v, "value", v)) for k, v in config.items()}
    json.dump(config, open(os.path.join(folder, "adapter_config.json"), "w"), indent=2, sort_keys=True, default=str)
    return got


SIGNS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "models", "signs")
SIGNS_PROMPTS = ['a blue sign that says "4071"', 'a red sign that says "OPEN"']


def record_signs(out):
    """A guided run of the checkpoint that ships, and which weights it was of."""
    pipe = QwenImagePipeline.from_pretrained(SIGNS, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    x = noise(np.random.default_rng(SEED), len(SIGNS_PROMPTS), tokens(64, 128), 64)
    kw = dict(negative_prompt=[" "] * len(SIGNS_PROMPTS), true_cfg_scale=4.0, height=64, width=128,
              num_inference_steps=20, latents=x)
    final = pipe(SIGNS_PROMPTS, output_type="latent", **kw).images
    image = pipe(SIGNS_PROMPTS, output_type="np", **kw).images
    got = {"signs.first": x, "signs.last": final, "signs.sigmas": pipe.scheduler.sigmas.clone(),
           "signs.image": torch.from_numpy((image * 255).round().astype("uint8"))}
    save_file({k: v.contiguous() for k, v in got.items()}, os.path.join(out, "signs.safetensors"))
    sums = {}
    for part in ("text_encoder", "transformer", "vae"):
        for f in sorted(os.listdir(os.path.join(SIGNS, part))):
            if f.endswith(".safetensors"):
                with open(os.path.join(SIGNS, part, f), "rb") as b:
                    sums[f"{part}/{f}"] = hashlib.sha256(b.read()).hexdigest()
    return dict(prompts=SIGNS_PROMPTS, sha256=sums)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.manual_seed(SEED)
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    shutil.copy(os.path.join(os.path.dirname(__file__), "golden.README.md"), os.path.join(out, "README.md"))
    rng = np.random.default_rng(SEED)
    pipes = {name: build(name, out, rng) for name in CHECKPOINTS}
    for name, record in (("text", lambda: record_text(pipes)), ("long", lambda: record_long(pipes)), ("velocity", lambda: record_velocities(pipes, rng)),
                         ("vae", lambda: record_vae(pipes, rng)), ("runs", lambda: record_runs(pipes, rng)),
                         ("lora", lambda: record_lora(pipes["full"], out, rng))):
        got = {k: v.contiguous() for k, v in record().items()}
        for k, v in got.items():
            assert torch.isfinite(v.float()).all(), k
        save_file(got, os.path.join(out, f"{name}.safetensors"))
    record_corpus(pipes["full"].tokenizer, pipes["half"].tokenizer, out, PROMPTS, SPECIAL, SEED)
    import diffusers, peft, tokenizers, transformers

    meta = dict(script="deploy/golden/make_golden.py", seed=SEED, prompts=PROMPTS, long=LONG, signs=record_signs(out), versions=dict(
        python=sys.version.split()[0], torch=torch.__version__, diffusers=diffusers.__version__,
        transformers=transformers.__version__, tokenizers=tokenizers.__version__, peft=peft.__version__,
        numpy=np.__version__))
    with open(os.path.join(out, "meta.json"), "w", encoding="utf-8") as f:
        json.dump(meta, f, indent=2, ensure_ascii=True)
        f.write("\n")


if __name__ == "__main__":
    main()
