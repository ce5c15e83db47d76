"""Random numbers that are a function of their index, and the same bits on every device: Philox 4x32-10.

A counter of four words of 32 bits and a key of two give four random words.  Nothing has a state, so a device draws what it
needs by itself, in any order.

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3" (SC '11), section 3.3.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256

import torch
from torch import Tensor

_WORD = 2**32 - 1
_FACTORS = 0xD2511F53, 0xCD9E8D57
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


def _pair(first: int, second: int, device: torch.device) -> Tensor:
    """Two numbers, made on the device: nothing is copied to it."""
    return torch.arange(2, device=device).mul_(second - first).add_(first)


def philox_(counter: Tensor, key: int) -> Tensor:
    """Replaces counters by random words.

    counter: (4, *S), int64, numbers in [0, 2³²)    key: of 64 bits
    Returns ``counter``: (4, *S), numbers in [0, 2³²).
    """
    both = (2, *[1] * (counter.ndim - 1))
    halves = key & _WORD, key >> 32
    first_key, factors, steps = (_pair(*own, counter.device).view(both) for own in (halves, _FACTORS, _STEPS))
    turn = torch.arange(_ROUNDS, device=counter.device).view(_ROUNDS, *[1] * counter.ndim)
    keys = torch.addcmul(first_key, turn, steps).bitwise_and_(_WORD)
    keys[::2] = keys[::2].flip(1)
    # Words 0 and 2 pass through each operation together.  A round gives their successors in the other order.
    words, last = counter[::2], counter[1::2]
    products, spare, orders = torch.empty_like(words), torch.empty_like(words), (factors, factors.flip(0))
    (first, second), others, own, next_own = words.unbind(), last.unbind(), products.unbind(), spare.unbind()
    for n, own_key in enumerate(keys.unbind()):
        # The products' bits are right although the largest overflow int64.  Their upper words are cut off after they have
        # entered the words, together with those of the words: that saves passes over memory.
        torch.mul(words, orders[n % 2], out=products)
        torch.bitwise_right_shift(products, 32, out=words)
        first.bitwise_xor_(others[1])
        second.bitwise_xor_(others[0])
        words.bitwise_xor_(own_key).bitwise_and_(_WORD)
        products, spare, others, own, next_own = spare, products, own, next_own, own
    torch.bitwise_and(spare, _WORD, out=last)
    return counter


def noise(shape: Sequence[int], key: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers of a shape, the same on all devices of one kind."""
    kind, draws = torch.complex64 if dtype.is_complex else torch.float32, torch.Generator(device).manual_seed(key)
    return torch.randn(tuple(shape), generator=draws, dtype=kind, device=device).to(dtype)


def hashed(numbers: Tensor, key: int, size: int) -> tuple[Tensor, Tensor]:
    """A random place in [0, size) for each number, and a sign ±1; both int64.

    numbers: integers in [0, 2³²)    size: below 2³¹; no place is likelier than another by more than size / 2³²
    """
    counter = torch.zeros(4, *numbers.shape, dtype=torch.int64, device=numbers.device)
    counter[0] = numbers
    place, sign, *_ = philox_(counter, key)
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
        counter = torch.zeros(4, own.stop - own.start, len(block), dtype=torch.int64, device=device)
        counter[0], counter[1] = block, line[own]
        drawn = philox_(counter, key).movedim(0, -1)
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
