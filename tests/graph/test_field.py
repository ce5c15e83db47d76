"""What could have sunk laws by node: checkpoints, loops over a hooked cell, shared layers, steps within a forward."""

from typing import Any

import torch
import torch.nn as nn
from one_at_a_time import by_memo, check, judge, traced
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autograd_hacks.graph.label import At, Entries
from autograd_hacks.graph.memo import Memo
from autograd_hacks.graph.walk import walked

N, D = 4, 4
PERMUTED = torch.tensor([1, 0, 3, 2])


def linear(count: int = 2) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(D, D) for _ in range(count)]).double()


def inputs(*sizes: int) -> Tensor:
    return torch.randn(*sizes).double()


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
