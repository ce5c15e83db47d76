"""Layers that compute in their own way: subclasses, patched forwards, parametrisations, and bare parameters."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from nets import Doubled, bare_matrix, language, perceptron, words
from oracle import assert_rows, one_loss_at_a_time, squares
from steps import assert_right, check_batches, check_hooked, check_losses
from torch import Tensor
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune, vector_to_parameters
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import BatchSizeError, SamplesMixed, UnseenGradient


def patched() -> nn.Module:
    layer = nn.Linear(3, 2)
    layer.forward = lambda x: 2 * nn.Linear.forward(layer, x)
    return layer


def adapted() -> nn.Module:
    """W + B A, as a parametrisation."""
    layer, lora = nn.Linear(3, 2), Bare(lambda m, w: w + m.b @ m.a, a=torch.randn(1, 3), b=torch.randn(2, 1))
    parametrize.register_parametrization(layer, "weight", lora)
    return layer


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "inside"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: Doubled(3, 2),
        patched,
        adapted,
        lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
        lambda: parametrizations.spectral_norm(nn.Linear(3, 2)),
        lambda: parametrizations.spectral_norm(nn.Linear(3, 2)).eval(),
        lambda: parametrizations.orthogonal(nn.Linear(3, 2)),
        lambda: nn.utils.weight_norm(nn.Linear(3, 2)),
        lambda: nn.utils.spectral_norm(nn.Linear(3, 2)),
        lambda: prune.l1_unstructured(nn.Linear(3, 2), "weight", 3),
    ],
    ids=[
        "subclass", "patched", "LoRA", "weight_norm", "spectral_norm", "spectral_norm in eval", "orthogonal",
        "old weight_norm", "old spectral_norm", "pruned",
    ],
)  # fmt: skip
def test_layers_that_compute_in_their_own_way(build: Callable[[], nn.Module], alone: bool) -> None:
    layer = build().double()
    assert not autograd_hacks.is_supported(layer)
    model = layer if alone else nn.Sequential(layer, nn.ReLU(inplace=True), nn.Linear(2, 2).double())
    x = torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            squares(model(x)).mean().backward()
            after = {name: buffer.clone() for name, buffer in model.named_buffers()}
            autograd_hacks.compute_grad1(model)
            assert all(torch.equal(buffer, after[name]) for name, buffer in model.named_buffers())

            def again(before: dict[str, Tensor] = before) -> Tensor:
                for name, buffer in model.named_buffers():  # power iterations from where the step began
                    buffer.copy_(before[name])
                return squares(model(x))

            with autograd_hacks.pause_hooks():
                assert_rows(model, one_loss_at_a_time(model, again))


@pytest.mark.parametrize("make", [
    lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)).eval(), nn.Tanh()),
])  # fmt: skip
def test_parametrize_cached_around_the_step(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 2)).double()
    x = torch.randn(3, 4).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            model.zero_grad()
            with parametrize.cached():
                squares(model(x)).mean().backward()
                plain = dict(parametrize._cache)
                autograd_hacks.compute_grad1(model)
                autograd_hacks.verify(model)
                assert plain.keys() == parametrize._cache.keys()
                assert all(parametrize._cache[key] is value for key, value in plain.items())
            assert all(p.grad is not None for p in model.parameters())
            assert_right(model, x)
            for p in model.parameters():
                p.data.sub_(0.1 * p.grad)


# What messages say of a cause that is known: packed samples, shared arguments, methods that aren't forward


def test_packed_samples() -> None:
    def graphs(m: nn.Module, x: Tensor, graph: Tensor) -> Tensor:
        """Adds up nodes by graph."""
        h = m.nodes(x).tanh()
        return m.out(h.new_zeros(int(graph.max()) + 1, 4).index_add(0, graph, h))

    model, x = Bare(graphs, nodes=nn.Linear(3, 4), out=nn.Linear(4, 2)).double(), torch.randn(7, 3).double()
    graph = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    with autograd_hacks.add_hooks(model), pytest.raises(BatchSizeError, match=r"pack samples.*batch_dim=None"):
        autograd_hacks.backward(model(x, graph).square().sum(1))
    check_hooked(model, lambda: model(x, graph).square().sum(1), batch_dim=None)


class Operator(nn.Module):
    """A function of each sample at points that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, u: Tensor, points: Tensor) -> Tensor:
        return self.branch(u) @ self.trunk(points).T


@pytest.mark.parametrize("points", [5, 6])
def test_an_argument_that_all_samples_share(points: int) -> None:
    model, u, y = Operator().double(), torch.randn(5, 3).double(), torch.randn(points, 2).double()
    if points == len(u):
        with autograd_hacks.add_hooks(model):
            autograd_hacks.backward(model(u, y).square().sum(1))
            with pytest.raises(SamplesMixed, match=r"None for an argument that all samples share"):
                autograd_hacks.compute_grad1(model)
    for axes in ((0, None), {"u": 0, "points": None}):
        with autograd_hacks.add_hooks(model, batch_dim=axes):
            check_losses(model, lambda: model(u, y).square().sum(1))
            if isinstance(axes, dict):
                check_losses(model, lambda: model(u, points=y).square().sum(1))


class Density(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 4), nn.Parameter(torch.ones(4))

    def log_prob(self, x: Tensor) -> Tensor:
        return (self.layer(x).tanh() * self.scale).sum(1)


def test_a_method_that_is_not_forward() -> None:
    model = Density()
    with autograd_hacks.add_hooks(model):
        check_losses(model, lambda: model.log_prob(torch.ones(5, 3)))  # the losses' graph shows it
        model.log_prob(torch.randn(5, 3)).mean().backward()
        with pytest.raises(UnseenGradient, match=r"scale: used by a method that isn't forward.*'layer'"):
            autograd_hacks.compute_grad1(model)


# Parameters that lie in one memory: beside each other, as after ``vector_to_parameters``, or over each other


NETS = {
    "layers": (perceptron, torch.randn(5, 4).double()),
    "a bare matrix": (lambda: bare_matrix(4), torch.randn(5, 4).double()),
    "a tied embedding": (lambda: language(11, 4), words() % 11),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), torch.randn(5, 3, 4).double()),
    "norms": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)), torch.randn(5, 4).double()),
}


def reads(model: nn.Module, x: Tensor) -> dict[str, str]:
    with autograd_hacks.add_hooks(model):
        model(x).square().flatten(1).sum(1).mean().backward()
        return {row.parameter: row.how for row in autograd_hacks.describe(model).rows}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", NETS)
def test_in_one_vector(name: str) -> None:
    build, x = NETS[name]
    model = build()
    apart = reads(model, x)
    vector_to_parameters(parameters_to_vector(model.parameters()).detach(), model.parameters())
    assert reads(model, x) == apart
    check_batches(model, x, x[:3])


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("within", [True, False])
def test_over_each_other(within: bool) -> None:
    """Two parameters that share some numbers."""
    model, numbers = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False)), torch.randn(20)
    model[0].weight = nn.Parameter(numbers[:9].view(3, 3))
    model[2].weight = nn.Parameter(numbers[:9].view(3, 3).T if within else numbers[6:15].view(3, 3))
    check_batches(model, torch.randn(5, 3), torch.randn(2, 3))


@pytest.mark.usefixtures("double")
def test_a_matrix_made_of_the_whole_memory() -> None:
    """An operation on all of the memory uses all parameters in it."""
    a, b = torch.randn(12).split(6)
    model = Bare(lambda m, x: x @ m.a.as_strided((12,), (1,), 0).view(3, 4) + m.b.sum(), a=a, b=b)
    check_batches(model, torch.randn(5, 3))
