"""The fields of a prompt have types: type checkers and help() know them, and one field has one name or that of its
flag."""

import inspect
import os
import pathlib
import subprocess
import sys

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
    assert sorted(lines) == [7, 8, 9, 10, 12, 13], done.stdout + done.stderr
    assert 'incompatible type "str"; expected "int"' in lines[7]
    assert "groupsize" in lines[8] and "los" in lines[10]
    assert "sde_type" in lines[9] or "Literal" in lines[9]
    assert 'Revealed type is "int"' in lines[13].replace("builtins.", "")


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
