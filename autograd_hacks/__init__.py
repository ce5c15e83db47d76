"""Per-sample gradients in PyTorch, through hooks.

autograd_hacks.add_hooks(model)
autograd_hacks.backward(losses)          # N losses, from reduction='none'
autograd_hacks.compute_grad1(model)      # param.grad1.mean(0) == param.grad
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from autograd_hacks import errors, forms, formulas
from autograd_hacks.capture.accumulate import accumulate
from autograd_hacks.capture.hooks import add_hooks, clear_backprops, disable_hooks, enable_hooks, pause_hooks, remove_hooks
from autograd_hacks.compiled.face import compile
from autograd_hacks.compiled.labels import register_operation
from autograd_hacks.curvature.backprop import backprop_hess
from autograd_hacks.curvature.blocks import compute_hess, compute_hess_over
from autograd_hacks.curvature.ekfac import ekfac_solve
from autograd_hacks.formulas.table import is_supported, register_rule
from autograd_hacks.privacy.bounds import QuantileClip
from autograd_hacks.privacy.noise import BandedNoise, SecureNoise
from autograd_hacks.privacy.private import PrivateStep, clip_and_noise_
from autograd_hacks.privacy.training import PrivateTraining
from autograd_hacks.support.display import hint as _hint
from autograd_hacks.verbs.check_rows import check_rows
from autograd_hacks.verbs.clipping import clip_grad1_norm_
from autograd_hacks.verbs.describe import describe
from autograd_hacks.verbs.during_backward import during_backward
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.jacobian import per_sample_jacobian
from autograd_hacks.verbs.losses import backward
from autograd_hacks.verbs.metric import Metric
from autograd_hacks.verbs.noise_scales import NoiseScales
from autograd_hacks.verbs.over import over
from autograd_hacks.verbs.per_sample import compute_grad1, per_sample_grads
from autograd_hacks.verbs.store import Store, trak_scores
from autograd_hacks.verbs.verify import verify

__version__ = "0.1.0"

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
    "per_sample_jacobian",
    "PerSampleGrads",
    "Metric",
    "NoiseScales",
    "over",
    "Store",
    "trak_scores",
    "clip_grad1_norm_",
    "during_backward",
    "describe",
    "verify",
    "check_rows",
    # Train privately.
    "clip_and_noise_",
    "PrivateStep",
    "PrivateTraining",
    "QuantileClip",
    "SecureNoise",
    "BandedNoise",
    # In the compiler.
    "compile",
    # Curvature.
    "backprop_hess",
    "compute_hess",
    "compute_hess_over",
    "ekfac_solve",
    # Extend it.
    "is_supported",
    "register_rule",
    "register_operation",
    "forms",
    "formulas",
    "errors",
]


def __dir__() -> list[str]:
    """The public names, without the package's folders, for tab completion."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


if not _TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Raises AttributeError and suggests a name or a call."""
        if name == "integrations":
            raise AttributeError(
                "autograd_hacks.integrations is not imported as a whole. Import the module of one tool: "
                "import autograd_hacks.integrations.transformers"
            )
        raise AttributeError(f"module 'autograd_hacks' has no attribute {name!r}{_hint(name, __all__)}")
