"""Quantities that add over parameters, taken while a backward pass runs: each layer's record is freed at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.forward import Recorder
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.passes import Pass, Segment
from autograd_hacks.capture.records import Visit
from autograd_hacks.capture.wrappers import check_unsharded
from autograd_hacks.errors import BatchSizeError, HigherOrderError, NothingRecorded, where
from autograd_hacks.forms import Form, RandomMap, Sum
from autograd_hacks.forms.numerics import row_norms
from autograd_hacks.reading.gate import forms_of, without_autocast
from autograd_hacks.reading.guards import batch_size, check_scale, check_seen, check_sum, readable_segments, reduction
from autograd_hacks.verbs.grads import check_dim, check_direction, unwrapped

BUDGET = 16 * 2**20
"""Bytes to use beside the results, unless told another number."""


@contextmanager
def streaming(
    model: nn.Module,
    dot: Mapping[str, Tensor] | None = None,
    gram: bool = False,
    project: int | None = None,
    seed: int = 0,
    loss_type: str | None = None,
    scale: float | Tensor = 1.0,
    budget: int = BUDGET,
) -> Iterator[Streamed]:
    """A context for one backward pass, during which quantities are taken that add over parameters; for models at the edge of
    memory, since what a layer has left is freed as soon as its parameters' gradients are known::

        with autograd_hacks.streaming(model) as streamed:
            loss.backward(retain_graph=True)
        weights = (max_norm / streamed.norms).clamp(max=1)

    The norms are always taken.  ``.grad`` is filled as by any backward pass.  Nothing is left to be read by `compute_grad1`.

    dot: {name: shape}, a direction for ``PerSampleGrads.dot``    gram: whether to take the inner products of all pairs
    project: how many coordinates to project to    seed: as in ``PerSampleGrads.project``
    loss_type, scale: as in `compute_grad1`    budget: bytes to use beside the results

    Raises as `per_sample_grads` and the verbs of `PerSampleGrads` do, and RuntimeError for a second backward pass inside.
    """
    recorder = recorder_of(model)
    check_unsharded(model)
    if dot is not None:
        check_direction(dot, {name: p.shape for name, p in model.named_parameters() if p.requires_grad})
    check_scale(scale)
    if project is not None:
        check_dim("streaming was given project", project)
    if recorder.stream is not None:
        raise RuntimeError("streaming(model) is open already, for this model; leave that context first")
    if recorder.accumulating:
        raise RuntimeError(
            "streaming is for one backward pass, and this model is accumulating several; leave that context first"
        )
    recorder.clear()
    streamed = Streamed()
    recorder.stream = Stream(model, recorder, streamed, dot, gram, project, seed, loss_type, 1 / scale, budget)
    try:
        yield streamed
        recorder.stream.end()
    finally:
        recorder.stream = None
        recorder.clear("its rows were streamed; run a forward and a backward pass outside of `streaming`")


class Streamed:
    """What `streaming` has found, after the context's end.

    norms: N    dot: N    gram: (N, N)    projection: (N, dim)    samples: N
    """

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Tensor:
        if name in ("norms", "dot", "gram", "projection") and "found" in vars(self):
            if name in self.found:
                return self.found[name]
            raise NothingRecorded(
                f"streaming has taken no {name}: no backward pass has ended inside the context, the context has not ended, "
                "or it was not asked for."
            )
        raise AttributeError(name)


class Stream:
    """Takes the quantities of each parameter when the last gradient for it has arrived."""

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        streamed: Streamed,
        dot: Mapping[str, Tensor] | None,
        gram: bool,
        project: int | None,
        seed: int,
        loss_type: str | None,
        factor: float | Tensor,
        budget: int,
    ) -> None:
        self.model, self.recorder, self.streamed, self.loss_type, self.factor = model, recorder, streamed, loss_type, factor
        self.dot, self.gram, self.dim, self.seed, self.budget = dot, gram, project, seed, budget
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.samples: tuple[int, str] | None = None  # N, and which layer has told
        self._pass: Pass | None = None
        self._forms: dict[Visit, dict[str, Form]] = {}  # of calls some of whose parameters are still to come
        self._norms: list[Tensor] = []
        self._totals: dict[str, Tensor] = {}

    def arrived(self, current: Pass, parameter: Tensor, grad: Tensor | None) -> None:
        """Hears that a pass has brought all it will bring to a parameter.  grad: its ordinary gradient, where that is
        computed"""
        if current.is_hess:
            raise RuntimeError("backprop_hess has begun inside streaming(model), which is for one ordinary backward pass")
        if self._pass is None:
            self._pass = current
        if self._pass is not current:
            raise RuntimeError("a second backward pass has begun inside streaming(model), which is for one")
        if current.higher_order:
            raise HigherOrderError("streaming takes no quantities of a backward pass with create_graph=True")
        is_mean, terms = reduction(current, self.loss_type) == "mean", []
        for visit in [v for v in current.received if any(p is parameter for p, _ in v.parameters.values())]:
            forms = self._forms.get(visit)
            if forms is None:
                forms = self._forms[visit] = self._read(visit, current)
            for name in [name for name in forms if visit.parameters[name][0] is parameter]:
                form = forms.pop(name)
                terms.append(form.scaled(form.samples) if is_mean and form.samples != 1 else form)
        if terms:
            form = Sum.of(terms)
            if grad is not None and self.recorder.plan.watched:
                current.arrived = {parameter: grad.detach()}
                name = self.names.get(id(parameter), "a parameter")
                segment = Segment([current])
                check_sum(name, parameter, form, segment, self.loss_type, form.samples, self.recorder, lazily=True)
                current.arrived = {}
            self._take(parameter, form if isinstance(self.factor, float) and self.factor == 1 else form.scaled(self.factor))
        for visit in [visit for visit, forms in self._forms.items() if not forms]:
            del self._forms[visit]
            if not self.recorder.plan.watched:  # else the largest gradient is still to be told
                current.received.pop(visit)

    def _read(self, visit: Visit, current: Pass) -> dict[str, Form]:
        received = current.received[visit]
        check_seen(visit, received)
        samples = batch_size(visit, received)
        self.samples = self.samples or (samples, where(visit.path, visit.layer))
        if samples != self.samples[0]:
            raise BatchSizeError(
                f"the numbers of samples disagree, so that rows can't be matched: {self.samples[1]}: {self.samples[0]}; "
                f"{where(visit.path, visit.layer)}: {samples}."
            )
        return dict(forms_of(visit, received))

    @torch.no_grad()
    def _take(self, parameter: Tensor, form: Form) -> None:
        name = self.names.get(id(parameter))
        if name is None:
            return
        with without_autocast(parameter):
            self._norms.append(form.norms(self.budget))
            if self.dot is not None:
                self._add("dot", form.dot(self.dot[name].to(parameter.device), self.budget))
            if self.gram:
                self._add("gram", form.gram(form, self.budget))
            if self.dim is not None:
                random = RandomMap(unwrapped(name), form.shape, self.dim, self.seed)
                self._add("projection", form.project(random, self.budget))

    def _add(self, what: str, value: Tensor) -> None:
        self._totals[what] = self._totals[what] + value.to(self._totals[what]) if what in self._totals else value

    def end(self) -> None:
        """Makes the results, if the pass can be trusted."""
        readable_segments(dict(self.model.named_parameters()), self.recorder)
        self.recorder.plan.checked, self.recorder.plan.watched = True, False
        if self._norms:
            dtype = self._norms[0].dtype
            norms = torch.stack([own.to(self._norms[0].device, dtype) for own in self._norms], dim=1)
            self.streamed.found = {"norms": row_norms(norms), **self._totals}
