"""Log-probs of stored samples under another model, from `meander teacher`."""

import asyncio
import json
import signal
import subprocess
import sys

import numpy as np
import pytest

import meander
from conftest import ENVIRONMENT, ROOT, SIGNS, SUMS, first, publish
from test_texts import ask


@pytest.fixture
def teach(binary, tmp_path):
    """Starts teachers: of a pipeline, by name, with flags. They answer when it returns."""
    processes = []

    def start(url, name, *flags):
        command = [str(binary), "teacher", "--nats", url, "--name", name, *flags]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path, env=ENVIRONMENT, text=True)
        processes.append(process)
        assert any("answers on" in line for line in process.stderr), f"teacher {name} ended with {process.wait(30)}"
        return process

    yield start
    for process in processes:
        killed = process.poll() == -signal.SIGKILL
        process.terminate()
        assert process.wait(30) == 0 or killed
        process.stderr.close()


def test_texts(run, sums, teach):
    """With its own weights a batch has exactly its own log-probs, of either kind, wherever padding is."""
    teach(sums, "texts", "--model", str(SUMS))

    async def test(client, name):
        drawn = {"temperature": 0.7, "top_k": 9}
        await ask(client, name, "u0", "999+1=?", groups=2, text=drawn)
        await ask(client, name, "u1", "7+2=?", groups=2, text=drawn)
        for kind in ("raw", "processed"):
            batch = await first(client.batches(name, log_prob_kind=kind, timeout=50))
            assert np.array_equal(await client.teacher_log_probs("texts", batch), batch["log_probs"])
        s = batch.samples[0]
        reply = await client.teacher_reply("texts", name, s.trajectory["uid"], s.trajectory["sample_index"], top_k=4)
        where = s.text.mask == 1
        assert reply.model == "sums" and reply.weights_digest == s.trajectory["weights_digest"] and not reply.steps
        assert np.array_equal(
            reply.numbers["entropies"], s.text.numbers["entropies"]
        ) and reply.top_ids.shape == (len(where), 4)
        best = reply.top_logits[where, 0] - reply.numbers["log_sum_exps"][where]
        np.testing.assert_allclose(best, s.text.numbers["top_log_probs"][where], rtol=0, atol=1e-6)
        assert (np.diff(reply.top_logits[where]) <= 0).all() and not reply.top_logits[~where].any()
        # 300 tokens and their likeliest do not fit into a reply: they come as blobs.
        long = {"max_new_tokens": 300, "stop_token_ids": [], "temperature": 5.0}
        await ask(client, name + "long", "u", "1+1=?", n=1, text=long)
        s = (await first(client.batches(name + "long", timeout=50))).samples[0]
        reply = await client.teacher_reply("texts", name + "long", s.trajectory["uid"], 0, top_k=4096)
        assert reply.top_logits.shape == (len(s.text.ids), s.text.settings["vocabulary"])
        probability = np.exp(reply.top_logits - reply.numbers["log_sum_exps"][:, None]).sum(axis=1)
        np.testing.assert_allclose(probability[s.text.mask == 1], 1, rtol=0, atol=1e-5)
        with pytest.raises(meander.Unscored, match="sample 9 of group u0 of run .*: no trajectory is stored") as e:
            await client.teacher_reply("texts", name, "u0", 9)
        assert e.value.code == "unknown_sample"
        with pytest.raises(meander.NoTeacher, match="meander teacher --name nobody"):
            await client.teacher_reply("nobody", name, "u0", 0)

    run(test, sums)


def test_images(run, url, teach):
    teach(url, "images", "--model", "synthetic")

    async def test(client, name):
        await publish(client, name, "u", "b")
        batch = await first(client.batches(name, timeout=50))
        assert np.array_equal(await client.teacher_log_probs("images", batch), batch["log_probs"])
        reply = await client.teacher_reply("images", name, "u", 1)
        assert sorted(reply.steps) == [1, 2] and reply.log_prob_kind == "density" and not reply.steps_left_out
        assert reply.velocities is None
        own, finer = [await client.teacher_velocities("images", batch, n) for n in (1, 4)]
        assert own.shape == batch["latents"].shape == finer.shape and own.dtype == np.float32
        # Step events were scored with means of float32, and this is of float64.
        np.testing.assert_allclose(batch.recompute_log_prob(own), batch["log_probs"], rtol=0, atol=1e-6)
        assert np.abs(finer - own).max() > 1e-3
        by_finer = [r.steps for r in await client.teacher_replies("images", batch, substeps=4)]
        want = [[steps[i] for i in (1, 2)] for steps in by_finer]
        np.testing.assert_allclose(batch.recompute_log_prob(finer), want, rtol=0, atol=1e-6)
        for substeps in (-1, 101):
            with pytest.raises(meander.Unscored, match=f"substeps: {substeps}; must be between 0 and 100") as e:
                await client.teacher_velocities("images", batch, substeps)
            assert e.value.code == "invalid"

    run(test)


def adapted():
    """sums in transformers, with an adapter of random weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(SUMS, dtype=torch.float32)
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=1, target_modules="all-linear", init_lora_weights=False))


def test_transformers(run, sums, teach, tmp_path):
    """Log-probs and likeliest tokens are those of transformers and peft, of the checkpoint and with an adapter."""
    torch = pytest.importorskip("torch", reason="no torch: the teacher's numbers are not compared with transformers")
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason=f"no {package}: the teacher's numbers are not compared with its own")
    network = adapted()
    network.save_pretrained(tmp_path / "adapter")
    teach(sums, "base", "--model", str(SUMS))
    teach(sums, "adapted", "--model", str(SUMS), "--adapter", str(tmp_path / "adapter"))

    async def test(client, name):
        await ask(client, name, "u0", "999+1=?", groups=2, text={"temperature": 1.5})
        await ask(client, name, "u1", "7+2=?", groups=2, text={"temperature": 1.5})
        batch = await first(client.batches(name, timeout=50))
        t, mask, means = batch.torch(), batch["response_mask"] == 1, []
        for teacher in ("base", "adapted"):
            with torch.no_grad(), network.disable_adapter() if teacher == "base" else torch.no_grad():
                logits = network(
                    input_ids=t["input_ids"], attention_mask=t["attention_mask"], position_ids=t["position_ids"]
                ).logits
            logits = logits[:, t["prompts"].shape[1] - 1 : -1]
            want = logits.log_softmax(-1)
            got = await client.teacher_log_probs(teacher, batch)
            chosen = want.gather(-1, t["responses"][..., None])[..., 0].numpy()
            np.testing.assert_allclose(got[mask], chosen[mask], rtol=0, atol=1e-5)
            assert not got[~mask].any()
            means.append(got[mask].mean())
            for b, s in enumerate(batch.samples):
                reply = await client.teacher_reply(
                    teacher, name, s.trajectory["uid"], s.trajectory["sample_index"], top_k=5
                )
                rows = slice(s.text.prompt_length, None)
                top = want[b, : len(s.text.ids) - s.text.prompt_length].topk(5)
                log_probs = reply.top_logits[rows] - reply.numbers["log_sum_exps"][rows, None]
                np.testing.assert_allclose(log_probs, top.values.numpy(), rtol=0, atol=1e-5)
                assert np.array_equal(reply.top_ids[rows], top.indices.numpy())
        assert abs(means[0] - means[1]) > 0.01, "the adapter changes them"

    run(test, sums)


def test_distill_sums(sums, teach, tmp_path):
    """The example goes on with what the teacher says of each batch, and names a teacher that does not run."""
    for package in ("torch", "transformers", "peft"):
        pytest.importorskip(package, reason=f"no {package}: the example that distils is not run")
    adapted().save_pretrained(tmp_path / "teacher")
    example = str(ROOT / "pkg/client/python/examples/distill_sums.py")
    flags = [
        "--url", sums, "--model", str(SUMS), "--out", str(tmp_path), "--updates", "2", "--prompts", "8", "--held-out",
        "10"
    ]
    env = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "pkg/client/python"), "OMP_NUM_THREADS": "1"}
    teach(sums, "other", "--model", str(SUMS), "--adapter", str(tmp_path / "teacher"))
    done = subprocess.run(
        [sys.executable, example, *flags, "--teacher", "other"], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(log) == 2 and 0 < log[0]["kl"] < 1 and log[1]["made_by"] == log[0]["pushed"] < log[1]["pushed"]
    done = subprocess.run(
        [sys.executable, example, *flags, "--teacher", "nobody"], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(
        "distill_sums: no teacher nobody answers"
    ), done.stderr[-3000:]


def test_distil_images(signs, teach, tmp_path):
    """A trainer learns from a teacher of finer steps. One that is killed meanwhile, and started again, changes no bit;
    its weights are named, and an update is made again with it."""
    torch = pytest.importorskip("torch", reason="no torch: meander-train is not run")
    from test_learning import adapter, ended, started, told, trained, until

    fields = {"loss": "diffusion_opd", "beta": 0.0, "group_size": 1, "teacher_substeps": 2}
    teach(signs, "fine", "--model", str(SIGNS))
    log = trained(signs, tmp_path / "calm", teacher="fine", **fields)
    assert [r["used"] for r in log] == [2, 2, 2] and log[0]["loss"] > 0
    frail = teach(signs, "frail", "--model", str(SIGNS))
    out = tmp_path / "shaken"
    process = started(signs, out, teacher="frail", **fields)
    asyncio.run(asyncio.wait_for(until(process, out, 1), 300))
    frail.kill()
    frail.wait(30)
    frail = teach(signs, "frail", "--model", str(SIGNS))
    ended(process, out)
    calm, shaken = adapter(tmp_path / "calm"), adapter(out)
    assert calm.keys() == shaken.keys() and all(torch.equal(calm[k], shaken[k]) for k in calm)
    updates = [u for u in told(signs, out.name) if u["step"]]
    teacher = f", teacher signs {updates[0]['weights_before']:.16} on cpu"  # it has the weights that the run began with
    assert len(updates) > 1 and all(teacher in u["code"] for u in updates)
    replay = [sys.executable, "-m", "meander.train", "--replay", f"{out.name}@2", "--nats", signs]
    replay += ["--model", str(SIGNS)]
    env = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "pkg/client/python"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(replay, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "update 2: holds: made again to the bit" in done.stdout, done.stdout + done.stderr
    frail.kill()
    frail.wait(30)
    done = subprocess.run(replay, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "--teacher frail: none has answered" in done.stderr, done.stdout + done.stderr
