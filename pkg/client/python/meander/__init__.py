"""Rollouts of a meander pipeline in Python: publish prompts, read batches to train on, control runs, give verdicts,
check a loss.

    async with meander.connect("nats://127.0.0.1:4222") as client:
        await client.publish("demo", 'a blue sign that says "4071"', group_size=8)
        async for batch in client.batches("demo", "trainer", groups=1):
            print(batch["latents"].shape, batch["log_probs"], batch["advantages"])

Events are plain dicts with the names of the contract (schemas/jsonschema in the repository).
"""

from . import loss, noise, policy, scheduled, transition
from .batch import Batch, Group, Keep, Ratio, RatioOff, Sample, fresh
from .client import Client, Judged, Refused, connect
from .cursor import CursorError, Taken
from .events import EventError, Gone, tensor
from .reader import Batches, Groups, Health
from .text import Text
from .textbatch import TextBatch

__all__ = [
    "Batch", "Batches", "Client", "CursorError", "EventError", "Gone", "Group", "Groups", "Health", "Judged", "Keep", "Ratio", "RatioOff", "Refused",
    "Sample", "Taken", "Text", "TextBatch", "connect", "fresh", "loss", "noise", "policy", "scheduled", "tensor", "transition",
]
