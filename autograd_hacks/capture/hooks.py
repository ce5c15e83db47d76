"""Hooks on a model and its layers, and the switches for them.  This module contains no mathematics."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.nn.parameter import is_lazy

from autograd_hacks.capture.above import ABOVE
from autograd_hacks.capture.kinds import Kinds, Parts, Within, uncovered
from autograd_hacks.capture.recorder import Recorder, Settings
from autograd_hacks.capture.uncompiled import put_around_all, take_from_around
from autograd_hacks.capture.wrappers import check_hookable, check_module
from autograd_hacks.errors import ON_BATCH, ON_HOOKS, NothingRecorded
from autograd_hacks.formulas.table import rule_for
from autograd_hacks.probe.batch import BatchDim
from autograd_hacks.probe.documents import Segments, check_segments
from autograd_hacks.support.display import Shown, Table
from autograd_hacks.support.internals import COMPILER
from autograd_hacks.support.patterns import names_matching
from autograd_hacks.support.ranges import checked
from autograd_hacks.support.restored import restored
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import tensors_of


@checked(ON_BATCH)
def add_hooks(
    model: nn.Module,
    batch_dim: BatchDim = 0,
    probe: bool = True,
    param_grad: bool = True,
    independent: bool = False,
    only: str | Iterable[str] | None = None,
    segments: Segments | None = None,
    replace: Parts | None = None,
) -> Hooked:
    """Hooks a model, so that each backward pass records what `compute_grad1` needs.

    batch_dim: axis of the samples in the model's arguments, 0 by default. Give a tree of axes if arguments differ: a tuple
    like the positional arguments, as ``in_dims`` of ``torch.func.vmap``, or a dictionary by name, with None for an
    argument without samples. Give None alone if no argument has a batch axis
    probe: whether each forward's graph is read. The law of each node says where the samples are, so layers' batch axes, uses
    of parameters and samples that mix are known in every step. With False, axis 0 of every layer's input is assumed to be
    the batch, if every parameter has a layer's rule
    param_grad: whether a backward pass fills ``.grad``. With False, autograd skips the ordinary weight gradients, a quarter
    of a step or more. Set ``.grad`` by `clip_grad1_norm_`, ``compute_grad1(set_grad=True)`` or
    ``per_sample_grads(model).weighted_sum(w)``. They are still computed, and discarded, until rows of a kind of step have
    been compared with them, after a loss with derivatives, and for parameters that have hooks of yours. While a model
    is hooked, ``torch.autograd.backward`` is a function of this library, which then gives torch's own ``inputs=``
    only: names or patterns, as in `per_sample_grads`, of the parameters that need per-sample gradients. Other parameters
    train as usual, and their layers get no hooks. 'norms' means all biases and the parameters of norm layers. They are
    cheap, and their noise scale predicts the model's (Gray et al. 2024, arXiv:2411.00999)
    independent: also check that no sample's output depends on other samples' values along a path without a gradient, as in
    ``h - h.mean(0).detach()``. This is needed for private training. Laws show it from the operations of each forward; if
    that is not enough, a copy runs with other samples replaced, in each forward whose operations are new. Reading raises if
    independence was not shown
    segments: for samples that pack several documents. Rows then belong to documents, (D, ...). Give the name of the
    argument that separates the documents; (B, T) integers, if all batches are packed alike; or a function of all arguments
    that returns such integers. An argument whose name contains "position" holds each token's position in its document;
    "cu_seq", the D + 1 offsets of the documents; any other name, a document number for each token, negative for padding.
    The check shows that no document's gradient reaches another document's positions. With 'tokens', each row is one
    position's part of its sample's gradient
    replace: for ``independent`` and samples that are packed along the arguments, such as graphs, if laws don't show that
    they are independent: a function ``replace(keep, *args, **kwargs)`` that returns the model's arguments for some samples
    alone, such as your collate function once more. ``keep`` has their numbers, (K,). It returns a tuple of positional
    arguments, a dictionary, or the only argument. A copy of the model runs with half of the samples several times, with
    random numbers left out, and outputs and rows are compared

    A second call hooks the layers that were added since, hooks no layer twice, and replaces the settings.  As a context
    manager it removes the hooks at the end; if the model had hooks before, they stay and their old settings return::

        with autograd_hacks.add_hooks(model):
            ...

    Outputs, gradients and ``state_dict`` don't change.  Copies of the model (deepcopy, pickle) have no hooks.

    Raises ValueError for a pattern that matches no parameter, and ``only`` with ``param_grad=False``;
    TypeError if ``model`` is not a module, or is a scripted or DataParallel module.  With ``param_grad=False``,
    ``torch.autograd.grad`` with respect to parameters raises ParamGradSkipped.  The model's forward raises ValueError if the
    tree of axes doesn't fit its arguments, ProbeFailed if ``independent`` can't be checked, and ShardedParameters.
    """
    check_module("add_hooks", model, ON_HOOKS)
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "add_hooks was given a scripted module. Scripted modules accept no hooks; give the module that was scripted"
            + ON_HOOKS
        )
    check_hookable(model)
    if probe not in (True, False):
        raise ValueError(f"add_hooks was given probe={probe!r}; expected True or False" + ON_HOOKS)
    if replace is not None and not independent:
        raise ValueError("add_hooks was given replace= without independent=True, for which it is" + ON_HOOKS)
    if segments is not None:
        check_segments(segments, "add_hooks", batch_dim, probe, independent)
    names = [name for name, _ in model.named_parameters()]
    left_out = set[str]() if only is None else set(names).difference(names_matching(only, model, names))
    if left_out and not param_grad:
        raise ValueError(
            "add_hooks was given only=... with param_grad=False, so nothing would compute the gradients of the other "
            f"{len(left_out)} parameters. Leave param_grad out." + ON_HOOKS
        )
    known = _recorder_of(model)
    recorder = Recorder(model) if known is None else known
    record = recorder.record
    before = None if known is None else known.settings
    record.left_out = frozenset(left_out)
    record.is_settled, record.gathered = False, {}  # the next forward finds the whole parameters that replace shards
    try:
        _hook_all(recorder, model)
        recorder.set((Kinds(model, batch_dim, probe, independent, replace), param_grad, record.left_out, segments))
        recorder.attach()
    except BaseException:
        if known is None:
            _take_off(recorder, model)
        elif before is not None:
            record.left_out = before[2]
        raise
    return Hooked(model, before)


def _hook_all(recorder: Recorder, model: nn.Module) -> None:
    """Puts the missing hooks on a model and its layers."""
    left_out, forward = recorder.record.left_out, recorder.forward
    forward.layers.clear()
    asked = {id(p) for name, p in model.named_parameters() if name not in left_out} if left_out else None
    # Users may call a module by itself if it reads parameters that no rule covers.
    own_readers = {m for m in uncovered(model) if getattr(type(m), "forward", None) is not nn.Module.forward}
    for path, layer in model.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            continue
        there = own_hooks(recorder, layer)
        for own in there:
            own.path = path  # the path may have changed
        by_rule, does = rule_for(layer), [own.then for own in there]
        if by_rule and asked is not None:
            wanted = [p for p in layer._parameters.values() if p is not None and id(p) in asked]
            # Vectors are read at autograd's own nodes, which takes no memory for inputs or gradients.
            by_rule = by_rule if wanted and not (by_rule.is_node and all(p.ndim < 2 for p in wanted)) else None
        if by_rule and isinstance(getattr(layer, "dropout", None), int | float) and forward.begin_layer not in does:
            layer.register_forward_pre_hook(Hook(recorder, forward.begin_layer, path), with_kwargs=True)
        if by_rule and forward.end_layer not in does:
            # This hook goes first: the rules need the layer's own output, before other hooks change it.
            hook = Hook(recorder, forward.end_layer, path)
            layer.register_forward_hook(hook, prepend=True, with_kwargs=True, always_call=True)
        if (layer is model or layer in own_readers) and recorder.end not in does:
            first, last = Hook(recorder, partial(_begin, recorder), path), Hook(recorder, recorder.end, path)
            layer.register_forward_pre_hook(first, prepend=True, with_kwargs=True)
            layer.register_forward_hook(last, with_kwargs=True, always_call=True)
        recorder.layers.add(layer)
    for name, parameter in model.named_parameters():
        recorder.record.names[parameter] = name
        if name not in left_out:
            recorder.backward.watch(parameter)
        else:  # rows of an earlier step, before the parameter was left out
            vars(parameter).pop("grad1", None)
    recorder.bare = recorder.trained_before = None  # with the names that replaced parameters had
    put_around_all(model, recorder)


def remove_hooks(model: nn.Module) -> None:
    """Restores the model to its state before `add_hooks`: no hooks, no records, no ``grad1``, no curvature.

    Warns if it had no hooks.
    """
    recorder = _recorder_of(model)
    if recorder is None:
        warnings.warn(f"remove_hooks: {type(model).__name__} has no hooks", stacklevel=2)
        return
    with restored(partial(_take_off, recorder, model)):  # completes even if an interrupt comes
        pass


@contextmanager
def hooked_copy(
    model: nn.Module, recorder: Recorder, independent: bool, within: Within | None = None, knows: bool = False
) -> Iterator[Recorder]:
    """A context in which a copy of a hooked model has hooks and a recorder of its own, with the same settings.

    independent: see `add_hooks`; it is shown once more    within, knows: see `Kinds.for_copy`"""
    own = Recorder(model)
    own.is_aside = own.said_uncompiled = True
    own.record.left_out = recorder.record.left_out
    with torch.enable_grad():
        try:
            _hook_all(own, model)
            own.set((recorder.kinds.for_copy(independent, within, knows), True, own.record.left_out, recorder.segments))
            own.attach()
            yield own
        finally:
            own.interrupt()
            own.detach()


def _unhook(recorder: Recorder, model: nn.Module) -> None:
    recorder.detach()
    for module in {*recorder.layers, *model.modules()}:
        for hook in own_hooks(recorder, module):
            drop(module, hook)
        take_from_around(module, recorder)


def _take_off(recorder: Recorder, model: nn.Module) -> None:
    _unhook(recorder, model)
    for parameter in model.parameters():
        for attribute in ("grad1", "hess", "hess_diag", "kfac"):
            vars(parameter).pop(attribute, None)


def recorder_of(model: nn.Module) -> Recorder:
    """The model's recorder.  Raises NothingRecorded if it has no hooks, TypeError if it is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected the torch.nn.Module that add_hooks was given; got {type(model).__name__}" + ON_HOOKS)
    recorder = _recorder_of(model)
    if recorder is None:
        raise NothingRecorded(
            f"this {type(model).__name__} has no hooks. Call autograd_hacks.add_hooks(model) on this object before the "
            "forward pass, or hooks.on() if its hooks are off. A copy, a part or a wrapper of a hooked model is another "
            "object." + ON_HOOKS
        )
    return recorder


class Hooked(Shown):
    """The handle of a model's hooks, as `add_hooks` returns it.  As a context it removes the hooks at the end.

    It prints as a table of the model's settings and of the record.
    """

    def __init__(self, model: nn.Module, before: Settings | None) -> None:
        self._model, self._before = model, before  # before: the earlier settings, None if there were no hooks
        self._resting: Recorder | None = None  # the model's recorder while its hooks are off

    def remove(self) -> None:
        """Removes the hooks for good, as `remove_hooks` does.  Does nothing if there are no hooks."""
        if self._resting is not None:
            self.on()
        if _recorder_of(self._model) is not None:
            remove_hooks(self._model)

    def pause(self) -> AbstractContextManager[None]:
        """A context in which nothing is recorded, for any model in this process.  At the end recording is as before."""
        return Switch.paused()

    def clear(self) -> None:
        """Discards the recorded backward passes and frees their memory.

        A training loop doesn't need it: a backward pass of a later forward replaces the record.  ``grad1`` stays.

        Raises NothingRecorded if the hooks were removed.
        """
        cleared = "clear_backprops(model), or clear(), has cleared the record; run a forward and a backward pass"
        recorder_of(self._model).record.clear(cleared)

    def accumulate(self) -> Any:
        """A context that appends the rows of several forward and backward passes: `accumulate`."""
        return ABOVE.accumulate(self._model)

    def off(self) -> None:
        """Takes the hooks off the model until `on`.

        Meanwhile its steps cost what they cost without the library, and there is nothing to read.  Earlier checks of its
        forwards stay valid.

        Raises NothingRecorded if the hooks were removed.
        """
        if self._resting is None:
            recorder = recorder_of(self._model)
            with restored(partial(_unhook, recorder, self._model)):
                self._resting = recorder

    def on(self) -> None:
        """Puts the hooks back, also on layers that were added since `off`.  Does nothing if the hooks are on.

        Raises NothingRecorded if the hooks were removed.
        """
        recorder, self._resting = self._resting, None
        if recorder is None or _recorder_of(self._model) is not None:
            recorder_of(self._model)
            return
        recorder.attach()
        _hook_all(recorder, self._model)

    def describe(self, trained: bool = False) -> Any:
        """A table of the model's parameters: `autograd_hacks.describe`.  trained: whether to leave out frozen ones"""
        return ABOVE.describe(self._model, trained)

    def _table(self) -> Table:
        recorder, kind = _recorder_of(self._model), type(self._model).__name__
        if recorder is None:
            return Table(f"<hooks of a {kind}, {'off' if self._resting is not None else 'removed'}>")
        layers, batch_dim, wanted = len(recorder.layers), recorder.kinds.batch_dim, recorder.backward.wants_grad
        title = f"<hooks of a {kind}: {layers} modules, batch_dim={batch_dim!r}, param_grad={wanted}>"
        trained, frozen = ([p for p in self._model.parameters() if p.requires_grad == own] for own in (True, False))
        rows = [("setting", "value"), ("modules", str(layers)), ("trained", _counted(trained)), ("frozen", _counted(frozen))]
        if left_out := recorder.record.left_out:
            rows.append(("left out", _counted([p for n, p in self._model.named_parameters() if n in left_out])))
        rows += [("batch_dim", repr(batch_dim)), ("param_grad", str(wanted)), *recorder.record.cells()]
        return Table(title, rows)

    def __enter__(self) -> Hooked:
        return self

    def __exit__(self, *_: object) -> None:
        if self._resting is not None:
            self.on()
        if (recorder := _recorder_of(self._model)) is None:
            return
        if self._before is None:
            remove_hooks(self._model)
        else:
            recorder.set(self._before)
            _hook_all(recorder, self._model)  # hooks for parameters that were left out meanwhile


def _counted(parameters: list[nn.Parameter]) -> str:
    known = [p for p in parameters if not is_lazy(p)]
    more = f", {len(parameters) - len(known)} of unknown size" if len(known) < len(parameters) else ""
    return f"{len(parameters)} parameters, {sum(p.numel() for p in known)} numbers{more}"


def _begin(recorder: Recorder, path: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not path and COMPILER in sys.modules:
        put_around_all(model, recorder)  # also around modules that were compiled since
    recorder.begin(path, model, args, kwargs)


def _recorder_of(model: nn.Module) -> Recorder | None:
    found = [hook.recorder for hook in model._forward_pre_hooks.values() if isinstance(hook, Hook) and not hook.path]
    return found[0] if found else None


class Hook:
    """Calls a method of the recorder with the module's path and the arguments that torch passes to hooks.

    A forward hook also passes whether it ran first.  A copy of its module (deepcopy, pickle) gets a hook that only removes
    itself.
    """

    def __init__(self, recorder: Recorder, then: Callable[..., Any], path: str = "") -> None:
        self.recorder, self.then, self.path = recorder, then, path

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        if torch.compiler.is_compiling():  # a compiled forward has no hooks; its gradients are detected on arrival
            return None
        given = (output[0], self._is_first(module)) if output else ()
        if (tape := self.recorder.tape) is None:
            return self.then(self.path, module, args, kwargs, *given)
        with tape.paused():
            returned = self.then(self.path, module, args, kwargs, *given)
            if output and returned is not None and returned is not output[0]:
                tape.take_as_same(tensors_of(output[0]), tensors_of(returned))
            return returned

    def _is_first(self, module: nn.Module) -> bool:
        """Whether no foreign hook ran before this one.  The library's own hooks return the module's output unchanged."""
        for hook in module._forward_hooks.values():
            if hook is self or not isinstance(hook, Hook):
                return hook is self
        return False

    def __reduce__(self) -> tuple[type[_Unhooked], tuple[()]]:
        return _Unhooked, ()


def own_hooks(recorder: Recorder, module: nn.Module) -> list[Hook]:
    every = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [hook for hook in every if isinstance(hook, Hook) and hook.recorder is recorder]


def drop(module: nn.Module, hook: Hook | _Unhooked) -> None:
    """Removes a hook, as its handle would."""
    tables: tuple[dict[int, Any], ...] = (module._forward_pre_hooks, module._forward_hooks)
    for key in [key for table in tables for key, other in table.items() if other is hook]:
        for table in (*tables, module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs):
            table.pop(key, None)
        module._forward_hooks_always_called.pop(key, None)


class _Unhooked:
    """Replaces a hook in a copy of a hooked model, until the copy first runs."""

    def __call__(self, module: nn.Module, *given: object) -> None:
        if given[-1] is not None:  # a forward that has failed has no output, and torch is iterating over its hooks
            drop(module, self)
