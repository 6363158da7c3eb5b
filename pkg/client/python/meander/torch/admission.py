"""The test that a pipeline passes before it is served: that it is a function of states and timesteps.

It makes about twenty turns at a small size, where the pipeline has one: the card says which. The default size is one
turn more, unless that is long and the states of two small sizes tell its own. A pipeline that fails is refused with the
reason.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import canonical
from .canonical import Grid
from .family import Size
from .faults import Fault
from .seam import Session
from .whole import digest_of

if TYPE_CHECKING:
    from .sessions import Loaded, Recipe, Run
    from .whole import Pipeline

_STEPS = 4
_TRIED = (_STEPS, 7)  # steps for which a rule must give the pipeline's sigmas
_SAME = 1.5e-6
_RULES = [("linspace", "linear"), ("linspace", "flux2"), ("scheduler", "linear"), ("uni_flow", "none")]
_USUAL = (1, 2, 4, 6, 8, 10, 12, 15, 16, 20, 24, 25, 28, 30, 32, 40, 50, 100)  # steps of prompts, without a rule
_EULERS = {
    "FlowMatchEulerDiscreteScheduler", "DDIMScheduler", "EulerDiscreteScheduler", "CogVideoXDDIMScheduler",
    "EDMEulerScheduler",
    *(f"{name}MultistepScheduler of order 1" for name in ("DPMSolver", "EDMDPMSolver", "UniPC", "DEIS")),
}  # fmt: skip
"""Schedulers whose own steps are Euler's in canonical coordinates."""
_EDGES, _UNIT = (64, 256), 32  # of small sizes: edges of squares of their pixels, and what edges are multiples of
_FEW = 1 << 12  # pixels of all frames of a default size at which a turn is made in any case
_CLOSE = {torch.float32: 1e-5}
_CLOSE_16 = 5e-2
_SCALES, _NEGATIVE = (2.0, 5.0), "negative_prompt"  # scales at which a pipeline is guided
_SCALARS: dict[str, Any] = {"number": 1.0, "integer": 1, "boolean": False, "text": "a"}


def admit(loaded: Loaded, say: Callable[[str], None]) -> None:
    """Tests a pipeline, and notes in its family what hosts must know. Fault: why it is refused."""
    family, size = loaded.family, loaded.family.size()
    say("testing the pipeline")
    told, least = _small_sizes(loaded)
    if not least and size.frames * size.height * size.width > _FEW:
        say(f"testing the pipeline at {size.frames} x {size.height} x {size.width}, its default size: it has no small "
            "one; frames, height and width in meander.json may be less")  # fmt: skip
    recipe, loaded.first = recipe_of(loaded, told[0] if told else None), not least
    with _session(loaded, recipe) as run:
        if not told:
            family.label([torch.empty(s) for s, _ in run.shapes], recipe.size)
        default = [1, *family.latent_shape(family.size())]
        family.tracks = [
            {"name": name, "elements": math.prod(default) if told else s.numel(),
             "shape": default if told or family.packed else list(s)}  # fmt: skip
            for (s, _), name in zip(run.shapes, ("latents", "audio", "third"), strict=False)
        ]
    loaded.first = True
    small = recipe if told else _small(loaded, least, recipe)
    family.admitted = at = vars(small.size).copy()

    def testing(what: str) -> None:
        say(f"testing the pipeline at {at['frames']} x {at['height']} x {at['width']}: {what}")

    testing("its sigmas")
    _find_grid(loaded, told or [recipe.size, small.size])
    with _session(loaded, small) as run:
        n, grid = sum(s.numel() for s, _ in run.shapes), run.grids[0]
        _check_start(loaded, small, run)
    y = torch.randn(1, n, generator=torch.Generator().manual_seed(7)).to(family.device)
    testing("the order of its steps")
    _check_access(loaded, small, y, grid.sigmas)
    testing("guidance and texts")
    _check_guidance(loaded, small, y, grid.sigmas)
    _measure_texts(loaded, small)
    testing("rows together")
    _check_rows(loaded, small, y, grid.sigmas[1], say)
    testing("its own steps to the end")
    check_euler(loaded, small)


class _session:
    """A session that is given up at the end."""

    def __init__(self, loaded: Loaded, recipe: Recipe, n: int = 1):
        self.run = loaded.session(recipe, n)

    def __enter__(self) -> Run:
        return self.run

    def __exit__(self, *_: object) -> None:
        self.run.session.cancel()


def recipe_of(loaded: Loaded, size: Size | None = None, steps: int = _STEPS) -> Recipe:
    """One of a size, the default one where none is given, with what the pipeline needs."""
    family, given = loaded.family, dict[str, list[str]]()
    size = size or family.size()
    for c in family.conditions:
        if not c["required"]:
            continue
        kind = c["type"].replace("images", "image")
        frames = size.frames if kind == "video" else 1
        shape = (frames, size.height, size.width, 1 if kind == "mask" else 3)
        ramp = np.linspace(0, 255, int(np.prod(shape))).astype(np.uint8).reshape(shape)
        a = ramp if kind != "mask" else np.where(ramp > 127, 255, 0).astype(np.uint8)
        a = a if kind != "audio" else np.sin(np.arange(44100) / 20)[:, None].astype(np.float32)
        digest = digest_of(kind, a.shape[:3] if kind != "audio" else (len(a), 0, 0), a)
        loaded.conditions.put(digest, kind, a)
        given[c["name"]] = [digest]
    card = family.card()
    return loaded.recipe(
        {
            "prompts": [["a photo"]],
            "truncate": True,
            "conditions": given,
            "arguments": {a["name"]: _SCALARS[a["type"]] for a in family.arguments if a["required"]},
            "guidance": card["true_cfg_scale"] if card["pipeline"]["guidance"] else 0,
            "steps": steps,
            **vars(size),
        }
    )


def _smaller(family: Pipeline, edge: int, frames: int) -> Size:
    """The default size with about the pixels of an edge squared, and the frames of some latent ones."""
    size = family.size()
    share = edge / (size.height * size.width) ** 0.5
    unit = math.lcm(_UNIT, family.scale * family.patch[1])
    edges = [max(1, round(e * share / unit)) * unit if share < 1 else e for e in (size.height, size.width)]
    return Size(min(size.frames, 1 + (frames - 1) * family.temporal), *edges)


def _small_sizes(loaded: Loaded) -> tuple[list[Size], Size | None]:
    """Two small sizes whose states tell those of the default size, else none, and the smallest that the pipeline
    accepts: it begins, and decodes its last state. None and none where a turn at the default size is short."""
    family, size, least = loaded.family, loaded.family.size(), None
    if size.frames * size.height * size.width <= _FEW:
        return [], None
    before = vars(family).copy()
    for edge, frames in ((_EDGES[0], (3, 2)), (_EDGES[0], (size.frames,) * 2), (_EDGES[1], (3, 2))):
        if frames[0] == size.frames and (least or size.frames == 1):
            continue  # all frames are for networks that take no others
        one, two = _smaller(family, edge, frames[0]), _smaller(family, edge * 3 // 2, frames[1])
        try:
            for at in (one, two):
                loaded.first = not least  # then it is known what the networks give
                with _session(loaded, recipe_of(loaded, at)) as run:
                    if at is one:
                        first = run.session.first_states()
                        run.session.end(first)
                        least = least or one
                        family.label([torch.empty(s.shape) for s in first], at)
                    if len(run.shapes) > 1 or not _follows(loaded, run):
                        raise Fault("latents", "not one state that grows as sizes do")
            family.latent_shape(size)
            return ([one, two], one) if one != two else ([], least)
        except (Fault, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            vars(family).update(before)
    return [], least


def _follows(loaded: Loaded, run: Run) -> bool:
    """Whether a state has the elements that the card says for its size."""
    return sum(s.numel() for s, _ in run.shapes) == math.prod(loaded.family.latent_shape(run.recipe.size))


def _small(loaded: Loaded, least: Size | None, otherwise: Recipe) -> Recipe:
    """The recipe of the least size that the pipeline accepts, where it has states that the card says if it must."""
    try:
        probe = recipe_of(loaded, least or _smaller(loaded.family, _EDGES[-1], 3))
        with _session(loaded, probe) as run:
            return probe if not loaded.family.packed or _follows(loaded, run) else otherwise
    except (Fault, RuntimeError):
        return otherwise


def _fits(family: Pipeline, size: Size) -> bool:
    """Whether a size is one by the card, which may be of the default size alone."""
    with contextlib.suppress(Fault):
        return bool(family.latent_shape(size))
    return False


def _find_grid(loaded: Loaded, sizes: list[Size]) -> None:
    """Finds by which rule the pipeline makes its sigmas, which two sizes show. Where hosts know none, the card has them
    for some numbers of steps: of the default size alone, where they are others at the second one."""
    family, first = loaded.family, loaded.first
    loaded.first = False  # the outputs of the turns are not read

    def grid_of(size: Size, steps: int) -> Grid:
        with _session(loaded, recipe_of(loaded, size, steps)) as run:
            return run.grids[0]

    sizes = [s for s in dict.fromkeys(sizes) if _fits(family, s)]
    tried = {(size, n): grid_of(size, n) for size in sizes for n in _TRIED}
    grid = tried[sizes[0], _STEPS]
    if grid.kind == "flow":
        for name, mu in _RULES:
            by_rule = (_by_rule(grid.scheduler, name, mu, family.latent_shape(size)[0], n) for size, n in tried)
            pairs = zip(by_rule, tried.values(), strict=True)
            if all(len(a) == len(b.sigmas) and np.allclose(a, b.sigmas, 0, _SAME) for a, b in pairs):
                family.grid_name, family.mu_name = name, mu
                break
        else:
            fixed = len(sizes) > 1 and tried[sizes[1], _STEPS].sigmas == grid.sigmas
            at = sizes[0] if fixed else family.size()
            steps, found = sorted({*_USUAL, family.card()["steps"]}), []
            for n in steps:
                with contextlib.suppress(Fault, ArithmeticError):  # such as too few steps
                    found.append((n, grid_of(at, n).sigmas))
            family.grid_name = "pipeline"
            family.sigmas = [s for n, s in found if len(s) == n + 1 and all(np.diff(s) < 0)]
            family.sigmas_tokens = 0 if fixed else family.latent_shape(at)[0]
    loaded.first = first


def _by_rule(scheduler: Any, name: str, mu: str, tokens: int, n: int) -> list[float]:
    """The n + 1 sigmas of a scheduler by a grid and a rule of shifts that hosts know; empty: it has none by them."""
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    base, config = type(scheduler).base, scheduler.config
    if name == "uni_flow" and "FlowMatch" not in base.__name__:
        shares, by = np.linspace(1, 1e-3, n + 1)[:n], config.get("flow_shift") or 1.0
        return [*(by * shares / (1 + (by - 1) * shares)), 0.0]
    if name == "uni_flow" or "FlowMatch" not in base.__name__ or config.get("num_train_timesteps") != 1000:
        return []
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    slope = (config.get("max_shift", 1.15) - config.get("base_shift", 0.5)) / (high - low)
    linear = config.get("base_shift", 0.5) + slope * (tokens - low)
    shift = {"mu": linear if mu == "linear" else compute_empirical_mu(tokens, n)}
    grid = {"sigmas": np.linspace(1.0, 1 / n, n)} if name == "linspace" else {}
    s = base.from_config(config)
    s.set_timesteps(n, **grid, **(shift if config.get("use_dynamic_shifting") else {}))
    return [] if config.get("invert_sigmas") else [float(v) for v in s.sigmas]


def _check_start(loaded: Loaded, recipe: Recipe, run: Run) -> None:
    """Fault: the pipeline begins with more than noise."""
    first = run.session.first_states()[0].double().cpu()
    call = loaded.call_of(recipe)
    if "generator" not in call:
        return
    call["generator"] = torch.Generator("cpu").manual_seed(1)
    other = Session(loaded.family.pipe, call, shapes=loaded.shapes, memo=loaded.memo)
    other.begin()
    second = other.first_states()[0].double().cpu()
    other.cancel()
    p = run.grids[0].find(run.grids[0].sigmas[0])
    want = run.grids[0].init() * (p.a + p.b)
    most = 0.3 + 3 / first.numel() ** 0.5  # few numbers say little
    if abs(float((first - second).std()) / 2**0.5 / want - 1) > most:
        raise Fault("config", "its first state is not noise alone, but mixed with a condition; must be of strength 1")


def _check_access(loaded: Loaded, recipe: Recipe, y: torch.Tensor, sigmas: list[float]) -> None:
    """Finds in which order steps may be evaluated. Fault: noise in the loop, or steps that depend on those before."""
    family, steps = loaded.family, list(range(1, min(_STEPS, len(sigmas) - 1)))

    def velocities(order: list[int]) -> list[torch.Tensor]:
        with _session(loaded, recipe) as run:
            return [run.velocity(y, sigmas[k]) for k in order]

    loaded.first, family.access = True, "exact"
    one, again = velocities([steps[0], steps[0]])
    once_more = velocities([steps[0]])[0]
    if not (torch.equal(one, again) or torch.equal(one, once_more)):
        raise Fault("config", "noise in its loop: one turn twice has two outputs")
    for access in ("exact", "after_previous"):
        family.access = access
        ahead = dict(zip(steps, velocities(steps), strict=True))
        order = [*steps[::-1], *steps]
        if all(torch.equal(v, ahead[k]) for k, v in zip(order, velocities(order), strict=True)) and (
            torch.equal(velocities(steps[-1:])[0], ahead[steps[-1]])
        ):
            break
    else:
        raise Fault("config", "its steps depend on those before (momentum, a cache, or a time for each frame)")
    if access == "exact":
        with _session(loaded, recipe) as run:
            start = run.velocity(y, sigmas[0])
        if not torch.equal(velocities([steps[0], 0])[1], start):
            family.access = "after_previous"
    loaded.first = False
    if not torch.equal(velocities(steps[:1])[0], ahead[steps[0]]):
        loaded.first = True


def _check_guidance(loaded: Loaded, recipe: Recipe, y: torch.Tensor, sigmas: list[float]) -> None:
    """Finds the scales of guidance that have no effect without a negative prompt. Fault: with guidance its steps depend
    on those before, which they do not at the default scale."""
    family, sigma = loaded.family, sigmas[1]
    known, own = {a["name"] for a in family.arguments}, family.card()["pipeline"]["guidance"]
    if own and len(sigmas) > 3:
        with _session(loaded, replace(recipe, guidance=_SCALES[-1])) as run:
            once, _, again = (run.velocity(y, s) for s in (sigma, sigmas[2], sigma))
        if not torch.equal(once, again):
            raise Fault("config", f"its steps with {own} of {_SCALES[-1]:g} depend on those before (momentum, a cache)")

    def moves(name: str, **beside: str) -> bool:
        """Whether a scale moves the velocity, beside other arguments."""
        both = []
        for scale in _SCALES:
            asked = replace(recipe, arguments=recipe.arguments | beside)
            asked = replace(asked, guidance=scale) if name == own else replace(
                asked, arguments=asked.arguments | {name: scale}
            )
            with _session(loaded, asked) as run:
                both.append(run.velocity(y, sigma))
        return not torch.equal(*both)

    if _NEGATIVE in known:
        scales = [n for n in (own, "true_cfg_scale") if n in known]
        family.beside_negative = [n for n in dict.fromkeys(scales) if not moves(n) and moves(n, **{_NEGATIVE: ""})]


def _longer(recipe: Recipe) -> Recipe:
    """One with another text, of more tokens."""
    return replace(recipe, texts=tuple(f"{t} of a red cat on a mat" for t in recipe.texts))


def _measure_texts(loaded: Loaded, recipe: Recipe) -> None:
    """Finds how large what the pipeline encodes of texts is: its bytes at most, and those of a token, which are all
    where it pads."""
    sizes = []
    for asked in (recipe, _longer(recipe)):
        with _session(loaded, asked) as run:
            sizes.append({name: t.shape for name, t in run.session.encoded.items()})
    family, of_token = loaded.family, 0
    for name, shape in sizes[1].items():
        grows = len(shape) > 0 and sizes[0].get(name) != shape
        one = 4 * math.prod(shape[1:] if grows else shape)
        of_token += one * grows
        family.conditioning_bytes += one * (family.card()["max_prompt_tokens"] if grows else 1)
    family.token_bytes = of_token or family.conditioning_bytes


def _check_rows(loaded: Loaded, recipe: Recipe, y: torch.Tensor, sigma: float, say: Callable[[str], None]) -> None:
    """Finds whether rows of one prompt may be computed together, and then those of several."""
    family, ys = loaded.family, torch.cat([y, -y])
    close = 1e-3 if family.dtype == torch.float32 else _CLOSE_16

    def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
        return bool((a - b).abs().max() <= close * b.abs().max())

    with _session(loaded, recipe) as one:
        alone = torch.cat([one.velocity(ys[i : i + 1], sigma) for i in (0, 1)])
    for loaded.seeded in (True, False):  # some take one generator alone
        with contextlib.suppress(Fault, ValueError, RuntimeError), _session(loaded, recipe, 2) as two:
            if alike(two.velocity(ys, sigma), alone):
                break
    else:
        return
    family.rows_alike = True
    try:
        with (
            _session(loaded, recipe) as one, _session(loaded, recipe, 2) as two,
            _session(loaded, _longer(recipe)) as third,
        ):  # fmt: skip
            loaded.together.learn(one.turn(y, sigma), two.turn(ys, sigma))
            turns = [(2, two.turn(ys, sigma)), (1, third.turn(y, sigma))]
            joined = torch.cat(loaded.together.run(turns))
            loaded.joint = alike(joined, torch.cat([alone, third.velocity(y, sigma)]))
    except (Fault, LookupError, TypeError, ValueError, RuntimeError) as e:
        say(f"rows of several prompts are computed one prompt after another: {e}")
        return
    if loaded.joint:
        _check_ahead(loaded, recipe, y, sigma, alike)


def _check_ahead(
    loaded: Loaded, recipe: Recipe, y: torch.Tensor, sigma: float, alike: Callable[[torch.Tensor, torch.Tensor], bool]
) -> None:
    """Finds whether the calls of a turn with guidance may be one."""
    known, found = {a["name"] for a in loaded.family.arguments}, False
    recipe = replace(recipe, arguments=recipe.arguments | ({_NEGATIVE: ""} if _NEGATIVE in known else {}))
    if loaded.family.card()["pipeline"]["guidance"] == "true_cfg_scale":
        recipe = replace(recipe, guidance=4.0)
    try:
        with _session(loaded, recipe) as run:
            alone = run.velocity(y, sigma)
            once = loaded.together.calls + 1, run.session.turns + 1
            loaded.ahead = True
            v = loaded.together.run([(1, run.turn(y, sigma))])[0]
            found = once == (loaded.together.calls, run.session.turns) and alike(v, alone)
    except (Fault, LookupError, TypeError, ValueError, RuntimeError):  # it takes no such arguments
        pass
    loaded.ahead = found


def check_euler(loaded: Loaded, recipe: Recipe) -> float | None:
    """Returns how far Euler's steps of a host end from the pipeline itself, None: they cannot be compared. Fault: they
    end elsewhere."""
    from .sessions import media_of

    family = loaded.family
    with _session(loaded, recipe) as run:
        first, grids = [*run.session.first_states()], run.grids
        start = [g.canonical(x, g.find(g.sigmas[0])) for g, x in zip(grids, first, strict=True)]
        y, sigmas = run.joined(start), grids[0].sigmas
        for s, s2 in zip(sigmas, sigmas[1:], strict=False):
            y = (y.double() + (s2 - s) * run.velocity(y, s).double()).float()
        ours = media_of(run.end(y), family.pipe)[1]
        family.media = ["audio" if name == "sound" else "image" for name, _ in ours]
    steps = [canonical.of_first_order(s) for s in run.session.schedulers]
    if apart := [n for s in steps if (n := _steps_of(s)) not in _EULERS]:
        family.notes.append(f"the steps of {apart[0]} are not Euler's: not compared")
        return None
    solvers = {type(s).__name__ for s in run.session.schedulers if s.config.get("solver_order", 1) > 1}
    family.notes += [f"{name} is compared in its first order, which has Euler's steps" for name in sorted(solvers)]
    pipe = copy.copy(family.pipe)
    parts = {name: part for name, part in pipe.components.items() if hasattr(part, "set_timesteps")}
    vars(pipe).update((name, canonical.of_first_order(part)) for name, part in parts.items())
    session = Session(pipe, loaded.call_of(recipe), shapes=loaded.shapes, memo=loaded.memo)
    try:
        session.begin()
        states = session.states_by_own_steps()
        if family.access == "exact":
            last = [g.canonical(x, g.last()) for g, x in zip(grids, states, strict=True)]
            off, close = _apart(y, run.joined(last)), _CLOSE.get(family.dtype, _CLOSE_16)
            # States as large as their noise, such as 4096 without a signal, lose that much of their last digits.
            close = max(close, torch.finfo(torch.float32).eps * max(float(x.std()) for x in first))
            # Where the last state is what a network gives, that has moved by the roundings of all states before.
            close *= 5 if grids[0].prediction == "sample" else 1
        else:  # the last states are before what the pipeline then does to them
            theirs = media_of(session.end(states), family.pipe)[1]
            pairs = [(torch.from_numpy(a[1]), torch.from_numpy(b[1])) for a, b in zip(ours, theirs, strict=True)]
            off, close = max(_apart(a.float(), b.float()) for a, b in pairs), 2.5 / 255
    finally:
        session.cancel()
    if not off <= close:
        raise Fault("config", f"Euler's steps end {off:.1e} from the pipeline's own; must be within {close:g}")
    return off


def _steps_of(scheduler: Any) -> str:
    """A name of how a scheduler steps."""
    name, c = type(scheduler).__name__, scheduler.config
    if name == "DDIMScheduler" and c.get("timestep_spacing") == "linspace":
        return "DDIMScheduler with timestep_spacing linspace, which do not end at the next timestep,"
    return f"{name} of order 1" if c.get("solver_order") == 1 else name


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())
