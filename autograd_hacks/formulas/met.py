"""What a formula gets: the operands by name, of a node of autograd's graph or of a layer's call, and the gradient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.forms import Dense, Form, gathered
from autograd_hacks.formulas.call import Call, LayerFormula, needs_batch
from autograd_hacks.support.layout import POSITIONS, Layout

Kept = Callable[[str], Any]
"""The operands and settings of an operation, by the names under which its node saves them."""


@dataclass(slots=True)
class Met:
    """One use of a value of parameters, as a formula gets it.

    grad: the gradient at the only output
    layout: where the samples are in the gradient
    samples: N
    place: the number of the node's input that is the value
    shape: the value's shape
    """

    kept: Kept
    grad: Tensor
    layout: Layout
    samples: int
    place: int
    shape: torch.Size

    def grad_times(self, name: str) -> Tensor:
        """The gradient times the number by which the value was multiplied, which is usually 1."""
        factor = self.kept(name).conjugate()  # as in gradients
        return self.grad if factor == 1 else self.grad * factor

    def first(self, x: Tensor) -> Tensor:
        """A tensor with the gradient's layout, with samples first: N ..."""
        return self.layout.samples_first(x, self.samples)

    def summed(self, x: Tensor, shape: Sequence[int] | None = None) -> Form | None:
        """x: of the gradient's shape.  Each entry is added to the entry of the value that was broadcast there.

        shape: the value's, with axes that it hasn't"""
        shape = tuple(self.shape if shape is None else shape)
        axis, fold, missing = self.layout.axis, self.layout.fold, x.ndim - len(shape)
        if not (axis or fold) and missing > 0 and x.shape[missing:] == self.shape:  # the usual case
            return Dense(x if missing == 1 else x.sum(tuple(range(1, missing))))
        sizes = (1,) * missing + shape
        end = axis + (2 if fold == POSITIONS else 1)  # of the samples' axes
        if sizes[axis:end] not in ((1,), (1, 1)):
            return None  # the value has an entry for each sample
        if fold in ("", POSITIONS):  # else the positions are where the folded axis was
            sizes = sizes[:axis] + sizes[end:]
        rows = self.first(x)
        given = rows.shape
        over = [n for n, size in enumerate(sizes, 1) if size == 1 != given[n]]
        rows = rows.sum(over) if over else rows
        if rows.numel() != len(rows) * self.shape.numel():  # those of a sample without a batch axis
            return None
        return Dense(rows if rows.shape[1:] == self.shape else rows.reshape(len(rows), *self.shape))

    def by_channel(self, x: Tensor) -> Form | None:
        """x: N C *T.  The same for a value of shape C."""
        is_elsewhere = self.layout.axis or self.layout.fold == POSITIONS
        return None if is_elsewhere else self.summed(x, (*self.shape, *[1] * (x.ndim - 2)))

    def added_up(self, form: Form) -> Form:
        """form: of M rows, where M is N·T, T·N or N"""
        rows = self.layout.rows(form.samples, self.samples, self.grad.device) if self.layout.fold else None
        return form if rows is None else gathered(form, rows, self.samples)


_FIRST = Layout()

Formula = Callable[[Met], Form | None]
"""The value's form; None if the case isn't covered."""


def of_layer(
    formula: Callable[..., Form | None],
    layout: str,
    axes: int | Callable[[Any], int] = 1,
    kept: Callable[[Any, Call, Tensor], Mapping[str, Any]] | None = None,
    places: Mapping[str, int] = {"weight": 1, "bias": 2},
    **more: Any,
) -> LayerFormula:
    """A layer's formula from its node's: what a node saves is an argument or an attribute of the layer.

    layout: the expected shape of the input, for messages
    axes: how many axes it must have
    kept: what isn't the layer's attribute of the same name; by default its argument, as "input". Or all as "forms"
    places: the numbers of the node's inputs, by the parameters' names
    more: passed to the formula
    """

    @wraps(formula)
    def of_call(layer: Any, call: Call) -> Mapping[str, Form]:
        x = call.args[0] if call.args else next(x for x in call.kwargs.values() if isinstance(x, Tensor))
        needs_batch(x, axes if isinstance(axes, int) else axes(layer), layout)
        known: Mapping[str, Any] = {"input": x} if kept is None else kept(layer, call, x)
        found, size = {**(known.get("forms") or {})}, x.shape
        met = Met(lambda name: known[name] if name in known else getattr(layer, name), call.grad, _FIRST, size[0], 0, size)
        for name, value in layer._parameters.items():
            if value is not None and name in places and name not in found:
                met.place, met.shape = places[name], call._shape_of(name, value)
                if (form := formula(met, **more)) is None:
                    needs_batch(x, x.ndim + 1, layout)
                found[name] = form
        return found

    return of_call
