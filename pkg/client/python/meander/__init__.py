"""Rollouts of a meander pipeline in Python: publish prompts, read batches to train on, control runs, give verdicts,
check a loss.

    async with meander.connect("nats://127.0.0.1:4222") as client:
        await client.publish("demo", 'a blue sign that says "4071"', group_size=8)
        async for batch in client.batches("demo", "trainer", groups=1):
            print(batch["latents"].shape, batch["log_probs"], batch["advantages"])

Events are plain dicts with the names of the contract (schemas/jsonschema in the repository).
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import dataset, loss, noise, policy, scheduled, sync, transition
    from .batch import Batch, Group, Keep, Ratio, RatioOff, Sample, fresh
    from .client import Client, Judged, connect
    from .control import Refused
    from .cursor import CursorError, Taken
    from .events import EventError, Gone, tensor
    from .reader import Batches, EmptyBatch, Groups, Health
    from .teacher import NoTeacher, TeacherReply, Unscored
    from .text import Text
    from .textbatch import TextBatch

__version__ = "0.1.0"

__all__ = [
    "Batch", "Batches", "Client", "CursorError", "EmptyBatch", "EventError", "Gone", "Group", "Groups", "Health", "Judged", "Keep",
    "NoTeacher", "Ratio", "RatioOff", "Refused",
    "Sample", "Taken", "TeacherReply", "Text", "TextBatch", "Unscored", "connect", "dataset", "fresh", "loss", "noise",
    "policy",
    "scheduled", "sync", "tensor", "transition",
]
if importlib.util.find_spec("torch") is None:
    __all__.remove("dataset")  # which is for loaders of torch

_MODULES = {
    "loss": (), "noise": (), "policy": (), "scheduled": (), "transition": (),
    "batch": ("Batch", "Group", "Keep", "Ratio", "RatioOff", "Sample", "fresh"),
    "client": ("Client", "Judged", "connect"),
    "control": ("Refused",),
    "cursor": ("CursorError", "Taken"), "events": ("EventError", "Gone", "tensor"),
    "reader": ("Batches", "EmptyBatch", "Groups", "Health"), "text": ("Text",),
    "teacher": ("NoTeacher", "TeacherReply", "Unscored"),
    "textbatch": ("TextBatch",), "access": (), "tasks": (), "sync": (), "dataset": (),
    "ask": (), "trl": (), "verl": (), "accelerate": (), "rewards": (),
}  # fmt: skip
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports what is asked for when it is: a worker of meander.torch has no need of the NATS client."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOME:
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
