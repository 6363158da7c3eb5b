"""The example for accelerate against a real pipeline of signs: two processes, FSDP2 or DDP, do what one does."""

import re
import socket
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="training in several processes needs torch, which is not installed here")
pytest.importorskip("accelerate", reason="this plug is for accelerate, which is not installed here")
pytest.importorskip("diffusers", reason="the example trains a transformer of diffusers, which is not installed here")

from conftest import ENVIRONMENT, ROOT, SIGNS  # noqa: E402

EXAMPLE = ROOT / "pkg/client/python/examples/accelerate_signs.py"


def train(url, out, processes, *flags):
    """Runs the example, and returns what each update and each process said, and the adapter."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "pkg/client/python"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), "--url", url, "--model", str(SIGNS), "--out", str(out)]
    command += ["--updates", "2", "--groups", "3", "--samples", "4", *flags]
    group = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [group | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(processes)] if processes > 1 else [{}]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, env=env | rank, **pipes) for rank in ranks]
    ended = [p.communicate(timeout=280) for p in started]
    assert all(p.returncode == 0 for p in started), "\n".join(err[-2000:] for _, err in ended)
    said = "\n".join(out for out, _ in ended)
    updates = [(float(r), float(n)) for r, n in re.findall(r"update \d: reward ([\d.]+), norm ([\d.]+)", said)]
    shares = re.findall(r"process \d: (\d+) samples, first ratio (\S+) from 1", said)
    shares = [(int(n), float(off)) for n, off in shares]
    from safetensors.torch import load_file

    return updates, shares, load_file(out / "adapter_model.safetensors")


def test_two_processes(signs, tmp_path):
    whole, alone, adapter = train(signs, tmp_path / "one", 1)
    assert alone[0][0] == 12 and len(whole) == 2
    for name, flags in (("fsdp2", []), ("ddp", ["--ddp"])):
        updates, shares, together = train(signs, tmp_path / name, 2, *flags)
        assert sorted(n for n, _ in shares) == [4, 4, 8, 8], "a share of each batch"
        # The weights of a process are those of the sampler, behind the push too: what was gathered is the whole.
        assert max(off for _, off in shares + alone) < 1e-5
        assert updates[0][0] == whole[0][0] and updates[0][1] == pytest.approx(whole[0][1], rel=1e-4), name
        assert together.keys() == adapter.keys()
        apart = torch.cat([(together[k] - adapter[k]).flatten() for k in adapter]).norm()
        assert apart / torch.cat([v.flatten() for v in adapter.values()]).norm() < 1e-2, name
