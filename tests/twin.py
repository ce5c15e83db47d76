"""Steps of a hooked model beside those of an unhooked copy, which is run anew for each loss: nothing of the oracle comes
near the graph that the library reads."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import Rows, assert_rows, one_loss_at_a_time, squares
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import PerSampleGradientError

Run = Callable[..., Tensor]
"""A model and one batch's arguments -> N losses."""


class Bare(nn.Module):
    """Parameters by name, and a forward from outside.  Modules, buffers and whatever else by name, too."""

    def __init__(self, how: Callable[..., Any], **own: Any) -> None:
        super().__init__()
        self.how = how
        for name, x in own.items():
            setattr(self, name, nn.Parameter(x) if isinstance(x, Tensor) and not isinstance(x, nn.Buffer) else x)

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.how(self, *args, **named)


def of_squares(model: nn.Module, *args: Any) -> Tensor:
    return squares(model(*args))


def steps_of(model: nn.Module, batches: Any, run: Run, context: Any, total: str, **options: Any) -> Iterator[Rows]:
    """Hooked steps, each up to the rows that are expected."""
    twin = copy.deepcopy(model)
    with autograd_hacks.add_hooks(model, **options):
        for args in batches:
            model.zero_grad()
            before = copy.deepcopy(model.state_dict())
            state = torch.get_rng_state()
            with context():
                losses = run(model, *args)
            if total == "each":
                autograd_hacks.backward(losses)
            else:
                getattr(losses, total)().backward()
            after = torch.get_rng_state()
            torch.set_rng_state(state)

            def again(args: Any = args, before: Any = before) -> Tensor:
                twin.load_state_dict(before)
                with context():
                    return run(twin, *args)

            rows = one_loss_at_a_time(twin, again)
            yield {name: None if own is None else own.to_dense() for name, own in rows.items()}
            torch.set_rng_state(after)


def check_right(
    model: nn.Module,
    *batches: tuple[Any, ...],
    run: Run = of_squares,
    context: Any = contextlib.nullcontext,
    total: str = "mean",
    inside: torch.dtype | None = None,
    **options: Any,
) -> None:
    """Each step's rows are those of each loss, and their mean is what the user's own backward pass has left.

    total: how losses become one: 'mean', 'sum', or 'each' for backward(losses)    inside: a coarser dtype that is computed
    in, by which rows of each sample may be rounded in another order
    """
    for expected in steps_of(model, batches, run, context, total, **options):
        autograd_hacks.compute_grad1(model, None if total == "each" else total)
        if inside is None:
            assert_rows(model, expected)
        else:
            _assert_near(model, expected, inside)
        for name, p in model.named_parameters():
            if expected.get(name) is not None and inside is None and total != "each":
                whole = expected[name].mean(0) if total == "mean" else expected[name].sum(0)
                torch.testing.assert_close(
                    p.grad.to_dense(), whole, check_dtype=False, msg=lambda m, n=name: f"{n}.grad: {m}"
                )


def _assert_near(model: nn.Module, expected: Rows, dtype: torch.dtype) -> None:
    for name, p in model.named_parameters():
        found, rows = p.grad1.double().flatten(1), expected[name].double().flatten(1)
        apart = (found - rows).norm(dim=1) / (rows.norm(dim=1) + 1e3 * torch.finfo(dtype).smallest_normal)
        assert float(apart.max()) < 30 * torch.finfo(dtype).eps, (name, apart)


def check_refused(
    model: nn.Module,
    *batches: tuple[Any, ...],
    run: Run = of_squares,
    match: str = "",
    may_be_right: bool = False,
    **options: Any,
) -> None:
    """Each step is refused by name.  may_be_right: or has the very rows of each loss"""
    for number, expected in enumerate(steps_of(model, batches, run, contextlib.nullcontext, "mean", **options)):
        try:
            autograd_hacks.compute_grad1(model)
        except PerSampleGradientError as error:
            assert match in str(error)  # noqa: PT017
            continue
        if may_be_right:
            assert_rows(model, expected)
        else:
            pytest.fail(f"step {number} was read")
