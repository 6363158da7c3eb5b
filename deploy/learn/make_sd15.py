#!/usr/bin/env python3
"""Writes a tiny folder of Stable Diffusion 1.5 with random weights, as the tests build it, and prompts of animals, as
in DDPO (Black et al. 2023): to train on, to validate on and to test on. make learn-ddpo takes them."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "pkg/client/python/tests/torch_engine"))

import tiny_whole  # noqa: E402

ANIMALS = """cat dog horse monkey rabbit zebra spider bird sheep deer cow goat lion tiger bear raccoon fox wolf lizard
beetle ant butterfly fish shark whale dolphin squirrel mouse rat snake turtle frog chicken duck goose bee pig turkey fly
llama camel bat gorilla hedgehog kangaroo""".split()

out = Path(sys.argv[1])
if not (out / "model/meander.json").exists():
    out.mkdir(parents=True, exist_ok=True)
    tiny_whole.write(out, "sd15")["sd15"].rename(out / "model")
    (out / "model/meander.json").write_text(json.dumps({"height": 32, "width": 32, "num_inference_steps": 8}))
for k, name in enumerate(("test", "held_out", "prompts")):
    (out / f"{name}.txt").write_text("\n".join(f"a photo of a {a}" for a in ANIMALS[k::3]) + "\n")
