"""Independence by labels: of a model's graph, or of the operations on a forward's tape.  Both hold for all values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor, fx

from autograd_hacks.capture.above import ABOVE
from autograd_hacks.compiled.labelled import labelled
from autograd_hacks.compiled.labels import RULES, Joint, Labels, name_of, shape
from autograd_hacks.errors import ON_PRIVATE, PerSampleGradientError, ProbeFailed, UnsupportedOperation
from autograd_hacks.probe.batch import Batch
from autograd_hacks.probe.tape import ARGUMENT, OUTSIDE, Tape, numbers_of
from autograd_hacks.support.copies import Marks
from autograd_hacks.support.trees import tensors_of

FILLS = "bernoulli_ uniform_ normal_ random_ exponential_ geometric_ cauchy_ log_normal_ zero_ fill_".split()  # noqa: SIM905  # to be read
"""Operations that overwrite a tensor with numbers of their own, if no tensor but that is among their arguments."""
LIKE = "zeros_like ones_like full_like rand_like randn_like new_zeros new_full new_ones".split()  # noqa: SIM905  # to be read
"""Operations that read sizes of their first argument only."""
TURNS = "transpose_ t_ unsqueeze_ squeeze_ detach_".split()  # noqa: SIM905  # to be read
"""Operations that turn a tensor into a view of itself."""
UNWRITTEN = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
"""Operations whose result is memory.  What is read from it before an operation wrote there came another way."""


def why_unshown(model: nn.Module, batch: Batch, axis: int | None, samples: int) -> str:
    """Why the analysis can't show that outputs and buffers don't depend on other samples; "" if it shows that.

    model, batch: copies; the model may change itself, and everything that it reaches through the arguments
    axis, samples: see `Batch.axes_of_samples`
    """
    places = [n for n, leaf in enumerate(batch.leaves) if isinstance(leaf, Tensor)]

    def show() -> None:
        from autograd_hacks.compiled import torch_names as compiler  # which takes a second to import, and may lack parts

        with ExitStack() as stack, torch.enable_grad():
            stack.enter_context(compiler.recurrent_layers_unrolled())
            tensors = [batch.leaves[n].detach() for n in places]
            traced = compiler.joint_graph(stack, _OfTensors(model, batch, places), tensors, compiler.decompositions())
            axes, ends = batch.axes_of_samples(axis, samples), compiler.ends_of(traced.graph)
            found = {node: axes[places[n]] for node, n in ends.inputs.items()}
            given = {node: at % len(shape(node)) for node, at in found.items() if at is not None}
            gradients = {name: node for name, node in ends.gradients.values() if isinstance(name, str)}
            left, outputs = {str(name): node for name, node in ends.written.items()}, list(ends.outputs.values())
            if any(samples in getattr(traced, str(node.target)).shape for node in traced.graph.find_nodes(op="get_attr")):
                raise UnsupportedOperation("the model reads a tensor that is not an argument, a parameter or a buffer")
            labelled(Joint(traced.graph, samples, given, ends.tangents, gradients, outputs, left))

    return _why_not(show)


def why_not_by_tape(tape: Tape, axes: Sequence[int | None], samples: int, outputs: Sequence[Tensor]) -> str:
    """Why labels can't show that a forward's outputs and buffers don't depend on other samples; "" if they show it.

    axes: the samples' axis in each argument    samples: N    outputs: what the forward returned
    """

    def show() -> None:
        graph = _Graph(tape, axes, samples)
        graph.check_writes(labelled(graph.joint(outputs)))

    return _why_not(show)


def _why_not(show: Callable[[], None]) -> str:
    try:
        show()
    except PerSampleGradientError as error:
        return str(error)
    except Exception as error:  # whatever the model or torch raises for tensors without values, or a rule that lacks a case
        return f"{type(error).__name__}: {error}"
    return ""


class _OfTensors(nn.Module):
    """A model as a function of the tensors in its arguments."""

    def __init__(self, model: nn.Module, batch: Batch, places: list[int]) -> None:
        super().__init__()
        self.model, self._batch, self._places = model, batch, places
        self._marks = Marks([*model.modules()])  # a trace runs it several times, and counters must not go on

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self._batch.leaves)
        for place, x in zip(self._places, tensors):
            leaves[place] = x
        args, kwargs = replace(self._batch, leaves=leaves).arguments()
        self._marks.put_on()
        return tuple(tensors_of(self.model(*args, **kwargs)))


def check_opaque(tape: Tape) -> None:
    """Raises ProbeFailed if other packages' operations without a rule work on what depends on the forward's arguments."""
    unknown = [(entry, at) for entry, at in tape.opaque if entry.func._schema.name not in RULES]
    reached = tape.reached() if unknown else set[int]()
    for entry, (file, line) in unknown:
        if not reached.isdisjoint(numbers_of(entry)):
            name = entry.func._schema.name
            raise ProbeFailed(
                f"independence of samples: the forward runs {name}, at {file}:{line}. What it computes can't be followed, "
                "so nothing shows in which step it begins to mix samples. Say where its result has the samples: "
                f"autograd_hacks.compiled.register_operation({name!r})." + ON_PRIVATE
            )


class _Graph:
    """The graph of the operations on a tape.  A write into memory is an operation that returns the new value."""

    def __init__(self, tape: Tape, axes: Sequence[int | None], samples: int) -> None:
        self.tape, self.graph, self.axes, self.samples = tape, fx.Graph(), axes, samples
        self.nodes: dict[int, fx.Node] = {}  # by number
        self.given: dict[fx.Node, int] = {}  # arguments with samples, and their axis
        self.owners: dict[int, int] = {}  # by number, that of the first tensor with the same memory
        self.views: dict[int, int] = {}  # by that number, how many tensors use the memory
        self.unwritten: set[int] = set()  # the numbers of memory into which nothing was written
        self.writes: list[tuple[fx.Node, fx.Node, bool, str]] = []  # before, after, whether nothing else sees it, where
        for entry in tape.entries:
            self._add(entry)

    def joint(self, outputs: Sequence[Tensor]) -> Joint:
        numbers = [self.tape.number(x) for x in outputs]
        if None in numbers:
            raise UnsupportedOperation("the forward returns a tensor that no operation of PyTorch made")
        seen = [self._of((n,)) for n in numbers if n is not None]
        seen += [after for _, after, is_alone, _ in self.writes if not is_alone]
        buffers = {name: self.tape.number(x) for name, x in self.tape.model.named_buffers()}
        left = {name: self.nodes[n] for name, n in buffers.items() if n in self.nodes and n not in self.tape.sources}
        return Joint(self.graph, self.samples, self.given, {}, {}, seen, left)

    def check_writes(self, labels: Labels) -> None:
        """Raises if a write changes which samples some other view of the memory depends on."""
        for before, after, is_alone, name in self.writes:
            old, new = labels[before], labels[after]
            if new is not None and new != old and not (old is None and is_alone):
                raise UnsupportedOperation(f"{name} writes samples into memory of which there are other views")

    def _add(self, entry: Any) -> None:
        target, written = _as_function(entry.func)
        name = target._schema.name.removeprefix("aten::")
        overwrites = written == 0 and entry.func._schema.name.removeprefix("aten::") in FILLS
        reads_sizes = name in UNWRITTEN or name in LIKE or (overwrites and not any(type(x) is tuple for x in entry.args[1:]))
        args = [] if reads_sizes else [self._one(x, n == written) for n, x in enumerate(entry.args)]
        kwargs = {key: self._one(x, False) for key, x in entry.kwargs or ()}
        if target is _LIFT:  # a number of Python's
            (number, *_), (given,) = entry.outputs[0], entry.args[0]
            self.nodes[number] = self._of((given,))
            self._same_memory(number, given)
            return
        if name.endswith("batch_norm") and len(args) > 5 and args[3] is not None and args[5] is True:
            raise UnsupportedOperation(f"{name} writes what buffers keep of samples")
        node = self.graph.call_function(target, tuple(args), kwargs)
        values = [_meta(shape, strides, dtype) if n else None for n, shape, strides, dtype in entry.outputs]
        node.meta["val"] = tuple(values) if entry.returns_many else values[0] if values else None
        if written is not None:
            old = entry.args[written][0]
            owner = self.owners.get(old, old)
            is_source = owner in self.tape.sources
            before = self._of((old,))
            self.unwritten.discard(old)
            number = entry.outputs[0][0]
            self.writes.append((before, node, not is_source and self.views.get(owner, 1) == 1, name_of(node)))
            self.nodes[number] = self.nodes[old] = node
            self.owners[number] = owner
            return
        for place, (number, *_) in enumerate(entry.outputs):
            if number:
                self.nodes[number] = self._part(node, place) if entry.returns_many else node
                if (_is_view(entry.func) or entry.func is not target) and entry.args and type(entry.args[0]) is tuple:
                    self._same_memory(number, entry.args[0][0])
        if name in UNWRITTEN:
            self.unwritten.update(number for number, *_ in entry.outputs)

    def _same_memory(self, number: int, as_other: int) -> None:
        owner = self.owners[number] = self.owners.get(as_other, as_other)
        self.views[owner] = self.views.get(owner, 1) + 1
        if as_other in self.unwritten:
            self.unwritten.add(number)

    def _part(self, node: fx.Node, place: int) -> fx.Node:
        part = self.graph.call_function(operator.getitem, (node, place))
        part.meta["val"] = node.meta["val"][place]
        return part

    def _one(self, x: Any, is_written: bool) -> Any:
        if type(x) is tuple:
            if x[0] in self.unwritten and not is_written:
                raise UnsupportedOperation("the forward reads memory into which no operation of PyTorch has written")
            return self._of(x)
        return [self._one(y, is_written) for y in x] if type(x) is list else x

    def _of(self, x: tuple[int]) -> fx.Node:
        (number,) = x
        if (known := self.nodes.get(number)) is not None:
            return known
        source = self.tape.sources[number]
        if source.kind == OUTSIDE:
            raise UnsupportedOperation("the forward reads a tensor that is not an argument, a parameter or a buffer")
        node = self.nodes[number] = self.graph.placeholder(f"source_{number}")
        node.meta["val"] = _meta(source.shape, source.strides, source.dtype)
        axis = self.axes[source.name] if source.kind == ARGUMENT else None  # type: ignore[call-overload]
        if axis is not None:
            self.given[node] = axis % len(source.shape)
        return node


_LIFT: Any = torch.ops.aten.lift_fresh.default


def _meta(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")


@cache
def _is_view(func: Any) -> bool:
    return any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)


@cache
def _as_function(func: Any) -> tuple[Any, int | None]:
    """The operation that returns what ``func`` writes, and the place of the argument into which it writes; None if none.

    Raises UnsupportedOperation if it writes into several."""
    schema = func._schema
    if not schema.is_mutable:
        return func, None
    places = [n for n, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    name = schema.name.removeprefix("aten::")
    overload = "int" if name == "transpose_" else func._overloadname
    pure = getattr(getattr(torch.ops.aten, name.removesuffix("_"), None), overload, None)
    if name in TURNS:
        return pure, None
    if places == [0] and name in FILLS and (name, overload) != ("fill_", "Tensor"):
        return torch.ops.aten.empty.memory_format if name not in ("zero_", "fill_") else torch.ops.aten.zeros.default, 0
    if places != [0] or pure is None or not name.endswith("_"):
        raise UnsupportedOperation(f"the operation {schema.name} writes into its arguments")
    return pure, 0


ABOVE.why_unshown, ABOVE.why_not_by_tape, ABOVE.check_opaque = why_unshown, why_not_by_tape, check_opaque
