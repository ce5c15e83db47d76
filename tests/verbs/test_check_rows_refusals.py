"""What `check_rows` refuses: numbers, losses and arguments that make no sense."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from test_check_rows import N, Rows, case, losses_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import autograd_hacks
from autograd_hacks import check_rows

BAD: dict[str, tuple[Callable[[Rows], Any], str]] = {
    "unknown": (lambda rows: {"0.wieght": rows["0.weight"]}, "'0.wieght', which the model lacks; it has '0.weight'"),
    "frozen": (lambda rows: {"1.slope": torch.zeros(N)}, "'1.slope', which is frozen"),
    "another shape": (
        lambda rows: {"0.weight": rows["0.weight"].mT},
        r"shape \(6, 5, 8\) for '0.weight'; expected \(6, 8, 5\)",
    ),
    "another N": (lambda rows: {"0.weight": rows["0.weight"][:1]}, r"shape \(1, 8, 5\).*expected \(6, 8, 5\)"),
    "rows and norms": (lambda rows: {**rows, "0.weight": torch.zeros(N)}, r"shape \(6,\) for '0.weight'"),
    "norms of fewer": (lambda rows: torch.zeros(N - 1), r"shape \(5,\), but the loss returned 6 numbers; expected norms of"),
    "no square": (lambda rows: torch.zeros(N, 2), r"shape \(6, 2\)"),
    "nothing": (lambda rows: {}, "without rows"),
    "only None": (lambda rows: {"0.weight": None}, "without rows"),
}


@pytest.mark.parametrize("what", BAD)
def test_numbers_that_make_no_sense_are_refused(what: str) -> None:
    model, batch, rows = case()
    model[1].slope = nn.Parameter(torch.zeros(()), requires_grad=False)
    given, says = BAD[what]
    with pytest.raises(ValueError, match=says):
        check_rows(model, batch, losses_of, given(rows))


LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "mean": (lambda model, x, y: losses_of(model, x, y).mean(), r"returned shape \(\); expected a vector of N losses"),
    "tokens": (lambda model, x, y: model(x), r"returned shape \(6, 3\)"),
    "none": (lambda model, x, y: None, "returned NoneType"),
    "empty": (lambda model, x, y: losses_of(model, x, y)[:0], "no losses"),
    "detached": (lambda model, x, y: losses_of(model, x, y).detach(), "depend on no trainable parameter"),
    "fewer": (lambda model, x, y: losses_of(model, x, y)[1:], r"expected \(5, 8, 5\)"),
}


@pytest.mark.parametrize("what", LOSSES)
def test_losses_that_make_no_sense_are_refused(what: str) -> None:
    model, batch, rows = case()
    loss, says = LOSSES[what]
    with pytest.raises(ValueError, match=says):
        check_rows(model, batch, loss, rows)


def test_arguments_that_make_no_sense_are_refused() -> None:
    model, batch, rows = case()
    wrong: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (TypeError, "function for the model", (losses_of, batch, model, rows), {}),
        (TypeError, "Tensor for the loss", (model, batch, batch[0], rows), {}),
        (TypeError, "list for the rows", (model, batch, losses_of, list(rows.values())), {}),
        (TypeError, "list for '0.weight'", (model, batch, losses_of, {"0.weight": rows["0.weight"].tolist()}), {}),
        (ValueError, "coverage=97", (model, batch, losses_of, rows), {"coverage": 97}),
        (ValueError, "tolerance=0", (model, batch, losses_of, rows), {"tolerance": 0}),
        (ValueError, "without trainable parameters", (nn.ReLU(), batch, losses_of, rows), {}),
        (ValueError, "'weight' has no shape yet", (nn.LazyLinear(3), batch, losses_of, rows), {}),
    ]
    for kind, says, args, kwargs in wrong:
        with pytest.raises(kind, match=says):
            check_rows(*args, **kwargs)


def test_reentrant_checkpoints_are_refused() -> None:
    model, (x, y), rows = case()
    layer = model[0]

    def checkpointed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        inner = checkpoint(layer, x.requires_grad_(), use_reentrant=True)
        return F.cross_entropy(model[2](model[1](inner)), y, reduction="none")

    with pytest.raises(autograd_hacks.errors.UnsupportedLayer, match="use_reentrant=False"):
        check_rows(model, (x, y), checkpointed, rows)


def test_parts_of_parameters_are_refused() -> None:
    model, batch, rows = case()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(autograd_hacks.errors.ShardedParameters, match="the whole model, in one process"):
            check_rows(model, batch, losses_of, rows)
    finally:
        dist.destroy_process_group()
