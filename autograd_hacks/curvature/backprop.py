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

from autograd_hacks.capture.arrivals import announced
from autograd_hacks.capture.records import Announcement
from autograd_hacks.errors import ON_CURVATURE, NothingRecorded
from autograd_hacks.reading.scale import check_batch_size
from autograd_hacks.support.contexts import outside_inference
from autograd_hacks.support.display import progress
from autograd_hacks.support.ranges import check_word, checked
from autograd_hacks.verbs.jacobian import check_output, leaves_of, run_pass


@checked(ON_CURVATURE)
def backprop_hess(
    output: Tensor, hess_type: str = "CrossEntropy", samples: int | None = None, generator: torch.Generator | None = None
) -> None:
    """Runs the backward passes for a square root of the loss's Hessian at a hooked model's output.

    Pass k records Jₙᵀ sₖₙ for each sample, where Jₙ is the Jacobian of sample n's output with respect to the parameters and
    Σₖ sₖₙ sₖₙᵀ is the Hessian of its loss.  `compute_hess` and the verbs of `PerSampleGrads` build the Gauss-Newton matrix
    from these rows.  ``.grad`` does not change, and the graph is kept.

    output: (N, C), or (N, T, C) for T positions; logits for classification
    hess_type: the loss of a sample

    * ``'CrossEntropy'``: -log softmax(output)[y] for any label y, averaged over positions. It takes C passes, or T · C; each
      keeps the gradients at all layers' outputs in the record
    * ``'BinaryCrossEntropy'``: with sigmoid(output), summed over C and averaged over positions. As many passes
    * ``'LeastSquares'``: ½ ‖output - y‖², summed over C and averaged over positions. As many passes
    * ``'Jacobian'``: no loss. The rows are those of the Jacobian, in the order of the output's entries

    samples: number of random vectors to use instead of an exact root: gradients for labels drawn from the model's own
    distribution, normal vectors for 'LeastSquares' and 'Jacobian'. The Hessian is their mean
    generator: draws the random vectors

    Raises TypeError if ``output`` is not a floating-point tensor; ValueError for another shape or hess_type, for
    'CrossEntropy' of a single class, and if ``samples`` is below 1; NothingRecorded if the output comes from no hooked
    layer, or if passes of an earlier `backprop_hess` on the same forward have not been read; BatchSizeError if axis 0 is not
    the batch.

    Source: Schraudolph 2002, "Fast curvature matrix-vector products"; Dangel et al. 2020, arXiv:1912.10985.
    """
    passes_for(output, hess_type, samples, generator)


def passes_for(
    output: Tensor,
    hess_type: str,
    samples: int | None,
    generator: torch.Generator | None,
    chosen: Collection[Tensor] | None = None,
) -> None:
    """`backprop_hess`, with passes only for some parameters.  chosen: these, as layers see them; all by default"""
    _check_arguments(output, hess_type, generator)
    losses = Announcement(output.shape, "sum", "the output given to backprop_hess", hess_type, complete=False)
    count, vectors = directions(hess_type, output, samples, generator)
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
            f"the output of shape {tuple(output.shape)} given to backprop_hess comes from no hooked layer with "
            "trainable parameters. Give it the model's output, after add_hooks(model), with hooks enabled."
        )
    check_batch_size(losses, "the output given to backprop_hess did not match the batch; repeat the step")


def _check_arguments(output: Tensor, hess_type: str, generator: torch.Generator | None) -> None:
    check_output("backprop_hess", output, ON_CURVATURE)
    check_word("backprop_hess", ON_CURVATURE, ROOTS, hess_type=hess_type)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"backprop_hess was given generator={generator!r}; expected a torch.Generator, seeded by manual_seed"
            + ON_CURVATURE
        )
    if output.ndim not in (2, 3):
        raise ValueError(
            f"backprop_hess was given an output of shape {tuple(output.shape)}; expected (N, C), or (N, T, C) with T "
            "positions. Bring classes to the last axis and positions to one: output.flatten(2).mT for (N, C, H, W); and a "
            "single output to (N, 1): output[:, None]." + ON_CURVATURE
        )
    if hess_type == "CrossEntropy" and output.shape[-1] == 1:
        raise ValueError(
            f"backprop_hess was given an output of shape {tuple(output.shape)} and hess_type='CrossEntropy', whose Hessian "
            "is zero for a single class. For a logit give hess_type='BinaryCrossEntropy', for any other number "
            "'LeastSquares'." + ON_CURVATURE
        )


class Root(NamedTuple):
    """Square roots of the Hessian of one position's loss with respect to the output.

    column: returns one of the C columns of a root, N C, from the outputs z, (N, C), and the column's number
    drawn: returns random vectors s, N T C, from outputs (N, T, C); the mean of s sᵀ is the Hessian, and positions are
    independent
    """

    column: Callable[[Tensor, int], Tensor]
    drawn: Callable[[Tensor, torch.Generator | None], Tensor]
    averages: bool = True  # over the positions


def cross_entropy_column(z: Tensor, c: int) -> Tensor:
    """ℓ = -log softmax(z)[y] has H = diag(p) - p pᵀ = Σ_c p_c (e_c - p)(e_c - p)ᵀ for any label y."""
    p = z.softmax(-1)
    return (_one_hot(z, c) - p) * p[:, c, None].sqrt()


def cross_entropy_draw(z: Tensor, generator: torch.Generator | None) -> Tensor:
    """The gradient p - e_y for a label y drawn from p."""
    p = z.softmax(-1)
    labels = torch.multinomial(p.flatten(0, 1), 1, generator=generator).view(z.shape[:2])
    return p - F.one_hot(labels, z.shape[-1]).to(p.dtype)


def binary_column(z: Tensor, c: int) -> Tensor:
    """ℓ = Σ_c BCE(sigmoid(z_c), y_c) has H = diag(p (1 - p)) for any labels."""
    p = z[:, c, None].sigmoid()
    return _one_hot(z, c) * (p * (1 - p)).sqrt()


def binary_draw(z: Tensor, generator: torch.Generator | None) -> Tensor:
    """The gradient p - y for labels y drawn from p."""
    p = z.sigmoid()
    return p - torch.bernoulli(p, generator=generator)


def identity_column(z: Tensor, c: int) -> Tensor:
    """ℓ = ½ ‖z - y‖² has H = 1."""
    return _one_hot(z, c).expand(z.shape)


def normal_draw(z: Tensor, generator: torch.Generator | None) -> Tensor:
    """A vector of independent standard normal numbers."""
    return torch.randn(z.shape, dtype=z.dtype, device=z.device, generator=generator)


def _one_hot(z: Tensor, c: int) -> Tensor:
    """e_c, (1, C)."""
    return F.one_hot(torch.tensor([c], device=z.device), z.shape[-1]).to(z.dtype)


ROOTS = {
    "CrossEntropy": Root(cross_entropy_column, cross_entropy_draw),
    "BinaryCrossEntropy": Root(binary_column, binary_draw),
    "LeastSquares": Root(identity_column, normal_draw),
    "Jacobian": Root(identity_column, normal_draw, averages=False),
}
"""By ``hess_type``.  Sources: Dangel et al. 2020, "BackPACK" (arXiv:1912.10985), for roots; Martens 2014, "New insights and
perspectives on the natural gradient method" (arXiv:1412.1193), for drawn labels."""


def directions(
    hess_type: str, output: Tensor, samples: int | None, generator: torch.Generator | None
) -> tuple[int, Iterator[Tensor]]:
    """How many vectors there are, and these, each of the output's shape, a vector for every sample.

    output: (N, C) or (N, T, C)    samples: how many to draw; None for an exact root, which has T · C columns
    """
    root = ROOTS[hess_type]
    z = output.detach().to(torch.promote_types(output.dtype, torch.float32))
    z = z if z.ndim == 3 else z[:, None]
    share = 1 / math.sqrt(max(1, z.shape[1])) if root.averages else 1.0
    if samples is not None:
        drawn = (root.drawn(z, generator) * (share / math.sqrt(samples)) for _ in range(samples))
        return samples, (s.view(output.shape).to(output.dtype) for s in drawn)
    return z.shape[1] * z.shape[2], _columns(output, z, root, share)


def _columns(output: Tensor, z: Tensor, root: Root, share: float) -> Iterator[Tensor]:
    for position in range(z.shape[1]):
        for c in range(z.shape[2]):
            s = torch.zeros_like(z)
            s[:, position] = root.column(z[:, position], c) * share
            yield s.view(output.shape).to(output.dtype)
