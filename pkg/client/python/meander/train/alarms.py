"""Finds what goes wrong in a training run while it runs: readers that are cheated, steps that are too large, weights
that did not arrive."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .config import Config

HACKING, COLLAPSE, RATIO, STALE, EMPTY = "hacking", "collapse", "ratio", "stale", "empty"
"""Kinds of alarms: a reader is cheated, rewards fall, the first ratio is not 1, a batch is too old, or has no
sample."""
STILL, UNCHANGED, NARROW = "no variance", "unchanged", "narrow"
"""More of them: equal rewards in each group, an update that changes nothing, samples that begin to look alike."""
UNCHECKED = "unchecked"
"""And one more: nothing but their names says that the samplers' weights are the trainer's."""
FATAL = (HACKING, COLLAPSE)
"""Those from which a run cannot recover by itself: they end it."""


class Alarms:
    """Reads the records of updates and evaluations, and returns what is wrong with them. Each alarm is returned once,
    until its cause is gone."""

    def __init__(self, config: Config):
        self.config = config
        self.raised: set[str] = set()
        self.rewards: list[float] = []
        self.evaluations: list[dict[str, Any]] = []

    def update(self, record: dict[str, Any]) -> list[tuple[str, str]]:
        """Returns alarms of an update's record, as pairs of kind and text."""
        c, out = self.config, []
        pairs = zip(record["ratio_off"], record["ratio_bound"], strict=True)
        off, bound = max((p for p in pairs if p[0] > c.ratio_factor * p[1]), default=(0.0, 0.0))
        what = "|log_prob - old|" if record["steps"] else "what the network makes of the state before the last step"
        if record["behind"] == 0 and off:
            out.append(
                (
                    RATIO,
                    f"{what} is up to {off:.1e} off before any step, and roundings are {bound:.1e}: the "
                    f"sampler's weights are not the trainer's, or --dtype is not the sampler's"
                )
            )
        if not record["steps"] and all(math.isnan(x) for x in record["ratio_off"]):
            out.append(
                (
                    UNCHECKED,
                    "no sample has the state before its last step, or the solver's last step is none of euler's: that "
                    "the sampler's weights are the trainer's is known by their digest alone"
                )
            )
        # Later steps have less noise, so the same change is a larger divergence there: a window is compared at one
        # step.
        if record["steps"] and record["steps"][:1] == c.trained[:1] and (kl := record["kl"][0]) > c.kl_limit:
            out.append(
                (
                    HACKING,
                    f"the divergence from the base at the first trained step is {kl:.1e}, more than {c.kl_limit:g}"
                )
            )
        self.rewards.append(record["reader"])
        means = [sum(self.rewards[i : i + 5]) / 5 for i in range(len(self.rewards) - 4)]
        if means and means[-1] < max(means) - c.reward_drop:
            out.append(
                (
                    COLLAPSE,
                    f"what {c.reader} gives in five updates is {means[-1]:.3f}, and was {max(means):.3f}: the steps "
                    f"are too large"
                )
            )
        if record["zero_std"] == 1 and not c.teacher:
            out.append((STILL, "all rewards of each group are equal: the batch has no gradient"))
        return self._new(out)

    def stale(self, batch: str, behind: int) -> list[tuple[str, str]]:
        """Returns the alarm for a batch of weights that are further behind than --ahead allows."""
        return [
            (
                STALE,
                f"batch {batch} is of weights {behind} updates old, or of others, more than --ahead "
                f"{self.config.ahead}: it is left out"
            )
        ]

    def empty(self, batch: str, why: Iterable[str]) -> list[tuple[str, str]]:
        """Returns the alarm for a batch without samples to train on. why: what its groups are left out for."""
        reasons = "; ".join(f"{n} x {text}" for text, n in Counter(why).most_common(3))
        return [(EMPTY, f"no sample of batch {batch} has an advantage: it is left out: {reasons}")]

    def evaluated(self, record: dict[str, Any]) -> list[tuple[str, str]]:
        """Returns alarms of an evaluation's record."""
        c, out = self.config, []
        self.evaluations.append(record)
        golds = [e["gold"] for e in self.evaluations if e.get("gold") is not None]
        if len(golds) > 2 and all(g < max(golds) - c.gold_drop for g in golds[-2:]):
            out.append(
                (
                    HACKING,
                    f"{c.gold}, which is not rewarded, reads {golds[-1]:.3f} and read {max(golds):.3f}, while "
                    f"{c.reader} reads {record['exact']:.3f}"
                )
            )
        if self.narrow(record):
            share = record["diversity"] / self.evaluations[0]["diversity"]
            # While diversity is rewarded it may come back; else samples are on their way to look alike.
            kind = NARROW if c.hold_diversity else HACKING
            out.append((kind, f"diversity is {share:.0%} of the start's"))
        return out

    def narrow(self, record: dict[str, Any]) -> bool:
        """Says whether an evaluation has lost too much of the first one's diversity."""
        start, now = self.evaluations[0].get("diversity"), record.get("diversity")
        return start is not None and now is not None and now < self.config.diversity_floor * start

    def held(self) -> float:
        """Returns the weight of diversity in the reward: above 0 while the last evaluation found too little."""
        start, now = (self.evaluations[i].get("diversity") if self.evaluations else None for i in (0, -1))
        missing = self.config.hold_diversity - now / start if start and now is not None else 0.0
        return round(max(0.0, 20 * missing), 3)

    def _new(self, found: list[tuple[str, str]]) -> list[tuple[str, str]]:
        out = [f for f in found if f[0] not in self.raised]
        self.raised = {kind for kind, _ in found}
        return out
