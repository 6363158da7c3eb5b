"""A lane as trainers of others see it: prompts to it, weights of theirs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..client import policy, sync
from ..client.ask import Asker
from ..client.given import Given, Pair
from ..client.tasks import maybe_awaited, retry_while_away
from ..data.events import Event

_log = logging.getLogger("meander")

Prompt = Any
"""A text, or a conversation: a list of messages with role and content."""

Fields = Mapping[str, Any] | Callable[[Any], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]
"""Fields of a Prompt, such as reward, or a function, which may be async, that says them for a prompt."""


def _refuse_stages(fields: Mapping[str, Any]) -> None:
    if fields.get("stages"):
        names = ", ".join(str(s.get("name")) for s in fields["stages"])
        raise ValueError(
            f"fields.stages: {names}; must be absent: this trainer asks one lane for samples; meander-train --stage "
            f"and client.batches(stage=...) read one stage"
        )


class Lane:
    """A connection to a lane: its weights, and a run to ask in."""

    def __init__(
        self,
        url: str,
        lane: str,
        run: str,
        fields: Fields,
        attempts: int,
        timeout: float,
        connection: Mapping[str, Any],
    ):
        if not callable(fields):
            _refuse_stages(fields)
        self.connection = sync.connect(url, **connection)
        self.client = self.connection.__enter__()
        self.run, self.lane, self.fields = run, lane, fields
        self.asker = Asker(self.client.asynchronous, self.run, attempts=attempts, timeout=timeout)
        self.version = 0

    async def fields_of(self, prompt: Prompt, text: Mapping[str, Any], trainer: str = "") -> dict[str, Any]:
        """What a prompt is published with. text are the settings of the trainer; those of fields go before. trainer
        names one that computes advantages by itself. ValueError: fields ask for others, or for stages."""
        own = dict(await maybe_awaited(self.fields(prompt)) if callable(self.fields) else self.fields)
        if trainer and "advantage" in own:
            raise ValueError(
                f"fields.advantage: {own['advantage']!r}; must be absent: {trainer} computes advantages, "
                f"by its own settings"
            )
        _refuse_stages(own)
        own["text"] = {**text, **own.get("text", {})}
        if self.lane:
            own["model"] = self.lane
        return {"min_policy_version": self.version, "advantage": {"estimator": "grpo"}, **own}

    def push(self, folder: Path) -> None:
        """Has the lane serve the weights of a folder, an adapter in PEFT's form or whole weights, and waits until its
        samplers have answered, also while NATS is away. An adapter that is as it began is the checkpoint alone.

        PolicyRefused: nobody can use them. TimeoutError: not all samplers have answered.
        """
        adapter, client = folder / "adapter_model.safetensors", self.client.asynchronous
        if adapter.exists():
            push = partial(policy.push_policy, client, None if policy._is_fresh(adapter.read_bytes()) else folder,
                self.lane, by=self.run)
        else:
            push = partial(policy.push_weights, client, folder, self.lane, by=self.run)
        self._taken(self.client.thread.run(retry_while_away(push, self.asker.timeout)))

    def push_each(self, pairs: Iterable[Pair]) -> None:
        """push of whole weights whose tensors come one by one, in this thread: a file of them is held at once."""
        given, client, timeout = Given(), self.client.asynchronous, self.asker.timeout
        push = policy.push_weights(client, given, self.lane, by=self.run, patience=timeout)
        pushed = asyncio.run_coroutine_threadsafe(push, self.client.thread.loop)
        pushed.add_done_callback(given.leave)
        try:
            for pair in pairs:
                given.give(pair)
        finally:
            given.end()
        self._taken(pushed.result())

    def _taken(self, pushed: Event) -> None:
        sync.policy.taken(self.client, pushed, self.asker.timeout)
        self.version = pushed["policy_version"]

    async def tell(
        self, trainer: str, step: int, logged: Mapping[str, Any], names: Mapping[str, str], tests: str
    ) -> None:
        """Tells an update (update/1) from what a trainer has logged: names are those of its numbers, with what they
        are called here; what begins with tests is its evaluation. It never ends a training: what it cannot tell, it
        logs."""
        floats = {k: float(v) for k, v in logged.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        numbers: dict[str, Any] = {to: floats[name] for name, to in reversed(list(names.items())) if name in floats}
        evaluation = {k.removeprefix(tests).lstrip("_-/"): v for k, v in floats.items() if k.startswith(tests)}
        if not numbers and not evaluation:
            return
        client = self.client.asynchronous
        try:
            served = await policy.policy(client, self.lane)
            await client.update(
                self.run, served["lane"], step, trainer=trainer, policy_version=served["policy_version"],
                weights_digest=served["weights_digest"], evaluation=evaluation, **numbers
            )
        except Exception as e:
            _log.warning("update %d of run %s is not told: %s", step, self.run, e)

    def close(self) -> None:
        """Ends the connection. What was asked for is finished by the pipeline."""
        self.client.thread.finish(self.asker.close())
        self.connection.__exit__(None, None, None)
