"""Rollouts for the trainers of TRL: a rollout_func for GRPOTrainer, a rollout worker for AsyncGRPOTrainer.

    rollouts = meander.trl.Rollouts("nats://127.0.0.1:4222", "sums", fields={"reward": [{"name": "numeric_match"}]})
    trainer = GRPOTrainer(model=..., reward_funcs=meander.trl.reward, rollout_func=rollouts, ...)

Made for TRL 1.16.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..client.ask import Unanswered, drawn_log_probs, written
from ..data.batch import Sample
from .lane import Fields, Lane, Prompt
from ..client.tasks import together

if TYPE_CHECKING:
    import torch
    from transformers import TrainerCallback
    from trl import GRPOTrainer

_NUMBERS = {
    "loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm", "kl": "kl", "clip_ratio/region_mean": "clip_share",
    "ratio": "ratio", "sampling/importance_sampling_ratio/mean": "ratio",
    "sampling/importance_sampling_ratio/max": "ratio_max",
}  # fmt: skip
"""The numbers of an update, by what TRL logs them as; of two the first that is there."""


def reward(completions: list[Any], meander_reward: list[float], **_: Any) -> list[float]:
    """The reward function that passes on what the pipeline gave."""
    return meander_reward


class Rollouts:
    """The rollout_func of a GRPOTrainer: completions, their tokens and log-probs come from a lane of a pipeline.

    At the first call of each optimizer step the trainer's adapter is pushed, and the prompts wait for it; behind the
    last step it is pushed, too. What the trainer logs of a step is told as an update, under `name`, once its weights
    are pushed. Whole weights are pushed where there is no adapter. Repeats of a prompt are asked for as one group. Each
    prompt gets exactly one sample; what fails is asked for again. Reward functions of the trainer get meander_reward,
    and reward passes it on.

    Sampling follows the trainer's arguments: temperature, top_p, top_k, min_p, max_completion_length. In evaluations
    the groups are marked as validation.

    url, connection: as meander.connect. lane: the only one there is, unless named. run: a new name, unless given.
    fields: fields of the prompts, such as reward; a function gets the prompt. Advantages are TRL's own.
    attempts, timeout: how often samples are asked for, and the seconds in which no group closes.
    """

    def __init__(
        self,
        url: str,
        lane: str = "",
        run: str = "",
        *,
        fields: Fields = {},
        attempts: int = 3,
        timeout: float = 600,
        name: str = "trl",
        **connection: Any,
    ):
        self._lane = Lane(url, lane, run or "trl-" + secrets.token_hex(4), fields, attempts, timeout, connection)
        self._pushed_at = -1
        self._logged = _Logged(self._lane, name)
        self._followed: Any = None

    @property
    def run(self) -> str:
        """The name of the run that prompts are published in."""
        return self._lane.run

    @property
    def version(self) -> int:
        """The policy version that was pushed last."""
        return self._lane.version

    @property
    def again(self) -> int:
        """How many samples failed and were asked for again."""
        return self._lane.asker.again

    def close(self) -> None:
        """Ends the connection."""
        self._logged.tell()
        self._lane.close()

    def __call__(self, prompts: list[Prompt], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """The samples of prompts, one each, in their order, as TRL takes them: prompt_ids, completion_ids, logprobs,
        and env_mask where others than the model spoke; for reward functions meander_reward and meander_policy_version.

        Unanswered, Refused, TimeoutError, PolicyRefused: as the calls of the client.
        """
        self.follow(trainer)
        training = trainer.model.training
        most = trainer.num_generations if training else trainer.num_generations_eval
        settings, more = _settings(trainer.args), {} if training else {"validation": True}

        async def one(prompt: Prompt, count: int) -> list[dict[str, Any]]:
            fields = await self._lane.fields_of(prompt, settings, "TRL")
            return [_row(s) for s in await self._lane.asker.samples(prompt, count, fields | more)]

        async def ask() -> list[list[dict[str, Any]]]:
            return await together(one(p, n) for p, n in fold(prompts, most))

        rows = [row for group in self._lane.client.thread.run(ask()) for row in group]
        out = {name: [row[name] for row in rows] for name in _ROW}
        if not any(0 in mask for mask in out["env_mask"]):
            del out["env_mask"]
        return out

    def follow(self, trainer: GRPOTrainer) -> None:
        """Pushes the trainer's weights if it has taken a step since, in all its processes."""
        from accelerate.utils import broadcast_object_list

        if self._followed is not trainer:
            self._followed = trainer
            trainer.add_callback(self._logged.callback(lambda: self.follow(trainer)))
        if trainer.state.global_step == self._pushed_at:
            return
        accelerator = trainer.accelerator
        state = accelerator.get_state_dict(trainer.model)  # of all processes, where weights are sharded
        if accelerator.is_main_process:
            model = accelerator.unwrap_model(trainer.model)
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder, state_dict=state)
                self._lane.push(Path(folder))
            self._logged.tell()
        self._lane.version = int(broadcast_object_list([self._lane.version])[0])
        self._pushed_at = trainer.state.global_step


_ROW = ("prompt_ids", "completion_ids", "logprobs", "meander_reward", "meander_policy_version", "env_mask")


def _row(sample: Sample) -> dict[str, Any]:
    """What TRL takes of a sample; the rest of it goes as soon as its group is there."""
    t = written(sample)
    begin = t.prompt_length
    version = int(sample.facts["policy_version_max"])
    reward = float(cast(float, sample.member["reward"]))
    values = t.ids[:begin].tolist(), t.ids[begin:].tolist(), drawn_log_probs(t), reward, version
    return dict(zip(_ROW, (*values, t.mask[begin:].tolist()), strict=True))


class _Logged:
    """What a trainer has logged of steps whose weights are not pushed yet."""

    def __init__(self, lane: Lane, name: str):
        self._lane, self._name = lane, name
        self._steps: dict[int, dict[str, Any]] = {}

    def callback(self, end: Callable[[], None] | None = None) -> TrainerCallback:
        """A callback for the trainer, whose main process tells; end is called behind its last step."""
        from transformers import TrainerCallback

        steps = self._steps

        class Told(TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
                if state.is_world_process_zero and state.global_step > 0:
                    told = {k: v for k, v in (logs or {}).items() if not k.endswith(("_runtime", "_per_second"))}
                    steps.setdefault(state.global_step, {}).update(told)

            def on_train_end(self, *_: Any, **__: Any) -> None:
                if end is not None:
                    end()

        return Told()

    def tell(self) -> None:
        """Tells them: their weights are those that the lane has."""
        for step in sorted(self._steps):
            self._lane.client.thread.run(self._lane.tell(self._name, step, self._steps.pop(step), _NUMBERS, "eval_"))


def fold(prompts: list[Prompt], most: int) -> list[tuple[Prompt, int]]:
    """Neighbours that are equal as one prompt with their number, at most `most`."""
    out: list[tuple[Prompt, int]] = []
    for prompt in prompts:
        if out and out[-1][0] == prompt and out[-1][1] < most:
            out[-1] = (prompt, out[-1][1] + 1)
        else:
            out.append((prompt, 1))
    return out


def _settings(args: Any) -> dict[str, Any]:
    """What a trainer's arguments say of sampling, as fields of text. ValueError: a lane cannot do it."""
    if args.repetition_penalty != 1.0:
        raise ValueError(f"repetition_penalty: {args.repetition_penalty}; must be 1: a lane has none")
    out = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": max(args.top_k or 0, 0),
        "min_p": args.min_p or 0.0,
    }
    return out | ({"max_new_tokens": args.max_completion_length} if args.max_completion_length else {})


class RolloutWorker:
    """The rollout_worker of an AsyncGRPOTrainer, and its weight_transfer: give it as both.

        worker = meander.trl.RolloutWorker(url, prompts, "sums", fields={"reward": [{"name": "numeric_match"}]})
        trainer = AsyncGRPOTrainer(model=..., rollout_worker=worker, weight_transfer=worker, ...)
        worker.attach(trainer.model)                # a PEFT model
        trainer.add_callback(worker.callback())     # tells each update to those who look on

    It asks for a group of num_generations for each prompt, `ahead` groups at a time, and puts their samples, with the
    advantages of the pipeline (fields.advantage says which; default grpo), into rollout_buffer, which holds at most
    `most` of them. A group in which a sample failed is asked for again whole. text are settings of sampling,
    and must fit the trainer's temperature. The other arguments are those of Rollouts. Prompts may be endless; when they
    end, no more samples come.
    """

    def __init__(
        self,
        url: str,
        prompts: Iterable[Prompt],
        lane: str = "",
        run: str = "",
        *,
        num_generations: int = 8,
        ahead: int = 8,
        most: int = 1024,
        text: Mapping[str, Any] = {},
        fields: Fields = {},
        attempts: int = 3,
        timeout: float = 600,
        name: str = "trl",
        **connection: Any,
    ):
        for what, value in (("num_generations", num_generations), ("ahead", ahead), ("most", most)):
            if value < 1:
                raise ValueError(f"{what}: {value}; must be at least 1")
        self._lane = Lane(url, lane, run or "trl-" + secrets.token_hex(4), fields, attempts, timeout, connection)
        self._prompts, self._n, self._ahead, self._most, self._text = prompts, num_generations, ahead, most, dict(text)
        self._logged = _Logged(self._lane, name)
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._model: Any = None
        self._model_versions: dict[int, int] = {}
        self._work: concurrent.futures.Future[None] | None = None
        self._last = time.monotonic()

    def start(self) -> None:
        """Begins to ask."""
        self._last = time.monotonic()
        self._work = asyncio.run_coroutine_threadsafe(self._produce(), self._lane.client.thread.loop)

    def stop(self) -> None:
        """Ends the asking; what was asked for is still made and stored."""
        if self._work is not None:
            self._work.cancel()
            concurrent.futures.wait([self._work])

    def update_model_version(self, model_version: int) -> None:
        """Says which version of the trainer the weights are that were pushed last."""
        self._model_versions[self._lane.version] = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises what ended the asking; RuntimeError: the prompts have ended, or no sample came for so many seconds."""
        if self._work is not None and self._work.done() and not self._work.cancelled():
            self._work.result()
            raise RuntimeError(f"run {self._lane.run}: the prompts have ended")
        if time.monotonic() - self._last > stale_after_s:
            raise RuntimeError(f"run {self._lane.run}: no sample came for {stale_after_s:g} s")

    def init_weight_transfer(self) -> None:
        """Nothing: the connection is there."""

    def pause(self) -> None:
        """Nothing: samples that have begun end with the weights that they began with."""

    def resume(self) -> None:
        """Nothing: see pause."""

    def attach(self, model: Any) -> None:
        """Names the PEFT model that is trained: its adapter alone is pushed. Call it with the trainer's model, before
        train."""
        self._model = model

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Pushes the adapter of the attached model, else the whole weights that the trainer gives, of which no more
        than a file of 512 MiB is held; prompts that are asked for from now on wait for them.

        PolicyRefused: the lane takes none of that kind. ValueError: the attached adapter is sharded.
        """
        if self._model is None:
            self._lane.push_each((name, t.detach().cpu()) for name, t in iterator)
            self._logged.tell()
            return
        for _ in iterator:  # the other processes take part in it
            pass
        if any(hasattr(p, "full_tensor") for n, p in self._model.named_parameters() if p.requires_grad):
            raise ValueError("the adapter is sharded over processes, of which TRL calls one: train it unsharded")
        with tempfile.TemporaryDirectory() as folder:
            self._model.save_pretrained(folder)
            self._lane.push(Path(folder))
        self._logged.tell()

    def callback(self) -> TrainerCallback:
        """A callback that tells what the trainer logs of a step as an update, once its weights are pushed."""
        return self._logged.callback()

    def destroy(self) -> None:
        """Ends the connection."""
        self._logged.tell()
        self._lane.close()

    async def _produce(self) -> None:
        """Asks for the groups of the prompts, `ahead` at a time, and waits while the buffer is full."""
        room = asyncio.Semaphore(self._ahead)
        begun: set[asyncio.Task[None]] = set()
        try:
            for number, prompt in enumerate(self._prompts):
                await room.acquire()
                while self.rollout_buffer.qsize() >= self._most:
                    await asyncio.sleep(0.02)
                for task in [t for t in begun if t.done()]:
                    begun.discard(task)
                    task.result()
                task = asyncio.create_task(self._group(number, prompt))
                task.add_done_callback(lambda _: room.release())
                begun.add(task)
            await asyncio.gather(*begun)
        finally:
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)

    async def _group(self, number: int, prompt: Prompt) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        fields = await self._lane.fields_of(prompt, self._text)
        samples = await self._lane.asker.samples(prompt, self._n, fields, whole=True)
        spread = float(np.std([cast(float, s.member["reward"]) for s in samples]))
        for s in samples:
            if s.member.get("step_advantages"):
                raise ValueError(
                    f"fields.advantage: {fields['advantage']}: gives each token an advantage of its own; TRL takes one "
                    f"for a sample, of another estimator"
                )
            t = written(s)
            messages = t.messages
            asked = len(t.settings["messages"])
            before = t.prompt_length
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=messages[:asked],
                    completion=messages[asked:],
                    input_ids=t.ids.astype(np.int64),
                    completion_mask=t.mask.astype(np.int64),
                    old_log_probs=np.array([0.0] * before + drawn_log_probs(t), np.float32),
                    advantage=float(s.advantage or 0.0),
                    model_version=self._model_version(s),
                    group_id=number,
                    metrics={"reward": float(cast(float, s.member["reward"])), "reward_std": spread},
                    enqueued_at=time.time(),
                )
            )
        self._last = time.monotonic()

    def _model_version(self, sample: Sample) -> int:
        """The trainer's version of a sample's oldest weights; what it did not push is as old as can be."""
        oldest = sample.facts["policy_version_min"]
        return max((v for pushed, v in self._model_versions.items() if pushed <= oldest), default=0)


__all__ = ["RolloutWorker", "Rollouts", "Unanswered", "fold", "reward"]
