"""Files that a pipeline is given besides texts: paths, bytes, images of Pillow and arrays, as PNG files."""

from __future__ import annotations

import asyncio
import io
import os
import struct
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..data.events import Event
from .tasks import means_away, retry_while_away

if TYPE_CHECKING:
    from .client import Client

_PNG = b"\x89PNG\r\n\x1a\n"
_EXACT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # modes of 8 bits


def png_of(value: Any) -> bytes:
    """A condition as a PNG file; one of several frames is an animated PNG.

    value is the path of a file or its bytes, an image of Pillow, or an array: uint8, or float 0 to 1, of [height,
    width], [height, width, 3] or [frames, height, width, 3]. A file that is turned by EXIF is turned as diffusers'
    load_image does; alpha is dropped. What has more than 8 bits is a ValueError.
    """
    if isinstance(value, (str, os.PathLike)):
        value = Path(value).read_bytes()
    if isinstance(value, (bytes, bytearray, memoryview)):
        value = bytes(value)
        if value.startswith(_PNG) and b"eXIf" not in value:
            return bytes(value)  # intake reads it
    if not isinstance(value, bytes) and not hasattr(value, "convert"):
        return _encoded(_frames(value))
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ImportError("to give images that are no PNG files, install Pillow: pip install 'meander-rl[images]'"
            ) from None
    if isinstance(value, bytes):
        with Image.open(io.BytesIO(value)) as file:
            if file.format == "PNG" and file.getexif().get(0x0112, 1) == 1:
                return value
            if getattr(file, "n_frames", 1) > 1:
                raise ValueError(f"an animated {file.format}; must be an animated PNG, or an array of its frames")
            value = ImageOps.exif_transpose(file)
    if value.mode not in _EXACT:
        raise ValueError(f"an image of mode {value.mode}; must have 8 bits for each colour: convert it")
    return _encoded(np.asarray(value.convert("RGB"))[None])


def _frames(value: Any) -> npt.NDArray[np.uint8]:
    """The frames of an array, uint8 [frames, height, width, 3]."""
    x = np.asarray(value)
    if x.dtype.kind == "f":
        if not (x.size and np.isfinite(x).all() and x.min() >= 0 and x.max() <= 1):
            raise ValueError("an array of floats; must be 0 to 1")
        x = (x * 255).round().astype(np.uint8)
    if x.dtype == np.bool_:
        x = x.astype(np.uint8) * np.uint8(255)
    if x.dtype != np.uint8 or x.ndim not in (2, 3, 4) or x.ndim > 2 and x.shape[-1] != 3 or x.size == 0:
        raise ValueError(f"an array of {x.dtype} {list(x.shape)}; must be uint8 or floats of [height, width], "
            "[height, width, 3] or [frames, height, width, 3]")
    if x.ndim == 2:
        x = np.repeat(x[:, :, None], 3, axis=2)
    return x if x.ndim == 4 else x[None]


def _encoded(frames: npt.NDArray[np.uint8]) -> bytes:
    """Frames [frames, height, width, 3] as a PNG file: of several, an animated one whose frames are whole."""
    count, height, width = frames.shape[:3]

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    out, number = _PNG + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), 0
    if count > 1:
        out += chunk(b"acTL", struct.pack(">II", count, 0))
    for i, frame in enumerate(frames):
        rows = np.concatenate([np.zeros((height, 1), np.uint8), frame.reshape(height, -1)], axis=1)
        pixels = zlib.compress(rows.tobytes(), 1)
        if count > 1:
            out += chunk(b"fcTL", struct.pack(">IIIIIHHBB", number, width, height, 0, 0, 1, 8, 0, 0))
            number += 1
        if i == 0:
            out += chunk(b"IDAT", pixels)
        else:
            out += chunk(b"fdAT", struct.pack(">I", number) + pixels)
            number += 1
    return out + chunk(b"IEND", b"")


async def stored(client: Client, conditions: Mapping[str, Any], timeout: float) -> list[Event]:
    """Stores conditions by their names, and returns them as a prompt has them. Several of one name are a list. Waits
    for a server that is away, and for the store of a pipeline that has just started."""
    from .policy import put_blob

    out: list[Event] = []
    for name, given in sorted(conditions.items()):
        for value in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(value, Mapping):  # a reference
                out.append({"name": name, "ref": dict(value)})
                continue
            try:
                data = await asyncio.to_thread(png_of, value)
            except (ValueError, OSError) as fault:
                raise ValueError(f"conditions: {name}: {fault}") from fault
            try:
                ref = await retry_while_away(partial(put_blob, client, data), timeout)
            except Exception as e:
                if not means_away(e):
                    raise
                raise TimeoutError(
                    f"conditions: {name}: not stored: the server has no store of files; is a pipeline up?"
                ) from None
            out.append({"name": name, "ref": ref})
    return out


def texts(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Arguments of a pipeline as a prompt has them: numbers, texts and truth values as texts. ValueError: another."""
    out = {}
    for name, value in arguments.items():
        if isinstance(value, np.generic):
            value = value.item()
        if not isinstance(value, (bool, int, float, str)):
            raise ValueError(f"arguments: {name}: {value!r}; must be a number, a text, true or false")
        out[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return out
