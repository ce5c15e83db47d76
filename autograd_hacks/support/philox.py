"""Random numbers that are a function of their index, and the same bits on every device: Philox 4x32-10.

A counter of four words of 32 bits and a key of two give four random words.  Nothing has a state, so a device draws what it
needs by itself, in any order.

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3" (SC '11), section 3.3.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

_WORD = 2**32 - 1
_FACTORS = 0xD2511F53 - 2**32, 0xCD9E8D57 - 2**32
"""Philox' multipliers less 2³²: times a word they stay in int64, so that nothing overflows."""
_STEPS = 0x9E3779B9, 0xBB67AE85
"""The increments of the key's words from round to round."""
_ROUNDS = 10

BITS = 128
"""Signs that one counter gives."""
_AT_ONCE = {"cpu": 2**15}
"""Counters that are drawn at a time: as many as a CPU's cache holds, and 2²⁰ elsewhere, where each call is a launch."""


def key_of(*fields: object) -> int:
    """A key of 64 bits, by the fields' ``repr``."""
    return int.from_bytes(sha256(repr(fields).encode()).digest()[:8], "big")


def philox(counter: Sequence[Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four random words of each counter.

    counter: four int64 tensors of one shape with numbers in [0, 2³²)    key: of 64 bits, its lower word first
    Returns four int64 tensors with numbers in [0, 2³²).
    """
    (a, b, c, d), low, high = counter, key & _WORD, key >> 32
    for _ in range(_ROUNDS):
        p, q = a * _FACTORS[0], c * _FACTORS[1]
        # The upper word of a product is that of p or q, plus what 2³² times the factor adds to it.
        upper_p, upper_q = (p >> 32).add_(a), (q >> 32).add_(c)
        a, c = upper_q.bitwise_xor_(b).bitwise_xor_(low), upper_p.bitwise_xor_(d).bitwise_xor_(high)
        b, d = q.bitwise_and_(_WORD), p.bitwise_and_(_WORD)
        low, high = (low + _STEPS[0]) & _WORD, (high + _STEPS[1]) & _WORD
    return a, b, c, d


def noise(shape: Sequence[int], key: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers of a shape, of variance 1: 65,536 equally likely numbers in (-√3, √3), none of them 0."""
    count = torch.Size(shape).numel() * (2 if dtype.is_complex else 1)
    each = -(-count // 8)  # a word gives two numbers
    found = torch.empty(4, 2, each, dtype=torch.float32, device=device)
    for piece, drawn in _numbered(each, key, device):
        for rows, word in zip(found[:, :, piece], drawn):
            rows[0], rows[1] = word & 0xFFFF, word >> 16
    found = found.flatten()[:count].sub_(32767.5).mul_(3**0.5 / 2**15)  # the difference is exact
    found = torch.view_as_complex(found.view(-1, 2)) if dtype.is_complex else found
    return found.view(shape).to(dtype)


def _numbered(count: int, key: int, device: torch.device) -> Iterator[tuple[slice, tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """The words of the counters (i, 0, 0, 0), some i at a time."""
    for piece in _pieces(count, 1, device):
        index = torch.arange(piece.start, piece.stop, device=device)
        zero = torch.zeros_like(index)
        yield piece, philox((index, zero, zero, zero), key)


def random_like(like: Any, draws: torch.Generator) -> Tensor:
    """`noise` of a tensor's shape, dtype and device, under a key that a generator of the CPU's draws."""
    key = int(torch.randint(2**63 - 1, (), generator=draws, device="cpu"))
    return noise(like.shape, key, like.device, like.dtype)


def hashed(numbers: Tensor, block: int, key: int, size: int) -> tuple[Tensor, Tensor]:
    """A random place in [0, size) for each number, and a sign ±1; both int64.

    numbers: integers in [0, 2³²)    block: selects other places and signs    size: below 2³¹; no place is likelier than
    another by more than size / 2³²
    """
    zero = torch.zeros_like(numbers)
    place, sign, *_ = philox((numbers, zero + block, zero, zero), key)
    return (place * size) >> 32, 2 * (sign & 1) - 1


def packed_signs(key: int, lines: slice, entries: slice, device: torch.device) -> Tensor:
    """Random bits, eight in a byte, for each number in ``lines``: those of some entries, and of the entries before them that
    share a counter with the first.  Returns (lines, bytes), uint8; see `unpacked`.
    """
    first, last = entries.start // BITS, -(-entries.stop // BITS)
    block, line = torch.arange(first, last, device=device), torch.arange(lines.start, lines.stop, device=device)[:, None]
    found = torch.empty(len(line), len(block), 16, dtype=torch.uint8, device=device)
    shifts = 8 * torch.arange(4, device=device)
    for own in _pieces(len(line), len(block), device):
        some = line[own]
        counter = torch.broadcast_tensors(block, some, *[torch.zeros_like(some)] * 2)
        drawn = torch.stack(philox(counter, key), -1)
        found[own] = (drawn[..., None] >> shifts).bitwise_and_(255).flatten(2)  # the lowest byte first
    return found.flatten(1)


def unpacked(packed: Tensor, places: slice, values: Tensor) -> Tensor:
    """The numbers of the bits in some places, (lines, places).

    packed: (lines, bytes)    values: the numbers of each byte's bits; see `by_byte`
    """
    first, last = places.start // 8, -(-places.stop // 8)
    own = packed[:, first:last]
    found = values.index_select(0, own.flatten().int()).view(len(own), -1)
    return found[:, places.start - 8 * first : places.stop - 8 * first]


def by_byte(like: Tensor, size: float = 1.0) -> Tensor:
    """± size for each bit of each byte, the lowest first: (256, 8), of the dtype and device of ``like``."""
    byte, bit = torch.arange(256, device=like.device)[:, None], torch.arange(8, device=like.device)
    return (((byte >> bit) & 1) * 2 - 1).to(like.dtype) * size


def _pieces(count: int, each: int, device: torch.device) -> Iterator[slice]:
    """[0, count) in pieces of as many counters as are drawn at a time.  each: how many counters one has"""
    step = max(1, _AT_ONCE.get(device.type, 2**20) // max(1, each))
    return (slice(start, min(count, start + step)) for start in range(0, count, step))
