"""Frames: u32 header length, u64 body length (little-endian), a header (a msgpack map) and a body (raw tensors).

The header describes the tensors of the body: [{"name", "dtype": "f32" | "u8", "shape", "at", "bytes"}], little-endian,
in C order. Every length is checked before memory is taken for it.
"""

from __future__ import annotations

import math
import socket
import struct
from typing import Any

import msgpack
import numpy as np

from .faults import Fault

MAX_HEADER = 1 << 20
"""Bytes of a header at most."""
MAX_BODY = 1 << 30
"""Bytes of a body at most."""
DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype("<f4"), "u8": np.dtype("u1")}
"""dtypes of tensors in frames, by name."""

_PREFIX = struct.Struct("<IQ")
_MAX_DIMENSIONS = 8
_PIECE = 1 << 16


class FrameError(Exception):
    """Bytes that are not a frame: what follows cannot be read, so the connection must be closed."""


def read_frame(stream: socket.socket, max_body: int = MAX_BODY) -> tuple[dict[str, Any], np.ndarray | None] | None:
    """Returns the header and the body (u8 [n]) of the next frame, or None if the stream ended before one.

    The body is None where memory is too small for it: it was read and thrown away, so that the next frame follows.
    FrameError: a length out of bounds, an end inside a frame, or a header that is not a map.
    """
    prefix = memoryview(bytearray(_PREFIX.size))
    if not _fill(stream, prefix, optional=True):
        return None
    header_bytes, body_bytes = _PREFIX.unpack(prefix)
    if not 0 < header_bytes <= MAX_HEADER:
        raise FrameError(f"header: {header_bytes} bytes; must be 1 to {MAX_HEADER}")
    if body_bytes > max_body:
        raise FrameError(f"body: {body_bytes} bytes; must be at most {max_body}")
    packed = memoryview(bytearray(header_bytes))
    _fill(stream, packed)
    header = decode_header(packed)
    try:
        body = np.empty(body_bytes, np.uint8)  # memory is taken as bytes come, so a length alone costs nothing
    except MemoryError:
        piece = memoryview(bytearray(_PIECE))
        for left in range(body_bytes, 0, -_PIECE):
            _fill(stream, piece[:left])
        return header, None
    _fill(stream, body.data)
    return header, body


def decode_header(data: bytes | memoryview) -> dict[str, Any]:
    """Returns the map that a header is. FrameError: it is something else."""
    try:
        header = msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_refuse_ext)
    except Exception as e:  # what msgpack raises is of many types
        raise FrameError(f"header: {type(e).__name__}: {e}; must be a msgpack map") from e
    if not isinstance(header, dict) or not all(isinstance(k, str) for k in header):
        raise FrameError(f"header: a {type(header).__name__}; must be a map with keys of text")
    return header


def tensors_of(header: dict[str, Any], body: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the tensors of a frame by name, as views of its body.

    Fault of class protocol: a description that is incomplete, twice there, not inside the body or over another.
    """
    described = header.get("tensors") or []
    if not isinstance(described, list):
        raise Fault("protocol", f"tensors: a {type(described).__name__}; must be a list")
    out: dict[str, np.ndarray] = {}
    spans = []
    for i, d in enumerate(described):
        where = f"tensors[{i}]"
        if not isinstance(d, dict) or set(d) != {"name", "dtype", "shape", "at", "bytes"}:
            raise Fault("protocol", f"{where}: must be a map of name, dtype, shape, at, bytes")
        name, dtype, shape, at, size = d["name"], d["dtype"], d["shape"], d["at"], d["bytes"]
        if not isinstance(name, str) or name in out:
            raise Fault("protocol", f"{where}: name: {name!r:.80}; must be text, once")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise Fault("protocol", f"{where}: dtype: {dtype!r:.80}; must be one of {', '.join(DTYPES)}")
        if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(_is_size(n) for n in shape):
            raise Fault(
                "protocol", f"{where}: shape: {shape!r:.80}; must be at most {_MAX_DIMENSIONS} sizes of at least 0"
            )
        if not _is_size(at) or not _is_size(size) or at + size > len(body):
            raise Fault(
                "protocol", f"{where}: at {at!r:.40}, bytes {size!r:.40}; must be inside the body of {len(body)} bytes"
            )
        if (needed := math.prod(shape) * DTYPES[dtype].itemsize) != size:
            raise Fault("protocol", f"{where}: bytes: {size}; must be {needed} for {dtype} {shape}")
        spans.append((at, at + size))
        data = body[at : at + size]
        if at % DTYPES[dtype].itemsize:
            data = data.copy()  # torch takes no unaligned memory
        out[name] = np.frombuffer(data, DTYPES[dtype]).reshape(shape)
    spans = sorted(s for s in spans if s[0] < s[1])
    if any(a[1] > b[0] for a, b in zip(spans, spans[1:], strict=False)):
        raise Fault("protocol", "tensors: two share bytes of the body; must not overlap")
    return out


Named = list[tuple[str, np.ndarray]]
"""Tensors in order, with their names; the same name may come again."""


def write_frame(stream: socket.socket, header: dict[str, Any], tensors: Named) -> None:
    """Sends header, with a description of these named f32 or u8 tensors added to it, and the tensors."""
    described, at, bodies = [], 0, []
    for name, array in tensors:
        dtype = "u8" if array.dtype == np.uint8 else "f32"
        data = np.ascontiguousarray(array, DTYPES[dtype])
        described.append({"name": name, "dtype": dtype, "shape": list(array.shape), "at": at, "bytes": data.nbytes})
        bodies.append(data)
        at += data.nbytes
    packed = msgpack.packb({**header, "tensors": described})
    if len(packed) > MAX_HEADER:
        raise ValueError(f"header: {len(packed)} bytes; must be at most {MAX_HEADER}")
    stream.sendall(_PREFIX.pack(len(packed), at) + packed)
    for data in bodies:
        if data.nbytes:
            stream.sendall(data.reshape(-1).data.cast("B"))


def _is_size(n: Any) -> bool:
    return type(n) is int and 0 <= n


def _refuse_ext(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _fill(stream: socket.socket, data: memoryview, optional: bool = False) -> bool:
    """Reads as many bytes as there is room for; False where the stream ends before the first and optional says so."""
    got = 0
    while got < len(data):
        k = stream.recv_into(data[got:])
        if k == 0:
            if optional and got == 0:
                return False
            raise FrameError(f"the stream ended after {got} of {len(data)} bytes")
        got += k
    return True
