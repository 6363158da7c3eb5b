"""What a reward function is: a class that scores samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Union

if TYPE_CHECKING:
    from PIL import Image


@dataclasses.dataclass(frozen=True)
class Input:
    """What is scored: image is a Pillow image in RGB; prompt, ground_truth (a text, or any other value of JSON),
    params and metadata are those of the prompt event. metadata is the record that the prompt came with, as a data set
    has it. conditions are the Pillow images in RGB that the network was given, by their types (image, mask), in order;
    of a video the frame in the middle. trace has the headers of the sample's trace context (W3C), if any."""

    image: Image.Image
    prompt: str
    ground_truth: Any = ""
    params: Mapping[str, str] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    conditions: Mapping[str, Sequence[Image.Image]] = dataclasses.field(default_factory=dict)
    trace: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def before(self, reward: str) -> Sequence[Image.Image]:
        """The images that were edited, one at least. ValueError, which names the reward: there is none."""
        if not (images := self.conditions.get("image")):
            raise ValueError(f"the sample has no condition of type image; {reward} compares with it")
        return images


class Score(NamedTuple):
    """A finite value, and a detail that tells people what was seen."""

    value: float
    detail: str = ""


Scored = Union[Score, Exception]
"""The score of a sample, or why it has none."""


class Fault(Exception):
    """Weights or a setting that a restart does not help. The message says what to do."""


class Busy(Exception):
    """It may pass: the sample is asked for again."""


class Reward:
    """A reward function: name is NAME of nats:NAME unless the command says otherwise, flags are the arguments of its
    constructor as those of the command, extra is the extra of meander-rl that brings what it imports."""

    name: ClassVar[str]
    extra: ClassVar[str]
    flags: ClassVar[dict[str, dict[str, Any]]] = {}

    def score(self, samples: Sequence[Input]) -> list[Scored] | Awaitable[list[Scored]]:
        """Returns a score for each sample, at once or from an async method, or the error that this sample has. An
        error that is raised is that of the batch: its samples are then scored one by one."""
        raise NotImplementedError

    @property
    def version(self) -> str:
        """Changes whenever a score would; at most 128 bytes. It goes into scorers.yaml, for the record."""
        raise NotImplementedError
