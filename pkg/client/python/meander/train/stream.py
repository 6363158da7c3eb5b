"""A trainer's side of the stream: it publishes prompts, reads batches with a cursor of its own, and pushes weights."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from nats.js.errors import NotFoundError

from ..client import policy
from ..data.batch import Batch
from ..data.events import PREFIX, decode
from ..data.textbatch import batch_of
from ..client.client import Client
from ..client.lease import Lease
from ..client.tasks import retry_while_away, together
from . import distributed
from .config import Config
from .evaluate import publish
from .model import Network, digest


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
        """Waits for an update of the other trainers of the run, and returns the versions of their weights, by stage."""
        out = {}
        for stage in self.config.others if update else ():
            subject = f"{PREFIX}update.{self.config.run}.*.*.{stage}.{update}"
            end = time.monotonic() + self.config.patience
            while stage not in out:
                try:
                    m = await self.patiently(self.client.js.get_last_msg, "MDR_UPDATES", subject)
                    out[stage] = int(decode(m.data or b"")["policy_version"])
                except NotFoundError:
                    if time.monotonic() > end:
                        raise TimeoutError(
                            f"--beside {stage}: no update {update} of it in run {self.config.run} for "
                            f"{self.config.patience:g} s; does its trainer run?"
                        ) from None
                    await asyncio.sleep(0.1)
        return out

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
        end = time.monotonic() + self.config.patience
        while True:
            try:
                lane = (await self.patiently(policy.policy, self.client, self.config.lane))["lane"]
            except policy.NoPolicy:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.2)
                continue
            self.lease = Lease(self.client, lane, f"{self.config.trainer} of run {self.config.run}")
            return self.lease

    async def base(self) -> int:
        """Makes the samplers serve the checkpoint without an adapter, unless they do, and returns its version."""
        return await self._serve(None, "a new training run")

    async def tell(self, record: dict[str, Any], evaluation: dict[str, float]) -> None:
        """Publishes an update of the weights that were pushed last, for those who look on."""
        joined = "+" in record["batch_digest"]
        await self.patiently(
            self.client.update, self.config.run, self.lane, record["update"], trainer=self.config.trainer,
            batches=record["batch"].split("+"), batch_digest="" if joined else record["batch_digest"],
            policy_version=self.version, weights_digest=self.weights, evaluation=evaluation,
            clip_share=record.get("clipped"), kl=max(record["kl"]), staleness=record["behind"],
            **{name: record[name] for name in ("loss", "ratio", "ratio_max", "lr", "grad_norm", "groups", "samples")},
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
            note=note,
            lease=self.lease,
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
