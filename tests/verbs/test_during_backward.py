"""Rows written while a backward pass runs."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import MODELS, with_spare
from oracle import assert_rows, joined, one_loss_at_a_time, squares
from rarely import crossed
from refused import check_each
from steps import alive, assert_means, at_most, rows_joined, rows_of
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.capture.calls import LayerCall
from autograd_hacks.errors import BatchSizeError, HigherOrderError, NothingRecorded, SamplesMixed, UnseenGradient


@pytest.mark.filterwarnings("ignore:None of the inputs")
@crossed(name=MODELS, loss_type=["mean", "sum"], param_grad=[True, False])
def test_rows_are_those_of_each_loss(name: str, loss_type: str, param_grad: bool) -> None:
    build, batch = MODELS[name]
    model = build().double()
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    asked = {"dot": v, "project": 5, "seed": 2, "loss_type": loss_type}
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(4):
            x = batch()
            with autograd_hacks.pause_hooks():
                expected = one_loss_at_a_time(model, lambda x=x: squares(model(x)))
            model.zero_grad()
            getattr(squares(model(x)), loss_type)().backward()
            kept = [p.grad for p in model.parameters()]
            projection = autograd_hacks.per_sample_grads(model, loss_type).project(5, 2)
            model.zero_grad()
            with autograd_hacks.during_backward(model, "grad1", "norms", "gram", **asked) as found:
                getattr(squares(model(x)), loss_type)().backward()
            assert_rows(model, expected)
            flat = joined(expected)
            along = sum(own.flatten(1) @ v[n].flatten() for n, own in expected.items() if own is not None)
            assert_close((found.norms, found.gram, found.dot), (flat.norm(dim=1), flat @ flat.T, along))
            assert_close(found.projection, projection)
            assert_close([p.grad for p in model.parameters()], kept)
            with pytest.raises(NothingRecorded, match="read during the backward pass"):
                autograd_hacks.compute_grad1(model)


def test_parameters_that_no_loss_reaches_have_none_and_frozen_ones_nothing() -> None:
    model = with_spare(nn.Linear(4, 3), nn.Linear(3, 3))
    with autograd_hacks.add_hooks(model):
        with autograd_hacks.during_backward(model, "grad1"):
            squares(model(torch.randn(5, 4))).mean().backward()
        assert model.used.weight.grad1.shape == (5, 3, 4)
        assert not hasattr(model.frozen.weight, "grad1")
        assert model.spare.weight.grad1 is None


def mixing() -> nn.Module:
    """Two layers, and the mean of the batch taken away between them if ``mixes`` is set."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.last(h - h.mean(0) if m.mixes else h)

    return Bare(forward, first=nn.Linear(4, 4), last=nn.Linear(4, 3), mixes=False)


def test_a_pass_that_fails_leaves_no_rows() -> None:
    model, x = mixing(), torch.randn(5, 4)
    with autograd_hacks.add_hooks(model):
        with autograd_hacks.during_backward(model, "grad1"):
            squares(model(x)).mean().backward()
        assert model.last.weight.grad1 is not None
        model.mixes = True
        said = pytest.raises(SamplesMixed, match=r"reaches other samples at .*backward\(losses\)")
        with said, autograd_hacks.during_backward(model, "grad1"):
            squares(model(x)).mean().backward()
        assert not any(hasattr(p, "grad1") for p in model.parameters())


def test_records_are_freed_as_the_pass_goes_on() -> None:
    layers, others = 20, alive(LayerCall)
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(layers))), torch.randn(256, 256)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(2):
            squares(model(x)).sum().backward()
        one = 256 * 256 * 4
        loss = squares(model(x)).sum()
        with at_most(6 * one), autograd_hacks.during_backward(model, "norms", loss_type="sum", max_bytes=one):
            loss.backward()
            assert alive(LayerCall) <= others  # nor are the layers' inputs kept
        loss = squares(model(x)).sum()
        with pytest.raises(AssertionError, match="held"), at_most(layers * one // 2):
            loss.backward()


def test_what_it_refuses() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(6, 4)

    def during(passes: int, *what: str, create_graph: bool = False, penalty: float = 0.0, **options: Any) -> Any:
        with autograd_hacks.during_backward(model, "norms", **options) as streamed:
            for _ in range(passes):
                (squares(model(x)).sum() + penalty * model[0].weight.square().sum()).backward(create_graph=create_graph)
        return [getattr(streamed, name) for name in what]

    def within_accumulate() -> None:
        with autograd_hacks.accumulate(model):
            during(0)

    check_each((NothingRecorded, "", lambda: during(0)))
    with autograd_hacks.add_hooks(model):
        check_each(
            (ValueError, r"without '0\.weight'", lambda: during(0, dot={})),
            (ValueError, "project=0", lambda: during(0, project=0)),
            (RuntimeError, r"leave accumulate\(model\) first", within_accumulate),
            (NothingRecorded, "", lambda: during(0)),
            (NothingRecorded, "no .gram", lambda: during(1, "gram")),
            (RuntimeError, "second backward", lambda: during(2)),
            (HigherOrderError, "", lambda: during(1, create_graph=True)),
            (UnseenGradient, "", lambda: during(1, penalty=1.0)),
        )
        with pytest.raises(NothingRecorded), autograd_hacks.during_backward(model, "norms") as streamed:
            pass
        check_each((NothingRecorded, "no .norms", lambda: streamed.norms))
        model.zero_grad()
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert_means(model)


def test_batches_that_disagree() -> None:
    model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
    with autograd_hacks.add_hooks(model), pytest.raises(BatchSizeError), autograd_hacks.during_backward(model, "norms"):
        (model[0](torch.randn(5, 4)).sum() + model[1](torch.randn(3, 4)).sum()).backward()
    with autograd_hacks.add_hooks(model), pytest.raises(BatchSizeError), autograd_hacks.during_backward(model, "norms"):
        autograd_hacks.backward(squares(model[0](torch.randn(6, 4))).view(2, 3).sum(0))  # two views of each sample


def test_reading_inside() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(6, 4)
    with autograd_hacks.add_hooks(model), autograd_hacks.during_backward(model, "norms"):
        squares(model(x)).sum().backward()
        for read in (autograd_hacks.compute_grad1, autograd_hacks.per_sample_grads):
            with pytest.raises(NothingRecorded, match="Read after that context"):
                read(model)
        with pytest.raises(RuntimeError, match="already open"), autograd_hacks.during_backward(model, "norms"):
            pass


# Directions that are made of the pass's own samples, and sums of rows in ``.grad``, while a backward pass runs


@pytest.mark.filterwarnings("ignore:None of the inputs")
@crossed(name=MODELS, param_grad=[True, False])
def test_sums_and_inner_products_with_a_direction_that_is_given_or_made_of_held_out_samples(
    name: str, param_grad: bool
) -> None:
    """Of the same pass.  Sums and inner products come from one call of each form."""
    build, batch = MODELS[name]
    model, x = build().double(), batch()
    is_held, v = torch.arange(len(x)) >= len(x) - 2, {n: torch.randn_like(p) for n, p in model.named_parameters()}
    h, w, flat = is_held.double() / 2, (~is_held).double() * torch.rand(len(x)).double(), rows_joined(model, x)
    along = {
        "of samples": flat @ (h @ flat),
        "given": sum(own.flatten(1) @ v[n].flatten() for n, own in rows_of(model, x).items()),
    }
    expected = {n: torch.tensordot(w, own, 1) for n, own in rows_of(model, x).items()}
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for loss_type, direction in product(("mean", "sum"), along):
            given = {"dot": h if direction == "of samples" else v, "weights": w, "loss_type": loss_type}
            model.zero_grad()
            with autograd_hacks.during_backward(model, *["norms"] * (direction == "of samples"), **given) as found:
                getattr(squares(model(x)), loss_type)().backward()
            assert_close(found.dot, along[direction])
            assert_close({n: model.get_parameter(n).grad for n in expected}, expected)
            if direction == "of samples":
                assert_close(found.norms, flat.norm(dim=1))


@pytest.mark.parametrize(("positions", "width"), [(1, 40), (1, 2), (3, 60), (3, 2)])
def test_both_ways_to_a_direction_are_the_same(positions: int, width: int) -> None:
    """By products with the samples, and by the direction, whichever is cheaper."""
    torch.manual_seed(0)
    model, x = nn.Linear(width, width).double(), torch.randn(6, positions, width).double()
    flat = rows_joined(model, x)
    h = torch.tensor([0, 0, 0.5, 0, 0, -2]).double()
    with autograd_hacks.add_hooks(model), autograd_hacks.during_backward(model, dot=h, loss_type="sum") as found:
        squares(model(x)).sum().backward()
    assert_close(found.dot, flat @ (h @ flat))
