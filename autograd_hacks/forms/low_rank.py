"""Best approximations of rows by low-rank matrices."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Form
from autograd_hacks.forms.composite import Scaled
from autograd_hacks.forms.outer import Outer


class LowRank(NamedTuple):
    """Σᵣ left[n, :, r] ⊗ right[n, :, r] for each sample n.  The parameter is seen as a matrix O I; I is 1 for a vector.

    left: (N, O, R)
    right: (N, I, R)
    """

    left: Tensor
    right: Tensor


def low_rank(form: Form, rank: int, budget: int = BUDGET) -> LowRank:
    """The best approximation of each row by a matrix of rank R = min(rank, O, I), the largest singular values first.

    Each singular value is split evenly between both factors.  A row with NaN or ∞ has NaN factors.

    Outer products over T < min(O, I) positions are not written out: each factor has a QR decomposition, and T × T numbers a
    singular value decomposition.
    Source: Eckart and Young 1936, "The approximation of one matrix by another of lower rank"; Li et al. 2026,
    "LoRIF" (arXiv:2601.21929), for stores of gradients.
    """
    fan_out, fan_in = form.shape[:1].numel(), form.shape[1:].numel()
    rank, found = min(rank, fan_out, fan_in), []
    if isinstance(form, Scaled):
        left, right = low_rank(form.form, rank, budget)
        return LowRank(left * form._factor(left), right)
    is_short = isinstance(form, Outer) and form.shape[:1] == (form.fan_out,) and form.positions < min(fan_out, fan_in)
    for _, part in form.chunks(budget // 4, form.held_size() if is_short else form.row_size() + form.shape.numel()):
        if is_short:
            assert isinstance(part, Outer)  # all parts of the form are
            found.append(_of_products(part.left, part.right, rank))
        else:
            found.append(_of_rows(part.matrix().reshape(part.samples, fan_out, fan_in), rank))
    return LowRank(*(torch.cat(parts) for parts in zip(*found)))


def _of_products(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """left: N T O    right: N T I"""
    samples, positions = left.shape[:2]
    odd = ~(left.isfinite().flatten(1).all(1) & right.isfinite().flatten(1).all(1))
    left, right = (torch.where(odd[:, None, None], 0, factor).mT for factor in (left, right))
    (q, upper), (p, lower) = torch.linalg.qr(left), torch.linalg.qr(right)
    u, v = _of_rows(upper @ lower.mT, rank)
    pad = left.new_zeros(samples, 1, max(0, rank - positions))
    mine, theirs = (torch.cat([x, pad.expand(-1, x.shape[1], -1)], 2) for x in (q @ u, p @ v))
    return _spoilt(mine, odd), _spoilt(theirs, odd)


def _of_rows(rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """rows: N O I"""
    odd = ~rows.isfinite().flatten(1).all(1)
    u, s, vh = torch.linalg.svd(torch.where(odd[:, None, None], 0, rows), full_matrices=False)
    root = s[:, None, :rank].sqrt()
    return _spoilt(u[..., :rank] * root, odd), _spoilt(vh.mT[..., :rank] * root, odd)


def _spoilt(factor: Tensor, odd: Tensor) -> Tensor:
    return factor.masked_fill(odd[:, None, None], torch.nan)
