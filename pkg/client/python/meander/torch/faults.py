"""The errors that an answer can carry."""

from __future__ import annotations

CLASSES = ("prompt", "latents", "handle", "weights", "memory", "config", "worker", "protocol", "condition")
"""The classes of a Fault."""


class Fault(Exception):
    """An error of a call, as the host reads it: one of CLASSES and a message.

    prompt: a prompt that the family cannot encode. latents: a size, or latents, that it cannot compute. handle: an
    unknown conditioning, to put again. weights: a version that does not fit or is not loaded. memory: the device is
    full. config: the worker is set up wrongly, and a restart does not help. worker: a bug. protocol: a call that is
    not one. condition: conditions of a recipe, by their digests, that are not here: to send, and to call again.
    """

    def __init__(self, kind: str, message: str, conditions: list[str] | None = None):
        assert kind in CLASSES, kind
        super().__init__(message)
        self.kind, self.conditions = kind, conditions or []

    def answer(self) -> dict[str, object]:
        """The fault as an answer has it."""
        more = {"conditions": self.conditions} if self.conditions else {}
        return {"class": self.kind, "message": str(self), **more}


def first_sentence(e: BaseException) -> str:
    """What an error of a library says first, on one line; what follows is often about other programs."""
    return " ".join(str(e).split()).partition(". ")[0]
