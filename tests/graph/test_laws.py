"""A law by rule says what asking the node says, and what one backward pass a sample says, for torch's own examples of each
operation and of its derivative: random sizes, numbers and places of the samples, and each node by itself."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from of_devices import BATCH_NORMS, first_of
from one_at_a_time import Leaf
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

from autograd_hacks.graph.axes import AXES
from autograd_hacks.graph.label import At, Entries, Label, One, Several, entries
from autograd_hacks.graph.laws import kind_of, law_of, node_name
from autograd_hacks.graph.moves import MOVES
from autograd_hacks.graph.probed import CannotAsk, probed
from autograd_hacks.support.graph import Value, made, shape_of
from autograd_hacks.support.sweep import call_node, fitted

pytestmark = pytest.mark.filterwarnings("ignore")

SKIPPED = ("linalg.lstsq", "torch.ops", "svd_lowrank", "pca_lowrank", "linalg.eig", "nn.functional.linear_cross_entropy")
"""Operations without a derivative for their own examples, or that torch runs as Functions of its own."""
OPS = [op for op in op_db if op.supports_autograd and torch.float64 in op.dtypes and not op.name.startswith(SKIPPED)]


def nodes_of(op: Any, samples: int, draws: random.Random) -> Iterator[Any]:
    """The nodes behind an operation's results, and behind their derivatives, for some of its examples."""
    examples = list(islice(op.sample_inputs("cpu", torch.float64, requires_grad=True), 60))
    for example in draws.sample(examples, min(samples, len(examples))):
        try:
            out = op(example.input, *example.args, **example.kwargs)
            outs = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.grad_fn is not None]
        except Exception:  # an example that isn't for this build
            continue
        yield from _behind(outs)
        ins = [x for x in tree_leaves((example.input, example.args)) if isinstance(x, Tensor) and x.requires_grad]
        try:
            weighted = [(x * torch.randn_like(x)).sum() for x in outs]
            grads = torch.autograd.grad(weighted, ins, create_graph=True, allow_unused=True)
        except (RuntimeError, NotImplementedError):  # no second derivative
            continue
        yield from _behind([g for g in grads if g is not None and g.grad_fn is not None])


def _behind(outs: Sequence[Tensor], most: int = 14) -> Iterator[Any]:
    waiting, seen = [x.grad_fn for x in outs], set()
    while waiting and len(seen) < most:
        node = waiting.pop()
        if node is None or node in seen or type(node) is Leaf:
            continue
        seen.add(node)
        waiting += [ahead for ahead, _ in node.next_functions]
        yield node


def placed(outs: Sequence[Sequence[int]], draws: random.Random) -> tuple[list[Label], int] | None:
    """Labels of a node's outputs and N: samples on an axis, perhaps among positions, or anywhere."""
    o = draws.randrange(len(outs))
    sizes = outs[o]
    if not sizes:
        return None
    d = draws.randrange(len(sizes))
    ways = [(n, inner) for n in range(2, sizes[d] + 1) if sizes[d] % n == 0
            for inner in range(1, sizes[d] // n + 1) if sizes[d] // n % inner == 0]  # fmt: skip
    if not ways:
        return None
    samples, inner = draws.choice(ways)
    label: Label = At(d, sizes[d] // (samples * inner), inner)
    chance = draws.random()
    if chance < 0.25:
        torch.manual_seed(draws.randrange(1000))
        label = Entries(torch.randint(0, samples, [s if k == d or draws.random() < 0.5 else 1 for k, s in enumerate(sizes)]))
    elif chance < 0.3:
        label = One(draws.randrange(samples))
    labels: list[Label] = [None] * len(outs)
    labels[o] = label
    return labels, samples


def owners(node: Any, labels: Sequence[Label], samples: int) -> list[Tensor | None]:
    """One backward pass a sample: at each input, which samples contribute to each entry, N *shape."""
    given = [
        (None if label is None else torch.randn(tuple(m.shape), dtype=m.dtype), label)
        for m, label in zip(made(node), labels)
    ]
    found: list[Any] = []
    for n in range(samples):
        own = [
            None if g is None else torch.where(entries(at, g.shape, samples) == n, g, torch.zeros_like(g)) for g, at in given
        ]  # type: ignore[arg-type]
        out = call_node(node, own)
        assert out is not None
        found.append([None if ahead is None or x is None else fitted(x, Value(ahead, number)).nan_to_num(0, 0, 0) != 0
                      for x, (ahead, number) in zip(out, node.next_functions)])  # fmt: skip
    return [None if any(x is None for x in own) else torch.stack(own) for own in zip(*found)]


def assert_right(what: str, label: Label, truth: Tensor, exact: bool = False) -> None:
    if label is None:
        assert not truth.any(), f"{what}: nothing, but something arrives"
    elif isinstance(label, Several):
        assert not exact or int(truth.sum(0).max()) > 1, f"{what}: several, but each entry has one"
    else:
        at = entries(label, truth.shape[1:], len(truth)).expand(truth.shape[1:])
        assert not any((own & (at != n)).any() for n, own in enumerate(truth)), f"{what}: {label}"


@pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.name}{op.variant_test_name and '-'}{op.variant_test_name}")
def test_rule_probe_and_one_backward_a_sample_agree(op: Any, request: pytest.FixtureRequest) -> None:
    draws = random.Random(request.node.name)
    for node in nodes_of(op, 3, draws):
        kind, outs = kind_of(node), [tuple(m.shape) for m in made(node)]
        if any(0 in sizes for sizes in outs) or (found := placed(outs, draws)) is None:
            continue
        labels, samples = found
        ins = [None if ahead is None else tuple(shape_of(Value(ahead, number))) for ahead, number in node.next_functions]
        numbers = None if kind.get is None else kind.get(node)
        try:
            truth = owners(node, labels, samples)
        except (RuntimeError, NotImplementedError):  # no derivative of its own
            continue
        law = law_of(kind, node, numbers, labels, outs, ins, [False] * len(ins), samples)
        what = f"{kind.name}, outputs {outs}, inputs {ins}, N = {samples}, {labels}, {numbers}"
        for label, own in zip(law.ins, truth):
            if own is not None:
                assert_right(f"by rule, {what}", label, own)
        try:
            asked = probed(node, labels, samples)
        except CannotAsk:
            continue
        for label, own in zip(asked, truth):
            if own is not None and not torch.isnan(own.double()).any():
                assert_right(f"by asking, {what}", label, own)


# What is done to a tensor.
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a column": lambda h, v: h[:, 2].copy_(v[:, 0]),
    "a row": lambda h, v: h[1].copy_(v[2]),
    "rows in another order": lambda h, v: h[:3].copy_(v[1:].flip(0)),
    "zeros": lambda h, v: h[:, 1:3].zero_(),
    "one value for all": lambda h, v: h[:2].copy_(v[3]),
    "twice": lambda h, v: h[:, 1:3].mul_(2),
    "a product": lambda h, v: h[1:3].mul_(v[:2]),
    "sums of samples": lambda h, v: h[:, 1:5].cumsum_(0),
    "sums of positions": lambda h, v: h[:, 1:5].cumsum_(1),
    "strided": lambda h, v: h.as_strided((6, 4), (1, 6)),
    "strided, overlapping": lambda h, v: h.as_strided((5, 8), (4, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", WRITES)
def test_nodes_that_write(name: str, dtype: torch.dtype) -> None:
    h, v = torch.randn(4, 6, dtype=dtype, requires_grad=True) * 1, torch.randn(4, 6, dtype=dtype, requires_grad=True)
    written: Any = WRITES[name](h, v)
    node: Any = (written if name.startswith("strided") else h).grad_fn
    sizes = made(node)[0].shape
    for label in [At(k, sizes[k] // (2 * inner), inner) for k in (0, 1) for inner in (1, 2) if sizes[k] % (2 * inner) == 0]:
        for found, own in zip(probed(node, [label], 2), owners(node, [label], 2)):
            assert_right(f"{name}, {label}", found, torch.zeros(2, *sizes) if own is None else own)


aten_rnn = first_of(torch.ops.aten._cudnn_rnn)

# Of several samples, whether along their axis (MIXED) or to a value without one (SUM).  They differ only in that SUM may be
# a use of a parameter, so no gradient tells them apart.
SEVERAL: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], int, str]] = {
    # name: (the operation, the sizes of what it is given, the samples' axis in its output, the labels at its inputs)
    "softmax over samples": (lambda x: x.softmax(0), [(4, 3)], 0, "MIXED"),
    "renorm of columns": (lambda x: x.renorm(2, 1, 1.0), [(4, 3)], 0, "MIXED"),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (3,), w, b), [(4, 3), (3,), (3,)], 0, "At SUM SUM"),
    "layer norm over samples": (lambda x, w, b: F.layer_norm(x, (4, 3), w, b), [(4, 3)] * 3, 0, "MIXED At At"),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(4, 3), (3,), (3,)], 0, "MIXED SUM SUM"),
    **{
        f"{own.__name__}{', training' * on}": (
            lambda x, w, b, own=own, on=on: first_of(own)(x, w, b, x.new_zeros(3), x.new_ones(3), on, 0.1, 1e-5),
            [(4, 3), (3,), (3,)],
            0,
            f"{'MIXED' if on else 'At'} SUM SUM",
        )
        for own in BATCH_NORMS.values()
        for on in (True, False)
    },
    "LSTM cell": (
        first_of(torch.ops.aten._thnn_fused_lstm_cell),
        [(4, 12), (4, 12), (4, 3), (12,), (12,)],
        0,
        "At At At SUM SUM",
    ),
    "GRU cell": (first_of(torch.ops.aten._thnn_fused_gru_cell), [(4, 9), (4, 9), (4, 3), (9,), (9,)], 0, "At At At SUM SUM"),
    **{
        f"RNN, axis {axis}{', batch_first' * first}": (
            lambda x, w, v, h, first=first: aten_rnn(
                x, [w, v], 2, None, h, None, 3, 3, 0, 1, first, 0.0, True, False, [], None
            ),
            [(4, 4, 2), (9, 2), (9, 3), (1, 4, 3)],
            axis,
            "MIXED SUM SUM MIXED" if first is bool(axis) else "At SUM SUM At",
        )
        for axis in (0, 1)
        for first in (True, False)
    },
    "group norm of samples": (lambda x, w, b: F.group_norm(x, 2, w, b), [(1, 4, 3), (4,), (4,)], 1, "MIXED At At"),
    "convolution": (F.conv1d, [(4, 2, 5), (3, 2, 3), (3,)], 0, "At SUM SUM"),
    "convolution along samples": (F.conv1d, [(1, 2, 6), (3, 2, 3), (3,)], 2, "MIXED SUM SUM"),
    "convolution to samples": (F.conv1d, [(1, 4, 5), (4, 4, 3), (4,)], 1, "MIXED SUM At"),
    "solve": (torch.linalg.solve, [(4, 4), (4, 2)], 0, "MIXED MIXED"),
    "solve with one matrix": (torch.linalg.solve, [(4, 4), (4, 4, 2)], 0, "SUM At"),
    "distances": (torch.cdist, [(4, 3), (5, 3)], 0, "At SUM"),
    "attention": (F.scaled_dot_product_attention, [(1, 1, 4, 3)] * 3, 2, "At MIXED MIXED"),
    "addmm": (torch.addmm, [(2,), (4, 3), (3, 2)], 0, "SUM At SUM"),
    "bmm over positions": (torch.bmm, [(2, 4, 3), (2, 3, 2)], 1, "At SUM"),
    "mv": (torch.mv, [(4, 3), (3,)], 0, "At SUM"),
    "addition": (torch.add, [(4, 3), (3,)], 0, "At SUM"),
    "expand": (lambda x: x.expand(4, 3), [(1, 3)], 0, "SUM"),
    "repeat": (lambda x: x.repeat(4, 1), [(1, 3)], 0, "SUM"),
    "grid": (lambda x, at: F.grid_sample(x, at, align_corners=True), [(1, 1, 4, 4), (1, 4, 4, 2)], 2, "MIXED At"),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_samples_are_told_along_their_axis_or_not(name: str) -> None:
    operation, sizes, axis, expected = SEVERAL[name]
    node: Any = operation(*(torch.randn(own, dtype=torch.float64, requires_grad=True) for own in sizes)).grad_fn
    outs, kind = [tuple(m.shape) for m in made(node)], kind_of(node)
    labels = [At(axis), *[None] * (len(outs) - 1)]
    law = law_of(kind, node, kind.get and kind.get(node), labels, outs, sizes, [False] * len(sizes), 4)
    assert " ".join("At" if isinstance(label, At) else str(label) for label in law.ins) == expected


@pytest.mark.slow
def test_all_kinds_of_the_tables_that_torch_makes_here_are_among_the_examples() -> None:
    here = {name for name in dir(torch._C._functions) if "Backward" in name}
    tables = {node_name(n) for n in (*AXES, *MOVES)}
    known = {name for name in here if name.split("Backward0")[0] in tables}
    draws = random.Random(0)
    met = {node.name() for op in OPS for node in nodes_of(op, 8, draws)}
    assert len(known & met) > 300, sorted(known - met)
