"""Pipelines that make sound, through the whole of meander: a run, its files, and the proof of it."""

import json
import os
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("diffusers")

import zoo

BIN = os.environ.get("MEANDER_BIN", "")


def meander(*args):
    env = os.environ | {"MEANDER_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([BIN, *map(str, args)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.skipif(not BIN, reason="needs MEANDER_BIN, a built meander")
@pytest.mark.parametrize(("name", "kinds"), [("AceStepPipeline", {"wav"}), ("LTX2Pipeline", {"png", "apng", "wav"})])
def test_sound_goes_the_whole_way(tmp_path, name, kinds):
    """Its loudness is the reward, recomputed here from the file in float64; verify finds no difference."""
    folder, store, out = tmp_path / name, tmp_path / "store", tmp_path / "out"
    zoo.write(folder, name)
    engine = ["--engine", "torch", "--model", folder, "--store", store]
    meander(
        "run", *engine, "--run", "r", "--group-size", 2, "--steps", 2, "--seed", 5, "--reward", "loudness",
        "--out", out, "a drum",
    )  # fmt: skip
    group = json.loads((out / "results.jsonl").read_text().splitlines()[0])
    assert len(group["members"]) == 2
    for member in group["members"]:
        files = {p.suffix[1:] for p in out.glob(f"*-{member['sample_index']:03d}.*")}
        assert files - {"mp4"} == kinds, "where ffmpeg is there, a video is an mp4, too"
        file = Path(member["audio"]).read_bytes()
        with pytest.raises(wave.Error, match="3"):  # floats, which the module does not read
            wave.open(member["audio"])
        values = np.frombuffer(file[58:], "<f4").astype(np.float64)
        assert file[:4] == b"RIFF" and len(values) > 64
        assert abs(member["reward"] - 10 * np.log10(np.mean(values**2))) < 1e-9
    said = meander("verify", "r", *engine)
    assert "0 mismatches" in said and "log-probs recomputed" in said
