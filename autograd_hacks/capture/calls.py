"""A call of a layer with a rule: the few words that the log notes of it, and what follows from them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from autograd_hacks.capture.kinds import Whose
from autograd_hacks.capture.uses import Edge, OutputGrads, Use, ready
from autograd_hacks.errors import BatchSizeError, SamplesMixed, UnsupportedLayer, where
from autograd_hacks.forms import Form, Grouping, gathered
from autograd_hacks.forms.numerics import looks_free
from autograd_hacks.formulas.call import Call, Settings
from autograd_hacks.formulas.table import Rule, is_given, rule_for
from autograd_hacks.probe.documents import check_told
from autograd_hacks.support.graph import node_of
from autograd_hacks.support.layout import Layout
from autograd_hacks.support.trees import is_packed, map_tensors, versions_among


class Layer:
    """What stays the same from call to call of a layer with a rule.  path: its name in the model

    wanted: the parameters whose rows are wanted, by their names in the layer and in the model"""

    def __init__(self, path: str, layer: nn.Module, rule: Rule, wanted: Sequence[tuple[str, Tensor, str]]) -> None:
        self.path, self.layer, self.rule, self.wanted = path, layer, rule, wanted
        self._state = self._state_of(layer)
        # The rule may read them.
        self.held = {n: x for n, x in (*layer._parameters.items(), *layer._buffers.items()) if x is not None}
        self.tensors = [*self.held.values()]
        self.ids = frozenset([id(p) for _, p, _ in wanted])
        self.locals, self.names = tuple([local for local, _, _ in wanted]), tuple([name for _, _, name in wanted])
        self.is_given = is_given(layer)
        self.is_plain = not rule.recomputes and rule.count is None  # whether its calls may be noted in few words
        self.settings = Settings(layer)  # a stride, an epsilon: they may differ from call to call
        self.ref = weakref.ref(self)

    def holds(self, layer: nn.Module) -> bool:
        """Whether a layer is as it was."""
        is_same = layer is self.layer and self.settings.are_of(layer) and self._state_of(layer) == self._state
        return is_same and rule_for(layer) is self.rule

    @staticmethod
    def _state_of(layer: nn.Module) -> tuple[Any, ...]:
        own, buffers = layer._parameters, layer._buffers
        trains = [p is not None and p.requires_grad for p in own.values()]
        return (*own,), [*map(id, own.values())], trains, [*map(id, buffers.values())] if buffers else []


class LayerCall(Use, Call):
    """A call of a layer with a rule.  Most of what may be asked about a call is asked about none: `_FOLLOWS` has that."""

    known: Layer  # the layer as it was
    number: int  # its place in the log, if it belongs to a forward
    overwritten: Sequence[int]  # how often its only tensor, and what the rule may read, had been overwritten
    slots: int = 1
    is_plain: bool = False  # whether one tensor gave one, in the usual course of a forward

    def __init__(self, **own: Any) -> None:
        self.__dict__ = own

    def __getattr__(self, name: str) -> Any:
        if name == "whose":
            calls = self.within.facts.calls
            return _NOBODYS if calls is None else calls[self.number] or _NOBODYS
        if name not in _FOLLOWS:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        value = vars(self)[name] = _FOLLOWS[name](self)
        return value

    def forget(self) -> None:
        """Frees what was kept for the rule, because rows come from where the output meets the batch."""
        self.edges, self.args, self.kwargs, self.versions, self.outputs, self.is_plain = {}, (), {}, [], (), False

    def forms_at_once(self, grads: OutputGrads) -> Mapping[str, Form] | None:
        """The forms of its parameters, and perhaps of others, by their names in the layer.

        None if there is more to decide or to check."""
        known, within = self.known, self.within
        if grads.reached is not known.locals or grads.live is not None:  # it came in another way than the usual
            return None
        plain = within.facts.plain if self.is_plain and self.is_first and not within.refused else ()
        if not (plain and plain[self.number]) or within.documents is not None:
            return None
        ((x,), (grad,)), samples, dtype = (self.args, grads.at), within.samples, known.wanted[0][1].dtype
        if grad is None or not samples or rule_for(known.layer) is not known.rule:
            return None
        is_usual = type(grad) is Tensor and grad.dtype is dtype and grad.layout is torch.strided
        is_as_noted = versions_among(x, grad) == [self.overwritten[0], *grads.versions] and grad.shape[:1] == (samples,)
        if not (is_usual and is_as_noted) or (x.dtype is not dtype and x.is_floating_point()):
            return None
        layer = known.settings.put_back(known.layer)
        call = object.__new__(LayerCall)
        call.__dict__ = {**self.__dict__, "layer": layer, "grads": (grad,)}
        return self._by_formula(call, known.locals, samples)

    def _shape_of(self, name: str, value: Tensor) -> torch.Size:
        return self.known.held.get(name, value).shape

    @property
    def what(self) -> str:
        return f"{self.place}, input {', '.join(str(tuple(x.shape)) for x, _ in self.versions)}"

    @property
    def place(self) -> str:
        return where(self.path, self.layer)

    def _rows(self, grads: OutputGrads) -> int:
        """The size of axis 0 of the outputs, or the count by the layer's rule if it has one."""
        if (count := self.known.rule.count) is not None:
            return count(self.layer, self.args, self.kwargs)
        return grads.first.shape[0] if grads.first.ndim else 1

    def _forms(self, grads: OutputGrads) -> Mapping[str, Form]:
        rule, (layouts, labels, _) = self.known.rule, self.whose
        layout = layouts[0] if self.within.samples is not None and layouts else None
        if rule_for(self.layer) is not rule:  # nobody has compared what the other one gives
            raise UnsupportedLayer(f"{self.place}: its rule was replaced or removed after the forward pass. Repeat the step")
        if self.within.documents is not None:
            features = None if rule.features is None else rule.features(self.layer)
            shape = grads.first.shape
            found = None if features is None or labels is not None else self.within.documents.layout(shape, layout, features)
            by_position = check_told(found, self.place, shape)
            forms = self._by_rule(grads, by_position if by_position.fold else None, self.within.documents.ids.numel())
            return {name: self.within.documents.rows(form) for name, form in forms.items()}
        if labels is not None:
            forms = self._by_rule(grads, None, len(labels))
            return {name: gathered(form, labels, self.within.samples or 0) for name, form in forms.items()}
        if rule.features is not None and layout is not None:
            return self._by_rule(grads, layout if layout.axis or layout.fold else None, self.within.samples or 0)
        rows = self._rows(grads)
        forms = self._by_rule(grads, None, rows)
        if layout is None or not layout.fold:
            return forms
        labels = layout.rows(rows, self.within.samples or 0, grads.first.device)
        return {name: Grouping(form, labels, self.within.samples or 0) for name, form in forms.items()}

    def _by_rule(self, grads: OutputGrads, layout: Layout | None, rows: int) -> Mapping[str, Form]:
        """The forms that the layer's rule returns.

        layout: where the samples are; None if they are where the rule expects them    rows: how many it must return"""
        dtype, samples = next(iter(self.edges.values())).parameter.dtype, rows

        def as_expected(tensor: Tensor) -> Tensor:
            tensor = ready(tensor, dtype)
            return tensor if layout is None or not layout.fits(tensor, samples) else layout.samples_first(tensor, samples)

        args, kwargs = [map_tensors(as_expected, given) for given in grads.live or (self.args, self.kwargs)]
        at = tuple([g if g is None else as_expected(g) for g in grads.at])
        saved = {name: as_expected(x) for name, x in (self.saved or {}).items()}
        layer = self.known.settings.put_back(self.layer)
        is_compared = self.random_state is not None or looks_free(grads.first)  # else the host would wait for a GPU
        more = self.outputs, self.precision, is_compared, saved
        call = Call(self.path, layer, args, kwargs, self.training, at, self.state, self.random_state, *more)
        forms = self._by_formula(call, grads.reached, rows)
        return {name: forms[name] for name in grads.reached}

    def _by_formula(self, call: Call, names: Sequence[str], rows: int) -> Mapping[str, Form]:
        """The forms that the layer's rule returns, after a check of those that are asked for.  names: theirs"""
        try:
            forms = self.known.rule.formula(call.layer, call)
        except (BatchSizeError, SamplesMixed) as error:
            raise type(error)(f"{self.place} {error}") from None
        known, is_mapping = self.known, type(forms) is dict or isinstance(forms, Mapping)
        for name, p, _ in known.wanted:
            form = forms.get(name) if is_mapping else None
            is_form = not known.is_given or isinstance(form, Form)
            if name in names and (form is None or not is_form or form.samples != rows or form.shape != p.shape):
                raise self._unfit(forms, name, (rows, *p.shape))
        return forms

    def _unfit(self, forms: Any, name: str, shape: Sequence[int]) -> Exception:
        """The error for what a rule returned.  shape: the expected one"""
        if isinstance(forms, Mapping) and name not in forms:
            return UnsupportedLayer(
                f"the rule of {self.place} returned forms for {', '.join(forms) or 'nothing'}, but {name!r} trains too. "
                "Register a rule that covers it (autograd_hacks.register_rule), or freeze it: requires_grad_(False)."
            )
        form = forms[name] if isinstance(forms, Mapping) else None
        if not isinstance(form, Form):
            return TypeError(
                f"the rule of {self.place} returned {forms!r}; expected {{name: form}}, see autograd_hacks.forms"
            )
        return BatchSizeError(
            f"the rule of {self.place} returned per-sample gradients of shape {(form.samples, *form.shape)} for "
            f"{name!r}; expected {shape}: samples first, then the parameter's shape."
        )


def _edges(call: LayerCall) -> Mapping[str, Edge]:
    leaves, wanted = call.within.leaves, call.known.wanted
    return {local: Edge(n, p, leaves[id(p)] if id(p) in leaves else node_of(p)) for local, p, n in wanted}


_FOLLOWS: Mapping[str, Callable[[LayerCall], Any]] = {
    "path": lambda call: call.known.path,
    "layer": lambda call: call.known.layer,
    "kwargs": lambda call: {},
    "edges": _edges,
    "state": lambda call: {local: (p, n) for (local, p), n in zip(call.known.held.items(), call.overwritten[1:])},
    "versions": lambda call: [(call.args[0], call.overwritten[0])],
}
"""What follows about a call from what was noted."""
_NOBODYS = Whose()


def packed_into(call: Call) -> PackedSequence | None:
    return next((x for x in (*call.args, *call.kwargs.values()) if is_packed(x)), None)
