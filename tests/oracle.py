"""What is true: one backward pass for each sample.  Imports nothing from the library."""

from collections.abc import Callable, Mapping

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

Losses = Callable[..., Tensor]
"""Outputs of a batch, and its targets where there are any -> N losses."""
Rows = dict[str, Tensor | None]
"""{parameter name: (N, *shape)}, or None where no sample's loss reached it."""


def squares(out: Tensor | tuple[Tensor, ...], y: Tensor | None = None) -> Tensor:
    """Each sample's loss: squares around y, and a slope that no two positions of a sample share.

    out: N *S, of any kind, or several
    y: N, or of out's shape; 0 without
    """
    z = torch.cat([flat(x) for x in (out if isinstance(out, tuple) else (out,))], 1)
    slopes = torch.linspace(-1, 1, z.shape[1], dtype=z.dtype, device=z.device)
    return (z * slopes).sum(1) + (z if y is None else z - flat(y)).square().sum(1)


def cross_entropies(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def of_classes(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return cross_entropies(model(x), y)


def targets(samples: int) -> Tensor:
    """Another for each sample, so that no two share a loss.  N"""
    return torch.arange(1, samples + 1, dtype=torch.float64)


def flat(x: Tensor) -> Tensor:
    """Of N *S, the real numbers of each sample, (N, S)."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.flatten(1) if x.ndim > 1 else x[:, None]


def one_backward_per_sample(
    model: nn.Module, losses: Losses, x: Tensor, y: Tensor | None = None, run: Callable[[Tensor], Tensor] | None = None
) -> Rows:
    """Each sample alone through the model; leaves ``.grad`` as it was.

    run: how x goes through the model, if not by a call
    """

    def alone(n: int) -> Tensor:
        out = (run or model)(x[n : n + 1])
        return (losses(out) if y is None else losses(out, y[n : n + 1])).sum()

    return _rows(model, len(x), alone)


def one_loss_at_a_time(model: nn.Module, losses: Callable[[], Tensor]) -> Rows:
    """A backward pass from each entry of the whole batch's losses, the random numbers the same in every one."""
    state = torch.get_rng_state()

    def entry(n: int) -> Tensor:
        torch.set_rng_state(state)
        return losses()[n]

    return _rows(model, len(losses()), entry)


def rows_of_one_graph(model: nn.Module, losses: Tensor) -> Rows:
    """A backward pass from each of N losses through their very graph, which stays: for programs that can't be run twice."""
    return _rows(model, len(losses), lambda n: losses[n], retain_graph=True)


def joined(rows: Rows) -> Tensor:
    """J, N P, without the parameters that no loss reached."""
    return torch.cat([own[:, None].flatten(1) for own in rows.values() if own is not None], 1)


def clipped(rows: Rows, bound: float, divisor: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """The rows' norms, and the sum of the rows, each clipped to a bound, over a divisor."""
    norms = joined(rows).norm(dim=1)
    weights = (bound / norms).clamp(max=1) / divisor
    return norms, {name: torch.tensordot(weights, own, 1) for name, own in rows.items() if own is not None}


def _rows(model: nn.Module, samples: int, loss: Callable[[int], Tensor], retain_graph: bool = False) -> Rows:
    parameters = dict(model.named_parameters())
    kept = {name: p.grad for name, p in parameters.items()}
    grads: dict[str, list[Tensor | None]] = {name: [] for name, p in parameters.items() if p.requires_grad}
    for n in range(samples):
        model.zero_grad(set_to_none=True)
        loss(n).backward(retain_graph=retain_graph)
        for name, own in grads.items():
            own.append(parameters[name].grad)
    for name, p in parameters.items():
        p.grad = kept[name]
    return {name: _stack(own, parameters[name].shape) for name, own in grads.items()}


def _stack(grads: list[Tensor | None], shape: torch.Size) -> Tensor | None:
    if not grads:
        return torch.zeros(0, *shape)
    if all(g is None for g in grads):
        return None
    like = next(g for g in grads if g is not None)
    return torch.stack([torch.zeros_like(like) if g is None else g for g in grads])


def assert_rows(model: nn.Module, expected: Rows, inside: torch.dtype | None = None) -> None:
    """Each parameter's grad1 against the oracle's rows, at the dtype's own tolerance; none where it doesn't train.

    inside: a coarser dtype that the model computes in
    """
    found = {name: p.grad1 for name, p in model.named_parameters() if hasattr(p, "grad1")}
    assert_same(found, expected, inside)


def assert_same(found: Rows, expected: Rows, inside: torch.dtype | None = None) -> None:
    """`assert_rows`, of rows that are no attribute."""
    assert list(found) == list(expected)
    for name, rows in expected.items():
        own = found[name]
        if rows is None or own is None:
            assert rows is own, f"{name}: {own}, where the oracle has {rows}"
            continue
        if inside is not None:
            own, rows = own.to(inside), rows.to(inside)
        torch.testing.assert_close(own, rows, check_dtype=False, msg=lambda m, name=name: f"{name}: {m}")


def vector(v: Mapping[str, Tensor]) -> Tensor:
    """A direction, {name: shape}, as one vector."""
    return torch.cat([x.flatten() for x in v.values()])
