"""The fields of a prompt have types: type checkers and help() know them, and one field has one name or that of its
flag."""

import inspect
import json
import os
import pathlib
import subprocess
import sys

import msgpack
import pytest

import meander
from meander.client.client import by_name
from meander.data.fields import ALIASES, PromptFields

ROOT = pathlib.Path(meander.__file__).parent.parent
SAMPLE = '''
import meander

async def main(client: meander.Client) -> None:
    await client.publish("r", "a fox", group_size=4, num_inference_steps=20, reward="glyph",
                         rollout={"sde_step_indices": [1, 2]}, batch={"id": "b", "groups": 2})
    await client.publish("r", "a fox", group_size="four")
    await client.publish("r", "a fox", groupsize=4)
    await client.publish("r", "a fox", rollout={"sde_type": "sdee"})
    await client.update("r", "l", 1, loss=0.5, los=1.0)
    with meander.sync.connect() as other:
        other.publish("r", "a fox", seed=1.5)
    reveal_type(meander.data.fields.PromptFields()["height"])
    async for step in client.steps("r"):
        reveal_type(step["log_prob"])
        print(step["logprob"])
    async for trajectory in client.stream_trajectories("r"):
        reveal_type(trajectory.get("text"))
    async for advantage in client.advantages("r"):
        reveal_type(advantage["members"][0]["reward"])
    reveal_type((await client.publish("r", "a fox"))["samples"])
    reveal_type((await client.pause("r"))["status"])
    reveal_type((await client.status("r"))["groups"])
    async for made in client.batch_events("r"):
        print(made["metric"])
    with meander.sync.connect() as other:
        for tokens in other.tokens("r"):
            reveal_type(tokens["ids"])
    group = await client.group("r", "u")
    reveal_type(group.samples[0].steps[0]["latents"])
    print(group.advantage["statuss"])
'''


def test_type_checkers_know_fields(tmp_path):
    pytest.importorskip("mypy", reason="needs mypy")
    (tmp_path / "sample.py").write_text(SAMPLE)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), "sample.py"]
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=300)
    found = [line for line in done.stdout.splitlines() if line.startswith("sample.py")]
    lines = {}
    for line in found:
        lines[n] = lines.get(n := int(line.split(":")[1]), "") + line
    assert sorted(lines) == [7, 8, 9, 10, 12, 13, 15, 16, 18, 20, 21, 22, 23, 25, 28, 30, 31], done.stdout + done.stderr
    assert 'incompatible type "str"; expected "int"' in lines[7]
    assert "groupsize" in lines[8] and "los" in lines[10]
    assert "sde_type" in lines[9] or "Literal" in lines[9]
    for n, kind in {
        13: "int", 15: "float | None", 18: "TypedDict(meander.data.contract.TextResult", 20: "float | None",
        21: "int", 22: "TypedDict(meander.data.contract.RunStatus", 23: "int", 28: "list[int]",
        30: "list[TypedDict(meander.data.contract.IndexedTensor",
    }.items():
        assert f'Revealed type is "{kind}' in lines[n].replace("builtins.", "").replace("'", ""), lines[n]
    for n in (16, 25, 31):
        assert "has no key" in lines[n], lines[n]


def test_help_lists_fields():
    for publish in (meander.Client.publish, meander.sync.Client.publish):
        text = " ".join(inspect.getdoc(publish).split())
        for line in (
            "group_size: n, the number of samples of the prompt (integer 1 to 1024). Default: 8.",
            "height: the height of the image",
            "pixels). Default: the model's.",
        ):
            assert line in text, line
    assert "grad_norm" in meander.Client.update.__doc__
    step = " ".join(inspect.getdoc(meander.contract.Step).split())
    assert "device_ns: this step's share of device time, nanoseconds (integer ≥ 0)." in step
    assert "height: the height of the image" in " ".join(inspect.getdoc(PromptFields).split())
    events = json.loads(pathlib.Path(meander.__file__).with_name("data").joinpath("contract.json").read_text())
    for name, fields in events["structs"].items():
        assert getattr(meander.contract, name).__annotations__.keys() == fields.keys(), name


def test_what_is_no_event_is_skipped(run):
    """What a stranger stored in a stream has not the fields of its event: it is skipped."""

    async def test(client, name):
        await client.js.publish(f"mdr.v1.update.{name}.l.main.main.1", msgpack.packb({"v": 1, "run": name}))
        assert await client.update(name, "l", 2, loss=0.5)
        async for update in client.updates(name):
            assert update["step"] == 2 and update["batches"] == []
            return

    run(test)


def test_names_of_flags():
    assert by_name({"n": 4, "steps": 20, "seed": 1}) == {"group_size": 4, "num_inference_steps": 20, "seed": 1}
    assert by_name({"sde_steps": [1]}) == {"sde_step_indices": [1]} and "group_size" in PromptFields.__annotations__
    assert not ALIASES.keys() & PromptFields.__annotations__.keys()
    with pytest.raises(TypeError, match="steps and num_inference_steps: both given"):
        by_name({"steps": 1, "num_inference_steps": 2})


def test_a_first_batch(run):
    """A prompt, the size of its group and a reward are enough."""

    async def test(client, name):
        for i in range(2):
            await client.publish(name, f"a red fox {i}", n=2, steps=3, reward="synthetic")
        async for batch in client.batches(name, groups=2):
            assert batch["latents"].shape[0] == 4
            return

    run(test)
