"""Samples of a prompt in an exact number, for trainers that ask and wait."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import nats

from ..data.batch import Sample
from .client import Client
from .control import status_text
from .cursor import Cursor, results
from ..data.events import ADVANTAGE, EventError, fitting
from .tasks import SAY, retry_while_away
from ..data.text import Text

_log = logging.getLogger("meander")

_R = TypeVar("_R")
_FINAL = ("cancelled", "refused")  # statuses of groups that would come out the same again
_OTHER_SEED = 1_000_003  # added to the seed of a group that is asked for again


async def retried(ask: Callable[[], Awaitable[_R]], timeout: float) -> _R:
    """What ask gives; while the server is away or slow, it is asked again, for timeout seconds in all."""
    return await asyncio.wait_for(retry_while_away(ask, timeout), timeout)


class Unanswered(RuntimeError):
    """The pipeline did not make the samples that were asked for."""


class Asker:
    """Publishes prompts in a run, and waits for their samples; many at once. To be used on one event loop.

    A sample that failed, and a group that counts for nothing, is asked for again as a group of its own, with another
    seed, in at most `attempts` groups. timeout: seconds in which no group closes; a slow lane may take longer for all.
    """

    def __init__(self, client: Client, run: str, *, attempts: int = 3, timeout: float = 600):
        if attempts < 1:
            raise ValueError(f"attempts: {attempts}; must be at least 1")
        self.client, self.run, self.attempts, self.timeout = client, run, attempts, timeout
        self.again = 0  # samples that were asked for again
        self._closed_at = 0.0  # when a group closed last, by the monotonic clock
        self._mark, self._count = secrets.token_hex(4), itertools.count()
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._reads: asyncio.Task[None] | None = None

    async def samples(
        self, prompt: str | list[dict[str, str]], count: int, fields: Mapping[str, Any], *, whole: bool = False
    ) -> list[Sample]:
        """Returns `count` samples of a prompt, a text or a conversation, each with a reward. fields are those of a
        Prompt. whole: they are of one group, each with an advantage in it; a group that lacks one is asked for again.

        Unanswered: samples failed in every attempt, or the group was cancelled. Refused: intake takes the prompt for
        none. TimeoutError: no group closed in time; this one is cancelled.
        """
        text, asked = ("", {"messages": prompt}) if isinstance(prompt, list) else (prompt, {})
        found, why = list[Sample](), ""
        for attempt in range(self.attempts):
            found = [] if whole else found
            more = {**fields, **asked, "group_size": count - len(found)}
            if attempt:
                self.again += count - len(found)
                more |= {"seed": fields["seed"] + attempt * _OTHER_SEED} if "seed" in fields else {}
            event = await self._closed(text, more)
            status = event["status"]
            if status in _FINAL:
                raise Unanswered(f"run {self.run}: a group is {status}: {event.get('error') or 'no reason given'}")
            read = partial(self.client.group, self.run, event["uid"], event)
            group = await retried(read, self.timeout)
            if status not in ("mixed", "stale"):
                found += [
                    s for s in group.samples if s.trajectory is not None and s.member["reward"] is not None
                    and not (whole and s.advantage is None)
                ]  # fmt: skip
            if len(found) == count:
                return found
            members = [str(m["error"]) for m in event["members"] if m.get("error")]
            why = next(iter(members), "") or event.get("error") or status
        raise Unanswered(f"run {self.run}: {count - len(found)} of {count} samples failed {self.attempts} times: {why}")

    async def _closed(self, text: str, fields: Mapping[str, Any]) -> Any:
        """Publishes a group, and returns its result."""
        if self._reads is None or self._reads.done():
            self._reads = asyncio.create_task(self._read())
        uid = f"{self._mark}-{next(self._count)}"
        outcome = self._waiting[uid] = asyncio.get_running_loop().create_future()
        try:
            await self.client.publish(self.run, text, timeout=self.timeout, **{**fields, "uid": uid})
            began = time.monotonic()
            while (left := max(began, self._closed_at) + self.timeout - time.monotonic()) > 0:
                if (await asyncio.wait({outcome}, timeout=min(left, SAY)))[0]:
                    return outcome.result()
                if left > SAY:
                    passed = time.monotonic() - began
                    _log.warning("run %s: waits for a group for %.0f s; %s", self.run, passed, await self._state())
            raise asyncio.TimeoutError
        except (TimeoutError, asyncio.TimeoutError):
            state = await self._state()
            with contextlib.suppress(ValueError, TimeoutError, nats.errors.Error):  # state says what is wrong
                await self.client.cancel(self.run, uid, reason=f"no group has closed in {self.timeout:g} s")
            raise TimeoutError(f"run {self.run}: no group has closed in {self.timeout:g} s; {state}") from None
        finally:
            self._waiting.pop(uid, None)

    async def _state(self) -> str:
        try:
            return status_text(await self.client.status(self.run, timeout=2))
        except (ValueError, TimeoutError, nats.errors.Error) as e:
            return f"no word of how the run is doing: {str(e) or type(e).__name__}"

    async def _read(self) -> None:
        """Hands the results of the run to those who wait for them; an error goes to all of them."""
        cursor = Cursor(self.client.nc, self.run, "", results(self.run, "advantage"))
        try:
            while True:
                if (m := await cursor.next()) is None:
                    continue
                try:
                    event = fitting(m.data, ADVANTAGE, m.subject, "run", "uid")
                except EventError:
                    continue  # whatever a stranger stored: its true event comes
                outcome = self._waiting.get(event["uid"])
                self._closed_at = time.monotonic()
                if outcome is not None and not outcome.done():
                    outcome.set_result(event)
                await cursor.done(m.metadata.sequence.stream)
        except Exception as e:
            for outcome in self._waiting.values():
                if not outcome.done():
                    outcome.set_exception(e)
        finally:
            await cursor.close()

    async def close(self) -> None:
        """Ends the reading."""
        if self._reads is not None:
            self._reads.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reads


def written(sample: Sample) -> Text:
    """The text of a sample. Unanswered: it is an image."""
    if sample.text is None:
        raise Unanswered(f"sample {sample.member['sample_index']}: an image; the lane must serve a language model")
    return sample.text


def drawn_log_probs(text: Text) -> list[float]:
    """The log-probs, in nats, that the tokens behind the prompt were drawn with, 0 where they were given.

    Unanswered: the server that drew them gave none of that kind.
    """
    plain = (
        text.settings["temperature"] == 1
        and not text.settings["top_k"]
        and text.settings["top_p"] == 1
        and not text.settings["min_p"]
    )
    numbers = text.numbers.get("processed_log_probs")
    if numbers is None and plain:
        numbers = text.numbers.get("log_probs")
    if numbers is None:
        raise Unanswered(
            "no log-probs of what the tokens were drawn with: the server gives none; set temperature 1 and no filters"
        )
    if text.unscored:
        raise Unanswered(f"no log-probs of {text.unscored} tokens: the server gave none; draw them again")
    return [float(x) for x in numbers[text.prompt_length :]]
