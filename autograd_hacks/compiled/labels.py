"""Labels: where the samples are in each tensor of a joint graph of forward and backward, and where they are summed.

A label is None for a tensor that is the same for all samples, `At` for a tensor with samples on an axis, and `SUM` for a sum
over samples of terms that each depend on one sample.  Anything else that an operation does with samples is an error.  So a
graph that can be labelled has independent samples, for all values of weights and inputs.

Each kind of operation has one rule, by name: see `compiled/operations.py` and `compiled/products.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten

from autograd_hacks.errors import ON_COMPILING, SamplesMixed, UnsupportedOperation


@dataclass(frozen=True)
class At:
    """The samples are on axis ``dim``, which is outer × N × inner: positions may be folded in on either side."""

    dim: int
    outer: int = 1
    inner: int = 1

    def moved(self, dim: int) -> At:
        """The same label on another axis."""
        return At(dim, self.outer, self.inner)


@dataclass(frozen=True)
class Routed:
    """A tensor that depends on a sort of positions by values: see `compiled/routed.py`.

    order: the sort
    source: where the samples are in the sorted tensor
    """

    order: fx.Node
    source: At


class _Sum:
    def __repr__(self) -> str:
        return "SUM"


SUM = _Sum()

Label = At | _Sum | Routed | None
Found = Label | list[Label]
"""The label of an operation's result, or a list for several results."""
Rule = Callable[..., Found]
"""``rule(labels, node, *args, **kwargs)`` is called if some of the operation's tensors have samples and none is a sum."""

RULES: dict[str, Rule] = {}
"""{an operation's name: its rule}.  Operations that torch tags as pointwise need no rule."""
OF_ROUTED = "of what is routed"
"""The name of the rule for operations with a `Routed` tensor."""
SIZES = {"sym_size", "sym_stride", "sym_numel", "sym_storage_offset"}
"""Operations that read sizes, not values."""
LINEAR: set[str] = set()
"""Operations that are linear in each of their tensors, so they may follow a sum over samples."""


def register_operation(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for `compile`: where the samples are in the result of an operation of torch or a custom one::

        @autograd_hacks.register_operation("mylib::scan")
        def _(labels, node, x, length):
            return labels.along(node, x, dim=1)   # samples stay on their axis of x, unless that is axis 1

    The rule gets the `Labels`, the graph's node and the operation's arguments.  It returns the label of the result, or a
    list of labels for several results.  If samples mix it raises by ``labels.mixed(node, why)``.

    names: the operation's names in ``torch.ops``, with the namespace unless that is 'aten'
    """

    def put(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return put


def size(x: Any) -> int:
    """The value of a size, which may be symbolic, in the traced batch."""
    if isinstance(x, int):
        return x
    hint = getattr(getattr(x, "node", None), "hint", None)
    return int(x) if hint is None else int(hint)


def shape(node: fx.Node) -> list[int]:
    return [size(s) for s in node.meta["val"].shape]


@dataclass(frozen=True)
class Contraction:
    """A node that sums over samples.

    at: where the samples are in its tensors, by place among its flattened arguments; all on axes, or all routed
    gradient: the place of the argument that depends on the gradient; the node is linear in it
    output: the number of the result that is the sum
    """

    node: fx.Node
    at: Mapping[int, Any]
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

    def contract(
        self, node: fx.Node, at: Mapping[fx.Node, Any], gradient: int | None = None, output: int | None = None
    ) -> Label:
        """The label of a node that sums over samples.  Raises SamplesMixed if it is in the forward pass.

        at: {argument: where its samples are}
        gradient: the place of the argument that the node is linear in
        output: the number of the result that is the sum
        """
        flat, _ = tree_flatten((node.args, node.kwargs))
        places = {n: at[x] for n, x in enumerate(flat) if isinstance(x, fx.Node) and x in at}
        if gradient is None:
            gradient = next((n for n in places if flat[n] in self.after_gradients), None)
        if gradient is None or flat[gradient] not in self.after_gradients:
            self.mixed(node, "a sum over samples in the forward pass")
        self.contractions[node, output] = Contraction(node, places, gradient, output)  # type: ignore[arg-type]
        return SUM


def place_of(node: fx.Node) -> str:
    """An operation and the line of user code that it comes from, for messages."""
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    files = [n for n, line in enumerate(trace) if line.startswith("File ")]
    name = str(node.target).removeprefix("aten.")
    return f"{name}, at {' '.join(trace[files[-1] : files[-1] + 2])}" if files else name


def labelled(joint: Joint) -> Labels:
    """The labels of all nodes that parameters' gradients depend on; with ``joint.left`` also of outputs and buffers.

    Raises SamplesMixed, with the operation and its line, if samples mix; UnsupportedOperation for an operation without a
    rule.
    """
    seen = [] if joint.left is None else [*joint.outputs, *joint.left.values()]
    labels, needed = Labels(joint.samples), behind([*joint.gradients.values(), *joint.tangents.values(), *seen])
    labels.after_gradients.update(joint.tangents)
    nodes = [node for node in joint.graph.nodes if node in needed]
    for node in nodes:
        if not labels.after_gradients.isdisjoint(node.all_input_nodes):
            labels.after_gradients.add(node)
    for node in nodes:  # the forward's nodes
        if node not in labels.after_gradients:
            axis = joint.axes.get(node)
            labels.found[node] = _label(labels, node) if node.op == "call_function" else None if axis is None else At(axis)
    for tangent, output in joint.tangents.items():
        if not isinstance(labels[output], At):
            labels.mixed(output, "an output of the model has no batch axis")
        labels.found[tangent] = labels[output]
    for node in nodes:
        if node not in labels.found:
            labels.found[node] = _label(labels, node) if node.op == "call_function" else None
    for name, gradient in joint.gradients.items():
        if isinstance(labels[gradient], At):
            labels.mixed(gradient, f"the gradient of {name} has a batch axis")
    for node in seen:
        if isinstance(labels[node], Routed):
            labels.mixed(node, "an output is in an order that depends on all samples")
    for name, node in (joint.left or {}).items():
        if labels[node] is not None:
            labels.mixed(node, f"the forward writes a value to {name} that depends on samples")
    return labels


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


def name_of(node: fx.Node) -> str:
    """An operation's name, with its namespace unless that is torch's own."""
    target: Any = node.target
    return str(target._schema.name).removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else str(target)


def _label(labels: Labels, node: fx.Node) -> Found:
    if node.target is operator.getitem:
        found = labels[node.args[0]]
        return found[node.args[1]] if isinstance(found, list) else found  # type: ignore[index]
    if not isinstance(node.target, torch._ops.OpOverload):
        if any(isinstance(x, torch.Tensor) for x in tree_flatten(node.meta.get("val"))[0]) and any(
            labels[x] is not None for x in node.all_input_nodes
        ):
            return labels.unsupported(
                node, f"there is no rule for the operation {name_of(node)!r}, a loop or a custom function"
            )
        return None  # arithmetic on sizes
    given = [labels[x] for x in node.all_input_nodes]
    if all(label is None or (isinstance(label, list) and not any(label)) for label in given):
        return None
    name = name_of(node)
    if name in SIZES:
        return None
    if any(isinstance(label, Routed) for label in given):
        return RULES[OF_ROUTED](labels, node)
    if SUM in given:
        return _after_sum(labels, node, name)
    if (rule := RULES.get(name)) is not None:
        return rule(labels, node, *node.args, **node.kwargs)
    if torch.Tag.pointwise in node.target.tags:
        return pointwise(labels, node)
    return labels.unsupported(
        node, f"there is no rule for the operation {name!r} (autograd_hacks.register_operation({name!r}) adds one)"
    )


def _after_sum(labels: Labels, node: fx.Node, name: str) -> Label:
    """The label of an operation on a sum over samples, which must be linear in it."""
    if any(isinstance(labels[x], At) for x in node.all_input_nodes):
        labels.mixed(node, "the operation combines a sum over samples with samples")
    sums = [x for x in node.all_input_nodes if labels[x] is SUM]
    if name not in LINEAR:
        labels.mixed(node, "the operation is not linear in a sum over samples")
    if name in ("mul", "mm", "bmm", "convolution") and len(sums) > 1:
        labels.mixed(node, "the operation multiplies two sums over samples")
    if name == "div" and labels[node.args[1]] is SUM:
        labels.mixed(node, "the operation divides by a sum over samples")
    return SUM


def pointwise(labels: Labels, node: fx.Node) -> At | None:
    """The common label of the arguments after broadcasting."""
    made = node.meta["val"]
    axes = (made[0] if isinstance(made, tuple | list) else made).ndim
    given = [(x, labels[x]) for x in node.all_input_nodes]
    return labels.same(node, [at.moved(axes - len(shape(x)) + at.dim) for x, at in given if isinstance(at, At)])
