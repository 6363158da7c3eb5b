"""Flow-GRPO in a hundred lines, for people with a loop of their own: the stream in, an adapter out.

    bin/meander up & python pkg/client/python/examples/own_loop.py
"""

import asyncio
import json
import math
import os
import random
import secrets
import string
import sys
from pathlib import Path

import torch
from diffusers import QwenImageTransformer2DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save

import meander

NATS = os.environ.get("MEANDER_URL", "nats://127.0.0.1:4222")
MODEL, RUN = "deploy/models/signs", "own-loop-" + secrets.token_hex(4)
UPDATES, GROUPS, SAMPLES, CLIP = 20, 8, 16, 1e-4

torch.set_num_threads(1)
torch.manual_seed(0)
network = QwenImageTransformer2DModel.from_pretrained(
    MODEL, subfolder="transformer", torch_dtype=torch.float32
).requires_grad_(False)
lora = LoraConfig(
    r=16, lora_alpha=16,
    target_modules=["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
)
network.add_adapter(lora)
parameters = [p for p in network.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.99), weight_decay=0)


def log_probs(batch: meander.Batch, rows: slice) -> torch.Tensor:
    """The log-probs [n, W] of the stored steps under the network as it is; gradients flow."""
    t = batch.torch()
    mask = t["prompt_embeds_mask"][rows]
    longest = int(mask.sum(dim=1).max())  # less padding, the same result
    out = []
    for w in range(t["latents"].shape[1]):
        x, after, sigma = t["latents"][rows, w], t["next_latents"][rows, w], t["sigmas"][rows, w]
        v = network(hidden_states=x, timestep=sigma, encoder_hidden_states=t["prompt_embeds"][rows, :longest],
            encoder_hidden_states_mask=mask[:, :longest],
                    img_shapes=[[(1, 4, 8)]] * len(x), return_dict=False)[0]  # fmt: skip
        a, b, n = (t[name][rows, w, None, None] for name in ("x_coefficient", "v_coefficient", "noise_std"))
        square = ((after.double() - a * x.double() - b * v.double()) / n).square().mean(dim=(1, 2))
        out.append(-square / 2 - n[:, 0, 0].log() - math.log(2 * math.pi) / 2)
    return torch.stack(out, dim=1)


def update(batch: meander.Batch) -> float:
    """One optimizer step on the clipped ratio; returns how far the first ratio is from 1."""
    t, off = batch.torch(names=["log_probs", "advantages"]), 0.0
    optimizer.zero_grad()
    for first in range(0, batch.size, 64):
        rows = slice(first, first + 64)
        new, old, a = log_probs(batch, rows), t["log_probs"][rows], t["advantages"][rows].clamp(-5, 5)
        off = max(off, float((new.detach() - old).exp().sub(1).abs().max()))
        ratio = (new - old).exp()
        torch.maximum(-a * ratio, -a * ratio.clamp(1 - CLIP, 1 + CLIP)).sum().div(t["log_probs"].numel()).backward()
    if off > 1e-5:
        sys.exit(f"the ratio is {off:.1e} from 1: the sampler has other weights")
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    return off


async def push(client: meander.Client) -> int:
    """Hands the adapter, in PEFT's form, to the samplers; returns its version once they make samples with it."""
    state = {f"base_model.model.{k}": v.contiguous() for k, v in get_peft_model_state_dict(network).items()}
    config = {k: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for k, v in lora.to_dict().items()}
    folder = Path(os.environ.get("OUT", "meander-out/own-loop"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(save(state))
    (folder / "adapter_config.json").write_text(json.dumps(config, default=str))
    return await serve(client, folder)


async def serve(client: meander.Client, adapter: Path | None) -> int:
    policy = await meander.policy.push_policy(client, adapter, by="own-loop")
    await meander.policy.taken(client, policy)
    return policy["policy_version"]


async def ask(client: meander.Client, rng: random.Random, number: int, version: int) -> None:
    """Publishes the prompts of a batch, for weights of that version or newer."""
    for i in range(GROUPS):
        text = "".join(rng.choices(string.ascii_uppercase, k=rng.randint(2, 6)))
        await client.publish(
            RUN, f'a {rng.choice(["red", "blue", "green"])} sign that says "{text}"', uid=f"b{number}-{i}",
            group_size=SAMPLES, num_inference_steps=4,
            initial_noise="shared", min_policy_version=version, batch={
                "id": f"b{number}", "groups": GROUPS
            }, reward=[{"name": "glyph"}],
            rollout={
                "sde_step_indices": [0, 1], "noise_level": 0.9, "return_step_indices": [0, 1, 2],
                "return_conditioning": True
            },
        )  # fmt: skip


async def main() -> None:
    rng = random.Random(0)
    async with meander.connect(NATS) as client:
        version = await serve(client, None)  # the checkpoint as it is
        batches = client.batches(RUN, name="own-loop", timeout=600)
        stream = aiter(batches)
        for number in range(1, UPDATES + 1):
            await ask(client, rng, number, version)
            batch = await anext(stream)
            off = update(batch)
            version = await push(client)
            print(
                f"update {number}: reward {batch['rewards'].mean():.3f}, first ratio {off:.0e} from 1, version "
                f"{version}",
                flush=True
            )
        await batches.done(batch)


asyncio.run(main())
