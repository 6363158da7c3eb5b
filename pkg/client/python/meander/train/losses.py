"""The losses of meander-train, each a plug: --loss NAME for one of LOSSES, or --loss module:name for your own.

A plug is a callable of Steps, or of Noised where it is forward, that returns the losses of the samples. Its fields are
its settings (--loss-options). A function of Steps is a plug, too:

    def reinforce(s):                                    # meander-train --loss mine:reinforce
        return -s.advantages * (s.log_prob - s.old).exp()

Log-probs are means over the elements of a state, as in the events; so are divergences. Defaults are those of verl-omni
(DiffusionLossConfig) unless a field says otherwise. schemas/vectors/losses.json has worked examples of each, with
gradients.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional as F

from ..data.events import ESTIMATORS

if TYPE_CHECKING:
    from .config import Config
    from .rollouts import Rollouts

Figures = dict[str, torch.Tensor]
"""What a loss tells beside the losses, by name."""


@dataclasses.dataclass
class Steps:
    """Trained steps of n samples, float64 [n, w]: one of them, or all w = W for a loss of whole trajectories. Where
    tracks have advantages of their own it is called for each track, and log-probs are means over the track's elements.
    """

    log_prob: torch.Tensor
    """Under the network as it is, with a gradient."""
    old: torch.Tensor
    """Under the weights that the ratio is against: those that made the batch."""
    advantages: torch.Tensor
    """Of each step."""
    weights: torch.Tensor
    """Importance weights; 1 on-policy."""
    noise_std: torch.Tensor
    """[w], the standard deviation of the transition."""
    step: torch.Tensor
    """[w], sigma - sigma_next."""
    rewards: torch.Tensor
    """[n], of the samples."""
    drift: torch.Tensor | None = None
    """Divergence of the transition from that of old, with a gradient, for a loss with drift."""
    base: torch.Tensor | None = None
    """Log-probs of the network without its adapter, for a loss with base."""
    taught: torch.Tensor | None = None
    """Divergence of the transition from the teacher's, with a gradient, for a loss with taught."""


@dataclasses.dataclass
class Noised:
    """Clean latents of n samples, noised to one sigma of the schedule: x_t = (1 - sigma) x0 + sigma noise, [n, S, C];
    of one track, where these have advantages of their own, [n, 1, elements]."""

    velocity: torch.Tensor
    """At x_t under the network as it is, with a gradient."""
    old_velocity: torch.Tensor
    """At x_t under the weights that made the batch."""
    clean: torch.Tensor
    """x0, the last latents of the samples."""
    noised: torch.Tensor
    """x_t."""
    sigma: torch.Tensor
    """[n], the noise level of x_t."""
    advantages: torch.Tensor
    """[n], of the samples."""
    estimator: str
    """The name of the estimator that the advantages are of."""


class Loss:
    """What the learner asks of a loss. A call returns the losses, [n, w] of Steps and [n] of Noised, alone or with
    figures of the same shape, whose means are logged."""

    drift: ClassVar[bool] = False
    """It reads Steps.drift."""
    base: ClassVar[bool] = False
    """It reads Steps.base."""
    taught: ClassVar[bool] = False
    """It reads Steps.taught, which --teacher gives, and neither old log-probs nor advantages."""
    trajectory: ClassVar[bool] = False
    """It wants all trained steps of a sample at once, which costs a forward pass more."""
    pairs: ClassVar[bool] = False
    """Rows 2k and 2k + 1 of Steps are the best and the worst sample of a group."""
    forward: ClassVar[bool] = False
    """It is called with Noised, and needs no log-probs."""
    figures: ClassVar[tuple[str, ...]] = ()
    """The names of what it tells beside the losses."""

    def __call__(self, s: Any) -> torch.Tensor | tuple[torch.Tensor, Figures]:
        raise NotImplementedError

    def rows(self, batch: Rollouts, regularized: bool) -> list[int]:
        """The samples that have a gradient, regularized: also by the divergence from the base."""
        if self.pairs:
            return batch.pairs()
        return list(range(batch.size)) if regularized or self.forward or self.taught else batch.used

    def count(self, batch: Rollouts) -> int:
        """The samples that the mean is over."""
        return len(batch.pairs()) if self.pairs else batch.size

    def _above(self, **least: float) -> None:
        for name, low in least.items():
            if not low < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name}: {value}; must be a finite number above {low:g}")


def _surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, weights: torch.Tensor
) -> tuple[torch.Tensor, Figures]:
    """max(-A r, -A clamp(r, low, high)) times the weights."""
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high)) * weights
    return losses, {"clipped": ((ratio < low) | (ratio > high)).double()}


@dataclasses.dataclass(frozen=True)
class PPO(Loss):
    """The clipped ratio of Flow-GRPO (arXiv 2505.05470): max(-A' r, -A' clamp(r, 1 - clip, 1 + clip)) with r =
    exp(log_prob - old) and A' the clamped advantage, step by step."""

    clip: float = 1e-4
    adv_clip_max: float = 5.0
    """Advantages are clamped to plus or minus this."""
    figures: ClassVar = ("clipped",)

    def __post_init__(self) -> None:
        self._above(clip=0, adv_clip_max=0)

    def log_ratio(self, s: Steps) -> torch.Tensor:
        """The logarithms [n, w] of the ratios."""
        return s.log_prob - s.old

    def __call__(self, s: Steps) -> tuple[torch.Tensor, Figures]:
        a = s.advantages.clamp(-self.adv_clip_max, self.adv_clip_max)
        return _surrogate(self.log_ratio(s).exp(), a, 1 - self.clip, 1 + self.clip, s.weights)


@dataclasses.dataclass(frozen=True)
class Guard(PPO):
    """GRPO-Guard (arXiv 2510.22319): PPO with r = exp((log_prob - old + drift) noise_std), which removes the bias of
    the ratio, and the loss divided by the step, which makes steps alike."""

    drift: ClassVar = True

    def log_ratio(self, s: Steps) -> torch.Tensor:
        assert s.drift is not None
        return (s.log_prob - s.old + s.drift) * s.noise_std

    def __call__(self, s: Steps) -> tuple[torch.Tensor, Figures]:
        losses, figures = super().__call__(s)
        return losses / s.step, figures


@dataclasses.dataclass(frozen=True)
class GSPO(Loss):
    """GSPO (arXiv 2507.18071): one ratio for a whole trajectory, exp(mean over its trained steps of log_prob - old),
    clipped to [1 - clip_low, 1 + clip_high].

    In the paper's token form: each step has the value of the trajectory's ratio and its own gradient,
    so that steps may have advantages of their own. The clips are the paper's. Advantages are not clamped.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    trajectory: ClassVar = True
    figures: ClassVar = ("clipped",)

    def __post_init__(self) -> None:
        self._above(clip_low=0, clip_high=0)

    def __call__(self, s: Steps) -> tuple[torch.Tensor, Figures]:
        of_all = (s.log_prob - s.old).mean(dim=1, keepdim=True).detach()
        ratio = (s.log_prob - s.log_prob.detach() + of_all).exp()
        return _surrogate(ratio, s.advantages, 1 - self.clip_low, 1 + self.clip_high, s.weights)


@dataclasses.dataclass(frozen=True)
class DPPO(Loss):
    """Flow-DPPO (arXiv 2606.11025): -A r, but 0 where the transition is at least kl_mask_threshold from that of old
    and the ratio moves further away: r > 1 with A > 0, r < 1 with A < 0. Advantages are not clamped."""

    kl_mask_threshold: float = 1e-5
    drift: ClassVar = True
    figures: ClassVar = ("masked",)

    def __post_init__(self) -> None:
        self._above(kl_mask_threshold=0)

    def __call__(self, s: Steps) -> tuple[torch.Tensor, Figures]:
        assert s.drift is not None
        ratio = (s.log_prob - s.old).exp()
        away = ((ratio > 1) & (s.advantages > 0)) | ((ratio < 1) & (s.advantages < 0))
        masked = away & (s.drift.detach() >= self.kl_mask_threshold)
        return torch.where(masked, 0.0, -s.advantages * ratio) * s.weights, {"masked": masked.double()}


@dataclasses.dataclass(frozen=True)
class DPO(Loss):
    """Diffusion-DPO (arXiv 2311.12908) on the stored transitions, as D3PO has it (arXiv 2311.13231): of the best and
    the worst sample of each group, step by step,

        -log sigmoid(dpo_beta ((log_prob - base)_best - (log_prob - base)_worst))

    Where the two noise one image (verl-omni), errors of velocities stand for -2 log_prob. Groups whose rewards are all
    equal have no pair. It needs neither old log-probs nor advantages.
    """

    dpo_beta: float = 2000.0
    base: ClassVar = True
    pairs: ClassVar = True
    figures: ClassVar = ("preferred", "margin")

    def __post_init__(self) -> None:
        self._above(dpo_beta=0)

    def __call__(self, s: Steps) -> tuple[torch.Tensor, Figures]:
        assert s.base is not None
        gain = self.dpo_beta * (s.log_prob - s.base)
        margin = gain[0::2] - gain[1::2]
        # Both rows have the loss of their pair, so that the mean over rows is that over pairs.
        both = [t.repeat_interleave(2, dim=0) for t in (-F.logsigmoid(margin), (margin > 0).double(), margin.detach())]
        return both[0], {"preferred": both[1], "margin": both[2]}


def probabilities(estimator: str) -> bool:
    """Whether the advantages of an estimator are probabilities."""
    return bool(ESTIMATORS.get(estimator, {}).get("probabilities"))


def probability(advantages: torch.Tensor, most: float) -> torch.Tensor:
    """How likely a sample is optimal (arXiv 2509.16117, section 3.3): its advantage, clamped to plus or minus most,
    scaled to [0, 1]. Estimators that give probabilities do the same."""
    return advantages.clamp(-most, most) / most / 2 + 0.5


@dataclasses.dataclass(frozen=True)
class DiffusionNFT(Loss):
    """DiffusionNFT (arXiv 2509.16117): no log-probs, but clean latents that are noised again. With b = mix_beta and r
    the probability that the sample is optimal,

        v+ = b v + (1 - b) v_old    v- = (1 + b) v_old - b v    x0(v) = x_t - sigma v    e(v) = mean |x0(v) - x0|
        adv_clip_max / b (r mean((x0(v+) - x0)^2) / e(v+) + (1 - r) mean((x0(v-) - x0)^2) / e(v-))

    e has no gradient and is at least adaptive_weight_min. Advantages that are probabilities are r; others are mapped
    to it.
    """

    mix_beta: float = 0.5
    adaptive_weight_min: float = 1e-5
    adv_clip_max: float = 5.0
    forward: ClassVar = True
    figures: ClassVar = ("positive", "negative")

    def __post_init__(self) -> None:
        self._above(mix_beta=0, adaptive_weight_min=0, adv_clip_max=0)

    def __call__(self, s: Noised) -> tuple[torch.Tensor, Figures]:
        b, v, old = self.mix_beta, s.velocity.double(), s.old_velocity.double()
        r = s.advantages if probabilities(s.estimator) else probability(s.advantages, self.adv_clip_max)
        positive, negative = self._error(s, b * v + (1 - b) * old), self._error(s, (1 + b) * old - b * v)
        losses = (r * positive + (1 - r) * negative) * self.adv_clip_max / b
        return losses, {"positive": positive.detach(), "negative": negative.detach()}

    def _error(self, s: Noised, velocity: torch.Tensor) -> torch.Tensor:
        off = s.noised.double() - s.sigma.double()[:, None, None] * velocity - s.clean.double()
        size = off.detach().abs().mean(dim=(1, 2)).clamp(min=self.adaptive_weight_min)
        return off.square().mean(dim=(1, 2)) / size


@dataclasses.dataclass(frozen=True)
class DiffusionOPD(Loss):
    """DiffusionOPD (arXiv 2605.15055): on-policy distillation. Step by step, on the states that the student came to,
    the divergence KL(student || teacher) of two transitions with the noise of the sample's,

        mean((m - m_teacher)^2) / (2 noise_std^2)    m = x_coefficient x + v_coefficient v

    with m_teacher of the teacher's velocity at x, or of its mean one over finer steps to the step's end. Its gradient
    is exact, where the policy gradient of log p - log p_teacher has the noise of the step in it.
    """

    taught: ClassVar = True

    def __call__(self, s: Steps) -> torch.Tensor:
        assert s.taught is not None
        return s.taught


LOSSES: dict[str, type[Loss]] = {
    "ppo": PPO, "grpo_guard": Guard, "gspo": GSPO, "flow_dppo": DPPO, "dpo": DPO, "diffusion_nft": DiffusionNFT,
    "diffusion_opd": DiffusionOPD,
}  # fmt: skip


# Settings with flags of their own, and what these are unless they are given.
_FLAGS = {"clip": PPO.clip, "adv_clip_max": PPO.adv_clip_max}


class _Own(Loss):
    """A function of Steps as a loss; its parameters with defaults are its settings."""

    def __init__(self, function: Callable[..., Any], **options: float):
        self.function, self.options = function, options

    def __call__(self, s: Steps) -> Any:
        return self.function(s, **self.options)


def make(name: str, **options: float) -> Loss:
    """Returns the loss of a name, one of LOSSES or module:name, with some of its settings. ValueError: what is wrong
    with it."""
    kind: Any = LOSSES.get(name) or _import(name)
    function = not inspect.isclass(kind)
    if not function:
        known = {f.name: f.default for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    else:
        known = {
            p.name: p.default for p in list(inspect.signature(kind).parameters.values())[1:] if p.default is not p.empty
        }
    for option in options:
        if option not in known:
            has = ", ".join(f"{k} ({v})" for k, v in known.items()) or "none"
            flag = f"--{option.replace('_', '-')}" if option in _FLAGS else f"--loss-options: {option!r}"
            raise ValueError(f"{flag}: must be a setting of {name}: {has}")
    if function:
        return _Own(kind, **options)
    try:
        loss: Loss = kind(**options)
    except ValueError as e:
        raise ValueError(f"--loss {name}: {e}") from None
    return loss


def _import(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"--loss: {name!r}; must be one of {', '.join(LOSSES)}, or module:name of your own")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"--loss: {name!r}: {e}; a module of this folder or of PYTHONPATH, and a name in it") from e
    if not callable(found) or inspect.isclass(found) and not issubclass(found, Loss):
        raise ValueError(
            f"--loss: {name!r}; must be a function of Steps, or a class that is a meander.train.losses.Loss"
        )
    return found


_TEXT_CLIP = 0.2  # of verl and TRL


def of(config: Config) -> Loss:
    """Returns the loss of a configuration. ValueError: it does not fit the other settings."""
    options = config.options()
    options = {name: value for name, default in _FLAGS.items() if (value := getattr(config, name)) != default} | options
    if config.texts and config.loss == "ppo":
        options = {"clip": _TEXT_CLIP} | options  # log-probs of tokens are no means
    loss = make(config.loss, **options)
    if config.ode and not loss.forward:
        raise ValueError(
            f"--loss {config.loss}: needs log-probs, which --sde-type ode has none of; must be diffusion_nft, or one "
            f"of your own that is forward"
        )
    if loss.taught != bool(config.teacher):
        raise ValueError(
            f"--teacher: {config.teacher or 'empty'}; must be the name of a teacher with --loss diffusion_opd, or with "
            f"one of your own that is taught, and only there"
        )
    if loss.taught and (config.texts or config.stage):
        raise ValueError(
            f"--teacher: {config.teacher}; must be empty with --stage or a language model (for texts see "
            f"examples/distill_sums.py)"
        )
    if loss.forward and (config.ahead or config.follow):
        raise ValueError(
            f"--loss {config.loss}: needs the weights that made a batch; it is without --ahead and --follow"
        )
    if loss.pairs and config.micro_batch % 2:
        raise ValueError(
            f"--micro-batch: {config.micro_batch}; must be even for --loss {config.loss}: pairs stay whole"
        )
    if loss.pairs and config.group_size < 2:
        raise ValueError(
            f"--group-size: {config.group_size}; must be at least 2 for --loss {config.loss}, which takes pairs"
        )
    if probabilities(config.estimator) and not (loss.forward or loss.pairs):
        raise ValueError(
            f"--estimator {config.estimator}: gives probabilities; --loss {config.loss} needs advantages, as of "
            "flow_grpo"
        )
    return loss
