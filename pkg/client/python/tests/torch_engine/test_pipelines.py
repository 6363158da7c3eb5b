"""The generic family: whole pipelines of diffusers, over the protocol and for trainers."""

import hashlib
import importlib.util

import numpy as np
import pytest

pytest.importorskip("diffusers")

import torch

VISION = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="its processor needs torchvision")
NAMES = ["sd15", "sdxl", "kontext", "sd3", "ltx", pytest.param("qwen-edit", marks=VISION)]
IMAGE = np.random.default_rng(3).integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """served(name) is a worker of this process with a tiny pipeline."""
    import json

    import tiny
    import tiny_whole
    import zoo

    from meander.torch.engine import Settings, make_engine
    from meander.torch.folder import Folder
    from meander.torch.server import Worker
    from meander.torch.whole import Pipeline

    torch.set_num_threads(1)
    kept = {}

    def get(name):
        if name not in kept:
            folder = tmp_path_factory.mktemp("whole")
            if name in tiny.PIPELINES:
                folder = tiny.write(folder, (name,))[name]
                settings = json.loads((folder / "meander.json").read_text())
                (folder / "meander.json").write_text(json.dumps(settings | {"num_inference_steps": 4}))
            elif name in tiny_whole.PIPELINES:
                folder = tiny_whole.write(folder, name)[name]
            else:
                zoo.write(folder, name)
            family = Pipeline(Folder(folder), trust=True)
            worker = kept[name] = Worker(family, Settings("cpu", "f32"))
            worker.load(lambda say: make_engine(family, Settings("cpu", "f32", threads=1), say))
            assert worker.error is None, worker.error
        return kept[name]

    return get


@pytest.fixture
def client(served, dial):
    """client(name) is a connection to it, and its card."""

    def get(name):
        client = dial(name, worker=served(name))
        card = client.ready()["card"]
        client.frames = card["size"]["frames"]
        return client, card

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
        "guidance": 3.0 if p["guidance"] else 0.0,
        "steps": steps,
        **size,
        **more,
    }


def begin(client, recipe):
    """The handle of a recipe."""
    return client("encode", recipe)[0]["items"][0]["handle"]


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
    states, run = [], engine.loaded.session(engine.recipes[handle])
    [first], [last] = (run.split(torch.as_tensor(y)) for y in (noise, ys[-1]))
    run.session.cancel()
    own = worker.family.pipe(
        **{**call, "latents": first},
        callback_on_step_end=lambda pipe, i, t, values: states.append(values["latents"]) or {},
    )
    mine = grid.state(last, grid.last())
    assert (mine - states[-1]).abs().max() <= 1e-5 * states[-1].abs().max()

    size = {n: recipe[n] for n in ("frames", "height", "width")}
    s, c = worker.family.latent_shape(engine.recipes[handle].size)
    media = client("decode", {**size, "handle": handle}, {"x": ys[-1].reshape(s, c)})[1]["media"]
    assert np.abs(media.astype(int) - (np.reshape(own[0], media.shape) * 255).round()).max() <= 1


def test_sessions_with_other_guidance_do_not_touch_each_other(client, served):
    client, card = client("sd15")
    worker, size = served("sd15"), card["size"]
    recipes = [recipe_of(client, card, guidance=g, steps=n) for g, n in ((1.0, 4), (7.0, 3))]
    noise = noise_of(card)
    alone = [rollout(client, worker, card, r, noise, stop=3)[0][-1] for r in recipes]
    worker.engine.within(worker.engine._clear)
    ys, handles = [None, None], [begin(client, r) for r in recipes]
    assert handles[0] != handles[1]
    for k in range(3):
        for i, r in enumerate(recipes):
            ys[i] = rollout(client, worker, card, r, noise, k, k + 1, ys[i])[0][-1]
    assert all((a == b).all() for a, b in zip(alone, ys, strict=True))
    assert size["height"] == 16


def test_a_row_may_have_another_scale_than_its_recipe(client, served):
    """As hosts have it outside of cfg_from and cfg_until."""
    client, card = client("sd15")
    own, other = (begin(client, recipe_of(client, card, guidance=g)) for g in (7.0, 1.0))
    size = {n: card["size"][n] for n in ("height", "width")}
    x = np.concatenate([noise_of(card).numpy().reshape(1, *served("sd15").family.latent_shape(
        served("sd15").engine.recipes[own].size))] * 3)  # fmt: skip
    v = client.velocity(x, [0.5] * 3, [own, own, other], **size, guidance=[0.0, 1.0, 0.0])
    assert np.abs(v[1] - v[2]).max() <= 1e-5 * np.abs(v[2]).max() < np.abs(v[0] - v[1]).max()


def test_rollout_goes_on_in_a_new_session_from_its_recipe(client, served):
    client, card = client("kontext")
    worker, noise = served("kontext"), noise_of(card)
    recipe = recipe_of(client, card)
    ys, _, handle = rollout(client, worker, card, recipe, noise)
    worker.engine.within(worker.engine._clear)
    worker.engine.recipes.clear()
    worker.engine.loaded.memo.clear()
    with pytest.raises(Exception, match="unknown; put its recipe"):
        client.velocity(ys[2].reshape(1, -1, 64), [0.5], [handle], 64, 64)
    shuffled = dict(reversed([*recipe.items()]))
    assert client("put", {"recipe": shuffled})[0] == {"handle": handle}
    again = rollout(client, worker, card, recipe, noise, start=2, y=ys[2])[0]
    assert (again[-1] == ys[-1]).all()


@pytest.mark.parametrize(
    ("name", "calls"), [("sdxl", 1), ("kontext", 1), ("qwen-image", 1), ("StableDiffusionPAGPipeline", 0)]
)
def test_rows_of_several_prompts_are_computed_together(client, served, name, calls):
    """Qwen-Image has prompts of two lengths; PAG divides all rows by what they are, and has each alone."""
    client, card = client(name)
    engine = served(name).engine
    prompts = ("a cat", "the quick brown fox jumps over the lazy dog")
    handles = [begin(client, recipe_of(client, card, prompt=p)) for p in prompts]
    size = {n: card["size"][n] for n in ("height", "width")}
    shape = served(name).family.latent_shape(engine.recipes[handles[0]].size)
    x = np.random.default_rng(0).standard_normal((5, *shape)).astype(np.float32)
    rows, sigmas = [handles[i] for i in (0, 1, 0, 0, 1)], [0.5, 0.5, 0.5, 0.25, 0.5]
    client.velocity(x, sigmas, rows, **size)  # from the first call on it is known what networks give at this size
    before = engine.loaded.together.calls
    together = client.velocity(x, sigmas, rows, **size)
    assert engine.loaded.together.calls - before == calls
    alone = np.concatenate(
        [client.velocity(x[i : i + 1], sigmas[i : i + 1], rows[i : i + 1], **size) for i in range(5)]
    )
    assert np.abs(together - alone).max() <= 1e-5 * np.abs(alone).max()


@pytest.mark.parametrize(
    ("name", "calls", "turns"),
    [("qwen-image", 1, 1), ("FluxPipeline", 1, 1), ("StableDiffusionControlNetPipeline", 0, 2)],
)
def test_the_calls_of_a_turn_are_computed_together(client, served, name, calls, turns):
    """The two of guidance are one. A network that takes what another gave is called after it: the turn is done
    again."""
    client, card = client(name)
    engine = served(name).engine
    recipe = recipe_of(client, card)
    assert engine.loaded.ahead == (calls > 0)
    run = engine.within(lambda: engine.loaded.session(recipe))
    y = torch.randn(1, run.shapes[0][0].numel(), generator=torch.Generator().manual_seed(1))

    def turn(ahead):
        engine.loaded.ahead = ahead
        before = np.array([engine.loaded.together.calls, run.session.turns])
        v = engine.within(lambda: engine.loaded.together.run([(1, run.turn(y, 0.5))])[0])
        return v, tuple(np.array([engine.loaded.together.calls, run.session.turns]) - before)

    turn(False)  # the first one also places the state
    one_by_one, counted = turn(False)
    assert counted == (0, 1)
    together, counted = turn(True)
    assert counted == (calls, turns)
    assert (together - one_by_one).abs().max() <= 1e-5 * one_by_one.abs().max()
    run.session.usual += 1  # a turn with fewer calls than the first
    fewer, counted = turn(True)
    assert counted == (0, 2) and torch.equal(fewer, one_by_one)
    engine.loaded.ahead = calls > 0


def test_calls_for_which_memory_is_too_small_are_computed_one_after_another(client, served, monkeypatch):
    client, card = client("qwen-image")
    engine = served("qwen-image").engine
    handle, size = begin(client, recipe_of(client, card)), {n: card["size"][n] for n in ("height", "width")}
    x = noise_of(card).numpy().reshape(1, *served("qwen-image").family.latent_shape(engine.recipes[handle].size))
    together = client.velocity(x, [0.5], [handle], **size)
    compute = engine.loaded.together._compute

    def small(group, counts):
        if len(group) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(group, counts)

    monkeypatch.setattr(engine.loaded.together, "_compute", small)
    alone = client.velocity(x, [0.5], [handle], **size)
    assert not engine.loaded.ahead
    engine.loaded.ahead = True
    assert np.abs(together - alone).max() <= 1e-5 * np.abs(alone).max()


def test_a_compiled_pipeline_computes_the_same(client, served, dial):
    """Alone, beside others, and with an adapter that comes later."""
    from meander.torch.engine import Settings, make_engine
    from meander.torch.folder import Folder
    from meander.torch.server import Worker
    from meander.torch.whole import Pipeline

    plain, card = client("qwen-image")
    family = Pipeline(Folder(served("qwen-image").family.folder.path))
    worker = Worker(family, Settings("cpu", "f32", compile=True))
    worker.load(lambda say: make_engine(family, Settings("cpu", "f32", threads=1, compile=True), say))
    assert worker.error is None, worker.error
    compiled = dial("qwen-image", worker=worker)
    assert "/compiled/nondeterministic" in compiled.ready()["backend"]
    recipes = [recipe_of(plain, card, prompt=p) for p in ("a cat", "the quick brown fox")]
    handles = [[begin(c, r) for c in (plain, compiled)] for r in recipes]
    shape = family.latent_shape(served("qwen-image").engine.recipes[handles[0][0]].size)
    x = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    size = {n: card["size"][n] for n in ("height", "width")}
    linear = plain("modules")[0]["linear"]
    name = min(n for n in linear if n.endswith("attn.to_q"))
    out, into = linear[name]
    adapter = {f"{name}.A": torch.randn(2, into).numpy(), f"{name}.B": torch.randn(out, 2).numpy()}
    module = {"name": name, "rank": 2, "scale": 1.0}
    for weights in ("", "a" * 64):
        if weights:
            for c in (plain, compiled):
                c("load", {"weights": weights, "kind": "adapter", "modules": [module], "files": []}, adapter)
        for n in (1, 3):
            of = [handles[i % 2] for i in range(n)]
            theirs, ours = (
                c.velocity(x[:n], [0.5] * n, [h[i] for h in of], **size, weights=weights)
                for i, c in enumerate((plain, compiled))
            )
            assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("name", ["qwen-image", "sd3", "wan", "sdxl"])
def test_media_to_start_from_are_latents(client, served, name):
    """As the family of Qwen-Image encodes them, and as pipelines from image to image do."""
    from meander.torch import families
    from meander.torch.engine import Engine, Settings
    from meander.torch.family import Size
    from meander.torch.folder import Folder

    client, _ = client(name)
    family, temporal = served(name).family, served(name).family.temporal
    frames = 1 + temporal if family.makes_video() else 1
    size = {"frames": frames, "height": 64, "width": 96}
    media = np.random.default_rng(0).uniform(-1, 1, (frames, 64, 96, 3)).astype(np.float32)
    x = client("encode_media", size, {"media": media})[1]["x"]
    assert np.array_equal(client("encode_media", size, {"media": media})[1]["x"], x)
    assert list(served(name).engine.starts) == [Size(**size)]
    if name != "qwen-image":
        vae, pixels = family.pipe.vae, torch.from_numpy(media).permute(0, 3, 1, 2)
        with torch.no_grad():
            z = vae.encode(pixels.transpose(0, 1)[None] if name == "wan" else pixels).latent_dist.mode()
        if name == "wan":
            mean, std = (z.new_tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
            z = (z - mean) / std
        else:
            z = (z - (vae.config.shift_factor or 0)) * vae.config.scaling_factor
        handle = begin(client, recipe_of(client, client.ready()["card"], **size))
        run = served(name).engine.loaded.session(served(name).engine.recipes[handle])
        [ours] = run.split(torch.from_numpy(x.reshape(1, -1)))
        run.session.cancel()
        assert ours.shape == z.shape and (ours - z).abs().max() <= 1e-5 * z.abs().max()
        return
    engine = Engine(families.find(Folder(family.folder.path)), Settings("cpu", "f32", threads=1))
    with torch.no_grad():
        latents = dict(engine.encode_media(Size(**size), {"media": media})[1])
        want = dict(engine.decode(Size(**size), latents)[1])["media"]
    handle = begin(client, recipe_of(client, client.ready()["card"], **size))
    made = client("decode", {"handle": handle, **size}, {"x": x})[1]["media"]
    assert np.abs(np.sort(x.flatten()) - np.sort(latents["x"].flatten())).max() <= 1e-5 * np.abs(x).max()
    assert made.std() > 1 and np.abs(made.astype(int) - want).max() <= 1


def test_media_to_start_from_are_refused_where_the_state_is_not_decoded_so(client, served, monkeypatch):
    from meander.torch import starts

    client, card = client("sd15")
    size = card["size"]
    media = {"media": np.zeros((size["frames"], size["height"], size["width"], 3), np.float32)}
    monkeypatch.setattr(starts.Start, "_decoded", lambda self, y: y.sin().double())
    with pytest.raises(Exception, match="element by element: samples must begin with noise"):
        client("encode_media", size, media)


def test_rows_have_the_same_condition_where_its_encoder_draws(client, served):
    """FLUX Control draws the code of its image from the VAE's distribution."""
    client, card = client("FluxControlPipeline")
    engine, handle = served("FluxControlPipeline").engine, begin(client, recipe_of(client, card))
    assert engine.family.rows_alike
    x = np.random.default_rng(0).standard_normal((4, *served("FluxControlPipeline").family.latent_shape(
        engine.recipes[handle].size))).astype(np.float32)  # fmt: skip
    size = {n: card["size"][n] for n in ("height", "width")}
    together = client.velocity(x, [0.5] * 4, [handle] * 4, **size)
    alone = np.concatenate([client.velocity(x[i : i + 1], [0.5], [handle], **size) for i in range(4)])
    assert np.abs(together - alone).max() <= 1e-5 * np.abs(alone).max()


def test_a_condition_is_encoded_once(client, served, monkeypatch):
    """By the sessions of its steps and of all samples that are decoded; it is the one that the encoder gives."""
    name = "FluxControlPipeline"
    client, card = client(name)
    engine, calls = served(name).engine, []
    encode = type(engine.family.pipe.vae).encode
    monkeypatch.setattr(
        type(engine.family.pipe.vae),
        "encode",
        lambda self, *args, **named: calls.append(1) or encode(self, *args, **named),
    )
    recipe = recipe_of(client, card, "a sign", conditions={"control_image": [send(client, IMAGE[:, ::-1].copy())]})
    handle, x = begin(client, recipe), noise_of(card).numpy().reshape(1, -1)
    s, c = served(name).family.latent_shape(engine.recipes[handle].size)
    size = {n: recipe[n] for n in ("frames", "height", "width")}

    def made():
        v = client.velocity(x.reshape(1, s, c), [0.7], [handle], recipe["height"], recipe["width"])
        return v, client("decode", {"handle": handle, **size}, {"x": x.reshape(s, c)})[1]["media"]

    first, again = made(), made()
    assert len(calls) == 1
    engine.loaded.memo.clear()
    for v, media in (again, made()):
        assert np.array_equal(v, first[0]) and np.array_equal(media, first[1])
    assert len(calls) == 2


def test_condition_that_is_not_there_is_asked_for(client):
    client, card = client("kontext")
    recipe = recipe_of(client, card) | {"conditions": {"image": ["0" * 64]}}
    client.id += 1
    client.send({"id": client.id, "call": "encode", "args": recipe}, {})
    error = client.receive()[0]["error"]
    assert (error["class"], error["conditions"]) == ("condition", ["0" * 64])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"arguments": {"callback_on_step_end": "f"}}, "arguments: callback_on_step_end: .* changes the loop"),
        ({"arguments": {"generator": 1}}, "arguments: generator"),
        ({"arguments": {"output_type": "latent"}}, "arguments: output_type"),
        ({"arguments": {"latents": 1}}, "arguments: latents"),
        ({"arguments": {"num_inference_steps": 3}}, "arguments: num_inference_steps"),
        ({"arguments": {"colour": 3}}, "arguments: colour: unknown; must be of .*guidance_rescale"),
        ({"arguments": {"guidance_rescale": "much"}}, "guidance_rescale: 'much'; must be of type number"),
        ({"conditions": {"image": ["0" * 64]}}, "conditions: image; must be of none"),
        ({"prompts": [["a"], ["b"]]}, "prompts: must be one"),
        ({"prompts": [["a b c d " * 50]]}, "prompt: .*303 tokens; must be at most 77, or ask for truncation"),
        ({"height": 18, "width": 17}, "height x width: 18 x 17; must be positive multiples of 2"),
        ({"colour": 1}, "encode: args: colour: unknown"),
    ],
)
def test_recipe_is_refused_by_the_name_of_what_is_wrong(client, change, why):
    client, card = client("sd15")
    with pytest.raises(Exception, match=why):
        client("encode", {**recipe_of(client, card), **change})


def test_class_that_is_not_tested_needs_trust(tmp_path):
    import tiny_whole

    from meander.torch import families
    from meander.torch.faults import Fault
    from meander.torch.folder import Folder

    folder = tiny_whole.write(tmp_path, "sd15")["sd15"]
    index = folder / "model_index.json"
    text = index.read_text()
    index.write_text(text.replace("StableDiffusionPipeline", "StableDiffusionDiffEditPipeline"))
    with pytest.raises(Fault, match="StableDiffusionDiffEditPipeline; not among .* --trust-class"):
        families.find(Folder(folder))
    index.write_text(text.replace('"transformers"', '"os"', 1))
    with pytest.raises(Fault, match="os; must be diffusers or transformers"):
        families.find(Folder(folder), trust=True)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A pipeline for trainers, and a recipe."""
    import tiny_whole

    import meander.torch

    folder = tiny_whole.write(tmp_path_factory.mktemp("trained"), "inpaint")["inpaint"]
    return meander.torch.pipeline(folder, "cpu", "f32", trust_class=True)


def test_inpainting_has_gradients_with_its_masks_and_guidance(trained):
    from PIL import Image

    image = trained.condition(Image.fromarray(IMAGE[0]).resize((16, 16)))
    mask = trained.condition(Image.fromarray(np.eye(16, dtype=np.uint8) * 255))
    recipe = {
        "prompts": [["a cat"]],
        "steps": 4,
        "guidance": 3.0,
        "arguments": {"negative_prompt": "blue"},
        "conditions": {"image": [image], "mask_image": [mask]},
    }
    assert trained.family.access == "after_previous"
    network = trained.family.networks[""]
    weight = network.conv_in.weight.requires_grad_(True)
    run = trained.session(recipe, grad=True)
    sigma = run.grids[0].sigmas[2]
    x = torch.randn(1, 64, 4, generator=torch.Generator().manual_seed(1))
    w = torch.linspace(-1, 1, x.numel()).reshape(x.shape).double()

    def loss():
        return (run.velocity(x, sigma).double() * w).sum()

    value = loss()
    value.backward()
    gradient = weight.grad.clone()
    with torch.no_grad():
        assert trained.session(recipe).velocity(x, sigma).double().mul(w).sum() == value
        step = gradient / gradient.norm() * 1e-3 * weight.norm()
        before = weight.clone()
        ends = [loss() for w2 in (before + step, before - step) if weight.copy_(w2) is not None]
        weight.copy_(before)
    slope = (ends[0] - ends[1]) / (2 * step.norm())
    assert abs(slope / gradient.norm() - 1) < 1e-2

    weight.grad = None
    network.enable_gradient_checkpointing()
    network.train()
    loss().backward()
    assert torch.allclose(weight.grad, gradient, 1e-4, 1e-6)
    network.eval().disable_gradient_checkpointing()
    weight.requires_grad_(False)


def test_adapters_change_a_whole_pipeline_and_leave_its_base(client):
    client, card = client("sd15")
    handle = begin(client, recipe_of(client, card))
    name, (rows, columns) = next((n, s) for n, s in client("modules")[0]["linear"].items() if n.endswith("to_q"))
    generator = np.random.default_rng(0)
    tensors = {f"{name}.A": (2, columns), f"{name}.B": (rows, 2)}
    tensors = {n: generator.standard_normal(s).astype(np.float32) for n, s in tensors.items()}
    module = {"name": name, "scale": 1.0, "rank": 2}
    client("load", {"weights": "v1", "kind": "adapter", "modules": [module]}, tensors)
    x = generator.standard_normal((1, 64, 4)).astype(np.float32)
    base, adapted, again = (client.velocity(x, [0.5], [handle], 16, 16, weights=w) for w in ("", "v1", ""))
    assert (base == again).all() and np.abs(base - adapted).max() > 1e-3 * np.abs(base).max()


def test_learned_variances_are_left_away(served):
    """The host's steps end where the pipeline's do: it is looked at before it is served."""
    family = served("super-resolution").family
    assert family.access == "exact"
    assert [n.split()[0] for n in family.notes] == ["DDPMScheduler", "clip_sample"], "of the scheduler alone"
    assert [c["name"] for c in family.conditions if c["required"]] == ["image"]


def test_prompts_of_llama_keep_their_spaces(tmp_path):
    """transformers' class of Llama drops them, of tokenizers that split bytes."""
    import json

    import tiny

    import meander.torch

    folder = tiny.write(tmp_path, ("hunyuan-video",))["hunyuan-video"]
    index = json.loads((folder / "model_index.json").read_text())
    index["tokenizer"] = ["transformers", "LlamaTokenizerFast"]
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "meander.json").write_text(json.dumps({"height": 16, "width": 16, "frames": 5}))
    tokenizer = meander.torch.pipeline(folder, "cpu", "f32").family.pipe.tokenizer
    assert tokenizer.decode(tokenizer("a red cat on a mat").input_ids) == "a red cat on a mat"


def test_noise_of_a_decoder_is_the_same_each_time(tmp_path):
    import json

    import proofs
    import tiny

    import meander.torch

    torch.manual_seed(3)
    tiny.ltx_noise().save_pretrained(tmp_path)
    (tmp_path / "meander.json").write_text(json.dumps({"height": 64, "width": 64, "frames": 9}))
    loaded = meander.torch.pipeline(tmp_path, "cpu", "f32")
    recipe = loaded.recipe({"prompts": [["a cat"]], "steps": 4})
    with torch.no_grad():
        run = loaded.session(recipe)
        y = proofs.first_state(run)
        run.session.cancel()
        ends = [proofs.arrays(loaded.session(recipe).end(x))[0] for x in (y, y, -y)]
        vae, z = loaded.family.pipe.vae, torch.zeros(1, 16, 2, 2, 2)
        drawn = [vae.decode(z, torch.zeros(1), return_dict=False)[0] for _ in range(2)]
    assert np.array_equal(ends[0], ends[1]) and not np.array_equal(ends[0], ends[2])
    assert not torch.equal(*drawn)  # it does draw
