"""Each forward is labelled by itself: programs that change are right, or refused, in the very step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from one_at_a_time import by_memo, check, judge, walk_of
from programs import CHANGING, D, N, Net, between
from random_programs import Doubles
from torch import Tensor

from autograd_hacks.graph.label import NOBODY, At, Entries
from autograd_hacks.graph.memo import Memo
from autograd_hacks.graph.probed import confirmed


@pytest.mark.parametrize("name", CHANGING)
def test_a_program_that_changes_is_right_or_refused_in_that_step(name: str) -> None:
    net, memo = Net(between(name)).double(), Memo()
    _, off, on = CHANGING[name]
    torch.set_default_dtype(torch.float64)
    try:
        for flag in (0, 0, 1, 1, 0, 1):
            x = torch.randn(N, D)
            out = net(x, flag)
            found = by_memo(memo, out, N, net, [x])
            check([out], N, net, **found)
            walk, expected = found["walk"], on if flag else off
            assert bool(walk.mixes) == (expected == "mixed"), (walk.mixes, flag)
            assert bool(walk.mixed) == bool(walk.mixes)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(memo) <= 2


def test_a_wrong_label_is_seen_and_swapped_samples_in_rows() -> None:
    net = Net(lambda h, k: h.tanh()).double()
    out = net(torch.randn(N, D).double())
    trace, walk = walk_of([out], N, net)
    use = next(use for use in walk.uses if trace.kinds[use.node].name == "AddmmBackward0")
    for k in (next(k for k, own in enumerate(walk.labels) if own == [At(0)]), use.node):
        walk.labels[k] = [At(1)]
        found = judge([out], N, net, walk=walk, trace=trace)
        assert found.wrong if k != use.node else found.rows > 0.1
        walk.labels[k] = [At(0)]


def test_nobodys_factor_may_be_a_samples_too() -> None:
    label = Entries(torch.tensor([0, NOBODY]))
    assert not confirmed(torch.randn(2).double().requires_grad_().flip(0).grad_fn, [label], [label], 2)


def test_a_batchs_statistic_mixes_though_its_parameters_are_alone() -> None:
    net = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)]).double()
    x = torch.randn(N, D).double()
    out = net[0](x) * net[1](x.mean(0))
    _, walk = walk_of([out], N, net, [x])
    # Its rows are those of this forward, see walk.py; that the mean is of the batch is no gradient's matter.
    assert not walk.mixes
    out = net[0](x) * net[1](x).mean(0)
    _, walk = walk_of([out], N, net, [x])
    assert len(walk.mixed) == 2
    for axis in (0, 1):  # noise that a parameter scales has no owners, and is none of the parameter's own either
        _, walk = walk_of([net[0](x) + (torch.randn(N, D).double() * net[1].bias).softmax(axis)], N, net, [x])
        assert bool(walk.mixes) == (axis == 0)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_value_that_has_owners_is_of_the_batch_wherever_it_came_from(is_known: bool) -> None:
    """What is centred over the batch mixes, even if nobody knows the memory of the model's arguments."""
    net, x = nn.Sequential(nn.Linear(D, D)).double(), torch.randn(N, D).double()
    h = net(x)
    _, walk = walk_of([h - h.mean(0)], N, net, [x] if is_known else [])
    assert len(walk.mixed) == 2


EYE, MANY = 9 * torch.eye(4 * N).double(), torch.ones(N, N).double().to_sparse()
OF = torch.randint(0, N, (4 * N * N,), generator=torch.Generator().manual_seed(0))


def dealt(y: Tensor) -> Tensor:
    return torch.zeros(N).double().index_put((OF,), y.flatten().tanh(), accumulate=True)


MADE: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], bool]] = {
    # name: (what is made of parameters, data and indices, whether samples mix)
    "rows for each sample": (lambda net, x, ids: (x * net.rows).tanh() + net.bias.expand(N, 4 * N), False),
    "positions": (lambda net, x, ids: net.table[ids[:, :N]] + net.rows[torch.arange(N)[None]], False),
    "chunks, dealt out": (lambda net, x, ids: dealt(torch.cat((x + net.rows).chunk(2)[::-1])), False),
    "parts, one empty": (lambda net, x, ids: dealt(torch.cat((x + net.rows).split([N, 0])[::-1])), False),
    "rows, dealt out": (lambda net, x, ids: dealt(torch.stack((x + net.rows).unbind(0)[::-1])), False),
    "columns, dealt out": (lambda net, x, ids: dealt(torch.stack((x + net.rows).unbind(1), 0)), False),
    "an index": (lambda net, x, ids: (net.table + EYE)[ids], False),
    "embedding": (lambda net, x, ids: F.embedding(ids, net.table * (EYE > 0)), False),
    "an index of parts": (lambda net, x, ids: torch.cat([EYE[N:], net.rows])[ids], False),
    "embedding of parts": (lambda net, x, ids: F.embedding(ids, EYE.index_copy(0, torch.arange(N), net.rows)), False),
    "an index of samples and parts": (lambda net, x, ids: torch.cat([2 * x @ net.table, net.rows])[ids % N], True),
    "bags": (lambda net, x, ids: F.embedding_bag(ids, net.table / (net.table.abs() + EYE + 1)), False),
    "bags of what a Function made": (lambda net, x, ids: F.embedding_bag(ids, Doubles.apply(net.table)), False),
    "solve": (lambda net, x, ids: torch.linalg.solve(net.table + EYE, x.t()).t(), False),
    "solve for each sample": (lambda net, x, ids: torch.linalg.solve(net.table + EYE, x[..., None])[..., 0], False),
    "inverse": (lambda net, x, ids: (torch.linalg.inv(EYE + Doubles.apply(net.table)) @ x.t()).t(), False),
    "a graph of samples": (lambda net, x, ids: torch.sparse.mm(MANY, 2 * x @ net.table), True),
    "a graph of samples, of data beside parameters": (lambda net, x, ids: torch.sparse.mm(MANY, 2 * x + net.bias), True),
    # That what stands beside rows for each is of the batch is no gradient's matter, see walk.py.
    "a graph of rows for each": (lambda net, x, ids: torch.sparse.mm(MANY, 2 * x + net.rows), False),
    "samples that a Function made": (lambda net, x, ids: torch.sparse.mm(MANY, Doubles.apply(2 * x + net.bias)), True),
    "an inner step by the batch's gradient": (lambda net, x, ids: x @ (net.table - torch.autograd.grad(
        (x @ net.table).square().mean(), net.table, create_graph=True)[0]), True),
    "bags of samples": (lambda net, x, ids: F.embedding_bag(ids % N, 2 * x @ net.table), True),
}  # fmt: skip


@pytest.mark.parametrize("how", MADE)
def test_values_beside_parameters_are_tables_where_their_axes_are_those_of_parameters(how: str) -> None:
    """No number tells a sum over samples from what mixes them; N divides all sizes."""
    net = nn.ParameterDict(
        {"rows": torch.randn(N, 4 * N), "bias": torch.randn(1, 4 * N), "table": torch.randn(4 * N, 4 * N)}
    )
    x, ids = torch.randn(N, 4 * N).double(), torch.randint(0, 4 * N, (N, 40))
    out = MADE[how][0](net.double(), x, ids)
    assert bool(walk_of([out], N, net, [x])[1].mixes) == MADE[how][1]
    check([out], N, net, [x])
