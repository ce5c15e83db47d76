"""Labels of a joint graph of forward and backward: where the samples are in each tensor, and where they are summed.

They are the labels of `graph/label.py`, of which a graph has few, since they must hold for all values and sizes: None for a
tensor that is the same for all samples, `At` for one with samples on an axis, and `SUM` for a sum over samples of terms that
each depend on one sample.  Anything else that an operation does with samples is an error.  So a graph that can be labelled
has independent samples, for all values of weights and inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from autograd_hacks.errors import ON_COMPILING, PerSampleGradientError, SamplesMixed, UnsupportedOperation
from autograd_hacks.graph.label import ALONE, MIX, SUM, At, Links, Several
from autograd_hacks.graph.tape_laws import REGISTERED, Step, operation
from autograd_hacks.support.internals import tree_flatten

Label = At | Several | None
Found = Label | Sequence[Label | Exception]
"""The label of an operation's result; for several results a list, with an error for each that has no label."""
Rule = Callable[..., Found]
"""``rule(labels, node, *args, **kwargs)`` is called if some of the operation's tensors have samples and none is a sum."""

RULES: dict[str, Rule] = {}
"""{an operation's name: its rule}, for those that have no law in `graph/`, and for custom operations."""


def register_operation(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for `compile`: where the samples are in the result of an operation of torch or a custom one::

        @autograd_hacks.compiled.register_operation("mylib::scan")
        def _(labels, node, x, length):
            return labels.along(node, x, dim=1)   # samples stay on their axis of x, unless that is axis 1

    The rule gets the `Labels`, the graph's node and the operation's arguments.  It returns the label of the result, or a
    list of labels for several results.  If samples mix it raises by ``labels.mixed(node, why)``.

    names: the operation's names in ``torch.ops``, with the namespace unless that is 'aten'
    """

    def put(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        REGISTERED.update((name, partial(_links, rule)) for name in names if "::" in name)
        return rule

    return put


def _links(rule: Rule, step: Step) -> Sequence[Sequence[Links]]:
    """An operation's links: its rule is asked where the samples are in the results if they are on an axis of a tensor."""
    graph = fx.Graph()

    def made(x: Any) -> Any:
        if type(x) is not tuple:
            return [made(y) for y in x] if type(x) is list else x
        node = graph.placeholder(f"x{x[0]}")
        node.meta["val"] = torch.empty(shapes.pop(0), device="meta")
        return node

    shapes = [own for own in step.ins if own is not None]
    node = graph.call_function(step.operation.func, (), {name: made(x) for name, x in step.given.items()})
    values = [torch.empty(own or (), device="meta") for own in step.outs]
    node.meta["val"] = values if len(values) != 1 else values[0]
    given, links = node.all_input_nodes, [[[MIX] * len(own or ()) for own in step.ins] for _ in values]
    places = [k for k, own in enumerate(step.ins) if own is not None]
    for k, x in zip(places, given):
        for d in range(len(step.ins[k] or ())):
            labels = Labels(step.ins[k][d], {x: At(d)})  # type: ignore[index]  # it has a shape
            try:
                found = rule(labels, node, *node.kwargs.values())
            except PerSampleGradientError:  # samples mix
                continue
            for o, label in enumerate(found if isinstance(found, list) else [found]):
                links[o][k][d] = label.dim if isinstance(label, At) else ALONE if label is None else MIX
    return links


@dataclass(frozen=True)
class Contraction:
    """A node that sums over samples.

    at: where the samples are in its tensors, by place among its flattened arguments
    gradient: the place of the argument that depends on the gradient; the node is linear in it
    output: the number of the result that is the sum
    """

    node: fx.Node
    at: Mapping[int, At]
    gradient: int
    output: int | None = None


@dataclass(frozen=True)
class Joint:
    """The graph of a forward and its backward.

    samples: N
    axes: {placeholder of an argument with samples: their axis}
    tangents: {placeholder of an output's gradient: the output}
    gradients: the parameters' gradients by name
    outputs: the model's outputs, and other results of the forward
    left: {name of a buffer: its new value}, if buffers must not depend on samples; else None
    """

    graph: fx.Graph
    samples: int
    axes: Mapping[fx.Node, int]
    tangents: Mapping[fx.Node, fx.Node]
    gradients: Mapping[str, fx.Node]
    outputs: Sequence[fx.Node]
    left: Mapping[str, fx.Node] | None = None


@dataclass
class Labels:
    """The labels of a graph's nodes, and the nodes that sum over samples."""

    samples: int
    found: dict[fx.Node, Found] = field(default_factory=dict)
    contractions: dict[tuple[fx.Node, int | None], Contraction] = field(default_factory=dict)
    after_gradients: set[fx.Node] = field(default_factory=set)  # nodes that depend on the outputs' gradients

    def __getitem__(self, x: Any) -> Any:
        """The label of a node; None for anything that is not a node."""
        return self.found.get(x) if isinstance(x, fx.Node) else None

    def contraction_of(self, node: fx.Node) -> Contraction | None:
        if node.target is operator.getitem:
            return self.contractions.get((node.args[0], node.args[1]))  # type: ignore[arg-type]
        return self.contractions.get((node, None))

    # Methods for rules.

    def mixed(self, node: fx.Node, why: str) -> Any:
        """Raises SamplesMixed."""
        raise SamplesMixed(f"samples mix: {why}: {place_of(node)}." + ON_COMPILING)

    def unsupported(self, node: fx.Node, why: str) -> Any:
        """Raises UnsupportedOperation."""
        raise UnsupportedOperation(f"{why}: {place_of(node)}. Use add_hooks(model) for this model." + ON_COMPILING)

    def same(self, node: fx.Node, labels: Iterable[Found]) -> At | None:
        """The common label; None if no argument has samples.  Raises SamplesMixed if labels differ."""
        found = list(dict.fromkeys(label for label in labels if isinstance(label, At)))
        if len(found) > 1:
            self.mixed(node, f"the arguments have samples on different axes, {found[0]} and {found[1]}")
        return found[0] if found else None

    def along(self, node: fx.Node, x: fx.Node, dim: int, outputs: int = 1) -> Found:
        """The label of x for an operation along an axis.  Raises SamplesMixed if that is the samples' axis."""
        if dim % len(shape(x)) == self[x].dim:
            self.mixed(node, "the operation works along the samples' axis")
        return self[x] if outputs == 1 else [self[x]] * outputs

    def contract(self, node: fx.Node, at: Mapping[fx.Node, Any], output: int | None = None) -> Label:
        """The label of a node that sums over samples.  Raises SamplesMixed if it is in the forward pass.

        at: {argument: where its samples are}.  The node is linear in the first one that depends on the gradient
        output: the number of the result that is the sum
        """
        flat, _ = tree_flatten((node.args, node.kwargs))
        places = {n: at[x] for n, x in enumerate(flat) if isinstance(x, fx.Node) and x in at}
        gradient = next((n for n in places if flat[n] in self.after_gradients), None)
        if gradient is None:
            return self.mixed(node, "a sum over samples in the forward pass")
        self.contractions[node, output] = Contraction(node, places, gradient, output)
        return SUM


# What rules read of a node.


def size(x: Any) -> int:
    """The value of a size, which may be symbolic, in the traced batch."""
    if isinstance(x, int):
        return x
    hint = getattr(getattr(x, "node", None), "hint", None)
    return int(x) if hint is None else int(hint)


def shape(node: fx.Node) -> list[int]:
    return [size(s) for s in node.meta["val"].shape]


def number(x: Any) -> Any:
    """An operation's argument with the values that symbolic sizes have in the traced batch."""
    if isinstance(x, list | tuple):
        return [number(y) for y in x]
    return size(x.meta["val"]) if isinstance(x, fx.Node) else x


def name_of(node: fx.Node) -> str:
    """An operation's name, with its namespace unless that is torch's own."""
    schema = getattr(node.target, "_schema", None)
    return str(node.target) if schema is None else str(schema.name).removeprefix("aten::")


def by_name(node: fx.Node) -> dict[str, Any]:
    """An operation's arguments by name, with defaults."""
    known = operation(node.target)
    return {**known.defaults, **dict(zip(known.arguments, node.args)), **node.kwargs}


def tensors_of(node: fx.Node) -> list[fx.Node | None]:
    """An operation's tensors in the order of its arguments, None for those that aren't given."""
    given, found = by_name(node), list[Any]()
    for name in operation(node.target).tensors:
        x = given.get(name)
        found += x if isinstance(x, list | tuple) else [x]
    return [x if isinstance(x, fx.Node) else None for x in found]


def place_of(node: fx.Node) -> str:
    """An operation and the line of user code that it comes from, for messages."""
    return str(node.target).removeprefix("aten.") + last_line(node.meta.get("stack_trace") or "")


def last_line(trace: str) -> str:
    """The last line of code in a trace, for messages; nothing if there is none."""
    lines = [line.strip() for line in trace.strip().splitlines()]
    files = [n for n, line in enumerate(lines) if line.startswith("File ")]
    return f", at {' '.join(lines[files[-1] : files[-1] + 2])}" if files else ""


def behind(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that the given ones depend on, with the given ones."""
    return _reached(nodes, lambda node: node.all_input_nodes)


def after(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on the given ones, with the given ones."""
    return _reached(nodes, lambda node: node.users)


def _reached(nodes: Iterable[fx.Node], ahead: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += ahead(node)
    return found
