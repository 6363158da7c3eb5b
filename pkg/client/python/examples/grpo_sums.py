"""GRPO of a language model in a hundred lines: sums in, right answers out, an adapter pushed after each batch.

    bin/meander up --model sums & python pkg/client/python/examples/grpo_sums.py

transformers has the weights that learn, meander those that draw: prompts go out, batches of answers with rewards,
advantages and the log-probs of every token come in, and the adapter follows the samplers' next batch. Settings are
arguments: --updates 40 --seed 0.
"""

import argparse
import asyncio
import json
import os
import random
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import meander
from meander.client.tasks import together

Advantages = Callable[
    [meander.Client, argparse.Namespace, meander.TextBatch, dict[str, torch.Tensor]],
    Awaitable[tuple[torch.Tensor, dict[str, float]]]
]

args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
args.add_argument(
    "--url", default=os.environ.get("MEANDER_URL", "nats://127.0.0.1:4222"),
    help="of the pipeline (default %(default)s)"
)
args.add_argument(
    "--model", default="deploy/models/sums", help="the folder that the pipeline serves (default %(default)s)"
)
args.add_argument("--lane", default="sums", help="that serves it (default %(default)s)")
args.add_argument(
    "--out", type=Path, default=Path("meander-out/learn-sums"),
    help="takes the adapter and log.jsonl (default %(default)s)"
)
args.add_argument("--updates", type=int, default=40)
args.add_argument("--prompts", type=int, default=32, help="of a batch (default %(default)s)")
args.add_argument("--samples", type=int, default=8, help="of a prompt (default %(default)s)")
args.add_argument(
    "--held-out", type=int, default=300, help="problems of the evaluations before and after (default %(default)s)"
)
args.add_argument("--whole", action="store_true", help="train all weights, not an adapter, and push all of them")
args.add_argument("--lr", type=float, help="default 2e-3, with --whole 1e-4")
args.add_argument("--patience", type=float, default=600, help="seconds to wait for the pipeline (default %(default)s)")
args.add_argument("--seed", type=int, default=0)


def problem(rng: random.Random) -> tuple[str, str, bool]:
    """A sum or difference of up to three digits, its answer, and whether it is held out: the model has never been
    trained on it."""
    digits = rng.choices((1, 2, 3), (0.12, 0.28, 0.6))[0]
    other = digits if rng.random() < 0.6 else rng.randint(1, digits)
    a, b = rng.sample([rng.randint(10 ** (d - 1) if d > 1 else 0, 10**d - 1) for d in (digits, other)], 2)
    plus = rng.random() < 0.5
    if not plus and a < b and rng.random() < 0.6:
        a, b = b, a
    held_out = max(a, b) >= 100 and (7919 * a + 104729 * b + 31 * plus) % 97 == 0
    return f"{a}{'+' if plus else '-'}{b}=?", str(a + b if plus else a - b), held_out


def problems(rng: random.Random, count: int, held_out: bool) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    while len(found) < count:
        question, answer, apart = problem(rng)
        if apart == held_out:
            found[question] = answer
    return list(found.items())


async def ask(
    client: meander.Client, a: argparse.Namespace, run: str, batch: str, asked: list[tuple[str, str]], version: int,
    **fields: object,
) -> None:
    """Publishes a batch of problems, for weights of that version or newer."""
    await together(
        client.publish(
            run, question, timeout=a.patience, model=a.lane, uid=f"{batch}-{i}", group_size=a.samples,
            batch={"id": batch, "groups": len(asked)}, min_policy_version=version,
            text={"temperature": 1.0, "tokens_per_event": 8}, reward=[{"name": "exact_match", "ground_truth": answer}],
            advantage={"estimator": "grpo"}, **fields,
        )
        for i, (question, answer) in enumerate(asked)
    )  # fmt: skip


async def accuracy(
    client: meander.Client, a: argparse.Namespace, run: str, asked: list[tuple[str, str]], version: int
) -> float:
    """The share of right answers at temperature 1, drawn and rated by the pipeline. Runs of one seed draw the same
    noise."""
    await ask(client, a, run, "held-out", asked, version, seed=1, validation=True)
    events = client.batch_events(run)
    try:
        return float((await asyncio.wait_for(anext(events), a.patience))["mean"])
    except asyncio.TimeoutError:
        raise TimeoutError(f"run {run}: the held-out problems were not answered in {a.patience:g} s") from None


def log_probs(network: torch.nn.Module, t: dict[str, torch.Tensor]) -> torch.Tensor:
    """Those of the responses' tokens [B, R] under the network as it is; gradients flow."""
    logits = network(
        input_ids=t["input_ids"], attention_mask=t["attention_mask"], position_ids=t["position_ids"]
    ).logits
    first = t["prompts"].shape[1]  # the logits in front of a token are its own
    return logits[:, first - 1 : -1].log_softmax(-1).gather(-1, t["responses"][..., None])[..., 0]


async def rewarded(
    client: meander.Client, a: argparse.Namespace, batch: meander.TextBatch, t: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The advantages of a batch's tokens [B, R], and figures for the log: those of the pipeline."""
    return t["advantages"], {}


async def main(a: argparse.Namespace, advantages: Advantages = rewarded, name: str = "learn-sums") -> None:
    torch.manual_seed(a.seed)
    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32)
    if not a.whole:
        network = get_peft_model(network, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))
    rate = a.lr or (1e-4 if a.whole else 2e-3)
    optimizer = torch.optim.AdamW(
        [p for p in network.parameters() if p.requires_grad], lr=rate, betas=(0.9, 0.95), weight_decay=0
    )
    rng, run, began = random.Random(a.seed), f"{name}-{secrets.token_hex(4)}", time.monotonic()
    held_out = problems(random.Random(7), a.held_out, True)
    a.out.mkdir(parents=True, exist_ok=True)
    async with meander.connect(a.url) as client:
        pushed = await meander.policy.push_policy(client, None, a.lane, by=run)  # the checkpoint as it is
        before = await accuracy(client, a, f"{run}-before", held_out, pushed["policy_version"])
        print(f"held out, temperature 1: {before:.3f} right before", flush=True)
        batches = client.batches(run, name="trainer", timeout=a.patience)
        with open(a.out / "log.jsonl", "w") as log:
            stream = aiter(batches)
            for update in range(a.updates):
                asked = problems(rng, a.prompts, False)
                await ask(client, a, run, f"b{update}", asked, pushed["policy_version"], seed=a.seed + update)
                batch = await anext(stream)
                t = batch.torch()
                new, mask = log_probs(network, t), t["response_mask"]
                # The same weights, on both sides: every ratio is 1. The push of the update before has arrived.
                off = batch.check(new.detach().numpy())
                ratio = (new - t["log_probs"]).exp()
                weights, figures = await advantages(client, a, batch, t)
                loss = -(weights * ratio * mask).sum() / mask.sum()  # one step for each batch: there is nothing to clip
                optimizer.zero_grad()
                loss.backward()
                norm = float(torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0))
                optimizer.step()
                network.save_pretrained(a.out / ("weights" if a.whole else "adapter"))
                if a.whole:  # a head that is tied to the embedding is no parameter of its own
                    pushed = await meander.policy.push_weights(
                        client, dict(network.named_parameters()), a.lane, by=run)
                else:
                    pushed = await meander.policy.push_policy(client, a.out / "adapter", a.lane, by=run)
                if "entropies" in batch:  # not all servers that draw tokens give them
                    entropies = batch["entropies"] * batch["response_mask"]
                    figures["entropy"] = float(entropies.sum() / batch["response_mask"].sum())
                record = {
                    "update": update, "reward": float(batch["rewards"].mean()), "ratio_off": off.max_abs,
                    "furthest_token": off.worst, "norm": norm, "made_by": int(batch["policy_version"].max()),
                    "pushed": pushed["policy_version"], "seconds": time.monotonic() - began, **figures,
                }
                print(json.dumps(record), file=log, flush=True)
                shown = "".join(f", {k} {v:.4f}" for k, v in figures.items())
                print(
                    f"update {update}: {record['reward']:.3f} right{shown}, first ratio {off.max_abs:.0e} from 1 (a "
                    f"token {off.worst:.0e}), version {record['pushed']}",
                    flush=True
                )
        await batches.done(batch)
        after = await accuracy(client, a, f"{run}-after", held_out, pushed["policy_version"])
        summary = {
            "before": before, "after": after, "held_out": a.held_out, "samples": a.samples, "updates": a.updates,
            "seconds": time.monotonic() - began
        }
        (a.out / "summary.json").write_text(json.dumps(summary))
        print(
            f"held out, temperature 1: {before:.3f} right before, {after:.3f} after {a.updates} updates, "
            f"{summary['seconds']:.0f} s"
        )


if __name__ == "__main__":
    try:
        asyncio.run(main(args.parse_args()))
    except (meander.RatioOff, meander.Refused, meander.policy.NoPolicy, ConnectionError, TimeoutError) as e:
        sys.exit(f"grpo_sums: {e}")
