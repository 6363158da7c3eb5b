"""A platform of verl's for machines without a GPU: enough for one process that trains a small model. verl imports it
where VERL_USE_EXTERNAL_MODULES names it; Ray is told of a GPU that there is not."""

import contextlib
import types
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform


def nothing(*_: Any, **__: Any) -> None:
    """What a CPU need not do."""


def zero(*_: Any, **__: Any) -> int:
    """The memory of a device that there is not."""
    return 0


class PlatformCPU(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = types.SimpleNamespace(
        is_available=lambda: False, current_device=lambda: "cpu", get_device_name=lambda *_: "cpu",
        memory_allocated=zero, memory_reserved=zero, max_memory_allocated=zero, max_memory_reserved=zero,
        mem_get_info=lambda *_: (0, 1), reset_peak_memory_stats=nothing, empty_cache=nothing, set_device=nothing,
        synchronize=nothing, get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state,
    )  # fmt: skip
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = nothing
    manual_seed = manual_seed_all = nothing  # torch.manual_seed is all there is

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


def one_backend(backend: str | None = None, **settings: Any) -> None:
    """torch.distributed.init_process_group, which takes no device twice: verl names a backend for the CPU and one for
    its device."""
    init_process_group(backend="gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **settings)


PlatformRegistry.register(platform="cpu")(PlatformCPU)
set_platform(PlatformCPU())
init_process_group = torch.distributed.init_process_group
torch.distributed.init_process_group = one_backend
