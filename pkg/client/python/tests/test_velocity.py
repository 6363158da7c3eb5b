"""One adapter in two programs: what samplers make of it, and what diffusers and peft do."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

from conftest import SIGNS  # noqa: E402

from meander import policy  # noqa: E402
from meander.data.batch import Batch  # noqa: E402
from meander.data.events import tensor  # noqa: E402
from meander.train.model import Network  # noqa: E402
from meander.train.rollouts import Rollouts  # noqa: E402

TOLERANCE = 1e-5


def drawn(rank, alpha, seed):
    """An adapter of every projection, drawn: those of a training run are smaller."""
    net = Network(SIGNS, rank=rank, alpha=alpha, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.data = 0.05 * torch.randn(p.shape, generator=generator)
    return net


def off(got, want):
    """The distance of two velocities over the length of the second: relative L2."""
    return float(np.linalg.norm((got - want).astype(np.float64)) / np.linalg.norm(want.astype(np.float64)))


@pytest.mark.parametrize("scale, shares", [(1.0, {}), (4.0, {}), (4.0, {"cfg_from": 0.25, "cfg_until": 0.5})])
def test_velocities_agree(run, signs, tmp_path, scale, shares):
    net, before = drawn(8, 16, seed=int(scale)), Network(SIGNS, rank=1)
    net.save(tmp_path)

    async def check(client, name):
        pushed = await policy.push_policy(client, tmp_path)
        for sampler in await policy.taken(client, pushed):
            assert sampler["answer"]["state"] == "applied", sampler
        await client.publish(
            name, 'a red sign that says "FOX"', uid="u", group_size=2, num_inference_steps=4, true_cfg_scale=scale,
            negative_prompt="blurred", seed=7, **shares,
            min_policy_version=pushed["policy_version"], reward=[{"name": "synthetic"}],
            rollout={"sde_step_indices": [0, 1, 2], "debug": ["model_output"], "return_conditioning": True})
        async for group in client.stream_groups(name):
            break
        batch = Rollouts(Batch([group]))
        assert set(batch.batch["weights_digest"]) == {pushed["weights_digest"]}
        rows, worst, elsewhere = np.arange(batch.size), 0.0, 1.0
        velocities = np.zeros_like(batch.batch["latents"])
        for j in range(velocities.shape[1]):
            x, _, sigma, texts = batch.step(rows, j, torch.device("cpu"))
            with torch.no_grad():
                velocities[:, j] = net.guided(x, sigma, texts, batch.frame, batch.rule).numpy()
                base = before.guided(x, sigma, texts, batch.frame, batch.rule).numpy()
            for i, sample in enumerate(batch.batch.samples):
                step = sample.trained[j]
                got = tensor(next(d["tensor"] for d in step["debug"] if d["name"] == "model_output"))
                worst, elsewhere = max(worst, off(got, velocities[i, j])), min(elsewhere, off(got, base[i]))
        assert batch.scales == ([1.0, scale, 1.0, 1.0] if shares else [scale] * 4)
        ratio = batch.batch.check(batch.batch.recompute_log_prob(velocities))
        print(
            f"\nguidance {scale:g}: velocities differ by {worst:.2g} (relative L2), without the adapter by "
              f"{elsewhere:.2g}; ratio {ratio.max_abs:.2g} from 1"
        )
        assert worst < TOLERANCE
        assert elsewhere > 1000 * TOLERANCE  # so that the adapter is seen

    run(check, at=signs)
