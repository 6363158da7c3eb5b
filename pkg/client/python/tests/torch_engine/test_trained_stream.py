"""meander-train on samples with conditions: prompts, files, rewards and weights go through a pipeline with a worker."""

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("diffusers")
pytest.importorskip("peft")

import zoo  # noqa: E402
from PIL import Image  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[5] / "deploy/learn"))

from learn import pipeline, train  # noqa: E402
from learn_edit import FLAGS, rewards  # noqa: E402

from meander.rewards.reward import Reward, Score  # noqa: E402

BIN = os.environ.get("MEANDER_BIN", "")
SMALL = {
    "updates": 2, "eval-every": 2, "eval-samples": 1, "groups": 2, "group-size": 3, "reward": "nats:near", "rank": 4,
    "targets": "to_q,to_v", "height": 32, "width": 64, "patience": 200,
}  # fmt: skip


class Near(Reward):
    """How near a sample is to the image that it was made of."""

    name, extra, version = "near", "images", "1"

    def score(self, samples):
        pairs = [[np.asarray(i, np.float64) for i in (s.image, s.conditions["image"][0])] for s in samples]
        return [Score(-float(np.abs(a - b).mean()) / 255) for a, b in pairs]


def prompts_of(folder, name, seeds):
    """A file of one text with other images."""
    lines = []
    for seed in seeds:
        pixels = np.random.default_rng(seed).integers(0, 256, (32, 64, 3), np.uint8)
        image = folder / f"{seed}.png"
        Image.fromarray(pixels).save(image)
        more = {"conditions": {"control_image": str(image)}, "arguments": {"max_sequence_length": 16}}
        lines.append(json.dumps({"prompt": "make it red", **more}))
    (folder / name).write_text("\n".join(lines))
    return folder / name


@pytest.mark.skipif(not BIN, reason="needs MEANDER_BIN, a built meander")
def test_samples_with_conditions_are_trained_on(tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    zoo.write(model, "FluxControlPipeline")
    files = zip(("prompts", "held-out", "test"), ((1, 2, 3), (4,), (5,)), strict=True)
    flags = [x for name, seeds in files for x in (f"--{name}", str(prompts_of(tmp_path, f"{name}.jsonl", seeds)))]
    flags = [*FLAGS, *(str(x) for name, value in SMALL.items() for x in (f"--{name}", value)), *flags]
    out.mkdir()
    with pipeline(BIN, out, str(model), "torch") as url, rewards(url, Near()):
        train(url, 1, out, str(model), [*flags, "--test-steps", "0"])
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    updates = [r for r in log if r["kind"] == "update"]
    assert len(updates) == 2 and all(r["used"] == 6 and r["grad_norm"] > 0 for r in updates)
    for r in updates:  # the trainer's velocities, of the pushed weights, too, are the worker's
        assert all(off < bound for off, bound in zip(r["ratio_off"], r["ratio_bound"], strict=True))
        assert max(r["ratio_off"]) < 1e-6 and len(r["made_by"]) == 1
    assert updates[0]["made_by"] != updates[1]["made_by"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["before"]["update"] == 0 and summary["last"]["update"] == 2
    assert set(summary["test"]) == {"base", "last", "kept"} and math.isfinite(summary["test"]["last"]["exact"])
    assert (out / "best/adapter_model.safetensors").is_file() and (out / "before.png").is_file()
