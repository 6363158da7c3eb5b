"""Writes tensors in memory as a safetensors file, with numpy alone."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

# The names of dtypes in the file, in the order in which it has their tensors.
_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def encode(tensors: Mapping[str, Any]) -> bytes:
    """Returns the bytes that safetensors writes of these arrays of numpy or tensors of torch, on whatever device.

    ValueError: one is no tensor of float64, float32, bfloat16 or float16.
    """
    parts = {name: _part(name, t) for name, t in tensors.items()}
    order = list(_DTYPES.values())
    names = sorted(parts, key=lambda name: (order.index(parts[name][0]), name))
    header, end = {}, 0
    for name in names:
        dtype, shape, data = parts[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + data.nbytes]}
        end += data.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(parts[name][2].data for name in names)])


def _part(name: str, t: Any) -> tuple[str, list[int], np.ndarray]:
    """The dtype, the shape and the bytes of a tensor."""
    dtype = getattr(t, "dtype", type(t))
    kind = dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")
    if kind not in _DTYPES:
        raise ValueError(f"{name}: {kind}; must be a tensor of {', '.join(_DTYPES)}")
    shape = [int(n) for n in t.shape]
    if isinstance(t, np.ndarray):
        data = np.ascontiguousarray(t, t.dtype.newbyteorder("<"))
    else:
        flat = t.detach().cpu().contiguous().reshape(-1)
        data = flat.view(sys.modules["torch"].uint8).numpy()
    return _DTYPES[kind], shape, data.reshape(-1).view(np.uint8)
