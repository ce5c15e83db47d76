"""Random numbers of a secret, one by one and in Python's own numbers: a hash, Philox' definition, Box and Muller's formula.

Nothing of the package is used, so that what a seed, a purpose and a step give is written down twice.
"""

from hashlib import sha256
from math import cos, log, pi, sin, sqrt

import numpy as np


def words(counter: list[int], low: int, high: int) -> list[int]:
    """Philox 4x32 with 10 rounds.  low, high: the key's words"""
    a, b, c, d = counter
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = q >> 32 ^ b ^ low, q % 2**32, p >> 32 ^ d ^ high, p % 2**32
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def secret(*fields: object) -> bytes:
    return sha256(repr(fields).encode()).digest()


def integers(of: bytes, count: int) -> list[int]:
    """Of 64 bits, by Philox 4x64 with 10 rounds."""
    key, counter = (int.from_bytes(half, "big") for half in (of[:16], of[16:]))
    return [int(word) for word in np.random.Philox(key=key, counter=counter << 128).random_raw(count)]


def normals(of: bytes, count: int, width: int = 32) -> list[float]:
    """width: of the numbers, in bits. Those of R cos θ come first"""
    half = (count + 1) // 2
    wide = integers(of, half * width // 32)
    own = wide if width == 64 else [word >> shift & (2**32 - 1) for word in wide for shift in (0, 32)]
    signed = [(n + 2 ** (width - 1)) % 2**width - 2 ** (width - 1) for n in own]
    sizes = [sqrt(max(0, -2 * log(abs(u + 0.5) / 2 ** (width - 1)))) for u in signed[:half]]
    angles = [v * pi / 2 ** (width - 1) for v in signed[half:]]
    return [r * turn(v) for turn in (cos, sin) for r, v in zip(sizes, angles)][:count]


def uniforms(of: bytes, count: int) -> list[float]:
    return [(word >> 11) / 2**53 for word in integers(of, count)]
