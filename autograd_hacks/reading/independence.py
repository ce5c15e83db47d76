"""Checks that a model's outputs for a sample don't depend on the values of other samples.

The operations of each forward are compared with those of forwards whose samples were shown to be independent.  For other
operations laws show it.  If that is not possible, copies of the model run with other samples replaced.  If the model
computes a loss itself, the rows are compared too."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from time import perf_counter
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.above import ABOVE
from autograd_hacks.capture.gradient_hooks import named
from autograd_hacks.capture.kinds import Kind, Unknown, Within
from autograd_hacks.capture.ran import Ran
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.wrappers import has_processes
from autograd_hacks.errors import ON_PRIVATE, ProbeFailed
from autograd_hacks.graph.dependence import is_kept, read_values
from autograd_hacks.graph.label import MIXED
from autograd_hacks.graph.laws import kind_of
from autograd_hacks.graph.places import NUMBER, is_ragged, look_like_sizes, numbers
from autograd_hacks.graph.roots import label_of
from autograd_hacks.graph.tape_laws import REGISTERED, Unshown, operation
from autograd_hacks.probe.batch import Batch, kept_samples
from autograd_hacks.probe.tape import MIXING, READ_BY_PYTHON, SEEDED, Site, Tape, numbers_in, numbers_of
from autograd_hacks.reading.answers import changing, following
from autograd_hacks.reading.replaced import Arguments, Runs, Seen, alone_among
from autograd_hacks.support.copies import Copy
from autograd_hacks.support.graph import Leaf, is_recomputed, is_users
from autograd_hacks.support.internals import made
from autograd_hacks.support.layout import differs, likeliest
from autograd_hacks.support.sweep import call_node
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import is_packed

BY_LABELS, BY_VALUES, BY_RUNS = "for all values", "for its indices and masks", "in runs with other samples"
"""How samples of a forward were shown to be independent."""
OF_FUNCTIONS, OF_HOOKS = "a backward of its own", "a hook on gradients"
"""Kinds of what runs in a backward pass, and is on no tape."""
DIVIDED = (
    f"{MIXING}: the model divides its loss by how many of the batch's tokens count, which depends on all samples. Return "
    "outputs, or a loss for each sample, and call backward(losses)."
)


def is_shown(recorder: Recorder, ran: Ran) -> bool:
    """Whether it is known if samples of a finished forward are independent, by its tape.  Else copies must run, before the
    forward's gradients are read."""
    tape, within, kind, samples = recorder.tape, ran.within, ran.within.kind, ran.within.samples
    if not samples or (samples == 1 and ran.known is None):
        return True
    if tape is not None and tape.refused is not None:
        raise tape.refused
    if kind.dependent is not None and (tape is None or kind.tapes.mixing != tape.entries):
        within.mixing, within.mixed_outputs, kind.dependent = "", (), None  # another tape may tell another tale
    if samples == 1 and tape is not None and not kind.tapes.how(tape):
        _check_opaque(tape)
        if names := _kept(recorder, tape, ran):
            what = f"the forward writes what depends on a sample, or may, to {', '.join(names)}, which the next forward has."
            _note_mixing(within, what, range(ran.count))
    if samples == 1 or within.mixing:
        kind.is_independent = not within.mixing
        kind.tapes.mixing = tape.entries if tape is not None and samples > 1 else None
        return True
    if tape is None:
        return not kind.pending
    kind.shown, kind.tapes.mixing = "", None
    _note_backwards(tape, ran)
    if _is_divided(tape, ran):
        within.mixing, within.mixed_outputs = DIVIDED, tuple(range(ran.count))  # of this batch, not of this kind of forward
        return True
    if kind.is_independent and (how := kind.tapes.how(tape)) and not changing(recorder, ran, samples):
        kind.shown = how
        return True
    _check_opaque(tape)
    tape.is_to_count = _is_to_count(recorder, tape, ran)
    return _is_by_tape(recorder, ran, samples) and not tape.is_to_count


def _kept(recorder: Recorder, tape: Tape, ran: Ran) -> list[str]:
    """The parameters, buffers and attributes in which a forward of one sample may leave something of it for the next one."""
    assert ran.known is not None
    assert recorder.marks is not None
    # Operations on lists of tensors return none, and count no version.
    on_lists = (entry for entry in tape.entries if entry.func._schema.is_mutable and not entry.outputs)
    same = {None, *tape.sources}.difference(n for entry in on_lists for n in numbers_of(entry))
    for entry in tape.entries:  # a view of a whole tensor has its memory, shape and strides
        if entry.func.is_view and same.issuperset(numbers_of(entry)):
            same.update(n for n, *_ in entry.outputs)
    written = recorder.marks.written(tape.model, lambda x: tape.number(x) not in same)
    found = [name for name in written if name not in recorder.record.gathered]  # shards are replaced while layers run
    if not found or not is_kept(tape, ran.known.batch.axes_of_samples(ran.within.axis, 1)):
        ran.within.kind.tapes.add(tape, (), BY_LABELS, 1)
        return []
    return found


def _is_to_count(recorder: Recorder, tape: Tape, ran: Ran) -> bool:
    """Whether it must be tried if a forward does something else for another number of samples."""
    within, batch, samples = ran.within, ran.known.batch if ran.known else None, ran.within.samples or 0
    is_odd = batch is None or batch.has_lists(samples) or any(map(is_packed, batch.leaves))
    if is_odd or recorder.kinds.replace is not None or within.counted_at is not None or _losses(ran):
        return False
    free = (
        own
        for own in tape.entries
        if torch.Tag.nondeterministic_seeded in own.func.tags and (SEEDED, True) not in (own.kwargs or ())
    )
    is_odd = any(not kind.is_floating_point for entry in free for *_, kind in entry.outputs)  # they are others then
    return not is_odd and not any(within.kind.tapes.like(tape))


def _count(recorder: Recorder, copy: Copy, batch: Batch, ran: Ran, tape: Tape, samples: int) -> None:
    """Notes if outputs are others at other places in a batch of another size: the last one, or half of the samples.

    Other sizes may have other kernels, so differences that rounding may leave are none."""
    within = ran.within
    count = within.kind.tapes.other_than(samples)
    donors = _moved(samples).repeat(count // samples + 1)[:count]
    try:
        given = batch.replaced(within.axis, torch.ones(samples, dtype=torch.bool, device="cpu"), donors=donors)
        first, other = _both(recorder, copy, within, samples, (batch.arguments(), given or batch.arguments()))
    except ProbeFailed:  # the model takes batches of this size only
        return
    eps = max(first.eps, other.eps)
    is_told = False  # equal samples, such as zeros, may look the same at all places
    for slot, (x, y) in enumerate(zip(first.outputs, other.outputs)):
        at = dict(enumerate(within.outputs)).get(slot) or likeliest(x.shape, samples, range(x.ndim))
        if at is not None and at.fits(y, count):
            is_told |= bool((at.samples_first(x, samples) != at.samples_first(x, samples)[:1]).any())
            x, y = at.samples_first(x, samples)[donors.to(x.device)], at.samples_first(y, count)
            most = (x if x.is_complex() else x.float()).abs().nan_to_num(posinf=0).amax(0, keepdim=True)
            slack = most * (0.1 if x.is_cuda and eps > 1e-10 else min(1e4 * eps, 0.1))  # TF32
            if x.shape != y.shape or differs(x, y, slack).any():
                what = f"the model's output number {slot} changed for samples at other places in a batch of {count}"
                _note_mixing(within, f"{what} instead of {samples} samples. A drawn batch's size is private, too.", [slot])
                break
    if within.mixing or not is_told:
        within.kind.tapes.forget(tape)


def _both(recorder: Recorder, copy: Copy, within: Within, samples: int, both: Sequence[Arguments]) -> list[Seen]:
    """Runs with batches of two sizes, in double precision where the model computes in it: other kernels round otherwise."""
    runs = Runs(recorder, within, copy, samples, False, are_parts=True, is_precise=True)
    try:
        return [runs.run(own, with_rows=False) for own in both]
    except Exception:  # not all models compute in it, or have the memory
        runs.is_precise = False
        return [runs.run(own, with_rows=False) for own in both]


def _moved(samples: int) -> Tensor:
    """Samples for the places of a batch: by odd and even numbers of places from either end."""
    if samples < 5:
        return torch.tensor([[0], [1, 0], [2, 0, 1], [2, 0, 1, 3]][samples - 1], device="cpu")
    return torch.randperm(samples, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


def _is_by_tape(recorder: Recorder, ran: Ran, samples: int) -> bool:
    """Whether laws show it, from the operations on the tape."""
    tape, within, tapes = recorder.tape, ran.within, ran.within.kind.tapes
    if tape is None or ran.known is None or ran.known.batch.has_lists(samples) or _losses(ran):
        return False
    is_packed = within.counted_at is not None
    sites = _sites(tape, is_packed)
    unknown = (sites - tapes.sites) | {*tape.reads().values()} | tape.untold  # what Python reads may decide what comes later
    if is_packed and not tapes and not look_like_sizes(numbers(tape), tape.sizes()):
        unknown -= numbers(tape)  # later forwards have other sizes, and must have these numbers
    axes = None if is_packed else ran.known.batch.axes_of_samples(within.axis, samples)
    places = zip_longest(ran.outputs[: ran.count], within.outputs[: ran.count])
    roots = [(x, at or likeliest(x.shape, samples, range(x.ndim))) for x, at in places]
    labels = [(x, MIXED if at is None else label_of(at, x.shape, samples)) for x, at in roots]
    try:
        read = read_values(tape, axes, samples, labels, _packed(recorder, within))
    except Unshown as why:
        within.unknown = Unknown(str(why), why.at, why.meet)
        return False
    if (answers := tape.answers()) and all(site[0] == READ_BY_PYTHON for site in unknown):
        tape.tried = changing(recorder, ran, samples)
        unknown = unknown if tape.tried != [] or not any(tapes.like(tape, answers)) else set()
    if unknown:
        within.unknown = Unknown(_said(min(unknown, key=str)), sites=unknown)
        return False
    tapes.sites |= sites
    within.unknown, within.kind.shown, within.kind.is_independent = (
        Unknown(),
        BY_RUNS if answers else BY_VALUES if read or is_packed else BY_LABELS,
        True,
    )
    tapes.add(tape, read, within.kind.shown, samples)
    return True


def _packed(recorder: Recorder, within: Within) -> dict[int, frozenset[int]]:
    """By argument, the axes along which samples were packed in this kind of forward.

    If it is new, as with a single entry, other kinds with the same arguments say it.
    """
    kinds: Mapping[Any, Kind] = recorder.kinds.seen
    tapes, arguments = within.kind.tapes, {kind.tapes: (path, tree) for (path, (tree, *_), *_), kind in kinds.items()}
    for other, own in arguments.items():
        if own == arguments.get(tapes):
            tapes.packed = other.packed | tapes.packed
    return tapes.packed


def _sites(tape: Tape, is_packed: bool) -> set[Site]:
    """What no law shows: values that Python reads, functions whose backward isn't on the tape, and sizes as numbers."""
    return tape.sites | (numbers(tape) if is_packed or is_ragged(tape) else set())


def _note_backwards(own: Tape, ran: Ran) -> None:
    """Notes what a pass will run that is not on the tape: hooks of this forward, and functions' backwards, each with the
    operations that it would run now.  What can't be called alone is compared in each forward."""
    own.sites |= {(OF_HOOKS, named(hooks_of[key])) for hooks_of, key in ran.users_hooks if key in hooks_of}
    for node in filter(is_users, ran.trace.nodes):
        tape, is_told = Tape(own.model, ()), not is_recomputed(node)
        if is_told:
            ones = [torch.ones(x.shape, dtype=x.dtype, device=x.device) for x in made(node)]
            with torch.no_grad(), Switch.paused_here(), torch.random.fork_rng():
                tape.start()
                try:
                    call_node(node, ones)
                except Exception:  # a user's backward may raise anything outside of a pass: then nothing is told
                    is_told = False
                finally:
                    tape.stop()
        steps = str([(entry.func, entry.args, entry.kwargs) for entry in tape.entries])
        (own.sites if is_told else own.untold).add((OF_FUNCTIONS, type(node), steps))


def _said(site: Site) -> str:
    at = ":".join(map(str, site[1])) if isinstance(site[1], tuple) else getattr(site[1], "__name__", site[1])
    return f"nothing shows what follows from {site[0]} ({at})"


def _losses(ran: Ran) -> list[torch.Tensor]:
    """The losses that the model makes itself."""
    pairs = zip(ran.outputs, ran.within.outputs)
    return [x for x, at in pairs if at is None and x.numel() == 1 and x.grad_fn is not None]


def _is_divided(tape: Tape, ran: Ran) -> bool:
    """Whether a loss that the model makes is divided by a number of the batch's tokens that isn't that of all tokens."""
    entries, waiting = tape.entries, [tape.number(x) for x in _losses(ran)]
    made = {n: k for k, entry in enumerate(entries) for n, *_ in entry.outputs} if waiting else {}
    shapes = {n: x.shape for n, x in tape.sources.items()} | {n: entries[k].outputs[0][1] for n, k in made.items()}
    while waiting:
        k = made.get(waiting.pop() or 0, -1)
        if k < 0 or entries[k].outputs[0][1].numel() > 1:
            continue
        given, divisor = numbers_of(entries[k]), tape.items.get(k)
        waiting += given if divisor is None else given[:1]
        if divisor is None or ((is_of_targets := len(entries[k].outputs) > 1) and entries[k].args[3] != 1):
            continue
        of, is_counted = given[1], is_of_targets
        while not is_counted and of in made:
            is_counted, of = operation(entries[made[of]].func).name == "sum", next(numbers_in(entries[made[of]].args))
        size = shapes[of].numel()
        if divisor != size if is_counted else size > 1 and of in tape.reached():
            return True
    return False


def show_independent(recorder: Recorder, model: nn.Module, ran: Ran) -> None:
    """Runs copies to see whether outputs, and changed buffers, are independent of other samples.

    Raises ProbeFailed if the model can't be copied, or the copy can't run.
    """
    within, tapes, tape, samples = ran.within, ran.within.kind.tapes, recorder.tape, ran.within.samples or 0
    assert ran.known is not None
    batch = ran.known.batch
    copy = ran.known.copy or Copy(model, batch.leaves, recorder.marks)  # as the forward began
    batch = replace(batch, leaves=copy.given)  # the forward may have overwritten its own
    if not within.kind.shown:
        _show(recorder, copy, batch, ran, samples)
    if tape is not None and tape.is_to_count and not within.mixing:
        _count(recorder, copy, batch, ran, tape, samples)
    tapes.mixing = tape.entries if tape is not None and within.mixing else None


def _show(recorder: Recorder, copy: Copy, batch: Batch, ran: Ran, samples: int) -> None:
    within, kind, tape = ran.within, ran.within.kind, recorder.tape
    every, with_rows = _runs_for({site[0] for site in within.unknown.sites}, samples, None if tape is None else tape.tried)
    is_new = tape is not None and (tape.tried is None or not any(kind.tapes.like(tape, tape.answers())))
    if tape is not None and is_new and not has_processes():
        _check_repeats(tape, copy, batch, within, len(every) + 1 + 3 * with_rows)
    unknown = within.unknown
    is_met = unknown.meets and recorder.kinds.replace is None and within.counted_at is None  # else the way out is replace=
    if is_met or not recorder.kinds.mixing_sites.isdisjoint(unknown.sites):  # runs may miss it by luck
        how = "" if is_met else ", after which samples mixed in an earlier forward"
        _note_mixing(within, f"by the laws of operations {unknown.why}{how}.", range(ran.count))
        return
    if not _changes_something(recorder, copy, batch, ran, every, with_rows) and within.counted_at is not None:
        raise ProbeFailed(
            "independence of samples: the samples are packed along the model's arguments, and laws don't show that they are "
            f"independent: {unknown.why}. Give replace=, a function of the samples to be kept and of the model's "
            "arguments that returns the arguments for these samples alone, such as your collate function once more. The "
            "model's outputs are then compared." + ON_PRIVATE
        )
    if tape is not None and kind.is_independent:
        kind.tapes.sites |= _sites(tape, within.counted_at is not None)
        for x in tape.outside:
            kind.tapes.constants[x] = True
        tape.placed |= set() if unknown.sites else tape.values.keys()  # no law has said which they are
        # Wrappers give the memory of parts back when the forward has ended.
        kind.tapes.add(tape, () if has_processes() else tape.values, BY_RUNS, samples)
        kind.shown = BY_RUNS


def _runs_for(kinds: set[str], samples: int, tried: list[torch.Tensor] | None) -> tuple[list[torch.Tensor], int]:
    """Which samples each run keeps, and in how many of the runs rows are compared, which take a backward pass.

    kinds: of what no law shows, where laws show all else    tried: see `Tape`"""
    every = kept_samples(samples, torch.Generator().manual_seed(samples))
    if not kinds.isdisjoint({OF_FUNCTIONS, OF_HOOKS}):  # they change gradients
        return every, len(every)
    # If all follows from values that Python reads, gradients are apart, and two runs change these.
    half = torch.arange(samples, device="cpu") % 2 == 0
    every = ([half, ~half] if tried is None else tried) if kinds == {READ_BY_PYTHON} else every
    return every, 0 if kinds and kinds <= {READ_BY_PYTHON, NUMBER} else 2


def _changes_something(
    recorder: Recorder, copy: Copy, batch: Batch, ran: Ran, every: Sequence[torch.Tensor], with_rows: int
) -> bool:
    """Runs the copy with samples replaced, and notes what that shows.  Returns whether any run had other arguments.

    every, with_rows: see `_runs_for`"""
    within, kind, samples = ran.within, ran.within.kind, ran.within.samples or 0
    makes_loss, parts = bool(_losses(ran)), recorder.kinds.replace
    runs, arguments = Runs(recorder, within, copy, samples, makes_loss, parts is not None), batch.arguments()
    reference = runs.run(arguments, with_rows=makes_loss or with_rows > 0)
    # Rows that are moved by values pass through kernels together with other rows, which may change their rounding.
    by_values = (type(node) is not Leaf and kind_of(node).by_values for node in ran.trace.nodes)
    is_read = recorder.tape is not None and recorder.tape.tried is not None  # other answers may choose other kernels
    has_changed, rounds = not every, parts is not None or is_read or any(by_values)
    is_list = within.counted_at is not None
    for turn, kept in enumerate(every, 1):
        given = batch.replaced(within.axis, kept, turn, is_list) if parts is None else alone_among(parts, kept, arguments)
        if given is None:
            continue
        has_changed = True
        seen = runs.run(given, makes_loss or turn <= with_rows, None if parts is None else kept)
        what, slots = runs.differing(reference, seen, kept, rounds)
        if what and not rounds and not runs.differing(reference, seen, kept, rounds=True)[0]:
            again = runs.run(arguments, with_rows=False)  # it gives the same bits, unless kernels add in any order
            rounds = bool(runs.differing(reference, again, torch.ones_like(kept), rounds)[0])
            what = "" if rounds else what
        if what:
            recorder.kinds.mixing_sites |= set(within.unknown.sites)
            others = "replaced" if parts is None else "left out"
            unshown = f" By the laws of operations {why}." if (why := within.unknown.why) else ""
            _note_mixing(within, f"{what} changed for samples that were kept while others were {others}.{unshown}", slots)
            return True
    if (tape := recorder.tape) is not None and tape.tried is not None:
        what, slots = following(runs, arguments, reference, tape)
        if what:
            _note_mixing(within, what, slots)
    # If all samples are equal, replacing them shows nothing.
    kind.is_independent |= has_changed and not within.mixing
    return has_changed


def _note_mixing(within: Within, what: str, slots: Sequence[int]) -> None:
    """what: shows it, for messages    slots: the outputs in which samples mix"""
    within.mixing, within.mixed_outputs = within.kind.dependent = (
        f"{MIXING}: {what} There is no gradient between them, but private training needs samples that don't depend on each "
        "other.", tuple(slots)
    )  # fmt: skip
    within.kind.is_independent = False


def _check_opaque(tape: Tape) -> None:
    """Raises ProbeFailed if other packages' operations without a rule work on what depends on the forward's arguments."""
    unknown = [(entry, at) for entry, at in tape.opaque if entry.func._schema.name not in REGISTERED]
    reached = tape.reached() if unknown else set[int]()
    for entry, (file, line) in unknown:
        if not reached.isdisjoint(numbers_of(entry)):
            name = entry.func._schema.name
            raise ProbeFailed(
                f"independence of samples: the forward runs {name}, at {file}:{line}. What it computes can't be followed, "
                "so nothing shows in which step it begins to mix samples. Say where its result has the samples: "
                f"autograd_hacks.compiled.register_operation({name!r})." + ON_PRIVATE
            )


def _check_repeats(tape: Tape, copy: Copy, batch: Batch, within: Within, runs: int) -> None:
    """Raises ProbeFailed if the model runs other operations when it runs again, so that this would show nothing.

    runs: how many are to come; if they take long, it says so
    """
    own = copy.again(batch.leaves)
    model = own.model
    with ABOVE.alone(model), own.running(), Switch.paused_here():
        args, kwargs = replace(batch, leaves=own.given).arguments()
        again = Tape(model, own.given)
        again.lines, begin = [], perf_counter()
        again.start()
        try:
            with torch.enable_grad():
                model(*args, **kwargs)
        finally:
            again.stop()
    seconds = perf_counter() - begin
    # The check keeps no casts of weights, so that each use has its own.
    is_cached = torch.is_autocast_cache_enabled() and torch.is_autocast_enabled("cpu")
    # An array may share the memory of a tensor, and its copy does not.
    if not tape.repeats(again, is_cached or any(hasattr(leaf, "__array_interface__") for leaf in batch.leaves)):
        raise ProbeFailed(
            "independence of samples: this forward ran operations that are new, and other ones when it was repeated for the "
            "check. What a forward computes must follow from its arguments, the modules' attributes and the random "
            "numbers of torch and Python. Set flags and counters as attributes of the model, outside of its forward."
        )
    unknown = within.unknown
    if unknown.at is not None and again.lines:
        within.unknown = unknown = unknown._replace(why=unknown.why + " ({}:{})".format(*again.lines[unknown.at]))
    if seconds * runs > 1:
        print(
            f"autograd_hacks: checking that samples are independent in {type(model).__name__}, by runs with other samples "
            f"replaced: about {seconds * runs:.0f} s. Laws of operations don't show it, because {unknown.why}",
            file=sys.stderr,
        )


ABOVE.show = show_independent
