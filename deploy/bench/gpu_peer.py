#!/usr/bin/env python3
"""The other engine of `bench gpu`: PyTorch, eager, in bfloat16, on the first GPU. It needs torch and nothing else.

It reads one JSON object per line and answers each with one. The first is answered by {"engine"}; every other, a
question {"what", ...} of integration/tools/bench/gpu.go, by {"seconds"} of one such call, the least of those in
"seconds", or by {"error"}.
"""

import json
import math
import sys
import time

try:
    import torch
    import torch.nn.functional as F
except ImportError as e:
    sys.exit(f"gpu_peer.py: {e}; needs python3 with torch built for CUDA")
if not torch.cuda.is_available():
    sys.exit("gpu_peer.py: torch sees no GPU; needs one, and torch built for CUDA")


def rand(*shape):
    return torch.rand(*shape, device="cuda", dtype=torch.bfloat16) - 0.5


class Block:
    """A dual-stream block as Qwen-Image has it: image and text have weights of their own and attend to each other."""

    def __init__(self, width, heads):
        self.heads = heads
        self.streams = [{n: rand(o, i) * i**-0.5 for n, (o, i) in {
            "mod": (6 * width, width), "qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width),
            "down": (width, 4 * width)}.items()} for _ in range(2)]
        self.norm = torch.ones(width // heads, device="cuda", dtype=torch.bfloat16)

    def __call__(self, xs, temb, ropes):
        q, k, v, mods = [], [], [], []
        for x, w, rope in zip(xs, self.streams, ropes):
            mods.append(F.linear(F.silu(temb), w["mod"])[:, None].chunk(6, -1))
            y = F.layer_norm(x, x.shape[-1:]) * (1 + mods[-1][1]) + mods[-1][0]
            parts = F.linear(y, w["qkv"]).unflatten(-1, (3, self.heads, -1)).unbind(2)
            q.append(self.rotate(F.rms_norm(parts[0], self.norm.shape, self.norm), rope))
            k.append(self.rotate(F.rms_norm(parts[1], self.norm.shape, self.norm), rope))
            v.append(parts[2])
        o = F.scaled_dot_product_attention(
            *(torch.cat(t, 1).transpose(1, 2) for t in (q, k, v))
        ).transpose(1, 2).flatten(2)
        out = []
        for x, w, m, a in zip(xs, self.streams, mods, o.split([x.shape[1] for x in xs], 1)):
            x = x + m[2] * F.linear(a, w["out"])
            y = F.layer_norm(x, x.shape[-1:]) * (1 + m[4]) + m[3]
            out.append(x + m[5] * F.linear(F.gelu(F.linear(y, w["up"]), approximate="tanh"), w["down"]))
        return out

    @staticmethod
    def rotate(x, rope):
        y = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(y * rope[:, None]).flatten(-2).to(x.dtype)


def forward(c):
    width = c["heads"] * c["dim"]
    blocks = [Block(width, c["heads"]) for _ in range(c["layers"])]
    xs = [rand(c["batch"], c["tokens"], width), rand(c["batch"], c["text"], width)]
    ropes = [
        torch.polar(torch.ones(n, c["dim"] // 2, device="cuda"), torch.rand(n, c["dim"] // 2, device="cuda"))
        for n in (c["tokens"], c["text"])
    ]
    temb = rand(c["batch"], width)

    def call():
        ys = xs
        for b in blocks:
            ys = b(ys, temb, ropes)

    return call, c["layers"] / c["m"]


def prepare(c):
    """Returns a call, and how many of what is asked for it is."""
    what = c["what"]
    if what == "product":
        x, w = rand(c["m"], c["k"]), rand(c["n"], c["k"])
        return lambda: F.linear(x, w), 1
    if what == "attention":
        q, k, v = (rand(1, c["heads"], c["tokens"], c["dim"]) for _ in range(3))
        return lambda: F.scaled_dot_product_attention(q, k, v), 1
    if what in ("copy in", "copy out"):
        host, device = torch.empty(
            c["bytes"], dtype=torch.uint8, pin_memory=True
        ), torch.empty(c["bytes"], dtype=torch.uint8, device="cuda")
        return (lambda: device.copy_(host)) if what == "copy in" else (lambda: host.copy_(device)), 1
    if what == "launch":
        x = rand(1, 4)

        def call():
            for _ in range(1000):
                torch.mul(x, x, out=x)

        return call, 1000
    if what == "forward":
        return forward(c)
    raise ValueError(f"no such question: {what}")


@torch.inference_mode()
def answer(c):
    call, share = prepare(c)
    best, began = math.inf, time.perf_counter()
    for i in range(10**9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if i >= 2:  # the first ones warm up
            best = min(best, time.perf_counter() - start)
            if time.perf_counter() - began > c["seconds"]:
                return best / share


def main():
    sys.stdin.readline()
    print(json.dumps({"engine": f"PyTorch {torch.__version__}, eager"}), flush=True)
    for line in sys.stdin:
        try:
            reply = {"seconds": answer(json.loads(line))}
        except (RuntimeError, ValueError) as e:
            reply = {"error": str(e).splitlines()[0]}
        torch.cuda.empty_cache()
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
