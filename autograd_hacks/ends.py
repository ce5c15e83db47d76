"""Where the graph ends at parameters, and whether a backward pass comes there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


def ends_of(parameters: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Node]]:
    """Parameters with their ends of the graph."""
    return {name: (p, get_gradient_edge(p).node) for name, p in parameters.items()}


def gets_gradient(node: Node) -> bool:
    """Whether the running backward pass will bring a gradient to a parameter, given the parameter's node."""
    return is_captured(node) or torch._C._will_engine_execute_node(node)


def is_captured(node: Node) -> bool:
    """Whether torch.autograd.grad takes the gradient in front of a leaf's node, instead of executing it."""
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        # torch's answer for a leaf that autograd.grad captures, given only after it has seen that the gradient is wanted.
        if "A leaf node was passed to _will_engine_execute_node" in str(error):
            return True
        raise
    return False
