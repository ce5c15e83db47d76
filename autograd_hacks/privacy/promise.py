"""What a step of private training was, and what it promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autograd_hacks.errors import ON_CLIPPING
from autograd_hacks.support.display import Shown, Table

RELATIONS = {"add_remove": 1, "zero_out": 1, "replace_one": 2}
"""{how two data sets are neighbours: how many bounds apart their sums are}"""


@dataclass(frozen=True, repr=False)
class PrivateStep(Shown):
    """What `clip_and_noise_` returns.  Only ``.grad`` is private: norms, weights and shares are not.

    norms: before clipping, N, or of each group in the order of the ids; NaN for what has no part in the sum
    weights: N, or {pattern: N} where parameters are bounded apart; what each gradient was multiplied by in the sum, 0 where
    it has no part in that    bound: the longest that one's part of the sum can be
    expected_batch_size: what the sum was divided by    deviation: of the noise in ``.grad``
    unit: 'sample', or 'group', whichever comes or goes
    """

    norms: Tensor
    weights: Tensor | Mapping[str, Tensor]
    bound: float
    expected_batch_size: float
    deviation: float
    unit: str

    @property
    def clipped_fraction(self) -> Tensor:
        """The share of those in the sum that are shorter there than they were, 0-dim."""
        parts = self.weights.values() if isinstance(self.weights, Mapping) else [self.weights]
        taken = self.norms.isfinite()
        clipped = torch.stack([w < 1 for w in parts]).any(0) & taken if parts else taken
        return clipped.sum() / taken.sum().clamp(min=1)

    def sensitivity(self, relation: str = "add_remove") -> float:
        """How far ``.grad`` moves at most between two data sets that are neighbours, in its 2-norm.

        relation: 'add_remove', one sample (or group) more or less; 'zero_out', one replaced by nothing; 'replace_one', one
        replaced by any other
        """
        if relation not in RELATIONS:
            raise ValueError(f"sensitivity was given {relation!r}; expected one of {', '.join(RELATIONS)}" + ON_CLIPPING)
        return RELATIONS[relation] * self.bound / self.expected_batch_size

    def _first(self, samples: int) -> PrivateStep:
        """The same without the padding behind."""
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
    """The step whose micro-batches these were; the last of them had the noise."""
    last = parts[-1]
    if isinstance(last.weights, Mapping):
        maps = [part.weights for part in parts if isinstance(part.weights, Mapping)]
        weights: Tensor | Mapping[str, Tensor] = {key: torch.cat([own[key] for own in maps]) for key in last.weights}
    else:
        weights = torch.cat([part.weights for part in parts if isinstance(part.weights, Tensor)])
    norms = torch.cat([part.norms for part in parts])
    return replace(last, norms=norms, weights=weights)
