"""A lane as verl's rollout engine: it has no servers of verl's, and takes the weights of each step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from ...client import ask, client, policy
from ...client.given import Given
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
        pairs = aiter(ensure_async_iterator(weights))
        try:
            # Of another process, or the checkpoint under an adapter, which the lane has, nothing is pushed.
            if first and base_sync_done and (head := await anext(pairs, None)) is not None:
                note = "" if global_steps is None else f"global_steps={global_steps}"
                await self._push(head, pairs, peft_config, note)
        finally:
            async for _ in pairs:  # all processes take part in it
                pass

    async def _push(
        self, head: tuple[str, torch.Tensor], pairs: AsyncIterator[tuple[str, torch.Tensor]], peft_config: Any,
        note: str,
    ) -> None:
        """Pushes the first pair and those behind it; of whole weights no more than a file is held at once."""
        s = rows.settings_of(self.config)
        async with client.connect(s["url"], **s["connection"]) as connection:
            if peft_config is None:
                given = Given()
                push = asyncio.create_task(policy.push_weights(
                    connection, given, s["lane"], by="verl", note=note, patience=s["timeout"]
                ))
                push.add_done_callback(given.leave)
                try:
                    await asyncio.to_thread(given.give, (head[0], head[1].detach().cpu()))
                    async for name, t in pairs:
                        await asyncio.to_thread(given.give, (name, t.detach().cpu()))
                except BaseException:
                    push.cancel()
                    raise
                finally:
                    given.end()
                pushed = await push
            else:
                tensors = {head[0]: head[1].detach().cpu()} | {name: t.detach().cpu() async for name, t in pairs}
                trained = any(t.any() for name, t in tensors.items() if ".lora_A." not in name)
                adapter, config = (tensors, peft_config) if trained else (None, None)
                again = partial(
                    policy.push_policy, connection, adapter, s["lane"], config=config, by="verl", note=note
                )
                pushed = await ask.retried(again, s["timeout"])
            await policy.taken(connection, pushed, s["timeout"])
