"""The vectors of schemas/noise.md: the same bits as the services."""

import hashlib
import json
import pathlib

import numpy as np
import pytest

from meander import noise

VECTORS = json.loads((pathlib.Path(__file__).parents[4] / "schemas/testdata/noise.json").read_text())


def test_philox():
    for v in VECTORS["philox"]:
        k0, k1 = (int(k, 16) for k in v["key"])
        counter = tuple(int(c, 16) for c in v["counter"])
        assert [int(w) for w in noise.philox(counter, k1 << 32 | k0)] == [int(w, 16) for w in v["words"]]


def test_normals():
    for v in VECTORS["normal"]:
        want = np.array([float.fromhex(x) for x in v["normals"]], np.float32)
        assert (noise.normals(int(v["seed"]), v["step"], len(want), v["stream"]) == want).all(), v
    for v in VECTORS["box_muller"]:
        w = [np.array([int(x, 16)], np.uint64) for x in v["words"]]
        assert [np.float32(x[0]) for x in noise._pair(*w)] == [np.float32(float.fromhex(x)) for x in v["normals"]], v
    for v in VECTORS["long"]:
        got = noise.normals(int(v["seed"]), v["step"], v["count"], v["stream"])
        assert hashlib.sha256(got.astype("<f4").tobytes()).hexdigest() == v["sha256"]


def test_seeds():
    for v in VECTORS["sample_seed"]:
        assert noise.sample_seed(v["base"], v["uid"], int(v["sample_index"])) == int(v["seed"])


@pytest.mark.parametrize(("seed", "step", "n"), [(-1, 0, 1), (1 << 64, 0, 1), (0, -1, 1), (0, 1 << 32, 1), (0, 0, -1)])
def test_refused(seed, step, n):
    with pytest.raises(ValueError, match="must be"):
        noise.normals(seed, step, n)
