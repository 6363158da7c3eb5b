"""The examples of the README and those beside it run as they stand, but for the server's address."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parents[1]
README = re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)
# The others of the README need a worker's folder: tests/torch_engine has them.
EXAMPLES = {f"README {i}": text for i, text in enumerate(README) if "127.0.0.1:4222" in text} | {
    "trainer.py": (HERE / "examples/trainer.py").read_text()
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(url, name, tmp_path):
    code = EXAMPLES[name].replace("nats://127.0.0.1:4222", url).replace(
        "meander.connect()", f'meander.connect("{url}")'
    )
    assert url in code
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(HERE)}, capture_output=True,
        text=True, timeout=60
    )
    assert out.returncode == 0, out.stderr
    assert "(" in out.stdout, "it prints shapes"


def test_the_reflexflow_loss_trains(tmp_path):
    pytest.importorskip("torch", reason="no torch: pip install torch")
    out = subprocess.run(
        [sys.executable, HERE / "examples/reflexflow.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
    )
    assert out.returncode == 0, out.stdout + out.stderr
