"""Normal and uniform numbers by counter: against Python's own numbers, in any pieces, and their distribution."""

from math import sqrt

import pytest
import torch
from counted import normals, pair, stream, uniforms
from counted import words as by_definition
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest, norm
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from autograd_hacks.support import philox
from autograd_hacks.support.philox import Stream, box_muller, by_byte, key_of, noise, normal, packed_signs, uniform, unpacked

CPU = torch.device("cpu")
FIRST = ["0x1.5fdd637a09752p-1", "0x1.0f5a23c5a6cd3p-2", "-0x1.3002a32414a1fp+1", "-0x1.be7ae65271527p-1"]
"""The numbers 0, 1, 128 and 255 of `Stream.of("written down")`, so that no version has others."""


def alone(of: Stream, count: int, deviation: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal([of], [count], deviation, CPU, dtype)[0]


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 255, 256, 257, 1000])
def test_numbers_are_those_of_the_definition(count: int) -> None:
    own, other = Stream.of(5, "noise", 7), stream(5, "noise", 7)
    assert own == other
    assert own.part(3) == stream(*other, 3)
    expected = torch.tensor(normals(other, count), dtype=torch.float64)
    assert_close(alone(own, count), expected, rtol=0, atol=5e-15)
    assert torch.equal(alone(own, count, 0.7, torch.float32), (0.7 * alone(own, count)).float())
    assert uniform(own, count).tolist() == uniforms(other, count)


def test_pieces_and_neighbours_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, counts = [Stream.of(n) for n in range(5)], [3, 700, 0, 256, 1025]
    whole = [alone(own, count) for own, count in zip(streams, counts)]
    for at_once in (128, 384, 2**15):
        monkeypatch.setattr(philox, "_AT_ONCE", {"cpu": at_once})
        assert all(map(torch.equal, normal(streams, counts, 1.0, CPU, torch.float64), whole))
        assert torch.equal(uniform(streams[0], 1000)[:3], uniform(streams[0], 3))


def test_large_tensors_take_the_memory_of_their_numbers() -> None:
    """All else is made in pieces."""
    count = 2**20 + 5

    class Sizes(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found = func(*args, **(kwargs or {}))
            if isinstance(found, Tensor) and found.dtype != torch.float32:
                self.most = max(self.most, found.untyped_storage().nbytes())
            return found

    with Sizes() as sizes:
        alone(Stream.of(1), count, dtype=torch.float32)
    counters = 4 * 8 * philox._AT_ONCE["cpu"] * torch.get_num_threads()  # bytes of their four words
    assert 0 < sizes.most <= counters


def test_first_and_last_numbers_of_box_and_muller() -> None:
    """Where the logarithm is 0 or largest, and the sine is 0 or 1; √ of a number below 0 would be NaN."""
    places = [0, 1, 2, 2**51 - 1, 2**51, 2**52 - 1, 2**52, 2**52 + 1, 2**53 - 3, 2**53 - 2, 2**53 - 1]
    ends = [(u, v) for u in places for v in places]
    u, v = torch.tensor(ends).T
    found, expected = box_muller(torch.stack([u, v])).T, torch.tensor([pair(*own) for own in ends], dtype=torch.float64)
    assert_close(found, expected, rtol=0, atol=5e-15)
    assert float(found.abs().max()) == pytest.approx(sqrt(-2 * torch.tensor(2.0**-53, dtype=torch.float64).log().item()))


def test_numbers_without_values() -> None:
    """As when somebody asks how much memory a step takes: nothing is kept from before the mode."""
    with FakeTensorMode():
        assert box_muller(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5)
        assert philox.philox_(torch.zeros(4, 3, dtype=torch.int64), 5).shape == (4, 3)


def test_bits_are_written_down() -> None:
    found = [x.hex() for x in alone(Stream.of("written down"), 256)[[0, 1, 128, 255]].tolist()]
    assert found == FIRST


@pytest.mark.parametrize("kind", ["one long stream", "first numbers of many streams", "steps of one parameter"])
def test_numbers_are_normal_and_independent(kind: str) -> None:
    count = 200_000
    if kind == "one long stream":
        x = alone(Stream.of(3, "noise", 4), count)
    else:
        fields = [(9, "noise", 0, n) if kind.startswith("first") else (9, "noise", n, 0) for n in range(count // 100)]
        x = torch.cat(normal([Stream.of(*own) for own in fields], [100] * len(fields), 1.0, CPU, torch.float64))
    assert kstest(x.numpy(), norm.cdf).pvalue > 1e-4
    assert kstest(x.abs().numpy(), lambda r: 2 * norm.cdf(r) - 1).pvalue > 1e-4
    for power, (moment, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96), 6: (15, 10170)}.items():
        assert abs(float(x.pow(power).mean()) - moment) < 4.5 * sqrt(variance / count)
    for lag in (1, 2, 99, 100, 127, 128, 256):  # a pair's two numbers are 128 apart
        for one in (x, x.square() - 1):
            other = one.roll(lag)
            assert abs(float((one * other).mean() / one.square().mean())) < 4.5 / sqrt(count)
    u = uniform(Stream.of(3, "batch", 4), count)
    assert kstest(u.numpy(), "uniform").pvalue > 1e-4
    assert 0 <= float(u.min()) < float(u.max()) < 1


# Philox against the vectors that its authors publish, and its own definition in Python's integers


WORD = st.integers(0, 2**32 - 1)

VECTORS = [  # counter, key, words; of philox4x32 with 10 rounds, in tests/kat_vectors of Random123
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def drawn(counter: list[int], key: int) -> list[int]:
    return [int(word) for word in philox.philox_(torch.tensor(counter)[:, None], key)]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    numbers, (low, high), wanted = ([int(word, 16) for word in text.split()] for text in (counter, key, expected))
    assert drawn(numbers, low + (high << 32)) == by_definition(numbers, low, high) == wanted


@given(st.lists(WORD, min_size=4, max_size=4), WORD, WORD)
def test_any_counter_and_key(counter: list[int], low: int, high: int) -> None:
    assert drawn(counter, low + (high << 32)) == by_definition(counter, low, high)


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = noise((9, 11), 7, CPU), packed_signs(7, slice(3, 40), slice(150, 300), CPU)
    monkeypatch.setattr(philox, "_AT_ONCE", {"cpu": 8})
    pieces = noise((9, 11), 7, CPU), packed_signs(7, slice(3, 40), slice(150, 300), CPU)
    assert torch.equal(whole[0], pieces[0])
    assert torch.equal(whole[1], pieces[1])


@given(st.integers(0, 400), st.integers(1, 300), st.integers(0, 5))
def test_some_signs_are_those_of_all(start: int, count: int, line: int) -> None:
    values, own = by_byte(torch.empty(0, dtype=torch.float64), 0.5), slice(start, start + count)
    all_bits, bits = packed_signs(11, slice(0, 6), slice(0, 700), CPU), packed_signs(11, slice(line, 6), own, CPU)
    whole, some = unpacked(all_bits, slice(0, 700), values), unpacked(bits, slice(start % 128, start % 128 + count), values)
    assert torch.equal(some, whole[line:, own])
    assert set(whole.flatten().tolist()) == {-0.5, 0.5}
    for entry in (0, 31, 32, 130, 699):  # a counter has 128 bits, the lowest of its first word first
        word = by_definition([entry // 128, line, 0, 0], 11, 0)[entry % 128 // 32]
        assert whole[line, entry] == (word >> entry % 32 & 1) - 0.5


def test_signs_are_independent() -> None:
    bits = packed_signs(key_of("a"), slice(0, 1024), slice(0, 512), CPU)
    signs = unpacked(bits, slice(0, 512), by_byte(torch.empty(0)))
    for x in (signs, signs.mT):
        correlations = (x @ x.mT / x.shape[1]).fill_diagonal_(0)
        assert correlations.abs().max() < 7 / x.shape[1] ** 0.5  # up to 524,000 pairs, nearly normal
    assert signs.mean().abs() < 5 / signs.numel() ** 0.5


def test_noise() -> None:
    x = noise((100, 999), key_of(1), CPU)
    assert x.shape == (100, 999)
    assert x.dtype == torch.float32
    assert bool((x != 0).all())
    assert float(x.abs().max()) < 3**0.5
    assert float(x.mean()) == pytest.approx(0, abs=0.015)
    assert float(x.square().mean()) == pytest.approx(1, abs=0.015)
    assert 50_000 < len(x.unique()) <= 2**16
    word = by_definition([4, 0, 0, 0], key_of(1) % 2**32, key_of(1) >> 32)[0]
    eighth = -(-x.numel() // 8)
    assert x.flatten()[[4, eighth + 4]].tolist() == pytest.approx(
        [(h - 32767.5) * 3**0.5 / 2**15 for h in (word % 2**16, word >> 16)]
    )
    assert torch.equal(noise((100, 999), key_of(1), CPU, torch.float64), x.double())
    assert not torch.equal(noise((100, 999), key_of(2), CPU), x)
    assert noise((3, 5), 1, CPU, torch.complex64).shape == (3, 5)
    assert noise((), 1, CPU).shape == ()
    assert noise((4, 0), 1, CPU).shape == (4, 0)


@pytest.mark.parametrize("fields", [("a", 1), ("a", torch.Size((1, 2)), None)])
def test_keys(fields: tuple[object, ...]) -> None:
    assert 0 <= key_of(*fields) < 2**64
    assert key_of(*fields) == key_of(*fields) != key_of(*fields, 0)
