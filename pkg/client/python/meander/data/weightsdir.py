"""Files of weights that go by path: in a folder that is shared with the samplers (their --weights-dir). Files that lie
in it stay where they are; others are copied to a folder of meander's in it, under their digest, for the janitor to
remove."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from .events import Event

_PIECE = 1 << 20  # bytes of a file in memory at once
_MAX_PATH = 1024
_FRESH_EVERY = 20  # seconds after which a push that copies says again that it needs the copies before


Pieces = Callable[[], Iterator["bytes | memoryview"]]
"""What gives the pieces of a file that is made in memory, once."""


def place(folder: str | Path, store: str, files: Iterable[Path | Pieces]) -> list[Event]:
    """Names files for a policy that is stored at once. What is made in memory is hashed as it is written. store names
    the store that it goes to. Files are put in their places when all of them are there; else nothing stays.

    OSError: the folder or a file cannot be read or written. ValueError: a path that no policy can have.
    """
    placing = _Placing(Path(folder).resolve(strict=True), f"meander-{store}")
    try:
        out = [placing.add(file) for file in files]
        placing.finish()
        return out
    finally:
        for part in placing.parts:
            part.unlink(missing_ok=True)


class _Placing:
    """A call of place: files that it has copied under other names, with their places, and those that it needs."""

    def __init__(self, root: Path, own: str):
        self.root, self.own, self.said = root, root / own, time.monotonic()
        self.parts: dict[Path, Path] = {}
        self.copies: list[Path] = []

    def add(self, file: Path | Pieces) -> Event:
        """Names a file. One that must be copied is, under another name."""
        if not isinstance(file, Path):
            digest, size = self._copy(file)
        else:
            digest, size = self._each(_read(file))
            real = file.resolve(strict=True)
            if real.is_relative_to(self.root) and real.parent != self.own:
                return _event(digest, size, real.relative_to(self.root).as_posix())
        target = self.own / f"{digest}.safetensors"
        if not self._has(target, digest):
            if isinstance(file, Path) and self._copy(partial(_read, file)) != (digest, size):
                raise OSError(f"{file}: was changed while it was copied")
            self.parts[next(reversed(self.parts))] = target
        elif not isinstance(file, Path):
            self.parts.popitem()[0].unlink()
        self.copies.append(target)
        return _event(digest, size, target.relative_to(self.root).as_posix())

    def finish(self) -> None:
        """Puts the copies in their places. All may read them: samplers may be other users."""
        while self.parts:
            part, target = next(iter(self.parts.items()))
            part.chmod(0o644)
            part.replace(target)
            del self.parts[part]
        self._keep()

    def _keep(self) -> None:
        """Says that the files are needed: by their times."""
        self.said = time.monotonic()
        for path in (*self.copies, *self.parts):
            with contextlib.suppress(FileNotFoundError):  # it is not in its place yet
                os.utime(path)

    def _each(self, pieces: Iterator[bytes | memoryview], to: BinaryIO | None = None) -> tuple[str, int]:
        """Writes pieces, unless to is None, and returns their SHA-256 and their size."""
        h, size = hashlib.sha256(), 0
        for piece in pieces:
            h.update(piece)
            size += len(piece)
            if to is not None:
                to.write(piece)
            if time.monotonic() - self.said > _FRESH_EVERY:
                self._keep()
        return h.hexdigest(), size

    def _has(self, target: Path, digest: str) -> bool:
        """Whether a whole copy is there; it is said to be needed."""
        try:
            os.utime(target)
            return self._each(_read(target))[0] == digest
        except (FileNotFoundError, PermissionError):
            return False

    def _copy(self, pieces: Pieces) -> tuple[str, int]:
        """Writes a file under another name, and returns its SHA-256 and its size."""
        with contextlib.suppress(FileExistsError):
            self.own.mkdir()
            self.own.chmod(0o755)
        part = self.own / f".part-{uuid.uuid4().hex}"
        self.parts[part] = part
        with part.open("xb") as to:
            of = self._each(pieces(), to)
            to.flush()
            os.fsync(to.fileno())
        return of


def _read(file: Path) -> Iterator[bytes]:
    """The pieces of a file."""
    with file.open("rb") as opened:
        yield from iter(partial(opened.read, _PIECE), b"")


def _event(digest: str, size: int, path: str) -> Event:
    """A file as policies name it. ValueError: a path that none can have."""
    if len(path.encode()) > _MAX_PATH or "\\" in path or not path.isprintable():
        raise ValueError(
            f"{path!r}: must be a path of at most {_MAX_PATH} bytes, without backslashes and control characters"
        )
    return {"digest": digest, "size": size, "path": path}
