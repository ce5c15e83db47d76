"""Batches of other things than one tensor, and what models return, read off autograd's graph."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from one_graph import check, data
from oracle import squares
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import UnseenGradient

# Batches of other things than tensors


class Stored(nn.Module):
    """Is told which samples of stored data to take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(3, 4), nn.Parameter(torch.ones(4))
        self.stored = {f"{n}.png": data(3) for n in range(9)}

    def forward(self, names: Any) -> Tensor:
        return self.first(torch.stack([self.stored[name] for name in names])).tanh() * self.scale


def test_a_batch_of_file_names() -> None:
    names = iter([["1.png", "4.png", "2.png"], ["7.png", "8.png", "3.png"], ["1.png", "2.png", "5.png", "6.png"]])
    model = Stored().double()
    check(model, lambda: squares(model(next(names))))


def test_a_tensor_and_strings() -> None:
    class Captioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(9, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor, captions: list[str]) -> Tensor:
            own = torch.stack([self.words(torch.tensor([len(word) for word in c.split()])).mean(0) for c in captions])
            return self.out(x + own)

    model, x = Captioned().double(), data(3, 3)
    check(model, lambda: squares(model(x, ["a cat", "the blue whale", "dog"])))


@pytest.mark.parametrize("batch_dim", [None, (None,)])
def test_a_batch_of_indices_that_are_no_tensor(batch_dim: Any) -> None:
    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.data, self.first, self.scale = data(9, 3), nn.Linear(3, 4), nn.Parameter(torch.ones(4))

        def forward(self, rows: range) -> Tensor:
            return self.first(self.data[rows.start : rows.stop]).tanh() * self.scale

    model, rows = Indexed().double(), iter([range(3), range(3, 7), range(2, 6)])
    check(model, lambda: squares(model(next(rows))), batch_dim=batch_dim)


@pytest.mark.parametrize("lengths", [[4, 2, 3], [3, 3, 3], [2, 5]])
def test_a_list_of_tensors_a_sample_each(lengths: list[int]) -> None:
    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale = nn.Linear(3, 4), nn.Parameter(torch.ones(4))

        def forward(self, xs: list[Tensor]) -> Tensor:
            return torch.stack([(self.first(x).tanh() * self.scale).mean(0) for x in xs])

    model, xs = Each().double(), [data(n, 3) for n in lengths]
    check(model, lambda: squares(model(xs)))


# What is returned


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_std = nn.Linear(3, 2), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x), self.log_std


def test_a_parameter_that_is_returned() -> None:
    model, x, a = Policy().double(), data(4, 3), data(4, 2)

    def losses() -> Tensor:
        mean, log_std = model(x)
        return -torch.distributions.Normal(mean, log_std.exp()).log_prob(a).sum(1)

    check(model, losses, by_losses=True)
    check(model, lambda: squares(model(x)[0]))
    with autograd_hacks.add_hooks(model):
        losses().mean().backward()
        with pytest.raises(UnseenGradient, match=r"log_std.*output that depends on parameters only.*backward\(losses\)"):
            autograd_hacks.compute_grad1(model)


def test_a_distribution_of_a_parameter() -> None:
    class Stochastic(Policy):
        def forward(self, x: Tensor) -> Any:
            return torch.distributions.Normal(self.mean(x), self.log_std.exp())

    model, x, a = Stochastic().double(), data(4, 3), data(4, 2)
    check(model, lambda: -model(x).log_prob(a).sum(1), by_losses=True)


def test_a_scale_of_logits_that_is_returned() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.scale = nn.Linear(3, 4), nn.Linear(5, 4), nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.one(x), self.two(y), self.scale.exp()

    model, x, y = Towers().double(), data(4, 3), data(4, 5)

    def losses() -> Tensor:
        one, two, scale = model(x, y)
        return (scale * (one * two).sum(1)).sigmoid()

    check(model, losses, by_losses=True)


@pytest.mark.parametrize("whole", [True, False])
def test_outputs_of_chosen_positions(whole: bool) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale = nn.Linear(3, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, mask: Tensor) -> Any:
            h = self.first(x).tanh() * self.scale
            return (h[mask], h) if whole else h[mask]

    model, x = Masked().double(), data(4, 5, 3)
    masks = iter([torch.rand(4, 5) < 0.5 for _ in range(3)])

    def losses() -> Tensor:
        mask = next(masks)
        mask[:, 0] = True
        out = model(x, mask)
        chosen = out[0] if whole else out
        rows = mask.nonzero()[:, 0]
        return torch.zeros(4, dtype=x.dtype).index_add(0, rows, squares(chosen))

    check(model, losses)


class Lazily:
    """An output that is computed when it is asked for."""

    def __init__(self, h: Tensor, head: nn.Module) -> None:
        self.h, self.head = h, head

    @property
    def logits(self) -> Tensor:
        return self.head(self.h)


def test_outputs_that_are_computed_lazily() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head, self.scale = nn.Linear(3, 4), nn.Linear(4, 2), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Lazily:
            return Lazily(self.first(x).tanh() * self.scale, self.head)

    model, x = Model().double(), data(4, 3)
    check(model, lambda: squares(model(x).logits))
