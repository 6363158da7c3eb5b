"""What a run is logged as while it goes on, by a sink that keeps it and by TensorBoard, W&B and trackio themselves."""

import asyncio
import glob
import json
import math
import os
import sqlite3
import statistics
import subprocess
import sys
import uuid

import numpy as np
import pytest

import meander
from conftest import ENVIRONMENT, ROOT, publish
from meander import track


class Kept:
    """A sink that keeps what it gets, and calls when each time."""

    def __init__(self, when=lambda step: None):
        self.points, self.rows, self.when = {}, {}, when

    def log(self, values, step):
        self.points[step] = values
        self.when(step)

    def show(self, rows, step):
        self.rows[step] = rows


async def closed(client, run, groups):
    """The results of a run's groups, once so many have closed."""
    events = client.advantages(run)
    return [await anext(events) for _ in range(groups)]


@pytest.fixture(scope="module")
def stored(url):
    """The name and the results of a run of five groups of two, all closed."""
    name = "track" + uuid.uuid4().hex[:8]

    async def make():
        async with meander.connect(url) as client:
            for i in range(5):
                await publish(client, name, f"u{i}", seed=i, metadata={"data_source": "even" if i % 2 == 0 else "odd"})
            return await closed(client, name, 5)

    return name, asyncio.run(make())


def test_points_are_means_of_groups(url, stored):
    name, results = stored

    async def go(every):
        kept = Kept()
        async with meander.connect(url) as client:
            assert await track.follow(client, name, kept, every=every, samples_every=1, once=True) == 5
        return kept

    kept = asyncio.run(go(2))
    assert list(kept.points) == [2, 4, 5]
    for step, groups in {2: results[:2], 4: results[2:4], 5: results[4:]}.items():
        rewards = [[m["reward"] for m in g["members"]] for g in groups]
        flat = [r for group in rewards for r in group]
        point = kept.points[step]
        assert math.isclose(point["reward/mean"], statistics.fmean(flat)) and point["groups/complete"] == 1
        assert point["reward/min"] == min(flat) and point["reward/max"] == max(flat)
        assert math.isclose(point["reward/std_in_group"], statistics.fmean(statistics.pstdev(r) for r in rewards))
        assert math.isclose(point["score/synthetic"], statistics.fmean(flat)) and point["samples/not_scored"] == 0
        of = {}
        for g, r in zip(groups, rewards, strict=True):
            of.setdefault(g["metadata"]["data_source"], []).extend(r)
        for source, r in of.items():
            assert math.isclose(point[f"reward/data_source/{source}"], statistics.fmean(r))
        best, worst = kept.rows[step]
        assert (best["place"], worst["place"]) == ("best", "worst")
        assert best["reward"] == max(rewards[-1]) >= worst["reward"] == min(rewards[-1])
        assert best["image"].dtype == np.uint8 and best["image"].shape[2] == 3 and best["prompt"] and best["text"] == ""
    assert asyncio.run(go(2)).points == kept.points, "a second look must log the same"
    assert list(asyncio.run(go(100)).points) == [5]


def test_follows_groups_as_they_close(url):
    name = "live" + uuid.uuid4().hex[:8]

    async def go():
        seen = asyncio.Queue()
        async with meander.connect(url) as client:
            task = asyncio.create_task(track.follow(client, name, Kept(seen.put_nowait), every=1, samples_every=0))
            for i in range(3):
                await publish(client, name, f"u{i}", seed=i)
                assert await asyncio.wait_for(seen.get(), 60) == i + 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(go())


def test_what_strangers_store_is_left_out(url):
    """Neither garbage nor a map without fields ends or holds up a look at what is stored, as the last event either."""
    name = "strange" + uuid.uuid4().hex[:8]

    async def go():
        kept = Kept()
        async with meander.connect(url) as client:
            await publish(client, name, "u0")
            await closed(client, name, 1)
            for uid, body in (("x", b"garbage"), ("y", b"\x80")):
                await client.js.publish(f"mdr.v1.advantage.{name}.{uid}", body)
            assert await asyncio.wait_for(track.follow(client, name, kept, every=8, once=True), 60) == 1
        return kept

    assert list(asyncio.run(go()).points) == [1]


def test_a_group_without_rewards_is_a_point():
    """Failed and cancelled groups count, and have no reward; what is not finite is not logged."""
    member = {"reward": None, "tokens": 3}
    p = track.Point()
    p.add({"status": "failed", "members": [member, member], "policy_version_max": 4, "opened": 0, "closed": 0}, [])
    assert p.values() == {"groups/complete": 0, "samples/not_scored": 1, "samples/tokens": 3}
    p.add(
        {
            "status": "complete", "members": [{"reward": math.inf}], "policy_version_max": 4, "opened": 1, "closed": 2,
            "validation": True
        },
        [{"scores": [{"name": "x", "value": 1.0}, {"name": "y", "value": None}]}],
    )
    values = p.values()
    assert values["groups/complete"] == 0.5 and values["val/score/x"] == 1
    assert "val/mean" not in values and "reward/mean" not in values


def test_conditions_are_shown_beside(url):
    """What a sample was made from is beside it, several of one name in their order."""
    from meander.client import conditions

    class Board:
        def __init__(self):
            self.images = {}

        def add_image(self, name, pixels, step, dataformats):
            self.images[name] = pixels

        def add_text(self, *_):
            pass

        def flush(self):
            pass

    async def go():
        async with meander.connect(url) as client:
            given = [np.full((2, 3, 3), 40 * i, np.uint8) for i in range(3)]
            stored = await conditions.stored(client, {"image": given[0], "references": given[1:]}, 10)
            return given, await client.conditions({"conditions": stored}), await client.conditions({})

    given, found, none = asyncio.run(go())
    assert [name for name, _ in found] == ["image", "references", "references.1"] and none == []
    assert all((a == b).all() for a, (_, b) in zip(given, found, strict=True))
    to = track.TensorBoard.__new__(track.TensorBoard)
    to.board = Board()
    row = {"place": "best", "reward": 1.0, "advantage": 0.0, "prompt": "x", "text": "", "image": given[0]}
    to.show([row | {"conditions": found}], 1)
    assert list(to.board.images) == ["samples/best", *(f"samples/best/condition {name}" for name, _ in found)]


def test_videos_are_shown_as_mp4(tmp_path, monkeypatch, caplog):
    """A video goes to W&B and trackio as mp4 where ffmpeg is there, else as its frame in the middle, which is said."""

    class Client:
        async def medium(self, t, kind):
            return kind.encode()

    class Module:
        __name__ = "trackio"

        def __init__(self):
            self.logged = []

        def init(self, **_):
            pass

        def Image(self, pixels, caption):
            return "an image"

        def Video(self, path, caption, format):
            with open(path, "rb") as f:
                return path, format, f.read()

        def log(self, values, step):
            self.logged.append((step, values))

        def finish(self):
            pass

    program = tmp_path / "ffmpeg"
    monkeypatch.setenv("PATH", str(tmp_path))
    of = {"media": [{"kind": "video"}, {"kind": "audio"}]}
    track._no_ffmpeg.cache_clear()
    assert [asyncio.run(track._video(Client(), t)) for t in (of, of, {"media": [{"kind": "image"}]})] == [None] * 3
    assert caplog.text.count("mp4 needs the program ffmpeg in the PATH") == 1
    program.write_text(
        '#!/bin/sh\nwhile [ "$1" != -i ]; do shift; done\nin=$2\nshift 2\nwhile [ "$1" != -i ]; do shift; done\n'
        'for out; do :; done\n/bin/cat "$in" "$2" > "$out"\n'
    )
    program.chmod(0o755)
    mp4 = asyncio.run(track._video(Client(), of))
    assert mp4 == b"videoaudio"
    to = track.Tracker(Module(), "", "r")
    row = {"place": "best", "reward": 1.0, "advantage": 0.0, "prompt": "x", "text": "", "conditions": []}
    image = np.zeros((2, 2, 3), np.uint8)
    to.show([row | {"image": image, "video": mp4}, row | {"place": "worst", "image": image, "video": None}], 7)
    (best, _), worst = to.module.logged[0][1]["samples/best"][1:], to.module.logged[1][1]
    assert best == "mp4" and to.module.logged[0][1]["samples/best"][2] == mp4 and worst == {"samples/worst": "an image"}
    to.close()
    assert not os.path.exists(to.module.logged[0][1]["samples/best"][0])
    program.write_text("#!/bin/sh\necho no codec >&2\nexit 1\n")
    with pytest.raises(OSError, match="no codec"):
        asyncio.run(track._video(Client(), of))


def run_track(url, folder, *args):
    env = ENVIRONMENT | {
        "PYTHONPATH": str(ROOT / "pkg/client/python"), "WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")
    }
    return subprocess.run(
        [sys.executable, "-m", "meander.plugs.track", "--nats", url, *args], cwd=folder, env=env, capture_output=True,
        text=True, timeout=300
    )


def test_refusals(url, stored, tmp_path):
    name = stored[0]
    for args, status, says in (
        ((name, "--to", "file"), 1, "must be tensorboard, wandb or trackio"),
        (("nosuchrun", "--to", "file", "--once"), 1, "no group has closed"),
        ((name, "--to", "tensorboard", "--every", "0"), 2, "--every"),
        ((name,), 2, "--to"),
    ):
        done = run_track(url, tmp_path, *args)
        assert done.returncode == status and says in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert run_track("nats://127.0.0.1:1", tmp_path, name, "--to", "tensorboard").returncode == 1
    assert not os.listdir(tmp_path), "nothing may be written for a refusal"


def test_tensorboard(url, stored, tmp_path):
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed: its event files are not read")
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed: its event files are not read"
    )
    done = run_track(url, tmp_path, stored[0], "--to", "tensorboard=tb", "--every", "2", "--samples", "1", "--once")
    assert done.returncode == 0 and done.stdout.count("groups: reward") == 3, done.stderr
    files = reader.EventAccumulator(str(tmp_path / "tb" / stored[0])).Reload()
    assert [s.step for s in files.Scalars("reward/mean")] == [2, 4, 5]
    assert {"samples/best", "samples/worst"} <= set(files.Tags()["images"])


def test_wandb(url, stored, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed: nothing is logged to it")
    done = run_track(url, tmp_path, stored[0], "--to", "wandb=meander", "--every", "2", "--samples", "1", "--once")
    assert done.returncode == 0, done.stderr
    (folder,) = glob.glob(str(tmp_path / "wandb" / "offline-run-*"))
    (table,) = glob.glob(
        folder + "/files/media/table/samples/table_0_*"
    ) or glob.glob(folder + "/files/media/table/samples/table_*")[:1]
    with open(table) as f:
        rows = json.load(f)
    assert rows["columns"][:2] == ["uid", "sample_index"] and len(rows["data"]) == 2
    assert len(glob.glob(folder + "/files/media/images/samples/*.png")) >= 2


def test_trackio(url, stored, tmp_path):
    pytest.importorskip("trackio", reason="trackio is not installed: nothing is logged to it")
    done = run_track(url, tmp_path, stored[0], "--to", "trackio=meander", "--every", "2", "--samples", "1", "--once")
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(tmp_path / "trackio" / "meander.db") as db:
        rows = [json.loads(m) for (m,) in db.execute("select metrics from metrics order by step")]
    assert sum("reward/mean" in r for r in rows) == 3
