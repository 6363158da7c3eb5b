#!/usr/bin/env python3
"""Record the grids of diffusers' DDIM, DDPM, PNDM, Euler and DPM schedulers as those of a flow.

    python deploy/golden/make_diffusions.py pkg/flow/testdata/diffusions.json

Part of `make golden`. With x = a x0 + b eps, sigmas [T+1] are b/(a+b), in float64 from what the scheduler holds after
set_timesteps, rounded to float32; timesteps [T] are its own, and std is that of x_T/(a+b). All little-endian float32 in
base64. Steps of DDIM without noise, and of Euler, were compared with Euler steps of x/(a+b): `step` is the largest
difference. The grid of PNDM is that of DDIM with its config, as trainers run it; that of a solver its own, with steps
of the first order of DPM-Solver++, which is DDIM.
"""

import base64
import json
import sys

import diffusers
import numpy as np
import torch

SD15 = dict(_class_name="PNDMScheduler", _diffusers_version="0.6.0", beta_start=0.00085, beta_end=0.012,
            beta_schedule="scaled_linear", num_train_timesteps=1000, set_alpha_to_one=False, skip_prk_steps=True,
            steps_offset=1, trained_betas=None, clip_sample=False)
SDXL = dict(_class_name="EulerDiscreteScheduler", _diffusers_version="0.19.0.dev0", beta_start=0.00085, beta_end=0.012,
            beta_schedule="scaled_linear", clip_sample=False, interpolation_type="linear", num_train_timesteps=1000,
            prediction_type="epsilon", sample_max_value=1.0, set_alpha_to_one=False, skip_prk_steps=True,
            steps_offset=1, timestep_spacing="leading", trained_betas=None, use_karras_sigmas=False)
DDIM = dict(SD15, _class_name="DDIMScheduler")
PIXART = dict(_class_name="DDIMScheduler", beta_start=0.0001, beta_end=0.02, beta_schedule="linear", clip_sample=False)
ZERO = dict(DDIM, rescale_betas_zero_snr=True, timestep_spacing="trailing", prediction_type="v_prediction")
DDPM = dict(_class_name="DDPMScheduler", clip_sample=False, variance_type="fixed_small")

CONFIGS = [
    SD15, DDIM, SDXL, PIXART, ZERO, DDPM,
    dict(DDIM, timestep_spacing="trailing"), dict(DDIM, timestep_spacing="linspace", set_alpha_to_one=True),
    dict(PIXART, steps_offset=3, prediction_type="sample"), dict(PIXART, beta_schedule="squaredcos_cap_v2"),
    dict(ZERO, set_alpha_to_one=True), dict(DDPM, timestep_spacing="trailing", beta_schedule="scaled_linear"),
    dict(DDPM, num_train_timesteps=250, beta_end=0.05, rescale_betas_zero_snr=True, prediction_type="v_prediction"),
    dict(SDXL, timestep_spacing="trailing"), dict(SDXL, timestep_spacing="linspace"),
    dict(SDXL, use_karras_sigmas=True), dict(SDXL, use_karras_sigmas=True, sigma_min=0.05, sigma_max=10.0),
    dict(SDXL, use_karras_sigmas=True, timestep_spacing="trailing", final_sigmas_type="zero"),
    dict(SDXL, final_sigmas_type="sigma_min", prediction_type="v_prediction"),
    dict(SDXL, rescale_betas_zero_snr=True, timestep_spacing="trailing", prediction_type="v_prediction"),
]
DPM = dict(SD15, _class_name="DPMSolverMultistepScheduler", solver_order=2, algorithm_type="dpmsolver++")
CONFIGS += [
    DPM, dict(DPM, timestep_spacing="leading"), dict(DPM, timestep_spacing="trailing", use_karras_sigmas=True),
    dict(DPM, _class_name="UniPCMultistepScheduler"), dict(DPM, _class_name="DEISMultistepScheduler"),
    dict(DPM, rescale_betas_zero_snr=True, timestep_spacing="trailing", prediction_type="v_prediction"),
    dict(SDXL, _class_name="EulerAncestralDiscreteScheduler"),
]
COGVIDEO = dict(_class_name="CogVideoXDDIMScheduler", beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear",
                clip_sample=False, rescale_betas_zero_snr=True, set_alpha_to_one=True, snr_shift_scale=3.0,
                prediction_type="v_prediction", timestep_spacing="trailing", steps_offset=0)
CONFIGS += [
    COGVIDEO, dict(COGVIDEO, _class_name="CogVideoXDPMScheduler", snr_shift_scale=1.0),
    dict(COGVIDEO, rescale_betas_zero_snr=False, prediction_type="epsilon", timestep_spacing="linspace"),
    dict(_class_name="CogVideoXDDIMScheduler", steps_offset=1),
]
STEPS = [1, 2, 3, 4, 7, 10, 20, 25, 30, 49, 50, 100]


def floats(values):
    return base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()


def case(config, steps):
    own = config["_class_name"].replace("PNDM", "DDIM").replace("CogVideoXDPM", "CogVideoXDDIM")
    solver = own.startswith(("DPM", "UniPC", "DEIS"))
    name = "DPMSolverMultistepScheduler" if solver else own.replace("Ancestral", "")
    more = {"solver_order": 1, "algorithm_type": "dpmsolver++"} if solver else {}
    more |= {"final_sigmas_type": "sigma_min"} if own.startswith("DEIS") else {}
    s = getattr(diffusers, name).from_config({**config, "_class_name": name, **more})
    s.set_timesteps(steps)
    ts = [float(t) for t in s.timesteps]
    levels = getattr(diffusers, own).from_config({**config, "_class_name": own})
    levels.set_timesteps(steps)
    assert [float(t) for t in levels.timesteps] == ts, config
    if name.startswith("Euler"):
        ab = [(1.0, float(x)) for x in levels.sigmas]
    elif solver:
        ab = [((1 + x * x) ** -0.5, x * (1 + x * x) ** -0.5) for x in map(float, levels.sigmas)]
    else:
        final = float(getattr(s, "final_alpha_cumprod", torch.tensor(1.0)))
        ab = [(v**0.5, (1 - v) ** 0.5) for v in [float(s.alphas_cumprod[int(t)]) for t in ts] + [final]]
    x = torch.randn(64, generator=torch.Generator().manual_seed(steps), dtype=torch.float64)
    sigmas, off = [b / (a + b) for a, b in ab], 0.0
    for i, t in enumerate(s.timesteps):
        ratio, (a, b), (a2, b2) = s.config.num_train_timesteps // steps, ab[i], ab[i + 1]
        ddim = name.endswith("DDIMScheduler")
        if name == "DDPMScheduler" or ddim and i + 1 < steps and ts[i] - ratio != ts[i + 1] or a == 0:
            continue
        if ddim and i + 1 == steps and ts[i] - ratio >= 0:
            continue
        out = torch.sin(3 * x + i)
        if name.startswith("Euler"):
            s.scale_model_input(x, t)
        after = s.step(out, t, x).prev_sample.double()
        p = s.config.prediction_type
        if p == "epsilon":
            eps, x0 = out, (x - b * out) / a
        elif p == "sample":
            eps, x0 = (x - a * out) / b, out
        else:
            x0 = x / (b * b + 1) - out * b / (b * b + 1) ** 0.5 if name.startswith("Euler") else a * x - b * out
            eps = (x - a * x0) / b
        y = x / (a + b) + (sigmas[i + 1] - sigmas[i]) * (eps - x0)
        off = max(off, float((y - after / (a2 + b2)).abs().max()))
    assert off < 1e-5, (config, steps, off)
    return {"steps": steps, "sigmas": floats(sigmas), "timesteps": floats(ts), "step": off,
            "std": float(s.init_noise_sigma) / sum(ab[0])}


def main():
    groups = [{"config": c, "cases": [case(c, n) for n in STEPS]} for c in CONFIGS]
    about = f"deploy/golden/make_diffusions.py, diffusers {diffusers.__version__}, torch {torch.__version__}"
    with open(sys.argv[1], "w") as f:
        f.write(f'{{"about": {json.dumps(about)},\n"schedules": [\n' + ",\n".join(map(json.dumps, groups)) + "\n]}\n")
    print(max(c["step"] for g in groups for c in g["cases"]))


main()
