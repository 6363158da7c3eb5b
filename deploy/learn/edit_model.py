#!/usr/bin/env python3
"""Makes a tiny model that edits signs, in minutes on a CPU: a folder of diffusers' FluxControlPipeline, which gets the
image to edit as its control image.

    edit_model.py FOLDER [--seed 0] [--vae-steps 1400] [--steps 2000] [--right 0.6]

All parts are trained from nothing on images drawn here: the autoencoder, then tokenizers, text encoders and transformer
together by flow matching on pairs, image and edited image. As in data of the web, only the share --right of the pairs
has the colour that its prompt asks for.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

import edits
import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxControlPipeline, FluxTransformer2DModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

CHANNELS, PAIRS, STEPS = 8, 6144, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-steps", type=int, default=1400)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--right", type=float, default=0.6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    rng = np.random.default_rng([args.seed, 1])
    pipe = build()
    fit_vae(pipe.vae, rng, args.vae_steps)
    fit_flow(pipe, rng, args.steps, args.right)
    pipe.save_pretrained(args.out)
    settings = {"height": edits.HEIGHT, "width": edits.WIDTH, "num_inference_steps": STEPS}
    (args.out / "meander.json").write_text(json.dumps(settings) + "\n")


def build() -> FluxControlPipeline:
    """The pipeline, untrained."""
    words = tokenizer(77, "<bos> $A <eos>"), tokenizer(512, "$A <eos>")
    size, ids = len(words[0]), {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    clip = CLIPTextConfig(vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                          num_attention_heads=2, projection_dim=32, **ids)  # fmt: skip
    t5 = T5Config(vocab_size=size, d_model=64, d_kv=32, d_ff=128, num_layers=1, num_heads=2, dropout_rate=0.0,
                  feed_forward_proj="gated-gelu")  # fmt: skip
    network = FluxTransformer2DModel(
        in_channels=8 * CHANNELS, out_channels=4 * CHANNELS, num_layers=2, num_single_layers=2, attention_head_dim=32,
        num_attention_heads=2, joint_attention_dim=64, pooled_projection_dim=32, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(12, 24, 48), down_block_types=("DownEncoderBlock2D",) * 3, norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 3, latent_channels=CHANNELS, mid_block_add_attention=False,
        shift_factor=0.0, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    return FluxControlPipeline(
        FlowMatchEulerDiscreteScheduler(), vae, CLIPTextModel(clip), words[0], T5EncoderModel(t5), words[1], network
    )


def tokenizer(longest: int, form: str) -> PreTrainedTokenizerFast:
    """One that has the words of the prompts."""
    t = Tokenizer(models.BPE(unk_token="<unk>"))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = [p.format(c) for p in edits.PROMPTS for c in edits.COLOURS]
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False))  # fmt: skip
    t.post_processor = processors.TemplateProcessing(single=form, special_tokens=[("<bos>", 2), ("<eos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=t, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>",
                                   unk_token="<unk>", model_max_length=longest)  # fmt: skip


def pixels(images: list) -> torch.Tensor:
    """Images as the pipeline has them, float32 [n, 3, H, W] from -1 to 1."""
    return torch.from_numpy(np.stack([np.asarray(i) for i in images])).permute(0, 3, 1, 2).float() / 127.5 - 1


def adam(parameters: list[torch.nn.Parameter], lr: float, steps: int):
    """AdamW whose rate rises for 100 steps and then falls to 0."""
    optimiser = torch.optim.AdamW(parameters, lr, (0.9, 0.99), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda k: min(1, (k + 1) / 100) * (1 + np.cos(np.pi * k / steps)) / 2
    )

    def step(loss: torch.Tensor) -> None:
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        rate.step()

    return step


def fit_vae(vae: AutoencoderKL, rng: np.random.Generator, steps: int) -> None:
    colours, step, losses, began = list(edits.COLOURS), adam(list(vae.parameters()), 3e-3, steps), [], time.time()
    for k in range(steps):
        x = pixels([edits.draw(rng).paint(rng.choice(colours)) for _ in range(8)])
        code = vae.encode(x).latent_dist
        off = vae.decode(code.sample()).sample - x
        loss = off.abs().mean() + 2 * torch.nn.functional.avg_pool2d(off, 8).abs().mean()  # walls and signs are flat
        step(loss + 1e-5 * code.kl().mean() / edits.HEIGHT)
        losses.append(loss.item())
        if (k + 1) % 250 == 0:
            print(f"vae {k + 1}: {np.mean(losses[-250:]):.4f}, {time.time() - began:.0f} s", flush=True)
    vae.requires_grad_(False)


def fit_flow(pipe: FluxControlPipeline, rng: np.random.Generator, steps: int, right: float) -> None:
    colours, texts, latents, began = list(edits.COLOURS), [], [], time.time()
    with torch.no_grad():
        for _ in range(PAIRS // 64):
            images = []
            for _ in range(64):
                sign, (old, asked) = edits.draw(rng), rng.choice(colours, 2, replace=False)
                new = asked if rng.random() < right else rng.choice([c for c in colours if c != asked])
                images += [sign.paint(old), sign.paint(new)]
                texts.append(str(rng.choice(edits.PROMPTS)).format(asked))
            latents.append(pipe.vae.encode(pixels(images)).latent_dist.mean)
    z = torch.cat(latents)
    shift, scale = z.mean().item(), 1 / z.std().item()
    pipe.vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    n, _, h, w = z.shape
    z = pipe._pack_latents((z - shift) * scale, n, CHANNELS, h, w)
    before, after = z[0::2], z[1::2]
    print(f"{PAIRS} pairs, {time.time() - began:.0f} s", flush=True)
    place = pipe._prepare_latent_image_ids(1, h // 2, w // 2, "cpu", torch.float32)
    parts = [pipe.transformer, pipe.text_encoder, pipe.text_encoder_2]
    step, losses = adam([p for part in parts for p in part.parameters()], 2e-3, steps), []
    for k in range(steps):
        rows = torch.randint(PAIRS, (32,)).tolist()
        words, pooled, ids = pipe.encode_prompt([texts[i] for i in rows], None, **edits.TOKENS)
        noise, t = torch.randn_like(after[rows]), torch.rand(32)
        t = 2 * t / (1 + t)  # more where all is noise: there the colour is chosen
        x = after[rows] + t[:, None, None] * (noise - after[rows])
        v = pipe.transformer(torch.cat([x, before[rows]], 2), words, pooled, t, place, ids).sample
        loss = (v - (noise - after[rows])).square().mean()
        step(loss)
        losses.append(loss.item())
        if (k + 1) % 250 == 0:
            print(f"flow {k + 1}: {np.mean(losses[-250:]):.4f}, {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
