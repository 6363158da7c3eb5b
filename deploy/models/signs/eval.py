#!/usr/bin/env python3
"""Measures the checkpoint with diffusers' own QwenImagePipeline and tesseract; prints the numbers of the model card.

    eval.py [--model DIR] [--steps 20] [--scales 1.0 2.5 4.0] [--groups 40] [--grid FILE] [--variety FILE]
"""

from __future__ import annotations

import argparse
import collections
import logging
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from PIL import Image

from trainer import export, ocr, render

HERE = Path(__file__).parent
SIZE = {"height": render.HEIGHT, "width": render.WIDTH}
NEGATIVE = " "


def closeness(got: str, want: str) -> float:
    """1 minus the edit distance over the length of want, at least 0: a graded reading reward."""
    row = list(range(len(want) + 1))
    for i, a in enumerate(got, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(want, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
    return max(0.0, 1 - row[-1] / len(want))


def seeds(first: int, count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(first + i) for i in range(count)]


def draw(generators: list[torch.Generator]) -> torch.Tensor:
    """Standard normal packed latents [n, 32, 64], row i by generator i."""
    tokens = render.HEIGHT // 16 * (render.WIDTH // 16)
    return torch.cat([torch.randn(1, tokens, 64, generator=g) for g in generators])


def paint(pipeline, prompts: list[str], steps: int, scale: float, seed: int) -> list[Image.Image]:
    """One image per prompt by the deterministic solver; image i starts from seed + i."""
    images = []
    for i in range(0, len(prompts), 40):
        part = prompts[i : i + 40]
        images += pipeline(
            prompt=part,
            negative_prompt=[NEGATIVE] * len(part),
            true_cfg_scale=scale,
            num_inference_steps=steps,
            generator=seeds(seed + i, len(part)),
            **SIZE,
        ).images
    return images


def sde_step(x: torch.Tensor, v: torch.Tensor, sigmas: torch.Tensor, i: int, level: float, noise: torch.Tensor):
    """One stochastic step of Flow-GRPO (arXiv 2505.05470), written with g = level * sqrt(sigma / (1 - sigma))."""
    now, then = float(sigmas[i]), float(sigmas[i + 1])
    below_one = float(sigmas[1]) if now == 1 else now
    g2, dt = level**2 * now / (1 - below_one), then - now
    mean = x * (1 + g2 * dt / (2 * now)) + v * dt * (1 + g2 * (1 - now) / (2 * now))
    return mean + (g2 * -dt) ** 0.5 * noise


class Stochastic:
    """A step callback for the pipeline that replaces its deterministic step by `sde_step` from the same latents."""

    def __init__(self, start: torch.Tensor, level: float, generators: list[torch.Generator]):
        self.x, self.level, self.generators = start, level, generators

    def __call__(self, pipeline, i: int, t, values: dict) -> dict:
        sigmas = pipeline.scheduler.sigmas
        v = (values["latents"] - self.x) / (sigmas[i + 1] - sigmas[i])
        noise = draw(self.generators)
        self.x = sde_step(self.x, v, sigmas, i, self.level, noise)
        return {"latents": self.x}


def paint_group(
    pipeline, prompt: str, size: int, steps: int, scale: float, level: float, seed: int
) -> list[Image.Image]:
    """size images of one prompt, by stochastic steps."""
    generators = seeds(seed, size)
    start = draw(generators)
    return pipeline(
        prompt=[prompt] * size,
        negative_prompt=[NEGATIVE] * size,
        true_cfg_scale=scale,
        num_inference_steps=steps,
        latents=start,
        callback_on_step_end=Stochastic(start, level, generators),
        **SIZE,
    ).images


def tile(images: list[Image.Image], columns: int) -> Image.Image:
    w, h = images[0].width + 4, images[0].height + 4
    out = Image.new("RGB", (w * columns, h * -(-len(images) // columns)), "white")
    for i, image in enumerate(images):
        out.paste(image, (2 + i % columns * w, 2 + i // columns * h))
    return out


def save(image: Image.Image, path: Path) -> None:
    """PNG of at most 256 colours: small enough for a document."""
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def by_length(right: list[bool], texts: list[str]) -> str:
    sums = collections.defaultdict(list)
    for r, t in zip(right, texts):
        sums[len(t)].append(r)
    return " ".join(f"{n}:{np.mean(v):.2f}" for n, v in sorted(sums.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE)
    parser.add_argument("--prompts", type=Path, default=HERE / "held_out.txt")
    parser.add_argument("--steps", type=int, nargs="+", default=[20])
    parser.add_argument("--scales", type=float, nargs="*", default=[1.0, 2.5, 4.0])
    parser.add_argument("--group-scale", type=float, default=2.5, help="guidance of the groups and the images")
    parser.add_argument("--groups", type=int, default=40)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--group-steps", type=int, default=10)
    parser.add_argument("--noise-level", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--grid", type=Path, help="write one sample of each of 40 held-out prompts here")
    parser.add_argument("--variety", type=Path, help="write groups of samples of six prompts here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    pipeline = export.load_pipeline(args.model)
    prompts = args.prompts.read_text().split("\n")[:-1]
    texts = [render.text_in(p) for p in prompts]
    for steps in args.steps:
        for scale in args.scales:
            got = ocr.read(paint(pipeline, prompts, steps, scale, args.seed), texts)
            right = [a == b for a, b in zip(got, texts)]
            near = np.mean([closeness(a, b) for a, b in zip(got, texts)])
            print(f"ode {steps} steps, guidance {scale}: exact {np.mean(right):.3f}, by length {by_length(right, texts)}, "
                  f"graded {near:.3f}", flush=True)  # fmt: skip
    if args.groups:
        chosen = [prompts[i * len(prompts) // args.groups] for i in range(args.groups)]
        graded, exact, means = [], [], []
        for i, prompt in enumerate(chosen):
            seed = args.seed + 1000 * (i + 1)
            images = paint_group(
                pipeline, prompt, args.group_size, args.group_steps, args.group_scale, args.noise_level, seed
            )
            want = render.text_in(prompt)
            got = ocr.read(images, [want] * len(images))
            rewards = [closeness(g, want) for g in got]
            graded.append(np.std(rewards) > 0)
            exact.append(np.std([g == want for g in got]) > 0)
            means.append(np.mean([g == want for g in got]))
        print(f"sde {args.group_steps} steps, noise {args.noise_level}, guidance {args.group_scale}, {args.groups} groups of "
              f"{args.group_size}: std > 0 in {np.mean(graded):.2f} (graded), {np.mean(exact):.2f} (exact); "
              f"exact {np.mean(means):.3f}", flush=True)  # fmt: skip
    if args.grid:
        save(tile(paint(pipeline, prompts[::3], args.steps[0], args.group_scale, args.seed), 5), args.grid)
    if args.variety:
        images = []
        for i, prompt in enumerate(prompts[10::20]):
            images += paint_group(
                pipeline, prompt, 8, args.group_steps, args.group_scale, args.noise_level, args.seed + i
            )
        save(tile(images, 8), args.variety)


if __name__ == "__main__":
    main()
