"""A trainer's side of the stream: it publishes prompts, reads batches with a cursor of its own, and pushes weights."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from nats.js.errors import NotFoundError

from ..client import policy
from ..data.batch import Batch
from ..data.events import PREFIX, TENANT, decode
from ..data.textbatch import batch_of
from ..client.client import Client
from ..client.lease import Lease, holder
from ..client.tasks import Wait, retry_while_away, together
from . import distributed
from .config import Config
from .evaluate import publish
from .ledger import joined
from .model import Network, digest
from .prompts import batch_id


# What samplers say of an update whose weights give the same as those before it.
_CHANGES_NOTHING = "changes nothing"

_T = TypeVar("_T")


@dataclasses.dataclass
class Task:
    """A batch as the first process describes it to the others: its groups, how many updates its weights are behind, and
    why it is skipped."""

    name: str
    """The batch id."""
    cursor: str
    """Where reading goes on behind it."""
    uids: list[str]
    """Its groups, in order."""
    behind: int
    left_out: list[tuple[str, str]]
    """Groups that are skipped, each with the reason."""
    steps: int
    """How many steps are trained."""
    sampled: str
    """One of its groups that has samples."""


class Stream:
    """The run that a trainer reads. The checkpoint keeps the position: batches that were not learned from come again
    after a crash."""

    def __init__(self, client: Client, config: Config):
        self.client, self.config = client, config
        self.asked = -1  # the newest batch that was published
        # Of the policy that was pushed last: its version, the digest of its weights, that of the adapter's file,
        # and its lane.
        self.version, self.weights, self.digest, self.lane = 0, "", "", ""
        self.lease: Lease | None = None
        self.unchanged = ""  # why the samplers kept the version before at the last push

    def open(self, after: str) -> None:
        """Continues after the batch with this cursor; empty: where the trainer of that name was, or at the beginning of
        the run."""
        self.reader = self.client.batches(
            self.config.run, name=self.config.trainer, after=after, timeout=self.config.patience, empty="give",
            whole=False, stage=self.config.stage,
            log_prob_kind="processed" if self.config.texts else "raw",
        )
        if self.config.stage:
            self.reader.more = self.doing
        self.batches = aiter(self.reader)

    async def patiently(self, call: Callable[..., Awaitable[_T]], *args: Any, **named: Any) -> _T:
        """Makes a call of the client, again while NATS is away, for as long as the configuration says."""
        return await retry_while_away(partial(call, *args, **named), self.config.patience)

    async def used(self) -> bool:
        """Says whether the run has groups."""
        of = f"mdr.v1.group.{self.config.run}.*"
        try:
            info = await self.patiently(self.client.js.stream_info, "MDR_GROUPS", subjects_filter=of)
        except NotFoundError:  # a pipeline that has just been started
            return False
        return bool(info.state.subjects)

    async def ask(self, bodies: list[dict[str, Any]], batch: int) -> None:
        """Publishes a batch's prompts, once."""
        if batch > self.asked:
            await publish(self.client, self.config.run, bodies, self.config.patience)
            self.asked = batch

    async def beside(self, update: int) -> dict[str, int]:
        """Waits until the trainers of the other stages have made an update, 0: have begun, and returns the versions of
        their weights, by stage. ValueError: one learns from more batches, or fewer, in an update than this trainer."""
        out, parts = dict[str, int](), self.config.accumulate
        mine = {batch_id(n) for n in range((update - 1) * parts, update * parts)}
        for stage in self.config.others:
            subject = f"{PREFIX}update.{self.config.run}.*.*.{stage}.{update}"
            wait = Wait(self.config.patience, partial(self._lacks, stage, update))
            while stage not in out:
                with contextlib.suppress(NotFoundError):
                    m = await self.patiently(self.client.js.get_last_msg, "MDR_UPDATES", subject)
                    told = decode(m.data or b"")
                    if other := sorted(set(told["batches"]) - mine):
                        raise ValueError(
                            f"--accumulate: {parts}; must be that of the trainer of {stage}, which learned from "
                            f"{other[0]} in its update {update}"
                        )
                    out[stage] = int(told["policy_version"])
                    break
                await wait.check()
                await asyncio.sleep(0.1)
        return out

    async def _lacks(self, stage: str, update: int, seconds: float) -> str:
        """Says for what beside waits."""
        return (
            f"run {self.config.run}: --beside {stage}: waited {seconds:.3g} s for update {update} of its trainer, "
            f"which the next batch is made with; {await self.doing(stage)}"
        )

    async def doing(self, name: str = "") -> str:
        """Says how far the other trainers of the run are, or the one of that name, and whether they run."""
        of, newest, said = f"{PREFIX}update.{self.config.run}.", dict[tuple[str, str, str], int](), list[str]()
        info = await self.patiently(self.client.js.stream_info, "MDR_UPDATES", subjects_filter=of + ">")
        for subject in info.state.subjects or ():
            lane, tenant, trainer, step = subject.removeprefix(of).split(".")
            newest[trainer, lane, tenant] = max(newest.get((trainer, lane, tenant), 0), int(step))
        for (trainer, lane, tenant), made in sorted(newest.items()):
            if trainer == self.config.trainer or trainer != (name or trainer):
                continue
            has, _ = await self.patiently(holder, self.client, lane, tenant)
            runs = has is not None and has["holder"] == self._holder(trainer)
            said.append(f"trainer {trainer} of lane {lane} has made {made} updates and " + (
                "runs" if runs else "does not run: start it again with the same --out; if it has taken all of its "
                "--updates, with more of them"
            ))
        if name and not said:
            said = [f"no trainer {name} has begun: start meander-train --run {self.config.run} --stage {name}",
                    *filter(None, [await self.doing()] if newest else [])]  # fmt: skip
        return "; ".join(said) or "no other trainer has begun: one has --prompts, and publishes"

    def _holder(self, trainer: str) -> str:
        """By what name a trainer of the run has the lease of its lane."""
        return f"{trainer} of run {self.config.run}"

    async def next(self) -> Batch:
        """Returns the next batch, complete."""
        return await anext(self.batches)

    async def mine(self, task: Task, batch: Batch | None) -> Batch:
        """Returns the groups of a batch that this process trains on. The first process has the batch already."""
        return await self.part(task, task.uids[distributed.rank() :: distributed.world()], batch)

    async def part(self, task: Task, uids: list[str], batch: Batch | None) -> Batch:
        """Returns some groups of a batch. The first process has the batch already."""
        groups = [g for g in batch.groups if g.uid in uids] if batch else await together(
            self.patiently(self.client.group, self.config.run, uid, whole=False, stage=self.config.stage)
            for uid in uids
        )
        kind = "processed" if self.config.texts else "raw"
        return batch_of(groups, task.name, task.cursor, kind, self.client)

    async def lane_lease(self) -> Lease:
        """Returns the lease of the lane to train, not yet taken. Waits for the first sampler."""
        async def unannounced(seconds: float) -> str:
            return f"lane {self.config.lane!r}: no sampler has announced its model for {seconds:.3g} s"

        wait = Wait(self.config.patience, unannounced)
        while True:
            try:
                lane = (await self.patiently(policy.policy, self.client, self.config.lane))["lane"]
            except policy.NoPolicy:
                await wait.check()
                await asyncio.sleep(0.2)
                continue
            self.lease = Lease(self.client, lane, self._holder(self.config.trainer), self.config.tenant)
            return self.lease

    async def base(self) -> int:
        """Makes the samplers serve the checkpoint without an adapter, unless they do, and returns its version."""
        return await self._serve(None, "a new training run")

    async def tell(
        self, update: int, record: dict[str, Any], evaluation: dict[str, float], ledger: dict[str, Any]
    ) -> None:
        """Publishes an update of the weights that were pushed last, for those who look on and for trainers beside this
        one. record: its line of the log; empty: it changed nothing, or is 0, and the trainer begins. ledger: see
        Began.told; empty after a restart."""
        digests, names = record.get("batch_digest", ""), record.get("batch", "")
        if ledger.get("state"):  # just before it is named: what nothing names is swept
            ledger = {**ledger, "state": await self.patiently(policy.put_blob, self.client, ledger["state"])}
        kl = [x for x in record.get("kl", ()) if x is not None]
        await self.patiently(
            self.client.update, self.config.run, self.lane, update, trainer=self.config.trainer,
            tenant=self.config.tenant or TENANT, batches=names.split("+") if names else [],
            batch_digest=joined(digests.split("+")) if digests else "",
            policy_version=self.version, weights_digest=self.weights, evaluation=evaluation,
            ledger=ledger, clip_share=record.get("clipped"), kl=max(kl, default=None), staleness=record.get("behind"),
            **{n: record.get(n) for n in ("loss", "ratio", "ratio_max", "lr", "grad_norm", "groups", "samples")},
        )

    async def push(self, network: Network, state: dict[str, Any], note: str) -> int:
        """Pushes an adapter, waits until the samplers make samples with it, and returns their version: that before,
        where the adapter changes nothing that they can see. One that is zero is the base, which they always take."""
        if not any(bool(v.any()) for name, v in state.items() if ".lora_B." in name):
            self.digest = digest(state)
            return await self._serve(None, note)
        self.digest = digest(state)
        return await self._serve(state, note, network.config_json())

    async def _serve(self, adapter: dict[str, Any] | None, note: str, config: str | None = None) -> int:
        if self.lease is not None:
            self.lease.check()
        pushed = await self.patiently(
            policy.push_policy, self.client, adapter, self.config.lane, config=config, by=self.config.trainer,
            note=note, lease=self.lease, tenant=self.config.tenant,
        )
        self.lane = pushed["lane"]
        samplers = await policy.taken(self.client, pushed, self.config.patience, refused="give")
        answers = [s["answer"] for s in samplers if s["answer"]]
        refused = [a for a in answers if a["state"] == "refused"]
        self.unchanged = ""
        if refused and len(refused) == len(answers) and all(_CHANGES_NOTHING in a.get("error", "") for a in refused):
            version, serving = pushed["policy_version"], refused[0]["serving"]
            self.unchanged = f"version {version}, {note}, gives what version {serving} gives, which the samplers keep"
            return self.version
        if bad := next((a for a in refused if _CHANGES_NOTHING not in a.get("error", "")), None):
            raise RuntimeError(f"{bad['instance']} refuses version {pushed['policy_version']}: {bad.get('error', '')}")
        self.version, self.weights = pushed["policy_version"], pushed["weights_digest"]
        return self.version
