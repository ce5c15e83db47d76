"""Random numbers by counter, one by one and in Python's own numbers: a hash, Philox' definition, Box and Muller's formula.

Nothing of the package is used, so that what a seed, a purpose, a step and a parameter give is written down twice.
"""

from hashlib import blake2b
from math import cos, log, log1p, pi, sin, sqrt

ROW = 128
"""Counters of which the cosines come first and the sines then."""

Stream = tuple[int, int]
"""The key, and the upper half of the counters."""


def words(counter: list[int], low: int, high: int) -> list[int]:
    """Philox 4x32 with 10 rounds.  low, high: the key's words"""
    a, b, c, d = counter
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = q >> 32 ^ b ^ low, q % 2**32, p >> 32 ^ d ^ high, p % 2**32
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def stream(*fields: object) -> Stream:
    digest = blake2b(repr(fields).encode(), digest_size=16).digest()
    key, upper = (int.from_bytes(digest[i : i + 8], "little", signed=True) for i in (0, 8))
    return key, upper


def bits(of: Stream, counter: int) -> tuple[int, int]:
    """Two numbers of 53 bits."""
    (low, high), upper = ([half % 2**32, half >> 32 & (2**32 - 1)] for half in of)
    a, b, c, d = words([counter % 2**32, counter >> 32, *upper], low, high)
    return (a << 32 | b) >> 11, (c << 32 | d) >> 11


def pair(u: int, v: int) -> tuple[float, float]:
    """R cos θ and R sin θ."""
    missing = 2**53 - 1 - u
    size = sqrt(-2 * (log1p(-missing / 2**53) if missing < 2**52 else log((u + 1) / 2**53)))
    angle = (v >> 1) * pi / 2**52 - pi / 2
    return (-size if v % 2 else size) * cos(angle), (-size if v % 2 else size) * sin(angle)


def normals(of: Stream, count: int) -> list[float]:
    return [pair(*bits(of, counter))[side] for counter, side in map(_place, range(count))]


def uniforms(of: Stream, count: int) -> list[float]:
    return [bits(of, counter)[side] / 2**53 for counter, side in map(_place, range(count))]


def _place(number: int) -> tuple[int, int]:
    """The counter that gives a number, and which of its two."""
    row, place = divmod(number, 2 * ROW)
    return ROW * row + place % ROW, place // ROW
