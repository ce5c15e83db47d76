"""Hooks on a model and its layers, and the switches for them.  No mathematics."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.wrappers import check_hookable, check_one_process
from autograd_hacks.errors import NothingRecorded
from autograd_hacks.probe.batch import BatchDim
from autograd_hacks.probe.plan import Plan
from autograd_hacks.probe.planner import Planner
from autograd_hacks.rules.table import parts_of_composites, rule_for
from autograd_hacks.support.switch import Switch


def add_hooks(
    model: nn.Module, batch_dim: BatchDim = 0, probe: bool = True, param_grad: bool = True, reuse: bool = True
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

    Called again it hooks the layers that were added since, and no layer twice, and takes the new settings.  As a context
    manager it removes the hooks at the end, unless the model had hooks before, which then have their ``param_grad`` again::

        with autograd_hacks.add_hooks(model):
            ...

    Outputs, gradients and ``state_dict`` stay as they are.  Copies of the model (deepcopy, pickle) have no hooks.

    Raises TypeError where ``model`` is no ``torch.nn.Module``, or a scripted, compiled or DataParallel one, and
    ParamGradSkipped for ``param_grad=False`` with DistributedDataParallel or FSDP; so does ``torch.autograd.grad`` with
    respect to parameters then.  The model's forward then raises ValueError for a tree of axes that doesn't fit its
    arguments, ProbeFailed where it can't run the probe, and ShardedParameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"add_hooks was given an object of type {type(model).__name__}; expected a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("add_hooks was given a scripted module, which takes no hooks; expected the module it was made from")
    check_hookable(model)
    if not param_grad:
        check_one_process(model)
    known = _recorder_of(model)
    recorder = Recorder() if known is None else known
    if known is None:
        first, last = _Hook(recorder, partial(_begin, recorder)), _Hook(recorder, recorder.end)
        recorder.handles.append(model.register_forward_pre_hook(first, prepend=True, with_kwargs=True))
        recorder.handles.append(model.register_forward_hook(last, with_kwargs=True, always_call=True))
    before = recorder.param_grad.wanted
    recorder.param_grad.wanted, recorder.pool.reuse = param_grad, reuse
    if not param_grad:
        recorder.watch_steps()
    parts, forward = parts_of_composites(model), recorder.forward
    for path, layer in model.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            continue
        for own in (*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()):
            if isinstance(own, _Hook) and own.recorder is recorder:
                own.path = path  # which may be another than it was
        by_rule = layer not in parts and rule_for(layer)
        has_dropout = isinstance(getattr(layer, "dropout", None), int | float)
        if by_rule and layer not in recorder.begun and (not param_grad or has_dropout):
            recorder.begun.add(layer)
            hook = _Hook(recorder, forward.begin_layer, path)
            recorder.handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        if layer in recorder.layers:
            continue
        recorder.layers.add(layer)
        if by_rule:
            # First in line: the rules need what the layer itself returned, before other hooks change it.
            hook = _Hook(recorder, forward.end_layer, path)
            handle = layer.register_forward_hook(hook, prepend=True, with_kwargs=True, always_call=True)
            recorder.handles.append(handle)
    recorder.plan_by(Planner(model, batch_dim, probe))
    for name, parameter in model.named_parameters():
        recorder.record.names[parameter] = name
        recorder.backward.watch(parameter)
    _hook_units(recorder, model, recorder.planner.static)
    return Hooked(model, known is None, before)


def remove_hooks(model: nn.Module) -> None:
    """Leaves the model as it was before `add_hooks`: no hooks, no records, no ``grad1``, no curvature.

    Warns where it had no hooks.
    """
    recorder = _recorder_of(model)
    if recorder is None:
        warnings.warn(f"remove_hooks: {type(model).__name__} has no hooks", stacklevel=2)
        return
    recorder.detach()
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
    Switch.pauses += 1
    try:
        yield
    finally:
        Switch.pauses -= 1


def clear_backprops(model: nn.Module) -> None:
    """Forgets the recorded backward passes and frees their memory.

    A training loop doesn't need it: a backward pass from a later forward replaces the record.  ``grad1`` stays.

    Raises NothingRecorded where the model has no hooks.
    """
    recorder_of(model).record.clear("clear_backprops(model) has cleared the record; run a forward and a backward pass")


def recorder_of(model: nn.Module) -> Recorder:
    """The model's records.  Raises NothingRecorded where it has no hooks, TypeError where it is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, the one that add_hooks was given; got {type(model).__name__}")
    recorder = _recorder_of(model)
    if recorder is None:
        raise NothingRecorded(
            f"this {type(model).__name__} has no hooks. Call autograd_hacks.add_hooks on this very object, before the "
            "forward pass; a copy of a hooked model, a part of it or a wrapper around it counts as another."
        )
    return recorder


class Hooked:
    """What `add_hooks` returns: a context that removes the hooks it added."""

    def __init__(self, model: nn.Module, is_new: bool, param_grad: bool) -> None:
        self._model, self._is_new, self._param_grad = model, is_new, param_grad

    def __repr__(self) -> str:
        recorder, kind = _recorder_of(self._model), type(self._model).__name__
        if recorder is None:
            return f"<hooks of a {kind}, removed>"
        layers, batch_dim = len(recorder.layers), recorder.planner.batch_dim
        return f"<hooks of a {kind}: {layers} modules, batch_dim={batch_dim!r}, param_grad={recorder.param_grad.wanted}>"

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        recorder = _recorder_of(self._model)
        if recorder is not None and self._is_new:
            remove_hooks(self._model)
        elif recorder is not None:
            recorder.param_grad.wanted = self._param_grad


class _Hook:
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
            if hook is self or not isinstance(hook, _Hook):
                break
        return self.then(self.path, module, args, kwargs, *output, hook is self)

    def __reduce__(self) -> tuple[type[_Unhooked], tuple[()]]:
        return _Unhooked, ()


def _begin(recorder: Recorder, path: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    plan = recorder.begin(model, args, kwargs)
    if plan is not None:
        _hook_units(recorder, model, plan)
        recorder.prove_plan(model, args, kwargs)
        recorder.forward.begin_unit(path, model, args, kwargs)


def _hook_units(recorder: Recorder, model: nn.Module, plan: Plan) -> None:
    """Has the calls of modules kept that a plan runs again."""
    for path in plan.units:
        module = model.get_submodule(path)
        if module not in recorder.units:
            recorder.units.add(module)
            begins, ended = (_Hook(recorder, f, path) for f in (recorder.forward.begin_unit, recorder.forward.end_unit))
            if path:  # for the model itself `_begin` does it, when the plan is known
                handle = module.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)
                recorder.handles.append(handle)
            recorder.handles.append(module.register_forward_hook(ended, prepend=True, with_kwargs=True))


def _recorder_of(model: nn.Module) -> Recorder | None:
    hooks = (hook for hook in model._forward_pre_hooks.values() if isinstance(hook, _Hook))
    return next((hook.recorder for hook in hooks if isinstance(hook.then, partial) and hook.then.func is _begin), None)


class _Unhooked:
    """What is left of a hook in a copy of a hooked model, until the copy first runs."""

    def __call__(self, module: nn.Module, *_: object) -> None:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
                module._forward_pre_hooks_with_kwargs.pop(key, None)
