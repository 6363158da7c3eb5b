"""The rollout side of a training step: one batch, its groups, and the loss that an unmoved policy has.

    meander up --model synthetic &
    python examples/trainer.py
"""

import asyncio

import numpy as np

import meander

PROMPTS = ["a red fox", "a blue fox", "a green fox"]


async def main() -> None:
    async with meander.connect() as client:
        run = "trainer"
        batch_id = f"step-{np.random.randint(1 << 30)}"
        for i, prompt in enumerate(PROMPTS):
            await client.publish(
                run, prompt, uid=f"{batch_id}-{i}", group_size=4, reward=[{"name": "synthetic"}],
                rollout={"sde_window": {"size": 2, "range": [0, 5]}, "latents_dtype": "BF16"},
                advantage={"std": "global"}, batch={"id": batch_id, "groups": len(PROMPTS)},
            )
        async for batch in client.batches(run):
            if batch["batch"] == batch_id:
                break
        print(f"batch {batch['batch']}: {batch['samples']} samples, mean reward {batch['mean']:.4f}")
        old, advantages = [], []
        for uid in batch["uids"]:
            group = await client.group(run, uid)
            for sample in group.samples:
                print(f"  {uid} #{sample.member['sample_index']}  reward {sample.member['reward']:.4f}  advantage {sample.advantage:+.3f}  steps {[s['step_index'] for s in sample.trained]}")
                for step in sample.trained:
                    # A trainer evaluates its policy on step["latents"] here.
                    old.append(step["log_prob"])
                    advantages.append(sample.advantage)
        out = meander.loss.ppo(old, old, advantages)
        print(f"loss {out['loss']:+.6f}, ratio {out['ratio_mean']:.6f} over {len(old)} steps")


asyncio.run(main())
