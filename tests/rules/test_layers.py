"""What the strategies don't draw: several inputs, refusals, and what a layer's own state has to do with it."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
from mixing import check_refused
from nets import within
from oracle import assert_rows, assert_same, one_backward_per_sample, one_loss_at_a_time, squares
from steps import check, check_batches
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import BatchSizeError, SamplesMixed, StaleRecord
from autograd_hacks.forms import Lookup


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False).eval(), nn.SyncBatchNorm(3)]
)
def test_normalising_over_the_batch_is_refused(layer: nn.Module) -> None:
    says = r"layer '1' \(.*BatchNorm.*\) normalises .* GroupNorm"
    check_refused(nn.Sequential(nn.Linear(2, 3), layer), (torch.randn(4, 2),), error=SamplesMixed, match=says)


def test_what_counts_is_the_mode_that_the_forward_ran_in() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    x = torch.randn(4, 2, dtype=torch.float64)
    model(x)
    model.eval()
    check_batches(model, x)
    with autograd_hacks.add_hooks(model):
        loss = model(x).sum()
        model.train()
        loss.backward()
        autograd_hacks.compute_grad1(model)


def without_statistics(layer: nn.Module) -> None:
    layer.running_mean = layer.running_var = None  # type: ignore[assignment]


@pytest.mark.parametrize("affine", [True, False])
def test_running_statistics_that_are_gone_in_a_later_step(affine: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=affine)).double().eval()
    autograd_hacks.add_hooks(model)
    for step in range(6):
        if step == 3:
            without_statistics(model[1])
        x = torch.randn(4, 2, dtype=torch.float64)
        model(x).square().sum().backward()
        says = "BatchNorm1d" if affine else "samples mix"
        with pytest.raises(SamplesMixed, match=says) if step >= 3 else nullcontext():
            autograd_hacks.compute_grad1(model, "sum")
    model[1].running_mean, model[1].running_var = torch.zeros(3).double(), torch.ones(3).double()
    check_batches(model, x)


def test_running_statistics_that_are_gone_since_the_forward_or_new() -> None:
    layer, x = nn.BatchNorm1d(3).double().eval(), torch.randn(4, 3, dtype=torch.float64)
    with autograd_hacks.add_hooks(layer):
        layer(x).sum().backward()
        without_statistics(layer)
        with pytest.raises((SamplesMixed, StaleRecord)):
            autograd_hacks.compute_grad1(layer)
        layer(x).sum().backward()
        layer.running_mean, layer.running_var = torch.zeros(3).double(), torch.ones(3).double()
        with pytest.raises((SamplesMixed, StaleRecord)):
            autograd_hacks.compute_grad1(layer)


@pytest.mark.parametrize("by", ["the user", "a forward in training mode"])
def test_running_statistics_that_have_moved_since(by: str) -> None:
    layer = nn.BatchNorm1d(3).eval()
    with autograd_hacks.add_hooks(layer):
        for step in range(3):
            layer(torch.randn(4, 3)).sum().backward()
            if step < 2:
                autograd_hacks.compute_grad1(layer)  # rows are known to agree from now on
        if by == "the user":
            layer.running_mean.add_(1)
        else:
            layer.train()
            with torch.no_grad():
                layer(torch.randn(4, 3) * 5)
            layer.eval()
        with pytest.raises(StaleRecord, match=r"the model itself \(BatchNorm1d\): .* has changed"):
            autograd_hacks.compute_grad1(layer)


# Layers, each with one sample without an axis for the batch.
SINGLE = [
    *((nn.Embedding(3, 2), torch.tensor(1)), (nn.LayerNorm(3), torch.randn(3)), (nn.RMSNorm((2, 3)), torch.randn(2, 3))),
    *((nn.InstanceNorm1d(2, affine=True), torch.randn(2, 4)), (nn.ConvTranspose1d(2, 3, 2), torch.randn(2, 4))),
    *((nn.Conv2d(2, 3, 2), torch.randn(2, 4, 4)), (nn.Conv3d(2, 3, 2), torch.randn(2, 4, 4, 4))),
    *((nn.LSTM(2, 3), torch.randn(4, 2)), (nn.GRUCell(2, 3), torch.randn(2)), (nn.Linear(2, 3), torch.randn(2))),
]


@pytest.mark.parametrize(("layer", "x"), SINGLE, ids=lambda value: type(value).__name__)
def test_unbatched_inputs(layer: nn.Module, x: Tensor) -> None:
    says = r"the model itself \(.*without a batch axis.*x\[None\]"
    losses = lambda out: (out[0] if isinstance(out, tuple) else out).sum()  # noqa: E731
    check_refused(layer, (x,), losses=losses, error=BatchSizeError, match=says)


@pytest.mark.parametrize(
    ("layer", "x"),
    [*SINGLE, (nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0), torch.randn(4, 2))],
    ids=lambda value: type(value).__name__,
)
def test_samples_one_by_one(layer: nn.Module, x: Tensor) -> None:  # as many as positions, too, and a batch of one
    model = Bare(
        lambda m, rows: torch.stack([(y if isinstance(y := m.layer(row), Tensor) else y[0]).flatten() for row in rows]),
        layer=layer,
    )
    check_batches(model, *[torch.stack([(x + x * 0.1 * n).to(x) for n in range(count)]) for count in (4, 3, 1, 4)])


def test_unbatched_attention() -> None:
    """No rule knows its inputs: its positions are taken for samples, and attend to each other."""
    layer, x = nn.MultiheadAttention(2, 1), torch.randn(4, 2)
    check_refused(layer, (x, x, x), losses=lambda out: out[0].sum(), error=SamplesMixed, match=r"x\[None\]")


def test_prelu_ignores_the_gradient_where_its_slope_was_not_used() -> None:
    layer, x = nn.PReLU(), torch.tensor([[1.0, -2.0], [-1.0, 3.0]])
    with autograd_hacks.add_hooks(layer):
        layer(x).backward(torch.tensor([[torch.nan, 1.0], [1.0, torch.inf]]))
        autograd_hacks.compute_grad1(layer, "sum")
        torch.testing.assert_close(layer.weight.grad, torch.tensor([-3.0]))
        torch.testing.assert_close(layer.weight.grad1, torch.tensor([[-2.0], [-1.0]]))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(3, 2), (4, 3)),
        (nn.Linear(3, 2), (4, 5, 3)),
        (nn.Conv2d(2, 3, 2), (4, 2, 5, 5)),
        (nn.Conv2d(20, 3, 2), (4, 20, 2, 2)),
        (nn.Conv1d(4, 2, 1, groups=2), (4, 4, 3)),
        (nn.ConvTranspose1d(2, 3, 2), (4, 2, 5)),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_complex_layers(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer, x = layer.to(torch.complex128), torch.randn(shape, dtype=torch.complex128)

    check_batches(layer, x)


# Layers that end in a softmax or are a loss: rows against a backward pass for each sample's loss


def test_adaptive_softmax() -> None:
    """Its output and its loss, with targets in every cluster or in some."""
    torch.manual_seed(0)
    for bias, targets in ((True, [0, 1, 2, 4, 5, 7]), (False, [6, 1, 7, 6])):
        layer = nn.AdaptiveLogSoftmaxWithLoss(4, 8, [2, 5], div_value=2, head_bias=bias).double()
        x, y, w = torch.randn(len(targets), 4).double(), torch.tensor(targets), torch.randn(len(targets)).double()

        def each(layer: nn.Module = layer, x: Tensor = x, y: Tensor = y, w: Tensor = w) -> Tensor:
            return (w - 3 / len(y)) * layer(x, y).output

        for model in (layer, within(layer)):
            with autograd_hacks.add_hooks(model):
                out = model(x, y)
                ((out.output * w).sum() + 3 * out.loss).backward()
                autograd_hacks.compute_grad1(model, "sum")
                with autograd_hacks.pause_hooks():
                    assert_rows(model, one_loss_at_a_time(model, each))
            model.zero_grad()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.parametrize(
    ("width", "targets"), [(16, [0, 1, 2, 4]), (16, [9, 0, 1]), (16, [4, 9, 0, 5]), (16, [4]), (4, [9, 0])]
)
def test_adaptive_softmax_with_one_target_in_a_cluster(width: int, targets: list[int]) -> None:
    """Torch selects its row and writes it by an index without axes.  In the last case its weights have no entries."""
    torch.manual_seed(0)
    first, layer = nn.Linear(4, width).double(), nn.AdaptiveLogSoftmaxWithLoss(width, 12, [3, 7]).double()
    model, x, y = nn.ModuleList([first, layer]), torch.randn(len(targets), 4).double(), torch.tensor(targets)
    model.forward = lambda x, y: layer(first(x), y).output
    own = one_backward_per_sample(model, lambda h, y: layer(h, y).output, x, y, run=first)
    with autograd_hacks.add_hooks(model):
        model(x, y).sum().backward()
        autograd_hacks.compute_grad1(model, "sum")
        assert_rows(model, own)


# Tables and bags that the strategies don't draw: offsets, weights, padding, tied and sparse ones, and refusals


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
