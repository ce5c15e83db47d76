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


class _Line:
    """The given and the right rows or norms of one parameter, or over all (index None), by sample."""

    def __init__(self, name: str, given: Tensor, index: int | None = None, shape: Sequence[int] = ()) -> None:
        self.name, self.rows, self.index, self.shape = name, given, index, tuple(shape)
        # By sample: the distance, the right length, which it is relative to, and the given one, the inner product of both,
        # and the distance that rounding explains.
        self.error, self.right, self.given, self.product, self.noise = torch.zeros(
            5, len(given), dtype=torch.float64, device="cpu"
        )

    def put(self, n: int, given: Tensor, right: Tensor) -> None:
        """Compares a sample.  given, right: F"""
        for own, x in ((self.error, given - right), (self.right, right), (self.given, given)):
            own[n] = vector_norm(x)
        self.product[n] = (given.conj() * right).sum().real

    def off(self, tolerance: float) -> Tensor:
        """Whether each sample's error is too large, or NaN."""
        return ~(self.error <= tolerance * self.right + self.noise)

    def doubtful(self, tolerance: float) -> Tensor:
        """Whether each sample's error is too large, and may be rounding."""
        return self.off(tolerance) & self.error.isfinite()

    def checked(self, tolerance: float, digits: str) -> CheckedParameter:
        """The line of the table.  digits: the name of the dtype whose digits count"""
        off, is_right = self.off(tolerance), not self.off(tolerance).any()
        relative = (self.error / self.right).nan_to_num(nan=math.inf, posinf=math.inf).where(self.error != 0, 0)
        worst = int(relative.where(off | is_right, -1).argmax())
        number = int((relative > tolerance if is_right else off).sum())
        if is_right:
            verdict = f"right; too few digits in {digits}" if number else "right"
        elif not self.right[worst].isfinite():
            verdict = "autograd's own is not finite"
        else:
            verdict = "wrong" if self.given[worst].isfinite() else "not finite"
        verdict += f": {number} of {counted(len(off), 'sample')}" if number else ""
        return CheckedParameter(self.name, self.shape, float(relative[worst]), worst, verdict, is_right)


@dataclass(eq=False)
class Comparison:
    """Compares given numbers with those of plain backward passes."""

    # {name: (index of the parameter, N rows or norms)}; {WHOLE: (None, (N,))} for norms over all parameters
    given: Mapping[str, tuple[int | None, Tensor]]
    what: str  # the word for the numbers
    parameters: Mapping[str, torch.Size]  # all trainable ones, each once
    samples: int
    tolerance: float  # the relative error of right numbers
    dtype: torch.dtype  # the one whose digits they have

    def __post_init__(self) -> None:
        self.lengths: list[list[float | None]] = [[]] * self.samples  # of each sample's gradients, by parameter
        self.length = [0.0] * self.samples  # of whole gradients
        shapes = list(self.parameters.values())
        self.lines = [_Line(name, x, n, () if n is None else shapes[n]) for name, (n, x) in self.given.items()]
        self.is_whole = WHOLE in self.given  # then small parameters may be missing from the numbers unnoticed

    def look(self, n: int, gradients: Gradients) -> None:
        """Compares sample n."""
        self.lengths[n] = [None if g is None else float(vector_norm(g)) for g in gradients]
        self.length[n] = math.hypot(*(x or 0.0 for x in self.lengths[n]))
        for line in self.lines:
            given = exact(line.rows[n])
            if self.is_whole or self.what == "norms":
                right = given.new_tensor(self.length[n] if line.index is None else self.lengths[n][line.index] or 0.0)
            else:
                g = gradients[line.index or 0]
                right = torch.zeros_like(given) if g is None else g.to(given.device)
            line.put(n, given.flatten(), right.flatten())

    def look_again(self, n: int, changes: Sequence[float]) -> None:
        """Allows for rounding in sample n.  changes: of its gradients, by parameter, by rounding all weights once more"""
        for line in self.lines:
            if line.doubtful(self.tolerance)[n]:
                change = math.hypot(*changes) if line.index is None else changes[line.index]
                line.noise[n] = self.allowance(n, change, float(line.right[n]))

    def compare(self, of: GradientsOf) -> None:
        """Compares all samples."""
        for n in progress(range(self.samples), "checking rows", "sample"):
            self.look(n, of(n))

    def doubtful(self) -> list[int]:
        """The samples whose errors are too large, to be checked again."""
        each = torch.stack([line.doubtful(self.tolerance) for line in self.lines])
        return list[int](each.any(0).nonzero()[:, 0].tolist())

    def compare_again(self, of: GradientsOf, rounded: GradientsOf) -> None:
        """Compares the doubtful samples again.  rounded: their gradients with all weights rounded once more"""
        for n in progress(self.doubtful(), "checking again", "sample"):
            pairs = zip(of(n), rounded(n))
            self.look_again(n, [0.0 if x is None or y is None else float(vector_norm(x - y)) for x, y in pairs])

    def allowance(self, n: int, apart: float, right: float) -> float:
        """The error that sample n may have.  apart: its change by rounding all weights    right: its length"""
        # A row that cancels is a difference of numbers as large as the whole gradient, each off by a few ε.
        few, unknown = (2 * torch.finfo(dtype).eps * self.length[n] for dtype in (self.dtype, torch.float64))
        has_digits = right > _ROUNDINGS * (apart + unknown)  # then an error must not hide behind larger parameters
        least = min(few, max(few / 32, _ROUNDINGS * self.tolerance * right)) if has_digits else few
        found = _ROUNDINGS * apart + least
        return found if math.isfinite(found) else 0.0

    def result(self) -> CheckedRows:
        """The table."""
        digits, covered, numbers = str(self.dtype).removeprefix("torch."), 0, 0
        checked = [line.checked(self.tolerance, digits) for line in self.lines if line.index is None]
        for index, (name, shape) in enumerate(self.parameters.items()):
            own = [line.checked(self.tolerance, digits) for line in self.lines if line.index == index]
            is_reached = any(lengths[index] is not None for lengths in self.lengths)
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
        whole = self.lines[0]
        rest = [max(0.0, x**2 - (own[index] or 0.0) ** 2) ** 0.5 for x, own in zip(self.length, self.lengths)]
        allowed = self.tolerance * whole.right + whole.noise
        is_small = is_reached and bool(((whole.given - whole.given.new_tensor(rest)).abs() <= allowed).all())
        return "unknown: too small to make a difference" if is_small else ""

    def hint(self) -> str:
        """A property that all wrong numbers share."""
        squares = [(line.given, line.right.square()) for line in self.lines]
        if self.what == "norms" and all(((given - x).abs() <= _ALIKE * x).all() for given, x in squares):
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
        found = torch.stack([torch.stack([line.given, line.product, line.right])[:, samples] for line in self.lines], 1)
        given, product, right = found
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
