"""The backward passes that second-order quantities are made of."""

from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor

from autograd_hacks.capture.graph import announced
from autograd_hacks.capture.records import Announcement
from autograd_hacks.curvature.roots import ROOTS, directions
from autograd_hacks.distributed.cut import refuse_curvature
from autograd_hacks.errors import ON_CURVATURE, NothingRecorded
from autograd_hacks.reading.scale import check_batch_size
from autograd_hacks.support.display import progress
from autograd_hacks.support.parts import is_part
from autograd_hacks.support.untouched import outside_inference
from autograd_hacks.verbs.jacobian import leaves_of, run_pass


def backprop_hess(
    output: Tensor, hess_type: str = "CrossEntropy", samples: int | None = None, generator: torch.Generator | None = None
) -> None:
    """Runs the backward passes for a square root of the Hessian of a loss at a hooked model's output.

    Pass k leaves Jₙᵀ sₖₙ for each sample, with Jₙ the Jacobian of sample n's output by the parameters and Σₖ sₖₙ sₖₙᵀ the
    Hessian of its loss at it; `compute_hess` and the verbs of `PerSampleGrads` make the Gauss-Newton matrix of them.
    ``.grad`` stays as it is, and the graph is kept.

    output: (N, C), or (N, T, C) for T positions, logits where there are classes    hess_type: the loss of a sample,

    * ``'CrossEntropy'``: -log softmax(output)[y], for whichever label y, the mean over positions; C passes, or T · C, each
      of which leaves the gradients at all layers' outputs in the record
    * ``'BinaryCrossEntropy'``: with sigmoid(output), the sum over C and the mean over positions; as many
    * ``'LeastSquares'``: ½ ‖output - y‖², the sum over C and the mean over positions; as many
    * ``'Jacobian'``: none; the rows are those of the Jacobian, in the order of the output's entries

    samples: how many random vectors to take in the place of an exact root: gradients for labels drawn from the model's own
    distribution, normal vectors for 'LeastSquares' and 'Jacobian'; the Hessian is their mean
    generator: that draws them

    Raises TypeError for what is no floating-point tensor; ValueError for another shape or type of Hessian, and a number of
    samples below 1; NothingRecorded for an output that no hooked layer leads to, or inside of which passes of an earlier
    `backprop_hess` are still to be read; BatchSizeError where axis 0 is not the batch.

    Source: Schraudolph 2002, "Fast curvature matrix-vector products"; Dangel et al. 2020, arXiv:1912.10985.
    """
    _check_arguments(output, hess_type, samples, generator)
    samples = None if samples is None else index(samples)
    losses = Announcement(output.shape, "sum", "the output given to backprop_hess", hess_type, complete=False)
    count, vectors = directions(hess_type, output, samples, generator)
    try:
        with outside_inference(), announced(output, losses) as root:
            leaves = list(leaves_of(root))
            refuse_curvature(any(map(is_part, leaves)))
            for s in progress(vectors, "backward passes", "pass", count) if leaves else ():
                run_pass("backprop_hess", root, leaves, s)
        losses.complete = True
    except BaseException as error:
        for record in losses.heard_by:
            record.clear(f"backprop_hess was left by {type(error).__name__}, and its rows were thrown away; repeat the step")
        raise
    if not losses.heard_by:
        raise NothingRecorded(
            f"the output of shape {tuple(output.shape)} given to backprop_hess comes of no hooked layer with parameters "
            "that train. Give it what the model returned, after add_hooks(model), with hooks enabled."
        )
    check_batch_size(losses, "the output given to backprop_hess did not match the batch; repeat the step")


def _check_arguments(output: Tensor, hess_type: str, samples: int | None, generator: torch.Generator | None) -> None:
    if not isinstance(output, Tensor) or not output.is_floating_point():
        kind = output.dtype if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(
            f"backprop_hess was given {kind}; expected the model's output, a floating-point tensor" + ON_CURVATURE
        )
    if hess_type not in ROOTS:
        raise ValueError(
            f"backprop_hess was given hess_type={hess_type!r}; expected one of {', '.join(map(repr, ROOTS))}" + ON_CURVATURE
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"backprop_hess was given generator={generator!r}; expected a torch.Generator, seeded by manual_seed"
            + ON_CURVATURE
        )
    if samples is not None and (not isinstance(samples, SupportsIndex) or isinstance(samples, bool)):
        raise TypeError(
            f"backprop_hess was given samples={samples!r}; expected a whole number, or None for an exact root" + ON_CURVATURE
        )
    if samples is not None and index(samples) < 1:
        raise ValueError(
            f"backprop_hess was given samples={samples}; expected 1 or more, or None for an exact root" + ON_CURVATURE
        )
    if output.ndim not in (2, 3):
        raise ValueError(
            f"backprop_hess was given an output of shape {tuple(output.shape)}; expected (N, C), or (N, T, C) with T "
            "positions. Bring classes to the last axis and positions to one: output.flatten(2).mT for (N, C, H, W); and a "
            "single output to (N, 1): output[:, None]." + ON_CURVATURE
        )
    if 0 in output.shape[1:]:
        raise ValueError(f"backprop_hess was given an output of shape {tuple(output.shape)}, without entries" + ON_CURVATURE)
    if not output.requires_grad:
        raise NothingRecorded(
            "backprop_hess was given an output without a graph, detached or made under torch.no_grad. Give it what the "
            "model returned, with gradients enabled and before anything has freed its graph."
        )
