"""Each family against the pipeline of diffusers itself: the same first state and sigmas, another loop."""

import contextlib

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
    "sd3": {"guidance_scale": 4.5},
    "flux1": {"guidance_scale": 3.5, "true_cfg_scale": 4.5, "negative_prompt": ""},
    "z-image": {"guidance_scale": 3.5},
    "qwen-image": {"true_cfg_scale": 4.5, "negative_prompt": " "},
    "signs": {"true_cfg_scale": 4.5, "negative_prompt": " "},
    "flux2": {"guidance_scale": 4.0},
    "flux2-klein": {"guidance_scale": 4.5},
    "krea2": {"guidance_scale": 3.5},
    "wan": {"guidance_scale": 4.5},
    "wan-5b": {"guidance_scale": 4.5},
    "wan-two": {"guidance_scale": 4.5},
    "hunyuan-video": {"guidance_scale": 6.0, "true_cfg_scale": 4.5, "negative_prompt": ""},
    "ltx": {"guidance_scale": 4.5},
}
UNGUIDED = ("flux2",)  # the pipeline knows no negative prompt
WANS = ("wan", "wan-5b", "wan-two")
VIDEOS = (*WANS, "hunyuan-video", "ltx")
FLUX2S = ("flux2", "flux2-klein")
PACKED = ("flux1", "qwen-image", "signs", "krea2", "ltx")  # the pipeline takes tokens
FAMILIES = tuple(CALLS)


@contextlib.contextmanager
def zeroed(network):
    """A network without its last layer."""
    kept = network.proj_out.weight.data.clone()
    network.proj_out.weight.data.zero_()
    yield
    network.proj_out.weight.data.copy_(kept)


def relative(a, b):
    a, b = (np.asarray(v.cpu() if isinstance(v, torch.Tensor) else v, np.float64) for v in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def guided(card, positive, negative, scale, rescale=0.0):
    """Classifier-free guidance as a host combines it."""
    v = negative + np.float32(scale) * (positive - negative)
    if card["cfg_rule"] == "rescaled":
        v = v * (np.linalg.norm(positive, axis=-1, keepdims=True) / np.linalg.norm(v, axis=-1, keepdims=True))
    return v * np.float32(rescale * positive.std(dtype=np.float64) / v.std(dtype=np.float64) + 1 - rescale)


def grid(x, card, frames):
    """[1, S, C] as [1, c, F, H, W]: tokens frame by frame, rows first, channels (c, p, p)."""
    c = card["latent"]
    deep, p = (frames - 1) // c["temporal"] + 1, c["patch"][1]
    h, w = HEIGHT // c["scale"], WIDTH // c["scale"]
    x = x.reshape(1, deep, h // p, w // p, c["channels"], p, p).transpose(0, 4, 1, 2, 5, 3, 6)
    return x.reshape(1, c["channels"], deep, h, w)


def lines(x, rows, columns):
    """Tokens [1, S, C] as [1, C, rows, columns]."""
    return x.transpose(0, 2, 1).reshape(1, x.shape[-1], rows, columns)


def as_pipelines(name, card, x, frames):
    """A first state [1, S, C] as the pipeline takes it."""
    if name in PACKED:
        return x
    if name in FLUX2S:
        return lines(x, HEIGHT // 16, WIDTH // 16)
    return grid(x, card, frames) if name in VIDEOS else grid(x, card, frames)[:, :, 0]


def sample(pipe, name, z, output, frames, own):
    """What the pipeline makes of its first state with arguments of its own, and the sigmas that it took."""
    import diffusers

    taken, call = [], CALLS[name] | own
    if name in VIDEOS:
        call["num_frames"] = frames
    if name in WANS:  # with the scheduler's own sigmas, in steps of Euler
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    elif name != "ltx":  # which takes its own
        call["sigmas"] = list(np.linspace(1, 1 / STEPS, STEPS))
    made = pipe(
        prompt=PROMPT,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=STEPS,
        latents=torch.from_numpy(z.copy()),
        output_type=output,
        callback_on_step_end=lambda p, i, t, kw: (taken.append(p.scheduler.sigmas.cpu().numpy().copy()), kw)[1],
        return_dict=False,
        **call,
    )[0]
    return made, taken[0]


def roll(client, card, x, sigmas, scale, second=None, rescale=0.0):
    """Six Euler steps of the worker's velocities; a second scale is that below the card's boundary_ratio."""
    (positive, _, _), (negative, _, _) = client.encode(PROMPT, card["negative_prompt"])
    for sigma, following in zip(sigmas, sigmas[1:], strict=False):
        both = np.concatenate([x, x])
        v = client.velocity(both, [sigma] * 2, [positive, negative], HEIGHT, WIDTH, [card["guidance"]] * 2)
        late = second is not None and np.float32(1000) * np.float32(sigma) < 1000 * card["boundary_ratio"]
        x = x + np.float32(following - sigma) * guided(card, v[:1], v[1:], second if late else scale, rescale)
    return x


def agree(name, client, pipe, second=None, rescale=0.0, **own):
    """Holds the worker's sample of client.frames frames against that of the pipeline with arguments of its own."""
    card, frames = client.ready()["card"], client.frames
    x = latents(card, 1, HEIGHT, WIDTH, seed=5, frames=frames)
    z = as_pipelines(name, card, x, frames)
    final, sigmas = sample(pipe, name, z, "latent", frames, own)
    ours = roll(client, card, x, sigmas, 1.0 if name in UNGUIDED else 4.5, second, rescale)
    theirs = final.cpu().numpy()
    last = ours if theirs.ndim == 3 else as_pipelines(name, card, ours, frames)
    if name == "flux2-klein":  # which returns what its VAE takes
        bn, deviation = pipe.vae.bn, (pipe.vae.bn.running_var + pipe.vae.config.batch_norm_eps).sqrt()
        last = torch.from_numpy(last) * deviation[:, None, None].cpu() + bn.running_mean[:, None, None].cpu()
        last = pipe._unpatchify_latents(last)
    error = relative(last, theirs)
    pixels, _ = sample(pipe, name, z, "np", frames, own)
    media = client.decode(ours[0], HEIGHT, WIDTH)
    away = np.abs(media.astype(int) - np.round(pixels.reshape(media.shape) * 255).astype(int))
    print(f"{name}: latents {error:.2g}, {np.count_nonzero(away)} of {away.size} bytes differ, by {away.max()}")
    assert error <= TOLERANCE
    assert media.shape == (frames, HEIGHT, WIDTH, 3)
    assert all(frame.std() > 1 for frame in media), "a flat image shows nothing"
    assert away.max() <= 1
    return media


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_like_the_pipeline(name, dial, pipelines):
    media = agree(name, dial(name), pipelines(name))
    assert len(media) == ((17 if name == "ltx" else 9) if name in VIDEOS else 1)
    for one, following in zip(media, media[1:], strict=False):
        assert not np.array_equal(one, following), "a still video does not show the order of its frames"


@pytest.mark.parametrize("name", VIDEOS)
def test_a_video_of_one_frame_is_an_image(name, dial, pipelines):
    client = dial(name)
    client.frames = 1
    agree(name, client, pipelines(name))


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
    if card["guidance"]:
        assert relative(client.velocity(x, [0.7], [one], HEIGHT, WIDTH, [9.0]), v) > 1e-2


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
    client = dial("sd3", deterministic=deterministic)
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
    card, frames = client.ready()["card"], client.frames
    media = np.random.default_rng(0).uniform(-1, 1, (frames, HEIGHT, WIDTH, 3)).astype(np.float32)
    _, out = client("encode_media", {"frames": frames, "height": HEIGHT, "width": WIDTH}, {"media": media})
    pipe = pipelines(name)
    vae, pixels = pipe.vae, torch.from_numpy(media).permute(0, 3, 1, 2).to(pipe.device)
    with torch.no_grad():
        if name in VIDEOS or name in ("qwen-image", "signs", "krea2"):
            z = vae.encode(pixels.transpose(0, 1)[None]).latent_dist.mode()
        if name == "hunyuan-video":
            z = z * vae.config.scaling_factor
        elif name == "ltx":
            z = pipe._normalize_latents(z, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        elif getattr(vae.config, "latents_mean", None):
            mean, std = (
                z.new_tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std)
            )
            z = (z - mean) / std
        elif name in FLUX2S:
            z = pipe._encode_vae_image(pixels, None)
        else:
            z = (vae.encode(pixels).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
    if name in FLUX2S:
        ours = lines(out["x"][None], HEIGHT // 16, WIDTH // 16)
    else:
        ours = grid(out["x"][None], card, frames).reshape(z.shape)
    assert relative(ours, z) < TOLERANCE


def test_each_expert_has_its_sigmas(dial):
    """Rows of one call on both sides of the boundary are those of calls of their own, of either transformer."""
    client = dial("wan-two")
    x = latents(client.ready()["card"], 1, HEIGHT, WIDTH)
    [(handle, _, _)] = client.encode(PROMPT)
    sigmas = [0.9, 0.6, 0.59, 0.1]  # the boundary is of the first
    together = client.velocity(np.concatenate([x] * 4), sigmas, [handle] * 4, HEIGHT, WIDTH)
    family = client.family
    for i, sigma in enumerate(sigmas):
        assert relative(together[i : i + 1], client.velocity(x, [sigma], [handle], HEIGHT, WIDTH)) < TOLERANCE
    first, second = family.networks.values()
    for network, rows in ((first, [2, 3]), (second, [0, 1])):
        with zeroed(network):
            left = client.velocity(np.concatenate([x] * 4), sigmas, [handle] * 4, HEIGHT, WIDTH)
        assert [i for i in range(4) if np.array_equal(left[i], together[i])] == rows


@pytest.mark.parametrize("second", [1.0, 2.5])
def test_the_second_expert_has_a_scale_of_its_own(second, dial, pipelines):
    client, pipe = dial("wan-two"), pipelines("wan-two")
    assert client.ready()["card"]["boundary_ratio"] == pipe.config.boundary_ratio
    assert dial("wan").ready()["card"]["boundary_ratio"] == 0
    media = agree("wan-two", client, pipe, second, guidance_scale_2=second)
    assert not np.array_equal(media, agree("wan-two", client, pipe))


@pytest.mark.parametrize("share", [0.7, 1.0])
def test_guidance_is_rescaled_as_in_ltx(share, dial, pipelines):
    client, pipe = dial("ltx"), pipelines("ltx")
    media = agree("ltx", client, pipe, rescale=share, guidance_rescale=share)
    assert not np.array_equal(media, agree("ltx", client, pipe))


def test_z_image_scale_is_one_more_than_the_pipelines_guidance(dial):
    card = dial("z-image").ready()["card"]
    assert card["true_cfg_scale"] == 6.0  # the pipeline's guidance_scale is 5 by default


def test_texts_of_their_own_reach_their_encoders(dial, pipelines):
    client = dial("sd3")
    (_, ours, _), (_, same, _) = client.encode([PROMPT, OTHER, "0123"], [PROMPT])
    with torch.no_grad():
        embeds, _, pooled, _ = pipelines("sd3").encode_prompt(PROMPT, OTHER, "0123", do_classifier_free_guidance=False)
    assert relative(ours["prompt_embeds"], embeds[0]) < TOLERANCE
    assert relative(ours["pooled_prompt_embeds"], pooled[0]) < TOLERANCE
    assert relative(ours["prompt_embeds"], same["prompt_embeds"]) > 1e-3
