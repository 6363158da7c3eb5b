#!/usr/bin/env python3
"""A reward function that rates whole groups, as a NATS worker: which samples of a prompt are the more colourful?

It compares every sample with every other. The score of a sample is the share of comparisons that it wins, 0 to 1.

    pip install 'meander-rl[images]'
    python rank.py --nats nats://127.0.0.1:4222 --name rank
    meander publish --run demo --reward nats:rank --group-min nats:rank=2 'a red sign that says "OPEN"'
"""

import itertools

from meander.rewards import Preference, scorer, serve
from worker import colourfulness


@scorer(group=True)
def rank(group):
    """The preferences among the members of a group. Each has sample_index and image, of texts text and messages;
    group has prompt, ground_truth, params, metadata, and missing: samples that are not there, and why."""
    values = [colourfulness(member.image) for member in group]
    return [
        Preference(a, b, 0.5 if values[a] == values[b] else float(values[a] > values[b]))
        for a, b in itertools.combinations(range(len(group)), 2)
    ]


if __name__ == "__main__":
    raise SystemExit(serve(rank))
