"""Values that follow from parameters alone, v = φ(θ), and the way back from their rows to the parameters'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from autograd_hacks.errors import StaleRecord
from autograd_hacks.forms import Chained, Dense, Form, Lookup, Outer, Placed, pull_along
from autograd_hacks.probe.functions import SIZED, name_of
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import version_of
from autograd_hacks.support.untouched import RandomState, autocast_dtype, autocast_to, with_random_state


@dataclass(eq=False)
class Step:
    """A call of a function of torch that has made values of values."""

    func: Any
    args: tuple[Any, ...]  # with a `Value` in the place of each
    kwargs: dict[str, Any]
    precision: torch.dtype | None  # autocast's dtype
    random_state: RandomState  # of the generators before, where it has drawn from them
    versions: list[tuple[Tensor, int]] = field(default_factory=list)  # of the other tensors

    @staticmethod
    def of(
        func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: Mapping[int, Value], state: RandomState
    ) -> Step:
        others = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and id(x) not in values]
        if name_of(func) in SIZED:
            empty = {id(x): x.detach().new_empty(()).expand(x.shape) for x in others}
            args, kwargs = tree_map(lambda x: empty.get(id(x), x), (args, kwargs))
            others = []
        args, kwargs = tree_map(lambda x: values.get(id(x), x) if isinstance(x, Tensor) else x, (args, kwargs))
        first = next(v for v in tree_leaves((args, kwargs)) if isinstance(v, Value))
        return Step(func, args, kwargs, autocast_dtype(first.tensor.device), state, [(x, version_of(x)) for x in others])

    def run(self, made: dict[Value, Tensor], steps: dict[Step, Any]) -> Any:
        """What it returns, in a graph from the parameters' copies.  made, steps: what is there of it"""
        if self not in steps:
            args, kwargs = tree_map(lambda x: x.again(made, steps) if isinstance(x, Value) else x, (self.args, self.kwargs))
            with autocast_to(self.precision, next(iter(made)).tensor.device), with_random_state(self.random_state):
                steps[self] = self.func(*args, **kwargs)
        return steps[self]


@dataclass(eq=False)
class Value:
    """A tensor that follows from parameters alone."""

    tensor: Tensor  # detached
    parameters: Mapping[str, Tensor]  # those, by name in the model
    step: Step | None = None  # what has made it; None for a parameter
    slot: int = 0  # which of the tensors that the step has returned
    version: int = 0  # of a parameter

    def again(self, made: dict[Value, Tensor], steps: dict[Step, Any]) -> Tensor:
        """The same, in a graph from the parameters, or copies of them, which are there."""
        if self not in made:
            assert self.step is not None
            made[self] = tensors_in(self.step.run(made, steps))[self.slot]
        return made[self]

    def roots(self) -> dict[Value, str]:
        """The parameters that it is made of, and their names."""
        if self.step is None:
            return {self: next(iter(self.parameters))}
        inner = [x for x in tree_leaves((self.step.args, self.step.kwargs)) if isinstance(x, Value)]
        return {root: name for x in inner for root, name in x.roots().items()}

    def check_unchanged(self) -> None:
        """Raises where what it was made of has been overwritten since."""
        if self.step is None:
            ((name, parameter),) = self.parameters.items()
            if version_of(parameter) != self.version:
                raise StaleRecord(_changed(name))
            return
        for tensor, version in self.step.versions:
            if version_of(tensor) != version:
                raise StaleRecord(_changed(f"a tensor of shape {tuple(tensor.shape)}"))
        for x in tree_leaves((self.step.args, self.step.kwargs)):
            if isinstance(x, Value):
                x.check_unchanged()

    def forms(self, form: Form, is_live: bool = False) -> dict[str, Form]:
        """{name: form} of its parameters, from its own.  is_live: whether they may be differentiated by the parameters"""
        if self.step is None:
            return dict.fromkeys(self.parameters, form)
        found: dict[str, Form] = {}
        if (looked_up := self._looked_up(form)) is not None:
            return looked_up
        made: dict[Value, Tensor] = {}
        roots = self.roots()
        for root, name in roots.items():
            p = root.parameters[name]  # whose own hooks are not to hear of what is read
            made[root] = p.view_as(p) if is_live else root.tensor.detach().requires_grad_()
        with Switch.paused_here(), torch.enable_grad():
            graph = self.again(made, {})
        for root, name in roots.items():
            leaf = made[root]
            if len(roots) == 1 and (whole := _moved(form, graph, leaf)) is not None:
                return {name: whole}
            self.check_unchanged()
            found[name] = chained = Chained(form, pull_along(graph, leaf, is_live), leaf.shape, leaf.detach())
            chained.through = frozenset(value.dtype for value in made.values())
        return found

    def _looked_up(self, form: Form) -> dict[str, Form] | None:
        """A table's form, where it is entries of the table that are the same for all samples."""
        step = self.step
        if step is None or name_of(step.func) != "embedding" or not isinstance(form, Dense) or len(step.args) < 2:
            return None
        index, table = step.args[0], step.args[1]
        padding = step.kwargs.get("padding_idx", step.args[2] if len(step.args) > 2 else None)
        is_scaled = step.kwargs.get("scale_grad_by_freq", step.args[5] if len(step.args) > 5 else False)
        if not isinstance(table, Value) or table.step is not None or padding is not None or is_scaled:
            return None
        rows = form.matrix().view(form.samples, index.numel(), table.tensor.shape[1])
        entries = index.reshape(1, -1).expand(form.samples, -1).long()
        return {next(iter(table.parameters)): Lookup(entries, rows, table.tensor.shape[0])}


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in what a function of torch has returned."""
    return [tree] if isinstance(tree, Tensor) else [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _moved(form: Form, graph: Tensor, leaf: Tensor) -> Form | None:
    """The parameter's form, where the value is the parameter in another shape, its transpose, or some of its first axis."""
    if graph.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr() or graph.dtype != leaf.dtype:
        return None
    if not leaf.is_contiguous() or not leaf.numel() or graph.is_conj() or graph.is_neg():  # whose numbers aren't in memory
        return None
    start = graph.storage_offset() - leaf.storage_offset()
    if start < 0 or start + graph.numel() > leaf.numel():  # as_strided goes beyond a parameter that is a part of more memory
        return None
    if graph.ndim == 2 and leaf.ndim == 2 and graph.shape == leaf.shape[::-1] and graph.stride() == leaf.stride()[::-1]:
        return _swapped(form) if leaf.shape[0] > 1 < leaf.shape[1] else None
    if graph.ndim == 3 and graph.mT.is_contiguous() and graph.mT.shape == leaf.shape and min(leaf.shape) > 1:
        return _swapped(form)
    if not graph.is_contiguous():
        return None
    each = leaf.stride(0) if leaf.ndim else 1
    start, left = divmod(int(start), each or 1)
    count, rest = divmod(graph.numel(), each or 1)
    if left or rest:
        return None
    shape = torch.Size((count, *leaf.shape[1:])) if leaf.ndim else leaf.shape
    if isinstance(form, Dense):
        form = Dense(form.matrix().view(form.samples, *shape))
    elif isinstance(form, Outer):
        form = Outer(form.left, form.right, shape)
    elif form.shape != shape:
        return None
    return form if count == (leaf.shape[0] if leaf.ndim else 1) else Placed({(start, start + count): form}, leaf.shape)


def _swapped(form: Form) -> Form | None:
    """The form of a matrix's transpose, or of a stack's."""
    if isinstance(form, Placed):
        swapped = {at: part for at, own in form.entries.items() if (part := _swapped(own)) is not None}
        return (
            Placed(swapped, torch.Size((form.shape[0], form.shape[2], form.shape[1])))
            if len(swapped) == len(form.entries)
            else None
        )
    if not isinstance(form, Outer):
        return None
    return Outer(form.right, form.left, torch.Size((*form.shape[:-2], form.shape[-1], form.shape[-2])))


def _changed(what: str) -> str:
    return (
        f"{what} has changed since the forward pass, and per-sample gradients depend on it: something was made of it before "
        "it met the batch. Read them before optimizer.step(), and before another forward in training mode."
    )
