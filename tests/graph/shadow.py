"""Laws beside what is read, in any test of the package: labels and rows of every hooked forward against one backward pass a
sample.

    PYTHONPATH=tests/graph python -m pytest -p shadow tests/programs

A test fails if a label or a row is wrong.  A summary says where laws refuse what the package reads, and where laws find uses
without refusing.  Left out: forwards that have no batch axis, and those with hooks, Functions and
checkpoints of the user's, which would see the passes.
"""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from one_at_a_time import judge, traced

from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.graph.label import At, Label, One
from autograd_hacks.graph.memo import Memo
from autograd_hacks.support.graph import is_recomputed, is_users
from autograd_hacks.support.internals import tree_leaves
from autograd_hacks.support.layout import POSITIONS, Layout
from autograd_hacks.support.switch import NO_TASK, Switch, current_task

MOST = 1500
"""Nodes of a graph; the passes of larger ones take too long."""
counts, refused, early, faults = Counter[str](), Counter[str](), Counter[str](), list[str]()
memos: dict[int, Memo] = {}
_end = Recorder._end


def label_of(layout: Layout, shape: tuple[int, ...], samples: int) -> Label:
    if samples == 1:
        return One(0)
    size = shape[layout.axis]
    return At(layout.axis, *{"": (1, 1), "N·T": (1, size // samples), "T·N": (size // samples, 1)}[layout.fold])


def end(self: Recorder, path: str, model: Any, ran: Any, output: Any) -> Any:
    returned = _end(self, path, model, ran, output)
    known = [(x, self.record.outputs.get(x)) for x in ran.outputs if x.grad_fn is not None]
    found = [(x, *own[:2]) for x, own in known if own is not None]
    if path or current_task() != NO_TASK or returned is not None:
        counts["left out"] += 1
        return returned
    if not found or any(layout is None or layout.fold == POSITIONS or not samples for _, layout, samples in found):
        counts["left out"] += 1
        return returned
    samples = found[0][2]
    given = [x for x in tree_leaves(ran.arguments) if isinstance(x, torch.Tensor)]
    trace, memory = traced([x for x, _, _ in found], model, given)
    if (
        len(trace.nodes) > MOST
        or any(is_users(node) or is_recomputed(node) for node in trace.nodes)
        or any(getattr(x, "_backward_hooks", None) for x, _, _ in found)
    ):
        counts["left out"] += 1
        return returned
    labels = [label_of(layout, tuple(x.shape), samples) for x, layout, _ in found]
    walk = memos.setdefault(id(self), Memo()).walk(trace, dict(enumerate(labels)), samples, memory)
    counts["forwards"] += 1
    today = "refused" if self.record.told.mixing else "read"
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split("::")[-1].split("[")[0]
    for mix in walk.mixes:
        refused[f"{trace.kinds[mix.node].name} {mix.why}, today {today}, {test}"] += 1
    with Switch.paused_here(), torch.random.fork_rng():
        try:
            own = judge([x for x, _, _ in found], samples, model, labels=labels, walk=walk, trace=trace)
        except (RuntimeError, NotImplementedError) as error:  # the graph can't be run several times
            counts[f"no oracle: {str(error)[:60]}"] += 1
            return returned
    counts["owned values"] += own.owned
    early.update(own.early)
    coarse = any(x.dtype != torch.float64 for x, _, _ in found)
    if own.wrong or own.rows > (1e-2 if coarse else 1e-6):
        faults.append(f"{own.wrong[:3]}, rows off by {own.rows:.1e}")
    return returned


Recorder._end = end  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    faults.clear()
    memos.clear()
    try:
        return (yield)
    finally:
        if faults:
            pytest.fail(f"laws: {faults[0]}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for name, found in (("laws", counts), ("samples mix by laws", refused), ("early", early)):
        terminalreporter.write_line(f"{name}: {dict(found.most_common(40))}")
