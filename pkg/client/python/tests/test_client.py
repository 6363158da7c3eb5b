"""The client against a real pipeline that serves the model synthetic (conftest.py)."""

import argparse
import asyncio
import base64
import hashlib
import json
import math
import pathlib
import re
import struct
import warnings

import msgpack
import nats
import numpy as np
import pytest
from blake3 import blake3
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

import meander
from conftest import first
from meander import access, cursor, policy
from meander.data.events import (
    _CONTRACT, STEP, TRAJECTORY, EventError, _is_payload, _is_right, check_known, check_uses, checked, decode, fault,
    fitting, payload_digest,
)

GOLDEN = pathlib.Path(__file__).parents[4] / "schemas/testdata/golden"


def test_payload_digest():
    folder = pathlib.Path(__file__).parents[4] / "schemas/testdata"
    want = {
        name.removesuffix(" payload"): digest
        for name, digest in json.loads((folder / "digests.json").read_text()).items() if name.endswith(" payload")
    }
    assert len(want) > 10

    def computed(name):
        data = (folder / f"golden/{name}.msgpack").read_bytes()
        return payload_digest(data, decode(data))

    assert {name: computed(name) for name in want} == want


@pytest.mark.parametrize("spec, name", [(STEP, "step-*"), (TRAJECTORY, "trajectory-s*")])
def test_a_quick_look_says_what_a_thorough_one_does(spec, name):
    """Of each event and of each that has one value changed: what is taken to be right has no fault, and is what it was
    made of. The events themselves are found right."""

    def changed(value):
        """Copies of a value with one value in it changed, added or left out."""
        yield from (math.nan, math.inf, 1 << 63, True, None, b"x", "x", [1.5], [None], {}, {"x": 1.0})
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for k, v in parts:
            for other in changed(v):
                yield {**value, k: other} if isinstance(value, dict) else [*value[:k], other, *value[k + 1 :]]
        if isinstance(value, dict):
            yield {**value, "later": 1}
            yield from ({a: b for a, b in value.items() if a != k} for k in value)

    def thorough(data):
        event = decode(data)
        if wrong := fault(event, spec):
            raise EventError(wrong)
        check_known(event, spec, "")
        return event

    files = sorted(GOLDEN.glob(f"{name}.msgpack"))
    quick, seen = 0, 0
    for file in files:
        data = file.read_bytes()
        places, event = [], decode(data)
        quick += _is_right(event, spec, places)
        held = [of[field] for of, field in places]
        assert spec is TRAJECTORY or _is_payload(data, held, payload_digest(data, event)), file
        assert not _is_payload(data + b"x", held, payload_digest(data, event))
        for other in (e for e in changed(decode(data)) if isinstance(e, dict)):
            seen += 1
            packed = msgpack.packb(other)
            try:
                want = thorough(packed)
            except EventError:
                want = None
            event = msgpack.unpackb(packed)
            if _is_right(event, spec, []):
                assert event == want, other
    assert quick == len(files) > 0 and seen > 1000


def test_a_step_with_a_field_twice_is_refused():
    data, name = (GOLDEN / "step-sde.msgpack").read_bytes(), "mdr.v1.step.r.u.0.main.a.0"
    event = decode(data)
    digest = payload_digest(data, event)
    assert fitting(data, STEP, name, digest=digest, known=name) == event
    twice = b"\xde" + (len(event) + 1).to_bytes(2, "big") + msgpack.packb("v") + msgpack.packb(1) + data[3:]
    assert data[:1] == b"\xde" and decode(twice) == event
    with pytest.raises(EventError, match="a map has a field twice"):
        fitting(twice, STEP, name, digest=digest, known=name)


def test_bytes_are_held_to_their_digest():
    data = bytes(1000)
    for digest in (hashlib.sha256(data).hexdigest(), "blake3:" + blake3(data).hexdigest()):
        assert checked(data, {"size": 1000, "digest": digest}) == data
        swapped = digest.removeprefix("blake3:") if digest.startswith("blake3:") else "blake3:" + digest
    for other in (digest[:-1] + "g", swapped):
            with pytest.raises(meander.EventError, match="not those of digest"):
                checked(data, {"size": 1000, "digest": other})


def test_every_trajectory_can_be_read():
    """Those of samples without steps, and of samples that failed, too."""
    folder = GOLDEN
    files = sorted(folder.glob("trajectory-*.msgpack"))
    assert len(files) > 10
    events = {f.stem: decode(f.read_bytes()) for f in files}
    assert {name: fault(e, TRAJECTORY) for name, e in events.items()} == {name: "" for name in events}
    for name, event in events.items():
        check_known(event, TRAJECTORY, name)


def test_another_release_is_said(url, monkeypatch):
    async def main():
        async with meander.connect(url):
            pass

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())
        monkeypatch.setattr(access, "__version__", "9.9.9")
        said = rf"is meander {re.escape(meander.__version__)}\S*, this client is meander-rl 9\.9\.9: .*pip install"
        with pytest.raises(meander.VersionMismatch, match=said):
            asyncio.run(main())


@pytest.mark.parametrize("path", [(), ("start",), ("start", "branch"), ("text", "settings"), ("steps", 0)])
def test_a_setting_of_a_later_version_is_refused_by_name(path):
    folder = GOLDEN
    for file in sorted(folder.glob("trajectory-*.msgpack")):
        event = at = decode(file.read_bytes())
        try:
            for key in path:
                at = at[key]
        except (KeyError, IndexError, TypeError):
            continue
        if at is None:
            continue
        at["cfg_phase"] = 0.2
        assert fault(event, TRAJECTORY) == ""
        named = ".".join([*(k for k in path if isinstance(k, str)), "cfg_phase"])
        with pytest.raises(meander.EventError, match=f"u #1: setting {named}=0.2 is not known to this version"):
            check_known(event, TRAJECTORY, "u #1")
        return
    raise AssertionError(f"no golden has {path}")


def test_what_decides_no_rollout_may_be_new():
    event = decode((GOLDEN / "trajectory-cfg-from.msgpack").read_bytes())
    event["timings"]["queue_ns"] = event["group"]["later"] = 1
    check_known(event, TRAJECTORY, "")


def test_a_setting_that_a_reader_does_not_use_is_refused_by_name():
    event = decode((GOLDEN / "trajectory-cfg-from.msgpack").read_bytes())
    uses = set(_CONTRACT["settings"].values())
    check_uses(event, uses, "this trainer")
    with pytest.raises(meander.EventError, match="setting cfg_from=0.25 is not used by this trainer|true_cfg_scale=4"):
        check_uses(event, uses - {"cfg_scales"}, "this trainer")
    with pytest.raises(meander.EventError, match="setting guidance_rescale=0.7 is not used by this trainer"):
        check_uses(event | {"guidance_rescale": 0.7}, uses - {"guidance_rescale"}, "this trainer")


def test_blobs_are_read_whole_or_not_at_all(run):
    async def test(client, _):
        data = bytes(range(256)) * 12000 + b"end"
        ref = await policy.put_blob(client, data)
        assert await client.blob(ref) == data and await client.blob(await policy.put_blob(client, b"")) == b""
        with pytest.raises(meander.EventError, match=f"has {len(data)} bytes that are not those of"):
            await client.blob(ref | {"size": 1 << 50})
        name = base64.urlsafe_b64encode(ref["digest"].encode()).decode()
        entry = json.loads((await client.js.get_last_msg("OBJ_mdr-blobs", f"$O.mdr-blobs.M.{name}")).data)
        for keep, why in ((3, "bytes are stored"), (0, "is no longer stored")):
            await client.js.purge_stream("OBJ_mdr-blobs", subject=f"$O.mdr-blobs.C.{entry['nuid']}", keep=keep or None)
            with pytest.raises(meander.Gone, match=why):
                await client.blob(ref)
        with pytest.raises(meander.Gone, match="is no longer stored"):
            await client.blob(ref | {"digest": "0" * 64})

    run(test)


def test_slow_server(monkeypatch):
    """A stored message that the server gives late is asked for again, with more time; what is not there is not."""
    monkeypatch.setattr(cursor, "_PAUSE", 0)
    given = []

    class Late:
        async def request(self, subject, payload=b"", timeout=0, headers=None):
            given.append(timeout)
            if len(given) < late:
                if busy:
                    raise busy
                return Msg(_client=self, data=b'{"error": {"code": 503}}')
            assert subject == "$JS.API.STREAM.MSG.GET.MDR_REWARDS"
            found = {"message": {"subject": "s", "seq": 7, "data": "eA==", "time": "2026-11-27T00:00:00Z"}}
            return Msg(_client=self, data=json.dumps(found if there else {"error": {"code": 404}}).encode())

        def jetstream(self, **options):
            return JetStreamContext(self, **options)

    def read():
        given.clear()
        return asyncio.run(meander.Client(Late()).js.get_last_msg("MDR_REWARDS", "s")).data

    late, there = 4, True
    for busy in (nats.errors.TimeoutError, nats.errors.NoRespondersError, None):
        assert read() == b"x" and given == [5, 10, 20, 40]
    busy, late = nats.errors.TimeoutError, 5
    with pytest.raises(nats.errors.TimeoutError):
        read()
    late, there = 1, False
    with pytest.raises(NotFoundError):
        read()
    assert given == [5]


def test_group(run):
    async def test(client, name):
        receipt = await client.publish(
            name, "a red fox", uid="fox", group_size=2, num_inference_steps=4,
            reward=[{"name": "synthetic"}],
            rollout={"sde_step_indices": [1, 2], "latents_dtype": "BF16", "debug": ["mean"]},
        )
        assert receipt["samples"] == 2 and receipt["sde_step_indices"] == [1, 2]
        advantage = await first(client.advantages(name))
        assert advantage["uid"] == "fox" and advantage["status"] == "complete"
        group = await client.group(name, "fox")
        assert [s.advantage for s in group.samples] == [m["advantage"] for m in advantage["members"]]
        for sample in group.samples:
            assert len(sample.steps) == 4 and [s["step_index"] for s in sample.trained] == [1, 2]
            assert (await client.medium(sample.trajectory)).startswith(b"\x89PNG")
            for step in sample.trained:
                latents = meander.tensor(step["latents"][0]["tensor"])
                assert latents.dtype == np.float32 and latents.shape == (16, 64) and np.isfinite(latents).all()
        # The policy has not moved: every ratio is 1, and the loss is the mean advantage, negated.
        old = [s["log_prob"] for x in group.samples for s in x.trained]
        adv = [x.advantage for x in group.samples for _ in x.trained]
        out = meander.loss.ppo(old, old, adv)
        assert (out["ratio"] == 1).all() and abs(out["loss"]) < 1e-12

    run(test)


def test_group_of_scheduled_sampling(run):
    """A sample that does not roll has no steps, in a group where another has some."""

    async def test(client, name):
        x = np.zeros((2, 16, 64), "<f4")
        receipt = await client.publish(
            name, "a red fox", uid="fox", group_size=2, start={"data": {"latents": {"dtype": "F32", "shape": [2, 16,
                64], "data": x.tobytes()}}},
            scheduled_sampling={"timesteps": 100, "base_timesteps": [20, 99], "max_step_offset": 5, "probability": 1,
                "seed": 3},
        )
        assert receipt["samples"] == 2
        group = await client.group(name, (await first(client.advantages(name)))["uid"])
        rolled, still = group.samples
        assert len(rolled.steps) == len(rolled.trajectory["steps"]) > 0
        assert still.trajectory["steps"] == still.steps == still.trained == []
        assert still.lacks == "no stochastic step"
        assert meander.Batch([group]).size == 0

    run(test)


def test_refused(run):
    async def test(client, name):
        with pytest.raises(meander.Refused, match="beauty"):
            await client.publish(name, "a red fox", reward=[{"name": "beauty"}])

    run(test)


def test_verdicts_and_batches(run):
    async def test(client, name):
        await client.publish(
            name, "a red fox", uid="fox", group_size=2, num_inference_steps=2, reward=[
                {"name": "external:human"}
            ], batch={"id": "b", "groups": 1, "step": 7},
        )
        seen = 0
        async for t in client.stream_trajectories(name):
            await client.verdict(name, t["uid"], t["sample_index"], t["sample_index"] * 0.5, name="human", author="lin")
            seen += 1
            if seen == 2:
                break
        batch = await first(client.batch_events(name))
        metrics = {m["name"]: m["value"] for m in batch["metrics"]}
        assert metrics["critic/rewards/mean"] == 0.25 and metrics["training/global_step"] == 7
        assert (await first(client.steps(name)))["run"] == name

    run(test)


def test_second_verdict(run):
    async def test(client, name):
        give = lambda value, **fields: client.verdict(name, "fox", 0, value, name="human", **fields)  # noqa: E731
        await client.publish(
            name, "a red fox", uid="fox", group_size=1, num_inference_steps=2,
            reward=[{"name": "external:human"}, {"name": "external:robot"}]
        )
        await give(np.float32(0.5))
        await give(0.5)
        await give(0.5, author="lin")
        with pytest.raises(meander.Judged, match="already: 0.5"):
            await give(0.25)
        with pytest.raises(meander.Judged):
            await give(None, error="none")

    run(test)


def test_malformed_verdict_is_replaced(run):
    async def test(client, name):
        await client.publish(
            name, "a red fox", uid="fox", group_size=1, num_inference_steps=2, reward=[{"name": "external:human"}]
        )
        await first(client.stream_trajectories(name))
        subject = f"mdr.v1.verdict.{name}.fox.0.human"
        nan = {"v": 1, "run": name, "uid": "fox", "sample_index": 0, "name": "human", "value": float("nan"), "at": 1}
        await client.js.publish(subject, msgpack.packb(nan), headers={"Nats-Msg-Id": subject.removeprefix("mdr.v1.")})
        await client.verdict(name, "fox", 0, 0.75, name="human")
        advantage = await first(client.advantages(name))
        assert advantage["members"][0]["reward"] == 0.75

    run(test)


def test_readers_skip_garbage(run):
    async def test(client, name):
        for uid, data in {
            "bytes": b"\xc1", "nan": msgpack.packb({"v": 1, "run": name, "uid": "nan", "mean": float("nan")})
        }.items():
            await client.js.publish(f"mdr.v1.advantage.{name}.{uid}", data)
        await client.publish(
            name, "a red fox", uid="fox", group_size=1, num_inference_steps=2, reward=[{"name": "synthetic"}]
        )
        assert (await first(client.advantages(name)))["uid"] == "fox"

    run(test)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"value": float("nan")}, "value: nan; must be a finite number"),
        ({"value": float("-inf")}, "value: -inf"),
        ({"value": None}, "error: ''; must say why"),
        ({"value": 1, "error": "none"}, "must be empty"),
        ({"value": 1, "name": "a.b"}, "name: 'a.b'"),
        ({"value": 1, "uid": ""}, "uid: ''"),
        ({"value": 1, "sample_index": -1}, "sample_index: -1"),
        ({"value": 1, "sample_index": 1024}, "sample_index: 1024"),
        ({"value": 1, "comment": "x" * 4097}, "comment: must be at most 4096"),
    ],
)
def test_refuses_malformed_verdicts(fields, says):
    with pytest.raises(ValueError, match=says):
        asyncio.run(meander.Client(NoServer()).verdict(**{"run": "r", "uid": "u", "sample_index": 0, **fields}))


class NoServer:
    """Nothing may be sent."""

    def jetstream(self, **_options):
        return None


def test_tensor():
    values = np.array([[1.5, -2.0], [0.0, 3.25]], np.float32)
    for dtype, raw in {
        "F32": values.tobytes(), "F16": values.astype("<f2").tobytes(),
        "BF16": (values.view("<u4") >> 16).astype("<u2").tobytes()
    }.items():
        assert (meander.tensor({"dtype": dtype, "shape": [2, 2], "data": raw}) == values).all()
    with pytest.raises(meander.EventError):
        meander.tensor({"dtype": "F8", "shape": [1], "data": b"\0"})


def test_hostile_events():
    for data in (
        msgpack.packb([1]), msgpack.packb(msgpack.ExtType(5, b"x")), b"\xc1", b"", struct.pack(">BI", 0xDF, 2**31),
        b"\0" * (9 << 20)
    ):
        with pytest.raises((ValueError, msgpack.exceptions.UnpackException)):
            decode(data)


def test_json_events():
    "What a person published as JSON reads as its twin does."
    for file in GOLDEN.glob("prompt*.json"):
        twin = decode((GOLDEN / f"{file.stem}.msgpack").read_bytes())
        assert decode(b" " + file.read_bytes())["prompt"] == twin["prompt"]
    assert decode(b'{"seed": 9007199254740993}') == {"seed": 9007199254740993}
    for data in (b'{"x": NaN}', b'{"x": 1e999}', b'{"x"', b'{"x": "\xff"}', b"[1]"):
        with pytest.raises(meander.EventError):
            decode(data)



def test_an_update_is_told_once(run):
    async def test(client, name):
        told = [
            await client.update(
                name, "synthetic", 1, batches=["step-0"], loss=loss, kl=float("nan"), ratio_max=None, samples=8,
                grad_norm=-1, clip_share=1.5,
                evaluation={"exact": 1.0, "none": float("nan")},
            )
            for loss in (0.5, 0.25)  # the first one counts: a trainer that restarted
        ]
        told.append(await client.update(name, "synthetic", 1, trainer="other", loss=2))
        assert told == [True, False, True]
        m = await client.js.get_last_msg("MDR_UPDATES", f"mdr.v1.update.{name}.synthetic.main.main.1")
        event = decode(m.data)
        assert (event["loss"], event["evaluation"]) == (0.5, [{"name": "exact", "value": 1.0}])
        assert event["samples"] == 8 and not {"kl", "ratio_max", "grad_norm", "clip_share"} & event.keys()
        with pytest.raises(ValueError, match="los: not a number of an update; it has clip_share"):
            await client.update(name, "synthetic", 2, los=1.0)
        for step in (-1, 1.5):
            with pytest.raises(ValueError, match=f"step: {step}; must be a whole number"):
                await client.update(name, "synthetic", step, loss=1.0)
        with pytest.raises(ValueError, match="trainer: 'a b'"):
            await client.update(name, "synthetic", 2, trainer="a b")
        await client.js.publish(f"mdr.v1.update.{name}.synthetic.main.main.3", b"garbage")
        with pytest.raises(EventError, match=f"update.{name}.synthetic.main.main.3: "):
            await client.update(name, "synthetic", 3, loss=1.0)

    run(test)


@pytest.fixture
def contexts(tmp_path, monkeypatch):
    """Writes contexts of the nats command."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "nats" / "context").mkdir(parents=True)

    def write(name, **settings):
        file = tmp_path / "nats" / "context" / f"{name}.json"
        file.write_text(json.dumps(settings))
        return str(file)

    return write


def test_contexts(contexts, url):
    file = contexts("mine", url=url, jetstream_api_prefix="$JS.API.", color_scheme="red")

    async def stored(**of):
        async with meander.connect(**of) as client:
            return (await client.js.stream_info("MDR_PROMPTS")).config.name

    for name in ("mine", file):
        assert asyncio.run(stored(context=name)) == "MDR_PROMPTS"
    with pytest.raises(ConnectionError, match="127.0.0.1:1"):  # what is given comes first
        asyncio.run(stored(url="nats://127.0.0.1:1", context="mine", patience=2))
    with pytest.raises(ValueError, match="'other'; must be a file by its full path, or one of those in .*: mine"):
        asyncio.run(stored(context="other"))
    with pytest.raises(ValueError, match="js_domain: excludes js_prefix"):
        asyncio.run(stored(context="mine", js_domain="site"))
    contexts("bad", nsc="nsc://a/b/c")
    with pytest.raises(ValueError, match="nsc: set; must be absent"):
        asyncio.run(stored(context="bad"))


def test_flags_come_before_contexts(contexts, monkeypatch):
    contexts("mine", url="nats://there", creds="~/mine.creds")

    def of(*given):
        p = argparse.ArgumentParser()
        access.add_flags(p)
        return access.arguments(p.parse_args(given), None)

    monkeypatch.setenv("MEANDER_NATS_URL", "nats://variable")
    monkeypatch.setenv("MEANDER_NATS_TLS_CA", "ca.pem")
    assert of()["url"] == "nats://variable"
    monkeypatch.setenv("NATS_CONTEXT", "mine")
    assert (of()["url"], of()["ca"]) == ("nats://there", "ca.pem")
    assert of()["credentials"].endswith("/mine.creds") and "~" not in of()["credentials"]
    assert of("--nats", "nats://flag", "--creds", "x")["url"] == "nats://flag"
    assert of("--creds", "x")["credentials"] == "x"
