"""Scheduled sampling with ReflexFlow in plain numpy: who rolls, from where, with which sampler, and the loss of the
result, which keeps the gradient of tensors of torch. Arrays are computed in float64; a ValueError names the argument,
its value and what it must be.

The Go package pkg/scheduled computes the same, and plans are equal to the bit. With some probability a sample starts a
few levels noisier than the timestep it is trained at, the model steps it down to there without gradient, and the
latent it comes to takes the place of the one made of data and noise (the teacher-forced one).

Levels are x = a*x0 + u*noise: of a flow model u = t/(N-1), a = 1-u; of one that predicts epsilon or v a = sqrt(abar_t),
u = sqrt(1-abar_t). compat is "exact", or "simpletuner" for what that trainer does with the library it pins (skrample
0.5): a prob_start or prob_end of 0 counts as unset; flow models step with Euler, whatever the sampler; epsilon and v
models step the wrong way, so that the latent gets noisier; the sigma of a rolled flow latent is the mirrored table
entry.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .noise import COS, SIN, philox

STRATEGIES = ("uniform", "biased_early", "biased_late")
"""How offsets are drawn."""
SAMPLERS = {"euler": 1, "dpm": 3, "unipc": 9, "unip": 9, "rk4": 4}
"""The samplers, and the highest order of each."""
EXACT_ORDERS = {"unipc": 3, "unip": 6}
"""The highest orders that the library of the public trainer computes without losing digits."""
PURE_NOISE = 1e6
"""u/a of that trainer where there is no data."""
PREDICTIONS = ("flow_prediction", "epsilon", "v_prediction")
"""What models predict."""
COMPAT = ("exact", "simpletuner")
"""What a plan and a roll agree with: the formulas, or that trainer."""
STREAM = 2
"""The stream of the draws: the third word of the counter."""
FLOOR = 1e-6
"""The least that a divisor counts for."""


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: {value!r}; must be one of {', '.join(allowed)}")


# The probability and the plan. schemas/noise.md fixes every bit.

_HALF_PI = float.fromhex("0x1.921fb54442d18p+0")


def _horner(coefficients: list[float], z: float) -> float:
    p = coefficients[0]
    for c in coefficients[1:]:
        p = p * z + c
    return p


def _sin_quarter(a: float) -> float:
    """sin(a pi/2), 0 <= a <= 1."""
    if a > 0.5:
        x = (1 - a) * _HALF_PI
        return 1 + x * x * _horner(COS, x * x)
    x = a * _HALF_PI
    return x + x * (x * x * _horner(SIN, x * x))


def probability(
    step: int, probability: float = 0.0, prob_start: float | None = None, prob_end: float | None = None,
    ramp_steps: int = 0,
    start_step: int = 0, ramp_shape: str = "linear", compat: str = "exact",
) -> float:
    """The probability that a sample is eligible to roll at training step `step`, in [0, 1].

    With ramp_steps > 0 it goes from prob_start to prob_end by q = clip((step - start_step)/ramp_steps, 0, 1), for a
    cosine by (1 - cos(pi q))/2. An end of None is probability, and 0 is a value. In the public trainer's way 0 counts
    as None, which there is 0 for prob_start and 0.5 for prob_end: so a prob_start of 0 and a probability of 1 ramp
    down.

    ValueError: a probability outside [0, 1], a negative number of steps, or another ramp_shape than linear and cosine.
    """
    _one_of("ramp_shape", ramp_shape, ("linear", "cosine"))
    _one_of("compat", compat, COMPAT)
    for name, p in (("probability", probability), ("prob_start", prob_start), ("prob_end", prob_end)):
        if p is not None and not 0 <= p <= 1:
            raise ValueError(f"{name}: {p}; must be 0 to 1")
    for name, n in (("ramp_steps", ramp_steps), ("start_step", start_step)):
        if n < 0:
            raise ValueError(f"{name}: {n}; must be at least 0")
    if compat == "simpletuner":
        prob_start = prob_start or None
        prob_end = 0.5 if prob_end is None else prob_end or None
    start = probability if prob_start is None else prob_start
    end = probability if prob_end is None else prob_end
    if ramp_steps == 0:
        return float(probability)
    if step < start_step:
        return float(start)
    q = min((step - start_step) / ramp_steps, 1.0)
    if ramp_shape == "cosine":
        q = _sin_quarter(q) ** 2
    return float(end) if q == 1 else min(max(start + (end - start) * q, 0.0), 1.0)


def _draws(seed: int, step: int, index: int, kind: int) -> tuple[int, int]:
    w = [int(x) for x in philox((index, step, STREAM, kind), seed)]
    return w[1] << 32 | w[0], w[3] << 32 | w[2]


def _unit(draw: int) -> float:
    return (draw >> 11) * 2.0**-53


def draw_timestep(seed: int, step: int, index: int, n: int) -> int:
    """A uniform timestep 0 .. n-1 of sample `index` of a batch, which was given none. seed has 64 bits, step 32."""
    return _draws(seed, step, index, 1)[0] * n >> 64


@dataclass(frozen=True)
class Planned:
    """What a plan has for one sample. It rolls from source down to base unless there is a reason not to.

    timestep is what was given and base its integer part. offset is what was drawn, 0 where masked; it may exceed steps,
    source - base. reason is "", or "disabled" (max_step_offset 0), "masked", "zero_offset" or "clipped" (base is N-1).
    """

    timestep: float
    base: int
    source: int
    offset: int
    reason: str

    @property
    def steps(self) -> int:
        """The steps from source down to base; 0: it does not roll."""
        return self.source - self.base


def plan(
    seed: int, step: int, timesteps: ArrayLike, n: int, max_step_offset: int, strategy: str = "uniform",
    probability: float = 1.0
) -> list[Planned]:
    """Which samples of a batch roll, and from where: one Planned for each of the timesteps [B], in [0, n), of which
    fractions are allowed. seed has 64 bits, step, of training, 32.

    Sample i's draws depend on (seed, step, i) alone, so a batch that is planned again is planned the same.

    ValueError: an argument is out of its range; max_step_offset must be below n.
    """
    _one_of("strategy", strategy, STRATEGIES)
    if n < 2:
        raise ValueError(f"n: {n}; must be at least 2")
    if not 0 <= max_step_offset < n:
        raise ValueError(
            f"max_step_offset: {max_step_offset}; must be at least 0 and below {n}, the number of timesteps"
        )
    if not 0 <= probability <= 1:
        raise ValueError(f"probability: {probability}; must be 0 to 1")
    if not (0 <= seed < 1 << 64 and 0 <= step < 1 << 32):
        raise ValueError(f"seed, step: {seed}, {step}; must be unsigned numbers of 64 and 32 bits")
    out = []
    for i, t in enumerate(np.asarray(timesteps, np.float64).tolist()):
        if not 0 <= t < n:
            raise ValueError(f"timesteps[{i}]: {t}; must be at least 0 and below {n}")
        base = int(t)
        if max_step_offset == 0:
            out.append(Planned(t, base, base, 0, "disabled"))
            continue
        mask, draw = _draws(seed, step, i, 0)
        if not _unit(mask) < probability:
            out.append(Planned(t, base, base, 0, "masked"))
            continue
        u = _unit(draw)
        if strategy == "uniform":
            offset = draw * (max_step_offset + 1) >> 64
        else:
            offset = round((u * u if strategy == "biased_early" else 1 - u * u) * max_step_offset)
        source = min(base + offset, n - 1)
        out.append(
            Planned(t, base, source, offset, "zero_offset" if offset == 0 else "clipped" if source == base else "")
        )
    return out


def offset_shares(strategy: str, m: int) -> np.ndarray:
    """The probabilities [m+1] of the offsets 0 .. m, float64. ValueError: an unknown strategy."""
    _one_of("strategy", strategy, STRATEGIES)
    if strategy == "uniform" or m == 0:
        return np.full(m + 1, 1 / (m + 1))
    p = np.diff(np.sqrt(np.clip((np.arange(m + 2) - 0.5) / m, 0, 1)))
    return p if strategy == "biased_early" else p[::-1]


def expected_forwards(batch: int, p: float, strategy: str, m: int, reflexflow: bool, evaluations: int = 1) -> float:
    """The mean number of evaluations of the model that a batch of so many samples costs beyond training's, where no
    base is near the top. p is the probability, m the max_step_offset, evaluations those of a step: 4 of rk4."""
    shares = offset_shares(strategy, m)
    rolled = p * evaluations * (shares * np.arange(m + 1)).sum()
    return float(batch * (rolled + (1 + p * (1 - shares[0]) if reflexflow else 0)))


def plan_metrics(
    planned: Sequence[Planned], probability: float, reflexflow: bool, evaluations: int = 1, drifts: Sequence[float] = ()
) -> dict[str, float]:
    """The numbers to log of a plan, by the names that the public trainer logs. offset_mean and offset_max are of what
    was drawn; drifts are those of the samples that rolled, none: not logged."""
    n, rolled, offsets = len(planned), sum(not s.reason for s in planned), [s.offset for s in planned]
    forwards = sum(s.steps for s in planned) * evaluations + (n + rolled if reflexflow else 0)
    m = {
        "probability": probability, "rolled_fraction": rolled / n if n else 0.0,
        "offset_mean": sum(offsets) / n if n else 0.0,
        "offset_max": max(offsets, default=0), "extra_forwards": forwards,
    }
    if len(drifts):
        m["drift_l2"] = float(np.mean(drifts))
    return {f"scheduled_sampling/{k}": v for k, v in m.items()}


# Rollouts.


def linear_alphas_cumprod(n: int = 1000, first: float = 1e-4, last: float = 0.02) -> np.ndarray:
    """alphas_cumprod [n], float64, of n betas that rise linearly from first to last (Ho et al. 2020)."""
    return np.cumprod(1 - (first + (last - first) * np.arange(n) / max(n - 1, 1)))


def zero_snr(alphas_cumprod: ArrayLike) -> np.ndarray:
    """alphas_cumprod [N], float64, whose roots are moved evenly so that the last is 0 and the first stays (Lin et al.
    2023)."""
    root = np.sqrt(np.asarray(alphas_cumprod, np.float64))
    return ((root - root[-1]) * (root[0] / (root[0] - root[-1]))) ** 2


class Levels:
    """The mixes x = a*x0 + u*noise of a model's training timesteps 0 .. N-1: u and a are [N], float64, u rises.
    prediction is what the model predicts, one of PREDICTIONS."""

    def __init__(self, prediction: str, u: np.ndarray, a: np.ndarray):
        self.prediction, self.u, self.a = prediction, u, a

    @classmethod
    def flow(cls, n: int) -> Levels:
        """u = t/(n-1), a = 1-u. ValueError: n is below 2."""
        if n < 2:
            raise ValueError(f"n: {n}; must be at least 2")
        u = np.arange(n) / (n - 1)
        return cls("flow_prediction", u, 1 - u)

    @classmethod
    def variance_preserving(cls, prediction: str, alphas_cumprod: ArrayLike) -> Levels:
        """a = sqrt(abar), u = sqrt(1-abar) of alphas_cumprod [N]. prediction is epsilon or v_prediction.

        ValueError: alphas_cumprod do not strictly decrease within (0, 1). With v_prediction the last may be 0.
        """
        _one_of("prediction", prediction, PREDICTIONS[1:])
        abar = np.asarray(alphas_cumprod, np.float64)
        least = 0 if prediction == "v_prediction" else np.finfo(np.float64).tiny
        if abar.ndim != 1 or abar.size < 2 or not (np.diff(abar) < 0).all() or not least <= abar[-1] <= abar[0] < 1:
            raise ValueError("alphas_cumprod: must be at least 2 values that strictly decrease within (0, 1)")
        return cls(prediction, np.sqrt(1 - abar), np.sqrt(abar))

    def __len__(self) -> int:
        return len(self.u)

    def at(self, t: float) -> tuple[float, float]:
        """(u, a) of timestep t, 0 to N-1: the true noise level of a latent rolled down to t. Between two timesteps u of
        flow models, u/a of others, is interpolated linearly."""
        i = int(t)
        if t == i:
            return float(self.u[i]), float(self.a[i])
        if self.prediction == "flow_prediction":
            u = float(self.u[i] + (t - i) * (self.u[i + 1] - self.u[i]))
            return u, 1 - u
        if self.a[i + 1] == 0:  # at any share of the way, on a clock that has no end
            return 1.0, 0.0
        low, high = self.u[i] / self.a[i], self.u[i + 1] / self.a[i + 1]
        s = float(low + (t - i) * (high - low))
        return s / math.hypot(1, s), 1 / math.hypot(1, s)

    def sigma(self, t: int, table: Sequence[float], compat: str = "exact") -> float:
        """The noise level u that is given to the model with a flow latent rolled down to t: the true one, or with
        compat simpletuner entry t of that trainer's table of sigmas, which runs the other way."""
        return float(table[t] if compat == "simpletuner" and t < len(table) else self.u[t])


def noised(x0: ArrayLike, noise: ArrayLike, level: tuple[float, float]) -> np.ndarray:
    """a*x0 + u*noise, float64: the teacher-forced latent of a level (u, a). x0 and noise have one shape."""
    return level[1] * np.asarray(x0, np.float64) + level[0] * np.asarray(noise, np.float64)


def drift(rolled: ArrayLike, teacher: ArrayLike) -> float:
    """|rolled - teacher| / |teacher| of two latents of one shape, with Euclidean norms; nan or inf where teacher is
    0."""
    teacher = np.asarray(teacher, np.float64)
    return float(np.linalg.norm(np.asarray(rolled) - teacher) / np.linalg.norm(teacher))


@dataclass(frozen=True)
class Step:
    """One step of a rollout, from timestep at to timestep to = at - 1: latent, in the shape of the first, float64, is
    at the level (u, a). order is that of the step."""

    at: int
    to: int
    level: tuple[float, float]
    order: int
    latent: np.ndarray


Model = Callable[[np.ndarray, float], ArrayLike]
"""(latent, timestep) -> prediction, in the latent's shape."""


def roll(
    levels: Levels, sampler: str, x: ArrayLike, source: int, target: int, model: Model, order: int = 0,
    compat: str = "exact"
) -> Iterator[Step]:
    """Steps the latent x, of any shape, from timestep source down to target, 0 <= target <= source < N, and yields each
    Step. model(x, timestep) returns the prediction; rk4 asks at halves of timesteps, too.

    sampler is one of SAMPLERS. order 0 is the sampler's usual one, 2 of dpm, unipc and unip. The latent that the model
    sees, and that a step has, is the predictor's; unipc goes on from the corrected one.

    ValueError: an unknown sampler, timesteps out of range, or an order that the sampler does not have.
    """
    _one_of("sampler", sampler, list(SAMPLERS))
    _one_of("compat", compat, COMPAT)
    if not 0 <= target <= source < len(levels):
        raise ValueError(f"source, target: {source}, {target}; must be 0 <= target <= source < {len(levels)}")
    most = SAMPLERS[sampler]
    if compat == "simpletuner" and sampler == "rk4":
        raise ValueError("sampler: rk4; must be euler, dpm, unipc or unip with compat simpletuner, which has no rk4")
    if sampler == "rk4" and levels.a[-1] == 0 and levels.prediction != "flow_prediction":
        raise ValueError("sampler: rk4; must be euler, dpm, unipc or unip where the last timestep has no data")
    if not 0 <= order <= (9 if compat == "simpletuner" else most) or sampler == "rk4" and order not in (0, 4):
        raise ValueError(
            f"order: {order}; must be {'4' if sampler == 'rk4' else f'1 to {most}'} with {sampler}, or 0 for its own"
        )
    flow = levels.prediction == "flow_prediction"
    if compat == "simpletuner" and not flow and order > EXACT_ORDERS.get(sampler, 9):
        raise ValueError(
            f"order: {order}; must be at most {EXACT_ORDERS[sampler]} with {sampler} and compat simpletuner"
        )
    state = np.array(x, np.float64)
    if flow and (sampler == "euler" or compat == "simpletuner"):
        for t in range(source, target, -1):
            state = state + (levels.u[t - 1] - levels.u[t]) * np.asarray(model(state, float(t)))
            yield Step(t, t - 1, levels.at(t - 1), 1, state)
    elif sampler == "rk4":
        yield from _runge_kutta(levels, state, source, target, model)
    else:
        yield from _multistep(
            levels, sampler, state, source, target, model, min(order or min(2, most), most), compat == "simpletuner"
        )


def _runge_kutta(levels: Levels, x: np.ndarray, source: int, target: int, model: Model) -> Iterator[Step]:
    """dx/du = v of flow; dy/ds = e of the others, with y = x/a, s = u/a."""

    def scale(level: tuple[float, float]) -> float:
        return 1.0 if levels.prediction == "flow_prediction" else level[1]

    def slope(y: np.ndarray, t: float) -> np.ndarray:
        level = levels.at(t)
        x = scale(level) * y
        p = np.asarray(model(x, t), np.float64)
        return level[0] * x + level[1] * p if levels.prediction == "v_prediction" else p

    for t in range(source, target, -1):
        here, there = levels.at(t), levels.at(t - 1)
        y, d = x / scale(here), there[0] / scale(there) - here[0] / scale(here)
        k1 = slope(y, float(t))
        k2 = slope(y + d / 2 * k1, t - 0.5)
        k3 = slope(y + d / 2 * k2, t - 0.5)
        k4 = slope(y + d * k3, t - 1.0)
        x = scale(there) * (y + d / 6 * (k1 + 2 * k2 + 2 * k3 + k4))
        yield Step(t, t - 1, there, 4, x)


def _log_ratio(level: tuple[float, float]) -> float:
    u, a = level
    return math.inf if u == 0 else -math.inf if a == 0 else math.log(a / u)


def _moments(h: float, count: int) -> np.ndarray:
    """b_n = n! h phi_{n+1}(h) / B(h) of UniPC with B(h) = e^-h - 1, n = 1 .. count."""
    if math.isinf(h):
        return np.ones(1)
    if h < 1:
        phi = [math.fsum((-h) ** j / math.factorial(j + k) for j in range(25)) for k in range(1, count + 2)]
    else:
        phi = [math.expm1(-h) / -h]
        for k in range(1, count + 1):
            phi.append((phi[-1] - 1 / math.factorial(k)) / -h)
    return np.array([math.factorial(n) * phi[n] / phi[0] for n in range(1, count + 1)])


class _Span:
    """A step between two levels; reach is how far back a level lies, in steps of this one."""

    def __init__(self, here: tuple[float, float], there: tuple[float, float], directed: bool = False):
        self.ratio, self.log = there[0] / here[0], _log_ratio(here)
        self.h = abs(_log_ratio(there) - self.log)
        self.c = there[1] - here[1] * self.ratio if directed else -there[1] * math.expm1(-self.h)

    def reach(self, level: tuple[float, float]) -> float:
        return (_log_ratio(level) - self.log) / self.h


def _dpm(x: np.ndarray, m: np.ndarray, span: _Span, past: list[Any]) -> np.ndarray:
    """DPM-Solver++ multistep; past are the (level, estimate) before, newest first."""
    out = span.ratio * x + span.c * m
    if not past:
        return out
    r = -span.reach(past[0][0])
    d1 = (m - past[0][1]) / r
    if len(past) == 1:
        return out + span.c / 2 * d1
    r2 = span.reach(past[0][0]) - span.reach(past[1][0])
    d1b = (past[0][1] - past[1][1]) / r2
    b = _moments(span.h, 2)
    return out + span.c * b[0] * (d1 + r / (r + r2) * (d1 - d1b)) + span.c * b[1] / 2 * (d1 - d1b) / (r + r2)


def _uni(x: np.ndarray, m: np.ndarray, span: _Span, past: list[Any], corrected: np.ndarray | None = None) -> np.ndarray:
    """UniP, or UniC where the estimate at the step's end is given."""
    out = span.ratio * x + span.c * m
    reaches, d = [span.reach(level) for level, _ in past], [e - m for _, e in past]
    if corrected is not None:
        reaches, d = [*reaches, 1.0], [*d, corrected - m]
    if not d:
        return out
    b = _moments(span.h, len(d))
    rho = np.linalg.solve([[r**n for r in reaches] for n in range(len(d))], b)
    return out + span.c * sum(p / r * e for p, r, e in zip(rho, reaches, d))


def _multistep(
    levels: Levels, sampler: str, x: np.ndarray, source: int, target: int, model: Model, order: int, rises: bool
) -> Iterator[Step]:
    n = len(levels)
    history: list[tuple[np.ndarray, np.ndarray]] = []  # estimate and corrected latent, newest first

    def index(t: int, ahead: int) -> int:
        return int(t / n * n) + ahead if rises else t - ahead

    def near(t: int, ahead: int) -> tuple[float, float]:
        i = index(t, ahead)
        u, a = (0.0, 1.0) if i >= n else levels.at(i % n)
        return (math.sin(math.atan(PURE_NOISE)), math.cos(math.atan(PURE_NOISE))) if rises and a == 0 else (u, a)

    def order_at(t: int, ahead: int, known: int) -> int:
        return max(1, min(order, known + 1, index(t, ahead) + 1))

    def behind(t: int, first: int, count: int, estimates: Any) -> list[Any]:
        out = []
        for k in range(count):
            level = near(t, -first - k)
            if level[1] == 0:
                break
            out.append((level, estimates[k][0]))
        return out

    for t in range(source, target, -1):
        here, there = near(t, 0), near(t, 1)
        m = _estimate(levels, x, np.asarray(model(x, float(t)), np.float64), here)
        if sampler == "unipc" and history:
            past = behind(t, 2, order_at(t, -1, len(history) - 1) - 1, history[1:])
            x = _uni(history[0][1], history[0][0], _Span(near(t, -1), here), past, m)
        past = behind(t, 1, order_at(t, 0, len(history)) - 1, history) if there[0] > 0 else []
        history = [(m, x), *history][:order]
        span = _Span(here, there, sampler == "euler")
        x = _dpm(x, m, span, past) if sampler == "dpm" else _uni(x, m, span, past)
        yield Step(t, t - 1, there, 1 + len(past), x)


def _estimate(levels: Levels, x: np.ndarray, prediction: np.ndarray, level: tuple[float, float]) -> np.ndarray:
    """The clean latent x0 that follows from x at a level (u, a) and the model's prediction there."""
    u, a = level
    if levels.prediction == "flow_prediction":
        return x - u * prediction
    return (x - u * prediction) / a if levels.prediction == "epsilon" else a * x - u * prediction


# The loss.


def reflexflow_on(switch: bool | None, max_step_offset: int, prediction: str) -> bool:
    """Whether the loss is ReflexFlow's. It is for flow models only; there a switch of None is on where samples may
    roll."""
    return prediction == "flow_prediction" and (max_step_offset > 0 if switch is None else switch)


def _torch(*values: Any) -> Any:
    """The module torch where one of the values is a tensor of it, else None."""
    torch = sys.modules.get("torch")
    return torch if torch and any(isinstance(v, torch.Tensor) for v in values) else None


def _samples(**named: Any) -> list[Any]:
    """The arrays [B, ...] as float64 [B, D], of torch with their gradient where one is a tensor; None stays.
    ValueError: shapes differ, or a number is not finite."""
    torch = _torch(*named.values())
    if torch:
        device = next(v.device for v in named.values() if isinstance(v, torch.Tensor))
        wide = torch.float32 if device.type == "mps" else torch.float64  # which has no float64
        out: list[Any] = [None if v is None else torch.as_tensor(v).to(device, wide) for v in named.values()]
    else:
        out = [None if v is None else np.asarray(v, np.float64) for v in named.values()]
    for name, a in zip(named, out):
        if a is None:
            continue
        if a.shape != out[0].shape or a.ndim < 2 or 0 in a.shape:
            raise ValueError(f"{name}: shape {tuple(a.shape)}; must be samples and elements, alike in all")
        if not (torch or np).isfinite(a).all():
            raise ValueError(f"{name}: has NaN or infinity; must be finite numbers")
    return [None if a is None else a.reshape(len(a), -1) for a in out]


def reflexflow_weights(clean: Any, biased: Any, alpha: float = 1.0) -> Any:
    """The weights [B, D], float64, of the elements of samples: 1 + alpha E / max(sum |E| over the sample, 1e-6), with
    E = clean - biased, both [B, ...]; they have no gradient.

    The mean of |w - 1| is alpha/D. With an alpha above 1 weights can be negative. ValueError: shapes differ, or a
    number is not finite.
    """
    torch = _torch(clean, biased)
    a, b = (v.detach() if torch else v for v in _samples(clean=clean, biased=biased))
    e = a - b
    total = abs(e).sum(1)[:, None]
    return 1 + alpha * e / (total.clamp_min(FLOOR) if torch else np.maximum(total, FLOOR))


def anti_drift(pred: Any, noisy: Any, x0: Any) -> Any:
    """The anti-drift term of each sample, [B], float64: |pred/|pred| - d/|d||^2 with d = noisy - x0, which is 2 - 2
    cos(pred, d). Arguments are [B, ...]; lengths count as at least 1e-6. ValueError: shapes differ, or a number is not
    finite."""
    torch = _torch(pred, noisy, x0)
    p, n, x = _samples(pred=pred, noisy=noisy, x0=x0)

    def unit(v: Any) -> Any:
        if torch:
            return v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(FLOOR)
        return v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), FLOOR)

    return ((unit(p) - unit(n - x)) ** 2).sum(1)


def reflexflow(
    pred: Any, target: Any, noisy: Any, x0: Any, clean: Any = None, biased: Any = None, alpha: float | None = 1.0,
    beta1: float | None = 10.0, beta2: float | None = 1.0, losses: Any = None, mask: Any = None,
) -> dict[str, Any]:
    """The loss mean(FC + beta1*ADR) of a batch, "loss", and its terms, float64: "losses", "fc" and "adr" are [B], of
    each sample, "weights" [B, D], of each element, and the reflexflow/ ones numbers to log. Arguments are [B, ...].

    Of tensors of torch they are tensors, on the device of the first of them: the loss has the gradient of pred, and of
    the other arguments but clean and biased, whose weights have none, as the public trainer detaches them. What is to
    log is detached.

    FC = beta2 * mean(w * losses * mask) per sample, with losses the squared errors unless they are given; ADR is
    anti_drift, which is not masked and applies to every sample. clean and biased are the model's outputs for the
    teacher-forced latent and for the rolled one, the same where a sample did not roll; without both, all weights are 1.
    alpha, beta1 and beta2 of None are 0, 0 and 1, as the public trainer reads null.

    ValueError: only one of clean and biased is given, shapes differ, or a number is not finite.
    """
    alpha, beta1, beta2 = alpha or 0.0, beta1 or 0.0, 1.0 if beta2 is None else beta2
    if not (math.isfinite(alpha) and 0 <= beta1 < math.inf and 0 <= beta2 < math.inf):
        raise ValueError(f"alpha, beta1, beta2: {alpha}, {beta1}, {beta2}; must be finite, and the betas at least 0")
    if (clean is None) != (biased is None):
        raise ValueError("clean, biased: one of them; must be both or neither")
    p, t, n, x, c, b, given, m = _samples(
        pred=pred, target=target, noisy=noisy, x0=x0, clean=clean, biased=biased, losses=losses, mask=mask
    )
    adr = anti_drift(p, n, x)
    w = (_torch(p) or np).ones_like(p) if c is None else reflexflow_weights(c, b, alpha)
    fc = beta2 * (w * ((p - t) ** 2 if given is None else given) * (1 if m is None else m)).mean(1)
    exposure = 0 * adr if c is None else abs(c - b).sum(1)
    logged = {
        "exposure_l1": exposure.mean(), "weight_min": w.min(), "weight_max": w.max(), "fc_loss": fc.mean(),
        "adr_loss": adr.mean(),
    }
    return {
        "loss": (fc + beta1 * adr).mean(), "losses": fc + beta1 * adr, "fc": fc, "adr": adr, "weights": w,
        **{f"reflexflow/{k}": v.detach() if _torch(v) else v for k, v in logged.items()},
    }
