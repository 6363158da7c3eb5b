"""The files of samples: images, videos, sounds, and what they were conditioned on."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..data.events import AnyEvent, EventError, medium


class Files:
    """What a Client reads of the files of samples; blob is its own."""

    blob: Callable[[AnyEvent], Awaitable[bytes]]  # of the Client

    async def medium(self, trajectory: AnyEvent, kind: str = "image") -> bytes:
        """Returns a file of a sample by its kind: its image, a PNG; its video, an animated PNG whose middle
        frame is the image; its audio, a WAV (see pixels, frames, sound)."""
        if stored := medium(trajectory, kind):
            return stored["data"] if stored.get("data") else await self.blob(stored["ref"])
        has = ", ".join(m["kind"] for m in trajectory.get("media") or ())
        why = f"it has {has}" if has else f"it {trajectory['stop_reason']}"
        raise EventError(f"sample {trajectory['sample_index']} has no {kind}: {why}")

    async def conditions(self, trajectory: AnyEvent) -> list[tuple[str, npt.NDArray[np.uint8]]]:
        """Returns what a sample was conditioned on: names and pixels, [height, width, 3] uint8, of a video those of
        its first frame. Of several of one name the second is NAME.1. Needs Pillow: meander-rl[images]."""
        out: list[tuple[str, npt.NDArray[np.uint8]]] = []
        seen: dict[str, int] = {}
        for c in trajectory.get("conditions") or ():
            n = seen[c["name"]] = seen.get(c["name"], -1) + 1
            with _opened(await self.blob(c["ref"])) as file:
                out.append((f"{c['name']}.{n}" if n else c["name"], np.asarray(file.convert("RGB"))))
        return out

    async def pixels(self, trajectory: AnyEvent) -> npt.NDArray[np.uint8]:
        """Returns the image of a sample, [height, width, 3] uint8, checked against its digest; of a video the frame in
        the middle. Needs Pillow: meander-rl[images]."""
        return _decoded(await self.medium(trajectory), trajectory, medium(trajectory, "image") or {})[0]

    async def frames(self, trajectory: AnyEvent) -> npt.NDArray[np.uint8]:
        """Returns all frames of a sample, [frames, height, width, 3] uint8, checked against their digest; an image has
        one. Needs Pillow: meander-rl[images]."""
        if video := medium(trajectory, "video"):
            return _decoded(await self.medium(trajectory, "video"), trajectory, video)
        return (await self.pixels(trajectory))[None]

    async def sound(self, trajectory: AnyEvent) -> tuple[npt.NDArray[np.float32], int]:
        """Returns the sound of a sample, [samples, channels] float32, checked against its digest, and its rate in
        Hz."""
        file, stored = await self.medium(trajectory, "audio"), medium(trajectory, "audio") or {}
        size = 4 * stored["samples"] * stored["channels"]
        if hashlib.sha256(file[-size:]).hexdigest() != stored["digest"]:
            what = f"the audio of {trajectory['uid']} #{trajectory['sample_index']}"
            raise EventError(f"{what} has other samples than its digest says")
        return np.frombuffer(file[-size:], "<f4").reshape(stored["samples"], stored["channels"]), stored["rate"]


def _opened(data: bytes) -> Any:
    """A PNG file as an image of Pillow, of which no pixel is decoded yet."""
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("to decode images, install Pillow: pip install 'meander-rl[images]'") from None
    return Image.open(io.BytesIO(data), formats=["PNG"])


def _decoded(data: bytes, trajectory: AnyEvent, stored: AnyEvent) -> npt.NDArray[np.uint8]:
    """The frames in a PNG file, [frames, height, width, 3] uint8. EventError: the event says others."""
    count = stored.get("frames") or 1
    what = f"the {stored['kind']} of {trajectory['uid']} #{trajectory['sample_index']}"
    with _opened(data) as file:
        got = (getattr(file, "n_frames", 1), *file.size)
        if got != (count, stored["width"], stored["height"]):  # before a pixel is decoded
            raise EventError(f"{what} has {got[0]} frames of {got[1]}x{got[2]} pixels, not those that the event says")
        out = np.empty((count, stored["height"], stored["width"], 3), np.uint8)
        for i in range(count):
            file.seek(i)
            out[i] = np.asarray(file.convert("RGB"))
    if hashlib.sha256(out.tobytes()).hexdigest() != stored["digest"]:
        raise EventError(f"{what} has other pixels than its digest says")
    return out
