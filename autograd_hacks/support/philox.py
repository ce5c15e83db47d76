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
from typing import Any, NamedTuple

import torch
from torch import Tensor

_WORD = 2**32 - 1
_FACTORS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
"""The increments of the key's words from round to round."""
_ROUNDS = 10
_HALVES = struct.Struct("<2q")
_ROOT_OF_HALF = 0x3FE6A09E667F3BCD
"""The bits of √½ in float64."""
_ROW = 128
"""Counters of a row.  A row belongs to one stream: its numbers are those of R cos θ, then those of R sin θ."""
_ARTANH = [-4 / (2 * k + 1) for k in range(10, -1, -1)]
_SINE = [(-1) ** k / factorial(2 * k + 1) for k in range(7, -1, -1)]
"""Series: of -4 artanh(s) / s by s², for |s| ≤ .172, and of sin(t) / t by t², for |t| ≤ π/4: to 10⁻¹⁶."""

BITS = 128
"""Signs that one counter gives."""
_AT_ONCE = {"cpu": 2**15}
"""Counters that are drawn at a time: as many as a CPU's cache holds, and 2²⁰ elsewhere, where each call is a launch."""


def key_of(*fields: object) -> int:
    """A key of 64 bits, by the fields' ``repr``."""
    return int.from_bytes(sha256(repr(fields).encode()).digest()[:8], "big")


def philox(counter: Sequence[Tensor], key: int | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four random words of each counter.

    counter: four int64 tensors of one shape with numbers in [0, 2³²)
    key: of 64 bits, its lower word first; or its two words, int64 tensors whose shape can be expanded to the counters'
    Returns four int64 tensors with numbers in [0, 2³²).
    """
    a, b, c, d = counter
    low, high = (key & _WORD, key >> 32) if isinstance(key, int) else key
    for _ in range(_ROUNDS):
        # The products' bits are right although the largest overflow int64.  The upper words of b and d are never cut off,
        # because those of a and c are, after b and d have entered them: that saves two of twelve passes over memory.
        p, q = a * _FACTORS[0], c * _FACTORS[1]
        a = (q >> 32).bitwise_xor_(b).bitwise_xor_(low).bitwise_and_(_WORD)
        c = (p >> 32).bitwise_xor_(d).bitwise_xor_(high).bitwise_and_(_WORD)
        b, d = q, p
        low, high = (low + _STEPS[0]) & _WORD, (high + _STEPS[1]) & _WORD
    return a, b.bitwise_and_(_WORD), c, d.bitwise_and_(_WORD)


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
        for own, numbers in zip(found[piece].unbind(1), bits):
            own.copy_(numbers)
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
        for own, numbers in zip(found[piece].unbind(1), box_muller(*bits)):
            own.copy_(numbers.mul_(deviation))
    return [own.flatten()[:count] for own, count in zip(found.split(rows), counts)]


def _rows(
    streams: Sequence[Stream], rows: Sequence[int], device: torch.device
) -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
    """Rows of counters, some at a time, each with two numbers of 53 random bits.  rows: how many a stream has"""
    fields = [(*stream.words(), start) for stream, start in zip(streams, accumulate(rows, initial=0))]
    counts = torch.tensor(rows, device=device)
    of_row = torch.tensor(fields, device=device).repeat_interleave(counts, 0, output_size=sum(rows))
    entry = torch.arange(_ROW, device=device)
    # A CPU's threads share each operation, if all of them have enough to do.
    for piece in _pieces(len(of_row), _ROW // (torch.get_num_threads() if device.type == "cpu" else 1), device):
        low, high, *upper, start = of_row[piece].T[..., None]
        index = (torch.arange(piece.start, piece.stop, device=device)[:, None] - start) * _ROW + entry
        counter = index & _WORD, index >> 32, *(word.expand_as(index) for word in upper)
        a, b, c, d = philox(counter, (low, high))
        yield piece, (a.mul_(2**21).add_(b >> 11), c.mul_(2**21).add_(d >> 11))


def box_muller(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent normal numbers for each pair of numbers in [0, 2⁵³), in float64: R cos θ and R sin θ with
    R = √(-2 log((u + 1) / 2⁵³)).

    No number is beyond 8.57.  The lowest bit of v is the sign of R, the others are θ in [-π/2, π/2).  Libraries' logarithms
    and sines differ in their last bits by device, version and place in a vector.  Here are only operations that IEEE 754
    rounds in one way, so all devices and pieces have the same bits.

    u, v: int64
    Source: Box and Muller 1958, "A note on the generation of random normal deviates".
    """
    x = u.add(1).double().view(torch.int64)
    exponent = (x - _ROOT_OF_HALF) >> 52
    m = x.sub_(exponent << 52).view(torch.float64)  # x = m · 2^exponent with m in [√½, √2)
    s = (m - 1).div_(m.add_(1))  # log m = 2 artanh s
    radius = _polynomial(_ARTANH, s * s).mul_(s).add_(exponent.sub_(53).double().mul_(-2 * log(2))).sqrt_()
    radius.view(torch.int64).bitwise_xor_(v << 63)
    t = (v >> 1).double().mul_(pi / 2**53).sub_(pi / 4)  # θ / 2, for which cos = √(1 - sin²) loses no digits
    sine = _polynomial(_SINE, t * t).mul_(t)
    square = sine * sine
    cosine = (1 - square).sqrt_()
    return square.mul_(-2).add_(1).mul_(radius), sine.mul_(2).mul_(cosine).mul_(radius)


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
