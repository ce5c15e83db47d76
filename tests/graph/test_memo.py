"""Forwards whose graphs look alike are told apart, and what a memo keeps is what a walk would find."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from one_at_a_time import by_memo, check, judge, traced, walk_of
from pairs import CHANGING, ORDER, PAIRS, PERMUTED, N, Net, between, eye, leaf
from pairs import D as WIDTH
from random_programs import OPERATIONS, Doubles, Program, Step
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autograd_hacks.graph import probed
from autograd_hacks.graph.label import NOBODY, At, Entries, same
from autograd_hacks.graph.memo import Memo
from autograd_hacks.graph.probed import Asked, confirmed
from autograd_hacks.graph.walk import Walk, walked


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_that_look_alike_have_labels_of_their_own(name: str) -> None:
    make, axis = PAIRS[name]
    memo = Memo()
    for k in (0, 0, 0, 1, 0, 1, 1, 1):
        torch.manual_seed(0)
        out = make(k)
        label = At(axis, 1, out.shape[axis] // N)
        trace, memory = traced([out])
        walk = memo.walk(trace, {0: label}, N, memory)
        assert not judge([out], N, labels=[label], walk=walk, trace=trace).wrong
        assert_same(walk, walked(trace, {0: label}, N, memory))


def assert_same(a: Walk, b: Walk) -> None:
    assert all(same(x, y) for own, other in zip(a.labels, b.labels) for x, y in zip(own, other))
    assert (a.uses, a.mixes, a.mixed) == (b.uses, b.mixes, b.mixed)


def layers(count: int = 2) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(count)]).double()


def test_parameters_are_told_apart_by_identity() -> None:
    net, memo, x = layers(), Memo(), torch.randn(N, 4).double()
    for first, second in (net, net[::-1], net):
        by_memo(memo, second(first(x)), N, net, [x])
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
    assert probed.confirmed(written.grad_fn, probed.Asked([At(0)], [At(0), At(0)]), samples)

    def leak(_: object, grads: list[Tensor]) -> list[Tensor]:
        calls.append(grads[0].clone())
        grads[0][-1, 0] += part(calls[-1])
        return [grads[0]] * 2

    monkeypatch.setattr(probed, "_ask", leak)
    doubled: Any = torch.randn(samples, 3, requires_grad=True) + torch.randn(samples, 3, requires_grad=True)
    answers = [probed.confirmed(doubled.grad_fn, probed.Asked([At(0)], [At(0), At(k)]), samples) for k in (0, 1)]
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


# A random program of 40 operations, edited at a random step, is right or refused in that very step


steps = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 5), st.integers(0, 5))
edits = st.tuples(st.integers(0, 39), st.sampled_from(["put", "insert", "drop"]), steps)


def edited(program: Sequence[Step], edit: tuple[int, str, Step]) -> list[Step]:
    at, how, step = edit
    found = list(program)
    at %= max(1, len(found))
    found[at : at + (how != "insert")] = [] if how == "drop" else [step]
    return found


LONG, SHORT = (st.lists(steps, min_size=least, max_size=most) for least, most in ((40, 40), (2, 8)))


@settings(max_examples=55)
@given(size=st.integers(2, 4), program=LONG | SHORT | SHORT, edit=edits, when=st.integers(1, 2))
def test_programs(size: int, program: list[Step], edit: tuple[int, str, Step], when: int) -> None:
    """Few short ones mix samples, so that more of their values have owners."""
    model, memo = Program(size), Memo()
    for step in range(3):
        model.program = edited(program, edit) if step == when else program
        x = torch.randn(size, size, size, dtype=torch.float64)
        out = model(x)
        found = judge([out], size, model, **by_memo(memo, out, size, model, [x]))
        assert not found.wrong, found.wrong
        assert found.rows < 1e-7, found.rows


# Each forward is labelled by itself: programs that change are right, or refused, in the very step


@pytest.mark.parametrize("name", CHANGING)
def test_a_program_that_changes_is_right_or_refused_in_that_step(name: str) -> None:
    net, memo = Net(between(name)).double(), Memo()
    _, off, on = CHANGING[name]
    torch.set_default_dtype(torch.float64)
    try:
        for flag in (0, 0, 1, 1, 0, 1):
            x = torch.randn(N, WIDTH)
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
    out = net(torch.randn(N, WIDTH).double())
    trace, walk = walk_of([out], N, net)
    use = next(use for use in walk.uses if trace.kinds[use.node].name == "AddmmBackward0")
    for k in (next(k for k, own in enumerate(walk.labels) if own == [At(0)]), use.node):
        walk.labels[k] = [At(1)]
        found = judge([out], N, net, walk=walk, trace=trace)
        assert found.wrong if k != use.node else found.rows > 0.1
        walk.labels[k] = [At(0)]


def test_nobodys_factor_may_be_a_samples_too() -> None:
    label = [Entries(torch.tensor([0, NOBODY]))]
    assert not confirmed(leaf(2).flip(0).grad_fn, Asked(label, label), 2)


def test_a_batchs_statistic_mixes_though_its_parameters_are_alone() -> None:
    net, x = layers(), torch.randn(N, WIDTH).double()
    out = net[0](x) * net[1](x.mean(0))
    _, walk = walk_of([out], N, net, [x])
    # Its rows are those of this forward, see walk.py; that the mean is of the batch is no gradient's matter.
    assert not walk.mixes
    out = net[0](x) * net[1](x).mean(0)
    _, walk = walk_of([out], N, net, [x])
    assert len(walk.mixed) == 2
    for axis in (0, 1):  # noise that a parameter scales has no owners, and is none of the parameter's own either
        _, walk = walk_of([net[0](x) + (torch.randn(N, WIDTH).double() * net[1].bias).softmax(axis)], N, net, [x])
        assert bool(walk.mixes) == (axis == 0)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_value_that_has_owners_is_of_the_batch_wherever_it_came_from(is_known: bool) -> None:
    """What is centred over the batch mixes, even if nobody knows the memory of the model's arguments."""
    net, x = nn.Sequential(nn.Linear(WIDTH, WIDTH)).double(), torch.randn(N, WIDTH).double()
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


# Checkpoints that aren't reentrant


def test_what_laws_read_in_a_checkpoint_is_what_it_computes_again() -> None:
    net, memo, x = layers(3), Memo(), torch.randn(N, WIDTH).double()

    def part(h: Tensor) -> Tensor:
        return net[1](h.tanh()[PERMUTED])

    for wrapped in (False, True, False, True):
        h = net[0](x)
        out = net[2](checkpoint(part, h, use_reentrant=False) if wrapped else part(h))
        found = by_memo(memo, out, N, net, [x])
        assert any(isinstance(own[0], Entries) for own in found["walk"].labels if own)
        assert not judge([out], N, net, **found).wrong
