"""The plugs for TRL against a real pipeline of sums: exact counts, weights that follow, samples that failed."""

import asyncio
import concurrent.futures
import json
import queue
import subprocess
import sys
import uuid

import numpy as np
import pytest

import meander
from conftest import ENVIRONMENT, ROOT, SUMS, stored_updates

torch = pytest.importorskip("torch", reason="the plugs for TRL need torch, which is not installed here")
trl = pytest.importorskip("trl", reason="the plugs for TRL need trl, which is not installed here")

from datasets import Dataset  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from meander import trl as plug  # noqa: E402

FIELDS = {"reward": [{"name": "numeric_match"}], "text": {"tokens_per_event": 8}}
PROMPTS = [f"{a}+{b}=?" for a, b in ((12, 3), (7, 8), (90, 9), (41, 1), (5, 5), (66, 20), (31, 8), (2, 9))]


LORA = LoraConfig(r=4, target_modules="all-linear")


def trainer_of(tmp_path, rollouts, peft=LORA, **settings):
    args = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_steps": 2,
        "learning_rate": 2e-3,
        "max_completion_length": 16,
        "logging_steps": 1,
    }
    args |= {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "beta": 0.0,
        "gradient_checkpointing": False,
    }
    return trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(SUMS, dtype=torch.float32),
        args=trl.GRPOConfig(**(args | settings)), reward_funcs=plug.reward,
        train_dataset=Dataset.from_list([{"prompt": p} for p in PROMPTS]),
        processing_class=AutoTokenizer.from_pretrained(SUMS), rollout_func=rollouts,
        peft_config=peft,
    )  # fmt: skip


def test_fold():
    assert plug.fold(["a", "a", "b", "a", "a", "a"], 2) == [("a", 2), ("b", 1), ("a", 2), ("a", 1)]


def test_grpo_trainer(sums, tmp_path, monkeypatch):
    """Each batch of the real trainer has a sample of each prompt, made by the weights of the step before; the log-probs
    of trainer and sampler agree."""
    rollouts = plug.Rollouts(sums, "sums", fields=FIELDS)
    trainer = trainer_of(tmp_path, rollouts, num_iterations=2, max_steps=4)
    seen, pushed = [], []
    generate = trainer._generate_and_score_completions

    def look(inputs):
        out = generate(inputs)
        seen.append((out, [i["prompt"] for i in inputs]))
        pushed.append(rollouts.version)
        return out

    monkeypatch.setattr(trainer, "_generate_and_score_completions", look)
    trainer.train()
    # A batch whose groups have equal rewards has no gradient: its weights stay, and are not pushed again.
    moved = any(h["grad_norm"] > 0 for h in trainer.state.log_history[:2])
    assert len(seen) == 2 and len(set(pushed)) == 1 + moved
    for out, _ in seen:
        mask = out["completion_mask"].bool()
        assert out["completion_ids"].shape[0] == 8
        # num_iterations makes TRL compute its own log-probs before the update.
        assert (out["old_per_token_logps"] - out["sampling_per_token_logps"])[mask].abs().max() < 1e-3
    with meander.sync.connect(sums) as client:
        groups = list(client.stream_groups(rollouts.run, follow=False))
        assert len(groups) == 4 and all(g.advantage["group_size"] == 4 for g in groups)
        assert (
            {g.advantage["policy_version_min"] for g in groups}
            == set(pushed)
            == {g.advantage["policy_version_max"] for g in groups}
        )
        told = client.thread.run(stored_updates(client.asynchronous, rollouts.run))
        newest = meander.sync.policy.policy(client, "sums")["policy_version"]
        meander.sync.policy.push_policy(client, None, "sums")
    history = [h for h in trainer.state.log_history if "loss" in h]
    assert [(u["step"], u["loss"], u["lr"]) for u in told] == [
        (h["step"], h["loss"], h["learning_rate"]) for h in history
    ]
    assert all(u["clip_share"] >= 0 and u["trainer"] == "trl" for u in told)
    assert told[-1]["policy_version"] == newest and len(told) == 4
    logged = [h for h in trainer.state.log_history if "reward" in h]
    assert len(logged) >= 2 and rollouts.again == 0
    rollouts.close()


def test_example(sums, tmp_path):
    """The example trains, and measures before and after."""
    command = [sys.executable, ROOT / "pkg/client/python/examples/trl_sums.py", "--url", sums, "--model", SUMS]
    command += ["--out", tmp_path, "--updates", "1", "--prompts", "4", "--samples", "2", "--held-out", "2"]
    env = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "pkg/client/python")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["updates"] == 1 and 0 <= summary["before"] <= 1 and 0 <= summary["after"] <= 1


def test_whole_weights(sums, tmp_path):
    """Without an adapter, the lane follows with whole weights."""
    rollouts = plug.Rollouts(sums, "sums", fields=FIELDS)
    trainer_of(tmp_path, rollouts, None, max_steps=1).train()
    with meander.sync.connect(sums) as client:
        now = meander.sync.policy.policy(client, "sums")
        assert now["policy_version"] == rollouts.version and now["weights"]
        meander.sync.policy.push_policy(client, None, "sums")
    rollouts.close()


class FakeTrainer:
    """What a rollout_func reads of a trainer whose weights stay."""

    def __init__(self, **args):
        settings = {
            "repetition_penalty": 1.0,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 0,
            "min_p": None,
            "max_completion_length": 8,
        }
        self.args = type("Args", (), settings | args)()
        self.model, self.num_generations, self.num_generations_eval = torch.nn.Linear(1, 1), 4, 1
        self.state = type("State", (), {"global_step": -1})()  # as pushed

    def add_callback(self, callback):
        """It takes no step."""


def test_settings(sums):
    """Conversations, what the sampler is told, evaluations, and what a lane cannot do."""
    rollouts = plug.Rollouts(sums, "sums", fields=lambda prompt: FIELDS | {"seed": len(prompt)})
    chat = [{"role": "user", "content": "1+1=?"}]
    out = rollouts([chat] * 4 + ["2+2=?"] * 2, FakeTrainer())
    assert {len(v) for v in out.values()} == {6} and "env_mask" not in out
    assert all(len(a) == len(b) <= 8 for a, b in zip(out["completion_ids"], out["logprobs"], strict=True))
    trainer = FakeTrainer()
    trainer.model.eval()
    assert len(rollouts(["3+3=?"] * 2, trainer)["prompt_ids"]) == 2
    with meander.sync.connect(sums) as client:
        groups = list(client.stream_groups(rollouts.run, follow=False))
        assert sorted((g.advantage["group_size"], g.advantage.get("validation", False)) for g in groups) == [
            (1, True),
            (1, True),
            (2, False),
            (4, False),
        ]
        text = groups[0].samples[0].text.settings
        assert text["temperature"] == 0.7 and text["top_p"] == 0.9 and text["max_new_tokens"] == 8
    with pytest.raises(ValueError, match="repetition_penalty: 1.1"):
        rollouts(["1+1=?"], FakeTrainer(repetition_penalty=1.1))
    rollouts.close()


def test_failed_samples(sums):
    """Samples that fail are asked for again until their number is whole; the last attempt says why."""
    name = "trl" + uuid.uuid4().hex[:6]
    fields = {"reward": [{"name": f"external:{name}"}], "text": {"tokens_per_event": 8}}
    rollouts = plug.Rollouts(sums, "sums", name, fields=fields, attempts=2, timeout=50)
    failing = [3]  # samples that still fail

    async def judge(client):
        async for t in client.stream_trajectories(name):
            verdict = {"value": None, "error": "no idea"} if failing[0] > 0 else {"value": 0.5}
            failing[0] -= 1
            await client.verdict(name, t["uid"], t["sample_index"], name=name, **verdict)

    with meander.sync.connect(sums) as client:
        task = asyncio.run_coroutine_threadsafe(judge(client.asynchronous), client.thread.loop)
        out = rollouts(["1+2=?"] * 4, FakeTrainer())
        assert out["meander_reward"] == [0.5] * 4 and len(out["completion_ids"]) == 4 and rollouts.again == 3
        failing[0] = 1000
        with pytest.raises(plug.Unanswered, match="4 of 4 samples failed 2 times: no sample was scored"):
            rollouts(["3+4=?"] * 4, FakeTrainer())
        task.cancel()
    rollouts.close()


def test_async_worker(sums):
    """The worker's samples pass through the data set and batcher of AsyncGRPOTrainer, which itself needs a GPU."""
    module = pytest.importorskip(
        "trl.experimental.async_grpo.async_grpo_trainer", reason="this TRL has no AsyncGRPOTrainer"
    )
    prompts = [[{"role": "user", "content": p}] for p in PROMPTS]
    worker = plug.RolloutWorker(
        sums, prompts, "sums", num_generations=4, ahead=3, most=8, fields=FIELDS, text={"temperature": 1.0}
    )
    for protocol in (module.RolloutWorkerProtocol, module.WeightTransferProtocol):
        assert all(callable(getattr(worker, n)) for n in vars(protocol) if not n.startswith("_"))
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(SUMS, dtype=torch.float32), LORA)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B" in n:
                p.normal_(std=0.01)
    worker.init_weight_transfer()
    worker.pause()
    with pytest.raises(meander.policy.PolicyRefused, match="the network has none"):
        worker.send_weights(iter([("another", torch.zeros(1))]))
    worker.send_weights(module._iter_vllm_named_params(AutoModelForCausalLM.from_pretrained(SUMS, dtype=torch.float32)))
    with meander.sync.connect(sums) as client:
        assert meander.sync.policy.policy(client, "sums")["weights"]
    worker.attach(model)
    worker.send_weights(module._iter_vllm_named_params(model))
    worker.resume()
    worker.update_model_version(7)
    worker.start()
    metrics = {
        k: []
        for k in (
            "sample/dropped_stale_total",
            "sample/rollout_queue_size",
            "sample/time_in_queue_s",
            "sample/staleness_mean",
            "sample/staleness_max",
        )
    }
    samples = module.RolloutQueueDataset(
        worker.rollout_buffer, lambda: 7, worker.check_health, 60, metrics, poll_interval_s=1
    )
    rows = next(iter(module.FixedCountBatcher(samples, 1, 16)))
    packed = rows[0].pack()
    assert len(rows[0].samples) == 16 and len(packed["old_log_probs"]) == sum(
        int(s["completion_mask"].sum()) for s in rows[0].samples
    )
    for s in rows[0].samples:
        assert len(s["input_ids"]) == len(s["completion_mask"]) == len(s["old_log_probs"])
        with torch.no_grad():
            ids = torch.from_numpy(s["input_ids"])[None]
            new = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
        where = s["completion_mask"][1:] == 1
        assert np.abs(new - s["old_log_probs"][1:])[where].max() < 1e-3, "the weights that were sent drew it"
    assert set(metrics["sample/staleness_max"]) == {0.0}
    with pytest.raises(RuntimeError, match="the prompts have ended"):
        for _ in samples:
            pass
    with pytest.raises(queue.Empty):
        worker.metrics_queue.get_nowait()
    worker.stop()
    worker.destroy()
    with meander.sync.connect(sums) as client:
        meander.sync.policy.push_policy(client, None, "sums")


def test_advantages_are_those_that_were_asked_for(sums):
    """The worker passes on the advantages of the pipeline; where TRL makes its own, other ones are refused."""
    pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker", reason="this TRL has no AsyncGRPOTrainer")
    for advantage, weight in (({"estimator": "rloo"}, 4 / 3), ({}, None)):
        fields = FIELDS | ({"advantage": advantage} if advantage else {})
        worker = plug.RolloutWorker(sums, PROMPTS[:4], "sums", num_generations=4, fields=fields, timeout=50)
        worker.start()
        samples = [worker.rollout_buffer.get(timeout=50) for _ in range(16)]
        for number in range(4):
            group = [s for s in samples if s.group_id == number]
            rewards = np.array([s.metrics["reward"] for s in group])
            off = rewards - rewards.mean()
            want = off * weight if weight else off / (rewards.std(ddof=1) + 1e-6)
            assert [s.advantage for s in group] == pytest.approx(want, abs=1e-5)
        assert any(s.advantage for s in samples)
        worker.stop()
        worker.destroy()
    each = FIELDS | {"advantage": {"estimator": "reinforce_plus_plus", "gamma": 0.9}, "batch": {"id": "b", "groups": 1}}
    worker = plug.RolloutWorker(sums, PROMPTS[:1], "sums", num_generations=4, fields=each, timeout=50)
    worker.start()
    with pytest.raises(ValueError, match="gives each token an advantage of its own"):
        concurrent.futures.wait([worker._work], 50)
        worker.check_health(50)
    worker.destroy()


def test_an_estimator_beside_trls_own_is_refused(sums, tmp_path):
    rollouts = plug.Rollouts(sums, "sums", fields=FIELDS | {"advantage": {"estimator": "rloo"}})
    trainer = trainer_of(tmp_path, rollouts)
    with pytest.raises(ValueError, match="fields.advantage: .*rloo.*must be absent: TRL computes advantages"):
        trainer.train()
    rollouts.close()
