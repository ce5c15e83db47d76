"""Values that meet the batch entry by entry, or are repeated over it."""

import torch

from autograd_hacks.forms import Dense, Form
from autograd_hacks.formulas.met import Met


def divided(met: Met) -> Form | None:
    other = met.kept("other").conj()
    return met.summed(met.grad / other if met.place == 0 else -met.grad * met.kept("self").conj() / other.square())


def repeat(met: Met) -> Form | None:
    """The value, repeated along each axis."""
    times = list(met.kept("repeats"))
    sizes = [1] * (len(times) - len(met.shape)) + list(met.shape)
    if met.layout.fold or sizes[met.layout.axis] != 1:
        return None
    split = met.grad.reshape([n for pair in zip(times, sizes) for n in pair])
    axis = 2 * met.layout.axis
    rows = split.movedim(axis, 0)
    over = [n + 1 if n < axis else n for n in range(0, split.ndim, 2) if n != axis]
    return Dense((rows.sum(over) if over else rows).reshape(met.samples, *met.shape))


def prelu(met: Met) -> Form | None:
    """x, g: N C *T.  y = x where x > 0, else weight · x; one weight for all, or one for each channel."""
    if met.place != 1:
        return None
    x = met.kept("self")
    products = torch.where(x > 0, 0, met.grad * x)
    # A node's weight has the axes of x, a layer's may lack them.
    return met.summed(products, None if len(met.shape) == x.ndim else (*met.shape, *[1] * (x.ndim - 2)))
