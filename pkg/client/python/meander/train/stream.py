"""A trainer's side of the stream: prompts out, batches in by a cursor of its own, weights out."""

from __future__ import annotations

import asyncio
import json
import os
from asyncio.subprocess import PIPE
from pathlib import Path

from ..batch import Batch
from ..client import Client
from . import distributed
from .config import Config
from .evaluate import publish
from .model import Network, digest


class Stream:
    """The run that a trainer reads. The place in it is the checkpoint's: what was not learned from comes again after a crash."""

    def __init__(self, client: Client, config: Config):
        self.client, self.config = client, config
        self.asked = -1  # the newest batch that was published
        # Of the policy that was pushed last: its version, the digest of its weights, that of the adapter's file.
        self.version, self.weights, self.digest = 0, "", ""

    def open(self, after: str) -> None:
        """Goes on behind the batch with this cursor; empty: where the trainer of that name was, or at the run's begin."""
        self.reader = self.client.batches(self.config.run, name=self.config.trainer, after=after, timeout=self.config.patience)
        self.batches = aiter(self.reader)

    async def used(self) -> bool:
        """Whether the run has groups."""
        info = await self.client.js.stream_info("MDR_GROUPS", subjects_filter=f"mdr.v1.group.{self.config.run}.*")
        return bool(info.state.subjects)

    async def ask(self, bodies: list[dict], batch: int) -> None:
        """Publishes a batch's prompts, once."""
        if batch > self.asked:
            await publish(self.client, self.config.run, bodies)
            self.asked = batch

    async def next(self) -> Batch:
        """The next batch, whole."""
        return await anext(self.batches)

    async def share(self, batch: Batch | None) -> Batch:
        """The groups of the first process's batch that this process is to train on; alone: all."""
        if batch is not None and distributed.world() == 1:
            return batch
        name, cursor, uids = distributed.share((batch.name, batch.cursor, [g.uid for g in batch.groups]) if batch is not None else ("", "", [""]))
        mine = uids[distributed.rank() :: distributed.world()]
        if batch is not None:
            return Batch([g for g in batch.groups if g.uid in mine], name, cursor)
        return Batch(await asyncio.gather(*(self.client.group(self.config.run, uid) for uid in mine)), name, cursor)

    async def base(self) -> int:
        """Has the samplers serve the checkpoint without an adapter, unless they do; returns its version."""
        now = await self._policy("show")
        if now.get("adapter"):
            first = (await self._policy("ls"))["policy_version"]  # the oldest: what the samplers began with
            now = await self._policy("rollback", str(first), "--by", self.config.trainer, "--note", "a new training run")
        return self._serving(now)

    async def push(self, network: Network, state: dict, note: str) -> int:
        """Pushes an adapter, waits until the samplers make samples with it, and returns its version."""
        folder = Path(self.config.out) / "pushed"
        network.save(folder, state)
        self.digest = digest(state)
        return self._serving(await self._policy("push", str(folder), "--by", self.config.trainer, "--note", note))

    def _serving(self, policy: dict) -> int:
        self.version, self.weights = policy["policy_version"], policy["weights_digest"]
        return self.version

    async def _policy(self, command: str, *args: str) -> dict:
        """One object that meander policy prints."""
        c = self.config
        flags = ["--nats", c.nats, "--json", *(["--lane", c.lane] if c.lane else [])]
        env = os.environ | ({"MEANDER_NATS_TOKEN": c.token} if c.token else {})
        p = await asyncio.create_subprocess_exec(c.meander, "policy", command, *args, *flags, stdout=PIPE, stderr=PIPE, env=env)
        out, err = await p.communicate()
        if p.returncode:
            raise RuntimeError(f"{c.meander} policy {command}: {(err or out).decode().strip()}")
        return json.loads(out.splitlines()[0])
