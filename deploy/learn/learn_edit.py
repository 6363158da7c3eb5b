#!/usr/bin/env python3
"""Has a tiny model of ours learn to edit signs by Flow-GRPO, on a pipeline with a worker, once a seed, and measures it
on images, texts and a wording that are not trained on: by the pipeline, and in diffusers.

    learn_edit.py [--seeds 0 1 2] [--out FOLDER] [--meander bin/meander] [--updates 60]

The model is made first, in minutes, unless the folder has it. Nothing is chosen by what is held out: the last adapter
is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import edits
import meander
import meander.torch
import numpy as np
import torch
from diffusers import FluxControlPipeline
from learn import HERE, pipeline
from meander.client.tasks import together
from meander.rewards.reward import Input, Reward, Score
from meander.rewards.worker import Worker
from meander.plugs import accelerate
from meander.train.objective import Kernel
from peft import LoraConfig
from PIL import Image
from safetensors.torch import save_file
from transfer import attach

SAMPLES, STEPS, SDE = 4, 4, [0, 1]
TARGETS = [
    "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "proj_mlp", "proj_out",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("meander-out/learn-edit"))
    parser.add_argument("--meander", default="bin/meander")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--groups", type=int, default=8, help="prompts of a batch")
    parser.add_argument("--samples", type=int, default=16, help="of a prompt")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--noise-level", type=float, default=0.9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    model, env = (args.out / "model").resolve(), os.environ | {"OMP_NUM_THREADS": "1"}
    if not (model / "meander.json").exists():
        subprocess.run([sys.executable, str(HERE / "edit_model.py"), str(model)], check=True, env=env)
    train = read(edits.write(args.out, "train", 96, 1, edits.PROMPTS[:3]))
    held_out = read(edits.write(args.out, "held_out", 48, 2, edits.PROMPTS[3:]))
    rows = []
    for seed in args.seeds:
        out, began = args.out / f"seed-{seed}", time.monotonic()
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        with pipeline(args.meander, out, str(model), "torch") as url, rewards(url):
            before, after = asyncio.run(learn(url, model, train, held_out, out, seed, args))
        rows.append((seed, before, after, time.monotonic() - began))
    print("\n| seed | held out before | after | gained | in diffusers before | after | gained | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    base, shown = edit(model, held_out)
    for seed, before, after, seconds in rows:
        adapter = args.out / f"seed-{seed}/adapter"
        scores, images = edit(model, held_out, adapter)
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
def rewards(url: str) -> Iterator[None]:
    """Answers for nats:edit, in a thread."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with meander.connect(url) as client:
            await Worker(Edit()).serve(client, Edit.name, stop)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def learn(
    url: str, model: Path, prompts: list[dict], held_out: list[dict], out: Path, seed: int, a: argparse.Namespace
) -> tuple[float, float]:
    """Trains a LoRA of the transformer on the stream: for each update a batch, one on-policy step, and a push.
    Returns the mean rewards of the held-out prompts before and after."""
    started = time.monotonic()
    loaded, rng = meander.torch.pipeline(model, "cpu"), random.Random(seed)
    network = loaded.family.networks[""]
    torch.manual_seed(seed)
    network.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS), "learned")
    parameters = [p for n, p in network.named_parameters() if "lora_" in n]
    optimizer = torch.optim.AdamW(parameters, a.lr, (0.9, 0.99), weight_decay=0)
    async with meander.connect(url) as client:
        while time.monotonic() < started + 600:  # the worker starts
            with contextlib.suppress(meander.policy.NoPolicy):
                version = (await meander.policy.push_policy(client, None, model.name))["policy_version"]
                break
            await asyncio.sleep(0.5)
        before = await measure(client, "before", held_out)
        batches = client.batches("learn", name="trainer", timeout=600)
        stream = aiter(batches)
        for update in range(a.updates):
            began = time.monotonic()
            asked = rng.sample(prompts, a.groups)
            await together(
                client.publish(
                    "learn", timeout=600, uid=f"u{update}-{i}", seed=rng.getrandbits(40), group_size=a.samples,
                    num_inference_steps=STEPS, initial_noise="shared", min_policy_version=version,
                    rollout={"sde_step_indices": SDE, "noise_level": a.noise_level}, true_cfg_scale=1.0,
                    batch={"id": f"u{update}", "groups": a.groups}, advantage={"estimator": "flow_grpo"}, **p,
                )
                for i, p in enumerate(asked)
            )  # fmt: skip
            batch = await anext(stream)
            waited = time.monotonic() - began
            t, off, loss = batch.torch(), 0.0, 0.0
            for i, p in enumerate(asked):
                rows = [k for k, uid in enumerate(batch["uid"]) if uid == f"u{update}-{i}"]
                if not rows:
                    continue
                recipe = {"prompts": [[p["prompt"]]], "arguments": p["arguments"], "steps": STEPS, "conditions": {
                    name: [loaded.condition(file)] for name, file in p["conditions"].items()}}  # fmt: skip
                run = loaded.session(recipe, len(rows), grad=True)
                for j in range(len(SDE)):
                    kernel = Kernel.of(batch, j, "density")
                    x, then = t["latents"][rows, j], t["next_latents"][rows, j]
                    new = kernel.log_prob(kernel.mean(x, run.velocity(x, float(t["sigmas"][0, j]))), then)
                    ratio = (new - t["log_probs"][rows, j]).exp()
                    off = max(off, float((ratio.detach() - 1).abs().max()))
                    part = -(t["advantages"][rows, j].clamp(-5, 5) * ratio).sum() / t["log_probs"].numel()
                    part.backward()
                    loss += part.item()
                run.session.cancel()
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
            optimizer.step()
            optimizer.zero_grad()
            await batches.done(batch)
            save(network, out / "adapter")
            version = (await meander.policy.push_policy(client, out / "adapter", model.name))["policy_version"]
            record = {"update": update, "reward": float(batch["rewards"].mean()), "ratio_off": off, "norm": norm,
                      "used": len(batch["uid"]), "waited": waited, "seconds": time.monotonic() - began}  # fmt: skip
            with open(out / "log.jsonl", "a") as log:
                print(json.dumps(record), file=log)
            print(f"update {update}: " + ", ".join(f"{k} {v:.3g}" for k, v in record.items()), flush=True)
        return before, await measure(client, "after", held_out)


def save(network: torch.nn.Module, folder: Path) -> None:
    """Writes the adapter in PEFT's form."""
    folder.mkdir(exist_ok=True)
    state = accelerate.gathered(accelerate.adapter_parameters(network, "learned"))
    save_file(state, folder / "adapter_model.safetensors")
    config = network.peft_config["learned"].to_dict()
    plain = {k: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for k, v in config.items()}
    (folder / "adapter_config.json").write_text(json.dumps(plain, default=str))


async def measure(client: meander.Client, name: str, prompts: list[dict]) -> float:
    """The mean reward of held-out prompts by the weights that the pipeline has, without noise, by equal seeds."""
    run = f"held-out-{name}"
    await together(
        client.publish(
            run, timeout=600, uid=f"p-{i}", seed=1000 + i, group_size=SAMPLES, num_inference_steps=STEPS,
            initial_noise="per_sample", batch={"id": "all", "groups": len(prompts)}, validation=True,
            true_cfg_scale=1.0, **p,
        )
        for i, p in enumerate(prompts)
    )  # fmt: skip
    return float((await asyncio.wait_for(anext(client.batch_events(run)), 900))["mean"])


@torch.no_grad()
def edit(model: Path, prompts: list[dict], adapter: Path | None = None) -> tuple[np.ndarray, list[Image.Image]]:
    """The rewards of what diffusers alone makes of the held-out prompts by its own scheduler, and the first images."""
    pipe = FluxControlPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    if adapter:
        attach(pipe.transformer, adapter)
    scores, images = [], []
    for i, p in enumerate(prompts):
        before = Image.open(p["conditions"]["control_image"])
        made = pipe(
            p["prompt"], control_image=before, height=edits.HEIGHT, width=edits.WIDTH, num_inference_steps=STEPS,
            num_images_per_prompt=SAMPLES, generator=torch.Generator().manual_seed(2000 + i), **p["arguments"],
        ).images  # fmt: skip
        scores += [np.mean([edits.rate(m, before, p["reward"][0]["ground_truth"])[0] for m in made])]
        images += made[:2]
    return np.array(scores), images


def sheet(path: Path, prompts: list[dict], before: list[Image.Image], after: list[Image.Image]) -> None:
    """Of each prompt the image to edit, two edits before and two after."""
    from PIL import ImageDraw, ImageFont

    zoom, font = 2, ImageFont.load_default(12)
    w, h = edits.WIDTH * zoom + 6, edits.HEIGHT * zoom + 24
    out = Image.new("RGB", (10 * w + 20, 8 * h + 24), "white")
    draw = ImageDraw.Draw(out)
    for x, text in enumerate(("to edit", "before training", "", "after", "") * 2):
        draw.text((x * w + x // 5 * 20 + 3, 4), text, "black", font)
    size = edits.WIDTH * zoom, edits.HEIGHT * zoom
    for i, p in enumerate(prompts[:16]):
        x, y = i % 2 * (5 * w + 20), 24 + i // 2 * h
        row = [Image.open(p["conditions"]["control_image"]), *before[2 * i : 2 * i + 2], *after[2 * i : 2 * i + 2]]
        for k, image in enumerate(row):
            out.paste(image.resize(size, Image.Resampling.NEAREST), (x + k * w + 3, y))
        draw.text((x + 3, y + edits.HEIGHT * zoom + 2), p["prompt"], "black", font)
    out.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
