"""Each family against the pipeline of diffusers itself: the same first state and sigmas, another loop."""

import numpy as np
import pytest
from talk import latents

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

HEIGHT, WIDTH, STEPS = 64, 96, 6  # rectangular: a network with rows and columns swapped must not pass
PROMPT, OTHER = "a red cat on a mat", "a blue sign that says hello"
TOLERANCE = 5e-6  # relative L2 of float32 after six steps; the two loops add in another order

# The pipeline's arguments beside a scale of guidance that is meander's 4.5.
CALLS = {
    "qwen-image": {"true_cfg_scale": 4.5, "negative_prompt": " "},
    "signs": {"true_cfg_scale": 4.5, "negative_prompt": " "},
    "krea2": {"guidance_scale": 3.5},
}
FAMILIES = tuple(CALLS)


def relative(a, b):
    a, b = (np.asarray(v.cpu() if isinstance(v, torch.Tensor) else v, np.float64) for v in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def guided(card, positive, negative, scale):
    """Classifier-free guidance as a host combines it."""
    v = negative + np.float32(scale) * (positive - negative)
    if card["cfg_rule"] == "rescaled":
        v = v * (np.linalg.norm(positive, axis=-1, keepdims=True) / np.linalg.norm(v, axis=-1, keepdims=True))
    return v


def grid(x, card):
    """[1, S, C] as [1, c, 1, H, W]: rows first, channels (c, p, p)."""
    c = card["latent"]
    p, h, w = c["patch"][1], HEIGHT // c["scale"], WIDTH // c["scale"]
    x = x.reshape(1, 1, h // p, w // p, c["channels"], p, p).transpose(0, 4, 1, 2, 5, 3, 6)
    return x.reshape(1, c["channels"], 1, h, w)


def sample(pipe, name, x, output):
    """What the pipeline makes of its first state, and the sigmas that it took."""
    taken = []
    made = pipe(
        prompt=PROMPT,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=STEPS,
        latents=torch.from_numpy(x.copy()),
        output_type=output,
        sigmas=list(np.linspace(1, 1 / STEPS, STEPS)),
        callback_on_step_end=lambda p, i, t, kw: (taken.append(p.scheduler.sigmas.cpu().numpy().copy()), kw)[1],
        return_dict=False,
        **CALLS[name],
    )[0]
    return made, taken[0]


def roll(client, card, x, sigmas, scale):
    """Six Euler steps of the worker's velocities."""
    (positive, _, _), (negative, _, _) = client.encode(PROMPT, card["negative_prompt"])
    for sigma, following in zip(sigmas, sigmas[1:], strict=False):
        both = np.concatenate([x, x])
        v = client.velocity(both, [sigma] * 2, [positive, negative], HEIGHT, WIDTH, [card["guidance"]] * 2)
        x = x + np.float32(following - sigma) * guided(card, v[:1], v[1:], scale)
    return x


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_like_the_pipeline(name, dial, pipelines):
    client, pipe = dial(name), pipelines(name)
    card = client.ready()["card"]
    x = latents(card, 1, HEIGHT, WIDTH, seed=5)
    final, sigmas = sample(pipe, name, x, "latent")
    ours = roll(client, card, x, sigmas, 4.5)
    error = relative(ours, final)
    pixels, _ = sample(pipe, name, x, "np")
    media = client.decode(ours[0], HEIGHT, WIDTH)
    away = np.abs(media.astype(int) - np.round(pixels.reshape(media.shape) * 255).astype(int))
    print(f"{name}: latents {error:.2g}, {np.count_nonzero(away)} of {away.size} bytes differ, by {away.max()}")
    assert error <= TOLERANCE
    assert media.shape == (1, HEIGHT, WIDTH, 3) and media.std() > 1, "a flat image shows nothing"
    assert away.max() <= 1


@pytest.mark.parametrize("name", FAMILIES)
def test_velocity_depends_on_each_input(name, dial):
    client = dial(name)
    card = client.ready()["card"]
    x = latents(card, 1, HEIGHT, WIDTH)
    (one, _, _), (other, _, _) = client.encode(PROMPT, OTHER)
    g = [card["guidance"]]
    v = client.velocity(x, [0.7], [one], HEIGHT, WIDTH, g)
    assert relative(client.velocity(x, [0.7], [other], HEIGHT, WIDTH, g), v) > 1e-3
    assert relative(client.velocity(x, [0.6], [one], HEIGHT, WIDTH, g), v) > 1e-2
    assert relative(client.velocity(x * 1.1, [0.7], [one], HEIGHT, WIDTH, g), v) > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_pooled_and_token_embeddings_both_count(name, dial):
    client = dial(name)
    card = client.ready()["card"]
    x = latents(card, 1, HEIGHT, WIDTH)
    (one, tensors, _), (_, others, _) = client.encode(PROMPT, OTHER + ", " + PROMPT)  # another length, too
    v = client.velocity(x, [0.7], [one], HEIGHT, WIDTH, [card["guidance"]])
    for c in card["conditioning"]:
        mixed, _ = client("put", {}, {**tensors, c["name"]: others[c["name"]]})
        other = client.velocity(x, [0.7], [mixed["handle"]], HEIGHT, WIDTH, [card["guidance"]])
        assert relative(other, v) > 1e-4, c["name"]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_call_are_rows_of_their_own(name, dial):
    client = dial(name)
    card = client.ready()["card"]
    x = latents(card, 3, HEIGHT, WIDTH)
    # Prompts of unequal length: where a family pads, padding must not reach the other rows.
    handles = [h for h, _, _ in client.encode("x", PROMPT + ", " + OTHER, "")]
    sigmas, g = [0.9, 0.5, 0.2], [card["guidance"]] * 3
    together = client.velocity(x, sigmas, handles, HEIGHT, WIDTH, g)
    for i in range(3):
        alone = client.velocity(x[i : i + 1], sigmas[i : i + 1], handles[i : i + 1], HEIGHT, WIDTH, g[:1])
        assert relative(together[i : i + 1], alone) < TOLERANCE


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_of_one_state(dial, deterministic):
    client = dial("qwen-image", deterministic=deterministic)
    x = latents(client.ready()["card"], 2, HEIGHT, WIDTH)
    handles = [h for h, _, _ in client.encode(PROMPT, "", PROMPT, "")]
    sigmas, states = [0.9, 0.9, 0.3, 0.3], [1, 0, 1, 1]
    each = client.velocity(x[states], sigmas, handles, HEIGHT, WIDTH)
    assert np.array_equal(client.velocity(x, sigmas, handles, HEIGHT, WIDTH, states=states), each)


@pytest.mark.parametrize("name", FAMILIES)
def test_deterministic_rows_have_the_bits_of_a_row_alone(name, dial):
    client = dial(name, deterministic=True)
    card = client.ready()["card"]
    x = latents(card, 3, HEIGHT, WIDTH)
    handles = [h for h, _, _ in client.encode(PROMPT, OTHER, "")]
    sigmas, g = [0.9, 0.5, 0.2], [card["guidance"]] * 3
    together = client.velocity(x, sigmas, handles, HEIGHT, WIDTH, g)
    for i in range(3):
        alone = client.velocity(x[i : i + 1], sigmas[i : i + 1], handles[i : i + 1], HEIGHT, WIDTH, g[:1])
        assert np.array_equal(together[i], alone[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_encoded_media_are_the_pipelines_latents(name, dial, pipelines):
    client = dial(name)
    card = client.ready()["card"]
    media = np.random.default_rng(0).uniform(-1, 1, (1, HEIGHT, WIDTH, 3)).astype(np.float32)
    _, out = client("encode_media", {"frames": 1, "height": HEIGHT, "width": WIDTH}, {"media": media})
    pipe = pipelines(name)
    vae, pixels = pipe.vae, torch.from_numpy(media).permute(0, 3, 1, 2).to(pipe.device)
    with torch.no_grad():
        z = vae.encode(pixels.transpose(0, 1)[None]).latent_dist.mode()
        mean, std = (z.new_tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
        z = (z - mean) / std
    ours = grid(out["x"][None], card)
    assert relative(ours, z) < TOLERANCE
