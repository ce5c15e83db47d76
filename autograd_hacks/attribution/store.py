"""Search in rows on disk: nearest rows and near duplicates.  And TRAK's scores from such rows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import ON_STORES
from autograd_hacks.extending import accumulation_dtype, check_kind, differing, kind_of, row_norms, slices_of, some
from autograd_hacks.forms import BUDGET
from autograd_hacks.support.display import Shown, Table, progress, with_unit
from autograd_hacks.support.ranges import checked
from autograd_hacks.support.row_files import RowFiles, digest_of

_STEP = 1024
"""How many rows are compared with each other at a time, for duplicates."""

Queries = Tensor | Mapping[str, Tensor]
"""Rows like those of the store: (Q, *shape); or {name: (Q, *shape)}."""
Named = Mapping[str, Tensor]
"""Rows of some samples by the name of their file."""


class Store(Shown):
    """The rows that ``over(..., out=path)`` has written, one for each sample of a data set, ready to be searched.

    They are mapped into memory and searched in blocks, so they may be larger than memory.  Queries must come from the same
    verb, projected to the same ``dim`` with the same ``seed`` and ``kind``; a store can't check that.  It can check the
    weights, see `check`.  No query finds a row with NaN or ∞, and it is no duplicate; a warning names such rows.  A row of
    zeros has cosine 0 with every other row.

    path: a file of rows, ``(D, *shape)``; or a folder of files, ``{name: (D, *shape)}``, whose inner products are summed
    over names

    Raises FileNotFoundError if there are no rows, or no notes beside them; ValueError for incomplete files.
    Source: Chang et al. 2024, "TrackStar" (arXiv:2410.17413), for search in stored gradients.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_kind("Store", ON_STORES, str | os.PathLike, "the path of rows that over has written", path=path)
        self.path = Path(path)
        self._files = RowFiles(self.path)
        self._rows = self._files.rows()
        if not self._files.notes["rows"]:
            raise ValueError(
                f"{self.path} has no rows; expected 1 or more. Run the call of over that writes them to its end; it resumes "
                "after an interruption" + ON_STORES
            )
        for name, x in self._rows.items():
            if not x.is_floating_point() or x.ndim < 2:
                raise ValueError(
                    f"{self.path} has {kind_of(x)}{f' for {name!r}' if name else ''}; expected rows of floating-point "
                    "numbers, (D, *shape), for example projections" + ON_STORES
                )
        if not self._files.notes["ended"]:
            warnings.warn(
                f"{self.path} is incomplete: it has {len(self)} rows, and the call of over that writes them has not ended"
                + ON_STORES,
                RuntimeWarning,
                stacklevel=2,
            )

    def __len__(self) -> int:
        return len(next(iter(self._rows.values())))

    @property
    def rows(self) -> Any:
        """The rows, ``(D, *shape)`` or ``{name: (D, *shape)}``, mapped from disk.  Writing doesn't change the file."""
        return self._rows[""] if self._files.is_one else dict(self._rows)

    def _table(self) -> Table:
        size = with_unit(sum(x.nbytes for x in self._rows.values()))
        return Table(f"Store of {len(self)} rows in {self.path}, {size}")

    # The weights that the rows come from.

    def check(self, model: nn.Module) -> None:
        """Raises ValueError if the rows come from other weights than the model has now."""
        given, stored = digest_of(model.state_dict()), self._files.notes["weights"]
        if stored != given:
            raise ValueError(
                f"{self.path} has rows of other weights than this {type(model).__name__}: digests {stored[:12]}… and "
                f"{given[:12]}…. Load the old weights, or write the rows again by over(model, ..., out=...)" + ON_STORES
            )

    # Searches.

    @checked(ON_STORES)
    def search(
        self,
        queries: Queries,
        k: int = 10,
        *,
        cosine: bool = False,
        model: nn.Module | None = None,
        max_bytes: int = BUDGET,
    ) -> tuple[Tensor, Tensor]:
        """The k rows with the largest inner products with each query: (values, numbers), each (Q, k).

        Values are in falling order.  Both results are on the queries' device; one block of rows goes there at a time.  If
        fewer than k rows are finite, the rest have value -∞ and number -1.

        queries: ``(Q, *shape)`` in the rows' dtype, as returned by the verb that wrote the rows; for a folder
        ``{name: (Q, *shape)}``
        k: how many rows to find for each query
        cosine: divide inner products by both lengths; they are 0 for rows and queries of zeros
        model: a model to `check` first    max_bytes: bytes to use beside the result

        Raises ValueError for queries of the wrong shape or with NaN or ∞, for k below 1 or above the number of rows;
        TypeError for queries of another dtype, or that are not tensors.
        """
        given = self._named(queries)
        if k > len(self):
            raise ValueError(f"search was given k={k}; expected at most the {len(self)} rows of {self.path}" + ON_STORES)
        if model is not None:
            self.check(model)
        with torch.no_grad():
            mine = self._units(_wide(given)) if cosine else _wide(given)
            like = next(iter(mine.values()))
            values = like.new_full((len(like), k), -torch.inf)
            numbers, odd = torch.full((len(like), k), -1, device=like.device), list[int]()
            for piece, theirs in self._blocks(max_bytes, len(like), like.device, "search"):
                is_odd = _is_odd(theirs)
                odd += (is_odd.nonzero()[:, 0] + piece.start).tolist()
                found = self._products(mine, self._units(theirs) if cosine else theirs)
                found = self._checked(found.masked_fill(is_odd, 0)).masked_fill(is_odd, -torch.inf)
                own, places = found.topk(min(k, found.shape[1]))
                places = torch.where(own == -torch.inf, -1, places + piece.start)
                values, chosen = torch.cat([values, own], 1).topk(k)
                numbers = torch.cat([numbers, places], 1).gather(1, chosen)
        self._tell(odd)
        return values, numbers

    @checked(ON_STORES)
    def duplicates(
        self, threshold: float = 0.99, *, max_pairs: int = 10**7, max_bytes: int = BUDGET
    ) -> tuple[Tensor, Tensor]:
        """The pairs of rows i < j with a cosine of at least a threshold: (cosines, pairs), (M,) and (M, 2).

        Cosines are in falling order.  All D (D - 1) / 2 pairs are compared, in blocks, up to rounding.

        threshold: above 0, at most 1    max_pairs: the largest number of pairs
        max_bytes: bytes to use beside the result

        Raises ValueError for a threshold out of range, and if there are more pairs than ``max_pairs``.
        """
        cpu, slack = torch.device("cpu"), 8 * torch.finfo(torch.float32).eps  # slack: rounding of products of equal rows
        cosines, pairs, total, odd = list[Tensor](), list[Tensor](), 0, list[int]()
        with torch.no_grad():
            for first, raw in self._blocks(max_bytes // 2, _STEP, cpu, "duplicates"):
                odd += (_is_odd(raw).nonzero()[:, 0] + first.start).tolist()
                mine, step = self._units(raw), first.stop - first.start
                for start in range(first.start, len(self), step):
                    second = slice(start, min(len(self), start + step))
                    theirs = mine if second == first else self._units(self._block(second, cpu))
                    found = self._products(mine, theirs)
                    near = (found >= float(threshold) - slack).triu(first.start - start + 1)  # NaN isn't
                    places = near.nonzero()
                    if (total := total + len(places)) > max_pairs:
                        raise ValueError(
                            f"{self.path} has more than {max_pairs:,} pairs of rows with a cosine of {threshold} or more; "
                            "raise threshold, or max_pairs" + ON_STORES
                        )
                    cosines.append(found[near].clamp(max=1))
                    pairs.append(places + torch.tensor([first.start, second.start], device=cpu))
        self._tell(odd)
        order = torch.cat(cosines).argsort(descending=True, stable=True)
        return torch.cat(cosines)[order], torch.cat(pairs)[order]

    # Rows of some samples, {name: (n, *shape)}.

    def _named(self, queries: Queries) -> Named:
        """The queries by file.  Raises for queries that don't fit the rows."""
        given = dict(queries) if isinstance(queries, Mapping) else {"": queries}
        if given.keys() != self._rows.keys():
            names = kind_of(queries) if "" in given else f"tensors named {some(list(given))}"
            names += "" if self._files.is_one or "" in given else f", {differing(given, self._rows)}"
            what = "one tensor" if self._files.is_one else f"{{name: tensor}} for {some(list(self._rows))}"
            raise ValueError(f"search was given {names}; {self.path} expects {what}" + ON_STORES)
        for name, x in given.items():
            rows = self._rows[name]
            of = f" for {name!r}" if name else ""
            if not isinstance(x, Tensor) or x.dtype != rows.dtype:
                raise TypeError(
                    f"search was given {kind_of(x)}{of}; expected {rows.dtype}, like the rows of {self.path}" + ON_STORES
                )
            if x.ndim != rows.ndim or x.shape[1:] != rows.shape[1:]:
                raise ValueError(
                    f"search was given queries of shape {tuple(x.shape)}{of}; the rows of {self.path} expect (Q, "
                    f"{', '.join(map(str, rows.shape[1:]))}), from the same verb" + ON_STORES
                )
            if len(bad := (~x.isfinite()).flatten(1).any(1).nonzero()[:, 0]):
                raise ValueError(
                    f"search was given queries{of} with NaN or ∞, the first of them {bad[:5].tolist()}. Remove those samples"
                    + ON_STORES
                )
        if len(sizes := {len(x) for x in given.values()}) > 1:
            raise ValueError(f"search was given queries of {sorted(sizes)} samples; expected one number of them" + ON_STORES)
        return {name: x.detach() for name, x in given.items()}

    def _blocks(self, max_bytes: int, queries: int, device: torch.device, what: str) -> Iterator[tuple[slice, Named]]:
        """The rows in blocks of samples, with a progress bar.  queries: how many are compared with each block"""
        numbers = sum(x.shape[1:].numel() for x in self._rows.values())
        for piece in progress(slices_of(len(self), max_bytes // (12 * max(1, numbers + queries))), what, "block"):
            yield piece, self._block(piece, device)

    def _block(self, piece: slice, device: torch.device) -> Named:
        return _wide({name: x[piece].to(device) for name, x in self._rows.items()})

    def _products(self, mine: Named, theirs: Named) -> Tensor:
        """The inner products of Q rows with n others, (Q, n)."""
        found = [mine[name].flatten(1) @ theirs[name].flatten(1).mT for name in mine]
        return sum(found[1:], found[0])

    def _units(self, rows: Named) -> Named:
        """Rows of length one; zeros stay as they are."""
        lengths = row_norms(torch.stack([row_norms(x.flatten(1)) for x in rows.values()], 1))
        self._checked(lengths.masked_fill(_is_odd(rows), 0))
        divisors = torch.where(lengths == 0, 1, lengths)
        return {name: x / divisors.view(-1, *[1] * (x.ndim - 1)) for name, x in rows.items()}

    def _checked(self, found: Tensor) -> Tensor:
        if not bool(found.isfinite().all()):
            raise ValueError(
                f"products of rows of {self.path} overflow in {found.dtype}. Write the rows in float64, by a verb that "
                "returns rows.double(); or multiply the loss by a small number" + ON_STORES
            )
        return found

    def _tell(self, odd: Sequence[int]) -> None:
        if odd:
            warnings.warn(
                f"{len(odd)} rows of {self.path} have NaN or ∞ and were left out, the first of them {odd[:5]}" + ON_STORES,
                RuntimeWarning,
                stacklevel=3,
            )


def _wide(rows: Named) -> Named:
    """The rows in the accumulation dtype of products."""
    return {name: x.to(accumulation_dtype(x.dtype)) for name, x in rows.items()}


def _is_odd(rows: Named) -> Tensor:
    """Which rows have NaN or ∞, n."""
    return torch.stack([~x.isfinite().flatten(1).all(1) for x in rows.values()]).any(0)


@torch.no_grad()
def trak_scores(train: Sequence[Tensor], queries: Sequence[Tensor], margins: Sequence[Tensor]) -> Tensor:
    """How much each of D training samples raises the margin of each of E queries, (D, E): (1 - p) φ (ΦᵀΦ)⁻¹ φ′ᵀ.

    All three have an entry for each trained model; 1 - p and the rest are means over models.  The margin of a sample is
    log p / (1 - p).  Gradients of margins are projected by ``over(model, data, margins, partial(PerSampleGrads.project,
    dim=K, seed=m))``, with the same seed for both data sets.

    train: Φ, (D, K), with K far below D    queries: φ′, (E, K)    margins: of the training samples, D

    Raises ValueError for other shapes, and for K above D.
    Source: Park et al. 2023, "TRAK" (arXiv:2303.14186), equation 17.
    """
    shapes = [[tuple(x.shape) for x in own] for own in zip(train, queries, margins, strict=True)]
    if not shapes or any(len(a) != 2 or len(b) != 2 or a[1] != b[1] or a[1] > a[0] or of != a[:1] for a, b, of in shapes):
        raise ValueError(
            f"trak_scores was given shapes {shapes}; expected (D, K), (E, K) and (D,) for each model, K ≤ D" + ON_STORES
        )
    products = [x @ torch.linalg.solve((x.mT @ x).double(), y.mT.double()).to(x) for x, y in zip(train, queries)]
    doubts = torch.stack([torch.sigmoid(-own) for own in margins]).mean(0)
    return doubts[:, None] * torch.stack(products).mean(0)
