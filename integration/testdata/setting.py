"""What a trainer gets of samples with cfg_from and cfg_until: the setting, its effect in each step, and a loss at ratio 1."""

import asyncio
import sys

import numpy as np

import meander
from meander.data.events import tensor
from meander.maths import loss


async def main(url, run):
    async with meander.connect(url) as client:
        async for batch in client.batches(run, groups=1):
            break
    assert set(batch["cfg_from"]) == {0.25} and set(batch["cfg_until"]) == {0.75}, batch["cfg_from"]
    assert batch["cfg_scales"].tolist() == [[1.0, 3.0, 3.0]] * batch.size, batch["cfg_scales"]
    guided = np.zeros_like(batch["latents"])
    for i, sample in enumerate(batch.samples):
        for j, step in enumerate(sample.trained):
            guided[i, j] = tensor(next(d["tensor"] for d in step["debug"] if d["name"] == "model_output"))
    new = batch.recompute_log_prob(guided)
    assert batch.check(new).ok
    for j in range(3):
        ppo = loss.ppo(new[:, j], batch["log_probs"][:, j], batch["advantages"][:, j])
        assert abs(ppo["ratio_mean"] - 1) < 1e-6 and ppo["pg_clipfrac"] == 0, ppo


asyncio.run(main(*sys.argv[1:]))
