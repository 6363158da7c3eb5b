"""Log-probs and divergences of stored steps in torch, with gradients; the losses of them are in losses.py."""

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
