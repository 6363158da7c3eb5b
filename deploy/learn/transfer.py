#!/usr/bin/env python3
"""Measures an adapter outside meander: diffusers draws the test's prompts with the checkpoint alone, and with the
adapter by peft, from the same noise; tesseract reads both.

    transfer.py FOLDER... [--model DIR] [--prompts FILE] [--steps 4] [--seed 500] [--samples 2]

FOLDER: an adapter in PEFT's form, as best/ of meander-train. Standard errors are of the paired differences.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy/models/signs"))

from eval import paint  # noqa: E402
from trainer import export, ocr, render  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapters", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--model", type=Path, default=ROOT / "deploy/models/signs")
    parser.add_argument("--prompts", type=Path, default=ROOT / "deploy/models/signs/held_out.txt")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=500)
    parser.add_argument("--samples", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    prompts = args.prompts.read_text().splitlines() * args.samples
    base = None
    for folder in [None, *args.adapters]:
        pipeline = export.load_pipeline(args.model)
        if folder is not None:
            attach(pipeline.transformer, folder)
        texts = [render.text_in(p) for p in prompts]
        read = ocr.read(paint(pipeline, prompts, args.steps, 1.0, args.seed), texts)
        right = np.array([a == b for a, b in zip(read, texts, strict=True)], float)
        line = f"{folder or 'the checkpoint'}, {args.steps} steps: tesseract reads {right.mean():.3f} of {len(right)}"
        if base is None:
            base = right
        else:
            gained = right - base
            line += f", {gained.mean():+.3f} +- {gained.std(ddof=1) / len(gained) ** 0.5:.3f}"
        print(line, flush=True)


def attach(transformer: torch.nn.Module, folder: Path) -> None:
    """Adds the LoRA of a folder to a transformer of diffusers. ValueError: some of it fits nowhere."""
    transformer.add_adapter(LoraConfig.from_pretrained(folder), adapter_name="kept")
    state = load_file(folder / "adapter_model.safetensors")
    state = {name.removeprefix("base_model.model."): value for name, value in state.items()}
    outcome = set_peft_model_state_dict(transformer, state, adapter_name="kept")
    if outcome.unexpected_keys:
        raise ValueError(f"{folder}: {outcome.unexpected_keys[0]} and others fit nowhere")


if __name__ == "__main__":
    main()
