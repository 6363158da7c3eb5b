#!/usr/bin/env python3
"""Record the sigmas of schedulers of diffusers that choose their own grid, of Flux2Pipeline and of ZImagePipeline.

    python deploy/golden/make_grids.py pkg/flow/testdata/grids.json

Part of `make golden`. StableDiffusion3Pipeline and WanPipeline pass no sigmas, so their scheduler's own grid counts.
Flux2Pipeline passes its own, and a mu that depends on the number of steps; ZImagePipeline those of torch.linspace,
which fuses multiply-adds where the processor has them (x86 with AVX2). `sigmas` is what the scheduler holds,
little-endian float32 in base64, `mu` the pipeline's.
"""

import base64
import json
import sys

import diffusers
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

DYNAMIC = dict(use_dynamic_shifting=True)
EULER = [dict(shift=s) for s in (3.0, 1.0, 0.3, 1.73, 4.03, 4.14, 5.0, 7.3, 12.0)] + [
    DYNAMIC, dict(DYNAMIC, time_shift_type="linear"), dict(shift=3.0, shift_terminal=0.1)]
FLOW = dict(prediction_type="flow_prediction", use_flow_sigmas=True)
UNIPC = [dict(FLOW, flow_shift=s) for s in (1.0, 3.0, 5.0)] + [dict(FLOW, use_dynamic_shifting=True)]
STEPS = [1, 2, 6, 10, 28, 50]
TOKENS = [16, 1024, 4096, 4300, 4301, 16384]


def case(scheduler, steps, tokens, mu=None, **call):
    scheduler.set_timesteps(mu=mu, **call)
    return dict(steps=steps, tokens=tokens, mu=mu,
                sigmas=base64.b64encode(scheduler.sigmas.numpy().astype("<f4").tobytes()).decode())


def own(make, config):
    """Cases of a scheduler that chooses its grid."""
    cases = []
    for i, steps in enumerate(STEPS):
        if config.get("shift_terminal") and steps == 1:
            continue  # diffusers divides 0 by 0
        tokens = TOKENS[i % len(TOKENS)]
        mu = calculate_shift(tokens) if config.get("use_dynamic_shifting") else None
        cases.append(case(make(**config), steps, tokens, mu, num_inference_steps=steps))
    return cases


def flux2():
    config = dict(DYNAMIC, base_shift=0.5, max_shift=1.15)
    return [case(FlowMatchEulerDiscreteScheduler(**config), steps, tokens, compute_empirical_mu(tokens, steps),
                 sigmas=np.linspace(1.0, 1 / steps, steps)) for steps in STEPS for tokens in TOKENS]


def z_image(config):
    return [case(FlowMatchEulerDiscreteScheduler(**config), steps, 1024, sigmas=get_default_z_image_sigmas(steps))
            for steps in (*range(1, 65), 100, 239, 240, 1000)]


def main():
    groups = [
        dict(grid="scheduler", mu="linear", config=c, cases=own(FlowMatchEulerDiscreteScheduler, c)) for c in EULER
    ]
    groups += [dict(grid="uni_flow", mu="linear", config=dict(c, _class_name="UniPCMultistepScheduler"),
                    cases=own(UniPCMultistepScheduler, c)) for c in UNIPC]
    groups.append(dict(grid="linspace", mu="flux2", config=DYNAMIC, cases=flux2()))
    groups += [dict(grid="linspace_torch", mu="linear", config=c, cases=z_image(c)) for c in (dict(shift=3.0), dict(shift=1.0))]
    about = "deploy/golden/make_grids.py, diffusers %s, torch %s, numpy %s" % (
        diffusers.__version__, torch.__version__.split("+")[0], np.__version__)
    with open(sys.argv[1], "w") as f:
        f.write(
            '{"about": %s,\n"schedules": [\n%s\n]}\n' % (json.dumps(about), ",\n".join(json.dumps(g) for g in groups))
        )


if __name__ == "__main__":
    main()
