#!/usr/bin/env python3
"""Record rollouts of skrample 0.5.3 as SimpleTuner drives it (simpletuner/helpers/scheduled_sampling, v4.8).

    python deploy/golden/make_simpletuner.py pkg/scheduled/testdata/simpletuner.json

Part of `make golden`. Everything is a float of Python. The table is that of a DDPMScheduler, in float64; the latent
starts as its add_noise makes it, and the model is affine. `order` is what was asked for. The share t/N of a timestep is
taken times N and cut to an integer, as the adapter of SimpleTuner does it for the table and for the data estimate.
"""

import importlib.metadata
import json
import math
import random
import sys

import numpy as np
from skrample import sampling
from skrample.common import sigma_polar

SAMPLERS = {"euler": lambda order: sampling.Euler(), "dpm": lambda order: sampling.DPM(order=min(order, 3)),
            "unip": lambda order: sampling.UniP(order=order), "unipc": lambda order: sampling.UniPC(order=order)}


def table(n, first, last, zero):
    abar = np.cumprod(1 - np.linspace(first, last, n))
    if zero:  # rescale_zero_terminal_snr
        root = np.sqrt(abar)
        abar = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
    return abar


def roll(case, abar):
    n = len(abar)
    sigmas = np.sqrt((1 - abar) / np.maximum(abar, 1e-12))
    sampler = SAMPLERS[case["sampler"]](case["order"])
    at = abar[case["source"]].item()
    x = math.sqrt(at) * case["x0"][0] + math.sqrt(1 - at) * case["noise"][0]
    states, previous = [x], []
    for t in range(case["source"], case["target"], -1):
        index = int(t / n * n)
        u, a = sigma_polar(sigmas[index].item())
        p = case["model"]["scale"] * x + case["model"]["shift"]
        m = (x - u * p) / a if case["prediction"] == "epsilon" else a * x - u * p
        result = sampler.sample(x, m, index, sigmas, sigma_polar, None, tuple(previous))
        if sampler.require_previous > 0:
            previous = [*previous, result][-sampler.require_previous:]
        x = result.final
        states.append(x)
    return states


def main():
    rng = random.Random(20261123)
    rolls = []
    ways = [("epsilon", 100, False, 31, 27), ("epsilon", 100, False, 60, 55), ("v_prediction", 100, False, 99, 94),
            ("epsilon", 1000, False, 603, 597), ("v_prediction", 1000, True, 999, 994),
            ("v_prediction", 100, True, 31, 27)]
    orders = {"euler": [1], "dpm": [1, 2, 3], "unip": range(1, 10), "unipc": range(1, 10)}
    for prediction, n, zero, source, target in ways:
        first, last = (1e-4, 0.02) if n == 1000 else (1e-3, 0.1)
        abar = table(n, first, last, zero)
        for name, list_ in orders.items():
            for order in list_:
                case = dict(name="%s, %s %d, %d of %d to %d%s" % (prediction, name, order, source, n, target, ", zero SNR" * zero),
                            prediction=prediction, timesteps=n, beta_first=first, beta_last=last, zero_snr=zero,
                            source=source, target=target, sampler=name, order=order, compat="simpletuner",
                            x0=[rng.uniform(-1, 1)], noise=[rng.uniform(-2, 2)],
                            model=dict(scale=rng.uniform(0.2, 0.9), shift=rng.uniform(-0.5, 0.5)))
                rolls.append(dict(case, states=[[x] for x in roll(case, abar)]))
    about = "deploy/golden/make_simpletuner.py, skrample %s, numpy %s" % (
        importlib.metadata.version("skrample"), np.__version__
    )
    with open(sys.argv[1], "w") as f:
        f.write('{"about": %s,\n"rolls": [\n%s\n]}\n' % (json.dumps(about), ",\n".join(json.dumps(r) for r in rolls)))


if __name__ == "__main__":
    main()
