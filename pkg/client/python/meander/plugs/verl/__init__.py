"""Rollouts of a lane for verl's trainers, and weights of theirs for the lane. With the package installed, verl's
configuration is all that it takes:

    actor_rollout_ref.rollout.name=meander
    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=meander.plugs.verl.AgentLoopManagerTQ
    +actor_rollout_ref.rollout.engine_kwargs.meander.url=nats://127.0.0.1:4222
    +actor_rollout_ref.rollout.engine_kwargs.meander.lane=sums
    +actor_rollout_ref.rollout.engine_kwargs.meander.fields.reward=[{name:exact_match}]

AgentLoopManagerTQ is for trainer.use_v1=True, verl's default; AgentLoopManager gives a DataProto, as the trainer
before it takes. rollout.name is found by an entry point of this package; where that is not wanted, the managers work
beside any other name, and nobody pushes weights.

Made for verl 0.9.1.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Replica, ServerAdapter
    from .manager import AgentLoopManager
    from .rows import diffusion_output, diffusion_outputs
    from .transfer import AgentLoopManagerTQ

__all__ = [
    "AgentLoopManager", "AgentLoopManagerTQ", "Replica", "ServerAdapter", "diffusion_output", "diffusion_outputs",
]  # fmt: skip

_HOME = {
    "AgentLoopManager": "manager", "AgentLoopManagerTQ": "transfer", "Replica": "engine", "ServerAdapter": "engine",
    "diffusion_output": "rows", "diffusion_outputs": "rows",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports what is asked for when it is: verl takes seconds, and its TransferQueue is optional."""
    if name in _HOME:
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
