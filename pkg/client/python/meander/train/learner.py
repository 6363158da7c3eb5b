"""One policy update: the gradient of the objective over a batch of rollouts, and the steps that follow it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from .. import loss as reference
from . import distributed
from .model import Network
from .objective import Loss
from .rollouts import Rollouts


@dataclasses.dataclass
class Report:
    """What an update did. Lists are by trained step; NaN stands for values without samples."""

    ratio_off: list[float]
    """max |log_prob - old| of samples that no optimizer step had been taken for."""
    moved: float
    """mean |log_prob - old| of the others."""
    clipped: float
    """The share of ratios that the clip cut."""
    loss: float
    """The mean loss over the minibatches."""
    grad_norm: float
    """The norm of the gradient, before it is cut."""
    kl: list[float]
    """Mean divergence from the base, of the first micro-batch."""
    weight: float
    """The mean importance weight."""
    used: int
    """Samples whose advantage is not 0."""


class Learner:
    """The network with its optimizer and its running average.

    Each process holds the groups that it read. Gradients are summed over the processes, so all take the same step.
    """

    def __init__(self, network: Network, loss: Loss, lr: float = 2e-3, beta2: float = 0.99, weight_decay: float = 0.0, max_grad_norm: float = 1.0,
                 minibatches: int = 1, micro_batch: int = 64, ema: float = 0.0, is_threshold: float = 2.0):  # fmt: skip
        self.network, self.loss, self.max_grad_norm = network, loss, max_grad_norm
        self.minibatches, self.micro_batch, self.decay, self.is_threshold = minibatches, micro_batch, ema, is_threshold
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=lr, betas=(0.9, beta2), weight_decay=weight_decay)
        self.average = network.state() if ema else None

    def update(self, batch: Rollouts, behind: int = 0) -> Report:
        """Trains on a batch whose weights are behind by this many updates; 0: it was made by the current weights.

        The log-probs of an older batch are computed again, with importance weights for how far the weights have changed
        since.
        """
        network, w = self.network, len(batch.kernels)
        used = list(range(batch.size)) if self.loss.beta else batch.used
        old, means, weights = batch.log_probs, None, np.ones_like(batch.log_probs)
        if behind or self.loss.name == "grpo_guard":
            found, means = self.score(batch, used)
            if behind and used:
                old = np.where(np.isfinite(found), found, old)
                weights[used] = reference.rollout_weights(old[used], batch.log_probs[used], threshold=self.is_threshold)
        tally = _Tally(w)
        norm = 0.0
        for part, rows in enumerate(batch.split(used, self.minibatches)):
            self.optimizer.zero_grad(set_to_none=False)
            if part == 0 or self.minibatches > 1:
                share = distributed.total(batch.size) / self.minibatches * w
            for k, piece in enumerate(batch.pieces(rows, self.micro_batch)):
                for j in range(w):
                    self._add(batch, piece, j, old, means, weights, share, tally, fresh=part == 0, compare=part == k == 0)
            for p in network.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            distributed.add([p.grad for p in network.parameters() if p.grad is not None])
            norm = max(norm, float(torch.nn.utils.clip_grad_norm_(network.parameters(), self.max_grad_norm)))
            if not math.isfinite(norm):
                raise FloatingPointError(f"the gradient of batch {batch.name} has norm {norm}: the adapter is left as it is")
            if distributed.total(len(rows)):
                self.optimizer.step()
        if self.average is not None:
            for name, value in network.state().items():
                self.average[name].lerp_(value, 1 - self.decay)
        return tally.report(norm, distributed.total(len(batch.used)), self.minibatches)

    def _add(self, batch: Rollouts, rows: np.ndarray, j: int, old: np.ndarray, means: torch.Tensor | None, weights: np.ndarray, share: float,
             tally: "_Tally", fresh: bool, compare: bool) -> None:  # fmt: skip
        """Adds the gradient of trained step j of some samples."""
        kernel, device = batch.kernels[j], self.network.device
        was, a, weight = (torch.as_tensor(t[rows], dtype=torch.float64, device=device) for t in (old[:, j], batch.advantages[:, j], weights[:, j]))
        mean, after = self._mean(batch, rows, j)
        log_prob = kernel.log_prob(mean, after)
        losses, ratio = self.loss.losses(kernel, log_prob, was, a, mean, None if means is None else means[rows, j], weight)
        total = losses.sum() / share
        if self.loss.beta or compare:
            with torch.no_grad(), self.network.base():
                base, _ = self._mean(batch, rows, j)
            divergence = kernel.divergence(mean, base)
            if self.loss.beta:
                total = total + self.loss.beta * divergence.sum() / share
            if compare:
                tally.kl[j] += torch.stack([divergence.detach().sum().cpu(), torch.tensor(float(len(rows)), dtype=torch.float64)])
        total.backward()
        off = (log_prob.detach() - torch.as_tensor(batch.log_probs[rows, j], device=device)).abs()
        if fresh:
            tally.off[j] = max(float(tally.off[j]), float(off.max()))
        tally.sums += torch.tensor([float(total.detach()), 0 if fresh else float(off.sum()), 0 if fresh else len(rows), float(((ratio - 1).abs() > self.loss.clip).sum()),
                                    float(weight.sum()), len(rows)], dtype=torch.float64)  # fmt: skip

    def _mean(self, batch: Rollouts, rows: np.ndarray, j: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean of trained step j of some samples under the network, and the state after it."""
        x, after, sigma, texts = batch.step(rows, j, self.network.device)
        v = self.network.guided(x, sigma, texts, batch.frame, batch.guidance, batch.rule)
        return batch.kernels[j].mean(x, v), after

    @torch.no_grad()
    def score(self, batch: Rollouts, rows: list[int]) -> tuple[np.ndarray, torch.Tensor]:
        """Returns the log-probs [B, W] of the rows under the current network, NaN for other rows, and the means that
        they belong to, [B, W, S, C]."""
        out = np.full(batch.log_probs.shape, np.nan)
        means = torch.zeros(batch.batch["latents"].shape, dtype=torch.float64, device=self.network.device)
        for piece in batch.pieces(rows, self.micro_batch):
            for j, kernel in enumerate(batch.kernels):
                mean, after = self._mean(batch, piece, j)
                means[piece, j] = mean
                out[piece, j] = kernel.log_prob(mean, after).cpu().numpy()
        return out, means

    def state(self) -> dict[str, Any]:
        """Returns all that a checkpoint needs to continue bit by bit."""
        return {"adapter": self.network.state(), "optimizer": self.optimizer.state_dict(), "average": self.average}

    def load(self, state: dict[str, Any]) -> None:
        """Continues from what state returned."""
        self.network.load(state["adapter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average = state["average"]

    def best(self) -> dict[str, torch.Tensor]:
        """Returns the adapter to evaluate and keep: the running average, if there is one."""
        return self.network.state() if self.average is None else self.average


class _Tally:
    """Sums over the pieces of an update, of all processes."""

    def __init__(self, steps: int):
        self.off = torch.full((steps,), -math.inf, dtype=torch.float64)
        self.kl = torch.zeros(steps, 2, dtype=torch.float64)
        self.sums = torch.zeros(6, dtype=torch.float64)

    def report(self, norm: float, used: int, minibatches: int) -> Report:
        distributed.add([self.kl, self.sums])
        distributed.largest(self.off)
        loss, moved, later, clipped, weight, n = self.sums.tolist()

        def per(x: float, count: float) -> float:
            return x / count if count else math.nan

        return Report([x if math.isfinite(x) else math.nan for x in self.off.tolist()], per(moved, later), per(clipped, n), loss / minibatches, norm,
                      [per(a, b) for a, b in self.kl.tolist()], per(weight, n), used)  # fmt: skip
