"""Reward functions that people use, each a file of this package, run as workers.

    meander-scorer pickscore --weights ./PickScore_v1 &
    meander run -n 4 --reward nats:pickscore 'a red fox'

In a program, without a pipeline:

    from meander.rewards import Input
    from meander.rewards.clipscore import ClipScore

    scores = ClipScore("openai/clip-vit-base-patch32").score([Input(image, "a red fox")])

A function of your own is served by serve; one that rates whole groups is given all samples of a prompt:

    from meander.rewards import scorer, serve

    @scorer(group=True)
    def longest_last(group):
        order = sorted(range(len(group)), key=lambda i: len(group[i].text))
        return [order.index(i) / max(len(group) - 1, 1) for i in range(len(group))]

    serve(longest_last)
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
from .reward import Busy, Fault, Group, Input, Member, Preference, Rated, Reward, Score, Scored, scorer

REWARDS: dict[str, type[Reward]] = {
    c.name: c for c in (
        PickScore, HPSv2, HPSv3, ImageReward, Aesthetic, ClipScore, GenEval, Judge, EditJudge, ClipDirection, EditL2,
    )
}  # fmt: skip
"""The classes by the names that meander-scorer knows."""



def serve(reward: Reward, argv: list[str] | None = None) -> int:
    """Answers for a reward function of one's own until the process is asked to stop, as a command with the flags of
    meander-scorer for the worker: --name, --batch, --patience, --nats-url and so on. Returns the exit status."""
    from .__main__ import serve_own

    return serve_own(reward, argv)


__all__ = [
    "REWARDS", "Busy", "Fault", "Group", "Input", "Member", "Preference", "Rated", "Reward", "Score", "Scored",
    "scorer", "serve",
]  # fmt: skip
