"""A reward made of all logits of an answer: the mean entropy of its tokens and the margin of the likeliest."""

import asyncio
import sys

import numpy as np

import meander


def answer(request):
    z, n = request["generation_logits"], len(request["ids"])
    assert isinstance(z, np.ndarray) and z.shape == (n, request["vocabulary"]), z
    assert request["generation_logit_ids"] is None
    z = z.astype(np.float64)
    log_probs = z - np.array(request["log_sum_exps"])[:, None]
    entropy = -(np.exp(log_probs) * log_probs).sum(axis=1)
    top = np.sort(z, axis=1)[:, -2:]
    return {"content": "again", "score": float((entropy + top[:, 1] - top[:, 0]).mean())}


async def main():
    async with meander.connect(sys.argv[1]) as client:
        await client.interact("python", answer, ready=lambda: print("listening on mdr.v1.interact.python", flush=True))


asyncio.run(main())
