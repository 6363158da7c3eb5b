"""The schedules that the installed diffusers makes of a folder's scheduler, for the host to compare with its own: a new
release that computes another schedule is said, and does not change samples in silence."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from .faults import Fault
from .family import Family, Size

_STEPS = 8
"""A number of steps to compare, beside the model's own."""


def told(family: Family) -> list[dict[str, Any]]:
    """The sigmas [T + 1], float32, for two numbers of steps at the default size; none where the pipeline itself lists
    its sigmas, or the installed diffusers has not the scheduler."""
    card = family.card()
    if card["grid"] == "pipeline":
        return []
    out = []
    for steps in sorted({card["steps"], _STEPS}):
        try:
            tokens, _ = family.latent_shape(Size(**card["size"]))
            sigmas = sigmas_of(family.scheduler_config, card, tokens, steps)
        except (Fault, AttributeError, TypeError, ValueError) as e:
            # What the host makes of it is said there; a folder without a scheduler of diffusers has none to compare.
            out.append({"steps": steps, "sigmas": [], "why": f"{type(e).__name__}: {e}"[:300]})
            continue
        out.append({"steps": steps, "sigmas": sigmas, "why": ""})
    return out


def sigmas_of(config: dict[str, Any], card: dict[str, Any], tokens: int, steps: int) -> list[float]:
    """The sigmas of a scheduler by its configuration, and by the grid and the rule of shifts of a card."""
    import numpy as np
    import torch

    canonical = importlib.import_module("meander.torch.canonical")
    cls = getattr(importlib.import_module("diffusers"), str(config.get("_class_name")))
    scheduler = canonical.suited(cls.from_config(config))
    takes = inspect.signature(scheduler.set_timesteps).parameters
    given: dict[str, Any] = {}
    if card["grid"] == "linspace":
        given["sigmas"] = np.linspace(1.0, 1 / steps, steps)
    elif card["grid"] == "linspace_torch":
        given["sigmas"] = torch.linspace(1.0, 1 / steps, steps).tolist()
    if config.get("use_dynamic_shifting") and card["mu"] != "none" and "mu" in takes:
        given["mu"] = _mu(config, card, tokens, steps)
    scheduler.set_timesteps(steps, **given)
    return [float(np.float32(s)) for s in canonical.Grid(scheduler, scheduler.timesteps).sigmas]


def _mu(config: dict[str, Any], card: dict[str, Any], tokens: int, steps: int) -> float:
    """The shift of an image of so many tokens, by diffusers' own functions."""
    if card["mu"] == "constant":
        return float(card["mu_constant"])
    if card["mu"] == "flux2":
        flux2 = importlib.import_module("diffusers.pipelines.flux2.pipeline_flux2")
        return float(flux2.compute_empirical_mu(tokens, steps))
    shift = importlib.import_module("diffusers.pipelines.flux.pipeline_flux").calculate_shift
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    return float(shift(tokens, *(config.get(n, d) for n, d in zip(names, (256, 4096, 0.5, 1.15), strict=True))))
