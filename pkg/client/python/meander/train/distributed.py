"""Several processes as one trainer, through torch.distributed; without it, or alone, every function is the identity.

torchrun or accelerate launch starts them, with gloo for tensors on CPUs and nccl for those on GPUs. The first process
reads the cursor, publishes, pushes and writes; each reads the tensors of its own share of a batch's groups.
"""

from __future__ import annotations

import datetime
import functools
import os
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

_T = TypeVar("_T")
_patient: dist.ProcessGroup | None = None  # for share: the others wait as long as the first one evaluates


def device(name: str) -> str:
    """Returns the device of this process: each process on a machine has a GPU of its own, if there are GPUs."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" else name


def begin(device: str) -> None:
    """Joins the processes that were started. ValueError: this one was started alone, in place of several."""
    if "ACCELERATE_USE_CPU" in os.environ and "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ:
        raise ValueError("accelerate launch --cpu starts one process of several; use torchrun --nproc-per-node")
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
            # torchrun has one store for all attempts: those who come again must not find the addresses of those who
            # died. Several machines count their attempts each for itself.
            store, rank, size = next(dist.rendezvous("env://"))
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        else:
            dist.init_process_group(backend)
        global _patient
        _patient = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))


def end() -> None:
    """Leaves the processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def shard(network: torch.nn.Module, blocks: list[torch.nn.Module], device: torch.device) -> float:
    """Leaves a part of each parameter to this process, on the device (FSDP2). A block is whole while it is computed.

    Returns the factor that turns what FSDP2 makes of the processes' gradients into their sum. It asks for the mean, but
    gloo of torch 2.8 gives the sum.
    """
    mesh = init_device_mesh(device.type, (world(),))
    for module in (*blocks, network):
        # The network's own parameters, too: else they would stay whole, as they are, behind a pass without gradients.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    made = torch.empty(1, device=device)
    dist.reduce_scatter_tensor(made, torch.ones(world(), device=device), dist.ReduceOp.AVG, mesh.get_group())
    return world() / float(made)


class Lockstep:
    """Has all processes call sharded networks equally often, in one order, where what each of them computes needs other
    calls: sessions of whole pipelines. A process goes along with the calls of others, by what it called before, and
    these count nothing. The numbers of calls are agreed on before each: one small reduction."""

    def __init__(self, networks: list[torch.nn.Module]):
        self._networks = networks
        self._last: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}  # arguments of the last call
        self._along = False
        self._nothing: list[torch.Tensor] = []
        for i, network in enumerate(networks):  # before the hooks that gather its parameters
            network.register_forward_pre_hook(functools.partial(self._before, i), prepend=True, with_kwargs=True)

    def _before(self, i: int, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._along:
            self._last[i] = args, kwargs
            self._wait(2 * i + torch.is_grad_enabled())

    def _wait(self, mine: int) -> None:
        """Goes along with the calls that come before: the network's number twice, and 1 more with a gradient."""
        while True:
            first = torch.tensor(mine)
            dist.all_reduce(first, op=dist.ReduceOp.MIN)
            if int(first) == mine:
                return
            i, grad = divmod(int(first), 2)
            args, kwargs = self._last[i]
            self._along = True
            try:
                with torch.set_grad_enabled(bool(grad)):
                    out = self._networks[i](*args, **kwargs)
            finally:
                self._along = False
            if grad:  # the others' backward passes need this one's
                one = out[0] if isinstance(out, tuple) else next(iter(out.values()))
                self._nothing.append(0 * (one[0] if isinstance(one, list) else one).sum())

    def end(self, v: torch.Tensor) -> torch.Tensor:
        """Goes along until all processes are done, and returns what this one has computed: its backward pass goes
        along, too."""
        self._wait(2 * len(self._networks))
        nothing, self._nothing = self._nothing, []
        return v + sum(nothing) if nothing else v


def part(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor that all have, as like is sharded; the tensor itself where like is not."""
    if not isinstance(like, DTensor):
        return t
    return distribute_tensor(t.to(like.device, like.dtype), like.device_mesh, like.placements)


def add(tensors: list[torch.Tensor]) -> None:
    """Sums each tensor over the processes, in place."""
    if world() > 1:
        for t in tensors:
            dist.all_reduce(t)


def largest(t: torch.Tensor) -> None:
    """Takes the largest of each element over the processes, in place."""
    if world() > 1:
        dist.all_reduce(t, op=dist.ReduceOp.MAX)


def total(n: int) -> int:
    """The sum of a count over the processes."""
    t = torch.tensor([n], dtype=torch.int64)
    add([t])
    return int(t)


def share(value: _T) -> _T:
    """Returns in all processes what the first one has."""
    if world() == 1:
        return value
    box: list[_T] = [value]
    dist.broadcast_object_list(box, src=0, group=_patient)
    return box[0]
