"""Checks that a model's outputs for a sample don't depend on the values of other samples.

The operations of each forward are compared with those of forwards whose samples were shown to be independent.  For other
operations labels show it, or a trace of the model.  If that is not possible, copies of the
model run with other samples replaced.  If the model computes a loss itself, the rows are compared too."""

import sys
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.above import ABOVE
from autograd_hacks.capture.hooks import hooked_copy
from autograd_hacks.capture.kinds import Told
from autograd_hacks.capture.ran import Ran
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.distributed.shards import alone
from autograd_hacks.errors import PerSampleGradientError, ProbeFailed
from autograd_hacks.graph.laws import kind_of
from autograd_hacks.probe.batch import Batch, kept_samples
from autograd_hacks.probe.tape import MIXING, Constants, Tape
from autograd_hacks.reading.gate import read
from autograd_hacks.support.copies import Copy
from autograd_hacks.support.graph import Leaf, is_users
from autograd_hacks.support.internals import COMPILER
from autograd_hacks.support.layout import Layout, differs, likeliest, rounding_of
from autograd_hacks.support.parts import is_part
from autograd_hacks.support.philox import key_of, noise
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import tensors_of

TRACED, IMPORTED = 0.008, 2.0
"""About how many seconds a trace takes for each operation, and the import of torch's compiler."""


class _Seen(NamedTuple):
    """The results of one run."""

    outputs: list[Tensor]
    buffers: dict[str, Tensor]
    rows: dict[str, Tensor]  # by parameter, its rows along a random direction, N, if they were read


def is_shown(recorder: Recorder, ran: Ran, told: Told, samples: int | None) -> bool:
    """Whether samples of a finished forward are known to be independent, from its tape.

    A tape that is new needs a check, before the forward's gradients are read.  True if nothing asks
    for independence.
    """
    tape = recorder.tape
    if tape is None or not samples or samples < 2 or not recorder.kinds.independent:
        return True
    if tape.refused is not None:
        raise tape.refused
    if told.mixing:
        return bool(told.kind.tapes.mixing == tape.entries)
    return tape in told.kind.tapes or _is_by_tape(recorder, ran, told, samples)


def _is_by_tape(recorder: Recorder, ran: Ran, told: Told, samples: int) -> bool:
    """Whether the tape shows it: by the labels of its operations, or because it differs from a known one in sizes only."""
    tape, batch, tapes = recorder.tape, recorder.batch, told.kind.tapes
    if tape is None or batch is None or told.counted_at is not None or batch.has_lists(samples) or _losses(ran, told):
        return False
    if not (tape.sites | _functions(ran)) <= tapes.sites:
        return False
    axes = batch.axes_of_samples(told.axis, samples)
    why_not = ABOVE.why_not_by_tape(tape, axes, samples, ran.outputs[: ran.count])
    if why_not and not tapes.has_alike(tape):
        return False
    tapes.add(tape, for_all_values=True)
    return True


def _functions(ran: Ran) -> set[Hashable]:
    """The functions in a forward's graph whose backward isn't on the tape."""
    return {("a backward of its own", type(node)) for node in ran.trace.nodes if is_users(node)}


def _losses(ran: Ran, told: Told) -> bool:
    """Whether the model makes a loss itself."""
    return any(at is None and x.numel() == 1 and x.grad_fn is not None for x, at in zip(ran.outputs, told.outputs))


def show_independent(
    recorder: Recorder, model: nn.Module, copy: Copy | None, batch: Batch, ran: Ran, told: Told, samples: int
) -> None:
    """Records whether outputs, and changed buffers, are independent of other samples.

    copy: of the model as the forward began; None if a check was not known to be due then

    Raises ProbeFailed if the model can't be copied, or the copy can't run.
    """
    kind = told.kind
    if kind.dependent is not None:  # another tape may tell another tale
        told.mixing, told.mixed_outputs, kind.dependent = "", (), None
    tape = recorder.tape
    if tape is not None and tape.refused is not None:
        raise tape.refused
    if tape is not None and tape.opaque:
        ABOVE.check_opaque(tape)
    if samples < 2 or told.mixing:
        kind.is_independent = not told.mixing
    elif tape is None or not (kind.is_independent and tape in kind.tapes):
        copy = copy or Copy(model, batch.leaves, recorder.marks)
        _show(recorder, copy, replace(batch, leaves=copy.given), ran, told, samples)
    if tape is None or samples < 2:
        return
    kind.tapes.mixing = tape.entries if told.mixing else None
    if kind.is_independent and not told.mixing and tape not in kind.tapes:
        kind.tapes.sites |= tape.sites | _functions(ran)
        kind.tapes.constants.add(tape.outside)
        kind.tapes.add(tape, for_all_values=not kind.why_unshown)


def _show(recorder: Recorder, copy: Copy, batch: Batch, ran: Ran, told: Told, samples: int) -> None:
    """batch: the copied arguments: the forward may have overwritten its own"""
    makes_loss = _losses(ran, told)
    if makes_loss or told.counted_at is not None or batch.has_lists(samples):  # lists' numbers are constants in a trace
        _check_repeats(recorder, copy, batch)
    elif _is_analysed(recorder, copy, batch, ran, told, samples):
        told.kind.is_independent = True
        return
    runs, arguments = _Runs(recorder, told, copy, samples, makes_loss), batch.arguments()
    draws, with_rows = torch.Generator().manual_seed(samples), 2  # rows take a backward pass: compared in two runs
    reference = runs.run(arguments, with_rows=True)
    # Rows that are moved by values pass through kernels together with other rows, which may change their rounding.
    has_changed, rounds = False, any(type(node) is not Leaf and kind_of(node).by_values for node in ran.trace.nodes)
    for turn, kept in enumerate(kept_samples(samples, draws), 1):
        replaced = batch.replaced(told.axis, kept, turn, told.counted_at is not None)
        if replaced is None:
            continue
        has_changed = True
        seen = runs.run(replaced, with_rows=makes_loss or turn <= with_rows)
        what, slots = runs.differing(reference, seen, kept, rounds)
        if what and not rounds and not runs.differing(reference, seen, kept, rounds=True)[0]:
            again = runs.run(arguments, with_rows=False)  # it gives the same bits, unless kernels add in any order
            rounds = bool(runs.differing(reference, again, torch.ones_like(kept), rounds)[0])
            what = "" if rounds else what
        if what:
            why = (
                f"{MIXING}: {what} changed for samples that were kept while others were replaced. There is no gradient "
                "between them, but private training needs samples that don't depend on each other."
            )
            told.kind.dependent, told.kind.is_independent = (why, slots), False
            told.mixing, told.mixed_outputs = told.kind.dependent
            return
    # If all samples are equal, replacing them shows nothing.
    told.kind.is_independent |= has_changed


def _is_analysed(recorder: Recorder, copy: Copy, batch: Batch, ran: Ran, told: Told, samples: int) -> bool:
    """Whether analysis shows it.  With several processes it is not used, because they must decide together."""
    if dist.is_available() and dist.is_initialized():
        return False
    told.kind.why_unshown = ""
    if _is_by_tape(recorder, ran, told, samples):
        return True
    _check_repeats(recorder, copy, batch)
    own = copy.again(batch.leaves)
    with own.running(), Switch.paused_here():
        given = replace(batch, leaves=own.given)
        told.kind.why_unshown = ABOVE.why_unshown(own.model, given, told.axis, samples)
    return not told.kind.why_unshown


def _check_repeats(recorder: Recorder, copy: Copy, batch: Batch) -> None:
    """Raises ProbeFailed if the model runs other operations when it runs again, so that this would show nothing."""
    tape, own = recorder.tape, copy.again(batch.leaves)
    if tape is None:
        return
    model = own.model
    if (seconds := TRACED * len(tape.entries) + (0 if COMPILER in sys.modules else IMPORTED)) > 1:
        print(
            f"autograd_hacks: checking that samples are independent in {type(model).__name__}, in {len(tape.entries)} "
            f"operations that are new. It is traced, or runs again with other samples replaced: about {seconds:.0f} "
            "s, and again for each new sequence of operations that labels alone don't show",
            file=sys.stderr,
        )
    with alone(model), own.running(), Switch.paused_here():
        args, kwargs = replace(batch, leaves=own.given).arguments()
        again = Tape(model, own.given, Constants())
        again.start()
        try:
            with torch.enable_grad():
                model(*args, **kwargs)
        finally:
            again.stop()
    # The check keeps no casts of weights, so that each use has its own.
    is_cached = torch.is_autocast_cache_enabled() and torch.is_autocast_enabled("cpu")
    # An array may share the memory of a tensor, and its copy does not.
    if not tape.repeats(again, is_cached or any(hasattr(leaf, "__array_interface__") for leaf in batch.leaves)):
        raise ProbeFailed(
            "independence of samples: this forward ran operations that are new, and other ones when it was repeated for the "
            "check. What a forward computes must follow from its arguments, the modules' attributes and the random "
            "numbers of torch and Python. Set flags and counters as attributes of the model, outside of its forward."
        )


class _Runs:
    """Runs copies of a model, each once."""

    def __init__(self, recorder: Recorder, told: Told, copy: Copy, samples: int, makes_loss: bool) -> None:
        self.recorder, self.told, self.copy, self.samples = recorder, told, copy, samples
        self.makes_loss = makes_loss

    def run(self, arguments: tuple[tuple[Any, ...], dict[str, Any]], with_rows: bool) -> _Seen:
        own, rows = self.copy.again(arguments), dict[str, Tensor]()
        model = own.model
        with alone(model), own.running():
            for n, p in enumerate(p for p in model.parameters() if p.requires_grad):
                # Zeros hide what is behind them.  Small numbers change as little as possible of what values decide.
                if p.numel() and not is_part(p) and not p.detach().any():
                    p.data = noise(p.shape, key_of(f"zero {n}"), p.device, p.dtype) / 32
            args, kwargs = own.given
            try:
                if with_rows:
                    outputs, rows = self._with_rows(model, args, kwargs)
                else:
                    with torch.enable_grad(), Switch.paused_here():  # the forward may take derivatives itself
                        outputs = tensors_of(model(*args, **kwargs))
            except PerSampleGradientError:
                raise
            except Exception as error:  # the model may raise anything for other samples
                raise ProbeFailed(
                    "independence of samples: the check runs a copy of the model with other samples replaced, and it "
                    f"raised {type(error).__name__}: {error}. Training that is not "
                    "private can leave the check out: independent=False."
                ) from error
            buffers = {name: x.detach().clone() for name, x in model.named_buffers()}
            return _Seen([x.detach().clone() for x in outputs], buffers, rows)

    def _with_rows(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        found = dict[str, Tensor]()
        # Its values may be read in another way.  It starts no further runs.
        with hooked_copy(model, self.recorder, independent=False, told=self.told) as recorder:
            outputs = tensors_of(model(*args, **kwargs))
            losses = [x for x in outputs if x.numel() == 1 and x.grad_fn is not None and x.is_floating_point()]
            if not self.makes_loss:
                losses = [_along(x, slot) for slot, x in enumerate(outputs) if x.grad_fn is not None and not x.is_nested]
            if not losses:
                return outputs, {}
            torch.autograd.backward(losses)
            for name, form in read(model, dict(model.named_parameters()), recorder, "sum").items():
                if form is not None and form.samples == self.samples:
                    like = form.like
                    found[name] = form.dot(noise(form.shape, key_of(name), like.device, like.dtype)).detach()
        return outputs, found

    def differing(self, first: _Seen, other: _Seen, kept: Tensor, rounds: bool) -> tuple[str, tuple[int, ...]]:
        """The difference found for the kept samples, as text for messages, and the outputs that show it; "" if there is
        none.

        rounds: whether to ignore differences that rounding explains
        """
        every = tuple(range(len(first.outputs)))
        if len(first.outputs) != len(other.outputs):
            return "how many tensors the model returns", every
        for slot, (x, y) in enumerate(zip(first.outputs, other.outputs)):
            if x.shape != y.shape:
                return f"the shape of the model's output number {slot}", (slot,)
            at = self.told.outputs[slot] if slot < len(self.told.outputs) else None
            at = at or self._by_size(x)
            if at is not None and _changes(x, y, at, kept, rounds):
                return f"the model's output number {slot} (shape {tuple(x.shape)})", (slot,)
        for name, x in first.buffers.items():
            left = other.buffers.get(name)
            if left is None or x.shape != left.shape or _changes(x, left, self._by_size(x), kept, rounds):
                return f"what the forward leaves in the buffer {name}", every
        return _differing_rows(first.rows, other.rows, kept), every

    def _by_size(self, x: Tensor) -> Layout | None:
        return likeliest(x.shape, self.samples, range(x.ndim))


def _along(x: Tensor, seed: int) -> Tensor:
    """An output along a random direction.  For some samples no entry depends on other samples' entries."""
    return (x * noise(x.shape, key_of(seed), x.device, x.dtype)).sum().real


def _changes(x: Tensor, y: Tensor, at: Layout | None, kept: Tensor, rounds: bool) -> bool:
    if torch.equal(x, y):
        return False
    difference = differs(x, y, rounding_of(x) if rounds else None)
    if at is not None:
        difference = at.samples_first(difference, len(kept))[kept.to(x.device)]
    return bool(difference.any())


def _differing_rows(first: Mapping[str, Tensor], other: Mapping[str, Tensor], kept: Tensor) -> str:
    """The parameter whose rows changed by more than one factor that is common to all (the batch's denominator)."""
    names = [name for name in first if name in other]
    if not names:
        return ""
    pairs = [(first[name][kept.to(first[name].device)], other[name][kept.to(first[name].device)]) for name in names]
    x, y = (torch.cat([pair[n].flatten().double() for pair in pairs]) for n in (0, 1))
    factor = (x @ y) / (x @ x).clamp(min=torch.finfo(x.dtype).tiny)
    eps = max(torch.finfo(pair[0].dtype).eps for pair in pairs)
    for name, (own, again) in zip(names, pairs):
        if (own * factor - again).norm() > 1e3 * eps * again.norm() + 1e-30:
            return f"the rows of {name}"
    return ""


ABOVE.is_shown, ABOVE.show = is_shown, show_independent
