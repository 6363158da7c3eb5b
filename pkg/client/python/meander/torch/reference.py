"""python -m meander.torch.reference: one sample by the pipeline of diffusers itself, for `meander parity`.

The pipeline draws its first state and runs its own loop, with its own scheduler; what its scheduler is given and gives
is written down: sigmas, timesteps, states, pixels.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .family import Family, Size
    from .sessions import PipelineEngine

SOLVERS = {"UniPCMultistepScheduler": "unipc", "DPMSolverMultistepScheduler": "dpm"}
"""The solvers of meander that integrate as a scheduler does, by its class; all others are Euler's."""


def main() -> None:
    """Writes the reference to --out, and what meander is to be asked to the standard output, as JSON."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", DIFFUSERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    p = argparse.ArgumentParser(prog="meander.torch.reference")
    p.add_argument("--model", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--prompt", required=True)
    p.add_argument("--negative-prompt")
    for name in ("steps", "height", "width", "frames", "seed"):
        p.add_argument(f"--{name}", type=int, default=0)
    p.add_argument("--guidance", type=float, help="the true_cfg_scale of meander")
    p.add_argument("--condition", action="append", default=[], metavar="NAME=FILE")
    p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    p.add_argument("--device", default="auto")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--generic", action="store_true")
    p.add_argument("--trust-class", action="store_true")
    p.add_argument("--family", default="")
    from .faults import Fault

    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        print(json.dumps(_reference(p.parse_args())), file=out, flush=True)
    except Fault as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(78)


def _reference(a: argparse.Namespace) -> dict[str, Any]:
    import torch
    from safetensors.torch import save_file

    from . import families
    from .family import Settings, Size
    from .faults import Fault
    from .folder import Folder
    from .sessions import PipelineEngine, media_of
    from .whole import Pipeline

    family = families.find(Folder(a.model), a.generic, a.trust_class, a.family)
    family.check()
    whole = family if isinstance(family, Pipeline) else Pipeline(family.folder, True)
    engine = PipelineEngine(whole, Settings(a.device, a.dtype))
    if whole is family:
        engine.within(engine.check_decoder)
    pipe, card = whole.pipe, family.card()
    size = Size(*(getattr(a, n) or card["size"][n] for n in ("frames", "height", "width")))
    steps = a.steps or card["steps"]
    guidance = card["true_cfg_scale"] if a.guidance is None else a.guidance
    shape = family.latent_shape(size)
    call = _call(engine, family, size, steps, guidance, a)
    taken = _Taken(pipe.scheduler)
    with torch.no_grad():
        result = pipe(**call)
    states, scheduler = taken.states, pipe.scheduler
    if len(taken.timesteps) != steps:
        raise Fault("config", f"{type(pipe).__name__}: {len(taken.timesteps)} steps of its scheduler; must be {steps}")
    canonical = importlib.import_module("meander.torch.canonical")
    grid = canonical.Grid(scheduler, torch.tensor(taken.timesteps))
    points = [*(grid.find(s) for s in grid.sigmas[:-1]), grid.last()]
    packed = [_packed(grid.canonical(x, p), family, shape) for x, p in zip(states, points, strict=True)]
    fields, media = media_of(result, pipe)
    tensors = {f"latents.{i}": x for i, x in enumerate(packed)}
    tensors |= {"sigmas": torch.tensor(grid.sigmas), "timesteps": torch.tensor(taken.timesteps)}
    tensors |= {name: torch.from_numpy(values.copy()) for name, values in media if name == "media"}
    save_file({k: v.float().contiguous() if k != "media" else v for k, v in tensors.items()}, a.out)
    name, notes = type(scheduler).__name__, whole.notes if whole is family else []
    return {
        "class": type(pipe).__name__, "scheduler": name, "note": "; ".join(notes), "steps": steps, "guidance": guidance,
        "solver": "euler" if scheduler.config.get("solver_order") == 1 else SOLVERS.get(name, "euler"),
        "dtype": engine.dtype, "device": str(engine.device),
        "versions": {n: importlib.import_module(n).__version__ for n in ("diffusers", "torch", "transformers")},
        "whole_timesteps": grid.kind == "flow" and not scheduler.timesteps.is_floating_point(), **vars(size),
    }  # fmt: skip


class _Taken:
    """What the scheduler of a pipeline is given, step by step, and what it gives at the end."""

    def __init__(self, scheduler: Any):
        self.states: list[Any] = []
        self.timesteps: list[float] = []
        step = scheduler.step

        @functools.wraps(step)
        def noted(output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
            made = step(output, timestep, sample, *args, **kwargs)
            after = made[0] if isinstance(made, tuple) else made.prev_sample
            self.states[-1:] = [sample.detach().float().cpu().clone(), after.detach().float().cpu().clone()]
            self.timesteps.append(float(timestep))
            return made

        scheduler.step = noted


def _packed(x: Any, family: Any, shape: tuple[int, int]) -> Any:
    """A state of the pipeline as meander has it, [1, S, C]."""
    from .family import pack
    from .whole import Pipeline

    if isinstance(family, Pipeline) and not family.packed or x.ndim == 3:
        return x.reshape(1, *shape)
    return pack(x[:, :, None] if x.ndim == 4 else x, family.patch)


def _call(
    engine: PipelineEngine, family: Family, size: Size, steps: int, guidance: float, a: argparse.Namespace
) -> dict[str, Any]:
    """The arguments of the pipeline that are those of a prompt of meander."""
    import torch
    from PIL import Image

    from .faults import Fault
    from .sessions import READ

    own, card = family.card(), engine.family.card()
    arguments: dict[str, Any] = {} if a.negative_prompt is None else {"negative_prompt": a.negative_prompt}
    if family is not engine.family:
        if a.set:
            must = "this network takes no arguments; --generic computes its whole pipeline"
            raise Fault("prompt", f"--set {a.set[0]}: {must}")
        arguments = {"negative_prompt": own["negative_prompt"], **arguments} if guidance > 1 else {}
        arguments |= {"guidance_scale": own["guidance"]} if own["guidance"] else {}
        # meander's 1 is without guidance; some count from 0
        takes = engine.family.takes_guidance()
        guidance -= family.true_cfg_scale - engine.family.default_scale() if takes else guidance
    given, masks = dict[str, list[str]](), [c["name"] for c in card["pipeline"]["conditions"] if c["type"] == "mask"]
    for text in a.condition:
        name, _, file = text.partition("=")
        with Image.open(Path(file)) as image:
            digest = engine.loaded.condition(image.convert("L" if name in masks else "RGB"))
        given.setdefault(name, []).append(digest)
    types = {x["name"]: x["type"] for x in card["pipeline"]["arguments"]}
    for name, _, text in (x.partition("=") for x in a.set):
        try:
            arguments[name] = READ[types.get(name, "text")](text)
        except ValueError:
            raise Fault("prompt", f"--set {name}: {text!r:.80}; must be of type {types[name]}") from None
    recipe = engine.loaded.recipe({
        "prompts": [[a.prompt]], "conditions": given, "arguments": arguments, "steps": steps, "guidance": guidance,
        **vars(size),
    })  # fmt: skip
    engine.family.pipe.set_progress_bar_config(disable=True)
    return {**engine.loaded.call_of(recipe), "generator": torch.Generator("cpu").manual_seed(a.seed)}


if __name__ == "__main__":
    main()
