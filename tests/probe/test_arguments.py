"""What a model is given, how many samples are in it, and that the probe leaves it as it is."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_backward_per_sample, squares
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import autograd_hacks


def check(model: nn.Module, x: Tensor, *others: Any, run: Callable[..., Tensor] | None = None) -> None:
    """A step of a hooked model against one backward pass per sample, where the other arguments are no batch."""
    model.zero_grad()
    squares(model(x, *others)).sum().backward()
    autograd_hacks.compute_grad1(model, "sum")
    with autograd_hacks.pause_hooks():
        assert_rows(model, one_backward_per_sample(model, squares, x, run=run or (lambda x: model(x, *others))))


class Mixed(nn.Module):
    """A mixing of positions that is given as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, how: Tensor) -> Tensor:
        return self.out((how @ self.into(x)).relu())


class Placed(nn.Module):
    """Positions that are given as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(9, 8), nn.Embedding(9, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.out((self.words(x) + self.places(places)).tanh())


class PlacesFirst(Placed):
    def forward(self, places: Tensor, x: Tensor) -> Tensor:
        return super().forward(x, places)


@pytest.mark.parametrize("samples", [1, 2, 3, 5])
def test_a_matrix_beside_few_samples_is_no_batch(samples: int) -> None:
    model = Mixed().double()
    with autograd_hacks.add_hooks(model):
        for n in (4, samples):
            check(model, torch.randn(n, 3, 4).double(), torch.randn(3, 3).double())


@pytest.mark.parametrize("samples", [1, 3, 4])
def test_positions_are_no_samples_even_where_they_are_as_many(samples: int) -> None:
    model = Placed().double()
    with autograd_hacks.add_hooks(model):
        check(model, torch.randint(9, (samples, 4)), torch.arange(4))


def test_positions_before_the_batch() -> None:
    model, places = PlacesFirst().double(), torch.arange(4)[None]
    with autograd_hacks.add_hooks(model):
        for samples in (3, 4, 3):
            x = torch.randint(9, (samples, 4))
            model.zero_grad()
            squares(model(places, x)).sum().backward()
            autograd_hacks.compute_grad1(model, "sum")
            with autograd_hacks.pause_hooks():
                assert_rows(model, one_backward_per_sample(model, squares, x, run=lambda x: model(places, x)))


class Cache:
    """A user's own object, which the model changes."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None

    def update(self, keys: Tensor) -> Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        return self.keys


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        keys = cache.update(self.key(x))
        return self.out((self.query(x) @ keys.mT).softmax(-1) @ keys)


def test_the_probe_leaves_a_cache_as_it_is() -> None:
    model, x = Cached().double(), torch.randn(3, 5, 4).double()
    expected = model(x, Cache())
    with autograd_hacks.add_hooks(model):
        cache = Cache()
        assert torch.equal(model(x, cache), expected)
        assert cache.keys is not None
        assert cache.keys.shape == (3, 5, 4)
        check(model, x, Cache(), run=lambda x: model(x, Cache()))


def test_an_object_that_cannot_be_copied_is_refused() -> None:
    class Held(Cache):
        def __deepcopy__(self, memo: object) -> None:
            raise TypeError("there is but one")

    model = Cached()
    with autograd_hacks.add_hooks(model), pytest.raises(autograd_hacks.errors.ProbeFailed, match="there is but one"):
        model(torch.randn(3, 5, 4), Held())


class Packed(nn.Module):
    def __init__(self, kind: str, head: str) -> None:
        super().__init__()
        self.rnn, self.out, self.head = getattr(nn, kind)(4, 3, batch_first=True), nn.Linear(3, 2), head

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        lengths = (x[..., 0] < 9).sum(1) if lengths is None else lengths
        packed, state = self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        if self.head == "state":
            return self.out((state[0] if isinstance(state, tuple) else state)[-1])
        return self.out(pad_packed_sequence(packed, batch_first=True)[0].sum(1))


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("head", ["state", "padded"])
@pytest.mark.parametrize("counts", [False, True])
def test_packed_inside_the_model_in_any_order(kind: str, head: str, counts: bool) -> None:
    model, x, lengths = Packed(kind, head).double(), torch.randn(4, 5, 4).double(), torch.tensor([2, 5, 1, 4])
    x[torch.arange(5) >= lengths[:, None]] = 10
    expected = {}
    for name, p in model.named_parameters():
        expected[name] = torch.zeros(4, *p.shape, dtype=torch.float64)
    for n in range(4):
        model.zero_grad()
        squares(model(x[n : n + 1], lengths[n : n + 1])).sum().backward()
        for name, p in model.named_parameters():
            expected[name][n] = p.grad
    model.zero_grad()
    with autograd_hacks.add_hooks(model):
        squares(model(x) if counts else model(x, lengths)).sum().backward()
        autograd_hacks.compute_grad1(model, "sum")
        assert_rows(model, expected)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn, self.out = nn.Embedding(11, 8), nn.LSTM(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.words(x))[0])


def test_an_axis_that_was_learnt_is_kept_for_a_batch_of_one() -> None:
    model = TimeFirst().double()
    with autograd_hacks.add_hooks(model):
        for samples in (3, 1):
            x = torch.randint(11, (4, samples))
            model.zero_grad()
            model(x).square().sum().backward()
            autograd_hacks.compute_grad1(model, "sum")
            alone = copy.deepcopy(model)
            for n in range(samples):
                alone.zero_grad()
                alone(x[:, n : n + 1]).square().sum().backward()
                for p, q in zip(model.parameters(), alone.parameters()):
                    torch.testing.assert_close(p.grad1[n], q.grad)


def test_a_model_that_fails_says_so_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(5, 2))
    autograd_hacks.add_hooks(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.randn(3, 4))


def test_mixing_by_a_parameter_is_called_mixing() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.into(x)
            return (h - h.mean(0)) * self.scale

    model = Centred()
    with autograd_hacks.add_hooks(model):
        model(torch.randn(5, 4)).sum().backward()
        with pytest.raises(autograd_hacks.errors.SamplesMixed):
            autograd_hacks.compute_grad1(model)
