#!/usr/bin/env python3
"""How far velocities of a worker's networks are from those in f32, and from a row alone: for deploy/bench/gpu-torch.sh.

    torch_differences.py MODEL DEVICE [ROWS]

It computes with the worker's own engine, in this process, at the default size. The largest relative L2 of rows at three
sigmas, one row of the report for each dtype; and the memory that torch reserved at most.
"""

import gc
import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", DIFFUSERS_OFFLINE="1")

try:
    import numpy as np
    import torch
    from meander.torch import families
    from meander.torch.engine import Settings, make_engine
    from meander.torch.family import Size
    from meander.torch.folder import Folder
except ImportError as e:
    sys.exit(f"torch_differences.py: {e}; python3 -m pip install './pkg/client/python[torch]'")

SIGMAS = (0.98, 0.6, 0.1)


def relative(a, b):
    """The largest relative L2 of rows."""
    a, b = a.reshape(len(a), -1).astype(np.float64), b.reshape(len(b), -1).astype(np.float64)
    return float((np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)).max())


@torch.no_grad()
def velocities(folder, device, dtype, rows):
    """Velocities of rows in one call, again, and of each row alone, for all sigmas; and the memory's peak in GiB."""
    family = families.find(Folder(folder))
    engine = make_engine(family, Settings(device, dtype))
    engine.within(engine.check_decoder)
    card = family.card()
    size, recipe = Size(**card["size"]), {"steps": card["steps"], **card["size"]} if "pipeline" in card else {}
    answer = engine.within(lambda: engine.encode([["a red cat on a mat"]], False, **recipe))
    handle = answer[0]["items"][0]["handle"]
    x = np.random.default_rng(0).standard_normal((rows, *family.latent_shape(size)), np.float32)

    def call(at, sigma):
        n = len(at)
        given = [sigma] * n, [handle] * n, [card["guidance"]] * n
        return engine.within(lambda: engine.velocity([], *given, size, "", {"x": at}))[1][0][1]

    def alone(sigma):
        return np.concatenate([call(x[i : i + 1], sigma) for i in range(rows)])

    made = [np.concatenate([way(s) for s in SIGMAS]) for way in (lambda s: call(x, s), lambda s: call(x, s), alone)]
    return *made, engine.memory()[0]["peak_bytes"] / 2**30


def main(folder, device, rows="4"):
    print("| dtype | from f32 | rows alone | again | GiB |\n| --- | --- | --- | --- | --- |")
    exact = None
    for dtype in ("f32", "bf16", "f16"):
        together, again, alone, peak = velocities(folder, device, dtype, int(rows))
        gc.collect()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        exact = together if exact is None else exact
        same = "the same bits" if np.array_equal(together, again) else f"{relative(again, together):.2g}"
        print(f"| {dtype} | {relative(together, exact):.2g} | {relative(alone, together):.2g} | {same} | {peak:.1f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
