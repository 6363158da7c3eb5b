#!/usr/bin/env python3
"""What a step costs by a family written by hand, by the pipeline as a whole, and in the pipeline itself.

    torch_families.py [--classes krea2] [--rounds 15] [--device cpu] [--width 192]

Folders of random weights whose network is most of a step. The three take turns in one process; a turn is a step of all
samples with guidance. Processor time on a CPU, time elsewhere: medians, and medians of the ratios of each round.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "pkg/client/python/tests/torch_engine"))
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", DIFFUSERS_OFFLINE="1")

try:
    import numpy as np
    import tiny
    import torch
    from meander.torch import families
    from meander.torch.engine import Settings, make_engine
    from meander.torch.family import Size
    from meander.torch.folder import Folder
    from meander.torch.server import _keep_memory
except ImportError as e:
    sys.exit(f"torch_families.py: {e}; python3 -m pip install './pkg/client/python[torch]'")

STEPS, LAYERS, SIGMA = 4, 4, 0.6
PROMPTS = [
    "a red cat on a mat", "a blue sign", "the quick brown fox jumps over the dog", "0123", "a lazy dog", "hello",
    "a sign that says hello", "a blue cat on a red mat over a sign",
]  # fmt: skip
# Rows, and how many prompts they have.
CASES = ((1, 1), (8, 1), (8, 8))


def _axes(head):
    """How a head is divided among time, rows and columns."""
    return [head // 4, head // 8 * 3, head // 8 * 3]


def _one(**more):
    """Of networks with blocks of one kind; more: by the width, such as that of their inner layers."""
    return lambda w: {"num_layers": LAYERS, "attention_head_dim": w // 4} | {k: f(w) for k, f in more.items()}


SIZE = Size(1, 256, 256)
# What widens the tiny network of a class, and guidance as the pipeline has it.
CLASSES = {
    "qwen-image": (_one(axes_dims_rope=lambda w: _axes(w // 4)), {"true_cfg_scale": 4.0, "negative_prompt": " "}),
    "krea2": (
        _one(axes_dims_rope=lambda w: _axes(w // 4), intermediate_size=lambda w: 3 * w // 2), {"guidance_scale": 4.5}
    ),
}


class Turns:
    """The three ways of a class."""

    def __init__(self, name, folder, device):
        self.size, self.call = SIZE, CLASSES[name][1]
        self.by_hand, self.whole = (self._engine(folder, device, generic) for generic in (False, True))
        self.pipe = self.whole.family.pipe
        self.guidance = self.whole.family.card()["pipeline"]["guidance"]
        self.card = self.by_hand.family.card()
        self.x = np.random.default_rng(0).standard_normal((8, *self.by_hand.family.latent_shape(self.size)), np.float32)

    def _engine(self, folder, device, generic):
        engine = make_engine(families.find(Folder(folder), generic), Settings(device, "f32", threads=1))
        engine.within(engine.check_decoder)
        return engine

    def of(self, rows, prompts):
        """A step of each way, by its name."""
        texts = [PROMPTS[i % prompts] for i in range(rows)]
        arguments = {k: v for k, v in self.call.items() if k != self.guidance}
        size = vars(self.size)
        recipes = [
            {
                "prompts": [[t]],
                "truncate": False,
                "arguments": arguments,
                "guidance": self.call[self.guidance],
                "steps": STEPS,
                **size,
            }
            for t in texts
        ]
        whole = [self.whole.within(lambda r=r: self.whole.encode(**r))[0]["items"][0]["handle"] for r in recipes]
        items = self.by_hand.encode([[t] for t in texts] + [[self.card["negative_prompt"]]], False)[0]["items"]
        *hand, against = [item["handle"] for item in items]
        guided = self.card["true_cfg_scale"] > 1 or "negative_prompt" in self.call
        both, states = (hand + [against] * rows, list(range(rows)) * 2) if guided else (hand, list(range(rows)))
        of_network = [self.card["guidance"]] * len(both)
        x = {"x": self.x[:rows]}
        shape = {"x": self.x[:rows].reshape(rows, *self.whole.family.latent_shape(self.size))}
        sizes = {"height": self.size.height, "width": self.size.width}
        count = "num_images_per_prompt"
        own = {"prompt": texts, **self.call} if prompts > 1 else {"prompt": texts[0], count: rows, **self.call}
        if prompts > 1 and "negative_prompt" in self.call:
            own["negative_prompt"] = [self.call["negative_prompt"]] * rows

        return {
            "by hand": lambda: self.by_hand.velocity(states, [SIGMA] * len(both), both, of_network, self.size, "", x),
            "whole": lambda: self.whole.within(
                lambda: self.whole.velocity([], [SIGMA] * rows, whole, [0.0] * rows, self.size, "", shape)
            ),
            "pipeline": lambda: self.pipe(**own, **sizes, num_inference_steps=STEPS, output_type="latent"),
        }


@torch.no_grad()
def measure(turns, rounds, clock):
    """Milliseconds of a step by way, one for each round."""
    out = {way: [] for way in turns}
    for n in range(rounds + 1):
        for way, step in sorted(turns.items(), reverse=n % 2 > 0):
            began = clock()
            step()
            if n:  # the first one warms up
                out[way].append(1e3 * (clock() - began) / (STEPS if way == "pipeline" else 1))
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--classes", default=",".join(CLASSES), help="of these, with commas (default: all)")
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--device", default="cpu")
    p.add_argument("--width", type=int, default=192, help="channels of the networks, a multiple of 64; 0: tiny ones")
    a = p.parse_args()
    _keep_memory()  # as the worker does
    clock = time.process_time if a.device == "cpu" else time.perf_counter
    print("| class | samples | prompts | by hand ms | whole ms | pipeline ms | whole to hand | whole to pipeline |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in a.classes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            pipe = tiny.PIPELINES[name]()
            if a.width:
                config = dict(pipe.transformer.config) | CLASSES[name][0](a.width)
                pipe.register_modules(transformer=tiny.wide(type(pipe.transformer).from_config(config)))
            pipe.save_pretrained(folder)
            settings = {**vars(SIZE), "num_inference_steps": STEPS}
            Path(folder, "meander.json").write_text(json.dumps(settings))
            turns = Turns(name, folder, a.device)
        turns.pipe.set_progress_bar_config(disable=True)
        for rows, prompts in CASES:
            ms = measure(turns.of(rows, prompts), a.rounds, clock)
            middle = {way: statistics.median(v) for way, v in ms.items()}
            ratio = {
                way: statistics.median(w / o for w, o in zip(ms["whole"], ms[way], strict=True))
                for way in ("by hand", "pipeline")
            }
            print(
                f"| {name} | {rows} | {prompts} | {middle['by hand']:.0f} | {middle['whole']:.0f} "
                f"| {middle['pipeline']:.0f} | **{ratio['by hand']:.2f}** | {ratio['pipeline']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
