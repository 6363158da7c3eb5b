"""Writes trained weights as a folder in the diffusers layout of QwenImagePipeline, bf16, and checks that it loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from . import mmdit, render, text, tokens, vae

SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "invert_sigmas": False,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_dynamic_shifting": True,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}
DTYPE = torch.bfloat16
LIMIT = 12_000_000  # bytes, all files of the checkpoint together
PARTS = ("scheduler", "tokenizer", "text_encoder", "transformer", "vae")


def special_ids(tokenizer) -> dict[str, int]:
    return {t: tokenizer.convert_tokens_to_ids(t) for t in tokens.SPECIALS}


def new_encoder(tokenizer) -> text.TextEncoder:
    """An untrained text encoder for this tokenizer."""
    return text.TextEncoder(len(tokenizer), tokenizer(tokens.TEMPLATE.split("{}")[0]).input_ids)


def write_parts(
    out: Path,
    encoder: dict[str, torch.Tensor],
    transformer: dict[str, torch.Tensor],
    autoencoder: dict[str, torch.Tensor],
    mean: list[float],
    std: list[float],
) -> None:
    """Writes every part; mean and std are those of the latents, per channel."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

    tokens.write(out / "tokenizer")
    tokenizer = Qwen2Tokenizer.from_pretrained(out / "tokenizer")
    torch.manual_seed(0)  # of the vision tower, which is never run
    language = Qwen2_5_VLForConditionalGeneration(text.config(len(tokenizer), special_ids(tokenizer)))
    language.model.language_model.load_state_dict(encoder)
    net = QwenImageTransformer2DModel(**mmdit.CONFIG)
    net.load_state_dict(transformer)
    image = AutoencoderKLQwenImage(**vae.CONFIG, latents_mean=mean, latents_std=std)
    image.load_state_dict(vae.to_diffusers(autoencoder, {k: v.shape for k, v in image.state_dict().items()}))
    pipeline = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=image.to(DTYPE),
        text_encoder=language.to(DTYPE),
        tokenizer=tokenizer,
        transformer=net.to(DTYPE),
    )
    for part in PARTS:
        if part != "tokenizer":
            getattr(pipeline, part).save_pretrained(out / part)
    (out / "model_index.json").write_text(pipeline.to_json_string() + "\n")
    for config in out.glob("*/*.json"):
        strip(config)
    write_legacy(out / "text_encoder" / "config.json")
    for weights in out.glob("*/*.safetensors"):
        weights.chmod(0o644)
    size = sum(f.stat().st_size for part in PARTS for f in (out / part).iterdir())
    if size > LIMIT:
        raise ValueError(f"{out}: the checkpoint takes {size} bytes, more than {LIMIT}")


def strip(path: Path) -> None:
    """Takes the name of the folder it was loaded from out of a configuration file."""
    config = json.loads(path.read_text())
    if isinstance(config, dict) and config.pop("_name_or_path", None) is not None:
        path.write_text(json.dumps(config, indent=2) + "\n")


def write_legacy(path: Path) -> None:
    """Repeats the rotary base in the spelling of transformers 4, which would otherwise assume the large model's."""
    config = json.loads(path.read_text())
    language = config["text_config"]
    rope = language["rope_parameters"]
    language["rope_theta"] = rope["rope_theta"]
    language["rope_scaling"] = {"mrope_section": rope["mrope_section"], "rope_type": "default", "type": "default"}
    path.write_text(json.dumps(config, indent=2) + "\n")


def load_pipeline(folder: Path):
    """QwenImagePipeline of a folder, float32, without a progress bar."""
    from diffusers import QwenImagePipeline

    pipeline = QwenImagePipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def check(out: Path, encoder: dict[str, torch.Tensor], transformer: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Largest relative differences (text hidden states, velocity) between the folder and the rounded training forms."""
    pipeline = load_pipeline(out)
    tokens.check(pipeline.tokenizer)
    ours = new_encoder(pipeline.tokenizer)
    ours.load_state_dict({k: v.to(DTYPE).float() for k, v in encoder.items()})
    net = mmdit.new()
    net.load_state_dict({k: v.to(DTYPE).float() for k, v in transformer.items()})
    prompt = render.prompt_of("blue", "4071")
    with torch.no_grad():
        states, _ = pipeline.encode_prompt(prompt)
        ids = pipeline.tokenizer(tokens.TEMPLATE.format(prompt), return_tensors="pt").input_ids[:, tokens.DROPPED :]
        mine = ours(ids)
        x = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(0))
        sigma, keep = torch.tensor([0.7]), torch.ones(1, ids.shape[1], dtype=torch.bool)
        theirs_v = pipeline.transformer(x, states, None, sigma, [[(1, 4, 8)]], return_dict=False)[0]
        mine_v = mmdit.Velocity(net, 4, 8, ids.shape[1])(x, sigma, mine, keep)
    relative = lambda a, b: float((a - b).norm() / b.norm().clamp_min(1e-12))  # noqa: E731
    return relative(mine, states), relative(mine_v, theirs_v)


def write(work: Path, out: Path, log: Callable[[str], None]) -> None:
    """Stage `export`: work/flow.pt, work/vae.pt and work/cache.npz become the checkpoint folder."""
    import numpy as np

    flow = torch.load(work / "flow.pt")
    autoencoder = torch.load(work / "vae.pt")
    cache = np.load(work / "cache.npz")
    mean, std = (np.round(cache[k].astype(np.float64), 5).tolist() for k in ("mean", "std"))
    write_parts(out, flow["encoder"], flow["transformer"], autoencoder, mean, std)
    states, velocity = check(out, flow["encoder"], flow["transformer"])
    size = sum(f.stat().st_size for part in PARTS for f in (out / part).iterdir())
    log(f"export: {size} bytes; relative difference to diffusers: text {states:.1e}, velocity {velocity:.1e}")
    if states > 1e-5 or velocity > 1e-5:
        raise ValueError(
            f"{out}: diffusers computes something else than was trained: text {states}, velocity {velocity}"
        )
