"""The generic family: whole pipelines of diffusers, over the protocol and for trainers."""

import hashlib
import importlib.util

import numpy as np
import pytest

pytest.importorskip("diffusers")

import torch

VISION = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="its processor needs torchvision")
NAMES = ["sd15", "sdxl", "kontext", pytest.param("qwen-edit", marks=VISION)]
IMAGE = np.random.default_rng(3).integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """served(name) is a worker of this process with a tiny pipeline."""
    import tiny_whole

    from meander.torch.engine import Settings, make_engine
    from meander.torch.folder import Folder
    from meander.torch.pipeline import Pipeline
    from meander.torch.server import Worker

    torch.set_num_threads(1)
    kept = {}

    def get(name):
        if name not in kept:
            folder = tiny_whole.write(tmp_path_factory.mktemp("whole"), name)[name]
            family = Pipeline(Folder(folder), trust=True)
            worker = kept[name] = Worker(family, "cpu", "f32")
            worker.load(lambda say: make_engine(family, Settings("cpu", "f32", threads=1), say))
            assert worker.error is None, worker.error
        return kept[name]

    return get


@pytest.fixture
def client(served, dial):
    """client(name) is a connection to it, and its card."""

    def get(name):
        client = dial(name, worker=served(name))
        return client, client.ready()["card"]

    return get


def send(client, image=IMAGE):
    """Sends an image, and returns its digest."""
    _, h, w, _ = image.shape
    digest = hashlib.sha256(f"image 1 {h} {w} 0\n".encode() + image.tobytes()).hexdigest()
    args = {"digest": digest, "type": "image", "frames": 1, "height": h, "width": w}
    client("condition", args, {"condition": image})
    return digest


def recipe_of(client, card, prompt="a red cat", steps=4, **more):
    """The arguments of an encode call."""
    p = card["pipeline"]
    conditions = {c["name"]: [send(client)] for c in p["conditions"] if c["type"] == "image"}
    arguments = {"negative_prompt": "blue"} if any(a["name"] == "negative_prompt" for a in p["arguments"]) else {}
    size = card["size"]
    return {
        "prompts": [[prompt]],
        "truncate": False,
        "conditions": conditions,
        "arguments": arguments,
        "guidance": 3.0,
        "steps": steps,
        **size,
        **more,
    }


def begin(client, recipe):
    """The handle of a recipe."""
    result, tensors = client("encode", recipe)
    assert not tensors
    return result["items"][0]["handle"]


def noise_of(card, seed=5):
    shape = card["pipeline"]["tracks"][0]["shape"]
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rollout(client, worker, card, recipe, noise, start=0, stop=None, y=None):
    """Euler's steps over the pipeline's own sigmas, by calls; returns the canonical states."""
    engine, handle = worker.engine, begin(client, recipe)
    run = engine.loaded.session(engine.recipes[handle])
    grid = run.grids[0]
    run.session.cancel()
    n = len(grid.sigmas) - 1
    y = (noise * grid.init()).reshape(1, -1).numpy() if y is None else y
    s, c = worker.family.latent_shape(engine.recipes[handle].size)
    ys = [y]
    for k in range(start, n if stop is None else stop):
        v = client.velocity(y.reshape(1, s, c), [grid.sigmas[k]], [handle], recipe["height"], recipe["width"])
        y = (y.astype(np.float64) + (grid.sigmas[k + 1] - grid.sigmas[k]) * v.reshape(1, -1)).astype(np.float32)
        ys.append(y)
    return ys, grid, handle


@pytest.mark.parametrize("name", NAMES)
def test_whole_pipeline_ends_where_diffusers_does(client, served, name):
    client, card = client(name)
    worker = served(name)
    recipe = recipe_of(client, card)
    noise = noise_of(card)
    ys, grid, handle = rollout(client, worker, card, recipe, noise)
    assert card["cfg_rule"] == "inside" and card["pipeline"]["random_access"] == "exact"

    engine = worker.engine
    call = engine.loaded.call_of(engine.recipes[handle])
    states = []
    own = worker.family.pipe(
        **{**call, "latents": noise},
        callback_on_step_end=lambda pipe, i, t, values: states.append(values["latents"]) or {},
    )
    mine = grid.state(torch.from_numpy(ys[-1]), grid.last()).reshape(states[-1].shape)
    assert (mine - states[-1]).abs().max() <= 1e-5 * states[-1].abs().max()

    size = {n: recipe[n] for n in ("frames", "height", "width")}
    s, c = worker.family.latent_shape(engine.recipes[handle].size)
    media = client("decode", {**size, "handle": handle}, {"x": ys[-1].reshape(s, c)})[1]["media"]
    assert np.abs(media[0].astype(int) - (own[0][0] * 255).round()).max() <= 1
