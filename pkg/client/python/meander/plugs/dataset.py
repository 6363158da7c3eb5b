"""Batches of a run as a data set of torch, for DataLoader and its workers. It needs torch."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..client import sync
from ..data.batch import Batch, Keep
from ..client.cursor import Cursor, results
from ..data.shares import Extent, Part, Shares
from ..client.sync.client import Stream
from ..client.tasks import maybe_awaited


def as_tensors(batch: Batch) -> dict[str, Any]:
    """The arrays of a batch as tensors (Batch.torch), its texts as lists of str, and its cursor, name and size; last
    says whether no more micro-batches of the batch come.

    A batch of size 0 has the last four alone.
    """
    texts = {name: batch[name].tolist() for name in batch if batch[name].dtype.kind == "U"}
    return {
        **(batch.torch() if batch.size else {}),
        **texts,
        "cursor": batch.cursor,
        "name": batch.name,
        "size": batch.size,
        "last": batch.last,
    }


class BatchDataset(IterableDataset[Any]):
    """The batches of a run, in the order in which they closed, each group once.

        data = BatchDataset("nats://127.0.0.1:4222", "demo", "my-trainer", groups=8)
        for batch in data.loader(num_workers=2):
            ...                                   # batch["latents"], batch["advantages"], as tensors
            data.done(batch)                      # behind the optimizer's step: it does not come again

    With workers, worker k of n makes batches k, k + n, ...; DataLoader hands them out in order. Under torch.distributed
    each process gets its share of the groups of every batch, so that all take the same number of steps; a process
    without a group gets a batch of size 0. Make the data set in all processes, behind init_process_group.

    Call done in all processes; that of rank 0 tells the server. A new iteration, here or in a later process, begins
    behind what was acknowledged last: a batch that was read and not acknowledged comes again.

    run, groups, keep, empty, timeout, logits, log_prob_kind and stage are those of client.batches; groups is 0 where
    prompts name their batches.
    name: the server remembers how far this reader is, and keeps what it has not acknowledged. Without it, after says
    where reading begins.
    after: the cursor of a batch; reading begins behind it, whatever was acknowledged.
    follow=False: end with the results that are stored when the data set is made. Groups that are too few for a batch
    are left for later.
    limit: an iteration ends after so many batches; 0: never.
    prefetch: the batches that each worker reads ahead.
    micro: a batch comes as micro-batches of so many samples (Batch.micro), whose steps are read one ahead, and not
    whole; call done behind the one that is the last. It takes at most one worker. 0: whole.
    convert: what becomes of a Batch; the result is sent from the worker to the training process. done takes it, or the
    cursor.
    connection: the other arguments of meander.connect.
    """

    def __init__(
        self,
        url: str,
        run: str,
        name: str = "",
        *,
        groups: int = 0,
        after: str = "",
        follow: bool = True,
        limit: int = 0,
        prefetch: int = 2,
        micro: int = 0,
        convert: Callable[[Batch], Any] = as_tensors,
        keep: Keep | None = None,
        empty: str = "",
        timeout: float = 0,
        logits: bool = False,
        log_prob_kind: str = "raw",
        stage: str = "",
        **connection: Any,
    ):
        """ValueError: an argument is wrong, or torchrun started several processes that are no process group yet.
        ConnectionError: as meander.connect."""
        for what, value, least in (
            ("groups", groups, 0), ("limit", limit, 0), ("prefetch", prefetch, 1), ("micro", micro, 0),
        ):  # fmt: skip
            if value < least:
                raise ValueError(f"{what}: {value}; must be at least {least}")
        self.rank: int = dist.get_rank() if dist.is_initialized() else 0
        self.world: int = dist.get_world_size() if dist.is_initialized() else 1
        if self.world == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "several processes, each of which would read everything: make the data set behind init_process_group"
            )
        self.url, self.run, self.groups, self.prefetch, self.convert, self.connection = (
            url,
            run,
            groups,
            prefetch,
            convert,
            connection,
        )
        self._options: dict[str, Any] = {
            "log_prob_kind": log_prob_kind,
            "keep": keep,
            "empty": empty,
            "faults": "raise",
            "timeout": timeout,
            "logits": logits,
            "whole": not micro,
            "stage": stage,
        }
        self.micro = micro
        self._begun = False
        self._position: _Position | None = None
        extent: list[Any] = [None]
        if self.rank == 0:
            self._position = _Position(url, connection, run, name, "advantage" if groups else "batch", after)
            extent = [Extent(self._position.after, None if follow else self._position.newest, limit)]
        if self.world > 1:
            dist.broadcast_object_list(extent, src=0)
        self.extent: Extent = extent[0]

    def loader(self, num_workers: int = 0, **options: Any) -> DataLoader[Any]:
        """A DataLoader of this data set, which batches already; options are those of DataLoader."""
        return DataLoader(self, batch_size=None, num_workers=num_workers, **options)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None and self._begun:
            raise RuntimeError("persistent_workers: a worker does not learn what was acknowledged; leave it False")
        self._begun = worker is not None
        part = Part(self.rank, self.world, *((worker.id, worker.num_workers) if worker else ()))
        if self.micro and part.workers > 1:
            raise ValueError(
                f"num_workers: {part.workers}; must be 0 or 1 with micro: DataLoader takes from its workers in turns, "
                f"so that micro-batches of several batches would alternate"
            )
        with sync.connect(self.url, **self.connection) as client:
            shares = Shares(
                client.asynchronous, self.run, self.groups, part, self.extent, self.prefetch, **self._options
            )
            batches: Stream[Batch] = Stream(client.thread, shares.__aiter__())
            try:
                for whole in batches:
                    whole.thread = client.thread
                    for batch in whole.micro(self.micro) if self.micro and whole.size else [whole]:
                        out = self.convert(batch)
                        yield client.thread.run(maybe_awaited(out)) if inspect.isawaitable(out) else out
            finally:
                batches.close()

    def done(self, batch: Any) -> None:
        """Acknowledges a batch, or that of a cursor, and those before: they do not come again.

        RuntimeError: called in a worker. Taken: another process now reads under the name. TimeoutError: the server does
        not confirm it.
        """
        if get_worker_info() is not None:
            raise RuntimeError("done: called in a worker of DataLoader; call it in the process that trains")
        cursor = batch if isinstance(batch, str) else batch["cursor"] if isinstance(batch, dict) else batch.cursor
        if self._position is not None:
            self._position.advance(cursor)
        self.extent = dataclasses.replace(self.extent, after=cursor)

    def close(self) -> None:
        """Ends the connection that done uses; what is not acknowledged comes again."""
        if self._position is not None:
            self._position.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_position": None}


class _Position:
    """The place of a reader, kept by the server where it has a name: after is where it begins, newest the last stored
    result."""

    def __init__(self, url: str, connection: dict[str, Any], run: str, name: str, kind: str, after: str):
        self._connection = sync.connect(url, **connection)
        self._client = self._connection.__enter__()
        asynchronous = self._client.asynchronous
        self._cursor = Cursor(asynchronous.nc, run, name, results(run, kind), after, mark=asynchronous.mark)
        self.newest = self._client.thread.run(self._cursor.newest())
        self.after = self._client.thread.run(self._cursor.acknowledged()) if name else after

    def advance(self, cursor: str) -> None:
        if self._cursor.name:
            self._client.thread.run(self._cursor.advance(cursor))

    def close(self) -> None:
        self._client.thread.finish(self._cursor.close())
        self._connection.__exit__(None, None, None)
