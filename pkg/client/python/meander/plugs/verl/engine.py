"""A lane as verl's rollout engine: it has no servers of verl's, and takes the weights of each step."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from ...client import ask, client, policy
from . import rows


class Replica(RolloutReplica):
    """Stands in for servers that verl starts: the samplers are there already."""

    async def launch_servers(self) -> None:
        self._server_address = rows.settings_of(self.config)["url"]


class ServerAdapter(BaseRollout):
    """Pushes the weights of verl's actor to the lane, at each of its steps, and waits until the samplers have answered.

    Adapters are pushed as they are; whole weights, and adapters that verl merges (model.lora.merge), only to lanes that
    take them. PolicyRefused: nobody can use them. TimeoutError: not all samplers have answered.
    """

    async def resume(self, tags: list[str]) -> None:
        """Nothing: the samplers have memory of their own."""

    async def release(self) -> None:
        """Nothing: see resume."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        *,
        peft_config: Any = None,
        base_sync_done: bool = True,
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        if wire_format != "named_tensors":
            raise ValueError(f"checkpoint_engine.backend: sends {wire_format}; must be naive")
        first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        tensors = {}
        async for name, t in ensure_async_iterator(weights):  # all processes take part in it
            if first and base_sync_done:
                tensors[name] = t.detach().cpu()
        if not tensors:  # of another process, or the checkpoint under an adapter, which the lane has
            return
        s = rows.settings_of(self.config)
        note = "" if global_steps is None else f"global_steps={global_steps}"
        async with client.connect(s["url"], **s["connection"]) as connection:
            if peft_config is None:
                push = partial(policy.push_weights, connection, tensors, s["lane"])
            else:
                trained = any(t.any() for name, t in tensors.items() if ".lora_A." not in name)
                adapter, config = (tensors, peft_config) if trained else (None, None)
                push = partial(policy.push_policy, connection, adapter, s["lane"], config=config)
            pushed = await ask.retried(partial(push, by="verl", note=note), s["timeout"])
            await policy.taken(connection, pushed, s["timeout"])
