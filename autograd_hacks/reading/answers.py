"""What Python reads of a batch's values, such as ``mask.all()``, and whether outputs follow it.

What follows in Python is on no tape: another answer may lead to other operations, and another batch may give it.  So the
operations that make the answers run once more on other samples of the batch, alone.  Where these change an answer, copies of
the model run.  Another run answers as batches may that have not come yet: not all are, one is, one is more, another is the
largest.  Where outputs of kept samples stay in both, forwards of the same operations and answers need no runs."""

from collections.abc import Callable, Collection, Sequence
from operator import gt, lt
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autograd_hacks.capture.ran import Ran
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.errors import ProbeFailed
from autograd_hacks.probe.tape import NAMED, READ_BY_PYTHON, Site, Tape, numbers_of, place
from autograd_hacks.reading.replaced import Arguments, Runs, Seen
from autograd_hacks.support.internals import tree_leaves
from autograd_hacks.support.trees import is_packed

MOST = 2048
"""For how many operations it is tried if single samples change answers."""
_OTHERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("all", "equal", "allclose"), lambda _: False), "any": lambda _: True,
    **dict.fromkeys(("max", "amax", "sum"), lambda x: x + 1),
    **dict.fromkeys(("min", "amin"), lambda x: x - 1),
    **dict.fromkeys(("argmax", "argmin"), lambda x: int(x == 0)),
}  # fmt: skip
"""By the operation that made it: another answer, whatever the samples are, if one more is there."""


def changing(recorder: Recorder, ran: Ran, samples: int) -> list[Tensor] | None:
    """The samples that runs must keep so that Python reads something else; none if outputs were compared with those of other
    answers before, or no samples of this batch give others.  None if the tape alone doesn't say it."""
    tape, within = recorder.tape, ran.within
    if tape is None or ran.known is None or within.counted_at is not None or recorder.kinds.replace is not None:
        return None
    batch, reads, found = ran.known.batch, tape.reads(), list[Tensor]()
    alike, told, now = within.kind.tapes.like(tape, tape.answers()), set[Site](), [*tape.answers().values()]
    while not told.issuperset(reads.values()) and (own := next(alike, None)) is not None:
        told |= own.told
    tape.told = told
    if told.issuperset(reads.values()) or not (part := _makers(tape, reads)):
        return [] if told.issuperset(reads.values()) else None

    def others(kept: Tensor) -> list[Any]:
        given = batch.replaced(within.axis, kept, len(found) + 1) if kept.any() else None
        return now if given is None else _answers(tape, part, tree_leaves(given, is_packed))

    try:
        half, single = torch.arange(samples, device="cpu") % 2 == 0, torch.eye(samples, dtype=torch.bool, device="cpu")
        alone = [*map(others, single)] if len(part) * samples <= MOST else [now] * samples
        more, less = (torch.tensor([compare(own, now) for own in alone], device="cpu") for compare in (gt, lt))
        for kept in (half, ~half, more, less, *single[more | less][:1]):
            sites = {site for site, x, y in zip(reads.values(), now, others(kept)) if x != y}
            if sites and not (found and kept.sum() == 1):
                found.append(kept)
                told |= sites
        return found if _answers(tape, part, batch.leaves) == now else None
    except Exception:  # of an operation that doesn't run alone, or of arguments that can't be replaced
        return None


def _makers(tape: Tape, reads: Collection[int]) -> list[int]:
    """The numbers of the operations that alone make the answers; none if they draw, or their memory is written."""
    found, wanted, end = set(reads), set[int](), max(reads) + 1
    for k in reversed(range(end)):
        if k in found or not wanted.isdisjoint(n for n, *_ in tape.entries[k].outputs):
            found.add(k)
            wanted.update(numbers_of(tape.entries[k]))
    for entry in tape.entries[:end]:
        if not wanted.isdisjoint(numbers_of(entry)):
            if entry.func._schema.is_mutable:
                return []
            wanted.update(n for n, *_ in entry.outputs if entry.func.is_view)
    return [] if any(torch.Tag.nondeterministic_seeded in tape.entries[k].func.tags for k in found) else sorted(found)


def _answers(tape: Tape, part: Sequence[int], leaves: Sequence[Any]) -> list[Any]:
    """What Python would read of other arguments.  part: see `_makers`"""
    known, found = {n: leaves[k] for n, k in tape.arguments.items()} | tape.values, list[Any]()
    known |= {
        n: tape.model.get_parameter(str(s.name)) for n, s in tape.sources.items() if s.kind == NAMED and n not in known
    }

    def given(x: Any) -> Any:
        return known[x[0]] if type(x) is tuple else [*map(given, x)] if type(x) is list else x

    with torch.no_grad():
        for k in part:
            func, args, kwargs, outputs = tape.entries[k]
            out = func(*map(given, args), **{name: given(x) for name, x in kwargs or ()})
            known.update((n, x) for (n, *_), x in zip(outputs, out if type(out) in (tuple, list) else [out]))
            found += [] if outputs else [out]
    return found


class _Otherwise(TorchDispatchMode):
    """Python reads other answers at some places."""

    _should_skip_dynamo = classmethod(lambda cls: False)

    def __init__(self, sites: Collection[Site]) -> None:
        super().__init__()
        self.sites, self.answered, self.made = sites, dict[Site, Any](), list[tuple[Tensor, Any]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, own = func(*args, **kwargs or {}), _OTHERS.get(func.overloadpacket.__name__)
        if isinstance(out, Tensor):
            self.made += [(out, own)] if own is not None and out.numel() == 1 else []
        elif type(out) in (bool, int) and (site := (READ_BY_PYTHON, place())) in self.sites:
            others = [own] if own is not None else [other for x, other in self.made if x is args[0]]
            self.answered.update((site, other(out)) for other in others if other(out) != out)
            return self.answered.get(site, out)
        return out


def following(runs: Runs, arguments: Arguments, reference: Seen, tape: Tape) -> tuple[str, tuple[int, ...]]:
    """What changes as Python reads other answers, as text for messages, or "", and in which outputs."""
    what, slots, mode = "", tuple[int, ...](), _Otherwise(set(tape.reads().values()) - tape.told)
    try:
        seen = runs.run(arguments, with_rows=False, around=mode)
    except ProbeFailed:  # then there is no step
        tape.told |= {site for site, x in mode.answered.items() if type(x) is bool}
    else:
        tape.told |= mode.answered.keys()
        every = torch.ones(runs.samples, dtype=torch.bool, device="cpu")
        what, slots = runs.differing(reference, seen, every, rounds=True) if mode.answered else ("", ())
    return what and f"{what} changed as Python read another answer, which another sample may give.", slots
