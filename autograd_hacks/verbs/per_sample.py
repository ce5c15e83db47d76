"""`per_sample_grads`: what a backward pass has left, as a matrix for each parameter."""

import weakref
from collections.abc import Iterable

import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.distributed.spread import Spread, Where, spread_of
from autograd_hacks.forms import Zero
from autograd_hacks.reading.gate import read
from autograd_hacks.support.parts import part_of
from autograd_hacks.verbs.arguments import names_matching
from autograd_hacks.verbs.grads import PerSampleGrads


def per_sample_grads(
    model: nn.Module,
    loss_type: str | None = None,
    scale: float | Tensor = 1.0,
    process_group: Where = None,
    only: str | Iterable[str] | None = None,
) -> PerSampleGrads:
    """The per-sample gradients of the last backward pass, lazily: nothing of size N × P until it is asked for.

    loss_type, scale: as in `compute_grad1`    process_group: the processes that have the other samples of the batch, a
    ``torch.distributed.ProcessGroup`` or ``DeviceMesh``; None for those of DistributedDataParallel or ``fully_shard``, False
    for this process alone
    only: names of some parameters, or patterns: ``'8.*'``, ``['*.weight', 'head.bias']``. Verbs are then of these alone

    Raises what `compute_grad1` raises, and ValueError for a group beside ``fully_shard``, and for a pattern that matches no
    parameter that trains.
    """
    recorder = recorder_of(model)
    spread = spread_of(model, recorder, process_group)
    return grads_of(model, recorder, spread, loss_type, scale, only)


def grads_of(
    model: nn.Module,
    recorder: Recorder,
    spread: Spread,
    loss_type: str | None = None,
    scale: float | Tensor = 1.0,
    only: str | Iterable[str] | None = None,
) -> PerSampleGrads:
    """What `per_sample_grads` returns.  spread: the processes that have samples"""
    parameters = recorder.record.parameters_of(model)
    with spread.reading():
        forms = read(model, parameters, recorder, loss_type, scale, lazily=True)  # and checks, of all
    samples = next((form.samples for form in forms.values() if form is not None), 0)
    if only is not None:
        names = names_matching(only, list(model.named_parameters(remove_duplicate=False)), list(forms))
        forms = {name: forms[name] for name in names}
    reached = frozenset(name for name, form in forms.items() if form is not None)
    like = {name: part_of(parameters[name]) for name in forms}
    filled = {n: Zero(samples, like[n].shape, like[n]) if f is None else f for n, f in forms.items()}
    record, known = recorder.record, weakref.ref(model)
    hess_type, batches = record.hess_type, [segment.batch_size() for segment in record.segments]
    return PerSampleGrads(filled, samples, reached, record.reduction(loss_type), known, hess_type, batches, spread=spread)
