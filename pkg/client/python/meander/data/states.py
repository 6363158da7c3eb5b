"""The states of a batch in one buffer, in the dtype that was stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .events import stored_tensor, widened
from .memory import empty

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]
"""An array of numpy, of any dtype."""
NAMES = ("latents", "next_latents")
"""The arrays of a batch that are views of its states."""
_STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class States:
    """The states before and behind W trained steps of B samples, [B, W, S, C] each, in one buffer: where steps follow
    one another in every sample, as in a window, the state between two of them is there once.

    dtype is the stored one, F32, F16 or BF16 (whose bits numpy has as uint16); F32 where samples differ.
    """

    def __init__(self, at: Sequence[Sequence[int]], w: int, shape: tuple[int, ...],
        kept: Sequence[Mapping[int, list[Any]]],
        memory: Callable[[tuple[int, ...], Any], Array] = empty):  # fmt: skip
        """at are the indices of the trained steps of each sample, and kept its states by their index. The events give
        up their bytes for the buffer."""
        self.w, self.joined = w, all(list(t) == list(range(t[0], t[0] + w)) for t in at)
        dtypes = {kept[i][k][0]["dtype"] for i, t in enumerate(at) for step in t for k in (step, step + 1)}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else "F32"
        self.held = memory((len(at), w + 1 if self.joined else 2 * w, *shape), _STORED[self.dtype])
        self._wide: Array | None = None
        self._torch: torch.Tensor | None = None
        raw = dict(zip(NAMES, self._views(self.held), strict=True))
        size, same = math.prod(shape) * self.held.itemsize, list(shape)
        rows = {name: views.reshape(*views.shape[:2], -1).view(np.uint8) for name, views in raw.items()}
        for i, t in enumerate(at):
            for views in raw.values() if len(t) < w else ():
                views[i, len(t) :] = 0
            for k, step in enumerate(t):
                for name, index in zip(NAMES, (step, step + 1)):
                    if name == "latents" and k and self.joined:
                        continue  # the state behind the step before
                    first, row = kept[i][index][0], rows[name][i, k]
                    if first["dtype"] != self.dtype:
                        raw[name][i, k] = widened(first["dtype"], stored_tensor(first))
                        continue
                    data = first.get("data")
                    if first["shape"] == same and data is not None and len(data) == size:
                        row[:] = np.frombuffer(data, np.uint8)
                    else:
                        raw[name][i, k] = stored_tensor(first)
                    for of in kept[i][index]:
                        if of["dtype"] == self.dtype:
                            of["data"] = row

    def _views(self, held: Any) -> tuple[Any, Any]:
        """The states before and behind the steps."""
        return held[:, : self.w], held[:, 1:] if self.joined else held[:, self.w :]

    def array(self, name: str) -> Array:
        """latents or next_latents, float32 [B, W, S, C]: a view; of F16 and BF16 one of an exact copy, which is made
        once."""
        if self._wide is None:
            self._wide = widened(self.dtype, self.held).astype(np.float32, copy=False)
        return self._views(self._wide)[NAMES.index(name)]

    def tensor(self, name: str) -> torch.Tensor:
        """latents or next_latents [B, W, S, C] of the stored dtype: a view."""
        import torch

        if self._torch is None:  # one for both, so that they are sent to another process once
            held = torch.from_numpy(self.held.view(np.int16) if self.dtype == "BF16" else self.held)
            self._torch = held.view(torch.bfloat16) if self.dtype == "BF16" else held
        return self._views(self._torch)[NAMES.index(name)]


def pinned(shape: tuple[int, ...], dtype: Any) -> Array:
    """Memory that a GPU copies from beside the computation."""
    import torch

    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.asarray(torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().view(dtype).reshape(shape))
