"""The image autoencoder in the form it is trained in: AutoencoderKLQwenImage seen by a single frame.

For one frame only the last temporal slice of a causal 3x3x3 kernel meets data (the other slices meet zero padding), so
training uses 2-D kernels and `to_diffusers` writes them into that slice. Module and parameter names are the diffusers
ones.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

Z_DIM = 16
CONFIG = {
    "base_dim": 16,
    "z_dim": Z_DIM,
    "dim_mult": [1, 2, 2, 4],
    "num_res_blocks": 1,
    "attn_scales": [],
    "temperal_downsample": [False, False, False],
    "dropout": 0.0,
}


class Norm(nn.Module):
    """RMS norm over channels; the square root of the width and the division are one rsqrt of the mean square."""

    def __init__(self, dim: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-12)
        return (x * scale * self.gamma.view(1, -1, 1, 1)).to(x.dtype)


class ResidualBlock(nn.Module):
    def __init__(self, dim_in: int, dim_out: int):
        super().__init__()
        self.norm1 = Norm(dim_in)
        self.conv1 = nn.Conv2d(dim_in, dim_out, 3, padding=1)
        self.norm2 = Norm(dim_out)
        self.conv2 = nn.Conv2d(dim_out, dim_out, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(dim_in, dim_out, 1) if dim_in != dim_out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return self.conv2(F.silu(self.norm2(h))) + self.conv_shortcut(x)


class Attention(nn.Module):
    """Single-head self-attention over the pixels of the lowest resolution."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = Norm(dim)
        self.to_qkv = nn.Conv2d(dim, 3 * dim, 1)
        self.proj = nn.Conv2d(dim, dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        q, k, v = self.to_qkv(self.norm(x)).reshape(b, 3 * c, h * w).transpose(1, 2).chunk(3, -1)
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(out.transpose(1, 2).reshape(b, c, h, w))


class MidBlock(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.resnets = nn.ModuleList([ResidualBlock(dim, dim), ResidualBlock(dim, dim)])
        self.attentions = nn.ModuleList([Attention(dim)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class Down(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.resample = nn.ModuleDict({"1": nn.Conv2d(dim, dim, 3, stride=2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.resample["1"](F.pad(x, (0, 1, 0, 1)))


class Up(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.resample = nn.ModuleDict({"1": nn.Conv2d(dim, dim // 2, 3, padding=1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.resample["1"](F.interpolate(x, scale_factor=2.0, mode="nearest-exact"))


class UpBlock(nn.Module):
    def __init__(self, dim_in: int, dim_out: int, blocks: int, up: bool):
        super().__init__()
        self.resnets = nn.ModuleList([ResidualBlock(dim_in if i == 0 else dim_out, dim_out) for i in range(blocks)])
        self.upsamplers = nn.ModuleList([Up(dim_out)] if up else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.resnets, *self.upsamplers):
            x = layer(x)
        return x


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        base, mult = CONFIG["base_dim"], CONFIG["dim_mult"]
        self.conv_in = nn.Conv2d(3, base, 3, padding=1)
        self.down_blocks = nn.ModuleList()
        dim = base
        for i, m in enumerate(mult):
            for _ in range(CONFIG["num_res_blocks"]):
                self.down_blocks.append(ResidualBlock(dim, base * m))
                dim = base * m
            if i + 1 < len(mult):
                self.down_blocks.append(Down(dim))
        self.mid_block = MidBlock(dim)
        self.norm_out = Norm(dim)
        self.conv_out = nn.Conv2d(dim, 2 * Z_DIM, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv_in(x)
        for layer in self.down_blocks:
            x = layer(x)
        return self.conv_out(F.silu(self.norm_out(self.mid_block(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        base, mult = CONFIG["base_dim"], CONFIG["dim_mult"][::-1]
        dim = base * mult[0]
        self.conv_in = nn.Conv2d(Z_DIM, dim, 3, padding=1)
        self.mid_block = MidBlock(dim)
        self.up_blocks = nn.ModuleList()
        for i, m in enumerate(mult):
            up = i + 1 < len(mult)
            self.up_blocks.append(UpBlock(dim, base * m, CONFIG["num_res_blocks"] + 1, up))
            dim = base * m // 2 if up else base * m
        self.norm_out = Norm(dim)
        self.conv_out = nn.Conv2d(dim, 3, 3, padding=1)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x = self.mid_block(self.conv_in(z))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class VAE(nn.Module):
    """encode: [B, 3, H, W] -> mean and log-variance [B, 16, H/8, W/8] each; decode: the way back, not clamped."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.quant_conv = nn.Conv2d(2 * Z_DIM, 2 * Z_DIM, 1)
        self.post_quant_conv = nn.Conv2d(Z_DIM, Z_DIM, 1)
        self.decoder = Decoder()

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, logvar = self.quant_conv(self.encoder(x)).float().chunk(2, 1)
        return mean, logvar.clamp(-30, 20)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.post_quant_conv(z))


def to_diffusers(state: dict[str, torch.Tensor], shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Weights of VAE in the shapes of AutoencoderKLQwenImage; KeyError or ValueError where the two do not match."""
    out = {}
    for name, shape in shapes.items():
        value = state[name]
        if len(shape) == 5:
            full = torch.zeros(shape, dtype=value.dtype)
            full[:, :, -1] = value
            value = full
        else:
            value = value.reshape(shape)
        out[name] = value
    if extra := set(state) - set(out):
        raise ValueError(f"the trained autoencoder has weights that the target lacks: {sorted(extra)}")
    return out
