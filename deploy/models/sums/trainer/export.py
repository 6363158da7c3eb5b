"""The checkpoint as a folder that transformers 4.57 and 5 load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from . import fit
from .tokens import ROWS, Tokens

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
    "hidden_act": "silu", "hidden_size": fit.WIDTH, "initializer_range": 0.05, "intermediate_size": fit.INTERMEDIATE,
    "layer_types": ["full_attention"] * fit.LAYERS, "max_position_embeddings": 512, "max_window_layers": fit.LAYERS,
    "model_type": "qwen2",
    "num_attention_heads": fit.HEADS, "num_hidden_layers": fit.LAYERS, "num_key_value_heads": fit.KV_HEADS,
    "rms_norm_eps": 1e-06,
    # Each field for the versions of transformers that read it: before 5, and since.
    "rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "torch_dtype": "bfloat16", "dtype": "bfloat16",
    "sliding_window": None, "tie_word_embeddings": True, "use_cache": True, "use_sliding_window": False,
    "vocab_size": ROWS,
}


def write(work: Path, folder: Path, step: int, log) -> None:
    tokens = Tokens(folder)
    average = torch.load(work / f"average-{step}.pt")
    tensors = {n: t.bfloat16().contiguous() for n, t in average.items() if n != "lm_head.weight"}
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    config = CONFIG | {"eos_token_id": tokens.end, "pad_token_id": tokens.pad}
    generation = {
        "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 8, "bos_token_id": None,
        "eos_token_id": tokens.end,  # padding is not among them: generate could not infer masks
        "pad_token_id": tokens.pad,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    log(f"wrote step {step}: {len(tensors)} tensors, {weights.stat().st_size} bytes of weights, "
        f"{sum(t.numel() for t in tensors.values())} parameters")
