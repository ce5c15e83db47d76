"""Hooks on a model and its layers, and the switches for them.  No mathematics."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from autograd_hacks.capture.forward import Recorder
from autograd_hacks.capture.wrappers import check_hookable, check_one_process, check_unwrapped
from autograd_hacks.errors import NothingRecorded
from autograd_hacks.probe.batch import BatchDim
from autograd_hacks.probe.planner import Planner
from autograd_hacks.probe.trace import SurveyHook
from autograd_hacks.rules.table import parts_of_composites, rule_for
from autograd_hacks.support.switch import NO_TASK, Switch, current_task
from autograd_hacks.support.trees import tensors_of


def add_hooks(
    model: nn.Module, batch_dim: BatchDim = 0, probe: bool = True, param_grad: bool = True, reuse: bool = True
) -> Hooked:
    """Hooks ``model``, so that a backward pass leaves what `compute_grad1` needs for every parameter.

    batch_dim: where the samples are in the model's arguments. An axis for all of them; or a tree of axes, None for what
    has no samples: a tuple like the positional arguments, as ``in_dims`` of ``torch.func.vmap``, or a dictionary by
    keyword. None where no argument tells
    probe: whether the first forward of each kind (dtypes, ranks, training flags) is run once more before, with half of the
    samples replaced, to find out where samples are in every layer, whether they mix, and where parameters are read. False
    takes axis 0 of every layer's input for the batch, and a parameter for read by its own layer alone
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
    root = _root_hook(model)
    is_new = root is None
    if root is None:
        recorder = Recorder()
        root = _ForwardBegins(recorder)
        root.handles.append(model.register_forward_pre_hook(root, prepend=True, with_kwargs=True))
        root.handles.append(model.register_forward_hook(_ForwardEnds(recorder, root), always_call=True))
    recorder = root.recorder
    before = recorder.skipper.param_grad
    recorder.skipper.param_grad, recorder.reuse = param_grad, reuse
    parts = parts_of_composites(model)
    for path, layer in model.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            continue
        by_rule = layer not in parts and rule_for(layer)
        if (
            by_rule
            and layer not in root.begun
            and (not param_grad or isinstance(getattr(layer, "dropout", None), int | float))
        ):
            root.begun.add(layer)
            root.handles.append(layer.register_forward_pre_hook(_LayerBegins(recorder, path), with_kwargs=True))
        if layer in recorder.layers:
            continue
        recorder.layers.add(layer)
        if by_rule:
            # First in line: the rules need what the layer itself returned, before other hooks change it.
            hook = _LayerRan(recorder, path)
            root.handles.append(layer.register_forward_hook(hook, prepend=True, with_kwargs=True, always_call=True))
    root.planner = Planner(model, recorder, batch_dim, probe, root.hook_unit)
    for parameter in model.parameters():
        recorder.watch(parameter)
        recorder.skipper.own[parameter] = True
    return Hooked(model, is_new, before)


def remove_hooks(model: nn.Module) -> None:
    """Leaves the model as it was before `add_hooks`: no hooks, no records, no ``grad1``, no curvature.

    Warns where it had no hooks.
    """
    root = _root_hook(model)
    if root is None:
        warnings.warn(f"remove_hooks: {type(model).__name__} has no hooks", stacklevel=2)
        return
    root.recorder.detach()
    for handle in root.handles:
        handle.remove()
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


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """A context in which the rows of several forward and backward passes are appended, for micro-batches::

        with autograd_hacks.accumulate(model):
            for x, y in micro_batches:
                loss_fn(model(x), y).backward()
        autograd_hacks.compute_grad1(model)

    With ``loss_type='mean'`` each loss is taken for the mean over its own micro-batch, so that a row is the gradient of
    its sample's loss however large the micro-batch was.  An exception throws the rows away.

    Raises NothingRecorded where the model has no hooks, RuntimeError inside another `accumulate` of the same model.
    """
    recorder = recorder_of(model)
    if recorder.accumulating:
        raise RuntimeError("accumulate: this model is accumulating already; leave that context first")
    recorder.clear()
    recorder.accumulating = True
    try:
        yield
    except BaseException as error:
        recorder.clear(f"accumulate(model) was left by {type(error).__name__} and its rows were thrown away; run it again")
        raise
    finally:
        recorder.accumulating = False


def clear_backprops(model: nn.Module) -> None:
    """Forgets the recorded backward passes and frees their memory.

    A training loop doesn't need it: a backward pass from a later forward replaces the record.  ``grad1`` stays.

    Raises NothingRecorded where the model has no hooks.
    """
    recorder_of(model).clear("clear_backprops(model) has cleared the record; run a forward and a backward pass")


def recorder_of(model: nn.Module) -> Recorder:
    """The model's records.  Raises NothingRecorded where it has no hooks, TypeError where it is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, the one that add_hooks was given; got {type(model).__name__}")
    root = _root_hook(model)
    if root is None:
        raise NothingRecorded(
            f"this {type(model).__name__} has no hooks. Call autograd_hacks.add_hooks on this very object, before the "
            "forward pass; a copy of a hooked model, a part of it or a wrapper around it counts as another."
        )
    return root.recorder


class Hooked:
    """What `add_hooks` returns: a context that removes the hooks it added."""

    def __init__(self, model: nn.Module, is_new: bool, param_grad: bool) -> None:
        self._model, self._is_new, self._param_grad = model, is_new, param_grad

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        root = _root_hook(self._model)
        if root is not None and self._is_new:
            remove_hooks(self._model)
        elif root is not None:
            root.recorder.skipper.param_grad = self._param_grad


class _Hook:
    """A hook; a copy of its module, by deepcopy or pickle, gets one that only removes itself."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __reduce__(self) -> tuple[type[_Unhooked], tuple[()]]:
        return _Unhooked, ()


class _ForwardBegins(_Hook):
    """On the model itself.  The records and the way back hang on it, so that they live as long as the model."""

    planner: Planner

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.handles: list[RemovableHandle] = []
        self.begun: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # layers with a hook where they begin
        self._units: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        # Checkpointing runs a model without gradients at first, and its input asks for them all the same.
        self.recorder.begin_forward(torch.is_grad_enabled() or any(x.requires_grad for x in tensors_of((args, kwargs))))
        self.recorder.reduction.begin(model, self.recorder.forwards)
        if self.recorder.records():
            self.planner.begin(model, args, kwargs)
            # Not before the sums of a plan's rows were once compared with the gradients that arrived.
            skipper = self.recorder.skipper
            if current_task() == NO_TASK:  # what checkpointing runs again must save what it saved before
                skipper.skips = not (skipper.param_grad or self.recorder.plan.watched)
            if skipper.skips:
                check_unwrapped()
            self.recorder.begin_unit("", model, args, kwargs)
        self.recorder.in_forward = True

    def hook_unit(self, path: str, module: nn.Module) -> None:
        """Has a module's calls kept, for them to be run again where the plan says so."""
        if module not in self._units:
            self._units.add(module)
            begins, ran = _UnitBegins(self.recorder, path), _UnitRan(self.recorder, path)
            if path:  # for the model itself this hook does it, when the plan is known
                self.handles.append(module.register_forward_pre_hook(begins, prepend=True, with_kwargs=True))
            self.handles.append(module.register_forward_hook(ran, prepend=True, with_kwargs=True))


class _ForwardEnds(_Hook):
    def __init__(self, recorder: Recorder, root: _ForwardBegins) -> None:
        super().__init__(recorder)
        self._root = root

    def __call__(self, model: nn.Module, args: object, output: object) -> None:
        if not torch.compiler.is_compiling() and Switch.on():
            self.recorder.in_forward = False
            self._root.planner.end(model, output)


class _LayerBegins(_Hook):
    """On layers with dropout inside, and on all by rule where no ordinary gradients are to be computed."""

    def __init__(self, recorder: Recorder, path: str) -> None:
        super().__init__(recorder)
        self.path = path

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self.recorder.begin_layer(self.path, layer, args, kwargs)


class _LayerRan(_Hook):
    def __init__(self, recorder: Recorder, path: str) -> None:
        super().__init__(recorder)
        self.path = path

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if torch.compiler.is_compiling():  # a compiled forward has no hooks; its gradients are noticed when they arrive
            return output
        if output is None:  # the layer has failed
            self.recorder.end_failed(layer)
            return None
        return self.recorder.visit(self.path, layer, args, kwargs, output, self._is_first(layer))

    def _is_first(self, layer: nn.Module) -> bool:
        """Whether no hook came before but the library's own, which hand on what the layer returned."""
        for hook in layer._forward_hooks.values():
            if hook is self:
                return True
            if not isinstance(hook, _LayerRan | SurveyHook):
                return False
        return False


class _UnitBegins(_Hook):
    """On modules that are run again."""

    def __init__(self, recorder: Recorder, path: str) -> None:
        super().__init__(recorder)
        self.path = path

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self.recorder.begin_unit(self.path, module, args, kwargs)


class _UnitRan(_LayerRan):
    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if torch.compiler.is_compiling():
            return output
        return self.recorder.end_unit(self.path, layer, output, self._is_first(layer))


class _Unhooked:
    """What is left of a hook in a copy of a hooked model, until the copy first runs."""

    def __call__(self, module: nn.Module, *_: object) -> None:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _root_hook(model: nn.Module) -> _ForwardBegins | None:
    return next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, _ForwardBegins)), None)
