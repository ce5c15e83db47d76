"""A verb for all batches of a loader, in the memory of one batch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.data import RandomSampler

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.wrappers import has_processes
from autograd_hacks.errors import ON_DATA_SETS, ON_PASSES
from autograd_hacks.forms import Dense, Form, Lookup, Outer
from autograd_hacks.forms.base import written_bytes
from autograd_hacks.support.display import progress
from autograd_hacks.support.internals import hooks_after
from autograd_hacks.support.parts import part_of
from autograd_hacks.support.patterns import names_matching
from autograd_hacks.support.ranges import checked
from autograd_hacks.support.row_files import RowFiles, digest_of
from autograd_hacks.verbs.arguments import check_kind, check_loader, kind_of
from autograd_hacks.verbs.grads import WITHIN, PerSampleGrads
from autograd_hacks.verbs.losses import backward
from autograd_hacks.verbs.per_sample import per_sample_grads

Found = TypeVar("Found")
"""What a verb returns: a tensor, or a dictionary of tensors."""
KEPT = 2**28
"""The default number of bytes for gradients that are kept from batch to batch."""
_ALONE = ""
"""The name of a verb's result that is a single tensor."""
_ROWS = PerSampleGrads.gram, PerSampleGrads.norms, PerSampleGrads.project, PerSampleGrads.dot
"""Verbs that return one row per sample.  Their results can't be summed over batches."""


@checked(ON_DATA_SETS)
def over(
    model: nn.Module,
    loader: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    verb: Callable[..., Found],
    *,
    against: Iterable[Any] | None = None,
    total: bool = False,
    out: str | os.PathLike[str] | None = None,
    only: str | Iterable[str] | None = None,
    max_bytes: int = KEPT,
) -> Found:
    """Runs a verb on every batch of a loader and returns one result per sample, (D, ...), on the CPU.

    ``.grad`` doesn't change.  The model stays in its mode.  Call ``model.eval()`` first: in training mode dropout draws
    other masks in each call.

    loader: the batches, D samples in all. Rows come in this order; there is a warning for a DataLoader that shuffles
    loss: ``loss(model, batch)`` returns N losses, one for each sample of the batch
    verb: ``verb(grads)`` gets the `PerSampleGrads` of a batch and returns N rows, for example ``PerSampleGrads.norms`` or
    ``lambda grads: grads.project(512)``. It may also return {name: N rows}
    against: batches of another data set with E samples. ``verb(grads, others)`` then returns (N, M), as
    ``PerSampleGrads.gram`` does, and the result is (D, E). Batches of ``against`` that don't fit the budget are recomputed
    for every batch of the loader, so make the loader the larger set, with large batches
    total: the verb returns sums over samples, as ``PerSampleGrads.second_moment`` does; the result is their sum
    out: a file for the rows, .npy or .safetensors. It is written batch by batch, with ``out.progress`` beside it, and the
    result is mapped from disk. A name without an ending is a folder with one .npy file for each name of the verb's
    dictionary, and ``.progress``. `Store` searches both. After an interruption, the same call with the same loss and verb
    resumes. With several processes the name must contain {rank}
    only: as in `per_sample_grads`
    max_bytes: bytes for gradients of ``against`` that are kept from batch to batch, 256 MiB by default. Kept gradients
    are recomputed when the weights change. If the loss depends on anything else that changes, pass
    ``max_bytes=0``

    With ``add_hooks(segments=...)``, for samples that pack several documents, ``loss`` returns one loss for each document.

    Raises NothingRecorded for a model without hooks; RuntimeError inside `accumulate`; ValueError for a loader without
    batches, for a verb that returns something else, for a file with rows of other weights, and for batches in another order
    than in the file or than ``against`` had before (shuffled); and what ``loss``, `backward` and ``verb`` raise.
    """
    recorder = recorder_of(model)
    record = recorder.record
    only = only if only is None or isinstance(only, str) else list(only)
    if record.accumulating:
        raise RuntimeError("over reads after each batch; leave accumulate(model) first" + ON_PASSES)
    _check(loader, loss, verb, against, total, out)
    if not total and isinstance(getattr(loader, "sampler", None), RandomSampler):
        warnings.warn(
            "over was given a loader that shuffles, so row k is not sample k of the data set: rows come in the order of the "
            "batches. Give DataLoader(..., shuffle=False)" + ON_DATA_SETS,
            stacklevel=2,
        )
    file: RowFiles | None = None
    if out is not None:
        weights = digest_of(model.state_dict())
        origin = digest_of(only, before=weights)
        for other in against if against is not None else ():
            origin = digest_of(other, before=origin)
        file = RowFiles(_of_process(out), origin, weights)
    recorder.kinds.doubt()  # checks with another loss, or of whole samples, don't count here
    step = _Step(model, loss, verb, against, only, max_bytes)
    pieces: list[dict[str, Tensor]] = []
    batches = 0
    for batch in progress(loader, "gradients", "batch"):
        batches += 1
        if file is not None and not file.wants(batch):
            continue
        piece = step.rows(batch, total)
        if file is None:
            _check_alike(pieces, piece, total)
            pieces = [{n: pieces[0][n] + x for n, x in piece.items()}] if total and pieces else [*pieces, piece]
        else:
            file.take(piece)
    record.clear("over has read its passes and discarded them")
    if not batches:
        raise ValueError("over was given a loader without batches" + ON_DATA_SETS)
    joined: dict[str, Tensor] = {} if file is None else file.end()
    for name, x in pieces[0].items() if pieces else ():
        joined[name] = x if total else torch.cat([piece[name] for piece in pieces])
    return cast(Found, joined.get(_ALONE, joined))


def _check(
    loader: object, loss: object, verb: Callable[..., Any], against: Iterable[Any] | None, total: bool, out: object
) -> None:
    """Raises TypeError for arguments of another kind, and ValueError for some that don't go together."""
    check_loader("over", loader, ON_DATA_SETS)
    check_kind("over", ON_DATA_SETS, Callable, "a function of the model and a batch", loss=loss)
    check_kind("over", ON_DATA_SETS, Callable, "a function, such as PerSampleGrads.norms", verb=verb)
    if out is not None and total:
        raise ValueError("over was given out= for rows and total=True; expected only one of them" + ON_DATA_SETS)
    if total and (against is not None or verb in _ROWS):
        raise ValueError(
            "over was given total=True, but this verb returns rows; expected one that returns sums" + ON_DATA_SETS
        )
    if isinstance(against, Iterator):
        raise ValueError(
            f"over was given against={kind_of(against)}, which can be iterated only once; expected a list or a DataLoader"
            + ON_DATA_SETS
        )


def _check_alike(pieces: list[dict[str, Tensor]], piece: dict[str, Tensor], total: bool) -> None:
    """Raises ValueError if a verb's result has another shape than for the first batch."""
    first, now = ({name: tuple(x.shape[not total :]) for name, x in each.items()} for each in ([*pieces, piece][0], piece))
    if now != first:
        raise ValueError(
            f"over: verb returned {'sums' if total else 'rows'} of shape {now.get(_ALONE, now)} for one batch, and of "
            f"{first.get(_ALONE, first)} for the first; expected rows of their own samples only, or against=" + ON_DATA_SETS
        )


@dataclass
class _Step:
    """One batch, by the model's current weights."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    verb: Callable[..., Any]
    against: Iterable[Any] | None
    only: str | Iterable[str] | None
    max_bytes: int

    def __post_init__(self) -> None:
        self._kept: list[PerSampleGrads] = []  # gradients of the other data's first batches
        self._left = self.max_bytes
        self._weights = ""  # a digest of the kept gradients' weights
        self._seen: list[str] = []  # digests of the other data's batches

    def rows(self, batch: Any, total: bool) -> dict[str, Tensor]:
        """The verb's result by name, or by `_ALONE` if it is one tensor."""
        grads = self._grads(batch)
        if self.against is None:
            token = WITHIN.set(taken := list[str]())
            try:
                found = _by_name(self.verb(grads), None if total else grads.samples)
            finally:
                WITHIN.reset(token)
            if taken and any(x.shape[:2] == (grads.samples, grads.samples) for x in found.values()):
                raise ValueError(
                    "over was given a verb that compares samples, without against=, so it would compare samples of one "
                    "batch only. Give the other batches, against=loader for the same ones, and a verb of both: lambda "
                    "grads, others: grads.gram(others)" + ON_DATA_SETS
                )
            return found
        blocks = [_by_name(self.verb(grads, others), grads.samples) for others in self._others(self.against)]
        if not blocks:
            raise ValueError("over: against has no batches" + ON_DATA_SETS)
        return {name: torch.cat([block[name] for block in blocks], 1) for name in blocks[0]}

    def _others(self, against: Iterable[Any]) -> Iterator[PerSampleGrads]:
        """The gradients of the other data, batch by batch."""
        own = [*self.model.parameters(), *self.model.buffers()]
        weights = digest_of([part_of(x) for x in own], [x.requires_grad for x in own])  # also sees writes through ``.data``
        if weights != self._weights:
            self._kept, self._left, self._weights = [], self.max_bytes, weights
        kept = self._kept
        yield from kept[:]
        first = len(kept)
        if first and first == len(self._seen):  # all are kept
            return
        for number, batch in islice(enumerate(against), first, None):
            seen = digest_of(batch)
            if number == len(self._seen):
                self._seen.append(seen)
            elif self._seen[number] != seen:
                raise ValueError("over: against returned other batches or another order; it must not shuffle" + ON_DATA_SETS)
            grads = self._grads(batch)
            products, others = ([form for form in grads.values() if _stays(form) is stays] for stays in (True, False))
            size = sum(x.nbytes for form in products for x in form.held)
            size += sum(map(written_bytes, others))
            if number == len(kept) and size <= self._left:
                self._left -= size
                kept.append(grads := _copied(grads))
            yield grads

    def _grads(self, batch: Any) -> PerSampleGrads:
        parameters = list(self.model.parameters())
        grads = [p.grad for p in parameters]
        tables = [] if has_processes() else [table for p in parameters if (table := hooks_after(p))]
        hooks, ours = [dict(table) for table in tables], recorder_of(self.model).backward.own_hooks()
        try:
            for table in tables:  # for example of an optimizer that steps in the backward pass
                for key in table.keys() - ours:
                    del table[key]
            for p in parameters:
                p.grad = None
            chosen: list[Tensor] | None = None  # None for all: processes need all, because they wait for each other
            if self.only is not None and not has_processes():
                trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
                chosen = [trained[name] for name in names_matching(self.only, self.model, list(trained))]
            with torch.enable_grad():
                backward(self.loss(self.model, batch), "sum", inputs=chosen)
            return per_sample_grads(self.model, only=self.only)
        finally:
            for p, grad in zip(parameters, grads):
                p.grad = grad
            for table, before in zip(tables, hooks):
                table.update(before)


def _by_name(returned: Any, samples: int | None) -> dict[str, Tensor]:
    """A verb's result by name, on the CPU.  samples: the expected number of rows; None for sums"""
    named = returned if isinstance(returned, Mapping) else {_ALONE: returned}
    for x in named.values():
        if not isinstance(x, Tensor) or (samples is not None and x.shape[:1] != (samples,)):
            rows = "sums" if samples is None else f"{samples} rows, one for each sample"
            raise ValueError(
                f"over: verb returned {kind_of(x)}; expected {rows}, as a tensor or a dictionary of tensors" + ON_DATA_SETS
            )
    return {name: x.detach().cpu() for name, x in named.items()}


def _of_process(out: str | os.PathLike[str]) -> Path:
    path, rank = os.fspath(out), torch.distributed.get_rank() if has_processes() else 0
    if has_processes() and "{rank}" not in path and torch.distributed.get_world_size() > 1:
        raise ValueError(
            f"over: out={path!r} is the same on several processes; expected a name with {{rank}}" + ON_DATA_SETS
        )
    return Path(path.replace("{rank}", str(rank)))


# Rows that outlive their activations.


def _copied(grads: PerSampleGrads) -> PerSampleGrads:
    """The same rows in memory of their own: products as copies of their factors, all others written out."""
    every = torch.arange(grads.samples, device="cpu")  # indexing by numbers copies
    with grads.reading():
        forms = {n: form[every.to(form.like.device)] if _stays(form) else Dense(form.dense()) for n, form in grads.items()}
        made = grads.with_forms(forms, grads.samples)
    made._versions = made._versions[len(grads._versions) :]
    return made


def _stays(form: Form) -> bool:
    """Whether a form's factors are cheap to keep."""
    return all(isinstance(leaf, Outer | Lookup) for leaf in form.leaves())
