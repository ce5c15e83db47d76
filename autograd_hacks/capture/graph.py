"""Where the graph ends at parameters, and whether a backward pass comes there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter

EXECUTED, CAPTURED, NOT_REACHED = "executed", "captured", ""
"""What a backward pass does at a parameter's node; torch.autograd.grad takes the gradient in front of it."""


def ends_of(parameters: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Node]]:
    """Parameters with their ends of the graph."""
    return {name: (p, _end_of(p)) for name, p in parameters.items()}


def _end_of(parameter: Tensor) -> Node:
    if type(parameter) is Parameter and parameter.requires_grad and torch.is_grad_enabled():
        # What get_gradient_edge does, without its context, which takes two thirds of 3 µs.
        function = parameter.view_as(parameter).grad_fn
        if function is not None and function.next_functions[0][0] is not None:
            return function.next_functions[0][0]
    return get_gradient_edge(parameter).node


def way_to(node: Node) -> str:
    """What the running backward pass does at a parameter's node: EXECUTED, CAPTURED or NOT_REACHED."""
    try:
        return EXECUTED if torch._C._will_engine_execute_node(node) else NOT_REACHED
    except RuntimeError as error:
        # torch's answer for a leaf that autograd.grad captures, given only after it has seen that the gradient is wanted.
        if "A leaf node was passed to _will_engine_execute_node" in str(error):
            return CAPTURED
        raise
