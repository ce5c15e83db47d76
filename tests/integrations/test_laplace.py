"""A backend of laplace-torch: the posteriors of its own default backend, and the same predictions."""

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import one_backward_per_sample
from rarely import crossed
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset
from trained import needed

from autograd_hacks.errors import SamplesMixed, UnsupportedLayer

needed("laplace")

from laplace import Laplace  # noqa: E402
from laplace.curvature import CurvatureInterface, CurvlinopsGGN, EFInterface, GGNInterface  # noqa: E402

from autograd_hacks.integrations.laplace import AutogradHacksEF, AutogradHacksGGN  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
C = 3


def conv() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 5), nn.ReLU(), nn.Linear(5, C)).double()


def loader(likelihood: str) -> DataLoader:
    x = torch.randn(10, 1, 6, 6).double()
    y = torch.randint(C, (10,)) if likelihood == "classification" else torch.randn(10, C).double()
    return DataLoader(TensorDataset(x, y), batch_size=4)  # the last one is smaller


def fitted(model: nn.Module, data: DataLoader, likelihood: str, backend: Any, structure: str, **options: Any) -> Any:
    options = {"subset_of_weights": "all", **options}
    found = Laplace(model, likelihood, hessian_structure=structure, backend=backend, prior_precision=2.0, **options)
    found.fit(data)
    return found


def both(backends: tuple[Any, Any], likelihood: str, structure: str, **options: Any) -> list[Any]:
    """What two backends make of one model and data."""
    model, data = conv(), loader(likelihood)
    return [fitted(copy.deepcopy(model), data, likelihood, backend, structure, **options) for backend in backends]


def matrix(posterior: Any) -> Tensor:
    """The posterior precision, written out."""
    found = posterior.posterior_precision
    return found if isinstance(found, Tensor) else found.to_matrix()


class Jacobians(GGNInterface):
    """laplace-torch's own torch.func, for what its default has no word for."""


@crossed(part=["all", "last_layer"], structure=["full", "diag", "kron"], likelihood=["classification", "regression"])
def test_posteriors_are_those_of_the_default_backend(part: str, structure: str, likelihood: str) -> None:
    theirs, ours = both((CurvlinopsGGN, AutogradHacksGGN), likelihood, structure, subset_of_weights=part)
    assert_close(ours.loss, theirs.loss)
    assert_close(matrix(ours), matrix(theirs))
    x = torch.randn(5, 1, 6, 6).double()
    for mine, other in zip(ours(x, pred_type="glm"), theirs(x, pred_type="glm")):
        assert_close(mine, other)
    assert_close(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_the_empirical_fisher_matrix(structure: str, likelihood: str) -> None:
    theirs, ours = both((EFInterface, AutogradHacksEF), likelihood, structure)
    assert_close(ours.loss, theirs.loss)
    assert_close(matrix(ours), matrix(theirs))


def test_the_last_layers_empirical_fisher_matrix() -> None:
    model, data = conv(), loader("classification")
    found = fitted(copy.deepcopy(model), data, "classification", AutogradHacksEF, "full", subset_of_weights="last_layer")
    losses = lambda out, y: nn.functional.cross_entropy(out, y, reduction="none")  # noqa: E731
    by_name = one_backward_per_sample(model, losses, *data.dataset.tensors)
    rows = torch.cat([by_name[f"5.{name}"].flatten(1) for name in ("weight", "bias")], 1)
    assert_close(found.H, rows.mT @ rows)


def test_some_weights() -> None:
    options = {"subset_of_weights": "subnetwork", "subnetwork_indices": torch.tensor([0, 5, 40, 100, 200])}
    theirs, ours = both((Jacobians, AutogradHacksGGN), "classification", "full", **options)
    assert_close(matrix(ours), matrix(theirs))


@pytest.mark.parametrize("frozen", [False, True])
def test_jacobians_and_gradients(frozen: bool) -> None:
    model = conv()
    if frozen:
        model[0].requires_grad_(False)
    own = copy.deepcopy(model)
    theirs, ours = (CurvatureInterface(model, "classification"), AutogradHacksGGN(own, "classification"))
    x, y = torch.randn(4, 1, 6, 6).double(), torch.tensor([0, 2, 1, 0])
    own[5].bias.grad = torch.ones(C).double()
    for enable in (False, True):
        for mine, other in zip(ours.jacobians(x, enable), theirs.jacobians(x, enable)):
            assert_close(mine, other)
            assert mine.requires_grad == enable
        wanted = torch.tensor([[0, 1]] * 4)
        expected = theirs.selected_output_jacobians(x, wanted, enable)
        assert_close(ours.selected_output_jacobians(x, wanted, enable), expected)
    for mine, other in zip(ours.gradients(x, y), theirs.gradients(x, y)):
        assert_close(mine, other)
    assert own[5].bias.grad.tolist() == [1, 1, 1]
    assert own[5].weight.grad is None


def test_drawn_labels_come_close() -> None:
    model, data = conv(), loader("classification")
    exact = fitted(copy.deepcopy(model), data, "classification", AutogradHacksGGN, "diag")
    options = {"backend_kwargs": {"stochastic": True, "num_samples": 100}}
    drawn = fitted(copy.deepcopy(model), data, "classification", AutogradHacksGGN, "diag", **options)
    assert 0 < (drawn.H - exact.H).norm() < 0.4 * exact.H.norm()


def test_what_is_refused() -> None:
    data = loader("classification")
    grouped = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, C)).double()
    with pytest.raises(UnsupportedLayer, match=r"1\.weight"):
        fitted(grouped, data, "classification", AutogradHacksGGN, "kron")
    mixing = nn.Sequential(nn.Flatten(), nn.Linear(36, C), nn.Softmax(0)).double()
    with pytest.raises(SamplesMixed):
        fitted(mixing, data, "classification", AutogradHacksGGN, "diag")
