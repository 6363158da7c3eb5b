"""The local cache of the steps of samples."""

import pytest

import meander
from conftest import first, publish


def test_steps_are_read_from_the_folder_again(run, url, tmp_path):
    """By another connection, and when the server has them no more; what is damaged is read of the server."""

    async def test(client, name):
        await publish(client, name, "u0", batch="b0", groups=1)
        seen = await first(client.batches(name, timeout=50))

        async def again(hits):
            async with meander.connect(url, cache=tmp_path / "cache", cache_bytes=1 << 20) as cached:
                batch = await first(cached.batches(name, whole=False, timeout=50))
                (got,) = [m async for m in batch.micro(2)]
                assert (got["latents"] == seen["latents"]).all() and cached.cache.hits == hits

        await again(0)
        await again(2)
        files = sorted((tmp_path / "cache").iterdir())
        assert len(files) == 2
        files[0].write_bytes(files[0].read_bytes()[:-1] + b"x")
        await again(1)
        for s in seen.samples:
            for ref in s.trajectory["steps"]:
                await client.js.delete_msg("MDR_STEPS", ref["seq"])
        await again(2)
        files[0].unlink()
        with pytest.raises(meander.Gone, match="is no longer stored"):
            await again(1)

    run(test)


def test_the_folder_is_bounded(run, url, tmp_path):
    """What was used longest ago goes first; what is larger than the whole is not kept."""

    async def test(client, name):
        for k in range(4):
            await publish(client, name, f"u{k}", batch=f"b{k}", groups=1)

        async def kept(size):
            folder = tmp_path / str(size)
            async with meander.connect(url, cache=folder, cache_bytes=size) as cached:
                batches = aiter(cached.batches(name, timeout=50))
                for _ in range(4):
                    await anext(batches)
                await batches.aclose()
            return [f.stat().st_size for f in folder.iterdir()]

        sizes = await kept(1 << 24)
        assert len(sizes) == 8
        few = await kept(int(2.5 * max(sizes)))
        assert 1 <= len(few) <= 2 and sum(few) <= 2.5 * max(sizes)
        assert await kept(100) == []
        with pytest.raises(ValueError, match="cache_bytes: 0; must be at least 1"):
            async with meander.connect(url, cache=tmp_path, cache_bytes=0):
                pass

    run(test)
