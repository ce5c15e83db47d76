"""Hooks on a model and its layers, and the switches for them.  No mathematics."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.nn.parameter import is_lazy

from autograd_hacks.capture.attached import Hook, drop, guard, own_hooks
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.uncompiled import put_around_all, take_from_around
from autograd_hacks.capture.wrappers import check_hookable
from autograd_hacks.errors import ON_HOOKS, ON_MODES, NothingRecorded
from autograd_hacks.probe.batch import BatchDim
from autograd_hacks.probe.plan import EXPAND, HOOKS, MODES, Plan
from autograd_hacks.probe.planner import Planner
from autograd_hacks.rules.table import parts_of_composites, rule_for
from autograd_hacks.support.display import Shown, Table
from autograd_hacks.support.restored import restored
from autograd_hacks.support.switch import Switch


def add_hooks(
    model: nn.Module,
    batch_dim: BatchDim = 0,
    probe: bool = True,
    param_grad: bool = True,
    reuse: bool = True,
    mode: str = HOOKS,
) -> Hooked:
    """Hooks ``model``, so that a backward pass leaves what `compute_grad1` needs for every parameter.

    batch_dim: where the samples are in the model's arguments. An axis for all of them; or a tree of axes, None for what
    has no samples: a tuple like the positional arguments, as ``in_dims`` of ``torch.func.vmap``, or a dictionary by
    keyword. None where no argument tells
    probe: whether the first forward of each kind (dtypes, ranks, training flags) is run twice more before, as
    it is and with half of the samples replaced, to find out where samples are in every layer, whether they
    mix, and where parameters are read. False takes axis 0 of every layer's input for the batch, and a parameter for read by
    its own layer alone
    param_grad: whether a backward pass fills ``.grad``. False has autograd compute no ordinary weight gradients, which are
    a quarter of a step and more: ``.grad`` is then set by `clip_grad1_norm_`, by ``compute_grad1(set_grad=True)``, or from
    ``per_sample_grads(model).weighted_sum(w)``. They are computed all the same, and thrown away, in the first step of each
    kind, and for modules that are run again: the rows are compared with them
    reuse: whether rows are written into the memory of an earlier step's, where nobody else holds that
    mode: 'hooks'; 'derivatives', for losses with derivatives in them, of any order, and so that `per_sample_grads` after a
    pass with ``create_graph=True`` differentiates; or 'expand', which gives each sample a copy of the weights: N × P numbers
    for each use of them, and ``is_grads_batched`` and forward-mode derivatives too

    Called again it hooks the layers that were added since, and no layer twice, and takes the new settings.  As a context
    manager it removes the hooks at the end, unless the model had hooks before, which then have their settings again::

        with autograd_hacks.add_hooks(model):
            ...

    Outputs, gradients and ``state_dict`` stay as they are, but for last bits in modes other than 'hooks'.  Copies of the
    model (deepcopy, pickle) have no hooks.

    Raises ValueError for another mode, and for 'expand' without a probe; TypeError where ``model`` is no module, or a
    scripted or DataParallel one.  With ``param_grad=False`` ``torch.autograd.grad`` with respect to parameters
    raises ParamGradSkipped.  The model's forward then raises ValueError for a tree of axes that doesn't fit its arguments,
    ProbeFailed where it can't run the probe, and ShardedParameters.
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
    if mode == EXPAND and not probe:
        raise ValueError(
            'add_hooks(mode="expand", probe=False): each read gets a copy of the weights for each sample, and the probe '
            "finds where the samples are there. Leave probe out." + ON_MODES
        )
    known = _recorder_of(model)
    recorder = Recorder() if known is None else known
    before = (recorder.planner, recorder.param_grad.wanted, recorder.pool.reuse) if known is not None else None
    try:
        recorder.plan_by(Planner(model, batch_dim, probe, mode))
        recorder.param_grad.wanted, recorder.pool.reuse = param_grad, reuse
        if not param_grad:
            recorder.watch_steps()
        _hook_all(recorder, model, not param_grad or mode != HOOKS)
    except BaseException:
        if known is None:
            _take_off(recorder, model)
        raise
    return Hooked(model, before)


def _hook_all(recorder: Recorder, model: nn.Module, begin: bool) -> None:
    """Puts hooks on a model and its layers, but for those that are there.  begin: whether in front of each layer, too"""
    if _recorder_of(model) is None:
        first, last = Hook(recorder, partial(_begin, recorder)), Hook(recorder, recorder.end)
        model.register_forward_pre_hook(first, prepend=True, with_kwargs=True)
        model.register_forward_hook(last, with_kwargs=True, always_call=True)
    parts, forward = parts_of_composites(model), recorder.forward
    for path, layer in model.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            continue
        there = [own for _, _, own in own_hooks(recorder, layer)]
        for own in there:
            own.path = path  # which may be another than it was
        by_rule, does = layer not in parts and rule_for(layer), [own.then for own in there]
        has_dropout = isinstance(getattr(layer, "dropout", None), int | float)
        if by_rule and (begin or has_dropout) and forward.begin_layer not in does:
            guard(layer, recorder)
            layer.register_forward_pre_hook(Hook(recorder, forward.begin_layer, path), with_kwargs=True)
        if by_rule and forward.end_layer not in does:
            # First in line: the rules need what the layer itself returned, before other hooks change it.
            hook = Hook(recorder, forward.end_layer, path)
            layer.register_forward_hook(hook, prepend=True, with_kwargs=True, always_call=True)
        recorder.layers.add(layer)
    for name, parameter in model.named_parameters():
        recorder.record.names[parameter] = name
        recorder.backward.watch(parameter)
    _hook_units(recorder, model, recorder.planner.static)
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


def _take_off(recorder: Recorder, model: nn.Module) -> None:
    recorder.detach()
    for module in {*recorder.layers, *model.modules()}:
        for hooks, key, _ in own_hooks(recorder, module):
            drop(module, hooks, key)
        take_from_around(module, recorder)
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
            "forward pass; a copy of a hooked model, a part of it or a wrapper around it counts as another." + ON_HOOKS
        )
    return recorder


class Hooked(Shown):
    """What `add_hooks` returns: a context that removes the hooks it added."""

    def __init__(self, model: nn.Module, before: tuple[Planner, bool, bool] | None) -> None:
        self._model, self._before = model, before  # the settings that the model had, where it had hooks

    def _table(self) -> Table:
        recorder, kind = _recorder_of(self._model), type(self._model).__name__
        if recorder is None:
            return Table(f"<hooks of a {kind}, removed>")
        layers, batch_dim = len(recorder.layers), recorder.planner.batch_dim
        mode, wanted = recorder.planner.mode, recorder.param_grad.wanted
        title = f"<hooks of a {kind}: {layers} modules, batch_dim={batch_dim!r}, mode={mode!r}, param_grad={wanted}>"
        parameters = list(self._model.parameters())
        rows = [("modules", str(layers))]
        for what, own in (("trained", True), ("frozen", False)):
            rows.append((what, _counted([p for p in parameters if p.requires_grad == own])))
        settings = [("batch_dim", repr(batch_dim)), ("mode", mode), ("param_grad", str(wanted))]
        return Table(title, [("setting", "value"), *rows, *settings, *recorder.record.cells()])

    def __enter__(self) -> Hooked:
        return self

    def __exit__(self, *_: object) -> None:
        recorder = _recorder_of(self._model)
        if recorder is not None and self._before is None:
            remove_hooks(self._model)
        elif recorder is not None and self._before is not None:
            planner, recorder.param_grad.wanted, recorder.pool.reuse = self._before
            recorder.plan_by(planner)


def _counted(parameters: list[nn.Parameter]) -> str:
    known = [p for p in parameters if not is_lazy(p)]
    more = f", {len(parameters) - len(known)} of unknown size" if len(known) < len(parameters) else ""
    return f"{len(parameters)} parameters, {sum(p.numel() for p in known)} numbers{more}"


def _begin(recorder: Recorder, path: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if "torch._dynamo" in sys.modules:
        put_around_all(model, recorder)  # what has been compiled since
    known = recorder.begin(model, args, kwargs)
    if known is not None:
        with recorder.together(model, recorder, known):
            plan = recorder.take_plan(model, known, args, kwargs)
            _hook_units(recorder, model, plan)
            _hook_frames(recorder, model, plan)
            recorder.prove_plan(model, args, kwargs)
        if not recorder.is_proving:
            recorder.begin_passes(model)
        recorder.forward.begin_unit(path, model, args, kwargs)
        recorder.forward.begin_reads(model)
        recorder.forward.begin_frame(path, model, args, kwargs)


def _hook_units(recorder: Recorder, model: nn.Module, plan: Plan) -> None:
    """Has the calls of modules kept that a plan runs again."""
    for path in plan.units:
        module, forward = model.get_submodule(path), recorder.forward
        if module in recorder.units:
            continue
        does = [own.then for _, _, own in own_hooks(recorder, module)]
        if path and forward.begin_unit not in does:  # for the model itself `_begin` does it, when the plan is known
            hook = Hook(recorder, forward.begin_unit, path)
            module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        if forward.end_unit not in does:
            module.register_forward_hook(Hook(recorder, forward.end_unit, path), prepend=True, with_kwargs=True)
        recorder.units.add(module)


def _hook_frames(recorder: Recorder, model: nn.Module, plan: Plan) -> None:
    """Has modules watched in whose own code parameters meet the batch past rules, and those that they call."""
    modules, forward = {path: model.get_submodule(path) for path in plan.reading.paths}, recorder.forward
    first = {module: path for path, module in model.named_modules()} if modules else {}
    inner = [child for path, module in modules.items() for child in _children_of(path, module).values()]
    for module in [model, *modules.values(), *inner] if modules else []:
        if module in recorder.frames or isinstance(module, torch.jit.ScriptModule):
            continue
        guard(module, recorder)
        if module is not model:  # for which `_begin` does it, when the plan is known
            hook = Hook(recorder, forward.begin_frame, first[module])
            module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        last = Hook(recorder, forward.end_frame, first[module])
        module.register_forward_hook(last, prepend=True, with_kwargs=True, always_call=True)
        recorder.frames.add(module)


def _children_of(path: str, module: nn.Module) -> dict[str, nn.Module]:
    """The modules by path that a module's own code may call: its children, through containers that are never called."""
    found = {}
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        found[inner] = child
        if getattr(type(child), "forward", None) is nn.Module.forward or isinstance(child, nn.ModuleList | nn.ModuleDict):
            found |= _children_of(inner, child)
    return found


def _recorder_of(model: nn.Module) -> Recorder | None:
    hooks = (hook for hook in model._forward_pre_hooks.values() if isinstance(hook, Hook))
    return next((hook.recorder for hook in hooks if isinstance(hook.then, partial) and hook.then.func is _begin), None)
