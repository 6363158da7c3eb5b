"""The time machine: updates made again of the stream, of an archive and of a bundle."""

import asyncio
import json
import subprocess
import sys
import tarfile

import msgpack
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

from safetensors.torch import load  # noqa: E402

from conftest import ENVIRONMENT, ROOT, SIGNS  # noqa: E402
from meander.client.bulk import Stored  # noqa: E402
from meander.data.events import EventError  # noqa: E402
from meander.train import replay  # noqa: E402
from meander.train.archive import Archive  # noqa: E402
from meander.train.config import Config  # noqa: E402
from meander.train.loop import train  # noqa: E402
from meander.train.model import encoded  # noqa: E402

PROOF = ROOT / "deploy/learn/proof/signs.tar"


def made_again(of, **given):
    return asyncio.run(asyncio.wait_for(replay._Replay({"replay": str(of), "json": True, **given}).run(), 300))


@pytest.fixture(scope="module")
def run(signs, tmp_path_factory):
    """A run of updates of two batches each, with a running average, and its bundle."""
    out = tmp_path_factory.mktemp("replay")
    config = Config(
        nats=signs, run="again", out=str(out), prompts=str(ROOT / "deploy/learn/prompts.txt"), model=str(SIGNS), groups=2,
        group_size=4, rank=2, updates=2, accumulate=2, ema=0.5, tensorboard=False, patience=120.0, lr_schedule="linear",
    )  # fmt: skip
    asyncio.run(asyncio.wait_for(train(config), 300))
    bundle = out / "bundle.tar"
    link = made_again("again@2", nats=signs, bundle=str(bundle))
    return signs, bundle, link


def test_an_update_is_the_same_to_the_bit(run):
    signs, bundle, link = run
    assert link["verdict"] == "holds" and "running average" in link["what"] and link["of"] == "update 2"
    assert made_again("again@1", nats=signs)["verdict"] == "holds"
    assert made_again(bundle) == link


def test_a_bundle_is_proved(run, binary):
    _, bundle, _ = run
    links = "weights,chain,batch,sums,trajectories,rewards,advantages,prompts"
    done = subprocess.run([binary, "prove", "--archive", bundle, "--json", "--links", links], env=ENVIRONMENT,
                          capture_output=True)  # fmt: skip
    found = {x["link"]: x["verdict"] for x in json.loads(done.stdout)["links"]}
    others = {"archive": "unchecked", "update": "left out", "signature": "left out"}
    assert found == dict.fromkeys(links.split(","), "holds") | others


def test_a_running_average_is_of_its_update(run, binary, tmp_path):
    _, bundle, _ = run
    archive = Archive.read(bundle)
    update = msgpack.unpackb(max(archive.events.streams["MDR_UPDATES"].values()).data)
    state = load(archive.events.blobs[update["state"]["digest"]])
    average = {name.removeprefix("average/"): t for name, t in state.items() if name.startswith("average/")}
    policy = msgpack.unpackb(max(archive.events.streams["MDR_POLICIES"].values()).data)
    (tmp_path / "adapter_model.safetensors").write_bytes(encoded(average))
    config = tmp_path / "adapter_config.json"
    for wrong in (b"", b" "):
        config.write_bytes(policy["adapter"]["config"] + wrong)
        args = ["prove", tmp_path, "--archive", bundle, "--json", "--links", "weights"]
        done = subprocess.run([binary, *args], env=ENVIRONMENT, capture_output=True)
        (link,) = [x for x in json.loads(done.stdout)["links"] if x["link"] == "weights"]
        if wrong:
            assert link["verdict"] == "broken" and link["what"].startswith("adapter_config.json: 1 bytes")
        else:
            assert link["verdict"] == "holds" and link["of"] == "update 1" and "average" in link["what"]


def test_two_losses_and_two_versions_are_compared(run, tmp_path, capsys):
    _, bundle, _ = run
    link = made_again(bundle, json=False, loss="dpo", keep=str(tmp_path / "kept"))
    table = capsys.readouterr().out
    assert link["verdict"] == "compared" and "--loss dpo for ppo" in link["what"]
    assert table.count("transformer_blocks.") >= 4 and "cosine" in table
    steps = float(link["what"].split("steps ")[1].split()[0])
    assert steps > 0.01, "another loss takes another step"
    made_again(bundle, keep=str(tmp_path / "kept"))
    assert "steps 0 of" in made_again(bundle, against=str(tmp_path / "kept"))["what"]
    assert made_again(bundle, micro=0)["verdict"] == "compared"


def forged(bundle, change):
    """The bundle with another update event, and the digests of that."""
    archive = Archive.read(bundle)
    m = max(archive.events.streams["MDR_UPDATES"].values())
    event = msgpack.unpackb(m.data)
    change(event)
    archive.events.add("MDR_UPDATES", Stored(m.seq, m.subject, msgpack.packb(event)))
    path = bundle.with_name("forged.tar")
    archive.events.write(path)
    return path


def test_what_was_not_so_is_said(run):
    _, bundle, _ = run
    assert made_again(forged(bundle, lambda e: e.update(lr=2 * e["lr"])))["verdict"] == "broken"
    assert made_again(forged(bundle, lambda e: e.update(batch_digest="0" * 64)))["verdict"] == "broken"
    assert made_again(forged(bundle, lambda e: e.update(average_digest="0" * 64)))["verdict"] == "broken"
    link = made_again(forged(bundle, lambda e: e.pop("state")))
    assert link["verdict"] == "unchecked" and "moments" in link["what"]
    with pytest.raises(ValueError, match="settings"):
        made_again(forged(bundle, lambda e: e.pop("settings")))


def test_a_changed_byte_is_named(run, tmp_path):
    _, bundle, _ = run
    with tarfile.open(bundle) as files:
        member = next(f for f in files if f.name.startswith("MDR_STEPS"))
        at = member.offset_data + member.size // 2
    data = bytearray(bundle.read_bytes())
    data[at] ^= 1
    (tmp_path / "changed.tar").write_bytes(data)
    with pytest.raises(EventError, match="MDR_STEPS/.* its bytes are not those"):
        made_again(tmp_path / "changed.tar")


def test_a_changed_blob_is_named_whatever_the_list_says(run, tmp_path):
    _, bundle, _ = run
    archive = Archive.read(bundle)
    digest, data = next(iter(archive.events.blobs.items()))
    archive.events.blobs[digest] = data[:-1] + bytes([data[-1] ^ 1])
    archive.events.write(tmp_path / "blob.tar")
    with pytest.raises(EventError, match=digest):
        made_again(tmp_path / "blob.tar")


def test_of_several_trainers_one_is_named(run):
    """Two tenants of a lane count their updates alike."""
    signs, bundle, link = run
    archive = Archive.read(bundle)
    m = max(archive.events.streams["MDR_UPDATES"].values())
    archive.events.add("MDR_UPDATES", Stored(m.seq + 1, m.subject.replace(".main.", ".alice."), m.data))
    path = bundle.with_name("tenants.tar")
    archive.events.write(path)
    with pytest.raises(ValueError, match=r"signs.alice.trainer, signs.main.trainer; name one by .*--tenant"):
        made_again(f"{path}@2")
    assert made_again(f"{path}@2", tenant="main") == link == made_again("again@2", nats=signs, lane="signs")


def test_flags_that_decide_nothing_are_refused(run):
    signs, bundle, _ = run
    with pytest.raises(ValueError, match="--updates: does not decide"):
        made_again(bundle, updates=3)
    for lost in ("again@9", "again@0"):
        with pytest.raises(ValueError, match="told"):
            made_again(lost, nats=signs)
    with pytest.raises(ValueError, match="must be RUN@K"):
        made_again("again")


def test_prove_asks_the_trainer(binary):
    """The archive that is shipped was made on one processor: on another kind the bits may be others."""
    trainer = f"{sys.executable} -m meander.train"
    env = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "pkg/client/python"), "CUDA_VISIBLE_DEVICES": ""}
    args = ["prove", "--archive", str(PROOF), "--json", "--trainer", trainer]
    done = subprocess.run([binary, *args], cwd=ROOT, env=env, capture_output=True)
    report = json.loads(done.stdout)
    assert b"Traceback" not in done.stderr
    (link,) = [x for x in report["links"] if x["link"] == "update"]
    assert link["verdict"] == "holds" or link["verdict"] == "unchecked" and "step's length" in link["what"]
    assert report["proved"] == (done.returncode == 0) == (link["verdict"] == "holds")
    near = subprocess.run([binary, *args, "--tolerance", "1e-2"], cwd=ROOT, env=env, capture_output=True)
    assert near.returncode == 0
