"""Flow-GRPO's objective (arXiv 2505.05470) in torch: log-probs of stored steps under the network, clipped ratios,
divergence.

meander.loss is the reference in float64 without gradients; the tests hold one against the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One stochastic step: x' ~ N(state x + velocity v, noise_std^2), from sigma to sigma_next."""

    state: float
    velocity: float
    noise_std: float
    step: float
    """sigma - sigma_next."""
    kind: str
    """log_prob_kind of the event: density, scaled or squared."""

    @classmethod
    def of(cls, batch: Mapping[str, Any], j: int, kind: str) -> "Kernel":
        """Returns the kernel of trained step j of a batch whose samples ran one schedule."""
        x, v, n = (float(batch[name][0, j]) for name in ("x_coefficient", "v_coefficient", "noise_std"))
        return cls(x, v, n, float(batch["sigmas"][0, j]) - float(batch["next_sigmas"][0, j]), kind)

    def mean(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Returns the mean of x' in float64, because its distance from x' is small compared with it."""
        return self.state * x.double() + self.velocity * v.double()

    def log_prob(self, mean: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """Returns the log-probs [B]: means over the elements of x', as in the events."""
        square = _row_mean((after.double() - mean) ** 2)
        if self.kind == "squared":
            return -square
        scaled = -square / (2 * self.noise_std**2)
        return scaled if self.kind == "scaled" else scaled - math.log(self.noise_std) - 0.5 * math.log(2 * math.pi)

    def divergence(self, mean: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Returns the KL divergence of two transitions with these means, [B], per element."""
        return _row_mean((mean - other) ** 2) / (2 * self.noise_std**2)


def _row_mean(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1).mean(dim=1)


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss made from log-probs: ppo, the clipped ratio, or grpo_guard (arXiv 2510.22319), which also removes the
    bias of the ratio and scales the steps."""

    name: str = "ppo"
    """ppo or grpo_guard."""
    clip: float = 1e-4
    """Ratios count within 1 - clip and 1 + clip."""
    adv_clip_max: float = 5.0
    """Advantages are clamped to plus or minus this."""
    beta: float = 0.0
    """The weight of the divergence from the base."""

    def __post_init__(self) -> None:
        if self.name not in ("ppo", "grpo_guard"):
            raise ValueError(f"loss: {self.name!r}; must be ppo or grpo_guard")

    def losses(self, kernel: Kernel, log_prob: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mean: torch.Tensor | None = None,
               old_mean: torch.Tensor | None = None, weights: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Returns the losses [B] of one step, and the ratios [B] that were clipped."""
        a = advantages.clamp(-self.adv_clip_max, self.adv_clip_max)
        log_ratio, scale = log_prob - old, 1.0
        if self.name == "grpo_guard":
            assert mean is not None and old_mean is not None
            log_ratio = (log_ratio + kernel.divergence(mean, old_mean)) * kernel.noise_std
            scale = 1 / kernel.step
        ratio = log_ratio.exp()
        out = torch.maximum(-a * ratio, -a * ratio.clamp(1 - self.clip, 1 + self.clip)) * scale
        return (out if weights is None else out * weights), ratio
