"""Stored messages of samples in a folder, for several epochs, restarts and the processes of one machine."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgpack
from blake3 import blake3

from ..data.events import AnyEvent
from .bulk import Stored

_SUM = 32  # bytes of the BLAKE3 of a file's content, which it begins with


class Cache:
    """A file for the events of each sample, named by the digests that its trajectory gives them. What is read of it is
    checked as what a server gives; a file that is damaged is as one that is not there.

    folder is made; processes may share it. size: bytes of the files at most; those that were used longest ago go first.
    """

    def __init__(self, folder: str | os.PathLike[str], size: int):
        """ValueError: size is not positive."""
        if size <= 0:
            raise ValueError(f"cache_bytes: {size}; must be at least 1")
        self.folder, self.size = Path(folder), size
        self.folder.mkdir(parents=True, exist_ok=True)
        self.hits = self.misses = 0
        """Samples that were read from files, and that were not."""
        self._held = sum(size for _, size, _ in self._files())

    def _files(self) -> list[tuple[float, int, Path]]:
        """When each file was used last, its size, and its path."""
        out = []
        for file in self.folder.glob("*.steps"):
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                of = file.stat()
                out.append((of.st_mtime, of.st_size, file))
        return out

    def _file(self, trajectory: AnyEvent) -> Path:
        named = "".join(f"{ref['seq']} {ref['digest']}\n" for ref in trajectory["steps"])
        return self.folder / f"{blake3(named.encode()).hexdigest()}.steps"

    def get(self, trajectory: AnyEvent) -> list[Stored]:
        """The messages of a sample's events and of their parts; none where there is no such file."""
        file = self._file(trajectory)
        try:
            with open(file, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
                with memoryview(data) as whole, whole[_SUM:] as content:
                    if blake3(content).digest() != whole[:_SUM]:
                        raise ValueError("damaged")
                    out = [Stored(*m) for m in msgpack.unpackb(content, raw=False)]
            os.utime(file)
        except (OSError, ValueError):
            self.misses += 1
            return []
        self.hits += 1
        return out

    def put(self, trajectory: AnyEvent, messages: Iterable[Stored]) -> None:
        """Keeps the messages of a sample, which were checked. OSError: the folder cannot be written."""
        content = msgpack.packb([tuple(m) for m in messages])
        if _SUM + len(content) > self.size:
            return
        file = self._file(trajectory)
        part = file.with_suffix(f".{secrets.token_hex(4)}")
        try:
            with open(part, "wb") as f:
                f.write(blake3(content).digest())
                f.write(content)
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
        self._held += _SUM + len(content)
        if self._held > self.size:
            self._shrink()

    def _shrink(self) -> None:
        files = sorted(self._files())
        self._held = sum(size for _, size, _ in files)
        for _, size, file in files:
            if self._held <= self.size:
                break
            file.unlink(missing_ok=True)
            self._held -= size
