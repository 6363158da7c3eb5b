"""Any schedule of diffusers as one of a flow, and any prediction as a velocity.

A state x = a x0 + b eps is y = x / (a + b) = (1 - s) x0 + s eps at s = b / (a + b), and its velocity is eps - x0. DDIM
without noise is then Euler's step in y, exactly.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .faults import Fault

_PREDICTIONS = ("flow", "epsilon", "v_prediction", "sample")
_NOISE_ALONE = 1e-3  # a share of the sample below which no epsilon tells it
_ON_GRID = 2e-6
"""How far a sigma may be from one of the grid: hosts send them as float32."""


def kind_of(scheduler: Any) -> str:
    """flow; vp, of alphas_cumprod; ve, of sigmas; edm, of preconditioned networks; empty: none of these."""
    name, config = type(scheduler).__name__, scheduler.config
    if (
        "FlowMatch" in name
        or config.get("use_flow_sigmas")
        or config.get("prediction_type") in ("flow_prediction", "flow")
    ):
        return "flow"
    if name.startswith(("EDM", "CosineDPM")):
        return "edm"
    if name.startswith(("Euler", "Heun", "LMS", "KDPM2", "DPMSolverSDE")):
        return "ve"
    return "vp" if hasattr(scheduler, "alphas_cumprod") else ""


def prediction_of(scheduler: Any) -> str:
    """flow, epsilon, v_prediction or sample."""
    return "flow" if kind_of(scheduler) == "flow" else str(scheduler.config.get("prediction_type") or "epsilon")


def suited(scheduler: Any) -> Any:
    """The scheduler itself, or one of equal noise levels with a table of one timestep for each step, whose own steps
    are Euler's in canonical coordinates. Fault of class config: its levels are not known, or no other has them so."""
    kind, name, config = kind_of(scheduler), type(scheduler).__name__, scheduler.config
    diffusers, made = importlib.import_module("diffusers"), scheduler
    if not kind:
        raise _fault("_class_name", name, "a scheduler whose levels of noise are known: flow matching, DDIM or Euler")
    if (prediction := prediction_of(scheduler)) not in _PREDICTIONS:
        raise _fault("prediction_type", prediction, f"one of {', '.join(_PREDICTIONS)}")
    if kind == "vp" and hasattr(scheduler, "sigmas"):  # of solvers: DPM's first order is DDIM
        ends = {"final_sigmas_type": "sigma_min"} if name.startswith(("DEIS", "SASolver")) else {}
        made = diffusers.DPMSolverMultistepScheduler.from_config(
            config, algorithm_type="dpmsolver++", solver_order=1, thresholding=False, **ends
        )
    elif kind == "vp":
        levels = scheduler.alphas_cumprod
        tables = (diffusers.DDIMScheduler, diffusers.CogVideoXDDIMScheduler)
        others = (cls.from_config(config, clip_sample=False, thresholding=False) for cls in tables)
        equal = (s for s in others if np.allclose(s.alphas_cumprod, levels, rtol=1e-5, atol=1e-7))
        if (made := next(equal, None)) is None:
            raise _fault("_class_name", name, "DDIMScheduler or another with the levels of noise of DDIM or CogVideoX")
    elif kind == "ve":
        made = diffusers.EulerDiscreteScheduler.from_config(config)
    if made is not scheduler and name != type(made).__name__:
        for steps in (4, 7):
            own, ours = (_timesteps(s, steps) for s in (scheduler, made))
            if any(not np.isclose(own, t).any() for t in ours):
                raise _fault(
                    "_class_name", name, "DDIMScheduler or another that steps from level to level: what this one does "
                    f"at its timesteps {', '.join(f'{t:g}' for t in own)} of {steps} steps is not computed"
                )  # fmt: skip
    return made


def of_first_order(scheduler: Any) -> Any:
    """The scheduler itself, or of a solver the one whose steps are Euler's in canonical coordinates, if any are."""
    config = scheduler.config
    if "solver_order" not in config:
        return scheduler
    algorithm = str(config.get("algorithm_type")).removeprefix("sde-")
    own = {"disable_corrector": [*range(1000)], "algorithm_type": algorithm}
    own = {name: value for name, value in own.items() if name in config}
    return type(scheduler).from_config(config, solver_order=1, **own)


def notes_of(scheduler: Any, made: Any) -> list[str]:
    """What hosts should say of a scheduler that is computed as another one."""
    names, out = [type(s).__name__ for s in (scheduler, made)], []
    if made is not scheduler and names[0] != names[1]:
        out.append(f"{names[0]} is computed as {names[1]}, which has the same levels of noise")
    if scheduler.config.get("solver_order", 1) > 1 and made.config.get("solver_order") == 1:
        out.append("steps are of first order, not of the solver of the scheduler")
    if kind_of(scheduler) == "vp" and scheduler.config.get("clip_sample") and made is not scheduler:
        out.append("clip_sample of the scheduler is left away: a sample is what the network predicts")
    return out


def _timesteps(scheduler: Any, steps: int) -> np.ndarray:
    scheduler.set_timesteps(steps)
    return np.asarray(scheduler.timesteps.double())


def _fault(key: str, value: str, must: str) -> Fault:
    return Fault("config", f"scheduler/scheduler_config.json: {key}: {value:.80}; must be {must}")


@dataclass(frozen=True)
class Point:
    """A place on a schedule: timestep, coefficients of x0 and noise, and the index of its step."""

    t: torch.Tensor
    """As the pipeline has it."""
    a: float
    b: float
    """What x0 and the noise are multiplied by."""
    k: int
    """Of the last step of the grid at or before it."""
    on_grid: bool
    """Whether it is one of the grid, and not between two."""


class Grid:
    """The steps of a scheduler in canonical coordinates, for the timesteps of a loop."""

    def __init__(self, scheduler: Any, timesteps: torch.Tensor):
        """Fault of class config: a scheduler whose noise levels are not known."""
        self.scheduler, self.kind, self.timesteps = scheduler, kind_of(scheduler), timesteps
        self.prediction = prediction_of(scheduler)
        if not self.kind:
            raise Fault("config", f"scheduler: {type(scheduler).__name__}: its levels of noise are not known")
        table = scheduler.timesteps.as_subclass(torch.Tensor).cpu().double()
        at = [int((table - t).abs().argmin()) for t in timesteps.cpu().double()]
        self.inverted = bool(scheduler.config.get("invert_sigmas"))
        if self.kind == "vp" and not hasattr(scheduler, "sigmas"):
            abar = scheduler.alphas_cumprod.double()
            last = float(getattr(scheduler, "final_alpha_cumprod", 1.0))
            levels = [float(abar[int(t)]) for t in timesteps] + [last]
            self.ab = [(v**0.5, (1 - v) ** 0.5) for v in levels]
        else:
            sigmas = scheduler.sigmas.double().cpu()
            self.ab = [self._of(float(sigmas[i])) for i in (*at, at[-1] + 1)]
        if self.prediction == "epsilon" and self.kind != "edm" and self.ab[0][0] < _NOISE_ALONE * self.ab[0][1]:
            raise _fault(
                "prediction_type", "epsilon", "v_prediction beside rescale_betas_zero_snr: its first state is noise "
                "alone, of which epsilon does not tell the sample"
            )  # fmt: skip
        self.sigmas = [b / (a + b) for a, b in self.ab]
        """T + 1 of them, the last where the last step ends."""

    def _of(self, sigma: float) -> tuple[float, float]:
        """What x0 and the noise are multiplied by at a sigma of the scheduler."""
        if self.kind == "vp":
            return (1 + sigma**2) ** -0.5, sigma * (1 + sigma**2) ** -0.5
        if self.kind != "flow":
            return 1.0, sigma
        s = 1 - sigma if self.inverted else sigma
        return 1 - s, s

    def init(self) -> float:
        """What noise of deviation 1 is multiplied by for the first state, in canonical coordinates."""
        a, b = self.ab[0]
        return float(getattr(self.scheduler, "init_noise_sigma", 1.0)) / (a + b) if self.kind != "flow" else 1.0

    def find(self, sigma: float) -> Point:
        """The point of a canonical sigma, on the grid or between its steps. Fault of class latents: none."""
        grid = np.array(self.sigmas[:-1])
        near = int(np.abs(grid - sigma).argmin())
        if abs(grid[near] - sigma) <= _ON_GRID:
            return Point(self.timesteps[near], *self.ab[near], near, True)
        if not 0 < sigma <= 1 or (sigma == 1 and self.kind != "flow"):
            raise Fault("latents", f"sigma: {sigma:g}; must be above 0 and below 1")
        k = max(int((grid >= sigma).sum()) - 1, 0)
        own = sigma / (1 - sigma) if self.kind != "flow" else 1 - sigma if self.inverted else sigma
        if self.kind == "flow":
            t = own * float(self.scheduler.config.get("num_train_timesteps", 1000))
            t = t if self.timesteps.is_floating_point() else int(t)  # as the scheduler rounds
        elif self.kind == "edm":
            t = float(self.scheduler.precondition_noise(torch.tensor(own)))
        else:
            abar = self.scheduler.alphas_cumprod.double().cpu().numpy()
            levels = 0.5 * np.log((1 - abar) / abar)
            t = float(np.interp(np.log(own), levels, np.arange(len(levels))))
        return Point(torch.tensor(t, dtype=torch.float32, device=self.timesteps.device), *self._of(own), k, False)

    def last(self) -> Point:
        """The point at which the last step ends."""
        n = len(self.timesteps) - 1
        return Point(self.timesteps[n], *self.ab[-1], n, True)

    def own_sigma(self, p: Point) -> float | None:
        """The sigma that the scheduler scales the input of the network by; None: by none."""
        return p.b if self.kind in ("ve", "edm") else None

    def state(self, y: torch.Tensor, p: Point) -> torch.Tensor:
        """The state of the pipeline, float32, of a canonical one."""
        return y if self.kind == "flow" else (y.double() * (p.a + p.b)).float()

    def canonical(self, x: torch.Tensor, p: Point) -> torch.Tensor:
        """The inverse of state."""
        return x.float() if self.kind == "flow" else (x.double() / (p.a + p.b)).float()

    def velocity(self, out: torch.Tensor, x: torch.Tensor, p: Point) -> torch.Tensor:
        """eps - x0, float32, of what a network gave for a state of the pipeline."""
        if self.kind == "flow":
            return -out.float() if self.inverted else out.float()
        out, x, (a, b) = out.double(), x.double(), (p.a, p.b)
        if self.kind == "edm":
            sd = float(self.scheduler.config.sigma_data)
            c_out = b * sd / (b**2 + sd**2) ** 0.5 * (-1 if self.prediction == "v_prediction" else 1)
            x0 = sd**2 / (b**2 + sd**2) * x + c_out * out
        elif self.prediction == "epsilon":
            x0 = (x - b * out) / a
        elif self.prediction == "v_prediction":
            x0 = x / (b * b + 1) - out * b / (b * b + 1) ** 0.5 if self.kind == "ve" else a * x - b * out
        else:
            x0 = out
        eps = out if self.prediction == "epsilon" and self.kind != "edm" else (x - a * x0) / b
        return (eps - x0).float()
