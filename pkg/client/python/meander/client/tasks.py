"""Several calls side by side, and calls that are made again while the server is away."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from nats import errors
from nats.js.errors import NoStreamResponseError, ServiceUnavailableError

_log = logging.getLogger("meander")

_T = TypeVar("_T")

PATIENCE = 120
"""Seconds that the server may be away while something is read or acknowledged."""

SAY = 30.0
"""Seconds after which a wait says what it is for."""

_AWAY = (
    errors.TimeoutError, errors.NoRespondersError, errors.StaleConnectionError, errors.OutboundBufferLimitError,
    errors.ConnectionReconnectingError, NoStreamResponseError, ServiceUnavailableError, ConnectionError,
)  # fmt: skip


def means_away(e: Exception) -> bool:
    """Whether an error says that the server did not answer, or is not ready; not that it refused."""
    if isinstance(e, _AWAY):
        return True
    return isinstance(e, (TimeoutError, asyncio.TimeoutError)) and not str(e)  # ours say what was waited for


async def retry_while_away(call: Callable[[], Awaitable[_T]], timeout: float) -> _T:
    """Returns what the call returns. While the server is away it is made again, until timeout seconds after it failed
    first; so it must be one that can be made twice."""
    end, pause = 0.0, 0.1
    while True:
        try:
            return await call()
        except Exception as e:
            now = time.monotonic()
            if not end:
                end = now + timeout
            if not means_away(e) or now + pause > end:
                raise
            why = str(e) or type(e).__name__
            _log.warning("NATS does not answer (%s); asking again, for %.0f s at most", why, end - now)
        await asyncio.sleep(pause)
        pause = min(2 * pause, 5)


class Wait:
    """A wait that says each half minute what it is for, by text(seconds it took so far), and ends after so many seconds
    (0: never) with a TimeoutError that says it."""

    def __init__(self, seconds: float, text: Callable[[float], Awaitable[str]]):
        self.seconds, self.text = seconds, text
        self.began = self.said = time.monotonic()

    async def check(self) -> None:
        """TimeoutError: the time is over."""
        now = time.monotonic()
        if self.seconds and now - self.began > self.seconds:
            raise TimeoutError(await self.text(self.seconds))
        if now - self.said > SAY:
            self.said = now
            _log.warning("%s", await self.text(now - self.began))


async def maybe_awaited(out: Any) -> Any:
    """What a function of a user gave; where it is async, what it gives when it is awaited."""
    return await out if inspect.isawaitable(out) else out


def check_cancelled() -> None:
    """Raises CancelledError where this task was cancelled and has not noticed: before Python 3.12, asyncio.wait_for
    forgets a cancellation that comes together with its result."""
    task = asyncio.current_task()
    if task is not None and getattr(task, "cancelling", int)():
        raise asyncio.CancelledError


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
