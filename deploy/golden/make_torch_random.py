"""Writes what torch.randn draws from torch.Generator("cpu"), in float32: python make_torch_random.py OUT.json

A case is a seed and draws in a row. Of each draw the file has its length and the SHA-256 of its bytes (float32,
little-endian), of short ones the bits of all numbers, too. Only a processor with AVX2 gives these bits.
"""

import hashlib
import json
import sys

import torch

SEEDS = (0, 1, 5, 2**31, 2**32 - 1, 2**32 + 1, 2**63 - 1, 2**63 + 7)
ZERO = (12, [1 << 19])  # has a uniform number of 0, of which the logarithm is -0
IN_ROWS = (
    list(range(1, 41)),  # all tails, and the number that a short draw keeps for the next short one
    [100, 4096, 3, 4099, 624, 1, 1],
    [512, 512, 512, 512, 512],
)
SHORT = 40


def draw(generator, n):
    x = torch.randn(n, generator=generator).numpy()
    of = {"n": n, "sha256": hashlib.sha256(x.tobytes()).hexdigest()}
    if n <= SHORT and n % 5 == 1:
        of["bits"] = ["%08x" % v for v in x.view("uint32").tolist()]
    return of


def main():
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        sys.exit("torch does not use AVX2 here: it would draw other bits")
    cases = []
    for seed, row in [(seed, row) for seed in SEEDS for row in IN_ROWS] + [ZERO]:
        generator = torch.Generator("cpu").manual_seed(seed)
        cases.append({"seed": str(seed), "draws": [draw(generator, n) for n in row]})
    lines = ",\n".join(json.dumps(c) for c in cases)
    with open(sys.argv[1], "w", encoding="utf-8") as f:
        f.write('{"torch": "%s", "cases": [\n%s\n]}\n' % (torch.__version__.split("+")[0], lines))


main()
