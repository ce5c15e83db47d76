"""The names of torch's own that the package reads, each in one place.  Seen in torch 2.11, 2.12 and 2.13.

Attributes of ``nn.Module`` and of tensors that torch has had since 1.0 (``_parameters``, ``_version``, ``_base``) are read
where they are needed.
"""

from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import Node
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
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
current_task: Callable[[], int] = _C._current_graph_task_id  # -1 where none runs
current_node: Callable[[], Node] = _C._current_autograd_node
will_execute: Callable[[Node], bool] = _C._will_engine_execute_node  # raises for a leaf that torch.autograd.grad captures
keeps_graph: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph
call_at_end: Callable[[Callable[[], None]], None] = _autograd.Variable._execution_engine.queue_callback

# Nodes.
AccumulateGrad: Any = _C._functions.AccumulateGrad
sequence_number: Callable[[Node], int] = methodcaller("_sequence_nr")  # which of its thread's nodes it is
class_of_function: Callable[[Any], Any] = attrgetter("_forward_cls")  # the user's subclass that a node's class is of
SAVED, RAW = "_saved_", "_raw_saved_"
"""What attributes of a node begin with under which it keeps something: its value, and the tensor as hooks have packed it."""


def made(node: Node) -> tuple[Any, ...]:
    """What is known of the tensors that a node made: ``shape``, ``dtype``, ``device``.  Nothing for a leaf's."""
    return getattr(node, "_input_metadata", ())


# Hooks on parameters.
hooks_before: Callable[[Tensor], Any] = attrgetter("_backward_hooks")
hooks_after: Callable[[Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")

# Modes.
without_subclasses: Any = _C.DisableTorchFunctionSubclass
function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
dispatch_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
pop_function_mode: Callable[[], Any] = _C._pop_torch_function_stack
top_saved_hooks: Callable[[bool], Any] = _C._autograd._top_saved_tensors_default_hooks
pop_saved_hooks: Callable[[], None] = _C._autograd._pop_saved_tensors_default_hooks
set_grad_enabled: Callable[[bool], None] = _C._set_grad_enabled
disable_dynamo: Any = _disable_dynamo
COMPILER = "torch._dynamo"
"""The compiler's module, which takes a second to import."""


def is_transformed() -> bool:
    """Whether a transform of torch.func runs."""
    return _C._functorch.peek_interpreter_stack() is not None


is_traced: Callable[[], Any] = _C._get_tracing_state  # true where torch.jit.trace runs
is_batched: Callable[[Tensor], bool] = _C._functorch.is_legacy_batchedtensor  # by is_grads_batched


# Memory.
versions_kept: Any = _autograd._unsafe_preserve_version_counter  # a context that leaves no trace in counts of writes


def uses_of(storage: Any) -> int:
    count: int = _C._storage_Use_Count(storage._cdata)
    return count


__all__ = ["TreeSpec", "register_pytree_node", "tree_flatten", "tree_leaves", "tree_map", "tree_map_", "tree_unflatten"]
