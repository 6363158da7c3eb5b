#!/usr/bin/env python3
"""The other engine of `make bench-sampler`: diffusers' QwenImagePipeline on the CPU, in float32.

It reads one JSON object per line and answers each with one. The first, {"model", "height", "width", "steps",
"true_cfg_scale", "prompt", "negative_prompt"}, is answered by {"engine"}; every other, {"batch", "threads", "seconds"},
by the mean time in seconds of a call of the pipeline, repeated for at least "seconds": {"encode", "denoise", "decode",
"cpu"}, cpu being the time of all threads.

Python packages: deploy/golden/requirements.txt.
"""

import sys
import time

from peer import serve

try:
    import diffusers
    import torch
except ImportError as e:
    sys.exit(f"diffusers_peer.py: {e}; python3 -m pip install --requirement deploy/golden/requirements.txt")


class Peer:
    def __init__(self, config):
        diffusers.utils.logging.disable_progress_bar()
        self.config = config
        self.pipe = diffusers.QwenImagePipeline.from_pretrained(config["model"], dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)
        self.encoding = 0.0
        inner = self.pipe.encode_prompt

        def encode(*args, **kwargs):
            began = time.perf_counter()
            out = inner(*args, **kwargs)
            self.encoding += time.perf_counter() - began
            return out

        self.pipe.encode_prompt = encode

    def paint(self, batch):
        c = self.config
        denoised = 0.0

        def note(pipe, step, timestep, tensors):
            nonlocal denoised
            denoised = time.perf_counter()
            return tensors

        self.encoding = 0.0
        cpu, began = time.process_time(), time.perf_counter()
        self.pipe(
            c["prompt"], negative_prompt=c["negative_prompt"], true_cfg_scale=c["true_cfg_scale"], height=c["height"],
            width=c["width"], num_inference_steps=c["steps"], num_images_per_prompt=batch, callback_on_step_end=note,
        )
        ended = time.perf_counter()
        return {"encode": self.encoding, "denoise": denoised - began - self.encoding, "decode": ended - denoised,
                "cpu": time.process_time() - cpu}

    @torch.inference_mode()
    def measure(self, call):
        torch.set_num_threads(call["threads"])
        runs, until = [], time.perf_counter() + call["seconds"]
        while not runs or time.perf_counter() < until:
            runs.append(self.paint(call["batch"]))
        return {key: sum(run[key] for run in runs) / len(runs) for key in runs[0]}


if __name__ == "__main__":
    serve(Peer, f"diffusers {diffusers.__version__}, PyTorch {torch.__version__}")
