"""Backward passes for second-order quantities, from a square root of the loss's Hessian at the model's output.

A square root is vectors s₁ … s_K for each sample with Σₖ sₖ sₖᵀ = H.  The loss is the mean of ℓₙ over the samples, and ℓₙ is
the mean over T positions, so a sample's H has one block for each position, divided by T.  Without positions T is 1.
"""

import math
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.errors import ON_CURVATURE, NothingRecorded
from autograd_hacks.extending import Announcement, announced, check_batch_size, check_kind, check_output, leaves_of, run_pass
from autograd_hacks.support.contexts import outside_inference
from autograd_hacks.support.display import progress
from autograd_hacks.support.ranges import check_word, checked


@checked(ON_CURVATURE)
def backprop_hess(
    output: Tensor, hess_type: str = "CrossEntropy", draws: int | None = None, generator: torch.Generator | None = None
) -> None:
    """Runs the backward passes for a square root of the loss's Hessian at a hooked model's output.

    Pass k records Jₙᵀ sₖₙ for each sample, where Jₙ is the Jacobian of sample n's output with respect to the parameters and
    Σₖ sₖₙ sₖₙᵀ is the Hessian of its loss.  `compute_hess` and the verbs of `PerSampleGrads` build the Gauss-Newton matrix
    from these rows.  ``.grad`` does not change, and the graph is kept.

    output: (N, C), or (N, T, C) for T positions; logits for classification    hess_type: the loss of a sample

    * ``'CrossEntropy'``: -log softmax(output)[y] for any label y, averaged over positions. It takes C passes, or T · C; each
      keeps the gradients at all layers' outputs in the record
    * ``'BinaryCrossEntropy'``: with sigmoid(output), summed over C and averaged over positions. As many passes
    * ``'LeastSquares'``: ½ ‖output - y‖², summed over C and averaged over positions. As many passes
    * ``'Jacobian'``: no loss. The rows are those of the Jacobian, in the order of the output's entries

    draws: number of random vectors to use instead of an exact root: gradients for labels drawn from the model's own
    distribution, normal vectors for 'LeastSquares' and 'Jacobian'. The Hessian is their mean
    generator: draws the random vectors

    Raises TypeError if ``output`` is not a floating-point tensor; ValueError for another shape or hess_type, for
    'CrossEntropy' of a single class, and if ``draws`` is below 1; NothingRecorded if the output comes from no hooked
    layer, or if passes of an earlier `backprop_hess` on the same forward have not been read; BatchSizeError if axis 0 is not
    the batch.

    Source: Schraudolph 2002, "Fast curvature matrix-vector products"; Dangel et al. 2020, arXiv:1912.10985.
    """
    passes_for(output, hess_type, draws, generator)


def passes_for(
    output: Tensor,
    hess_type: str,
    draws: int | None,
    generator: torch.Generator | None,
    chosen: Collection[Tensor] | None = None,
) -> None:
    """`backprop_hess`, with passes only for some parameters.  chosen: these, as layers see them; all by default"""
    check_output("backprop_hess", output, ON_CURVATURE)
    check_word("backprop_hess", ON_CURVATURE, ROOTS, hess_type=hess_type)
    check_kind(
        "backprop_hess",
        ON_CURVATURE,
        torch.Generator | None,
        "a torch.Generator, from torch.manual_seed(n)",
        generator=generator,
    )
    given = f"backprop_hess was given an output of shape {tuple(output.shape)}"
    if output.ndim not in (2, 3):
        raise ValueError(
            f"{given}; expected (N, C), as output[:, None], or (N, T, C), as output.flatten(2).mT" + ON_CURVATURE
        )
    if hess_type == "CrossEntropy" and output.shape[-1] == 1:
        raise ValueError(
            f"{given} and hess_type='CrossEntropy', whose Hessian is zero for a single class. For a logit give "
            "hess_type='BinaryCrossEntropy', for any other number 'LeastSquares'." + ON_CURVATURE
        )
    losses = Announcement(output.shape, "sum", "the output given to backprop_hess", hess_type, complete=False)
    count, vectors = directions(hess_type, output, draws, generator)
    try:
        with outside_inference(), announced(output, losses) as root:
            leaves = leaves_of(root)
            wanted = [leaf for leaf in leaves if any(leaf is p for p in chosen or ())]
            if chosen is not None and all(isinstance(leaf, nn.Parameter) for leaf in leaves) and wanted:
                leaves = wanted  # autograd then skips every node that leads to none of these
            for s in progress(vectors, "backward passes", "pass", count) if leaves else ():
                run_pass("backprop_hess", root, leaves, s)
        losses.complete = True
    except BaseException as error:
        for record in losses.heard_by:
            passes = (own for segment in record.segments for own in segment.passes)
            if any(own.losses is losses for own in passes):  # an earlier call's passes stay: they are the reason
                why = f"backprop_hess ended with {type(error).__name__}, and its rows were discarded; repeat the step"
                record.clear(why)
        raise
    if not losses.heard_by:
        raise NothingRecorded(
            f"{given}, from no hooked layer with trainable parameters; expected a hooked model's output, with hooks enabled."
        )
    check_batch_size(losses, "the output given to backprop_hess did not match the batch; repeat the step")


class Root(NamedTuple):
    """Square roots of the Hessian of one position's loss with respect to the output z."""

    p: Callable[[Tensor], Tensor]  # from z, (..., C)
    column: Callable[[Tensor, Tensor], Tensor]  # one of the C columns of a root, N C, from p and the column's one-hot e, C
    drawn: Callable[[Tensor, torch.Generator | None], Tensor]  # s of p's shape; the mean of s sᵀ is the Hessian
    averages: bool = True  # over the positions


def _labels(p: Tensor, generator: torch.Generator | None) -> Tensor:
    """Labels that are drawn from p, one-hot."""
    labels = torch.multinomial(p.flatten(0, -2), 1, generator=generator).view(p.shape[:-1])
    return F.one_hot(labels, p.shape[-1]).to(p.dtype)


# ℓ = ½ ‖z - y‖² has H = 1.
_IDENTITY = Root(
    lambda z: z,
    lambda z, e: e.expand(z.shape),
    lambda z, generator: torch.randn(z.shape, dtype=z.dtype, device=z.device, generator=generator),
)
# ℓ = -log softmax(z)[y] has H = diag(p) - p pᵀ = Σ_c p_c (e_c - p)(e_c - p)ᵀ for any label y, and the gradient p - e_y.
_SOFTMAX = Root(
    lambda z: z.softmax(-1),
    lambda p, e: (e - p) * (p * e).sum(-1, keepdim=True).sqrt(),
    lambda p, generator: p - _labels(p, generator),
)
# ℓ = Σ_c BCE(sigmoid(z_c), y_c) has H = diag(p (1 - p)) for any labels, and the gradient p - y.
_SIGMOID = Root(
    torch.sigmoid, lambda p, e: e * (p * (1 - p)).sqrt(), lambda p, generator: p - torch.bernoulli(p, generator=generator)
)
ROOTS = {
    "CrossEntropy": _SOFTMAX,
    "BinaryCrossEntropy": _SIGMOID,
    "LeastSquares": _IDENTITY,
    "Jacobian": _IDENTITY._replace(averages=False),
}
"""By ``hess_type``.  Sources: Dangel et al. 2020, "BackPACK" (arXiv:1912.10985), for roots; Martens 2014, "New insights and
perspectives on the natural gradient method" (arXiv:1412.1193), for drawn labels."""


def directions(
    hess_type: str, output: Tensor, draws: int | None, generator: torch.Generator | None
) -> tuple[int, Iterator[Tensor]]:
    """How many vectors there are, and these, each of the output's shape, a vector for every sample.

    output: (N, C) or (N, T, C)    draws: how many to draw; None for an exact root, which has T · C columns
    """
    root = ROOTS[hess_type]
    z = output.detach().to(torch.promote_types(output.dtype, torch.float32))
    p = root.p(z if z.ndim == 3 else z[:, None])
    share = 1 / math.sqrt(max(1, p.shape[1])) if root.averages else 1.0

    def column(number: int) -> Tensor:
        position, c = divmod(number, p.shape[2])
        s, e = torch.zeros_like(p), p.new_zeros(p.shape[2])
        e[c] = 1
        s[:, position] = root.column(p[:, position], e) * share
        return s

    count = p.shape[1] * p.shape[2] if draws is None else draws
    drawn = (root.drawn(p, generator) * (share / math.sqrt(count)) for _ in range(count))
    found = map(column, range(count)) if draws is None else drawn
    return count, (s.view(output.shape).to(output.dtype) for s in found)
