"""One trainer at a time has a lane."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import pytest

import meander
from conftest import BINARY
from meander import policy, versions
from meander.client.cursor import api
from meander.client.lease import Held, Lease, holder
from test_policy import lora, put, width

SHORT = 2.0  # seconds that a lease lasts without its holder, in these tests

TRAINER = """
import asyncio, sys
import meander
from meander import policy
from meander.client.cursor import api
from meander.client.lease import Held, Lease

async def main(url, holder, adapter):
    async with meander.connect(url) as client:
        lease = Lease(client, "signs", holder)
        while True:
            try:
                await lease.take()
                break
            except Held:
                await asyncio.sleep(0.1)
        async with lease.held():
            print("has the lane", flush=True)
            for line in sys.stdin:  # which waits for the test, as a trainer that computes
                try:
                    pushed = await policy.push_policy(client, adapter, by=holder, lease=lease)
                    print("pushed", pushed["policy_version"], flush=True)
                except Exception as err:
                    print(type(err).__name__, err, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.contextmanager
def trainer(url, holder, adapter):
    """A trainer in a process of its own, which pushes when it gets a line, and a function that reads what it says."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, url, holder, str(adapter)], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip

    def says(line=""):
        if line:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        return process.stdout.readline().strip()

    try:
        yield process, says
    finally:
        process.kill()
        process.wait(30)
        process.stdin.close()
        process.stdout.close()


@pytest.fixture(autouse=True)
def short(signs):
    """Leases that last two seconds, as an operator may set it."""

    async def change(seconds):
        async with meander.connect(signs) as client:
            config = (await api(client.nc, "STREAM.INFO.KV_mdr-leases"))["config"]
            before = config["max_age"] / 1e9
            config |= {"max_age": int(seconds * 1e9), "duplicate_window": int(seconds * 1e9)}
            await api(client.nc, "STREAM.UPDATE.KV_mdr-leases", config)
            return before

    before = asyncio.run(change(SHORT))
    yield
    asyncio.run(change(before))


@pytest.fixture
def on(run, signs):
    """Runs a test with a client of the pipeline of signs."""
    return lambda test: run(test, signs)


def lease(client, name):
    return Lease(client, "signs", name)


def test_a_trainer_that_was_stopped_is_fenced(on, signs, tmp_path):
    """It was stopped for longer than its lease. Another one took the lane over, and has pushed, or not yet, or has
    ended since."""

    async def adapters(client, _):
        await policy.push_policy(client, None)
        d = await width(client)
        return [put(tmp_path / str(i), lora(d=d, fill=0.03 + 0.001 * i)) for i in range(4)]

    async def pushers(client, _):
        return [p.get("by") for p in await policy.policy_history(client)]

    old_one, *new_ones = on(adapters)
    for adapter, then in zip(new_ones, ("pushed", "not yet", "ended")):
        with trainer(signs, "a of run x", old_one) as (stopped, old):
            assert old() == "has the lane"
            os.kill(stopped.pid, signal.SIGSTOP)
            by = "another trainer" if then == "ended" else "b of run y"
            with trainer(signs, "b of run y", adapter) as (second, new):
                assert new() == "has the lane"
                if then != "not yet":
                    assert new("push").startswith("pushed ")
                if then == "ended":
                    second.stdin.close()
                    assert second.wait(30) == 0
                os.kill(stopped.pid, signal.SIGCONT)
                told = f"Taken lane signs: {by} trains it in another process now; what this one made is not pushed"
                assert old("push") == told == old("push")
                if then == "not yet":
                    assert new("push").startswith("pushed ")
        names = on(pushers)
        assert names[-1] == "b of run y" and "a of run x" not in names, then


def test_who_has_no_lease_does_not_push_to_a_lane_that_a_trainer_has(on, signs, tmp_path):
    """Neither from Python nor with the command, of Go; what began before the lease was taken comes too late."""

    async def test(client, _):
        adapter = put(tmp_path / "a", lora(d=await width(client), fill=0.031))
        before, _ = await versions.last(client, "signs")
        async with lease(client, "a of run x").held() as held:
            with pytest.raises(Held, match="lane signs: a of run x trains it, .* wait until it has ended .2 s after"):
                await policy.push_policy(client, adapter)
            with pytest.raises(Held, match="a of run x"):
                await policy.rollback_policy(client, before["policy_version"])
            command = [str(BINARY), "policy", "push", str(adapter), "--nats", signs, "--store", str(tmp_path / "none")]
            told = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
            assert told.returncode == 2 and 'lane "signs": a of run x trains it' in told.stderr
            late = before | {"policy_version": before["policy_version"] + 1, "parent": before["policy_version"]}
            assert not await versions.store(client, late, before)
            pushed = await policy.push_policy(client, adapter, lease=held)
            assert pushed["epoch"] == held.epoch == before.get("epoch", 0) + 1
        pushed = await policy.push_policy(client, None)
        assert pushed["epoch"] == held.epoch, "what follows without a lease keeps the lane's epoch"

    on(test)


def test_samplers_refuse_what_passed_the_guard_by(on, tmp_path):
    async def test(client, _):
        async with lease(client, "a of run x").held() as held:
            now = await policy.push_policy(client, put(tmp_path, lora(d=await width(client), fill=0.032)), lease=held)
            await policy.taken(client, now)
            forged = now | {
                "policy_version": now["policy_version"] + 1, "parent": now["policy_version"], "epoch": now["epoch"] - 1,
                "weights_digest": "0" * 64,
            }  # fmt: skip
            assert await versions.store(client, forged, now)
            (sampler,) = await policy.taken(client, forged, refused="give")
            assert f"epoch: {now['epoch'] - 1}; must be at least {now['epoch']}" in sampler["answer"]["error"]
            assert (await policy.policy(client, "signs"))["policy_version"] == now["policy_version"]

    on(test)


def test_another_trainer_is_told_who_has_the_lane(on):
    async def test(client, _):
        async with lease(client, "a of run x").held() as first:
            end = asyncio.get_running_loop().time() + 2 * SHORT  # longer than it lasts without its holder
            while asyncio.get_running_loop().time() < end:
                with pytest.raises(Held, match="lane signs: a of run x trains it, .* wait until it has ended"):
                    await lease(client, "b of run y").take()
                await asyncio.sleep(0.1)
            first.check()
        async with lease(client, "b of run y").held():
            pass

    on(test)


def test_the_same_trainer_takes_its_lane_over(on):
    """As after a crash; the process before, if it still lives, learns of it."""

    async def test(client, _):
        async with lease(client, "a of run x").held() as first:
            async with lease(client, "a of run x").held() as second:
                while not first.lost:
                    await asyncio.sleep(0.05)
                with pytest.raises(meander.Taken, match="lane signs: a of run x trains it in another process"):
                    first.check()
                second.check()

    on(test)


def test_a_lease_that_the_server_lost_is_taken_again(on):
    async def test(client, _):
        async with lease(client, "a of run x").held() as first:
            await client.js.purge_stream("KV_mdr-leases")
            while (await holder(client, "signs"))[0] is None:
                await asyncio.sleep(0.05)
            first.check()

    on(test)
