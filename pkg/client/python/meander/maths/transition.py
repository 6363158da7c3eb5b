"""Transitions of the sampler in float64: coefficients, means and log-probs of steps, as the services compute them.

A step goes from sigma to sigma_next by next = mean + noise_std * eps with mean = x_coefficient * x + v_coefficient * v,
where x are the latents, v the guided velocity at (x, sigma) and eps standard normal. With a the noise level and d =
sigma_next - sigma:

    sde        g = a sqrt(sigma / (1 - sigma)), noise_std = g sqrt(-d); at sigma 1 the denominator has the schedule's
               second sigma
    dance_sde  g = a, noise_std = a sqrt(-d)
    cps        g = noise_std = sigma_next sin(a pi/2)
    ddim       g = noise_std = a sigma_next sqrt(1 - r^2), r = sigma_next (1 - sigma) / (sigma (1 - sigma_next))
    ode        no noise, and no log-prob

Sources: Flow-GRPO (Liu et al. 2025), DanceGRPO (Xue et al. 2025), coefficients-preserving sampling (Wang and Yu 2025),
DDIM with eta = a (Song et al. 2021) as in DDPO (Black et al. 2023).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..data.events import TRANSITIONS

LOG_PROB_KINDS = ("density", "scaled", "squared")
"""What a log-prob is of: see Kernel.log_prob."""
_KEEPING = ("cps", "ddim")  # they keep the share of the data, and replace some of the noise
_NEAR_ONE = 1e-5
_HALF_LN_2_PI = 0.5 * math.log(2 * math.pi)

Floats = npt.NDArray[np.float64]
"""An array of float64."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The transition of one step, one of TRANSITIONS, from sigma to sigma_next: what comes next is x_coefficient x +
    v_coefficient v + noise_std eps. std_dev_t is the diffusion coefficient g. The coefficients are float32 numbers, as
    the sampler has them."""

    transition: str
    sigma: float
    sigma_next: float
    x_coefficient: float
    v_coefficient: float
    std_dev_t: float
    noise_std: float

    def mean(self, latents: npt.ArrayLike, velocity: npt.ArrayLike) -> Floats:
        """The mean of what comes next, in float64; any shape."""
        return np.asarray(
            self.x_coefficient * np.asarray(latents, np.float64) + self.v_coefficient * np.asarray(velocity, np.float64)
        )

    def log_prob(
        self, latents: npt.ArrayLike, velocity: npt.ArrayLike, next_latents: npt.ArrayLike, kind: str = "density"
    ) -> float:
        """The log-prob of next_latents, the mean over all elements, as step events have it.

        kind is density, -(next - mean)^2 / (2 n^2) - ln n - ln(2 pi)/2; scaled, without the logarithms; or squared,
        -(next - mean)^2. It agrees with the event's to some 1e-8: the sampler rounds each mean to float32.
        """
        if kind not in LOG_PROB_KINDS:
            raise ValueError(f"kind: {kind!r}; must be one of {', '.join(LOG_PROB_KINDS)}")
        if self.noise_std == 0 and kind != "squared" or not TRANSITIONS[self.transition].get("stochastic"):
            raise ValueError(f"transition: {self.transition} draws no noise here; it has no log-prob")
        mean = self.mean(latents, velocity).astype(np.float32).astype(np.float64)
        value = -float(np.square(np.asarray(next_latents, np.float64) - mean).mean())
        if kind != "squared":
            value /= 2 * self.noise_std**2
        return value - (math.log(self.noise_std) + _HALF_LN_2_PI if kind == "density" else 0)


def kernel(transition: str, noise_level: float, sigmas: Sequence[float], step_index: int) -> Kernel:
    """The transition of a step of the schedule sigmas [T+1]. Errors name the field, its value and the rule."""
    if transition not in TRANSITIONS:
        raise ValueError(f"transition: {transition!r}; must be one of {', '.join(TRANSITIONS)}")
    if not 0 <= step_index < len(sigmas) - 1:
        raise ValueError(f"step_index: {step_index}; must be 0 to {len(sigmas) - 2}")
    if not 0 <= noise_level < math.inf or TRANSITIONS[transition].get("level_is_share") and noise_level > 1:
        raise ValueError(
            f"noise_level: {noise_level}; must be a finite number of at least 0, of {transition} at most 1"
        )
    s, p = (float(np.float32(sigmas[i])) for i in (step_index, step_index + 1))
    g, n, keep = 0.0, 0.0, 0.0
    if transition in ("sde", "dance_sde"):
        g = noise_level
        if transition == "sde":
            patched = s if 1 - s > _NEAR_ONE else float(np.float32(sigmas[1]))
            if 1 - patched <= _NEAR_ONE:
                raise ValueError(f"sigmas[1]: {sigmas[1]}; must be less than {1 - _NEAR_ONE} for sde at sigma {s}")
            g = noise_level * math.sqrt(s / (1 - patched))
        n = g * math.sqrt(s - p)
    elif transition == "cps":
        g = n = p * math.sin(noise_level * math.pi / 2)
        keep = p * math.cos(noise_level * math.pi / 2)
    elif transition == "ddim":
        ratio = p * (1 - s) / (s * (1 - p)) if s < 1 else 0.0
        share = noise_level * math.sqrt(1 - ratio * ratio)
        g = n = p * share
        keep = p * math.sqrt(1 - share * share)
    return _kernel(transition, s, p, g, n, keep)


def step_kernel(step: Mapping[str, Any]) -> Kernel:
    """The transition that a step event says: of its sigmas, with the noise that it had."""
    return _step_kernel(*_OF_STEP(step))


_OF_STEP = itemgetter("transition", "sigma", "sigma_next", "std_dev_t", "noise_std")


@functools.lru_cache(4096)  # samples share their schedule
def _step_kernel(transition: str, sigma: float, sigma_next: float, std_dev_t: float, n: float) -> Kernel:
    s, p = float(np.float32(sigma)), float(np.float32(sigma_next))
    if transition not in TRANSITIONS:
        raise ValueError(f"transition: {transition!r}; must be one of {', '.join(TRANSITIONS)}")
    keep = math.sqrt(max(0.0, (p - n) * (p + n))) if transition in _KEEPING else 0.0
    return _kernel(transition, s, p, std_dev_t, n, keep)


def _kernel(transition: str, s: float, p: float, g: float, n: float, keep: float) -> Kernel:
    """keep is the factor of the noise that _KEEPING keep, sqrt(sigma_next^2 - n^2)."""
    d = p - s
    x, v = 1.0, d
    if transition in ("sde", "dance_sde"):
        c = g * g / (2 * s)
        x, v = 1 + c * d, d * (1 + c * (1 - s))
    elif transition in _KEEPING:
        x, v = (1 - p) + keep, keep * (1 - s) - s * (1 - p)
    return Kernel(transition, s, p, float(np.float32(x)), float(np.float32(v)), g, n)
