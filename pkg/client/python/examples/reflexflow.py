"""Scheduled sampling in a trainer of one's own: a small flow model of points near (2, 2), trained by the ReflexFlow
loss on latents that it rolls down itself. It needs torch, and no pipeline.

    python pkg/client/python/examples/reflexflow.py
"""

import numpy as np
import torch

from meander import scheduled

N, OFFSET, BATCH, STEPS, SEED = 100, 10, 64, 150, 7
levels = scheduled.Levels.flow(N)
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.SiLU(), torch.nn.Linear(64, 64), torch.nn.SiLU(),
                              torch.nn.Linear(64, 2))  # fmt: skip
optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)


def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The network's prediction of noise - x0, at timesteps 0 to N-1."""
    return network(torch.cat([x, t[:, None] / (N - 1)], dim=1))


def answer(x: np.ndarray, t: float) -> np.ndarray:
    """The same for one latent that is rolled, without gradient."""
    with torch.no_grad():
        return velocity(torch.tensor(x[None], dtype=torch.float32), torch.tensor([t])).numpy()[0]


draw = np.random.default_rng(SEED)
losses = []
for step in range(STEPS):
    x0, noise = 2 + 0.1 * draw.normal(size=(BATCH, 2)), draw.normal(size=(BATCH, 2))
    times = [scheduled.draw_timestep(SEED, step, i, N) for i in range(BATCH)]
    noisy, teacher = np.empty((BATCH, 2)), np.empty((BATCH, 2))
    for i, p in enumerate(scheduled.plan(SEED, step, times, N, OFFSET, probability=0.5)):
        teacher[i] = noisy[i] = scheduled.noised(x0[i], noise[i], levels.at(p.base))
        start = scheduled.noised(x0[i], noise[i], levels.at(p.source))
        for s in scheduled.roll(levels, "euler", start, p.source, p.base, answer):
            noisy[i] = s.latent
    t = torch.tensor(times, dtype=torch.float32)
    pred = velocity(torch.tensor(noisy, dtype=torch.float32), t)
    with torch.no_grad():
        clean = velocity(torch.tensor(teacher, dtype=torch.float32), t)
    out = scheduled.reflexflow(pred, noise - x0, noisy, x0, clean, pred, beta1=0.1)
    optimizer.zero_grad()
    out["loss"].backward()
    optimizer.step()
    losses.append(out["loss"].item())

first, last = np.mean(losses[:20]), np.mean(losses[-20:])
print(f"loss {first:.3f} ({STEPS} steps) {last:.3f}")
if last > 0.5 * first:
    raise SystemExit("it has not learned")
