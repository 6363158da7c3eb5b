"""Makes meander a name of verl's rollout engines. verl imports it by the entry point verl.plugins of this package."""

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry


def _replica() -> type:
    from .engine import Replica

    return Replica


_ROLLOUT_REGISTRY["meander", "async"] = "meander.plugs.verl.engine.ServerAdapter"
RolloutReplicaRegistry.register("meander", _replica)
