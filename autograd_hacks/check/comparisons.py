"""Compares given rows, norms with those of plain backward passes, in a table."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from autograd_hacks.support.display import Shown, Table, percent, progress

Gradients = Sequence[Tensor | None]
"""The gradients of a sample's loss, by parameter, in double precision; None where the loss doesn't depend on the
parameter."""
GradientsOf = Callable[[int], Gradients]

WHOLE = "all parameters"

_HEADER = ("parameter", "shape", "worst error", "sample", "verdict")
_ROUNDINGS = 4.0
"""A row's error may be this many times the effect of rounding all weights once: other kernels sum in another order."""
_ALIKE = 1e-3
"""The largest relative distance at which rows count as a multiple of the right ones."""


@dataclass(frozen=True)
class CheckedParameter:
    """A line of the table that `check_rows` returns."""

    name: str
    shape: tuple[int, ...]  # the parameter's; () for norms over all parameters
    error: float | None  # the largest of all samples, relative to the sample's own row; None if nothing was given
    sample: int | None  # the sample with that error
    verdict: str
    is_right: bool  # also True if nothing was given

    def cells(self) -> tuple[str, ...]:
        """The texts of the columns."""
        error = "" if self.error is None else f"{self.error:.1e}"
        return self.name, str(self.shape), error, "" if self.sample is None else str(self.sample), self.verdict


@dataclass(frozen=True, repr=False)
class CheckedRows(Shown):
    """The result of `check_rows`.  It prints as a table, in a terminal and in a notebook.

    parameters: a `CheckedParameter` for each    samples: N    covered: how many numbers the given parameters have; for norms
    over all parameters, those without which they would be wrong    numbers: how many numbers all trainable
    parameters have that some loss depends on    hint: what the errors have in common, or empty
    """

    parameters: Sequence[CheckedParameter]
    samples: int
    covered: int
    numbers: int
    hint: str = ""

    @property
    def share(self) -> float:
        """The share of the numbers that was given, or that norms over all parameters were shown to include."""
        return self.covered / self.numbers if self.numbers else 1.0

    def _table(self) -> Table:
        is_whole = any(line.name == WHOLE for line in self.parameters)
        given = "over all" if is_whole else f"attributed: {percent(self.share)} of"
        title = f"{counted(self.samples, 'sample')}, {given} {self.numbers:,} parameters"
        title += f"; shown to be in it: {percent(self.share)}" if is_whole and self.share < 1 else ""
        return Table(title, [_HEADER, *(line.cells() for line in self.parameters)], self.hint, is_whole=True)

    __repr__ = Shown.__str__


def counted(number: int, what: str) -> str:
    """A number of things, as text."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class Comparison:
    """Compares given rows or norms with those of plain backward passes, sample by sample.

    given: {name: (index of the parameter, N rows or norms)}; {WHOLE: (None, (N,))} for norms over all parameters
    what: the word for the numbers    parameters: the shapes of all trainable ones, each once    samples: N
    tolerance: the relative error of right numbers    dtype: the one whose digits they have
    """

    def __init__(
        self, given: Mapping[str, tuple[int | None, Tensor]], what: str, parameters: Mapping[str, torch.Size], samples: int,
        tolerance: float, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.what, self.parameters, self.samples, self.tolerance, self.dtype = what, parameters, samples, tolerance, dtype
        self.lines = [(name, index, rows) for name, (index, rows) in given.items()]
        self.is_whole = WHOLE in given  # then small parameters may be missing from the numbers unnoticed
        # By line and sample: the distance, the right length, which it is relative to, and the given one, the inner product
        # of both, and the distance that rounding explains.
        zeros = torch.zeros(5, len(given), samples, dtype=torch.float64, device="cpu")
        self.error, self.right, self.given, self.product, self.noise = zeros
        # By parameter and sample: the length of the gradient, and whether the loss depends on the parameter.
        self.lengths = torch.zeros(len(parameters), samples, dtype=torch.float64, device="cpu")
        self.is_reached = self.lengths > 0

    def compare(self, of: GradientsOf) -> None:
        """Compares all samples."""
        for n in progress(range(self.samples), "checking rows", "sample"):
            gradients = of(n)
            for index, g in enumerate(gradients):
                if g is not None:
                    self.is_reached[index, n], self.lengths[index, n] = True, vector_norm(g)
            for line, (_, place, rows) in enumerate(self.lines):
                given = exact(rows[n]).flatten()
                if self.what == "norms":
                    right = (self.lengths[:, n].norm() if place is None else self.lengths[place, n]).to(given)
                else:
                    g = gradients[place or 0]
                    right = torch.zeros_like(given) if g is None else g.to(given.device).flatten()
                for own, x in ((self.error, given - right), (self.right, right), (self.given, given)):
                    own[line, n] = vector_norm(x)
                self.product[line, n] = (given.conj() * right).sum().real

    def compare_again(self, of: GradientsOf, rounded: GradientsOf) -> None:
        """Allows for rounding in the doubtful samples.  rounded: their gradients with all weights rounded once more"""
        doubtful = self.doubtful()
        for n in progress(doubtful.any(0).nonzero()[:, 0].tolist(), "checking again", "sample"):
            pairs = zip(of(n), rounded(n))
            changes = [0.0 if x is None or y is None else float(vector_norm(x - y)) for x, y in pairs]
            for line, (_, place, _) in enumerate(self.lines):
                if doubtful[line, n]:
                    change = math.hypot(*changes) if place is None else changes[place]
                    self.noise[line, n] = self.allowance(n, change, float(self.right[line, n]))

    def off(self) -> Tensor:
        """Whether each error is too large, or NaN, by line and sample."""
        return ~(self.error <= self.tolerance * self.right + self.noise)

    def doubtful(self) -> Tensor:
        """Whether each error is too large, and may be rounding."""
        return self.off() & self.error.isfinite()

    def allowance(self, n: int, apart: float, right: float) -> float:
        """The error that sample n may have.  apart: its change by rounding all weights    right: its length"""
        # A row that cancels is a difference of numbers as large as the whole gradient, each off by a few ε.
        whole = float(self.lengths[:, n].norm())
        few, unknown = (2 * torch.finfo(dtype).eps * whole for dtype in (self.dtype, torch.float64))
        has_digits = right > _ROUNDINGS * (apart + unknown)  # then an error must not hide behind larger parameters
        least = min(few, max(few / 32, _ROUNDINGS * self.tolerance * right)) if has_digits else few
        found = _ROUNDINGS * apart + least
        return found if math.isfinite(found) else 0.0

    def checked(self, line: int) -> CheckedParameter:
        """A line of the table."""
        (name, index, _), off, error, right = self.lines[line], self.off()[line], self.error[line], self.right[line]
        is_right = not off.any()
        relative = (error / right).nan_to_num(nan=math.inf, posinf=math.inf).where(error != 0, 0)
        worst = int(relative.where(off | is_right, -1).argmax())
        number = int((relative > self.tolerance if is_right else off).sum())
        if is_right:
            verdict = f"right; too few digits in {str(self.dtype).removeprefix('torch.')}" if number else "right"
        elif not right[worst].isfinite():
            verdict = "autograd's own is not finite"
        else:
            verdict = "wrong" if self.given[line, worst].isfinite() else "not finite"
        verdict += f": {number} of {counted(self.samples, 'sample')}" if number else ""
        shape = () if index is None else tuple(list(self.parameters.values())[index])
        return CheckedParameter(name, shape, float(relative[worst]), worst, verdict, is_right)

    def result(self) -> CheckedRows:
        """The table."""
        covered, numbers, checked = 0, 0, [self.checked(0)] if self.is_whole else []
        for index, (name, shape) in enumerate(self.parameters.items()):
            own = [self.checked(line) for line, (_, place, _) in enumerate(self.lines) if place == index]
            is_reached = bool(self.is_reached[index].any())
            lacking = "" if own else self.lacking(index, is_reached)
            if is_reached:
                numbers += shape.numel()
                covered += 0 if lacking else shape.numel()
            checked += own or ([CheckedParameter(name, tuple(shape), None, None, lacking, True)] if lacking else [])
        is_right = all(line.is_right for line in checked)
        hint = "" if is_right else self.hint()
        if is_right and self.is_whole and covered < numbers:
            hint = (
                "Without a parameter marked unknown, no sample's number would change by more than the tolerance, "
                f"{self.tolerance:.1e}. Give rows by name, or compute in float64."
            )
        return CheckedRows(checked, self.samples, covered, numbers, hint)

    def lacking(self, index: int, is_reached: bool) -> str:
        """Why the given numbers may lack a parameter that has no line of its own; empty if they can't."""
        if not self.is_whole:
            return "not given" if is_reached else "not given; no loss depends on it"
        rest = (self.lengths.square().sum(0) - self.lengths[index].square()).clamp(min=0).sqrt()
        is_small = bool(((self.given[0] - rest).abs() <= self.tolerance * self.right[0] + self.noise[0]).all())
        return "unknown: too small to make a difference" if is_reached and is_small else ""

    def hint(self) -> str:
        """A property that all wrong numbers share."""
        squares = self.right.square()
        if self.what == "norms" and ((self.given - squares).abs() <= _ALIKE * squares).all():
            return "All norms are the squares of the right ones; take their roots."
        common, n = self._factor(slice(self.samples)), self.samples
        if common is not None:
            times, why = f"{common:.6g} times the samples' own." if common else "zero.", ""
            if self.samples > 1 and abs(common * n - 1) < _ALIKE:
                times = f"1/N times the samples' own, N = {self.samples}: they are of the mean of the losses. "
                why = "Multiply them, or tell the engine so (loss_reduction='mean')."
            elif self.samples > 1 and abs(common / n - 1) < _ALIKE:
                times = f"N times the samples' own, N = {self.samples}: the engine took the sum of the losses for "
                why = "their mean. Divide them, or tell the engine so (loss_reduction='sum')."
            return "" if abs(common - 1) < _ALIKE else f"All {self.what} are {times}{why}"
        factors = [c for n in range(self.samples) if (c := self._factor(slice(n, n + 1))) is not None]
        if len(factors) < self.samples or self.is_whole:  # one number always has the right direction
            return ""
        return (
            f"All {self.what} have the right direction and the wrong length, {min(factors):.3g} to {max(factors):.3g} times "
            "the right one: clipped or weighted, or of losses that are divided by something other than N."
        )

    def _factor(self, samples: slice) -> float | None:
        """The factor between some samples' right numbers and the given ones; None if there is no common factor."""
        given, product, right = found = torch.stack([self.given, self.product, self.right])[:, :, samples]
        total = float(right.square().sum())
        if not (0 < total < math.inf and found.isfinite().all()):
            return None
        c = float(product.sum()) / total
        far = given.square() - 2 * c * product + (c * right).square()
        near = (_ALIKE * c) ** 2 * (right.square() + 1e-6 * total / right.numel())
        return c if (far <= near).all() else None


def exact(x: Tensor) -> Tensor:
    """A tensor in double precision, out of its graph."""
    x = x.detach().to_dense() if x.layout != torch.strided else x.detach()
    x = x.cpu() if x.device.type == "mps" else x  # MPS has no float64
    return x.to(torch.complex128 if x.is_complex() else torch.float64)
