"""`add_hooks`.  It connects capture with the reading of forwards and with the agreement of processes."""

import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture import hooks
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.distributed.agreement import begin, together
from autograd_hacks.errors import ON_BATCH
from autograd_hacks.probe.batch import Batch, BatchDim
from autograd_hacks.probe.documents import Segments
from autograd_hacks.probe.tape import Tape
from autograd_hacks.reading.derivatives import follow
from autograd_hacks.reading.forwards import assume, read_forward
from autograd_hacks.reading.independence import is_shown, show_independent
from autograd_hacks.support.ranges import checked
from autograd_hacks.verbs.arguments import names_matching
from autograd_hacks.verbs.describe import Description, describe


class Hooked(hooks.Hooked):
    __doc__ = hooks.Hooked.__doc__

    def describe(self, trained: bool = False) -> Description:
        """A table of the model's parameters: `autograd_hacks.describe`.

        trained: whether to leave out frozen parameters
        """
        return describe(self._model, trained)


@checked(ON_BATCH)
def add_hooks(
    model: nn.Module,
    batch_dim: BatchDim = 0,
    probe: bool = True,
    param_grad: bool = True,
    reuse: bool = True,
    independent: bool = False,
    only: str | Iterable[str] | None = None,
    segments: Segments | None = None,
) -> Hooked:
    left_out: set[str] = set()
    if only is not None and isinstance(model, nn.Module):
        names = [name for name, _ in model.named_parameters()]
        left_out = set(names).difference(names_matching(only, model, names))
    handle = hooks.add_hooks(model, batch_dim, probe, param_grad, reuse, independent, left_out, segments)
    recorder = recorder_of(model)
    _connect(recorder)
    recorder.record.is_settled = False
    recorder.record.gathered = {}  # the next forward finds the whole parameters that replace shards
    return Hooked(model, handle._before)


def _connect(recorder: Recorder) -> None:
    recorder.learn, recorder.together, recorder.connect = begin, together, _connect
    recorder.read_forward, recorder.assume = read_forward, assume
    recorder.is_shown, recorder.show = is_shown, show_independent
    recorder.why_unshown, recorder.why_not_by_tape, recorder.check_tape = _why_unshown, _why_not_by_tape, _check_tape
    recorder.backward.created = partial(follow, weakref.ref(recorder))


def _why_unshown(model: nn.Module, batch: Batch, axis: int | None, samples: int) -> str:
    try:
        from autograd_hacks.compiled.analysis import why_unshown  # torch's compiler takes a second to import
    except ImportError as error:
        return str(error)
    return why_unshown(model, batch, axis, samples)


def _why_not_by_tape(tape: Tape, axes: Sequence[int | None], samples: int, outputs: Sequence[Tensor]) -> str:
    from autograd_hacks.compiled.of_tape import why_not_by_tape

    return why_not_by_tape(tape, axes, samples, outputs)


def _check_tape(tape: Tape) -> None:
    if tape.opaque:
        from autograd_hacks.compiled.of_tape import check_opaque

        check_opaque(tape)


add_hooks.__doc__ = hooks.add_hooks.__doc__
