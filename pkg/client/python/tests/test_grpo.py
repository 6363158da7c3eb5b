"""The example that trains a language model on the stream: ratios of 1, adapters that arrive, and weights that are
others noticed."""

import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import meander  # noqa: E402
from conftest import ENVIRONMENT, ROOT, SUMS, first  # noqa: E402

EXAMPLE = ROOT / "pkg/client/python/examples/grpo_sums.py"


@pytest.mark.parametrize("flags, why", [
    (["--patience", "0.001"], "is stored"),
    (["--lane", "other"], "no sampler has announced a model on it"),
])  # fmt: skip
def test_grpo_sums_gives_up_and_says_why(sums, tmp_path, flags, why):
    own = ["--url", sums, "--model", str(SUMS), "--out", str(tmp_path), "--held-out", "100"]
    command = [sys.executable, str(EXAMPLE), *own, *flags]
    env = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "pkg/client/python"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("grpo_sums: ") and why in last, done.stderr[-3000:]


def test_grpo_sums(run, sums, tmp_path):
    command = [
        sys.executable, str(EXAMPLE), "--url", sums, "--model", str(SUMS), "--out", str(tmp_path), "--updates", "3",
        "--prompts", "8", "--held-out", "10"
    ]
    env = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "pkg/client/python"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(log) == 3 and max(r["ratio_off"] for r in log) < 1e-5 and max(r["furthest_token"] for r in log) < 1e-4
    assert [
        r["made_by"] for r in log
    ][1:] == [r["pushed"] for r in log][:-1], "each batch is made by the weights of the update before"
    assert len({r["pushed"] for r in log}) == 3 and json.loads((tmp_path / "summary.json").read_text())["updates"] == 3

    async def test(client, name):
        """Samples of the adapter, looked at by the checkpoint alone, are off by far."""
        import torch
        from transformers import AutoModelForCausalLM

        text = {"logits": {"form": "full"}}
        await client.publish(
            name, "347+58=?", model="sums", group_size=8, text=text, reward=[{"name": "numeric_match"}],
            min_policy_version=log[-1]["pushed"]
        )
        batch = await first(client.batches(name, groups=1, logits=True, timeout=50))
        t, base = batch.torch(), AutoModelForCausalLM.from_pretrained(SUMS, dtype=torch.float32)
        with torch.no_grad():
            logits = base(
                input_ids=t["input_ids"], attention_mask=t["attention_mask"], position_ids=t["position_ids"]
            ).logits[:, t["prompts"].shape[1] - 1 : -1]
        batch.check(batch.recompute_log_prob(batch["logits"]))
        with pytest.raises(meander.RatioOff, match="other weights"):
            batch.check(batch.recompute_log_prob(logits.numpy()))
        # The checkpoint's own samples are its own, padding on the left and all.
        await meander.policy.push_policy(client, None, "sums")
        version = (await meander.policy.policy(client, "sums"))["policy_version"]
        for uid, prompt in (("short", "1+2=?"), ("long", "999-1000=?")):
            await client.publish(name + "base", prompt, uid=uid, model="sums", group_size=4, text=text,
                reward=[{"name": "numeric_match"}],
                                 batch={"id": "b", "groups": 2}, min_policy_version=version)
        batch = await first(client.batches(name + "base", logits=True, timeout=50))
        t = batch.torch()
        with torch.no_grad():
            logits = base(
                input_ids=t["input_ids"], attention_mask=t["attention_mask"], position_ids=t["position_ids"]
            ).logits[:, t["prompts"].shape[1] - 1 : -1].numpy()
        batch.check(batch.recompute_log_prob(logits))
        where = batch["logits_mask"]
        off = np.linalg.norm(logits[where] - batch["logits"][where], axis=1) / np.linalg.norm(logits[where], axis=1)
        assert off.max() < 1e-5, "logits, relative L2"

    run(test, sums)
