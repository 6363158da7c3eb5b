#!/usr/bin/env python3
"""Run one checkpoint through meander and through diffusers from the same x_T and compare what comes out.

    make build && python deploy/golden/compare.py deploy/models/signs

meander paints through its whole pipeline (`meander run`: intake, sampler, event stream, object store), diffusers with
its own QwenImagePipeline in float32; both follow the ODE with guidance. The table shows, per image, the relative L2
distance of the final latents and the pixels (all three channels) that differ. Exit status 1 when on more than one
pixel in a thousand of any image some channel is off by more than 1/255, or the latents by more than LATENTS.

Python packages: deploy/golden/requirements.txt.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    import numpy as np
    import torch
    from diffusers import QwenImagePipeline
    from diffusers.utils import logging
    from PIL import Image
    from safetensors.numpy import load_file, save_file
except ImportError as e:
    sys.exit(f"compare.py: {e}; python -m pip install --requirement deploy/golden/requirements.txt")

PROMPTS = [
    'a blue sign that says "4071"',
    'a red sign that says "OPEN"',
    'a green sign that says "7"',
    'a purple sign that says "SUNDAY"',
    'an orange sign that says "EXIT"',
    'a black sign that says "90210"',
    "a red fox in the morning snow",
    "Ein gr\u00fcnes Schild \u4f60\u597d \U0001f600",
]
PIXELS = 0.999  # share of pixels that may differ by 1/255 at most
LATENTS = 1e-4  # relative L2 distance of the final latents: the rounding of 20 guided steps, amplified by the guidance


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model", help="folder in the diffusers layout")
    p.add_argument("--meander", default="bin/meander", help="the program to compare")
    p.add_argument("--height", type=int, default=64)
    p.add_argument("--width", type=int, default=128)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--scale", type=float, default=4.0, help="true_cfg_scale")
    p.add_argument("--negative", default=" ", help="negative prompt")
    p.add_argument("--samples", type=int, default=2, help="images per prompt")
    p.add_argument("--seed", type=int, default=1, help="of x_T")
    p.add_argument("--prompt", action="append", help="instead of the built-in ones; may come several times")
    a = p.parse_args()
    prompts = a.prompt or PROMPTS

    logging.disable_progress_bar()
    pipe = QwenImagePipeline.from_pretrained(a.model, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    tokens = a.height // 16 * (a.width // 16)
    channels = pipe.transformer.config.in_channels
    rng = np.random.default_rng(a.seed)
    noise = rng.standard_normal((a.samples, tokens, channels)).astype(np.float32)

    print(f"{a.height}x{a.width}, {a.steps} ODE steps, true_cfg_scale {a.scale:g}, negative prompt {a.negative!r}\n")
    print("| prompt | sample | latents, rel. L2 | pixels that differ | by more than 1/255 | largest |")
    print("| --- | --- | --- | --- | --- | --- |")
    failed = 0
    with tempfile.TemporaryDirectory() as tmp:
        ours = by_meander(a, prompts, noise, tmp)
        for i, prompt in enumerate(prompts):
            latents, images = by_diffusers(pipe, a, prompt, noise)
            for s in range(a.samples):
                got_latents, got = ours[i][s]
                distance = np.linalg.norm(got_latents - latents[s]) / np.linalg.norm(latents[s])
                diff = np.abs(got.astype(int) - images[s].astype(int)).max(axis=-1)
                beyond = (diff > 1).mean()
                bad = beyond > 1 - PIXELS or not distance <= LATENTS
                failed += bad
                print(f"| {prompt} | {s} | {distance:.1e} | {(diff > 0).mean():.3%} | {beyond:.3%} | {diff.max()}/255 |"
                      f"{' differs' if bad else ''}")
    total = len(prompts) * a.samples
    print(
        f"\n{total - failed} of {total} images agree: at most 1/255 on {PIXELS:.1%} of the pixels, latents within {LATENTS:g}"
    )
    sys.exit(failed > 0)


def by_meander(a, prompts, noise, tmp):
    """Per prompt and sample: final latents [S, C] and the image [H, W, 3]."""
    x_t, kept, out = (os.path.join(tmp, name) for name in ("x_t.safetensors", "kept.safetensors", "out"))
    save_file({"latents": noise}, x_t)
    command = [
        a.meander, "run", "--store", os.path.join(tmp, "store"), "--run", "compare", "--out", out, "--json",
        "--model", a.model, "--height", str(a.height), "--width", str(a.width), "--steps", str(a.steps),
        "--validation", "--sde-type", "ode", "--true-cfg-scale", str(a.scale), "--negative-prompt", a.negative,
        "--group-size", str(a.samples), "--start-latents", x_t, "--return-steps", str(a.steps), "--save-latents", kept,
    ]
    done = subprocess.run([*command, "--", *prompts], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"compare.py: meander failed with exit status {done.returncode}")
    groups = [json.loads(line) for line in done.stdout.splitlines()]
    latents = load_file(kept)
    result = []
    for group in groups[: len(prompts)]:
        name = f"latents.{a.steps}"
        final = latents[name if name in latents else f"{group['uid']}.{name}"]
        images = [np.asarray(Image.open(m["image"]).convert("RGB")) for m in group["members"]]
        result.append(list(zip(final, images, strict=True)))
    return result


def by_diffusers(pipe, a, prompt, noise):
    """The same for one prompt."""
    last = {}

    def keep(pipe, step, timestep, tensors):
        last["latents"] = tensors["latents"].clone()
        return tensors

    with torch.no_grad():
        images = pipe(
            prompt, negative_prompt=a.negative, true_cfg_scale=a.scale, height=a.height, width=a.width,
            num_inference_steps=a.steps, num_images_per_prompt=len(noise), latents=torch.from_numpy(noise.copy()),
            callback_on_step_end=keep,
        ).images
    return last["latents"].numpy(), [np.asarray(image) for image in images]


if __name__ == "__main__":
    main()
