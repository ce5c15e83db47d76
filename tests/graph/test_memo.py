"""Forwards whose graphs look alike are told apart, and what a memo keeps is what a walk would find."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from one_at_a_time import by_memo, check, judge, traced
from pairs import ORDER, PAIRS, PERMUTED, N, eye, leaf
from torch import Tensor

from autograd_hacks.graph import probed
from autograd_hacks.graph.label import At, Label, same
from autograd_hacks.graph.memo import Memo
from autograd_hacks.graph.walk import Walk, walked


def label_on(x: Tensor, axis: int) -> Label:
    return At(axis, 1, x.shape[axis] // N)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_that_look_alike_have_labels_of_their_own(name: str) -> None:
    make, axis = PAIRS[name]
    memo = Memo()
    for k in (0, 0, 0, 1, 0, 1, 1, 1):
        torch.manual_seed(0)
        out = make(k)
        label = label_on(out, axis)
        trace, memory = traced([out])
        walk = memo.walk(trace, {0: label}, N, memory)
        assert not judge([out], N, labels=[label], walk=walk, trace=trace).wrong
        assert_same(walk, walked(trace, {0: label}, N, memory))


def assert_same(a: Walk, b: Walk) -> None:
    assert all(same(x, y) for own, other in zip(a.labels, b.labels) for x, y in zip(own, other))
    assert (a.uses, a.mixes, a.mixed, a.unknown) == (b.uses, b.mixes, b.mixed, b.unknown)


def layers() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).double()


def test_parameters_are_told_apart_by_identity() -> None:
    net, memo, x = layers(), Memo(), torch.randn(N, 4).double()
    a, b = net
    for out in (b(a(x)), a(b(x)), b(a(x))):
        by_memo(memo, out, N, net, [x])
    assert (memo.hits, memo.misses) == (1, 2)


def test_roots_and_their_labels_are_part_of_the_key() -> None:
    net, memo, x = layers(), Memo(), torch.randn(N, 4).double()
    both = torch.cat([net[0](x), net[1](x)]).chunk(2)
    for out, label, samples in ((both[0], At(0), N), (both[1], At(0), N), (both[0], At(1), N), (both[0], At(0, 1, 2), 2)):
        by_memo(memo, out, samples, net, [x], label)
    assert memo.misses == 4


def test_a_number_that_no_law_reads_is_no_part_of_the_key_nor_are_inputs_that_need_gradients() -> None:
    net, memo = layers(), Memo()
    for step in range(5):
        x = torch.randn(N, 4).double().requires_grad_()
        h = F.dropout(F.leaky_relu(net[0](x).clamp(max=1 / (1 + step)), 0.1 * step), 0.1 + 0.1 * step)
        by_memo(memo, torch.add(net[1](h), x, alpha=step), N, net, [x])
    assert memo.misses == 1


def test_another_size_is_another_key_and_their_number_is_bounded() -> None:
    net, memo = nn.ParameterList([torch.randn(4)]), Memo(size=3)
    for T in (8, 7, 6, 5, 4, 3, 2, 1):
        out = (torch.randn(N, T, 4) * net[0]).tanh()
        assert not judge([out], N, net, **by_memo(memo, out, N, net)).wrong
    assert (len(memo), memo.misses) == (3, 8)


INDEXED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "samples": (lambda h, index: h[index], 0),
    "features": (lambda h, index: h[:, index], 3),
    "some features of permuted samples": (lambda h, index: torch.cat([h.t()[index[:2]][:, PERMUTED]] * 2).t(), 3),
}


@pytest.mark.parametrize("what", INDEXED)
def test_an_index_that_is_written_to_between_forwards_is_seen_if_it_moves_samples(what: str) -> None:
    net, memo, index = layers(), Memo(), torch.arange(N)
    for order in (ORDER, PERMUTED, ORDER, PERMUTED.flip(0)):
        index.copy_(order)
        out = net[1](INDEXED[what][0](net[0](torch.randn(N, 4).double()), index))
        check([out], N, net, **by_memo(memo, out, N, net))
    assert memo.hits == INDEXED[what][1]


ZEROS = {
    "BatchNorm's weight": lambda h, k: F.batch_norm(
        h, None, None, torch.full((4,), float(k)).double().requires_grad_(), None, True
    ),
    "a matrix over samples": lambda h, k: (k * (eye(0) + 1)) @ h,
    "a kernel over samples": lambda h, k: F.conv1d(h.t()[None], torch.full((4, 4, 3), float(k)).double(), padding=1)[0].t(),
    "a gate before a mean": lambda h, k: h + torch.full((), float(k)).double() * h.mean(0),
    "low rank": lambda h, k: h @ (k * eye(0)[:, :2]) @ torch.ones(2, 4).double(),
    "a saturated gate": lambda h, k: h * (1e9 * (1 - k) - 1e12 * (1 - k) + h.mean(0, keepdim=True)).sigmoid(),
}


@pytest.mark.parametrize("name", ZEROS)
def test_what_an_operand_of_zeros_hides_is_not_kept(name: str) -> None:
    net, memo = layers(), Memo()
    for k in (0, 1, 0, 1):
        x = torch.randn(N, 4).double()
        out = net[1](ZEROS[name](net[0](x), k))
        found = by_memo(memo, out, N, net, [x])
        check([out], N, net, **found)
        assert found["walk"].mixed or not k or name == "low rank"


def test_another_default_device_changes_nothing() -> None:
    net, x = layers(), torch.randn(N, 4).double()
    h = net[0](x)
    out = net[1](torch.cat([h[2:], h[:2]])[torch.tensor([1, 0, 3, 2])].flip(0).unfold(0, 1, 1)[..., 0].roll(1, 0))
    trace, memory = traced([out], net, [x])
    torch.set_default_device("meta")
    try:
        walk = walked(trace, {0: At(0)}, N, memory)
    finally:
        torch.set_default_device(None)
    assert_same(walk, walked(trace, {0: At(0)}, N, memory))


@pytest.mark.parametrize("samples", [2, 16, 65, 4097])
@pytest.mark.parametrize(
    "part",
    [
        lambda g: 0,
        *(lambda g, size=size: size * g[0, 0] for size in (1e-5, 1.0, 1e5)),
        lambda g: g[-1, 0] * (g[:, 0] != 0).sum(),
        lambda g: g[-1, 0] / g.norm(),
    ],
    ids=["none", "small", "equal", "large", "by number", "by norm"],
)
def test_an_answer_is_confirmed_by_few_calls_and_a_leak_is_seen(
    samples: int, part: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Something of the first sample's gradient leaks to the last; their factors may be alike in all but one call."""
    calls, written = list[Tensor](), torch.randn(samples, 3, requires_grad=True) * 1
    written[:, 1] = torch.randn(samples, requires_grad=True)
    assert probed.confirmed(written.grad_fn, [At(0)], [At(0), At(0)], samples)

    def leak(_: object, grads: list[Tensor]) -> list[Tensor]:
        calls.append(grads[0].clone())
        grads[0][-1, 0] += part(calls[-1])
        return [grads[0]] * 2

    monkeypatch.setattr(probed, "_ask", leak)
    doubled: Any = torch.randn(samples, 3, requires_grad=True) + torch.randn(samples, 3, requires_grad=True)
    answers = [probed.confirmed(doubled.grad_fn, [At(0)], [At(0), At(k)], samples) for k in (0, 1)]
    assert (answers, len(calls)) == (["none" in request.node.name, False], 2 * {65: 3, 4097: 4}.get(samples, 2))


A, B, C, D = (leaf(2, 3), leaf(3, 2), leaf(2, 2), leaf(1, 3))
SIZES: dict[str, Callable[[], list[Tensor]]] = {
    # Each list has the same kinds of nodes on inputs of the same sizes; a hidden operand or a number makes other sizes.
    "add": lambda: [D + torch.ones(n, 3).double() for n in (1, 2)],
    "sub": lambda: [D - torch.ones(n, 3).double() for n in (1, 2)],
    "mul": lambda: [D * torch.ones(n, 3).double() for n in (1, 2)],
    "div": lambda: [D / torch.ones(n, 3).double() for n in (1, 2)],
    "mm": lambda: [A.mm(torch.ones(3, n).double()) for n in (1, 2)],
    "addmm": lambda: [torch.addmm(D, A.mT.mm(C), torch.ones(2, 3).double() * n) for n in (1, 2)]
    + [torch.addmm(D, torch.ones(n, 2).double(), A) for n in (1, 2)],
    "bmm": lambda: [A[None].bmm(torch.ones(1, 3, n).double()) for n in (1, 2)],
    "baddbmm": lambda: [
        torch.baddbmm(D[:, :1, None], torch.ones(n, 1, 3).double(), torch.ones(n, 3, 2).double()) for n in (1, 2)
    ],
    "transpose": lambda: [A[None].transpose(0, n) for n in (1, 2)],
    "permute": lambda: [A[None].permute(order) for order in ((0, 2, 1), (1, 0, 2), (2, 1, 0))],
    "unsqueeze": lambda: [A.unsqueeze(n) for n in (0, 1, 2)],
    "where": lambda: [torch.where(torch.ones(n, 1, 3).bool(), A, A * 2) for n in (1, 2)],
    "masked_fill": lambda: [D.masked_fill(torch.zeros(n, 3).bool(), 0.0) for n in (1, 2)],
    "expand": lambda: [D.expand(n, 3) for n in (1, 2)],
    "view": lambda: [A.view(shape) for shape in ((6,), (3, 2), (1, 6))],
    "slice": lambda: [A[:, :n] for n in (1, 2)],
    "then": lambda: [(D * torch.ones(n, 3).double()).tanh().t() for n in (1, 2)],
    "pad": lambda: [F.pad(A, (n, 0)) for n in (1, 2)],
    "pool": lambda: [F.avg_pool1d(A[None], n, 1) for n in (1, 2)],
    "conv": lambda: [F.conv1d(A[None], B[:2, :, None], padding=n) for n in (0, 1)],
    "sum": lambda: [A.sum(1, keepdim=keeps) for keeps in (False, True)],
    "stack": lambda: [torch.stack([A, A], n) for n in (0, 1, 2)],
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_dont_follow_from_others_are_part_of_the_key(name: str) -> None:
    every = SIZES[name]()
    assert len({x.shape for x in every}) > 1
    keys = {traced([x])[0].key: x.shape for x in every}
    assert {x.shape for x in every} <= set(keys.values())
    for x in every:
        assert keys[traced([x])[0].key] == x.shape
