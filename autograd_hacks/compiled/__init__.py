"""Per-sample gradients in compiled code: one graph of forward and backward, labelled, split, and compiled."""

from autograd_hacks.compiled.face import compile
from autograd_hacks.compiled.labels import register_operation

__all__ = ["compile", "register_operation"]
