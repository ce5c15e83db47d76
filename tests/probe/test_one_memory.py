"""Parameters that lie in one memory: beside each other, as after ``vector_to_parameters``, or over each other."""

import pytest
import torch
import torch.nn as nn
from nets import BareMatrix, Language, perceptron, words
from steps import check_batches
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from twin import Bare

import autograd_hacks

pytestmark = pytest.mark.usefixtures("double")

NETS = {
    "layers": (perceptron, torch.randn(5, 4).double()),
    "a bare matrix": (lambda: BareMatrix(4), torch.randn(5, 4).double()),
    "a tied embedding": (lambda: Language(11, 4), words() % 11),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), torch.randn(5, 3, 4).double()),
    "norms": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)), torch.randn(5, 4).double()),
}


def reads(model: nn.Module, x: Tensor) -> dict[str, str]:
    with autograd_hacks.add_hooks(model):
        model(x).square().flatten(1).sum(1).mean().backward()
        return {row.parameter: row.how for row in autograd_hacks.describe(model).rows}


@pytest.mark.parametrize("name", NETS)
def test_in_one_vector(name: str) -> None:
    build, x = NETS[name]
    model = build()
    apart = reads(model, x)
    vector_to_parameters(parameters_to_vector(model.parameters()).detach(), model.parameters())
    assert reads(model, x) == apart
    check_batches(model, x, x[:3])


@pytest.mark.parametrize("within", [True, False])
def test_over_each_other(within: bool) -> None:
    """Two parameters that share some numbers."""
    model, numbers = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False)), torch.randn(20)
    model[0].weight = nn.Parameter(numbers[:9].view(3, 3))
    model[2].weight = nn.Parameter(numbers[:9].view(3, 3).T if within else numbers[6:15].view(3, 3))
    check_batches(model, torch.randn(5, 3), torch.randn(2, 3))


def test_a_matrix_made_of_the_whole_memory() -> None:
    """An operation on all of the memory uses all parameters in it."""
    a, b = torch.randn(12).split(6)
    model = Bare(lambda m, x: x @ m.a.as_strided((12,), (1,), 0).view(3, 4) + m.b.sum(), a=a, b=b)
    check_batches(model, torch.randn(5, 3))
