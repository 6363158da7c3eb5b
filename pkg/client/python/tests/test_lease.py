"""One trainer at a time has a lane."""

import asyncio

import pytest

import meander
from meander.lease import Held, Lease


def lease(client, name, holder, expiry=1.0):
    return Lease(client.nc, name, holder, expiry)


def test_another_trainer_is_told_who_has_the_lane(run):
    async def test(client, name):
        async with lease(client, name, "a of run x").held() as first:
            for _ in range(30):  # for longer than it lasts without its holder
                with pytest.raises(Held, match=f"lane {name}: a of run x trains it, .* wait until it has ended"):
                    await lease(client, name, "b of run y").take()
                await asyncio.sleep(0.1)
            first.check()
        async with lease(client, name, "b of run y").held():
            pass

    run(test)


def test_the_lease_of_a_process_that_died_expires(run):
    async def test(client, name):
        await lease(client, name, "a of run x").take()
        while True:
            try:
                return await lease(client, name, "b of run y").take()
            except Held:
                await asyncio.sleep(0.1)

    run(test)


def test_the_same_trainer_takes_its_lane_over(run):
    """As after a crash; the process before, if it still lives, learns of it."""

    async def test(client, name):
        async with lease(client, name, "a of run x").held() as first:
            async with lease(client, name, "a of run x").held() as second:
                while not first.lost:
                    await asyncio.sleep(0.05)
                with pytest.raises(meander.Taken, match=f"lane {name}: a of run x trains it in another process"):
                    first.check()
                second.check()

    run(test)


def test_a_lease_that_the_server_lost_is_taken_again(run):
    async def test(client, name):
        async with lease(client, name, "a of run x").held() as first:
            await client.js.delete_consumer("MDR_POLICIES", first.name)
            while await first.holder_now() is None:
                await asyncio.sleep(0.05)
            first.check()

    run(test)
