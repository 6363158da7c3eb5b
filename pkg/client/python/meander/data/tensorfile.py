"""Safetensors files, with numpy alone: writes tensors in memory as one, and finds the checkpoint of a folder."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

# The names of dtypes in the file, in the order in which it has their tensors.
_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_OF_VARIANT = re.compile(r"[^.]+(?:\.safetensors(?:\.index)?)?\.([^.]+)(?:\.index)?\.(?:json|safetensors)")
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.")


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
