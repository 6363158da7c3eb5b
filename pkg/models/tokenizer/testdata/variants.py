#!/usr/bin/env python3
"""Records the ids that transformers gives for a tokenizer folder with changed settings, for variants_test.go.

    variants.py deploy/models/sums > variants.json

A change is [file, path, value]: the value is set at the path, or the key is removed where there is none. ids are those
with and without add_special_tokens; null where transformers refuses the folder.
"""

import json
import sys
import tempfile
from pathlib import Path

import transformers
from transformers import AutoTokenizer

transformers.logging.set_verbosity_error()
base = Path(sys.argv[1])
texts = [
    "347+58=?", " a<|im_end|> b <|im_start|>user\n1+1", "<tool>x<tool> x x<tool>x", "e\u0301 <|endoftext|>", "ｆｕｌｌ  width",
    "<new>1<|im_end|><new>", "user<e\u0301>user", "It's\n\n12 <unk>", "xuserx",
]
C, T, A, S = "tokenizer_config.json", "tokenizer.json", "added_tokens.json", "special_tokens_map.json"


def token(content, **more):
    keys = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": content, **keys, **more}


def added(id, content, **more):
    return {"id": id, **token(content, **more)}


noDecoder = [C, ["added_tokens_decoder"]]
variants = {
    "as it is": [],
    "split_special_tokens": [[C, ["split_special_tokens"], True]],
    "add_prefix_space": [[C, ["add_prefix_space"], True]],
    "add_bos_token": [[C, ["add_bos_token"], True], [C, ["bos_token"], "<|im_start|>"]],
    "add_eos_token": [[C, ["add_eos_token"], True]],
    "truncation_side": [[C, ["truncation_side"], "left"]],
    "padding_side": [[C, ["padding_side"], "left"]],
    "model_max_length": [[C, ["model_max_length"], 2]],
    "another class": [[C, ["tokenizer_class"], "GPT2Tokenizer"]],
    "no class": [[C, ["tokenizer_class"]]],
    "fast class": [[C, ["tokenizer_class"], "Qwen2TokenizerFast"]],
    "decoder of a word, class of the file": [
        [C, ["added_tokens_decoder", "263"], token("user")], [C, ["tokenizer_class"], "PreTrainedTokenizerFast"],
    ],
    "class of the file": [[C, ["tokenizer_class"], "PreTrainedTokenizerFast"]],
    "backend class": [[C, ["tokenizer_class"], "TokenizersBackend"]],
    "Llama class": [[C, ["tokenizer_class"], "LlamaTokenizerFast"]],
    "stale added_tokens.json": [[A, ["<new>"], 307]],
    "other id in added_tokens.json": [[A, ["<|im_end|>"], 305]],
    "added_tokens.json alone": [noDecoder, [A, ["<new>"], 307]],
    "added_tokens.json with a gap": [noDecoder, [A, ["<new>"], 309]],
    "stale special_tokens_map.json": [[S, ["eos_token"], "<new>"]],
    "special_tokens_map.json alone": [noDecoder, [S, ["eos_token"], {"content": "user", "lstrip": False, "rstrip": False}]],
    "extra in special_tokens_map.json": [noDecoder, [S, ["extra_special_tokens"], ["user"]]],
    "decoder has more": [[C, ["added_tokens_decoder", "307"], token("<new>", special=False, normalized=True)]],
    "decoder lacks one": [[C, ["added_tokens_decoder", "304"]], [C, ["pad_token"], None]],
    "decoder with a gap": [[C, ["added_tokens_decoder", "309"], token("<new>")]],
    "decoder of a word": [[C, ["added_tokens_decoder", "263"], token("user")]],
    "decoder with another id": [[C, ["added_tokens_decoder", "307"], token("user")]],
    "decoder without properties": [[C, ["added_tokens_decoder", "307"], {"content": "<e\u0301>"}]],
    "decoder, normalized content": [
        [C, ["added_tokens_decoder", "307"], token("<e\u0301>", special=False, normalized=True)]
    ],
    "file has more": [[T, ["added_tokens", 3], added(307, "<new>")]],
    "file has more, its class": [
        [T, ["added_tokens", 3], added(307, "<new>")], [C, ["tokenizer_class"], "PreTrainedTokenizerFast"],
    ],
    "file has more, no decoder": [noDecoder, [T, ["added_tokens", 3], added(307, "<new>")]],
    "no config": [[C, []]],
    "no eos, no pad": [[C, ["eos_token"]], [C, ["pad_token"]], [C, ["unk_token"]]],
    "special token is a word": [[C, ["eos_token"], "user"]],
    "model's own token": [[C, ["tool_token"], "user"]],
    "model's own token is new": [[C, ["tool_token"], "<tool>"]],
    "extra tokens": [[C, ["additional_special_tokens"]], [C, ["extra_special_tokens"], ["user"]]],
    "extra token is new": [[C, ["additional_special_tokens"]], [C, ["extra_special_tokens"], ["<tool>"]]],
    "extra tokens by name": [[C, ["additional_special_tokens"]], [C, ["extra_special_tokens"], {"tool": "user"}]],
    "both kinds of extra tokens": [[C, ["extra_special_tokens"], ["user"]]],
    "sep token": [[C, ["sep_token"], "user"]],
    "post-processor": [[T, ["post_processor"], {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [305], "tokens": ["<|im_start|>"]}},
    }]],
    "truncation": [[T, ["truncation"], {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }]],
    "padding": [[T, ["padding"], {
        "strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 304, "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }]],
    "normalizer NFKC": [[T, ["normalizer"], {"type": "NFKC"}]],
    "normalizer of two": [[T, ["normalizer"], {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}]],
    "no normalizer": [[T, ["normalizer"], None]],
    "normalizer NFKC, its class": [
        [T, ["normalizer"], {"type": "NFKC"}], [C, ["tokenizer_class"], "PreTrainedTokenizerFast"],
    ],
    "prefix space in the file": [[T, ["pre_tokenizer", "pretokenizers", 1, "add_prefix_space"], True]],
    "ignore_merges": [[T, ["model", "ignore_merges"], True]],
    "model.unk_token": [[T, ["model", "unk_token"], "!"]],
    "decoder step": [[T, ["decoder"], {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Fuse"}]}]],
}
for setting in ("lstrip", "rstrip", "single_word", "normalized"):
    for special in (False, True):
        new = token("<tool>", special=special, **{setting: True})
        name = f"{setting}, {'special' if special else 'plain'}"
        variants[name] = [[C, ["added_tokens_decoder", "307"], new]]
        variants[name + ", in the file"] = [
            noDecoder, [T, ["added_tokens", 3], added(307, "<tool>", special=special, **{setting: True})],
        ]


def apply(folder, changes):
    for file, path, *value in changes:
        at = folder / file
        if not path:
            at.unlink()
            continue
        whole = json.loads(at.read_text()) if at.exists() else {}
        node = whole
        for key in path[:-1]:
            node = node[key]
        last = path[-1]
        if not value:
            del node[last]
        elif isinstance(node, list) and last == len(node):
            node.append(value[0])
        else:
            node[last] = value[0]
        at.write_text(json.dumps(whole))


out = []
for name, changes in variants.items():
    with tempfile.TemporaryDirectory() as dir:
        folder = Path(dir)
        for file in (C, T, "config.json"):
            (folder / file).write_text((base / file).read_text())
        apply(folder, changes)
        try:
            t = AutoTokenizer.from_pretrained(folder)
            ids = [[t(x, add_special_tokens=s).input_ids for s in (True, False)] for x in texts]
        except Exception as e:
            print(name, type(e).__name__, e, file=sys.stderr)
            ids = None
        out.append({"name": name, "changes": changes, "ids": ids})
print(f'{{"transformers": "{transformers.__version__}", "texts": {json.dumps(texts)}, "variants": [')
print(",\n".join(json.dumps(v) for v in out) + "\n]}")
