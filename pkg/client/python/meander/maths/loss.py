"""The policy loss of Flow-GRPO and its relatives in float64: a reference to check a trainer's own against.

Log-probs are those of one step of each sample, shape [B]: means over the latent's elements, as step events of kind
density carry them. There are no gradients. The Go package pkg/client/policyloss computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

CLIP, ADV_CLIP_MAX = 1e-4, 5.0
"""Defaults of the losses: ratios count within 1 - CLIP and 1 + CLIP, advantages within plus and minus ADV_CLIP_MAX."""


def _arrays(**named: ArrayLike) -> list[np.ndarray]:
    out = [np.asarray(v, np.float64) for v in named.values()]
    for name, a in zip(named, out):
        if a.shape != out[0].shape or a.size == 0:
            raise ValueError(f"{name}: shape {a.shape}; want {out[0].shape}, with at least one sample")
        if not np.isfinite(a).all():
            raise ValueError(f"{name}: has NaN or infinity; want finite numbers")
    return out


def _clipped(
    ratio: np.ndarray, log_prob: np.ndarray, old: np.ndarray, advantages: np.ndarray, weights: ArrayLike | None,
    clip: float, adv_clip_max: float
) -> dict[str, Any]:
    if not 0 <= clip < np.inf:
        raise ValueError(f"clip: {clip}; must be a finite number of at least 0")
    if not 0 < adv_clip_max < np.inf:
        raise ValueError(f"adv_clip_max: {adv_clip_max}; must be a finite number above 0")
    a = np.clip(advantages, -adv_clip_max, adv_clip_max)
    losses = np.maximum(-a * ratio, -a * np.clip(ratio, 1 - clip, 1 + clip))
    if weights is not None:
        losses = losses * _arrays(log_prob=log_prob, weights=weights)[1]
    return {
        "loss": losses.mean(),
        "losses": losses,
        "ratio": ratio,
        "ppo_kl": (old - log_prob).mean(),
        "approx_kl": 0.5 * ((log_prob - old) ** 2).mean(),
        "pg_clipfrac": (np.abs(ratio - 1) > clip).mean(),
        "pg_clipfrac_higher": (ratio - 1 > clip).mean(),
        "pg_clipfrac_lower": (1 - ratio > clip).mean(),
        "ratio_mean": ratio.mean(),
        "ratio_std": ratio.std(ddof=1) if ratio.size > 1 else 0.0,
    }


def ppo(
    log_prob: ArrayLike, old: ArrayLike, advantages: ArrayLike, clip: float = CLIP, adv_clip_max: float = ADV_CLIP_MAX,
    weights: ArrayLike | None = None,
) -> dict[str, Any]:
    """max(-A' r, -A' clamp(r, 1-clip, 1+clip)) with r = exp(log_prob - old) and A' the clamped advantage, and its
    metrics.

    weights [B] multiply the samples' losses, where there are some (see rollout_weights); they do not change what the
    mean is divided by.
    """
    new, old, advantages = _arrays(log_prob=log_prob, old=old, advantages=advantages)
    return _clipped(np.exp(new - old), new, old, advantages, weights, clip, adv_clip_max)


def grpo_guard(
    log_prob: ArrayLike, old: ArrayLike, advantages: ArrayLike, mean: ArrayLike, old_mean: ArrayLike, noise_std: float,
    step: float,
    clip: float = CLIP, adv_clip_max: float = ADV_CLIP_MAX, weights: ArrayLike | None = None,
) -> dict[str, Any]:
    """GRPO-Guard: r = exp((log_prob - old + mean((m - m_old)^2) / 2n^2) n), the loss divided by the step, sigma -
    sigma_next.

    mean and old_mean are [B, ...], the transition means of both policies; noise_std is that of the step event; weights
    are those of ppo.
    """
    new, old, advantages = _arrays(log_prob=log_prob, old=old, advantages=advantages)
    if not (noise_std > 0 and step > 0):
        raise ValueError(f"noise_std, step: {noise_std}, {step}; must be more than 0")
    bias = _mean_square(mean, old_mean) / (2 * noise_std**2)
    out = _clipped(np.exp((new - old + bias) * noise_std), new, old, advantages, weights, clip, adv_clip_max)
    out["losses"], out["loss"] = out["losses"] / step, out["loss"] / step
    return out


def _mean_square(a: ArrayLike, b: ArrayLike) -> np.ndarray:
    a, b = _arrays(mean=a, reference=b)
    return ((a - b) ** 2).reshape(len(a), -1).mean(axis=1)


def image_kl(mean: ArrayLike, reference: ArrayLike, std: ArrayLike) -> np.ndarray:
    """mean((m - m_ref)^2) / (2 std^2) per sample, [B]: with std_dev_t as trainers log it, with noise_std the divergence
    itself.

    std is one number, one per sample, or [B, 1, ...] as a scheduler broadcasts it.
    """
    square, std = _mean_square(mean, reference), np.asarray(std, np.float64)
    if std.size not in (1, len(square)) or std.size > 1 and std.shape[0] != len(square):
        raise ValueError(f"std: shape {std.shape}; want one number, ({len(square)},) or ({len(square)}, 1, ...)")
    if not ((std > 0) & (std < np.inf)).all():
        raise ValueError(f"std: {std}; must be finite numbers above 0")
    return square / (2 * std.reshape(-1) ** 2)


def kl(kind: str, log_prob: ArrayLike, reference: ArrayLike) -> np.ndarray:
    """The estimates k1, abs, k2 and k3 (at most 10) of a KL divergence from log-probs alone.

    In verl a suffix + keeps the value and has the gradient of k2; here it changes nothing.
    """
    new, ref = _arrays(log_prob=log_prob, reference=reference)
    estimates = {
        "k1": new - ref, "abs": np.abs(new - ref), "k2": (new - ref) ** 2 / 2,
        "k3": np.minimum(_k3(_bounded(ref - new)), 10)
    }
    if kind.removesuffix("+") not in estimates:
        raise ValueError(f"kind: {kind!r}; must be one of {', '.join(estimates)}")
    return estimates[kind.removesuffix("+")]


def _bounded(log_ratio: np.ndarray) -> np.ndarray:
    return np.clip(log_ratio, -20, 20)


def _k3(d: np.ndarray) -> np.ndarray:
    return np.expm1(d) - d


Threshold = float | tuple[float, float]
"""A bound of ratios from above, the one from below being its inverse, or both: (lower, upper)."""


def rollout_weights(
    old: ArrayLike, rollout: ArrayLike, level: str | None = "token", threshold: Threshold = 2.0,
    normalize: bool = False,
    rejections: Sequence[tuple[str, Threshold]] = (),
) -> np.ndarray:
    """Importance weights [B, W] of log-probs that another engine computed, as verl's rollout correction has them.

    level is token, each step by itself; sequence, the product over the steps of a sample; or None for weights of 1. A
    threshold truncates them, a band (low, high) sets those outside to 0; normalize divides them by their mean. Each
    rejection is a rule and its threshold: token_k1..3, seq_sum_k1..3, seq_mean_k1..3 or seq_max_k2..3, with what the
    estimate may be at most, or for k1 a band of ratios or its upper end. What a rule rejects has weight 0.
    """
    old, rollout = _arrays(old=old, rollout=rollout)
    if old.ndim != 2:
        raise ValueError(f"old: shape {old.shape}; want samples and steps")
    d = old - rollout
    if level == "token":
        w = np.exp(_bounded(d))
    elif level == "sequence":
        w = np.broadcast_to(np.exp(_bounded(d.sum(axis=1, keepdims=True))), d.shape)
    elif level is None:
        w, threshold = np.ones_like(d), 1.0
    else:
        raise ValueError(f"level: {level!r}; must be token, sequence or None")
    low, high = _band(threshold)
    w = np.where((w < low) | (w > high), 0.0, w) if isinstance(threshold, tuple) else np.minimum(w, high)
    if normalize and w.sum() > 0:
        w = w / w.mean()
    for rule, limit in rejections:
        w = np.where(_rejected(rule, limit, _bounded(d)), 0.0, w)
    return w


def _band(threshold: Threshold) -> tuple[float, float]:
    low, high = threshold if isinstance(threshold, tuple) else (1 / threshold if threshold else 0, threshold)
    if not (0 < high < np.inf) or isinstance(threshold, tuple) and not 0 < low < high:
        raise ValueError(f"threshold: {threshold}; must be a number above 0, or a band (low, high)")
    return low, high


def _rejected(rule: str, threshold: Threshold, d: np.ndarray) -> np.ndarray:
    scopes: dict[str, Any] = {"token": lambda x: x, "seq_sum": np.sum, "seq_mean": np.mean, "seq_max": np.max}
    scope, _, kind = rule.rpartition("_")
    if scope not in scopes or kind not in ("k1", "k2", "k3") or rule == "seq_max_k1":
        raise ValueError(f"rule: {rule!r}; must be token_k1..3, seq_sum_k1..3, seq_mean_k1..3 or seq_max_k2..3")
    low, high = _band(threshold)
    if kind == "k1":
        if low > high:
            raise ValueError(f"threshold of {rule}: {threshold}; must be a ratio of at least 1, or a band")
        x, low, high = -d, np.log(low), np.log(high)
    elif isinstance(threshold, tuple):
        raise ValueError(f"threshold of {rule}: {threshold}; must be one number, a band is for k1")
    else:
        x, low = d**2 / 2 if kind == "k2" else _k3(d), 0
    if scope != "token":
        x = scopes[scope](x, axis=1, keepdims=True)
    return (x < low) | (x > high)
