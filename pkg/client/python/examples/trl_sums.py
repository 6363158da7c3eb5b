"""GRPO of a language model with TRL's GRPOTrainer: the pipeline draws and rates the answers, TRL trains a LoRA.

    bin/meander up --model sums & python pkg/client/python/examples/trl_sums.py

The problems and the evaluations are those of grpo_sums.py beside it.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from grpo_sums import accuracy, problems
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import meander

args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
args.add_argument("--url", default=os.environ.get("MEANDER_URL", "nats://127.0.0.1:4222"), help="of the pipeline")
args.add_argument("--model", default="deploy/models/sums", help="the folder that the pipeline serves")
args.add_argument("--lane", default="sums", help="that serves it")
args.add_argument(
    "--out", type=Path, default=Path("meander-out/learn-trl"), help="takes log.jsonl (default %(default)s)"
)
args.add_argument("--updates", type=int, default=40)
args.add_argument("--prompts", type=int, default=32, help="of a batch (default %(default)s)")
args.add_argument("--samples", type=int, default=8, help="of a prompt (default %(default)s)")
args.add_argument("--held-out", type=int, default=300, help="problems of the evaluations before and after")
args.add_argument("--lr", type=float, default=2e-3)
args.add_argument("--patience", type=float, default=600, help="seconds to wait for the pipeline (default %(default)s)")
args.add_argument("--seed", type=int, default=0)


async def measure(a: argparse.Namespace, run: str, version: int) -> float:
    """The share of right answers on problems that are held out."""
    async with meander.connect(a.url) as client:
        return await accuracy(client, a, run, problems(random.Random(7), a.held_out, True), version)


def main(a: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    began = time.monotonic()
    asked = dict(problems(random.Random(a.seed), a.prompts * a.updates, False))

    def fields(prompt: str) -> dict[str, object]:
        """What TRL does not hand over: how the answer to a prompt is rated."""
        return {"reward": [{"name": "exact_match", "ground_truth": asked[prompt]}], "text": {"tokens_per_event": 8}}

    rollouts = meander.trl.Rollouts(a.url, a.lane, fields=fields)
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(), seed=a.seed, use_cpu=not torch.cuda.is_available(), bf16=False, logging_steps=1,
        per_device_train_batch_size=a.prompts * a.samples, num_generations=a.samples, max_steps=a.updates,
        max_completion_length=16, temperature=1.0, learning_rate=a.lr, lr_scheduler_type="constant", adam_beta2=0.95,
        max_grad_norm=1.0, beta=0.0, loss_type="bnpo", gradient_checkpointing=False, report_to=[], save_strategy="no",
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32), args=settings,
        processing_class=AutoTokenizer.from_pretrained(a.model), reward_funcs=meander.trl.reward, rollout_func=rollouts,
        train_dataset=Dataset.from_list([{"prompt": p} for p in asked]),
        peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"),
    )  # fmt: skip
    rollouts.follow(trainer)
    before = asyncio.run(measure(a, f"{rollouts.run}-before", rollouts.version))
    print(f"held out, temperature 1: {before:.3f} right before", flush=True)
    trainer.train()
    after = asyncio.run(measure(a, f"{rollouts.run}-after", rollouts.version))
    a.out.mkdir(parents=True, exist_ok=True)
    log = [
        {"update": i, "reward": h["reward"], "entropy": h["entropy"], "norm": h["grad_norm"], "seconds": h["step_time"]}
        for i, h in enumerate(trainer.state.log_history)
        if "reward" in h
    ]
    (a.out / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in log))
    summary = {
        "before": before,
        "after": after,
        "held_out": a.held_out,
        "samples": a.samples,
        "updates": a.updates,
        "seconds": time.monotonic() - began,
    }
    (a.out / "summary.json").write_text(json.dumps(summary | {"again": rollouts.again}))
    print(f"held out, temperature 1: {before:.3f} right before, {after:.3f} after, {summary['seconds']:.0f} s")
    rollouts.close()


if __name__ == "__main__":
    try:
        main(args.parse_args())
    except (meander.Refused, meander.trl.Unanswered, ConnectionError, TimeoutError) as e:
        sys.exit(f"trl_sums: {e}")
