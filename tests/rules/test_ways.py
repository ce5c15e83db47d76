"""Values that follow from parameters before they meet the batch, against one backward pass for each sample."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import Rows, assert_same, one_backward_per_sample, squares
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.capture import ways
from autograd_hacks.errors import StaleRecord
from autograd_hacks.forms import Chained
from autograd_hacks.formulas.views import KNOWN, STEPS, Before
from autograd_hacks.graph.laws import kind_of

AT = torch.tensor([[0, 2, -1], [1, 2, 0]])
SIZES = [{"size": 4}, {"size": 2}, {"size": 1}, {"scale_factor": 1.5}, {"scale_factor": 1.2}]


def resized(mode: str, grid: tuple[int, ...], **how: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: F.interpolate(a.reshape(2, 3, *grid), mode=mode, **how)


RESIZED = {
    f"{mode} of {grid}, {how}, {more}": resized(mode, grid, **how, **more)
    for mode, grids in {"bilinear": [(2, 2), (1, 4)], "bicubic": [(2, 2), (4, 1)], "linear": [(4,)]}.items()
    for grid in grids
    for how in SIZES
    for more in [{"align_corners": True}, {"align_corners": False}, {"antialias": True}]
    if "antialias" not in more or mode != "linear"
}

MADE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "transposed": lambda a, b: a.t().contiguous().transpose(-1, 0),
    "permuted": lambda a, b: a.view(2, 2, 6).permute(2, -3, 1).clone().unsqueeze(1).squeeze(1)[None].squeeze(),
    "aliases": lambda a, b: torch.ops.aten.alias(a.float().double()),
    "complex": lambda a, b: a.to(torch.complex128) * torch.tensor([1 + 2j]) / (1 - 1j),
    "selected": lambda a, b: torch.cat([a[-1], a[:, -2], a.unbind(1)[2]]),
    "sliced": lambda a, b: torch.cat([a[1:3], a[2:], a[::2]]),
    "columns": lambda a, b: torch.cat([a[:, 1:3], a[:, ::2], torch.ones(4, 1).double(), a[:, -3:]], -1),
    "split": lambda a, b: a.split(3)[1] + a.split([1, 3])[1][:, :1],
    "chunks": lambda a, b: (
        torch.cat(a.chunk(2, 1)[::-1], 1) + torch.cat([*a.split([3, 1])][::-1]) + a.T.split([2, 4])[1].T[:, :1]
    ),
    "joined": lambda a, b: torch.cat([a, torch.ones(2, 6).double(), b, a[:0]]),
    "stacked": lambda a, b: torch.stack([a, b, a], -1).flatten(1),
    "looked up": lambda a, b: F.embedding(AT % 4, a, 1),
    "indexed": lambda a, b: a[AT].permute(2, 0, 1).contiguous().unsqueeze(0),
    "indexed twice": lambda a, b: a[AT, AT.int() - 1] + a.index_select(0, AT[0].abs())[0, 0],
    "index of columns": lambda a, b: a.T.index_select(0, AT[0].abs()),
    "expanded": lambda a, b: a[None].expand(3, 4, 6) + torch.where(AT.view(6) > 0, a[:1].expand(4, -1), b[:, :1]),
    "repeated": lambda a, b: a.repeat(2, 1, 3),
    "added": lambda a, b: torch.add(a, b[0], alpha=2) - torch.sub(a[:, :1], b, alpha=3) + (2 - a) + torch.rsub(a[0], b),
    "multiplied": lambda a, b: (a * b[0] * 2 - a[:, 1:2]) * torch.linspace(1, 2, 6).double() * b.exp() + (-a).sigmoid(),
    "bent": lambda a, b: F.softplus(a, 2, 1) + a.clamp(-0.3, 0.4) + b.clamp(0.5, -0.5) * b.relu() - b.clamp(max=0.2).tanh(),
    "bent, by no step": lambda a, b: (
        F.gelu(a) + b.square().sqrt() - torch.addmm(b[:, 0], a, b.T).view(2, 2, 4).relu_().view(4, 4)[:, :1]
    ),
    "written to": lambda a, b: (a * 2).t().relu_().t() + b.view(24).clone().view(4, 6)[:, 1:].cumsum_(1).sum(),
    "at once": lambda a, b: (
        a.cumsum(0) + torch.matrix_exp(b[:, :4]).sum(1, keepdim=True) + (a[:4, :4].clone() / 9).inverse()[:1, :1]
    ),
    "normed": lambda a, b: torch._weight_norm(a, b[:, :1], 0) - torch._weight_norm(a, b[:1], 1) / b[0],
    "layer norm": lambda a, b: F.layer_norm(a.view(2, 2, 6), (2, 6), b[:2], b[2:]) + F.layer_norm(a[:2, None], (6,)),
    "several outputs": lambda a, b: sum(torch.linalg.qr(a[:, :4].clone())),
    "one by one": lambda a, b: a.relu() / b.exp() + 1 / a.exp()[0] * b.tanh(),
    "products": lambda a, b: a @ b.T @ torch.ones(4, 3).double() + a @ torch.ones(6, 1).double(),
    "a layer": lambda a, b: torch.addmm(b[:, 0], a, b.T, beta=2, alpha=3) + F.linear(b, a[:3], b[0, :3])[:, :1],
    "many positions": lambda a, b: F.linear(torch.linspace(-1, 1, 60).double().view(10, 6), a),
    "batches of products": lambda a, b: torch.bmm(a.view(2, 2, 6), b.view(2, 6, 2)) @ torch.ones(2, 2, 3).double(),
    **RESIZED,
}


def model_of(make: Callable[[Tensor, Tensor], Tensor]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    a, b = torch.randn(4, 6).double(), torch.randn(4, 6).double()

    def how(m: nn.Module, x: Tensor) -> Tensor:
        value: Any = make(m.a, m.b)
        return (x.view(-1, *[1] * value.ndim) * value + value).sin() * m.b[1, 2]

    return Bare(how, a=a, b=b), torch.randn(3).double()


def grads_of(model: nn.Module, x: Tensor, **options: Any) -> Any:
    with autograd_hacks.add_hooks(model, **options):
        for _ in range(2):  # the second one as the first was read
            squares(model(x)).sum().backward()
            grads = autograd_hacks.per_sample_grads(model, "sum")
    return grads


def has_derivatives(grads: Any) -> bool:
    return any(isinstance(leaf, Chained) for form in grads.values() for leaf in form.leaves())


@pytest.mark.parametrize("name", MADE)
def test_rows_are_those_of_one_backward_per_sample(name: str) -> None:
    model, x = model_of(MADE[name])
    expected = one_backward_per_sample(model, squares, x)
    for param_grad in (True, False):
        grads = grads_of(model, x, param_grad=param_grad)
        assert_same(grads.dense(), expected)
        assert not has_derivatives(grads)


def test_each_step_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a step that is kept for other forwards reads numbers only that tell these apart."""
    asked: set[str] = set()

    for name, step in STEPS.items():

        def noted(before: Before, name: str = name, step: Callable[[Before], Any] = step) -> Any:
            read = list[str]()
            found = step(before._replace(kept=lambda of: read.append(of) or before.kept(of)))
            assert name not in KNOWN or set(read) <= set(kind_of(before.kept.args[0]).numbers)  # type: ignore[attr-defined]  # a partial
            asked.add(name)
            return found

        monkeypatch.setitem(STEPS, name, noted)
    for make in MADE.values():
        grads_of(*model_of(make))
    assert asked == STEPS.keys() - {"ReshapeAliasBackward0"}  # which torch no longer makes


def products(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b.T).exp()


@pytest.mark.parametrize(
    "make", [lambda a, b: (a[:2, :1] @ b.T[:1, :2]).exp(), lambda a, b: a[0].to(torch.complex128) * (1 + 2j)]
)
def test_large_rows_are_written_when_they_are_read(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values here are smaller than the parameters."""
    monkeypatch.setattr(ways, "AT_ONCE", 0)
    model, x = model_of(make)
    grads = grads_of(model, x)
    assert has_derivatives(grads)
    expected = one_backward_per_sample(model, squares, x)
    assert_same(grads.dense(), expected)
    for w in (torch.ones(3), torch.tensor([0.0, 2, 0])):
        summed = {name: torch.einsum("n,n...", w.double(), rows) for name, rows in expected.items() if rows is not None}
        assert_same(grads.weighted_sum(w.double()), summed)


def test_numbers_are_no_tensors_where_a_check_watches_operations() -> None:
    model, x = model_of(MADE["multiplied"])
    with autograd_hacks.add_hooks(model):
        squares(model(x)).sum().backward()
        autograd_hacks.verify(model)


@pytest.mark.parametrize("of", ["a", "b"])
def test_what_a_way_reads_must_stay(of: str) -> None:
    model, x = model_of(products)
    with autograd_hacks.add_hooks(model):
        squares(model(x)).sum().backward()
        with torch.no_grad():
            getattr(model, of).add_(1)
        with pytest.raises(StaleRecord, match="changed in place after the forward"):
            autograd_hacks.compute_grad1(model)


def test_rows_can_be_differentiated() -> None:
    model, x = model_of(products)

    def penalty(grads: Any) -> Rows:
        total = sum(rows.square().sum() for rows in grads)
        return dict(zip("ab", torch.autograd.grad(total, [model.a, model.b])))

    single = [torch.autograd.grad(loss, [model.a, model.b], create_graph=True) for loss in squares(model(x))]
    expected = penalty([rows for own in single for rows in own])
    with autograd_hacks.add_hooks(model):
        with warnings.catch_warnings(action="ignore"):  # that .grad has a graph
            squares(model(x)).sum().backward(create_graph=True)
        assert_same(penalty(autograd_hacks.per_sample_grads(model, "sum").dense().values()), expected)


def test_half_precision_on_the_way() -> None:
    model, x = model_of(lambda a, b: F.linear(a, b).exp())
    model, x = model.float(), x.float()
    expected = one_backward_per_sample(model, squares, x)
    with torch.autocast("cpu", torch.bfloat16):
        grads = grads_of(model, x)
    for name, rows in grads.dense().items():
        torch.testing.assert_close(rows, expected[name], rtol=0.1, atol=0.1 * float(expected[name].abs().max()))


KEEPS = {
    "relu": Tensor.relu,
    "clamp": lambda w: w.clamp(-0.5, 0.5),
    "tril": Tensor.tril,
    "times": lambda w: w * torch.eye(3),
}


@pytest.mark.parametrize("how", KEEPS)
def test_entries_that_a_way_leaves_out_are_zero_where_the_gradient_is_not_a_number(how: str) -> None:
    model = Bare(lambda m, x: x @ KEEPS[how](m.w), w=torch.randn(3, 3))
    with autograd_hacks.add_hooks(model):
        (model(torch.randn(4, 3)).sum(1) * torch.nan).sum().backward()
        autograd_hacks.compute_grad1(model, "sum")
        assert_close(model.w.grad1.sum(0), model.w.grad, equal_nan=True)
