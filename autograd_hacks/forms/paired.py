"""Norms and inner products of forms that are sums of outer products: by positions, where that is cheaper and safe."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autograd_hacks.forms.base import Form
from autograd_hacks.forms.positions import OneHot, Pair, gram_by_positions, norms_by_positions

PRODUCTS = 3
"""How much longer a multiplication takes in products of positions than in writing out.  Measured on two cores, for norms by
positions and by writing out: 16 samples of 128 positions, 1024 × 256, 6.5 ms and 3.9; of 64, 128 × 1152, 4.8 and 1.9."""


def prefers_positions(terms: Sequence[Form]) -> bool:
    """Whether the norms of a sum of forms are best taken from products over all their positions.

    Multiplications for a sample: T·T·(O + I) for products over positions, each `PRODUCTS` times as long; T·O·I to write out.
    """
    pairs = [term.pair for term in terms]
    if any(pair is None for pair in pairs) or terms[0].like.is_complex():
        return False
    fans = {_fans(pair) for pair in pairs if pair is not None}
    positions = sum(pair[1].shape[1] for pair in pairs if pair is not None)
    return len(fans) == 1 and PRODUCTS * positions * sum(min(fans)) < terms[0].shape.numel()


def norms_of_pairs(form: Form, budget: int) -> Tensor:
    """The rows' norms of a form, or a sum of forms, that `prefers_positions`; rows that cancel are written out."""
    found = []
    positions = sum(term.pair[1].shape[1] for term in form.terms if term.pair is not None)
    for _, part in form.chunks(budget, 2 * positions**2):
        norms, exact = norms_by_positions([term.pair for term in part.terms if term.pair is not None], budget)
        written = (~exact).nonzero()[:, 0]
        found.append(norms.index_put((written,), Form.norms(part[written], budget)) if len(written) else norms)
    return torch.cat(found)


def gram_of_pairs(mine: Form, theirs: Form, budget: int) -> Tensor | None:
    """Inner products by positions; None where writing out is cheaper, or where positions cancel."""
    one, other = mine.pair, theirs.pair
    if one is None or other is None or _fans(one) != _fans(other) or mine.like.is_complex():
        return None
    (n, t), (m, s), numbers = one[1].shape[:2], other[1].shape[:2], mine.shape.numel()
    lengths = one[1].shape[2] + (1 if isinstance(one[0], OneHot) or isinstance(other[0], OneHot) else one[0].shape[2])
    # Multiplications: N·M·T·S·(O + I) by positions; N·T·O·I and M·S·O·I to write out, and N·M·O·I for the product.
    if n * m * t * s * lengths > (n * t + m * s + n * m) * numbers:
        return None
    one, other = mine.wide().pair, theirs.wide().pair
    assert one is not None
    assert other is not None
    if max(t, s) > 1 and not all(bool(norms_by_positions([pair], budget)[1].all()) for pair in (one, other)):
        return None
    return gram_by_positions(one, other, budget)


def _fans(pair: Pair) -> tuple[int, int]:
    return pair[0].shape[2], pair[1].shape[2]
