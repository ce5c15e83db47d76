"""Parameters that no rule covers: rows are those of one backward per sample."""

import pytest
import torch
import torch.nn as nn
from nets import Choosy, Noisy, Patched
from oracle import assert_rows, one_backward_per_sample, one_loss_at_a_time, squares
from steps import check
from torch import Tensor

import autograd_hacks


def check_twice(model: nn.Module, x: Tensor) -> None:
    """Two right steps."""
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            check(model, x)
        if len(x) > 1:
            autograd_hacks.verify(model, samples=2)


def test_bare_parameters_and_a_tied_decoder() -> None:
    check_twice(Patched().double(), torch.randint(7, (4, 3)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> dict[str, Tensor]:
        return {"scaled": x * self.scale, "shifted": x if shift is None else x + shift * self.scale}


class Inside(nn.Module):
    """Tuple and dict outputs, arguments by keyword, and a module that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 3), Scaled()

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(self.first(x), shift=torch.arange(3.0, dtype=x.dtype))
        return self.inner(h["scaled"].tanh())["scaled"] + h["shifted"]


def test_dictionaries_keywords_and_two_calls() -> None:
    check_twice(Inside().double(), torch.randn(4, 3).double())


def test_the_same_dropout_mask() -> None:
    model, x = nn.Sequential(Noisy(), nn.Linear(3, 2), Noisy2()).double(), torch.randn(5, 3).double()
    with autograd_hacks.add_hooks(model):
        for seed in range(3):
            torch.manual_seed(seed)
            squares(model(x)).mean().backward()
            drawn = torch.get_rng_state()
            autograd_hacks.compute_grad1(model)
            assert torch.equal(torch.get_rng_state(), drawn)
            torch.manual_seed(seed)
            with autograd_hacks.pause_hooks():
                assert_rows(model, one_loss_at_a_time(model, lambda: squares(model(x))))


class Noisy2(nn.Module):
    """A rate that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rate * torch.randn_like(x)


class Experts(nn.Module):
    """Each row to the expert that it chooses: rows are gathered, and put back."""

    def __init__(self, layers: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 2)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]) if layers else None
        self.weights = None if layers else nn.Parameter(torch.randn(2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 3)
        scores = self.gate(rows).softmax(1)
        best, out = scores.argmax(1), torch.zeros_like(rows)
        for expert in range(2):
            at = (best == expert).nonzero()[:, 0]
            y = rows[at] @ self.weights[expert] if self.layers is None else self.layers[expert](rows[at])
            out = out.index_add(0, at, y * scores[at, expert, None])
        return out.view_as(x)


@pytest.mark.parametrize("positions", [(), (3,), (4, 2)])
@pytest.mark.parametrize("layers", [True, False])
def test_routed_experts(layers: bool, positions: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Experts(layers), nn.Linear(3, 2)).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(3):  # a new route each time
            x = torch.randn(4, *positions, 3).double()
            check(model, x)


def test_control_flow_on_values() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Choosy()).double()
    check_twice(model, torch.randn(5, 3).double())


class InPlace(nn.Module):
    """Overwrites its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.scale).tanh()


def test_a_module_that_overwrites_its_input() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = InPlace()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.sin())

    check_twice(Model().double(), torch.randn(4, 3).double())


def test_a_batch_of_one_and_of_none() -> None:
    model = Patched().double()
    check_twice(model, torch.randint(7, (1, 3)))
    with autograd_hacks.add_hooks(model):
        squares(model(torch.randint(7, (4, 3)))).mean().backward()
        autograd_hacks.compute_grad1(model)
        for samples in (1, 0, 3):
            tokens = torch.randint(7, (samples, 3))
            check(model, tokens, "sum")


def test_weights_that_were_moved_before_reading() -> None:
    """What a node kept is taken as the gradient comes by."""
    model, x = nn.Sequential(nn.Linear(3, 3), Choosy()).double(), torch.randn(5, 3).double()
    expected = one_backward_per_sample(model, squares, x)
    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        autograd_hacks.compute_grad1(model)
        assert_rows(model, expected)


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_a_generator_of_the_modules_own(strength: float) -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.strength = nn.Linear(3, 3), nn.Parameter(torch.tensor(strength))
            self.draws = torch.Generator().manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return h + self.strength * torch.rand(h.shape, generator=self.draws, dtype=h.dtype)

    model, x = Noise().double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            model.zero_grad()
            state = model.draws.get_state()
            squares(model(x)).mean().backward()
            after = model.draws.get_state()
            autograd_hacks.compute_grad1(model)
            assert torch.equal(model.draws.get_state(), after)
            with autograd_hacks.pause_hooks():
                model.draws.set_state(state)
                (row,) = torch.autograd.grad(squares(model(x))[1], model.strength)
            torch.testing.assert_close(model.strength.grad1[1], row)
