"""A batch of the stream in the form that the network needs: torch tensors of some rows and one trained step at a
time."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..data.batch import Batch, scales_of
from ..data.events import Event, EventError, check_uses
from ..data.textbatch import TextBatch
from ..torch.family import Size
from ..torch.sessions import Recipe
from .model import Row, Texts
from .objective import Kernel


_ALIKE = ("frames", "height", "width", "cfg_scales", "guidance_rescale")
_OF_PIPELINES = {"conditions", "arguments", "network_timesteps", "initial_std", "no_negative_prompt"}
"""The settings that this trainer computes a velocity with, and that all samples of a micro-batch share."""
Teacher = Callable[[Batch], tuple[np.ndarray, str]]
"""Gives the velocities [n, W, S, C] of a teacher in the trained steps of a micro-batch, and says which one it is."""
_LAST_AS_EULER = ("euler", "dpm", "unipc")
"""The solvers whose last step, to sigma 0, is x - sigma v, the data estimate."""
USES = {
    *_ALIKE, "prompt", "prompt_2", "prompt_3", "negative_prompt", "truncate_prompt",  # by the encoded texts
    "guidance", "sigmas", "transitions", "noise_level", "log_prob_kind",
    # What made the stored states, which are read as they are.
    "solver", "latents_dtype", "sample_seed", "noise_seed", "step_seeds", "start", "stop",
}  # fmt: skip
"""The settings that this trainer uses: a sample with another is refused. Those of whole pipelines come with these."""


class Rollouts:
    """The samples of a batch that have advantages: B rows with W trained steps each, of one size and one schedule.
    Where all steps are ode (clean) W is 0, and advantages have one column.

    log_probs and advantages are [B, W] float64; kernels [W] are the trained steps. Where T tracks of a state have
    advantages of their own both are [B, W T], those of a step beside each other; tracks has the places of each track in
    a state, flat, and its share of the elements; else one track is all of it. conditioning names the tensors of a
    prompt that the network takes, as Family.conditioning does; recipe is what a whole pipeline, which takes none, is
    called with for a trajectory. Samples that do not count add no gradient: a process
    without samples goes along with them in the passes of a sharded network.

    Of a batch whose steps are not read, `read` is a micro-batch of it; the others are read by pieces.
    """

    def __init__(self, batch: Batch, conditioning: Sequence[str] = ("prompt_embeds",), counts: bool = True,
        recipe: Callable[[Event], Recipe] | None = None, read: Batch | None = None,
        teacher: Teacher | None = None):  # fmt: skip
        if not batch.size:
            raise EventError(f"batch {batch.name}: no sample has an advantage")
        if isinstance(batch, TextBatch):
            raise EventError(
                f"batch {batch.name}: it is of texts; this trainer's must be of images (for texts see "
                f"examples/grpo_sums.py)"
            )
        self.now, first, self.clean, self.teacher = read or batch, batch.samples[0].facts, batch.clean, teacher
        self.noise_std = None if self.clean else self.now["noise_std"][0]
        trajectories = [s.facts for s in batch.samples]
        if any(t["sigmas"] != first["sigmas"] for t in trajectories) if self.clean else (
            not batch["mask"].all() or (batch["sigmas"] != batch["sigmas"][0]).any()
        ):
            raise EventError(f"batch {batch.name}: its samples ran different schedules; a micro-batch has one")
        self.rule = first["cfg_rule"]
        if (self.rule == "inside") != (recipe is not None):
            how = "--generic, as they have" if recipe is None else "no --generic, as they have none"
            raise EventError(
                f"batch {batch.name}: its samplers guide by the rule {self.rule}; must be trained with {how}"
            )
        for t in trajectories:
            check_uses(t, USES | _OF_PIPELINES if recipe else USES, "this trainer")
        if several := {name for name in (*_ALIKE, "cfg_rule") for t in trajectories if t.get(name) != first.get(name)}:
            raise EventError(f"batch {batch.name}: its samples differ in {', '.join(sorted(several))}; must be equal")
        self.rescale = first.get("guidance_rescale", 0.0)
        *self.schedule, self.last = first["sigmas"]
        self.scales = scales_of(first)
        prefixes = () if recipe else ("", "negative_") if max(self.scales) > 1 else ("",)
        self.needed = [p + n for p in prefixes for n in conditioning]
        self.batch, self.name, self.size, self.counts = batch, batch.name, batch.size, counts
        self._check(self.now)
        self.advantages, self.rewards = batch["advantages"], batch["rewards"]
        self.log_probs = np.zeros((self.size, 0)) if self.clean else batch["log_probs"]
        self.kernels = [Kernel.of(self.now, j, first["log_prob_kind"]) for j in range(self.log_probs.shape[1])]
        self.names = batch.tracks if batch.credits else []
        if self.names:
            self.tracks = [(place, place.stop - place.start) for place in map(batch.place, self.names)]
            whole = sum(n for _, n in self.tracks)
            self.tracks = [(place, n / whole) for place, n in self.tracks]
            self.advantages = self._beside(batch.track_advantages)
            if not self.clean:
                self.log_probs = np.full_like(self.advantages, np.nan)
                self._read_tracks(self.now)
        self.conditioning, self.prompts = tuple(conditioning), dict[tuple[int, str, torch.device], Row]()
        self.ends, self.spreads = dict[int, torch.Tensor](), dict[int, list[float]]()
        self.shape = (*self.log_probs.shape, *self.now["final_latents" if self.clean else "latents"].shape[-2:])
        first_of = dict(zip(batch.prompt_index[::-1].tolist(), trajectories[::-1], strict=True))
        self.recipes = {k: recipe(t) for k, t in first_of.items()} if recipe else {}
        self.frame = Size(first.get("frames", 1), first["height"], first["width"])

    clean = False
    teacher: Teacher | None = None
    """Gives the velocities of the other model, of a loss that learns from one."""
    taught: torch.Tensor | None = None
    """Those of the micro-batch: rows, trained steps, then as states are."""
    taught_by = ""
    """The digest of the teacher's weights."""
    names: Sequence[str] = ()
    tracks: Sequence[tuple[slice, float]] = ((slice(None), 1.0),)

    def _beside(self, of: Callable[[str], np.ndarray]) -> np.ndarray:
        """What each track has, [B, W], as [B, W T]."""
        parts = [of(name) for name in self.names]
        return np.stack(parts, axis=2).reshape(*parts[0].shape[:1], -1)

    def _read_tracks(self, micro: Batch) -> None:
        """Keeps the log-probs of the tracks, which are in the steps alone."""
        rows = slice(None) if micro.rows is None else micro.rows
        self.log_probs[rows] = self._beside(lambda name: micro.track(name)["log_probs"])

    def parts(self, states: torch.Tensor) -> list[torch.Tensor]:
        """States [n, S, C] as those of the tracks, [n, 1, elements]."""
        if not self.names:
            return [states]
        return [states.flatten(1)[:, None, place] for place, _ in self.tracks]

    @classmethod
    def without_samples(cls, name: str, steps: int) -> "Rollouts":
        """The share of a process that has no group of a batch with so many trained steps: it adds no gradient."""
        out = cls.__new__(cls)
        out.batch, out.name, out.size, out.counts = Batch([], name), name, 0, False
        out.batch.arrays |= {"group_index": np.zeros(0, np.int64)}
        out.now, out.shape, out.spreads = out.batch, (0, steps, 0, 0), {}
        out.log_probs, out.advantages, out.rewards = np.zeros((0, steps)), np.zeros((0, steps)), np.zeros(0)
        out.schedule, out.recipes, out.clean = [], {}, not steps
        out.kernels = [Kernel(0.0, 0.0, 1.0, 1.0, "density")] * steps
        return out

    @property
    def steps(self) -> list[int]:
        """The indices of the trained steps."""
        return [] if self.clean else [int(i) for i in self.batch["step_indices"][0]]

    @property
    def scored(self) -> int:
        """How many samples of the batch have a reward: of a stage, those that its own lead to."""
        groups: list[Any] = [g.advantage for g in self.batch.groups]
        leaves = [m for a in groups for m in a.get("leaves") or ()]
        return sum(m["reward"] is not None for m in leaves) if leaves else self.size

    @property
    def used(self) -> list[int]:
        """The rows that have a gradient."""
        return [int(i) for i in np.flatnonzero((self.advantages != 0).any(axis=1))]

    @property
    def estimator(self) -> str:
        """What the advantages are of."""
        found = sorted({g.advantage.get("estimator", "") for g in self.batch.groups})
        if len(found) > 1:
            raise EventError(f"batch {self.name}: its groups have the estimators {', '.join(found)}; must be of one")
        return found[0] if found else ""

    def pairs(self) -> list[int]:
        """The best and the worst sample of each group whose rewards are not all equal, one after the other."""
        out: list[int] = []
        for k in range(len(self.batch.groups)):
            rows = np.flatnonzero(self.batch["group_index"] == k)
            rewards = self.rewards[rows]
            if len(rows) and rewards.max() > rewards.min():
                # Of equal ones the first is the best and the last the worst, as verl-omni sorts them.
                out += [int(rows[rewards.argmax()]), int(rows[::-1][rewards[::-1].argmin()])]
        return out

    def split(self, rows: list[int], parts: int) -> list[list[int]]:
        """Splits the rows into parts of whole groups, of about equal size."""
        of, groups = self.batch["group_index"], len(self.batch.groups)
        return [[i for i in rows if of[i] * parts // groups == k] for k in range(parts)]

    def _check(self, micro: Batch) -> None:
        """EventError: samples that were read ran another schedule, or lack encoded texts."""
        if not self.clean and (micro["noise_std"] != self.noise_std).any():
            raise EventError(f"batch {self.name}: its samples ran different schedules; a micro-batch has one")
        if missing := [name for name in self.needed if name not in micro.conditioning]:
            raise EventError(
                f"batch {self.name}: no {missing[0]} are stored; "
                "prompts to train on must have rollout.return_conditioning, and be for the model of --model"
            )

    def pieces(self, rows: list[int], size: int) -> Iterator[np.ndarray]:
        """The rows as micro-batches; of each the steps are read when it comes, and held until the next one."""
        pieces = [np.array(rows[i : i + size]) for i in range(0, len(rows), size)]
        if not self.batch.unread and self.teacher is None:
            for piece in pieces:
                self._spread(piece, rows)
                yield piece
            return
        for piece, micro in zip(pieces, self.batch.micro(size, rows), strict=True):
            self._check(micro)
            self.now = micro
            if self.names and not self.clean:
                self._read_tracks(micro)
            if self.teacher is not None:
                velocities, self.taught_by = self.teacher(micro)
                self.taught = torch.from_numpy(velocities)
            texts = {int(k) for k in self.batch.prompt_index[piece]}
            self.prompts = {key: row for key, row in self.prompts.items() if key[0] in texts}
            self._spread(piece, rows)
            yield piece

    def _at(self, rows: np.ndarray) -> np.ndarray:
        """Where rows are in what is read now."""
        return rows if self.now.rows is None else np.searchsorted(self.now.rows, rows)

    def step(
        self, rows: np.ndarray, j: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Texts]:
        """Returns the states before and after trained step j [n, S, C] float32, its sigma [n] and the texts, for some
        rows."""
        assert self.now.states is not None, "it is read"
        at, states = torch.as_tensor(self._at(rows)), self.now.states
        x, after = (states.tensor(name)[at, j].to(device).float() for name in ("latents", "next_latents"))
        sigma = torch.as_tensor(self.batch["sigmas"][rows, j], device=device)
        return x, after, sigma, self._texts(rows, int(self.batch["step_indices"][0, j]), device)

    def taught_mean(self, rows: np.ndarray, j: int, device: torch.device) -> torch.Tensor:
        """Returns the means [n, S, C] float64 of trained step j of some rows by the teacher's velocities."""
        assert self.now.states is not None and self.taught is not None, "they are read"
        at = torch.as_tensor(self._at(rows))
        x, v = (t[at, j].to(device).float() for t in (self.now.states.tensor("latents"), self.taught))
        return self.kernels[j].mean(x, v)

    def last_step(
        self, rows: np.ndarray, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Texts] | None:
        """As step, of the last step of samples whose steps are all ode: of the rows whose state before it is stored.
        None: there are none, or it is none of euler's, as the last step to sigma 0 is of solvers that look back."""
        last = len(self.schedule) - 1
        samples = [self.now.samples[i] for i in self._at(rows)]
        if any(s.facts["solver"] not in (("euler",) if self.last else _LAST_AS_EULER) for s in samples):
            return None
        rows = np.array([r for r, s in zip(rows, samples, strict=True) if last in s.facts["latent_step_indices"]], int)
        if not rows.size:
            return None
        at = self._at(rows)
        x, after = (
            torch.as_tensor(np.stack([self.now.samples[i].latents(k) for i in at]), device=device)
            for k in (last, last + 1)
        )
        sigma = torch.full((len(rows),), self.schedule[last], dtype=torch.float32, device=device)
        return x, after, sigma, self._texts(rows, last, device)

    def noised(
        self, rows: np.ndarray, i: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Texts]:
        """Returns the clean latents of some rows [n, S, C], the same noised to the sigma of step i of the schedule,
        that sigma [n] and the texts. The noise is drawn of the sample and the step: it is the same in each
        micro-batch, process and repetition."""
        clean = torch.stack(
            [torch.as_tensor(self.now.samples[i].latents(len(self.schedule))) for i in self._at(rows)]
        )
        clean = clean / math.hypot(1 - self.last, self.last)  # the state that is decoded
        noise = torch.stack(
            [
                torch.randn(
                    clean.shape[1:], generator=_generator(self.batch["uid"][r], self.batch["sample_index"][r], i)
                )
                for r in rows
            ]
        )
        sigma = torch.full((len(rows),), self.schedule[i], dtype=torch.float32)
        s = sigma[:, None, None]
        x, clean, sigma = (t.to(device) for t in ((1 - s) * clean + s * noise, clean, sigma))
        return clean, x, sigma, self._texts(rows, i, device)

    def _texts(self, rows: np.ndarray, i: int, device: torch.device) -> Texts:
        """The texts of some rows as step i of the schedule has them."""
        guidance = torch.as_tensor(self.batch["guidance"][rows], dtype=torch.float32, device=device)
        texts = self.batch.prompt_index[rows].tolist()
        if self.recipes:
            return Texts([], guidance, recipes=[self._recipe(self.recipes[k], self.scales[i]) for k in texts])
        places = list(zip(texts, self.now.prompt_index[self._at(rows)].tolist(), strict=True))
        return Texts(
            [self._prompt(k, place, "", device) for k, place in places], guidance,
            [self._prompt(k, place, "negative_", device) for k, place in places if self.scales[i] > 1], self.scales[i],
        )  # fmt: skip

    def _recipe(self, r: Recipe, scale: float) -> Recipe:
        """A recipe at a scale of guidance, where some steps have another."""
        return dataclasses.replace(r, guidance=scale) if len({*self.scales}) > 1 else r

    def asked(self) -> list[Recipe]:
        """All recipes that a whole pipeline is called with."""
        return [self._recipe(r, scale) for r in self.recipes.values() for scale in {*self.scales}]

    def _prompt(self, text: int, group: int, prefix: str, device: torch.device) -> Row:
        """The tensors of a prompt, at a place of those that were read, without padding; prefix is that of the negative
        prompt's names."""
        key = (text, prefix, device)
        if key not in self.prompts:
            stored, out = self.now.conditioning, {}
            for name in self.conditioning:
                value, mask = stored[prefix + name][group], stored.get(f"{prefix}{name}_mask")
                out[name] = torch.as_tensor(value if mask is None else value[: int(mask[group].sum())], device=device)
            self.prompts[key] = out
        return self.prompts[key]

    def scale(self, j: int) -> float:
        """The scale of guidance at trained step j; 1: without."""
        return self.scales[int(self.batch["step_indices"][0, j])]

    def by_group(self, values: np.ndarray) -> list[np.ndarray]:
        """Values [B, ...] of the samples, a part for each group."""
        return [values[self.batch["group_index"] == k] for k in range(len(self.batch.groups))]

    def spread(self) -> float:
        """Returns the mean root mean square distance of two samples of a group after the last trained step, over the
        groups of which pieces were read: a cheap measure of diversity."""
        out = [d for distances in self.spreads.values() for d in distances]
        return float(np.mean(out)) if out else math.nan

    def _spread(self, piece: np.ndarray, rows: list[int]) -> None:
        """Keeps the last states of a piece until those of all of a group's rows are there, and then their distances."""
        of, states = self.batch["group_index"], self.now.states
        ends = states.tensor("next_latents")[:, -1] if states else torch.from_numpy(self.now["final_latents"])
        for r, i in zip(piece.tolist(), self._at(piece), strict=True):
            if int(of[r]) not in self.spreads:
                self.ends[r] = ends[i].double()  # a copy
        for k in {int(g) for g in of[piece]} - self.spreads.keys():
            own = sorted({r for r in rows if of[r] == k})
            if all(r in self.ends for r in own):
                x = torch.stack([self.ends.pop(r) for r in own]).flatten(1)
                square = (x * x).sum(dim=1)
                off = ((square[:, None] + square - 2 * x @ x.T).clamp(min=0) / x.shape[1]).sqrt()
                self.spreads[k] = [float(off[i, i + 1 :].mean()) for i in range(len(own) - 1)]


def _generator(*of: object) -> torch.Generator:
    seed = int.from_bytes(hashlib.sha256(" ".join(map(str, of)).encode()).digest()[:8], "big", signed=True)
    return torch.Generator().manual_seed(seed)
