"""What Hessian passes leave alone, and how long their record lives."""

import pytest
import torch
import torch.nn as nn
from curvature_nets import curve, network
from nets import with_spare
from oracle import joined, vector
from refused import check_each
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import NothingRecorded

NEW = "run the model again"


@pytest.mark.parametrize("param_grad", [True, False])
def test_gradients_stay_as_they_are(param_grad: bool) -> None:
    model, x = network(param_grad)
    x.requires_grad_(True)
    kept, heard = torch.ones(4, 3), []
    model[0].weight.grad = kept
    model[2].weight.register_post_accumulate_grad_hook(heard.append)
    output = model(x)
    autograd_hacks.backprop_hess(output)
    assert model[0].weight.grad is kept
    assert torch.equal(kept, torch.ones(4, 3))
    assert model[0].bias.grad is None
    assert x.grad is None
    assert not heard
    output.sum().backward()  # the graph is still there
    assert x.grad is not None


def test_a_second_one_without_reading_or_clearing() -> None:
    model, x = network()
    output = model(x)
    autograd_hacks.backprop_hess(output)
    for again in (output, model(x)):
        with pytest.raises(NothingRecorded, match=NEW):
            autograd_hacks.backprop_hess(again)
    autograd_hacks.compute_hess(model)  # what the first has left
    with pytest.raises(NothingRecorded, match=NEW):
        autograd_hacks.backprop_hess(output)
    autograd_hacks.clear_backprops(model)
    curve(model, output)


@pytest.mark.parametrize("hess_first", [True, False])
def test_mixed_with_an_ordinary_backward_pass(hess_first: bool) -> None:
    model, x = network()
    output = model(x)
    if not hess_first:
        output.sum().backward(retain_graph=True)
    autograd_hacks.backprop_hess(output)
    if hess_first:
        output.sum().backward(retain_graph=True)
    for read in (autograd_hacks.compute_hess, autograd_hacks.compute_grad1, autograd_hacks.per_sample_grads):
        with pytest.raises(NothingRecorded, match=r"between them|different kinds"):
            read(model)
    autograd_hacks.clear_backprops(model)
    curve(model, output)


def test_rows_of_passes_are_no_gradients() -> None:
    model, x = network()
    autograd_hacks.backprop_hess(model(x))
    check_each(
        (NothingRecorded, "no grad1", lambda: autograd_hacks.compute_grad1(model)),
        (NothingRecorded, "no gradient to clip", lambda: autograd_hacks.clip_grad1_norm_(model, 1.0)),
        (ValueError, "loss_type", lambda: autograd_hacks.per_sample_grads(model, loss_type="mean")),
    )
    with pytest.raises(RuntimeError, match="during_backward"), autograd_hacks.during_backward(model, "norms"):
        autograd_hacks.backprop_hess(model(x))
    autograd_hacks.backprop_hess(model(x))
    autograd_hacks.verify(model)
    autograd_hacks.describe(model)


def test_parameters_that_are_frozen_or_not_reached() -> None:
    model = with_spare(nn.Linear(3, 2), nn.Linear(2, 2))
    autograd_hacks.add_hooks(model)
    curve(model, model(torch.randn(4, 3)))
    assert model.used.weight.hess.shape == (2, 3, 2, 3)
    assert not hasattr(model.frozen.weight, "hess")
    assert model.spare.weight.hess is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, x = network()
    found = []
    for own in (dtype, torch.float32):
        curve(model.to(own), model(x.to(own)))
        autograd_hacks.compute_hess(model, kind="kfac")
        found.append([x for p in model.parameters() for x in (p.hess, *p.kfac)])
    for own, expected in zip(*found):
        assert own.dtype == torch.float32
        assert_close(own, expected, rtol=0.05, atol=0.02 * float(expected.abs().max()))


def test_half_precision_solves_in_single() -> None:
    """What is left of v after the rows' share was taken out is small, and would have no digits in half."""
    model, x = network()
    model.bfloat16()
    autograd_hacks.backprop_hess(model(x.bfloat16()))
    grads = autograd_hacks.per_sample_grads(model)
    rows = joined(grads.dense()).double()
    sizes = [form.shape.numel() for form in grads.values()]
    v = {n: x.view(grads[n].shape) for n, x in zip(grads, rows.mean(0).bfloat16().split(sizes))}
    flat = vector(v).double()
    expected = torch.linalg.solve(rows.mT @ rows / 5 + 1e-3 * torch.eye(rows.shape[1]), flat)
    found = vector(autograd_hacks.curvature.natural_gradient(grads, v, 1e-3))
    assert found.dtype == torch.bfloat16
    assert_close(found.double(), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("draws", [None, 2])
def test_batches_of_none(draws: int | None) -> None:
    model, _ = network()
    autograd_hacks.backprop_hess(model(torch.randn(0, 3)), draws=draws)
    autograd_hacks.compute_hess(model)
    assert not model[0].weight.hess.any()


def test_autocast() -> None:
    model, x = network()
    curve(model, model(x))
    expected = [p.hess for p in model.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    curve(model, output)
    for p, own in zip(model.parameters(), expected):
        assert_close(p.hess, own, rtol=0.05, atol=0.02 * float(own.abs().max()))


@pytest.mark.parametrize("kind", ["full", "diag", "kfac"])
def test_batches_that_do_not_reach_a_parameter_count(kind: str) -> None:
    """In the mean over a loader, and over micro-batches, they have no share in its curvature but their samples count."""

    torch.manual_seed(0)
    model = Bare(lambda m, x: m.one(x) if len(x) == 4 else m.other(x), one=nn.Linear(3, 2), other=nn.Linear(3, 2))
    x, rest = torch.randn(4, 3), torch.randn(2, 3)
    autograd_hacks.add_hooks(model)
    attribute, found = {"full": "hess", "diag": "hess_diag", "kfac": "kfac"}[kind], []
    for batches in ([x], [x, rest], [rest, x]):
        autograd_hacks.curvature.compute_hess_over(model, batches, kind)
        found.append(getattr(model.one.weight, attribute))
        assert (getattr(model.other.weight, attribute) is None) == (len(batches) == 1)
    with autograd_hacks.accumulate(model):
        autograd_hacks.backprop_hess(model(rest))
        autograd_hacks.backprop_hess(model(x))
    autograd_hacks.compute_hess(model, kind)
    alone, *others = *found, getattr(model.one.weight, attribute)
    for own in others:
        if kind == "kfac":
            assert_close(tuple(own), (alone[0], alone[1] * 4 / 6))
        else:
            assert_close(own, alone * 4 / 6)


def test_a_record_that_can_not_be_read_does_not_block_the_next() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    autograd_hacks.add_hooks(model)
    autograd_hacks.backprop_hess(model(torch.randn(5, 3)))
    with pytest.raises(autograd_hacks.errors.SamplesMixed):
        autograd_hacks.compute_hess(model)
    model.eval()
    curve(model, model(torch.randn(5, 3)))


def test_a_failed_reading_leaves_no_earlier_curvature() -> None:
    model, x = network()
    curve(model, model(x))
    autograd_hacks.clear_backprops(model)
    with pytest.raises(NothingRecorded):
        autograd_hacks.compute_hess(model)
    assert not any(hasattr(p, "hess") for p in model.parameters())


def test_parameters_by_iterators_and_aliases() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    autograd_hacks.add_hooks(model)
    curve(model, model(torch.randn(5, 3)), parameters=iter(["0.bias"]))
    assert layer.bias.hess.shape == (3, 3)
    autograd_hacks.compute_hess(model, parameters=["2.weight"])
    assert layer.weight.hess.shape == (3, 3, 3, 3)
    assert not hasattr(layer.bias, "hess")
    autograd_hacks.compute_hess(model, parameters="2.bias")


def test_a_leaf_that_went_after_the_forward_and_inference_mode() -> None:
    model, x = network()
    output = model(x)
    model[0].weight.requires_grad_(False)
    curve(model, output)
    assert not hasattr(model[0].weight, "hess")
    model[0].weight.requires_grad_(True)
    output = model(x)
    with torch.inference_mode():
        curve(model, output)
