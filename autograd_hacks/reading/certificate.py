"""Rows add up: the sum over the samples is the gradient that arrived at the parameter, or there is something unseen."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from math import inf, prod

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.records import Pass, Record, Segment
from autograd_hacks.capture.uses import LayerCall, NodeUse, OutputGrads, Use
from autograd_hacks.errors import HigherOrderError, UnseenGradient
from autograd_hacks.forms import Chained, Dense, Form, magnitudes
from autograd_hacks.support.parts import own_of, part_of
from autograd_hacks.support.precision import CONV, MATMUL, RNN, unit_of_products

ROUNDING = 64
"""By how many units of the least digit two ways to one sum may differ, of the sum of the terms' magnitudes."""

PRODUCTS = 4
"""By how many units to which the factors of products are rounded two sums may differ: each is off by a unit at most."""

_IN_STEPS = 20
"""The same, where products of products are added up, step by step."""

_ADD_IN_TURN = (nn.LayerNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers of whose biases torch adds the gradients at K positions one after the other on a CPU, which loses as many digits of
equal ones as K has."""


def check_sum(name: str, known: str, form: Form, segment: Segment, record: Record, loss_type: str | None) -> None:
    """Raises where the rows don't add up to the gradient that arrived, if that was kept.

    name: the parameter's, for people    known: in the record    form: its rows, but for those of calls that are settled
    """
    reaching = [p for p in segment.passes if p.calls_of.get(known)]
    left = [p for p in reaching if known in p.arrived or not p.settled.get(known, set()).issuperset(p.calls_of[known])]
    # Those of one `backprop_hess` have added up what arrived.
    brought = {id(p.arrived): (p, p.arrived[known]) for p in left if known in p.arrived}
    if not reaching or not all(known in p.arrived for p in left):
        return
    summed = record.plan.summed
    if not form.samples or not form.shape.numel():
        return
    if not brought or adds_up(known, form, list(brought.values()), loss_type):
        summed.add(known)
        return
    summed.discard(known)  # as another micro-batch's rows may have
    record.plan.pending = True
    if record.comparing:
        raise HigherOrderError(
            f"the rows of {name} don't add up to its gradient: a backward pass with create_graph=True has made a graph that "
            "leads to it by a way that isn't known: a layer that was called before add_hooks; a custom autograd.Function "
            "that was given the weight; rows that depend on how a weight was made of others (weight_norm), and were "
            "differentiated; or a penalty on the weight, which belongs to no sample. Run that part's backward pass within "
            "autograd_hacks.pause_hooks()."
        )
    raise UnseenGradient(
        f"the rows of {name} don't add up to the gradient that arrived at it: some of that came by a way that the hooks "
        "don't see, a penalty on the weight in the loss, say, or a use of the weight past its own layer; or its layer's "
        "rule is wrong. A penalty belongs to no sample: run its backward pass by itself, within "
        "autograd_hacks.pause_hooks()."
    )


def adds_up(known: str, form: Form, brought: Sequence[tuple[Pass, Tensor]], loss_type: str | None) -> bool:
    """Whether rows add up to the gradients that passes have brought to a parameter.

    known: the parameter's name in the record    form: the rows, but for those of calls that are settled
    """
    scales: list[float] = [form.samples if recorded.reduction(loss_type) == "mean" else 1 for recorded, _ in brought]
    weight = 1.0
    if len(scales) == 1:  # the usual case: no copy of the gradient is made
        weight, scales = 1 / max(1.0, scales[0]), [1.0]
    edges = (edge for p, _ in brought for call in p.calls_of[known] for edge in call.edges.values())
    parameter = next(edge.parameter for edge in edges if edge.name == known)
    arrived = [own_of(grad, parameter).to_dense() for _, grad in brought]
    expected = arrived[0] if len(arrived) == 1 else reduce(torch.add, map(torch.mul, arrived, scales))
    calls = [
        (call, p.received[call], scale)
        for (p, _), scale in zip(brought, scales)
        for call in p.calls_of.get(known, ())
        if call not in p.settled.get(known, ())
    ]
    # Under autocast the gradient that arrived was computed in its precision.
    used = [call.precision for call, _, _ in calls if call.precision is not None]
    with torch.no_grad():
        weights, received = expected.new_full((form.samples,), weight), partial(received_by, form, calls)
        return agree(form, weights, expected, used, received, rounded_by((call for call, _, _ in calls), expected))


def rounded_by(uses: Iterable[Use], like: Tensor) -> float:
    """How far sums may differ because products of a parameter's uses round their factors, of the sum of the magnitudes.

    like: what the sums are, which tells the device and the dtype
    """
    return max((rounding_of(kind, like) for kind in {_products_of(use) for use in uses}), default=0.0)


def rounding_of(kind: str, like: Tensor) -> float:
    """`rounded_by`, of one kind of products."""
    return (_IN_STEPS if kind == RNN else PRODUCTS) * unit_of_products(like, {kind, MATMUL})


def _products_of(use: Use) -> str:
    """By what kind of products a use makes its parameters' gradients."""
    if isinstance(use, LayerCall):
        is_step = isinstance(use.layer, nn.RNNBase | nn.RNNCellBase)
        return RNN if is_step else CONV if isinstance(use.layer, nn.modules.conv._ConvNd) else MATMUL
    node = use.node if isinstance(use, NodeUse) else ""
    return RNN if re.search("rnn|lstm|gru", node, re.I) else CONV if re.search("convolution", node, re.I) else MATMUL


def received_by(form: Form, found: Iterable[tuple[Use, OutputGrads, float]]) -> float:
    """How far rounding may lead a sum over positions, where one of `ROUNDING` units is 1: how long what it adds up is.

    Further for `_ADD_IN_TURN`: K / 12 units were seen; and where a norm takes away a mean that is far larger than what is
    left, the digits of which its forward and its backward round in their own ways.

    found: the parameter's calls, what came to each, and what that is multiplied by
    """
    length = 0.0
    for call, grads, scale in found:
        # What is too small for the dtype loses its digits, of each term.
        lost = scale * torch.finfo(grads.first.dtype).tiny * grads.first.numel() ** 0.5
        if not isinstance(call, LayerCall):
            length += scale * grads.length + lost
            continue
        in_turn = isinstance(call.layer, _ADD_IN_TURN) and all(isinstance(leaf, Dense) for leaf in form.leaves())
        terms = grads.first.numel() / max(1, form.shape.numel()) if in_turn else 1
        if in_turn and torch.bfloat16 in (call.precision, grads.first.dtype):
            length += 10 * scale * grads.length  # in bfloat16 sums of hundreds were off by 40 % of that
        if isinstance(call.layer, nn.Embedding) and torch.finfo(grads.first.dtype).eps > 1e-4 and grads.first.numel():
            # torch adds one token's gradients in turn, on which in half precision the digits of later ones are lost.
            times = int(part_of(call.argument(0, "input")).flatten().bincount().max())
            length += 20 * scale * times**2 * torch.finfo(grads.first.dtype).eps * float(grads.first.abs().max())
        length += scale * grads.length * max(1.0, terms**1.5 / (8 * ROUNDING)) * _centred(call)
        inputs = [part_of(x) for x in call.args if isinstance(x, Tensor) and x.is_floating_point()]
        largest = max([1.0, *(float(x.abs().max()) for x in inputs if x.numel())])
        length += lost * largest
    return length


def _centred(call: LayerCall) -> float:
    """How many times longer a norm's input is than what it normalises, divided by the same; 1 for other layers."""
    layer, x = call.layer, call.args[0] if call.args else None
    if not isinstance(x, Tensor) or not (x := part_of(x)).numel():
        return 1.0
    if isinstance(layer, nn.LayerNorm):
        groups = x.reshape(-1, prod(layer.normalized_shape))
    elif isinstance(layer, nn.GroupNorm):
        groups = x.reshape(len(x) * layer.num_groups, -1)
    elif isinstance(layer, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d) and x.ndim > 2:
        groups = x.reshape(x.shape[0] * x.shape[1], -1)
    else:
        return 1.0
    variance, mean = torch.var_mean(groups.double(), 1, correction=0)
    return 1 + float((mean.square() / (variance + layer.eps)).mean().sqrt())


def agree(
    form: Form,
    w: Tensor,
    expected: Tensor,
    used: Iterable[torch.dtype | None],
    received: Callable[[], float],
    rounded: float = 0.0,
) -> bool:
    """Whether Σₙ wₙ gₙ is what autograd has found, but for rounding: relative to the sum of its terms' magnitudes, which
    is far larger than the sum where they cancel.

    w: N    expected: shape    used: other dtypes that it was computed in    received: see `received_by`; what rows that are
    sums over positions already may have cancelled from    rounded: see `rounded_by`
    """
    if not expected.numel():
        return True
    difference = form.weighted_sum(w).to(expected.dtype).sub_(expected)
    dtypes = {expected.dtype, *(dtype for dtype in used if dtype is not None)}
    tolerance = max(rounded, *(min(ROUNDING * torch.finfo(dtype).eps, 0.05) for dtype in dtypes))
    worst, largest = torch.stack([torch.linalg.vector_norm(x, inf) for x in (difference, expected)]).tolist()
    if worst <= tolerance * largest < inf:  # the usual case
        return True
    difference = difference.abs()
    finite = difference.isfinite()
    if not finite.any():
        return True  # there is nothing to compare
    expected, difference = expected.where(finite, 0), difference.where(finite, 0)
    # Of numbers so small that they are multiples of the least one, each is off by some of that.
    least = max(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for dtype in dtypes)
    if difference.max() <= tolerance * expected.abs().max() + 8 * least * float(w.abs().sum()):
        return True
    is_coarse = max(torch.finfo(dtype).eps for dtype in dtypes) > 1e-4
    is_summed = is_coarse or any(isinstance(leaf, Chained | Dense) for leaf in form.leaves())
    if is_summed and difference.max() <= tolerance * received():
        return True
    terms = magnitudes(form).weighted_sum(w.abs()).to(difference.dtype).where(finite, 0).nan_to_num(0, 0, 0)
    return bool((difference <= tolerance * (terms + terms.max() / 8)).all())
