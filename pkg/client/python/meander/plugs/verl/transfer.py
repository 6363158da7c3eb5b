"""The manager for verl's trainer of version 1, which takes samples from a TransferQueue."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.ray_utils import auto_await

from .manager import AgentLoopManager, Asking


class WorkerTQ(Asking, AgentLoopWorkerTQ.__ray_actor_class__):
    """Puts samples into the queue as their groups close."""

    def _step(self, batch: Any) -> int:
        return int(batch["global_steps"])


class AgentLoopManagerTQ(AgentLoopManager):
    """AgentLoopManager for trainer.use_v1=True: generate_sequences returns once the prompts are on their way. A group
    whose samples failed in every attempt is marked as a failure, which the replay buffer refills or drops."""

    worker_class = WorkerTQ

    @auto_await
    async def generate_sequences(self, prompts: Any) -> None:
        """Begins to make the samples of prompts, a TensorDict of rows that are not repeated."""
        await self._on_lane(self.worker.generate_sequences(prompts))
