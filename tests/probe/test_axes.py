"""Where the samples are: time first, positions without a batch, axes that are given, masks."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from mixing import check_refused
from nets import SequenceFirst
from oracle import squares
from rarely import crossed
from steps import check, check_batches, check_hooked, check_losses, count_forwards
from torch import Tensor
from twin import Bare

import autograd_hacks


@pytest.mark.parametrize("steps", [3, 4, 8])
def test_sequence_first_and_folded_rows(steps: int) -> None:
    """T = N, too, and another length and batch size in the steps after the first."""
    draw = lambda n, t: torch.randint(9, (n, t))  # noqa: E731
    check_batches(SequenceFirst().double(), draw(4, steps), draw(4, steps + 1), draw(3, 3), draw(1, 4), draw(2, 6), verify=1)


@pytest.mark.parametrize("steps", [3, 4])
@pytest.mark.parametrize(
    "ids",
    [
        lambda n, t: torch.arange(t),
        lambda n, t: torch.arange(t)[None],
        lambda n, t: torch.arange(t).expand(n, t),
        lambda n, t: torch.zeros(t, dtype=torch.long),
    ],
    ids=["T", "1 T", "N T", "zeros T"],
)
def test_positions_without_a_batch(ids: Callable[[int, int], Tensor], steps: int) -> None:
    """Learnt positions: by ids T or (1, T) or repeated for each sample; and a table of relative ones.  T = N, too."""

    def run(m: nn.Module, tokens: Tensor) -> Tensor:
        x, at = m.embed(tokens) + m.positions(ids(*tokens.shape)), torch.arange(tokens.shape[1])
        scores = x @ x.mT + m.relative(at - at[:, None] + 8).permute(2, 0, 1)
        return m.out(torch.tanh(scores.softmax(2) @ x))

    tables = {"embed": nn.Embedding(9, 4), "positions": nn.Embedding(9, 4), "relative": nn.Embedding(17, 1)}
    model = Bare(run, **tables, out=nn.Linear(4, 2)).double()
    check_batches(model, *(torch.randint(9, sizes) for sizes in ((4, steps), (4, 4), (3, 5))), verify=1)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@crossed(samples=[4, 5], norm_first=[True, False], explicit=[True, False])
def test_transformers_with_time_first(norm_first: bool, samples: int, explicit: bool) -> None:
    """Arguments T N E, which layers that take axis 1 for the batch give away; T = N, too."""
    model = nn.Transformer(4, 2, 1, 1, 6, norm_first=norm_first).double()
    source, target = torch.randn(5, samples, 4).double(), torch.randn(3, samples, 4).double()
    mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)

    def losses() -> Tensor:
        torch.manual_seed(1)
        return squares(model(source, target, tgt_mask=mask).transpose(0, 1))

    with autograd_hacks.add_hooks(model, batch_dim=1) if explicit else autograd_hacks.add_hooks(model):
        for _ in range(2):
            check_losses(model, losses)
        autograd_hacks.verify(model, rows=2)


class Pair(nn.Module):
    """Arguments with samples on different axes, and a mask of N = T by T."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor, others: dict[str, Tensor], mask: Tensor | None = None) -> Tensor:
        y = self.left(x) + self.right(others["y"]).transpose(0, 1)
        return y if mask is None else mask @ y


def test_a_tree_of_axes() -> None:
    model, x, y = Pair().double(), torch.randn(4, 5, 3).double(), torch.randn(5, 4, 3).double()
    mask = torch.randn(5, 5).double()
    for batch_dim, args, kwargs in (
        ((0, {"y": 1}), (x, {"y": y}), {}),
        ((0, 1, None), (x, {"y": y}, mask), {}),
        ({"x": 0, "others": 1}, (), {"x": x, "others": {"y": y}, "mask": mask}),
    ):
        check_hooked(model, lambda a=args, k=kwargs: squares(model(*a, **k)), batch_dim=batch_dim)
    with autograd_hacks.add_hooks(model, batch_dim=(0, 0)), pytest.raises(ValueError, match=r"sizes \{4, 5\}"):
        model(x, {"y": y})
    with autograd_hacks.add_hooks(model, batch_dim=(0,)), pytest.raises(ValueError, match=r"doesn't fit 2 positional"):
        model(x, {"y": y})
    with autograd_hacks.add_hooks(model, batch_dim={"x": 0, "other": 1}), pytest.raises(ValueError, match="no argument 'o"):
        model(x=x, others={"y": y})


def test_a_mask_of_n_by_n() -> None:
    model, mask = Pair().double(), torch.randn(4, 4).double()
    x, y = torch.randn(4, 4, 3).double(), torch.randn(4, 4, 3).double()
    check_hooked(model, lambda: squares(model(x, {"y": y}, mask)), batch_dim=(0, 1, None))
    encoder = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True).double().eval()
    x = torch.randn(4, 4, 4).double()
    causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    with autograd_hacks.add_hooks(encoder):  # nothing but 0 and -inf is a mask
        check_losses(encoder, lambda: squares(encoder(x, causal)))
    check_hooked(encoder, lambda: squares(encoder(x, mask)), batch_dim=(0, None))
    with autograd_hacks.add_hooks(encoder):  # whether or not it has a row for each sample, no gradient goes there
        check_losses(encoder, lambda: squares(encoder(x, mask)))


def test_without_a_probe_axis_0_is_the_batch() -> None:
    model = SequenceFirst().double()
    calls = count_forwards(model)
    with autograd_hacks.add_hooks(model, probe=False):
        squares(model(torch.randint(9, (4, 4)))).mean().backward()
    assert len(calls) == 1


def long_and_short(mixes: bool = False) -> nn.Module:
    """Its time-first layer runs for long texts only."""

    def run(m: nn.Module, ids: Tensor) -> Tensor:
        h = m.words(ids)
        if ids.shape[1] > 8:
            h = m.long(h.transpose(0, 1))[0].transpose(0, 1)
        h = m.short(h).relu()
        return m.head(h - h.mean(0) if mixes else h)

    own = {"words": nn.Embedding(7, 4), "long": nn.GRU(4, 4), "short": nn.Linear(4, 4), "head": nn.Linear(4, 7)}
    return Bare(run, **own).double()


@pytest.mark.parametrize("sizes", [(1, 3, 4, 3), (3, 1, 3)])
def test_a_time_first_layer_that_does_not_run_says_nothing_of_the_axis(sizes: tuple[int, ...]) -> None:
    """A batch of one text of five words was read as five samples, and its gradient clipped position by position."""
    model = long_and_short()
    autograd_hacks.add_hooks(model)
    for length in (5, 9, 5):
        for samples in sizes:
            check(model, torch.randint(7, (samples, length)), "sum")
    check_refused(long_and_short(mixes=True), (torch.randint(7, (3, 5)),))
