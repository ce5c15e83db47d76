"""Checks that the rows add up to the gradient that arrived at the parameter.  If not, some gradient was not recorded.

Registered rules are checked with random weights, too: their rows must add up to what the layer's own graph gives."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.capture.calls import LayerCall
from autograd_hacks.capture.kinds import Whose
from autograd_hacks.capture.log import Noted
from autograd_hacks.capture.ran import Ran
from autograd_hacks.capture.records import Pass, Record
from autograd_hacks.capture.uses import NodeUse, OutputGrads, Use
from autograd_hacks.errors import HigherOrderError, UnseenGradient
from autograd_hacks.forms import Chained, Concatenation, Convolution, Dense, Form, magnitudes
from autograd_hacks.forms.directions import PAIRS, directions
from autograd_hacks.forms.factored import Factored
from autograd_hacks.formulas.table import is_given
from autograd_hacks.support.contexts import CONV, MATMUL, RNN, unit_of_products, without_autocast
from autograd_hacks.support.graph import Value, made
from autograd_hacks.support.parts import undivided
from autograd_hacks.support.sweep import Grads, sweep

ROUNDING = 64
"""How far two ways to compute a sum may differ, in units in the last place of the sum of the terms' magnitudes."""

UNITS, COARSE, FINEST = 84, 2.56, 1e-12
"""The same along a direction, in units of the root of the sum of the terms' squares: 1e-5 in float32; 2e-2 in bfloat16.
In float64 it is more behind nodes without a step of ours, as a function of a matrix: ``matrix_exp`` was off by 500 units."""

MANY = 2**14
"""From about how many terms on torch's own sum loses more than that: of 80,000 each, 4 of 60 steps were off by 1e-5."""

PRODUCTS = 4
"""How far two sums of products may differ, in units to which the factors are rounded.  Each factor is off by one at most."""

_IN_STEPS = 20
"""The same for products of products, which are added up step by step."""

_ADD_IN_TURN = (nn.LayerNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers for whose biases torch adds up the gradients of K positions one by one on a CPU.  For equal gradients that loses as
many digits as K has."""


Told = tuple[Use, OutputGrads, Form]
"""A use, the gradients that a pass gave to it, and the rows that follow for a parameter."""


class _Compared(NamedTuple):
    """A parameter that is compared."""

    name: str
    known: str  # its name in the record
    unit: float  # the tolerance
    told: Sequence[Told]  # what gives its rows
    parts: Sequence[Tensor]  # the terms of each use
    is_new: bool  # whether some are compared for the first time


class Certificate:
    """Compares sums of rows with the gradients that arrived at parameters, along a few random directions.

    Gradient that no use explains differs; rows of other samples don't.  The numbers of all parameters are read at once.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        # What is compared, by shapes.
        self._found = dict[tuple[object, ...], list[tuple[_Compared, Tensor, Tensor, Tensor]]]()

    def add(self, name: str, known: str, recorded: Pass, told: Sequence[Told]) -> None:
        """Takes the rows of all uses that brought gradient to a parameter in a pass.

        name: the parameter's name in messages    known: its name in the record"""
        form, sums = told[0][2], recorded.along[known]
        if known in recorded.beside or known in recorded.skipped or not form.samples or not form.shape.numel():
            return  # a part of what arrives belongs to no sample, or a part of it doesn't arrive; or nothing does
        if (unit := self._unit_of(told, sums[0])) is None:
            note_compared(known, told)
            return
        at = directions(known, recorded.task % 4, form.shape, form.like.dtype, sums[0].device)
        forms = [_as_used(use, own) for use, _, own in told]
        are_dense = len(forms) > 1 and all(type(own) is Dense for own in forms)
        terms = [own.terms(*at) for own in ([Concatenation.of(forms)] if are_dense else forms)]
        own = terms[0] if len(terms) == 1 else torch.cat(terms, 1)
        parts = own.split([each.samples for each in forms], 1) if are_dense else terms
        total = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
        key = own.shape, total.shape, own.dtype, total.dtype, own.device
        self._found.setdefault(key, []).append((
            _Compared(name, known, unit, told, parts, any(use.within.is_new(known) for use, _, _ in told)), own, total, at[1]
        ))  # fmt: skip

    def _unit_of(self, told: Sequence[Told], like: Tensor) -> float | None:
        """How far sums may differ, relative to the root of the sum of the terms' squares; None if nothing is known."""
        dtypes = {(use.precision, grads.first.dtype, form.like.dtype, like.dtype) for use, grads, form in told}
        unit = max(torch.finfo(dtype).eps for own in dtypes for dtype in own if dtype is not None)
        if unit < 1e-6:
            added = max(_added(grads, form) for _, grads, form in told)
            uses = [use for use, _, _ in told]
            ways = (value.way for use in uses if isinstance(use, NodeUse) for value in use.known.values)
            least = max(0.0 if all(way is None or way.is_stepwise for way in ways) else FINEST, rounded_by(uses, like))
            return max(UNITS * unit * (1 + (added / MANY) ** 0.5), least)
        leaves = [leaf for _, _, form in told for leaf in form.leaves()]
        if any(isinstance(leaf, Dense) for leaf in leaves):
            return None
        # torch adds up a convolution's samples in half precision: 32 were off by 0.7 %.
        samples = max([leaf.samples for leaf in leaves if isinstance(leaf, Convolution)], default=1)
        return COARSE * unit * max(1.0, samples**0.5 / 2)

    def check(self) -> None:
        """Raises if rows don't add up."""
        compared, apart, lengths = list[_Compared](), list[Tensor](), list[Tensor]()
        found, self._found = self._found, {}
        for group in found.values():
            own, *tensors = zip(*group)
            terms, totals, v = map(torch.stack, tensors)
            # What arrived and the terms, with one sign, add up to zero.
            both = torch.cat([torch.mul(totals, v).to(terms.dtype), terms.neg()], 2)
            apart.append(both.sum(2))
            lengths.append(torch.linalg.vector_norm(both, dim=(1, 2)))
            compared += own
        if compared:
            device = apart[0].device
            differences = torch.cat([x.to(device) for x in apart]).abs()
            length = torch.cat([x.to(device) for x in lengths]) * (2 / PAIRS) ** 0.5  # as long as both
            most = differences.amax(1)
            # Of infinite gradients nothing is known.
            for n, relative in enumerate((most / length).nan_to_num(0.0).tolist()):
                at = compared[n]
                if relative > at.unit and not self._is_rounding(at, float(most[n]), float(length[n])):
                    for use, _, _ in at.told:  # what agreed before is compared again
                        if use.within.compared is not None:
                            use.within.compared.discard(at.known)
                    raise unexplained(at.name, self._record)
            for own in compared:
                # Two zeros agree whatever gives rows, unless it is a layer's rule that sees what its node does.
                are_told = (isinstance(told[0], LayerCall) or bool(x.any()) for told, x in zip(own.told, own.parts))
                if own.is_new and all(are_told):
                    note_compared(own.known, own.told)
        for recorded in self._record.passes:
            if recorded.finished:  # what was compared is needed no more
                recorded.along = {}

    def _is_rounding(self, own: _Compared, apart: float, length: float) -> bool:
        """Whether a difference is no more than what torch loses in sums over positions.

        apart: the largest one along a direction    length: with which it was compared"""
        # The first one, the length of one use's gradient, is less and takes far less time.
        shorter, forms = partial(torch.linalg.vector_norm, own.told[0][1].first), [form for _, _, form in own.told]
        longer = partial(received_by, forms, [(use, grads, 1.0) for use, grads, _ in own.told])
        if any(not apart > own.unit * (length + 2 * float(more())) for more in (shorter, longer)):
            return True
        # Equal terms, added up one by one, are all rounded to the same side.
        terms = torch.cat([*own.parts], 1)
        if bool((terms - terms.mean(1, keepdim=True)).norm() > 2**-10 * terms.norm()):
            return False
        unit = torch.finfo(terms.dtype).eps * max(_added(grads, form) for _, grads, form in own.told) / 2
        return apart <= unit * float(terms.sum(1).abs().max())


def note_compared(known: str, told: Sequence[Told]) -> None:
    """Notes that from now on it is enough if a parameter's gradient arrives as the uses have made it."""
    for use, _, _ in told:
        if use.within.compared is not None and use.within.is_new(known):
            use.within.compared.add(known)


def _added(grads: OutputGrads, form: Form) -> float:
    """How many terms an entry of the gradient has."""
    return grads.first.numel() / max([1, *form.shape[:1]])


def _as_used(use: Use, form: Form) -> Form:
    """The form with its factors rounded as autocast rounded them for the product."""
    is_exact = use.precision in (None, form.like.dtype) or not isinstance(form, Factored)
    return form if is_exact or use.precision is None else form.to(use.precision).to(form.like.dtype)


def unexplained(name: str, record: Record) -> UnseenGradient | HigherOrderError:
    """The error for a parameter whose rows don't add up to its gradient."""
    if record.comparing:
        return HigherOrderError(
            f"{name}: the rows don't add up to its gradient. A backward pass with create_graph=True made a graph that leads "
            "to this parameter by an unknown way. Possible ways: a layer called before add_hooks; a custom "
            "autograd.Function that takes the weight; rows of a weight computed from others (weight_norm), differentiated "
            "again; or a penalty on the weight, which belongs to no sample. Run the backward pass of that part within "
            "autograd_hacks.pause_hooks()."
        )
    return UnseenGradient(
        f"{name}: the rows don't add up to the gradient that arrived. Part of the gradient did not pass through the "
        "hooked layers, for example a penalty on the weight or a use of the weight outside its own layer; or a hook on the "
        "parameter changes its gradient (change .grad after the rows are read); or the layer's rule is wrong. A penalty "
        "belongs to no sample: run its backward pass separately, within autograd_hacks.pause_hooks()."
    )


def rounded_by(uses: Iterable[Use], like: Tensor) -> float:
    """How far sums may differ because a parameter's uses round the factors of products, relative to the sum of magnitudes.

    like: a tensor with the sums' device and dtype
    """
    return max((rounding_of_products(kind, like) for kind in {_products_of(use) for use in uses}), default=0.0)


def rounding_of_products(kind: str, like: Tensor) -> float:
    """`rounded_by` for one kind of product."""
    return (_IN_STEPS if kind == RNN else PRODUCTS) * unit_of_products(like, {kind, MATMUL})


def _products_of(use: Use) -> str:
    """The kind of product by which a use computes its parameters' gradients."""
    if isinstance(use, LayerCall):
        is_step = isinstance(use.layer, nn.RNNBase | nn.RNNCellBase)
        return RNN if is_step else CONV if isinstance(use.layer, nn.modules.conv._ConvNd) else MATMUL
    node = use.known.node if isinstance(use, NodeUse) else ""
    return RNN if re.search("rnn|lstm|gru", node, re.I) else CONV if re.search("convolution", node, re.I) else MATMUL


def received_by(forms: Sequence[Form], found: Iterable[tuple[Use, OutputGrads, float]]) -> Tensor | float:
    """A length that scales the allowed rounding error of a sum over positions: the length of its terms.

    It is larger for two kinds of layers.  For `_ADD_IN_TURN`, errors of K / 12 units were seen.  A norm layer may subtract a
    mean far larger than the rest, and its forward and backward round the rest's digits differently.

    found: the parameter's calls, the gradients that each got, and their factors
    """
    length: Tensor | float = 0.0
    is_dense = all(isinstance(leaf, Dense) for form in forms for leaf in form.leaves())
    for call, grads, scale in found:
        # Terms too small for the dtype lose their digits.
        lost = scale * torch.finfo(grads.first.dtype).tiny * grads.first.numel() ** 0.5
        if not isinstance(call, LayerCall):
            length += scale * grads.length + lost
            continue
        in_turn = isinstance(call.layer, _ADD_IN_TURN) and is_dense
        terms = grads.first.numel() / max(1, forms[0].shape.numel()) if in_turn else 1
        if in_turn and torch.bfloat16 in (call.precision, grads.first.dtype):
            length += 10 * scale * grads.length  # in bfloat16, sums of hundreds were off by 40 % of that
        if isinstance(call.layer, nn.Embedding) and torch.finfo(grads.first.dtype).eps > 1e-4 and grads.first.numel():
            # torch adds one token's gradients one by one; in half precision later ones lose their digits.
            times = torch.bincount(call.argument(0, "input").flatten(), minlength=call.layer.num_embeddings).max().double()
            length += 20 * scale * times**2 * torch.finfo(grads.first.dtype).eps * grads.first.abs().max()
        length += scale * grads.length * max(1.0, terms**1.5 / (8 * ROUNDING)) * _centred(call)
        inputs = [x for x in call.args if isinstance(x, Tensor) and x.is_floating_point()]
        length += sum(lost * (x.abs().max().clamp(min=1).double() if x.numel() else 1) for x in inputs)
    return length


def _centred(call: LayerCall) -> Tensor | float:
    """How many times longer a norm layer's input is than the normalised input; 1 for other layers."""
    layer, x = call.layer, call.args[0] if call.args else None
    if not isinstance(x, Tensor) or not x.numel():
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
    return 1 + (mean.square() / (variance + layer.eps)).mean().sqrt()


def agree(
    form: Form,
    w: Tensor,
    expected: Tensor,
    used: Iterable[torch.dtype | None],
    received: Callable[[], Tensor | float],
    rounded: float = 0.0,
) -> bool:
    """Whether Σₙ wₙ gₙ equals autograd's result, except for rounding.

    Rounding is relative to the sum of the terms' magnitudes, which is far larger than the sum if the terms cancel.

    w: N    expected: parameter shape    used: other dtypes in which it was computed    rounded: see `rounded_by`
    received: see `received_by`; rows that are sums over positions may have cancelled themselves
    """
    difference = form.weighted_sum(w).to(expected.dtype).sub_(expected).abs()
    dtypes = {expected.dtype, *(dtype for dtype in used if dtype is not None)}
    tolerance = max(rounded, *(min(ROUNDING * torch.finfo(dtype).eps, 0.05) for dtype in dtypes))
    finite = difference.isfinite()
    if not finite.any():
        return True  # there is nothing to compare
    expected, difference = expected.where(finite, 0), difference.where(finite, 0)
    # Numbers so small that they are multiples of the smallest one may each be off by a few of these.
    least = max(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for dtype in dtypes)
    if difference.max() <= tolerance * expected.abs().max() + 8 * least * float(w.abs().sum()):
        return True
    is_coarse = max(torch.finfo(dtype).eps for dtype in dtypes) > 1e-4
    is_summed = is_coarse or any(isinstance(leaf, Chained | Dense) for leaf in form.leaves())
    if is_summed and bool(difference.max() <= tolerance * received()):
        return True
    terms = magnitudes(form).weighted_sum(w.abs()).to(difference.dtype).where(finite, 0).nan_to_num(0, 0, 0)
    return bool((difference <= tolerance * (terms + terms.max() / 8)).all())


def check_rules(ran: Ran, places: Sequence[Whose | None], samples: int) -> dict[str, str]:
    """{parameter: why its rows are wrong}, for the layers of a finished forward whose rules a user has registered.

    places: whose the entries of the calls' outputs are    samples: N"""
    wrong: dict[str, str] = {}
    for noted, place in zip(ran.noted, places):
        if place is not None and is_given(noted.call.layer) and noted.call.edges and not place.is_unseen:
            wrong |= _compared(ran, noted, place, samples)
    return wrong


def _compared(ran: Ran, noted: Noted, place: Whose, samples: int) -> dict[str, str]:
    draws = torch.Generator().manual_seed(samples)
    # Powers of two: multiplying by them does not change what rounding leaves of a zero.
    w = 2.0 ** (torch.randperm(samples, generator=draws, device="cpu") % 8 - 4)
    given: dict[Value, Tensor] = {}
    grads: list[Tensor | None] = [None] * noted.call.slots
    for node, hook in noted.hooks:
        layout, like = place.layouts[hook.slot], made(node)[hook.number]
        if layout is None and place.labels is None:
            return {}
        g = torch.randn(like.shape, generator=draws, dtype=like.dtype, device="cpu").to(like.device).reshape(hook.shape)
        each = w[place.labels].view(-1, *[1] * (g.ndim - 1)).to(g) if layout is None else layout.over(g, w.to(g))
        grads[hook.slot] = g
        given[Value(node, hook.number)] = (each * g).reshape(tuple(like.shape))
    leaves, arrived = {edge.node: name for name, edge in noted.call.edges.items()}, dict[str, Tensor]()

    def arrive(node: Node, at: Grads) -> None:
        if node in leaves and at[0] is not None:
            arrived[leaves[node]] = at[0].detach()

    with torch.no_grad(), without_autocast(ran.outputs):
        sweep(given, arrive, noted.inputs)
        received = OutputGrads(grads, [0] * len(grads), tuple(noted.call.edges))
        try:
            forms = noted.call.forms(received)
        except Exception:  # reading raises a rule's error again
            return {}
    terms = [(noted.call, received, float(w.max()))]
    return {
        (name := noted.call.edges[local].name): (
            f"with random weights, the rows of {name} don't add up to the gradient that its layer gives. Its rule is wrong "
            f"({noted.call.place})"
        )
        for local, form in forms.items()
        if local in arrived
        and not agree(
            form,
            w.to(form.like.device, form.sum_dtype.to_real()),
            undivided(arrived[local]).to_dense(),
            [noted.call.precision],
            partial(received_by, [form], terms),
            rounded_by([noted.call], arrived[local]),
        )
    }
