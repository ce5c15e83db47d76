"""Per-sample gradients in PyTorch, through hooks.

autograd_hacks.add_hooks(model)
loss_fn(model(x), y).backward()
autograd_hacks.compute_grad1(model)      # param.grad1.mean(0) == param.grad
"""

from autograd_hacks import errors, forms, rules
from autograd_hacks.clipping import clip_grad1_norm_
from autograd_hacks.curvature.backprop import backprop_hess
from autograd_hacks.curvature.blocks import compute_hess, compute_hess_over
from autograd_hacks.description import describe
from autograd_hacks.grad1 import compute_grad1
from autograd_hacks.grads import PerSampleGrads, per_sample_grads
from autograd_hacks.hooks import (
    accumulate,
    add_hooks,
    clear_backprops,
    disable_hooks,
    enable_hooks,
    pause_hooks,
    remove_hooks,
)
from autograd_hacks.losses import backward
from autograd_hacks.rules.table import is_supported, register_rule
from autograd_hacks.stream import streaming
from autograd_hacks.verification import verify

__all__ = [
    # Hook a model.
    "add_hooks",
    "remove_hooks",
    "enable_hooks",
    "disable_hooks",
    "pause_hooks",
    # Run it.
    "backward",
    "accumulate",
    "clear_backprops",
    # Read the per-sample gradients.
    "compute_grad1",
    "per_sample_grads",
    "PerSampleGrads",
    "clip_grad1_norm_",
    "streaming",
    "describe",
    "verify",
    # Curvature.
    "backprop_hess",
    "compute_hess",
    "compute_hess_over",
    # Extend it.
    "is_supported",
    "register_rule",
    "forms",
    "rules",
    "errors",
]
