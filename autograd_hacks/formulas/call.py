"""A layer's call, as a layer's formula gets it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from operator import itemgetter
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import A_BATCH, NO_BATCH, BatchSizeError, StaleRecord, where
from autograd_hacks.forms import Form
from autograd_hacks.support.contexts import MATMUL, RNN, unit_of_products, with_random_state
from autograd_hacks.support.trees import version_of


class Settings:
    """What a layer's type declares as constants, as it is now: formulas read it later, and models set it between calls.

    A type without a declaration has all its attributes that are numbers, texts or tuples."""

    def __init__(self, layer: nn.Module) -> None:
        own: dict[str, Any] = vars(layer)
        names = getattr(type(layer), "__constants__", None)
        if names is None:
            names = [name for name, value in own.items() if type(value) in _PLAIN and name != "training"]
        self._known = {name: own[name] for name in names if name in own}
        self._read = itemgetter(*self._known) if self._known else lambda own: None
        self._values = self._read(own)

    def are_of(self, layer: nn.Module) -> bool:
        try:
            return bool(self._read(layer.__dict__) == self._values)
        except (KeyError, RuntimeError):  # one is gone, or a tensor now
            return False

    def put_back(self, layer: nn.Module) -> nn.Module:
        """The layer if it has these settings; else another object that has them and is otherwise the same."""
        if self.are_of(layer):
            return layer
        found: nn.Module = object.__new__(type(layer))
        vars(found).update(vars(layer) | self._known)
        return found


_PLAIN = (bool, int, float, str, tuple, torch.Size, type(None))


@dataclass(eq=False)
class Call:
    """One call of a layer, as a formula gets it, in the parameters' dtype."""

    #: the layer's name in the model
    path: str
    #: the layer itself
    layer: nn.Module
    #: the positional arguments of the layer's forward
    args: tuple[Any, ...]
    #: the keyword arguments of the layer's forward
    kwargs: Mapping[str, Any]
    #: whether the layer was in training mode
    training: bool
    #: for each tensor that the layer returned, the gradient of the batch's loss; None if the loss did not reach it
    grads: tuple[Tensor | None, ...] = ()
    #: the layer's parameters and buffers with their versions, for `read`
    state: Mapping[str, tuple[Tensor, int]] = field(default_factory=dict)
    #: the generators' states before the call, for layers that contain dropout
    random_state: Mapping[str, Tensor] | None = None
    #: the layer's outputs, for rules that recompute them
    outputs: tuple[Tensor, ...] = ()
    #: autocast's dtype, if autocast was on
    precision: torch.dtype | None = None
    #: whether what is recomputed is compared with ``outputs``; see `check_same`
    compares: bool = True
    #: what the layer's node saved, by its names there, for some kinds of layers
    saved: Mapping[str, Tensor] | None = None

    @property
    def grad(self) -> Tensor:
        """The gradient at the layer's only output.  Raises TypeError if the layer returned several tensors."""
        if len(self.grads) != 1 or self.grads[0] is None:
            raise TypeError(
                f"{where(self.path, self.layer)} returned {len(self.grads)} tensors, but its rule asks for one gradient. "
                "Use call.grads in the rule: it has a gradient for each tensor."
            )
        return self.grads[0]

    def _shape_of(self, name: str, value: Tensor) -> torch.Size:
        """The shape of a parameter as it was at the call.  value: as it is"""
        return (self.state[name][0] if name in self.state else value).shape

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """The argument of the layer's forward at a position or with a name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def read(self, name: str) -> Tensor:
        """A parameter or buffer of the layer, as it was in the forward pass.

        Raises StaleRecord if it has changed since.
        """
        if name not in self.state:
            raise StaleRecord(
                f"{where(self.path, self.layer)} had no {name!r} in the forward pass, but per-sample gradients need it. Set "
                "it before the forward, and leave it as it is until they are read."
            )
        tensor, version = self.state[name]
        *path, own_name = name.split(".")
        if version_of(tensor) != version or getattr(self.layer.get_submodule(".".join(path)), own_name) is not tensor:
            raise StaleRecord(
                f"{where(self.path, self.layer)}: {name!r} has changed since the forward pass, but per-sample gradients "
                "need its old value. Read them before optimizer.step() and before another forward in training mode."
            )
        return tensor.detach()

    @contextmanager
    def running_again(self) -> Iterator[None]:
        """A context for running a layer again, with the same random numbers (for dropout) as in the forward pass."""
        with torch.enable_grad(), with_random_state(self.random_state or {}):
            yield

    def check_same(self, seen: Iterable[Tensor], again: Iterable[Tensor]) -> None:
        """Raises StaleRecord if recomputed tensors differ from those of the forward pass.

        On a GPU the comparison would wait for the device, so there it runs only if the layer has dropout. `read` still sees
        changed weights in each step, except changes through ``.data``.
        """
        if self.compares and not all(_agree(before, now, self.precision) for before, now in zip(seen, again)):
            raise StaleRecord(
                f"{where(self.path, self.layer)} could not be recomputed: its outputs differ from those of the forward "
                "pass. Either its weights have changed since (read per-sample gradients before the update), or its dropout "
                "drew other random numbers (set its dropout to 0)."
            )


def _agree(seen: Tensor, out: Tensor, precision: torch.dtype | None) -> bool:
    """Whether an output equals the earlier one, up to rounding.  precision: autocast's dtype, if autocast was on"""
    # The tolerance is far above rounding in the lowest precision of the forward pass, and far below the effect of changed
    # weights.
    eps = max(torch.finfo(dtype).eps for dtype in (seen.dtype, precision or seen.dtype))
    factor = max((1e3 if eps < 1e-6 else 20) * eps, 20 * unit_of_products(seen, (MATMUL, RNN)))
    seen, out = seen.detach(), out.detach().to(seen.dtype)
    if not seen.numel() or seen.is_meta:
        return True
    tolerance = factor * float(seen.nan_to_num(posinf=0, neginf=0).abs().amax())
    return torch.allclose(out, seen, rtol=0, atol=tolerance, equal_nan=True)


def needs_batch(x: Tensor, at_least: int, layout: str) -> None:
    """Raises if an input has fewer axes than a batch.  layout: the expected shape, for messages"""
    if x.ndim < at_least:
        raise BatchSizeError(f"{NO_BATCH}, of shape {tuple(x.shape)}; expected {layout}. {A_BATCH}")


LayerFormula = Callable[[Any, Call], Mapping[str, Form]]
"""``formula(layer, call)`` returns a form for each of the layer's own parameters."""


def single_input(formula: Callable[[Any, Tensor, Tensor], Mapping[str, Form]]) -> LayerFormula:
    """A formula of (layer, call) from ``formula(layer, x, g)``, for a layer with one input tensor x and one output tensor.

    g is the gradient at the output."""

    @wraps(formula)
    def of_call(layer: nn.Module, call: Call) -> Mapping[str, Form]:
        inputs = (*call.args, *call.kwargs.values())
        if len(inputs) != 1:
            raise TypeError(
                f"{where(call.path, layer)} got {len(inputs)} arguments, but its rule {formula.__name__} takes one. "
                "Write rule(layer, call) without single_input; call has all arguments."
            )
        return formula(layer, inputs[0], call.grad)

    return of_call
