#!/usr/bin/env python3
"""Record what PEFT makes of adapters, on layers of a few numbers.

    python deploy/golden/make_lora.py pkg/models/lora/testdata/peft.json

Part of `make golden`. Each adapter is made by its configuration, trained (its numbers are moved), saved, and loaded
into a fresh copy of the model. `deltas` is what it adds there to the weights that the model had, per module,
little-endian float32 in base64; `file` and `config` are the two files of its folder. `fields` are those of LoraConfig
with their defaults. LoftQ is not among them: it needs a quantizer that computes on GPUs.
"""

import base64
import copy
import dataclasses
import json
import os
import sys
import tempfile
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga

SEED = 20261123
ALL = ["to_q", "to_k", "up"]

# What LoraConfig is given. `order` rearranges the patterns of the file, which PEFT sorts when it saves.
CASES = {
    "plain": dict(),
    "other alpha": dict(r=3, lora_alpha=5),
    "rslora": dict(use_rslora=True, r=4),
    "rank by name": dict(rank_pattern={"to_q": 4, "blocks.1.attn.to_k": 1}),
    "alpha by name": dict(alpha_pattern={"to_q": 3, "up": 0.5}),
    "the first of two keys": dict(alpha_pattern={"attn.to_q": 6, "to_q": 3}),
    "the first of two keys, the longer last": dict(alpha_pattern={"blocks.10.attn.to_q": 9, "to_q": 3},
                                                   order=["to_q", "blocks.10.attn.to_q"]),
    "the first of two keys, the longer first": dict(alpha_pattern={"to_q": 3, "blocks.10.attn.to_q": 9},
                                                    order=["blocks.10.attn.to_q", "to_q"]),
    "keys are patterns": dict(alpha_pattern={r"blocks\.(1|10)\.attn\.to_q": 7, r"attn\.to_.": 5, r"[a-z]+": 2}),
    "keys match at a dot": dict(alpha_pattern={"o_q": 7, "q": 5, "ttn.to_k": 9, ".*o_k": 4}),
    "keys are alternatives": dict(alpha_pattern={"to_q|up": 6}, rank_pattern={"to_k|mlp.up": 3}, use_rslora=True),
    "keys with anchors": dict(alpha_pattern={r"^blocks.0.attn.to_q$": 6, r"blocks.0.attn.to_k$": 5}),
    "ranks of two keys": dict(
        rank_pattern={r"blocks\.1\..*": 4, "to_q": 3}, alpha_pattern={"to_q": 5, r".*\.1\..*": 7}
    ),
    "some layers": dict(layers_to_transform=[1, 10], layers_pattern="blocks"),
    "but some modules": dict(exclude_modules=["blocks.0.attn.to_q"]),
    "modules by a pattern": dict(target_modules=r".*attn\.to_(q|k)"),
    "dropout": dict(lora_dropout=0.5),
    "transposed": dict(fan_in_fan_out=True),
    "init gaussian": dict(init_lora_weights="gaussian"),
    "init none": dict(init_lora_weights=False),
    "init eva": dict(init_lora_weights="eva"),
    "init orthogonal": dict(init_lora_weights="orthogonal"),
    "init mica": dict(init_lora_weights="mica"),
    "init pissa": dict(init_lora_weights="pissa"),
    "init pissa_niter_4": dict(init_lora_weights="pissa_niter_4"),
    "init olora": dict(init_lora_weights="olora"),
    "init corda": dict(init_lora_weights="corda", corda_config=CordaConfig()),
    "init lora_ga": dict(init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig()),
    "dora": dict(use_dora=True),
    "bias of lora_B": dict(lora_bias=True),
    "biases": dict(bias="all"),
    "saved modules": dict(modules_to_save=["head"]),
}


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k = torch.nn.Linear(5, 4), torch.nn.Linear(5, 5)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Attention(), torch.nn.ModuleDict({"up": torch.nn.Linear(5, 5)})

    def forward(self, x):
        return self.mlp["up"](self.attn.to_k(x)) + torch.nn.functional.pad(self.attn.to_q(x), (0, 1))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(SEED)
        self.blocks = torch.nn.ModuleList([Block() if i in (0, 1, 10) else torch.nn.Identity() for i in range(11)])
        self.head = torch.nn.Linear(5, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def weights(model):
    return {n: m.weight.detach().clone() for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}


def prepare(model, config):
    """What some ways to begin need to have seen."""
    torch.manual_seed(SEED + 1)
    x = torch.randn(64, 5)
    if config.init_lora_weights == "corda":
        preprocess_corda(model, config, run_model=lambda: model(x))
    if config.init_lora_weights == "lora_ga":
        preprocess_loraga(model, config, train_step=lambda: model(x).square().mean().backward())


def case(name, given):
    given = dict(r=2, lora_alpha=4, target_modules=ALL) | given
    order = given.pop("order", None)
    config = LoraConfig(**given)
    base = Model()
    prepare(base, config)
    trained = get_peft_model(base, config)
    torch.manual_seed(SEED + 2)
    for key, p in trained.named_parameters():
        if "lora_" in key:
            p.data += 0.1 * torch.randn_like(p)
    with tempfile.TemporaryDirectory() as folder:
        trained.save_pretrained(folder)
        path = os.path.join(folder, "adapter_config.json")
        text = json.load(open(path))
        if order:
            text["alpha_pattern"] = {k: text["alpha_pattern"][k] for k in order}
        text = {k: text[k] for k in sorted(text, key=lambda k: (k == "target_modules", k))}
        for key in ("target_modules", "exclude_modules"):  # sets
            if isinstance(text.get(key), list):
                text[key] = sorted(text[key])
        json.dump(text, open(path, "w"))
        fresh = Model()
        before = weights(fresh)
        if config.init_lora_weights == "corda":
            prepare(fresh, config)
        loaded = PeftModel.from_pretrained(fresh, folder)
        merged = weights(loaded.merge_and_unload())
        deltas = {n: (w - before[n]) for n, w in merged.items() if not torch.equal(w, before[n])}
        with open(os.path.join(folder, "adapter_model.safetensors"), "rb") as f:
            file = base64.b64encode(f.read()).decode()
        return dict(name=name, config=text, file=file,
                    deltas={n: base64.b64encode(d.numpy().tobytes()).decode() for n, d in sorted(deltas.items())})


def fields():
    out = {}
    for field in dataclasses.fields(LoraConfig):
        default = getattr(LoraConfig(), field.name)
        out[field.name] = getattr(default, "value", default) if not dataclasses.is_dataclass(default) else {}
    return out


def main():
    import peft

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    about = "deploy/golden/make_lora.py, peft %s, torch %s" % (peft.__version__, torch.__version__.split("+")[0])
    cases = [case(name, copy.deepcopy(given)) for name, given in CASES.items()]
    with open(sys.argv[1], "w") as f:
        f.write('{"about": %s,\n"fields": %s,\n' % (json.dumps(about), json.dumps(fields())))
        f.write('"cases": [\n%s\n]}\n' % ",\n".join(json.dumps(c) for c in cases))


if __name__ == "__main__":
    main()
