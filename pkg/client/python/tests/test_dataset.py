"""Batches through torch's DataLoader against a real pipeline: each group once, whatever the workers and processes."""

import asyncio
import json
import socket
import subprocess
import sys
import uuid

import msgpack
import pytest

import meander
from conftest import ENVIRONMENT, ROOT, publish

torch = pytest.importorskip("torch", reason="data sets need torch, which is not installed here")

from meander.plugs.dataset import BatchDataset  # noqa: E402


@pytest.fixture(scope="module")
def stored(url):
    """The name of a run of seven groups, in batches b0 (4) and b1 (3), all closed."""
    name = "data" + uuid.uuid4().hex[:8]

    async def make():
        async with meander.connect(url) as client:
            for i in range(7):
                await publish(client, name, f"u{i}", f"b{i // 4}", 4 - i // 4, seed=i)
            batches = aiter(client.batches(name, timeout=60))
            for _ in range(2):
                await anext(batches)

    asyncio.run(make())
    return name


def uids(batches):
    return [sorted(set(b.get("uid", []))) for b in batches]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers(url, stored, workers):
    """The batches and their order are those of the reader, of any number of workers."""
    with meander.sync.connect(url) as client:
        want = [
            (b.name, sorted(set(b["uid"])), b.cursor, b["latents"])
            for b in client.batches(stored, groups=2, follow=False)
        ]
    got = list(BatchDataset(url, stored, groups=2, follow=False).loader(workers))
    assert [(b["name"], sorted(set(b["uid"])), b["cursor"]) for b in got] == [w[:3] for w in want] and len(got) == 3
    for b, w in zip(got, want, strict=True):
        assert (
            b["size"] == 4
            and torch.equal(b["latents"], torch.from_numpy(w[3]))
            and b["advantages"].dtype == torch.float64
        )


@pytest.mark.parametrize("workers", [0, 1])
def test_micro_batches(url, stored, workers):
    """A batch comes as micro-batches, whose rows together are those of the batch, and says which is the last."""
    want = list(BatchDataset(url, stored, groups=2, follow=False).loader())
    got = list(BatchDataset(url, stored, groups=2, follow=False, micro=3).loader(workers))
    assert [(b["size"], b["last"]) for b in got] == [(3, False), (1, True)] * 3 and all(b["last"] for b in want)
    for k, b in enumerate(want):
        parts = got[2 * k : 2 * k + 2]
        assert {p["cursor"] for p in parts} == {b["cursor"]}
        for name in ("latents", "next_latents", "advantages", "log_probs"):
            assert torch.equal(torch.cat([p[name] for p in parts]), b[name])
    with pytest.raises(ValueError, match="num_workers: 2; must be 0 or 1 with micro"):
        next(iter(BatchDataset(url, stored, groups=2, follow=False, micro=3).loader(2)))


@pytest.mark.parametrize("workers", [0, 2])
def test_acknowledged(url, stored, workers):
    """What is acknowledged comes no more, to this data set or a later one of the name; what is not comes again."""
    name = f"trainer-{workers}"
    data = BatchDataset(url, stored, name, groups=2, follow=False)
    loader = data.loader(workers)
    seen = []
    for batch in loader:
        seen.append(batch)
        if len(seen) == 2:
            break
    data.done(seen[0])
    again = uids(loader)
    assert again[0] == uids(seen)[1] and len(again) == 2, "the second comes again, first"
    later = BatchDataset(url, stored, name, groups=2, follow=False)
    assert uids(later.loader(workers)) == again
    with pytest.raises(meander.Taken):
        data.done(seen[1])
    for batch in later.loader(workers):
        later.done(batch)
    last = BatchDataset(url, stored, name, groups=1, follow=False)
    rest = list(last.loader(workers))
    assert len(rest) == 1 and not set(uids(rest)[0]) & set(sum([*uids(seen), *again], [])), (
        "the group that was one too few"
    )
    for closing in (data, later, last):
        closing.close()


def test_named_batches(url, stored):
    got = list(BatchDataset(url, stored, limit=2).loader(2))
    assert {b["name"]: len(set(b["uid"])) for b in got} == {"b0": 4, "b1": 3}
    assert [b["name"] for b in BatchDataset(url, stored, limit=1)] == [got[0]["name"]]
    assert [b["name"] for b in BatchDataset(url, stored, after=got[0]["cursor"], follow=False)] == [got[1]["name"]]
    assert list(BatchDataset(url, "no-such-run", follow=False).loader(2)) == []


def test_errors(url, stored):
    """Errors of a worker are raised where the batch is asked for."""
    with pytest.raises(TimeoutError, match="nothing came for 1 s"):
        list(BatchDataset(url, "no-such-run", timeout=1).loader(1))
    with pytest.raises(ValueError, match="prefetch: 0; must be at least 1"):
        BatchDataset(url, stored, prefetch=0)
    with pytest.raises(meander.CursorError, match="of another store"):
        BatchDataset(url, stored, "x").done("5@77")
    loader = BatchDataset(url, stored, limit=1).loader(1, persistent_workers=True)
    assert len(list(loader)) == 1
    with pytest.raises(RuntimeError, match="persistent_workers"):
        list(loader)


MAKE = "import sys; from meander.plugs.dataset import BatchDataset; BatchDataset(*sys.argv[1:])"
RANK = """
import json, sys, torch.distributed as dist
from meander.plugs.dataset import BatchDataset
dist.init_process_group("gloo")
data = BatchDataset(sys.argv[1], sys.argv[2], "ranks" + sys.argv[3], groups=3, follow=False)
for batch in data.loader(int(sys.argv[3])):
    print("batch", json.dumps([dist.get_rank(), batch["cursor"], sorted(set(batch.get("uid", [])))]), flush=True)
    data.done(batch)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks(url, stored, workers, tmp_path):
    """Two processes take as many steps; together a batch of theirs is the batch of one."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    whole = {b["cursor"]: sorted(set(b["uid"])) for b in BatchDataset(url, stored, groups=3, follow=False)}
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    env = ENVIRONMENT | {
        "PYTHONPATH": str(ROOT / "pkg/client/python"),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), url, stored, str(workers)],
            env=env | {"RANK": str(r)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    said = [line for p in processes for line in p.communicate(timeout=120)[0].splitlines()]
    lines = [json.loads(line.removeprefix("batch ")) for line in said if line.startswith("batch ")]
    assert all(p.returncode == 0 for p in processes)
    assert sorted(r for r, _, _ in lines) == [0, 0, 1, 1], "as many steps"
    for cursor, want in whole.items():
        parts = [u for _, c, u in lines if c == cursor]
        assert sorted(sum(parts, [])) == want and sorted(map(len, parts)) == [1, 2]
    alone = subprocess.run([sys.executable, "-c", MAKE, url, stored],
                                    env=env | {"RANK": "0"}, capture_output=True, text=True)  # fmt: skip
    assert "behind init_process_group" in alone.stderr


def test_a_batch_of_which_nothing_is_there(url):
    """It is an error, also from a worker; or an empty batch where asked for. An async convert is awaited."""
    name = "none" + uuid.uuid4().hex[:8]

    async def make():
        async with meander.connect(url) as client:

            async def fails(msg):
                await msg.respond(msgpack.packb({"v": 1, "error": "no face in the image"}))

            await client.nc.subscribe(f"mdr.v1.score.{name}", cb=fails)
            await client.publish(
                name, "a fox", uid="x", group_size=2, num_inference_steps=4, reward=[{"name": f"nats:{name}"}],
                batch={"id": "b", "groups": 1},
            )
            batch = await anext(aiter(client.batches(name, timeout=60, empty="give")))
            assert batch.size == 0 and "no face" in batch.left_out["x"]

    async def convert(batch):
        await asyncio.sleep(0)
        return batch.name, batch.size, dict(batch.left_out)

    asyncio.run(make())
    for workers in (0, 1):
        with pytest.raises(meander.EmptyBatch, match="none of its 1 groups counts: 1 x status failed: .*no face"):
            list(BatchDataset(url, name, follow=False).loader(workers))
    ((batch, size, left),) = BatchDataset(url, name, follow=False, empty="give", convert=convert)
    assert (batch, size, list(left)) == ("b", 0, ["x"])
