"""Which argument tells how many samples there are, and which are settings, positions, tables or masks."""

import pytest
import torch
import torch.nn as nn
from oracle import squares
from rarely import crossed
from steps import check, check_batches
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from twin import Bare

import autograd_hacks


def mixed() -> nn.Module:
    """A mixing of positions that is given as an argument."""
    return Bare(lambda m, x, how: m.out((how @ m.into(x)).relu()), into=nn.Linear(4, 4), out=nn.Linear(4, 2))


def placed() -> nn.Module:
    """Positions that are given as an argument, before the words."""
    own = {"words": nn.Embedding(9, 8), "places": nn.Embedding(9, 8), "out": nn.Linear(8, 3)}
    return Bare(lambda m, places, x: m.out((m.words(x) + m.places(places)).tanh()), **own).double()


@pytest.mark.parametrize("samples", [1, 2, 3, 5])
def test_a_matrix_beside_few_samples_is_no_batch(samples: int) -> None:
    model = mixed().double()
    with autograd_hacks.add_hooks(model):
        for n in (4, samples):
            how = torch.randn(3, 3).double()
            check(model, torch.randn(n, 3, 4).double(), "sum", lambda x, how=how: model(x, how))


@pytest.mark.parametrize("samples", [1, 3, 4])
def test_positions_are_no_samples_even_where_they_are_as_many(samples: int) -> None:
    model = placed()
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
    x = torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        squares(model(torch.ones(1).double(), x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert model.layer.weight.grad1.shape == (4, 3, 3)
