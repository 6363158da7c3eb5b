"""The event loop in the background that calls without asyncio run on: one thread of each process."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

_R = TypeVar("_R")

_PATIENCE = 10.0  # seconds for a call that is interrupted to come to its end


class LoopThread:
    """An event loop in a daemon thread, for the calls of one process. A fork does not take the thread along."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._ends = False
        self._thread = threading.Thread(target=self._serve, name="meander", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._ends:
            with contextlib.suppress(BaseException):  # SystemExit in a callback of a user ends its call, not the loop
                self.loop.run_forever()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())  # connections that nobody closed
        self.loop.close()

    @property
    def ours(self) -> bool:
        """Whether this process started the thread."""
        return self.pid == os.getpid()

    def stop(self) -> None:
        """Cancels what still runs, and ends the thread."""
        if not self.ours or self._ends:
            return
        self._ends = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_PATIENCE)

    def run(self, call: Coroutine[Any, Any, _R]) -> _R:
        """Runs a coroutine to its end and returns what it returns, or raises what it raises.

        An exception in the calling thread, such as KeyboardInterrupt, cancels the coroutine and is raised when that has
        ended.

        RuntimeError: the calling thread runs an event loop, which would stand still; or the process is a fork of the
        one that made the connection.
        """
        if why := self._hindrance():
            call.close()
            raise RuntimeError(why)
        outcome: concurrent.futures.Future[_R] = concurrent.futures.Future()
        started: list[asyncio.Task[_R]] = []

        def pass_on(task: asyncio.Task[_R]) -> None:
            if task.cancelled():
                outcome.set_exception(concurrent.futures.CancelledError())
            elif (error := task.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

        def start() -> None:
            started.append(self.loop.create_task(call))
            started[0].add_done_callback(pass_on)

        def cancel() -> None:
            if started:
                started[0].cancel()
            else:  # interrupted before it was handed over
                call.close()
                outcome.cancel()

        try:
            self.loop.call_soon_threadsafe(start)
            return outcome.result()
        except BaseException:
            if not outcome.done():
                self.loop.call_soon_threadsafe(cancel)
                concurrent.futures.wait([outcome], _PATIENCE)
            raise

    def finish(self, call: Coroutine[Any, Any, None]) -> None:
        """Runs what cleans up. Where nobody can wait for it, as in the garbage collector on the loop's own thread, it
        is begun; a fork leaves it to its parent."""
        if not self.ours or self._ends:
            call.close()
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.run(call)
        else:
            self.loop.call_soon_threadsafe(self.loop.create_task, call)

    def _hindrance(self) -> str:
        """Why no call can be made from here; empty if it can."""
        if not self.ours:
            return f"the connection is of process {self.pid}, of which this one is a fork: connect again in this one"
        if self._ends:
            return "the program is ending: its connections are closed"
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return ""
        return "inside a running event loop, which would stand still: await meander.connect instead, in a notebook too"


_current: LoopThread | None = None
_lock = threading.Lock()
_foreign: list[LoopThread] = []  # of the parent: kept, so that nothing closes what they share with it


def background() -> LoopThread:
    """The thread of this process; the first call starts it."""
    global _current
    with _lock:
        if _current is None or _current._ends:
            _current = LoopThread()
        return _current


def _forget() -> None:
    """Begins without the parent's thread and lock behind a fork."""
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _foreign.append(_current)
        _current = None


os.register_at_fork(after_in_child=_forget)
