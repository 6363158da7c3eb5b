"""Rollouts of a meander pipeline in Python: publish prompts, read groups as they close, give verdicts, check a loss.

    async with meander.connect("nats://127.0.0.1:4222") as client:
        await client.publish("demo", 'a blue sign that says "4071"', group_size=8)
        async for advantage in client.advantages("demo"):
            group = await client.group("demo", advantage["uid"])

Events are plain dicts with the names of the contract (schemas/jsonschema in the repository).
"""

from . import loss, scheduled
from .client import Client, EventError, Group, Judged, Refused, Sample, connect, tensor

__all__ = ["Client", "EventError", "Group", "Judged", "Refused", "Sample", "connect", "loss", "scheduled", "tensor"]
