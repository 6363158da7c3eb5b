"""Changes of the syntax of losses and steps, drawn by a seed, and how many of them certify explains.

    PYTHONPATH=. python tests/mutants.py SEED [--count 1] [--of 40] [--subject losses/ppo]

An operator is another one, or one of its sides; a sign, a function or a comparison is left out or another; a number is
one more or twice itself; a parameter stands for another of its shape. certify knows neither these nor the subjects.
"""

import argparse
import ast
import collections
import copy
import random

import numpy as np
from planted import PPO, SDE
from test_certify import DPPO, GRPO, NFT

from meander.certify import suite, trainer

TOKENS = """
def grpo_tokens(log_prob, old, reference, advantages, mask, clip_low, clip_high, beta, reduce):
    a, r, d = advantages[:, None], np.exp(log_prob - old), reference - log_prob
    losses = np.maximum(-a * r, -a * np.clip(r, 1 - clip_low, 1 + clip_high))
    losses = (losses + beta * (np.exp(d) - d - 1)) * mask
    if reduce == "sample_mean":
        return (losses.sum(axis=1) / np.maximum(mask.sum(axis=1), 1)).mean()
    return losses.sum() / (np.maximum(mask.sum(), 1) if reduce == "token_mean" else mask.size)
"""
CPS = """
def cps(x, v, next, sigmas, step, noise_level):
    s, p = sigmas[step], sigmas[step + 1]
    n = p * np.sin(noise_level * np.pi / 2)
    mean = (1 - p) * (x - s * v) + np.sqrt(p**2 - n**2) * (x + (1 - s) * v)
    return (-((next - mean) ** 2) / (2 * n**2) - np.log(n) - np.log(2 * np.pi) / 2).mean()
"""
SUBJECTS = {
    "losses/ppo": PPO, "losses/flow_dppo": DPPO, "losses/diffusion_nft": NFT, "losses/grpo_tokens": TOKENS,
    "transitions/sde": SDE, "transitions/cps": CPS, "advantages/flow_grpo": GRPO,
}  # fmt: skip
"""Sources that are right, by what they are judged by."""
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
OTHERS = {"maximum": "minimum", "minimum": "maximum", "mean": "sum", "sum": "mean", "log": "log2", "exp": "expm1",
          "sqrt": "square", "sin": "cos"}  # fmt: skip


def mutants(tree, shapes):
    """Each change of one node: its number, words, and a function of a node that gives what stands for it."""
    for k, n in enumerate(ast.walk(tree)):
        says = ast.unparse(n) if hasattr(n, "lineno") else ""
        if isinstance(n, ast.BinOp):
            for to in (o for o in OPERATORS if type(n.op) in OPERATORS and not isinstance(n.op, o)):
                yield k, f"{says} by {to.__name__}", lambda m, to=to: ast.BinOp(m.left, to(), m.right)
            yield k, f"{says}: its left", lambda m: m.left
            yield k, f"{says}: its right", lambda m: m.right
        if isinstance(n, ast.UnaryOp):
            yield k, f"{says} without its sign", lambda m: m.operand
        if isinstance(n, ast.Constant) and type(n.value) in (int, float):
            for to in {n.value + 1, n.value * 2} - {n.value}:
                yield k, f"{says} is {to}", lambda m, to=to: ast.Constant(to)
        if isinstance(n, ast.Compare) and not isinstance(n.ops[0], ast.Eq):
            for to in (o for o in (ast.Lt, ast.Gt) if not isinstance(n.ops[0], o)):
                yield k, f"{says} by {to.__name__}", lambda m, to=to: ast.Compare(m.left, [to()], m.comparators)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute):
            if n.args:
                yield k, f"{says}: its first", lambda m: m.args[0]
            if to := OTHERS.get(n.func.attr):
                yield k, f"{says} by {to}", lambda m, to=to: ast.Call(
                    ast.Attribute(m.func.value, to, ast.Load()), m.args, m.keywords)  # fmt: skip
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in shapes:
            for to in (s for s in shapes if s != n.id and shapes[s] == shapes[n.id]):
                yield k, f"{to} for {n.id} at {n.lineno}:{n.col_offset}", lambda m, to=to: ast.Name(to, ast.Load())


def changed(tree, chosen):
    """The tree with some of these changes."""
    tree = copy.deepcopy(tree)
    by = {id(n): [f for k, _, f in chosen if k == at] for at, n in enumerate(ast.walk(tree))}

    class Change(ast.NodeTransformer):
        def visit(self, node):
            of, node = by.get(id(node), ()), self.generic_visit(node)
            for f in of[:1]:
                node = f(node)
            return node

    return ast.fix_missing_locations(Change().visit(tree))


def state(title, tree):
    """What certify says of a tree: a state, and words."""
    made = {"np": np}
    try:
        exec(compile(tree, title, "exec"), made)
        with np.errstate(all="ignore"):
            found = trainer.judge(made[title.partition("/")[2]], suite.load()[title], arrays="numpy")[0]
    except (ValueError, TypeError, IndexError, AttributeError, ZeroDivisionError) as fault:
        return "does not run", str(fault)
    wild = found.says.startswith("not finite") or "numbers where there are" in found.says
    return "no number" if wild else found.state, found.says


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("seed", help="what decides the draw")
    options.add_argument("--count", type=int, default=1, help="how many changes at once")
    options.add_argument("--of", type=int, default=40, help="how many mutants of each subject")
    options.add_argument("--subject", action="append", choices=SUBJECTS, help="of which subjects; default of all")
    o, total = options.parse_args(), collections.Counter()
    for title in o.subject or SUBJECTS:
        rng, tree, counts = random.Random(f"{o.seed}{title}"), ast.parse(SUBJECTS[title]), collections.Counter()
        every = list(mutants(tree, {n: s.get("shape", "") for n, s in suite.load()[title].inputs.items()}))
        draws = rng.sample([[m] for m in every], min(o.of, len(every))) if o.count == 1 else [
            rng.sample(every, o.count) for _ in range(o.of)]  # fmt: skip
        for chosen in draws:
            what, says = state(title, changed(tree, chosen))
            counts[what] += 1
            if what == "unexplained":
                print(f"    unexplained: {'; '.join(words for _, words, _ in chosen)}", flush=True)
        print(f"{title}: {', '.join(f'{n} {what}' for what, n in counts.most_common())} of {len(every)}", flush=True)
        total += counts
    print(f"explained: {total['differs']} of {total['differs'] + total['unexplained']}")
