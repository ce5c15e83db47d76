"""Tables and bags that the strategies don't draw: offsets, weights, padding, tied and sparse ones, and refusals."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from mixing import check_refused
from oracle import assert_same, one_backward_per_sample, squares
from steps import check, check_batches
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import SamplesMixed
from autograd_hacks.forms import Lookup


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_with_offsets(mode: str, padding_idx: int | None, include_last_offset: bool, weighted: bool) -> None:
    """Bags of every length, an empty one and one of nothing but padding among them."""
    mode = "sum" if weighted else mode  # the only one that takes weights
    layer = nn.EmbeddingBag(
        5, 3, mode=mode, padding_idx=padding_idx, include_last_offset=include_last_offset, dtype=torch.float64
    )
    bags = [torch.tensor(bag, dtype=torch.long) for bag in ([0, 4, 4, 1], [], [2, 2], [3], [1, 2, 0])]
    weights = [torch.linspace(-1, 1, len(bag), dtype=torch.float64) for bag in bags]

    def run(chosen: Tensor) -> Tensor:
        ends = torch.tensor([0, *[len(bags[n]) for n in chosen]]).cumsum(0)
        offsets = ends if include_last_offset else ends[:-1]
        psw = torch.cat([weights[n] for n in chosen]) if weighted else None
        return layer(torch.cat([bags[n] for n in chosen]), offsets, per_sample_weights=psw)

    with autograd_hacks.add_hooks(layer):
        check(layer, torch.arange(len(bags)), run=run)
        torch.testing.assert_close(layer.weight.grad1.mean(0), layer.weight.grad)


def test_weighted_bags_in_two_dimensions() -> None:
    layer, weights = nn.EmbeddingBag(4, 2, mode="sum", dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    index = torch.randint(4, (3, 5))
    check_batches(layer, torch.arange(3), loss_type="sum", run=lambda n: layer(index[n], per_sample_weights=weights[n]))


@pytest.mark.parametrize(
    "layer", [nn.Embedding(4, 2, scale_grad_by_freq=True), nn.EmbeddingBag(4, 2, scale_grad_by_freq=True)]
)
def test_gradients_scaled_by_the_batchs_frequencies_are_refused(layer: nn.Module) -> None:
    says = r"the model itself \(Embedding.*scale_grad_by_freq=False"
    check_refused(layer, (torch.tensor([[0, 1], [1, 1]]),), error=SamplesMixed, match=says)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_tables_read_by_32_bit_integers(mode: str) -> None:
    bag, table = nn.EmbeddingBag(5, 2, mode=mode, dtype=torch.float64), nn.Embedding(5, 2, dtype=torch.float64)
    for layer in (bag, table):
        check_batches(layer, torch.randint(5, (3, 4), dtype=torch.int32))


def test_padding_stays_zero_where_the_gradient_is_not_finite() -> None:
    for layer in (
        nn.Embedding(4, 2, padding_idx=1),
        *(nn.EmbeddingBag(4, 2, mode=m, padding_idx=1) for m in ("sum", "mean")),
    ):
        with autograd_hacks.add_hooks(layer):
            out = layer(torch.tensor([[0, 1], [2, 1]]))
            out.backward(torch.full_like(out, torch.nan))
            autograd_hacks.compute_grad1(layer, "sum")
            assert not layer.weight.grad[1].any()
            assert not layer.weight.grad1[:, 1].any()


def positions(m: nn.Module, x: Tensor) -> Tensor:
    """A table that is read by one index for all samples, which may repeat."""
    at = checkpoint(m.positions, m.at, use_reentrant=False) if m.checkpointed else m.positions(m.at)
    return m.out(torch.tanh(m.embed(x) + at))


def relative(m: nn.Module, x: Tensor) -> Tensor:
    """A table that is read by distances, from both ends, as a bias of attention."""

    def bias() -> Tensor:
        return m.positions.weight[m.at.flatten()].view(3, 3, 2).permute(2, 0, -2).contiguous().unsqueeze(0)

    own = checkpoint(bias, use_reentrant=False) if m.checkpointed else bias()
    h = m.embed(x).unflatten(2, (2, 2)).transpose(1, 2)
    return m.out((h @ h.mT + own).softmax(-1).matmul(h).transpose(1, 2).flatten(2))


AT, DISTANCES = torch.tensor([[0, 1, 1, 5, 3]]), torch.arange(3)[:, None] - torch.arange(3)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("how", "table", "at", "sizes"),
    [
        (positions, nn.Embedding(6, 4), AT, (3, 5)),
        (positions, nn.Embedding(6, 4, padding_idx=1), AT, (3, 5)),
        (positions, nn.Embedding(6, 4, padding_idx=-1), AT, (3, 5)),
        (relative, nn.Embedding(5, 2), DISTANCES, (4, 3)),
    ],
    ids=["positions", "padded", "padded at the end", "relative"],
)
def test_positions_are_looked_up(
    how: Callable[..., Tensor], table: nn.Module, at: Tensor, sizes: tuple[int, int], checkpointed: bool
) -> None:
    own = {"embed": nn.Embedding(7, 4), "positions": table, "out": nn.Linear(4, 2)}
    model, x = Bare(how, **own, checkpointed=False).double(), torch.randint(7, sizes)
    model.register_buffer("at", at.clone())
    expected = one_backward_per_sample(model, squares, x)
    model.checkpointed = checkpointed
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            squares(model(x)).sum().backward()
            model.at.zero_()
            grads = autograd_hacks.per_sample_grads(model, "sum")
            assert isinstance(grads["positions.weight"], Lookup)
            assert_same(grads.dense(), expected)
            model.at.copy_(at)
