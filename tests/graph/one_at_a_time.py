"""What is true of a graph: one backward pass a sample through that very forward, seen at every node.

Imports from the library only what is judged."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autograd_hacks.graph.label import At, Label, One, Several, entries
from autograd_hacks.graph.memo import Memo
from autograd_hacks.graph.trace import LEAF, Trace
from autograd_hacks.graph.walk import Memory, Walk, walked
from autograd_hacks.support.graph import Value
from autograd_hacks.support.parts import memory_of
from autograd_hacks.support.sweep import call_node, fitted

Leaf: Any = torch._C._functions.AccumulateGrad


@dataclass
class Judged:
    """What was found of one forward's labels.

    wrong: labels that name another sample than the one that the gradient belongs to, or none
    early: values that are said to have several samples, though each entry has one
    owned: values with owners that were confirmed
    rows: the largest error of a parameter's rows, of their length
    """

    wrong: list[str] = field(default_factory=list)
    early: Counter[str] = field(default_factory=Counter)
    owned: int = 0
    rows: float = 0.0


PLANS: deque[Any] = deque(maxlen=2)


def traced(outputs: Sequence[Tensor], model: nn.Module | None = None, given: Sequence[Tensor] = ()) -> tuple[Trace, Memory]:
    """The graph behind outputs, and what is known of memory."""
    held = [] if model is None else [*model.parameters(), *model.buffers()]
    roots, fixed = [(edge.node, edge.output_nr) for edge in map(get_gradient_edge, outputs)], {id(x) for x in held}
    trace = Trace(roots, fixed)
    PLANS.append(trace.plan)
    again, own = [Trace(roots, fixed, (), plan) for plan in PLANS], {*map(memory_of, held)}
    assert all((one.key, one.nodes) == (trace.key, trace.nodes) for one in again)  # found along another, it is the same
    return trace, Memory(lambda x: memory_of(x) in own, {*map(memory_of, given)})


def root_label(samples: int) -> Label:
    return One(0) if samples == 1 else At(0)


def walk_of(
    outputs: Sequence[Tensor], samples: int, model: nn.Module | None = None, given: Sequence[Tensor] = (),
    labels: Sequence[Label] | None = None,
) -> tuple[Trace, Walk]:  # fmt: skip
    trace, memory = traced(outputs, model, given)
    found = labels or [root_label(samples) for _ in outputs]
    return trace, walked(trace, dict(enumerate(found)), samples, memory)


class Passes:
    """One backward pass a sample from random gradients at the outputs, and one of the whole batch."""

    def __init__(self, trace: Trace, outputs: Sequence[Tensor], labels: Sequence[Label], samples: int) -> None:
        self.trace, self.samples = trace, samples
        whole = [torch.randn(x.shape, dtype=x.dtype) for x in outputs]
        self.alone = []  # by sample: what arrives at each node, and at each leaf
        for n in range(samples):
            own = [torch.where(entries(at, g.shape, samples) == n, g, torch.zeros_like(g)) for at, g in zip(labels, whole)]  # type: ignore[arg-type]
            self.alone.append(self._run(outputs, own))
        self.whole = self._run(outputs, whole)

    def _run(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> tuple[dict[int, Sequence[Tensor | None]], list[Tensor | None]]:
        seen: dict[int, Sequence[Tensor | None]] = {}
        nodes = self.trace.nodes
        inner = [k for k, kind in enumerate(self.trace.kinds) if kind is not LEAF]

        def look(k: int) -> Callable[[Any], None]:
            return lambda arrived: seen.update({k: tuple(g if g is None else g.detach().clone() for g in arrived)})

        handles = [nodes[k].register_prehook(look(k)) for k in inner]
        try:
            found = torch.autograd.grad(
                outputs, [nodes[k].variable for k in self.trace.leaves], grads, retain_graph=True, allow_unused=True
            )
        finally:
            for handle in handles:
                handle.remove()
        return seen, list(found)

    def owners(self, k: int, number: int) -> Tensor | None:
        """Which samples contribute to each entry, N *shape."""
        each = [seen.get(k, [None] * (number + 1))[number] for seen, _ in self.alone]
        like = next((g for g in each if g is not None), None)
        if like is None:
            return None
        return torch.stack([torch.zeros_like(like) if g is None else g for g in each]).nan_to_num(0, 0, 0) != 0


def judge(
    outputs: Sequence[Tensor], samples: int, model: nn.Module | None = None, given: Sequence[Tensor] = (),
    labels: Sequence[Label] | None = None, walk: Walk | None = None, trace: Trace | None = None,
) -> Judged:  # fmt: skip
    """Compares a walk's labels with the truth at each value, and the rows of its uses with those of each parameter."""
    labels = labels or [root_label(samples) for _ in outputs]
    if walk is None or trace is None:
        trace, walk = walk_of(outputs, samples, model, given, labels)
    passes, found = Passes(trace, outputs, labels, samples), Judged()
    of_parameters = _behind(trace, [use[:2] for use in walk.uses if use.node >= 0])
    mixed = [k for k, own in enumerate(walk.labels) if any(isinstance(label, Several) for label in own)]
    unjudged = _behind(trace, [(k, place) for k in mixed for place in range(len(trace.edges[k]))])
    for k, kind in enumerate(trace.kinds):
        if kind is LEAF or k in of_parameters:
            continue
        for number, label in enumerate(walk.labels[k]):
            owners = passes.owners(k, number)
            if owners is None or (label is None and k in unjudged):
                continue
            _compare(found, f"{kind.name}, {tuple(owners.shape[1:])}", label, owners, samples)
    found.rows = _rows(passes, trace, walk)
    return found


def check(outputs: Sequence[Tensor], samples: int, model: nn.Module | None = None, *given: Any, **more: Any) -> Judged:
    """`judge`: no label is wrong, and rows are right."""
    found = judge(outputs, samples, model, *given, **more)
    assert not found.wrong, found.wrong
    assert found.rows < 1e-9
    return found


def by_memo(
    memo: Memo, out: Tensor, samples: int, model: nn.Module | None = None, given: Sequence[Tensor] = (), label: Label = None
) -> dict[str, Any]:
    """The walk of a memo and its trace, by their names.  label: of the output, if not of samples on axis 0"""
    trace, memory = traced([out], model, given)
    return {"walk": memo.walk(trace, {0: label or At(0)}, samples, memory), "trace": trace}


def _compare(found: Judged, what: str, label: Label, owners: Tensor, samples: int) -> None:
    if isinstance(label, Several):
        if samples > 1 and int(owners.sum(0).max() if owners.numel() else 0) == 1:
            found.early[what] += 1
    elif label is None:
        if owners.any():
            found.wrong.append(f"{what}: nothing, but something arrives")
    else:
        at = entries(label, owners.shape[1:], samples).expand(owners.shape[1:])
        if any(bool((own & (at != n)).any()) for n, own in enumerate(owners)):
            found.wrong.append(f"{what}: {label}")
        found.owned += 1


def _behind(trace: Trace, places: Sequence[tuple[int, int]]) -> set[int]:
    """The nodes behind some nodes' inputs."""
    return trace.behind([edge[0] for k, place in places if (edge := trace.edges[k][place]) is not None])


def _rows(passes: Passes, trace: Trace, walk: Walk) -> float:
    """How far the rows of the uses are from those of a backward pass a sample: each use's node is called with its sample's
    part of the batch's gradient, and what comes out is brought to the parameters."""
    trained = [id(x) in trace.parameters and k not in walk.mixed for k, x in zip(trace.leaves, trace.variables)]
    places = [n for n, is_trained in enumerate(trained) if is_trained]
    leaves = [trace.variables[n] for n in places]
    worst = 0.0
    for n in range(passes.samples):
        at: list[Any] = []
        grads: list[Tensor] = []
        for use in walk.uses:
            own = _of_sample(passes, trace, walk, use, n)
            edge = trace.roots[use.place] if use.node < 0 else trace.edges[use.node][use.place]
            if own is not None and edge is not None:
                at.append(GradientEdge(trace.nodes[edge[0]], edge[1]))
                grads.append(own)
        found = (
            torch.autograd.grad(at, leaves, grads, retain_graph=True, allow_unused=True)
            if at and leaves
            else [None] * len(leaves)
        )
        for place, own, leaf in zip(places, found, leaves):
            want = passes.alone[n][1][place]
            want, own = (torch.zeros_like(leaf) if g is None else g for g in (want, own))
            scale = max(float(g.norm()) for g in (own, want, passes.whole[1][place]) if g is not None) + 1e-12
            worst = max(worst, float((own - want).norm()) / scale)
    return worst


def _of_sample(passes: Passes, trace: Trace, walk: Walk, use: Any, n: int) -> Tensor | None:
    if use.node < 0:
        raise NotImplementedError
    arrived = passes.whole[0].get(use.node)
    if arrived is None:
        return None
    given: list[Tensor | None] = []
    for g, label in zip(arrived, walk.labels[use.node]):
        if g is None or label is None or isinstance(label, Several):
            given.append(None)
            continue
        given.append(torch.where(entries(label, g.shape, passes.samples) == n, g, torch.zeros_like(g)))
    with torch.no_grad():
        found = call_node(trace.nodes[use.node], given)
    x, (ahead, number) = found[use.place] if found else None, trace.nodes[use.node].next_functions[use.place]
    return None if x is None else fitted(x, Value(ahead, number))
