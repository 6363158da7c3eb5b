"""The text encoder in the form it is trained in: the language half of Qwen2.5-VL, on one template.

All prompts share the 34 tokens before them and the encoder is causal, so those run once per batch, with batch size one,
and every prompt attends to their keys and values. Parameter names are those of transformers' Qwen2_5_VLTextModel.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from .mmdit import attend

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 128, 2, 4, 2, 256
HEAD_DIM = HIDDEN // HEADS
THETA = 1e4
EPS = 1e-6


def config(vocab: int, ids: dict[str, int]):
    """transformers' Qwen2_5_VLConfig of this encoder, with the smallest vision tower that the class accepts."""
    from transformers import Qwen2_5_VLConfig

    text = {
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA, "mrope_section": [4, 6, 6]},
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 1,
        "out_hidden_size": HIDDEN,
        "fullatt_block_indexes": [0],
        "window_size": 112,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def rotary(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [count, HEAD_DIM] of positions first.. in the half-split form."""
    inverse = 1.0 / THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angle = torch.outer(torch.arange(first, first + count).float(), inverse)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    return (x * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        """Queries, keys, values [B, heads, L, HEAD_DIM], rotated; keys and values not yet repeated."""
        split = lambda y, heads: y.unflatten(-1, (heads, HEAD_DIM)).transpose(1, 2)  # noqa: E731
        q, k, v = split(self.q_proj(x), HEADS), split(self.k_proj(x), KV_HEADS), split(self.v_proj(x), KV_HEADS)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        out = attend(q.to(v.dtype), k.to(v.dtype), v, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLPBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, MLP, bias=False)
        self.up_proj = nn.Linear(HIDDEN, MLP, bias=False)
        self.down_proj = nn.Linear(MLP, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = RMSNorm(HIDDEN)
        self.self_attn = Attention()
        self.post_attention_layernorm = RMSNorm(HIDDEN)
        self.mlp = MLPBlock()


class TextEncoder(nn.Module):
    """tokens [B, L] after the template's start -> last hidden states [B, L, HIDDEN]; padding on the right is
    harmless."""

    def __init__(self, vocab: int, prefix: list[int]):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, HIDDEN)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm = RMSNorm(HIDDEN)
        self.register_buffer("prefix", torch.tensor([prefix]), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        b, n = tokens.shape
        m = self.prefix.shape[1]
        causal = torch.ones(m + n, m + n, dtype=torch.bool).tril()
        near, far = rotary(0, m), rotary(m, n)
        p, x = self.embed_tokens(self.prefix), self.embed_tokens(tokens)
        for layer in self.layers:
            pq, pk, pv = layer.self_attn.project(layer.input_layernorm(p), *near)
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), *far)
            k = torch.cat([pk.expand(b, -1, -1, -1), k], 2)
            v = torch.cat([pv.expand(b, -1, -1, -1), v], 2)
            p = p + layer.self_attn.attend(pq, pk, pv, causal[:m, :m])
            x = x + layer.self_attn.attend(q, k, v, causal[m:])
            p = p + layer.mlp(layer.post_attention_layernorm(p))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)
