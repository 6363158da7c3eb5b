"""Several calls side by side, of which the first that fails stops the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


async def together(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """What the calls return, in their order, or the error of the first that fails: the others are stopped by then.

    asyncio.gather leaves them running: the connection closes under them, and each ends with a traceback of its own.
    """
    tasks = [asyncio.ensure_future(c) for c in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
