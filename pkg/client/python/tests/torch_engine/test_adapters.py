"""Names of adapters: what a file of other trainers changes is what the converters of diffusers make of it, and the
client, PEFT and the samplers' reader agree on what is refused."""

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from diffusers import (  # noqa: E402
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    Krea2Transformer2DModel,
    QwenImageTransformer2DModel,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from diffusers.loaders import lora_conversion_utils as converters  # noqa: E402

from meander import lora  # noqa: E402

RANK = 2
FAMILIES = {
    "flux kohya": (
        FluxTransformer2DModel, {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True},
        converters._convert_kohya_flux_lora_to_diffusers, "lora_unet_",
    ),
    "flux2 kohya": (
        Flux2Transformer2DModel, {"num_layers": 1, "num_single_layers": 1},
        converters._convert_kohya_flux2_lora_to_diffusers,
        "lora_unet_",
    ),
    "flux2": (
        Flux2Transformer2DModel, {"num_layers": 1, "num_single_layers": 1},
        converters._convert_non_diffusers_flux2_lora_to_diffusers, "diffusion_model.",
    ),
    "hunyuan": (
        HunyuanVideoTransformer3DModel, {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1},
        converters._convert_hunyuan_video_lora_to_diffusers, "diffusion_model.",
    ),
    "wan musubi": (
        WanTransformer3DModel, {"num_layers": 1}, converters._convert_musubi_wan_lora_to_diffusers, "lora_unet_"
    ),
    "wan": (
        WanTransformer3DModel, {"num_layers": 1}, converters._convert_non_diffusers_wan_lora_to_diffusers,
        "diffusion_model.",
    ),
    "krea2": (
        Krea2Transformer2DModel, {"num_layers": 1}, converters._convert_non_diffusers_krea2_lora_to_diffusers,
        "diffusion_model.",
    ),
    "qwen kohya": (
        QwenImageTransformer2DModel, {"num_layers": 1}, converters._convert_non_diffusers_qwen_lora_to_diffusers,
        "lora_unet_",
    ),
    "z-image kohya": (
        ZImageTransformer2DModel, {"n_layers": 1, "n_refiner_layers": 1},
        converters._convert_non_diffusers_z_image_lora_to_diffusers, "lora_unet_",
    ),
}  # fmt: skip


def probe(shape):
    """A fixed input of a layer: deltas of real sizes are compared by what they make of it."""
    return torch.linspace(-1, 2, shape[1])


BFL = (
    r"double_blocks.0.(img|txt)_(attn\.(qkv|proj)|mlp.[02])|single_blocks.0.linear[12]|"
        r"(img|txt|time)_in(.(in|out)_layer)?|"
    r"final_layer.linear"
)
KNOWN = {
    "flux kohya": BFL + r"|final_layer.adaLN.*|(guidance|vector)_in.*_layer|double_blocks.*_mod.lin|.*.modulation.lin",
    "flux2 kohya": BFL, "flux2": BFL + r"|final_layer.adaLN.*|guidance_in.*_layer|(sing|doub)le_stream_modulation.*",
    # of its refiner's qkv, and of the last layer's scale and shift, it divides both factors
    "hunyuan": r"double_blocks.0.(img|txt)_(attn_(qkv|proj)|mlp.fc[12]|mod.linear)|(time|guidance)_in.mlp.[02]|"
    r"vector_in.*|single_blocks.0.(linear[12]|modulation.linear)|final_layer.linear|"
        r"txt_in.(?!.*(qkv|self_attn.proj)).*",
    "wan musubi": r"blocks.*(?<!_img)", "wan": r"(blocks|time|text|head).*(?<!_img)",
    "krea2": r"(blocks|txtfusion|first|last|tmlp|tproj|txtmlp).*",
}  # fmt: skip
"""Of the spellings that are read, those that a converter knows."""


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_those_of_the_converters(family):
    cls, config, convert, prefix = FAMILIES[family]
    with torch.device("meta"):
        network = cls(**config)
    table = {n: list(m.weight.shape) for n, m in network.named_modules() if isinstance(m, torch.nn.Linear)}
    resolver, flat = lora.Resolver(table), prefix.endswith("_")
    r = lora.rules()
    names = [e[0].replace("*", "0") for e in (*r.originals, *r.swapped)]
    if family.startswith(("qwen", "z-image")):  # their own names, without dots
        names = [n for n in table if "norm_out" not in n or family.startswith("qwen")]
        names = [n for n in names if not n.startswith(("all_", "cap_")) or "linear" in n]
    generator, state, want = torch.Generator().manual_seed(1), {}, {}
    for name in dict.fromkeys(names):
        spelt = prefix + (name.replace(".", "_") if flat else name)
        module, _, _ = lora.split(f"{spelt}.lora_down.weight")
        own, swap = resolver.resolve(module)
        if not own or not re.fullmatch(KNOWN.get(family, ".*"), name):
            continue
        a = torch.randn(RANK, table[own[0]][1], generator=generator)
        b = torch.randn(sum(table[m][0] for m in own), RANK, generator=generator)
        down, up = (".lora_down.weight", ".lora_up.weight") if flat else (".lora_A.weight", ".lora_B.weight")
        state |= {spelt + down: a, spelt + up: b}
        scale = 1.0
        if flat and "final_layer" not in name:
            state[f"{spelt}.alpha"], scale = torch.tensor(1.0), 1 / RANK
        b = torch.cat(b.chunk(2)[::-1]) if swap else b
        for m in own:
            assert m not in want, (m, name)
            want[m], b = scale * b[: table[m][0]] @ (a @ probe(table[m])), b[table[m][0] :]
    assert len(want) > 5
    converted = convert(dict(state))
    got = {}
    for key, a in converted.items():
        if key.endswith(".lora_A.weight"):
            stem = key.removesuffix(".lora_A.weight")
            got[stem.removeprefix("transformer.")] = converted[f"{stem}.lora_B.weight"] @ (a @ probe(a.shape))
    assert got.keys() == want.keys()
    for m, delta in want.items():
        torch.testing.assert_close(got[m], delta, atol=1e-5, rtol=1e-5, msg=m)
