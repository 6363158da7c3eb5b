"""What a loaded pipeline computes: sessions by recipes, for a worker's calls and for trainers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .canonical import Grid, Point
from .engine import Answer, Engine, Tensors, _array, compile_networks, is_out_of_memory
from .family import Settings, Size, pack, unpack
from .faults import Fault, first_sentence
from .folder import Folder
from .seam import Memo, Session, digest
from .together import Together, Turn
from .whole import COUNTS, _FRAMES, _TEXTS, Conditions, Pipeline, argument, digest_of

_KEYS = {"prompts", "truncate", "conditions", "arguments", "frames", "height", "width", "guidance", "steps"}
_SESSIONS = 64
_RATES = ("frame_rate", "fps")  # of videos, which meander.json may say
_RECIPES = 4096
_STARTS = 8
_BATCHES = (8, 4, 2, 1)
READ: dict[str, Callable[[str], Any]] = {
    "number": float, "integer": int, "boolean": lambda text: text == "true", "text": str,
}  # fmt: skip
"""How an argument is read that a prompt has as a text, by its type."""


@dataclass(frozen=True)
class Recipe:
    """All that a call of a pipeline is conditioned on, checked.

    texts, of one prompt, are cut where truncate says so; conditions are digests by name, arguments values by name;
    size is that of samples, guidance the value of the argument that scales it, steps how many the own grid has. What
    was not given, of texts, arguments and guidance, the pipeline is not given: its defaults are its own.
    """

    texts: tuple[str, ...]
    truncate: bool
    conditions: dict[str, list[str]]
    arguments: dict[str, Any]
    size: Size
    guidance: float | None
    steps: int

    @property
    def handle(self) -> str:
        """Its digest."""
        return digest(vars(self) | {"size": vars(self.size)})


class Loaded:
    """A pipeline that is loaded, with its conditions and sessions."""

    def __init__(self, family: Pipeline):
        self.family, self.conditions, self.memo = family, Conditions(), Memo()
        self.shapes: dict[Any, Any] = {}
        self.together, self.joint, self.ahead = Together(), False, False
        """Turns of several sessions, whether they may be computed so, and the calls within a turn, too."""
        self.seeded = True
        """Whether each row has a generator of its own: what encoders draw is then equal in all rows."""
        self.first = True
        """Whether the first turn of a session is computed even where it is not read."""

    def recipe(self, given: dict[str, Any]) -> Recipe:
        """Checks a recipe. Fault of class protocol, prompt or condition: what is wrong with it."""
        f, card = self.family, self.family.card()
        if unknown := sorted(given.keys() - _KEYS):
            raise Fault("protocol", f"recipe: {unknown[0]:.80}: unknown; must be of {', '.join(sorted(_KEYS))}")
        prompts = given.get("prompts", [[]])
        if len(prompts) != 1 or not isinstance(prompts[0], list) or len(prompts[0]) > card["prompts"]:
            raise Fault("protocol", f"prompts: must be one, a list of at most {card['prompts']} texts")
        if not all(isinstance(t, str) for t in prompts[0]):
            raise Fault("protocol", "prompts: must be texts")
        default, steps = f.size(), given.get("steps") or card["steps"]
        size = Size(*(given.get(n) or getattr(default, n) for n in ("frames", "height", "width")))
        if not 1 <= steps <= 1000:
            raise Fault("protocol", f"steps: {steps}; must be 1 to 1000")
        guidance = None if given.get("guidance") is None else float(given["guidance"])
        if not card["pipeline"]["guidance"]:
            guidance = guidance or None  # hosts say 0
        if guidance and not card["pipeline"]["guidance"]:
            raise Fault("prompt", f"guidance: {guidance}; must be 0: {f.cls.__name__} has no such argument")
        return Recipe(
            tuple(prompts[0]), bool(given.get("truncate")), self._conditions(given.get("conditions") or {}),
            self._arguments(f.default_arguments() | (given.get("arguments") or {})), size, guidance, int(steps),
        )  # fmt: skip

    def _conditions(self, given: dict[str, Any]) -> dict[str, list[str]]:
        known = {c["name"]: c for c in self.family.conditions}
        if unknown := sorted(given.keys() - known.keys()):
            raise Fault("prompt", f"conditions: {unknown[0]:.80}; must be of {', '.join(known) or 'none'}")
        absent, out = [], {}
        for name, digests in given.items():
            if not isinstance(digests, list) or not digests or not all(isinstance(d, str) for d in digests):
                raise Fault("protocol", f"conditions: {name}: must be a list of digests")
            want = known[name]["type"]
            if len(digests) > 1 and want != "images":
                raise Fault("prompt", f"conditions: {name}: {len(digests)}; must be one {want}")
            for d in digests:
                got = self.conditions.get(d)
                absent += [] if got else [d]
                if got and got[0] != want.replace("images", "image"):
                    raise Fault("prompt", f"conditions: {name}: {got[0]}; must be {want}")
            out[name] = digests
        if lacks := [n for n, c in known.items() if c["required"] and n not in given]:
            raise Fault("prompt", f"conditions: {lacks[0]}: missing; {self.family.cls.__name__} needs it")
        if absent:
            raise Fault("condition", f"conditions: {len(absent)} are not here; send them and repeat the call", absent)
        return out

    def _arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        known = {a["name"]: a for a in self.family.arguments}
        out = {}
        for name, value in given.items():
            if name not in known:
                why = "the host gives it otherwise, or it changes the loop" if name in self.family.call else "unknown"
                raise Fault("prompt", f"arguments: {name:.80}: {why}; must be of {', '.join(known) or 'none'}")
            try:
                out[name] = argument(known[name], value)
            except ValueError as e:
                raise Fault("prompt", f"arguments: {e}") from None
        if out.get("strength", 1.0) != 1:
            raise Fault("prompt", f"arguments: strength: {out['strength']}; must be 1: samples begin with noise alone")
        if lacks := [n for n, a in known.items() if a["required"] and n not in given]:
            raise Fault("prompt", f"arguments: {lacks[0]}: missing; {self.family.cls.__name__} needs it")
        return out

    def takes_video(self, r: Recipe) -> bool:
        """Whether a recipe has a video, which says how many frames states have."""
        return any(c["type"] == "video" and c["name"] in r.conditions for c in self.family.conditions)

    def call_of(self, r: Recipe, n: int = 1) -> dict[str, Any]:
        """The arguments of the pipeline's call for n samples of a recipe. Fault of class condition: one is not kept."""
        takes, out = self.family.call, dict(r.arguments)
        texts = [name for name in _TEXTS if name in takes]
        out |= dict(zip(texts, r.texts, strict=False))
        sizes: dict[str, Any] = {
            "height": r.size.height,
            "width": r.size.width,
            "max_area": r.size.height * r.size.width,
        }
        sizes |= dict.fromkeys(_FRAMES, r.size.frames) | {"num_inference_steps": r.steps, "output_type": "np"}
        seeded = [torch.Generator("cpu").manual_seed(0) for _ in range(n)]
        sizes["use_resolution_binning"] = False  # it would compute at another size, and resize
        sizes |= dict.fromkeys(COUNTS, n) | {"generator": seeded if self.seeded and n > 1 else seeded[0]}
        out |= {name: value for name, value in sizes.items() if name in takes}
        if "strength" in takes:
            out["strength"] = 1.0
        if fps := self.family.settings.get("fps"):
            out = {n: int(fps) if fps == int(fps) else fps for n in _RATES if n in takes} | out
        if r.guidance is not None:
            out[self.family.card()["pipeline"]["guidance"]] = r.guidance
        for name, digests in r.conditions.items():
            values = [self.conditions.get(d) for d in digests]
            if absent := [d for d, v in zip(digests, values, strict=True) if v is None]:
                raise Fault("condition", f"conditions: {name}: not here; send it and repeat the call", absent)
            several = next(c["type"] for c in self.family.conditions if c["name"] == name) == "images"
            out[name] = [v[1] for v in values if v] if several else values[0][1]  # type: ignore[index]
            if isinstance(out[name], np.ndarray):
                out[name] = torch.from_numpy(out[name].T.copy())[None]
        return out

    def condition(self, value: Any) -> str:
        """Keeps an image, of PIL or a file, or frames of a video, and returns the digest that recipes name it by.

        Images are turned as their EXIF says and converted to RGB, as diffusers does. ValueError: one of 16 bits, or
        with several frames.
        """
        from diffusers.utils import load_image
        from PIL import Image

        frames = value if isinstance(value, list) else [value]
        images = [Image.open(v) if isinstance(v, str | Path) else v for v in frames]
        for image in images:
            if getattr(image, "n_frames", 1) > 1 or image.mode.startswith(("I", "F")):
                raise ValueError(f"condition: {image.mode}; must be one image of 8 bits a channel")
        a = np.stack([np.asarray(image if image.mode == "L" else load_image(image)) for image in images])
        kind = "video" if isinstance(value, list) else "mask" if a.ndim == 3 else "image"
        a = a[..., None] if a.ndim == 3 else a
        digest = digest_of(kind, a.shape[:3], a)
        self.conditions.put(digest, kind, a)
        return digest

    def session(self, r: Recipe | dict[str, Any], n: int = 1, grad: bool = False) -> Run:
        """Begins a session of n samples of a recipe, or of the map that one is on the wire. Fault of class prompt or
        latents: the pipeline refuses it."""
        return self._begun(r if isinstance(r, Recipe) else self.recipe(r), n, grad)

    def encode(self, r: Recipe) -> None:
        """Encodes what a recipe has, for the sessions that follow. The same faults."""
        self._begun(r, loop=False).session.cancel()

    def _begun(self, r: Recipe, n: int = 1, grad: bool = False, loop: bool = True) -> Run:
        """A session, which the pipeline may refuse. Of several encoders that read a prompt CLIP's limit is none."""
        self.memo.cut.clear()
        try:
            run = Run(self, r, n, grad, loop)
        except (ValueError, TypeError, AttributeError, LookupError, AssertionError, ImportError, NameError) as e:
            raise Fault("prompt", said_by(self.family.cls, e)) from e
        parts = self.family.pipe.components
        encoders = {k.removeprefix("text_encoder"): type(c).__name__ for k, c in parts.items()
                    if k.startswith("text_encoder") and c is not None}  # fmt: skip
        clip = [k for k, name in encoders.items() if name.startswith("CLIP")]
        silent = [parts.get(f"tokenizer{k}") for k in clip if len(clip) < len(encoders)]
        cuts = [(n, most) for by, n, most in self.memo.cut if not any(by is t for t in silent)]
        n, most = max(cuts, key=lambda c: c[0] - c[1], default=(0, 0))
        if cuts and not r.truncate:
            run.session.cancel()
            raise Fault("prompt", f"prompt: {n} tokens; must be at most {most}, or ask for truncation")
        run.cut = n - most
        return run


def read(
    folder: str | Path, device: str = "auto", dtype: str = "auto", trust_class: bool = False, family: str = "",
    networks: str = "",
) -> Loaded:  # fmt: skip
    """Loads a pipeline for trainers, which test it before they use it. family.networks are what it steps with: what is
    done to them, such as adapters and checkpointing, the sessions have; they may have a device of their own, until they
    are moved. Fault of class config: it cannot be read."""
    from . import families

    found = families.find(Folder(folder), not family, trust_class, family)
    if not isinstance(found, Pipeline):
        raise Fault("config", f"family: {family}; must be a pipeline, a subclass of diffusers.DiffusionPipeline")
    return PipelineEngine(found, Settings(device, dtype), networks=networks).loaded


class Run:
    """A session of n samples in canonical coordinates; without its loop it has encoded, and computes nothing."""

    def __init__(self, of: Loaded, r: Recipe, n: int, grad: bool, loop: bool):
        self.of, self.recipe, self.n, self.grad = of, r, n, grad
        if n > 1 and not any(c in of.family.call for c in COUNTS):
            raise Fault("protocol", f"rows: {n}; must be 1: {of.family.cls.__name__} makes one sample of a prompt")
        self.cut = 0
        """The tokens of its texts that are cut off."""
        self.session = Session(of.family.pipe, of.call_of(r, n), grad, of.shapes, of.memo, of.first)
        self.loop = self.session.begin()
        self.shapes = [(s.shape, s.dtype) for s in (self.session.first_states() if loop else ())]
        self.grids = [Grid(s, self.loop) for s in self.session.schedulers]

    def velocity(self, y: torch.Tensor, sigma: float) -> torch.Tensor:
        """eps - x0 float32 of canonical states y float32 [n, ...] at a sigma."""
        return self.of.together.run([(self.n, self.turn(y, sigma, joint=False))])[0]

    def turn(self, y: torch.Tensor, sigma: float, joint: bool = True) -> Turn:
        """velocity as a turn among others."""
        points = [g.find(float(sigma)) for g in self.grids]
        p = points[0]
        xs = [
            g.state(x, p).to(d) for g, x, p, (_, d) in zip(self.grids, self.split(y), points, self.shapes, strict=True)
        ]
        exact = self.of.family.access == "exact"
        if not exact and p.k == 0 and self.grids[0].kind != "flow":
            return self.joined([self._first(xs[0], p)]).reshape(y.shape)
        after = None if exact else p.k - 1
        own = None if p.on_grid else self.grids[0].own_sigma(p)
        outs = yield from self.session.evaluate(xs, p.t, p.k, after, own, joint, exact and self.of.ahead)
        vs = [g.velocity(o, x, p) for g, o, x, p in zip(self.grids, outs, xs, points, strict=True)]
        return self.joined(vs).reshape(y.shape)

    def _first(self, x: torch.Tensor, p: Point) -> torch.Tensor:
        """The velocity of the first step of a pipeline that computes on its state after each, where its first state is
        none that could follow a step: in a session that begins with the state."""
        grid, family = self.grids[0], self.of.family
        scale = float(getattr(grid.scheduler, "init_noise_sigma", 1.0))
        call = {**self.of.call_of(self.recipe, self.n), "latents": x / scale}
        session = Session(family.pipe, call, self.grad, self.of.shapes, self.of.memo)
        try:
            session.begin()
            out, [state] = session.first_output(), session.states
            if state.shape != x.shape or not torch.allclose(state, x, 1e-4, 1e-4):
                raise Fault("latents", f"{family.cls.__name__}: does not begin with the state that it is given")
            return grid.velocity(out, x, p)
        finally:
            session.cancel()

    def split(self, y: torch.Tensor) -> list[torch.Tensor]:
        """Canonical states [n, ...] in the shapes of the pipeline's, one for each track."""
        sizes = [shape.numel() // self.n for shape, _ in self.shapes]
        flat = y.reshape(self.n, -1)
        if flat.shape[1] != sum(sizes):
            raise Fault(
                "latents", f"x: {flat.shape[1]} elements a row; must be {sum(sizes)}, those of the pipeline's state at "
                f"{self.recipe.size}{': its video must have as many frames' * self.of.takes_video(self.recipe)}"
            )  # fmt: skip
        f, parts = self.of.family, flat.split(sizes, 1)
        if f.packed:
            tokens = flat.reshape(self.n, *f.latent_shape(self.recipe.size))
            parts = (unpack(tokens, f.patch, f.latent_grid(self.recipe.size)),)
        return [x.reshape(shape) for x, (shape, _) in zip(parts, self.shapes, strict=True)]

    def joined(self, states: list[torch.Tensor]) -> torch.Tensor:
        """The inverse of split, [n, elements]."""
        f = self.of.family
        if f.packed:
            grid = f.latent_grid(self.recipe.size)
            states = [pack(states[0].reshape(self.n, f.channels, *grid), f.patch)]
        return torch.cat([x.reshape(self.n, -1) for x in states], 1)

    def end(self, y: torch.Tensor) -> Any:
        """What the pipeline makes of the last canonical states [n, ...]."""
        last = [g.last() for g in self.grids]
        xs = [g.state(x, p).to(d) for g, x, p, (_, d) in zip(self.grids, self.split(y), last, self.shapes, strict=True)]
        return self.session.end(xs)


def said_by(cls: Any, e: BaseException) -> str:
    """What a pipeline refuses or lacks, or where its own code fails."""
    if isinstance(e, NameError | ImportError):  # diffusers imports some packages only where they are
        package = f": pip install {e.name}" if isinstance(e, NameError) else f": {first_sentence(e)}"
        return f"{cls.__name__} needs a package that is not here{package}"
    if isinstance(e, ValueError):
        return f"{cls.__name__} refuses what it is called with: {e}"[:2000]
    at: Any = e.__traceback__
    while at.tb_next:
        at = at.tb_next
    where = f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}"
    tiles = ": --vae-tiling has it decode in tiles" if isinstance(e, NotImplementedError) and "tiling" in str(e) else ""
    return f"{cls.__name__} fails in its own code, {where}: {type(e).__name__}: {e}{tiles}"[:2000]


class PipelineEngine(Engine):
    """The engine of the generic family: encode and put take recipes, and no tensors."""

    takes_recipes = True
    family: Pipeline

    def __init__(
        self, family: Pipeline, settings: Settings, say: Callable[[str], None] = lambda detail: None, networks: str = ""
    ):
        super().__init__(family, settings, say, networks)
        self.loaded, self.version = Loaded(family), ""
        self.say, self._thread = say, ThreadPoolExecutor(1, "pipeline")
        self.recipes: OrderedDict[str, Recipe] = OrderedDict()
        self.runs: OrderedDict[tuple[str, int], Run] = OrderedDict()
        self.starts = dict[Size, Any]()

    def _compile(self, say: Callable[[str], None]) -> None:
        compile_networks(self.family)

    def within(self, compute: Callable[[], Any]) -> Any:
        """Computes in one thread, whichever connection asks."""
        return self._thread.submit(torch.no_grad()(compute)).result()

    def check_decoder(self) -> None:
        """Tests whether the pipeline is a function of states and timesteps. Fault of class config: it is not."""
        from .admission import admit, recipe_of
        from .starts import encodes

        try:
            admit(self.loaded, self.say)
        except Exception as e:
            if is_out_of_memory(e):
                raise
            why, name = str(e) if isinstance(e, Fault) else said_by(self.family.cls, e), self.family.cls.__name__
            size = self.family.size()
            at = "" if self.family.admitted else (
                f" (at its default size, {size.frames} x {size.height} x {size.width}: frames, height and width in "
                "meander.json are another, its arguments other ones)"
            )  # fmt: skip
            raise Fault("config", f"not admitted: {'' if name in why else f'{name}: '}{why}{at}") from e
        self.family.encodes = encodes(self.loaded, Size(**self.family.admitted))
        for n in range(1, 1 + self.settings.compile * (1 + self.family.rows_alike)):
            self.say(f"compiling the network for {n} rows")
            run = self.loaded.session(recipe_of(self.loaded), n)
            y = torch.zeros(n, sum(shape.numel() // n for shape, _ in run.shapes), device=self.device)
            for sigma in (0.99, 0.01):  # a second transformer has the small ones
                run.velocity(y, sigma)
            run.session.cancel()

    def condition(self, digest: str, type: str, size: Size, rate: int, tensors: Tensors) -> Answer:
        """Keeps a condition by its digest."""
        if set(tensors) != {"condition"}:
            raise Fault("protocol", f"tensors: {', '.join(tensors) or 'none'}; must be condition")
        a = tensors["condition"]
        if type != "audio" and a.shape[:3] != (size.frames, size.height, size.width):
            raise Fault("protocol", f"condition: {list(a.shape)}; must be of {size}")
        self.loaded.conditions.put(digest, type, a, rate)
        return {}, []

    def encode(self, prompts: list[Any], truncate: bool, **recipe: Any) -> Answer:
        """Begins a session of a recipe, and returns its handle, and what its texts are encoded to."""
        handle = self._begin({"prompts": prompts, "truncate": truncate, **recipe})
        run = self.runs[handle, 1]
        tensors = [(name, _array(t)) for name, t in run.session.encoded.items()]
        return {"items": [{"handle": handle, "cut": run.cut, "tensors": [*range(len(tensors))]}]}, tensors

    def put(self, tensors: Tensors, recipe: dict[str, Any] | None = None) -> Answer:
        """The same for a recipe as a map."""
        if tensors or not recipe:
            raise Fault("protocol", "put: must be a recipe, without tensors")
        return {"handle": self._begin(recipe)}, []

    def velocity(
        self, states: list[Any], sigmas: list[Any], handles: list[Any], guidance: list[Any], size: Size, weights: str,
        tensors: Tensors,
    ) -> Answer:  # fmt: skip
        x = self.rows(states, sigmas, handles, guidance, size, tensors)
        handles = [self._guided(h, g) for h, g in zip(handles, guidance, strict=True)]
        recipes = [self._recipe(h) for h in handles]
        if wrong := [r for r in recipes if r.size != size]:
            raise Fault("latents", f"size: {size}; must be {wrong[0].size}, that of the recipe")
        if weights != self.version:
            self._clear()
        self.weights.select(weights)
        self.version = weights
        groups: dict[tuple[str, float], list[int]] = {}
        for i, (handle, sigma) in enumerate(zip(handles, sigmas, strict=True)):
            groups.setdefault((handle, sigma), []).append(i)
        most = 1 if self.settings.deterministic or not self.family.rows_alike else max(_BATCHES)
        waves: list[dict[tuple[str, int], tuple[list[int], float]]] = []  # of which each has a session once
        joint = self.loaded.joint and not self.settings.deterministic
        for (handle, sigma), rows in groups.items():
            while rows:
                n = next(b for b in _BATCHES if b <= min(len(rows), most))
                take, rows = rows[:n], rows[n:]
                if (wave := next((w for w in waves if joint and (handle, n) not in w), None)) is None:
                    waves.append(wave := {})
                wave[handle, n] = take, sigma
        out = torch.empty_like(x)
        for wave in waves:
            if not self._compute(wave, x, out, joint):  # the calls of a turn one after another may fit
                self.loaded.ahead = False
                self.free_cache()
                self._compute(wave, x, out, joint)
        return {}, [("v", _array(out))]

    def _compute(
        self, wave: dict[tuple[str, int], tuple[list[int], float]], x: torch.Tensor, out: torch.Tensor, joint: bool
    ) -> bool:
        """Computes the rows of a wave; False: memory is too small for the calls of a turn together."""
        runs: dict[tuple[str, int], Run] = {}
        try:
            for handle, n in wave:
                kept = self.runs.pop((handle, n), None)
                runs[handle, n] = kept or self.loaded.session(self._recipe(handle), n)
            turns = [(n, runs[handle, n].turn(x[t], s, joint)) for (handle, n), (t, s) in wave.items()]
            for (take, _), v in zip(wave.values(), self.loaded.together.run(turns), strict=True):
                out[take] = v
        except BaseException as e:
            for run in runs.values():
                run.session.cancel()
            if joint and self.loaded.ahead and len(wave) == 1 and is_out_of_memory(e):
                return False
            raise
        self.runs |= runs
        self._evict()
        return True

    def decode(self, size: Size, tensors: Tensors, handle: str = "") -> Answer:
        """Returns media u8 [F, H, W, 3] of latents x f32 [S, C], and sound f32 [samples, channels] where there is."""
        x = self._latents(tensors, self.family.latent_shape(size))
        run = self.loaded.session(self._recipe(handle))
        try:
            return media_of(run.end(x[None]), self.family.pipe)
        finally:
            run.session.cancel()

    def encode_media(self, size: Size, tensors: Tensors) -> Answer:
        from .starts import Start

        shape = self.family.latent_shape(size)
        media = self._tensor(tensors, "media", (size.frames, size.height, size.width, 3))
        start = self.starts.pop(size, None) or Start(self.loaded, size)
        self.starts = {**dict([*self.starts.items()][1 - _STARTS :]), size: start}
        return {}, [("x", _array(start.latents(media.permute(0, 3, 1, 2)).reshape(shape)))]

    def _begin(self, given: dict[str, Any]) -> str:
        r = self.loaded.recipe(given)
        if (r.handle, 1) not in self.runs:
            self.family.latent_grid(r.size)
            run = self.loaded.session(r)
            self.runs[r.handle, 1] = run
            run.split(torch.empty(1, int(np.prod(self.family.latent_shape(r.size)))))  # its fault tells the size
            self._evict()
        self.recipes[r.handle] = r
        while len(self.recipes) > _RECIPES:
            self.recipes.popitem(last=False)
        return r.handle

    def _recipe(self, handle: Any) -> Recipe:
        if handle not in self.recipes:
            raise Fault("handle", f"handles: {handle!s:.80}: unknown; put its recipe and repeat the call")
        self.recipes.move_to_end(handle)
        return self.recipes[handle]

    def _guided(self, handle: Any, scale: float) -> Any:
        """The handle of a recipe with another scale of guidance; 0: its own."""
        r = self._recipe(handle)
        if scale in (0, r.guidance):
            return handle
        r = replace(r, guidance=float(scale))
        self.recipes[r.handle] = r
        return r.handle

    def _evict(self) -> None:
        while len(self.runs) > _SESSIONS:
            self.runs.popitem(last=False)[1].session.cancel()

    def _clear(self) -> None:
        """Gives up all sessions: they may hold what other weights gave."""
        while self.runs:
            self.runs.popitem()[1].session.cancel()


def media_of(result: Any, pipe: Any) -> Answer:
    """The media of a pipeline's output: u8 frames, and f32 sound. Fault of class latents: no finite numbers."""
    out: list[tuple[str, np.ndarray]] = []
    fields: dict[str, Any] = {}
    found = {k: v for k, v in result.items() if v is not None} if isinstance(result, dict) else dict(enumerate(result))
    for name, value in found.items():
        a = value.float().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value, np.float32)
        if not np.isfinite(a).all():
            raise Fault("latents", "x: decodes to media that are not finite numbers; must be the latents of a sample")
        if str(name).startswith(("audio", "waveform")) or a.ndim < 4:
            out.append(("sound", a[0].T.copy() if a[0].ndim > 1 else a[0][:, None]))
            source = getattr(pipe, "vocoder", None) or pipe.vae
            rate = getattr(source.config, "output_sampling_rate", 0) or getattr(source.config, "sampling_rate", 0)
            fields["rate"] = int(rate or 48000)
        else:
            a = a[0] if a.ndim == 5 else a[:1]
            a = np.repeat(a, 3, -1) if a.shape[-1] == 1 else a[..., :3]
            out.append(("media", (a.clip(0, 1) * 255).round().astype(np.uint8)))
    return fields, out
