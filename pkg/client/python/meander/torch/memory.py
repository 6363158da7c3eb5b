"""How much memory of the machine is free, so that a worker refuses what does not fit: the kernel kills it otherwise."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that a process can still take, of the machine and of each of its cgroups; None where Linux does not say.

    What the kernel keeps of files counts as free: it gives that back first. So does what the C library keeps of freed
    memory, which this gives back to the kernel. root is where proc and sys are.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # not of glibc
        pass
    free = [v for k, v in _table(root / "proc/meminfo") if k == "MemAvailable:"]
    return min([1024 * v for v in free] + list(_free_of_cgroups(root)), default=None)


def size(n: int) -> str:
    """A number of bytes for people."""
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def _free_of_cgroups(root: Path) -> Iterator[int]:
    """What the limits of the process's cgroups leave, of version 2 and 1; those without a limit say nothing."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            mount, names, caches = "sys/fs/cgroup", ("memory.max", "memory.current"), ("inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            mount = "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            caches = ("total_inactive_file", "total_active_file")
        else:
            continue
        of = PurePosixPath(path.lstrip("/"))  # of a container it may be the host's, which is not there
        for place in (of, *of.parents):
            limit, used = (_text(root / mount / place / name).strip() for name in names)
            if limit.isdigit() and used.isdigit():
                kept = sum(v for k, v in _table(root / mount / place / "memory.stat") if k in caches)
                yield max(0, int(limit) - int(used) + kept)


def _table(file: Path) -> list[tuple[str, int]]:
    """Names and numbers of a file with one of each in a line."""
    rows = (line.split() for line in _text(file).splitlines())
    return [(r[0], int(r[1])) for r in rows if len(r) > 1 and r[1].isdigit()]


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
