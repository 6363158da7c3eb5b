"""The noise of rollouts, with the same bits as the services: schemas/noise.md fixes each of them.

    noise.initial(trajectory["noise_seed"], 16 * 64).reshape(16, 64)       # x_T
    noise.step(trajectory["sample_seed"], 3, 16 * 64)                      # what step 3 drew
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_INITIAL = 0xFFFFFFFF  # of x_T, in place of a step
_MASK = np.uint64(0xFFFFFFFF)
_ROUNDS = 10


def _coefficients(text: str) -> list[float]:
    return [float.fromhex(h) for h in text.split()]


_LN = _coefficients(
    "0x1.8618618618618p-5 0x1.af286bca1af28p-5 0x1.e1e1e1e1e1e1ep-5 0x1.1111111111111p-4 0x1.3b13b13b13b14p-4 "
    "0x1.745d1745d1746p-4 "
    "0x1.c71c71c71c71cp-4 0x1.2492492492492p-3 0x1.999999999999ap-3 0x1.5555555555555p-2")
SIN = _coefficients(
    "-0x1.ae7f3e733b81fp-41 0x1.6124613a86d09p-33 -0x1.ae64567f544e4p-26 0x1.71de3a556c734p-19 -0x1.a01a01a01a01ap-13 "
    "0x1.1111111111111p-7 "
    "-0x1.5555555555555p-3")
"""Coefficients of x^15 to x^3 of a sine, highest first."""
COS = _coefficients(
    "0x1.ae7f3e733b81fp-45 -0x1.93974a8c07c9dp-37 0x1.1eed8eff8d898p-29 -0x1.27e4fb7789f5cp-22 0x1.a01a01a01a01ap-16 "
    "-0x1.6c16c16c16c17p-10 "
    "0x1.5555555555555p-5 -0x1.0000000000000p-1")
"""Coefficients of x^16 to x^2 of a cosine, highest first."""
_SQRT2, _LN2 = float.fromhex("0x1.6a09e667f3bcdp+0"), float.fromhex("0x1.62e42fefa39efp-1")
_ANGLE = float.fromhex("0x1.921fb54442d18p-31")  # pi * 2^-32, of 2*d + 1

Floats = npt.NDArray[np.float64]
"""An array of float64."""


def _horner(coefficients: list[float], z: Floats) -> Floats:
    p = np.full_like(z, coefficients[0])
    for c in coefficients[1:]:
        p = p * z + c
    return p


def philox(
    counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], seed: int
) -> npt.NDArray[np.uint64]:
    """Philox4x32-10: the four words [4, n] of counters whose words are numbers or [n], under a key of 64 bits."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in np.broadcast_arrays(*counter))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(_ROUNDS):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0), p1 & _MASK, (
            p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1), p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


def _ln(u: Floats) -> Floats:
    m, e = np.frexp(u)
    m, e = m * 2, e.astype(np.float64) - 1
    big = m >= _SQRT2
    m, e = np.where(big, m * 0.5, m), np.where(big, e + 1, e)
    s = (m - 1) / (m + 1)
    z = s * s
    t = s + s
    return np.asarray(e * _LN2 + (t + t * (z * _horner(_LN, z))))


def _pair(w0: npt.NDArray[np.uint64], w1: npt.NDArray[np.uint64]) -> tuple[Floats, Floats]:
    """Two normals of two words each, before they are rounded (Box and Muller, 1958)."""
    r = np.sqrt(-2.0 * _ln((w0.astype(np.float64) + 0.5) * 2.0**-32))
    q = ((w1 + np.uint64(1 << 29)) & _MASK) >> np.uint64(30)
    d = ((w1 - (q << np.uint64(30))) & _MASK).astype(np.uint32).view(np.int32).astype(np.float64)
    x = (2 * d + 1) * _ANGLE
    z = x * x
    s, c = x + x * (z * _horner(SIN, z)), 1 + z * _horner(COS, z)
    cos = np.choose(q.astype(np.intp), [c, -s, -c, s])
    sin = np.choose(q.astype(np.intp), [s, c, -s, -c])
    return r * cos, r * sin


def normals(seed: int, step: int, n: int, stream: int = 0) -> npt.NDArray[np.float32]:
    """The n normals of a step (0 .. T-1) of the sample with that seed, in memory order of its packed latents [S, C]."""
    if not 0 <= seed < 1 << 64 or not 0 <= step <= _INITIAL or not 0 <= n <= 1 << 34:
        raise ValueError(f"seed, step, n: {seed}, {step}, {n}; must be below 2^64, 2^32 and at most 2^34")
    w = philox((np.arange((n + 3) // 4, dtype=np.uint64), step, stream, 0), seed)
    out = np.stack([*_pair(w[0], w[1]), *_pair(w[2], w[3])], axis=-1)
    return out.reshape(-1)[:n].astype(np.float32)


def step(sample_seed: int, step_index: int, n: int) -> npt.NDArray[np.float32]:
    """The noise of a stochastic step, n = S*C elements; sample_seed is that of the trajectory."""
    return normals(sample_seed, step_index, n)


def initial(noise_seed: int, n: int) -> npt.NDArray[np.float32]:
    """x_T, n = S*C elements; noise_seed is that of the trajectory."""
    return normals(noise_seed, _INITIAL, n)


def sample_seed(base: str, uid: str, sample_index: int) -> int:
    """The seed of a sample; base is `seed:` with the prompt's seed in decimal, or `run:` with the run where it has
    none.

    sample_index 2**64 - 1 gives the group's, which keys x_T where it is shared.
    """
    h = hashlib.sha256()
    for text in (base.encode(), uid.encode()):
        h.update(len(text).to_bytes(8, "little") + text)
    h.update(sample_index.to_bytes(8, "little"))
    return int.from_bytes(h.digest()[:8], "little")
