"""One policy update: the gradient of the objective over a batch of rollouts, and the steps that follow it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..plugs import accelerate
from ..maths import loss as reference
from . import distributed
from .losses import Loss, Noised, Steps
from .model import Network, Texts
from .objective import last_off, velocity_off
from .prompts import NO_TRACKS
from .rollouts import Rollouts


@dataclasses.dataclass
class Report:
    """What an update did. Lists are by trained step, ratio_off and ratio_bound also by track, where tracks have
    advantages of their own; NaN stands for values without samples."""

    ratio_off: list[float]
    """max |log_prob - old| of samples that no optimizer step had been taken for. Where all steps are ode, by track: how
    far the last latents are from what the network makes of the state before them, where that is known."""
    ratio_bound: list[float]
    """What of it roundings may be: see Kernel.rounding and last_off."""
    moved: float
    """mean |log_prob - old| of the others."""
    ratio: float
    """The mean of exp(log_prob - old) over all of them."""
    ratio_max: float
    """The largest of these."""
    figures: dict[str, float]
    """Means of what the loss tells: clipped, the share of ratios that the clip cut."""
    loss: float
    """The mean loss over the minibatches."""
    grad_norm: float
    """The norm of the gradient, before it is cut."""
    kl: list[float]
    """Mean divergence from the base, of the first micro-batch."""
    weight: float
    """The mean importance weight."""
    used: int
    """Samples that the loss has a gradient for, without the divergence from the base."""


class Learner:
    """The network with its optimizer and its running average.

    Each process holds the groups that it read. Gradients are summed over the processes, so all take the same step. The
    adapter as it is, and its average, are whole in each of them.
    """

    def __init__(self, network: Network, loss: Loss, lr: float = 2e-3, beta2: float = 0.99, weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
                 minibatches: int = 1, micro_batch: int = 64, ema: float = 0.0, is_threshold: float = 2.0,
                 beta: float = 0.0):
        """beta: weight of the divergence from the base; that of a forward loss is the mean square of the distance of
        velocities."""
        self.network, self.loss, self.beta, self.max_grad_norm = network, loss, beta, max_grad_norm
        self.minibatches, self.micro_batch, self.decay, self.is_threshold = minibatches, micro_batch, ema, is_threshold
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=lr, betas=(0.9, beta2), weight_decay=weight_decay)
        self.adapter = network.state()
        self.average = network.state() if ema else None
        self.gathered = 0  # samples with a gradient since the last step of the optimizer
        self.taught_by = ""  # the teacher of the last batch

    def update(
        self, batch: Rollouts, behind: int = 0, lr: float | None = None, part: int = 0, parts: int = 1
    ) -> Report:
        """Trains on a batch whose weights are behind by this many updates; 0: it was made by the current weights. lr:
        another learning rate from now on. Of an update of several parts, each a batch, the last one takes the step.

        The log-probs of an older batch are computed again, with importance weights for how far the weights have changed
        since.
        """
        network, loss = self.network, self.loss
        if network.whole and batch.recipes:
            network.whole.encode(batch.asked())
        for group in self.optimizer.param_groups if lr is not None else ():
            group["lr"] = lr
        rows, used, counted = list[int](), 0, 0
        if loss.pairs and batch.names:
            raise ValueError(f"batch {batch.name}: {NO_TRACKS}")
        if batch.size and batch.clean and not loss.forward:
            raise ValueError(
                f"batch {batch.name}: all steps of its samples are ode, so there are no log-probs, which this loss "
                f"needs; must be trained with --loss diffusion_nft, or have stochastic steps"
            )
        if batch.counts:
            rows, used, counted = loss.rows(batch, self.beta > 0), len(loss.rows(batch, False)), loss.count(batch)
        shared = _Shared(
            batch, batch.log_probs, np.ones_like(batch.log_probs), _Tally(batch, loss.figures)
        )
        if loss.forward:
            if behind:
                raise ValueError(
                    f"batch {batch.name} is {behind} updates old; must be of the current weights for a forward loss"
                )
            if self.minibatches > 1:
                shared.velocities = self._velocities(batch, rows)
        elif loss.drift or behind and not (loss.pairs or loss.taught):
            found, shared.means = self.score(batch, rows, loss.drift)
            if behind and rows:
                shared.old = np.where(np.isfinite(found), found, shared.old)
                shared.weights[rows] = reference.rollout_weights(
                    shared.old[rows], batch.log_probs[rows], threshold=self.is_threshold
                )
        count = distributed.total(counted) * parts / self.minibatches
        norm = 0.0
        for k, chosen in enumerate(batch.split(rows, self.minibatches)):
            if part == 0:
                self.optimizer.zero_grad()
                self.gathered = 0
            for i, (piece, counts) in enumerate(self._pieces(batch, chosen)):
                shared.fresh, shared.compare = k == 0, k == i == 0
                add = self._add_noised if loss.forward else self._add
                if counts:
                    add(shared, piece, count)
                else:
                    nothing = _Tally(batch, loss.figures)
                    add(dataclasses.replace(shared, tally=nothing, counts=False), piece, math.inf)
            self.gathered += distributed.total(len(chosen))
            if part < parts - 1:
                continue
            idle = network.untrained()
            for p in network.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            if not network.shard:  # else the backward pass has added them
                distributed.add([p.grad for p in network.parameters() if p.grad is not None])
            length = torch.nn.utils.clip_grad_norm_(network.parameters(), self.max_grad_norm)
            norm = max(norm, float(accelerate.whole(length)))
            if not math.isfinite(norm):
                raise FloatingPointError(
                    f"the gradient of batch {batch.name} has norm {norm}: the adapter is left as it is"
                )
            for p in idle:
                p.grad = None  # zeros would move it by its momentum
            if self.gathered:
                self.optimizer.step()
        if part == parts - 1:
            self.adapter = network.state()
            for name, value in self.average.items() if self.average is not None else ():
                value.lerp_(self.adapter[name], 1 - self.decay)
        self.taught_by = batch.taught_by
        return shared.tally.report(norm, distributed.total(used), self.minibatches)

    def _pieces(self, batch: Rollouts, rows: list[int]) -> Iterator[tuple[np.ndarray, bool]]:
        """The rows as micro-batches, and whether they count. Of a sharded network all processes make the same passes:
        one that has fewer micro-batches goes along with one of its samples, which counts nothing."""
        count = -(-len(rows) // self.micro_batch)
        most = torch.tensor(count)
        if self.network.shard:
            distributed.largest(most)
        for piece in batch.pieces(rows, self.micro_batch):
            yield piece, True
        for _ in range(int(most) - count):
            for piece in batch.pieces([0], 1):
                yield piece, False

    def _backward(self, loss: torch.Tensor) -> None:
        """Adds the gradient."""
        (loss * self.network.gradients).backward()

    def _add(self, shared: _Shared, rows: np.ndarray, count: float) -> None:
        """Adds the gradient of all trained steps of some samples. The graph of one step is held at a time: of a loss of
        whole trajectories the gradient by the log-probs is found first, in a pass without a graph."""
        w, slopes = len(shared.batch.kernels), None
        share = count * w
        if self.loss.trajectory:
            with torch.no_grad():
                seen = [self._step(shared, rows, j, self.loss.base) for j in range(w)]
            told = zip(*((s.log_prob, s.drift, s.taught) for s in seen))
            leaves = [torch.stack(t, dim=1).requires_grad_() for t in told]
            bases = torch.stack([s.base for s in seen], dim=1)
            with torch.enable_grad():
                losses = self._call(shared, rows, 0, leaves[0], leaves[1], leaves[2], bases)
                slopes = torch.autograd.grad(losses.sum() / share, leaves, allow_unused=True)
            shared.tally.loss += float(losses.detach().sum()) / share
        for j in range(w):
            now = self._step(shared, rows, j, self.beta > 0 or shared.compare or self.loss.base and slopes is None)
            if slopes is None:
                total = self._call(
                    shared, rows, j, now.log_prob[:, None], now.drift[:, None], now.taught[:, None], now.base[:, None]
                ).sum() / share
                shared.tally.loss += float(total.detach())
            else:
                pairs = zip(slopes, (now.log_prob, now.drift, now.taught), strict=True)
                total = torch.stack([(by[:, j] * of).sum() for by, of in pairs if by is not None]).sum()
            if self.beta:
                penalty = self.beta * now.divergence.sum() / share
                shared.tally.loss += float(penalty.detach())
                total = total + penalty
            self._backward(total)
            self._check(shared, rows, j, now)
        weights = shared.weights[rows]
        shared.tally.weight += torch.tensor([weights.sum(), weights.size], dtype=torch.float64)

    def _call(
        self, shared: _Shared, rows: np.ndarray, first: int, log_prob: torch.Tensor, drift: torch.Tensor,
        taught: torch.Tensor, base: torch.Tensor
    ) -> torch.Tensor:
        """The losses [n, w] of some samples at w trained steps, from the first on; where they do not count, any with a
        gradient. Of a state of T tracks log_prob, drift, taught and base are [n, w, T]: the loss of each track as if it
        were the state, weighted by its share of the elements, so that equal advantages have the gradient of the
        whole."""
        batch, w, out = shared.batch, log_prob.shape[1], torch.zeros(())
        if not shared.counts:
            return log_prob

        def tensor(x: object) -> torch.Tensor:
            return torch.as_tensor(x, dtype=torch.float64, device=self.network.device)

        kernels, t = batch.kernels[first : first + w], len(batch.tracks)
        noise_std, step = tensor([k.noise_std for k in kernels]), tensor([k.step for k in kernels])
        for i, (_, of) in enumerate(batch.tracks):
            at = slice(first * t + i, (first + w) * t, t)
            old, advantages, weights = (tensor(a[rows, at]) for a in (shared.old, batch.advantages, shared.weights))
            more = (t[..., i] if asked else None for t, asked in (
                (drift, self.loss.drift), (base, self.loss.base), (taught, self.loss.taught)))  # fmt: skip
            given = self.loss(
                Steps(log_prob[..., i], old, advantages, weights, noise_std, step, tensor(batch.rewards[rows]), *more)
            )
            out = out.to(log_prob) + of * shared.tally.told(given, log_prob.shape[:2])
        return out

    def _step(self, shared: _Shared, rows: np.ndarray, j: int, base: bool) -> _Seen:
        """Trained step j of some samples under the network, and under its base."""
        kernel, batch = shared.batch.kernels[j], shared.batch
        mean, after, off = self._mean(batch, rows, j)
        means, afters = batch.parts(mean), batch.parts(after)
        nothing = torch.full((len(rows), len(means)), math.nan, dtype=torch.float64, device=mean.device)

        def each(of: Callable[..., torch.Tensor], *x: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.stack([of(*a) for a in zip(*x, strict=True)], dim=1)

        rounding = each(kernel.rounding, [m.detach() for m in means], off)
        seen = _Seen(each(kernel.log_prob, means, afters), nothing, nothing, nothing, nothing[:, 0], rounding)
        if self.loss.taught:
            taught = batch.parts(batch.taught_mean(rows, j, self.network.device))
            seen.taught = each(kernel.divergence, means, taught)
        if shared.means is not None:
            seen.drift = each(kernel.divergence, means, batch.parts(shared.means[rows, j]))
        if base:
            with torch.no_grad(), self.network.base():
                of_base, _, _ = self._mean(batch, rows, j)
            seen.divergence, seen.base = kernel.divergence(mean, of_base), each(
                kernel.log_prob, batch.parts(of_base), afters)
        return seen

    def _check(self, shared: _Shared, rows: np.ndarray, j: int, seen: _Seen) -> None:
        """Tallies how far the network is from what made the samples, and from the base."""
        t = len(shared.batch.tracks)
        at = slice(j * t, (j + 1) * t)
        apart = seen.log_prob.detach() - torch.as_tensor(
            shared.batch.log_probs[rows, at], device=seen.log_prob.device
        )
        off, ratio, tally = apart.abs(), apart.exp(), shared.tally
        tally.ratio += torch.tensor([float(ratio.sum()), ratio.numel()], dtype=torch.float64)
        tally.ratio_max = torch.maximum(tally.ratio_max, ratio.max().cpu())
        if shared.fresh:
            tally.off[at] = torch.maximum(tally.off[at], off.amax(dim=0).cpu())
            tally.bound[at] = torch.maximum(tally.bound[at], seen.rounding.amax(dim=0).cpu())
        else:
            tally.moved += torch.tensor([float(off.sum()), off.numel()], dtype=torch.float64)
        if shared.compare:
            tally.kl[j] += torch.tensor([float(seen.divergence.detach().sum()), len(rows)], dtype=torch.float64)

    def _check_last(self, shared: _Shared, rows: np.ndarray) -> None:
        """Tallies how far the last latents are from what the network makes of the states before them."""
        batch, tally = shared.batch, shared.tally
        if (known := batch.last_step(rows, self.network.device)) is None:
            return
        x, after, sigma, texts = known
        v = self._guided(batch, x, sigma, texts)
        dtype, last = str(batch.batch["latents_dtype"][rows[0]]), float(sigma[0])
        for k, (at, of, end) in enumerate(zip(*map(batch.parts, (x, v, after)), strict=True)):
            off = self._off(at, of, last, batch.scales[-1])
            found, bound = last_off(at, of, end, last, batch.last, off, dtype)
            tally.off[k], tally.bound[k] = found.max().cpu(), bound.max().cpu()

    def _add_noised(self, shared: _Shared, rows: np.ndarray, count: float) -> None:
        """Adds the gradient of a forward loss of some samples, at all sigmas of the schedule."""
        batch, device = shared.batch, self.network.device
        if shared.compare:  # log-probs say whether the sampler's weights are these, here too
            with torch.no_grad():
                for j in range(len(batch.kernels)):
                    self._check(shared, rows, j, self._step(shared, rows, j, base=True))
                if batch.clean:
                    self._check_last(shared, rows)
        share = count * len(batch.schedule)
        t = len(batch.tracks)
        advantages = [torch.as_tensor(batch.advantages[rows, k::t].mean(axis=1), dtype=torch.float64, device=device)
                      for k in range(t)]  # fmt: skip
        for i in range(len(batch.schedule)):
            clean, x, sigma, texts = batch.noised(rows, i, device)
            v = self._guided(batch, x, sigma, texts)
            old = v.detach() if shared.velocities is None else shared.velocities[i][rows].to(device)
            if shared.counts:
                total = torch.zeros(()).to(advantages[0])
                states = zip(*map(batch.parts, (v, old, clean, x)), strict=True)
                for (now, before, end, noised), a, (_, of) in zip(states, advantages, batch.tracks, strict=True):
                    given = self.loss(Noised(now, before, end, noised, sigma, a, batch.estimator))
                    total = total + of * shared.tally.told(given, a.shape).sum() / share
            else:
                total = v.double().sum() / share
            if self.beta:
                with torch.no_grad(), self.network.base():
                    base = self._guided(batch, x, sigma, texts)
                total = total + self.beta * (v - base).double().square().mean(dim=(1, 2)).sum() / share
            self._backward(total)
            shared.tally.loss += float(total.detach())

    @torch.no_grad()
    def _velocities(self, batch: Rollouts, rows: list[int]) -> list[torch.Tensor]:
        """The velocities [B, S, C] of the noised samples at each sigma, under the weights that made them."""
        out = [torch.zeros(batch.size, *batch.shape[2:]) for _ in batch.schedule]
        for piece, counts in self._pieces(batch, rows):
            for i, found in enumerate(out):
                _, x, sigma, texts = batch.noised(piece, i, self.network.device)
                velocity = self._guided(batch, x, sigma, texts).cpu()
                if counts:
                    found[piece] = velocity
        return out

    def _guided(self, batch: Rollouts, x: torch.Tensor, sigma: torch.Tensor, texts: Texts) -> torch.Tensor:
        return self.network.guided(x, sigma, texts, batch.frame, batch.rule, batch.rescale)

    def _mean(
        self, batch: Rollouts, rows: np.ndarray, j: int
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """The mean of trained step j of some samples under the network, the state after it, and how far roundings may
        bring the velocity of each track off."""
        x, after, sigma, texts = batch.step(rows, j, self.network.device)
        v = self._guided(batch, x, sigma, texts)
        off = [self._off(*xv, float(sigma[0]), batch.scale(j))
               for xv in zip(batch.parts(x), batch.parts(v.detach()), strict=True)]  # fmt: skip
        return batch.kernels[j].mean(x, v), after, off

    def _off(self, x: torch.Tensor, v: torch.Tensor, sigma: float, scale: float) -> torch.Tensor:
        """How far roundings may bring velocities off, [B], under classifier-free guidance of a scale."""
        relative = self.network.relative_error() * (2 * scale - 1)  # v = scale of one and 1 - scale of another
        prediction = self.network.whole.family.prediction() if self.network.whole else "flow"
        return velocity_off(x, v, sigma, prediction, relative)

    @torch.no_grad()
    def score(
        self, batch: Rollouts, rows: list[int], with_means: bool = True
    ) -> tuple[np.ndarray, torch.Tensor | None]:  # fmt: skip
        """Returns the log-probs of the rows under the current network, NaN for other rows, in the shape of those of the
        batch, and the means that they belong to, [B, W, S, C], where these are wanted."""
        out = np.full(batch.log_probs.shape, np.nan)
        means = torch.zeros(batch.shape, dtype=torch.float64, device=self.network.device) if with_means else None
        for piece, counts in self._pieces(batch, rows):
            for j, kernel in enumerate(batch.kernels):
                mean, after, _ = self._mean(batch, piece, j)
                if not counts:
                    continue
                if means is not None:
                    means[piece, j] = mean
                t = len(batch.tracks)
                for i, of in enumerate(zip(batch.parts(mean), batch.parts(after), strict=True)):
                    out[piece, j * t + i] = kernel.log_prob(*of).cpu().numpy()
        return out, means

    def state(self) -> dict[str, Any]:
        """Returns all that a checkpoint needs to continue bit by bit, whole: any number of processes can load it."""
        optimizer = self.optimizer.state_dict()
        optimizer["state"] = {
            i: {k: accelerate.whole(v) for k, v in of.items()} for i, of in optimizer["state"].items()
        }
        return {"adapter": self.network.state(), "optimizer": optimizer, "average": self.average}

    def load(self, state: dict[str, Any]) -> None:
        """Continues from what state returned."""
        self.network.load(state["adapter"])
        self.adapter = self.network.state()
        ours, kept = self.network.parameters(), state["optimizer"]["state"]
        parts = {
            i: {k: distributed.part(v, ours[i]) if v.dim() else v for k, v in of.items()} for i, of in kept.items()
        }
        self.optimizer.load_state_dict({**state["optimizer"], "state": parts})
        self.average = state["average"]

    def best(self) -> dict[str, torch.Tensor]:
        """Returns the adapter to evaluate and keep: the running average, if there is one."""
        return self.adapter if self.average is None else self.average


class _Tally:
    """Sums over the pieces of an update, of all processes. Of two numbers the second counts."""

    def __init__(self, batch: Rollouts, figures: tuple[str, ...]):
        steps = len(batch.kernels)
        columns = (max(steps, int(batch.clean)) * len(batch.tracks),)  # of ode steps the last is looked at
        self.off, self.bound = (torch.full(columns, -math.inf, dtype=torch.float64) for _ in range(2))
        self.kl = torch.zeros(steps, 2, dtype=torch.float64)
        self.moved, self.weight, self.ratio = (torch.zeros(2, dtype=torch.float64) for _ in range(3))
        self.ratio_max = torch.tensor(-math.inf, dtype=torch.float64)
        self.figures = {name: torch.zeros(2, dtype=torch.float64) for name in figures}
        self.loss = 0.0

    def told(
        self, given: torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]], shape: torch.Size
    ) -> torch.Tensor:
        """The losses of what a loss gave, whose figures are tallied. ValueError: it is not what a loss gives."""
        losses, figures = given if isinstance(given, tuple) else (given, {})
        if losses.shape != shape:
            raise ValueError(f"--loss: it returns {list(losses.shape)}; must be one loss for each of {list(shape)}")
        if unknown := figures.keys() - self.figures.keys():
            raise ValueError(
                f"--loss: it returns the figures {', '.join(sorted(unknown))}, which its class must name in figures"
            )
        for name, value in figures.items():
            self.figures[name] += torch.tensor([float(value.detach().sum()), value.numel()], dtype=torch.float64)
        return losses

    def report(self, norm: float, used: int, minibatches: int) -> Report:
        loss = torch.tensor(self.loss, dtype=torch.float64)
        distributed.add([self.kl, self.moved, self.weight, self.ratio, loss, *self.figures.values()])
        for most in (self.off, self.bound, self.ratio_max):
            distributed.largest(most)

        def per(t: torch.Tensor) -> float:
            return float(t[0] / t[1]) if t[1] else math.nan

        off, bound = ([x if math.isfinite(x) else math.nan for x in most.tolist()] for most in (self.off, self.bound))
        highest = float(self.ratio_max) if self.ratio[1] else math.nan
        return Report(off, bound, per(self.moved), per(self.ratio), highest,
            {name: per(t) for name, t in self.figures.items()},
                      float(loss) / minibatches, norm, [per(t) for t in self.kl], per(self.weight), used)  # fmt: skip


@dataclasses.dataclass
class _Shared:
    """What the pieces of an update share."""

    batch: Rollouts
    old: np.ndarray  # log-probs that ratios are against, in the shape of those of the batch
    weights: np.ndarray  # importance weights, in that shape
    tally: _Tally
    means: torch.Tensor | None = None  # [B, W, S, C] of the transitions of old
    velocities: list[torch.Tensor] | None = None  # of the noised samples under the weights that made them
    fresh: bool = True  # no optimizer step has been taken
    compare: bool = True  # the first piece, which is compared with the base
    counts: bool = True  # else its passes alone are wanted


@dataclasses.dataclass
class _Seen:
    """A trained step of n samples under the network, [n, T] by track; NaN for what was not asked for."""

    log_prob: torch.Tensor
    drift: torch.Tensor
    taught: torch.Tensor
    base: torch.Tensor  # log-prob of the network without its adapter
    divergence: torch.Tensor  # [n], from that network
    rounding: torch.Tensor  # how far roundings may bring log_prob off
