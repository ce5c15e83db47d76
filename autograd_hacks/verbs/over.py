"""A verb for all batches of a loader, in the memory of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.wrappers import has_processes
from autograd_hacks.errors import ON_DATA_SETS, ON_PASSES
from autograd_hacks.support.digest import digest_of
from autograd_hacks.support.display import progress
from autograd_hacks.support.kinds import is_number
from autograd_hacks.support.parts import part_of
from autograd_hacks.support.row_files import RowFile
from autograd_hacks.support.trees import version_of
from autograd_hacks.verbs.arguments import kind_of, names_matching
from autograd_hacks.verbs.checkpoints import Checkpoints, listed, weights_of
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.kept import kept, size_kept
from autograd_hacks.verbs.losses import backward_to
from autograd_hacks.verbs.per_sample import per_sample_grads

KEPT = 2**28
"""Bytes for gradients that are kept from batch to batch."""
_BETWEEN = PerSampleGrads.gram, PerSampleGrads.cosine
"""Verbs between samples."""
_ROWS = *_BETWEEN, PerSampleGrads.norms, PerSampleGrads.project, PerSampleGrads.dot
"""Verbs that have a row for each sample, which can't be added up over batches."""


def over(
    model: nn.Module,
    loader: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    verb: Callable[..., Any],
    *,
    against: Iterable[Any] | None = None,
    checkpoints: Checkpoints | None = None,
    total: bool = False,
    out: str | os.PathLike[str] | None = None,
    only: str | Iterable[str] | None = None,
    budget: int = KEPT,
) -> Any:
    """What a verb says of each sample of a loader, one batch after the other: (D, ...) for D samples, on the CPU.

    loader: batches    loss: ``loss(model, batch)`` returns a loss for each sample of a batch, N
    verb: ``verb(grads)``, of the `PerSampleGrads` of a batch, returns N rows, or {name: N rows}:
    ``PerSampleGrads.norms``, ``lambda grads: grads.project(512)``
    against: batches of another data set. ``verb(grads, others)`` then returns (N, M), ``PerSampleGrads.gram`` say, and the
    result is (D, E) for its E samples. What is not kept of them runs once for each batch of the loader, so let that be the
    larger set, in large batches
    checkpoints: of training, [(state, weight), ...] with a copy of a state dictionary, or its file: the result is the
    weighted sum over these; with learning rates for weights that is TracIn's. The model has its own weights again afterwards
    total: whether the verb returns sums over samples, ``PerSampleGrads.second_moment`` say, which are added up
    out: a file for the rows, .npy or .safetensors, which is written batch by batch, with ``out.progress`` beside it; the
    result is then mapped into memory, and not held there. The same call, with the same loss and verb, goes on where an
    earlier one was interrupted. Where several processes run, the name has {rank} in it
    only: as in `per_sample_grads`
    budget: bytes for gradients of ``against``, which are kept from batch to batch, by each of the checkpoints, as far as
    they fit

    ``.grad`` stays as it is.  What is kept is taken anew where the model's weights have changed; if anything else that
    ``loss`` depends on may change in between, give ``budget=0``.

    Raises NothingRecorded for a model without hooks; RuntimeError inside `accumulate`; ValueError for a loader without
    batches, for a verb that returns something else, and for a file of other weights, or batches that come in another order
    than those it holds, or than before in ``against`` (shuffled); and what ``loss``, `backward` and ``verb`` raise.

    Source: Pruthi et al. 2020, "Estimating training data influence by tracing gradient descent" (arXiv:2002.08484), for
    checkpoints.
    """
    recorder = recorder_of(model)
    record, known = recorder.record, listed(model, checkpoints)
    only = only if only is None or isinstance(only, str) else list(only)
    if record.accumulating:
        raise RuntimeError("over reads batch by batch; leave accumulate(model) first" + ON_PASSES)
    _check(verb, against, total, out, budget)
    file = None
    if out is not None:
        origin = digest_of(model.state_dict() if known is None else known, only)
        for other in against if against is not None else ():
            origin = digest_of(other, before=origin)
        file = RowFile(_of_process(out), origin)
    recorder.planner.doubts = True  # of what was proven by another loss
    step = _Step(model, loss, verb, against, only, budget, known is not None)
    found: list[dict[str, Tensor]] = []
    batches, is_dict = 0, False
    with weights_of(model, known) as weights:
        for batch in progress(loader, "gradients", "batch"):
            batches += 1
            if file is not None and not file.wants(batch):
                continue
            piece: dict[str, Tensor] = {}
            for number, weight in enumerate(weights()):
                own, is_dict = step.rows(batch, total, number)
                own = {name: x if weight == 1 else x * weight for name, x in own.items()}
                piece = {name: x + piece[name] for name, x in own.items()} if piece else own
            if file is not None:
                if is_dict:
                    raise ValueError(
                        "over was given out, and verb returned a dictionary; expected one tensor of N rows" + ON_DATA_SETS
                    )
                file.take(piece[""])
            else:
                _check_alike(found, piece, total)
                found = [{n: found[0][n] + x for n, x in piece.items()}] if total and found else [*found, piece]
    record.clear("over has read its passes, and thrown them away")
    if not batches:
        raise ValueError("over was given a loader without batches" + ON_DATA_SETS)
    if file is not None:
        return file.end()
    joined = {name: torch.cat([piece[name] for piece in found]) if not total else x for name, x in found[0].items()}
    return joined if is_dict else joined[""]


def _check(verb: Callable[..., Any], against: Iterable[Any] | None, total: bool, out: object, budget: object) -> None:
    """Raises ValueError for what doesn't go together."""
    if out is not None and total:
        raise ValueError(
            "over was given out for sums; expected it for rows. Save what is returned: torch.save(sums, path)" + ON_DATA_SETS
        )
    if total and (against is not None or verb in _ROWS):
        raise ValueError(
            "over was given total=True, which adds up over batches what a verb returns, for rows of other samples in each "
            "batch. Leave it out, or give a verb that returns sums: PerSampleGrads.second_moment" + ON_DATA_SETS
        )
    if verb in _BETWEEN and against is None:
        raise ValueError(
            "over was given a verb between samples, and would take it within each batch alone; expected against=, the "
            "batches of the other samples. For those of the same data give the loader again: over(..., against=loader)"
            + ON_DATA_SETS
        )
    if not is_number(budget):
        raise TypeError(f"over was given budget={budget!r}; expected a number of bytes" + ON_DATA_SETS)
    if isinstance(against, Iterator):
        raise ValueError(
            f"over was given against={kind_of(against)}, which can be taken once; expected a list or a DataLoader, which is "
            "taken again for each batch" + ON_DATA_SETS
        )


def _check_alike(found: Sequence[Mapping[str, Tensor]], piece: Mapping[str, Tensor], total: bool) -> None:
    """Raises ValueError where a verb returns something else for one batch than for the first."""
    first = found[0] if found else piece
    own, expected = ({name: tuple(x.shape[not total :]) for name, x in each.items()} for each in (piece, first))
    if own != expected:
        raise ValueError(
            f"over: verb returned {'sums' if total else 'rows'} of shape {own.get('', own)} for one batch, and of "
            f"{expected.get('', expected)} for the first; expected the same for all. What depends on the other samples of a "
            "batch can't be had batch by batch; inner products with samples of another data set are, by against="
            + ON_DATA_SETS
        )


class _Step:
    """One batch by one model's weights.

    is_brought: whether the model is brought to checkpoints, and else has weights of its own, which may change meanwhile
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        verb: Callable[..., Any],
        against: Iterable[Any] | None,
        only: str | Iterable[str] | None,
        budget: int,
        is_brought: bool,
    ) -> None:
        self._model, self._loss, self._verb, self._against, self._only = model, loss, verb, against, only
        self._kept: dict[int, list[PerSampleGrads]] = {}  # of the other data's first batches, by checkpoint
        self._whole: set[int] = set()  # the checkpoints by which they are those of all batches
        self._left, self._budget, self._is_brought = budget, budget, is_brought
        self._weights: object = None  # by which they were taken
        self._seen: list[str] = []  # what tells the other data's batches from others

    def rows(self, batch: Any, total: bool, checkpoint: int) -> tuple[dict[str, Tensor], bool]:
        """What the verb returns, by name, and whether it has names.  checkpoint: which weights the model has"""
        grads = self._grads(batch)
        if self._against is None:
            return self._checked(self._verb(grads), None if total else grads.samples)
        blocks = []
        for others in self._others(self._against, checkpoint):
            blocks.append(self._checked(self._verb(grads, others), grads.samples))
        if not blocks:
            raise ValueError("over was given against without batches" + ON_DATA_SETS)
        return {name: torch.cat([own[name] for own, _ in blocks], 1) for name in blocks[0][0]}, blocks[0][1]

    def _others(self, against: Iterable[Any], checkpoint: int) -> Iterator[PerSampleGrads]:
        """The gradients of the other data, batch by batch."""
        weights = None if self._is_brought else _look_of(self._model)
        if weights != self._weights:
            self._kept, self._whole, self._left, self._weights = {}, set(), self._budget, weights
        known = self._kept.setdefault(checkpoint, [])
        yield from (before := list(known))
        if checkpoint in self._whole:
            return
        is_room = True
        for number, batch in enumerate(against):
            if number < len(before):
                continue
            self._check_order(number, batch)
            grads = self._grads(batch)
            is_room = is_room and number == len(known) and (size := size_kept(grads)) <= self._left
            if is_room:
                self._left -= size
                known.append(grads := kept(grads))
            yield grads
        if is_room:
            self._whole.add(checkpoint)

    def _check_order(self, number: int, batch: Any) -> None:
        """Raises ValueError where the other data's batches are others, or in another order, than before."""
        seen = digest_of(batch)
        if number == len(self._seen):
            self._seen.append(seen)
        elif number > len(self._seen) or self._seen[number] != seen:
            raise ValueError(
                "over was given against with other batches, or in another order, each time that it is gone through. It must "
                "not shuffle, or draw: DataLoader(data, shuffle=False)" + ON_DATA_SETS
            )

    def _grads(self, batch: Any) -> PerSampleGrads:
        parameters = list(self._model.parameters())
        before = [p.grad for p in parameters]
        recorder = recorder_of(self._model)
        hooks = [own for p in parameters if (own := getattr(p, "_post_accumulate_grad_hooks", None)) and not has_processes()]
        kept_hooks = [dict(own) for own in hooks]
        try:
            for own in hooks:  # of an optimizer, say, that steps in the backward pass
                for key in own.keys() - recorder.backward.own_hooks():
                    del own[key]
            for p in parameters:
                p.grad = None
            with torch.enable_grad():
                backward_to(self._loss(self._model, batch), self._chosen(), "sum")
            return per_sample_grads(self._model, only=self._only)
        finally:
            for p, grad in zip(parameters, before):
                p.grad = grad
            for own, known in zip(hooks, kept_hooks):
                own.update(known)

    def _chosen(self) -> list[Tensor] | None:
        """The parameters that the pass is to go as far as; None for all, for which processes wait for each other."""
        if self._only is None or has_processes():
            return None
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        named = list(self._model.named_parameters(remove_duplicate=False))
        return [trained[name] for name in names_matching(self._only, named, list(trained))]

    def _checked(self, found: Any, samples: int | None) -> tuple[dict[str, Tensor], bool]:
        """samples: how many rows there are to be"""
        is_dict = isinstance(found, Mapping)
        own = dict(found) if is_dict else {"": found}
        for x in own.values():
            if not isinstance(x, Tensor) or (samples is not None and x.shape[:1] != (samples,)):
                rows = "sums" if samples is None else f"{samples} rows, one for each sample"
                raise ValueError(
                    f"over: verb returned {kind_of(x)}; expected {rows}, in a tensor or a dictionary of tensors"
                    + ON_DATA_SETS
                )
        return {name: x.detach().cpu() for name, x in own.items()}, is_dict


def _look_of(model: nn.Module) -> object:
    """What changes where a model's numbers do, also where they are written to by ``.data``, of which torch doesn't hear."""
    own = [part_of(x).detach() for x in (*model.parameters(), *model.buffers())]
    dense = [x for x in own if x.layout == torch.strided and not x.is_meta]
    real = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in dense]
    numbers = [x for x in real if x.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
    sizes = [
        each for x in numbers for each in (torch.linalg.vector_norm(x, dtype=torch.float64), x.sum(dtype=torch.float64))
    ]
    by_device = [[x for x in sizes if x.device == device] for device in dict.fromkeys(x.device for x in sizes)]
    places = [(x.data_ptr() if x.layout == torch.strided else 0, version_of(x)) for x in own]
    return [torch.stack(each).tolist() for each in by_device], places, [p.requires_grad for p in model.parameters()]


def _of_process(out: str | os.PathLike[str]) -> str:
    path, rank = os.fspath(out), 0
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
        if "{rank}" not in path and torch.distributed.get_world_size() > 1:
            raise ValueError(
                f"out is {path!r} on each of several processes; expected a name with {{rank}} in it: rows-{{rank}}.npy"
                + ON_DATA_SETS
            )
    return path.replace("{rank}", str(rank))
