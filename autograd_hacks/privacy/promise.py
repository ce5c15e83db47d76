"""The record of a private step and the guarantee that it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autograd_hacks.errors import ON_CLIPPING
from autograd_hacks.support.display import Shown, Table
from autograd_hacks.support.ranges import check

RELATIONS = {"add_remove": 1, "zero_out": 1, "replace_one": 2}
"""{relation of two neighbouring data sets: the distance of their sums, in bounds}"""


@dataclass(frozen=True, repr=False)
class PrivateStep(Shown):
    """The result of `clip_and_noise_`.  Only ``.grad`` is private: norms, weights and shares are not.

    norms: norms before clipping, N, or of each group in the order of the ids; NaN for those that didn't enter the sum
    weights: the factor of each gradient in the sum, N, or {pattern: N} if parameters are bounded separately; 0 for those
    that didn't enter the sum
    bound: the largest norm of one sample's (or group's) contribution to the sum
    expected_batch_size: the divisor of the sum
    deviation: the standard deviation of the noise in ``.grad``
    unit: 'sample' or 'group', the unit that is protected
    """

    norms: Tensor
    weights: Tensor | Mapping[str, Tensor]
    bound: float
    expected_batch_size: float
    deviation: float
    unit: str

    def __post_init__(self) -> None:
        numbers = {"bound": self.bound, "expected_batch_size": self.expected_batch_size, "deviation": self.deviation}
        check("PrivateStep", ON_CLIPPING, **numbers)

    @property
    def clipped_fraction(self) -> Tensor:
        """The share of samples in the sum that were clipped, a 0-dim tensor."""
        parts = self.weights.values() if isinstance(self.weights, Mapping) else [self.weights]
        taken = self.norms.isfinite()
        clipped = torch.stack([w < 1 for w in parts]).any(0) & taken if parts else taken
        return clipped.sum() / taken.sum().clamp(min=1)

    def sensitivity(self, relation: str = "add_remove") -> float:
        """The largest change of ``.grad`` between two neighbouring data sets, in the 2-norm.

        relation: 'add_remove', one sample (or group) is added or removed; 'zero_out', one is replaced by zero;
        'replace_one', one is replaced by another
        Raises ValueError for another relation.
        """
        if relation not in RELATIONS:
            raise ValueError(f"sensitivity was given {relation!r}; expected one of {', '.join(RELATIONS)}" + ON_CLIPPING)
        return RELATIONS[relation] * self.bound / self.expected_batch_size

    def _first(self, samples: int) -> PrivateStep:
        """The same step without the padding at the end.

        samples: how many samples to keep
        """
        whole = self.weights
        weights = {key: w[:samples] for key, w in whole.items()} if isinstance(whole, Mapping) else whole[:samples]
        return replace(self, norms=self.norms[:samples], weights=weights)

    def _table(self) -> Table:
        multiplier = self.deviation / self.sensitivity()
        rows = [
            ("unit", self.unit),
            ("in the sum", f"{int(self.norms.isfinite().sum())} of {len(self.norms)}"),
            ("clipped", f"{float(self.clipped_fraction):.1%}"),
            ("bound", f"{self.bound:.6g}"),
            ("expected batch size", f"{self.expected_batch_size:.6g}"),
            ("sensitivity of .grad, add_remove", f"{self.sensitivity():.6g}"),
            ("sensitivity of .grad, replace_one", f"{self.sensitivity('replace_one'):.6g}"),
            ("deviation of the noise in .grad", f"{self.deviation:.6g}"),
        ]
        title = f"a private step of {len(self.norms)} {self.unit}s, bound {self.bound:.4g}, noise {multiplier:.4g} of it"
        return Table(title, [("", ""), *rows])


def together(parts: Sequence[PrivateStep]) -> PrivateStep:
    """The whole step of several micro-batches.  The last of them had the noise."""
    last = parts[-1]
    if isinstance(last.weights, Mapping):
        maps = [part.weights for part in parts if isinstance(part.weights, Mapping)]
        weights: Tensor | Mapping[str, Tensor] = {key: torch.cat([own[key] for own in maps]) for key in last.weights}
    else:
        weights = torch.cat([part.weights for part in parts if isinstance(part.weights, Tensor)])
    norms = torch.cat([part.norms for part in parts])
    return replace(last, norms=norms, weights=weights)
