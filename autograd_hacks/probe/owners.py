"""Which sample owns each entry of a gradient.

Backward passes with G and with w ∘ G, w powers of two, show it: an entry that depends on one sample only is multiplied by
exactly that sample's weight, to the last bit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autograd_hacks.support.layout import Layout

ROUNDING = 8
"""How far a sample's gradient may differ from its multiple, in units in the last place of its length.  Some kernels add in
an order that changes from call to call."""

NOBODY, SEVERAL = -2, -1
"""Labels of entries that are zero or too small to judge, and of entries to which several samples contribute."""

SOME, STEPS = 32, (1, 7, 13, 29, 53, 101, 211, 431)
"""How many entries are read first to rule out layouts, and how far apart they are on each axis."""

CHUNK = 2**16
"""How many numbers are compared at once, so that they fit a cache."""


class Weights:
    """Gives each sample a number.  A pass uses one digit of it, and weights the sample by a power of two for that digit.

    samples: N
    draws: assigns the numbers at random
    dtypes: the dtypes of the gradients
    """

    def __init__(self, samples: int, draws: torch.Generator, dtypes: Iterable[torch.dtype] = ()) -> None:
        self.samples = samples
        dtypes = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
        self.base = 8 if torch.float16 in dtypes else 32  # powers that fit the dtypes, with a margin on both sides
        self.tiny = max((torch.finfo(dtype).tiny for dtype in dtypes), default=0.0)  # smaller numbers lose digits
        self.passes = 1
        while self.base**self.passes < samples:
            self.passes += 1
        # Widely spread numbers make small mixtures visible.
        spread = torch.arange(samples, device="cpu") * (self.base**self.passes - 1) // max(1, samples - 1)
        self.numbers = spread[torch.randperm(samples, generator=draws, device="cpu")]

    def of_pass(self, number: int) -> Tensor:
        """The weights of one pass, N."""
        digits = self.numbers // self.base**number % self.base
        return torch.pow(2.0, digits - self.base // 2)

    def smallest(self, dtype: torch.dtype) -> float:
        """Smaller entries may lose digits when they are weighted."""
        return torch.finfo(dtype).tiny * 2.0**self.base

    def owners(self, x: Tensor, weighted: Sequence[Tensor]) -> Tensor:
        """The owner of each entry, of x's shape: a sample's number, NOBODY or SEVERAL.

        x: the gradient
        weighted: the gradient in each weighted pass
        """
        alive = x.isfinite() & (x.abs() >= self.smallest(x.dtype))
        number, is_own = torch.zeros(x.shape, dtype=torch.long, device=x.device), alive.clone()
        for k, y in enumerate(weighted):
            power = (y / x).abs().log2().round().where(alive, 0).nan_to_num(0, 0, 0)
            digit = (power + self.base // 2).long().clamp(0, self.base - 1)
            is_own &= x * torch.pow(2.0, digit - self.base // 2).to(x) == y
            number += digit * self.base**k
        sample = torch.full((self.base**self.passes,), SEVERAL, device="cpu")
        sample[self.numbers] = torch.arange(self.samples, device="cpu")
        found = sample.to(x.device)[number].where(is_own, SEVERAL)
        return found.where(alive, NOBODY)


@dataclass(frozen=True)
class Verdict:
    """The owners of a gradient's entries.

    layouts: those under which each entry belongs to its own sample, the likeliest first
    owners: how many samples have a nonzero entry
    is_mixed: whether some entry depends on several samples
    labels: the sample of each entry, if no layout gives it
    """

    layouts: tuple[Layout, ...] = ()
    owners: int = 0
    is_mixed: bool = False
    labels: Tensor | None = None

    @property
    def layout(self) -> Layout | None:
        return self.layouts[0] if self.layouts else None

    @property
    def is_owned(self) -> bool:
        """Whether several samples have entries, and each entry belongs to one sample."""
        return self.owners > 1 and not self.is_mixed

    @property
    def is_decided(self) -> bool:
        """Whether a batch with other values would give the same verdict."""
        return self.is_mixed or (self.owners > 1 and len(self.layouts) < 2)


def judged(x: Tensor, weighted: Sequence[Tensor | None], weights: Weights, layouts: Iterable[Layout]) -> Verdict:
    """The owners of a gradient's entries.

    x: the gradient
    weighted: the gradient in the pass of each digit; None if none arrived
    layouts: those that are tried, the likeliest first
    """
    others = [torch.zeros_like(x) if y is None else y for y in weighted]
    fitting = [layout for layout in layouts if layout.fits(x, weights.samples)]
    for number, y in enumerate(others):
        w = weights.of_pass(number)
        fitting = _left_by_sample(fitting, x, y, w)
        fitting = [layout for layout in fitting if _is_multiple(layout, x, y, w, weights.tiny)]
    if fitting:
        rows = fitting[0].samples_first(x, weights.samples)
        return Verdict(tuple(fitting), int(rows.flatten(1).any(1).sum()) if rows.ndim > 1 else int(rows.count_nonzero()))
    labels = weights.owners(x, others)
    known = labels.unique()
    if bool((known == SEVERAL).any()):
        return Verdict(is_mixed=True)
    return Verdict(owners=int((known >= 0).sum()), labels=labels)


def _left_by_sample(layouts: list[Layout], x: Tensor, y: Tensor, w: Tensor) -> list[Layout]:
    """The layouts that fit a few large entries: y is x times the weight of the sample to which an entry belongs."""
    if len(layouts) < 2 or not 0 < x.ndim <= len(STEPS) or not x.numel() or torch.finfo(x.dtype).eps > 1e-6:
        return layouts
    places = [[step * k % size for k in range(SOME)] for step, size in zip(STEPS, x.shape)]
    few = [g[tuple(places)].abs().tolist() for g in (x, y)]
    large = 1e-3 * max(few[0])  # larger than rounding could change
    ratios = [(k, b / a) for k, (a, b) in enumerate(zip(*few)) if a > large]
    weights = w.tolist()

    def is_left(layout: Layout) -> bool:
        at, positions = places[layout.axis], max(1, x.shape[layout.axis] // len(weights))
        of = [k % len(weights) for k in at] if layout.fold == "T·N" else [k // positions for k in at]
        return all(abs(ratio / weights[of[k]] - 1) < 0.4 for k, ratio in ratios)

    return [layout for layout in layouts if is_left(layout)] or layouts


def _is_multiple(layout: Layout, x: Tensor, y: Tensor, w: Tensor, tiny: float) -> bool:
    """Whether y is x with each sample's entries multiplied by its weight."""
    mine, theirs = (layout.samples_first(g, len(w)) for g in (x, y))
    factors = w.to(y).view(-1, *[1] * (mine.ndim - 1))
    some = max(1, CHUNK * len(w) // max(1, y.numel()))
    # First one sample alone, which reveals most wrong layouts.
    sizes = [1] * bool(len(w)) + [min(some, len(w) - begin) for begin in range(1, len(w), some)]
    pieces = zip(mine.split(sizes), theirs.split(sizes), factors.split(sizes))
    return all(torch.equal(own * factor, other) or _is_near(own, other, factor, tiny) for own, other, factor in pieces)


def _is_near(x: Tensor, y: Tensor, w: Tensor, tiny: float) -> bool:
    """Whether both are equal up to rounding, sample by sample, ignoring NaN and entries that are too small to judge."""
    finite, wide = x.isfinite() & y.isfinite(), torch.promote_types(x.dtype, torch.float32)
    expected, found = (g.where(finite, 0).to(wide).reshape(len(g), -1) for g in (x * w, y))
    allowed = ROUNDING * torch.finfo(x.dtype).eps * expected.norm(dim=1)
    allowed += max(tiny, torch.finfo(x.dtype).tiny) * (1 + w.flatten().abs().to(allowed)) * x[0].numel() ** 0.5
    return bool(((found - expected).norm(dim=1) <= allowed).all())
