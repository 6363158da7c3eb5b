"""Flow-GRPO of an image model in several processes, by Hugging Face's accelerate and FSDP2: each process trains on its
share of every batch, and the adapter is gathered for the samplers.

    bin/meander up & torchrun --nproc-per-node 2 pkg/client/python/examples/accelerate_signs.py

One process needs no torchrun. Without GPUs the processes talk by gloo.
"""

import argparse
import contextlib
import json
import math
import os
import random
import secrets
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list
from diffusers import QwenImageTransformer2DModel
from peft import LoraConfig
from torch.distributed.fsdp import fully_shard

import meander
from meander.plugs.dataset import BatchDataset

args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
args.add_argument("--url", default=os.environ.get("MEANDER_URL", "nats://127.0.0.1:4222"), help="of the pipeline")
args.add_argument("--model", default="deploy/models/signs", help="the folder that the pipeline serves")
args.add_argument("--lane", default="", help="that serves it (default: the only one)")
args.add_argument("--updates", type=int, default=5)
args.add_argument("--groups", type=int, default=8, help="of a batch, for all processes together (default %(default)s)")
args.add_argument("--samples", type=int, default=8, help="of a group (default %(default)s)")
args.add_argument("--lr", type=float, default=2e-3)
args.add_argument("--seed", type=int, default=0)
args.add_argument("--out", type=Path, help="a folder for the last adapter, log.jsonl and summary.json")
args.add_argument("--held-out", type=Path, help="a file of prompts to rate before and after, in JSON lines")
args.add_argument("--ddp", action="store_true", help="DDP in place of FSDP2")

PATIENCE = 600  # seconds to wait for the pipeline
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]


def network_of(a: argparse.Namespace, accelerator: Accelerator) -> torch.nn.Module:
    """The transformer with a LoRA, sharded over the processes."""
    torch.manual_seed(a.seed)  # the adapters of all processes begin alike
    network = QwenImageTransformer2DModel.from_pretrained(a.model, subfolder="transformer", torch_dtype=torch.float32)
    network.requires_grad_(False).add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS))
    if accelerator.num_processes == 1:
        return network
    if a.ddp:
        return accelerator.prepare(network)
    for block in network.transformer_blocks:
        fully_shard(block)
    return fully_shard(network)


def log_probs(network: torch.nn.Module, t: dict[str, torch.Tensor]) -> torch.Tensor:
    """The log-probs [B, W] of the stored steps under the network as it is, by one pass; gradients flow."""
    b, w = t["log_probs"].shape
    longest = int(t["prompt_embeds_mask"].sum(dim=1).max())  # less padding, the same result
    each = {k: t[k][:, :longest].repeat_interleave(w, dim=0) for k in ("prompt_embeds", "prompt_embeds_mask")}
    x, after, sigma = (t[k].flatten(0, 1) for k in ("latents", "next_latents", "sigmas"))
    shapes = [[(1, 4, 8)]] * (b * w)
    v = network(hidden_states=x, timestep=sigma, encoder_hidden_states=each["prompt_embeds"], img_shapes=shapes,
                encoder_hidden_states_mask=each["prompt_embeds_mask"], return_dict=False)[0]  # fmt: skip
    mean_x, mean_v, n = (t[k].flatten()[:, None, None] for k in ("x_coefficient", "v_coefficient", "noise_std"))
    square = ((after.double() - mean_x * x.double() - mean_v * v.double()) / n).square().mean(dim=(1, 2))
    return (-square / 2 - n[:, 0, 0].log() - math.log(2 * math.pi) / 2).view(b, w)


def ask(client: meander.sync.Client, a: argparse.Namespace, run: str, number: int, version: int) -> None:
    """Publishes the prompts of a batch, for weights of that version or newer."""
    rng = random.Random(f"{a.seed} {number}")
    for i in range(a.groups):
        text = "".join(rng.choices("ABCDEFGHIKLMNOPRSTUVW", k=rng.randint(2, 6)))
        client.publish(
            run, f'a {rng.choice(["red", "blue", "green"])} sign that says "{text}"', uid=f"b{number}-{i}",
            seed=1000 * a.seed + number, model=a.lane, group_size=a.samples, num_inference_steps=4,
            initial_noise="shared", min_policy_version=version, reward=[{"name": "glyph"}],
            batch={"id": f"b{number}", "groups": a.groups}, timeout=PATIENCE,
            rollout={"sde_step_indices": [0, 1], "noise_level": 0.9, "return_conditioning": True},
        )  # fmt: skip


def measure(client: meander.sync.Client | None, a: argparse.Namespace, run: str, version: int) -> float:
    """The mean reward of the held-out prompts, drawn without noise by that version or newer, as one batch. NaN without
    prompts, and in every process but the first."""
    if not client or not a.held_out:
        return math.nan
    asked = [json.loads(line)["prompt"] for line in a.held_out.read_text().splitlines()]
    for i, prompt in enumerate(asked):
        client.publish(
            run, prompt, uid=f"h{i}", seed=1, model=a.lane, group_size=2, num_inference_steps=4, validation=True,
            min_policy_version=version, reward=[{"name": "glyph"}], batch={"id": "held-out", "groups": len(asked)},
            rollout={"sde_type": "ode"}, timeout=PATIENCE,
        )  # fmt: skip
    return float(next(client.batch_events(run))["mean"])


def main(a: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)  # the last block's text stream leads nowhere
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[unused])
    if a.groups < accelerator.num_processes:
        raise SystemExit(f"--groups: {a.groups}; must be one for each of the {accelerator.num_processes} processes")
    first, device = accelerator.is_main_process, accelerator.device
    run = broadcast_object_list(["accelerate-" + secrets.token_hex(4)])[0]
    network = network_of(a, accelerator)
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=a.lr, betas=(0.9, 0.99), weight_decay=0)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(meander.sync.connect(a.url)) if first else None
        if client:
            a.lane = a.lane or meander.sync.policy.policy(client)["lane"]
            version = meander.sync.policy.push_policy(client, None, a.lane)["policy_version"]  # the checkpoint as it is
        began, before = time.monotonic(), measure(client, a, f"{run}-before", version if first else 0)
        if first and a.out:
            a.out.mkdir(parents=True, exist_ok=True)
        log = stack.enter_context(open(a.out / "log.jsonl", "w")) if first and a.out else None
        data = BatchDataset(a.url, run, "trainer", timeout=PATIENCE)
        batches = iter(data.loader())
        for number in range(a.updates):
            if client:
                ask(client, a, run, number, version)
            batch = next(batches)
            t = {k: v.to(device) for k, v in batch.items() if isinstance(v, torch.Tensor)}
            new, old, advantages = log_probs(network, t), t["log_probs"], t["advantages"].clamp(-5, 5)
            off = float((new.detach() - old).exp().sub(1).abs().max())
            # Gradients are means over the processes: what a process adds is divided by the steps of all.
            steps, rewards = accelerator.reduce(torch.tensor([old.numel(), t["rewards"].sum()], device=device))
            loss = -(advantages * (new - old).exp()).sum() / steps * accelerator.num_processes
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            data.done(batch)
            version = meander.accelerate.push_adapter(accelerator, network, client, a.lane, by=run)
            whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            reward = float(rewards / (steps / old.shape[1]))
            print(f"process {accelerator.process_index}: {len(old)} samples, first ratio {off:.0e} from 1", flush=True)
            accelerator.print(f"update {number}: reward {reward:.6f}, norm {float(whole):.8f}, version {version}")
            if log:
                record = {
                    "update": number, "reward": reward, "norm": float(whole), "ratio_off": off, "version": version
                }
                print(json.dumps(record | {"seconds": time.monotonic() - began}), file=log, flush=True)
        after = measure(client, a, f"{run}-after", version)
        if a.held_out:
            accelerator.print(f"held out: mean reward {before:.3f} before, {after:.3f} after {a.updates} updates")
        if a.out:
            meander.accelerate.save_adapter(accelerator, network, a.out)
        if first and a.out:
            summary = {"before": before, "after": after, "updates": a.updates, "seconds": time.monotonic() - began}
            (a.out / "summary.json").write_text(json.dumps(summary))
    accelerator.end_training()


if __name__ == "__main__":
    main(args.parse_args())
