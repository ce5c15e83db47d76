"""Checks per-sample gradients from any source against the definition: one plain backward pass for each sample's loss."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.parameter import is_lazy

from autograd_hacks import pause_hooks
from autograd_hacks.check.comparisons import WHOLE, CheckedRows, Comparison, Gradients, counted, exact
from autograd_hacks.errors import (
    A_LOSS_EACH,
    ON_CHECKING,
    REENTRANT,
    ShardedParameters,
    UnsupportedLayer,
    VerificationFailed,
)
from autograd_hacks.extending import check_kind, check_module, kind_of, some
from autograd_hacks.support.contexts import autocast_dtype, without_autocast
from autograd_hacks.support.copies import Copy
from autograd_hacks.support.display import percent
from autograd_hacks.support.graph import CHECKPOINT, nodes_behind
from autograd_hacks.support.parts import has_parts
from autograd_hacks.support.ranges import checked
from autograd_hacks.support.trees import map_tensors

Losses = tuple[Tensor, list[nn.Parameter]]
"""N losses and a model's trainable parameters."""


@checked(ON_CHECKING)
def check_rows(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor],
    rows: Mapping[str, Tensor | None] | Tensor,
    coverage: float = 0.0,
) -> CheckedRows:
    """Compares per-sample gradients from any source with the definition: row n is the gradient of ``losses[n]``.

    A copy of the model runs once, ``losses = loss(copy, *batch)``, and autograd takes one plain backward pass from each of
    the N losses.  The library computes no gradients there.  The model needs no hooks: the library's are paused, and
    modules' backward hooks, such as other engines', don't run.  All losses come from one forward, so dropout and BatchNorm
    act as in a step.  If losses mix samples, row n is still the derivative of loss n.

    batch: a tuple of arguments for ``loss(model, *batch)``; anything else is passed as it is, ``loss(model, batch)``
    loss: returns N losses, one for each sample
    rows: {parameter name: (N, \\*shape)}, rows; {parameter name: (N,)}, norms by parameter; or (N,), norms over all
    parameters that train.  A shared parameter may have any of its names.  A parameter without rows, or
    with None, appears in the table as "not given"
    coverage: the smallest share of the trainable numbers that must be given, 1.0 for all.  Norms over all
    parameters cover a parameter if they would be wrong without it; the table calls the others "unknown"

    A relative error of a sample's row of up to 4 ε^(3/4) counts as right, with ε of the coarsest dtype among parameters,
    rows and autocast: 7e-12 for float64, 2.6e-5 for float32, 0.02 for float16, 0.1 for bfloat16.

    A row with a larger error is checked again.  Autograd's row is also computed in double precision, with all weights
    rounded once more.  An error of up to four times the difference counts as rounding, for example with a loss near zero or
    a gradient that cancels.  The verdict then says "too few digits", and in how many samples.

    The forward draws the random numbers that a step would draw now.  With dropout, first set the generator to the state from
    which the engine's forward started.  The model, ``.grad``, buffers, generators and what a loss function names don't
    change, but what the object of a loss that is a method holds may.  Rows are compared sample by sample, so memory is that
    of a step, a copy of the model and one or two gradients, and that of a second step
    where rows are checked again.

    Returns a table with a line for each parameter, and the share that was given.  Raises VerificationFailed with that table
    if a row is wrong or not finite, or if less than ``coverage`` is given; ValueError for losses that are not N numbers with
    a graph, unknown or frozen parameters, other shapes, another N; TypeError for arguments of another type;
    ShardedParameters if the model is split over processes; UnsupportedLayer under reentrant checkpoints; ProbeFailed if
    something can't be copied.
    """
    _check_arguments(model, loss, rows)
    known = _known_names(model)
    first = Copy(model, (batch, None if isinstance(loss, MethodType) else loss))  # it doesn't run itself
    with _losses(first.again(first.given), loss) as (losses, parameters):
        comparison = _comparison(model, rows, known, len(losses))
        comparison.compare(partial(_gradients, losses, parameters))
    if comparison.doubtful().any():
        _look_again(comparison, first, loss)
    result = comparison.result()
    wrong = [line.name for line in result.parameters if not line.is_right]
    if wrong or result.share < coverage:
        asked = f"; coverage={coverage} requires {percent(coverage)} of the parameters"
        raise VerificationFailed(
            f"check_rows found {'wrong' if wrong else 'too few'} {comparison.what}"
            f"{asked if result.share < coverage else ''}:\n{result}" + ON_CHECKING
        )
    return result


def _check_arguments(model: Any, loss: Any, rows: Any) -> None:
    check_module("check_rows", model, ON_CHECKING)
    given = partial(check_kind, "check_rows", ON_CHECKING)
    given(Callable, "a function of the model and the batch that returns N losses", loss=loss)
    given(Mapping | Tensor, "a mapping from names of parameters to tensors, or N norms", rows=rows)
    for name, x in rows.items() if isinstance(rows, Mapping) else ():
        mend = "a tensor of N rows, or of N norms. From autograd_hacks.per_sample_grads give dense()."
        given(Tensor | None, mend, **{f"rows[{name!r}]": x})
    if has_parts(model):
        raise ShardedParameters(
            "check_rows was given a model that is split over processes; give it the whole model, in one process"
            + ON_CHECKING
        )


def _known_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters, each once, by its first name."""
    known = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not known:
        raise ValueError("check_rows was given a model without trainable parameters" + ON_CHECKING)
    if lazy := [name for name, p in known.items() if is_lazy(p)]:
        raise ValueError(f"parameter {lazy[0]!r} has no shape yet; run the model once before check_rows" + ON_CHECKING)
    return known


def _comparison(
    model: nn.Module,
    rows: Mapping[str, Tensor | None] | Tensor,
    known: Mapping[str, nn.Parameter],
    n: int,
) -> Comparison:
    """The comparison for the kind of numbers that were given.  n: the number of samples"""
    is_whole = isinstance(rows, Tensor)
    given = {WHOLE: rows} if isinstance(rows, Tensor) else {name: x for name, x in rows.items() if x is not None}
    if not given:
        raise ValueError("check_rows was given a mapping without rows: it is empty, or all of it is None" + ON_CHECKING)
    places = {name: None if is_whole else _place(model, name, known) for name in given}
    shapes = {name: p.shape for name, p in known.items()}
    own = {name: () if place is None else [*shapes.values()][place] for name, place in places.items()}
    are_norms = all(x.shape == (n,) for x in given.values()) and (is_whole or any(map(len, own.values())))
    for name, x in given.items():
        if x.shape != (n, *own[name]) and not are_norms:
            raise ValueError(
                f"check_rows was given rows of shape {tuple(x.shape)} for {name!r}; expected {(n, *own[name])}, or only "
                f"norms, {(n,)}, since the loss returned {counted(n, 'number')}" + ON_CHECKING
            )
    dtype = _coarsest([*model.parameters(), *given.values()])
    by_name = {name: (places[name], x) for name, x in given.items()}
    return Comparison(by_name, "norms" if are_norms else "rows", shapes, n, 4 * torch.finfo(dtype).eps ** 0.75, dtype)


def _place(model: nn.Module, name: str, known: Mapping[str, nn.Parameter]) -> int:
    """The index of a parameter among the trainable ones.  name: any of its names"""
    every = dict(model.named_parameters(remove_duplicate=False))
    if name not in every:
        raise ValueError(
            f"check_rows was given rows of {name!r}, which the model lacks; it has {some([*known])}" + ON_CHECKING
        )
    if not every[name].requires_grad:
        raise ValueError(f"check_rows was given rows of {name!r}, which is frozen; leave them out" + ON_CHECKING)
    return next(place for place, p in enumerate(known.values()) if p is every[name])


def _look_again(comparison: Comparison, first: Copy, loss: Callable[..., Tensor]) -> None:
    """Allows for rounding, where it changes losses only a little."""
    half = torch.finfo(comparison.dtype).eps ** 0.5
    for is_double in (True, False):
        plain, changed = (first.again(first.given) for _ in range(2))
        try:
            with _losses(plain, loss) as (losses, parameters), _losses(changed, loss, is_double) as (rounded, theirs):
                # Dropout may draw other masks in another precision, which is not rounding.
                values = exact(losses).cpu()
                apart = (exact(rounded).cpu() - values).abs()
                if (apart <= half * values.abs().clamp(min=float(values.abs().median()))).all() or not is_double:
                    comparison.compare_again(partial(_gradients, losses, parameters), partial(_gradients, rounded, theirs))
                    return
        except Exception:  # a model that was written for one precision may raise anything
            if not is_double:
                raise


@contextmanager
def _losses(copy: Copy, loss: Callable[..., Tensor], is_double: bool | None = None) -> Iterator[Losses]:
    """A context with the losses of a copy.  is_double: with rounded weights, in double precision or in their own"""
    model, (own, function) = copy.model, copy.given  # a loss that is a method isn't copied
    loss = function or loss
    with copy.running(), pause_hooks(), torch.enable_grad(), ExitStack() as stack:
        for module in model.modules():  # other engines' hooks, which may change gradients
            module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()
        if is_double is not None:
            _round(model, is_double)
        if is_double:
            own = map_tensors(_doubled, own)
            for x in model.buffers():
                x.data = _doubled(x.data)
            stack.enter_context(without_autocast([*model.parameters(), *model.buffers()]))
        losses = loss(model, *own) if isinstance(own, tuple) else loss(model, own)
        if not isinstance(losses, Tensor) or losses.ndim != 1:
            raise ValueError(
                f"the loss given to check_rows returned {kind_of(losses)}; expected {A_LOSS_EACH}" + ON_CHECKING
            )
        if not len(losses):
            raise ValueError("check_rows: the loss returned no losses; give it at least one sample" + ON_CHECKING)
        if not losses.requires_grad or losses.is_complex():
            why = "complex numbers" if losses.is_complex() else "losses that depend on no trainable parameter"
            raise ValueError(f"check_rows: the loss returned {why}; expected N differentiable losses" + ON_CHECKING)
        # A reentrant checkpoint's graph doesn't lead to the parameters inside it, whose gradients would be zero.
        if losses.grad_fn is not None and any(node.name() == CHECKPOINT for node in nodes_behind([losses.grad_fn])):
            raise UnsupportedLayer(f"check_rows {REENTRANT}" + ON_CHECKING)
        yield losses, list(_known_names(model).values())


def _round(model: nn.Module, is_double: bool) -> None:
    """Changes each weight at random by a relative error of up to half its dtype's ε, or 2 ε if it doesn't become double."""
    draws = torch.Generator().manual_seed(0)  # its own generator, so that the model draws the same numbers again
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() or p.is_complex():
                by = torch.rand(p.shape, generator=draws, device="cpu", dtype=torch.float32) - 0.5
                by = by * (torch.finfo(p.dtype).eps * (1 if is_double else 4))
                own = _doubled(p.data) if is_double else p.data
                p.data = own + own * by.to(p.device)


def _doubled(x: Tensor) -> Tensor:
    is_exact = not (x.is_floating_point() or x.is_complex())
    return x if is_exact else x.to(torch.promote_types(x.dtype, torch.float64))


def _gradients(losses: Tensor, parameters: Sequence[Tensor], n: int) -> Gradients:
    """The gradient of loss n, by one plain backward pass."""
    found = torch.autograd.grad(losses[n], parameters, retain_graph=True, allow_unused=True)
    return [None if g is None else exact(g) for g in found]


def _coarsest(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype with the fewest digits among the tensors' and autocast's."""
    dtypes = [x.dtype for x in tensors if x.is_floating_point() or x.is_complex()]
    dtypes += [dtype for x in tensors if (dtype := autocast_dtype(x.device)) is not None]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
