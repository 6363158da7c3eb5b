"""Training of the text encoder and the transformer together, by flow matching on a cache of encoded images."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from . import export, mmdit, ocr, render, tokens, vae

BATCH = 64
ROWS, COLS = render.HEIGHT // 16, render.WIDTH // 16
PEAK, WARM, COOL = 1e-3, 200, 0.3  # learning rate, its warm-up steps, the last share of steps, in which it falls
NO_PROMPT = 0.1  # share of rows that learn the unconditional velocity
HELD_OUT = Path(__file__).parent.parent / "held_out.txt"


def held_out() -> list[str]:
    """The prompts of the test."""
    return HELD_OUT.read_text().split("\n")[:-1]


def write_cache(work: Path, seed: int, count: int, log: Callable[[str], None]) -> None:
    """Encodes random signs with work/vae_joint.pt: work/cache.npz with latents, prompts, channel mean and std.

    Latents are posterior means, normalised per channel, fp16. Texts of three and more characters that the test asks for
    never occur.
    """
    model = vae.VAE().to(memory_format=torch.channels_last)
    model.load_state_dict(torch.load(work / "vae_joint.pt"))
    rng = np.random.default_rng([seed, 5])
    secret = frozenset(t for t in map(render.text_in, held_out()) if len(t) > 2)
    latents = np.empty((count, vae.Z_DIM, 2 * ROWS, 2 * COLS), np.float32)
    prompts = []
    start = time.time()
    for i in range(0, count, 64):
        signs = [render.random_sign(rng, secret) for _ in range(min(64, count - i))]
        prompts += [render.prompt_of(colour, text) for colour, text, _ in signs]
        x = torch.from_numpy(np.stack([s[2] for s in signs])).contiguous(memory_format=torch.channels_last)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            latents[i : i + len(signs)] = model.encode(x)[0].numpy()
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    latents = (latents - mean[:, None, None]) / std[:, None, None]
    np.savez(work / "cache.npz", latents=latents.astype(np.float16), prompts=prompts, mean=mean, std=std)
    log(f"cache: {count} images in {time.time() - start:.0f} s, std {std.min():.3f} to {std.max():.3f}")


def tokenise(tokenizer, users: list[str], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [n, length] after the template's start, padded on the right, and which of them count."""
    ids = torch.full((len(users), length), tokenizer.pad_token_id)
    keep = torch.zeros(len(users), length, dtype=torch.bool)
    texts = [tokens.TEMPLATE.format(u) for u in users]
    for i, row in enumerate(tokenizer(texts).input_ids):
        row = row[tokens.DROPPED :]
        ids[i, : len(row)] = torch.tensor(row)
        keep[i, : len(row)] = True
    return ids, keep


class Painter(torch.nn.Module):
    """Text encoder and transformer: noisy latents, noise level, token ids and mask -> velocity."""

    def __init__(self, tokenizer, length: int):
        super().__init__()
        self.encoder = export.new_encoder(tokenizer)
        self.transformer = mmdit.new()
        # a list: its weights are the transformer's
        self.velocity = [mmdit.Velocity(self.transformer, ROWS, COLS, length)]

    def forward(self, x: torch.Tensor, sigma: torch.Tensor, ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return self.velocity[0](x, sigma, self.encoder(ids), keep)


def schedule(steps: int) -> torch.Tensor:
    """steps + 1 noise levels: what FlowMatchEulerDiscreteScheduler gives the pipeline at this image size."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    c = export.SCHEDULER
    slope = (c["max_shift"] - c["base_shift"]) / (c["max_image_seq_len"] - c["base_image_seq_len"])
    mu = c["base_shift"] + slope * (ROWS * COLS - c["base_image_seq_len"])
    scheduler = FlowMatchEulerDiscreteScheduler(**c)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return scheduler.sigmas


@torch.no_grad()
def sample(painter: Painter, tokenizer, users: list[str], steps: int, scale: float, seed: int) -> torch.Tensor:
    """Normalised latents [n, 16, 8, 16] by the ODE, with the pipeline's guidance against the prompt " "."""
    length = painter.velocity[0].cos.shape[0] - ROWS * COLS
    ids, keep = tokenise(tokenizer, users, length)
    no_ids, no_keep = tokenise(tokenizer, [" "] * len(users), length)
    x = torch.randn(len(users), ROWS * COLS, 64, generator=torch.Generator().manual_seed(seed))
    sigmas = schedule(steps)
    for now, then in zip(sigmas[:-1], sigmas[1:]):
        level = now.expand(len(users))
        v = painter(x, level, ids, keep)
        if scale > 1:
            u = painter(x, level, no_ids, no_keep)
            mixed = u + scale * (v - u)
            v = mixed * (v.norm(dim=-1, keepdim=True) / mixed.norm(dim=-1, keepdim=True))
        x = x + (then - now) * v
    return mmdit.unpack(x, ROWS, COLS)


@torch.no_grad()
def decode(work: Path, z: torch.Tensor) -> list:
    """Images of normalised latents by the newest decoder in work."""
    path = work / "vae.pt"
    model = vae.VAE()
    model.load_state_dict(torch.load(path if path.exists() else work / "vae_joint.pt"))
    cache = np.load(work / "cache.npz")
    mean, std = (torch.from_numpy(cache[k]).view(1, -1, 1, 1) for k in ("mean", "std"))
    return [render.to_image(p) for p in model.decode(z * std + mean).clamp(-1, 1).numpy()]


def reading_rate(work: Path, painter: Painter, tokenizer, prompts: list[str], scale: float) -> float:
    """Share of prompts whose sign, painted in ten ODE steps, tesseract reads exactly."""
    images = decode(work, sample(painter, tokenizer, prompts, 10, scale, 7))
    texts = [render.text_in(p) for p in prompts]
    return float(np.mean([a == b for a, b in zip(ocr.read(images, texts), texts)]))


def train(work: Path, seed: int, steps: int, compiled: bool, log: Callable[[str], None], resume: bool = False) -> None:
    """Stage `flow`: writes work/flow.pt with the running average of both parts every 1000 steps, and
    work/flow_state.pt.

    With resume it goes on from work/flow_state.pt; another number of steps then only moves the fall of the rate.
    """
    from transformers import Qwen2Tokenizer

    tokens.write(work / "tokenizer")
    tokenizer = Qwen2Tokenizer.from_pretrained(work / "tokenizer")
    cache = np.load(work / "cache.npz")
    ids, keep = tokenise(tokenizer, [*cache["prompts"].tolist(), " "], render.MAX_CHARS + 12)
    x0 = mmdit.pack(torch.from_numpy(cache["latents"]))
    count = len(x0)
    tests = held_out()

    torch.manual_seed(seed + 20)
    painter = Painter(tokenizer, ids.shape[1])
    params = [p for p in painter.parameters()]
    matrices = [p for p in params if p.dim() > 1]
    rest = [p for p in params if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.99))
    average = copy.deepcopy(painter)
    step = 0
    if resume:
        state = torch.load(work / "flow_state.pt")
        painter.load_state_dict(state["painter"])
        average.load_state_dict(state["average"])
        optimiser.load_state_dict(state["optimiser"])
        step = state["step"]
    generator = torch.Generator().manual_seed(1_000_000 * seed + step)

    def forward(x, sigma, ids, keep, target):
        with torch.autocast("cpu", torch.bfloat16):
            v = painter(x, sigma, ids, keep)
        return (v - target).square().mean((1, 2))

    run = torch.compile(forward, dynamic=False) if compiled else forward
    start, losses, high = time.time(), [], []
    while step < steps:
        fall = max(0.0, (step / steps - (1 - COOL)) / COOL)
        lr = PEAK * min(1, (step + 1) / WARM) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * fall)))
        for group in optimiser.param_groups:
            group["lr"] = lr
        rows = torch.randint(count, (BATCH,), generator=generator)
        data = x0[rows].float()
        words = torch.where(torch.rand(BATCH, generator=generator) < NO_PROMPT, count, rows)
        u = torch.rand(BATCH, generator=generator)
        # Only the noisy end makes the model read the prompt: elsewhere the image itself tells the text.
        sigma = 3 * u / (1 + 2 * u)
        noise = torch.randn(data.shape, generator=generator)
        s = sigma[:, None, None]
        loss = run((1 - s) * data + s * noise, sigma, ids[words], keep[words], noise - data)
        optimiser.zero_grad(set_to_none=True)
        loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimiser.step()
        step += 1
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), params, 1 - min(0.9995, (1 + step) / (10 + step)))
        losses.append(float(loss.detach().mean()))
        high += loss.detach()[sigma > 0.8].tolist()
        if step % 1000 == 0 or step == steps or step == 500:
            rates = [reading_rate(work, average, tokenizer, tests, g) for g in (1.0, 2.5)]
            log(
                f"flow step {step} seconds {time.time() - start:.0f} loss {np.mean(losses):.4f} loss above 0.8 "
                f"{np.mean(high):.4f} read {rates[0]:.3f}, with guidance 2.5 {rates[1]:.3f}"
            )
            losses, high = [], []
            parts = {"encoder": average.encoder.state_dict(), "transformer": average.transformer.state_dict()}
            torch.save(parts, work / "flow.pt")
            state = {"painter": painter, "average": average, "optimiser": optimiser}
            torch.save({k: v.state_dict() for k, v in state.items()} | {"step": step}, work / "flow_state.pt")
