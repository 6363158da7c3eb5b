"""A batch of the stream in the form that the network needs: torch tensors of some rows and one trained step at a
time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ..batch import Batch
from ..events import EventError
from ..textbatch import TextBatch
from ..torch.family import Size
from .model import Row, Texts
from .objective import Kernel


class Rollouts:
    """The samples of a batch that have advantages: B rows with W trained steps each, of one size and one schedule.

    log_probs and advantages are [B, W] float64; kernels [W] are the trained steps. conditioning names the tensors of a
    prompt that the network takes, as Family.conditioning does.
    """

    def __init__(self, batch: Batch, conditioning: Sequence[str] = ("prompt_embeds",)):
        if not batch.size:
            raise EventError(f"batch {batch.name}: no sample has an advantage")
        if isinstance(batch, TextBatch):
            raise EventError(f"batch {batch.name}: it is of texts; this trainer's must be of images (for texts see examples/grpo_sums.py)")
        first = batch.samples[0].trajectory or {}
        if not batch["mask"].all() or (batch["sigmas"] != batch["sigmas"][0]).any() or (batch["noise_std"] != batch["noise_std"][0]).any():
            raise EventError(f"batch {batch.name}: its samples ran different schedules; a micro-batch has one")
        alike = ("frames", "height", "width", "true_cfg_scale", "cfg_rule")
        trajectories = [s.trajectory or {} for s in batch.samples]
        if several := {name for name in alike for t in trajectories if t.get(name) != first.get(name)}:
            raise EventError(f"batch {batch.name}: its samples differ in {', '.join(sorted(several))}; must be equal")
        self.guidance, self.rule = first["true_cfg_scale"], first["cfg_rule"]
        prefixes = ("", "negative_") if self.guidance > 1 else ("",)
        if missing := [p + n for p in prefixes for n in conditioning if p + n not in batch.conditioning]:
            raise EventError(
                f"batch {batch.name}: no {missing[0]} are stored; "
                "prompts to train on must have rollout.return_conditioning, and be for the model of --model"
            )
        self.batch, self.name, self.size = batch, batch.name, batch.size
        self.log_probs, self.advantages, self.rewards = batch["log_probs"], batch["advantages"], batch["rewards"]
        self.kernels = [Kernel.of(batch, j, first["log_prob_kind"]) for j in range(self.log_probs.shape[1])]
        self.conditioning, self.prompts = tuple(conditioning), dict[tuple[int, str, torch.device], Row]()
        self.frame = Size(first.get("frames", 1), first["height"], first["width"])
        steps = len(first["transitions"])
        # whether trained step j has guidance
        self.guided = [(int(i) + 1) / steps <= batch["cfg_until"][0] for i in batch["step_indices"][0]]

    @classmethod
    def without_samples(cls, name: str, steps: int) -> "Rollouts":
        """The share of a process that has no group of a batch with so many trained steps: it adds no gradient."""
        out = cls.__new__(cls)
        out.batch, out.name, out.size = Batch([], name), name, 0
        out.batch.arrays |= {"group_index": np.zeros(0, np.int64), "latents": np.zeros((0, steps, 0, 0), np.float32)}
        out.log_probs, out.advantages, out.rewards = np.zeros((0, steps)), np.zeros((0, steps)), np.zeros(0)
        out.kernels = [Kernel(0.0, 0.0, 1.0, 1.0, "density")] * steps
        return out

    @property
    def used(self) -> list[int]:
        """The rows that have a gradient."""
        return [int(i) for i in np.flatnonzero((self.advantages != 0).any(axis=1))]

    def split(self, rows: list[int], parts: int) -> list[list[int]]:
        """Splits the rows into parts of whole groups, of about equal size."""
        of, groups = self.batch["group_index"], len(self.batch.groups)
        return [[i for i in rows if of[i] * parts // groups == k] for k in range(parts)]

    def pieces(self, rows: list[int], size: int) -> list[np.ndarray]:
        """The rows as micro-batches."""
        return [np.array(rows[i : i + size]) for i in range(0, len(rows), size)]

    def step(self, rows: np.ndarray, j: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Texts]:
        """Returns the states before and after trained step j [n, S, C], its sigma [n] and the texts, for some rows."""
        names = ("latents", "next_latents", "sigmas")
        x, after, sigma = (torch.as_tensor(self.batch[name][rows, j], device=device) for name in names)
        guidance = torch.as_tensor(self.batch["guidance"][rows], dtype=torch.float32, device=device)
        groups = self.batch["group_index"][rows].tolist()
        guided = groups if self.guidance > 1 and self.guided[j] else []
        there, away = ([self._prompt(g, p, device) for g in gs] for p, gs in (("", groups), ("negative_", guided)))
        return x, after, sigma, Texts(there, guidance, away)

    def _prompt(self, group: int, prefix: str, device: torch.device) -> Row:
        """The tensors of a group's prompt, without padding; prefix is that of the negative prompt's names."""
        key = (group, prefix, device)
        if key not in self.prompts:
            stored, out = self.batch.conditioning, {}
            for name in self.conditioning:
                value, mask = stored[prefix + name][group], stored.get(f"{prefix}{name}_mask")
                out[name] = torch.as_tensor(value if mask is None else value[: int(mask[group].sum())], device=device)
            self.prompts[key] = out
        return self.prompts[key]

    def by_group(self, values: np.ndarray) -> list[np.ndarray]:
        """Values [B, ...] of the samples, a part for each group."""
        return [values[self.batch["group_index"] == k] for k in range(len(self.batch.groups))]

    def spread(self) -> float:
        """Returns the mean root mean square distance of two samples of a group after the last trained step: a cheap
        measure of diversity."""
        out = []
        for x in self.by_group(self.batch["next_latents"][:, -1].astype(np.float64)):
            out += [float(np.sqrt(((x[i + 1 :] - x[i]) ** 2).mean(axis=(1, 2))).mean()) for i in range(len(x) - 1)]
        return float(np.mean(out)) if out else math.nan
