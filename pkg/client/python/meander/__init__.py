"""Rollouts of a meander pipeline in Python: publish prompts, read batches to train on, control runs, give verdicts,
check a loss.

    async with meander.connect("nats://127.0.0.1:4222") as client:
        await client.publish("demo", 'a blue sign that says "4071"', group_size=8)
        async for batch in client.batches("demo", "trainer", groups=1):
            print(batch["latents"].shape, batch["log_probs"], batch["advantages"])

Events are plain dicts. meander.contract has the fields of each, with their types, units and defaults: a step of
client.steps(run) is a contract.Step.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .client import policy, sync
    from .maths import loss, noise, scheduled, transition
    from .plugs import dataset
    from .data import contract
    from .data.batch import Batch, Group, Keep, Ratio, RatioOff, Sample, fresh
    from .client.access import VersionMismatch
    from .client.client import Client, connect
    from .client.control import Refused
    from .client.cursor import CursorError, NoStreams, Taken
    from .data.events import EventError, Gone, tensor
    from .client.reader import Batches, EmptyBatch, Groups, Health
    from .client.teacher import NoTeacher, TeacherReply, Unscored
    from .client.traces import trace_context, traced
    from .client.verdicts import Judged
    from .data.staged import StagedBatch, stage, stages
    from .data.text import Text
    from .data.textbatch import TextBatch

__all__ = [
    "Batch", "Batches", "Client", "CursorError", "EmptyBatch", "EventError", "Gone", "Group", "Groups", "Health",
    "Judged", "Keep",
    "NoStreams", "NoTeacher", "Ratio", "RatioOff", "Refused",
    "Sample", "StagedBatch", "Taken", "TeacherReply", "Text", "TextBatch", "Unscored", "VersionMismatch", "connect",
    "contract", "dataset", "fresh", "loss", "noise", "policy",
    "scheduled", "stage", "stages", "sync", "tensor", "trace_context", "traced", "transition",
]
if importlib.util.find_spec("torch") is None:
    __all__.remove("dataset")  # which is for loaders of torch

_MODULES = {
    "client": ("access", "ask", "control", "cursor", "lease", "policy", "reader", "sync", "tasks", "teacher",
               "versions"),
    "data": ("batch", "contract", "events", "lora", "staged", "tensorfile", "text", "textbatch"),
    "maths": ("loss", "noise", "scheduled", "transition"),
    "plugs": ("accelerate", "dataset", "lane", "track", "trl", "verl"), "rewards": (),
}
_NAMES = {
    "client.access": ("VersionMismatch",), "client.client": ("Client", "connect"), "client.verdicts": ("Judged",),
    "client.control": ("Refused",), "client.cursor": ("CursorError", "NoStreams", "Taken"),
    "client.reader": ("Batches", "EmptyBatch", "Groups", "Health"),
    "client.teacher": ("NoTeacher", "TeacherReply", "Unscored"), "client.traces": ("trace_context", "traced"),
    "data.batch": ("Batch", "Group", "Keep", "Ratio", "RatioOff", "Sample", "fresh"),
    "data.events": ("EventError", "Gone", "tensor"), "data.staged": ("StagedBatch", "stage", "stages"),
    "data.text": ("Text",), "data.textbatch": ("TextBatch",),
}  # fmt: skip
# The module of each public name; that of a module is itself.
_HOME = {
    **{package: package for package in _MODULES},
    **{module: f"{package}.{module}" for package, modules in _MODULES.items() for module in modules},
    **{name: module for module, names in _NAMES.items() for name in names},
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for when it is: a worker of meander.torch has no need of the NATS client."""
    if name in _HOME:
        module = importlib.import_module(f"{__name__}.{_HOME[name]}")
        value = globals()[name] = module if module.__name__.endswith(f".{name}") else getattr(module, name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
