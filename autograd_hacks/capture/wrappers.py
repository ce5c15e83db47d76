"""Wrappers around a hooked model, or inside it, that reduce its gradients over processes or that hooks can't follow.

No mathematics.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autograd_hacks.errors import NotReduced, ParamGradSkipped, ShardedParameters, where
from autograd_hacks.support.parts import is_part
from autograd_hacks.support.switch import NO_TASK, Switch, current_task
from autograd_hacks.support.trees import modules_of

LATEST = 1024
"""How many forwards are remembered, whose gradients are reduced: many more than a record can be of."""


class Reduction:
    """Of one hooked model: which of its forwards DistributedDataParallel reduces the gradients of."""

    def __init__(self) -> None:
        self._forwards: deque[int] = deque(maxlen=LATEST)
        self.reducing: list[weakref.ref[DistributedDataParallel]] = []  # the wrappers that reduce the next pass
        self._task = NO_TASK  # the last pass that has come to parameters since the last forward

    def begin(self, model: nn.Module, forward: int) -> None:
        """Hears of a forward of the model, by its number, and raises where it is one that hooks can't follow."""
        if "_is_replica" in vars(model):
            raise TypeError(_over_devices("this model"))
        if not (_has_processes() and torch.is_grad_enabled() and current_task() == NO_TASK):
            return
        if Switch.on():
            check_unsharded(model)
        self.reducing, self._task = [], NO_TASK
        for wrapper in _reducing(model):
            # In the first step with a static graph the reducer but counts, and doesn't tell whether it has finished.
            is_counting = wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued
            if wrapper.require_backward_grad_sync:
                self.reducing += [] if is_counting else [weakref.ref(wrapper)]
                self._forwards += [forward] if Switch.on() else []

    def accumulated(self) -> None:
        """Hears that a gradient has been added to a parameter's.  Raises NotReduced where the pass before this one has been
        reduced, and this one will not be."""
        before, self._task = self._task, current_task()
        if before in (NO_TASK, self._task):
            return
        if any(_has_reduced(wrapper) for reference in self.reducing if (wrapper := reference()) is not None):
            raise NotReduced(
                "a second backward pass has come to parameters since the last forward pass of DistributedDataParallel, "
                "which reduces one after each: .grad would hold what this process's samples give, and replicas would drift "
                "apart. Run the first forward and backward pass within ddp.no_sync(), and for the second pass another "
                "forward outside of it; or run all of them within ddp.no_sync(), and reduce .grad yourself "
                "(torch.distributed.all_reduce)."
            )

    def check_local(self, recorded: Iterable[Collection[int]], what: str) -> None:
        """Raises NotReduced where other processes' gradients belong into ``.grad``.

        recorded: the numbers of forwards    what: sets ``.grad`` from what they have left, for people
        """
        if any(forward in forwards for forwards in recorded for forward in self._forwards):
            raise NotReduced(
                f"{what} puts into .grad what this process's samples give, after a forward pass whose gradients "
                "DistributedDataParallel reduces over all processes: replicas would drift apart. Run the forward and the "
                "backward pass within ddp.no_sync(), and reduce .grad yourself afterwards: for each parameter "
                "torch.distributed.all_reduce(p.grad), then p.grad /= torch.distributed.get_world_size() where the loss is "
                "a mean and every process has as many samples."
            )


def _has_reduced(wrapper: DistributedDataParallel) -> bool:
    """Whether no reduction is on its way: heads may have a backward pass each, and be reduced when the last has come."""
    try:
        wrapper._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def _reducing(model: nn.Module) -> Iterator[DistributedDataParallel]:
    """The wrappers over several processes that the model runs in, or that it consists of."""
    for module in (_active(), *modules_of(model)):
        if isinstance(module, DistributedDataParallel) and dist.get_world_size(module.process_group) > 1:
            yield module


def check_hookable(model: nn.Module) -> None:
    """Raises TypeError for a model that runs other modules than those that hooks are put on."""
    for path, module in model.named_modules():
        if isinstance(module, DataParallel) and len(module.device_ids) > 1:
            raise TypeError(_over_devices(where(path, module)))
        if isinstance(getattr(module, "_orig_mod", None), nn.Module):
            raise TypeError(
                f"{where(path, module)} is what torch.compile has returned, and compiled code has no hooks. Call add_hooks "
                "on the model that it was made from (compiled._orig_mod), and run that one in steps whose per-sample "
                "gradients you read; the compiled one, which has the same parameters, in all others. A model that compiled "
                'itself, by model.compile(), runs with hooks within torch.compiler.set_stance("force_eager").'
            )


def _over_devices(what: str) -> str:
    return (
        f"{what} runs in torch.nn.DataParallel, as copies on several devices at a time, whose calls the hooks can't put "
        "together. Use one device, or torch.nn.parallel.DistributedDataParallel."
    )


def check_unsharded(model: nn.Module) -> None:
    """Raises ShardedParameters where FSDP holds parameters that train, and hands layers others in their place."""
    if not _has_processes():
        return
    old, new = _sharded(model)
    if old:
        raise ShardedParameters(
            f"processes hold parts of {', '.join(old)}: FullyShardedDataParallel (FSDP1) lays parameters of many layers end "
            "to end and cuts them anywhere, so that rows would be missing. Shard each block, and the model, with "
            "torch.distributed.fsdp.fully_shard instead; or keep whole ones on each process (DistributedDataParallel)."
        )
    if new:
        raise ShardedParameters(
            f"processes hold parts of {', '.join(new)} (fully_shard). What layers compute with are other tensors, so that "
            "rows would be missing: they are not supported yet. Keep whole ones on each process (DistributedDataParallel), "
            "or freeze them: requires_grad_(False)."
        )


def _sharded(model: nn.Module) -> tuple[list[str], list[str]]:
    """The parameters that train and that FullyShardedDataParallel has cut, and those that fully_shard has, by name."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # takes a second to import, and has been where there is any
    if fsdp is None:
        return [], []
    modules, old, new = modules_of(model), set[int](), set[int]()
    inside = {id(m) for module in modules if isinstance(module, fsdp.FSDPModule) for m in module.modules()}
    for module in modules:
        parameters = [p for p in module._parameters.values() if p is not None]
        if "_is_fsdp_managed_module" in vars(module):  # while its forward runs, whole ones stand in the place of the parts
            is_new = id(module) in inside or any(map(is_part, parameters))
            (new if is_new else old).update(map(id, parameters))
    named = [(name, id(p)) for name, p in (model.named_parameters() if old or new else ()) if p.requires_grad]
    return [name for name, key in named if key in old], [name for name, key in named if key in new]


def check_one_process(model: nn.Module) -> None:
    """Raises ParamGradSkipped for a model whose gradients a wrapper reduces over processes, as they arrive."""
    wrappers: list[type] = [DistributedDataParallel]
    if dist.is_available():
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        wrappers += [FullyShardedDataParallel, FSDPModule]
    for module in model.modules():
        if isinstance(module, tuple(wrappers)):
            raise _drifts(type(module))


def check_unwrapped() -> None:
    """Raises ParamGradSkipped inside the forward of DistributedDataParallel, whatever model runs in it."""
    active = _active()
    if active is not None:
        raise _drifts(type(active))


def _drifts(wrapper: type) -> ParamGradSkipped:
    return ParamGradSkipped(
        f"the model was hooked by add_hooks(param_grad=False) and is wrapped in {wrapper.__name__}, which reduces "
        "ordinary gradients over processes when they arrive; here none do, so that replicas would drift apart. Use "
        "param_grad=True."
    )


def _active() -> DistributedDataParallel | None:
    """The wrapper whose forward runs."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def counts_passes() -> bool:
    """Whether the forward runs in a DistributedDataParallel whose first pass may be the only one: with ``static_graph`` it
    left gradients unreduced after passes that a proof had run inside."""
    active = _active()
    return active is not None and active.static_graph


def _has_processes() -> bool:
    return dist.is_available() and dist.is_initialized()
