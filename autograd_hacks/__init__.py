"""Per-sample gradients in PyTorch, through hooks.

autograd_hacks.add_hooks(model)
autograd_hacks.backward(losses)          # N losses, from reduction='none'
autograd_hacks.compute_grad1(model)      # param.grad1.mean(0) == param.grad
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from autograd_hacks import errors, forms, formulas
from autograd_hacks.capture.hooks import add_hooks, remove_hooks
from autograd_hacks.formulas.table import register_rule
from autograd_hacks.original import accumulate as accumulate
from autograd_hacks.original import clear_backprops as clear_backprops
from autograd_hacks.original import disable_hooks as disable_hooks
from autograd_hacks.original import enable_hooks as enable_hooks
from autograd_hacks.original import is_supported as is_supported
from autograd_hacks.original import pause_hooks as pause_hooks
from autograd_hacks.support.display import hint as _hint
from autograd_hacks.verbs.clipping import clip_grad1_norm_
from autograd_hacks.verbs.describe import describe
from autograd_hacks.verbs.during_backward import during_backward
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.jacobian import per_sample_jacobian
from autograd_hacks.verbs.losses import backward
from autograd_hacks.verbs.over import over
from autograd_hacks.verbs.per_sample import compute_grad1, per_sample_grads
from autograd_hacks.verbs.verify import verify

# isort: split
# The rooms come last, because they import the names above from here.
from autograd_hacks import attribution, check, compiled, curvature, private
from autograd_hacks import distributed as distributed  # it registers itself
from autograd_hacks.compiled import compile
from autograd_hacks.curvature import backprop_hess, compute_hess

__version__ = "0.1.0"

__all__ = [
    # Hook a model, and run it.
    "add_hooks",
    "remove_hooks",
    "backward",
    # Read the per-sample gradients.
    "compute_grad1",
    "per_sample_grads",
    "PerSampleGrads",
    "clip_grad1_norm_",
    "during_backward",
    "over",
    "per_sample_jacobian",
    "describe",
    "verify",
    # In the compiler.
    "compile",
    # Curvature.
    "backprop_hess",
    "compute_hess",
    # Extend it.
    "register_rule",
    # Modules.
    "attribution",
    "check",
    "compiled",
    "curvature",
    "errors",
    "forms",
    "formulas",
    "private",
]


def __dir__() -> list[str]:
    """The public names, without the package's folders, for tab completion."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


if not _TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        """A name of a room, without the room.  Raises AttributeError for others and suggests a name or a call."""
        if name == "integrations":
            raise AttributeError(
                "autograd_hacks.integrations is not imported as a whole. Import the module of one tool: "
                "import autograd_hacks.integrations.transformers"
            )
        for room in (attribution, check, compiled, curvature, private):
            if name in room.__all__:
                return getattr(room, name)
        meant = _hint(name, __all__, [verb for verb in dir(PerSampleGrads) if verb[0] != "_"])
        raise AttributeError(f"module 'autograd_hacks' has no attribute {name!r}{meant}")
