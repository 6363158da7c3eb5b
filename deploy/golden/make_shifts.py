#!/usr/bin/env python3
"""Record the sigmas of diffusers' solvers that can follow flow sigmas.

    python deploy/golden/make_shifts.py pkg/flow/testdata/shifts.json

Part of `make golden`. UniPC is handed the grid of QwenImagePipeline, as that pipeline does, and takes its own besides;
DPM-Solver++ takes its own alone. `given` is the grid before the shift, `sigmas` what the scheduler holds, little-endian
float32 in base64. UniPC takes 1e-6 off a first sigma of 1.
"""

import base64
import json
import sys

import diffusers
import numpy as np
import torch
from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

FLOW = dict(prediction_type="flow_prediction", use_flow_sigmas=True)
STATIC = [dict(FLOW, flow_shift=s) for s in (1.0, 0.3, 1.73, 3.0, 5.0, 7.0, 12.0)] + [FLOW]
DYNAMIC = [dict(FLOW, use_dynamic_shifting=True), dict(FLOW, use_dynamic_shifting=True, flow_shift=3.0)]
TERMINAL = [dict(FLOW, flow_shift=3.0, shift_terminal=0.02), dict(DYNAMIC[0], shift_terminal=0.1)]
STEPS = [1, 2, 5, 8, 20, 28, 50]
TOKENS = 4096


def record(scheduler, given, **call):
    mu = calculate_shift(TOKENS, *(scheduler.config.get(k, d) for k, d in (
        ("base_image_seq_len", 256), ("max_image_seq_len", 4096), ("base_shift", 0.5), ("max_shift", 1.15))))
    if scheduler.config.use_dynamic_shifting:
        call["mu"] = mu
    scheduler.set_timesteps(**call)
    return dict(given=[float(s) for s in given], tokens=TOKENS,
                sigmas=base64.b64encode(scheduler.sigmas.numpy().astype("<f4").tobytes()).decode())


def unipc(config, steps):
    scheduler = UniPCMultistepScheduler(**config)
    grid, own = np.linspace(1.0, 1 / steps, steps), np.linspace(1, 1 / 1000, steps + 1)[:-1]
    if config.get("shift_terminal") and steps == 1:
        return []  # diffusers divides 0 by 0
    return [record(scheduler, grid, sigmas=grid), record(scheduler, own, num_inference_steps=steps)]


def dpm(config, steps):
    own = np.flip(1 - np.linspace(1, 1 / 1000, steps + 1))[:-1]
    return [record(DPMSolverMultistepScheduler(**config), own, num_inference_steps=steps)]


def main():
    groups = []
    for name, configs, cases in (("UniPCMultistepScheduler", STATIC + DYNAMIC + TERMINAL, unipc),
                                 ("DPMSolverMultistepScheduler", STATIC + DYNAMIC, dpm)):
        for config in configs:
            groups.append(
                dict(config=dict(config, _class_name=name), cases=[c for n in STEPS for c in cases(config, n)])
            )
    about = "deploy/golden/make_shifts.py, diffusers %s, torch %s, numpy %s" % (
        diffusers.__version__, torch.__version__.split("+")[0], np.__version__)
    with open(sys.argv[1], "w") as f:
        f.write(
            '{"about": %s,\n"schedules": [\n%s\n]}\n' % (json.dumps(about), ",\n".join(json.dumps(g) for g in groups))
        )


if __name__ == "__main__":
    main()
