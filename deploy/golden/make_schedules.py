#!/usr/bin/env python3
"""Record the schedules of diffusers' QwenImagePipeline, and whole ODE runs of its schedulers.

    python deploy/golden/make_schedules.py pkg/flow/testdata/diffusers.json

Part of `make golden`. A schedule is what the scheduler holds after QwenImagePipeline.__call__ has run, in float32 on
the CPU, with a transformer that predicts 0: `sigmas` [T+1] and `timesteps` [T], little-endian float32 in base64. The
timesteps were also found by their scheduler's index_for_timestep, each at its own index. `given` are sigmas handed to
the pipeline. Runs start at x = 1 on the closed-form velocity of data from N(0, 0.25).
"""

import argparse
import base64
import contextlib
import json
import os
import random

os.environ.setdefault("OMP_NUM_THREADS", "1")

import diffusers
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline
from diffusers.utils import logging

QWEN = dict(base_image_seq_len=256, base_shift=0.5, max_image_seq_len=8192, max_shift=0.9, shift=1.0,
            shift_terminal=0.02, use_dynamic_shifting=True, time_shift_type="exponential")
GENERIC = dict(use_dynamic_shifting=True)  # the scheduler's own defaults: 4096 and 1.15, no terminal
LIGHTNING = dict(QWEN, base_shift=1.0986122886681098, max_shift=1.0986122886681098, shift_terminal=None)

CONFIGS = [
    QWEN, dict(QWEN, time_shift_type="linear"), dict(QWEN, shift_terminal=None), dict(QWEN, shift_terminal=0.1),
    dict(QWEN, shift_terminal=0.001), dict(QWEN, shift_terminal=0), dict(QWEN, shift=3.0),
    dict(QWEN, base_shift=-0.4, max_shift=2.5), LIGHTNING, GENERIC,
    dict(GENERIC, time_shift_type="linear", shift_terminal=0.05), dict(GENERIC, base_shift=1, max_shift=2),
    {}, *(dict(shift=s) for s in (0.3, 1.5, 1.73, 3.0, 4.03, 4.14, 7.3, 12.0)),
    dict(shift=3.0, shift_terminal=0.02), dict(shift=1.0, shift_terminal=0.1), dict(QWEN, use_dynamic_shifting=False),
    dict(QWEN, use_dynamic_shifting=False, shift=3.1, shift_terminal=None),
]
DRAWN = 200  # and as many drawn at random
STEPS = [2, 3, 4, 5, 7, 8, 10, 16, 20, 25, 28, 30, 40, 50]
SIZES = [(64, 128), (256, 256), (512, 512), (1024, 1024), (1328, 1328), (928, 1664), (1472, 1104), (512, 776)]
GIVEN = [
    [1.0, 0.75, 0.5, 0.25], [0.9, 0.1], [1.0], [0.5], [1.0, 0.97, 0.9, 0.6, 0.3, 0.1, 0.01],
    [float(s) for s in np.linspace(1.0, 0.02, 13)], [float(s) for s in np.linspace(0.987, 1 / 30, 30)],
]


class Zero(torch.nn.Module):
    """A transformer that predicts 0 and keeps the timesteps it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = type("Config", (), dict(in_channels=64, guidance_embeds=False))
        self.seen = []

    dtype, device = torch.float32, torch.device("cpu")

    def cache_context(self, _):
        return contextlib.nullcontext()

    def forward(self, hidden_states, timestep, **_):
        self.seen.append(timestep[0])
        return (torch.zeros_like(hidden_states),)


def packed(x):
    return base64.b64encode(x.numpy().astype("<f4").tobytes()).decode()


def schedule(config, size, steps=None, given=None):
    scheduler, transformer = FlowMatchEulerDiscreteScheduler(**config), Zero()
    pipe = QwenImagePipeline(scheduler=scheduler, vae=None, text_encoder=None, tokenizer=None, transformer=transformer)
    pipe.set_progress_bar_config(disable=True)
    height, width = size
    out = pipe(prompt_embeds=torch.zeros(1, 1, 8), prompt_embeds_mask=torch.ones(1, 1), height=height, width=width,
               num_inference_steps=steps or len(given), sigmas=given, true_cfg_scale=1.0, output_type="latent")
    for i, t in enumerate(scheduler.timesteps):
        assert scheduler.index_for_timestep(t) == i, (config, i)
        assert transformer.seen[i] == t / 1000, (config, i)
    case = dict(given=given) if given else dict(steps=steps)
    return dict(
        case, tokens=out.images.shape[1], sigmas=packed(scheduler.sigmas), timesteps=packed(scheduler.timesteps)
    )


def drawn(rng):
    """A scheduler_config.json with every number of its own."""
    config = dict(shift=round(rng.uniform(0.3, 12), 3))
    if rng.random() < 0.6:
        base, length = round(rng.uniform(0.05, 1.5), 4), rng.randrange(16, 33)  # no size is below 32 tokens
        config = dict(use_dynamic_shifting=True, base_shift=base, max_shift=round(base + rng.uniform(0, 2), 4),
                      base_image_seq_len=length, max_image_seq_len=length + rng.randrange(4096, 16384),
                      time_shift_type=rng.choice(["exponential", "linear"]))
    if rng.random() < 0.5:
        config["shift_terminal"] = round(rng.uniform(0.001, 0.3), 4)
    return config


def schedules():
    rng = random.Random(20260101)
    groups = []
    for i, config in enumerate(CONFIGS):
        cases = [schedule(config, SIZES[(i + j) % len(SIZES)], STEPS[(i + 3 * j) % len(STEPS)]) for j in range(4)]
        terminal = config.get("shift_terminal")
        if not terminal:  # with one, diffusers divides 0 by 0
            cases.append(schedule(config, SIZES[0], 1))
        cases += [
            schedule(config, SIZES[i % len(SIZES)], given=g) for g in GIVEN[i % 3::3] if not terminal or g != [1.0]
        ]
        groups.append(dict(config=config, cases=cases))
    groups[0]["cases"].append(schedule(QWEN, (1024, 1024), 1000))
    for _ in range(DRAWN):
        config = drawn(rng)
        groups.append(dict(config=config, cases=[schedule(config, rng.choice(SIZES), rng.choice(STEPS))]))
    return groups


def velocity(x, sigma, s2=0.25):
    return x * (sigma - (1 - sigma) * s2) / ((1 - sigma) ** 2 * s2 + sigma * sigma)


def run(scheduler):
    x = torch.ones(1, 1, dtype=torch.float32)
    path = []
    for i, t in enumerate(scheduler.timesteps):
        x = scheduler.step(velocity(x, float(scheduler.sigmas[i])), t, x).prev_sample
        path.append(float(x))
    return path


def runs():
    out = []
    for shift in (1.0, 3.0):
        for steps in (1, 2, 3, 8, 20):
            flow = dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
            for solver, s in (("unipc", diffusers.UniPCMultistepScheduler(**flow)),
                              ("dpm", diffusers.DPMSolverMultistepScheduler(**flow)),
                              ("euler", FlowMatchEulerDiscreteScheduler(shift=shift))):
                if solver == "euler":
                    s.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
                else:
                    s.set_timesteps(steps)
                out.append(dict(solver=solver, shift=shift, steps=steps, sigmas=packed(s.sigmas), path=run(s)))
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    about = "deploy/golden/make_schedules.py, diffusers %s, torch %s, numpy %s" % (
        diffusers.__version__, torch.__version__.split("+")[0], np.__version__)
    with open(out, "w") as f:
        f.write('{"about": %s,\n' % json.dumps(about))
        f.write('"schedules": [\n%s\n],\n' % ",\n".join(json.dumps(s) for s in schedules()))
        f.write('"runs": [\n%s\n]}\n' % ",\n".join(json.dumps(r) for r in runs()))


if __name__ == "__main__":
    main()
