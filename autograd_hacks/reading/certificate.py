"""Rows add up: the sum over the samples is the gradient that arrived at the parameter, or there is something unseen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autograd_hacks.capture.records import Pass, Record, Segment
from autograd_hacks.errors import HigherOrderError, UnseenGradient
from autograd_hacks.forms import Form
from autograd_hacks.probe.plan import SumCheck


def comparable(segment: Segment, name: str) -> list[Pass]:
    """The passes that brought gradient to a parameter; none where that was not kept for all of them."""
    # Those of one `backprop_hess` have added up what arrived.
    passes = list({id(p.arrived): p for p in segment.passes if name in p.reached}.values())
    return passes if all(name in recorded.arrived for recorded in passes) else []


def check_sum(name: str, form: Form, passes: Sequence[Pass], record: Record, loss_type: str | None, lazily: bool) -> None:
    """Raises where the rows don't add up to the gradient that arrived.

    name: the parameter's    passes: see `comparable`
    lazily: whether the rows of modules that are run again may not all be written out; they are compared in the plan's first
    step alone then
    """
    if not passes or not form.samples or not form.shape.numel():
        return
    sources = form.sources
    if sources and lazily and record.plan.sum_check is SumCheck.DONE:
        return
    for source in sources:
        if not lazily:
            source.prepare()  # the rows, which are wanted anyway; else the sum would run the module once more
    scales = [form.samples if recorded.reduction(loss_type) == "mean" else 1 for recorded in passes]
    expected, *others = [recorded.arrived[name].to_dense() * scale for recorded, scale in zip(passes, scales)]
    for other in others:
        expected = expected + other
    # Under autocast the gradient that arrived was computed in its precision.
    used = [call.precision for p in passes for call in p.received if call.precision is not None]

    def largest() -> Tensor:
        return max(_largest(recorded) * scale for recorded, scale in zip(passes, scales))

    with torch.no_grad():
        ones = expected.new_ones(form.samples)
        total = Form.weighted_sum(form, ones) if sources else form.weighted_sum(ones)  # of rows, and by no other way
        # A gradient that is zero but for rounding, as a bias's before a normalisation, has no digits to compare.
        difference = (total.to(expected.dtype) - expected).abs().max()
        if is_rounding(difference, expected.abs().max(), largest, (expected.dtype, *used)):
            return
    if record.comparing:
        raise HigherOrderError(
            f"the rows of {name} don't add up to its gradient: a backward pass with create_graph=True has made a graph that "
            "leads to it past the hooks. Per-sample gradients of such losses, a gradient penalty say, are not supported: "
            "run the penalty's backward pass by itself, within autograd_hacks.pause_hooks()."
        )
    raise UnseenGradient(
        f"the rows of {name} don't add up to the gradient that arrived at it: some of that came by a way that the hooks "
        "don't see, a penalty on the weight in the loss, say, or a use of the weight past its own layer; or its layer's "
        "rule is wrong. A penalty belongs to no sample: run its backward pass by itself, within "
        "autograd_hacks.pause_hooks()."
    )


def is_rounding(difference: Tensor, value: Tensor, largest: Callable[[], Tensor], dtypes: Sequence[torch.dtype]) -> bool:
    """Whether the difference between two ways to one gradient is no more than rounding makes it.

    difference, value, largest: magnitudes, the largest of the difference, of the gradient, and of all gradients around it
    dtypes: in which it was computed
    """
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    if not value.isfinite():
        return True  # there is nothing to compare
    return bool(difference <= max(1e-3, 8 * eps) * value) or bool(difference <= max(1e3 * eps, 1e-10) * largest())


def _largest(recorded: Pass) -> Tensor:
    """The largest magnitude among the gradients that a pass brought to outputs and to parameters."""
    if recorded.largest is not None:
        return recorded.largest
    received = [grad for grads in recorded.received.values() for grad in grads.at if grad is not None]
    grads = [*received, *(grad.to_dense() for grad in recorded.arrived.values())]
    largest = torch.stack([grad.abs().max().cpu().double() for grad in grads if grad.numel()]).max()
    if recorded.finished:
        recorded.largest = largest
    return largest
