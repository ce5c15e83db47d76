"""Verbs between this process's samples and those of others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from autograd_hacks.distributed.cut import whole_sum
from autograd_hacks.errors import BlockTooLarge, NotReduced
from autograd_hacks.forms import Dense, Form
from autograd_hacks.verbs.readable import Readable
from autograd_hacks.verbs.whole import Whole

LIMIT = 2**30
"""Bytes of other processes' rows, unless told another number."""


class Everyone(Readable, Whole):
    """Rows of which other processes have more."""

    samples: int

    @abstractmethod
    def project(self, dim: int, seed: int = 0) -> Tensor:
        """J R."""

    def gram_of_all(self, dim: int | None = None, seed: int = 0, limit: float = LIMIT) -> Tensor:
        """⟨gₙ, g′ₘ⟩ of this process's samples with those of all processes, (N, M), M in the order of the processes.

        dim: from rows that are projected to so many coordinates, as `project` does it: N · dim numbers go to each process.
        Unless told, the products are exact: the rows of all, written out, go to each process, one parameter at a time
        limit: bytes that those may have

        All processes at once.  Raises BlockTooLarge on all where the rows of a parameter take more.
        Source: Park et al. 2023, "TRAK" (arXiv:2303.14186), for projected rows.
        """
        if dim is not None:
            with self.summing(lambda: self.project(dim, seed)) as (own, _):
                return own @ self.spread.everyones(own).mT
        size = max((form.shape.numel() * form.like.element_size() for form in self.values()), default=0)
        with self.summing(lambda: None, lambda _: [self.samples], 1) as (_, (count,)):
            if count * size > limit:
                raise BlockTooLarge(
                    f"the rows of all {count:.0f} samples have {count * size / 2**20:,.0f} MiB for the largest parameter, "
                    f"which each process would be sent; the limit is {limit / 2**20:,.0f} MiB. Project them, "
                    "gram_of_all(dim=4096), or raise limit."
                )
            return whole_sum(self, self.cuts, lambda own: self._with_all(own, int(count)))

    def _with_all(self, forms: Mapping[str, Form], count: int) -> Tensor:
        products = [form.gram(Dense(self.spread.everyones(form.dense()))) for form in forms.values()]
        like = products[0] if products else torch.zeros(self.samples, count, device="cpu")
        return sum((part.to(like.device) for part in products), torch.zeros_like(like))

    def _check_alone(self, what: str) -> None:
        """Raises where a verb would take this process's rows for all."""
        if self.spread.mesh is not None:
            raise NotReduced(
                f"{what} needs the inner products of all rows, and this process has {self.samples} of those of "
                f"{self.spread.mesh.size()} processes. Take it of this process's samples, grads.local().{what}(...), or "
                "products with JᵀJ, which are everyone's: fisher_matvec, ggn_matvec."
            )
