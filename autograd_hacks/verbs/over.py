"""A verb for all batches of a loader, in the memory of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.wrappers import has_processes
from autograd_hacks.errors import ON_DATA_SETS, ON_PASSES
from autograd_hacks.forms import Dense, Form, Lookup, Outer
from autograd_hacks.forms.base import written_bytes
from autograd_hacks.probe.documents import Segments
from autograd_hacks.support.display import progress
from autograd_hacks.support.internals import hooks_after
from autograd_hacks.support.kinds import is_number
from autograd_hacks.support.parts import part_of
from autograd_hacks.support.row_files import RowFile, RowFolder, digest_of
from autograd_hacks.support.trees import version_of
from autograd_hacks.verbs.algebra import WITHIN
from autograd_hacks.verbs.arguments import kind_of, names_matching
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.losses import backward_to
from autograd_hacks.verbs.per_sample import per_sample_grads

State: TypeAlias = "Mapping[str, Tensor] | str | os.PathLike[str]"
Checkpoints: TypeAlias = "Iterable[tuple[State, float]]"
"""State dictionaries, or files of such, each with a weight."""
KEPT = 2**28
"""Bytes for gradients that are kept from batch to batch."""
_BETWEEN = PerSampleGrads.gram, PerSampleGrads.cosine
"""Verbs between samples."""
_WITHIN = (
    "over was given a verb between samples, and would take it within each batch alone; expected against=, the batches of "
    "the other samples, and a verb of both: lambda grads, others: grads.gram(others), say. For those of the same data give "
    "the loader again: over(..., against=loader)"
)
_ALONE = ""
"""The name of what a verb returns in no dictionary."""
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
    segments: Segments | None = None,
) -> Any:
    """What a verb says of each sample of a loader, one batch after the other: (D, ...) for D samples, on the CPU.

    loader: batches    loss: ``loss(model, batch)`` returns a loss for each sample of a batch, N
    verb: ``verb(grads)``, of the `PerSampleGrads` of a batch, returns N rows, or {name: N rows}, or a named tuple of such
    for a name, whose fields are then said behind it, "0.weight.left":
    ``PerSampleGrads.norms``, ``lambda grads: grads.project(512)``
    against: batches of another data set. ``verb(grads, others)`` then returns (N, M), ``PerSampleGrads.gram`` say, and the
    result is (D, E) for its E samples. What is not kept of them runs once for each batch of the loader, so let that be the
    larger set, in large batches
    checkpoints: of training, [(state, weight), ...] with a copy of a state dictionary, or its file: the result is the
    weighted sum over these; with learning rates for weights that is TracIn's. The model has its own weights again afterwards
    total: whether the verb returns sums over samples, ``PerSampleGrads.second_moment`` say, which are added up
    out: a file for the rows, .npy or .safetensors, which is written batch by batch, with ``out.progress`` beside it; the
    result is then mapped into memory, and not held there. Without an ending it is a folder, with a .npy file for each name
    where the verb returns a dictionary; `Store` searches either. The same call, with the same loss and verb, goes on where
    an earlier one was interrupted. Where several processes run, the name has {rank} in it
    only: as in `per_sample_grads`
    budget: bytes for gradients of ``against``, which are kept from batch to batch, by each of the checkpoints, as far as
    they fit

    segments: as in `add_hooks`: where documents are packed into samples, and rows are to be theirs; ``loss`` then returns a
    loss for each document, D. Those of `add_hooks` unless told

    ``.grad`` stays as it is.  What is kept is taken anew where the model's weights have changed; if anything else that
    ``loss`` depends on may change in between, give ``budget=0``.

    Raises NothingRecorded for a model without hooks; RuntimeError inside `accumulate`; ValueError for a loader without
    batches, for a verb that returns something else, and for a file of other weights, or batches that come in another order
    than those it holds, or than before in ``against`` (shuffled); and what ``loss``, `backward` and ``verb`` raise.

    Source: Pruthi et al. 2020, "Estimating training data influence by tracing gradient descent" (arXiv:2002.08484), for
    checkpoints.
    """
    recorder, states = recorder_of(model), _listed(model, checkpoints)
    record = recorder.record
    only = only if only is None or isinstance(only, str) else list(only)
    if record.accumulating:
        raise RuntimeError("over reads batch by batch; leave accumulate(model) first" + ON_PASSES)
    _check(verb, against, total, out, budget)
    file: RowFile | RowFolder | None = None
    if out is not None:
        weights = digest_of(model.state_dict() if states is None else states)
        origin = digest_of(only, before=weights)
        for other in against if against is not None else ():
            origin = digest_of(other, before=origin)
        path = _of_process(out)
        kind = RowFile if os.path.splitext(path)[1] else RowFolder
        file = kind(path, origin, weights if states is None else "")
    recorder.planner.doubt()  # what was proven with another loss, or of samples
    told, recorder.segments = recorder.segments, recorder.segments if segments is None else segments
    step = _Step(model, loss, verb, against, only, budget, states is not None)
    pieces: list[dict[str, Tensor]] = []
    batches, before = 0, None if states is None else _cloned(model.state_dict())
    try:
        for batch in progress(loader, "gradients", "batch"):
            batches += 1
            if file is not None and not file.wants(batch):
                continue
            piece: dict[str, Tensor] = {}
            for number, (state, weight) in enumerate(states or [(None, 1.0)]):
                if state is not None:
                    _load(model, state)
                rows = step.rows(batch, total, number)
                rows = {name: x if weight == 1 else x * weight for name, x in rows.items()}
                piece = {name: x + piece[name] for name, x in rows.items()} if piece else rows
            if file is None:
                _check_alike(pieces, piece, total)
                pieces = [{n: pieces[0][n] + x for n, x in piece.items()}] if total and pieces else [*pieces, piece]
            elif isinstance(file, RowFolder) and _ALONE not in piece:
                file.take(piece)
            elif isinstance(file, RowFile) and _ALONE in piece:
                file.take(piece[_ALONE])
            else:
                raise ValueError(
                    f"over was given out={out!r}, and verb returned {'one tensor' if _ALONE in piece else 'a dictionary'}; "
                    "expected a file, rows.npy, for one tensor of N rows, and a folder, rows, for a dictionary of such"
                    + ON_DATA_SETS
                )
    finally:
        recorder.segments = told
        if before is not None:
            model.load_state_dict(before)
    record.clear("over has read its passes, and thrown them away")
    if not batches:
        raise ValueError("over was given a loader without batches" + ON_DATA_SETS)
    if file is not None:
        return file.end()
    joined = {name: torch.cat([piece[name] for piece in pieces]) if not total else x for name, x in pieces[0].items()}
    return joined.get(_ALONE, joined)


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
        raise ValueError(_WITHIN + ON_DATA_SETS)
    if not is_number(budget):
        raise TypeError(f"over was given budget={budget!r}; expected a number of bytes" + ON_DATA_SETS)
    if isinstance(against, Iterator):
        raise ValueError(
            f"over was given against={kind_of(against)}, which can be taken once; expected a list or a DataLoader, which is "
            "taken again for each batch" + ON_DATA_SETS
        )


def _check_alike(pieces: list[dict[str, Tensor]], piece: dict[str, Tensor], total: bool) -> None:
    """Raises ValueError where a verb returns something else for one batch than for the first."""
    first, now = ({name: tuple(x.shape[not total :]) for name, x in each.items()} for each in ([*pieces, piece][0], piece))
    if now != first:
        raise ValueError(
            f"over: verb returned {'sums' if total else 'rows'} of shape {now.get(_ALONE, now)} for one batch, and of "
            f"{first.get(_ALONE, first)} for the first; expected the same for all. What depends on the other samples of a "
            "batch can't be had batch by batch; inner products with samples of another data set are, by against="
            + ON_DATA_SETS
        )


@dataclass
class _Step:
    """One batch by one model's weights."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    verb: Callable[..., Any]
    against: Iterable[Any] | None
    only: str | Iterable[str] | None
    budget: int
    is_brought: bool  # whether the model is brought to checkpoints; else its weights may change meanwhile

    def __post_init__(self) -> None:
        self._kept: dict[int, list[PerSampleGrads]] = {}  # of the other data's first batches, by checkpoint
        self._left = self.budget
        self._weights: object = None  # by which they were taken
        self._seen: list[str] = []  # what tells the other data's batches from others

    def rows(self, batch: Any, total: bool, checkpoint: int) -> dict[str, Tensor]:
        """What the verb returns, by name; by `_ALONE` what has none.  checkpoint: which weights the model has"""
        grads = self._grads(batch)
        if self.against is None:
            taken: list[str] = []
            token = WITHIN.set(taken)
            try:
                found = _by_name(self.verb(grads), None if total else grads.samples)
            finally:
                WITHIN.reset(token)
            if taken and any(x.shape[:2] == (grads.samples, grads.samples) for x in found.values()):
                raise ValueError(_WITHIN + ON_DATA_SETS)
            return found
        blocks = [_by_name(self.verb(grads, others), grads.samples) for others in self._others(self.against, checkpoint)]
        if not blocks:
            raise ValueError("over was given against without batches" + ON_DATA_SETS)
        return {name: torch.cat([block[name] for block in blocks], 1) for name in blocks[0]}

    def _others(self, against: Iterable[Any], checkpoint: int) -> Iterator[PerSampleGrads]:
        """The gradients of the other data, batch by batch."""
        weights = None if self.is_brought else _look_of(self.model)
        if weights != self._weights:
            self._kept, self._left, self._weights = {}, self.budget, weights
        kept = self._kept.setdefault(checkpoint, [])
        yield from kept[:]
        first = len(kept)
        if first and first == len(self._seen):  # all of them
            return
        for number, batch in enumerate(against):
            if number < first:
                continue
            seen = digest_of(batch)
            if number == len(self._seen):
                self._seen.append(seen)
            elif self._seen[number] != seen:
                raise ValueError(
                    "over was given against with other batches, or in another order, each time that it is gone through. It "
                    "must not shuffle, or draw: DataLoader(data, shuffle=False)" + ON_DATA_SETS
                )
            grads = self._grads(batch)
            if number == len(kept) and (size := _size_copied(grads)) <= self._left:
                self._left -= size
                kept.append(grads := _copied(grads))
            yield grads

    def _grads(self, batch: Any) -> PerSampleGrads:
        parameters = [(p, p.grad) for p in self.model.parameters()]
        of_all = [] if has_processes() else [hooks_after(p) for p, _ in parameters]
        hooks = [(table, dict(table)) for table in of_all if table]
        ours = recorder_of(self.model).backward.own_hooks()
        try:
            for table, _ in hooks:  # of an optimizer, say, that steps in the backward pass
                for key in table.keys() - ours:
                    del table[key]
            for p, _ in parameters:
                p.grad = None
            with torch.enable_grad():
                backward_to(self.loss(self.model, batch), self._chosen(), "sum")
            return per_sample_grads(self.model, only=self.only)
        finally:
            for p, grad in parameters:
                p.grad = grad
            for table, before in hooks:
                table.update(before)

    def _chosen(self) -> list[Tensor] | None:
        """The parameters that the pass is to go as far as; None for all, for which processes wait for each other."""
        if self.only is None or has_processes():
            return None
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return [trained[name] for name in names_matching(self.only, self.model, list(trained))]


def _by_name(returned: Any, samples: int | None) -> dict[str, Tensor]:
    """What a verb has returned, on the CPU.  samples: how many rows there are to be; None for sums"""
    given = dict(returned) if isinstance(returned, Mapping) else {_ALONE: returned}
    named: dict[str, Any] = {}
    for name, x in given.items():
        fields = getattr(x, "_asdict", None)
        named |= {name: x} if fields is None else {f"{name}.{field}": part for field, part in fields().items()}
    for x in named.values():
        if not isinstance(x, Tensor) or (samples is not None and x.shape[:1] != (samples,)):
            rows = "sums" if samples is None else f"{samples} rows, one for each sample"
            raise ValueError(
                f"over: verb returned {kind_of(x)}; expected {rows}, in a tensor or a dictionary of tensors" + ON_DATA_SETS
            )
    return {name: x.detach().cpu() for name, x in named.items()}


def _look_of(model: nn.Module) -> object:
    """What changes where a model's numbers do, also where they are written to by ``.data``, of which torch doesn't hear."""
    parts = [part_of(x).detach() for x in (*model.parameters(), *model.buffers())]
    by_device: dict[torch.device, list[Tensor]] = {}
    for x in parts:
        if x.layout == torch.strided and not x.is_meta:
            real = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
            if real.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                sizes = torch.linalg.vector_norm(real, dtype=torch.float64), real.sum(dtype=torch.float64)
                by_device.setdefault(x.device, []).extend(sizes)
    places = [(x.data_ptr() if x.layout == torch.strided else 0, version_of(x)) for x in parts]
    return [torch.stack(x).tolist() for x in by_device.values()], places, [p.requires_grad for p in model.parameters()]


def _of_process(out: str | os.PathLike[str]) -> str:
    path, rank = os.fspath(out), torch.distributed.get_rank() if has_processes() else 0
    if has_processes() and "{rank}" not in path and torch.distributed.get_world_size() > 1:
        raise ValueError(
            f"out is {path!r} on each of several processes; expected a name with {{rank}} in it: rows-{{rank}}.npy"
            + ON_DATA_SETS
        )
    return path.replace("{rank}", str(rank))


# Weights of training, to which a model is brought one after the other.

_EXPECTED = "expected [(state, weight), ...], of state dictionaries, or their files, and numbers"


def _load(model: nn.Module, state: State) -> None:
    """Brings the model to a checkpoint."""
    loaded: Any = state
    if isinstance(state, str | os.PathLike):
        loaded = torch.load(state, map_location="cpu", weights_only=True)
    if not isinstance(loaded, Mapping) or model.state_dict().keys().isdisjoint(loaded):
        what = list(loaded)[:5] if isinstance(loaded, Mapping) else kind_of(loaded)
        raise ValueError(
            f"over was given {'a checkpoint' if isinstance(state, Mapping) else state} with {what}; expected the "
            f"state dictionary of this {type(model).__name__}: torch.load(path)['model'] say, where more was saved "
            "with it" + ON_DATA_SETS
        )
    model.load_state_dict(loaded)


def _cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in state.items()}


def _listed(model: nn.Module, checkpoints: Checkpoints | None) -> list[tuple[State, float]] | None:
    """The checkpoints as a list, in which none is overwritten as others are loaded.  Raises ValueError for other things."""
    if checkpoints is None:
        return None
    if isinstance(checkpoints, Mapping | str) or not isinstance(checkpoints, Iterable):
        raise ValueError(f"over was given checkpoints={kind_of(checkpoints)}; {_EXPECTED}" + ON_DATA_SETS)
    states = list(checkpoints)
    if not states:
        raise ValueError(f"over was given no checkpoints in its list; {_EXPECTED}" + ON_DATA_SETS)
    trained, live = {_memory_of(p) for p in model.parameters() if p.requires_grad}, 0
    memory = trained | {_memory_of(x) for x in (*model.parameters(), *model.buffers())}
    for number, pair in enumerate(states):
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], Mapping | str | os.PathLike) or isinstance(pair[1], Mapping | str):
            raise ValueError(f"over was given {kind_of(pair)} for a checkpoint; {_EXPECTED}" + ON_DATA_SETS)
        state, weight = pair
        if isinstance(state, Mapping):
            places = {_memory_of(x) for x in state.values() if isinstance(x, Tensor)}
            live += not places.isdisjoint(trained)
            states[number] = state if places.isdisjoint(memory) else _cloned(state), weight
    if live > 1:
        raise ValueError(
            f"{live} of the checkpoints given to over are the model's weights of now: model.state_dict() holds no copies, "
            "and training overwrites what it returned before. Save copies, copy.deepcopy(model.state_dict())" + ON_DATA_SETS
        )
    return states


def _memory_of(x: Tensor) -> object:
    part = part_of(x)
    return part.untyped_storage().data_ptr() if part.layout == torch.strided and part.numel() else object()


# Rows that outlive what they were made of.


def _copied(grads: PerSampleGrads) -> PerSampleGrads:
    """The same rows in memory of their own: products as copies of their factors, all others written out."""
    every = torch.arange(grads.samples, device="cpu")  # to take rows by their numbers copies them
    with grads.reading():
        forms = {n: form[every.to(form.like.device)] if _stays(form) else Dense(form.dense()) for n, form in grads.items()}
        made = grads.with_forms(forms, grads.samples)
    made._versions = made._versions[len(grads._versions) :]
    return made


def _size_copied(grads: PerSampleGrads) -> int:
    """How many bytes `_copied` takes."""
    return sum(
        sum(x.nbytes for leaf in form.leaves() for x in leaf.held) if _stays(form) else written_bytes(form)
        for form in grads.values()
    )


def _stays(form: Form) -> bool:
    """Whether a form is cheap as it is."""
    return all(isinstance(leaf, Outer | Lookup) for leaf in form.leaves())
