#!/usr/bin/env python3
"""The other side of `make bench-e2e`: a plain loop of diffusers on the CPU, in float32, in one process.

It is what a trainer without a pipeline of services has: QwenImagePipeline with Flow-GRPO's stochastic step in place of
the scheduler's, the states and log-probs of all steps in memory, images by Pillow, jpeg_compressibility of each, and
the advantages of each group. A prompt is encoded once for its group. Nothing is written to a disk.

It reads one JSON object per line and answers each with one. The first, {"model", "height", "width", "steps",
"noise_level", "negative_prompt"}, is answered by {"engine"}; every other, {"prompts", "group_size", "batch",
"true_cfg_scale", "seed"}, by what all groups took, in seconds: {"seconds", "cpu"}, cpu being the time of all threads,
and {"samples", "reward"}, the mean reward.

Python packages: deploy/golden/requirements.txt.
"""

import io
import math
import sys
import time

from peer import serve

try:
    import diffusers
    import torch
except ImportError as e:
    sys.exit(f"loop_peer.py: {e}; python3 -m pip install --requirement deploy/golden/requirements.txt")


class Stochastic(diffusers.FlowMatchEulerDiscreteScheduler):
    """The scheduler with the SDE step of Flow-GRPO (arXiv 2505.05470): it keeps states and log-probs of a batch."""

    noise_level = 0.7

    def begin(self, generator):
        self.generator, self.states, self.log_probs = generator, [], []

    def step(self, model_output, timestep, sample, return_dict=False):
        at = self.index_for_timestep(timestep)
        sigma, after = float(self.sigmas[at]), float(self.sigmas[at + 1])
        d = after - sigma
        g = self.noise_level * math.sqrt(sigma / (1 - (sigma if sigma < 1 else float(self.sigmas[1]))))
        drift = g * g / (2 * sigma)
        mean = sample * (1 + drift * d) + model_output * (1 + drift * (1 - sigma)) * d
        std = g * math.sqrt(-d)
        noise = torch.randn(sample.shape, generator=self.generator)
        after = mean + std * noise
        density = -((after - mean) ** 2) / (2 * std * std) - math.log(std) - 0.5 * math.log(2 * math.pi)
        self.states.append(sample)
        self.log_probs.append(density.mean(dim=tuple(range(1, density.ndim))))
        return (after,)


def jpeg_compressibility(image):
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=95)
    return -len(file.getvalue()) / 1000


class Peer:
    def __init__(self, config):
        diffusers.utils.logging.disable_progress_bar()
        diffusers.utils.logging.set_verbosity_error()  # it says that prompts have no masks
        torch.set_num_threads(1)
        self.config = config
        self.pipe = diffusers.QwenImagePipeline.from_pretrained(config["model"], dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)
        self.pipe.scheduler = Stochastic.from_config(self.pipe.scheduler.config)
        self.pipe.scheduler.noise_level = config["noise_level"]

    def group(self, prompt, call):
        """States [n, T + 1, S, C], log-probs [n, T], rewards and advantages [n] of one prompt."""
        c, pipe, n = self.config, self.pipe, call["group_size"]
        guided = call["true_cfg_scale"] > 1
        positive = pipe.encode_prompt(prompt)
        negative = pipe.encode_prompt(c["negative_prompt"]) if guided else (None, None)
        states, log_probs, rewards = [], [], []
        for first in range(0, n, call["batch"]):
            rows = min(call["batch"], n - first)
            pipe.scheduler.begin(self.generator)
            images = pipe(
                prompt_embeds=positive[0], prompt_embeds_mask=positive[1], negative_prompt_embeds=negative[0],
                negative_prompt_embeds_mask=negative[1], true_cfg_scale=call["true_cfg_scale"], height=c["height"],
                width=c["width"], num_inference_steps=c["steps"], num_images_per_prompt=rows, generator=self.generator,
                callback_on_step_end=self.keep,
            ).images
            states.append(torch.stack([*pipe.scheduler.states, self.last], dim=1))
            log_probs.append(torch.stack(pipe.scheduler.log_probs, dim=1))
            rewards += [jpeg_compressibility(image) for image in images]
        rewards = torch.tensor(rewards)
        return torch.cat(states), torch.cat(log_probs), rewards, (rewards - rewards.mean()) / (rewards.std() + 1e-4)

    def keep(self, pipe, step, timestep, tensors):
        self.last = tensors["latents"]
        return tensors

    @torch.inference_mode()
    def measure(self, call):
        self.generator = torch.Generator().manual_seed(call["seed"])
        cpu, began = time.process_time(), time.perf_counter()
        groups = [self.group(prompt, call) for prompt in call["prompts"]]
        took, used = time.perf_counter() - began, time.process_time() - cpu
        rewards = torch.cat([group[2] for group in groups])
        if not all(t.isfinite().all() for group in groups for t in group):
            raise ValueError("a group has numbers that are not finite")
        return {"seconds": took, "cpu": used, "samples": len(rewards), "reward": float(rewards.mean())}


if __name__ == "__main__":
    serve(Peer, f"diffusers {diffusers.__version__}, PyTorch {torch.__version__}")
