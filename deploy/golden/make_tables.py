#!/usr/bin/env python3
"""Record alphas_cumprod of diffusers' schedulers by their defaults, and rescaled to zero terminal SNR.

    python deploy/golden/make_tables.py pkg/scheduled/testdata/tables.json

Part of `make golden`. `abar` are those at the timesteps `at`, which the scheduler computes in float32.
"""

import json
import sys

import diffusers
import torch

CLASSES = [
    "DDPMScheduler", "DDPMParallelScheduler", "DDIMScheduler", "DDIMParallelScheduler", "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "DEISMultistepScheduler", "LMSDiscreteScheduler", "PNDMScheduler", "SASolverScheduler",
    "KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler", "LCMScheduler", "TCDScheduler",
]
OPTIONS = [{}, dict(prediction_type="v_prediction", rescale_betas_zero_snr=True),
           dict(prediction_type="v_prediction", rescale_betas_zero_snr=True, beta_schedule="scaled_linear", beta_start=0.00085,
                beta_end=0.012, num_train_timesteps=500)]


def main():
    tables = []
    for name in CLASSES:
        cls = getattr(diffusers, name)
        for options in OPTIONS:
            scheduler = cls(**options) if not options or "rescale_betas_zero_snr" in cls().config else None
            if scheduler is None:
                continue
            abar = scheduler.alphas_cumprod.double()
            at = [0, 1, len(abar) // 3, len(abar) // 2, len(abar) - 3, len(abar) - 2, len(abar) - 1]
            tables.append(dict(config=dict(options, _class_name=name), at=at, abar=[abar[i].item() for i in at]))
    about = "deploy/golden/make_tables.py, diffusers %s, torch %s" % (
        diffusers.__version__, torch.__version__.split("+")[0]
    )
    with open(sys.argv[1], "w") as f:
        f.write('{"about": %s,\n"tables": [\n%s\n]}\n' % (json.dumps(about), ",\n".join(json.dumps(t) for t in tables)))


if __name__ == "__main__":
    main()
