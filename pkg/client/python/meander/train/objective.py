"""Log-probs and divergences of stored steps in torch, with gradients; the losses of them are in losses.py."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

_DEVIATIONS = 6.0


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
        """Returns the log-probs [B]: means over the elements of x', as in the events: of the mean as the sampler rounds
        it, with the gradient of the mean as it is."""
        rounded = mean + (mean.detach().float().double() - mean.detach())
        square = _row_mean((after.double() - rounded) ** 2)
        if self.kind == "squared":
            return -square
        scaled = -square / (2 * self.noise_std**2)
        return scaled if self.kind == "scaled" else scaled - math.log(self.noise_std) - 0.5 * math.log(2 * math.pi)

    def rounding(self, mean: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
        """Returns [B], how far roundings may bring log-probs from the sampler's, for velocities that are off by a root
        mean square off [B].

        The means are then d noise_std apart, with d = (|velocity| off + 2^-24 rms(mean)) / noise_std, and by that the
        log-probs by mean(eps d) + d^2 / 2. The noise eps of the step was drawn behind the velocity, so over its D
        elements the first is normal with a deviation of d / sqrt(D): six of these, which two of 10^9 samples exceed.
        """
        d = (abs(self.velocity) * off + 2.0**-24 * rms(mean)) / self.noise_std
        most = _DEVIATIONS * d / mean[0].numel() ** 0.5 + d * d / 2
        return most * 2 * self.noise_std**2 if self.kind == "squared" else most

    def divergence(self, mean: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Returns the KL divergence of two transitions with these means, [B], per element."""
        return _row_mean((mean - other) ** 2) / (2 * self.noise_std**2)


def last_off(
    x: torch.Tensor, v: torch.Tensor, after: torch.Tensor, sigma: float, last: float, off: torch.Tensor, dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [B], the root mean square distances of the states after a last step of euler's, from sigma to last, from
    x + (last - sigma) v, and [B], how far roundings may bring them, for velocities that are off by off [B].

    Sampler and trainer round product and sum to float32, and the sampler the state to its dtype.
    """
    mean = x.double() + (last - sigma) * v.double()
    sizes = rms(x) + (sigma - last) * rms(v)
    stored = {"F16": 2.0**-11, "BF16": 2.0**-8}.get(dtype, 0.0) * rms(mean)
    return rms(after.double() - mean), (sigma - last) * off + 2.0**-23 * sizes + stored


def velocity_off(x: torch.Tensor, v: torch.Tensor, sigma: float, prediction: str, relative: float) -> torch.Tensor:
    """Returns [B], the root mean square that velocities v at states x are off by where the outputs of the network, of a
    prediction, have a relative error.

    A velocity is noise - data, and a state sigma noise + (1 - sigma) data. So an error of the noise is one of the
    velocity 1 / (1 - sigma) as large, and of the data 1 / sigma.
    """
    if prediction == "epsilon":
        return relative * rms(x + (1 - sigma) * v) / max(1 - sigma, 1e-6)
    if prediction == "sample":
        return relative * rms(x - sigma * v) / max(sigma, 1e-6)
    return relative * rms(v) * (2**0.5 if prediction == "v_prediction" else 1)


def rms(x: torch.Tensor) -> torch.Tensor:
    """Returns the root mean squares [B]."""
    return _row_mean(x.double() ** 2) ** 0.5


def _row_mean(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1).mean(dim=1)
