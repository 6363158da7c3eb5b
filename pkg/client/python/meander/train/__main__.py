"""meander-train: the command."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import sys
from pathlib import Path

from .config import Config, add_flags

_HELP = """Trains an adapter (LoRA) of a served model by Flow-GRPO, from the stream of a meander pipeline alone: publishes prompts,
reads groups with their latents, log-probs and advantages, takes a step, pushes the adapter, which the samplers take over
between two steps, and evaluates on held-out prompts through the same pipeline.

  meander up &
  meander-train --prompts deploy/learn/prompts.txt --held-out deploy/models/signs/held_out.txt --out meander-out/learn

Run again with the same --out it goes on where it was, after a crash too. --follow reads a run that another trainer publishes, for a second opinion.

In --out: log.jsonl, log.csv, tensorboard/, curve.png, before.png and after.png, checkpoint/ and best/, the best adapter
by the reader that is not rewarded (--gold), in PEFT's form."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="meander-train", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    try:
        config = Config(**vars(parser.parse_args()))
        config.trained, config.rewards()
    except ValueError as e:
        parser.error(str(e))
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        from .loop import train
    except ImportError as e:
        sys.exit(f"meander-train: {e}; pip install 'meander-client[train]' has what it needs")
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(dataclasses.asdict(config) | {"token": ""}, indent=1) + "\n")
    try:
        summary = asyncio.run(train(config))
    except KeyboardInterrupt:
        sys.exit(f"\ninterrupted; the same command goes on from {out}/checkpoint")
    except (ValueError, RuntimeError, TimeoutError, OSError, FloatingPointError) as e:
        sys.exit(f"meander-train: {e}")
    if summary:
        print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
