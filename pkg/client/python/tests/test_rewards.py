"""Reward functions that people use, with tiny random weights of their real classes, against what the library itself or
the formula of the paper says. Numbers are float32 on the CPU: they agree within 1e-5 of what they are in size."""

import asyncio
import functools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid

import msgpack
import numpy as np
import pytest
from conftest import ENVIRONMENT, Up, first

import meander
from meander.rewards import REWARDS, Fault, Input, Score
from meander.rewards.__main__ import main
from meander.rewards.geneval import check, relations

Image = pytest.importorskip(
    "PIL.Image", reason="rewards score images: pip install 'meander-rl[images]' brings Pillow"
)

HERE = __file__
NEAR = {"rel": 1e-5, "abs": 1e-5}
PROMPTS = ["a red fox", "two blue dogs on a very long road to the sea", ""]


def image(seed, side=40):
    """An image of soft colours: what is white noise to a network is grey to it."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)


SAMPLES = [Input(image(i), p) for i, p in enumerate(PROMPTS)]


def values(reward, samples):
    out = reward.score(samples)
    assert all(isinstance(x, Score) for x in out), out
    return [x.value for x in out]


def behaves(reward, prompts=True, samples=SAMPLES):
    """A batch is its samples one by one; another image, and another prompt, has another score. Returns the scores."""
    together = values(reward, samples)
    assert together == pytest.approx([values(reward, [s])[0] for s in samples], **NEAR)
    s = samples[0]
    assert abs(values(reward, [Input(image(99), s.prompt, s.ground_truth)])[0] - together[0]) > 1e-4
    other = values(reward, [Input(s.image, "a green cat", s.ground_truth)])[0]
    assert (abs(other - together[0]) > 1e-4) == prompts
    return together


# What needs torch.


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("transformers", reason="no transformers: pip install 'meander-rl[rewards]' brings it")
    pytest.importorskip("torchvision", reason="no torchvision: pip install 'meander-rl[rewards]' brings it")
    return pytest.importorskip("torch", reason="no torch: pip install 'meander-rl[rewards]' brings it")


def wide(torch, network, seed=7):
    """Draws weights from which scores depend on every input; with those of the classes they hardly do."""
    torch.manual_seed(seed)
    for name, p in network.named_parameters():
        if p.ndim >= 2:
            torch.nn.init.normal_(p, std=1.2 / p[0].numel() ** 0.5)
        elif name.endswith(("bias", "class_embedding")):
            torch.nn.init.normal_(p, std=0.1)
    return network.eval()


def words():
    """CLIP's tokenizer without merges: a token for each letter, as it is within a word and at its end."""
    from transformers import CLIPTokenizer

    letters = [chr(c) for c in range(33, 127)]
    vocabulary = [*letters, *(c + "</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer({t: i for i, t in enumerate(vocabulary)}, [], model_max_length=77)


@pytest.fixture(scope="module")
def clip(torch, tmp_path_factory):
    """The folder of a tiny CLIPModel."""
    import transformers as t

    tokens, folder = words(), tmp_path_factory.mktemp("clip")
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "projection_dim": 16
    }
    ends = {
        "bos_token_id": tokens.bos_token_id, "eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id
    }
    text = {**sizes, **ends, "vocab_size": len(tokens), "max_position_embeddings": 77}
    model = t.CLIPModel(
        t.CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 32, "patch_size": 8}, projection_dim=16)
    )
    wide(torch, model).save_pretrained(folder)
    pixels = t.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    t.CLIPProcessor(pixels, tokens).save_pretrained(folder)
    return folder


@functools.cache
def loaded(clip):
    import transformers as t

    return t.CLIPModel.from_pretrained(clip).eval(), t.CLIPProcessor.from_pretrained(clip)


def library(clip, torch, sample, text):
    """logits_per_image, and the embeddings by the calls for each, of the CLIPModel itself."""
    model, processor = loaded(clip)
    inputs = processor(text=[text], images=[sample.image], return_tensors="pt", truncation=True, max_length=77)
    with torch.no_grad():
        pixels = model.get_image_features(inputs["pixel_values"]).pooler_output
        tokens = model.get_text_features(inputs["input_ids"], inputs["attention_mask"]).pooler_output
        return model(**inputs).logits_per_image.item(), pixels[0], tokens[0]


def test_pickscore_is_the_logits_of_its_clip(torch, clip):
    from meander.rewards.pickscore import PickScore

    reward = PickScore(str(clip), device="cpu")
    assert behaves(reward) == pytest.approx([library(clip, torch, s, s.prompt)[0] for s in SAMPLES], **NEAR)
    assert re.fullmatch(
        "pickscore-[0-9a-f]{16}", reward.version
    ) and reward.version == PickScore(str(clip), device="cpu").version
    # bfloat16 has 8 bits; its scores are others, and so is its version
    coarse = PickScore(str(clip), device="cpu", dtype="bf16")
    assert values(coarse, SAMPLES) == pytest.approx(
        values(reward, SAMPLES), abs=0.5
    ) and coarse.version != reward.version


def test_a_prompt_beyond_77_tokens_is_cut(torch, clip):
    from meander.rewards.pickscore import PickScore

    reward = PickScore(str(clip), device="cpu")
    long = [Input(SAMPLES[0].image, "x " * n) for n in (75, 200, 60)]
    a, b, c = values(reward, long)
    assert a == pytest.approx(b, **NEAR) and abs(a - c) > 1e-4


def test_clipscore_is_the_papers_formula(torch, clip):
    from meander.rewards.clipscore import ClipScore

    reward = ClipScore(str(clip), device="cpu")
    want = []
    for s in SAMPLES:
        _, x, y = library(clip, torch, s, f"A photo depicts {s.prompt}")
        want.append(2.5 * max(0.0, torch.nn.functional.cosine_similarity(x, y, dim=0).item()))
    found = values(reward, SAMPLES)
    assert found == pytest.approx(want, **NEAR)
    many = values(reward, [Input(image(i), "Q") for i in range(12)])
    assert min(many) == 0 < max(many) <= 2.5 and len(set(many)) > 2


def test_clip_direction_is_the_formula(torch, clip):
    from meander.rewards.edits import ClipDirection

    reward = ClipDirection(str(clip), device="cpu")
    before = image(7)
    said = {"original_prompt": "a red fox", "edited_prompt": "a blue fox"}
    sample = Input(image(3), "make it blue", conditions={"image": [before]}, metadata=said)
    _, x, y = library(clip, torch, sample, "a blue fox")
    _, x0, y0 = library(clip, torch, Input(before, ""), "a red fox")
    unit = [v / v.norm() for v in (x, x0, y, y0)]
    want = torch.nn.functional.cosine_similarity(unit[0] - unit[1], unit[2] - unit[3], dim=0).item()
    params = {"before": "a red fox", "after": "a blue fox"}
    given = Input(image(3), "make it blue", conditions={"image": [before]}, params=params)
    same = Input(before, "make it blue", conditions={"image": [before]}, params=params)
    a, lost, b, bare, c, equal = reward.score([sample, Input(image(3), "x", params=params), given,
        Input(image(3), "x", conditions={"image": [before]}), same,
        Input(image(3), "x", conditions={"image": [before]}, params=params | {"after": "a red fox"})])  # fmt: skip
    assert [a.value, b.value] == pytest.approx([want] * 2, **NEAR) and c.value == pytest.approx(0, abs=1e-6)
    assert "no condition of type image" in str(lost) and "no caption before" in str(bare) and "the same" in str(equal)
    assert reward.version.startswith("clip-direction-")


def test_edit_l2():
    from PIL import Image
    from meander.rewards.edits import EditL2

    black, white = Image.new("RGB", (4, 2)), Image.new("RGB", (4, 2), (255, 255, 255))
    same, other, size, bare = EditL2().score([
        Input(black, "x", conditions={"image": [black]}), Input(white, "x", conditions={"image": [black]}),
        Input(black, "x", conditions={"image": [Image.new("RGB", (2, 4))]}), Input(black, "x")])  # fmt: skip
    assert (same.value, other.value) == (1, 0) and "2x4 pixels" in str(size) and "no condition" in str(bare)


def test_aesthetic_is_a_linear_network_over_clip(torch, clip, tmp_path):
    from torch import nn

    from meander.rewards.aesthetic import Aesthetic

    # The layers of the published predictor, narrower: it has dropout between them, and no activation.
    own = nn.Sequential(nn.Linear(16, 12), nn.Dropout(0.2), nn.Linear(12, 8), nn.Dropout(0.2), nn.Linear(8, 1)).eval()
    torch.save({f"layers.{k}": v for k, v in own.state_dict().items()}, tmp_path / "linear.pth")
    reward = Aesthetic(str(tmp_path), "linear.pth", str(clip), device="cpu")
    embeddings = [library(clip, torch, s, "x")[1] for s in SAMPLES]
    with torch.no_grad():
        want = [own(x / x.norm()).item() for x in embeddings]
    assert behaves(reward, prompts=False) == pytest.approx(want, **NEAR)

    with pytest.raises(Fault, match=r"there is no other\.pth"):
        Aesthetic(str(tmp_path), "other.pth", str(clip), device="cpu")
    torch.save({"layers.0.weight": torch.zeros(1, 3), "layers.0.bias": torch.zeros(1)}, tmp_path / "narrow.pth")
    with pytest.raises(Fault, match="takes 3 numbers"):
        Aesthetic(str(tmp_path), "narrow.pth", str(clip), device="cpu")


def hpsv2_transform(size):
    """What hpsv2 1.2 makes of an image: tensors of floats are resized, as torchvision does."""
    from torchvision.transforms import InterpolationMode, Normalize
    from torchvision.transforms import functional as tv

    def transform(image_):
        x = tv.to_tensor(image_.convert("RGB"))
        scale = size / max(x.shape[1:])
        h, w = (round(n * scale) for n in x.shape[1:])
        x = tv.resize(x, [h, w], InterpolationMode.BICUBIC) if scale != 1 else x
        x = tv.pad(x, [(size - w) // 2, (size - h) // 2, size - w - (size - w) // 2, size - h - (size - h) // 2])
        return Normalize((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))(x)

    return transform


@pytest.mark.parametrize("shape", [(32, 32), (80, 40), (37, 91), (512, 512), (9, 32), (3, 5)])
def test_hpsv2_resizes_floats(torch, shape):
    """With the bits of its authors' transform; resizing the image itself gives others."""
    pytest.importorskip("torchvision", reason="no torchvision: pip install 'meander-rl[rewards]' brings it")
    from meander.rewards.hpsv2 import preprocess

    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8))
    found, want = preprocess(noise, 32), hpsv2_transform(32)(noise)
    assert found.shape == (3, 32, 32) and torch.equal(found, want)


def test_hpsv2_is_the_cosine_of_open_clip(torch, tmp_path):
    open_clip = pytest.importorskip("open_clip", reason="no open_clip: pip install 'meander-rl[rewards]' brings it")
    from meander.rewards.hpsv2 import HPSv2

    vision = {"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 8}
    text = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 2}
    config = {"model_cfg": {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}, "preprocess_cfg": {"size": 32}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    model = wide(torch, open_clip.CLIP(16, open_clip.CLIPVisionCfg(**vision), open_clip.CLIPTextCfg(**text)))
    torch.save(
        {"epoch": 0, "state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "hps.pt"
    )
    reward = HPSv2(str(tmp_path), "hps.pt", str(tmp_path), device="cpu")

    tokenizer, want, preprocess = open_clip.get_tokenizer("ViT-H-14"), [], hpsv2_transform(32)
    samples = [*SAMPLES, Input(image(7).resize((80, 40)), "a fox at the side")]
    for s in samples:
        with torch.no_grad():
            features, texts, scale = model(preprocess(s.image)[None], tokenizer([s.prompt]))
        want.append((features @ texts.T).item())
    assert behaves(reward, samples=samples) == pytest.approx(want, **NEAR)
    with pytest.raises(Fault, match="not weights of CLIP"):
        torch.save({"state_dict": {"x": torch.zeros(1)}}, tmp_path / "none.pt")
        HPSv2(str(tmp_path), "none.pt", str(tmp_path), device="cpu")


def test_imagereward_is_that_of_its_library(torch, tmp_path):
    try:
        import ImageReward as library_
        from ImageReward.models.BLIP import blip, blip_pretrain, vit
    except ImportError as e:
        pytest.skip(f"no image-reward ({e}): pip install 'meander-rl[imagereward]' brings it and transformers 4")
    from transformers import BertTokenizer

    from meander.rewards.imagereward import ImageReward

    letters = [chr(c) for c in range(33, 127)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + c for c in letters)]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 768, "intermediate_size": 64}
    config = {**sizes, "vocab_size": len(tokens) + 2, "max_position_embeddings": 64, "type_vocab_size": 2,
        "hidden_act": "gelu",
              "layer_norm_eps": 1e-12, "pad_token_id": 0, "encoder_width": 32, "add_cross_attention": True,
              "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "initializer_range": 0.02}  # fmt: skip
    (tmp_path / "med_config.json").write_text(json.dumps(config))

    def small(*_, **__):
        """The library's own class of ViT, but not its size, which is that of ViT-L whatever the configuration says."""
        return vit.VisionTransformer(img_size=224, patch_size=56, embed_dim=32, depth=2, num_heads=4), 32

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blip_pretrain, "create_vit", small)
        with patch.context() as local:
            local.setattr(blip_pretrain, "init_tokenizer", lambda: BertTokenizer(str(tmp_path / "vocab.txt")))
            model = wide(torch, library_.ImageReward(str(tmp_path / "med_config.json"), "cpu"))
        torch.save(model.state_dict(), tmp_path / "ImageReward.pt")
        reward = ImageReward(str(tmp_path), str(tmp_path), device="cpu")
    assert blip_pretrain.init_tokenizer is blip.init_tokenizer
    want = []
    for s in SAMPLES:
        with torch.no_grad():
            want.append(model.score(s.prompt, s.image))
    assert behaves(reward) == pytest.approx(want, **NEAR)


def test_hpsv3_is_that_of_its_library(torch, tmp_path):
    try:
        from hpsv3 import HPSv3RewardInferencer
        from hpsv3.model.qwen2vl_trainer import Qwen2VLRewardModelBT
    except ImportError as e:
        pytest.skip(f"no hpsv3 ({e}): pip install 'meander-rl[hpsv3]' brings it and transformers 4.45")
    import transformers as t
    from safetensors.torch import save_file

    from meander.rewards.hpsv3 import HPSv3

    base, letters = tmp_path / "base", t.models.gpt2.tokenization_gpt2.bytes_to_unicode().values()
    base.mkdir()
    (base / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(letters)}))
    (base / "merges.txt").write_text("#version: 0.2\n")
    names = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokens = t.Qwen2TokenizerFast(str(base / "vocab.json"), str(base / "merges.txt"), additional_special_tokens=names)
    ids = {n.strip("<|>"): tokens.convert_tokens_to_ids(n) for n in names}
    chat = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}"
            "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n"
        "{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")  # fmt: skip
    tokens.chat_template = chat
    t.Qwen2VLProcessor(t.Qwen2VLImageProcessor(), tokens, chat_template=chat).save_pretrained(base)
    config = t.Qwen2VLConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(tokens) + 8,
        vision_config={"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2},
        max_position_embeddings=4096,
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}, vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"], bos_token_id=ids["im_start"],
        eos_token_id=ids["im_end"])
    wide(torch, t.Qwen2VLForConditionalGeneration(config)).save_pretrained(base)
    (tmp_path / "tiny.yaml").write_text(json.dumps({
        "rm_head_type": "ranknet", "model_name_or_path": str(base), "use_special_tokens": True,
        "reward_token": "special", "output_dim": 2,
        "loss_type": "uncertainty", "torch_dtype": "float32", "disable_flash_attn2": True, "output_dir": str(tmp_path),
        "report_to": "none",
        "bf16": False, "train_json_list": [], "test_json_list": [], "use_cpu": True}))  # fmt: skip
    weights = tmp_path / "HPSv3.safetensors"
    model = Qwen2VLRewardModelBT(config, output_dim=2, rm_head_type="ranknet")
    model.resize_token_embeddings(len(tokens) + 1)
    save_file({k: v.clone() for k, v in wide(torch, model, 9).state_dict().items()}, weights)
    library_ = HPSv3RewardInferencer(str(tmp_path / "tiny.yaml"), str(weights), "cpu")
    with torch.no_grad():
        want = [library_.reward([s.image], [s.prompt])[0, 0].item() for s in SAMPLES]
    assert behaves(HPSv3(str(tmp_path), str(base), "cpu")) == pytest.approx(want, **NEAR)


@pytest.fixture(scope="module")
def detr(torch, tmp_path_factory):
    """The folder of a tiny DETR that knows dog, cat and mouse."""
    import transformers as t

    folder = tmp_path_factory.mktemp("detr")
    backbone = t.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    config = t.DetrConfig(
        backbone_config=backbone, d_model=32, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4, decoder_attention_heads=4, num_queries=12, id2label={0: "dog", 1: "cat", 2: "mouse"},
        label2id={"dog": 0, "cat": 1, "mouse": 2})  # fmt: skip
    model = wide(torch, t.DetrForObjectDetection(config))
    torch.nn.init.normal_(model.class_labels_classifier.weight, std=1.5)  # some boxes are sure, and some are not
    model.save_pretrained(folder)
    t.DetrImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)
    return folder


def asks(*include, exclude=(), **more):
    return json.dumps({"include": list(include), "exclude": list(exclude), **more})


def test_geneval_sees_the_boxes_of_its_detector(torch, detr):
    import transformers as t

    from meander.rewards.geneval import GenEval

    reward = GenEval(str(detr), threshold=0.2, count_threshold=0.4, device="cpu")
    model, processor = t.DetrForObjectDetection.from_pretrained(detr).eval(), t.DetrImageProcessor.from_pretrained(detr)
    shown = image(3, 80)
    with torch.no_grad():
        raw = model(**processor(images=[shown], return_tensors="pt"))
    sure = raw.logits[0].softmax(-1)[:, :-1]
    for tag, least in (("", 0.2), ("counting", 0.4)):
        want = {}
        for label, name in enumerate(("dog", "cat", "mouse")):
            of = [(sure[q, label].item(), raw.pred_boxes[0, q]) for q in range(12) if sure[q].argmax() == label]
            of = sorted(((s, b) for s, b in of if s > least), key=lambda x: -x[0])
            want[name] = [
                [80 * float(v) for v in (b[0] - b[2] / 2, b[1] - b[3] / 2, b[0] + b[2] / 2, b[1] + b[3] / 2)]
                for _, b in of
            ]
        assert any(want.values()) and (tag or sum(map(len, want.values())) > 1)
        every = {"tag": tag, "include": [{"class": n, "count": 1} for n in want]}
        (found,) = reward.detect([shown], [every])
        assert {n: [pytest.approx(b, abs=1e-3) for b in boxes] for n, boxes in want.items()} == found

    (found,) = reward.detect([shown], [json.loads(asks(*({"class": n, "count": 1} for n in ("dog", "cat", "mouse"))))])
    counts = {n: len(boxes) for n, boxes in found.items()}
    there = [{"class": n, "count": c} for n, c in counts.items() if c]
    right = asks(*there, exclude=[{"class": n, "count": c + 1} for n, c in counts.items()])
    wrong = asks(*there, {"class": "dog", "count": counts["dog"] + 1})
    samples = [
        Input(shown, "", right), Input(shown, "", wrong), Input(shown, "", wrong, {"of": "share"}),
        Input(shown, "", "two dogs")
    ]
    a, b, c, d = reward.score(samples)
    # a line of GenEval's files, as Flow-GRPO has it, is the record of its prompt
    lines = [Input(shown, "", "", {}, json.loads(line)) for line in (right, wrong)]
    assert reward.score(lines) == [a, b]
    assert (a.value, b.value) == (1, 0) and 0 < c.value < 1 and f"want {counts['dog'] + 1}" in b.detail
    assert isinstance(d, ValueError) and "no record of GenEval" in str(d)
    # the name that GenEval has for a class of COCO, one that no class has, and a colour without --clip
    e, f, g = reward.score([Input(shown, "", asks({"class": n, "count": 1, **more})) for n, more in
                            (("computer mouse", {}), ("zebra", {}), ("dog", {"color": "red"}))])  # fmt: skip
    assert isinstance(e, Score) and "knows no 'zebra'" in str(f) and "no --clip" in str(g)


def test_geneval_tells_colours_by_clip(torch, detr, clip):
    from meander.rewards.geneval import COLOURS, GenEval

    reward = GenEval(str(detr), str(clip), threshold=0.0, device="cpu")
    shown, boxes = image(5, 80), [(0, 0, 40, 40), (30.4, 20.2, 79.5, 80)]
    want = []
    for box in boxes:
        crop = shown.crop((math.floor(box[0]), math.floor(box[1]), math.ceil(box[2]), math.ceil(box[3])))
        scores = []
        for colour in COLOURS:
            pairs = [library(clip, torch, Input(crop, ""), text) for text in
                     (
                         f"a photo of a {colour} dog", f"a photo of a {colour}-colored dog",
                         f"a photo of a {colour} object"
                     )]
            mean = torch.stack([t / t.norm() for _, _, t in pairs]).mean(0)
            scores.append(torch.nn.functional.cosine_similarity(pairs[0][1], mean, dim=0).item())
        want.append(COLOURS[int(np.argmax(scores))])
    assert reward.colours(shown, boxes, "dog") == want
    (seen,) = reward.detect([shown], [json.loads(asks(*({"class": n, "count": 1} for n in ("dog", "cat", "mouse"))))])
    name = next(n for n, found in seen.items() if found)
    (colour,) = reward.colours(shown, seen[name][:1], name)
    texts = [asks({"class": name, "count": 1, "color": c}) for c in (colour, COLOURS[COLOURS.index(colour) - 1])]
    a, b = reward.score([Input(shown, "", x) for x in texts])
    assert (a.value, b.value) == (1, 0) and colour in b.detail


def test_geneval_looks_for_words_by_owlv2(torch, clip, tmp_path):
    import transformers as t

    from meander.rewards.geneval import GenEval

    tokens = words()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {
        "bos_token_id": tokens.bos_token_id, "eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id
    }
    config = t.Owlv2Config(
        text_config={**sizes, **ends, "vocab_size": len(tokens), "max_position_embeddings": 77},
        vision_config={**sizes, "image_size": 32, "patch_size": 8}, projection_dim=32)  # fmt: skip
    wide(torch, t.Owlv2ForObjectDetection(config)).save_pretrained(tmp_path)
    pixels = t.Owlv2ImageProcessor(size={"height": 32, "width": 32})
    t.Owlv2Processor(pixels, tokens).save_pretrained(tmp_path)
    reward = GenEval(str(tmp_path), threshold=0.3, device="cpu")
    both = [image(3, 64), image(4, 64)]
    wants = [
        json.loads(asks({"class": "cat", "count": 1}, {"class": "dog", "count": 1})),
        json.loads(asks({"class": "sun", "count": 1}))
    ]
    found = reward.detect(both, wants)
    model, processor = t.Owlv2ForObjectDetection.from_pretrained(tmp_path).eval(), t.Owlv2Processor.from_pretrained(
        tmp_path)
    for shown, names, boxes in zip(both, (["cat", "dog"], ["sun"]), found):
        inputs = processor(text=[[f"a photo of a {n}" for n in names]], images=[shown], return_tensors="pt")
        with torch.no_grad():
            raw = model(**inputs)
        sure = raw.logits[0].sigmoid()
        for label, name in enumerate(names):
            of = [
                (sure[q, label].item(), raw.pred_boxes[0, q].tolist())
                for q in range(len(sure)) if sure[q].argmax() == label
            ]
            kept = sorted(((s, b) for s, b in of if s > 0.3), key=lambda x: -x[0])[:16]
            want = [[64 * v for v in (x - w / 2, y - h / 2, x + w / 2, y + h / 2)] for _, (x, y, w, h) in kept]
            assert len(boxes[name]) == len(want)
            for a, b in zip(boxes[name], want):
                assert a == pytest.approx(b, abs=1e-2)
    assert any(map(len, found[0].values()))


def test_weights_that_are_not_there_are_one_line(torch, clip, tmp_path):
    from meander.rewards.clipscore import ClipScore
    from meander.rewards.pickscore import PickScore

    with pytest.raises(Fault, match=r"--weights \./none: no such folder"):
        ClipScore("./none")
    with pytest.raises(Fault, match="--weights .*no CLIPProcessor"):
        ClipScore(str(tmp_path))
    with pytest.raises(Fault, match=r"--processor \./none"):
        PickScore(str(clip), "./none")
    with pytest.raises(Fault, match="--device cuda:99"):
        ClipScore(str(clip), device="cuda:99")
    # Weights that a file lacks would be as they were drawn.
    from safetensors.torch import load_file, save_file

    shutil.copytree(clip, tmp_path / "less")
    tensors = load_file(clip / "model.safetensors")
    save_file(
        {k: v for k, v in tensors.items() if not k.startswith("text_proj")}, tmp_path / "less/model.safetensors",
        {"format": "pt"}
    )
    with pytest.raises(Fault, match="1 are missing, such as text_projection.weight"):
        ClipScore(str(tmp_path / "less"), device="cpu")


# What needs no torch.

DOG, CAT = [10, 10, 30, 30], [60, 12, 90, 32]


@pytest.mark.parametrize(
    "a, b, want",
    [
        (DOG, CAT, {"left of"}),
        (CAT, DOG, {"right of"}),
        ([10, 60, 30, 80], DOG, {"below"}),
        (DOG, [10, 60, 30, 80], {"above"}),
        (DOG, [60, 60, 80, 80], {"left of", "above"}),
        (DOG, [13, 10, 33, 30], set()),  # nearer than a tenth of both widths: 4
        (DOG, [15, 10, 35, 30], set()),  # 5 - 4 is less than half of 5
        (DOG, [19, 10, 39, 30], {"left of"}),  # 9 - 4 is more than half of 9
        (DOG, DOG, set()),
    ],
)
def test_positions_are_by_the_rule_of_geneval(a, b, want):
    assert relations(a, b) == want


def test_geneval_checks_number_colour_and_place():
    found = {"dog": [DOG, [200, 10, 220, 30]], "cat": [CAT]}

    def wrong(*include, exclude=(), colours=None):
        return check({"include": list(include), "exclude": list(exclude)}, found, colours or {})

    dog, two, cat = {"class": "dog", "count": 1}, {"class": "dog", "count": 2}, {"class": "cat", "count": 1}
    assert not wrong(two, cat) and wrong({**two, "count": 3}) == ["2 dog; want 3"]
    assert not wrong(two, exclude=[{"class": "dog", "count": 3}])
    assert wrong(dog, exclude=[two]) == ["2 dog; want less than 2"]
    assert not wrong(dog, {**cat, "position": ["right of", 0]})
    assert wrong(two, {**cat, "position": ["right of", 0]}) == ["cat: not right of the dog"]  # of both
    red = {**dog, "color": "red"}
    assert not wrong(red, colours={("dog", 1): ["red"]})
    assert wrong(red, colours={("dog", 1): ["blue"]}) == ["dog: blue; want 1 red"]
    assert wrong(
        {"class": "cow", "count": 1}, {**cat, "position": ["right of", 0]}
    ) == ["0 cow; want 1", "cat: not right of the cow"]


def command(*args, **env):
    return [sys.executable, "-m", "meander.rewards", *args], {**ENVIRONMENT, **env}


def test_help_names_each_function_and_what_a_score_means(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in REWARDS)
    for name, cls in REWARDS.items():
        with pytest.raises(SystemExit):
            main([name, "--help"])
        said = capsys.readouterr().out
        assert "The score is" in said and f"meander-rl[{cls.extra}]" in said
        assert all(flag in said for flag in cls.flags)


def test_what_is_not_installed_is_named(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')")
    args, env = command("clipscore", "--try", "x.png", "x", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    out = subprocess.run(args, env=env, capture_output=True, text=True)
    assert out.returncode == 1 and "pip install 'meander-rl[rewards]'" in out.stderr
    assert "Traceback" not in out.stderr


def test_a_pipeline_is_rewarded_by_a_worker(torch, clip, binary, tmp_path):
    """The command scores what a pipeline makes; its scores are those of the class on the stored images, with the
    version that scorers.yaml says."""
    from meander.rewards.pickscore import PickScore

    reward = PickScore(str(clip), device="cpu")
    (tmp_path / "scorers.yaml").write_text(f"nats:\n  clip-tiny:\n    concurrency: 32\n    version: {reward.version}\n")
    up = Up(tmp_path, None, "--scorers", str(tmp_path / "scorers.yaml")).start()
    args, env = command("pickscore", "--weights", str(clip), "--device", "cpu", "--name", "clip-tiny", "--nats", up.url)
    worker = subprocess.Popen(args, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert reward.version in worker.stdout.readline() and "nats:clip-tiny" in worker.stdout.readline()

        async def test():
            async with meander.connect(up.url) as client:
                run = "py" + uuid.uuid4().hex[:8]
                await client.publish(
                    run, "a red fox", uid="fox", group_size=8, seed=3, num_inference_steps=4,
                    reward=[{"name": "nats:clip-tiny"}]
                )
                group = await first(client.stream_groups(run, timeout=60))
                assert group.advantage["status"] == "complete"
                images = [Image.fromarray(await client.pixels(s.trajectory)) for s in group.samples]
                m = await client.js.get_last_msg("MDR_REWARDS", f"mdr.v1.reward.*.{run}.*.fox.0")
                return [s.member["reward"] for s in group.samples], images, msgpack.unpackb(m.data)["scores"][0]

        rewards, images, score = asyncio.run(test())
        assert rewards == pytest.approx(values(reward, [Input(i, "a red fox") for i in images]), **NEAR)
        assert len({round(r, 6) for r in rewards}) > 1
        assert score["name"] == "nats:clip-tiny" and reward.version in score["version"]
        worker.send_signal(signal.SIGTERM)
        _, log = worker.communicate(timeout=60)
        assert worker.returncode == 0 and "8 scored" in log and "0 failed" in log
    finally:
        worker.kill()
        worker.wait()
        up.stop()
