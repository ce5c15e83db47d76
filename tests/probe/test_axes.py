"""Where the samples are: time first, positions without a batch, axes that are given, masks; none, samples that differ."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
from mixing import check_refused
from nets import SequenceFirst
from oracle import squares, targets
from rarely import crossed
from steps import check, check_batches, check_hooked, check_losses, count_forwards
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import SamplesMixed


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


# Which argument tells how many samples there are, and which are settings, positions, tables or masks


@pytest.mark.parametrize("samples", [1, 2, 3, 5])
def test_a_matrix_beside_few_samples_is_no_batch(samples: int) -> None:
    model = Bare(lambda m, x, how: m.out((how @ m.into(x)).relu()), into=nn.Linear(4, 4), out=nn.Linear(4, 2)).double()
    with autograd_hacks.add_hooks(model):
        for n in (4, samples):
            how = torch.randn(3, 3).double()
            check(model, torch.randn(n, 3, 4).double(), "sum", lambda x, how=how: model(x, how))


@pytest.mark.parametrize("samples", [1, 3, 4])
def test_positions_are_no_samples_even_where_they_are_as_many(samples: int) -> None:
    own = {"words": nn.Embedding(9, 8), "places": nn.Embedding(9, 8), "out": nn.Linear(8, 3)}
    model = Bare(lambda m, places, x: m.out((m.words(x) + m.places(places)).tanh()), **own).double()
    check_batches(model, torch.randint(9, (samples, 4)), loss_type="sum", run=lambda x: model(torch.arange(4)[None], x))


@crossed(kind=[nn.RNN, nn.LSTM, nn.GRU], head=["state", "padded"], counts=[False, True])
def test_packed_inside_the_model_in_any_order(kind: type[nn.RNNBase], head: str, counts: bool) -> None:
    def run(m: nn.Module, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        lengths = (x[..., 0] < 9).sum(1) if lengths is None else lengths
        packed, state = m.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        if head == "state":
            return m.out((state[0] if isinstance(state, tuple) else state)[-1])
        return m.out(pad_packed_sequence(packed, batch_first=True)[0].sum(1))

    model = Bare(run, rnn=kind(4, 3, batch_first=True), out=nn.Linear(3, 2)).double()
    x, lengths = torch.randn(4, 5, 4).double(), torch.tensor([2, 5, 1, 4])
    x[torch.arange(5) >= lengths[:, None]] = 10
    check_batches(model, torch.arange(4), loss_type="sum", run=lambda n: model(x[n]) if counts else model(x[n], lengths[n]))


def test_a_setting_before_the_batch() -> None:
    model = Bare(lambda m, temperature, x: m.layer(x) / temperature, layer=nn.Linear(3, 3)).double()
    check_batches(model, torch.randn(4, 3).double(), run=lambda x: model(torch.ones(1).double(), x))


# Batches of no samples, as Poisson sampling draws them, first and later, on any axis


def recurrent() -> nn.Module:
    return Bare(lambda m, x: m.out(m.layer(x)[0]), layer=nn.LSTM(3, 4), out=nn.Linear(4, 2))


def attention() -> nn.Module:
    return Bare(lambda m, x: m.layer(m.into(x)), into=nn.Linear(3, 4), layer=nn.TransformerEncoderLayer(4, 2, 8, 0.0))


def bare() -> nn.Module:
    """Nothing in it takes axis 1 for the batch."""
    return Bare(
        lambda m, x: m.out((m.into(x) * m.scale).tanh()), into=nn.Linear(3, 4), scale=torch.randn(4), out=nn.Linear(4, 2)
    )


KINDS = [(recurrent, {}), (attention, {}), *((kind, {"batch_dim": 1}) for kind in (recurrent, attention, bare))]


@crossed(made=KINDS, sizes=[[0], [0, 5], [5, 0, 3], [0, 6, 0], [6, 0]], param_grad=[False, True])
def test_time_first(made: tuple[Callable[[], nn.Module], dict[str, Any]], sizes: list[int], param_grad: bool) -> None:
    """Six positions, with and without as many samples."""
    model, options = made[0]().double(), made[1]
    with autograd_hacks.add_hooks(model, param_grad=param_grad, **options):
        for n in sizes:
            x = torch.randn(6, n, 3).double()
            if n:
                check_losses(model, lambda x=x: squares(model(x).transpose(0, 1)))
                continue
            for reduce in (lambda losses: autograd_hacks.backward(losses, "sum"), lambda losses: losses.sum().backward()):
                model.zero_grad()
                reduce(squares(model(x).transpose(0, 1)))
                grads = autograd_hacks.per_sample_grads(model)
                assert grads.norms().shape == (0,)
                autograd_hacks.compute_grad1(model, "sum")
                assert all(p.grad1.shape == (0, *p.shape) for p in model.parameters())


def test_a_mask_beside_no_samples() -> None:
    model = Bare(lambda m, x, mask: m.layer(x, mask), layer=nn.TransformerEncoderLayer(4, 2, 8, 0.0)).double()
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    with autograd_hacks.add_hooks(model):
        model(torch.randn(6, 0, 4).double(), mask).sum().backward()
        autograd_hacks.compute_grad1(model, "sum")
        assert all(p.grad1.shape == (0, *p.shape) for p in model.parameters())


# Batches whose samples differ in size, or in what becomes of them: packed sequences, lists, heads for some samples


def steps(mixes: bool = False, gated: bool = False) -> nn.Module:
    """A recurrent layer of one's own over a packed sequence, one step of all that still run after the other.

    gated: with a bare parameter
    """

    def run(m: nn.Module, packed: PackedSequence) -> tuple[PackedSequence, Tensor]:
        h, at, outs, ended = packed.data.new_zeros(int(packed.batch_sizes[0]), 4), 0, [], []
        for n in packed.batch_sizes.tolist():
            x, at = packed.data[at : at + n], at + n
            ended.append(h[n:])
            h = torch.tanh(m.ih(x) + m.hh(h[:n]))
            h = h - h.mean(0) if mixes else h
            outs.append(h)
        gate = m.gate if gated else 1.0
        return packed._replace(data=torch.cat(outs) * gate), torch.cat([h, *reversed(ended)]) * gate

    own = {"gate": torch.randn(4)} if gated else {}
    return Bare(run, ih=nn.Linear(3, 4), hh=nn.Linear(4, 4), **own)


def sequences(layer: nn.Module, head: str) -> nn.Module:
    def run(m: nn.Module, packed: PackedSequence) -> Tensor:
        out, h = m.layer(packed)
        if head == "last":
            order = packed.unsorted_indices
            return m.out(h if order is None else h[order])
        if head == "rows":  # a layer on the packed rows themselves
            out = out._replace(data=m.out(out.data).tanh())
            return pad_packed_sequence(out, batch_first=True)[0].sum(1)
        return m.out(pad_packed_sequence(out, batch_first=True)[0].sum(1))

    return Bare(run, layer=layer, out=nn.Linear(4, 2)).double()


def packed_of(x: Tensor, lengths: Tensor) -> Callable[[Tensor], PackedSequence]:
    return lambda n: pack_padded_sequence(x[n], lengths[n], batch_first=True, enforce_sorted=False)


@crossed(
    lengths=[[2, 5, 1, 4], [5, 5, 5, 5], [5, 4, 2, 1], [5, 5, 3, 3], [1, 1, 4]],
    head=["last", "padded", "rows"],
    gated=[False, True],
)
def test_a_recurrent_layer_of_ones_own_on_packed_sequences(lengths: list[int], head: str, gated: bool) -> None:
    """Its batch shrinks with time."""
    model, x = sequences(steps(gated=gated), head), torch.randn(len(lengths), 5, 3).double()
    pack = packed_of(x, torch.tensor(lengths))
    check_batches(model, *(torch.arange(len(x)) for _ in range(2)), run=lambda n: model(pack(n)))


@crossed(head=["last", "padded", "rows"], gated=[False, True])
def test_mixing_on_packed_sequences(head: str, gated: bool) -> None:
    packed = packed_of(torch.randn(4, 5, 3).double(), torch.tensor([2, 5, 1, 4]))(torch.arange(4))
    check_refused(sequences(steps(True, gated), head), (packed,), error=SamplesMixed)


@pytest.mark.parametrize("mixes", [False, True])
def test_a_packed_sequence_that_the_model_returns(mixes: bool) -> None:
    def rows_net(m: nn.Module, packed: PackedSequence) -> PackedSequence:
        out = m.layer(packed)[0]
        return out._replace(data=out.data - out.data.mean(0)) if mixes else out

    model, x = Bare(rows_net, layer=nn.LSTM(3, 4)).double(), torch.randn(4, 5, 3).double()
    pack = packed_of(x, torch.tensor([2, 5, 1, 4]))
    with autograd_hacks.add_hooks(model), pytest.raises(SamplesMixed) if mixes else nullcontext():
        check(model, torch.arange(4), run=lambda n: pad_packed_sequence(model(pack(n)), batch_first=True)[0].sum(1))


# Lists


def listed(how: str, bare: bool) -> nn.Module:
    """Samples of different lengths in a list: one after the other, in one tensor, or padded."""
    inner = nn.Sequential(
        nn.Linear(3, 4), *([Bare(lambda m, x: x * m.scale, scale=torch.randn(4))] if bare else []), nn.Tanh()
    )

    def run(m: nn.Module, parts: list[Tensor]) -> Tensor:
        if how == "each":
            return m.b(torch.stack([m.inner(x).mean(0) for x in parts]))
        if how == "joined":
            return m.b(torch.stack([x.mean(0) for x in m.inner(torch.cat(parts)).split([len(x) for x in parts])]))
        mask = pad_sequence([x.new_ones(len(x), 1) for x in parts], batch_first=True)
        return m.b((m.inner(pad_sequence(parts, batch_first=True)) * mask).sum(1))

    return Bare(run, inner=inner, b=nn.Linear(4, 2)).double()


@crossed(
    lengths=[[4, 2, 3], [3, 3, 3], [2, 2], [1, 1, 1], [5, 2, 3], [3, 1, 1, 5]],
    how=["each", "joined", "padded"],
    bare=[False, True],
)
def test_a_list_of_samples(lengths: list[int], how: str, bare: bool) -> None:
    model, parts = listed(how, bare), [torch.randn(n, 3).double() for n in lengths]
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            check(model, torch.arange(len(parts)), run=lambda n: model([parts[k] for k in n]))
            check_losses(model, lambda: squares(model(parts)))


def test_a_list_of_whole_batches_of_one() -> None:
    model, parts = listed("each", bare=True), [torch.randn(1, 3).double() for _ in range(2)]
    with autograd_hacks.add_hooks(model, batch_dim=([0, 0],)):
        squares(model(parts).flatten()[None]).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert all(torch.allclose(p.grad1[0], p.grad) for p in model.parameters())


def test_a_list_of_whole_batches() -> None:
    model = Bare(
        lambda m, levels: m.scale * sum(layer(x) for layer, x in zip(m.layers, levels)).tanh(),
        layers=nn.ModuleList([nn.Linear(3, 2), nn.Linear(5, 2)]),
        scale=torch.randn(2),
    ).double()
    x, y = torch.randn(4, 3).double(), torch.randn(4, 5).double()
    check_batches(model, torch.arange(4), run=lambda n: model([x[n], y[n]]))


# A part of the batch


def heads(m: nn.Module, x: Tensor, choice: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Two heads, each for a part of the batch."""
    h = m.first(x).tanh()
    n, out = len(h), h.new_zeros(len(h), 2)
    if m.way == "slices":
        return torch.cat([m.a(h[: n // 2]), m.b(h[n // 2 :])])
    if m.way == "strides":
        out[::2], out[1::2] = m.a(h[::2]), m.b(h[1::2])
        return out
    if m.way == "apart":
        return m.a(h[: n // 2]), m.b(h[n // 2 :])
    choice = x[:, 0] > 0 if choice is None else choice
    if m.way == "mask":
        out[choice], out[~choice] = m.a(h[choice]), m.b(h[~choice])
        return out
    if m.way == "index":
        at, rest = choice.nonzero()[:, 0], (~choice).nonzero()[:, 0]
        return out.index_copy(0, at, m.a(h[at])).index_copy(0, rest, m.b(h[rest]))
    return torch.where(choice[:, None], m.a(h), m.b(h))


def two_heads(way: str) -> nn.Module:
    return Bare(heads, first=nn.Linear(3, 4), a=nn.Linear(4, 2), b=nn.Linear(4, 2), way=way).double()


@crossed(how=["mask", "index", "where"], given=[False, True], samples=[6, 3, 2, 1])
def test_heads_that_a_mask_chooses(how: str, given: bool, samples: int) -> None:
    """Zeros for the head that a sample has not gone through."""
    model, x = two_heads(how), torch.randn(samples, 3).double()
    with autograd_hacks.add_hooks(model):
        for shift in range(2):
            choice = (torch.arange(samples) + shift) % 3 == 0
            check(model, torch.arange(samples), run=lambda n, c=choice: model(x[n], c[n]) if given else model(x[n]))
            if given:
                assert torch.equal(model.a.weight.grad1.flatten(1).any(1), choice)


@crossed(how=["slices", "strides", "apart"], samples=[8, 6, 5, 4, 3])
def test_heads_that_the_place_in_the_batch_chooses(how: str, samples: int) -> None:
    model, x = two_heads(how), torch.randn(samples, 3).double()

    def losses() -> Tensor:
        out = model(x)
        return squares(torch.cat(out) if isinstance(out, tuple) else out, targets(samples))

    check_hooked(model, losses)
    model.way = "where"
    check_batches(model, x)
