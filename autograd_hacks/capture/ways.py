"""How a value at a use follows from parameters, and the way back: from the value's rows to the parameters' own.

What follows from the graph alone is computed once and kept as numbers (`Way`).  In a pass, while the nodes still have what
they saved, it becomes steps (`Stepwise`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.errors import StaleRecord
from autograd_hacks.forms import Chained, Dense, Form, Lookup, add
from autograd_hacks.forms.mapped import times
from autograd_hacks.formulas.met import Kept
from autograd_hacks.formulas.views import KNOWN, STEPS, VIEWS, Before, Step, rows_of
from autograd_hacks.support.graph import Leaf, Value, inputs_of, kept_by, shape_of
from autograd_hacks.support.sweep import as_one_pass, called_with, factor_of, outside_passes
from autograd_hacks.support.trees import overwritten_in

AT_ONCE = 2**20
"""Rows of up to so many numbers are written as they go back.  Larger ones are written when they are read, some at a time."""


Held = list[tuple[Tensor, int]]
"""Tensors that steps hold, and how often each had been overwritten."""


class _Turn(NamedTuple):
    """An input of a node on the way."""

    node: int  # the node's number
    ahead: int  # the number of the node that made the input
    output: int  # the input's number there
    names: frozenset[str]  # the parameters behind it
    before: Before  # what the step gets, except for what the node saves


class Way(NamedTuple):
    """The nodes between a value and its parameters, numbered from the value on.  It holds none of them."""

    turns: tuple[_Turn, ...]  # the inputs on the way, each after those through which rows come to its node
    steps: tuple[Step | None, ...]  # their steps; None for one that doesn't hold for each equal graph
    computing: tuple[int, ...]  # the nodes, other than leaves, that don't only move entries: they may give another dtype
    output: int  # the value's number at its node
    ends: dict[str, int]  # the numbers of the parameters' leaves, by the parameters' names
    is_straight: bool  # whether there are views of one parameter alone
    is_stepwise: bool  # whether each kind of node on the way has a step
    most: int  # how many numbers the largest value on the way has, or the largest parameter

    def nodes(self, node: Node) -> list[Any]:
        """These nodes, in any forward's graph.  node: the value's"""
        found: list[Any] = [node] * (1 + max(self.ends.values()))
        for turn in self.turns:
            found[turn.ahead] = found[turn.node].next_functions[turn.before.place][0]
        return found

    def bound(self, nodes: Sequence[Any], kept: Callable[[Node, Held], Kept]) -> Stepwise:
        """The steps, with what they need of nodes that still have it.

        kept: gives what a node saves, and notes its tensors"""
        steps, held = list[Step](), list[tuple[Tensor, int]]()
        others = () if self.is_stepwise else dict.fromkeys(turn.node for turn in self.turns if turn.before.kind not in STEPS)
        factors = outside_passes(lambda: {k: factor_of(nodes[k]) for k in others}) if others else {}
        for turn, step in zip(self.turns, self.steps):
            before, make = turn.before, None if step else STEPS.get(turn.before.kind)
            if (factor := factors.get(turn.node)) is not None:
                step = partial(_multiplied, factor)
            elif make is not None:
                step = make(before._replace(kept=kept(nodes[turn.node], held)))
            steps.append(step or partial(_called, nodes[turn.node], before))
        return Stepwise(self, steps, held, any(getattr(step, "func", None) is _called for step in steps))


def way_of(value: Value, leaves: Mapping[Node, str]) -> Way:
    """The way from a value.  leaves: the parameters' names, by the node at which each ends the graph"""
    names, waiting = dict[Node, frozenset[str]](), [value.node]
    while waiting:  # a node comes into the dictionary after those behind it
        node = waiting[-1]
        behind = [] if type(node) is Leaf else [each.node for each in inputs_of(node)]
        if missing := [each for each in behind if each not in names]:
            waiting += missing
            continue
        own = frozenset([leaves[node]] if node in leaves else ())
        names[waiting.pop()] = own.union(*(names[each] for each in behind))
    # Leaves come last, so that the last number is one of theirs.
    order = sorted((node for node in reversed(names) if names[node]), key=lambda node: node in leaves)
    number, outputs, turns = {node: k for k, node in enumerate(order)}, {value.node: {value.number: None}}, list[_Turn]()
    steps = list[Step | None]()
    for node in order:
        given = tuple([None if ahead is None else shape_of(Value(ahead, n)) for ahead, n in node.next_functions])
        for out in outputs[node]:
            for place, (ahead, n) in enumerate(node.next_functions):
                if ahead in number:
                    outputs.setdefault(ahead, {})[n] = None
                    before = Before(_nothing, node.name(), out, place, shape_of(Value(node, out)), given)
                    is_known = before.kind in KNOWN  # so that what the node saves is the same in each equal graph
                    steps.append(STEPS[before.kind](before._replace(kept=partial(kept_by, node))) if is_known else None)
                    turns.append(_Turn(number[node], number[ahead], n, names[ahead], before))
    ends = {name: number[leaf] for leaf, name in leaves.items() if leaf in number}
    kinds, most = {turn.before.kind for turn in turns}, max(turn.before.shape.numel() for turn in turns)
    is_straight = len(turns) == len(order) - 1 and len(ends) == 1 and kinds <= VIEWS.keys()
    moving = VIEWS.keys() - {"ToCopyBackward0"}
    computing = tuple([k for k, x in enumerate(order) if x not in leaves and x.name() not in moving])
    return Way(tuple(turns), tuple(steps), computing, value.number, ends, is_straight, kinds <= STEPS.keys(), most)


def _multiplied(factor: Tensor, form: Form) -> Form:
    return Dense(times(rows_of(form).reshape(form.samples, *factor.shape), factor))


def _called(node: Node, before: Before, form: Form) -> Form:
    return Dense(called_with(node, before.number, before.place, rows_of(form)))


def _nothing(name: str) -> Any:
    raise LookupError(f"{name}: a node's own numbers are read in each pass")


class Stepwise:
    """The way back in steps, each of which makes forms of forms."""

    def __init__(self, way: Way, steps: Sequence[Step], held: Held, calls_nodes: bool) -> None:
        self.way, self.steps, self.held, self.is_live = way, steps, held, torch.is_grad_enabled()
        self.calls_nodes = calls_nodes  # so that rows must go back within the pass, where nodes have what they saved

    def rows(self, form: Form, parameters: Mapping[str, Tensor]) -> Mapping[str, Form]:
        """The parameters' forms, by name.  form: the value's"""
        if overwritten_in(self.held):
            raise StaleRecord(
                f"{', '.join(self.way.ends)}: changed in place after the forward (or another tensor did that its value is "
                "made of), and rows need the old value. Read them before optimizer.step() and before another forward."
            )
        held = form.samples * form.held_size()
        if self.calls_nodes or self.way.is_straight or form.samples * self.way.most <= max(AT_ONCE, held):
            back = partial(self._back, form, parameters.keys())
            # The running pass may not need some gradients on the way.
            rows = outside_passes(partial(as_one_pass, back)) if self.calls_nodes else back()
            return {name: _cast(own, parameters[name].dtype) for name, own in rows.items()}
        return {name: Chained(form, partial(self._pulled, name, p.dtype), p.shape, p) for name, p in parameters.items()}

    def _back(self, form: Form, names: Iterable[str]) -> dict[str, Form]:
        found, wanted, ends = {(0, self.way.output): form}, set(names), self.way.ends.values()
        for turn, step in zip(self.way.turns, self.steps):
            if not wanted.isdisjoint(turn.names):
                own, at = step(found[turn.node, turn.before.number]), (turn.ahead, turn.output)
                if type(own) is Lookup and turn.ahead not in ends:  # several steps may read the rows
                    own = Dense(own.dense())
                found[at] = add([found[at], own]) if at in found else own
        return {name: found[self.way.ends[name], 0] for name in names}

    def _pulled(self, name: str, dtype: torch.dtype, rows: Tensor) -> Tensor:
        return _cast(self._back(Dense(rows), [name])[name], dtype).dense()


def _cast(form: Form, dtype: torch.dtype) -> Form:
    """A form in a parameter's dtype."""
    return (Dense(form.dense().real) if form.like.is_complex() and not dtype.is_complex else form).to(dtype)
