"""The policy loss of Flow-GRPO and its relatives in float64: a reference to check a trainer's own against.

Log-probs are those of one step of each sample, shape [B]: means over the latent's elements, as step events of kind
density carry them. There are no gradients. The Go package pkg/policyloss computes the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

CLIP, ADV_CLIP_MAX = 1e-4, 5.0


def _arrays(**named: ArrayLike) -> list[np.ndarray]:
    out = [np.asarray(v, np.float64) for v in named.values()]
    for name, a in zip(named, out):
        if a.shape != out[0].shape or a.size == 0:
            raise ValueError(f"{name}: shape {a.shape}; want {out[0].shape}, with at least one sample")
    return out


def _clipped(ratio: np.ndarray, log_prob: np.ndarray, old: np.ndarray, advantages: np.ndarray, clip: float, adv_clip_max: float) -> dict:
    if not 0 <= clip < np.inf:
        raise ValueError(f"clip = {clip}: want a finite number of at least 0")
    if not 0 < adv_clip_max < np.inf:
        raise ValueError(f"adv_clip_max = {adv_clip_max}: want a finite number above 0")
    a = np.clip(advantages, -adv_clip_max, adv_clip_max)
    losses = np.maximum(-a * ratio, -a * np.clip(ratio, 1 - clip, 1 + clip))
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


def ppo(log_prob: ArrayLike, old: ArrayLike, advantages: ArrayLike, clip: float = CLIP, adv_clip_max: float = ADV_CLIP_MAX) -> dict:
    """max(-A' r, -A' clamp(r, 1-clip, 1+clip)) with r = exp(log_prob - old) and A' the clamped advantage, and its metrics."""
    new, old, advantages = _arrays(log_prob=log_prob, old=old, advantages=advantages)
    return _clipped(np.exp(new - old), new, old, advantages, clip, adv_clip_max)


def grpo_guard(
    log_prob: ArrayLike, old: ArrayLike, advantages: ArrayLike, mean: ArrayLike, old_mean: ArrayLike, noise_std: float, step: float,
    clip: float = CLIP, adv_clip_max: float = ADV_CLIP_MAX,
) -> dict:
    """GRPO-Guard: r = exp((log_prob - old + mean((m - m_old)^2) / 2n^2) n), the loss divided by the step, sigma - sigma_next.

    mean and old_mean are [B, ...], the transition means of both policies; noise_std is that of the step event.
    """
    new, old, advantages = _arrays(log_prob=log_prob, old=old, advantages=advantages)
    if not (noise_std > 0 and step > 0):
        raise ValueError(f"noise_std = {noise_std}, step = {step}: want more than 0")
    bias = _mean_square(mean, old_mean) / (2 * noise_std**2)
    out = _clipped(np.exp((new - old + bias) * noise_std), new, old, advantages, clip, adv_clip_max)
    out["losses"], out["loss"] = out["losses"] / step, out["loss"] / step
    return out


def _mean_square(a: ArrayLike, b: ArrayLike) -> np.ndarray:
    a, b = _arrays(mean=a, reference=b)
    return ((a - b) ** 2).reshape(len(a), -1).mean(axis=1)


def image_kl(mean: ArrayLike, reference: ArrayLike, std: ArrayLike) -> np.ndarray:
    """mean((m - m_ref)^2) / (2 std^2) per sample: with std_dev_t as trainers log it, with noise_std the divergence itself."""
    std = np.asarray(std, np.float64)
    if not (std > 0).all():
        raise ValueError(f"std = {std}: want more than 0")
    return _mean_square(mean, reference) / (2 * std**2)


def kl(kind: str, log_prob: ArrayLike, reference: ArrayLike) -> np.ndarray:
    """The estimates k1, abs, k2 and k3 of a KL divergence from log-probs alone."""
    new, ref = _arrays(log_prob=log_prob, reference=reference)
    d = np.clip(ref - new, -20, 20)
    estimates = {"k1": new - ref, "abs": np.abs(new - ref), "k2": (new - ref) ** 2 / 2, "k3": np.expm1(d) - d}
    if kind not in estimates:
        raise ValueError(f"kind = {kind!r}: want one of {', '.join(estimates)}")
    return estimates[kind]


def rollout_weights(old: ArrayLike, rollout: ArrayLike, level: str = "token", threshold: float | tuple[float, float] = 2.0) -> np.ndarray:
    """Importance weights [B, W] of log-probs that another engine computed: truncated at a threshold, or 0 outside of a band."""
    old, rollout = _arrays(old=old, rollout=rollout)
    d = np.clip(old - rollout, -20, 20)
    if level == "sequence":
        d = np.broadcast_to(np.clip(d.sum(axis=1, keepdims=True), -20, 20), d.shape)
    elif level != "token":
        raise ValueError(f"level = {level!r}: want token or sequence")
    w = np.exp(d)
    if isinstance(threshold, tuple):
        low, high = threshold
        return np.where((w < low) | (w > high), 0.0, w)
    return np.minimum(w, threshold)
