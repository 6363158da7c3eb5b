"""The transformer in the form it is trained in: QwenImageTransformer2DModel with its work fused for a narrow model.

`Velocity` borrows the parameters of the diffusers module and computes the same function with one matrix product for all
modulations and one for queries, keys and values; the text half of the last block, which nothing reads, is left out.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

CONFIG = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 4,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": 128,
    "guidance_embeds": False,
    "axes_dims_rope": [8, 12, 12],
}
EPS = 1e-6
THETA = 1e4


def new():
    """A fresh QwenImageTransformer2DModel that predicts zero: modulations and the output start at nothing."""
    from diffusers import QwenImageTransformer2DModel

    net = QwenImageTransformer2DModel(**CONFIG)
    zeroed = [net.norm_out.linear, net.proj_out]
    for block in net.transformer_blocks:
        zeroed += [block.img_mod[1], block.txt_mod[1]]
    for layer in zeroed:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return net


def sinusoid(t: torch.Tensor) -> torch.Tensor:
    """[B] noise levels in [0, 1] -> [B, 256], cosines first."""
    rates = torch.exp(-torch.log(torch.tensor(THETA)) * torch.arange(128).float() / 128)
    angle = 1000 * t.float()[:, None] * rates[None]
    return torch.cat([angle.cos(), angle.sin()], -1)


def rotations(rows: int, cols: int, text: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [text + rows*cols, 16]: text positions first, then the image's, centred, frame 0."""
    rates = [1.0 / THETA ** (torch.arange(0, d, 2).float() / d) for d in CONFIG["axes_dims_rope"]]
    r = torch.arange(-(rows - rows // 2), rows // 2).float()
    c = torch.arange(-(cols - cols // 2), cols // 2).float()
    image = [
        torch.zeros(rows * cols, len(rates[0])),
        torch.outer(r, rates[1]).repeat_interleave(cols, 0),
        torch.outer(c, rates[2]).repeat(rows, 1),
    ]
    place = torch.arange(text).float() + max(rows // 2, cols // 2)
    words = torch.outer(place, torch.cat(rates))
    angle = torch.cat([words, torch.cat(image, -1)], 0)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates neighbouring pairs; x [B, L, heads, 32] in float32, cos and sin [L, 1, 16]."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def modulated(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x.float(), x.shape[-1:], eps=EPS) * (1 + scale[:, None]) + shift[:, None]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention with the scores written out: at 50 tokens the backward pass of the fused CPU kernel costs far more."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return scores.float().masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype) @ v


def mlp(x: torch.Tensor, net: nn.Module) -> torch.Tensor:
    return net.net[2](F.gelu(net.net[0].proj(x), approximate="tanh"))


class Velocity(nn.Module):
    """x [B, S, 64], sigma [B], text [B, L, 128], keep [B, L] bool -> velocity [B, S, 64], noise minus data."""

    def __init__(self, net: nn.Module, rows: int, cols: int, text: int):
        super().__init__()
        self.net = net
        cos, sin = rotations(rows, cols, text)
        self.register_buffer("cos", cos[:, None], persistent=False)
        self.register_buffer("sin", sin[:, None], persistent=False)

    def forward(self, x: torch.Tensor, sigma: torch.Tensor, text: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        net, d = self.net, self.net.inner_dim
        n_text = text.shape[1]
        cos, sin = self.cos, self.sin
        mask = torch.cat([keep, keep.new_ones(x.shape[:2])], 1)[:, None, None]
        embed = net.time_text_embed.timestep_embedder
        temb = F.silu(embed.linear_2(F.silu(embed.linear_1(sinusoid(sigma)))))
        mods = [m for b in net.transformer_blocks for m in (b.img_mod[1], b.txt_mod[1])]
        weight, bias = torch.cat([m.weight for m in mods]), torch.cat([m.bias for m in mods])
        mod = F.linear(temb, weight, bias).float().chunk(12 * len(net.transformer_blocks), -1)
        img, txt = net.img_in(x).float(), net.txt_in(rms(text, net.txt_norm.weight)).float()
        last = len(net.transformer_blocks) - 1
        for i, block in enumerate(net.transformer_blocks):
            im, tm = mod[12 * i : 12 * i + 6], mod[12 * i + 6 : 12 * i + 12]
            a = block.attn
            iq, ik, iv = self.project(modulated(img, im[0], im[1]), a.to_q, a.to_k, a.to_v, a.norm_q, a.norm_k)
            tq, tk, tv = self.project(
                modulated(txt, tm[0], tm[1]), a.add_q_proj, a.add_k_proj, a.add_v_proj, a.norm_added_q, a.norm_added_k
            )
            q, k = (rotate(torch.cat(p, 1), cos, sin) for p in ((tq, iq), (tk, ik)))
            v = torch.cat([tv, iv], 1)
            q, k = q.to(v.dtype), k.to(v.dtype)
            if i == last:
                q = q[:, n_text:]
            out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
            out = out.transpose(1, 2).reshape(x.shape[0], -1, q.shape[2] * q.shape[3])
            img = img + im[2][:, None] * a.to_out[0](out[:, -x.shape[1] :])
            img = img + im[5][:, None] * mlp(modulated(img, im[3], im[4]), block.img_mlp)
            if i < last:
                txt = txt + tm[2][:, None] * a.to_add_out(out[:, :n_text])
                txt = txt + tm[5][:, None] * mlp(modulated(txt, tm[3], tm[4]), block.txt_mlp)
        scale, shift = net.norm_out.linear(temb).float().chunk(2, -1)
        return net.proj_out(modulated(img, shift, scale)).float()

    @staticmethod
    def project(x, to_q, to_k, to_v, norm_q, norm_k):
        """Normalised queries and keys, and values, [B, L, heads, 32] each."""
        weight = torch.cat([to_q.weight, to_k.weight, to_v.weight])
        bias = torch.cat([to_q.bias, to_k.bias, to_v.bias])
        q, k, v = F.linear(x, weight, bias).unflatten(-1, (3, -1, 32)).unbind(-3)
        return rms(q, norm_q.weight), rms(k, norm_k.weight), v


def pack(z: torch.Tensor) -> torch.Tensor:
    """[B, 16, H, W] -> [B, H/2*W/2, 64], channel order (channel, row, column)."""
    b, c, h, w = z.shape
    return z.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h // 2 * (w // 2), 4 * c)


def unpack(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The way back of pack; rows and cols count tokens."""
    b, _, d = x.shape
    return x.view(b, rows, cols, d // 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, d // 4, 2 * rows, 2 * cols)
