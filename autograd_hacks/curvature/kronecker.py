"""Kronecker factors of a layer's Gauss-Newton block: JᵀJ / N ≈ B ⊗ A.

Row n of pass k is Σₜ bₖₙₜ ⊗ aₙₜ, with aₙₜ the input and bₖₙₜ the gradient at the output, for T positions that share
the weight.

expand   A = Σₙₜ aₙₜ aₙₜᵀ / (N T)        B = Σₖₙₜ bₖₙₜ bₖₙₜᵀ / N        positions as if they were samples
reduce   A = Σₙ ān ānᵀ / N, ā = Σₜ aₜ / T    B = Σₖₙ b̂ₖₙ b̂ₖₙᵀ / N, b̂ = Σₜ bₜ    a sample as if it had one position

Sources: Martens and Grosse 2015 (arXiv:1503.05671), section 3; Grosse and Martens 2016 (arXiv:1602.01407), for convolutions;
Eschenhagen et al. 2023 (arXiv:2311.00636), sections 3.2 and 3.3, for the two treatments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from autograd_hacks.forms import Concatenation, Convolution, Dense, Form, Grouping, Outer, Passes, Scaled, Zero

APPROXIMATIONS = ("expand", "reduce")


@dataclass
class Sums:
    """Sums that A and B are means of.  a, b: outer products added up, (I, I) and (O, O)    positions: how many are in a"""

    a: Tensor
    b: Tensor
    positions: int

    def __iadd__(self, other: Sums) -> Sums:
        self.a += other.a
        self.b += other.b
        self.positions += other.positions
        return self


def sums_of(form: Form, kfac_approx: str) -> Sums | None:
    """The sums of a Linear's or a convolution's weight or bias; None where the form has no Kronecker factors."""
    found: Sums | None = None
    for part in _segments(form):
        own = _sums_of_segment(part, kfac_approx)
        if own is None:
            return None
        if found is None:
            found = own
        else:
            found += own
    return found


def _segments(form: Form) -> Iterator[Form]:
    """The forms of micro-batches, each with all its passes."""
    if isinstance(form, Concatenation) and not isinstance(form, Passes):
        for part in form.parts:
            yield from _segments(part)
    elif not isinstance(form, Zero):
        yield form


def _sums_of_segment(form: Form, kfac_approx: str) -> Sums | None:
    if isinstance(form, Scaled):
        own = _sums_of_segment(form.form, kfac_approx)
        return None if own is None else Sums(own.a, own.b * form.factor**2, own.positions)
    if isinstance(form, Grouping):
        inner, rows, samples = form.form, form.rows, form.samples
    else:
        inner, rows, samples = form, None, form.samples
    passes = inner.parts if isinstance(inner, Passes) else [inner]
    if isinstance(inner, Dense):
        values = form.wide().matrix()
        return Sums(values.new_ones(1, 1), values.mT @ values, 1)
    first = passes[0].wide()
    if isinstance(first, Convolution) and first.groups == 1:
        windows, gradients = first.factors()[1], [part.held[1].flatten(2).mT for part in passes]
    elif isinstance(first, Outer):
        windows, gradients = first.right, [part.held[0] for part in passes]
    else:
        return None
    gradients = [b.to(windows.dtype) for b in gradients]
    if kfac_approx == "reduce":
        labels, count = None if rows is None else rows[: len(windows)], samples // len(passes)
        shares = _added(torch.ones_like(windows[..., :1]), labels, count).clamp(min=1)
        windows, gradients = _added(windows, labels, count) / shares, [_added(b, labels, count) for b in gradients]
    else:
        windows, gradients = windows.flatten(0, 1), [b.flatten(0, 1) for b in gradients]
    b = torch.zeros(2 * gradients[0].shape[1:], dtype=windows.dtype, device=windows.device)
    for gradient in gradients:
        b.addmm_(gradient.mT, gradient)
    return Sums(windows.mT @ windows, b, len(windows))


def _added(x: Tensor, rows: Tensor | None, samples: int) -> Tensor:
    """The sums over a sample's positions, N F.  x: M T F    rows: the sample of each of the M, themselves unless told"""
    total = x.sum(1)
    return total if rows is None else total.new_zeros(samples, total.shape[1]).index_add_(0, rows, total)
