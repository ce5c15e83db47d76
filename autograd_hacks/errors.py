"""What the library raises.  Every message says where, what was given, what was expected and how to mend it."""

import torch.nn as nn


class PerSampleGradientError(RuntimeError):
    """Base of the errors below: the per-sample gradients that were asked for do not exist or can't be known."""


class NothingRecorded(PerSampleGradientError):
    """There is no backward pass to read: none has run, hooks were off, or its rows were thrown away."""


class UnsupportedLayer(PerSampleGradientError):
    """A trainable parameter belongs to a layer that no rule covers."""


class BatchSizeError(PerSampleGradientError):
    """The layers disagree on the number of samples, or an input has no batch axis."""


class SamplesMixed(PerSampleGradientError):
    """A layer's output for one sample depends on the others, so that samples have no gradients of their own."""


class StaleRecord(PerSampleGradientError):
    """A tensor that the record refers to was overwritten after the layer read it."""


class UnseenGradient(PerSampleGradientError):
    """Gradient has reached a parameter by a way that no hook sees, so that its rows would be incomplete."""


class ProbeFailed(PerSampleGradientError):
    """The model could not run with some samples of the batch in the place of others, which tells where they are."""


class VerificationFailed(PerSampleGradientError):
    """`verify` has found per-sample gradients that are not autograd's."""


class HigherOrderError(PerSampleGradientError):
    """A backward pass ran with ``create_graph=True``, and rows would miss terms of higher order: see ``add_hooks``."""


class BlockTooLarge(PerSampleGradientError):
    """A block of the Gauss-Newton matrix would take more memory than it may."""


class ParamGradSkipped(PerSampleGradientError):
    """Ordinary gradients of parameters were asked for, which ``add_hooks(param_grad=False)`` doesn't have computed."""


class NotReduced(PerSampleGradientError):
    """``.grad`` would hold what this process's samples give, where DistributedDataParallel reduces it over all processes."""


class ProcessesDisagree(PerSampleGradientError):
    """Processes that work on one batch can't go on together: one has failed, or they have hooked the model differently."""


class ShardedParameters(PerSampleGradientError):
    """Processes hold parts of a parameter that trains."""


OTHER_MODES = (
    'Losses with derivatives in them have per-sample gradients in add_hooks(model, mode="derivatives"), or mode="expand" '
    "for what that doesn't cover; or run this pass without it, or within autograd_hacks.pause_hooks(), or call "
    "clear_backprops(model) and repeat the step."
)
"""What to do where a pass makes a graph."""


def where(path: str, layer: nn.Module) -> str:
    """A layer's name for people: its path in the model and its type."""
    return f"layer {path!r} ({type(layer).__name__})" if path else f"the model itself ({type(layer).__name__})"
