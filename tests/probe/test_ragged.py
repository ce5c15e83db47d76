"""Batches whose samples differ in size, or in what becomes of them: packed sequences, lists, heads for some samples."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
from mixing import check_refused
from oracle import squares, targets
from rarely import crossed
from steps import check, check_batches, check_hooked, check_losses
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import SamplesMixed


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
