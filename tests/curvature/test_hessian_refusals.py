"""What curvature refuses, and that nothing is left of what has failed."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from curvature_nets import network
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import autograd_hacks
from autograd_hacks.errors import BatchSizeError, BlockTooLarge, NothingRecorded, UnseenGradient


def test_passes_that_are_interrupted_are_not_read() -> None:
    model, x = network()
    output, ran = model(x), []

    def interrupt(grad: Tensor) -> None:
        ran.append(grad)
        if len(ran) == 2:
            raise KeyboardInterrupt

    handle = output.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        autograd_hacks.backprop_hess(output)
    for read in (autograd_hacks.compute_hess, autograd_hacks.per_sample_grads):
        with pytest.raises(NothingRecorded, match="ended with KeyboardInterrupt"):
            read(model)
    handle.remove()
    autograd_hacks.backprop_hess(output)
    autograd_hacks.compute_hess(model)


def test_a_record_that_can_not_be_read_does_not_block_the_next() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    autograd_hacks.add_hooks(model)
    autograd_hacks.backprop_hess(model(torch.randn(5, 3)))
    with pytest.raises(autograd_hacks.errors.SamplesMixed):
        autograd_hacks.compute_hess(model)
    model.eval()
    autograd_hacks.backprop_hess(model(torch.randn(5, 3)))
    autograd_hacks.compute_hess(model)


def test_a_loader_within_accumulate_is_refused() -> None:
    model, x = network()
    with autograd_hacks.accumulate(model):
        autograd_hacks.backprop_hess(model(x))
        with pytest.raises(RuntimeError, match="Leave accumulate"):
            autograd_hacks.compute_hess_over(model, [x])
    autograd_hacks.compute_hess(model)


class Named(nn.Module):
    """As transformers' models: tensors by name, and an object with the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layer(x)}


def test_batches_and_outputs_by_name_ask_for_a_forward() -> None:
    model, x = Named(), torch.randn(5, 3)
    autograd_hacks.add_hooks(model)
    for batch, what in (({"x": x}, r"a dict, and model\(batch\) raised TypeError"), (x, "the model returned a dict")):
        with pytest.raises(TypeError, match=rf"compute_hess_over.*{what}.*forward=lambda model, batch"):
            autograd_hacks.compute_hess_over(model, [batch], kind="diag")
    with pytest.raises(TypeError, match=r"was given a dict; .*output\.logits"):
        autograd_hacks.backprop_hess(model(x))
    autograd_hacks.compute_hess_over(model, [{"x": x}], "diag", forward=lambda model, batch: model(**batch)["logits"])


def test_parameters_by_iterators_and_aliases() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    autograd_hacks.add_hooks(model)
    autograd_hacks.backprop_hess(model(torch.randn(5, 3)))
    autograd_hacks.compute_hess(model, parameters=iter(["0.bias"]))
    assert layer.bias.hess.shape == (3, 3)
    autograd_hacks.compute_hess(model, parameters=["2.weight"])
    assert layer.weight.hess.shape == (3, 3, 3, 3)
    assert not hasattr(layer.bias, "hess")
    autograd_hacks.compute_hess(model, parameters="2.bias")
    with pytest.raises(ValueError, match=r"parameters: '0\.bia' matches no"):
        autograd_hacks.compute_hess(model, parameters="0.bia")


class Both(nn.Module):
    """The sum of two models' outputs."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x)


def test_two_hooked_models_that_share_a_layer() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(3, 3)
    one, other = nn.Sequential(shared, nn.Linear(3, 2)), nn.Sequential(shared, nn.Linear(3, 2))
    autograd_hacks.add_hooks(one)
    autograd_hacks.add_hooks(other)
    x = torch.randn(4, 3)
    autograd_hacks.backprop_hess(one(x) + other(x))
    found = []
    for model in (one, other):  # each has seen all calls of the layer
        autograd_hacks.compute_hess(model)
        found.append(shared.weight.hess)
    autograd_hacks.remove_hooks(one)
    autograd_hacks.remove_hooks(other)
    autograd_hacks.add_hooks(both := Both(one, other))
    autograd_hacks.backprop_hess(both(x))
    autograd_hacks.compute_hess(both)
    for own in found:
        assert_close(own, shared.weight.hess)
    nested = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    autograd_hacks.add_hooks(nested)
    autograd_hacks.add_hooks(nested[2])
    autograd_hacks.backprop_hess(nested(x))
    autograd_hacks.compute_hess(nested)
    found = nested[2].weight.hess
    autograd_hacks.compute_hess(nested[2])
    assert_close(nested[2].weight.hess, found)


def test_too_many_rows_for_a_natural_gradient() -> None:
    model, x = network()
    autograd_hacks.backprop_hess(model(x))
    grads = autograd_hacks.per_sample_grads(model)
    v = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(BlockTooLarge, match="10 rows"):
        grads.natural_gradient(v, 0.1, limit=100)
    grads.natural_gradient(v, torch.tensor(0.1))
    with pytest.raises(TypeError, match=r"damping is missing.*rank 10.*damping=1e-2"):
        grads.natural_gradient(v)
    for limit in (None, "1GB"):
        with pytest.raises(TypeError, match="number of bytes"):
            autograd_hacks.compute_hess(model, limit=limit)
    with pytest.raises(ValueError, match="a number per parameter"):
        grads.from_vector(torch.zeros(3))
    for damping, kind in ((-1.0, ValueError), ("x", TypeError)):
        with pytest.raises(kind, match="damping"):
            grads.as_linear_operator(damping)  # type: ignore[arg-type]
    operator = grads.as_linear_operator()
    real, imaginary = torch.randn(2, 26).numpy()
    assert_close(torch.tensor(operator @ (real + 1j * imaginary)).imag, torch.tensor(operator @ imaginary))


def test_leaves_that_went_and_graphs_that_were_freed() -> None:
    model, x = network()
    output = model(x)
    model[0].weight.requires_grad_(False)
    autograd_hacks.backprop_hess(output)
    autograd_hacks.compute_hess(model)
    assert not hasattr(model[0].weight, "hess")
    model[0].weight.requires_grad_(True)
    output = model(x)
    output.sum().backward()
    with pytest.raises(NothingRecorded, match="retain_graph=True"):
        autograd_hacks.backprop_hess(output)
    output = model(x)
    with torch.inference_mode():
        autograd_hacks.backprop_hess(output)
        autograd_hacks.compute_hess(model)
    with autograd_hacks.accumulate(model):
        autograd_hacks.backprop_hess(model(x))
        model(x).sum().backward()
    with pytest.raises(NothingRecorded, match="different kinds"):
        autograd_hacks.per_sample_grads(model)
    with pytest.raises(TypeError, match="manual_seed"):
        autograd_hacks.backprop_hess(model(x), samples=1, generator=3)


def test_outputs_that_are_refused() -> None:
    model, x = network()
    for output, error, says in [
        (model(x).detach(), NothingRecorded, "without a graph"),
        (torch.randn(5, 2, requires_grad=True), NothingRecorded, "no hooked layer"),
        (model(x).sum(1), ValueError, r"output\[:, None\]"),
        (model(x)[:, :, None, None], ValueError, r"\(N, T, C\)"),
        (model(x)[:, :0], ValueError, "which has no entries"),
        (model(x)[:, :1], ValueError, "zero for a single class.*BinaryCrossEntropy"),
        (model(x).mT, BatchSizeError, "disagree"),
        (model(x)[:3], BatchSizeError, "disagree"),
        (3.0, TypeError, "floating-point"),
        (torch.zeros(5, 2, dtype=torch.long), TypeError, "floating-point"),
    ]:
        with pytest.raises(error, match=says):
            autograd_hacks.backprop_hess(output)
        autograd_hacks.clear_backprops(model)
    output = model(x)
    with torch.no_grad(), pytest.raises(NothingRecorded, match="without a graph"):
        autograd_hacks.backprop_hess(model(x))
    for arguments, error in [
        ({"hess_type": "Hinge"}, ValueError),
        ({"samples": 0}, ValueError),
        ({"samples": 1.5}, TypeError),
    ]:
        with pytest.raises(error, match="expected"):
            autograd_hacks.backprop_hess(output, **arguments)
    with autograd_hacks.pause_hooks(), pytest.raises(NothingRecorded, match="hooks enabled"):
        autograd_hacks.backprop_hess(output)


def test_readings_that_are_refused() -> None:
    model, x = network()
    with pytest.raises(NothingRecorded):
        autograd_hacks.compute_hess(model)
    autograd_hacks.backprop_hess(model(x))
    for arguments in ({"kind": "half"}, {"kind": "kfac", "kfac_approx": "some"}):
        with pytest.raises(ValueError, match="expected one of"):
            autograd_hacks.compute_hess(model, **arguments)
    grads = autograd_hacks.per_sample_grads(model)
    for read in (
        lambda: autograd_hacks.compute_hess(model, limit=100),
        lambda: autograd_hacks.compute_hess(model, kind="kfac", limit=20),
        lambda: grads.block("0.weight", "2.weight", limit=100),
    ):
        with pytest.raises(BlockTooLarge, match=r"(?s)weight.*MiB.*diag.*kfac.*matvec"):
            read()
    with pytest.raises(KeyError):
        grads.block("nowhere")
    for damping in (0, -1.0, float("nan"), True, "much"):
        kind = TypeError if damping in (True, "much") else ValueError
        with pytest.raises(kind, match="damping"):
            grads.natural_gradient(dict(model.named_parameters()), damping)
    with pytest.raises(ValueError, match="without samples"):
        autograd_hacks.compute_hess_over(model, [])
    autograd_hacks.backprop_hess(model(x), "Jacobian")
    with pytest.raises(NothingRecorded, match="likelihood"):
        autograd_hacks.per_sample_grads(model).fisher_matvec(dict(model.named_parameters()))


def test_a_failed_reading_leaves_no_earlier_curvature() -> None:
    model, x = network()
    autograd_hacks.backprop_hess(model(x))
    autograd_hacks.compute_hess(model)
    autograd_hacks.clear_backprops(model)
    with pytest.raises(NothingRecorded):
        autograd_hacks.compute_hess(model)
    assert not any(hasattr(p, "hess") for p in model.parameters())


def test_weights_used_past_their_layer_are_not_missed() -> None:
    class Past(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.layer(x), self.layer.weight)

    model = Past()
    autograd_hacks.add_hooks(model, probe=False)
    autograd_hacks.backprop_hess(model(torch.randn(4, 2)))
    with pytest.raises(UnseenGradient):
        autograd_hacks.compute_hess(model)


def test_reentrant_checkpoints_are_refused_by_torch() -> None:
    model, x = network()
    output = checkpoint(model, x.requires_grad_(True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant"):
        autograd_hacks.backprop_hess(output)


def test_other_types_within_accumulate_are_refused() -> None:
    model, x = network()
    with autograd_hacks.accumulate(model):
        autograd_hacks.backprop_hess(model(x), "CrossEntropy")
        autograd_hacks.backprop_hess(model(x), "LeastSquares")
    with pytest.raises(NothingRecorded, match="different kinds"):
        autograd_hacks.compute_hess(model)
