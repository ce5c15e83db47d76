"""Which parameters have a curvature, and why others have none, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autograd_hacks.support.display import Shown, Table, in_millions, percent


@dataclass(frozen=True, repr=False)
class Coverage(Shown):
    """The result of `compute_hess` and `compute_hess_over`: a line for each trainable parameter.  It prints as a table, in a
    terminal and in a notebook, below the share of their numbers that have the curvature."""

    kind: str  # the requested one
    kinds: Mapping[str, str]  # {parameter: what it has}
    skipped: Mapping[str, str]  # {parameter: why it has none}
    sizes: Mapping[str, int]  # {parameter: how many numbers}
    frozen: int = 0  # how many numbers are frozen

    @property
    def covered(self) -> list[str]:
        """The parameters that have it, for example for ``per_sample_grads(model, only=...)``."""
        return list(self.kinds)

    @property
    def share(self) -> float:
        """The share of the trainable numbers that have it, in [0, 1]."""
        return sum(self.sizes[name] for name in self.kinds) / max(1, sum(self.sizes.values()))

    def _table(self) -> Table:
        count, tensors = in_millions(sum(self.sizes.values())), f"{len(self.kinds)} of {len(self.sizes)} tensors"
        title = f"{self.kind}: {tensors}; attributed: {percent(self.share)} of {count} parameters"
        title += f" that train; {self.frozen:,} are frozen" if self.frozen else ""
        rows = [("parameter", "numbers", self.kind)]
        for name, size in self.sizes.items():
            rows.append((name, f"{size:,}", self.kinds.get(name) or f"none: {self.skipped[name]}"))
        return Table(title, rows, is_whole=True)
