"""A small net, three steps of 16 samples, and what they must come to: by one backward pass for each sample; tools."""

import copy
import importlib
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import one_backward_per_sample
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks

STEPS, N, LR, MAX_NORM = 3, 16, 0.5, 1.5


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def data() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(5)
    return torch.randn(STEPS * N, 4, generator=draws), torch.randint(3, (STEPS * N,), generator=draws)


def expected(
    model: nn.Module, max_norm: float | None = MAX_NORM
) -> tuple[list[Tensor], list[Tensor], list[dict[str, float]]]:
    """Weights after the steps, each step's norms, and its noise and signal."""
    model, norms, found = copy.deepcopy(model), [], []
    for x, y in zip(*(part.split(N) for part in data())):
        rows = rows_of(model, x, y)
        own, mean = rows.norm(dim=1), rows.mean(0)
        noise = (rows - mean).square().sum().item() / (N - 1)
        norms.append(own)
        found.append({"grads/noise": noise, "grads/signal": mean.square().sum().item() - noise / N})
        weights = torch.ones(N) if max_norm is None else (max_norm / own).clamp(max=1)
        with torch.no_grad():
            after = torch.nn.utils.parameters_to_vector(model.parameters()) - LR * (weights @ rows) / N
            torch.nn.utils.vector_to_parameters(after, model.parameters())
    return [p.detach() for p in model.parameters()], norms, found


def rows_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """J by plain backward passes, N P."""
    found = one_backward_per_sample(model, lambda out, y: F.cross_entropy(out, y, reduction="none"), x, y)
    return torch.cat([own.flatten(1) for own in found.values() if own is not None], 1)


def check(
    before: nn.Module,
    after: nn.Module,
    history: list[dict[str, float]],
    last: Tensor | None,
    max_norm: float | None = MAX_NORM,
    rtol: float = 1e-4,
) -> None:
    """What a trainer with a callback came to, against what it must.  last: the last step's norms"""
    weights, norms, noise = expected(before, max_norm)
    assert any((own > MAX_NORM).any() and (own < MAX_NORM).any() for own in norms)
    assert len(history) == STEPS
    assert last is not None
    assert_close([p.detach() for p in after.parameters()], weights, rtol=rtol, atol=rtol)
    assert_close(last, norms[-1], rtol=rtol, atol=rtol)
    for step, own, other in zip(history, norms, noise):
        assert step["grads/samples"] == N
        assert abs(step["grads/norm_mean"] - own.mean().item()) < rtol
        assert abs(step["grads/norm_max"] - own.max().item()) < rtol
        assert all(abs(step[key] - value) < rtol for key, value in other.items())
        if max_norm is not None:
            assert step["grads/clipped"] == (own > max_norm).float().mean()
    assert not any(layer._forward_hooks for layer in after.modules())  # nothing is left


def of_many(*given: Any) -> Any:
    """`per_sample_grads`, as if other processes had samples too."""
    grads = autograd_hacks.per_sample_grads(*given)
    grads.spread.mesh = object()  # type: ignore[assignment]
    return grads


def same(one: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> None:
    assert_close(list(one.parameters()), list(other.parameters()), rtol=tolerance, atol=tolerance)


def same_in_parts(
    run: Callable[[nn.Module, int], object], tolerance: float = 1e-5, model: nn.Module | None = None
) -> nn.Module:
    """Whole batches and four micro-batches each come to the same weights.  run: trains a copy, in so many parts"""
    model, ends = model or net(), []
    for parts in (1, 4):
        ends.append(copy.deepcopy(model))
        run(ends[-1], parts)
    same(*ends, tolerance)
    return ends[0]


def needed(*names: str) -> ModuleType:
    """Imports tools, and returns the first.  Where one is not installed the file is skipped; not in CI, which has all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, of which tests make errors
        try:
            first, *_ = [importlib.import_module(name) for name in names]
            return first
        except ModuleNotFoundError as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"{names[0]} is not installed ({error}); tox -e py brings it", allow_module_level=True)
