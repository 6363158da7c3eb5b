"""verl's agent loop over a lane: verl pads, collates and scores; the samples come from the pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from verl.experimental.agent_loop import AgentLoopManager as VerlManager
from verl.experimental.agent_loop import AgentLoopOutput, AgentLoopWorker
from verl.utils.ray_utils import auto_await
from verl.utils.skip import SkipManager
from verl.utils.tracking import Tracking

from ...client import ask, policy
from ...data.batch import Sample
from ..lane import Lane
from . import rows

_R = TypeVar("_R")


class Asking:
    """What makes a worker of verl ask a lane in place of verl's servers. Rows of one uid that are begun together are
    one group. config is verl's, and rollout_config its part for rollouts."""

    config: Any
    rollout_config: Any

    def __init__(self, lane: Lane, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.lane = lane
        self.steps: dict[int, int] = {}  # the trainer's, by policy version
        self._groups: dict[Any, _Asked] = {}

    async def generate_sequences(self, batch: Any) -> Any:
        """As verl's, once the newest weights of the lane are known: prompts wait for them."""
        client, lane = self.lane.client.asynchronous, self.lane.lane
        served = await ask.retried(lambda: policy.policy(client, lane), self.lane.asker.timeout)
        self.lane.version = served["policy_version"]
        self.steps[self.lane.version] = self._step(batch) - 1  # verl counts weights by the step that they are behind
        return await super().generate_sequences(batch)  # type: ignore[misc]

    def _step(self, batch: Any) -> int:
        """The step that a batch is for."""
        return int(batch.meta_info.get("global_steps", 1))

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        trace: bool = True,
        **row: Any,
    ) -> Any:
        if agent_name != rows.LOOP:
            raise ValueError(
                f"agent_name: {agent_name!r}; must be {rows.LOOP!r}: turns are those of the lane, text.interaction"
            )
        validate, config = trajectory["validate"], self.rollout_config
        key = (row["uid"], validate, tuple(sorted(sampling_params.items())))
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Asked()
            group.samples = asyncio.create_task(self._ask(key, group, sampling_params, validate, row))
        place, group.size = group.size, group.size + 1
        sample = (await group.samples)[place]
        log_probs = sampling_params["logprobs"] and not validate
        fields = rows.output(sample, config.prompt_length, config.response_length, log_probs, self.steps)
        output = AgentLoopOutput(**fields)
        return await self._agent_loop_postprocess(output, validate, **row)  # type: ignore[attr-defined]

    async def _ask(
        self, key: Any, group: _Asked, sampling_params: dict[str, Any], validate: bool, row: dict[str, Any]
    ) -> list[Sample]:
        """The samples of a group. It begins when the rows that were begun with the first have come."""
        del self._groups[key]
        text = rows.text_of(sampling_params, self.rollout_config.response_length)
        fields = rows.with_record(await self.lane.fields_of(row, text), row) | ({"validation": True} if validate
            else {})
        return await self.lane.asker.samples(rows.messages_of(row["raw_prompt"]), group.size, fields)


class _Asked:
    """Rows that are one group: how many have come, and their samples."""

    size = 0
    samples: asyncio.Task[list[Sample]]


class Worker(Asking, AgentLoopWorker):
    """Gives a DataProto."""


class AgentLoopManager(VerlManager):
    """The agent loop manager of verl's trainers that take a DataProto, with samples of a lane.

    The repeats of a row, by uid, are one group of the lane; samples that fail are asked for again, so each row gets
    exactly one, in its place. Prompts wait for the weights that were pushed last. Rewards are the pipeline's: rm_scores
    has them, and verl computes none. What verl's configuration asks of a lane that it cannot do is refused, and so is a
    prompt or response that is longer than a row: nothing is cut.

    What verl logs of a step is told as an update, whatever trainer.logger says.

    non_tensor_batch also has meander_run, meander_uid and meander_sample_index, which name the sample in the pipeline,
    and meander_policy_version_min and _max. Settings: rollout.engine_kwargs.meander; see meander.plugs.verl.

    ValueError: as said. Unanswered, Refused, TimeoutError: as the calls of the client.
    """

    worker_class: type = Worker
    """What asks the lane."""

    def __init__(
        self, config: Any, llm_client: Any = None, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ):
        super().__init__(config, llm_client, teacher_client, reward_loop_worker_handles)
        rows.check(config)
        if teacher_client:
            raise ValueError("distillation: on; must be off: a lane gives no log-probs of a teacher")
        self._settings = rows.settings_of(self.rollout_config)

    async def _init_agent_loop_workers(self) -> None:
        self.lane = await asyncio.to_thread(Lane, **self._settings)
        self.worker = self.worker_class(self.lane, self.config, self.llm_client, None, self.reward_loop_worker_handles)
        rows.tell_updates(Tracking, self.lane)

    @property
    def run(self) -> str:
        """The name of the run that prompts are published in."""
        return self.lane.run

    @property
    def again(self) -> int:
        """How many samples failed and were asked for again."""
        return self.lane.asker.again

    @auto_await
    @SkipManager.annotate(role="rollout")
    async def generate_sequences(self, prompts: Any) -> Any:
        """The samples of prompts, one for each row, in their order, as verl's own manager gives them."""
        output = await self._on_lane(self.worker.generate_sequences(prompts))
        metrics = [output.meta_info.pop("metrics")]
        output.meta_info = {"timing": self._performance_metrics(metrics, output), **output.meta_info}
        return output

    async def _on_lane(self, call: Coroutine[Any, Any, _R]) -> _R:
        """Runs a call on the event loop of the lane's connection, whatever loop verl waits on."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self.lane.client.thread.loop))

    def close(self) -> None:
        """Ends the connection."""
        rows.tell_updates(Tracking, None)
        self.lane.close()
