"""Do samples' gradients stay apart?  What comes of w ∘ G must be w times what comes of G, sample by sample."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.capture.arrivals import returned_in
from autograd_hacks.errors import SamplesMixed
from autograd_hacks.support.graph import Graph, Value
from autograd_hacks.support.layout import Layout
from autograd_hacks.support.parts import settled
from autograd_hacks.support.sweep import Grads, sweep

ROUNDING = 32
"""By how many units of the least digit a sample's gradient may differ, of its own length."""

CHUNK = 2**16
"""How many numbers are compared at once: a cache holds them, and they take no memory."""


def two_weights(samples: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two weights for each sample, N each.

    They are powers of two, times which all digits stay, and no two of sixteen samples have the same ratio of theirs.  Each
    sample has one that is not small, so that its row is seen in some weighted sum.
    """
    ratios = torch.randperm(max(16, samples), generator=draws, device="cpu")[:samples] % 16 - 8
    first, second = (ratios + 1).div(2, rounding_mode="floor"), -ratios.div(2, rounding_mode="floor")
    return torch.pow(2.0, first), torch.pow(2.0, second)


def are_apart(
    layout: Layout, x: Tensor, y: Tensor, first: Tensor, second: Tensor, kept: Tensor | None = None
) -> bool | None:
    """Whether gradients under two weightings are those apart for each sample; None where they aren't finite.

    x, y: under the first and second weights, N each    kept: N booleans, the samples to look at; all unless told
    """
    if kept is None and _is_multiple(layout, x, y, second / first):
        return True
    if not x.isfinite().all() or not y.isfinite().all():
        return None
    eps, tiny, samples = torch.finfo(x.dtype).eps, torch.finfo(x.dtype).tiny, len(first)
    mine, theirs = (
        layout.samples_first(g, samples).flatten(1).to(torch.promote_types(g.dtype, torch.float32)) / w.to(g.device)[:, None]
        for g, w in ((x, first), (y, second))
    )
    is_apart = (mine - theirs).norm(dim=1) <= ROUNDING * eps * mine.norm(dim=1) + tiny * mine.shape[1]
    return bool((is_apart if kept is None else is_apart[kept.to(is_apart.device)]).all())


def _is_multiple(layout: Layout, x: Tensor, y: Tensor, ratio: Tensor) -> bool:
    """Whether y is x, each sample's times its power of two, to the last digit, as it nearly always is."""
    mine, theirs = (layout.samples_first(g, len(ratio)) for g in (x, y))
    some = max(1, CHUNK * len(ratio) // max(1, x.numel()))
    factors = ratio.to(x).view(-1, *[1] * (mine.ndim - 1)).split(some)
    pairs = zip(mine.split(some), theirs.split(some), factors)
    return all(torch.equal(part * factor, other) for part, other, factor in pairs) and bool(y.sum().isfinite())


def check_losses(losses: Tensor) -> None:
    """Raises SamplesMixed where losses of samples follow from model outputs for others, of forwards that were just proven.

    losses: N
    """
    returned = [(edge, mark) for edge, mark in returned_in(losses) if mark.is_proven and mark.samples == len(losses) > 0]
    if not returned:
        return
    weights = two_weights(len(losses), torch.Generator().manual_seed(len(losses)))
    root, ends, found = losses.grad_fn, {edge.node for edge, _ in returned}, dict[Node, list[Grads]]()
    assert root is not None  # or nothing would be marked
    with torch.no_grad():  # past wrappers' hooks, which may wait for other processes
        given = {Value(root, losses.output_nr): [w.to(losses) for w in weights]}
        sweep(given, found.__setitem__, ends, Graph([root], ends).above(ends))
    for edge, mark in returned:
        x, y = (grads[edge.output_nr] for grads in found.get(edge.node, [[None] * (edge.output_nr + 1)] * 2))
        if x is not None and y is not None and are_apart(mark.layout, settled(x), settled(y), *weights) is False:
            mark.plan.pending = True  # the next forward's losses are looked at, too
            raise SamplesMixed(
                "samples mix in the losses given to backward: the loss of a sample follows from what the model has returned "
                "for others, as in a contrastive loss, or one over statistics of the batch. They have no gradients of their "
                "own then."
            )
