"""The training loop: publish prompts, wait for their advantages, make an update, push the weights to the samplers, and
evaluate."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file

from ..client.client import Client, connect
from ..client.reader import check_stage
from ..data.batch import Batch
from ..data.events import EventError
from ..data.staged import StagedBatch
from ..client.tasks import Wait, check_cancelled, retry_while_away
from ..client.teacher import NoTeacher, velocities
from ..torch.faults import Fault
from ..torch.family import Size
from . import distributed, evaluate, ledger, losses, prompts, records
from .alarms import FATAL, UNCHANGED, Alarms
from .config import Config
from .learner import Learner, Report
from .model import Network
from .rollouts import Rollouts, Teacher
from .stream import Stream, Task

_log = logging.getLogger("meander.train")

_T = TypeVar("_T")

# So many batches in a row without one to train on end a run, beyond --ahead.
_LEFT_OUT = 5


class Trainer:
    """One training run: its network, its position in the stream, its files."""

    def __init__(self, config: Config, client: Client, beside: Executor):
        self.config, self.client, self.out, self.beside = config, client, Path(config.out), beside
        given = prompts.read(config.prompts) if config.prompts else []
        prompts.check_stages(config, given, losses.of(config).pairs)
        prompts.check_rollouts(config, given, losses.of(config).forward)
        self.network = self._network(config)
        if whole := self.network.whole:
            guides = whole.family.card()["pipeline"]["guidance"]
            own = config.guidance if guides or config.guidance != 1 else 0.0
            config = self.config = dataclasses.replace(config, generic=True, guidance=own)
        self._check_size()
        self.learner = self.learns(self.network, config)
        self.alarms = Alarms(config)
        self.stream = Stream(client, config)
        self.draw = prompts.Draw(given, config.groups, config.seed) if given else None
        self.held_out = prompts.read(config.held_out) if config.held_out else []
        self.test = prompts.read(config.test) if config.test else []
        if both := set(map(prompts.asked, self.held_out)) & set(map(prompts.asked, self.test)):
            raise ValueError(f"--test: {len(both)} of its prompts choose the adapter, too, such as {min(both)[0]!r}")
        self.stopped = ""  # why, where an alarm did
        self.records = records.Records(
            self.out, config.tensorboard and self.first, config.trackers() if self.first else ()
        )
        self.updated = 0  # updates taken
        self.taken, self.cursor = 0, ""  # batches read, and the place of the last one
        self.made: dict[str, int] = {}  # by digest of weights: the update that they are of
        self.left_out = 0  # batches one after the other
        self.resumed = False
        self.version = 0  # of the policy that the samplers have, or are about to
        self.best: tuple[float, int] | None = None
        self.before: evaluate.Evaluation | None = None

    @staticmethod
    def _network(c: Config) -> Network:
        """The network to train."""
        return Network(c.model, c.rank, c.alpha, seed=c.seed, device=distributed.device(c.device),
                       dtype=getattr(torch, c.dtype), checkpointing=c.checkpointing, shard=c.shard, targets=c.layers(),
                       generic=c.generic, trust_class=c.trust_class)  # fmt: skip

    _learner: type[Learner] = Learner

    @classmethod
    def learns(cls, network: Network, c: Config) -> Learner:
        """The learner of a network."""
        return cls._learner(
            network, losses.of(c), c.lr, c.adam_beta2, c.weight_decay, c.max_grad_norm, c.minibatches, c.micro_batch,
            c.ema, c.is_threshold, c.beta
        )

    def _check_size(self) -> None:
        """ValueError: the model has no samples of the size to train."""
        size = self.network.family.card()["size"]
        asked = {name: getattr(self.config, name) for name in size}
        try:
            self.network.family.latent_grid(Size(**{name: asked[name] or size[name] for name in size}))
        except Fault as e:
            raise ValueError(f"--frames, --height, --width: {e}") from e

    @property
    def first(self) -> bool:
        """Whether this process is the one that publishes, pushes and writes."""
        return distributed.rank() == 0

    async def run(self) -> dict[str, Any]:
        """Trains to the end, or to a fatal alarm, and returns the summary."""
        await self._resume(await self._share(records.load_checkpoint(self.out) if self.first else None))
        stopped = self.stopped if self.config.stop else ""
        if stopped and self.first:
            _log.warning("this run was stopped: %s; --no-stop goes on", stopped)
        async with contextlib.AsyncExitStack() as held:
            held.callback(self.records.close)
            self.progress = held.enter_context(_Progress(self.config, self.updated, self.first))
            state = await self._state()
            if self.first:
                await self._begin(held, state)
            while self.updated < self.config.updates and not stopped:
                stopped = await self._update()
                check_cancelled()
            return await self._end(stopped) if self.first else {}

    async def _share(self, value: _T) -> _T:
        """Returns in all processes what the first one has."""
        return await _in(self.beside, distributed.share, value)

    async def _state(self) -> dict[str, Any]:
        """What a checkpoint has of the learner, in all processes: each may have a part of it."""
        return await _in(self.beside, self.learner.state)

    async def _resume(self, found: tuple[dict[str, Any], dict[str, Any]] | None) -> None:
        if found is None:
            return
        state, keep = found
        if (alpha := keep.get("alpha", self.config.alpha)) != self.config.alpha:
            raise ValueError(
                f"--alpha: {self.config.alpha}; must be {alpha}, by which {self.out}/checkpoint was trained, or --out "
                f"another folder"
            )
        self.resumed = True
        await _in(self.beside, self.learner.load, state)
        self.updated, self.taken, self.cursor, self.made, self.best = (
            keep[k] for k in ("updated", "taken", "cursor", "made", "best")
        )
        self.stopped = keep.get("stopped", "")
        self.alarms.rewards, self.alarms.evaluations = keep["rewards"], keep["evaluations"]
        if self.first:
            _log.warning("going on at update %d, from %s", self.updated, self.out / "checkpoint")

    async def _begin(self, held: contextlib.AsyncExitStack, state: dict[str, Any]) -> None:
        if self.config.stage:
            await check_stage(self.client, self.config.run, self.config.stage)
        if not self.config.follow:
            await held.enter_async_context((await self.stream.lane_lease()).held())
        self.records.begin(self.updated)
        if not self.resumed and self.draw and not self.config.follow and await self.stream.used():
            raise ValueError(
                f"--run: {self.config.run!r} has groups already, and {self.out} no checkpoint to go on from; must be "
                f"a new name"
            )
        self.stream.open(self.cursor)
        # The server's own place of the trainer is further before the first checkpoint after a batch.
        self.cursor = self.cursor or await self.stream.patiently(self.stream.reader.cursor.acknowledged)
        self._checkpoint(state)
        await self._push()
        if self.updated or self.config.stage:  # it may have died before it told
            await self._tell()
        if self.updated == 0 and not self.config.follow:
            await self._evaluate()

    async def _push(self) -> float:
        """Pushes the weights to the samplers; before the first update the base. Only the first process pushes. Returns
        the seconds."""
        start = time.monotonic()
        if self.config.follow:
            return 0.0
        if self.updated == 0:
            self.version = await self.stream.base()
        else:
            self.version = await self.stream.push(self.network, self.learner.adapter, f"update {self.updated}")
        self.made[self.stream.weights] = self.updated
        if self.stream.unchanged:
            self._raise([(UNCHANGED, self.stream.unchanged)])
        return time.monotonic() - start

    async def _update(self) -> str:
        """Makes one update. Returns why the run stops, if it does."""
        clock, done, parts, lr = _Clock(), list[dict[str, Any]](), self.config.accumulate, self.config.learning_rate(
            self.updated)
        marks, began = list[asyncio.Future[Any]](), await self._began()
        try:
            for part in range(parts):
                whole, batch, behind = await self._next(clock, part)
                while batch is None:
                    whole, batch, behind = await self._next(clock, part)
                if whole is not None:
                    marks.append(
                        asyncio.ensure_future(evaluate.full_marks(self.client, self.config, whole.name, whole.scored))
                    )
                report = await _in(self.beside, self.learner.update, batch, behind, lr, part, parts)
                clock.lap("update")
                if whole is not None:
                    done.append(self._record(whole, behind, report, batch.spread()))
            self.updated += 1
            if self.first and done:
                clock.seconds["push"] = await self._push()
                done = [d | await m for d, m in zip(done, marks, strict=True)]
            elif self.first:  # all was left out: the weights stay
                self.made[self.stream.weights] = self.updated
        except BaseException:
            for mark in marks:
                mark.cancel()
            raise
        why = ""
        if self.first and done:
            record = {
                "kind": "update", "update": self.updated, **_merged(done), "lr": lr, "pushed": self.version,
                "adapter_digest": self.stream.digest
            }
            record |= {
                "waiting": _waiting([clock.seconds]), "seconds": {k: round(v, 3) for k, v in clock.seconds.items()}
            }
            found = self.alarms.update(record)
            self.records.add(record)
            self.progress.step(record)
            if self.held_out and not self.config.follow and (
                self.updated % self.config.eval_every == 0 or self.updated == self.config.updates
            ):
                found += await self._evaluate()
            why = self.stopped = self._raise(found)
        why = await self._share(why)
        if self.updated % self.config.checkpoint_every == 0 or why or self.updated == self.config.updates:
            state = await self._state()
            if self.first:
                self._checkpoint(state)
        if self.first:
            await self._tell(began.told(self.config, self.learner) if done else {})
        return why

    async def _began(self) -> ledger.Began:
        """What the next update begins with; the state is in the first process alone."""
        state, size = None, sum(t.nbytes for t in self.learner.adapter.values())
        if (3 + bool(self.learner.average)) * size <= self.config.keep_states and not self.config.follow:
            state = await self._state()
        return ledger.Began(self.stream.weights, ledger.packed(state) if state and self.first else None)

    async def _tell(self, told: dict[str, Any] | None = None) -> None:
        """Tells the last update, when a crash does not take it back any more: trainers of other stages go on by it."""
        if self.config.follow:
            return
        update, evaluation = (
            next((r for r in self.records.of(kind)[-1:] if r["update"] == self.updated), {})
            for kind in ("update", "evaluation")
        )
        floats = {k: v for k, v in evaluation.items() if isinstance(v, float)}
        await self.stream.tell(self.updated, update, floats, told or {})

    async def _ask(self, count: int) -> None:
        """Publishes the prompts of so many batches behind those that were read, unless they are there."""
        if self.draw is None or self.config.follow:
            return
        for number in range(self.taken, self.taken + count):
            drawn, epoch, clean = self.draw.batch(number), self.draw.epoch(number), self.learner.loss.forward
            versions = await self.stream.beside(number // self.config.accumulate)
            await self.stream.ask(
                prompts.training(
                    self.config, number, drawn, epoch, self.version, self.alarms.held(), clean, versions
                ), number
            )

    async def _next(self, clock: "_Clock", part: int) -> tuple[Rollouts | None, Rollouts | None, int]:
        """Returns the next batch of an update that has so many (in the first process; None: it is left out), what this
        process trains on (None: another batch), and how many updates its weights are behind."""
        whole, task = None, None
        if self.first:
            ahead = min(self.config.ahead + 1, self.config.updates - self.updated) * self.config.accumulate - part
            await self._ask(ahead if self.config.ahead else 1)
            fetched = self.stream.reader.health.fetched
            found = await self.stream.next()
            clock.lap("rollout")
            clock.move("rollout", "read", self.stream.reader.health.fetched - fetched)
            # By weights, not by version: after a crash the same weights have another one. The samplers never have a
            # follower's but the first ones.
            if isinstance(found, StagedBatch):
                raise ValueError(f"--stage: empty; must name one that the run trains: {', '.join(found.stages)}")
            made = 0 if self.config.follow or not found.size else min(
                (self.made.get(w, -1) for w in set(found["weights_digest"].tolist())), default=self.updated
            )
            behind = self.updated - made
            left_out = []
            if not found.size:
                left_out = self.alarms.empty(found.name, found.left_out.values())
            elif behind > self.config.ahead and not self.config.follow:
                left_out = self.alarms.stale(found.name, behind)
            else:
                whole = await self._rollouts(found)
                self._check_model(whole)
            steps, sampled = (len(whole.kernels), str(found["uid"][0])) if whole else (0, "")
            task = Task(found.name, found.cursor, [g.uid for g in found.groups], behind, left_out, steps, sampled)
        task = await self._share(task)
        assert task is not None, "the first process has one"
        self.taken, self.cursor = self.taken + 1, task.cursor
        self.left_out = self.left_out + 1 if task.left_out else 0
        if task.left_out:
            self._raise(task.left_out)
            if self.left_out == _LEFT_OUT + self.config.ahead * self.config.accumulate:
                raise EventError(
                    f"run {self.config.run}: {self.left_out} batches one after the other cannot be trained on; the "
                    f"last: {task.left_out[0][1]}"
                )
            # Trainers of several stages count one update for equal batches, so that none waits for another's for ever.
            return None, Rollouts.without_samples(task.name, 0) if self.config.stage else None, 0
        if self.first and part + 1 < self.config.accumulate and not self.config.ahead:
            await self._ask(1)  # one after the other is read, so that equal seeds have them in equal order
        mine = whole
        if mine is None or distributed.world() > 1:
            share = await self.stream.mine(task, whole.batch if whole else None)
            if share.size:
                mine = await self._rollouts(share)
            elif self.network.shard:
                other = await self.stream.part(task, [task.sampled], whole.batch if whole else None)
                mine = await self._rollouts(other, counts=False)
            else:
                mine = Rollouts.without_samples(task.name, task.steps)
        clock.lap("read")
        return whole, mine, task.behind

    async def _rollouts(self, batch: Batch, counts: bool = True) -> Rollouts:
        """A batch as the network needs it, with the files that its samples are conditioned on."""
        whole = self.network.whole
        for c in [c for s in batch.samples for c in s.facts.get("conditions") or []] if whole else ():
            if whole and whole.lacks(c):
                await _in(self.beside, whole.read, c, await self.stream.patiently(self.client.blob, c["ref"]))
        batch.thread = _Loop(asyncio.get_running_loop())
        (first,) = [micro async for micro in batch.micro(1, [0])]
        teacher = teacher_of(self.client, self.config, self.config.patience)
        return Rollouts(
            batch, self.network.family.conditioning, counts, whole.recipe if whole else None, first, teacher
        )

    def _check_model(self, batch: Rollouts) -> None:
        """ValueError: the samples are of another model than the one to train, by their shapes."""
        family, size, whole = self.network.family, batch.frame, self.network.whole
        texts = 0 if whole else batch.now.conditioning["prompt_embeds"].shape[-1]
        made = (*batch.shape[-2:], texts)
        try:
            own = (*family.latent_shape(size), 0 if whole else family.width())
        except Fault as e:
            raise ValueError(
                f"--model: {self.config.model}: of the samples: {e}: must be the folder that the samplers serve"
            ) from e
        if made != own:
            raise ValueError(
                f"--model: {self.config.model}: a {family.folder.class_name} with latents {list(own[:2])} at "
                f"{size.height} x {size.width} pixels, and {own[2]} channels of text; the samples have "
                f"{list(made[:2])} and {made[2]}: must be the folder that the samplers serve"
            )

    def _record(self, batch: Rollouts, behind: int, report: Report, spread: float) -> dict[str, Any]:
        groups = batch.by_group(batch.rewards)
        return {
            "batch": batch.name, "batch_digest": batch.batch.digest(), "reward": float(batch.rewards.mean()),
            "groups": len(groups), "zero_std": sum(r.max() == r.min() for r in groups) / len(groups), "spread": spread,
            "samples": batch.size,
            "used": report.used, "ratio_off": report.ratio_off, "ratio_bound": report.ratio_bound,
            "moved": report.moved, "ratio": report.ratio, "ratio_max": report.ratio_max, **report.figures,
            "loss": report.loss,
            "grad_norm": report.grad_norm, "kl": report.kl, "weight": report.weight, "behind": behind,
            "steps": batch.steps,
            "policy_version": int(batch.batch["policy_version"].max()),
            "made_by": sorted(set(batch.batch["weights_digest"].tolist())),
        }  # fmt: skip

    async def _evaluate(self) -> list[tuple[str, str]]:
        """Measures the weights that the samplers have, and keeps the best by the gold reader, among those that are
        varied enough."""
        if not self.held_out:
            return []
        start = time.monotonic()
        # Before the first update the average is the base, which the samplers have.
        average = self.learner.average if self.updated > 0 and not self.config.follow else None
        if average is not None:
            await self.stream.push(self.network, average, f"running average at update {self.updated}")
            # It may make samples that were asked for ahead: those are not of the current weights.
            self.made[self.stream.weights] = self.updated - 1
        got = await evaluate.evaluate(
            self.client, self.config, self.held_out, f"e{self.updated:06d}", self.stream.version,
            self.progress.evaluation
        )
        if average is not None:
            await self._push()
        record = {
            "kind": "evaluation", "update": self.updated, **got.record(),
            "seconds": {"evaluation": round(time.monotonic() - start, 3)}
        }
        self.records.add(record)
        found = self.alarms.evaluated(record)
        score = got.exact if got.gold is None else got.gold
        varied = not self.alarms.narrow(record)
        if self.best is None or varied and score > self.best[0]:
            self.best = (score, self.updated)
            self.network.save(self.out / "best", self.learner.best())
            evaluate.sheet(self.out / "after.png", got.shown, self._title(got))
        if self.updated == 0:
            evaluate.sheet(self.out / "before.png", got.shown, self._title(got))
        _log.warning("%s", self._title(got))
        self._curve()
        return found

    def _title(self, got: evaluate.Evaluation) -> str:
        rates = ", ".join(f"{name} {rate:.3f}" for name, rate in got.rates.items())
        steps = self.config.eval_steps or self.config.steps
        diversity = f"; diversity {got.diversity:.4f}" if got.diversity is not None else ""
        samples = f"{got.samples} held-out samples at {steps} ode steps"
        return f"update {self.updated}: {samples}, exact or the mean: {rates}{diversity}"

    def _raise(self, found: list[tuple[str, str]]) -> str:
        """Reports the alarms, and returns why the run stops, if it does."""
        why = ""
        for kind, text in found if self.first else ():
            _log.warning("ALARM %s: %s", kind, text)
            self.records.add({"kind": "alarm", "update": self.updated, "alarm": kind, "text": text})
            if kind in FATAL and self.config.stop:
                why = why or f"{kind}: {text}"
        return why

    def _checkpoint(self, state: dict[str, Any]) -> None:
        keep = {name: getattr(self, name) for name in ("stopped", "updated", "taken", "cursor", "made", "best")}
        keep |= {"alpha": self.config.alpha, "rewards": self.alarms.rewards, "evaluations": self.alarms.evaluations}
        records.save_checkpoint(self.out, self.network, state, keep)

    def _curve(self) -> None:
        try:
            records.curve(
                self.out / "curve.png", {f"seed {self.config.seed}": self.records.lines},
                f"{Path(self.config.model).name}, {self.config.steps} steps, rewarded by {self.config.reward}"
            )
        except ImportError:
            _log.warning("no curve: pip install 'meander-rl[train]' brings matplotlib")

    async def _test(self) -> dict[str, dict[str, Any]]:
        """Measures the base, the kept adapter and the last one on prompts that chose nothing, once, and leaves the kept
        one to the samplers. Returns the measures by name."""
        done = {r["of"]: r for r in self.records.of("test") if r["update"] == self.updated}
        kept = load_file(self.out / "best" / "adapter_model.safetensors")
        base = {name: torch.zeros_like(v) for name, v in kept.items()}
        plain, again = dataclasses.replace(self.config, sheet=0), f"base, {self.config.test_steps} steps"
        tests = [("base", base, plain), ("last", self.learner.best(), plain), ("kept", kept, plain)]
        if self.config.test_steps:
            tests.insert(1, (again, base, dataclasses.replace(plain, eval_steps=self.config.test_steps, variety=0)))
        for of, state, config in tests:
            start = time.monotonic()
            if of in done and of != "kept":
                continue
            await self.stream.push(self.network, state, f"test of {of} at update {self.updated}")
            if of in done:
                continue
            name = f"t{self.updated:06d}-{config.eval_steps}-{of.split(',')[0]}"
            version, progress = self.stream.version, self.progress.evaluation
            got = await evaluate.evaluate(self.client, config, self.test, name, version, progress)
            seconds = {"test": round(time.monotonic() - start, 3)}
            done[of] = {"kind": "test", "update": self.updated, "of": of, **got.record(), "seconds": seconds}
            self.records.add(done[of])
        return done

    async def _end(self, stopped: str) -> dict[str, Any]:
        self._curve()
        tested = await self._test() if self.test and self.best is not None and not self.config.follow else {}
        seconds: dict[str, float] = {}
        for r in self.records.lines:
            for name, s in r.get("seconds", {}).items():
                seconds[name] = seconds.get(name, 0) + s
        evaluations, updates = self.records.of("evaluation"), self.records.of("update")
        summary: dict[str, Any] = {"updates": self.updated, "stopped": stopped}
        summary |= {"seconds": {k: round(v, 1) for k, v in seconds.items()}}
        summary |= {"waiting": _waiting([r["seconds"] for r in updates])}
        if evaluations:
            best = next(e for e in evaluations if self.best and e["update"] == self.best[1])
            summary |= {"before": evaluations[0], "best": best, "last": evaluations[-1]}
        if tested:
            summary["test"] = tested
        return summary


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of an update of several batches: names joined, what is counted added, the largest of what is off, and
    means of the rest."""
    out = dict(parts[-1])
    for name, last in out.items() if len(parts) > 1 else ():
        values = [p[name] for p in parts]
        if name in ("batch", "batch_digest"):
            out[name] = "+".join(values)
        elif name == "made_by":
            out[name] = sorted({w for v in values for w in v})
        elif name in ("groups", "samples", "used", "loss"):
            out[name] = sum(values)
        elif name in ("behind", "policy_version", "grad_norm"):
            out[name] = max(values)
        elif name == "ratio_max":
            out[name] = max(_known(values), default=math.nan)
        elif name in ("ratio_off", "ratio_bound"):
            out[name] = [max(_known(v), default=math.nan) for v in zip(*values)]
        elif name == "kl":
            out[name] = [_mean(v) for v in zip(*values)]
        elif isinstance(last, float):
            out[name] = _mean(values)
    return out


def _known(values: Iterable[float]) -> list[float]:
    """Those that there are samples for."""
    return [v for v in values if not math.isnan(v)]


def _mean(values: Iterable[float]) -> float:
    known = _known(values)
    return sum(known) / len(known) if known else math.nan


def _waiting(seconds: list[dict[str, float]]) -> float:
    """The share of the time of some updates that waits for rollouts, whatever was asked for ahead."""
    total = sum(sum(s.values()) for s in seconds)
    return round(sum(s.get("rollout", 0) for s in seconds) / total, 3) if total else 0.0


class _Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.monotonic()

    def move(self, stage: str, other: str, seconds: float) -> None:
        """Counts some of a stage's seconds as another's."""
        self.seconds[stage] -= seconds
        self.seconds[other] = self.seconds.get(other, 0) + seconds

    def lap(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[stage], self.last = self.seconds.get(stage, 0) + now - self.last, now


class _Progress:
    """Bars on a terminal, else a line for each update."""

    def __init__(self, config: Config, begun: int, shown: bool):
        self.config, self.begun, self.shown = config, begun, shown
        self.bar: Any = None
        self.open = contextlib.ExitStack()

    def __enter__(self) -> "_Progress":
        c = self.config
        if self.shown and self.begun >= c.updates:
            _log.warning(
                "run %s: %d updates are taken already; a larger --updates than %d goes on", c.run, self.begun, c.updates
            )
        elif self.shown:
            _log.warning("run %s: %s %d updates%s of %d x %d samples%s, loss %s, rewarded by %s; "
                         "all of it in %s", c.run, "follows" if c.follow else "takes", c.updates,
                         f", {self.begun} of them taken," if self.begun else "", c.groups, c.group_size,
                         "" if c.texts else f" in {c.steps} steps",
                         c.loss, c.reward, c.out)
        if self.shown and sys.stderr.isatty():
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            self.open.enter_context(logging_redirect_tqdm())
            self.bar = self.open.enter_context(
                tqdm(total=self.config.updates, initial=self.begun, unit="update", dynamic_ncols=True, smoothing=0.1)
            )
        return self

    def __exit__(self, *error: object) -> None:
        self.open.close()

    @contextlib.contextmanager
    def evaluation(self, samples: int) -> Iterator[Callable[[], object]]:
        """While held-out samples are waited for: what it gives is called with each that is there."""
        if self.bar is None:
            _log.warning("evaluating %d samples", samples)
            yield lambda: None
            return
        from tqdm import tqdm

        with tqdm(total=samples, desc="evaluating", unit="sample", dynamic_ncols=True, leave=False, position=1) as bar:
            yield bar.update

    def step(self, r: dict[str, Any]) -> None:
        off = max((x for x in r["ratio_off"] if x is not None and not math.isnan(x)), default=0.0)
        if self.bar is not None:
            self.bar.set_postfix_str(
                f"reward {r['reward']:.3f}, full marks {r['full']:.2f}, ratio off {off:.0e}, version {r['pushed']}"
            )
            self.bar.update()
            return
        seconds = " ".join(f"{k} {v:.1f}" for k, v in r["seconds"].items())
        _log.warning(
            "update %d/%d: reward %.3f, full marks %.2f, off %.1e,%s seconds %s", r["update"],
            self.config.updates, r["reward"], r["full"], off, f" kl {max(r['kl']):.1e}," if r["kl"] else "", seconds
        )


def kind_of(config: Config) -> type[Trainer]:
    """The trainer of a model, by its folder."""
    if config.texts:
        from .texts import TextTrainer  # which imports this module

        return TextTrainer
    return Trainer


async def train(config: Config) -> dict[str, Any]:
    """Trains as the configuration says, and returns the summary; {} in all processes but the first."""
    # What computes, or waits for other processes, does so in a thread beside the connection, which has pings to answer.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(config.threads,)) as beside:
        await _in(beside, distributed.begin, distributed.device(config.device))
        try:
            async with connect(
                config.nats, config.token or None, credentials=config.credentials or None, ca=config.ca or None,
                context=config.context or None, cache=config.cache, cache_bytes=config.cache_bytes,
            ) as client:
                return await (await _in(beside, kind_of(config), config, client, beside)).run()
        finally:
            await _in(beside, distributed.end)


class _Loop:
    """The event loop, for a thread beside it that reads micro-batches."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop

    def run(self, call: Coroutine[Any, Any, _T]) -> _T:
        """What a coroutine returns."""
        return asyncio.run_coroutine_threadsafe(call, self.loop).result()


def teacher_of(client: Client, config: Config, patience: float) -> Teacher | None:
    """What gives a thread beside the event loop the velocities of the teacher of a configuration; None: it has none. A
    teacher that does not run is waited for so many seconds: what it gives is decided by its weights and what is stored,
    so that an answer that was lost comes again."""
    if not config.teacher:
        return None
    name, loop = config.teacher, _Loop(asyncio.get_running_loop())

    async def away(seconds: float) -> str:
        return (f"--teacher {name}: none has answered for {seconds:.3g} s: `meander teacher --name {name} --model ...` "
                "starts one")  # fmt: skip

    async def ask(batch: Batch) -> tuple[np.ndarray, str]:
        wait = Wait(patience, away)
        while True:
            try:
                replies = await retry_while_away(
                    partial(client.teacher_replies, name, batch, config.patience, config.teacher_substeps),
                    config.patience,
                )
                by = replies[0]
                return velocities(batch, replies), f"{by.model:.64} {by.weights_digest:.16} on {by.backend:.64}"
            except NoTeacher:
                await wait.check()
                await asyncio.sleep(0.2)

    return lambda batch: loop.run(ask(batch))


async def _in(beside: Executor, f: Callable[..., _T], *args: Any) -> _T:
    return await asyncio.get_running_loop().run_in_executor(beside, f, *args)
