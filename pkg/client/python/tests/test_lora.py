"""Files of adapters as other trainers write them: every tensor and every setting is used, or refused by its name."""

import json
import logging
import secrets

import numpy as np
import pytest

from meander import lora, policy, tensorfile

MODULE = "transformer_blocks.0.attn.to_q"
TABLE = {MODULE: [4, 6], "transformer_blocks.0.attn.to_k": [4, 6], "transformer_blocks.0.attn.to_v": [4, 6]}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}


def check(names=(MODULE + ".lora_A.weight", MODULE + ".lora_B.weight"), config=None, rank=2, rows=4, **more):
    a, b = np.ones((rank, 6), np.float32), np.ones((rows, rank), np.float32)
    file = tensorfile.encode(dict(zip(names, (a, b), strict=True)) | more)
    return policy.check_adapter(file, json.dumps(config).encode() if config is not None else b"", TABLE)


def pair(module, down=".lora_A.weight", up=".lora_B.weight"):
    return module + down, module + up


def test_a_random_tensor_is_refused_by_name():
    check()
    for name, why in {
        f"{MODULE}.{secrets.token_hex(4)}": "no tensor of a LoRA", secrets.token_hex(4): "no tensor of a LoRA",
        f"{MODULE}.lora_magnitude_vector": "DoRA", f"{MODULE}.dora_scale": "merge_and_unload",
        f"{MODULE}.base_layer.weight": "out of target_modules",
        f"{MODULE}.hada_w1_a": "LoHa", f"{MODULE}.lokr_w1": "LyCORIS", f"{MODULE}.lora_B.bias": "bias",
        "text_encoder.text_model.q.lora_A.weight": "fuse_lora", "lora_te1_text_model_q.lora_up.weight": "text encoder",
    }.items():  # fmt: skip
        with pytest.raises(policy.PolicyRefused, match=f"{name}: .*{why}"):
            check(**{name: np.ones((1, 1), np.float32)})


def test_a_random_setting_is_refused_by_name():
    key = "x_" + secrets.token_hex(4)
    check(config=CONFIG | {key: None})
    for setting, value in {
        key: 1, "use_dora": True, "modules_to_save": ["proj_out"], "fan_in_fan_out": True, "lora_bias": True,
        "trainable_token_indices": [1], "target_parameters": ["w"], "bias": "all", "peft_type": "LOHA",
        "init_lora_weights": "pissa", "lora_alpha": "2", "rank_pattern": {"to_q": "3"}, "alpha_pattern": {"m(?!n)": 3},
        "text_encoder.r": 3,
    }.items():  # fmt: skip
        with pytest.raises(policy.PolicyRefused, match=f"{setting}: "):
            check(config=CONFIG | {setting: value})
    with pytest.raises(policy.PolicyRefused, match="rank 2; the adapter configuration has 8"):
        check(config=CONFIG | {"r": 8})
    with pytest.raises(policy.PolicyRefused, match="rank 2; the adapter configuration has 4"):
        check(config=CONFIG | {"rank_pattern": {"to_q": 4}})
    for setting, why in lora.rules().harmless.items():
        assert why
        check(config=CONFIG | {setting: "anything"})


@pytest.mark.parametrize("names", [
    pair("base_model.model." + MODULE), pair("module." + MODULE), pair("_orig_mod." + MODULE),
    pair("transformer_blocks.0._fsdp_wrapped_module.attn.to_q"), pair("diffusion_model." + MODULE),
    pair(MODULE + "._orig_mod"), pair(MODULE, *(f".lora_{x}.default._fsdp_wrapped_module.weight" for x in "AB")),
    pair("lora_unet_" + MODULE.replace(".", "_"), ".lora_down.weight", ".lora_up.weight"),
    pair("lora_transformer_" + MODULE.replace(".", "_"), ".lora_down.weight", ".lora_up.weight"),
    pair("lycoris_" + MODULE.replace(".", "_"), ".lora_down.weight", ".lora_up.weight"),
])  # fmt: skip
def test_names_of_other_trainers(names, caplog):
    with caplog.at_level(logging.INFO):
        check(names)
    off = [w for w in ("base_model.model.", "module.", "_orig_mod.", "_fsdp_wrapped_module.", "diffusion_model.")
           if w in names[0]]  # fmt: skip
    assert bool(off) == bool(caplog.records) and all(w in caplog.text for w in off)


def test_what_is_one_module_there_is_several_here():
    check(pair("diffusion_model.double_blocks.0.img_attn.qkv"), rows=12)
    with pytest.raises(policy.PolicyRefused, match="qkv: changes a weight of 11 x 6, here 12 x 6"):
        check(pair("diffusion_model.double_blocks.0.img_attn.qkv"), rows=11)
    a, b = (np.ones(s, np.float32) for s in ((2, 6), (4, 2)))
    with pytest.raises(policy.PolicyRefused, match="changed under another name, too"):
        check(pair("lora_unet_double_blocks_0_img_attn_qkv"), rows=12, **dict(zip(pair(MODULE), (a, b), strict=True)))


def test_the_rank_may_be_above_the_smaller_side():
    check(rank=9)
