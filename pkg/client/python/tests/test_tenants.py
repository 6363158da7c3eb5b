"""Several trainers of one lane, each a tenant of it: with versions and a lease of its own."""

import asyncio
import signal

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

import meander  # noqa: E402
from meander import policy  # noqa: E402
from meander.client.lease import Held, Lease  # noqa: E402
from meander.train.model import digest  # noqa: E402
from test_learning import adapter, ended, started, trained, until, updates  # noqa: E402
from test_policy import lora, put, width  # noqa: E402

SEEDS = {"a": 2, "b": 5}


def learned(out):
    """What a run came to: its batches, what they were made with, and the weights at the end."""
    log = updates(out)
    return [(r["batch_digest"], r["made_by"], r["behind"]) for r in log], digest(adapter(out))


def test_trainers_of_one_lane_learn_what_they_learn_alone(signs, tmp_path):
    alone = {}
    for name, seed in SEEDS.items():
        trained(signs, tmp_path / f"alone-{name}", seed=seed, tenant=f"alone-{name}")
        alone[name] = learned(tmp_path / f"alone-{name}")
    assert alone["a"] != alone["b"]
    outs = {name: tmp_path / f"beside-{name}" for name in SEEDS}
    both = {name: started(signs, outs[name], seed=seed, tenant=name) for name, seed in SEEDS.items()}
    try:
        asyncio.run(asyncio.wait_for(until(both["b"], outs["b"], 1), 300))
        both["b"].send_signal(signal.SIGKILL)
        both["b"].wait()
        ended(both["a"], outs["a"])
        assert learned(outs["a"]) == alone["a"]
        trained(signs, outs["b"], seed=SEEDS["b"], tenant="b")  # goes on, and takes its lease over
        assert learned(outs["b"])[1] == alone["b"][1]
    finally:
        for process in both.values():
            process.kill()
            process.wait()

    async def versions():
        async with meander.connect(signs) as client:
            return [
                {p["weights_digest"] for p in await policy.policy_history(client, "signs", t)}
                for t in ("a", "alone-a", "b", "alone-b")
            ]

    a, alone_a, b, alone_b = asyncio.run(versions())
    assert a == alone_a and b == alone_b and len(a & b) == 1, "of each its own updates, and the checkpoint"


def test_leases_and_pushes_are_of_a_tenant(run, signs, tmp_path):
    async def test(client, name):
        d = await width(client)
        files = [put(tmp_path / str(fill), lora(d=d, fill=fill)) for fill in (0.05, 0.07)]
        main = (await policy.policy(client, "signs"))["policy_version"]
        mine, other = f"{name}-x", f"{name}-y"
        with pytest.raises(policy.NoPolicy, match="its first push begins them"):
            await policy.policy(client, "signs", mine)
        async with Lease(client, "signs", "x", mine).held() as lease:
            with pytest.raises(Held, match="be another tenant"):
                await Lease(client, "signs", "other", mine).take()
            with pytest.raises(Held, match=f"lane signs.{mine}: x trains it"):
                await policy.push_policy(client, files[0], "signs", tenant=mine)
            with pytest.raises(policy.PolicyRefused, match="must be that of the lease"):
                await policy.push_policy(client, files[0], "signs", lease=lease, tenant=other)
            pushed = await policy.push_policy(client, files[0], "signs", lease=lease)
            beside = await policy.push_policy(client, files[1], "signs", tenant=other)
            for p in (pushed, beside):
                (sampler,) = await policy.taken(client, p, 30)
                assert sampler["answer"]["tenant"] == p["tenant"] and sampler["policy_version"] == 1
        assert (pushed["epoch"], beside.get("epoch", 0)) == (1, 0)
        entry = f"$KV.mdr-leases.signs.{other}"  # which is beyond a float
        await client.js.publish(entry, b'{"holder": "x", "mark": "m", "since": 1%s}' % (b"0" * 400))
        with pytest.raises(Held, match="somebody unknown"):
            await policy.push_policy(client, files[0], "signs", tenant=other)
        await client.js.publish(entry, b"")
        again = await policy.rollback_policy(client, 0, "signs", tenant=other)
        assert (again["policy_version"], again["tenant"], again["rollback"]) == (2, other, 0)
        assert (await policy.policy(client, "signs", mine))["policy_version"] == 1
        assert (await policy.policy(client, "signs"))["policy_version"] == main
        for bad in ("a b", "a.b", "*", "é", "x" * 65):
            with pytest.raises(ValueError, match="tenant"):
                await policy.push_policy(client, files[0], "signs", tenant=bad)

    run(test, signs)
