#!/usr/bin/env python3
"""Trains the sums checkpoint from scratch: about ten minutes on one core.

    train.py tokenizer | fit | export | measure | all   [--work DIR] [--out DIR] [--seed N]

Requirements: torch, transformers, tokenizers, safetensors.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

STAGES = ("tokenizer", "fit", "export", "measure")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=(*STAGES, "all"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/sums"), help="folder for what training leaves behind")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted `fit`")
    parser.add_argument(
        "--step", type=int, default=1520, help="the save that `export` writes: 700, 900, 1100, 1300 or 1520"
    )
    args = parser.parse_args()

    import torch
    import transformers

    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)

    def log(line: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {line}"
        print(line, flush=True)
        with open(args.work / "train.log", "a") as f:
            f.write(line + "\n")

    log(
        f"{args.stage}: seed {args.seed}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{args.threads} thread(s)"
    )
    for stage in STAGES if args.stage == "all" else (args.stage,):
        if stage == "tokenizer":
            from trainer import tokens

            tokens.write(args.out)
        elif stage == "fit":
            from trainer import fit

            fit.train(args.work, args.out, args.seed, args.resume, log)
        elif stage == "export":
            from trainer import export

            export.write(args.work, args.out, args.step, log)
        elif stage == "measure":
            from trainer import measure

            measure.report(args.out, args.seed, log)


if __name__ == "__main__":
    main()
