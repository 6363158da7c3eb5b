#!/usr/bin/env python3
"""The trainer of `make bench-update`: it asks for a batch and reads it as `meander-train` does, and computes nothing.

It reads one JSON object per line and answers each with one. The first, {"nats", "run", "batch", "groups",
"group_size", "steps", "size", "dtype", "micro"}, is answered by {"engine"}. The next ones are {"do": "publish"}, which
has all prompts stored, answered by {"samples"}; and {"do": "read"}, which reads the batch in micro-batches and looks at
the last number of both states of every trained step, answered by {"samples", "steps", "seconds", "cpu"}. It copies no
state: what a trainer does with them is its own work.

Python packages: the client's (pip install ./pkg/client/python); with torch the states are tensors, else arrays.
"""

import asyncio
import json
import sys
import time

try:
    import meander
    import numpy as np
except ImportError as e:
    sys.exit(f"update_reader.py: {e}; python3 -m pip install ./pkg/client/python")
try:
    import torch
except ImportError:
    torch = None

PATIENCE = 24 * 3600.0  # s


class Trainer:
    def __init__(self, config):
        self.config = config

    async def publish(self, client):
        c = self.config
        rollout = {"latents_dtype": c["dtype"], "sde_step_indices": list(range(c["steps"]))}
        await asyncio.gather(*(
            client.publish(
                c["run"], f"prompt {i}", timeout=PATIENCE, uid=f"g{i:05d}", group_size=c["group_size"], seed=i,
                height=c["size"], width=c["size"], num_inference_steps=c["steps"], rollout=rollout,
                batch={"id": c["batch"], "groups": c["groups"]},
            )
            for i in range(c["groups"])
        ))
        return {"samples": c["groups"] * c["group_size"]}

    async def read(self, client):
        cpu, began = time.process_time(), time.perf_counter()
        samples = steps = 0
        reader = client.batches(self.config["run"], name="bench", timeout=PATIENCE, whole=False)
        batch = await anext(aiter(reader))
        async for micro in batch.micro(self.config["micro"]):
            states = micro.torch(names=("latents", "next_latents")) if torch else micro
            before, after = states["latents"], states["next_latents"]
            for state in (before, after):
                if not np.isfinite(state[..., -1, -1].tolist()).all():
                    raise ValueError("a state has a number that is not finite")
            samples, steps = samples + before.shape[0], steps + before.shape[0] * before.shape[1]
            del before, after, states, micro
        return {"samples": samples, "steps": steps, "seconds": time.perf_counter() - began,
                "cpu": time.process_time() - cpu}


async def main():
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is no answer
    config = json.loads(sys.stdin.readline())
    trainer = Trainer(config)
    async with meander.connect(config["nats"]) as client:
        engine = f"meander-rl {meander.__version__}, " + (
            f"PyTorch {torch.__version__}" if torch else f"numpy {np.__version__}"
        )
        print(json.dumps({"engine": engine}), file=answers, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            answer = await getattr(trainer, json.loads(line)["do"])(client)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
