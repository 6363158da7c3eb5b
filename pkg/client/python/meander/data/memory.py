"""Memory of messages and states that is used again: fresh pages cost more than what is written to them."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

_PAGE = 64 << 10  # a size is a multiple of it, so that messages of nearly one size take each other's memory
_KEPT = 256 << 20  # bytes at most that nobody has; they were in use at once before
_free = dict[int, list[npt.NDArray[np.uint8]]]()


def empty(shape: tuple[int, ...], dtype: Any = np.uint8) -> npt.NDArray[Any]:
    """As numpy's, of memory that an array had before that nobody has any more, nor a view of it."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    whole = -(-size // _PAGE) * _PAGE
    try:
        memory = _free[whole].pop()
    except LookupError:
        memory = np.empty(whole, np.uint8)
    given = np.frombuffer(memory.data[:size], dtype)  # what all views of it have as their base
    weakref.finalize(given, _take_back, memory).atexit = False
    return given.reshape(shape)


def _take_back(memory: npt.NDArray[np.uint8]) -> None:
    if sum(size * len(of) for size, of in list(_free.items())) + len(memory) <= _KEPT:
        _free.setdefault(len(memory), []).append(memory)
