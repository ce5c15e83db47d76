"""Wrappers in or around a hooked model that reduce its gradients over processes, or that hooks can't follow.

No mathematics.
"""

import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autograd_hacks.errors import ON_PROCESSES, NotReduced, ShardedParameters, UnseenGradient, where
from autograd_hacks.support.parts import has_parts, is_part, may_have_parts
from autograd_hacks.support.switch import NO_TASK, Switch, current_task
from autograd_hacks.support.trees import tensors_of

LATEST = 1024
"""How many forwards are remembered: many more than a record can contain."""

_REDUCES, _COUNTED = "require_backward_grad_sync", "_static_graph_delay_allreduce_enqueued"


class Reduction:
    """For one hooked model: which of its forwards DistributedDataParallel runs, and which of these it reduces."""

    def __init__(self) -> None:
        self._forwards: list[tuple[int, weakref.ref[DistributedDataParallel]]] = []  # the latest, by number, in order
        self.reducing: list[weakref.ref[DistributedDataParallel]] = []  # the wrappers that reduce the next pass
        self._task = NO_TASK  # the last pass that reached parameters since the last forward
        # The wrappers that must not reduce the running forward's gradients, with their former settings.
        self._held: dict[DistributedDataParallel, dict[str, Any]] = {}

    def begin(self, model: nn.Module, forward: int, param_grad: bool) -> None:
        """Called when a forward begins.  param_grad: whether there will be ordinary gradients to reduce"""
        if not (has_processes() and torch.is_grad_enabled()):
            return
        if Switch.on():
            self.release()
        self.reducing, self._task = [], NO_TASK
        for wrapper in _spreading(model):
            # In the first step with a static graph the reducer only counts, and doesn't show whether it has finished.
            is_counting = wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued
            if Switch.on():
                self._forwards = [*self._forwards[-LATEST:], (forward, weakref.ref(wrapper))]
            if wrapper.require_backward_grad_sync and Switch.on() and not param_grad:
                self._hold(wrapper)
            elif wrapper.require_backward_grad_sync:
                self.reducing += [] if is_counting else [weakref.ref(wrapper)]

    def _hold(self, wrapper: DistributedDataParallel) -> None:
        """Makes a wrapper skip the reduction of the running forward, as within its ``no_sync()``."""
        after, own = wrapper._post_forward, vars(wrapper)
        self._held[wrapper] = {name: own[name] for name in (_REDUCES, _COUNTED) if name in own}
        own.update(dict.fromkeys(self._held[wrapper], False) | ({_COUNTED: True} if _COUNTED in own else {}))

        def end(output: Any) -> Any:
            try:
                return after(output)
            finally:
                self.release()

        vars(wrapper)["_post_forward"] = end  # after this, the forward no longer asks whether to reduce

    def release(self) -> None:
        """Restores the wrappers' settings."""
        while self._held:
            wrapper, before = self._held.popitem()
            vars(wrapper).pop("_post_forward", None)
            vars(wrapper).update(before | {"require_forward_param_sync": True})

    def accumulated(self) -> None:
        """Called when a gradient was added to a parameter's ``.grad``.

        Raises NotReduced if the previous pass was reduced and this one won't be."""
        before, self._task = self._task, current_task()
        if before in (NO_TASK, self._task):
            return
        if any(_has_reduced(wrapper) for reference in self.reducing if (wrapper := reference()) is not None):
            raise NotReduced(
                "a second backward pass reached parameters after one forward pass of DistributedDataParallel, which "
                "reduces only the first. .grad would then hold this process's samples only, and replicas would drift "
                "apart. Run the first forward and backward pass within ddp.no_sync(), and the second pass after another "
                "forward outside of it. Or run all of them within ddp.no_sync(), and reduce .grad yourself "
                "(torch.distributed.all_reduce)."
            )

    def wrapper_of(self, forwards: Collection[int]) -> DistributedDataParallel | None:
        """The wrapper that ran one of the forwards, by number.  If there are no numbers, the last one that ran."""
        ran = [(n, wrapper) for n, wrapper in self._forwards if n in forwards] if forwards else self._forwards[-1:]
        found = (reference() for _, reference in ran)
        return next((wrapper for wrapper in found if wrapper is not None), None)


def _has_reduced(wrapper: DistributedDataParallel) -> bool:
    """Whether no reduction is pending.  Several heads may have a backward pass each, and be reduced after the last one."""
    try:
        wrapper._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def _spreading(model: nn.Module) -> Iterator[DistributedDataParallel]:
    """The wrappers over several processes that run the model or are inside it."""
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)  # the one whose forward runs
    for module in (active, *model.modules()):
        if isinstance(module, DistributedDataParallel) and dist.get_world_size(module.process_group) > 1:
            yield module


def check_whole(model: nn.Module) -> None:
    """Raises if hooks can't follow a forward of the model."""
    if "_is_replica" in vars(model):
        raise TypeError(_over_devices("this model"))
    if Switch.on() and torch.is_grad_enabled():
        check_unsharded(model)


def check_module(who: str, model: object, page: str) -> None:
    """Raises TypeError for what is not a module.  who: the function that was given it    page: the end of the message"""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{who} was given {type(model).__name__} for the model; expected a torch.nn.Module" + page)


def check_hookable(model: nn.Module) -> None:
    """Raises TypeError for a model that runs copies of its modules, which have no hooks."""
    for path, module in model.named_modules():
        if isinstance(module, DataParallel) and len(module.device_ids) > 1:
            raise TypeError(_over_devices(where(path, module)))


def _over_devices(what: str) -> str:
    return (
        f"{what} runs in torch.nn.DataParallel, as copies on several devices. Hooks can't combine their calls. Use one "
        "device, or torch.nn.parallel.DistributedDataParallel." + ON_PROCESSES
    )


def check_unsharded(model: nn.Module) -> None:
    """Raises ShardedParameters if trainable parameters are in shards that can't be read.

    These are shards of FullyShardedDataParallel, or of ``fully_shard`` on a larger model of which this one is a part."""
    if "torch.distributed.fsdp" not in sys.modules or not has_processes():
        return
    gathered = {id(module) for part in gathering(model) for module in part.modules()}
    managed = [m for m in model.modules() if "_is_fsdp_managed_module" in vars(m) and id(m) not in gathered]
    held = {id(p) for module in managed for p in module._parameters.values()}  # whole parameters, while its forward runs
    if names := [name for name, p in (model.named_parameters() if held else ()) if id(p) in held and p.requires_grad]:
        raise ShardedParameters(
            f"{', '.join(names)}: split over processes, so rows would be missing. Either FullyShardedDataParallel (FSDP1) "
            "flattened and split them, or fully_shard split a larger model of which this one is a part. Use "
            "torch.distributed.fsdp.fully_shard, and hook the model that it was called on last. Or keep whole parameters on "
            "each process (DistributedDataParallel), or freeze them: requires_grad_(False)."
        )


def gathering(model: nn.Module) -> list[Any]:
    """The modules on which ``fully_shard`` was called (``FSDPModule``), which gather whole parameters while they run."""
    sharded: Any = sys.modules.get("torch.distributed.fsdp")
    return [m for m in model.modules() if isinstance(m, sharded.FSDPModule)] if sharded and has_processes() else []


def has_processes() -> bool:
    return _CAN_HAVE and dist.is_initialized()


_CAN_HAVE = dist.is_available()


def check_undivided(model: nn.Module, arguments: Any) -> None:
    """Raises if processes divide a sample's own gradient among them, so that none of them has whole rows.

    Tensor and pipeline parallelism raise ShardedParameters, context parallelism UnseenGradient, and DTensors among the
    arguments TypeError.
    """
    if _is_in_pipeline():
        raise ShardedParameters(
            "torch.distributed.pipelining runs this model as one stage of a pipeline, so this process has only a part of "
            "each sample's gradient. Pipelines are not supported. Use torch.distributed.fsdp.fully_shard, or "
            "DistributedDataParallel, on the whole model; or run the schedule within autograd_hacks.pause_hooks()."
        )
    if not may_have_parts():
        return
    if _is_context_parallel():
        raise UnseenGradient(
            "torch.distributed.tensor.experimental.context_parallel is on, so each process has only some positions of "
            "every sample, and this process sees only a part of a sample's gradient. Leave the context; to save memory, use "
            "torch.distributed.fsdp.fully_shard and shorter micro-batches."
        )
    for x in tensors_of(arguments):
        if is_part(x):
            raise TypeError(
                f"the hooked model got a DTensor of shape {tuple(x.shape)}; expected this process's local tensor. Call "
                "x.to_local()."
            )
    if has_parts(model):
        gathered = {id(p) for part in gathering(model) for p in part.parameters()}  # layers get whole tensors instead
        refuse_parts([name for name, p in model.named_parameters() if is_part(p) and id(p) not in gathered])


def refuse_parts(names: Sequence[str]) -> None:
    """Raises ShardedParameters for parameters that are DTensors while layers run.  names: theirs"""
    if names:
        raise ShardedParameters(
            f"{', '.join(names)}: split over processes while layers run (a DTensor, as parallelize_module and "
            "distribute_module make them), so each process has only a part of a sample's gradient. Tensor parallelism is "
            "not supported. Use torch.distributed.fsdp.fully_shard, which gathers a layer's parameters while it runs, or "
            "DistributedDataParallel."
        )


def _is_in_pipeline() -> bool:
    """Whether a stage of ``torch.distributed.pipelining`` runs the forward."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    frame = sys._getframe(1) if module is not None else None
    while frame is not None and frame.f_globals is not vars(module):
        frame = frame.f_back
    return frame is not None


def _is_context_parallel() -> bool:
    """Whether attention currently exchanges keys and values around a ring of processes."""
    ring = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if ring is None:
        return False
    dispatcher: Any = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher
    return ring._sdpa_handler in dispatcher._custom_op_handlers.values()
