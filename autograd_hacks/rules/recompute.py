"""For layers that use several linear maps inside: recompute the layer once as plain linear maps, run one backward pass
through that, and read the factors of each weight off its map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.errors import StaleRecord, where
from autograd_hacks.forms import Dense, Form, Outer, add, group
from autograd_hacks.rules.call import Call
from autograd_hacks.support.untouched import with_random_state


@dataclass
class Use:
    """One use of a linear map, x of ... I to y of ... O, with some rows of a weight and a bias, or all.

    samples: the sample of each row of x, where these are only some
    """

    x: Tensor
    y: Tensor
    batch_axis: int
    weight: str
    bias: str | None
    weight_rows: slice | None
    bias_rows: slice | None
    samples: Tensor | None


class LinearMaps:
    """Linear maps that remember what went in and out.

    call: of the layer that is recomputed, whose weights they use
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.uses: list[Use] = []
        self.copied: dict[str, Tensor] = {}
        self.samples = 0

    def __call__(
        self,
        x: Tensor,
        weight: str,
        bias: str | None,
        batch_axis: int = 0,
        weight_rows: slice | None = None,
        bias_rows: slice | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """x Wᵀ + b, for parameters of the layer by name, or rows of them.  x: N I, or with batch_axis 1 T N I; or some of
        the samples, by their numbers in `rows`, for a weight with no other use."""
        matrix, shift = self.call.read(weight), None if bias is None else self.call.read(bias)
        matrix = matrix if weight_rows is None else matrix[weight_rows]
        shift = shift if shift is None or bias_rows is None else shift[bias_rows]
        y = _differentiable(F.linear(x, matrix, shift))
        self.samples = max(self.samples, x.shape[batch_axis])
        self.uses.append(Use(x.detach(), y, batch_axis, weight, bias, weight_rows, bias_rows, rows))
        return y

    def copies(self, name: str, samples: int) -> Tensor:
        """A parameter of shape (1, 1, F) with a copy for each sample, 1 N F."""
        self.copied[name] = _differentiable(self.call.read(name).repeat(1, samples, 1))
        return self.copied[name]

    def forms(self, outputs: Sequence[Tensor]) -> dict[str, Form]:
        """{name: form} for the parameters of all maps, by one backward pass from the layer's outputs."""
        reached = [(out, grad) for out, grad in zip(outputs, self.call.grads) if grad is not None]
        inside = [use.y for use in self.uses] + list(self.copied.values())
        grads = torch.autograd.grad(
            [out for out, _ in reached], inside, [grad for _, grad in reached], allow_unused=True, materialize_grads=True
        )
        forms: dict[str, Form] = {
            name: Dense(grad.movedim(1, 0)[:, :, None]) for name, grad in zip(self.copied, grads[len(self.uses) :])
        }
        by_weight: dict[str, list[tuple[Use, Tensor]]] = {}
        shifts: dict[str, list[Form]] = {}
        for use, grad in zip(self.uses, grads):
            grad = _samples_first(grad, use.batch_axis)
            by_weight.setdefault(use.weight, []).append((use, self._spread(grad, use.weight, use.weight_rows)))
            if use.bias is not None:
                shifts.setdefault(use.bias, []).append(Dense(self._spread(grad.sum(1), use.bias, use.bias_rows)))
        for weight, uses in by_weight.items():
            left = torch.cat([grad for _, grad in uses], dim=1)
            right = torch.cat([_samples_first(use.x, use.batch_axis) for use, _ in uses], dim=1)
            form, samples = Outer(left, right), uses[0][0].samples
            forms[weight] = form if samples is None else group(form, samples, self.samples)
        return forms | {bias: add(parts) for bias, parts in shifts.items()}

    def _spread(self, grad: Tensor, name: str, rows: slice | None) -> Tensor:
        """The gradient at some rows of a parameter among zeros for its other rows, on the last axis."""
        if rows is None or rows.stop - rows.start == len(self.call.read(name)):
            return grad
        return F.pad(grad, (rows.start, len(self.call.read(name)) - rows.stop))


def _differentiable(y: Tensor) -> Tensor:
    """y, asking for its gradient even where nothing behind it does."""
    return y if y.requires_grad else y.requires_grad_()


def _samples_first(x: Tensor, batch_axis: int) -> Tensor:
    """N T F"""
    return x[:, None] if x.ndim == 2 else x.movedim(batch_axis, 0)


@contextmanager
def recomputing(call: Call) -> Iterator[None]:
    """A context to run a layer again in, with the random numbers that the forward pass drew, dropout's."""
    with torch.enable_grad(), with_random_state(call.random_state or {}):
        yield


def check_recomputed(call: Call, outputs: Sequence[Tensor]) -> None:
    """Raises StaleRecord where recomputed outputs are not those that the forward pass returned."""
    for seen, out in zip(call.outputs, outputs):
        check_same(call, seen, out)


def check_same(call: Call, seen: Tensor, out: Tensor) -> None:
    """Raises StaleRecord where something recomputed is not what was seen in the forward pass."""
    if not is_recomputed(seen, out, call.precision):
        raise StaleRecord(
            f"{where(call.path, call.layer)} could not be recomputed as it ran: its outputs came out different. Its "
            "weights have changed since (read per-sample gradients before the update), or its dropout drew other random "
            "numbers (set its dropout to 0)."
        )


def is_recomputed(seen: Tensor, out: Tensor, precision: torch.dtype | None) -> bool:
    """Whether an output is the one seen before, but for rounding.  precision: autocast's, where it was on"""
    # Far above rounding, in the coarsest precision that the forward pass used, and far below what other weights do.
    if not (seen.is_floating_point() or seen.is_complex()):
        return torch.equal(out, seen)
    eps = max(torch.finfo(dtype).eps for dtype in (seen.dtype, precision or seen.dtype))
    factor, out = (1e3 if eps < 1e-6 else 20) * eps, out.detach().to(seen.dtype)
    if not seen.numel():
        return True
    if _largest(out - seen) <= factor * _largest(seen) < torch.inf:  # the usual case, in few passes over the memory
        return True
    tolerance = factor * float(seen.nan_to_num(posinf=0, neginf=0).abs().amax())
    return torch.allclose(out, seen, rtol=0, atol=tolerance, equal_nan=True)


def _largest(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, torch.inf))
