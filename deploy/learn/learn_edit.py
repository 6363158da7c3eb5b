#!/usr/bin/env python3
"""Has a tiny model of ours learn to edit signs by Flow-GRPO: meander-train on a pipeline with a worker, once a seed.
What it learned is measured on images, texts and a wording that are not trained on: by the pipeline, and in diffusers.

    learn_edit.py [--seeds 0 1 2] [--out FOLDER] [--meander bin/meander] [-- flags of meander-train]

The model is made first, in minutes, unless the folder has it. What is held out is measured before and after, and
chooses nothing but between these two.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import edits
import meander
import numpy as np
import torch
from diffusers import FluxControlPipeline
from learn import HERE, arguments, flags, pipeline, train
from meander.rewards.reward import Input, Reward, Score
from meander.rewards.worker import Worker
from meander.train import prompts
from PIL import Image
from transfer import attach

SAMPLES, STEPS, UPDATES = 4, 4, 60
FLAGS = [
    "--reward", "nats:edit", "--gold", "", "--beta", "0", "--ema", "0", "--steps", str(STEPS), "--test", "",
    "--updates", str(UPDATES), "--eval-every", str(UPDATES), "--eval-samples", str(SAMPLES), "--variety", "0",
    "--hold-diversity", "0", "--no-stop", "--targets",
    "to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out,proj_mlp,proj_out",
]  # fmt: skip


def main() -> None:
    own, theirs = flags()
    args = arguments(__doc__, "learn-edit", 0).parse_args(own)
    torch.set_num_threads(1)
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    model, env = (args.out / "model").resolve(), os.environ | {"OMP_NUM_THREADS": "1"}
    if not (model / "meander.json").exists():
        subprocess.run([sys.executable, str(HERE / "edit_model.py"), str(model)], check=True, env=env)
    learned = edits.write(args.out, "train", 96, 1, edits.PROMPTS[:3])
    measured = edits.write(args.out, "held_out", 48, 2, edits.PROMPTS[3:])
    rows, settings = [], ["--prompts", str(learned), "--held-out", str(measured), *FLAGS, *theirs]
    for seed in args.seeds:
        out, began = args.out / f"seed-{seed}", time.monotonic()
        out.mkdir(parents=True, exist_ok=True)
        with pipeline(args.meander, out, str(model), "torch") as url, rewards(url, Edit()):
            train(url, seed, out, str(model), settings)
        rows.append((seed, json.loads((out / "summary.json").read_text()), time.monotonic() - began))
    print("\n| seed | held out before | after | gained | in diffusers before | after | gained | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    held_out = prompts.read(measured)
    base, shown = edit(model, held_out)
    for seed, summary, seconds in rows:
        before, after = summary["before"]["exact"], summary["last"]["exact"]
        scores, images = edit(model, held_out, args.out / f"seed-{seed}/best")
        gained = scores - base
        print(
            f"| {seed} | {before:.3f} | {after:.3f} | {after - before:+.3f} | {base.mean():.3f} | "
            f"{scores.mean():.3f} | {gained.mean():+.3f} +- {gained.std(ddof=1) / len(gained) ** 0.5:.3f} | "
            f"{seconds:.0f} |"
        )
        sheet(args.out / f"seed-{seed}/sheet.png", held_out, shown, images)


class Edit(Reward):
    """The share of the sign's pixels with the colour asked for, times the share of the rest that is as it was."""

    name, extra, version = "edit", "images", "1"

    def score(self, samples: list[Input]) -> list[Score]:
        return [Score(*edits.rate(s.image, s.conditions["image"][0], s.ground_truth)) for s in samples]


@contextlib.contextmanager
def rewards(url: str, of: Reward) -> Iterator[None]:
    """Answers for a reward function of that name, in a thread."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with meander.connect(url) as client:
            await Worker(of).serve(client, of.name, stop)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@torch.no_grad()
def edit(model: Path, held_out: list[dict], adapter: Path | None = None) -> tuple[np.ndarray, list[Image.Image]]:
    """The rewards of what diffusers alone makes of the held-out prompts by its own scheduler, and the first images."""
    pipe = FluxControlPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    if adapter:
        attach(pipe.transformer, adapter)
    scores, images = [], []
    for i, p in enumerate(held_out):
        before = Image.open(p["conditions"]["control_image"])
        made = pipe(
            p["prompt"], control_image=before, height=edits.HEIGHT, width=edits.WIDTH, num_inference_steps=STEPS,
            num_images_per_prompt=SAMPLES, generator=torch.Generator().manual_seed(2000 + i), **p["arguments"],
        ).images  # fmt: skip
        scores += [np.mean([edits.rate(m, before, p["reward"][0]["ground_truth"])[0] for m in made])]
        images += made[:2]
    return np.array(scores), images


def sheet(path: Path, held_out: list[dict], before: list[Image.Image], after: list[Image.Image]) -> None:
    """Of each prompt the image to edit, two edits before and two after."""
    from PIL import ImageDraw, ImageFont

    zoom, font = 2, ImageFont.load_default(12)
    w, h = edits.WIDTH * zoom + 6, edits.HEIGHT * zoom + 24
    out = Image.new("RGB", (10 * w + 20, 8 * h + 24), "white")
    draw = ImageDraw.Draw(out)
    for x, text in enumerate(("to edit", "before training", "", "after", "") * 2):
        draw.text((x * w + x // 5 * 20 + 3, 4), text, "black", font)
    size = edits.WIDTH * zoom, edits.HEIGHT * zoom
    for i, p in enumerate(held_out[:16]):
        x, y = i % 2 * (5 * w + 20), 24 + i // 2 * h
        row = [Image.open(p["conditions"]["control_image"]), *before[2 * i : 2 * i + 2], *after[2 * i : 2 * i + 2]]
        for k, image in enumerate(row):
            out.paste(image.resize(size, Image.Resampling.NEAREST), (x + k * w + 3, y))
        draw.text((x + 3, y + edits.HEIGHT * zoom + 2), p["prompt"], "black", font)
    out.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
