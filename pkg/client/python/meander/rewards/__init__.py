"""Reward functions that people use, each a file of this package, run as workers.

    meander-scorer pickscore --weights ./PickScore_v1 &
    meander run -n 4 --reward nats:pickscore 'a red fox'

In a program, without a pipeline:

    from meander.rewards import Input
    from meander.rewards.clipscore import ClipScore

    scores = ClipScore("openai/clip-vit-base-patch32").score([Input(image, "a red fox")])

A class of your own with a method score is served by `meander.rewards.worker.Worker`.
"""

from .aesthetic import Aesthetic
from .clipscore import ClipScore
from .edits import ClipDirection, EditL2
from .geneval import GenEval
from .hpsv2 import HPSv2
from .hpsv3 import HPSv3
from .imagereward import ImageReward
from .judge import EditJudge, Judge
from .pickscore import PickScore
from .reward import Busy, Fault, Reward, Input, Score, Scored

REWARDS: dict[str, type[Reward]] = {
    c.name: c for c in (
        PickScore, HPSv2, HPSv3, ImageReward, Aesthetic, ClipScore, GenEval, Judge, EditJudge, ClipDirection, EditL2,
    )
}  # fmt: skip
"""The classes by the names that meander-scorer knows."""

__all__ = ["REWARDS", "Busy", "Fault", "Reward", "Input", "Score", "Scored"]
