"""The plugs for verl: with its own classes against a real pipeline of sums, and what needs neither without it."""

import asyncio
import contextlib
import importlib
import json
import math
import os
import sys
import types
import uuid
import weakref

import nats
import numpy as np
import pytest
from nats.js.errors import BadRequestError

import meander
from conftest import SUMS, stored_updates
from meander import ask, policy
from meander.data.batch import Sample
from meander.plugs.lane import Lane
from meander.plugs.verl import rows

try:
    import torch
    import verl
except ImportError:
    verl = None
real = pytest.mark.skipif(verl is None, reason="the managers of verl need verl 0.9.1, which is not installed here")

PROBLEMS = [("12+3=?", "15"), ("90+9=?", "99"), ("7+8=?", "15")]
FIELDS = {"reward": [{"name": "exact_match"}], "text": {"tokens_per_event": 8}}


def rollout(**settings):
    return types.SimpleNamespace(engine_kwargs={"meander": settings})


def truth_of(row):
    """Fields of a prompt by a function that the configuration names."""
    return {"seed": len(row["uid"])}


def test_settings():
    got = rows.settings_of(rollout(url="nats://x", fields=f"{__name__}.truth_of"))
    assert got["fields"] is truth_of and got["run"].startswith("verl-") and got["attempts"] == 3
    for settings, why in (
        ({}, "url: empty"),
        ({"url": "x", "urls": 1}, "meander.urls: must be one of url, lane"),
        ({"url": "x", "fields": "f"}, "module.function"),
    ):
        with pytest.raises(ValueError, match=why):
            rows.settings_of(rollout(**settings))
    assert rows.text_of({"temperature": 0, "top_p": 0.9, "top_k": -1}, 7) == {
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 0,
        "max_new_tokens": 7,
    }


def test_updates(sums):
    """What verl logs of a step is told as an update, by the lane's newest weights; a validation before it is not."""

    class Tracking:
        logged = []

        def log(self, data, step, backend=None):
            self.logged.append((step, data))

    with contextlib.closing(Lane(sums, "sums", run := "verl-" + uuid.uuid4().hex[:8], {}, 1, 10, {})) as lane:
        rows.tell_updates(Tracking, lane)
        Tracking().log(data={"val-core/sums/acc/mean@1": 0.5}, step=0)
        metrics = {"actor/pg_loss": 0.25, "actor/pg_clipfrac": 0.125, "val-core/sums/acc/mean@1": 1, "actor/lr": True}
        Tracking().log(metrics, 1, backend=["console"])
        rows.tell_updates(Tracking, None)
        Tracking().log(data={"actor/pg_loss": 0.5}, step=2)
        stored = lane.client.thread.run(stored_updates(lane.client.asynchronous, run))
        version = meander.sync.policy.policy(lane.client, "sums")["policy_version"]
    assert [step for step, _ in Tracking.logged] == [0, 1, 2]
    (told,) = stored
    assert (told["trainer"], told["step"], told["loss"], told["clip_share"]) == ("verl", 1, 0.25, 0.125)
    assert (told["policy_version"], "lr" in told) == (version, False)
    assert told["evaluation"] == [{"name": "core/sums/acc/mean@1", "value": 1.0}]


def test_fields():
    row = {"reward_model": {"style": "rule", "ground_truth": 15}}
    fields = {"reward": [{"name": "exact_match"}, {"name": "ocr", "ground_truth": "x"}], "seed": 1}
    assert rows.with_record(fields, row) == {
        "reward": [{"name": "exact_match", "ground_truth": 15}, {"name": "ocr", "ground_truth": "x"}],
        "seed": 1,
        "metadata": row,
    }
    assert rows.with_record(fields, {}) == fields
    for truth in (["15"], {"answer": 15}, 15.5, np.array([15]), "a", False, np.int64(15)):
        out = rows.with_record(fields, {"reward_model": {"ground_truth": truth}, "data_source": "gsm8k", "uid": "7"})
        kept = truth.tolist() if isinstance(truth, (np.ndarray, np.generic)) else truth
        assert out["reward"][0]["ground_truth"] == kept
        assert out["metadata"] == {"reward_model": {"ground_truth": kept}, "data_source": "gsm8k"}
    assert rows.with_record({"metadata": {"a": 1}}, {"data_source": "gsm8k"}) == {"metadata": {"a": 1}}
    assert rows.messages_of(np.array([{"role": "user", "content": "a"}], object)) == [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match=r"raw_prompt\[0\].content: list; must be a text"):
        rows.messages_of([{"role": "user", "content": [{"type": "image"}]}])


def test_retried():
    """What the server does not answer is asked again until the time is over; what it refuses is not."""
    faults = [nats.errors.NoRespondersError(), ConnectionResetError(), TimeoutError()]

    async def answer():
        if faults:
            raise faults.pop(0)
        return 7

    assert asyncio.run(ask.retried(answer, 60)) == 7
    for fault, timeout in ((nats.errors.TimeoutError(), 0.05), (BadRequestError(code=400), 60), (ValueError(), 60)):
        faults[:] = [fault, None]
        with pytest.raises(type(fault)):
            asyncio.run(ask.retried(answer, timeout))
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(ask.retried(lambda: asyncio.sleep(3600), 0.05))


def test_slow_server():
    """The parts of a group are asked for again where the server is late."""
    faults = [nats.errors.TimeoutError(), nats.errors.TimeoutError()]
    made = Sample({"reward": 1.0}, {}, [])

    class Slow:
        async def group(self, run, uid, event):
            if faults:
                raise faults.pop()
            return meander.Group(event, [made])

    async def closed(text, fields):
        return {"status": "complete", "uid": "u", "members": []}

    asker = ask.Asker(Slow(), "r", timeout=60)
    asker._closed = closed
    assert asyncio.run(asker.samples("347+58=?", 1, {})) == [made]


def test_slow_lanes(monkeypatch):
    """A group may take as long as it wants while others close. When none does, it is cancelled."""
    published, cancelled = [], []

    class Client:
        nc = None

        async def publish(self, run, text, uid, **_):
            published.append(uid)

        async def cancel(self, run, uid, **_):
            cancelled.append(uid)

        async def status(self, run, **_):
            return {"state": "running"}

        async def group(self, *_):
            sample = types.SimpleNamespace(trajectory={}, member={"reward": 1.0})
            return types.SimpleNamespace(samples=[sample])

    async def test():
        closed = asyncio.Queue()

        class Cursor:
            def __init__(self, *_):
                self.next = closed.get

            async def done(self, _):
                pass

            async def close(self):
                pass

        def close(uid):
            sequence = types.SimpleNamespace(stream=1)
            metadata = types.SimpleNamespace(sequence=sequence)
            event = {"uid": uid, "status": "complete"}
            closed.put_nowait(types.SimpleNamespace(data=event, subject="", metadata=metadata))

        monkeypatch.setattr(ask, "Cursor", Cursor)
        monkeypatch.setattr(ask, "fitting", lambda event, *_: event)
        asker = ask.Asker(Client(), "r", timeout=1)
        slow = asyncio.create_task(asker.samples("1+2=?", 1, {}))
        for _ in range(15):
            await asyncio.sleep(0.1)
            close("another")
        assert not slow.done()
        close(published[0])
        assert len(await slow) == 1 and not cancelled
        with pytest.raises(TimeoutError, match="no group has closed in 1 s; state running"):
            await asker.samples("1+2=?", 1, {})
        assert cancelled == published[1:]

    asyncio.run(test())


def test_rows_of_samples(run, sums):
    """A sample under verl's names, without verl; and what is too long for a row."""

    async def test(client, name):
        await client.publish(name, "347+58=?", uid="u", model="sums", group_size=2, reward=[{"name": "numeric_match"}])
        group = await anext(aiter(client.stream_groups(name)))
        sample = group.samples[1]
        t, trajectory = sample.text, sample.trajectory
        out = rows.output(sample, 16, 16, True, {trajectory["policy_version_max"]: 7})
        assert out["prompt_ids"] + out["response_ids"] == t.ids.tolist() and len(out["prompt_ids"]) == t.prompt_length
        assert (
            out["response_mask"] == [1] * t.generated
            and out["reward_score"] == sample.member["reward"]
            and out["num_turns"] == 2
        )
        np.testing.assert_array_equal(out["response_logprobs"], t.numbers["processed_log_probs"][t.prompt_length :])
        assert out["extra_fields"]["min_global_steps"] == out["extra_fields"]["max_global_steps"] == 7
        assert rows.output(sample, 16, 16, True, {-1: 5})["extra_fields"]["max_global_steps"] == 5, "that before"
        assert out["extra_fields"]["meander_uid"] == "u" and out["extra_fields"]["meander_sample_index"] == 1
        assert out["metrics"]["generate_sequences"] > 0 <= out["metrics"]["compute_score"]
        assert rows.output(sample, 16, 16, False, {})["response_logprobs"] is None
        with pytest.raises(
            ValueError,
            match=f"u #1: a response of {t.generated} tokens; rollout.response_length is 1, and nothing is cut",
        ):
            rows.output(sample, 16, 1, True, {})
        with pytest.raises(ValueError, match="a prompt of .* rollout.prompt_length is 2"):
            rows.output(sample, 2, 16, True, {})

    run(test, sums)


def config_of(url, *overrides, fields=None, manager="AgentLoopManager", **settings):
    """verl's own configuration with a lane."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(os.path.join(os.path.dirname(verl.__file__), "trainer/config"), version_base=None):
        config = compose("ppo_trainer", overrides=[
            f"actor_rollout_ref.model.path={SUMS}", "actor_rollout_ref.rollout.name=meander",
            "actor_rollout_ref.rollout.n=4",
            f"+actor_rollout_ref.rollout.agent.agent_loop_manager_class=meander.plugs.verl.{manager}",
            "actor_rollout_ref.rollout.calculate_log_probs=True", "actor_rollout_ref.rollout.val_kwargs.n=2",
            "data.max_prompt_length=16", "data.max_response_length=12", *overrides,
        ])  # fmt: skip
    OmegaConf.set_struct(config, False)
    config.actor_rollout_ref.rollout.engine_kwargs.meander = {
        "url": url,
        "lane": "sums",
        "fields": fields or FIELDS,
        **settings,
    }
    return config


def manager_of(config, **arguments):
    """The manager, as verl's trainers make it."""
    from verl.utils.import_utils import load_class_from_fqn

    return load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class).create(
        config=config, llm_client=None, **arguments
    )


def prompts_of(problems=PROBLEMS, repeat=4, **meta):
    """Prompts as RLHFDataset and RayPPOTrainer hand them over."""
    raw = np.empty(len(problems), object)
    raw[:] = [[{"role": "user", "content": q}] for q, _ in problems]
    columns = {
        "dummy_tensor": torch.zeros(len(problems), 1, dtype=torch.uint8), "raw_prompt": raw,
        "index": np.arange(len(problems)),
        "reward_model": np.array([{"style": "rule", "ground_truth": a} for _, a in problems], object),
        "uid": np.array([str(uuid.uuid4()) for _ in problems], object),
    }  # fmt: skip
    out = verl.DataProto.from_single_dict(columns, meta_info={"global_steps": 1, **meta})
    return out.repeat(repeat, interleave=True)


@real
def test_manager(sums):
    """Each row gets one sample of its prompt, in its place, padded as verl pads; groups are those of the repeats; what
    comes out joins what went in, and verl's own functions take it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
    from verl.trainer.ppo.reward import extract_reward

    manager, tokenizer = manager_of(config_of(sums)), AutoTokenizer.from_pretrained(SUMS)
    asked = prompts_of()
    asked.reorder(torch.tensor([0, 7, 4, 1, 11, 5, 2, 8, 3, 6, 9, 10]))
    out = manager.generate_sequences(asked)
    b, other = out.batch, out.non_tensor_batch
    assert b["prompts"].shape == (12, 16) and b["responses"].shape == b["response_mask"].shape == b[
        "rm_scores"
    ].shape == b["rollout_log_probs"].shape == (12, 12)
    assert torch.equal(b["input_ids"], torch.cat([b["prompts"], b["responses"]], 1)) and b["attention_mask"].shape == b[
        "position_ids"
    ].shape == (12, 28)
    assert {k: v.dtype for k, v in b.items() if v.dtype != torch.int64} == {
        "rm_scores": torch.float32,
        "rollout_log_probs": torch.float32,
    }
    assert (b["attention_mask"][:, 15] == 1).all(), "prompts are padded left"
    network = AutoModelForCausalLM.from_pretrained(SUMS, dtype=torch.float32)
    for i in range(12):
        question = asked.non_tensor_batch["raw_prompt"][i]
        begin = tokenizer.apply_chat_template(list(question), add_generation_prompt=True)["input_ids"]
        n, length = len(begin), int(b["response_mask"][i].sum())
        assert b["prompts"][i, -n:].tolist() == begin and b["attention_mask"][i].tolist() == [0] * (16 - n) + [1] * (
            n + length
        ) + [0] * (12 - length)
        assert b["position_ids"][i, 16 - n : 16 + length].tolist() == list(range(n + length))
        answer = tokenizer.decode(b["responses"][i, :length], skip_special_tokens=True).strip()
        assert b["rm_scores"][i].nonzero().flatten().tolist() == [length - 1] * (
            answer == asked.non_tensor_batch["reward_model"][i]["ground_truth"]
        )
        ids = torch.tensor(begin + b["responses"][i, :length].tolist())
        with torch.no_grad():
            new = network(ids[None]).logits[0, n - 1 : -1].log_softmax(-1).gather(-1, ids[n:, None])[:, 0]
        assert (new - b["rollout_log_probs"][i, :length]).abs().max() < 1e-3 and not b["rollout_log_probs"][
            i, length:
        ].any()
    assert other["__num_turns__"].tolist() == [2] * 12 and len(set(other["meander_uid"])) == 3
    assert len(set(zip(other["uid"], other["meander_uid"], strict=True))) == 3, "a uid is a group"
    assert len(set(zip(other["meander_uid"], other["meander_sample_index"], strict=True))) == 12
    timing = out.meta_info.pop("timing")
    assert (
        timing["agent_loop/generate_sequences/min"] > 0
        and timing["agent_loop/slowest/prompt_length"] > 0
        and len(timing) == 18
    )
    joined = asked.union(out)
    scores, _ = extract_reward(joined)
    advantages, _ = compute_grpo_outcome_advantage(scores, b["response_mask"], joined.non_tensor_batch["uid"])
    assert advantages.shape == (12, 12) and not advantages[b["response_mask"] == 0].any()
    with meander.sync.connect(sums) as client:
        groups = list(client.stream_groups(manager.run, follow=False))
        assert [g.advantage["group_size"] for g in groups] == [4, 4, 4] and manager.again == 0
        text = groups[0].samples[0].text.settings
        assert (text["temperature"], text["top_p"], text["top_k"], text["max_new_tokens"]) == (1, 1, 0, 12)
    manager.close()


@real
def test_validation(sums):
    """In validations sampling is that of val_kwargs, greedy unless set; the groups are marked."""
    manager = manager_of(config_of(sums))
    out = manager.generate_sequences(prompts_of(repeat=2, validate=True))
    assert out.batch["responses"].shape == (6, 12) and "rollout_log_probs" not in out.batch
    assert torch.equal(out.batch["responses"][0::2], out.batch["responses"][1::2])
    with meander.sync.connect(sums) as client:
        groups = list(client.stream_groups(manager.run, follow=False))
        assert (
            all(g.advantage["validation"] and g.samples[0].text.settings["temperature"] == 0 for g in groups)
            and len(groups) == 3
        )
    manager.close()


@real
def test_awaited(sums):
    """Inside an event loop the manager is awaited, as verl's own is."""

    async def test():
        from meander.plugs.verl import AgentLoopManager

        manager = await AgentLoopManager.create(config=config_of(sums), llm_client=None)
        out = await manager.generate_sequences(prompts_of(repeat=1))
        assert len(out) == 3
        await asyncio.to_thread(manager.close)

    asyncio.run(test())


@real
@pytest.mark.parametrize(
    ("override", "why"),
    [
        (
            "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
            "default_agent_loop: 'tool_agent'; must be 'single_turn_agent'",
        ),
        ("actor_rollout_ref.rollout.full_determinism=True", "full_determinism: True; must be False"),
        (
            "+data.apply_chat_template_kwargs.enable_thinking=False",
            "apply_chat_template_kwargs: {'enable_thinking': False}",
        ),
        ("actor_rollout_ref.rollout.trace.backend=weave", "trace.backend: 'weave'"),
    ],
)
def test_refused(sums, override, why):
    with pytest.raises(ValueError, match=why):
        manager_of(config_of(sums, override))


@real
def test_rows_that_are_refused(sums):
    manager = manager_of(config_of(sums, "data.max_prompt_length=4"))
    with pytest.raises(ValueError, match="a prompt of 1. tokens; rollout.prompt_length is 4, and nothing is cut"):
        manager.generate_sequences(prompts_of())
    manager.close()
    manager = manager_of(config_of(sums))
    prompts = prompts_of()
    prompts.non_tensor_batch["agent_name"] = np.array(["tool_agent"] * 12, object)
    with pytest.raises(ValueError, match="agent_name: 'tool_agent'"):
        manager.generate_sequences(prompts)
    manager.close()


@real
def test_failed_samples(sums):
    """Samples that fail are asked for again until each row has one; the last attempt says why."""
    name = "verl" + uuid.uuid4().hex[:6]
    fields = {
        "reward": [{"name": f"external:{name}"}],
        "text": {"tokens_per_event": 8},
        "advantage": {"estimator": "rloo"},
    }
    manager = manager_of(config_of(sums, fields=fields, run=name, attempts=2, timeout=50))
    failing = [3]  # samples that still fail

    async def judge(client):
        async for t in client.stream_trajectories(name):
            verdict = {"value": None, "error": "no idea"} if failing[0] > 0 else {"value": 0.5}
            failing[0] -= 1
            await client.verdict(name, t["uid"], t["sample_index"], name=name, **verdict)

    with meander.sync.connect(sums) as client:
        task = asyncio.run_coroutine_threadsafe(judge(client.asynchronous), client.thread.loop)
        out = manager.generate_sequences(prompts_of(PROBLEMS[:1]))
        assert out.batch["rm_scores"].sum(-1).tolist() == [0.5] * 4 and manager.again == 3
        failing[0] = 1000
        with pytest.raises(meander.ask.Unanswered, match="4 of 4 samples failed 2 times: no sample was scored"):
            manager.generate_sequences(prompts_of(PROBLEMS[:1]))
        task.cancel()
        assert {g.advantage["estimator"] for g in client.stream_groups(name, follow=False)} == {"rloo"}
    manager.close()


@real
def test_weights(sums):
    """verl's engine pushes the adapter of each step, and the next prompts wait for it and are drawn with it."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    config = config_of(sums)
    parts = config.actor_rollout_ref
    adapter = get_rollout_class("meander")(
        omega_conf_to_dataclass(parts.rollout), omega_conf_to_dataclass(parts.model), None
    )
    replica = get_rollout_replica_class("meander")(0, parts.rollout, parts.model, gpus_per_node=2)
    asyncio.run(replica.init_hybrid(types.SimpleNamespace(workers=[None, None])))
    asyncio.run(replica.sleep())
    assert replica.server_address == sums
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(SUMS, dtype=torch.float32), LoraConfig(r=4, target_modules="all-linear")
    )
    settings = model.peft_config["default"].to_dict()

    def update(step, **more):
        state = get_peft_model_state_dict(model).items()
        asyncio.run(adapter.update_weights(state, peft_config=settings, global_steps=step, **more))

    manager = manager_of(config)
    update(0)  # as it begins, it is the checkpoint alone
    before = manager.generate_sequences(prompts_of(PROBLEMS[:1])).non_tensor_batch
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B" in n:
                p.normal_(std=0.01)
    update(3, base_sync_done=False)  # the checkpoint under the adapter is there already
    update(3)
    out = manager.generate_sequences(prompts_of(PROBLEMS[:1], global_steps=4))
    after = out.non_tensor_batch
    assert set(after["min_global_steps"]) == set(after["max_global_steps"]) == {3}
    assert set(after["meander_policy_version_min"]) == {before["meander_policy_version_max"][0] + 1}
    ids, mask = out.batch["input_ids"], out.batch["attention_mask"]
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=out.batch["position_ids"]).logits[:, 15:-1]
    new = logits.log_softmax(-1).gather(-1, out.batch["responses"][..., None])[..., 0]
    off = (new - out.batch["rollout_log_probs"]).abs()[out.batch["response_mask"] == 1].max()
    assert off < 1e-3, "the weights that were pushed drew it"
    with pytest.raises(meander.policy.PolicyRefused, match="w: the network has none"):
        asyncio.run(adapter.update_weights(iter([("w", torch.zeros(2))])))
    with pytest.raises(ValueError, match="must be naive"):
        asyncio.run(adapter.update_weights([], wire_format="delta_flush"))
    with meander.sync.connect(sums) as client:
        meander.sync.policy.push_policy(client, None, "sums")
    manager.close()


@real
def test_transfer_queue(sums):
    """The worker of the newer trainer puts whole groups into the TransferQueue, and marks those that failed."""
    pytest.importorskip("transfer_queue", reason="the manager of verl's newer trainer needs TransferQueue")
    ray = pytest.importorskip("ray")
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from verl.utils import tensordict_utils as tu

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        manager = manager_of(config_of(sums, manager="AgentLoopManagerTQ"))
        uids = [f"u{i}" for i in range(3)]
        raw = [[{"role": "user", "content": q}] for q, _ in PROBLEMS[:2]] + [
            [{"role": "user", "content": [{"type": "image"}]}]
        ]
        columns = {
            "uid": np.array(uids, object),
            "raw_prompt": np.array([None] * 3, object),
            "index": np.arange(3),
            "reward_model": np.array([{"ground_truth": "15"}] * 3, object),
        }
        columns["raw_prompt"][:] = raw
        batch = tu.get_tensordict(columns)
        tu.assign_non_tensor_data(batch, "global_steps", 1)
        tq.kv_batch_put(
            keys=uids, partition_id="train", tags=[{"is_prompt": True, "status": "pending", "global_steps": 1}] * 3
        )
        manager.generate_sequences(batch)
        tags = ended_tags(tq, uids)
        assert [tags[u]["status"] for u in uids] == ["finished", "finished", "failure"]
        keys = sorted(k for k in tags if k not in uids)
        assert keys == [f"u{i}_{n}_0" for i in range(2) for n in range(4)]
        data = tq.kv_batch_get(keys=keys, partition_id="train")
        lengths = [tags[k]["response_len"] for k in keys]
        assert [len(r) for r in data["responses"]] == [len(r) for r in data["rollout_log_probs"]] == lengths
        assert [float(s[-1]) for s in data["rm_scores"]] == [float(s.sum()) for s in data["rm_scores"]]
        assert {tags[k]["min_global_steps"] for k in keys} == {tags[k]["max_global_steps"] for k in keys} == {0}
        assert {extra["meander_run"] for extra in data["extra_fields"]} == {manager.run}
        manager.close()
        tq.close()
    finally:
        ray.shutdown()


def ended_tags(tq, uids):
    """The tags of the queue once no prompt is pending or running."""
    import time

    end = time.monotonic() + 60
    while time.monotonic() < end:
        tags = tq.kv_list("train")["train"]
        if all(tags[u]["status"] in ("finished", "failure") for u in uids):
            return tags
        time.sleep(0.05)
    raise TimeoutError(str(tags))


async def each(weights):
    """verl's ensure_async_iterator."""
    for pair in weights:
        yield pair


FAKES = {
    "verl": {}, "verl.workers": {}, "verl.workers.rollout": {},
    "verl.workers.rollout.base": {"BaseRollout": object},
    "verl.workers.rollout.replica": {"RolloutReplica": object},
    "verl.workers.rollout.utils": {"ensure_async_iterator": each},
}  # fmt: skip
"""What the engine takes of verl, by module."""


@pytest.fixture
def adapter(monkeypatch, request):
    """A ServerAdapter over verl's classes as far as it uses them, for a lane of images that takes whole weights."""
    pytest.importorskip("torch", reason="verl gives tensors of torch, which is not installed here")
    for name, values in FAKES.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "meander.plugs.verl.engine", raising=False)
    out = importlib.import_module("meander.plugs.verl.engine").ServerAdapter()
    out.config = rollout(url=request.getfixturevalue("signs"), lane="signs")
    return out


def test_whole_weights_are_a_stream(adapter, signs, monkeypatch):
    """Of whole weights a file is held at once, beside the pairs at hand; a refusal leaves no other process waiting."""
    monkeypatch.setattr(policy, "_FILE_BYTES", 1 << 10)
    with meander.sync.connect(signs) as client:
        now = meander.sync.policy.policy(client)
        table = json.loads(client.thread.run(client.asynchronous.blob(now["tensors"])))
        given, alive, most = [], weakref.WeakSet(), 0

        def pairs(names):
            nonlocal most
            for name in names:
                t = torch.full(table[name], 0.5)
                alive.add(t)
                most = max(most, sum(x.nbytes for x in alive))
                given.append(name)
                yield name, t
                del t

        whole = sum(4 * math.prod(shape) for shape in table.values())
        asyncio.run(adapter.update_weights(pairs(table), global_steps=3))
        new = meander.sync.policy.policy(client)
        assert new["policy_version"] == now["policy_version"] + 1 and new["note"] == "global_steps=3"
        largest = max(4 * math.prod(shape) for shape in table.values())
        assert given == list(table) and len(new["weights"]) > 3 and most <= min(whole / 2, 4 * largest + (1 << 11))
        given.clear()
        with pytest.raises(meander.policy.PolicyRefused, match="the network has none"):
            asyncio.run(adapter.update_weights(each_of(table, pairs)))
        assert given == list(table), "the other processes end"
        meander.sync.policy.push_policy(client, None)


def each_of(table, pairs):
    """Pairs, of which the first is of another network."""
    yield "another", torch.zeros(1)
    yield from pairs(table)


def test_diffusion_outputs(run, signs):
    """The samples of a batch come n at a time; what was read of those before is not held."""
    pytest.importorskip("torch", reason="verl-omni takes tensors of torch, which is not installed here")
    pytest.importorskip("PIL", reason="pixels need Pillow, which is not installed here")

    async def test(client, name):
        rollout = {"sde_step_indices": [1, 2], "return_conditioning": True}
        await client.publish(
            name, 'a red sign that says "OPEN"', uid="u", group_size=4, num_inference_steps=4,
            reward=[{"name": "jpeg_compressibility"}], rollout=rollout, seed=7, batch={"id": "b", "groups": 1},
            height=64, width=64,
        )  # fmt: skip
        batch = await anext(aiter(client.batches(name, whole=False)))
        whole = await client.group(name, "u")
        got, before = [], None
        async for outputs in rows.diffusion_outputs(client, batch, 1, lambda s: [s.member["sample_index"]]):
            assert before is None or before() is None, "the states before are gone"
            before = weakref.ref(outputs[0]["extra_fields"]["all_latents"])
            got.append((outputs[0]["prompt_ids"], outputs[0]["extra_fields"]["all_latents"].clone()))
            del outputs
        assert [ids for ids, _ in got] == [[0], [1], [2], [3]] and not any(s.steps for s in batch.samples)
        for s, (_, states) in zip(whole.samples, got, strict=True):
            assert np.array_equal(states[0].numpy(), s.latents(1))

    run(test)


def test_diffusion_output(run, signs):
    """A sample of an image under the names, shapes and dtypes of verl-omni's DiffusionAgentLoopOutput."""
    torch = pytest.importorskip("torch", reason="verl-omni takes tensors of torch, which is not installed here")
    pytest.importorskip("PIL", reason="pixels need Pillow, which is not installed here")

    async def test(client, name):
        rollout = {"sde_step_indices": [1, 2], "return_conditioning": True}
        await client.publish(
            name,
            'a red sign that says "OPEN"',
            uid="u",
            group_size=2,
            num_inference_steps=4,
            reward=[{"name": "glyph"}],
            rollout=rollout,
            seed=7,
            true_cfg_scale=2.0,
        )
        group = await anext(aiter(client.stream_groups(name)))
        sample = group.samples[0]
        frames = await client.frames(sample.trajectory)
        out = rows.diffusion_output(sample, frames, [5, 6])
        pixels, extra = out["response_diffusion_output"], out["extra_fields"]
        t = sample.trajectory
        assert pixels.dtype == torch.uint8 and pixels.shape == (3, t["height"], t["width"])
        np.testing.assert_array_equal(pixels.permute(1, 2, 0).numpy(), await client.pixels(t))
        assert out["response_logprobs"].shape == extra["all_timesteps"].shape == (2,)
        assert extra["all_latents"].shape == (3, *t["latents_shape"]) and extra["all_latents"].dtype == torch.float32
        for w, step in enumerate(sample.trained):
            np.testing.assert_array_equal(extra["all_latents"][w].numpy(), sample.latents(step["step_index"]))
            assert float(extra["all_timesteps"][w]) == np.float32(step["timestep"]) and float(
                out["response_logprobs"][w]
            ) == np.float32(step["log_prob"])
        for kind in ("", "negative_"):
            embeds, mask = extra[f"{kind}prompt_embeds"], extra[f"{kind}prompt_embeds_mask"]
            assert (
                embeds.dtype == torch.float32
                and embeds.shape[0] == mask.shape[0]
                and embeds.ndim == 2
                and mask.ndim == 1
            )
        assert out["reward_score"] == sample.member["reward"] and out["prompt_ids"] == [5, 6] and out["num_turns"] == 2
        assert (
            extra["global_steps"] == t["policy_version_max"]
            and rows.diffusion_output(sample, frames, [], 9)["extra_fields"]["global_steps"] == 9
        )
        assert set(out) == {
            "prompt_ids",
            "response_diffusion_output",
            "response_logprobs",
            "reward_score",
            "num_turns",
            "metrics",
            "extra_fields",
        }
        video = rows.diffusion_output(sample, np.concatenate([frames, frames]), [])["response_diffusion_output"]
        assert video.shape == (2, 3, t["height"], t["width"]) and torch.equal(video[1], pixels)
        with pytest.raises(ValueError, match="must be an image or a video"):
            rows.diffusion_output(Sample(sample.member, None, []), frames, [])
        omni = pytest.importorskip(
            "verl_omni.agent_loop.diffusion_agent_loop",
            reason="verl_omni is not installed here: names and shapes are held to its documented ones",
        )
        assert omni.DiffusionAgentLoopOutput(**out).metrics.generate_sequences > 0

    run(test, signs)
