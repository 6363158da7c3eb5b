"""What an update is told with, so that it can be proved and made again: what it began with, its settings, its code."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors import torch as safetensors

from .. import __version__
from .config import Config, decisive
from .model import digest

if TYPE_CHECKING:
    from .learner import Learner


def settings(config: Config) -> str:
    """The settings that decide an update, as JSON: what names places and servers is none of them."""
    return json.dumps({name: getattr(config, name) for name in decisive()}, sort_keys=True)


def code(device: torch.device, teacher: str) -> str:
    """The versions of what computes an update, and where; teacher is the one that taught it, empty: none."""
    import peft

    return (f"meander-rl {__version__}, torch {torch.__version__}, peft {peft.__version__}, {device.type}"
            + f", teacher {teacher}" * bool(teacher))  # fmt: skip


def packed(state: Mapping[str, Any]) -> bytes:
    """What Learner.state returned as a safetensors file: adapter/NAME, average/NAME and optimizer/PLACE/NAME, float32.
    The optimizer's settings are the trainer's, and not in it."""
    out = {f"adapter/{name}": t for name, t in state["adapter"].items()}
    out |= {f"average/{name}": t for name, t in (state["average"] or {}).items()}
    for place, of in state["optimizer"]["state"].items():
        out |= {f"optimizer/{place}/{name}": t.float() for name, t in of.items()}
    return safetensors.save({name: t.detach().cpu().contiguous() for name, t in out.items()})


def unpacked(file: bytes, learner: Learner) -> dict[str, Any]:
    """What packed made a file of, as Learner.load takes it."""
    state = learner.state()
    optimizer: dict[int, dict[str, torch.Tensor]] = {}
    parts: dict[str, dict[str, torch.Tensor]] = {"adapter": {}, "average": {}}
    for name, t in safetensors.load(file).items():
        kind, _, of = name.partition("/")
        if kind == "optimizer":
            place, _, field = of.partition("/")
            optimizer.setdefault(int(place), {})[field] = t
        else:
            parts[kind][of] = t
    return {
        "adapter": parts["adapter"], "average": parts["average"] or None,
        "optimizer": {**state["optimizer"], "state": optimizer},
    }


@dataclasses.dataclass
class Began:
    """What an update began with."""

    weights: str
    """The digest of the weights that the samplers had."""
    state: bytes | None
    """The file of packed; None: it is not kept."""

    def told(self, config: Config, learner: Learner) -> dict[str, Any]:
        """The fields of the update beside its numbers; state is a file still."""
        average = "" if learner.average is None else digest(learner.average)
        return {
            "weights_before": self.weights, "average_digest": average, "settings": settings(config),
            "code": code(learner.network.device, learner.taught_by), "state": self.state,
        }


def joined(digests: list[str]) -> str:
    """The batch_digest of an update of batches with these digests, as schemas.BatchDigests has it."""
    return digests[0] if len(digests) == 1 else hashlib.sha256(("\n".join(digests) + "\n").encode()).hexdigest()
