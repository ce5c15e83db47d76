"""Normal and uniform numbers of a secret are those of their definition in Python's own numbers, by Philox."""

import pytest
import torch
from counted import normals, secret, uniforms
from counted import words as by_definition
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from autograd_hacks.support import philox
from autograd_hacks.support.draws import Secret, box_muller, normal, uniform
from autograd_hacks.support.philox import by_byte, key_of, noise, packed_signs, unpacked

CPU = torch.device("cpu")
FIRST = [-1.645634564044147, 0.6644600679104723, 1.3960595044871138, -0.06103430670043852]
"""The numbers 0, 1, 128 and 255 of `Secret.of("written down")`, so that no version has others."""


def alone(of: Secret, count: int, deviation: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(of, count, deviation, CPU, dtype)


@pytest.mark.parametrize("count", [0, 1, 2, 127, 1000])
@pytest.mark.parametrize(("dtype", "width", "error"), [(torch.float64, 64, 5e-15), (torch.float32, 32, 3e-6)])
def test_numbers_are_those_of_the_definition(count: int, dtype: torch.dtype, width: int, error: float) -> None:
    own = Secret.of(5, "noise", 7)
    assert own == secret(5, "noise", 7)
    expected = torch.tensor(normals(own, count, width), dtype=dtype)
    assert_close(alone(own, count, 0.7, dtype), 0.7 * expected, rtol=0, atol=error)
    assert uniform(own, count).tolist() == uniforms(own, count)


def test_numbers_are_written_down() -> None:
    assert alone(Secret.of("written down"), 256)[[0, 1, 128, 255]].tolist() == pytest.approx(FIRST, rel=1e-14)


def test_first_and_last_numbers_of_box_and_muller() -> None:
    """Where the logarithm is largest or least.  √ of a number below 0 would be NaN, and a number 0 no noise."""
    ends = {32: (torch.int32, torch.float32, 6.67), 64: (torch.int64, torch.float64, 9.43)}
    for width, (kind, dtype, most) in ends.items():
        u, largest = torch.tensor([0, -1, 1, 2 ** (width - 1) - 1, -(2 ** (width - 1))], dtype=kind), 2 ** (width - 1) - 1
        for v in (0, 1, largest // 2, largest, -largest - 1):
            bits = torch.cat([u, torch.full_like(u, v), torch.zeros(2, dtype=kind)])  # whole words
            words = bits[: len(bits) // 2 * 2].view(torch.int64)
            found = box_muller(lambda count, own=words: own[:count], 10, 1.0, dtype).view(2, 5).double().norm(dim=0)  # type: ignore[misc]
            assert float(found.min()) > 1e-8
            assert most - 0.02 < float(found.max()) < most


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
    whole = packed_signs(7, slice(3, 40), slice(150, 300), CPU)
    monkeypatch.setattr(philox, "_AT_ONCE", {"cpu": 8})
    assert torch.equal(whole, packed_signs(7, slice(3, 40), slice(150, 300), CPU))


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


def test_noise() -> None:
    x = noise((100, 999), key_of(1), CPU)
    assert x.shape == (100, 999)
    assert x.dtype == torch.float32
    assert float(x.mean()) == pytest.approx(0, abs=0.015)
    assert float(x.square().mean()) == pytest.approx(1, abs=0.015)
    assert torch.equal(noise((100, 999), key_of(1), CPU), x)
    assert torch.equal(noise((100, 999), key_of(1), CPU, torch.float64), x.double())
    assert not torch.equal(noise((100, 999), key_of(2), CPU), x)
    assert noise((3, 5), 1, CPU, torch.complex64).shape == (3, 5)
    assert noise((), 1, CPU).shape == ()
    assert noise((4, 0), 1, CPU).shape == (4, 0)


@pytest.mark.parametrize("fields", [("a", 1), ("a", torch.Size((1, 2)), None)])
def test_keys(fields: tuple[object, ...]) -> None:
    assert 0 <= key_of(*fields) < 2**64
    assert key_of(*fields) == key_of(*fields) != key_of(*fields, 0)
