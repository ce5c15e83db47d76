"""For layers with several linear maps inside: the layer is recomputed once as plain linear maps, one backward pass runs
through that, and each weight's factors are the input of its map and the gradient at its output."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.errors import StaleRecord, where
from autograd_hacks.forms import Dense, Form, Outer, add, group
from autograd_hacks.rules.call import Call
from autograd_hacks.support.contexts import with_random_state


@dataclass
class Use:
    """One use of a linear map, from x to y."""

    x: Tensor  # ... I
    y: Tensor  # ... O
    batch_axis: int  # of x and y
    weight: str  # its name in the layer
    bias: str | None
    samples: Tensor | None  # the sample of each row of x, where x has only some of the samples


class LinearMaps:
    """Linear maps that remember their inputs and outputs.

    call: the call that is recomputed; the maps use its layer's weights
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.uses: list[Use] = []
        self.samples = 0

    def __call__(self, x: Tensor, weight: str, bias: str | None, batch_axis: int = 0, rows: Tensor | None = None) -> Tensor:
        """x Wᵀ + b, with the layer's parameters of these names.

        x: N I, or T N I with batch_axis 1    rows: the numbers of the samples in x, where it has only some;
        the weight must then have no other use
        """
        y = F.linear(x, self.call.read(weight), None if bias is None else self.call.read(bias))
        if not y.requires_grad:  # where nothing that it was computed from does
            y.requires_grad_()
        self.samples = max(self.samples, x.shape[batch_axis])
        self.uses.append(Use(x.detach(), y, batch_axis, weight, bias, rows))
        return y

    def forms(self, outputs: Sequence[Tensor]) -> dict[str, Form]:
        """{name: form} for the parameters of all maps, by one backward pass from the layer's outputs."""
        reached = [(out, grad) for out, grad in zip(outputs, self.call.grads) if grad is not None]
        roots, given, ys = [out for out, _ in reached], [grad for _, grad in reached], [use.y for use in self.uses]
        grads = torch.autograd.grad(roots, ys, given, allow_unused=True, materialize_grads=True)
        by_weight: dict[str, list[tuple[Use, Tensor]]] = {}
        shifts: dict[str, list[Form]] = {}
        for use, grad in zip(self.uses, (_samples_first(g, use.batch_axis) for g, use in zip(grads, self.uses))):
            by_weight.setdefault(use.weight, []).append((use, grad))
            if use.bias is not None:
                shifts.setdefault(use.bias, []).append(Dense(grad.sum(1)))
        forms: dict[str, Form] = {}
        for weight, uses in by_weight.items():
            left = torch.cat([grad for _, grad in uses], dim=1)
            right = torch.cat([_samples_first(use.x, use.batch_axis) for use, _ in uses], dim=1)
            form, samples = Outer(left, right), uses[0][0].samples
            forms[weight] = form if samples is None else group(form, samples, self.samples)
        return forms | {bias: add(parts) for bias, parts in shifts.items()}


def _samples_first(x: Tensor, batch_axis: int) -> Tensor:
    """x: N F, or T N F with batch_axis 1.  Returns N T F."""
    return x[:, None] if x.ndim == 2 else x.movedim(batch_axis, 0)


@contextmanager
def recomputing(call: Call) -> Iterator[None]:
    """A context in which a layer runs again, with the same random numbers (for dropout) as in the forward pass."""
    with torch.enable_grad(), with_random_state(call.random_state or {}):
        yield


def check_recomputed(call: Call, outputs: Sequence[Tensor]) -> None:
    """Raises StaleRecord where the recomputed outputs differ from those of the forward pass."""
    for seen, out in zip(call.outputs, outputs):
        check_same(call, seen, out)


def check_same(call: Call, seen: Tensor, out: Tensor) -> None:
    """Raises StaleRecord where a recomputed tensor differs from the one seen in the forward pass."""
    if not is_recomputed(seen, out, call.precision):
        raise StaleRecord(
            f"{where(call.path, call.layer)} could not be recomputed as it ran: its outputs came out different. Its "
            "weights have changed since (read per-sample gradients before the update), or its dropout drew other random "
            "numbers (set its dropout to 0)."
        )


def is_recomputed(seen: Tensor, out: Tensor, precision: torch.dtype | None) -> bool:
    """Whether an output equals the one seen before, up to rounding.  precision: autocast's dtype, where it was on"""
    # The tolerance is far above rounding in the coarsest precision that the forward pass used, and far below what changed
    # weights do.
    if not (seen.is_floating_point() or seen.is_complex()):
        return torch.equal(out, seen)
    eps = max(torch.finfo(dtype).eps for dtype in (seen.dtype, precision or seen.dtype))
    factor, out = (1e3 if eps < 1e-6 else 20) * eps, out.detach().to(seen.dtype)
    if not seen.numel():
        return True
    if _largest(out - seen) <= factor * _largest(seen) < torch.inf:  # the usual case, which reads the memory few times
        return True
    tolerance = factor * float(seen.nan_to_num(posinf=0, neginf=0).abs().amax())
    return torch.allclose(out, seen, rtol=0, atol=tolerance, equal_nan=True)


def _largest(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, torch.inf))
