"""The random map of a projection, drawn piece by piece."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import ClassVar

import torch
from torch import Tensor

from autograd_hacks.forms.numerics import slices_of
from autograd_hacks.support.internals import dispatch_modes

_SMALL = 2**19
"""Numbers of a map that is written out, and kept from batch to batch: one product took 4.4 ms where two took 8.6 (64
samples, 128 × 64), and drawing took a quarter of the time of projecting 32 batches of 200 images."""
_KEPT = 16
"""How many such maps are kept."""


@dataclass(frozen=True)
class RandomMap:
    """R of shape (P, dim), for a parameter seen as a matrix O I: coordinate k of a gradient G is uₖᵀ G vₖ / √dim.

    u and v are independent signs.  So E ⟨G R, H R⟩ = ⟨G, H⟩; and since E (uᵀa)⁴ ≤ 3 ‖a‖⁴, the squared length of a unit
    rank-one gradient has a standard deviation of √8 / √dim at most.  R is a function of these fields alone, and drawn on
    the CPU, so that it is the same for every batch, form and device.  Large ones are never stored: P · dim numbers would be
    needed.

    name: the parameter's    shape: the parameter's, (O, ...); further axes are flattened    dim: how many coordinates
    """

    name: str
    shape: torch.Size
    dim: int
    seed: int
    within: tuple[torch.Size, int, int] | None = None  # where this is a part of one: its shape, the first row and column

    COLUMNS: ClassVar[int] = 32
    """How many coordinates are drawn at a time."""

    @property
    def fans(self) -> tuple[int, int]:
        """O and I; I is 1 for a vector."""
        return _fans(self.shape)

    def columns(self, like: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Some coordinates k at a time with their u / √dim, (K, O), and v, (K, I), of the dtype and device of ``like``."""
        for number, columns in enumerate(slices_of(self.dim, self.COLUMNS)):
            whole, row, column = self.within or (self.shape, 0, 0)
            key = repr((self.seed, self.name, tuple(whole), self.dim, number)).encode()
            generator = torch.Generator().manual_seed(int.from_bytes(sha256(key).digest()[:7], "big"))
            count, (fan_out, fan_in) = columns.stop - columns.start, _fans(whole)
            signs = torch.randint(2, (count, fan_out + fan_in), generator=generator, dtype=torch.int8, device="cpu")
            left, right = signs.to(like).mul_(2).sub_(1).split([fan_out, fan_in], dim=1)
            if self.within is not None:
                left, right = left[:, row : row + self.fans[0]], right[:, column : column + self.fans[1]]
            yield columns, left / self.dim**0.5, right

    def add_to(self, found: Tensor, written: Tensor, rows: slice) -> None:
        """Adds what some entries of the parameter's first axis give, (N, entries · I) written out, to N dim in place."""
        if len(written) > 8 and self.dim * self.fans[0] * self.fans[1] <= _SMALL:
            is_ordinary = not dispatch_modes() and not torch.is_inference_mode_enabled()
            draw = _written if is_ordinary else _written.__wrapped__  # a mode's tensors are its own
            found.addmm_(written, draw(self, found.dtype, found.device)[:, rows].flatten(1).mT)
            return
        written = written.view(len(written), rows.stop - rows.start, self.fans[1])
        for columns, left, right in self.columns(found):
            # Products for a sample, dim · O · I and then dim · min(O, I): the longer axis goes first.
            if self.fans[0] < self.fans[1]:
                found[:, columns] += ((written @ right.mT) * left[:, rows].mT).sum(1)
            else:
                found[:, columns] += ((written.mT @ left[:, rows].mT) * right.mT).sum(1)


@lru_cache(_KEPT)
def _written(random: RandomMap, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A map itself, (dim, O, I)."""
    like = torch.empty(0, dtype=dtype, device=device)
    return torch.cat([left[:, :, None] * right[:, None] for _, left, right in random.columns(like)])


def _fans(shape: torch.Size) -> tuple[int, int]:
    return (shape[0], shape[1:].numel()) if shape else (1, 1)
