"""What the checkpoint can do: right answers by kind, variance within groups, second tries."""

from __future__ import annotations

import collections
import random
import statistics
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from . import fit, problems
from .tokens import Tokens

GROUP = 8


def report(folder: Path, seed: int, log, n: int = 1000, held_out: int = 200) -> None:
    torch.manual_seed(seed)
    tokens = Tokens(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    r = random.Random(f"measure {seed}")
    ps = [problems.draw(r) for _ in range(n)]
    greedy = [a == p.truth for p, a in zip(ps, fit.answers(model, tokens, ps, 0))]
    given = fit.answers(model, tokens, [p for p in ps for _ in range(GROUP)], 1.0)
    groups = [[a == p.truth for a in given[i * GROUP : (i + 1) * GROUP]] for i, p in enumerate(ps)]

    def line(name: str, at: list[int]) -> str:
        mixed = [0 < sum(groups[i]) < GROUP for i in at]
        return (f"{name} ({len(at)}): greedy {statistics.mean(greedy[i] for i in at):.3f}, "
                f"t1 {statistics.mean(x for i in at for x in groups[i]):.3f}, groups with variance "
                f"{statistics.mean(mixed):.3f}")

    kinds = collections.defaultdict(list)
    for i, p in enumerate(ps):
        kinds[p.kind].append(i)
    for kind in sorted(kinds):
        log(line(kind, kinds[kind]))
    log(line("all", list(range(n))))
    right = [sum(g) for g in groups]
    log(f"groups of {GROUP}: all right {sum(x == GROUP for x in right) / n:.3f}, none {sum(x == 0 for x in right) / n:.3f}; "
        f"mean standard deviation {statistics.mean(statistics.pstdev(g) for g in groups):.3f}; "
        f"no number or no end {sum(a is None for a in given) / len(given):.4f}")
    unseen = [problems.draw(r, held_out=True) for _ in range(held_out)]
    rates = [
        statistics.mean(a == p.truth for p, a in zip(unseen, fit.answers(model, tokens, unseen, t))) for t in (0, 1.0)
    ]
    log(f"held-out pairs ({held_out}): greedy {rates[0]:.3f}, t1 {rates[1]:.3f}")
    wrong = [(p, a) for p, a in zip((p for p in ps for _ in range(GROUP)), given) if a is not None and a != p.truth][:n]
    prompts = [
        tokens.prompt([("user", p.text), ("assistant", str(a)), ("user", problems.hint(p, a))]) for p, a in wrong
    ]
    second = [problems.parse(t) if ended else None for t, ended in fit.sample(model, tokens, prompts, 1.0)]
    fresh = fit.answers(model, tokens, [p for p, _ in wrong], 1.0)
    log(f"after a wrong answer and its hint ({len(wrong)}): right {statistics.mean(b == p.truth for (p, _), b in zip(wrong, second)):.3f}, "
        f"the same again {statistics.mean(b == a for (_, a), b in zip(wrong, second)):.3f}; "
        f"asked afresh {statistics.mean(b == p.truth for (p, _), b in zip(wrong, fresh)):.3f}")
