"""Parameters that are sharded over processes, and how to run such a model as on one process.  No mathematics."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from autograd_hacks.errors import StaleRecord
from autograd_hacks.extending import Recorder, gathering, refuse_parts
from autograd_hacks.formulas import rule_for
from autograd_hacks.support.parts import is_part, part_of
from autograd_hacks.support.restored import restored
from autograd_hacks.support.trees import map_tensors, version_of

Hooks = dict[int, Callable[..., Any]]


def learn(model: nn.Module, recorder: Recorder) -> None:
    """Gives names to the whole tensors that replace shards while layers run, one ``fully_shard`` module at a time.

    All processes must call it at once.  A gathered tensor is the same object in all steps; only its memory is freed.
    """
    record, parts = recorder.record, gathering(model)
    for module in parts:
        module.reshard()  # after a forward without gradients the outermost is still gathered
    record.cut = dict(model.named_parameters())
    meshes = [p.device_mesh for part in parts for p in part.parameters() if hasattr(p, "device_mesh")]
    record.mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
    for name, shard in record.cut.items():
        record.names[shard] = name
        recorder.backward.watch(shard)
    slots = {id(p): name for name, p in record.cut.items()}
    names = {(id(m), local): slots.get(id(p)) for m in model.modules() for local, p in m._parameters.items()}
    found = list[tuple[str, Tensor]]()
    for module in parts:
        with whole([module]):
            held = [(names[id(m), local], p) for m in module.modules() for local, p in m._parameters.items()]
            found += [(known, p) for known, p in held if known is not None and p is not None and id(p) not in slots]
    refuse_parts([known for known, seen in found if is_part(seen)])
    for known, seen in found:
        record.names[seen] = known
        record.gathered[known] = seen
        recorder.backward.watch(seen)
    recorder.forward.layers.clear()  # which of them layers called by other names


@contextmanager
def whole(modules: Sequence[Any]) -> Iterator[None]:
    """A context in which modules of ``fully_shard`` have whole parameters.  All processes must enter it at once."""

    def undo() -> None:
        for module in modules:
            module.reshard()

    with restored(undo):
        for module in modules:
            module.unshard()
        yield


_QUIET = {
    "require_backward_grad_sync": False,
    "require_forward_param_sync": False,
    "_static_graph_delay_allreduce_enqueued": True,
}
"""Settings that stop DistributedDataParallel from sending buffers and reducing gradients."""


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """A context in which a model runs, forwards and backwards, without communication.

    If shards must be gathered, all processes must enter it at once; then each may run the model any number of times.
    """
    parts = gathering(model)
    wrappers = [vars(module) for module in model.modules() if isinstance(module, DistributedDataParallel)]
    kept = [dict(own) for own in wrappers]
    tables: list[Any] = [table for part in parts for table in (part._forward_pre_hooks, part._forward_hooks)]
    hooks: list[Hooks] = [dict(table) for table in tables]

    def undo() -> None:
        for table, own in zip(tables, hooks):
            table.update({key: hook for key, hook in own.items() if key in table})
        for slots, before in zip(wrappers, kept):
            slots.update(before)
            for name in slots.keys() - before.keys():
                slots.pop(name)

    with whole(parts), restored(undo):
        for part in parts:
            policy = part._get_fsdp_state()._mp_policy
            given = policy.param_dtype if policy.cast_forward_inputs else None
            _stand_in(part._forward_pre_hooks, lambda _, args, kwargs, to=given: (_cast(args, to), _cast(kwargs, to)))
            _stand_in(part._forward_hooks, lambda _, args, output, to=policy.output_dtype: _cast(output, to))
        for slots in wrappers:
            slots.update(_QUIET)
            slots.pop("_post_forward", None)
        yield


def _stand_in(table: Any, hook: Callable[..., Any]) -> None:
    """Replaces the hooks of ``fully_shard`` that gather parameters and free them."""
    for key, own in table.items():
        if getattr(own, "__module__", "").startswith("torch.distributed.fsdp"):
            table[key] = hook


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Casts a module's arguments or outputs as ``MixedPrecisionPolicy`` does."""
    return map_tensors(lambda x: x.to(dtype) if dtype is not None and x.is_floating_point() else x, tree)


def reading_weights(model: nn.Module, names: frozenset[str]) -> list[nn.Module]:
    """The modules of ``fully_shard`` whose parameters' values rows need: a rule recomputes with them, or none covers them.

    names: the parameters that are read from the graph
    """
    parts, needed = gathering(model), dict[int, nn.Module]()
    holder = {id(module): part for part in parts for module in part.modules()}  # the innermost one, which comes last
    for path, module in model.named_modules() if parts else ():
        rule, part = rule_for(module), holder.get(id(module))
        own = [f"{path}.{local}" if path else local for local, p in module._parameters.items() if p is not None]
        is_plain = rule is not None and not rule.recomputes and names.isdisjoint(own)
        if own and part is not None and not is_plain:
            needed[id(part)] = part
    return list(needed.values())


def versions_of_shards(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """How often each shard has been overwritten, by the parameter's name."""
    return {name: version_of(part_of(p)) for name, p in parameters.items() if hasattr(p, "to_local")}


def check_shards(parameters: Mapping[str, Tensor], before: Mapping[str, int]) -> None:
    """Raises StaleRecord if weights on which rows depend have changed since the forward."""
    now = versions_of_shards(parameters)
    changed = [name for name, version in before.items() if now.get(name) != version]
    if changed:
        raise StaleRecord(
            f"{changed[0]}: changed since the forward pass, but rows of recurrent layers, attention and parameters without "
            "a rule depend on the values of weights. Read per-sample gradients before optimizer.step()."
        )
