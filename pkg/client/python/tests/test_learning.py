"""The whole loop on the model signs: meander up, trainers beside it, a few small updates."""

import asyncio
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

import meander  # noqa: E402
from meander import lease  # noqa: E402
from conftest import ENVIRONMENT, ROOT, SIGNS, Up, announced  # noqa: E402
from meander.train import evaluate, losses, prompts, records  # noqa: E402
from meander.train.config import Config  # noqa: E402
from meander.train.loop import train  # noqa: E402
from meander.train.model import digest  # noqa: E402

HERE = pathlib.Path(__file__).parents[1]
PROMPTS = ROOT / "deploy/learn/prompts.txt"
SMALL = {
    "prompts": str(PROMPTS), "model": str(SIGNS), "groups": 2, "group_size": 4, "rank": 4, "updates": 3,
    "tensorboard": False, "patience": 120.0
}


def config(url, out, **fields):
    return Config(**(SMALL | {"nats": url, "out": str(out), "run": out.name} | fields))


def trained(url, out, **fields):
    """Trains in this process, and returns the log's updates."""
    out.mkdir(parents=True, exist_ok=True)
    asyncio.run(asyncio.wait_for(train(config(url, out, **fields)), 300))
    return updates(out)


def updates(out):
    lines = (out / "log.jsonl").read_text().splitlines() if (out / "log.jsonl").exists() else []
    return [r for r in map(json.loads, lines) if r["kind"] == "update"]


def started(url, out, *launcher, **fields):
    """A trainer as a process of its own."""
    flags = []
    for name, value in (SMALL | {"nats": url, "out": str(out), "run_name": out.name} | fields).items():
        name = name.replace("_", "-")
        flags += [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    out.mkdir(parents=True, exist_ok=True)
    env = ENVIRONMENT | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with open(out / "stderr", "ab") as err:
        return subprocess.Popen(
            [sys.executable, "-m", *launcher, "meander.train", *flags], stdout=err, stderr=err, env=env
        )


def ended(process, out, seconds=300):
    assert process.wait(seconds) == 0, (out / "stderr").read_text()[-3000:]


async def until(process, out, count):
    """Waits for that many updates in the log of a process."""
    while len(updates(out)) < count:
        assert process.poll() is None, (out / "stderr").read_text()[-3000:]
        await asyncio.sleep(0.02)


def adapter(out):
    from safetensors.torch import load_file

    return load_file(out / "checkpoint/adapter/adapter_model.safetensors")


@pytest.fixture(scope="module")
def whole(signs, tmp_path_factory):
    """A run that nothing happened to."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, trained(signs, out)


def test_ratio_is_one_and_again_after_each_push(whole):
    _, log = whole
    assert [r["behind"] for r in log] == [0, 0, 0]
    assert len({r["made_by"][0] for r in log}) == 3, "each batch is made by the weights of the update before"
    assert max(max(r["ratio_off"]) for r in log) < 1e-6 and all(len(r["ratio_off"]) == 2 for r in log)
    assert len({r["pushed"] for r in log}) == 3
    for r in log:
        assert set(r["seconds"]) == {"rollout", "read", "update", "push"} and r["seconds"]["read"] > 0
        assert r["waiting"] == pytest.approx(r["seconds"]["rollout"] / sum(r["seconds"].values()), abs=0.01)


def told(url, run):
    """The updates that a trainer told of a run."""

    async def read():
        async with meander.connect(url) as client:
            return [u async for u in _first(client.updates(run), 3)]

    return asyncio.run(asyncio.wait_for(read(), 60))


async def _first(events, count):
    async with contextlib.aclosing(events):
        async for e in events:
            yield e
            if (count := count - 1) == 0:
                return


def test_updates_name_what_they_are_made_of(signs, whole):
    out, log = whole
    made = told(signs, out.name)
    base = log[0]["made_by"][0]
    assert [u["weights_before"] for u in made] == [base, *(u["weights_digest"] for u in made[:-1])]
    assert [u["batch_digest"] for u in made] == [r["batch_digest"] for r in log]
    assert json.loads(made[0]["settings"])["lr"] == 2e-3 and "torch" in made[0]["code"]
    assert "nats" not in json.loads(made[0]["settings"])
    assert all(u["state"]["size"] > 3 * sum(t.nbytes for t in adapter(out).values()) for u in made[1:])
    assert made[-1]["average_digest"] != made[-2]["average_digest"]


def test_same_seeds_give_the_same_run_even_if_it_is_killed(signs, whole, tmp_path):
    out, more = tmp_path / "killed", {"free_read_steps": True, "cache": str(tmp_path / "cache")}
    process = started(signs, out, **more)
    asyncio.run(asyncio.wait_for(until(process, out, 1), 300))
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = len(updates(out))
    assert 1 <= before <= 2
    log = trained(signs, out, **more)
    assert any((tmp_path / "cache").rglob("*"))
    assert [r["batch"] for r in log] == ["u000000", "u000001", "u000002"], "none is lost, none is learned from twice"
    for r, want in zip(log, whole[1], strict=True):
        assert [r[k] for k in ("batch_digest", "made_by", "adapter_digest")] == [
            want[k] for k in ("batch_digest", "made_by", "adapter_digest")
        ]
    assert digest(adapter(out)) == digest(adapter(whole[0]))
    with pytest.raises(ValueError, match="--run"):
        trained(signs, tmp_path / "other", run="killed")


def test_same_seeds_give_the_same_run_even_if_the_pipeline_is_killed(binary, whole, tmp_path):
    """The server and all services, while the trainer evaluates, reads and pushes: it waits until they are back."""
    held, out = tmp_path / "held", tmp_path / "away"
    held.write_text('a red sign that says "7"\n')
    up = Up(tmp_path, None, "--batch", "16", model=SIGNS).start()
    asyncio.run(announced(up.url))
    process = started(up.url, out, held_out=str(held), gold="", variety=0, eval_every=1, stop=False)

    async def test():
        for count in range(3):
            await until(process, out, count)
            up.stop(kill=True)
            up.start()

    try:
        asyncio.run(asyncio.wait_for(test(), 300))
        ended(process, out)
    finally:
        process.kill()
        up.stop()
    assert [r["adapter_digest"] for r in updates(out)] == [r["adapter_digest"] for r in whole[1]]


@pytest.mark.parametrize("loss", [name for name in losses.LOSSES if name not in ("ppo", "diffusion_opd")])
def test_each_loss_trains(signs, tmp_path, loss):
    """That of a teacher is trained with one in test_teacher.py."""
    log = trained(signs, tmp_path / loss, loss=loss, updates=2)
    assert [r["behind"] for r in log] == [0, 0] and len({r["made_by"][0] for r in log}) == 2
    assert max(max(r["ratio_off"]) for r in log) < 1e-6, "the samplers had the weights of the update before"
    assert all(r["grad_norm"] > 0 and set(losses.LOSSES[loss].figures) <= r.keys() for r in log)


def test_an_update_of_two_batches_goes_on_where_it_was_killed(signs, tmp_path):
    """A window that moves, a learning rate that changes, two batches of an update and clean latents: all of them again
    to the bit, also from before the first checkpoint behind a batch."""
    fields = {
        "accumulate": 2, "checkpoint_every": 2, "loss": "diffusion_nft", "lr_schedule": "cosine", "warmup": 1,
        "sde_steps": "0-2", "sde_window": 1, "sde_window_order": "progressive", "stop": False
    }
    process = started(signs, tmp_path / "cut", **fields)
    asyncio.run(asyncio.wait_for(until(process, tmp_path / "cut", 1), 300))
    process.send_signal(signal.SIGKILL)
    process.wait()
    log = trained(signs, tmp_path / "cut", **fields)
    assert [r["batch"] for r in log] == ["u000000+u000001", "u000002+u000003", "u000004+u000005"]
    assert [r["steps"] for r in log] == [[0], [1], [2]] and [r["lr"] for r in log] == pytest.approx([2e-3, 2e-3, 1e-3])
    for r, want in zip(log, trained(signs, tmp_path / "uncut", **fields), strict=True):
        assert [r[k] for k in ("batch_digest", "made_by", "adapter_digest", "loss")] == [
            want[k] for k in ("batch_digest", "made_by", "adapter_digest", "loss")
        ]


def test_two_trainers_read_one_run_and_one_is_killed(signs, tmp_path):
    """A second trainer, of another loss, follows; it dies in the middle, and reads on behind a place of its own."""
    first, second = tmp_path / "two", tmp_path / "second"
    follower = {"run_name": "two", "trainer": "second", "follow": True, "loss": "grpo_guard"}
    process = started(signs, second, **follower)

    async def side_by_side():
        first.mkdir()
        leader = asyncio.ensure_future(train(config(signs, first, updates=4)))
        await until(process, second, 2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        await leader

    asyncio.run(asyncio.wait_for(side_by_side(), 300))
    again = trained(signs, second, run="two", trainer="second", follow=True, loss="grpo_guard", updates=4)
    log = updates(first)
    assert [r["batch"] for r in log] == [r["batch"] for r in again] == [f"u{i:06d}" for i in range(4)]
    assert [r["batch_digest"] for r in log] == [r["batch_digest"] for r in again]
    assert digest(adapter(first)) != digest(adapter(second))
    assert all(p.get("by") != "second" for p in asyncio.run(history(signs))), "a follower pushes nothing"


async def history(url):
    async with meander.connect(url) as client:
        return await meander.policy.policy_history(client)


def test_updates_that_change_nothing(signs, tmp_path):
    """Batches without variance leave the adapter zero: the base stays, in evaluations too, and nothing is refused."""
    unread = {"reward": [{"name": "glyph", "ground_truth": "#" * 40}]}
    bodies = [{"prompt": line} | unread for line in PROMPTS.read_text().splitlines()[:8]]
    (tmp_path / "still").write_text("".join(json.dumps(b) + "\n" for b in bodies))
    (tmp_path / "held").write_text('a red sign that says "7"\n')
    before = asyncio.run(history(signs))
    out = tmp_path / "nothing"
    evaluated = {"held_out": str(tmp_path / "held"), "eval_every": 1, "gold": "", "variety": 0}
    log = trained(signs, out, prompts=str(tmp_path / "still"), updates=2, **evaluated)
    assert [(r["zero_std"], r["used"], r["behind"]) for r in log] == [(1, 0, 0)] * 2
    assert all(not p.get("adapter") for p in asyncio.run(history(signs))[len(before):])
    again = trained(signs, tmp_path / "after", updates=1)
    assert again[0]["behind"] == 0 and max(again[0]["ratio_off"]) < 1e-6, "another run begins on the base"


def test_an_update_that_samplers_cannot_see(signs, tmp_path):
    """One that is lost in rounding is refused by them: the version before stays, and the run goes on with it."""
    log = trained(signs, tmp_path / "unseen", updates=2, lr=1e-30, ema=0)
    assert [r["behind"] for r in log] == [0, 0] and len({r["pushed"] for r in log}) == 1
    lines = [json.loads(line) for line in (tmp_path / "unseen/log.jsonl").read_text().splitlines()]
    said = [r["text"] for r in lines if r["kind"] == "alarm" and r["alarm"] == "unchanged"]
    assert said and "which the samplers keep" in said[0]


def test_two_trainers_do_not_push_to_one_lane(signs, tmp_path):
    async def test():
        async with meander.connect(signs) as client, lease.Lease(client, "signs", "b of run y").held():
            await train(config(signs, tmp_path / "late", updates=1))

    (tmp_path / "late").mkdir()
    before = asyncio.run(history(signs))
    with pytest.raises(lease.Held, match="lane signs: b of run y trains it"):
        asyncio.run(asyncio.wait_for(test(), 120))
    after = asyncio.run(history(signs))
    assert after == [*before[:-1], before[-1] | {"epoch": after[-1]["epoch"]}], "the lane was taken, and nothing pushed"


TORCHRUN = ("torch.distributed.run", "--standalone")


@pytest.mark.parametrize("name, launcher, fields", [
    ("torchrun", (*TORCHRUN, "--nproc-per-node=3"), {}),
    ("accelerate", ("accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0"), {}),
    ("sharded", (*TORCHRUN, "--nproc-per-node=2"), {"shard": True}),
    ("sharded-more", (*TORCHRUN, "--nproc-per-node=3"), {"shard": True, "loss": "gspo"}),
])  # fmt: skip
def test_processes_of_one_trainer(signs, tmp_path, name, launcher, fields):
    """Two or three processes share each batch of two groups and add their gradients: what one process makes of the same
    batches, also if each has a part of the network."""
    two, one = tmp_path / name, tmp_path / "one"
    before = len(asyncio.run(history(signs)))
    ended(started(signs, two, *launcher, "-m", updates=2, **fields), two)
    pushed = asyncio.run(history(signs))[before:]
    assert [p["by"] for p in pushed] == ["trainer"] * len(pushed) and len(pushed) in (2, 3), (
        "the first process alone pushes: perhaps the base, and each update once"
    )
    assert pushed[-1]["adapter"]["file"]["digest"] == digest(adapter(two)) == updates(two)[-1]["adapter_digest"]
    log = trained(signs, one, run=name, trainer="one", follow=True, updates=2, **fields | {"shard": False})
    for r, want in zip(updates(two), log, strict=True):
        assert [r[k] for k in ("batch", "batch_digest", "samples", "used")] == [
            want[k] for k in ("batch", "batch_digest", "samples", "used")
        ]
        assert r["ratio_off"] and max(r["ratio_off"]) < 1e-6 and r["reward"] == want["reward"]
        assert r["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    got, want = adapter(two), adapter(one)
    # The second matrices begin at 0. AdamW makes steps of equal length from gradients that differ in their last bits
    # only.
    seconds = [k for k in want if "lora_B" in k]
    assert length(got[k] - want[k] for k in seconds) < 1e-3 * length(want[k] for k in seconds)


def test_torchrun_goes_on_when_a_process_of_a_sharded_network_is_killed(signs, tmp_path):
    """To the bit, with the running average and the learning rate; evaluations, too."""
    (tmp_path / "held").write_text('a red sign that says "7"\n')
    fields = {
        "shard": True, "lr_schedule": "cosine", "held_out": str(tmp_path / "held"), "eval_every": 2, "gold": "",
        "variety": 0, "stop": False
    }
    found = []
    for name in ("shards-cut", "shards-whole"):  # of no other test: they share a pipeline
        out = tmp_path / name
        process = started(signs, out, *TORCHRUN, "--nproc-per-node=2", "--max-restarts=1", "-m", **fields)
        if name == "shards-cut":
            asyncio.run(asyncio.wait_for(until(process, out, 2), 300))  # of which the first is in a checkpoint
            workers = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(workers[-1]), signal.SIGKILL)
        ended(process, out)
        assert ("going on at update" in (out / "stderr").read_text()) == (name == "shards-cut")
        rates = {
            r["update"]: r["rates"]
            for r in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if r["kind"] == "evaluation"
        }
        same = ("batch", "batch_digest", "made_by", "adapter_digest", "loss", "grad_norm", "kl", "lr")
        found.append([[[r[k] for k in same] for r in updates(out)], rates, digest(adapter(out))])
    assert found[0] == found[1] and len(found[0][0]) == 3


def test_settings_that_one_process_cannot_have_are_refused(signs, tmp_path):
    process = started(signs, tmp_path / "alone", shard=True)
    assert process.wait(300) == 1
    assert "meander-train: --shard: one process; must be several" in (tmp_path / "alone/stderr").read_text()
    process = started(signs, tmp_path / "cpu", "accelerate.commands.launch", "--cpu", "--num_processes=2", "-m")
    assert process.wait(300) != 0
    assert "accelerate launch --cpu starts one process of several" in (tmp_path / "cpu/stderr").read_text()


def test_sigterm_gives_the_lane_back_and_what_was_trained_with_stays(signs, tmp_path):
    """The next trainer need not wait for the lease to end; changed settings are said, another alpha refused. It ignores
    SIGINT, as what a script starts in the background does."""
    out = tmp_path / "terminated"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = started(signs, out, updates=50)
    signal.signal(signal.SIGINT, before)
    asyncio.run(asyncio.wait_for(until(process, out, 1), 300))
    process.terminate()
    assert process.wait(300) == 128 + signal.SIGTERM
    said = (out / "stderr").read_text()
    assert f"interrupted; the same command goes on from {out}/checkpoint" in said and "Traceback" not in said
    process = started(signs, out, updates=50, alpha=64)
    assert process.wait(300) == 1
    assert "--alpha: 64; must be 16, by which" in (out / "stderr").read_text()
    process = started(signs, out, updates=len(updates(out)) + 1)
    ended(process, out)
    said = (out / "stderr").read_text().rpartition("--alpha: 64; must be 16")[2]
    assert "settings of this run have changed: --alpha 64 -> 16, --updates 50 -> " in said


def test_a_model_that_is_not_served_is_refused(signs, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(SIGNS, other)
    file = other / "transformer/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"in_channels": 32}))
    process = started(signs, tmp_path / "refused", model=other)
    assert process.wait(300) == 1
    said = (tmp_path / "refused/stderr").read_text()
    assert f"meander-train: --model: {other}: " in said and "Traceback" not in said


def length(tensors):
    return sum(float(v.double().square().sum()) for v in tensors) ** 0.5


def test_ahead(signs, tmp_path):
    """One batch is asked for before the weights for it are there: it is older, and has importance weights."""
    held = tmp_path / "held_out"
    held.write_text('a red sign that says "7"\n')
    before = len(asyncio.run(history(signs)))
    log = trained(signs, tmp_path / "ahead", ahead=1, updates=4, held_out=str(held), eval_every=2, gold="", variety=0)
    known = records.load_checkpoint(tmp_path / "ahead")[1]["made"]
    pushed = {p["weights_digest"]: p.get("note", "") for p in asyncio.run(history(signs))[before:]}
    assert sum(note.startswith("running average") for note in pushed.values()) == 2
    assert pushed.keys() <= known.keys(), "a batch made by the running average is not one of strange weights"
    assert [r["behind"] for r in log] == [0, 1, 1, 1]
    assert all(0 <= r["waiting"] <= 1 for r in log)
    assert log[0]["weight"] == 1 and all(r["weight"] != 1 and abs(r["weight"] - 1) < 0.01 for r in log[1:])
    # Two are sampled at a time, and the one that is whole first is read first.
    assert sorted(r["batch"] for r in log) == [f"u{i:06d}" for i in range(4)]
    assert max(
        max(r["ratio_off"]) for r in log[1:]
    ) > 1e-6 > max(log[0]["ratio_off"]), "the ratio is 1 under the weights of the batch alone"


def test_batches_that_are_cancelled_are_left_out(signs, tmp_path):
    """A trainer goes on with the next one; when none has an advantage, it ends and says why."""
    c = config(signs, tmp_path / "cancelled", follow=True, updates=1)
    draw = prompts.Draw(prompts.read(c.prompts), c.groups, c.seed)

    async def ask(batches, cancelled=False):
        async with meander.connect(signs) as client:
            for number in batches:
                bodies = prompts.training(c, number, draw.batch(number), 0, 0)
                for body in bodies if cancelled else ():  # no verdicts before they are cancelled
                    body["reward"] = [{"name": "external"}]
                await evaluate.publish(client, c.run, bodies, c.patience)
                for body in bodies if cancelled else ():
                    await client.cancel(c.run, body["uid"])
            if cancelled:  # else a batch that is asked for later may be closed before
                async with contextlib.aclosing(client.batch_events(c.run)) as events:
                    while (await anext(events))["batch"] != prompts.batch_id(batches[-1]):
                        pass

    asyncio.run(ask([0], cancelled=True))
    asyncio.run(ask([1]))
    log = trained(signs, tmp_path / "cancelled", follow=True, updates=1)
    assert [r["batch"] for r in log] == ["u000001"]
    lines = [json.loads(line) for line in (tmp_path / "cancelled/log.jsonl").read_text().splitlines()]
    assert [r["text"] for r in lines if r["kind"] == "alarm" and r["alarm"] == "empty"] == [
        "no sample of batch u000000 has an advantage: it is left out: 2 x status cancelled"
    ]
    asyncio.run(ask(range(2, 7), cancelled=True))
    with pytest.raises(
        meander.EventError,
        match="run cancelled: 5 batches one after the other cannot be trained on; the last: no sample of batch u"
    ):
        trained(signs, tmp_path / "cancelled", follow=True, updates=2)
    lines = [json.loads(line) for line in (tmp_path / "cancelled/log.jsonl").read_text().splitlines()]
    left_out = {r["text"].split()[4] for r in lines if r["kind"] == "alarm" and r["alarm"] == "empty"}
    assert left_out == {"u000000", *(f"u{i:06d}" for i in range(2, 7))}, "in whatever order they were closed"


def test_evaluations_begin_with_the_same_noise(signs, tmp_path):
    """With steps that are next to nothing all evaluations measure the same; what they are made of is in the folder."""
    held = tmp_path / "held_out"
    held.write_text('a red sign that says "7"\na blue sign that says "HELLO"\n')
    out = tmp_path / "evaluated"
    trained(signs, out, updates=2, lr=1e-6, held_out=str(held), eval_every=1, gold="", variety=2)
    found = [r for r in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if r["kind"] == "evaluation"]
    assert [r["update"] for r in found] == [0, 1, 2] and all(
        r["samples"] == 4 and set(r["rates"]) == {"glyph"} for r in found
    )
    assert len({r["exact"] for r in found}) == 1
    assert found[0]["diversity"] > 0 and all(
        r["diversity"] == pytest.approx(found[0]["diversity"], rel=1e-3) for r in found
    )
    for name in ("before.png", "after.png", "curve.png", "best/adapter_model.safetensors"):
        assert (out / name).stat().st_size > 1000


def test_what_chose_nothing_is_looked_at_once(signs, tmp_path):
    """Base, last and kept adapter on the test's prompts, at the end; the samplers keep the one that was kept."""
    for name, text in (("held", "7"), ("tested", "HI")):
        (tmp_path / name).write_text(f'a red sign that says "{text}"\n')
    held, tested, out = str(tmp_path / "held"), str(tmp_path / "tested"), tmp_path / "tests"
    fields = {"held_out": held, "test": tested, "test_steps": 6, "updates": 2, "eval_every": 1, "gold": ""}
    fields |= {"variety": 2, "sheet": 0}
    for _ in range(2):  # once more: it is there already
        trained(signs, out, **fields)
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        tests = [r for r in lines if r["kind"] == "test"]
        assert [r["of"] for r in tests] == ["base", "base, 6 steps", "last", "kept"]
        assert all(r["update"] == 2 and r["samples"] == 2 and set(r["rates"]) == {"glyph"} for r in tests)
        assert [r["diversity"] is None for r in tests] == [False, True, False, False]
    assert not (out / "before.png").exists()
    kept = pathlib.Path(out / "best/adapter_model.safetensors").read_bytes()
    served = asyncio.run(history(signs))[-1].get("adapter")
    best = records.load_checkpoint(out)[1]["best"][1]
    assert hashlib.sha256(kept).hexdigest() == served["file"]["digest"] if best else served is None
    with pytest.raises(ValueError, match="--test: 1 of its prompts choose the adapter, too, such as 'a red sign"):
        trained(signs, tmp_path / "same", **fields | {"test": held})


def test_a_run_that_an_alarm_stopped_stays_stopped(signs, tmp_path):
    out = tmp_path / "stopped"
    for limit, flags in ((2, {}), (2, {}), (3, {"stop": False})):
        assert len(trained(signs, out, updates=3, kl_limit=1e-12, **flags)) == limit


def test_own_loop(signs, tmp_path):
    """The small example, with fewer and smaller updates."""
    code = (HERE / "examples/own_loop.py").read_text()
    small = code.replace("20, 8, 16, 1e-4", "2, 2, 4, 1e-4")
    assert small != code
    out = subprocess.run(
        [sys.executable, "-c", small], cwd=ROOT,
        env=ENVIRONMENT | {"PYTHONPATH": str(HERE), "MEANDER_URL": signs, "OUT": str(tmp_path)}, capture_output=True,
        text=True, timeout=300
    )
    assert out.returncode == 0, out.stderr
    lines = out.stdout.splitlines()
    assert len(lines) == 2 and lines[1].startswith("update 2: reward "), out.stdout
