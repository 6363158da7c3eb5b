"""Safetensors files, with numpy alone: writes tensors in memory as some, and finds the checkpoint of a folder."""

from __future__ import annotations

import json
import math
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

# The names of dtypes in the file, in the order in which it has their tensors.
_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}

_OF_VARIANT = re.compile(r"[^.]+(?:\.safetensors(?:\.index)?)?\.([^.]+)(?:\.index)?\.(?:json|safetensors)")
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.")


_PIECE = 4 << 20  # bytes that are handed over at once


def encode(tensors: Mapping[str, Any]) -> bytes:
    """Returns the bytes that safetensors writes of these arrays of numpy or tensors of torch, on whatever device.

    ValueError: one is no tensor of float64, float32, bfloat16 or float16.
    """
    return b"".join(pieces(tensors))


def pieces(tensors: Mapping[str, Any], finite: bool = False) -> Iterator[bytes | memoryview]:
    """encode in pieces: no tensor is copied whole, but that which is read from another device or is not contiguous.

    ValueError: as encode, before the first piece; with finite: a number of a tensor is not.
    """
    kinds = {name: kind_of(name, t) for name, t in tensors.items()}
    order = list(_DTYPES.values())
    names = sorted(kinds, key=lambda name: (order.index(kinds[name][0]), name))
    header, end = {}, 0
    for name in names:
        dtype, shape = kinds[name]
        begin, end = end, end + _SIZES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in names:
        data = _data(tensors[name])
        for begin in range(0, len(data), _PIECE):
            piece = data[begin : begin + _PIECE]
            if finite and not is_finite(kinds[name][0], piece):
                raise ValueError(f"{name}: not finite")
            yield piece.data


def kind_of(name: str, t: Any) -> tuple[str, list[int]]:
    """The dtype and the shape of a tensor, as files name them. ValueError: as encode, or it is a part of one."""
    dtype = getattr(t, "dtype", type(t))
    kind = dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")
    if kind not in _DTYPES:
        raise ValueError(f"{name}: {kind}; must be a tensor of {', '.join(_DTYPES)}")
    if hasattr(t, "full_tensor"):
        raise ValueError(f"{name}: sharded; must be whole: all processes call its full_tensor(), one at a time")
    return _DTYPES[kind], [int(n) for n in t.shape]


def size_of(t: Any) -> int:
    """The bytes of a tensor that kind_of takes."""
    dtype, shape = kind_of("", t)
    return _SIZES[dtype] * math.prod(shape)


def is_finite(dtype: str, data: np.ndarray | bytes | memoryview) -> bool:
    """Whether all numbers in these bytes of a tensor are finite."""
    if dtype == "BF16":  # all ones in the exponent are not
        return not bool(((np.frombuffer(data, "<u2") & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(np.frombuffer(data, _FLOATS[dtype])).all())


def _data(t: Any) -> np.ndarray:
    """The bytes of a tensor."""
    if isinstance(t, np.ndarray):
        data = np.ascontiguousarray(t, t.dtype.newbyteorder("<"))
    else:
        flat = t.detach().cpu().contiguous().reshape(-1)
        data = flat.view(sys.modules["torch"].uint8).numpy()
    return data.reshape(-1).view(np.uint8)


def choose_checkpoint(files: Iterable[str]) -> str:
    """Which of the files of a folder is its checkpoint, a file or an index, chosen as transformers and diffusers do:
    the one of a usual name, else that of the only variant, else the only one. Empty: it is not clear which.

    ValueError: there are several variants, and none without a name.
    """
    names = sorted(files)
    variants = sorted(v for v in {variant_of(n) for n in names} if v)
    for variant in ("", *variants):
        if chosen := next((n for n in usual(variant) if n in names), ""):
            if variant and len(variants) > 1:
                raise ValueError(
                    f"several variants and none without a name: {', '.join(variants)}; must be one: "
                    "move the others away"
                )
            return chosen
    for end in (".safetensors.index.json", ".safetensors"):
        only = [n for n in names if n.endswith(end)]
        if only:
            return only[0] if len(only) == 1 else ""
    return ""


def usual(variant: str) -> list[str]:
    """Names of checkpoints of a variant, in the order in which transformers and diffusers look for their own. The last
    index is that of older ones of diffusers."""
    v, (own, other) = f".{variant}" if variant else "", ("diffusion_pytorch_model", "model")
    return [
        f"{other}{v}.safetensors",
        f"{other}.safetensors.index{v}.json",
        f"{own}.safetensors.index{v}.json",
        f"{own}.safetensors{v}.index.json",
        f"{own}{v}.safetensors",
    ]


def variant_of(name: str) -> str | None:
    """The variant in the name of a checkpoint; None where it has none, or is the name of a shard."""
    m = _OF_VARIANT.fullmatch(name)
    return m[1] if m and not _SHARD.search(name) and name in usual(m[1]) else None
