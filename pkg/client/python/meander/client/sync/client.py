"""The client with calls that wait."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from .. import client as aio
from .. import control
from ...data.batch import Batch, Group
from ...data.events import Event
from ..reader import Batches, Groups, Health
from ..media import Files
from ..teacher import Teachers
from ..updates import Updates
from ..verdicts import Verdicts
from .thread import LoopThread, background

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
_S = TypeVar("_S", bound=control.Controls | Files | Teachers | Updates | Verdicts)


class Stream(Generic[_T]):
    """What an asynchronous iterator yields, as an iterator. close() ends it; so does the end of the connection.

    An exception while it waits, such as KeyboardInterrupt, ends it too: what may have come meanwhile was not handed
    over, so it is not acknowledged, and comes to a later reader of the name.
    """

    def __init__(self, thread: LoopThread, source: AsyncIterator[_T]):
        self._thread, self._source, self._ended = thread, source, ""

    def __iter__(self) -> Iterator[_T]:
        return self

    def __next__(self) -> _T:
        if self._ended:
            raise RuntimeError(f"the stream {self._ended}: read on with a new one")
        try:
            return self._thread.run(_item(self._source))
        except StopAsyncIteration:
            raise StopIteration from None
        except Exception:
            raise
        except BaseException:
            with contextlib.suppress(Exception):  # the interrupt is what the caller must see
                self.close("was interrupted")
            raise

    def close(self, why: str = "is closed") -> None:
        """Ends the reading; what was not acknowledged comes again."""
        if not self._ended:
            self._ended = why
            self._thread.finish(_end(self._source))


async def _item(source: AsyncIterator[_T]) -> _T:
    return await anext(source)


async def _end(source: AsyncIterator[Any]) -> None:
    if (close := getattr(source, "aclose", None)) is not None:
        await close()


class Reader(Stream[_T]):
    """Groups or batches. Iterating on, or done(), acknowledges the one before."""

    def __init__(self, thread: LoopThread, reader: Groups | Batches):
        self._reader: Any = reader
        super().__init__(thread, reader.__aiter__())  # type: ignore[arg-type]

    def __next__(self) -> _T:
        item = super().__next__()
        if isinstance(item, Batch):
            item.thread = self._thread
        return item

    @property
    def health(self) -> Health:
        """What it has seen."""
        return self._reader.health

    def done(self, item: _T) -> None:
        """Acknowledges the group or batch and those before: it does not come again."""
        self._thread.run(self._reader.done(item))


def _like(of: Callable[..., Any], returns: Any = None) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Gives a function the name, docstring and arguments of another one, and says what it returns; None: the same."""

    def wrap(call: Callable[_P, _R]) -> Callable[_P, _R]:
        functools.update_wrapper(call, of)
        del call.__wrapped__  # type: ignore[attr-defined]  # which is taken for the function itself, with its async
        signature = inspect.signature(of)
        if returns is not None:
            signature = signature.replace(return_annotation=returns)
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return wrap


def waiting(of: Callable[Concatenate[_S, _P], Coroutine[Any, Any, _R]]) -> Callable[Concatenate[Client, _P], _R]:
    """The method, or function of a client, that waits for that of the asynchronous client."""

    @_like(of)
    def call(self: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return self.thread.run(of(self.asynchronous, *args, **kwargs))  # type: ignore[arg-type]

    return call


def _streaming(
    of: Callable[Concatenate[aio.Client, _P], AsyncIterator[_T]],
) -> Callable[Concatenate[Client, _P], Stream[_T]]:
    """The method that iterates over what a method of the asynchronous client yields."""

    @_like(of, Stream)
    def call(self: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> Stream[_T]:
        return Stream(self.thread, of(self.asynchronous, *args, **kwargs))

    return call


def _groups(of: Callable[Concatenate[aio.Client, _P], Groups]) -> Callable[Concatenate[Client, _P], Reader[Group]]:
    @_like(of, Reader[Group])
    def call(self: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> Reader[Group]:
        return Reader(self.thread, of(self.asynchronous, *args, **kwargs))

    return call


def _batches(of: Callable[Concatenate[aio.Client, _P], Batches]) -> Callable[Concatenate[Client, _P], Reader[Batch]]:
    @_like(of, Reader[Batch])
    def call(self: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> Reader[Batch]:
        return Reader(self.thread, of(self.asynchronous, *args, **kwargs))

    return call


class Client:
    """The calls of meander.Client, with the same names, arguments and errors. Each waits for its end; threads may call
    side by side.

    asynchronous is the client that does the work; its coroutines run by thread.run alone.
    """

    def __init__(self, thread: LoopThread, asynchronous: aio.Client):
        self.thread, self.asynchronous = thread, asynchronous

    publish = waiting(aio.Client.publish)
    verdict = waiting(aio.Client.verdict)
    interact = waiting(aio.Client.interact)
    update = waiting(Updates.update)

    advantages = _streaming(aio.Client.advantages)
    batch_events = _streaming(aio.Client.batch_events)
    updates = _streaming(aio.Client.updates)
    stream_trajectories = _streaming(aio.Client.stream_trajectories)
    steps = _streaming(aio.Client.steps)
    tokens = _streaming(aio.Client.tokens)
    stream_groups = _groups(aio.Client.stream_groups)
    batches = _batches(aio.Client.batches)

    group = waiting(aio.Client.group)
    complete = waiting(aio.Client.complete)
    text = waiting(aio.Client.text)
    load = waiting(aio.Client.load)
    blob = waiting(aio.Client.blob)
    medium = waiting(aio.Client.medium)
    conditions = waiting(aio.Client.conditions)
    pixels = waiting(aio.Client.pixels)
    frames = waiting(aio.Client.frames)
    sound = waiting(aio.Client.sound)
    teacher_reply = waiting(aio.Client.teacher_reply)
    teacher_replies = waiting(aio.Client.teacher_replies)
    teacher_log_probs = waiting(aio.Client.teacher_log_probs)
    teacher_velocities = waiting(aio.Client.teacher_velocities)

    pause = waiting(control.Controls.pause)
    resume = waiting(control.Controls.resume)
    cancel = waiting(control.Controls.cancel)
    prune = waiting(control.Controls.prune)
    status = waiting(control.Controls.status)
    obeyed = waiting(control.Controls.obeyed)
    samplers = waiting(control.Controls.samplers)


def _connecting(
    of: Callable[_P, contextlib.AbstractAsyncContextManager[aio.Client]],
) -> Callable[_P, contextlib.AbstractContextManager[Client]]:
    @_like(of, contextlib.AbstractContextManager[Client])
    @contextlib.contextmanager
    def connecting(*args: _P.args, **kwargs: _P.kwargs) -> Iterator[Client]:
        thread, connection = background(), of(*args, **kwargs)
        client = Client(thread, thread.run(_enter(connection)))
        try:
            yield client
        finally:
            thread.finish(_leave(connection))

    return connecting


async def _enter(connection: contextlib.AbstractAsyncContextManager[aio.Client]) -> aio.Client:
    return await connection.__aenter__()


async def _leave(connection: contextlib.AbstractAsyncContextManager[aio.Client]) -> None:
    await connection.__aexit__(None, None, None)


connect = _connecting(aio.connect)
