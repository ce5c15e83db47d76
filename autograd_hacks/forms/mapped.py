"""Linear maps of one parameter's gradients, G ↦ M(G), and the form whose rows are M(Gₙ).

``Sides`` keeps products as products: L (u ⊗ v) R = (L u) ⊗ (Rᵀ v).  Its verbs cost the same as for any other product, and
nothing of the parameter's size is written.  With other maps, or other forms, rows are written a few at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Dense, Form, Index
from autograd_hacks.forms.composite import Concatenation, Grouping, Scaled
from autograd_hacks.forms.convolution import FORWARD, Convolution
from autograd_hacks.forms.directions import directions
from autograd_hacks.forms.lookup import Lookup
from autograd_hacks.forms.numerics import slices_of
from autograd_hacks.forms.outer import Outer, Zero
from autograd_hacks.forms.terms import Sum


class LinearMap(ABC):
    """G ↦ M(G), for gradients of one parameter."""

    like: Tensor | None = None
    """A tensor with the results' dtype and device, where these can differ from the gradients'."""

    @abstractmethod
    def shape_of(self, shape: torch.Size) -> torch.Size:
        """The shape of the result for a parameter's shape.  Raises ValueError if the map doesn't fit it."""

    @abstractmethod
    def __call__(self, x: Tensor, shape: torch.Size) -> Tensor:
        """M(G), ``(..., *shape_of(shape))``.  x: ``(..., *shape)``"""

    @abstractmethod
    def transposed(self, v: Tensor, shape: torch.Size) -> Tensor:
        """Mᵀ(V), shape.  v: shape_of(shape)"""

    def tensors(self) -> Sequence[Tensor]:
        """The tensors that the map consists of: its attributes that are tensors."""
        return [x for x in vars(self).values() if isinstance(x, Tensor)]

    def to(self, like: Tensor) -> LinearMap:
        """The map in another dtype, on another device."""
        kept = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        found = {name: x.to(like.device) if x.dtype == torch.bool else x.to(like) for name, x in kept.items()}
        made = self if all(x is vars(self)[name] for name, x in found.items()) else copy(self)
        vars(made).update(found)
        return made

    def rows(self, form: Form) -> Form | None:
        """M(Gₙ) as a form that is cheaper than `Mapped`; None if there is none."""
        return None


def times(x: Tensor, scale: Tensor) -> Tensor:
    return x.where(scale, 0) if scale.dtype == torch.bool else x * scale


@dataclass(frozen=True, eq=False)
class Elementwise(LinearMap):
    """G ↦ D ∘ G.  scale: D, of the parameter's shape; or whether each entry is kept: else it is 0, also if it was NaN"""

    scale: Tensor

    def shape_of(self, shape: torch.Size) -> torch.Size:
        if self.scale.shape != shape:
            raise ValueError(f"a factor for each entry, of shape {tuple(self.scale.shape)}; expected {tuple(shape)}")
        return shape

    def __call__(self, x: Tensor, shape: torch.Size) -> Tensor:
        return times(x, self.scale)

    def transposed(self, v: Tensor, shape: torch.Size) -> Tensor:
        return times(v, self.scale)


@dataclass(frozen=True, eq=False)
class Sides(LinearMap):
    """G ↦ L G R, for a parameter of shape (O, ...) seen as a matrix O I.  A vector is a matrix O 1.

    left: (O', O), or the diagonal of a diagonal matrix, O; None for the identity
    right: (I, I'), or the diagonal, I; None for the identity
    If R is a matrix with I' != I, the result has shape (O', I').

    With ``right`` of shape (K, I, I) the parameter consists of K matrices (O, I), stacked along its first axis, and ``left``
    is (K, O, O), or diagonals, (K, O); None for identities.
    """

    left: Tensor | None = None
    right: Tensor | None = None

    @property
    def _stack(self) -> tuple[int, ...]:
        """K, for a stack of matrices."""
        return self.right.shape[:-2] if self.right is not None else ()

    def _matrix(self, shape: torch.Size) -> tuple[int, ...]:
        """(O, I) or (K, O, I): a parameter as a matrix or as several."""
        if not self._stack or self.right is None:
            return shape[:1].numel(), shape[1:].numel()
        blocks, columns = self.right.shape[:2]
        return blocks, shape.numel() // max(1, blocks * columns), columns

    def shape_of(self, shape: torch.Size) -> torch.Size:
        *stack, fan_out, fan_in = self._matrix(shape)
        left, right = (None if x is None else (*x.shape,) for x in (self.left, self.right))
        rows = fan_out if not left or stack else left[0]
        columns = fan_in if not right or len(right) == 1 or stack else right[1]
        left_fits = left in (None, (*stack, fan_out), (*stack, rows, fan_out))
        right_fits = right in (None, (fan_in,), (*stack, fan_in, columns))
        is_whole = not stack or (shape[:1].numel() % stack[0] == 0 and stack[0] * fan_out * fan_in == shape.numel())
        if not (left_fits and right_fits and is_whole):
            k, o, i = (f"{stack[0]} × ", fan_out, fan_in) if stack else ("", "any", "any")
            raise ValueError(
                f"L and R of shapes {left} and {right}, for a parameter of shape {tuple(shape)}; expected L of {k}{o} × "
                f"{fan_out}, or its diagonals of {k}{fan_out}, and R of {k}{fan_in} × {i}, or a diagonal of {fan_in}. The "
                f"gradient is seen as {f'{stack[0]} matrices' if stack else 'a matrix'} {fan_out} × {fan_in}."
            )
        if columns != fan_in:
            return torch.Size((rows, columns))
        return shape if rows == fan_out else torch.Size((rows, *shape[1:]))

    def __call__(self, x: Tensor, shape: torch.Size) -> Tensor:
        before, diagonal = x.shape[: x.ndim - len(shape)], 1 + len(self._stack)
        matrix = x.reshape(*before, *self._matrix(shape))
        if self.left is not None:
            matrix = self.left[..., None] * matrix if self.left.ndim == diagonal else self.left @ matrix
        if self.right is not None:
            matrix = matrix * self.right if self.right.ndim == 1 else matrix @ self.right
        return matrix.reshape(*before, *self.shape_of(shape))

    def transposed(self, v: Tensor, shape: torch.Size) -> Tensor:
        turned = [x if x is None or x.ndim == 1 + len(self._stack) else x.mT for x in (self.left, self.right)]
        return Sides(*turned)(v, self.shape_of(shape)).reshape(shape)

    def rows(self, form: Form) -> Form | None:
        shape, fan_out = self.shape_of(form.shape), form.shape[:1].numel()
        if self._stack:
            return None
        if isinstance(form, Outer) and fan_out == form.fan_out:
            factors = _of_factor(form.left, self.left, -1), _of_factor(form.right, self.right, 0)
            return Outer(*factors, shape, form.gradient, form.present)
        if isinstance(form, Lookup) and fan_out == form.entries:
            values = _of_factor(form.g, self.right, 0)
            if self.left is not None and self.left.ndim == 2:
                return Outer(self.left.mT[form.index], values, shape, 1, form.present)
            values = values if self.left is None else values * self.left[form.index][..., None]
            return Lookup(form.index, values, form.entries, shape, form.present)
        if isinstance(form, Convolution) and form.groups == 1 and (self.right is None or self.right.ndim == 2):
            g = _of_factor(form.g.movedim(1, -1), self.left, -1).movedim(-1, 1)
            if self.right is None:
                return form.varied(1, g)
            # The windows times R, (N, L, I'), are the input convolved with the columns of R.  No window is cut.
            kernel, forward = self.right.mT.reshape(self.right.shape[1], *form.shape[1:]), FORWARD[len(form.kernel)]
            windows = forward(form.x, kernel, None, form.stride, form.padding, form.dilation)
            return Outer(g.flatten(2).mT, windows.flatten(2).mT, shape)
        return None


@dataclass(frozen=True, eq=False)
class InTurn(LinearMap):
    """Several maps, applied one after the other, the first one first."""

    maps: Sequence[LinearMap]

    def shape_of(self, shape: torch.Size) -> torch.Size:
        return reduce(lambda now, each: each.shape_of(now), self.maps, shape)

    def __call__(self, x: Tensor, shape: torch.Size) -> Tensor:
        for each in self.maps:
            x, shape = each(x, shape), each.shape_of(shape)
        return x

    def transposed(self, v: Tensor, shape: torch.Size) -> Tensor:
        shapes = accumulate(self.maps[:-1], lambda now, each: each.shape_of(now), initial=shape)
        for each, own in reversed([*zip(self.maps, shapes)]):
            v = each.transposed(v, own)
        return v

    def tensors(self) -> Sequence[Tensor]:
        return [x for each in self.maps for x in each.tensors()]

    def to(self, like: Tensor) -> InTurn:
        return InTurn([each.to(like) for each in self.maps])

    def rows(self, form: Form) -> Form | None:
        return reduce(mapped, self.maps, form)


def mapped(form: Form, by: LinearMap) -> Form:
    """The form whose rows are M(Gₙ), for the rows Gₙ of a form.  Raises ValueError if the map doesn't fit its shape."""
    by.shape_of(form.shape)
    dtype = reduce(torch.promote_types, (x.dtype for x in by.tensors()), form.like.dtype)
    form = form.to(dtype)
    return _mapped(form, by.to(form.like))


def _mapped(form: Form, by: LinearMap) -> Form:
    if isinstance(form, Zero):
        return Zero(form.samples, by.shape_of(form.shape), form.like)
    if isinstance(form, Dense):
        return Dense(by(form.values, form.shape))
    if isinstance(form, Scaled | Sum | Grouping | Concatenation):
        return form._of([_mapped(part, by) for part in form.parts])
    found = by.rows(form)
    return Mapped(form, by) if found is None else found


class Mapped(Form):
    """J M: its rows are M(Gₙ).

    form: the form with the rows Gₙ
    by: M
    """

    def __init__(self, form: Form, by: LinearMap) -> None:
        self.form, self.by, self.samples, self.shape = form, by, form.samples, by.shape_of(form.shape)
        self.held = form.held

    def _of(self, form: Form, by: LinearMap | None = None) -> Form:
        """The map of another form's rows.  by: another map of the same kind"""
        made = copy(self)
        Mapped.__init__(made, form, self.by if by is None else by)
        return made

    @property
    def like(self) -> Tensor:
        return self.form.like if self.by.like is None else self.by.like

    def saving(self, fresh: bool = False) -> float:
        return self.form.saving()

    def row_size(self) -> int:
        return self.form.row_size() + self.form.shape.numel() + 2 * self.shape.numel()

    def dense(self, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
        out = self.like.new_empty(self.samples, *self.shape) if out is None else out
        for piece in slices_of(self.samples, BUDGET // max(1, self.row_size() * self.sum_dtype.itemsize)):
            out[piece] = self.by(self.form[piece].dense(factor=factor), self.form.shape)
        return out

    def __getitem__(self, index: Index) -> Form:
        return self._of(self.form[index])

    def to(self, dtype: torch.dtype) -> Form:
        if self.like.dtype == dtype:
            return self
        inside = dtype.to_complex() if self.form.like.is_complex() else dtype.to_real()
        return self._of(self.form.to(inside), self.by.to(self.like.new_empty(0, dtype=dtype)))

    def blocks(self, max_bytes: int) -> Iterator[tuple[slice, Form]]:
        yield slice(0, self.shape[:1].numel()), self  # a few entries cost as much as all

    def dot(self, v: Tensor, max_bytes: int = BUDGET) -> Tensor:
        return self.form.dot(self.by.to(self.new_sums()).transposed(v.to(self.sum_dtype), self.form.shape), max_bytes)

    def weighted_sum(self, w: Tensor, max_bytes: int = BUDGET, total: Tensor | None = None) -> Tensor:
        if w.ndim == 2 and (len(w) > self.samples or len(w) * self.row_size() * self.sum_dtype.itemsize > max_bytes):
            return super().weighted_sum(w, max_bytes, total)
        found = self.by.to(self.new_sums())(self.form.weighted_sum(w, max_bytes), self.form.shape).to(self.sum_dtype)
        return found.contiguous() if total is None else total.add_(found)


Pull = Callable[[Tensor], Tensor]
"""φ's vector-Jacobian product for K vectors at once, from v's shape, (K, ...), to θ's.  It can be differentiated if the rows
require gradients."""


@dataclass(frozen=True)
class _Pulled(LinearMap):
    """G ↦ φ′ᵀ G.  pull: see ``Pull``    shape: θ's    like: a tensor with the rows' dtype and device"""

    pull: Pull
    shape: torch.Size
    like: Tensor

    def shape_of(self, shape: torch.Size) -> torch.Size:
        return self.shape

    def __call__(self, x: Tensor, shape: torch.Size) -> Tensor:
        if x.ndim == len(shape):
            return self.pull(x[None])[0]
        return self.pull(x) if len(x) else x.new_zeros(0, *self.shape)

    def transposed(self, v: Tensor, shape: torch.Size) -> Tensor:
        raise NotImplementedError("φ′ V would take another derivative; Chained.dot takes products of rows")


class Chained(Mapped):
    """J of a parameter θ that is used through v = φ(θ), where φ involves no samples: v's J times φ's Jacobian.

    form: v's J
    pull: see ``Pull``
    shape: θ's
    like: a tensor with the rows' dtype and device
    """

    def __init__(self, form: Form, pull: Pull, shape: torch.Size, like: Tensor) -> None:
        super().__init__(form, _Pulled(pull, torch.Size(shape), like.detach().new_empty(0)))

    dot = Form.dot  # of rows; of v it would take another derivative

    def terms(self, u: Tensor, v: Tensor) -> Tensor:
        """Two numbers, whose size says how much the way back may make of rounding."""
        like = self.form.like
        at = directions("", 0, self.form.shape, like.dtype, like.device)
        values = self.form.weighted_sum(torch.ones(self.samples, dtype=self.sum_dtype.to_real(), device=like.device))
        size = torch.linalg.vector_norm(self.form.terms(*at)[0]) + torch.linalg.vector_norm(values)
        noise = torch.outer(at[0][0], at[1][0]).to(values.dtype).view(values.shape)
        noise = self.by(noise * (size / torch.linalg.vector_norm(noise)), self.form.shape)
        own = self.by(values, self.form.shape).reshape(u.shape[1], v.shape[1]).to(self.sum_dtype)
        total = (u.to(self.sum_dtype) @ own * v).sum(1)
        spread = torch.linalg.vector_norm(noise).to(total.dtype)
        return torch.stack([total - spread, spread.expand_as(total)], 1)


def _of_factor(factor: Tensor, side: Tensor | None, axis: int) -> Tensor:
    """A factor (..., F) of outer products after the map.  axis: the axis of ``side`` that is summed with F"""
    if side is None or side.ndim == 1:
        return factor if side is None else factor * side
    return factor @ (side if axis == 0 else side.mT)
