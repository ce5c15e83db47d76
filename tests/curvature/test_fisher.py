"""Fisher matrices: of the data's labels, of the model's own, and from drawn ones."""

import pytest
import torch
import torch.nn.functional as F
from curvature_nets import HESS_TYPES, hooked, matrix
from second_order import gauss_newton
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.curvature.backprop import directions

pytestmark = pytest.mark.usefixtures("double")


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
    assert_close(grads.to_vector(grads.fisher_matvec(v)), expected @ grads.to_vector(v))
    assert_close(matrix(grads), expected)
    gradient = {name: p.grad for name, p in model.named_parameters()}
    found = grads.to_vector(grads.natural_gradient(gradient, 1e-3))
    assert_close(found, torch.linalg.solve(expected + 1e-3 * torch.eye(len(expected)), grads.to_vector(gradient)))
    with pytest.raises(autograd_hacks.errors.NothingRecorded, match="backprop_hess"):
        grads.ggn_matvec(v)
    with pytest.raises(autograd_hacks.errors.NothingRecorded, match="backprop_hess"):
        autograd_hacks.compute_hess(model)


def test_the_fisher_matrix_is_that_of_the_models_own_labels() -> None:
    """Σ_y p(y) ∇log p(y) ∇log p(y)ᵀ, by a backward pass for each label."""
    model, x = hooked("tanh")
    with autograd_hacks.pause_hooks():
        output, expected = model(x), torch.zeros(())
        for n in range(len(x)):
            for label in range(3):
                log_p = output[n].log_softmax(0)[label]
                grads = torch.autograd.grad(log_p, list(model.parameters()), retain_graph=True)
                g = torch.cat([own.flatten() for own in grads])
                expected = expected + log_p.detach().exp() * torch.outer(g, g) / len(x)
    autograd_hacks.backprop_hess(model(x))
    found = autograd_hacks.per_sample_grads(model)
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    assert_close(found.to_vector(found.fisher_matvec(v)), expected @ found.to_vector(v))


@pytest.mark.parametrize(("name", "hess_type"), [("positions", "CrossEntropy"), *(("tanh", own) for own in HESS_TYPES)])
def test_random_vectors_in_the_mean(name: str, hess_type: str) -> None:
    """The mean of many draws is within five standard errors of the exact matrix, entry by entry."""
    model, x = hooked(name)
    with autograd_hacks.pause_hooks():
        expected = gauss_newton(model, model(x), hess_type)
    draws = 300
    autograd_hacks.backprop_hess(model(x), hess_type, samples=draws, generator=torch.Generator().manual_seed(0))
    grads = autograd_hacks.per_sample_grads(model)
    assert grads.samples == draws * len(x)
    rows = torch.cat([own.flatten(1) for own in grads.dense().values()], dim=1).view(draws, len(x), -1)
    each = draws * rows.mT @ rows / len(x)  # an estimate from each draw alone
    error = each.std(0) / draws**0.5
    assert_close(matrix(grads), each.mean(0))
    assert bool(((each.mean(0) - expected).abs() <= 5 * error + 1e-12).all())
    assert float(error.max()) > 0
