"""What a reward function is: a class that scores samples, or a function with the decorator scorer."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Union

if TYPE_CHECKING:
    from PIL import Image


@dataclasses.dataclass(frozen=True)
class Input:
    """What is scored: image is a Pillow image in RGB; prompt, ground_truth (a text, or any other value of JSON),
    params and metadata are those of the prompt event. metadata is the record that the prompt came with, as a data set
    has it. conditions are the Pillow images in RGB that the network was given, by their types (image, mask), in order;
    of a video the frame in the middle. trace has the headers of the sample's trace context (W3C), if any. step is how
    many steps a sample in the middle has run, whose prediction is scored (at_steps); latents are the prediction itself,
    an array [S, C] of float32, where the prompt asks for it (latent): image is None then."""

    image: Image.Image
    prompt: str
    ground_truth: Any = ""
    params: Mapping[str, str] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    conditions: Mapping[str, Sequence[Image.Image]] = dataclasses.field(default_factory=dict)
    trace: Mapping[str, str] = dataclasses.field(default_factory=dict)
    step: int = 0
    latents: Any = None

    def before(self, reward: str) -> Sequence[Image.Image]:
        """The images that were edited, one at least. ValueError, which names the reward: there is none."""
        if not (images := self.conditions.get("image")):
            raise ValueError(f"the sample has no condition of type image; {reward} compares with it")
        return images


@dataclasses.dataclass(frozen=True)
class Member:
    """A sample of a group: its sample_index, and what Input has of an image, with its conditions. Of a video image is
    the frame in the middle, and frames are those that were sent. A text has no image but a text, and the messages
    before it (role, content)."""

    sample_index: int
    image: Image.Image | None = None
    frames: Sequence[Image.Image] = ()
    conditions: Mapping[str, Sequence[Image.Image]] = dataclasses.field(default_factory=dict)
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] = ()


class Group(list[Member]):
    """The samples of a prompt that a function rates together, by sample_index. What they have in common is as in Input;
    size is how many samples the prompt asked for, and missing says of the others, by sample_index, why they are not
    here: they failed, were pruned, or did not end in time."""

    def __init__(
        self, members: Iterable[Member], prompt: str, ground_truth: Any = "", params: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None, size: int = 0, missing: Mapping[int, str] | None = None,
        trace: Mapping[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(members)
        self.prompt, self.ground_truth, self.params, self.metadata = prompt, ground_truth, params or {}, metadata or {}
        self.size, self.missing, self.trace = size or len(self), missing or {}, trace or {}


class Preference(NamedTuple):
    """A comparison of the members at the places a and b of a Group: p is how sure the judge is that a is the better
    one, 0 to 1. Where a function gives preferences, the score of a member is its win rate: the mean of p, or of 1 - p
    where it is b, over all comparisons that name it."""

    a: int
    b: int
    p: float


class Score(NamedTuple):
    """A finite value, and a detail that tells people what was seen."""

    value: float
    detail: str = ""


Scored = Union[Score, Exception]
"""The score of a sample, or why it has none."""


Rated = Union[Sequence[Union[Score, float, Exception]], Sequence[Preference]]
"""What a function says of a group: a score for each member, or preferences."""


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

    group: ClassVar[bool] = False
    """Says that the function rates whole groups: it has rate in place of score."""

    def rate(self, group: Group) -> Rated | Awaitable[Rated]:
        """Returns a score for each member, in their order, or the error that it has; or the preferences among them. An
        error that is raised is that of all members."""
        raise NotImplementedError

    def score(self, samples: Sequence[Input]) -> list[Scored] | Awaitable[list[Scored]]:
        """Returns a score for each sample, at once or from an async method, or the error that this sample has. An
        error that is raised is that of the batch: its samples are then scored one by one."""
        raise NotImplementedError

    @property
    def version(self) -> str:
        """Changes whenever a score would; at most 128 bytes. It goes into scorers.yaml, for the record."""
        raise NotImplementedError


class _Function(Reward):
    """A function as a Reward."""

    extra = "images"

    def __init__(self, function: Callable[..., Any], group: bool, name: str, version: str):
        self.function, self.group, self.name = function, group, name or function.__name__  # type: ignore[misc]
        self._version = version

    @property
    def version(self) -> str:
        """As it was given, or a digest of the source of the function."""
        return self._version or hashlib.sha256(inspect.getsource(self.function).encode()).hexdigest()[:16]

    def rate(self, group: Group) -> Any:
        """What the function gives."""
        return self.function(group)

    def score(self, samples: Sequence[Input]) -> list[Scored]:
        """What the function gives for each sample."""

        def one(sample: Input) -> Scored:
            try:
                value = self.function(sample)
                return value if isinstance(value, Score) else Score(float(value))
            except Exception as e:
                return e

        return [one(s) for s in samples]


def scorer(
    function: Callable[..., Any] | None = None, *, group: bool = False, name: str = "", version: str = ""
) -> Any:
    """Makes a function a Reward.

        @scorer
        def bright(sample: Input) -> float: ...

        @scorer(group=True)
        def rank(group: Group) -> list[float]: ...

    With group it is given whole groups, and may be async: see Reward.rate. name is what it answers for, nats:NAME (the
    function's), version what rewards say of it (a digest of its source: what it calls is not in that).
    """
    if function is None:
        return lambda f: scorer(f, group=group, name=name, version=version)
    return _Function(function, group, name, version)
