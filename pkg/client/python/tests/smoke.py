"""What a user of the installed package does first, with asyncio and without: publishes prompts, reads a batch."""

import asyncio
import sys
from pathlib import Path

import numpy as np

import meander

URL, RUN = sys.argv[1:]


def check(batch: meander.Batch) -> None:
    """A batch has the two samples of its group, with their trained steps."""
    assert batch.size == 2 and batch["log_probs"].shape == (2, 2), dict(batch)
    assert batch["latents"].dtype == np.float32 and batch["latents"].shape == batch["next_latents"].shape
    assert np.isfinite(batch["advantages"]).all()


async def publish_and_read() -> None:
    async with meander.connect(URL) as client:
        await client.publish(
            RUN, "a red fox", group_size=2, seed=7, reward=[{"name": "synthetic"}], rollout={"sde_step_indices": [1, 2]}
        )
        async for batch in client.batches(RUN, "smoke", groups=1, timeout=300):
            check(batch)
            break


asyncio.run(publish_and_read())
with meander.sync.connect(URL) as waiting:
    for read in waiting.batches(RUN, "smoke-sync", groups=1, timeout=300):
        check(read)
        break
print(meander.__version__, Path(meander.__file__).parent, sys.version.split()[0])
