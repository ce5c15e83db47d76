"""Blocks of a model's Gauss-Newton matrix, their diagonals and their Kronecker factors, next to ``param.grad``."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.curvature.backprop import passes_for
from autograd_hacks.curvature.ekfac import Eigenvalues
from autograd_hacks.curvature.sums import MAX_BYTES, Coverage, Sums
from autograd_hacks.errors import ON_CURVATURE, ON_PASSES
from autograd_hacks.extending import check_kind, check_loader, kind_of, recorder_of, spread_of
from autograd_hacks.support.display import progress
from autograd_hacks.support.ranges import checked


@checked(ON_CURVATURE)
def compute_hess(
    model: nn.Module,
    kind: str = "full",
    parameters: str | Collection[str] | None = None,
    max_bytes: float = MAX_BYTES,
    skip: bool = False,
) -> Coverage:
    """Sets the curvature of the batch's mean loss on every trainable parameter, from the passes of `backprop_hess`.

    The curvature is the generalised Gauss-Newton matrix.  For the weight and bias of a layer that is used once, between
    piecewise linear activations (ReLU), a parameter's own block is the exact Hessian.

    kind: what to compute

    * ``'full'``: ``param.hess``, of shape ``(*shape, *shape)``
    * ``'diag'``: ``param.hess_diag``, its diagonal, of shape ``shape``
    * ``'kfac'``: ``param.kfac``, an `autograd_hacks.curvature.KFAC`, a pair (A, B). A is of the inputs, I × I,
      and B of the gradients at the outputs, O × O. The block of ``param.flatten()`` is approximated by
      ``torch.kron(B, A)`` for weights (O, I), as in Linear, and (O, C·K), in convolutions. It is ``torch.kron(A, B)`` if
      ``param.kfac.is_turned``: weights (I, O), as in transformers' Conv1D and in tables, whose A is a diagonal, I numbers.
      The groups of a convolution and the experts of a stack are G blocks with their own factors, (G, I, I) and (G, O, O).
      Vectors have A = 1 and their own block as B. If a weight has several uses, or its
      gradients are not products, A is each row's share of the squared gradients, a diagonal, and B is of what the rows hold
    * ``'ekfac'``: also ``param.ekfac``, an `autograd_hacks.curvature.EKFAC`: the same eigenvectors with corrected
      eigenvalues

    parameters: names or patterns, for example '*.attn.*'; all by default
    max_bytes: bytes that the largest tensor of 'full' or 'kfac' may take
    skip: whether to leave out parameters that have no Kronecker factors, or larger ones, instead of raising

    Returns a `Coverage`: a table of all trainable parameters, with what each has, or why it has nothing.

    The attributes are detached, in the parameter's dtype (single precision for half), and None if the loss did not reach the
    parameter.  If processes share a batch, or a loader's batches, they cover all samples and are whole on each process.

    Raises NothingRecorded after an ordinary backward pass, BlockTooLarge above ``max_bytes``, UnsupportedLayer for 'kfac' of
    a parameter without Kronecker factors, ValueError for unknown kinds, names and patterns, and what reading raises.

    Source: Botev et al. 2017 (arXiv:1706.03662) for Hessian blocks of piecewise linear networks; for KFAC see
    `autograd_hacks.curvature.kronecker`.
    """
    sums = Sums(model, kind, parameters, max_bytes, skip)
    sums.end(sums.add)
    if kind == "ekfac":
        values = Eigenvalues(sums)
        values.end(values.add)
    return sums.coverage()


@checked(ON_CURVATURE)
def compute_hess_over(
    model: nn.Module,
    loader: Iterable[Any],
    kind: str = "full",
    hess_type: str = "CrossEntropy",
    draws: int | None = None,
    generator: torch.Generator | None = None,
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
    parameters: str | Collection[str] | None = None,
    max_bytes: float = MAX_BYTES,
    skip: bool = False,
) -> Coverage:
    """`compute_hess` for all batches of a loader, as if they were one.  Every sample has the same weight, however large its
    batch.

    The model stays in its mode.  Call ``model.eval()`` first: in training mode dropout draws other masks in each call.

    loader: batches
    forward: ``forward(model, batch)`` returns the output for `backprop_hess`. By default it is ``model(batch)``, or
    ``model(batch[0])`` for a tuple or list
    hess_type, draws, generator: as in `backprop_hess`
    the others: as in `compute_hess`

    'ekfac' runs the loader twice, the second time with the eigenvectors of the first.  Backward passes go only to the
    parameters that are asked for.

    Raises as these functions do, ValueError for a loader without batches and for an iterator that would have to run twice,
    and RuntimeError inside `accumulate`.
    """
    record = recorder_of(model).record
    check_loader("compute_hess_over", loader, ON_CURVATURE)
    if record.accumulating:
        raise RuntimeError("compute_hess_over accumulates by itself. Leave accumulate(model) first" + ON_PASSES)
    if kind == "ekfac" and isinstance(loader, Iterator):
        raise ValueError("compute_hess_over(kind='ekfac') runs all batches twice; expected no iterator" + ON_CURVATURE)
    sums = Sums(model, kind, parameters, max_bytes, skip)
    record.clear()

    def sweep(into: Sums | Eigenvalues) -> None:
        for batch in progress(loader, "curvature", "batch"):
            with torch.enable_grad():
                given = batch[0] if forward is None and isinstance(batch, tuple | list) else batch
                output = _output(model, given) if forward is None else forward(model, given)
            seen = record.as_seen(recorder_of(model).tree.parameters())
            is_all = len(sums.names) == sum(p.requires_grad for p in seen.values())
            passes_for(output, hess_type, draws, generator, None if is_all else [seen[name] for name in sums.names])
            into.spread = spread_of(model, recorder_of(model))
            into.add()

    sweep(sums)
    if not sums.batch:
        raise ValueError("compute_hess_over was given a loader without samples; expected some batches" + ON_CURVATURE)
    sums.end()
    if kind == "ekfac":
        values = Eigenvalues(sums)
        sweep(values)
        values.end()
    return sums.coverage()


def _output(model: nn.Module, given: Any) -> Tensor:
    """The model's output, a tensor.  Raises TypeError if ``forward`` has to say how to get it."""
    example = "forward=lambda model, batch: model(**batch).logits, for example"
    try:
        output: Any = model(given)
    except Exception as error:  # whatever a model raises that takes tensors by name
        if not isinstance(given, Mapping):
            raise
        raised = f"model(batch) raised {type(error).__name__} for a {kind_of(given)}"
        raise TypeError(f"compute_hess_over: {raised}; expected {example}" + ON_CURVATURE) from error
    check_kind("compute_hess_over", ON_CURVATURE, Tensor, f"a tensor, or {example}", output=output)
    found: Tensor = output
    return found
