"""What a rule sees of a layer's call."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import BatchSizeError, StaleRecord, where
from autograd_hacks.support.trees import version_of


@dataclass(eq=False)
class Call:
    """One call of a layer, as a formula gets it: in the parameters' dtype."""

    #: the layer's name in the model
    path: str
    #: the layer itself
    layer: nn.Module
    #: what the layer's forward was given by position
    args: tuple[Any, ...]
    #: what the layer's forward was given by name
    kwargs: Mapping[str, Any]
    #: whether the layer was in training mode
    training: bool
    #: for each tensor that the layer returned, the gradient of the batch's loss at it; None where the loss did not reach it
    grads: tuple[Tensor | None, ...] = ()
    #: the layer's parameters and buffers with their versions, for `read`
    state: Mapping[str, tuple[Tensor, int]] = field(default_factory=dict)
    #: the generators' states before the call, for layers with dropout inside
    random_state: Mapping[str, Tensor] | None = None
    #: what the layer returned, for rules that recompute it
    outputs: tuple[Tensor, ...] = ()
    #: autocast's dtype, where the call ran under it
    precision: torch.dtype | None = None

    @property
    def grad(self) -> Tensor:
        """The gradient at the layer's only output.  Raises TypeError where it returned several."""
        if len(self.grads) != 1 or self.grads[0] is None:
            raise TypeError(
                f"{where(self.path, self.layer)} returned {len(self.grads)} tensors, but its rule asks for one gradient. "
                "Let the rule read call.grads instead, which holds them all."
            )
        return self.grads[0]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """What the layer's forward was given at a position or under a name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def read(self, name: str) -> Tensor:
        """A parameter or buffer of the layer, as it was in the forward pass.

        Raises StaleRecord where it has changed since.
        """
        tensor, version = self.state[name]
        *path, own_name = name.split(".")
        if version_of(tensor) != version or getattr(self.layer.get_submodule(".".join(path)), own_name) is not tensor:
            raise StaleRecord(
                f"{name!r} of {where(self.path, self.layer)} has changed since the forward pass, and the layer's per-sample "
                "gradients depend on it. Read them before optimizer.step(), and before another forward in training mode."
            )
        return tensor.detach()


def needs_batch(x: Tensor, at_least: int, layout: str) -> None:
    """Raises for an input with fewer axes than a batch has.  layout: the shape expected, for people."""
    if x.ndim < at_least:
        raise BatchSizeError(
            f"was given an input without a batch axis, of shape {tuple(x.shape)}; expected {layout}. "
            "Give a single sample as a batch of one: x.unsqueeze(0)."
        )
