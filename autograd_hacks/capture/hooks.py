"""Hooks on a model and its layers, and the switches for them.  No mathematics."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.nn.parameter import is_lazy

from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.uncompiled import put_around_all, take_from_around
from autograd_hacks.capture.wrappers import check_hookable
from autograd_hacks.errors import ON_HOOKS, ON_MODES, ON_SEGMENTS, NothingRecorded
from autograd_hacks.probe.batch import BatchDim
from autograd_hacks.probe.documents import Segments, check_segments
from autograd_hacks.probe.planner import ALWAYS, ONCE, Planner, uncovered
from autograd_hacks.rules.nodes import OF_NODES
from autograd_hacks.rules.table import covered, parts_of_composites, rule_for
from autograd_hacks.support.display import Shown, Table
from autograd_hacks.support.internals import COMPILER
from autograd_hacks.support.restored import restored
from autograd_hacks.support.switch import Switch

HOOKS = "hooks"
MODES = HOOKS, "derivatives", "expand"
"""Names of one thing: losses may have derivatives in them."""

Settings = tuple[Planner, bool, bool, frozenset[str], Segments | None]
"""What `add_hooks` was told: how plans are made, ``param_grad``, ``reuse``, names of left out parameters, ``segments``."""


def add_hooks(
    model: nn.Module,
    batch_dim: BatchDim = 0,
    probe: bool | str = True,
    param_grad: bool = True,
    reuse: bool = True,
    mode: str = HOOKS,
    independent: bool = False,
    left_out: Collection[str] = (),
    segments: Segments | None = None,
) -> Hooked:
    """Hooks ``model``, so that a backward pass leaves what `compute_grad1` needs for every parameter.

    batch_dim: where the samples are in the model's arguments. An axis for all of them; or a tree of axes, None for what
    has no samples: a tuple like the positional arguments, as ``in_dims`` of ``torch.func.vmap``, or a dictionary by
    keyword. None where no argument tells
    probe: whether forwards are proven, the first of each kind (dtypes, ranks, training flags) and ever more rarely later: a
    few backward passes through the forward's own graph show where samples are in every layer, whether they mix, where
    parameters are read, and that rows add up. 'once' proves the first of each kind alone, 'always' every one. False takes
    axis 0 of every layer's input for the batch; where no layer's rule covers a parameter, the first forward of each kind
    shows it
    param_grad: whether a backward pass fills ``.grad``. False has autograd compute no ordinary weight gradients, which are
    a quarter of a step and more: ``.grad`` is then set by `clip_grad1_norm_`, by ``compute_grad1(set_grad=True)``, or from
    ``per_sample_grads(model).weighted_sum(w)``. They are computed all the same, and thrown away, in the
    first step of each kind, once a loss has had derivatives in it, with reentrant checkpoints, and where others' hooks wait
    for them
    reuse: whether rows are written into the memory of an earlier step's, where nobody else holds that
    mode: no longer needed: losses may have derivatives in them, of any order
    only: names of the parameters whose per-sample gradients are wanted, or patterns as in `per_sample_grads`; the others
    train as ever, and their layers have no hooks. 'norms' stands for the parameters of norm layers and all biases: they are
    cheap, and their noise scale tells that of the model (Gray et al. 2024, arXiv:2411.00999)
    independent: whether it is also shown that no sample's outputs depend on the values of others, by a way without a
    gradient, as in ``h - h.mean(0).detach()``: by analysis, or else the model is run again with other samples replaced, on
    the first forward of each kind and ever more rarely. Reading then raises where it was not shown: for private training

    segments: where several documents are packed into one sample, and rows are to be theirs, (D, ...): the name of the
    model's argument that tells them; (B, T) whole numbers, for batches that are all packed alike; or a function of all
    arguments that returns such numbers. An argument named with "position" has the position of each token in its document,
    one named with "cu_seq" the D + 1 places at which documents begin and end, any other a number for each token, negative
    for padding. The proofs show that no document's gradients come to another's positions. 'tokens' has each position's own
    part of its sample's gradient, see `PerSampleGrads.tokens`

    Called again it hooks the layers that were added since, and no layer twice, and takes the new settings.  As a context
    manager it removes the hooks at the end, unless the model had hooks before, which then have their settings again::

        with autograd_hacks.add_hooks(model):
            ...

    Outputs, gradients and ``state_dict`` stay as they are.  Copies of the
    model (deepcopy, pickle) have no hooks.

    Raises ValueError for another mode, for a pattern that matches no parameter, and for ``only`` with ``param_grad=False``;
    TypeError where ``model`` is no module, or a scripted or DataParallel one.  With
    ``param_grad=False`` ``torch.autograd.grad`` with respect to parameters raises ParamGradSkipped.  The model's forward
    then raises ValueError for a tree of axes that doesn't fit its arguments, ProbeFailed where it can't be run again for
    ``independent``, and ShardedParameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"add_hooks was given an object of type {type(model).__name__}; expected a torch.nn.Module" + ON_HOOKS
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "add_hooks was given a scripted module, which takes no hooks; expected the module it was made from" + ON_HOOKS
        )
    check_hookable(model)
    if mode not in MODES:
        raise ValueError(f"add_hooks was given mode={mode!r}; expected one of {', '.join(map(repr, MODES))}" + ON_MODES)
    if mode != HOOKS:
        warnings.warn(
            f"add_hooks(mode={mode!r}) is no longer needed: losses may have derivatives in them without it. Leave mode out.",
            DeprecationWarning,
            stacklevel=3,
        )
    if probe not in (True, False, ONCE, ALWAYS):
        raise ValueError(f"add_hooks was given probe={probe!r}; expected True, False, {ONCE!r} or {ALWAYS!r}" + ON_HOOKS)
    if segments is not None:
        check_segments(segments, "add_hooks")
    if segments is not None and (independent or not probe or batch_dim != 0):
        raise ValueError(
            f"add_hooks was given segments with independent={independent}, probe={probe!r}, batch_dim={batch_dim!r}: that "
            "documents are independent is shown by proofs of their gradients alone, with the samples on axis 0. Leave these "
            "out; for private training give each document as a sample of its own, padded." + ON_SEGMENTS
        )
    if left_out and not param_grad:
        raise ValueError(
            "add_hooks was given only=... with param_grad=False, after which nothing would bring the gradients of the "
            f"{len(left_out)} parameters that are left out. Leave param_grad out." + ON_HOOKS
        )
    known = _recorder_of(model)
    recorder = Recorder() if known is None else known
    record = recorder.record
    before = (
        None
        if known is None
        else (known.planner, known.backward.wants_grad, known.pool.reuse, record.left_out, known.segments)
    )
    record.left_out = frozenset(left_out)
    try:
        _hook_all(recorder, model)
        recorder.plan_by(Planner(model, batch_dim, probe, independent))
        recorder.backward.wants_grad, recorder.pool.reuse, recorder.segments = param_grad, reuse, segments
        recorder.attach()
    except BaseException:
        if known is None:
            _take_off(recorder, model)
        elif before is not None:
            record.left_out = before[3]
        raise
    return Hooked(model, before)


def _hook_all(recorder: Recorder, model: nn.Module) -> None:
    """Puts hooks on a model and its layers, but for those that are there."""
    parts, forward = parts_of_composites(model), recorder.forward
    forward.forget_edges()
    # Modules that read parameters which no layer's rule covers may be called by themselves.
    left_out = recorder.record.left_out
    asked = {id(p) for name, p in model.named_parameters() if name not in left_out} if left_out else None
    own_readers = {m for m in uncovered(model) if getattr(type(m), "forward", None) is not nn.Module.forward}
    for path, layer in model.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            continue
        there = own_hooks(recorder, layer)
        for own in there:
            own.path = path  # which may be another than it was
        by_rule, does = layer not in parts and rule_for(layer), [own.then for own in there]
        if by_rule and asked is not None:
            wanted = [p for p in covered(layer).values() if id(p) in asked]
            # Vectors are read where autograd's own nodes are come by, which keeps neither inputs nor gradients.
            by_rule = by_rule if wanted and not (type(layer) in OF_NODES and all(p.ndim < 2 for p in wanted)) else None
        if by_rule and isinstance(getattr(layer, "dropout", None), int | float) and forward.begin_layer not in does:
            layer.register_forward_pre_hook(Hook(recorder, forward.begin_layer, path), with_kwargs=True)
        if by_rule and forward.end_layer not in does:
            # First in line: the rules need what the layer itself returned, before other hooks change it.
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
        else:  # of an earlier step, when they were asked for
            vars(parameter).pop("grad1", None)
    put_around_all(model, recorder)


def remove_hooks(model: nn.Module) -> None:
    """Leaves the model as it was before `add_hooks`: no hooks, no records, no ``grad1``, no curvature.

    Warns where it had no hooks.
    """
    recorder = _recorder_of(model)
    if recorder is None:
        warnings.warn(f"remove_hooks: {type(model).__name__} has no hooks", stacklevel=2)
        return
    with restored(partial(_take_off, recorder, model)):  # wholly, even if an interrupt comes
        pass


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


def enable_hooks() -> None:
    """Undoes `disable_hooks`."""
    Switch.enabled = True


def disable_hooks() -> None:
    """Stops all recording, everywhere in the process, until `enable_hooks`.  What was recorded before stays."""
    Switch.enabled = False


@contextmanager
def pause_hooks() -> Iterator[None]:
    """A context in which nothing is recorded, everywhere in the process; afterwards all is as it was before."""
    with Switch.paused():
        yield


def clear_backprops(model: nn.Module) -> None:
    """Forgets the recorded backward passes and frees their memory.

    A training loop doesn't need it: a backward pass from a later forward replaces the record.  ``grad1`` stays.

    Raises NothingRecorded where the model has no hooks.
    """
    recorder_of(model).record.clear("clear_backprops(model) has cleared the record; run a forward and a backward pass")


def recorder_of(model: nn.Module) -> Recorder:
    """The model's records.  Raises NothingRecorded where it has no hooks, TypeError where it is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a torch.nn.Module, the one that add_hooks was given; got {type(model).__name__}" + ON_HOOKS
        )
    recorder = _recorder_of(model)
    if recorder is None:
        raise NothingRecorded(
            f"this {type(model).__name__} has no hooks. Call autograd_hacks.add_hooks on this very object, before the "
            "forward pass, or hooks.on() where they are off; a copy of a hooked model, a part of it or a wrapper around it "
            "counts as another." + ON_HOOKS
        )
    return recorder


class Hooked(Shown):
    """What `add_hooks` returns: the handle of a model's hooks, and a context that removes the hooks it added.

    It prints as a table of the model's settings and of what is recorded.
    """

    def __init__(self, model: nn.Module, before: Settings | None) -> None:
        self._model, self._before = model, before  # the settings that the model had, where it had hooks
        self._resting: Recorder | None = None  # the model's, while its hooks are off

    @property
    def settings(self) -> dict[str, Any]:
        """What `add_hooks` was told, by the names of its arguments; ``left_out`` has the names that ``only`` left out.

        Raises NothingRecorded where the hooks were removed.
        """
        recorder = self._resting or recorder_of(self._model)
        planner = recorder.planner
        return {
            "batch_dim": planner.batch_dim,
            "probe": planner.probes,
            "param_grad": recorder.backward.wants_grad,
            "reuse": recorder.pool.reuse,
            "independent": planner.independent,
            "segments": recorder.segments,
            "left_out": sorted(recorder.record.left_out),
        }

    def remove(self) -> None:
        """Takes the hooks off for good, as `remove_hooks` does.  Where there are none, nothing happens."""
        if self._resting is not None:
            self.on()
        if _recorder_of(self._model) is not None:
            remove_hooks(self._model)

    def pause(self) -> AbstractContextManager[None]:
        """A context in which nothing is recorded, of any model in the process: `pause_hooks`."""
        return pause_hooks()

    def off(self) -> None:
        """Takes the hooks off the model until `on`: between, its steps cost what they cost without the library, and nothing
        of them can be read.  What was proven of its forwards stays.

        Raises NothingRecorded where the hooks were removed.
        """
        if self._resting is None:
            recorder = recorder_of(self._model)
            with restored(partial(_unhook, recorder, self._model)):
                self._resting = recorder

    def on(self) -> None:
        """Puts the hooks back; layers that were added since `off` get theirs.  Where the hooks are on, nothing happens.

        Raises NothingRecorded where the hooks were removed.
        """
        recorder, self._resting = self._resting, None
        if recorder is None or _recorder_of(self._model) is not None:
            recorder_of(self._model)
            return
        recorder.attach()
        _hook_all(recorder, self._model)

    def _table(self) -> Table:
        recorder, kind = _recorder_of(self._model), type(self._model).__name__
        if recorder is None:
            return Table(f"<hooks of a {kind}, {'off' if self._resting is not None else 'removed'}>")
        layers, batch_dim, wanted = len(recorder.layers), recorder.planner.batch_dim, recorder.backward.wants_grad
        title = f"<hooks of a {kind}: {layers} modules, batch_dim={batch_dim!r}, param_grad={wanted}>"
        rows = [("setting", "value"), ("modules", str(layers))]
        for what, own in (("trained", True), ("frozen", False)):
            rows.append((what, _counted([p for p in self._model.parameters() if p.requires_grad == own])))
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
            planner, recorder.backward.wants_grad, recorder.pool.reuse, recorder.record.left_out, recorder.segments = (
                self._before
            )
            _hook_all(recorder, self._model)  # of parameters that were left out since
            recorder.plan_by(planner)


def _counted(parameters: list[nn.Parameter]) -> str:
    known = [p for p in parameters if not is_lazy(p)]
    more = f", {len(parameters) - len(known)} of unknown size" if len(known) < len(parameters) else ""
    return f"{len(parameters)} parameters, {sum(p.numel() for p in known)} numbers{more}"


def _begin(recorder: Recorder, path: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not path and COMPILER in sys.modules:
        put_around_all(model, recorder)  # what has been compiled since
    recorder.begin(path, model, args, kwargs)


def _recorder_of(model: nn.Module) -> Recorder | None:
    hooks = (hook for hook in model._forward_pre_hooks.values() if isinstance(hook, Hook) and not hook.path)
    return next((hook.recorder for hook in hooks), None)


class Hook:
    """A hook: calls a method of the recorder's with a module's path and what torch gives hooks.

    Behind a forward it also says whether it stands first.  A copy of its module, by deepcopy or pickle, gets a hook that
    only removes itself.
    """

    def __init__(self, recorder: Recorder, then: Callable[..., Any], path: str = "") -> None:
        self.recorder, self.then, self.path = recorder, then, path

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        if torch.compiler.is_compiling():  # a compiled forward has no hooks; its gradients are noticed when they arrive
            return None
        if not output:
            return self.then(self.path, module, args, kwargs)
        # Whether no hook came before but the library's own, which hand on what the module returned.
        for hook in module._forward_hooks.values():
            if hook is self or not isinstance(hook, Hook):
                break
        return self.then(self.path, module, args, kwargs, *output, hook is self)

    def __reduce__(self) -> tuple[type[_Unhooked], tuple[()]]:
        return _Unhooked, ()


def own_hooks(recorder: Recorder, module: nn.Module) -> list[Hook]:
    """A recorder's hooks on a module."""
    every = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [hook for hook in every if isinstance(hook, Hook) and hook.recorder is recorder]


def drop(module: nn.Module, hook: Hook | _Unhooked) -> None:
    """Takes a hook off, as its handle would."""
    tables: tuple[dict[int, Any], ...] = (module._forward_pre_hooks, module._forward_hooks)
    for key in [key for table in tables for key, other in table.items() if other is hook]:
        for table in (*tables, module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs):
            table.pop(key, None)
        module._forward_hooks_always_called.pop(key, None)


class _Unhooked:
    """What is left of a hook in a copy of a hooked model, until the copy first runs."""

    def __call__(self, module: nn.Module, *_: object) -> None:
        drop(module, self)
