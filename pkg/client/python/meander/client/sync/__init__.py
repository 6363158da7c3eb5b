"""The client without asyncio: the same names, each call waits.

    with meander.sync.connect("nats://127.0.0.1:4222") as client:
        client.publish("demo", 'a blue sign that says "4071"', group_size=8)
        for batch in client.batches("demo", "trainer", groups=1):
            print(batch["latents"].shape, batch["advantages"])

The connections of a process share one thread in the background. A fork must connect again; so must a thread that runs
an event loop use meander.connect. Either is told so by a RuntimeError.
"""

from . import policy
from .client import Client, Reader, Stream, connect

__all__ = ["Client", "Reader", "Stream", "connect", "policy"]
