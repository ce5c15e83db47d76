"""Normal and uniform numbers by counter: against Python's own numbers, in any pieces, and their distribution."""

from math import sqrt

import pytest
import torch
from counted import normals, pair, stream, uniforms
from scipy.stats import kstest, norm
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from autograd_hacks.support import philox
from autograd_hacks.support.philox import Stream, box_muller, normal, uniform

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
