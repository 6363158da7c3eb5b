"""Shows a worker in NATS's service discovery: nats micro ls, info and stats."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from typing import Any

from nats.aio.client import Client as NATS
from nats.aio.msg import Msg

from .._version import __version__

_TYPE = "io.nats.micro.v1."


@dataclasses.dataclass
class Work:
    """What a worker has answered: requests, errors and the last_error among them, seconds of work in all."""

    requests: int = 0
    errors: int = 0
    seconds: float = 0.0
    last_error: str = ""

    def done(self, began: float, error: str | None) -> None:
        """Counts an answer whose work began at a time of time.monotonic(), with an error or without."""
        self.requests += 1
        self.seconds += time.monotonic() - began
        if error is not None:
            self.errors, self.last_error = self.errors + 1, error


@contextlib.asynccontextmanager
async def discoverable(nc: NATS, kind: str, name: str, description: str, subject: str) -> AsyncIterator[Work]:
    """Answers service discovery for a worker, the service meander-KIND with an endpoint of its name. A role that may
    not is not seen."""
    work, started = Work(), datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    service = f"meander-{kind}"
    self: dict[str, Any] = {
        "name": service, "id": nc.new_inbox().rsplit(".", 1)[1], "version": __version__,
        "metadata": {"client": "python", "version": __version__},
    }
    endpoint = {"name": name.replace(".", "-"), "subject": subject, "queue_group": name}

    def answer(verb: str) -> dict[str, Any]:
        out: dict[str, Any] = {**self, "type": f"{_TYPE}{verb.lower()}_response"}
        if verb == "INFO":
            out |= {"description": description, "endpoints": [endpoint | {"metadata": {}}]}
        elif verb == "STATS":
            took = int(work.seconds * 1e9)
            counts = {
                "num_requests": work.requests, "num_errors": work.errors, "last_error": work.last_error,
                "processing_time": took, "average_processing_time": took // max(1, work.requests),
            }
            out |= {"started": started, "endpoints": [endpoint | counts]}
        return out

    async def respond(msg: Msg) -> None:
        await msg.respond(json.dumps(answer(msg.subject.split(".")[1])).encode())

    listening = [
        await nc.subscribe(".".join(["$SRV", verb, *of]), cb=respond)
        for verb in ("PING", "INFO", "STATS") for of in ([], [service], [service, self["id"]])
    ]  # fmt: skip
    try:
        yield work
    finally:
        for sub in listening:
            with contextlib.suppress(Exception):  # the connection is gone
                await sub.unsubscribe()
