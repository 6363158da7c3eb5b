"""Verdicts: rewards that are given from outside."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import msgpack
from nats.js import JetStreamContext
from nats.js.errors import APIError, NotFoundError

from ..data.events import PREFIX, EventError, decode, name_of

_REFUSED = 10077  # the server's error for a subject that is taken, and for a full stream


class Judged(ValueError):
    """The sample already has another verdict of that name. The first verdict counts."""


class Verdicts:
    """What a Client gives and reads of verdicts; js is its JetStream."""

    js: JetStreamContext

    async def verdict(
        self, run: str, uid: str, sample_index: int, value: float | None, name: str = "external", error: str = "",
        comment: str = "", author: str = "", timeout: float = 10
    ) -> None:
        """Gives a reward from outside: of the reward function external (name external) or external:NAME (name NAME).

        Without a value, error says why there is none. A malformed verdict raises ValueError. The first verdict of a
        sample and name counts: another raises Judged, the same once more is no error. One that is stored and malformed
        does not count; the reward service takes it away, which is waited for up to timeout seconds.
        """
        event = {
            "v": 1, "run": run, "uid": uid, "sample_index": sample_index, "name": name, "value": value,
            "at": time.time_ns()
        }
        for key, text in (("error", error), ("comment", comment), ("author", author)):
            if text:
                event[key] = text
        if value is not None:
            event["value"] = float(value)
        if fault := verdict_fault(event):
            raise ValueError(fault)
        subject = f"{PREFIX}verdict.{run}.{uid}.{sample_index}.{name}"
        late = time.monotonic() + timeout
        while True:
            try:
                # Without a message id: the subject keeps one verdict, and says so by an error.
                await self.js.publish(
                    subject, msgpack.packb(event),
                    headers={"Mdr-Type": "verdict/1", "Content-Type": "application/msgpack"}
                )
                return
            except APIError as e:
                if e.err_code != _REFUSED:
                    raise
                first = await self._verdict(subject, e)
            if first is not None:
                if (first.get("value"), first.get("error", "")) == (event["value"], error):
                    return
                raise Judged(
                    f"the sample has a verdict already: "
                    f"{first.get('error') if first.get('value') is None else first['value']}"
                )
            if time.monotonic() > late:
                raise TimeoutError(f"{subject} holds a malformed verdict, and no reward service takes it away")
            await asyncio.sleep(0.05)

    async def _verdict(self, subject: str, refusal: APIError) -> dict[str, Any] | None:
        """Returns the verdict on a subject; None if it is malformed, or gone."""
        try:
            m = await self.js.get_last_msg("MDR_VERDICTS", subject)
        except NotFoundError:
            if "per subject" in (refusal.description or ""):
                return None
            raise refusal from None  # the stream is full
        try:
            first = decode(m.data or b"")
        except EventError:
            return None
        named = [str(first.get(field)) for field in ("run", "uid", "sample_index", "name")]
        return None if verdict_fault(first) or subject != f"{PREFIX}verdict." + ".".join(named) else first


def verdict_fault(event: dict[str, Any]) -> str:
    """Says what is wrong with a verdict, by the rules of its schema; empty if nothing is."""
    for field in ("run", "uid", "name"):
        try:
            name_of(field, event.get(field))
        except ValueError as fault:
            return str(fault)
    index, value, error = event.get("sample_index"), event.get("value"), event.get("error", "")
    if type(index) is not int or not 0 <= index < 1024:
        return f"sample_index: {index!r}; must be between 0 and 1023"
    if value is None and not error:
        return "error: ''; must say why there is no value"
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
        return f"value: {value!r}; must be a finite number"
    if value is not None and error:
        return f"error: {error!r}; must be empty when there is a value"
    for field, most in (("error", 4096), ("comment", 4096), ("author", 256)):
        text = event.get(field, "")
        if not isinstance(text, str) or len(text.encode()) > most:
            return f"{field}: must be at most {most} bytes of UTF-8"
    return ""
