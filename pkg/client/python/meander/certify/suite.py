"""The public vectors, and the formulas behind them in float64.

The files of schemas/vectors are in the package. Each set has a formula with its source, cases of inputs and expected
values, and a tolerance by dtype: of the largest expected magnitude of a case, at least 1. The formulas here compute the
same a second time: so a certificate can ask what a number would be if one input were another.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..maths import noise
from .formula import Constant, Values, named, stopped, traced

Floats = npt.NDArray[np.float64]
"""An array of float64."""
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

    def formula_of(self, inputs: Values) -> Floats:
        """What the formula gives for these inputs."""
        with np.errstate(all="ignore"):
            return np.asarray(self.function(**inputs))

    @property
    def function(self) -> Callable[..., Any]:
        """The formula, of numpy."""
        return self.compute or FORMULAS[self.title]


def gradient(of: Callable[[Floats], Any], at: Floats, along: Floats | None = None) -> Floats:
    """The gradient of a function, by differences of the fourth order: some 1e-8 of it. along: in some directions."""
    x, h = np.array(at, np.float64), 2e-6
    ways = np.eye(x.size).reshape(-1, *x.shape) if along is None else along
    out = [sum(k * float(of(x + by * h * d)) for by, k in ((-2, 1), (-1, -8), (1, 8), (2, -1))) for d in ways]
    return (np.array(out) / (12 * h)).reshape(x.shape if along is None else -1)


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


def _between(x: Any, low: Any, high: Any) -> Any:
    return np.minimum(np.maximum(x, low), high)


def _surrogate(ratio: Any, a: Any, low: Any, high: Any) -> Any:
    return named("surrogate", np.maximum(-a * ratio, -a * _between(ratio, low, high)))


def _divergence(mean: Any, other: Any, std: Any) -> Any:
    return named("divergence", np.mean((mean - other) ** 2, axis=1) / (2 * std**2))


def _ppo(
    log_prob: Any, old: Any, advantages: Any, weights: Any, clip: Any, adv_clip_max: Any, noise_std: Any = None,
    step: Any = None, mean: Any = None, old_mean: Any = None,
) -> Any:
    a, d = named("A", _between(advantages, -adv_clip_max, adv_clip_max)), log_prob - old
    if mean is not None:
        d = (d + _divergence(mean, old_mean, noise_std)) * noise_std
    losses = np.mean(_surrogate(named("ratio", np.exp(d)), a, 1 - clip, 1 + clip) * weights)
    return losses if step is None else losses / step


def _dppo(
    log_prob: Any, old: Any, advantages: Any, weights: Any, mean: Any, old_mean: Any, noise_std: Any,
    kl_mask_threshold: Any,
) -> Any:
    ratio = named("ratio", np.exp(log_prob - old))
    away = named("away", (advantages > 0) & (ratio > 1) | (advantages < 0) & (ratio < 1))
    far = _divergence(mean, old_mean, noise_std) >= kl_mask_threshold
    return np.mean(np.where(far & away, 0, -advantages * ratio * weights))


def _gspo(log_prob: Any, old: Any, advantages: Any, clip_low: Any, clip_high: Any) -> Any:
    ratio = named("ratio", np.exp(np.mean(log_prob - old, axis=1)))
    return np.mean(_surrogate(ratio, advantages, 1 - clip_low, 1 + clip_high))


def _dpo(log_prob: Any, base: Any, dpo_beta: Any) -> Any:
    d = log_prob - base
    return np.mean(np.logaddexp(0, -dpo_beta * (d[:, 0] - d[:, 1])))


def _nft(
    clean: Any, noise: Any, sigma: Any, velocity: Any, old_velocity: Any, advantages: Any, mix_beta: Any,
    adaptive_weight_min: Any, adv_clip_max: Any,
) -> Any:
    r = named("r", named("A", _between(advantages, -adv_clip_max, adv_clip_max)) / adv_clip_max / 2 + 0.5)
    positive = (1 - mix_beta) * old_velocity + mix_beta * velocity
    negative = (1 + mix_beta) * old_velocity - mix_beta * velocity

    def loss(sign: str, mixed: Any) -> Any:
        off = named(f"off{sign}", sigma[:, None] * (noise - clean - named(f"v{sign}", mixed)))
        scale = named(f"scale{sign}", np.maximum(np.mean(np.abs(stopped(off)), axis=1), adaptive_weight_min))
        return named(f"loss{sign}", np.mean(off**2, axis=1) / scale)

    return np.mean((r * loss("+", positive) + (1 - r) * loss("-", negative)) * adv_clip_max / mix_beta)


def _grpo_tokens(
    log_prob: Any, old: Any, reference: Any, advantages: Any, mask: Any, clip_low: Any, clip_high: Any, beta: Any,
    reduce: str,
) -> Any:
    d, ratio = named("d", reference - log_prob), named("ratio", np.exp(log_prob - old))
    losses = _surrogate(ratio, advantages[:, None], 1 - clip_low, 1 + clip_high)
    losses = (losses + beta * named("kl", np.exp(d) - 1 - d)) * mask
    if reduce == "sample_mean":
        return np.mean(np.sum(losses, axis=1) / np.maximum(np.sum(mask, axis=1), 1))
    return np.sum(losses) / (np.maximum(np.sum(mask), 1) if reduce == "token_mean" else np.size(mask))


_HALF_PI, _HALF_LN_2_PI = Constant(np.pi / 2, "pi/2"), Constant(np.log(2 * np.pi) / 2, "ln(2 pi)/2")


def _drifts(x: Any, v: Any, s: Any, p: Any, g: Any) -> tuple[Any, Any]:
    dt, drift = named("dt", p - s), named("drift", g**2 / (2 * s))
    return x * (1 + drift * dt) + v * (1 + drift * (1 - s)) * dt, g * np.sqrt(-dt)


def _keeps(x: Any, v: Any, s: Any, p: Any, n: Any, keeps: Any) -> tuple[Any, Any]:
    return (1 - p) * (x - s * v) + named("keeps", keeps) * (x + (1 - s) * v), n


def _sde(x: Any, v: Any, s: Any, p: Any, a: Any, second: Any) -> tuple[Any, Any]:
    return _drifts(x, v, s, p, named("std_dev_t", a * np.sqrt(s / (1 - np.where(1 - s > 1e-5, s, second)))))


def _ddim(x: Any, v: Any, s: Any, p: Any, a: Any, second: Any) -> tuple[Any, Any]:
    r = named("r", p * (1 - s) / (s * (1 - p)))
    n = named("noise_std", a * p * np.sqrt(1 - r**2))
    return _keeps(x, v, s, p, n, np.sqrt(p**2 - n**2))


_STEPS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "sde": _sde, "ddim": _ddim, "dance_sde": lambda x, v, s, p, a, second: _drifts(x, v, s, p, a),
    "cps": lambda x, v, s, p, a, second: _keeps(x, v, s, p, p * np.sin(a * _HALF_PI), p * np.cos(a * _HALF_PI)),
}  # fmt: skip
"""The mean and the noise of what comes next, by latents, velocity, sigma, the next and the second of the schedule, and
the noise level."""


def _log_prob(transition: str) -> Callable[..., Any]:
    def log_prob(
        x: Any, v: Any, next: Any, sigmas: Any, step: Any, noise_level: Any, log_prob_kind: str, reduce: str
    ) -> Any:
        sigma, after = named("sigma", sigmas[step]), named("sigma_next", sigmas[step + 1])
        mean, n = _STEPS[transition](x, v, sigma, after, noise_level, sigmas[1])
        mean, n = named("mean", mean), named("noise_std", n)
        value = -((next - mean) ** 2)
        value = value if log_prob_kind == "squared" else value / (2 * n**2)
        value = value - np.log(n) - _HALF_LN_2_PI if log_prob_kind == "density" else value
        return np.sum(value) if reduce == "sum" else np.mean(value)

    return log_prob


_linspace, _normals = traced(np.linspace), traced(noise.normals)


def _static(steps: Any, shift: Any, grid: str) -> Any:
    def shifted(u: Any) -> Any:
        return shift * u / (1 + (shift - 1) * u)

    return np.append(shifted(_linspace(1, 1 / steps if grid == "linspace" else shifted(0.001), steps)), 0)


def _dynamic(
    steps: Any, tokens: Any, base_tokens: Any, max_tokens: Any, base_shift: Any, max_shift: Any, terminal: Any,
    time_shift: str,
) -> Any:
    mu = named("mu", base_shift + (max_shift - base_shift) / (max_tokens - base_tokens) * (tokens - base_tokens))
    sigmas = _static(steps, np.exp(mu) if time_shift == "exponential" else mu, "linspace")[:-1]
    stretched = 1 - (1 - sigmas) * (1 - terminal) / (1 - sigmas[-1])
    return np.append(np.where(terminal > 0, stretched, sigmas), 0)


def _guided(rule: str) -> Callable[..., Any]:
    def guided(positive: Any, negative: Any, scale: Any, phi: Any = 0) -> Any:
        c, axis = named("guided", negative + scale * (positive - negative)), -1 if rule == "norm_of_tokens" else None
        if rule == "plain":
            return c
        if rule == "deviation":
            return c * (phi * np.std(positive) / np.std(c) + 1 - phi)
        ratio = np.linalg.norm(positive, axis=axis, keepdims=True) / np.linalg.norm(c, axis=axis, keepdims=True)
        return c * (np.minimum(ratio, 1) if rule == "norm_clamped" else ratio)

    return guided


def _group_relative(rewards: Any, std: str = "none", ddof: str = "0", epsilon: Any = 0) -> Any:
    off = rewards - np.mean(rewards, axis=1, keepdims=True)
    if std == "none":
        return off
    of: Any = {"axis": 1, "keepdims": True} if std == "group" else {}
    return off / (np.std(rewards, ddof=int(ddof), **of) + epsilon)


def kept(z: Floats, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.bool_]:
    """Which numbers filters keep, along the first axis."""
    order = np.argsort(-z, axis=0, kind="stable")
    p = np.exp(np.take_along_axis(z, order, 0) - z.max(axis=0))
    rank = np.arange(len(z)).reshape(-1, *[1] * (z.ndim - 1))
    p = np.where(rank < (top_k or len(z)), p, 0)
    p = p / p.sum(axis=0)
    kept = (p > 0) & (np.cumsum(p, axis=0) - p < (top_p or 1)) & (p >= min_p * p[0])
    out = np.zeros(z.shape, bool)
    np.put_along_axis(out, order, kept, 0)
    return out


def picked(z: Floats, tokens: Any) -> Floats:
    """The numbers of some tokens, along the first axis."""
    at = np.asarray(tokens, int)
    return np.asarray(np.take_along_axis(z, at[None], 0)[0] if at.ndim else z[at])


_kept_by, _at = traced(kept), traced(picked)


def token_log_probs(
    logits: Any, token: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, log_prob_kind: str
) -> Any:
    """The log-probs of tokens [T] by logits [V, T], or of one by [V]: raw, or of what temperature and filters leave."""
    z = logits if log_prob_kind == "raw" else logits / temperature
    if log_prob_kind == "processed":
        z = named("scaled", z)
        z = np.where(_kept_by(z, top_k, top_p, min_p), z, -np.inf)
    z = named("z", z)
    z = z - np.max(z, axis=0)
    return _at(z, token) - np.log(np.sum(np.exp(z), axis=0))


FORMULAS: dict[str, Callable[..., Any]] = {
    "losses/ppo": _ppo, "losses/grpo_guard": _ppo, "losses/flow_dppo": _dppo, "losses/diffusion_nft": _nft,
    "losses/gspo": _gspo, "losses/dpo": _dpo, "losses/grpo_tokens": _grpo_tokens,
    "losses/diffusion_opd": lambda mean, teacher_mean, noise_std: np.mean(_divergence(mean, teacher_mean, noise_std)),
    **{f"transitions/{t}": _log_prob(t) for t in _STEPS},
    "transitions/ode": lambda x, v, sigmas, step: x + (sigmas[step + 1] - sigmas[step]) * v,
    "schedules/static": _static, "schedules/dynamic": _dynamic,
    "noise/philox": lambda seed, step, count: _normals(seed, step, count),
    **{f"guidance/{r}": _guided(r) for r in ("plain", "norm_of_tokens", "norm_clamped", "deviation")},
    "advantages/flow_grpo": _group_relative,
    "advantages/rloo": lambda rewards: _group_relative(rewards) * np.size(rewards, 1) / (np.size(rewards, 1) - 1),
    "advantages/gpg": lambda rewards: _group_relative(rewards) * (np.size(rewards) / np.count_nonzero(rewards)),
    "tokens/log_prob": token_log_probs,
}  # fmt: skip
"""The formula of each set."""
