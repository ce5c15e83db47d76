"""Quantities that add over parameters, computed while a backward pass runs, which frees each layer's record at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.records import Pass, Segment, disagreement
from autograd_hacks.capture.wrappers import check_unsharded
from autograd_hacks.errors import ON_DURING_BACKWARD, ON_PASSES, HigherOrderError, NothingRecorded, NotReduced
from autograd_hacks.forms import Form, scale
from autograd_hacks.forms.factored import takes_positions
from autograd_hacks.forms.numerics import looks_free
from autograd_hacks.probe.documents import TOKENS
from autograd_hacks.reading.certificate import Certificate
from autograd_hacks.reading.gate import Gate
from autograd_hacks.reading.guards import check_known, check_no_tokens, check_own_documents, check_shown, readable_segments
from autograd_hacks.reading.processes import spread_of
from autograd_hacks.support.contexts import without_autocast
from autograd_hacks.support.display import Shown, Table
from autograd_hacks.support.ranges import checked
from autograd_hacks.support.restored import restored
from autograd_hacks.verbs.arguments import check_direction, kind_of
from autograd_hacks.verbs.matrix import joint_norms, random_maps
from autograd_hacks.verbs.per_sample import check_may_set, drop_grads, drop_rows, set_grads, write_rows

PASS_BUDGET = 16 * 2**20
"""The default number of bytes to use beside the results."""
Verb = Callable[[str, Form], Tensor | None]
"""``verb(name, form)``; None if it has written its result."""


@checked(ON_DURING_BACKWARD)
@contextmanager
def during_backward(
    model: nn.Module,
    *what: str,
    dot: Mapping[str, Tensor] | Tensor | None = None,
    project: int | None = None,
    seed: int = 0,
    loss_type: str | None = None,
    scale: float | Tensor = 1.0,
    max_bytes: int = PASS_BUDGET,
    weights: Tensor | None = None,
    kind: str = "signs",
) -> Iterator[Quantities]:
    """A context that computes quantities during one backward pass and frees each layer's activations early.

    A layer's input and output gradient are freed as soon as its parameters' gradients are known::

        with autograd_hacks.during_backward(model, "grad1", "norms") as found:
            loss.backward()
        found.norms                              # and param.grad1, as compute_grad1 sets it

    ``.grad`` is filled as by any backward pass.  Afterwards there is nothing left for `compute_grad1` to read.

    what: "grad1", rows of shape ``(N, *param.shape)`` in ``param.grad1``; "norms", N; "gram", the inner products of all
    pairs, (N, N)
    dot: a direction for ``PerSampleGrads.dot``, {name: shape}; or N weights w for the direction Σₘ wₘ gₘ, a sum over
    samples of the same pass, for example held-out ones
    weights: N weights; sets ``.grad`` to Σₙ wₙ gₙ. After ``add_hooks(param_grad=False)`` it costs as much as ordinary
    gradients. Give held-out samples weight 0
    project: the number of coordinates to project to    seed, kind: as in ``PerSampleGrads.project``
    loss_type, scale: as in `compute_grad1`    max_bytes: bytes to use beside the results

    Raises what `per_sample_grads` and the verbs of `PerSampleGrads` raise; ValueError if nothing is requested, or an unknown
    quantity; RuntimeError for a second backward pass inside; and NotReduced for ``weights`` if processes share the batch.
    """
    by_name: dict[str, Verb] = {
        "grad1": lambda name, form: stream.write(name, form),
        "norms": lambda name, form: form.norms(max_bytes),
        "gram": lambda name, form: form.gram(form, max_bytes),
    }
    unknown = [word for word in what if word not in by_name]
    if unknown or not (what or any(own is not None for own in (dot, project, weights))):
        raise ValueError(
            f"during_backward was given {repr(unknown[0]) if unknown else 'nothing to compute'}; expected one or several of "
            f"{', '.join(map(repr, by_name))}, dot=, project= and weights=." + ON_DURING_BACKWARD
        )
    recorder = recorder_of(model)
    record = recorder.record
    check_unsharded(model)
    verbs = {word: verb for word, verb in by_name.items() if word in what}
    if isinstance(dot, Tensor):
        check_weights("dot", dot)
        among = dot.detach().nonzero()[:, 0]  # those that aren't zero; few, as they are meant
        verbs["dot"] = lambda name, form: stream.along(name, form, dot, among, max_bytes)
    elif dot is not None:
        check_direction(dot, {name: p for name, p in record.as_seen(recorder.tree.parameters()).items() if p.requires_grad})
        verbs["dot"] = lambda name, form: form.dot(dot[name].to(form.like.device).conj().resolve_conj(), max_bytes)
    if weights is not None:
        check_weights("weights", weights)
        check_may_set(recorder, "during_backward(weights=...)")
        verbs["weights"] = lambda name, form: stream.add_up(name, form, weights, max_bytes)
    if project is not None:
        maps = random_maps("during_backward", project, seed, kind)
        verbs["projection"] = lambda name, form: form.project(maps(name, form), max_bytes)
    check_no_tokens(recorder.segments == TOKENS, "during_backward")
    if record.on_arrival is not None:
        raise RuntimeError("during_backward is already open for this model; leave that context first" + ON_DURING_BACKWARD)
    if record.accumulating:
        raise RuntimeError("during_backward is for one backward pass; leave accumulate(model) first" + ON_PASSES)
    record.clear()
    found, stream = Quantities(), _Stream(model, recorder, verbs, loss_type, scale, weights is not None)

    def undo() -> None:
        record.on_arrival = None
        record.clear("its rows were read during the backward pass; run another outside of `during_backward`")
        if not stream.has_ended:  # leave no rows of an earlier step, and no mixture of two steps
            drop_rows(model.parameters() if "grad1" in what else ())

    with restored(undo):
        record.on_arrival = stream.arrived
        yield found
        vars(found).update(stream.end())


def check_weights(what: str, w: Tensor) -> None:
    if not isinstance(w, Tensor) or not w.is_floating_point() or w.ndim != 1:
        raise TypeError(
            f"during_backward was given {what}={kind_of(w)}; expected N weights, floating-point" + ON_DURING_BACKWARD
        )


class Quantities(Shown):
    """The results of `during_backward`, available after the context's end.

    * ``norms``: N
    * ``dot``: N
    * ``gram``: (N, N)
    * ``projection``: (N, dim)
    """

    def _table(self) -> Table:
        found = [f"{name} of shape {tuple(x.shape)}" for name, x in vars(self).items()]
        return Table(f"<computed during the backward pass: {', '.join(found) or 'nothing yet'}>")

    def __getattr__(self, name: str) -> Tensor:
        if name in ("norms", "dot", "gram", "projection"):
            raise NothingRecorded(f"there is no {name!r}: it was not requested, or no backward pass and context have ended.")
        raise AttributeError(name)


@dataclass
class _Stream:
    """Reads one parameter at a time, as soon as its last gradient has arrived."""

    model: nn.Module
    recorder: Recorder
    verbs: Mapping[str, Verb]
    loss_type: str | None
    scaling: float | Tensor
    sets_grads: bool
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.record = record = self.recorder.record
        self._parameters = record.asked(self.recorder.tree.parameters())
        self._unwritten = set(self._parameters)  # parameters without rows yet
        self.names = {record.name_of(p): name for name, p in self._parameters.items()}
        self._gate: Gate | None = None
        self._certificate = Certificate(record)
        self._taken: set[str] = set()  # parameters
        self._told: tuple[int, str] | None = None  # N, and the call that it came from
        self._sums: dict[str, Tensor] = {}  # the new ``.grad``
        self._found: dict[str, list[Tensor]] = {what: [] for what in self.verbs}  # each verb's results

    def arrived(self, current: Pass, name: str, grad: Tensor | None) -> None:
        """Takes a parameter to which a pass has brought all its gradients.  grad: its ordinary one, if that is computed"""
        if current.is_hess:
            raise RuntimeError("during_backward is for one ordinary backward pass, not backprop_hess" + ON_DURING_BACKWARD)
        if self._gate is None:
            self._gate = Gate(Segment([current]), self.loss_type)
        if self._gate.segment.passes[0] is not current:
            raise RuntimeError("a second backward pass began inside during_backward, which is for one pass" + ON_PASSES)
        if current.higher_order:
            raise HigherOrderError("during_backward does not support a backward pass with create_graph=True")
        if name in self._taken:
            raise RuntimeError(
                f"{self.names.get(name, name)} received gradient a second time, because reentrant checkpoints share its "
                "layer; its rows were already read. Use use_reentrant=False, or read after the pass." + ON_DURING_BACKWARD
            )
        self._taken.add(name)
        calls = current.calls_of.get(name, [])
        for call in calls:
            if self.recorder.kinds.independent:
                check_shown(call)
            if call in current.received:  # else it was read already
                check_own_documents(call, current.received[call], self.recorder.segments is not None)
                size, losses = call.batch_size(current.received[call]), current.losses
                self._told = self._told or ((size, call.what) if losses is None else (losses.shape[0], losses.what))
                if size != self._told[0]:
                    raise disagreement({self._told[1]: self._told[0], call.what: size})
        with without_autocast([edge.parameter for call in calls[:1] for edge in call.edges.values()]):
            form, done = self._gate.form_at_once(name)
            if form is not None and name in self.names:
                self._gate.certify(self._certificate, self.names[name], name)
                if looks_free(form.like):  # else the host would have to wait
                    self._certificate.check()
                self._take(self.names[name], scale(form, 1 / self.scaling))
        current.calls_of[name] = []
        for call in done:
            current.free(call)

    @torch.no_grad()
    def _take(self, name: str, form: Form) -> None:
        for what, verb in self.verbs.items():
            value = verb(name, form)
            if value is None:  # the verb has written its result
                continue
            found = self._found[what]
            if what == "norms" or not found:  # norms of a row's parts are combined later; all else adds up
                found.append(value)
            else:
                found[0] = found[0] + value.to(found[0].device)

    def write(self, name: str, form: Form) -> None:
        """Sets a parameter's ``grad1``."""
        parameter = self._parameters[name]
        write_rows(name, parameter, self.record.gathered.get(name, parameter), form, self.recorder.pool)
        self._unwritten.discard(name)

    def along(self, name: str, form: Form, w: Tensor, among: Tensor, max_bytes: int) -> Tensor:
        """⟨gₙ, Σₘ wₘ gₘ⟩, N.  among: the samples m"""
        theirs = self.checked(name, form, w, "dot")[among.to(form.like.device)]
        weights = w.detach()[among].to(form.like.device, form.sum_dtype)
        if takes_positions(form, theirs):
            return form.gram(theirs, max_bytes) @ weights
        return form.dot(theirs.weighted_sum(weights, max_bytes).conj().resolve_conj(), max_bytes)

    def checked(self, name: str, form: Form, w: Tensor, what: str) -> Form:
        """The form.  Raises ValueError unless there is one weight for each of its samples."""
        if len(w) != form.samples:
            raise ValueError(
                f"during_backward was given {what} of shape {tuple(w.shape)}; expected ({form.samples},), because {name!r} "
                f"has {form.samples} samples" + ON_DURING_BACKWARD
            )
        return form

    def add_up(self, name: str, form: Form, w: Tensor, max_bytes: int) -> None:
        """Computes a parameter's new ``.grad``."""
        if not self._sums:
            drop_grads(self._parameters)  # first, so that two sets of gradients never exist at once
        own = self.checked(name, form, w, "weights")
        weights = w.to(own.like.device, torch.promote_types(w.dtype, own.sum_dtype))
        self._sums[name] = own.weighted_sum(weights, max_bytes).to(own.like.dtype)

    def end(self) -> dict[str, Tensor]:
        """The results.  Raises if the pass is not complete."""
        self._certificate.check()
        check_known(self.model, self.record)
        readable_segments(dict(self._parameters), self.record)
        for name in self._unwritten if "grad1" in self.verbs else ():  # None or no grad1, as `compute_grad1` does
            parameter = self._parameters[name]
            write_rows(name, parameter, parameter, None, self.recorder.pool)
        if self.sets_grads and spread_of(self.model, self.recorder).mesh is not None:
            raise NotReduced(
                "during_backward was given weights, but this process has only a part of the samples. Read after the pass: "
                "per_sample_grads(model).weighted_sum(w) sums over processes."
            )
        if self.sets_grads:
            set_grads(self._parameters, {name: self._sums.get(name) for name in self._parameters}, self._sums)
        self.has_ended = True
        return {
            what: joint_norms(found, len(found[0])) if what == "norms" else found[0]
            for what, found in self._found.items()
            if found
        }
