"""Random numbers that are a function of their index, and the same bits on every device: Philox 4x32-10.

A counter of four words of 32 bits and a key of two give four random words.  Nothing has a state, so a device draws what it
needs by itself, in any order.

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3" (SC '11), section 3.3.
"""

import secrets
import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b, sha256
from itertools import accumulate
from math import factorial, log, pi
from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 2**32 - 1
_FACTORS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
"""The increments of the key's words from round to round."""
_ROUNDS = 10
_HALVES = struct.Struct("<2q")
_ROW = 128
"""Counters of a row.  A row belongs to one stream: its numbers are those of R cos θ, then those of R sin θ."""
_ROOT_OF_HALF = 0x3FE6A09E667F3BCD
"""The bits of √½ in float64."""
_ARTANH = [-16 / (2 * k + 1) for k in range(10, -1, -1)]
_SINE = [(-1) ** k / factorial(2 * k + 1) for k in range(7, -1, -1)]
"""Series: of -16 artanh(s) / s by s², for |s| ≤ .172, and of sin(t) / t by t², for |t| ≤ π/4: to 10⁻¹⁶."""

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


def philox_(counter: Tensor, key: int | Tensor) -> Tensor:
    """Replaces counters by random words.

    counter: (4, *S), int64, numbers in [0, 2³²)
    key: of 64 bits, its lower word first; or its two words, (2, ...) that can be expanded to (2, *S)
    Returns ``counter``: (4, *S), numbers in [0, 2³²).
    """
    if isinstance(key, int):
        key = _pair(key & _WORD, key >> 32, counter.device)
    both = (2, *[1] * (counter.ndim - 1))
    factors, steps = (_pair(*own, counter.device).view(both) for own in (_FACTORS, _STEPS))
    turn = torch.arange(_ROUNDS, device=counter.device).view(_ROUNDS, *[1] * counter.ndim)
    keys = torch.addcmul(key.view(2, *key.shape[1:], *[1] * (counter.ndim - key.ndim)), turn, steps).bitwise_and_(_WORD)
    keys[::2] = keys[::2].flip(1)
    # Words 0 and 2 pass through each operation together.  A round gives their successors in the other order.
    words, last = counter[::2], counter[1::2]
    products, spare, orders = torch.empty_like(words), torch.empty_like(words), (factors, factors.flip(0))
    (first, second), others, own, next_own = words.unbind(), last.unbind(), products.unbind(), spare.unbind()
    for n, key in enumerate(keys.unbind()):
        # The products' bits are right although the largest overflow int64.  Their upper words are cut off after they have
        # entered the words, together with those of the words: that saves passes over memory.
        torch.mul(words, orders[n % 2], out=products)
        torch.bitwise_right_shift(products, 32, out=words)
        first.bitwise_xor_(others[1])
        second.bitwise_xor_(others[0])
        words.bitwise_xor_(key).bitwise_and_(_WORD)
        products, spare, others, own, next_own = spare, products, own, next_own, own
    torch.bitwise_and(spare, _WORD, out=last)
    return counter


class Stream(NamedTuple):
    """Where a sequence of random numbers begins: a key of 64 bits, and the upper half of the counters, another 64.  The
    lower half counts the numbers, so no two of a sequence share a counter, and no two streams a key and a counter unless
    their 128 bits are equal.  Both fields are signed.
    """

    key: int
    upper: int

    @classmethod
    def of(cls, *fields: object) -> "Stream":
        """The stream of some fields: a hash of their ``repr``."""
        return cls(*_HALVES.unpack(blake2b(repr(fields).encode(), digest_size=_HALVES.size).digest()))

    @classmethod
    def secret(cls) -> "Stream":
        """A stream that nobody knows, from the operating system's random bits."""
        return cls(*_HALVES.unpack(secrets.token_bytes(_HALVES.size)))

    def part(self, number: int) -> "Stream":
        return Stream.of(*self, number)

    def words(self) -> list[int]:
        """The words of the key and of the counter's upper half, the lower ones first."""
        return [half >> shift & _WORD for half in self for shift in (0, 32)]


def uniform(stream: Stream, count: int) -> Tensor:
    """Numbers in [0, 1), multiples of 2⁻⁵³: float64, on the CPU."""
    rows = [-(-count // (2 * _ROW))]
    found = torch.empty(rows[0], 2, _ROW, dtype=torch.float64, device="cpu")
    for piece, bits in _rows([stream], rows, found.device):
        found[piece] = bits.transpose(0, 1)
    return found.flatten()[:count].mul_(2.0**-53)


def normal(
    streams: Sequence[Stream], counts: Sequence[int], deviation: float, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Normal numbers of several streams, drawn in float64: the same bits on every device, and alone or with others.

    counts: of each stream's numbers
    dtype: of the result, real
    """
    rows = [-(-count // (2 * _ROW)) for count in counts]
    found = torch.empty(sum(rows), 2, _ROW, dtype=dtype, device=device)
    for piece, bits in _rows(streams, rows, device):
        found[piece] = box_muller(bits).mul_(deviation).transpose(0, 1)
    return [own.flatten()[:count] for own, count in zip(found.split(rows), counts)]


def _rows(streams: Sequence[Stream], rows: Sequence[int], device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Rows of counters, some at a time, each with two numbers of 53 random bits, (2, rows, counters).

    rows: how many a stream has
    """
    fields = [(*stream.words(), start) for stream, start in zip(streams, accumulate(rows, initial=0))]
    of_row = torch.tensor(fields, device=device)
    of_row = of_row.repeat_interleave(torch.tensor(rows, device=device), 0, output_size=sum(rows))
    entry = torch.arange(_ROW, device=device)
    # A CPU's threads share each operation, if all of them have enough to do.
    for piece in _pieces(sum(rows), _ROW // (torch.get_num_threads() if device.type == "cpu" else 1), device):
        low, high, *upper, start = of_row[piece].T
        row = torch.arange(piece.start, piece.stop, device=device) - start
        counter = torch.empty(4, len(row), _ROW, dtype=torch.int64, device=device)
        torch.add((row * _ROW & _WORD)[:, None], entry, out=counter[0])
        for own, word in zip(counter[1:], (row * _ROW >> 32, *upper)):
            own.copy_(word[:, None])
        philox_(counter, torch.stack([low, high])[..., None])
        yield piece, counter[::2].mul_(2**21).add_(counter[1::2].bitwise_right_shift_(11))


def box_muller(bits: Tensor) -> Tensor:
    """Two independent normal numbers for each pair (u, v) of numbers in [0, 2⁵³), in float64: R cos θ and R sin θ with
    R = √(-2 log((u + 1) / 2⁵³)).

    No number is beyond 8.57.  The lowest bit of v is the sign of R, the others are θ in [-π/2, π/2).  Libraries' logarithms
    and sines differ in their last bits by device, version and place in a vector.  Here are only operations that IEEE 754
    rounds in one way, so all devices and pieces have the same bits.

    bits: u and v, (2, ...), int64.  The result has the same shape
    Source: Box and Muller 1958, "A note on the generation of random normal deviates".
    """
    found = torch.empty_like(bits, dtype=torch.float64)
    (u, v), (one, other) = bits, found
    x = (u + 1).double().view(torch.int64)
    exponent = (x - _ROOT_OF_HALF).bitwise_right_shift_(52)
    m = x.sub_(exponent << 52).view(torch.float64)  # x = m · 2^exponent with m in [√½, √2)
    s = (m - 1).div_(m.add_(1))  # log m = 2 artanh s
    twice = _polynomial(_ARTANH, s * s).mul_(s).add_(exponent.double().sub_(53).mul_(-8 * log(2))).sqrt_()  # 2 R
    twice.view(torch.int64).bitwise_xor_(v << 63)
    t = (v >> 1).double().mul_(pi / 2**53).sub_(pi / 4)  # θ / 2, for which cos = √(1 - sin²) loses no digits
    sine = _polynomial(_SINE, t * t).mul_(t)
    square = torch.mul(sine, sine, out=one)
    cosine = (1 - square).sqrt_()
    square.neg_().add_(0.5).mul_(twice)
    torch.mul(sine, cosine, out=other).mul_(twice)
    return found


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """coefficients: the highest first"""
    found = x * coefficients[0]
    for c in coefficients[1:-1]:
        found.add_(c).mul_(x)
    return found.add_(coefficients[-1])


def noise(shape: Sequence[int], key: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers of a shape, of variance 1: 65,536 equally likely numbers in (-√3, √3), none of them 0."""
    count = torch.Size(shape).numel() * (2 if dtype.is_complex else 1)
    each = -(-count // 8)  # a word gives two numbers
    found = torch.empty(4, 2, each, dtype=torch.float32, device=device)
    for piece in _pieces(each, 1, device):
        counter = torch.zeros(4, piece.stop - piece.start, dtype=torch.int64, device=device)
        counter[0] = torch.arange(piece.start, piece.stop, device=device)
        drawn = philox_(counter, key)
        found[:, 0, piece], found[:, 1, piece] = drawn & 0xFFFF, drawn >> 16
    found = found.flatten()[:count].sub_(32767.5).mul_(3**0.5 / 2**15)  # the difference is exact
    found = torch.view_as_complex(found.view(-1, 2)) if dtype.is_complex else found
    return found.view(shape).to(dtype)


def hashed(numbers: Tensor, block: int, key: int, size: int) -> tuple[Tensor, Tensor]:
    """A random place in [0, size) for each number, and a sign ±1; both int64.

    numbers: integers in [0, 2³²)    block: selects other places and signs    size: below 2³¹; no place is likelier than
    another by more than size / 2³²
    """
    counter = torch.zeros(4, *numbers.shape, dtype=torch.int64, device=numbers.device)
    counter[0], counter[1] = numbers, block
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
