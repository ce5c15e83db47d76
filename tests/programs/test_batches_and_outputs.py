"""Batches of other things than one tensor, and what models return, read off autograd's graph."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from one_graph import check, data
from oracle import assert_rows, one_backward_per_sample, squares
from rarely import crossed
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import UnseenGradient


def scaled(given: Callable[[Any], Tensor] = lambda x: x, then: Callable[..., Any] = lambda h: h) -> nn.Module:
    """A layer and a bare parameter.  given: makes a tensor of the batch    then: makes the output"""
    return Bare(
        lambda m, x, *more: then(m.first(given(x)).tanh() * m.scale, *more), first=nn.Linear(3, 4), scale=torch.ones(4)
    ).double()


# Batches of other things than tensors


@pytest.mark.parametrize("batch_dim", [None, (None,)])
def test_a_batch_of_indices_that_are_no_tensor(batch_dim: Any) -> None:
    stored, rows = data(9, 3), iter([range(3), range(3, 7), range(2, 6)])
    model = scaled(lambda own: stored[own.start : own.stop])
    check(model, lambda: squares(model(next(rows))), batch_dim=batch_dim)


# What is returned


def policy(returns: Callable[[Tensor, Tensor], Any]) -> nn.Module:
    return Bare(lambda m, x: returns(m.mean(x), m.log_std), mean=nn.Linear(3, 2), log_std=torch.randn(2)).double()


def test_a_parameter_that_is_returned() -> None:
    model, x, a = policy(lambda mean, log_std: (mean, log_std)), data(4, 3), data(4, 2)

    def losses() -> Tensor:
        mean, log_std = model(x)
        return -torch.distributions.Normal(mean, log_std.exp()).log_prob(a).sum(1)

    check(model, losses, by_losses=True)
    check(model, lambda: squares(model(x)[0]))
    with autograd_hacks.add_hooks(model):
        losses().mean().backward()
        with pytest.raises(UnseenGradient, match=r"log_std.*output that depends on parameters only.*backward\(losses\)"):
            autograd_hacks.compute_grad1(model)


PICKS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rows, some of them twice": lambda h, rows, at: h[rows],
    "an index on one axis": lambda h, rows, at: h.index_select(0, rows).tanh(),
    "positions of a view": lambda h, rows, at: h.flatten(0, 1)[rows * 5 + at],
    "rows and positions": lambda h, rows, at: h[rows, at],
    "positions, then some of them": lambda h, rows, at: h[rows, at][2:],
    "windows of a sample": lambda h, rows, at: h[rows[:, None].expand(-1, 2), torch.stack([at, at], 1)],
    "parts of what was selected": lambda h, rows, at: h[rows].split([3, len(rows) - 3])[1],
    "pairs, after a view": lambda h, rows, at: h[rows.repeat_interleave(2)].view(len(rows), 2, 5, 4),
}


@pytest.mark.parametrize("name", PICKS)
def test_outputs_that_an_index_picked(name: str) -> None:
    model, x = scaled(then=PICKS[name]), data(4, 5, 3)
    draws = iter([(torch.randint(4, (n,)), torch.randint(5, (n,))) for n in (11, 9, 13)])

    def losses() -> Tensor:
        rows, at = next(draws)
        chosen = model(x, rows, at)
        return torch.zeros(4, dtype=x.dtype).index_add(0, rows[len(rows) - len(chosen) :], squares(chosen))

    check(model, losses)


# Batches of one sample, in which a value of parameters has the same size as one for each sample


def learnt(how: Callable[[Any, Tensor, Tensor], Any], **layers: nn.Module) -> nn.Module:
    """Has a learnt query, or first state, for every sample."""
    own = {"query": torch.randn(1, 2, 4), "u": torch.randn(4, 4), **layers}
    return Bare(lambda m, x: how(m, x, m.query.expand(len(x), -1, -1)), **own).double()


def weights_too(m: Any, x: Tensor, query: Tensor) -> Tensor:
    """The layer's second output depends on parameters only."""
    out, weights = m.attend(query, (m.query.mean(1, keepdim=True) * m.u).expand(len(x), -1, -1), x[:, :4])
    return out + weights @ x[:, :4]


def called_before(m: Any, x: Tensor, query: Tensor) -> Tensor:
    """The same layer is first called on parameters only."""
    return m.attend(query + m.attend(query, query, query)[0], x, x)[0]


def first_state(m: Any, x: Tensor, query: Tensor) -> Tensor:
    state = query.transpose(0, 1).contiguous()
    return m.run(x, (state, state.sin()) if isinstance(m.run, nn.LSTM) else state)[0]


def of_its_own_weight(m: Any, x: Tensor, query: Tensor) -> Tensor:
    """A weight of the layer also makes its first state."""
    state = m.run.weight_hh_l0[:4].view(2, 2, 4).sum(1, keepdim=True).expand(-1, len(x), -1)
    return m.run(x, state.contiguous())[0]


def tied(m: Any, x: Tensor, query: Tensor) -> Tensor:
    """A weight of the layer is also used behind it: with the batch, and with a parameter whose product meets the batch."""
    out = first_state(m, x, query)
    return out @ m.run.weight_hh_l0[:4] + out * (m.query[:, :1] @ m.run.weight_hh_l0[:4])


def by_steps(m: Any, x: Tensor, query: Tensor) -> Tensor:
    """No layer: the weight is used with the first state, and later with states of the batch."""
    state = query[:, 0]
    for t in range(x.shape[1]):
        state = (x[:, t] + state @ m.u).tanh()
    return state


LEARNT: dict[str, Callable[[], nn.Module]] = {
    "weights too": lambda: learnt(weights_too, attend=nn.MultiheadAttention(4, 2, batch_first=True)),
    "called before": lambda: learnt(called_before, attend=nn.MultiheadAttention(4, 2, batch_first=True)),
    "GRU": lambda: learnt(first_state, run=nn.GRU(4, 4, 2, batch_first=True)),
    "of its own weight": lambda: learnt(of_its_own_weight, run=nn.GRU(4, 4, 2, batch_first=True)),
    "tied": lambda: learnt(tied, run=nn.GRU(4, 4, 2, batch_first=True)),
    "by steps": lambda: learnt(by_steps),
}


@crossed(what=LEARNT, param_grad=[True, False], sizes=[(1, 1, 1), (3, 1, 3, 1)])
def test_one_sample_and_a_learnt_query(what: str, param_grad: bool, sizes: tuple[int, ...]) -> None:
    model = LEARNT[what]()
    plain = copy.deepcopy(model)
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for samples in sizes:
            x = data(samples, 5, 4)
            squares(model(x)).mean().backward()
            autograd_hacks.compute_grad1(model)
            assert_rows(model, one_backward_per_sample(plain, squares, x))
            model.zero_grad()
