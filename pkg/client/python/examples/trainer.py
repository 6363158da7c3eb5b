"""The rollout side of training: batches as arrays, the check that the first ratio is 1, and the loss of a policy that
has not moved.

    meander up --model synthetic &
    python examples/trainer.py
"""

import asyncio
import secrets

import numpy as np

import meander

PROMPTS = ["a red fox", "a blue fox", "a green fox"]


def log_probs(batch: meander.Batch) -> np.ndarray:
    """Those of the trainer's policy, [B, W]. A trainer evaluates its network on batch["latents"] here, at
    batch["sigmas"] and with batch["prompt_embeds"]; this one takes the velocities that the sampler stored for
    debugging."""
    velocity = [[meander.tensor(step["debug"][0]["tensor"]) for step in sample.trained] for sample in batch.samples]
    return batch.recompute_log_prob(np.array(velocity))


async def main() -> None:
    async with meander.connect() as client:
        run = "trainer-" + secrets.token_hex(4)
        for step in range(2):
            for i, prompt in enumerate(PROMPTS):
                await client.publish(
                    run, prompt, uid=f"{step}-{i}", group_size=4, reward=[{"name": "synthetic"}],
                    rollout={
                        "sde_window": {"size": 2, "range": [0, 5]}, "debug": ["model_output"],
                        "return_conditioning": True
                    },
                    advantage={"std": "global"}, batch={"id": f"step-{step}", "groups": len(PROMPTS), "step": step},
                )
        batches = client.batches(run, "trainer", log_probs=log_probs, timeout=60)
        async for batch in batches:
            out = meander.loss.ppo(batch["log_probs"].ravel(), log_probs(batch).ravel(), batch["advantages"].ravel())
            print(f"{batch.name}: {batch.size} samples, latents {batch['latents'].shape}, "
                  f"embeddings {batch['prompt_embeds'].shape}, "
                  f"mean reward {batch['rewards'].mean():.4f}, loss {out['loss']:+.2e}, ratio {out['ratio_mean']:.9f}")
            if batch.name == "step-1":
                await batches.done(batch)  # going on does it, too; what is not done comes again
                break
        print(batches.health)


asyncio.run(main())
