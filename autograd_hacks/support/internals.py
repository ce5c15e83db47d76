"""The names of torch's own that the package reads, each in one place.  Seen in torch 2.11, 2.12 and 2.13.

Attributes of ``nn.Module`` and of tensors that torch has had since 1.0 (``_parameters``, ``_version``, ``_base``) are read
where they are needed.
"""

from collections.abc import Callable
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

# The running backward pass.
current_task: Callable[[], int] = _C._current_graph_task_id  # -1 where none runs
current_node: Callable[[], Node] = _C._current_autograd_node
will_execute: Callable[[Node], bool] = _C._will_engine_execute_node  # raises for a leaf that torch.autograd.grad captures
keeps_graph: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph


def call_at_end(function: Callable[[], None]) -> None:
    """Has a function called at the end of the running pass."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


# Nodes.
AccumulateGrad: Any = _C._functions.AccumulateGrad


def sequence_number(node: Any) -> int:
    """Which of its thread's nodes it is."""
    number: int = node._sequence_nr()
    return number


def made_by(node: Any) -> tuple[Any, ...]:
    """The shapes, dtypes and devices of what a node made; nothing for a leaf."""
    return getattr(node, "_input_metadata", ())


SAVED, RAW = "_saved_", "_raw_saved_"
"""What attributes of a node begin with under which it keeps something: its value, and the tensor as hooks have packed it."""


def class_of_function(kind: Any) -> type:
    """The user's subclass of torch.autograd.Function that a node is of."""
    own: type = kind._forward_cls
    return own


# Hooks on parameters.
def hooks_before(parameter: Any) -> Any:
    return parameter._backward_hooks


def hooks_after(parameter: Any) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


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


def is_traced() -> bool:
    return bool(_C._get_tracing_state())


is_batched: Callable[[Tensor], bool] = _C._functorch.is_legacy_batchedtensor  # by is_grads_batched


# Memory.
def versions_kept(tensors: tuple[Tensor, ...]) -> Any:
    """A context that leaves no trace in tensors' counts of writes."""
    autograd: Any = torch.autograd
    return autograd._unsafe_preserve_version_counter(tensors)


def uses_of(storage: Any) -> int:
    count: int = _C._storage_Use_Count(storage._cdata)
    return count


__all__ = ["TreeSpec", "register_pytree_node", "tree_flatten", "tree_leaves", "tree_map", "tree_map_", "tree_unflatten"]
