"""Blocks, diagonals and products of the Gauss-Newton matrix against what is true: Jacobians by one backward
pass for each entry of the output, and the losses' own Hessians by differentiating twice."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from curvature_nets import CASES, HESS_TYPES, curve, hooked, matrix
from oracle import vector
from rarely import crossed
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.curvature import linear_operator, matvec, natural_gradient
from autograd_hacks.curvature.backprop import directions

pytestmark = pytest.mark.usefixtures("double")


def sample_loss(hess_type: str, z: Tensor) -> Tensor:
    """A sample's loss at its output, (C,) or (T, C), for targets that don't matter to the Hessian."""
    z = z.view(-1, z.shape[-1])
    if hess_type == "CrossEntropy":
        return F.cross_entropy(z, torch.zeros(len(z), dtype=torch.long))
    if hess_type == "BinaryCrossEntropy":
        return F.binary_cross_entropy_with_logits(z, torch.ones_like(z), reduction="none").sum(1).mean()
    if hess_type == "LeastSquares":
        return F.mse_loss(z, torch.zeros_like(z), reduction="none").sum(1).mean() / 2
    assert hess_type == "Jacobian"
    return z.square().sum() / 2


def jacobian(model: nn.Module, output: Tensor) -> Tensor:
    """(N, entries of a sample's output, P)"""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for z in output.flatten():
        found = torch.autograd.grad(z, parameters, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows).view(len(output), output[0].numel(), -1)


def gauss_newton(model: nn.Module, output: Tensor, hess_type: str) -> Tensor:
    """Σₙ Jₙᵀ Hₙ Jₙ / N, (P, P)."""
    total = torch.zeros(())
    for z, own in zip(output.detach(), jacobian(model, output)):
        curvature = torch.autograd.functional.hessian(lambda z: sample_loss(hess_type, z), z)
        total = total + own.mT @ curvature.view(z.numel(), z.numel()) @ own
    return total / len(output)


def hessian_of(model: nn.Module, name: str, loss: Callable[[], Tensor]) -> Tensor:
    """The Hessian of a loss by one parameter, (P, P), by differentiating twice."""
    parameter = model.get_parameter(name)
    (first,) = torch.autograd.grad(loss(), parameter, create_graph=True)
    rows = [torch.autograd.grad(g, parameter, retain_graph=True, materialize_grads=True)[0] for g in first.flatten()]
    return torch.stack([row.flatten() for row in rows])


def attentive() -> nn.Module:
    """Samples on axis 1, inside and at the output."""
    return Bare(
        lambda m, x: m.head(m.layer(x)),
        layer=nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=False),
        head=nn.Linear(4, 2),
    )


@crossed(name=CASES, given=[*((hess_type, True) for hess_type in HESS_TYPES), ("CrossEntropy", False)])
def test_blocks_diagonals_and_products(name: str, given: tuple[str, bool]) -> None:
    hess_type, param_grad = given
    model, x = hooked(name, param_grad)
    for _ in range(2):  # the second is no plan's first
        output = model(x)
        with autograd_hacks.pause_hooks():
            expected = gauss_newton(model, model(x), hess_type)
        curve(model, output, hess_type)
        autograd_hacks.compute_hess(model, kind="diag")
        grads = autograd_hacks.per_sample_grads(model)
        assert_close(matrix(grads), expected)
        start = 0
        for own in model.parameters():
            stop = start + own.numel()
            block = expected[start:stop, start:stop]
            assert own.hess.shape == (*own.shape, *own.shape)
            assert_close(own.hess.reshape(block.shape), block)
            assert_close(own.hess_diag, block.diagonal().view(own.shape))
            start = stop
        v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        assert_close(vector(matvec(grads, v)), expected @ vector(v))
        assert all(p.grad is None for p in model.parameters())
        damped = expected + 0.1 * torch.eye(len(expected))
        assert_close(damped @ vector(natural_gradient(grads, v, 0.1)), vector(v))


def test_samples_on_another_axis() -> None:
    torch.manual_seed(0)
    model, x = attentive(), torch.randn(3, 4, 4)
    with autograd_hacks.pause_hooks():
        expected = gauss_newton(model, model(x).transpose(0, 1), "CrossEntropy")
    autograd_hacks.add_hooks(model, batch_dim=1)
    autograd_hacks.backprop_hess(model(x).transpose(0, 1))
    assert_close(matrix(autograd_hacks.per_sample_grads(model)), expected)


@pytest.mark.parametrize("positions", [3, 4])
def test_samples_on_another_axis_of_the_output_are_refused(positions: int) -> None:
    model, x = attentive(), torch.randn(positions, 4, 4)
    autograd_hacks.add_hooks(model, batch_dim=1)
    with pytest.raises(autograd_hacks.errors.BatchSizeError, match=r"transpose|disagree"):
        autograd_hacks.backprop_hess(model(x))


@pytest.mark.parametrize("hess_type", ["CrossEntropy", "LeastSquares"])
def test_a_relu_network_has_the_exact_hessian(hess_type: str) -> None:
    """The claims of the original autograd-hacks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randn(5, 1, 5, 5), torch.randint(3, (5,))
    targets = torch.randn(5, 3)

    def loss() -> Tensor:
        output = model(x)
        if hess_type == "CrossEntropy":
            return F.cross_entropy(output, y)
        return (output - targets).square().sum(1).mean() / 2

    expected = {name: hessian_of(model, name, loss) for name, _ in model.named_parameters()}
    autograd_hacks.add_hooks(model)
    curve(model, model(x), hess_type)
    for name, p in model.named_parameters():
        assert float(expected[name].abs().max()) > 0
        assert_close(p.hess.reshape(expected[name].shape), expected[name])


def test_a_linear_operator_for_scipy() -> None:
    from scipy.sparse.linalg import cg, eigsh, svds

    model, x = hooked("relu")
    autograd_hacks.backprop_hess(model(x))
    grads = autograd_hacks.per_sample_grads(model)
    operator, expected = linear_operator(grads, damping=0.1), matrix(grads) + 0.1 * torch.eye(43)
    assert operator.shape == (43, 43)
    largest = torch.linalg.eigvalsh(expected)[-3:]
    assert_close(torch.tensor(eigsh(operator, k=3)[0]), largest)
    assert_close(torch.tensor(sorted(svds(operator, k=3, rng=0)[1])), largest)
    real, imaginary = torch.randn(2, 43).numpy()
    assert_close(torch.tensor(operator @ (real + 1j * imaginary)).imag, torch.tensor(operator @ imaginary))
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    solved, code = cg(operator, vector(v).numpy(), rtol=1e-12)
    assert code == 0
    assert_close(torch.tensor(solved), vector(natural_gradient(grads, v, 0.1)))


def test_micro_batches_and_loaders_are_one_batch() -> None:
    for kind in ("full", "diag", "kfac"):
        model, _ = hooked("relu")
        x = torch.randn(7, 4)
        curve(model, model(x), kind=kind)
        attribute = {"full": "hess", "diag": "hess_diag", "kfac": "kfac"}[kind]
        expected = [getattr(p, attribute) for p in model.parameters()]
        with autograd_hacks.accumulate(model):
            for part in x.split(3):
                autograd_hacks.backprop_hess(model(part))
        autograd_hacks.compute_hess(model, kind)
        assert_close([getattr(p, attribute) for p in model.parameters()], expected)
        autograd_hacks.curvature.compute_hess_over(model, [(part, None) for part in x.split(3)], kind)
        assert_close([getattr(p, attribute) for p in model.parameters()], expected)
        autograd_hacks.curvature.compute_hess_over(model, iter(x.split(2)), kind, forward=lambda model, batch: model(batch))
        assert_close([getattr(p, attribute) for p in model.parameters()], expected)
        autograd_hacks.remove_hooks(model)
        assert not any(hasattr(p, attribute) for p in model.parameters())


# Fisher matrices: of the data's labels, of the model's own, and from drawn ones


@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4)])
@pytest.mark.parametrize("hess_type", ["CrossEntropy", "BinaryCrossEntropy"])
def test_drawn_vectors_are_gradients_for_labels(hess_type: str, shape: tuple[int, ...]) -> None:
    """To the digit, which no mean of draws can tell: √(K T) s is p less a label."""
    z = torch.randn(shape, requires_grad=True)
    count, drawn = directions(hess_type, z, 7, torch.Generator().manual_seed(0))
    p = z.softmax(-1) if hess_type == "CrossEntropy" else z.sigmoid()
    positions = 3 if len(shape) == 3 else 1
    vectors = list(drawn)
    assert count == len(vectors) == 7
    for s in vectors:
        labels = (p - s * (7 * positions) ** 0.5).detach()
        assert_close(labels, labels.round(), atol=1e-12, rtol=0)
        assert_close(labels.round().clamp(0, 1), labels.round())
        if hess_type == "CrossEntropy":
            assert_close(labels.sum(-1), torch.ones(shape[:-1]))
    assert any(not torch.equal(s, vectors[0]) for s in vectors)


def test_the_empirical_fisher_matrix() -> None:
    model, x = hooked("tanh")
    y = torch.randint(3, (6,))
    F.cross_entropy(model(x), y).backward()
    grads = autograd_hacks.per_sample_grads(model)
    rows = torch.cat([own.flatten(1) for own in grads.dense().values()], dim=1)
    expected = rows.mT @ rows / 6
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    assert_close(vector(matvec(grads, v)), expected @ vector(v))
    assert_close(matrix(grads), expected)
    gradient = {name: p.grad for name, p in model.named_parameters()}
    found = vector(natural_gradient(grads, gradient, 1e-3))
    assert_close(found, torch.linalg.solve(expected + 1e-3 * torch.eye(len(expected)), vector(gradient)))
    with pytest.raises(autograd_hacks.errors.NothingRecorded, match="backprop_hess"):
        autograd_hacks.compute_hess(model)
