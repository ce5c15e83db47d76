"""The ways from a call to the rows of its parameters: by the layer's rule, or by operations inside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.capture.calls import OutputGrads, RecordedCall, Way
from autograd_hacks.errors import BatchSizeError, SamplesMixed, UnsupportedLayer, where
from autograd_hacks.forms import Form, group
from autograd_hacks.probe.layout import Layout
from autograd_hacks.rules.call import Call
from autograd_hacks.rules.rule import Rule
from autograd_hacks.rules.table import rule_for
from autograd_hacks.support.parts import part_of
from autograd_hacks.support.trees import map_tensors


class ByRule:
    """By the rule of the layer, which is looked up when the rows are read."""

    def rows(self, call: RecordedCall, grads: OutputGrads) -> int:
        """The size of axis 0 of the call's outputs, or what the layer's rule counts where it knows better."""
        rule = rule_for(call.layer)
        if rule is not None and rule.count is not None:
            return rule.count(call.layer, call.args, call.kwargs)
        return grads.first.shape[0] if grads.first.ndim else 1

    def with_input(self, call: RecordedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RecordedCall:
        return replace(call, args=args, kwargs=kwargs)

    def forms(self, call: RecordedCall, grads: OutputGrads) -> Mapping[str, Form]:
        rule = rule_for(call.layer)
        if rule is not None and rule.features is not None and call.samples is not None and call.layouts[0] is not None:
            layout = call.layouts[0]
            _check_layout(call, layout, grads.first.shape)
            return _apply(rule, call, grads, layout if layout.axis or layout.fold else None, call.samples)
        rows, at = self.rows(call, grads), None if call.samples is None else call.layouts[0]
        return _by_sample(_apply(rule, call, grads, None, rows), at, rows, call.samples or 0, grads)


BY_RULE = ByRule()


@dataclass(frozen=True)
class ByInner:
    """By an operation inside the layer."""

    way: Way
    count: int  # how many rows the layer has, a batch of its own
    layout: Layout | None  # where the samples are in its output; None where they are its rows

    def rows(self, call: RecordedCall, grads: OutputGrads) -> int:
        return self.count

    def with_input(self, call: RecordedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RecordedCall:
        way = self.way.with_input(call, args, kwargs).way
        return replace(call, way=replace(self, way=way))

    def forms(self, call: RecordedCall, grads: OutputGrads) -> Mapping[str, Form]:
        forms = self.way.forms(replace(call, samples=self.count), grads)
        return _by_sample(forms, self.layout, self.count, call.samples or 0, grads)


def _by_sample(
    forms: Mapping[str, Form], layout: Layout | None, rows: int, samples: int, grads: OutputGrads
) -> Mapping[str, Form]:
    """Forms of a layer's rows, grouped where a sample has several of them."""
    if layout is None or not layout.fold:
        return forms
    labels = layout.rows(rows, samples, grads.first.device)
    return {name: group(form, labels, samples) for name, form in forms.items()}


def _ready(call: RecordedCall, grads: OutputGrads, layout: Layout | None, samples: int) -> Call:
    """The call as rules expect it: samples first, in the parameters' dtype, whatever autocast made of the layer's input.

    layout: where the samples are; None where they are where the rule looks for them
    """
    dtype = next(iter(call.edges.values())).parameter.dtype

    def ready(tensor: Tensor) -> Tensor:
        tensor = part_of(tensor)
        tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
        if layout is not None and layout.fits(tensor, samples):
            tensor = layout.samples_first(tensor, samples)
        if tensor.dtype == dtype or not (tensor.is_floating_point() and dtype.is_floating_point):
            return tensor
        return tensor.to(dtype)

    args, kwargs = map_tensors(ready, call.args), map_tensors(ready, call.kwargs) if call.kwargs else {}
    given = call.training, tuple([grad if grad is None else ready(grad) for grad in grads.at]), call.state
    return Call(call.path, call.layer, args, kwargs, *given, call.random_state, call.outputs, call.precision)


def _apply(
    rule: Rule | None, call: RecordedCall, grads: OutputGrads, layout: Layout | None, rows: int
) -> Mapping[str, Form]:
    """What the layer's rule says, checked against what forms must be.  rows: how many they must have"""
    place = partial(where, call.path, call.layer)
    if rule is None:
        raise UnsupportedLayer(f"{place()} has lost its rule since the forward pass; repeat the step")
    try:
        forms = rule.formula(call.layer, _ready(call, grads, layout, rows))
    except (BatchSizeError, SamplesMixed) as error:
        raise type(error)(f"{place()} {error}") from None
    if not isinstance(forms, Mapping) or not all(isinstance(form, Form) for form in forms.values()):
        raise TypeError(f"the rule of {place()} returned {forms!r}; expected {{name: form}}, see autograd_hacks.forms")
    found = {}
    for name in grads.reached:
        if name not in forms:
            raise UnsupportedLayer(
                f"the rule of {place()} returned forms for {', '.join(forms) or 'nothing'}, but {name!r} trains too. "
                "Register a rule that covers it (autograd_hacks.register_rule), or freeze it: requires_grad_(False)."
            )
        form, shape = forms[name], part_of(call.edges[name].parameter).shape
        if form.samples != rows or tuple(form.shape) != shape:
            raise BatchSizeError(
                f"the rule of {place()} returned per-sample gradients of shape {(form.samples, *form.shape)} for {name!r}; "
                f"expected {(rows, *shape)}: samples first, then the parameter's shape."
            )
        found[name] = form
    return found


def _check_layout(call: RecordedCall, layout: Layout, shape: torch.Size) -> None:
    """Raises where a call's output has other sizes than its samples would give it."""
    size = shape[layout.axis] if layout.axis < len(shape) else None
    if size is None or (size % (call.samples or 1) if layout.fold else size != call.samples):
        raise BatchSizeError(
            f"the numbers of samples disagree: the model was given {call.samples}, but {where(call.path, call.layer)} "
            f"returned a tensor of shape {tuple(shape)}, in which they were to be found as {layout}. Rows can't be matched."
        )
