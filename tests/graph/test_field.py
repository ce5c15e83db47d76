"""What could have sunk laws by node: checkpoints, loops over a hooked cell, shared layers, steps within a forward."""

from typing import Any

import torch
import torch.nn as nn
from one_at_a_time import by_memo, check, judge, traced, walk_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autograd_hacks.graph.label import At, Entries
from autograd_hacks.graph.memo import Memo
from autograd_hacks.graph.trace import LEAF, Trace
from autograd_hacks.graph.walk import Memory, walked
from autograd_hacks.support.parts import memory_of

N, D = 4, 4
PERMUTED = torch.tensor([1, 0, 3, 2])


def linear(count: int = 2) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(D, D) for _ in range(count)]).double()


def inputs(*sizes: int) -> Tensor:
    return torch.randn(*sizes).double()


def ids(model: nn.Module) -> set[int]:
    return {id(x) for x in [*model.parameters(), *model.buffers()]}


# Checkpoints that aren't reentrant.


def test_a_checkpoint_runs_no_second_forward_and_its_labels_come_in_the_backward_pass() -> None:
    net, runs = linear(3), []

    def part(h: Tensor) -> Tensor:
        runs.append(1)
        return net[1](h.tanh()[PERMUTED])

    x = inputs(N, D)
    out = net[2](checkpoint(part, net[0](x), use_reentrant=False))
    trace, memory = traced([out], net, [x])
    walk = walked(trace, {0: At(0)}, N, memory)
    assert len(runs) == 1
    assert [trace.kinds[k].name for k in walk.deferred] == ["IndexBackward0"]
    assert not judge([out], N, net, walk=walk, trace=trace).wrong
    runs.clear()
    later: list[Any] = []
    node = trace.nodes[walk.deferred[0]]
    handle = node.register_prehook(lambda grads: later.append(walked(trace, {0: At(0)}, N, memory, walk.deferred)))
    out.backward(torch.ones_like(out), retain_graph=True)
    handle.remove()
    assert len(runs) == 1  # as without the walk
    settled = later[0]
    assert not settled.deferred
    check([out], N, net, walk=settled, trace=trace)
    assert any(isinstance(own[0], Entries) for own in settled.labels if own)


def test_a_memo_forgets_no_checkpoint() -> None:
    net, memo, x = linear(3), Memo(), inputs(N, D)

    def part(h: Tensor) -> Tensor:
        return net[1](h.tanh()[PERMUTED])

    for wrapped in (False, True, False, True):
        h = net[0](x)
        out = net[2](checkpoint(part, h, use_reentrant=False) if wrapped else part(h))
        found = by_memo(memo, out, N, net, [x])
        assert bool(found["walk"].deferred) or not wrapped
        assert not judge([out], N, net, **found).wrong


def test_a_reentrant_checkpoint_is_never_asked() -> None:
    net, runs = linear(3), []

    def part(h: Tensor) -> Tensor:
        runs.append(1)
        return net[1](h.tanh())

    out = net[2](checkpoint(part, net[0](inputs(N, D)), use_reentrant=True))
    _, walk = walk_of([out], N, net)
    assert len(runs) == 1
    assert "reentrant" in walk.mixes[0].why


# Loops over a hooked cell, and models that share a layer.


def test_a_walk_stops_at_what_an_earlier_forward_returned() -> None:
    cell, memo = nn.GRUCell(D, D).double(), Memo()
    h, ends, uses = inputs(N, D), set[Any](), 0
    for _ in range(5):
        h = cell(inputs(N, D), h)
        trace = Trace([(h.grad_fn, 0)], ids(cell), ends)
        memory = Memory({*map(memory_of, cell.parameters())}.__contains__)
        walk = memo.walk(trace, {0: At(0)}, N, memory)
        assert not walk.mixes
        assert all(walk.labels[k][0] == At(0) for k, node in enumerate(trace.nodes) if node in ends)
        uses += len(walk.uses)
        ends.add(h.grad_fn)
    assert uses == 5 * 4
    assert memo.misses == 2  # the first cell, whose state has no graph, and all others


def test_two_models_share_a_layer() -> None:
    shared = nn.Linear(D, D).double()
    one, other = nn.Sequential(shared, nn.Tanh()).double(), nn.Sequential(nn.Linear(D, D), shared).double()
    x = inputs(N, D)
    h = one(x)
    out = other(h)
    trace = Trace([(out.grad_fn, 0)], ids(other), {h.grad_fn})
    walk = walked(trace, {0: At(0)}, N, Memory({*map(memory_of, other.parameters())}.__contains__, {memory_of(h)}))
    assert sum(trace.leaf(_leaf_of(trace, use)) is shared.weight for use in walk.uses) == 1
    assert len(walk.uses) == 4


def _leaf_of(trace: Trace, use: Any) -> int:
    at, _ = trace.edges[use.node][use.place]
    while trace.kinds[at] is not LEAF:
        at, _ = trace.edges[at][0]
    return at


def test_an_inner_step_by_the_batchs_gradient_mixes() -> None:
    w, x = nn.Parameter(inputs(3, 1)), inputs(N, 3)
    (g,) = torch.autograd.grad((x @ w).square().mean(), w, create_graph=True)
    out = (x @ (w - g)).square()[:, 0]
    _, walk = walk_of([out], N, nn.ParameterList([w]), [x])
    assert walk.mixes
