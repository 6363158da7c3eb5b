#!/usr/bin/env python3
"""Writes diffusers.json beside this file: sigmas and whole ODE runs of diffusers' own schedulers.

Needs diffusers (0.42.1 when last run), torch (2.8.0, CPU) and numpy. No randomness: the model is the closed-form
velocity of data from N(0, 0.25), started at x = 1. Schedulers work in float32; the
Go test compares within 2e-6.
"""

import json
import os

import diffusers
import numpy as np
import torch

QWEN = dict(base_image_seq_len=256, base_shift=0.5, max_image_seq_len=8192, max_shift=0.9, shift=1.0,
            shift_terminal=0.02, use_dynamic_shifting=True)


def velocity(x, sigma, s2=0.25):
    return x * (sigma - (1 - sigma) * s2) / ((1 - sigma) ** 2 * s2 + sigma * sigma)


def floats(x):
    return [float(v) for v in x]


def run(scheduler):
    x = torch.ones(1, 1, dtype=torch.float32)
    path = []
    for i, t in enumerate(scheduler.timesteps):
        x = scheduler.step(velocity(x, float(scheduler.sigmas[i])), t, x).prev_sample
        path.append(float(x))
    return path


def main():
    schedules = []
    for kind in ("exponential", "linear"):
        for steps, tokens in ((1, 1024), (4, 1024), (10, 4096), (28, 256), (50, 8192)):
            config = dict(QWEN, time_shift_type=kind)
            if steps == 1:
                config["shift_terminal"] = None  # upstream divides by zero
            s = diffusers.FlowMatchEulerDiscreteScheduler(**config)
            slope = (0.9 - 0.5) / (8192 - 256)
            s.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=tokens * slope + 0.5 - slope * 256)
            schedules.append(dict(config=config, steps=steps, tokens=tokens, sigmas=floats(s.sigmas)))
    for shift in (1.0, 3.0):
        for steps in (1, 5, 40):
            s = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
            s.set_timesteps(steps)
            schedules.append(dict(config=dict(shift=shift), steps=steps, tokens=0, sigmas=floats(s.sigmas)))

    runs = []
    for shift in (1.0, 3.0):
        for steps in (1, 2, 3, 8, 20):
            flow = dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
            for solver, s in (("unipc", diffusers.UniPCMultistepScheduler(**flow)),
                              ("dpm", diffusers.DPMSolverMultistepScheduler(**flow)),
                              ("euler", diffusers.FlowMatchEulerDiscreteScheduler(shift=shift))):
                s.set_timesteps(steps)
                runs.append(dict(solver=solver, shift=shift, steps=steps, sigmas=floats(s.sigmas), path=run(s)))

    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "diffusers.json")
    with open(path, "w") as f:
        f.write('{"about": "written by diffusers_golden.py, diffusers %s, torch %s",\n' % (diffusers.__version__, torch.__version__))
        f.write('"schedules": [\n%s\n],\n' % ",\n".join(json.dumps(s) for s in schedules))
        f.write('"runs": [\n%s\n]}\n' % ",\n".join(json.dumps(r) for r in runs))


if __name__ == "__main__":
    main()
