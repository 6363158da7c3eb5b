"""Folders of checkpoints: what a card says of their files, and what is refused before or while they are loaded."""

import json
import re
import secrets
import shutil

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from meander.torch import families  # noqa: E402
from meander.torch.engine import Settings, make_engine  # noqa: E402
from meander.torch.faults import Fault  # noqa: E402
from meander.torch.folder import Folder  # noqa: E402
from meander.torch.server import Worker  # noqa: E402
from meander.torch.whole import Pipeline  # noqa: E402


def changed(folder, copy, file, **values):
    """A copy of a folder with other values in one of its JSON files."""
    shutil.copytree(folder, copy)
    at = copy / file
    at.write_text(json.dumps(json.loads(at.read_text()) | values))
    return copy


def loaded(folder):
    """A worker of this process that has loaded a folder, or says why it could not."""
    worker = Worker(families.find(Folder(folder)), Settings("cpu", "f32"))
    worker.load(lambda say: make_engine(worker.family, Settings("cpu", "f32", threads=1), say))
    return worker


@pytest.mark.parametrize("name", ["sd3", "qwen-image", "krea2"])
def test_every_setting_is_accounted_for(folders, tmp_path, name):
    """A key that nothing knows is refused by its name, at every level of every file."""
    key = "x_" + secrets.token_hex(4)
    copy = shutil.copytree(folders[name], tmp_path / name)
    families.find(Folder(copy)).check()
    files = [f for f in copy.glob("*/*config.json") if "token" not in f.name and "generation" not in f.name]
    for file in (*files, copy / "model_index.json"):
        text = file.read_text()
        levels = [()] + [(k,) for k, v in json.loads(text).items() if isinstance(v, dict) and "label" not in k]
        levels += [(*at, "rope_parameters") for at in levels if at == ("text_config",)]
        for at in levels:
            inner = whole = json.loads(text)
            for step in at:
                inner = inner[step]
            inner[key] = 3
            file.write_text(json.dumps(whole))
            with pytest.raises(Fault, match=f"{file.name}.*: {key}: ") as e:
                families.find(Folder(copy)).check()
            assert e.value.kind == "config"
        file.write_text(text)


@pytest.mark.parametrize(
    ("name", "file", "values", "says"),
    [
        ("qwen-image", "scheduler/scheduler_config.json", {"use_karras_sigmas": True},
        "use_karras_sigmas: True; must be false"),
        ("qwen-image", "scheduler/scheduler_config.json", {"stochastic_sampling": True},
        "stochastic_sampling: True; must be f"),
        ("qwen-image", "scheduler/scheduler_config.json", {"invert_sigmas": True}, "invert_sigmas: True; must be false"),
        ("qwen-image", "model_index.json", {"scheduler": ["diffusers", "DDIMScheduler"]},
        "must be DDIMScheduler, as in model_"),
        ("sd3", "model_index.json", {"transformer_2": ["diffusers", "SD3Transformer2DModel"]},
        "transformer_2: .*absent"),
        ("sd3", "model_index.json", {"boundary_ratio": 0.5}, "boundary_ratio: 0.5; must be absent"),
        ("qwen-image", "model_index.json", {"is_distilled": True}, "is_distilled: True; must be absent"),
        ("sd3", "text_encoder_3/config.json", {"new_attention": True},
        "text_encoder_3/config.json: new_attention: True"),
    ],
)  # fmt: skip
def test_what_a_pipeline_does_and_a_worker_does_not(folders, tmp_path, name, file, values, says):
    worker = loaded(changed(folders[name], tmp_path / name, file, **values))
    assert worker.error.kind == "config" and re.search(says, str(worker.error)), worker.error


@pytest.mark.parametrize(
    ("part", "values", "says"),
    [
        ("text_encoder", {"num_hidden_layers": 4}, "text_encoder: tensors are missing: 16, such as text_model.encoder"),
        ("text_encoder_3", {"num_layers": 3}, "text_encoder_3: tensors are missing: 9, such as "),
        ("text_encoder_3", {"num_layers": 1}, "text_encoder_3: tensors have no place in the network: 9, such as "),
        ("vae", {"layers_per_block": 0}, "vae: tensors have no place in the network: "),
        ("text_encoder_3", {"d_ff": 48}, "text_encoder_3: tensors have another shape: 6, such as encoder.block.0."),
        ("vae", {"layers_per_block": 2}, "vae: tensors are missing: 64, such as "),
        ("vae", {"latent_channels": 4}, "vae: Cannot load because decoder.conv_in.weight expected shape"),
        ("transformer", {"num_layers": 2.5}, "transformer/config.json: no SD3Transformer2DModel of it: TypeError: "),
        ("vae", {"scaling_factor": "1"}, "not admitted: StableDiffusion3Pipeline fails in its own code, "),
        ("vae", {"scaling_factor": 0}, "not admitted: "),
        ("transformer", {"qk_norm": None}, "transformer: tensors have no place in the network: 14, such as "),
    ],
)
def test_weights_of_another_network_are_refused(folders, tmp_path, part, values, says):
    folder = changed(folders["sd3"], tmp_path / "sd3", f"{part}/config.json", **values)
    worker = loaded(folder)
    assert worker.error.kind == "config" and says in str(worker.error)


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_3"])
def test_a_tensor_too_many_is_refused_in_every_part(folders, tmp_path, part):
    """Beside the other halves of what a text encoder was saved with, which no prompt needs."""
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(folders["sd3"], tmp_path / "sd3")
    [file] = (copy / part).glob("*.safetensors")
    tensors, name = load_file(file), f"x{secrets.token_hex(4)}.weight"
    save_file(tensors | {name: torch.zeros(2)}, file, {"format": "pt"})
    worker = loaded(copy)
    assert worker.error and f"{part}: tensors have no place in the network: 1, such as {name}" in str(worker.error)
    if part.startswith("text"):
        halves = ("vision_model.class_embedding", "logit_scale", "decoder.block.0.k.weight", "lm_head.weight")
        save_file(tensors | {name: torch.zeros(2) for name in halves}, file, {"format": "pt"})
        assert loaded(copy).error is None


@pytest.mark.parametrize("change", ["another shard", "no such tensor", "not in the index", "another key"])
def test_shards_that_are_not_those_of_their_index_are_refused(folders, tmp_path, pipelines, change):
    copy = shutil.copytree(folders["sd3"], tmp_path / "sd3")
    (copy / "vae/diffusion_pytorch_model.safetensors").unlink()
    pipelines("sd3").vae.save_pretrained(copy / "vae", max_shard_size="100KB")
    families.find(Folder(copy)).check()
    file = copy / "vae/diffusion_pytorch_model.safetensors.index.json"
    index = json.loads(file.read_text())
    table = index["weight_map"]
    first, last = min(table, key=table.get), max(table, key=table.get)
    if change == "another shard":
        table[first] = table[last]
    elif change == "no such tensor":
        table["strange"] = table[first]
    elif change == "not in the index":
        del table[first]
    else:
        index["strange"] = 1
    file.write_text(json.dumps(index))
    says = "strange; must be weight_map or" if change == "another key" else "do not match their index: 1 tensors"
    with pytest.raises(Fault, match=says) as e:
        families.find(Folder(copy)).check()
    assert e.value.kind == "config"


def cut(contents):
    return contents[: len(contents) // 2]


def pointer(_):
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


@pytest.mark.parametrize(
    ("file", "broken", "says"),
    [
        ("transformer/diffusion_pytorch_model.safetensors", cut, "model.safetensors has .* bytes of .*copy it again"),
        ("text_encoder/model.safetensors", cut, "model.safetensors has .* bytes of .*copy it again"),
        ("vae/diffusion_pytorch_model.safetensors", lambda b: b + b"\0", "has .* bytes of .*copy it again"),
        ("vae/diffusion_pytorch_model.safetensors", lambda b: b"", "has 0 bytes of 8; .*copy it again"),
        ("vae/diffusion_pytorch_model.safetensors", lambda b: b[:8] + b"]" + b[9:], "its header cannot be read"),
        ("text_encoder_3/model.safetensors", pointer, "a pointer of Git LFS; .*git lfs pull"),
        ("tokenizer_2/tokenizer.json", pointer, "a pointer of Git LFS; .*git lfs pull"),
        ("tokenizer_2/tokenizer_config.json", pointer, "a pointer of Git LFS; .*git lfs pull"),
        ("tokenizer_2/tokenizer.json", cut, "/tokenizer.json: .*; copy it again"),
        ("vae/config.json", pointer, "a pointer of Git LFS; .*git lfs pull"),
        ("vae/diffusion_pytorch_model.safetensors", lambda b: b"<html>" * 9, "is no safetensors file"),
    ],
)
def test_broken_files_are_refused_before_anything_is_loaded(folders, tmp_path, file, broken, says):
    copy = shutil.copytree(folders["sd3"], tmp_path / "sd3")
    (copy / file).write_bytes(broken((copy / file).read_bytes()))
    with pytest.raises(Fault, match=f"{file.split('/')[0]}.*{says}") as e:
        families.find(Folder(copy)).check()
    assert e.value.kind == "config"


def test_quantized_weights_are_refused_by_their_dtype(folders, tmp_path):
    """Libraries without the quantizer would take them for plain numbers."""
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(folders["sd3"], tmp_path / "sd3")
    file = copy / "transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    for dtype, name in ((torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")):
        save_file({k: v.to(dtype) if v.ndim == 2 else v for k, v in tensors.items()}, file)
        with pytest.raises(Fault, match=f"model.safetensors: .*: {name}; must be F16, BF16, F32 or F64") as e:
            families.find(Folder(copy)).check()
        assert e.value.kind == "config"


def test_other_broken_parts_are_refused_before_anything_is_loaded(folders, tmp_path):
    """Files that tokenizers go on without, links whose target was not copied, indexes without names of files."""
    copy = shutil.copytree(folders["sd3"], tmp_path / "sd3")

    def refused(says):
        with pytest.raises(Fault, match=says) as e:
            families.find(Folder(copy)).check()
        assert e.value.kind == "config"

    weights = copy / "vae/diffusion_pytorch_model.safetensors"
    weights.rename(copy / "kept")
    weights.symlink_to("../../blobs/00")
    refused("diffusion_pytorch_model.safetensors is a link to ../../blobs/00, which is not there")
    weights.unlink()
    index = copy / "vae/diffusion_pytorch_model.safetensors.index.json"
    for table, says in (({"a": 1}, "names of files"), ({}, "no files"), ({"a": "../kept"}, "must be a file beside it")):
        index.write_text(json.dumps({"weight_map": table}))
        refused(f"index.json: .*{says}")
    index.unlink()
    (copy / "kept").rename(weights)
    (copy / "tokenizer/tokenizer.json").unlink()
    (copy / "tokenizer/vocab.json").write_text("{}")
    refused("no .*tokenizer/merges.txt")
    (copy / "tokenizer/merges.txt").write_text("")
    refused("tokenizer/merges.txt is empty")


@pytest.mark.parametrize(
    ("file", "values"),
    [("meander.json", {"height": "big"}), ("meander.json", {"height": None}), ("meander.json", {"fps": []}),
     ("transformer/config.json", {"in_channels": "x"}), ("vae/config.json", {"temperal_downsample": 3})],
)  # fmt: skip
def test_values_of_another_kind_are_refused(folders, tmp_path, file, values):
    copy = shutil.copytree(folders["qwen-image"], tmp_path / "qwen-image")
    if not (copy / file).exists():
        (copy / file).write_text("{}")
    (copy / file).write_text(json.dumps(json.loads((copy / file).read_text()) | values))
    with pytest.raises(Fault, match="a value of its config.json or meander.json: ") as e:
        families.find(Folder(copy))
    assert e.value.kind == "config"


def test_a_tokenizer_that_cannot_be_read_is_named(folders, tmp_path):
    copy = shutil.copytree(folders["qwen-image"], tmp_path / "qwen-image")
    (copy / "tokenizer/tokenizer.json").write_text('{"model": {"type": "none"}}')
    worker = loaded(copy)
    assert worker.error.kind == "config" and str(worker.error).startswith("tokenizer: cannot be read: ")


UNIPC = {
    "_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction", "use_flow_sigmas": True,
    "flow_shift": 3.0,
}  # fmt: skip
DPM = UNIPC | {"_class_name": "DPMSolverMultistepScheduler"}


@pytest.mark.parametrize("config", [UNIPC, UNIPC | {"use_karras_sigmas": True}, DPM | {"prediction_type": "epsilon"}])
def test_whole_timesteps_are_those_of_the_whole_pipeline(folders, tmp_path, config):
    """Which a family of its own does not know by sigmas: 599 or 600 for 0.6."""
    family = families.find(Folder(with_scheduler(folders["qwen-image"], tmp_path / "qwen-image", config)))
    assert isinstance(family, Pipeline)
    with pytest.raises(Fault, match="must be FlowMatchEuler.* or another without whole timesteps|use_karras_sigmas: True; must be false"):
        families.QwenImage(family.folder).check()


def with_scheduler(folder, copy, config):
    shutil.copytree(folder, copy)
    (copy / "scheduler/scheduler_config.json").write_text(json.dumps(config))
    named = {"scheduler": ["diffusers", config["_class_name"]]}
    (copy / "model_index.json").write_text(json.dumps(json.loads((copy / "model_index.json").read_text()) | named))
    return copy


def test_a_folder_with_other_weights_has_another_fingerprint(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(folders["sd3"], tmp_path / "sd3")
    file = copy / "transformer/diffusion_pytorch_model.safetensors"
    same = shutil.copytree(copy, tmp_path / "same")
    (same / "text_encoder/model.fp16.safetensors").write_bytes(b"a variant that nothing loads")
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("attn.to_q.weight"))
    save_file({**tensors, name: tensors[name] + 0.01}, file, {"format": "pt"})
    first, changed_, variant = (Folder(f).fingerprint for f in (folders["sd3"], copy, same))
    assert first == variant != changed_


def test_a_part_has_one_checkpoint(folders, tmp_path):
    """A variant beside it is none; of two that a library or the host could take neither is taken."""
    copy = shutil.copytree(folders["sd3"], tmp_path / "sd3")
    for part, own in (("vae", "diffusion_pytorch_model"), ("text_encoder", "model")):
        shutil.copy(copy / part / f"{own}.safetensors", copy / part / f"{own}.fp16.safetensors")
    families.find(Folder(copy)).check()
    shutil.copy(copy / "vae/diffusion_pytorch_model.safetensors", copy / "vae/model.safetensors")
    with pytest.raises(Fault, match="several checkpoints in .*vae; must be one") as e:
        families.find(Folder(copy)).check()
    assert e.value.kind == "config"


@pytest.mark.parametrize("layout", ["new", "legacy", "one file"])
def test_variants_are_loaded_in_all_layouts(folders, tmp_path, pipelines, layout):
    """As diffusers and transformers write them (huggingface/diffusers#9253), for each part."""
    copy = shutil.copytree(folders["sd3"], tmp_path / "sd3")
    pipe = pipelines("sd3")
    for part in ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3", "vae"):
        for old in copy.glob(f"{part}/*.safetensors*"):
            old.unlink()
        size = {} if layout == "one file" else {"max_shard_size": "100KB"}
        getattr(pipe, part).save_pretrained(copy / part, variant="fp16", **size)
        names = {f.name for f in (copy / part).glob("*.safetensors*")}
        assert (layout == "one file") == (len(names) == 1) and all("fp16" in n for n in names)
        if layout == "legacy":
            for file in list((copy / part).glob("*.fp16-*")):
                stem, _, number = file.name.partition(".fp16")
                file.rename(file.with_name(number.replace(".safetensors", ".fp16.safetensors").join((stem, ""))))
            for index in list((copy / part).glob("*.json")):
                if ".index." not in index.name:
                    continue
                text = index.read_text()
                for n in names:
                    stem, _, number = n.partition(".fp16")
                    text = text.replace(n, stem + number.replace(".safetensors", ".fp16.safetensors"))
                index.write_text(text)
                if index.name.startswith("diffusion"):
                    index.rename(index.with_name("diffusion_pytorch_model.safetensors.fp16.index.json"))
    worker = loaded(copy)
    assert worker.error is None
    want = pipe.transformer.state_dict()
    got = worker.engine.family.networks[""].state_dict()
    assert want.keys() == got.keys() and all(torch.equal(got[n], want[n]) for n in want)


def test_of_several_variants_none_is_meant(folders, tmp_path):
    copy = shutil.copytree(folders["sd3"], tmp_path / "sd3")
    vae = copy / "vae"
    (vae / "diffusion_pytorch_model.safetensors").rename(vae / "diffusion_pytorch_model.fp16.safetensors")
    families.find(Folder(copy)).check()
    shutil.copy(vae / "diffusion_pytorch_model.fp16.safetensors", vae / "diffusion_pytorch_model.bf16.safetensors")
    with pytest.raises(Fault, match="vae: several variants and none without a name: bf16, fp16; must be one"):
        families.find(Folder(copy)).check()


@pytest.mark.parametrize(
    ("name", "named", "words"),
    [("hunyuan-video", "LlamaTokenizerFast", "a red cat on a mat"), ("flux2", "PixtralProcessor", "a red cat")],
)
def test_tokenizers_are_read_by_their_files(tmp_path, name, named, words):
    """Llama's class would lose spaces; of a processor, which takes images, too, the tokenizer is enough."""
    import tiny

    folder = tiny.write(tmp_path, (name,))[name]
    changed(folder, tmp_path / "other", "model_index.json", tokenizer=["transformers", named])
    (own, tokenizer) = (
        families.find(Folder(f)).load(torch.float32, torch.device("cpu"), lambda detail: None).tokenizer
        for f in (folder, tmp_path / "other")
    )
    ids = tokenizer(words).input_ids
    assert ids == own(words).input_ids and words in tokenizer.decode(ids)


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_quantized_weights_are_refused(folders, tmp_path, part):
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    family = families.find(Folder(changed(folders["qwen-image"], tmp_path / "qwen-image", f"{part}/config.json", **config)))
    with pytest.raises(Fault, match=f"{part}/config.json: quantization_config: bitsandbytes; must be none") as e:
        family.check()
    assert e.value.kind == "config"


def test_distilled_models_go_without_guidance(folders, tmp_path):
    base = families.find(Folder(folders["krea2"])).card()
    folder = changed(folders["krea2"], tmp_path / "krea2", "model_index.json", is_distilled=True)
    card = families.find(Folder(folder)).card()
    assert (base["true_cfg_scale"], card["true_cfg_scale"], card["steps"]) == (5.5, 1.0, 8)
    assert [(c["mu"], c["mu_constant"]) for c in (base, card)] == [("linear", 0), ("constant", 1.15)]
    changed(folder, tmp_path / "static", "scheduler/scheduler_config.json", use_dynamic_shifting=False)
    static = families.find(Folder(tmp_path / "static")).card()
    assert (static["mu"], static["mu_constant"]) == ("none", 0)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"text_encoder_select_layers": [1, 2]}, r"_select_layers: \[1, 2\]; must be 3 layers, from 0 to 4"),
        ({"text_encoder_select_layers": [1, 2, 5]}, "must be 3 layers, from 0 to 4"),
        ({"text_encoder_select_layers": 5}, "text_encoder_select_layers: 5; must be 3"),
        ({"text_encoder_select_layers": None}, r"text_encoder_select_layers: \[2, 5, .*; must be 3"),  # the default
        ({"patch_size": 1}, "patch_size: 1; must be 2"),
    ],
)
def test_other_kinds_of_krea_are_refused(folders, tmp_path, values, says):
    with pytest.raises(Fault, match=says) as e:
        families.find(Folder(changed(folders["krea2"], tmp_path / "krea2", "model_index.json", **values)))
    assert e.value.kind == "config"


def test_layers_of_the_encoder_are_those_of_the_folder(folders, tmp_path, dial):
    folder = changed(folders["krea2"], tmp_path / "krea2", "model_index.json", text_encoder_select_layers=[0, 3, 4])
    worker = loaded(folder)
    (_, other, _), (_, own, _) = *dial("", worker=worker).encode("a red cat"), *dial("krea2").encode("a red cat")
    same = (other["prompt_embeds"] == own["prompt_embeds"]).reshape(-1, 3, 48).all(axis=(0, 2))
    assert same.tolist() == [False, False, True]
