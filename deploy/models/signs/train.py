#!/usr/bin/env python3
"""Trains the sign-painting checkpoint from scratch, in stages that can be run alone, side by side or again.

    train.py vae-joint | cache | vae-decoder | flow | export | all   [--work DIR] [--out DIR] [--seed N]

`vae-decoder` and `flow` both need only `cache`, so they may run at the same time, one core each. Requirements: torch,
diffusers, transformers, numpy, Pillow, a C++ compiler for --compile, tesseract for the reading rates, and the Debian
packages fonts-dejavu-core, fonts-liberation and fonts-freefont-ttf.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

STAGES = ("vae-joint", "cache", "vae-decoder", "flow", "export")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=(*STAGES, "all"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/signs"), help="folder for what training leaves behind")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="torch.compile: 1.4 times as fast, needs a C++ compiler")
    parser.add_argument("--vae-steps", type=int, default=9000)
    parser.add_argument("--decoder-steps", type=int, default=8000)
    parser.add_argument("--images", type=int, default=32768, help="encoded images that the flow model learns from")
    parser.add_argument("--flow-steps", type=int, default=12000)
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted `flow`")
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)

    def log(line: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {line}"
        print(line, flush=True)
        with open(args.work / f"{args.stage}.log", "a") as f:
            f.write(line + "\n")

    log(f"{args.stage}: seed {args.seed}, torch {torch.__version__}, {args.threads} thread(s), compile {args.compile}")
    for stage in STAGES if args.stage == "all" else (args.stage,):
        if stage == "vae-joint":
            from trainer import fit_vae

            fit_vae.train_joint(args.work, args.seed, args.vae_steps, args.compile, log)
        elif stage == "cache":
            from trainer import fit_flow

            fit_flow.write_cache(args.work, args.seed, args.images, log)
        elif stage == "vae-decoder":
            from trainer import fit_vae

            fit_vae.train_decoder(args.work, args.seed, args.decoder_steps, args.compile, log)
        elif stage == "flow":
            from trainer import fit_flow

            fit_flow.train(args.work, args.seed, args.flow_steps, args.compile, log, args.resume)
        elif stage == "export":
            from trainer import export

            export.write(args.work, args.out, log)


if __name__ == "__main__":
    main()
