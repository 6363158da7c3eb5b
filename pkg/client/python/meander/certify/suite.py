"""The public vectors, and the formulas behind them in float64.

The files of schemas/vectors are in the package. Each set has a formula with its source, cases of inputs and expected
values, and a tolerance by dtype: of the largest expected magnitude of a case, at least 1. The formulas here compute the
same a second time: so a certificate can ask what a number would be if one input were another.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..data.events import TRANSITIONS
from ..maths import loss, noise, transition

Floats = npt.NDArray[np.float64]
"""An array of float64."""
Values = dict[str, Any]
"""Inputs or expected values by name: float64 arrays, numbers, or names of choices."""
FOLDER = pathlib.Path(__file__).parent / "vectors"
"""Where the files are."""


@dataclasses.dataclass(frozen=True)
class Set:
    """The vectors of one formula: its kind and name, the source of the formula, and the tolerance by dtype."""

    kind: str
    name: str
    formula: str
    source: str
    returns: str
    """The name of the expected value that a function of this formula returns."""
    inputs: dict[str, dict[str, Any]]
    """Of each input its shape, or the choices that it is one of; and the neutral value, where it can be left out."""
    tolerance: dict[str, float]
    cases: list[tuple[Values, Values]]
    """Inputs and expected values."""
    compute: Callable[..., Any] | None = None
    """The formula, where it is none of FORMULAS."""

    @property
    def title(self) -> str:
        """Kind and name, such as losses/ppo."""
        return f"{self.kind}/{self.name}"

    def formula_of(self, inputs: Values, anchor: Values | None = None) -> Floats:
        """What the formula gives for these inputs. anchor has the values of those parts that have no gradient; by
        default they are the inputs."""
        held = {"anchor": anchor or inputs} if self.anchored else {}
        with np.errstate(all="ignore"):
            return np.asarray((self.compute or FORMULAS[self.title])(**inputs, **held))

    def scale_of(self, inputs: Values) -> dict[str, float]:
        """The noise of a transition by name, for what is a multiple of it."""
        if self.kind != "transitions" or "noise_level" not in inputs:
            return {}
        k = _kernel(self.name, inputs["noise_level"], tuple(inputs["sigmas"]), inputs["step"])
        return {"noise_std": k.noise_std, "std_dev_t": k.std_dev_t}

    @property
    def uses(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """The places where the formula uses its inputs: of each name the input, and its shape or choices. A place
        without an input is a factor, 1, or a choice of its own."""
        out: dict[str, tuple[str, dict[str, Any]]] = {n: (n, said) for n, said in self.inputs.items()}
        for place, of in _USES.get(self.title, {}).items():
            own = {"choices": of.split()} if of else {"shape": "[]"}
            out[place] = (of, self.inputs[of]) if of in self.inputs else ("", own)
        return out

    @property
    def anchored(self) -> bool:
        """Whether a part of the formula has no gradient."""
        return self.title in _ANCHORED

    def gradient_of(self, inputs: Values, by: str, change: Callable[[Values, Values], Values]) -> Floats:
        """The gradient of the changed formula by an input; change gets the moved inputs and those without one."""
        fixed = change(inputs, inputs)
        return gradient(lambda x: self.formula_of(change(inputs | {by: x}, inputs), fixed), inputs[by])


def gradient(of: Callable[[Floats], Any], at: Floats) -> Floats:
    """The gradient of a function, by differences of the fourth order: some 1e-8 of it."""
    x = np.array(at, np.float64)
    out, h = np.zeros(x.shape), 2e-6
    for i in np.ndindex(x.shape):
        for by, weight in ((-2, 1), (-1, -8), (1, 8), (2, -1)):
            moved = x.copy()
            moved[i] += by * h
            out[i] += weight * float(of(moved)) / (12 * h)
    return out


def load(folder: pathlib.Path = FOLDER) -> dict[str, Set]:
    """All sets by title."""
    out: dict[str, Set] = {}
    for file in sorted(folder.glob("*.json")):
        data = json.loads(file.read_text())
        for s in data["sets"]:
            s["cases"] = [(_values(c["inputs"]), _values(c["expected"])) for c in s["cases"]]
            found = Set(data["kind"], **s)
            out[found.title] = found
    return out


def _values(of: Mapping[str, Any]) -> Values:
    return {k: np.asarray(v, np.float64) if isinstance(v, list) else v for k, v in of.items()}


def _surrogate(r: Floats, a: Floats, low: float, high: float, clipped: Floats | None = None) -> Floats:
    return np.asarray(np.maximum(-a * r, -_or(clipped, a) * np.clip(r, low, high)))


def _ppo(
    log_prob: Floats, old: Floats, advantages: Floats, weights: Floats, clip: float, adv_clip_max: float,
    lower_clip: float | None = None, upper_clip: float | None = None, noise_std: float = 1, step: float = 1,
    mean: Floats | None = None, old_mean: Floats | None = None, log_ratio_noise_std: float | None = None,
    drift: float = 1,
) -> Floats:
    a, d = np.clip(advantages, -adv_clip_max, adv_clip_max), log_prob - old
    if mean is not None and old_mean is not None:
        d = (d + drift * loss.image_kl(mean, old_mean, noise_std)) * _or(log_ratio_noise_std, noise_std)
    losses = _surrogate(np.exp(d), a, 1 - _or(lower_clip, clip), 1 + _or(upper_clip, clip)) * weights
    return np.asarray(np.mean(losses) / step)


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _dppo(
    log_prob: Floats, old: Floats, advantages: Floats, weights: Floats, mean: Floats, old_mean: Floats,
    noise_std: float, kl_mask_threshold: float, far_advantages: Floats | None = None,
) -> Floats:
    r = np.exp(log_prob - old)
    far = loss.image_kl(mean, old_mean, noise_std) >= kl_mask_threshold
    away = (r - 1) * _or(far_advantages, advantages) > 0
    return np.asarray(np.mean(np.where(far & away, 0, -advantages * r * weights)))


def _gspo(
    log_prob: Floats, old: Floats, advantages: Floats, clip_low: float, clip_high: float, log_ratio: float = 1
) -> Floats:
    r = np.exp(log_ratio * (log_prob - old).mean(axis=1))
    return np.asarray(np.mean(_surrogate(r, advantages, 1 - clip_low, 1 + clip_high)))


def _nft(
    clean: Floats, noise: Floats, sigma: Floats, velocity: Floats, old_velocity: Floats, advantages: Floats,
    mix_beta: float, adaptive_weight_min: float, adv_clip_max: float, anchor: Values,
) -> Floats:
    r = np.clip(advantages, -adv_clip_max, adv_clip_max) / adv_clip_max / 2 + 0.5
    total: Any = 0.0
    for share, b in ((r, mix_beta), (1 - r, -mix_beta)):
        off, held = (
            sigma[:, None] * (noise - clean - b * v - (1 - b) * old_velocity) for v in (velocity, anchor["velocity"])
        )
        total = total + share * (off**2).mean(axis=1) / np.maximum(np.abs(held).mean(axis=1), adaptive_weight_min)
    return np.asarray(np.mean(total * adv_clip_max / mix_beta))


def _grpo_tokens(
    log_prob: Floats, old: Floats, reference: Floats, advantages: Floats, mask: Floats, clip_low: float,
    clip_high: float, beta: float, reduce: str, ratio_log_prob: Floats | None = None, kl_log_prob: Floats | None = None,
    free_advantages: Floats | None = None, clipped_advantages: Floats | None = None, kl_mask: Floats | None = None,
    sum_mask: Floats | None = None, count_mask: Floats | None = None, kl: str = "k3",
) -> Floats:
    d, r = reference - _or(kl_log_prob, log_prob), np.exp(_or(ratio_log_prob, log_prob) - old)
    free, clipped = _or(free_advantages, advantages)[:, None], _or(clipped_advantages, advantages)[:, None]
    losses, summed = _surrogate(r, free, 1 - clip_low, 1 + clip_high, clipped), _or(sum_mask, mask)
    losses, count = losses * summed + beta * _KL[kl](d) * _or(kl_mask, summed), _or(count_mask, mask)
    if reduce == "sample_mean":
        return np.asarray(np.mean(losses.sum(axis=1) / np.maximum(count.sum(axis=1), 1)))
    return losses.sum() / (np.maximum(count.sum(), 1) if reduce == "token_mean" else mask.size)


_KL: dict[str, Callable[[Floats], Floats]] = {
    "k3": lambda d: np.expm1(d) - d, "k1": lambda d: -d, "k2": lambda d: d * d / 2
}
_kernel = functools.lru_cache(4096)(transition.kernel)  # the cases share few


def _log_prob(name: str) -> Callable[..., Floats]:
    def log_prob(
        x: Floats, v: Floats, next: Floats, sigmas: Floats, step: int, noise_level: float, log_prob_kind: str,
        reduce: str, noise_step: int | None = None, mean_step: int | None = None, noise: str = "noise_std",
        logarithm_of: str = "", exponent: float = 1, score: float = 1, ln_noise: float = 1, ln_2_pi: float = 1,
    ) -> Floats:
        k = _kernel(name, noise_level, tuple(sigmas), _or(noise_step, step))
        of_mean = _kernel(name, noise_level, tuple(sigmas), _or(mean_step, step))
        mean = of_mean.mean(x, v)
        if score != 1:  # the rest of the mean is that of a step without noise
            mean += (score - 1) * (mean - x - (of_mean.sigma_next - of_mean.sigma) * v)
        value = -exponent * ((next - mean.astype(np.float32)) ** 2)
        value = value / (1 if log_prob_kind == "squared" else 2 * getattr(k, noise) ** 2)
        if log_prob_kind == "density":
            value = value - ln_noise * np.log(getattr(k, logarithm_of or noise)) - ln_2_pi * 0.5 * np.log(2 * np.pi)
        return np.asarray(value.sum() if reduce == "sum" else value.mean())

    return log_prob


def _static(steps: int, shift: float, grid: str) -> Floats:
    def shifted(u: Any) -> Any:
        return shift * u / (1 + (shift - 1) * u)

    least = 1 / steps if grid == "linspace" else shifted(0.001)
    return np.append(shifted(np.linspace(1, least, steps)), 0)


def _dynamic(
    steps: int, tokens: int, base_tokens: int, max_tokens: int, base_shift: float, max_shift: float, terminal: float,
    time_shift: str,
) -> Floats:
    mu = base_shift + (max_shift - base_shift) / (max_tokens - base_tokens) * (tokens - base_tokens)
    sigmas = _static(steps, float(np.exp(mu)) if time_shift == "exponential" else mu, "linspace")[:-1]
    return np.append(1 - (1 - sigmas) * (1 - terminal) / (1 - sigmas[-1]) if terminal else sigmas, 0)


def _guided(rule: str) -> Callable[..., Floats]:
    def guided(positive: Floats, negative: Floats, scale: float, phi: float = 0) -> Floats:
        c, axis = negative + scale * (positive - negative), -1 if rule == "norm_of_tokens" else None
        ratio = np.linalg.norm(positive, axis=axis, keepdims=True) / np.linalg.norm(c, axis=axis, keepdims=True)
        if rule == "deviation":
            return np.asarray(c * (phi * positive.std() / c.std() + 1 - phi))
        return np.asarray(c * (1 if rule == "plain" else np.minimum(ratio, 1) if rule == "norm_clamped" else ratio))

    return guided


def _group_relative(
    rewards: Floats, std: str = "none", ddof: str = "0", epsilon: float = 0, centre_rewards: Floats | None = None
) -> Floats:
    off = rewards - _or(centre_rewards, rewards).mean(axis=1, keepdims=True)
    if std == "none":
        return np.asarray(off)
    of: Any = {"axis": 1, "keepdims": True} if std == "group" else {}
    return np.asarray(off / (rewards.std(ddof=int(ddof), **of) + epsilon))


def _token(
    logits: Floats, token: int, temperature: float, top_k: int, top_p: float, min_p: float, log_prob_kind: str
) -> Floats:
    z = logits if log_prob_kind == "raw" else logits / temperature
    z = z - z.max()
    kept = np.argsort(-z, kind="stable")[: top_k or None] if log_prob_kind == "processed" else np.arange(z.size)
    if log_prob_kind == "processed":
        p = np.exp(z[kept]) / np.exp(z[kept]).sum()
        kept = kept[(np.cumsum(p) - p < (top_p or 1)) & (p >= min_p * p[0])]
    return np.asarray(z[token] - np.log(np.exp(z[kept]).sum()) if token in kept else -np.inf)


FORMULAS: dict[str, Callable[..., Any]] = {
    "losses/ppo": _ppo, "losses/grpo_guard": _ppo, "losses/flow_dppo": _dppo, "losses/diffusion_nft": _nft,
    "losses/gspo": _gspo,
    "losses/dpo": lambda log_prob, base, dpo_beta: np.mean(np.logaddexp(
        0, dpo_beta * (log_prob - base) @ np.array([-1.0, 1.0]))),
    "losses/grpo_tokens": _grpo_tokens,
    "losses/diffusion_opd": lambda mean, teacher_mean, noise_std: np.mean(loss.image_kl(mean, teacher_mean, noise_std)),
    **{f"transitions/{t}": _log_prob(t) for t, is_ in TRANSITIONS.items() if is_.get("stochastic")},
    "transitions/ode": lambda x, v, sigmas, step: x + (sigmas[step + 1] - sigmas[step]) * v,
    "schedules/static": _static, "schedules/dynamic": _dynamic,
    "noise/philox": lambda seed, step, count: noise.normals(seed, step, count).astype(np.float64),
    **{f"guidance/{r}": _guided(r) for r in ("plain", "norm_of_tokens", "norm_clamped", "deviation")},
    "advantages/flow_grpo": _group_relative,
    "advantages/rloo": lambda rewards: _group_relative(rewards) * rewards.shape[1] / (rewards.shape[1] - 1),
    "advantages/gpg": lambda rewards: _group_relative(rewards) * (rewards.size / np.count_nonzero(rewards)),
    "tokens/log_prob": _token,
}  # fmt: skip
"""The formula of each set."""
_ANCHORED = {"losses/diffusion_nft"}
_CLIPS = {"lower_clip": "clip", "upper_clip": "clip"}
_TERMS = {
    "noise_step": "step", "mean_step": "step", "noise": "noise_std std_dev_t", "logarithm_of": "noise_std std_dev_t",
    "exponent": "", "score": "", "ln_noise": "", "ln_2_pi": "",
}
_USES: dict[str, dict[str, str]] = {
    "losses/ppo": _CLIPS, "losses/grpo_guard": _CLIPS | {"log_ratio_noise_std": "noise_std", "drift": ""},
    "losses/flow_dppo": {"far_advantages": "advantages"}, "losses/gspo": {"log_ratio": ""},
    "losses/grpo_tokens": {
        "ratio_log_prob": "log_prob", "kl_log_prob": "log_prob", "free_advantages": "advantages",
        "clipped_advantages": "advantages", "kl_mask": "mask", "sum_mask": "mask", "count_mask": "mask",
        "kl": "k3 k1 k2",
    },
    "advantages/flow_grpo": {"centre_rewards": "rewards"},
    **{f"transitions/{t}": _TERMS for t, is_ in TRANSITIONS.items() if is_.get("stochastic")},
}  # fmt: skip
"""Where a formula uses an input in several places: the places, which may be taken otherwise alone. Those of no input
are factors of its terms, 1, or choices of its own."""
