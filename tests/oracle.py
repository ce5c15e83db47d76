"""What is true: one backward pass for each sample.  Imports nothing from the library."""

from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor

Losses = Callable[[Tensor, Tensor], Tensor]
"""Outputs and targets of a batch -> N losses."""


def one_backward_per_sample(
    model: nn.Module, losses: Losses, x: Tensor, y: Tensor, run: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor | None]:
    """{parameter name: (N, *shape)}, or None where no sample's loss reached it; leaves ``.grad`` as it was."""
    kept = {name: p.grad for name, p in model.named_parameters()}
    rows: dict[str, list[Tensor | None]] = {name: [] for name, p in model.named_parameters() if p.requires_grad}
    for n in range(len(x)):
        model.zero_grad(set_to_none=True)
        losses((run or model)(x[n : n + 1]), y[n : n + 1]).sum().backward()
        for name, p in model.named_parameters():
            if p.requires_grad:
                rows[name].append(p.grad)
    for name, p in model.named_parameters():
        p.grad = kept[name]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return {
        name: None if grads and all(g is None for g in grads) else _stack(grads, shapes[name])
        for name, grads in rows.items()
    }


def _stack(grads: list[Tensor | None], shape: torch.Size) -> Tensor:
    filled = [torch.zeros(shape) if g is None else g for g in grads]
    return torch.stack(filled) if filled else torch.zeros(0, *shape)


def assert_rows(model: nn.Module, expected: dict[str, Tensor | None], inside: torch.dtype | None = None) -> None:
    """Each parameter's grad1 against the oracle's rows, at the dtype's own tolerance.

    inside: a coarser dtype that the model computes in
    """
    cast = (lambda x: x) if inside is None else (lambda x: x.to(inside))
    for name, p in model.named_parameters():
        if name not in expected:
            assert not hasattr(p, "grad1"), name
        elif expected[name] is None:
            assert p.grad1 is None, name
        else:
            torch.testing.assert_close(
                cast(p.grad1), cast(expected[name]), check_dtype=False, msg=lambda m, name=name: f"{name}: {m}"
            )


def one_loss_at_a_time(model: nn.Module, losses: Callable[[], Tensor]) -> dict[str, Tensor | None]:
    """Rows by a backward pass from each entry of the whole batch's losses, the random numbers the same in every one."""
    kept = {name: p.grad for name, p in model.named_parameters()}
    rows: dict[str, list[Tensor | None]] = {name: [] for name, p in model.named_parameters() if p.requires_grad}
    state = torch.get_rng_state()
    for n in range(len(losses())):
        model.zero_grad(set_to_none=True)
        torch.set_rng_state(state)
        losses()[n].backward()
        for name in rows:
            rows[name].append(model.get_parameter(name).grad)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = kept[name]
    return {n: None if all(g is None for g in grads) else _stack(grads, shapes[n]) for n, grads in rows.items()}
