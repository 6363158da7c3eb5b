"""Training of the image autoencoder: both halves together, then the decoder alone on slightly noisy latents."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from . import ocr, render, vae

CROP = 64
BATCH = 8
NOISE = 0.25  # largest latent noise of the decoder stage, in standard deviations of each channel


def crops(rng: np.random.Generator, count: int) -> torch.Tensor:
    """[count, 3, CROP, CROP]: random columns of random signs, channels last."""
    out = np.empty((count, 3, CROP, CROP), np.float32)
    for i in range(count):
        x = int(rng.integers(0, render.WIDTH - CROP + 1))
        out[i] = render.random_sign(rng)[2][:, :, x : x + CROP]
    return torch.from_numpy(out).contiguous(memory_format=torch.channels_last)


def images(rng: np.random.Generator, count: int) -> torch.Tensor:
    """[count, 3, HEIGHT, WIDTH]: whole random signs, channels last."""
    batch = np.stack([render.random_sign(rng)[2] for _ in range(count)])
    return torch.from_numpy(batch).contiguous(memory_format=torch.channels_last)


def image_loss(y: torch.Tensor, x: torch.Tensor, edges: float) -> tuple[torch.Tensor, torch.Tensor]:
    """L1 + 4 L2 + edges * (L1 of horizontal and vertical differences), and the plain squared error."""
    d = y.float() - x
    squared = d.square().mean()
    loss = d.abs().mean() + 4 * squared
    across, down = d[..., 1:] - d[..., :-1], d[..., 1:, :] - d[..., :-1, :]
    return loss + edges * (across.abs().mean() + down.abs().mean()), squared


def rate(step: int, steps: int, peak: float, warm: int = 100, last: float = 0.02) -> float:
    """Learning rate: linear warm-up, then a cosine from peak to last * peak."""
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (last + (1 - last) * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))


def reconstruction(model: vae.VAE, x: torch.Tensor) -> float:
    """Peak signal to noise ratio in dB of encode-decode, no sampling."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = model.decode(model.encode(x)[0]).float().clamp(-1, 1)
    return float(10 * torch.log10(4 / (y - x).square().mean()))


def fit(
    params: list[torch.nn.Parameter],
    loss_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    peak: float,
    report: Callable[[int, float, float], None],
) -> None:
    """The optimiser loop of both stages; report(step, mean squared error, seconds) every 250 steps and at the end."""
    optimiser = torch.optim.AdamW(params, lr=peak, betas=(0.9, 0.99), weight_decay=0.0)
    start, errors = time.time(), []
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate(step, steps, peak)
        loss, squared = loss_of(step)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimiser.step()
        errors.append(float(squared.detach()))
        if (step + 1) % 250 == 0 or step + 1 == steps:
            report(step + 1, float(np.mean(errors[-250:])), time.time() - start)


def train_joint(work: Path, seed: int, steps: int, compiled: bool, log: Callable[[str], None]) -> None:
    """Encoder and decoder from scratch; writes work/vae_joint.pt."""
    torch.manual_seed(seed)
    rng = np.random.default_rng([seed, 1])
    test = images(np.random.default_rng([seed, 2]), 64)
    model = vae.VAE().to(memory_format=torch.channels_last)

    def forward(x: torch.Tensor, eps: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            mean, logvar = model.encode(x)
            y = model.decode(mean + eps * torch.exp(0.5 * logvar))
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        loss, squared = image_loss(y, x, edges)
        return loss + 2e-4 * kl, squared

    run = torch.compile(forward, dynamic=False) if compiled else forward
    side = CROP // 8

    def loss_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        # The loss on differences from the first step on stalls in the flat-background optimum.
        edges = torch.tensor(0.5 if step > 0.4 * steps else 0.0)
        return run(crops(rng, BATCH), torch.randn(BATCH, vae.Z_DIM, side, side), edges)

    def report(step: int, squared: float, seconds: float) -> None:
        psnr = reconstruction(model, test)
        train = 10 * math.log10(4 / squared)
        log(f"vae joint step {step} seconds {seconds:.0f} psnr train {train:.2f} test {psnr:.2f}")
        torch.save(model.state_dict(), work / "vae_joint.pt")

    fit(list(model.parameters()), loss_of, steps, 2e-3, report)


def train_decoder(work: Path, seed: int, steps: int, compiled: bool, log: Callable[[str], None]) -> None:
    """Decoder alone, encoder and latents frozen, so that caches and flow models made meanwhile stay valid.

    Reads work/vae_joint.pt and the channel scales of work/cache.npz; writes work/vae.pt.
    """
    torch.manual_seed(seed + 10)
    rng = np.random.default_rng([seed, 3])
    test = images(np.random.default_rng([seed, 2]), 64)
    model = vae.VAE().to(memory_format=torch.channels_last)
    model.load_state_dict(torch.load(work / "vae_joint.pt"))
    scale = torch.from_numpy(np.load(work / "cache.npz")["std"]).view(1, -1, 1, 1)
    model.encoder.requires_grad_(False)
    model.quant_conv.requires_grad_(False)
    params = [p for p in model.parameters() if p.requires_grad]

    def encode(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model.encode(x)[0]

    def forward(x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y = model.decode(z)
        return image_loss(y, x, 0.5)

    enc, run = (torch.compile(f, dynamic=False) if compiled else f for f in (encode, forward))

    def loss_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = crops(rng, BATCH)
        z = enc(x)
        level = NOISE * torch.rand(BATCH, 1, 1, 1)
        return run(x, z + torch.randn_like(z) * level * scale)

    def report(step: int, squared: float, seconds: float) -> None:
        psnr = reconstruction(model, test)
        train = 10 * math.log10(4 / squared)
        log(f"vae decoder step {step} seconds {seconds:.0f} psnr train {train:.2f} test {psnr:.2f}")
        torch.save(model.state_dict(), work / "vae.pt")

    fit(params, loss_of, steps, 1e-3, report)


def read_back(model: vae.VAE, count: int, noise: float, seed: int) -> tuple[float, float]:
    """Share of texts that tesseract reads exactly, in true images and in their reconstructions.

    noise is in standard deviations of the latents of these images.
    """
    rng = np.random.default_rng([seed, 4])
    signs = [render.random_sign(rng) for _ in range(count)]
    texts = [s[1] for s in signs]
    x = torch.from_numpy(np.stack([s[2] for s in signs])).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        z = model.encode(x)[0]
        generator = torch.Generator().manual_seed(seed)
        z = z + noise * z.std((0, 2, 3), keepdim=True) * torch.randn(z.shape, generator=generator)
        y = model.decode(z).clamp(-1, 1).numpy()
    true = ocr.read([render.to_image(s[2]) for s in signs], texts)
    back = ocr.read([render.to_image(p) for p in y], texts)
    return float(np.mean([a == b for a, b in zip(true, texts)])), float(np.mean([a == b for a, b in zip(back, texts)]))
