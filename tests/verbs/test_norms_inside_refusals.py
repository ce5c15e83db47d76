"""What norms from inside a graph refuse, and where they are right though it is hard."""

import copy
import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import one_backward_per_sample
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import (
    BatchSizeError,
    NothingRecorded,
    PerSampleGradientError,
    SamplesMixed,
    UnseenGradient,
    UnsupportedLayer,
)


def norms_of(model: nn.Module, x: Tensor) -> Tensor:
    """By one backward pass for each sample, of the outputs' sum."""
    rows = one_backward_per_sample(model, lambda out: out.flatten(1).sum(1), x)
    return torch.stack([r.flatten(1).norm(dim=1) for r in rows.values() if r is not None]).norm(dim=0)


def found(inside: autograd_hacks.NormsInside, model: nn.Module, x: Tensor) -> Tensor:
    with inside.batch(len(x)):
        model(x).sum().backward()
    return inside.norms("sum")


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.twice = True

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).tanh()) if self.twice else self.inner(x)


class Tied(nn.Module):
    def __init__(self, by_function: bool, gate: float = 1.0) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.gate, self.by_function = gate, by_function
        if by_function:
            self.head.requires_grad_(False)
        else:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.table(x)
        return self.head(y) + (self.gate * F.linear(y, self.table.weight) if self.by_function else 0)


class Bare(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Extra(nn.Linear):
    """A Linear with a parameter that a hook of its own uses."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_forward_hook(lambda layer, args, out: out * layer.scale)


class Reshaped(nn.Module):
    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "fold":
            return self.inner(x.flatten(0, 1)).view(*x.shape[:2], -1)
        if self.how == "transpose":
            return self.inner(x.transpose(0, 1)).transpose(0, 1)
        return self.inner(x) - self.inner(x).mean(0) if self.how == "mix" else self.inner(x)


@pytest.mark.parametrize(
    ("model", "x", "error", "words"),
    [
        (Twice(), torch.randn(4, 3), UnsupportedLayer, "2 times through layer 'inner'"),
        (Tied(False), torch.arange(4)[:, None], UnsupportedLayer, "one parameter"),
        (Tied(True), torch.arange(4)[:, None], UnsupportedLayer, "table.weight: read past"),
        (Tied(True, 0.0), torch.arange(4)[:, None], UnsupportedLayer, "table.weight: read past"),
        (nn.Sequential(Bare(3, 2)), torch.randn(4, 3), UnsupportedLayer, r"0\.weight is of layer '0' \(Bare\)"),
        (nn.Sequential(Extra()), torch.randn(4, 3), UnsupportedLayer, r"0\.scale is of layer '0' \(Extra\)"),
        (nn.LSTM(3, 2), torch.randn(4, 2, 3), UnsupportedLayer, "weight_ih_l0 is of the model itself"),
        (nn.Sequential(nn.InstanceNorm1d(3, affine=True)), torch.randn(4, 3, 5), UnsupportedLayer, "InstanceNorm1d"),
        (Reshaped(nn.Linear(3, 2), "fold"), torch.randn(4, 2, 3), BatchSizeError, r"\(8, 3\).*4 samples.*axis 0"),
        (Reshaped(nn.Linear(3, 2), "transpose"), torch.randn(4, 2, 3), BatchSizeError, r"\(2, 4, 3\).*4 samples"),
        (Reshaped(nn.Linear(3, 2), "transpose"), torch.randn(4, 4, 3), PerSampleGradientError, "norms from inside"),
        (Reshaped(nn.Linear(3, 2), "mix"), torch.randn(4, 2, 3), SamplesMixed, "mix"),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(4, 3), SamplesMixed, "BatchNorm1d"),
    ],
)
def test_what_is_refused(model: nn.Module, x: Tensor, error: type[Exception], words: str) -> None:
    before = {name: (type(m), sorted(vars(m))) for name, m in model.named_modules()}
    with pytest.raises(error, match=words):
        autograd_hacks.norms_inside(model, (x,))
    assert {name: (type(m), sorted(vars(m))) for name, m in model.named_modules()} == before
    assert all(p.grad is None for p in model.parameters())


def test_what_changes_later_is_refused() -> None:
    model, x = Twice(), torch.randn(4, 3)
    model.twice = False
    inside = autograd_hacks.norms_inside(model, (x,))
    assert_close(found(inside, model, x), norms_of(model, x))
    model.twice = True
    with pytest.raises(UnsupportedLayer, match="2 times through layer 'inner'"):
        found(inside, model, x)
    model.twice = False
    with inside.batch(4):
        for _ in range(2):
            model(x).sum().backward()
    with pytest.raises(UnsupportedLayer, match="one backward"):
        inside.norms()
    with inside.batch(4):
        pass
    with pytest.raises(NothingRecorded, match="batch"):
        inside.norms()
    with pytest.raises(BatchSizeError, match="layer 'inner'"), inside.batch(5):
        model(x)
    with pytest.raises(ValueError, match="samples"), inside.batch(0):
        pass
    model.inner = nn.Linear(3, 3)
    with pytest.raises(UnsupportedLayer, match=r"inner\.weight"), inside.batch(4):
        pass


def test_a_parameter_that_comes_to_be_read_past_its_layer() -> None:
    model, x = Tied(True), torch.arange(4)[:, None]
    model.by_function = False
    inside = autograd_hacks.norms_inside(model, (x,))
    model(x).sum().backward()
    assert_close(found(inside, model, x), norms_of(model, x))
    model.by_function = True
    for _ in range(2):
        with pytest.raises(UnseenGradient, match=r"table\.weight past the layer"):
            found(inside, model, x)
        model.zero_grad()


def test_a_batch_norm_that_begins_to_train() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(), torch.randn(4, 3)
    inside = autograd_hacks.norms_inside(model, (x,))
    assert_close(found(inside, model, x), norms_of(model, x))
    model.train()
    with pytest.raises(SamplesMixed, match=r"layer '1' \(BatchNorm1d\)"):
        found(inside, model, x)


def test_hooks_and_norms_inside_of_one_model() -> None:
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3)
    with autograd_hacks.add_hooks(model), pytest.raises(ValueError, match="remove_hooks"):
        autograd_hacks.norms_inside(model, (x,))
    inside = autograd_hacks.norms_inside(model, (x,))
    with pytest.raises(ValueError, match=r"remove\(\)"):
        autograd_hacks.norms_inside(model, (x,))
    with autograd_hacks.add_hooks(model):
        model(x).sum().backward()
        assert_close(autograd_hacks.per_sample_grads(model, "sum").norms(), norms_of(model, x))
    twin = copy.deepcopy(model)
    assert_close(twin(x), model(x))
    inside.remove()
    assert type(model[0]) is nn.Linear


def test_positions_that_cancel() -> None:
    """In float32 the products between positions have no digits left then, and rows are written out."""
    model, half = nn.Sequential(nn.Linear(64, 64)), torch.randn(4, 3, 64)
    x = torch.stack([half, -half * (1 + 1e-4)], 2).flatten(1, 2)
    inside = autograd_hacks.norms_inside(model, (torch.randn(4, 6, 64),))
    model[0].bias.requires_grad_(False)
    exact = copy.deepcopy(model).double()
    inside_exact = norms_of(exact, x.double())
    assert_close(found(inside, model, x).double(), inside_exact, rtol=1e-3, atol=0)


def test_what_trains_may_change() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2)), torch.randn(4, 5, 3)
    inside = autograd_hacks.norms_inside(model, (x,))
    for frozen in (model[0].weight, model[1].bias, model[2].bias):
        frozen.requires_grad_(False)
        assert_close(found(inside, model, x), norms_of(model, x))
    with torch.no_grad(), inside.batch(4):
        assert not model(x).requires_grad


def test_lower_precision_and_scaled_losses() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)), torch.randn(4, 5, 16)
    inside = autograd_hacks.norms_inside(model, (x,))
    expected = norms_of(model, x)
    with inside.batch(4), torch.autocast("cpu", torch.bfloat16):
        (1024 * model(x).flatten(1).sum(1).mean()).backward()
    assert_close(inside.norms(scale=1024), expected, rtol=3e-2, atol=0)
    assert inside.norms().dtype == torch.float32


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.places, self.head = nn.Embedding(7, 4), nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head((self.table(tokens) + self.places(torch.arange(5).expand(tokens.shape))).tanh())


@pytest.mark.parametrize("n", [4, 5])
def test_a_table_of_positions(n: int) -> None:
    model, x = Placed(), torch.randint(7, (n, 5))
    inside = autograd_hacks.norms_inside(model, (x,))
    assert_close(found(inside, model, x), norms_of(model, x))


def test_norms_of_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    assert transformers
    model, x = nn.Sequential(Conv1D(4, 3), nn.Tanh(), Conv1D(2, 4)), torch.randn(4, 5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside = autograd_hacks.norms_inside(model, (x,))
    assert_close(found(inside, model, x), norms_of(model, x))


def test_only_a_batch_that_ended_has_norms() -> None:
    """Not the one that was compared with the hooks' norms, nor one that was broken off."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.randn(4, 3)
    inside = autograd_hacks.norms_inside(model, (x,))
    with pytest.raises(NothingRecorded, match=r"Run `with inside\.batch"):
        inside.norms()
    expected = found(inside, model, x)

    def broken_off() -> None:
        with inside.batch(len(x)):
            model(x).sum().backward()
            raise KeyError

    with pytest.raises(KeyError):
        broken_off()
    with pytest.raises(NothingRecorded, match=r"Run `with inside\.batch"):
        inside.norms()
    assert_close(found(inside, model, x), expected)
