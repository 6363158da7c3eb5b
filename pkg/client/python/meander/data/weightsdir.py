"""Files of weights that go by path: in a folder that is shared with the samplers (their --weights-dir). Files that lie
in it stay where they are; others are copied to a folder of meander's in it, under their digest, for the janitor to
remove."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .events import Event

_PIECE = 1 << 20  # bytes of a file in memory at once
_MAX_PATH = 1024
_FRESH_EVERY = 20  # seconds after which a push that copies says again that it needs the copies before


def place(folder: str | Path, store: str, files: Sequence[Path | bytes]) -> list[Event]:
    """Names files, or bytes in memory, for a policy that is stored at once. store names the store that it goes to.

    OSError: the folder or a file cannot be read or written. ValueError: a path that no policy can have.
    """
    root, said = Path(folder).resolve(strict=True), time.monotonic()
    copies: list[Path] = []

    def keep(now: bool = False) -> None:
        nonlocal said
        if now or time.monotonic() - said > _FRESH_EVERY:
            said = time.monotonic()
            for copy in copies:
                os.utime(copy)

    out: list[Event] = []
    for file in files:
        digest, size = _each(file, lambda _: keep())
        real = None if isinstance(file, bytes) else file.resolve(strict=True)
        target = root / f"meander-{store}" / f"{digest}.safetensors"
        if real is None or not real.is_relative_to(root) or real.parent == target.parent:
            if not _has(target, digest, lambda _: keep()):
                _copy(file, target, digest, lambda _: keep())
            copies.append(target)
            real = target
        path = real.relative_to(root).as_posix()
        if len(path.encode()) > _MAX_PATH or "\\" in path or not path.isprintable():
            raise ValueError(
                f"{path!r}: must be a path of at most {_MAX_PATH} bytes, without backslashes and control characters"
            )
        out.append({"digest": digest, "size": size, "path": path})
    keep(now=True)
    return out


def _each(file: Path | bytes, each: Callable[[bytes], object]) -> tuple[str, int]:
    """Calls each with every piece of a file, and returns its SHA-256 and its size."""
    h, size = hashlib.sha256(), 0
    with contextlib.ExitStack() as stack:
        if isinstance(file, bytes):
            pieces: Iterator[bytes] = (file[i : i + _PIECE] for i in range(0, len(file), _PIECE))
        else:
            opened = stack.enter_context(file.open("rb"))
            pieces = iter(lambda: opened.read(_PIECE), b"")
        for piece in pieces:
            h.update(piece)
            size += len(piece)
            each(piece)
    return h.hexdigest(), size


def _has(target: Path, digest: str, each: Callable[[bytes], object]) -> bool:
    """Whether a whole copy is there; it is said to be needed."""
    try:
        os.utime(target)
        return _each(target, each)[0] == digest
    except (FileNotFoundError, PermissionError):
        return False


def _copy(file: Path | bytes, target: Path, digest: str, each: Callable[[bytes], object]) -> None:
    """Copies a file, which is then there whole or not at all. All may read it: samplers may be other users."""
    with contextlib.suppress(FileExistsError):
        target.parent.mkdir()
        target.parent.chmod(0o755)
    part = target.with_name(f".part-{uuid.uuid4().hex}")
    try:
        with part.open("xb") as to:
            copied, _ = _each(file, lambda piece: (to.write(piece), each(piece)))
            to.flush()
            os.fsync(to.fileno())
        if copied != digest:
            raise OSError(f"{file!r}: was changed while it was copied")
        part.chmod(0o644)
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
