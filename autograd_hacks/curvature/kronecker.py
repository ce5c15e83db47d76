"""Kronecker factors of a layer's Gauss-Newton block: JᵀJ / N ≈ B ⊗ A.

Row n of pass k is Σₜ bₖₙₜ ⊗ aₙₜ, with aₙₜ the input and bₖₙₜ the gradient at the output, for T positions that share
the weight.

A = Σₙₜ aₙₜ aₙₜᵀ / (N T)        B = Σₖₙₜ bₖₙₜ bₖₙₜᵀ / N        positions as if they were samples

A comes from the inputs and B from the gradients, however the weight is stored.  For (O, I), Linear's, the block is
B ⊗ A; for (I, O), transformers' Conv1D's and a table's, it is A ⊗ B.

Blocks.  A parameter may be several matrices, one below the other along its first axis: the groups of a convolution, the
experts of a stack.  Each has its own pair of factors; blocks between two of them are left out.  N T is then the number of
positions that the matrix has seen.

Tables.  The input of an Embedding is a word, one-hot, so that A is diagonal: its entries are the words' shares of the
positions.

Other tensors, by their rows.  Some gradients are not sums of products of one kind: those of weights that are read several
times or in several ways (a table that is also the head), of values computed from a parameter (positions that are read once
and added to all samples), and of transposed convolutions.  A tensor (V, D) is then treated as a table of V rows.  With its
gradients Gₖₙ, summed over all uses and with their cross terms,

A = diag(Σₖₙ ‖Gₖₙ[v]‖²) / Σ   a row's share of all squares        B = Σₖₙ Gₖₙᵀ Gₖₙ / N

so that A ⊗ B has the trace of the block, and both of its partial traces: the trace-restricted factors of Gao et al. 2021,
with only A's diagonal.

Vectors.  A bias or a norm's weight has A = 1 and its own block, P × P, as B.

Sources: Martens and Grosse 2015 (arXiv:1503.05671), section 3; Grosse and Martens 2016 (arXiv:1602.01407), for convolutions;
Eschenhagen et al. 2023 (arXiv:2311.00636), section 3.2, for positions ("expand"); Gao et al. 2021 (arXiv:2011.10741).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autograd_hacks.extending import OneHot, Positions, Windows
from autograd_hacks.forms import BUDGET, Form


class KFAC(tuple[Tensor, Tensor]):
    """(A, B): A from a parameter's inputs, (I, I), and B from the gradients at its outputs, (O, O).

    A is I numbers, a diagonal, for a table.  For a parameter of G blocks
    there is an axis in front: (G, I, I) and (G, O, O).
    """

    is_turned = False
    """Whether the parameter is stored as (I, O), so that its block is A ⊗ B, instead of (O, I) and B ⊗ A."""

    @classmethod
    def of(cls, a: Tensor, b: Tensor, is_turned: bool) -> KFAC:
        """Factors that were kept elsewhere, to set as ``param.kfac``."""
        made = cls((a, b))
        made.is_turned = is_turned
        return made


class Matricised(NamedTuple):
    """How a parameter is made of matrices."""

    fan_in: int
    fan_out: int
    blocks: int = 1
    is_turned: bool = False
    is_table: bool = False  # whether inputs are one-hot, so that A is diagonal
    is_by_rows: bool = False  # whether each row is treated as a table's word, whatever made its gradient

    @property
    def factors(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A and B."""
        many = () if self.blocks == 1 else (self.blocks,)
        return (*many, self.fan_in, *(() if self.is_table else (self.fan_in,))), (*many, self.fan_out, self.fan_out)

    @property
    def matrix(self) -> tuple[int, ...]:
        """The parameter's shape as a matrix, or as several."""
        both = (self.fan_in, self.fan_out) if self.is_turned else (self.fan_out, self.fan_in)
        return both if self.blocks == 1 else (self.blocks, *both)

    def __str__(self) -> str:
        a = f"A diagonal, {self.fan_in:,}" if self.is_table else f"A {self.fan_in:,} × {self.fan_in:,}"
        blocks = "" if self.blocks == 1 else f"{self.blocks} blocks, each with "
        turned = ", stored as (I, O)" if self.is_turned and not self.is_table else ""
        return f"{'by its rows: ' if self.is_by_rows else ''}{blocks}{a}, B {self.fan_out:,} × {self.fan_out:,}{turned}"


def positions_of(form: Form) -> Sequence[Positions]:
    """The products that the rows are sums of.  A vector has the input 1."""
    if len(form.shape) > 1:
        return form.factors()
    rows = form.matrix()
    return [Positions([rows[:, None]], rows.new_ones(len(rows), 1, 1), slice(0, rows.shape[1]))]


def is_empty(form: Form) -> bool:
    """Whether the loss did not reach the parameter: the rows are sums over no positions."""
    found = form.factors() if len(form.shape) > 1 else ()
    return bool(found) and all(own.inputs.shape[1] == 0 for own in found)


def lay_of(form: Form) -> Matricised:
    """How a parameter is made of matrices."""
    found = positions_of(form)
    size = found[0].rows.stop - found[0].rows.start if found else 0
    kinds_of_blocks = {(p.rows.stop - p.rows.start, p.rows.start % size, p.is_turned, p.inputs.shape[2:],
                        p.gradients[0].shape[2:], type(p.inputs)) for p in found}  # fmt: skip
    entries = form.shape[:1].numel()
    if len(kinds_of_blocks) != 1 or found[0].rows.start % size or entries % size:  # no products, or cut into unequal slices
        axes = next((k for k, axis in enumerate(form.shape) if axis > 1), 0)
        rows = form.shape[axes]
        return Matricised(rows, form.shape.numel() // rows, is_turned=True, is_table=True, is_by_rows=True)
    first = found[0]
    is_table = isinstance(first.inputs, OneHot)
    return Matricised(first.inputs.shape[2], first.gradients[0].shape[2], entries // size, first.is_turned, is_table)


def parts_of(form: Form, batches: Sequence[int]) -> Sequence[Form]:
    """The rows of each micro-batch."""
    return form.parts if len(batches) > 1 else [form]


def products_of(form: Form, lay: Matricised, batches: Sequence[int]) -> Iterator[tuple[Positions, int, int | tuple[()]]]:
    """The products of each micro-batch, with its number of samples, and the index of their block."""
    for part, samples in zip(parts_of(form, batches), batches):
        for own in () if is_empty(part) else positions_of(part.wide()):
            yield own, samples, () if lay.blocks == 1 else own.rows.start // (own.rows.stop - own.rows.start)


def rows_by(form: Form, lay: Matricised) -> Iterator[tuple[slice, Tensor]]:
    """The gradients piece by piece: some rows of the parameter, and (samples, rows, D) of these."""
    each = lay.fan_in // max(1, form.shape[:1].numel())  # of an entry of the first axis
    for _, part in form.chunks(BUDGET):
        for entries, block in part.blocks(BUDGET):
            rows = slice(entries.start * each, entries.stop * each)
            yield rows, block.matrix().view(block.samples, rows.stop - rows.start, lay.fan_out)


class Factors(NamedTuple):
    """N T A and N B, sums over positions and over samples, which may be added up over batches."""

    a: Tensor
    b: Tensor
    positions: Tensor  # how many A has; a number for each block; 0 for parameters treated by their rows


def factors_of(form: Form, lay: Matricised, batches: Sequence[int]) -> Factors:
    """The sums for a parameter that is made of matrices as ``lay`` says.  batches: the micro-batches' numbers of samples"""
    a, b = (form.new_sums(*shape) for shape in lay.factors)
    counts = torch.zeros(lay.blocks, dtype=torch.int64, device=b.device)
    if lay.is_by_rows:
        for some, rows in rows_by(form, lay):
            a[some] += rows.square().sum((0, 2))
            _add_products(b, rows)
        return Factors(a, b, counts)
    for own, _, at in products_of(form, lay, batches):
        counts[at] += own.inputs.shape[0] * own.inputs.shape[1] if own.present is None else own.present.sum()
        for gradient in own.gradients:
            _add_products(b[at], gradient)
        if isinstance(own.inputs, OneHot):
            words = own.inputs.index if own.present is None else own.inputs.index[own.present]
            a[at] += words.flatten().bincount(minlength=lay.fan_in).to(a.dtype)
        else:
            _add_products(a[at], inputs_of(own))
    return Factors(a, b, counts)


def inputs_of(own: Positions) -> Tensor:
    """The inputs of a parameter that is not a table, M T I."""
    inputs = own.inputs.written() if isinstance(own.inputs, Windows) else own.inputs
    assert isinstance(inputs, Tensor)  # no table
    return inputs


def _add_products(total: Tensor, x: Tensor) -> Tensor:
    """total + Σₙₜ xₙₜ xₙₜᵀ, in place.  x: N T F"""
    if x.is_contiguous() or x.shape[1] == 1:
        rows = x.flatten(0, 1)
        return total.addmm_(rows.mT, rows)
    return total.addbmm_(x.mT, x)  # windows lie in memory the other way around, sample by sample
