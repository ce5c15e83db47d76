"""Corrected eigenvalues against the formula, on rows of plain backward passes."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn as nn
from curvature_nets import curve
from parts_of_models import expected_block, rows_of
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.attribution import Metric
from autograd_hacks.forms import Dense

pytestmark = pytest.mark.usefixtures("double")


def dense_net() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(9, 3)


def conv_net() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(nn.Conv2d(1, 2, 2, stride=2), nn.Tanh(), nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 3))
    return net, torch.randn(9, 1, 4, 4)


NETS = {"dense": dense_net, "convolutions": conv_net}


def written(p: nn.Parameter) -> Tensor:
    """The block that ``param.ekfac`` multiplies by, P P."""
    unit = torch.eye(p.numel()).view(-1, *p.shape)
    return p.ekfac.matvec(unit).flatten(1)


@pytest.fixture(params=list(NETS))
def case(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, Tensor]]:
    model, x = NETS[request.param]()
    with autograd_hacks.add_hooks(model):
        yield model, x


def test_blocks_equal_the_formula(case: tuple[nn.Module, Tensor]) -> None:
    model, x = case
    curve(model, model(x), "Jacobian", kind="ekfac")
    with autograd_hacks.pause_hooks():
        rows = rows_of(model, x)
    for name, p in model.named_parameters():
        expected = expected_block(rows[name], p.kfac, False, len(x))
        assert_close(written(p), expected, msg=lambda told, name=name: f"{name}: {told}")


def test_a_loader_gives_what_its_batches_together_do(case: tuple[nn.Module, Tensor]) -> None:
    model, x = case
    curve(model, model(x), kind="ekfac")
    once = [written(p) for p in model.parameters()]
    autograd_hacks.curvature.compute_hess_over(model, x.split(4), kind="ekfac")
    for p, expected in zip(model.parameters(), once):
        assert_close(written(p), expected)
    with autograd_hacks.accumulate(model):
        for part in x.split(4):
            autograd_hacks.backprop_hess(model(part))
    autograd_hacks.compute_hess(model, kind="ekfac")
    for p, expected in zip(model.parameters(), once):
        assert_close(written(p), expected)
    with pytest.raises(ValueError, match="runs all batches twice"):
        autograd_hacks.curvature.compute_hess_over(model, iter(x.split(4)), kind="ekfac")


@pytest.mark.parametrize("damping", [None, 0.3])
def test_solving(case: tuple[nn.Module, Tensor], damping: float | None) -> None:
    model, x = case
    autograd_hacks.curvature.compute_hess_over(model, [x], kind="ekfac")
    model(x).square().sum(1).mean().backward()
    grads = autograd_hacks.per_sample_grads(model)
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    metric = Metric.from_ekfac(model, damping)
    solved, rows = metric(v), grads.preconditioned(metric)
    products = torch.zeros(len(x), len(x))
    for name, p in model.named_parameters():
        block = written(p)
        block += torch.eye(p.numel()) * (0.1 * block.trace() / p.numel() if damping is None else damping)
        assert_close(solved[name].flatten(), torch.linalg.solve(block, v[name].flatten()))
        own = grads[name].dense().flatten(1)
        assert_close(rows[name].dense().flatten(1), torch.linalg.solve(block, own.T).T)
        products += own @ torch.linalg.solve(block, own.T)
    assert_close(grads.gram(rows), products)
    assert not any(isinstance(form, Dense) for form in rows.values())


# Curvature layer by layer: the numbers are those of all at once, which
# other tests hold to one backward pass for each output


def deep() -> tuple[nn.Sequential, Tensor]:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(6, 3)
    autograd_hacks.add_hooks(model)
    return model, x


def found(model: nn.Module, kind: str) -> dict[str, list[Tensor]]:
    attribute = {"full": "hess", "diag": "hess_diag"}.get(kind, kind)
    held = {name: getattr(p, attribute) for name, p in model.named_parameters()}
    if kind == "ekfac":
        return {name: [own.matvec(torch.eye(own.values.numel()).view(-1, *own.values.shape))] for name, own in held.items()}
    return {name: [x.clone() for x in own] if kind == "kfac" else [own.clone()] for name, own in held.items()}


@pytest.mark.parametrize("kind", ["full", "diag", "kfac", "ekfac"])
def test_layer_by_layer_is_all_at_once(kind: str) -> None:
    model, x = deep()
    autograd_hacks.curvature.compute_hess_over(model, [x[:2], x[2:]], kind)
    attribute, expected = {"full": "hess", "diag": "hess_diag"}.get(kind, kind), found(model, kind)
    for over in (True, False):
        if not over:
            autograd_hacks.backprop_hess(model(x))
        kept = dict[nn.Parameter, object]()
        for k in (0, 2, 4):
            settings = {"parameters": f"{k}.*"}
            if over:
                table = autograd_hacks.curvature.compute_hess_over(model, [x[:2], x[2:]], kind, **settings)
            else:
                table = autograd_hacks.compute_hess(model, kind, **settings)
            assert table.covered == [f"{k}.weight", f"{k}.bias"]
            assert [name for name, p in model.named_parameters() if getattr(p, attribute, None) is not None] == table.covered
            kept |= {p: getattr(p, attribute) for p in model[k].parameters()}
        for p, own in kept.items():
            setattr(p, attribute, own)
        assert_close(found(model, kind), expected)
