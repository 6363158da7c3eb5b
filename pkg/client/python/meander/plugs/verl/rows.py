"""What verl asks for as fields of a prompt, and samples under verl's names. It needs neither verl nor torch."""

from __future__ import annotations

import importlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from ...client.ask import drawn_log_probs, written
from ...data.batch import Batch, Sample
from ..lane import Lane

if TYPE_CHECKING:
    from ...client.client import Client

LOOP = "single_turn_agent"
"""The agent loop of verl that a lane stands in for; conversations of several turns are those of the lane."""

_OURS = ("raw_prompt", "agent_name", "uid", "index")
"""What verl adds to a record, and the prompt itself."""

_NUMBERS = {
    "actor/pg_loss": "loss", "actor/loss": "loss", "actor/lr": "lr", "actor/grad_norm": "grad_norm",
    "actor/kl_loss": "kl", "actor/reward_kl_penalty": "kl", "actor/pg_clipfrac": "clip_share",
}  # fmt: skip
"""The numbers of an update, by what verl logs them as; of two the first that is there."""

_SETTINGS = ("url", "lane", "run", "fields", "attempts", "timeout", "connection")


def settings_of(rollout: Any) -> dict[str, Any]:
    """The arguments of a Lane, as rollout.engine_kwargs.meander of verl's configuration names them: url, lane, run,
    fields (a mapping, or the name of a function of a row, module.name), attempts, timeout, connection.

    ValueError: url is not there, or a name is unknown.
    """
    given = _plain((rollout.engine_kwargs or {}).get("meander") or {})
    where = "rollout.engine_kwargs.meander"
    if not given.get("url"):
        raise ValueError(f"{where}.url: empty; must be the address of a pipeline: nats://127.0.0.1:4222")
    if unknown := sorted(set(given) - set(_SETTINGS)):
        raise ValueError(f"{where}.{unknown[0]}: must be one of {', '.join(_SETTINGS)}")
    out = {"lane": "", "run": "", "fields": {}, "attempts": 3, "timeout": 600.0, "connection": {}} | given
    out["run"] = out["run"] or "verl-" + secrets.token_hex(4)
    if isinstance(out["fields"], str):
        module, _, name = out["fields"].rpartition(".")
        if not module:
            raise ValueError(f"{where}.fields: {name!r}; must be fields of a prompt, or module.function")
        out["fields"] = getattr(importlib.import_module(module), name)
    return out


def tell_updates(tracking: Any, lane: Lane | None) -> None:
    """Has verl's class Tracking tell what it logs of a step as an update of the lane; None: no more. verl has no place
    for a logger of others, so its method is replaced."""
    log = getattr(tracking, "_log_of_verl", tracking.log)

    def told(self: Any, data: Any, step: int, *args: Any, **kwargs: Any) -> None:
        log(self, data, step, *args, **kwargs)
        if lane is not None and step > 0:  # before the first step there is an evaluation alone
            lane.client.thread.run(lane.tell("verl", step, data, _NUMBERS, "val-"))

    tracking._log_of_verl, tracking.log = log, log if lane is None else told


def _plain(value: Any) -> Any:
    """A part of OmegaConf's, or a value of numpy's, as Python's own types."""
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(v) for v in value]
    return value


def check(config: Any) -> None:
    """ValueError: verl's configuration asks for what a lane cannot do."""
    rollout, data, model = config.actor_rollout_ref.rollout, config.data, config.actor_rollout_ref.model
    template, turns = "the template is that of the lane's model", "turns are those of the lane: text.interaction"
    noise = "noise follows engine_kwargs.meander.fields.seed"
    trace, arguments = rollout.get("trace") or {}, data.get("apply_chat_template_kwargs")
    for name, value, only, why in (
        ("rollout.agent.default_agent_loop", rollout.agent.default_agent_loop, LOOP, turns),
        ("rollout.repetition_penalty", rollout.get("repetition_penalty", 1.0), 1.0, "a lane has none"),
        ("rollout.full_determinism", rollout.get("full_determinism", False), False, noise),
        ("rollout.trace.backend", trace.get("backend"), None, "traces of a pipeline are those of meander trace"),
        ("data.apply_chat_template_kwargs", dict(arguments or {}), {}, template),
        ("model.custom_chat_template", model.get("custom_chat_template"), None, template),
    ):
        if value != only:
            raise ValueError(f"{name}: {value!r}; must be {only!r}: {why}")


def text_of(sampling_params: Mapping[str, Any], response_length: int) -> dict[str, Any]:
    """verl's parameters of sampling as fields of text; a top_k of -1 is all."""
    out = {"temperature": float(sampling_params["temperature"]), "top_p": float(sampling_params["top_p"])}
    return out | {"top_k": max(int(sampling_params["top_k"]), 0), "max_new_tokens": response_length}


def messages_of(raw_prompt: Any) -> list[dict[str, str]]:
    """A row's raw_prompt as a conversation. ValueError: it has images, or what else is no text."""
    out = [dict(m) for m in raw_prompt]
    for i, m in enumerate(out):
        if not isinstance(m.get("content"), str):
            kind = type(m.get("content")).__name__
            raise ValueError(f"raw_prompt[{i}].content: {kind}; must be a text: a lane of texts takes nothing else")
    return out


def with_record(fields: dict[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a prompt, with the row as its metadata, unless they have their own, and its
    reward_model.ground_truth, any value of JSON, for each reward function that names none."""
    record = {k: x for k, v in row.items() if k not in _OURS and (x := _as_json(v)) is not None}
    out = {"metadata": record, **fields} if record else dict(fields)
    model = record.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    if truth is not None and fields.get("reward"):
        out["reward"] = [{"ground_truth": truth, **spec} for spec in fields["reward"]]
    return out


def _as_json(value: Any) -> Any:
    """A value of a row as JSON has it; None for what JSON cannot have, such as an image or a tensor."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(k): _as_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(v) for v in value]
    return value if isinstance(value, (str, bool, int, float)) else None


def output(
    sample: Sample, prompt_length: int, response_length: int, log_probs: bool, steps: Mapping[int, int]
) -> dict[str, Any]:
    """The fields of verl's AgentLoopOutput. steps are the steps of the trainer by the policy version behind each.

    ValueError: the sample is longer than a row of verl's. Unanswered: it is an image, or has no log-probs.
    """
    t, trajectory = written(sample), sample.facts
    ids, begin, name = t.ids.tolist(), t.prompt_length, _name(trajectory)
    for what, n, most in (("prompt", begin, prompt_length), ("response", len(ids) - begin, response_length)):
        if n > most:
            limit = f"rollout.{what}_length is {most}, and nothing is cut: raise it, or drop such prompts"
            raise ValueError(f"{name}: a {what} of {n} tokens; {limit}")
    oldest, newest = trajectory["policy_version_min"], trajectory["policy_version_max"]
    return {
        "prompt_ids": ids[:begin],
        "response_ids": ids[begin:],
        "response_mask": t.mask[begin:].tolist(),
        "response_logprobs": drawn_log_probs(t) if log_probs else None,
        "reward_score": float(cast(float, sample.member["reward"])),
        "num_turns": len(t.turns),
        "metrics": _seconds(trajectory),
        "extra_fields": {
            "turn_scores": [], "tool_rewards": [], "reward_extra_info": {},
            "min_global_steps": _step(steps, oldest), "max_global_steps": _step(steps, newest),
            "meander_run": trajectory["run"], "meander_uid": trajectory["uid"],
            "meander_sample_index": trajectory["sample_index"],
            "meander_policy_version_min": oldest, "meander_policy_version_max": newest,
        },
    }  # fmt: skip


def _step(steps: Mapping[int, int], version: int) -> int:
    """The trainer's step of a version; of one that it did not push, that before."""
    return max((step for pushed, step in steps.items() if pushed <= version), default=0)


def _name(trajectory: Mapping[str, Any]) -> str:
    return f"{trajectory['uid']} #{trajectory['sample_index']}"


def _seconds(trajectory: Mapping[str, Any]) -> dict[str, float]:
    """What verl times of a sample: how long a sampler had it, and how long it was until its group had its rewards."""
    t = trajectory["timings"]
    return {
        "generate_sequences": (t["finished"] - t["received"]) / 1e9,
        "compute_score": max(time.time() - t["finished"] / 1e9, 0.0),
    }


async def diffusion_outputs(
    client: Client, batch: Batch, n: int, prompt_ids: Callable[[Sample], list[int]] = lambda _: [],
    global_steps: int | None = None,
) -> AsyncIterator[list[dict[str, Any]]]:
    """diffusion_output of the samples of a batch, n at a time: of a batch of batches(whole=False) the states and the
    pixels of those n are held, and the states of the next ones are read meanwhile. prompt_ids says those of a sample.

        async for batch in client.batches(run, whole=False):
            async for outputs in meander.verl.diffusion_outputs(client, batch, 8):
    """
    async for micro in batch.micro(n):
        yield [
            diffusion_output(s, await client.frames(s.facts), prompt_ids(s), global_steps)
            for s in micro.samples
        ]


def diffusion_output(
    sample: Sample, frames: npt.NDArray[np.uint8], prompt_ids: list[int], global_steps: int | None = None
) -> dict[str, Any]:
    """The fields of verl-omni's DiffusionAgentLoopOutput, of torch tensors, which its workers pad and collate.

    frames [T, H, W, 3] uint8 are those of client.frames(sample.trajectory): [3, H, W] of an image, [T, 3, H, W] of a
    video. prompt_ids are the caller's: no event has them. all_latents are the W + 1 states around the W trained steps,
    [W + 1, S, C] float32; all_timesteps and response_logprobs [W]. prompt_embeds and their masks are there where the
    prompt asked for return_conditioning. global_steps is the policy's version, unless given.

    ValueError: the sample failed, or its trained steps do not follow one another.
    """
    import torch

    t = sample.trajectory
    if t is None or sample.text is not None:
        raise ValueError(f"sample {sample.member['sample_index']}: must be an image or a video that was made")
    indices = [s["step_index"] for s in sample.trained]
    if indices and indices != list(range(indices[0], indices[0] + len(indices))):
        raise ValueError(f"{_name(t)}: steps {indices}; must follow one another: set rollout.sde_window")
    pixels = torch.from_numpy(np.ascontiguousarray(frames.transpose(0, 3, 1, 2)))
    extra = {name: torch.tensor(a) for name, a in sample.conditioning.items()}
    log_probs = None
    if indices:
        log_probs = torch.tensor([s["log_prob"] for s in sample.trained], dtype=torch.float32)
        extra["all_latents"] = torch.from_numpy(np.stack([sample.latents(i) for i in [*indices, indices[-1] + 1]]))
        extra["all_timesteps"] = torch.tensor([s["timestep"] for s in sample.trained], dtype=torch.float32)
    return {
        "prompt_ids": prompt_ids,
        "response_diffusion_output": pixels if len(pixels) > 1 else pixels[0],
        "response_logprobs": log_probs,
        "reward_score": None if sample.member["reward"] is None else float(sample.member["reward"]),
        "num_turns": 2,
        "metrics": _seconds(t),
        "extra_fields": extra | {"global_steps": t["policy_version_max"] if global_steps is None else global_steps},
    }
