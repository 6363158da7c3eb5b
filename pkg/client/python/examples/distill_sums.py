"""On-policy distillation of a language model: the student draws answers to sums, a teacher says how likely it finds
each of their tokens, and no reward is looked at.

    bin/meander up --model sums &
    bin/meander teacher --nats nats://127.0.0.1:4222 --model sums --adapter TEACHER --name teacher &
    python pkg/client/python/examples/distill_sums.py --teacher teacher

The loop is that of grpo_sums.py beside it; only the advantages differ. A token's is -(log p_student - log p_teacher),
so its mean over what the student draws is the divergence KL(student || teacher) of each token, which falls.
"""

import argparse
import asyncio
import sys
from pathlib import Path

import torch
from grpo_sums import args, main

import meander

args.description = __doc__
args.add_argument("--teacher", default="teacher", help="the name of the teacher (default %(default)s)")
args.set_defaults(out=Path("meander-out/learn-distill"))


async def taught(
    client: meander.Client, a: argparse.Namespace, batch: meander.TextBatch, t: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The advantages of a batch's tokens [B, R], by the teacher. The batch's log-probs are the student's: it drew the
    tokens at temperature 1."""
    teacher = torch.from_numpy(await client.teacher_log_probs(a.teacher, batch, timeout=a.patience))
    apart, mask = t["log_probs"] - teacher, t["response_mask"]
    return -apart, {"kl": float((apart * mask).sum() / mask.sum())}


if __name__ == "__main__":
    try:
        asyncio.run(main(args.parse_args(), taught, "learn-distill"))
    except (
        meander.NoTeacher, meander.Unscored, meander.RatioOff, meander.Refused, meander.policy.NoPolicy,
        ConnectionError, TimeoutError
    ) as e:
        sys.exit(f"distill_sums: {e}")
