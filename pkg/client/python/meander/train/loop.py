"""The loop: ask for rollouts, wait for their advantages, take a step, hand the weights back, look at what came of it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from pathlib import Path

import torch

from ..client import Client, connect
from . import distributed, evaluate, prompts, records
from .alarms import FATAL, Alarms
from .config import Config
from .learner import Learner, Report
from .model import Network
from .objective import Loss
from .rollouts import Rollouts
from .stream import Stream

_log = logging.getLogger("meander.train")


class Trainer:
    """One training run: its network, its place in the stream, its files."""

    def __init__(self, config: Config, client: Client):
        self.config, self.client, self.out = config, client, Path(config.out)
        self.device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        self.network = Network(config.model, config.rank, config.alpha, seed=config.seed, device=self.device, dtype=getattr(torch, config.dtype),
                               checkpointing=config.checkpointing)  # fmt: skip
        self.learner = Learner(self.network, Loss(config.loss, config.clip, config.adv_clip_max, config.beta), config.lr, config.adam_beta2, config.weight_decay,
                               config.max_grad_norm, config.minibatches, config.micro_batch, config.ema, config.is_threshold)  # fmt: skip
        self.alarms = Alarms(config)
        self.stream = Stream(client, config)
        self.draw = prompts.Draw(prompts.read(config.prompts), config.groups, config.seed) if config.prompts else None
        self.held_out = prompts.read(config.held_out) if config.held_out else []
        self.records = records.Records(self.out, config.tensorboard and self.first)
        self.updated = 0  # updates taken
        self.taken, self.cursor = 0, ""  # batches read, and the place of the last one
        self.made: dict[str, int] = {}  # by digest of weights: the update that they are of
        self.resumed = False
        self.version = 0  # of the policy that the samplers have, or are about to
        self.best: tuple[float, int] | None = None
        self.before: evaluate.Evaluation | None = None

    @property
    def first(self) -> bool:
        return distributed.rank() == 0

    async def run(self) -> dict:
        """Trains to the end, or to an alarm, and returns the summary."""
        self._resume()
        if self.first:
            await self._begin()
        self.version = distributed.share(self.version)
        progress = _Progress(self.config, self.updated) if self.first else None
        stopped = ""
        while self.updated < self.config.updates and not stopped:
            stopped = await self._update(progress)
        if progress:
            progress.close()
        return await self._end(stopped) if self.first else {}

    def _resume(self) -> None:
        if (found := records.load_checkpoint(self.out)) is None:
            return
        state, keep = found
        self.resumed = True
        self.learner.load(state)
        self.updated, self.taken, self.cursor, self.made, self.best = (keep[k] for k in ("updated", "taken", "cursor", "made", "best"))
        self.alarms.rewards, self.alarms.evaluations = keep["rewards"], keep["evaluations"]
        _log.warning("going on at update %d, from %s", self.updated, self.out / "checkpoint")

    async def _begin(self) -> None:
        self.records.begin(self.updated)
        if not self.resumed and not self.config.follow and await self.stream.used():
            raise ValueError(f"--run: {self.config.run!r} has groups already, and {self.out} no checkpoint to go on from; must be a new name")
        self._checkpoint()
        self.stream.open(self.cursor)
        await self._push()
        if self.updated == 0 and not self.config.follow:
            await self._evaluate()

    async def _push(self) -> float:
        """Hands the weights to the samplers, before the first update the base; followers hand nothing. Returns the seconds."""
        start = time.monotonic()
        if self.config.follow:
            return 0.0
        if self.updated == 0:
            self.version = await self.stream.base()
        else:
            self.version = await self.stream.push(self.network, self.network.state(), f"update {self.updated}")
        self.made[self.stream.weights] = self.updated
        return time.monotonic() - start

    async def _update(self, progress: "_Progress | None") -> str:
        """One update; returns why the run stops, if it does."""
        clock = _Clock()
        batch, behind = await self._next(clock)
        if batch is None:
            return ""
        report = self.learner.update(batch, behind)
        clock.lap("update")
        self.updated += 1
        why = ""
        if self.first:
            clock.seconds["push"] = await self._push()
            record = self._record(batch, behind, report, clock)
            found = self.alarms.update(record)
            self.records.add(record)
            if progress:
                progress.step(record)
            if self.held_out and not self.config.follow and (self.updated % self.config.eval_every == 0 or self.updated == self.config.updates):
                found += await self._evaluate()
            why = self._raise(found)
            if self.updated % self.config.checkpoint_every == 0 or why or self.updated == self.config.updates:
                self._checkpoint()
        return distributed.share(why)

    async def _next(self, clock: "_Clock") -> tuple[Rollouts | None, int]:
        """The next batch, and how many updates its weights are behind; no batch: it is not to be trained on."""
        whole = None
        if self.first:
            if self.draw is not None and not self.config.follow:
                for number in range(self.taken, self.taken + min(self.config.ahead + 1, self.config.updates - self.updated)):
                    await self.stream.ask(prompts.training(self.config, number, self.draw.batch(number), self.draw.epoch(number), self.version), number)
            whole = await self.stream.next()
        batch = Rollouts(await self.stream.share(whole))
        clock.lap("rollout")
        self.whole_digest = distributed.share(whole.digest() if whole is not None else "")
        self.taken, self.cursor = self.taken + 1, batch.batch.cursor
        if self.config.follow:
            return batch, self.updated  # the samplers never have a follower's weights but the first ones
        # By weights, not by version: after a crash the same weights have another one.
        behind = distributed.share(self.updated - min(self.made.get(w, -1) for w in set(batch.batch["weights_digest"].tolist())))
        if behind > self.config.ahead:
            self._raise(self.alarms.stale(batch.name, behind))
            return None, behind
        return batch, behind

    def _record(self, batch: Rollouts, behind: int, report: Report, clock: "_Clock") -> dict:
        groups = batch.by_group(batch.rewards)
        return {
            "kind": "update", "update": self.updated, "batch": batch.name, "batch_digest": self.whole_digest, "reward": float(batch.rewards.mean()),
            "full": float((batch.rewards == 1).mean()), "zero_std": sum(r.max() == r.min() for r in groups) / len(groups), "spread": batch.spread(), "samples": batch.size,
            "used": report.used, "ratio_off": report.ratio_off, "moved": report.moved, "clipped": report.clipped, "loss": report.loss,
            "grad_norm": report.grad_norm, "kl": report.kl, "weight": report.weight, "behind": behind, "lr": self.config.lr,
            "policy_version": int(batch.batch["policy_version"].max()), "made_by": sorted(set(batch.batch["weights_digest"].tolist())), "pushed": self.version,
            "adapter_digest": self.stream.digest, "seconds": {k: round(v, 3) for k, v in clock.seconds.items()},
        }  # fmt: skip

    async def _evaluate(self) -> list[tuple[str, str]]:
        """Measures the weights that the samplers have; keeps the best by the gold reader, of those that are as varied as they must be."""
        if not self.held_out:
            return []
        start = time.monotonic()
        if self.learner.average is not None and not self.config.follow:
            await self.stream.push(self.network, self.learner.average, f"running average at update {self.updated}")
        got = await evaluate.evaluate(self.client, self.config, self.held_out, f"e{self.updated:06d}", self.stream.version)
        if self.learner.average is not None and not self.config.follow:
            await self._push()
        record = {"kind": "evaluation", "update": self.updated, **got.record(), "seconds": {"evaluation": round(time.monotonic() - start, 3)}}
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
        return f"update {self.updated}: {got.samples} held-out samples at {self.config.eval_steps or self.config.steps} ode steps, read exactly: {rates}" + (
            f"; diversity {got.diversity:.4f}" if got.diversity is not None else "")  # fmt: skip

    def _raise(self, found: list[tuple[str, str]]) -> str:
        """Says the alarms; returns why the run stops."""
        why = ""
        for kind, text in found:
            _log.warning("ALARM %s: %s", kind, text)
            if self.first:
                self.records.add({"kind": "alarm", "update": self.updated, "alarm": kind, "text": text})
            if kind in FATAL and self.config.stop:
                why = why or f"{kind}: {text}"
        return why

    def _checkpoint(self) -> None:
        keep = {"updated": self.updated, "taken": self.taken, "cursor": self.cursor, "made": self.made, "best": self.best, "rewards": self.alarms.rewards, "evaluations": self.alarms.evaluations}
        records.save_checkpoint(self.out, self.network, self.learner.state(), keep)

    def _curve(self) -> None:
        try:
            records.curve(self.out / "curve.png", {f"seed {self.config.seed}": self.records.lines}, f"{Path(self.config.model).name}, {self.config.steps} steps, rewarded by {self.config.reward}")
        except ImportError:
            _log.warning("no curve: pip install 'meander-client[train]' brings matplotlib")

    async def _end(self, stopped: str) -> dict:
        self._curve()
        seconds: dict[str, float] = {}
        for r in self.records.lines:
            for name, s in r.get("seconds", {}).items():
                seconds[name] = seconds.get(name, 0) + s
        evaluations = self.records.of("evaluation")
        summary = {"updates": self.updated, "stopped": stopped, "seconds": {k: round(v, 1) for k, v in seconds.items()}}
        if evaluations:
            best = next(e for e in evaluations if self.best and e["update"] == self.best[1])
            summary |= {"before": evaluations[0], "best": best, "last": evaluations[-1]}
        return summary


class _Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.monotonic()

    def lap(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[stage], self.last = self.seconds.get(stage, 0) + now - self.last, now


class _Progress:
    """A bar on a terminal, a line an update elsewhere."""

    def __init__(self, config: Config, begun: int):
        import sys

        from tqdm import tqdm

        self.config, self.bar = config, None
        if sys.stderr.isatty():
            self.bar = tqdm(total=config.updates, initial=begun, unit="update", dynamic_ncols=True, smoothing=0.1)

    def step(self, r: dict) -> None:
        off = max((x for x in r["ratio_off"] if x is not None and not math.isnan(x)), default=0.0)
        if self.bar is not None:
            self.bar.set_postfix_str(f"reward {r['reward']:.3f}, full {r['full']:.2f}, off {off:.0e}, v{r['pushed']}")
            self.bar.update()
            return
        seconds = " ".join(f"{k} {v:.1f}" for k, v in r["seconds"].items())
        _log.warning("update %d/%d: reward %.3f, full marks %.2f, off %.1e, kl %.1e, seconds %s", r["update"], self.config.updates, r["reward"], r["full"], off, max(r["kl"]), seconds)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


async def train(config: Config) -> dict:
    """Trains as the configuration says; returns the summary, {} in all processes but the first."""
    torch.set_num_threads(config.threads)
    distributed.begin(config.device)
    try:
        async with connect(config.nats, token=config.token or None) as client:
            return await Trainer(config, client).run()
    finally:
        distributed.end()
