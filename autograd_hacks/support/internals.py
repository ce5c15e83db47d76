"""All of torch's internal names that the package uses, each in one place.  Seen in torch 2.11, 2.12 and 2.13.

Exceptions are attributes of ``nn.Module`` and of tensors that torch has had since 1.0 (``_parameters``, ``_version``,
``_base``).
"""

import copy
from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._functorch import config as functorch_config
from torch.autograd.graph import Node
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_,
    tree_unflatten,
)

_C: Any = torch._C
_autograd: Any = torch.autograd

# The running backward pass.
current_task: Callable[[], int] = _C._current_graph_task_id  # -1 if none runs
current_node: Callable[[], Node] = _C._current_autograd_node
will_execute: Callable[[Node], bool] = _C._will_engine_execute_node  # raises for a leaf that torch.autograd.grad captures
keeps_graph: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph
call_at_end: Callable[[Callable[[], None]], None] = _autograd.Variable._execution_engine.queue_callback

# Nodes.
AccumulateGrad: Any = _C._functions.AccumulateGrad
sequence_number: Callable[[Node], int] = methodcaller("_sequence_nr")  # its number among its thread's nodes
class_of_function: Callable[[Any], Any] = attrgetter("_forward_cls")  # the user's subclass that a node's class is of
SAVED, RAW = "_saved_", "_raw_saved_"
"""The first part of the names of a node's attributes for saved values, and for saved tensors as hooks have packed them."""


def made(node: Node) -> tuple[Any, ...]:
    """The metadata of a node's outputs: ``shape``, ``dtype``, ``device``.  Empty for a leaf."""
    return getattr(node, "_input_metadata", ())


global_hooks: dict[int, Any] = torch.nn.modules.module._global_forward_hooks  # that all modules call

# Hooks on parameters.
hooks_before: Callable[[Tensor], Any] = attrgetter("_backward_hooks")
hooks_after: Callable[[Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")

# Modes.
without_subclasses: Any = _C.DisableTorchFunctionSubclass
dispatch_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
count_function_modes: Callable[[], int] = _C._len_torch_function_stack
count_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
push_dispatch_mode: Callable[[Any], None] = _push_mode
pop_dispatch_mode: Callable[[], Any] = _pop_mode
without_dispatch_modes: Callable[[], Any] = _disable_current_modes
pop_function_mode: Callable[[], Any] = _C._pop_torch_function_stack
top_saved_hooks: Callable[[bool], Any] = _C._autograd._top_saved_tensors_default_hooks
pop_saved_hooks: Callable[[], None] = _C._autograd._pop_saved_tensors_default_hooks
set_grad_enabled: Callable[[bool], None] = _C._set_grad_enabled
disable_dynamo: Any = _disable_dynamo
COMPILER = "torch._dynamo"
"""The compiler's module, which takes a second to import."""


def never_compile(function: Any) -> None:
    """Tells torch.compile to leave a function, and what it calls, as written.  It costs a call nothing, and no import."""
    skip = _C._dynamo.eval_frame._FrameAction.SKIP
    strategy = _C._dynamo.eval_frame._FrameExecStrategy(skip, skip)
    _C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)


next_node: Callable[[], int] = _C._autograd._get_sequence_nr  # the number of the next node that this thread makes
is_transformed: Callable[[], Any] = _C._functorch.maybe_current_level  # true while a transform of torch.func runs
is_traced: Callable[[], Any] = _C._get_tracing_state  # true while torch.jit.trace runs
is_any_autocast_on: Callable[[], bool] = _C._is_any_autocast_enabled
is_batched: Callable[[Tensor], bool] = _C._functorch.is_legacy_batchedtensor  # for is_grads_batched


rebuilt: Any = vars(copy)["_reconstruct"]  # makes an object of what ``__reduce_ex__`` returned, its parts by a function


times_each: Any = torch._foreach_mul  # one kernel, or a few, for all

# Memory.
address_of: Callable[[Tensor], int] = _C.TensorBase.data_ptr  # also while the class's method is watched


def uses_of(storage: Any) -> int:
    return int(_C._storage_Use_Count(storage._cdata))


__all__ = [
    "TreeSpec", "functorch_config", "register_pytree_node", "tree_flatten", "tree_leaves", "tree_map", "tree_map_",
    "tree_unflatten",
]  # fmt: skip
