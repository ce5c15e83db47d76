"""A rule is a formula of a layer's J, and what else must be known of the layer; what a formula sees of a call; and two
decorators for common formulas."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import BatchSizeError, StaleRecord, where
from autograd_hacks.forms import Form
from autograd_hacks.support.contexts import with_random_state
from autograd_hacks.support.precision import MATMUL, RNN, unit_of_products
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
    #: whether what is recomputed is compared with ``outputs``; see `check_same`
    compares: bool = True

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

    @contextmanager
    def running_again(self) -> Iterator[None]:
        """A context in which a layer runs again, with the same random numbers (for dropout) as in the forward pass."""
        with torch.enable_grad(), with_random_state(self.random_state or {}):
            yield

    def check_same(self, seen: Iterable[Tensor], again: Iterable[Tensor]) -> None:
        """Raises StaleRecord where recomputed tensors differ from those seen in the forward pass.

        A GPU would have to be waited for, so there they are compared after each proof, and in each step where the layer has
        dropout.  `read` sees changed weights in each step, but for those changed behind autograd's back (``.data``).
        """
        if self.compares and not all(is_recomputed(before, now, self.precision) for before, now in zip(seen, again)):
            raise StaleRecord(
                f"{where(self.path, self.layer)} could not be recomputed as it ran: its outputs came out different. Its "
                "weights have changed since (read per-sample gradients before the update), or its dropout drew other random "
                "numbers (set its dropout to 0)."
            )


def is_recomputed(seen: Tensor, out: Tensor, precision: torch.dtype | None) -> bool:
    """Whether an output equals the one seen before, up to rounding.  precision: autocast's dtype, where it was on"""
    # The tolerance is far above rounding in the coarsest precision that the forward pass used, and far below what changed
    # weights do.
    eps = max(torch.finfo(dtype).eps for dtype in (seen.dtype, precision or seen.dtype))
    factor = max((1e3 if eps < 1e-6 else 20) * eps, 20 * unit_of_products(seen, (MATMUL, RNN)))
    out = out.detach().to(seen.dtype)
    if not seen.numel() or seen.is_meta:
        return True
    error, size = (float(torch.linalg.vector_norm(x, torch.inf)) for x in (out - seen, seen))
    if error <= factor * size < torch.inf:  # the usual case, which reads the memory few times
        return True
    tolerance = factor * float(seen.nan_to_num(posinf=0, neginf=0).abs().amax())
    return torch.allclose(out, seen, rtol=0, atol=tolerance, equal_nan=True)


def needs_batch(x: Tensor, at_least: int, layout: str) -> None:
    """Raises for an input with fewer axes than a batch has.  layout: the shape expected, for people."""
    if x.ndim < at_least:
        raise BatchSizeError(
            f"was given an input without a batch axis, of shape {tuple(x.shape)}; expected {layout}. "
            "Give a single sample as a batch of one: x.unsqueeze(0)."
        )


Formula = Callable[[Any, Call], Mapping[str, Form]]
"""``formula(layer, call)`` returns a form for each of the layer's own parameters."""


@dataclass(frozen=True)
class Rule:
    """Which J a layer's parameters have, and what the library must know of the layer to ask for it."""

    #: ``formula(layer, call)``: {name: form}, a form for each parameter
    formula: Formula
    #: ``features(layer)``, for a layer that does the same at every position, wherever the batch is: how many of the output's
    #: last axes belong to one position.  Its formula gets samples first
    features: Callable[[Any], int] | None = None
    #: ``axes(layer)``: where the samples are in each output.  None: on axis 0
    axes: Callable[[Any], Sequence[int]] | None = None
    #: ``count(layer, args, kwargs)``: how many samples a call has.  None: as many as axis 0 of its output has entries
    count: Callable[[Any, Sequence[Any], Mapping[str, Any]], int] | None = None
    #: ``covers(layer)``: submodules whose parameters the layer reads itself, so that the formula has forms for them too
    covers: Callable[[Any], Sequence[str]] | None = None
    #: ``mixes(layer, training)``: why the layer mixes samples in this mode, for people, or None
    mixes: Callable[[Any, bool], str | None] | None = None
    #: whether the output may be a loss of the whole batch, so that only the first argument tells where the samples are
    by_input: bool = False
    #: whether the formula recomputes the layer's output, which is kept for it as ``call.outputs``
    recomputes: bool = False

    @property
    def name(self) -> str:
        """The formula's name, for people."""
        return getattr(self.formula, "__name__", "of yours")


def single_input(formula: Callable[[Any, Tensor, Tensor], Mapping[str, Form]]) -> Formula:
    """A formula of (layer, call) from ``formula(layer, x, g)``, for a layer of one tensor in, x, and one out, with the
    gradient g at it."""

    @wraps(formula)
    def of_call(layer: nn.Module, call: Call) -> Mapping[str, Form]:
        inputs = (*call.args, *call.kwargs.values())
        if len(inputs) != 1:
            raise TypeError(
                f"{where(call.path, layer)} was given {len(inputs)} arguments, but its rule {formula.__name__} is for one. "
                "Write rule(layer, call) without single_input, which sees all of them."
            )
        return formula(layer, inputs[0], call.grad)

    return of_call


def positionwise(features: Callable[[Any], int]) -> Callable[[Formula], Rule]:
    """A `autograd_hacks.rules.Rule` from the formula of a layer that does the same at every position, wherever the batch is.

    ``features(layer)`` says how many of the output's last axes belong to one position.
    """
    return lambda formula: Rule(formula, features=features)
