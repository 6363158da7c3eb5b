"""What whole pipelines encode of texts, and on which device and in which dtype their parts are."""

import numpy as np
import pytest

pytest.importorskip("diffusers")

import torch
from talk import Refused
from test_pipelines import client, recipe_of, served  # noqa: F401

from meander.torch.seam import Memo


@pytest.mark.parametrize("name", ["flux1", "qwen-image", "sdxl", "hunyuan-video"])
def test_what_texts_are_encoded_to_is_returned(client, served, name):
    """By the names under which the pipeline takes it, as its encode_prompt gives it, with a mask."""
    client, card = client(name)
    answer, tensors = client("encode", recipe_of(client, card) | {"truncate": False})
    [item] = answer["items"]
    found = {n: tensors[n] for n in list(tensors)}
    assert len(item["tensors"]) == len(found)
    pipe = served(name).family.pipe
    with torch.no_grad():
        given = pipe.encode_prompt("a red cat", device="cpu", **{"sdxl": {"negative_prompt": "blue"}}.get(name, {}))
    wants = {
        "flux1": {"prompt_embeds": 0, "pooled_prompt_embeds": 1},
        "qwen-image": {"prompt_embeds": 0},
        "sdxl": {"prompt_embeds": 0, "negative_prompt_embeds": 1, "pooled_prompt_embeds": 2,
                 "negative_pooled_prompt_embeds": 3},
        "hunyuan-video": {"prompt_embeds": 0, "pooled_prompt_embeds": 1, "prompt_attention_mask": 2},
    }[name]  # fmt: skip
    for n, at in wants.items():
        assert np.array_equal(found[n], given[at][0].float().numpy()), n
    if name != "hunyuan-video":
        assert found["prompt_embeds_mask"].shape == found["prompt_embeds"].shape[:1]
    size = sum(v.nbytes for n, v in found.items() if not n.startswith("negative_"))
    assert size <= card["conditioning_bytes"] and card["conditioning_token_bytes"] <= card["conditioning_bytes"]
    assert (card["conditioning_token_bytes"] < card["conditioning_bytes"]) == (name == "qwen-image")


@pytest.mark.parametrize(
    ("name", "texts", "tokens"),
    [("sd3", ["x", "x", "0 " * 600], 256), ("flux1", ["x", "0 " * 600], 512), ("wan", ["0 " * 600], 512),
     ("z-image", ["0 " * 600], 512), ("sdxl", ["0 " * 80], 77)],
)  # fmt: skip
def test_prompts_that_are_too_long(client, served, name, texts, tokens):
    """They are refused with their tokens, or cut; what CLIP cuts is none where another encoder reads on."""
    client, card = client(name)
    recipe = recipe_of(client, card) | {"prompts": [texts]}
    for _ in range(2):
        with pytest.raises(Refused, match=rf"prompt: \d+ tokens; must be at most {tokens}, or ask") as e:
            client("encode", recipe)
        assert e.value.kind == "prompt" and int(e.value.message.split()[1]) > tokens
    [item] = client("encode", recipe | {"truncate": True})[0]["items"]
    assert item["cut"] == int(e.value.message.split()[1]) - tokens
    with pytest.raises(Refused, match="or ask for truncation"):  # what it was encoded to is kept
        client("encode", recipe)
    if len(texts) > 1:
        assert client("encode", recipe | {"prompts": [[texts[-1]] * (len(texts) - 1) + ["x"]]})[0]["items"][0]["cut"] == 0


def test_the_vae_of_wan_is_float32_beside_a_network_in_bf16(served):
    from meander.torch.engine import Settings, make_engine
    from meander.torch.folder import Folder
    from meander.torch.whole import Pipeline

    family = Pipeline(Folder(served("wan").family.folder.path))
    engine = make_engine(family, Settings("cpu", "bf16", threads=1))
    engine.within(engine.check_decoder)
    assert family.pipe.vae.dtype == torch.float32 and family.networks[""].dtype == torch.bfloat16


def test_text_encoders_have_a_device_of_their_own(served, monkeypatch):
    """Here it has another name alone: what they are called with goes there, and what they give comes back."""
    from meander.torch import encoding
    from meander.torch.engine import Settings, make_engine
    from meander.torch.folder import Folder
    from meander.torch.whole import Pipeline

    plain, moves = served("sdxl"), []
    moved = encoding.moved
    monkeypatch.setattr(encoding, "moved", lambda v, device: moves.append(str(device)) or moved(v, device))
    family = Pipeline(Folder(plain.family.folder.path), trust=True)
    engine = make_engine(family, Settings("cpu", "f32", encoders="cpu:0", threads=1))
    pipe, recipe = family.pipe, {"prompts": [["a red cat"]], "steps": 4, "guidance": 5.0}
    assert str(pipe.device) == str(pipe._execution_device) == "cpu"
    vs = []
    for e in (engine, plain.engine):
        e.within(e.check_decoder) if e is engine else None
        run = e.loaded.session(recipe)
        y = torch.randn(1, run.shapes[0][0].numel(), generator=torch.Generator().manual_seed(1))
        vs.append(run.velocity(y, 0.5))
        run.session.cancel()
    # (weights that were moved are aligned in memory, those of a mapped file are not: the last bit of a product differs)
    assert (vs[0] - vs[1]).abs().max() <= 1e-5 * vs[1].abs().max()
    assert len(moves) % 2 == 0 and moves[:2] == ["cpu:0", "cpu"]


@pytest.mark.parametrize("several", [False, True])
def test_what_was_encoded_leaves_generators_where_encoding_does(several):
    """Each row has its own where there are several; what the pipeline draws next is then the same."""

    class Pipe:
        def _encode_vae_image(self, image, generator):
            first = generator[0] if isinstance(generator, list) else generator
            return image + torch.randn(3, generator=first)

    encode, drawn = Memo().of(Pipe(), "_encode_vae_image"), []
    for _ in range(2):
        given = [torch.Generator().manual_seed(k) for k in range(2)]
        code = encode(torch.ones(3), given if several else given[0])
        drawn.append(torch.cat([code, *(torch.randn(3, generator=g) for g in given)]))
    assert torch.equal(*drawn)
