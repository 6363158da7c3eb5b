"""The velocity of a whole pipeline of diffusers with gradients: by sessions of its recipes, as a worker has it."""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.events import AnyEvent, EventError
from ..torch import admission, sessions
from ..torch.encoding import Encoders
from ..torch.engine import DTYPES
from ..torch.faults import Fault
from ..torch.sessions import READ, Loaded, Recipe, Run
from ..torch.whole import digest_of
from . import distributed

_SESSIONS = 64
_TEXTS = 4  # that are encoded of a recipe: prompts, negative ones, and media


class Whole:
    """A pipeline that is loaded, with the files and the sessions of what is trained on."""

    def __init__(self, folder: str | Path, device: str, dtype: torch.dtype, trust: bool, shard: bool = False):
        """Loads it; of one to be sharded the networks are on the CPU. Fault: it cannot be read."""
        name = next(name for name, of in DTYPES.items() if of == dtype)
        self.loaded: Loaded = sessions.read(folder, device, name, trust, networks="cpu" if shard else "")
        self.family = self.loaded.family
        self._encoders: Encoders | None = None
        self._lockstep: distributed.Lockstep | None = None
        self.files: dict[tuple[str, str], str] = {}  # digests of conditions by the type and digest of a file
        self._runs: OrderedDict[tuple[str, int, bool], Run] = OrderedDict()

    def admit(self, shard: bool) -> None:
        """Tests the pipeline, before it is used. Fault: it is not computed, with the reason."""
        if shard:
            self._lockstep = distributed.Lockstep([*self.family.networks.values()])
        with torch.no_grad():
            admission.admit(self.loaded, lambda detail: None)
        if shard and self.family.access != "exact":
            raise Fault("config", f"--shard: set; must not be: steps of {self.family.cls.__name__} need those before")
        self.loaded.ahead &= not shard
        self._encoders = Encoders(self.family)
        self.loaded.memo.before = self._encoders.read

    def encode(self, recipes: list[Recipe]) -> None:
        """Encodes what is trained on, and gives the memory of the text encoders back."""
        memo = self.loaded.memo
        memo.count = max(memo.count, _TEXTS * len(recipes))
        for r in recipes:
            try:
                self.loaded.encode(r)
            except Fault as e:
                raise EventError(f"prompt {r.texts!r:.80}: {e}") from e
        if self._encoders:
            self._encoders.free()

    def lacks(self, c: AnyEvent) -> bool:
        """Whether the file of a condition of a sample must be read."""
        digest = self.files.get((c["type"], c["ref"]["digest"]), "")
        return self.loaded.conditions.get(digest) is None

    def read(self, c: AnyEvent, file: bytes) -> None:
        """Keeps the file of a condition of a sample. EventError: none of those that samplers give to pipelines."""
        from PIL import Image, ImageSequence

        kind = c["type"]
        if kind not in ("image", "mask", "video"):
            raise EventError(f"conditions: {c['name']}: {kind}; must be an image, a mask or a video to train on")
        with Image.open(io.BytesIO(file)) as opened:
            frames = [f.convert("RGB") for f in ImageSequence.Iterator(opened)]
        a = np.stack([np.asarray(f.convert("L"))[..., None] if kind == "mask" else np.asarray(f) for f in frames])
        digest = self.files[kind, c["ref"]["digest"]] = digest_of(kind, a.shape[:3], a)
        self.loaded.conditions.put(digest, kind, a)

    def recipe(self, t: AnyEvent) -> Recipe:
        """What the pipeline was called with for the sample of a trajectory. EventError: it takes no such."""
        f, scale = self.family, t["true_cfg_scale"]
        types, arguments = {a["name"]: a["type"] for a in f.arguments}, dict[str, Any]()
        try:
            for name, text in (t.get("arguments") or {}).items():
                arguments[name] = READ[types[name]](text)
            if "negative_prompt" in types and not t.get("no_negative_prompt"):
                arguments["negative_prompt"] = t["negative_prompt"]
            conditions: dict[str, list[str]] = {}
            for c in t.get("conditions") or []:
                conditions.setdefault(c["name"], []).append(self.files[c["type"], c["ref"]["digest"]])
            second, third = t.get("prompt_2") or t["prompt"], t.get("prompt_3")
            texts = [t["prompt"], second, third][: 3 if third else 2 if t.get("prompt_2") else 1]
            return self.loaded.recipe({
                "prompts": [texts], "truncate": t.get("truncate_prompt", False), "conditions": conditions,
                "arguments": arguments, "guidance": scale if f.card()["pipeline"]["guidance"] else 0,
                "frames": t.get("frames") or 1, "height": t["height"], "width": t["width"],
                "steps": len(t["transitions"]),
            })  # fmt: skip
        except (Fault, LookupError, ValueError) as e:
            raise EventError(
                f"{t['uid']}: {type(e).__name__ * (not str(e))}{e}: --model must be the folder that the samplers serve"
            ) from e

    def velocity(self, x: torch.Tensor, sigma: torch.Tensor, recipes: list[Recipe]) -> torch.Tensor:
        """v float32 [n, S, C] of states x at sigma [n], guided, of a recipe for each row."""
        places: dict[tuple[str, float], list[int]] = {}
        for i, r in enumerate(recipes):
            places.setdefault((r.handle, float(sigma[i])), []).append(i)
        parts, order = [], list[int]()
        for (_, s), rows in places.items():
            for take in [rows] if self.family.rows_alike else [[i] for i in rows]:
                parts.append(self._velocity(recipes[take[0]], x[take], s))
                order += take
        v = torch.cat(parts)[np.argsort(order)]
        return self._lockstep.end(v) if self._lockstep else v

    def _velocity(self, recipe: Recipe, x: torch.Tensor, sigma: float) -> torch.Tensor:
        """Of rows of one recipe. A session is kept only where the pipeline keeps nothing that the network gave."""
        key = (recipe.handle, len(x), torch.is_grad_enabled())
        try:
            run = self._runs.pop(key, None) or self.loaded.session(recipe, len(x), key[2])
        except Fault as e:
            raise EventError(f"prompt {recipe.texts!r:.80}: {e}") from e
        kept = False
        try:
            if self._lockstep:  # all calls of networks are of this thread: backward passes have their order
                v = self.loaded.together.run([(len(x), run.turn(x, sigma))])[0]
            else:
                v = run.velocity(x, sigma)
            kept = not self.loaded.first
        except Fault as e:
            raise EventError(f"prompt {recipe.texts!r:.80}: {e}") from e
        finally:
            if not kept:
                run.session.cancel()
        if kept:
            self._runs[key] = run
        while len(self._runs) > _SESSIONS:
            self._runs.popitem(last=False)[1].session.cancel()
        return v
