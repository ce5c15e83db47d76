"""A hooked model and the calls that tables of refusals make on it: the error, words of its message, the section it names."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import squares
from steps import batch, check, mlp
from test_errors import POINTER
from torch import Tensor

import autograd_hacks
from autograd_hacks import PerSampleGrads
from autograd_hacks.support.pages import explained


class Given:
    """A hooked model and a batch of five samples.  What comes of them is made where a row first asks for it."""

    def __init__(self) -> None:
        self.model, (self.x, self.y) = mlp(), batch()
        autograd_hacks.add_hooks(self.model)

    @cached_property
    def out(self) -> Tensor:
        return self.model(self.x)

    @cached_property
    def losses(self) -> Tensor:
        return squares(self.out, self.y)

    @cached_property
    def grads(self) -> PerSampleGrads:
        self.losses.mean().backward()
        return autograd_hacks.per_sample_grads(self.model)

    @cached_property
    def rows(self) -> PerSampleGrads:
        """Of each entry of the output."""
        return autograd_hacks.per_sample_jacobian(self.model, self.out)

    @cached_property
    def passes(self) -> PerSampleGrads:
        """Of the curvature."""
        autograd_hacks.backprop_hess(self.out)
        return autograd_hacks.per_sample_grads(self.model)

    @cached_property
    def v(self) -> dict[str, Tensor]:
        return {name: torch.ones_like(p) for name, p in self.model.named_parameters()}

    @property
    def doubled(self) -> dict[str, Tensor]:
        return {name: 2 * p for name, p in self.model.named_parameters()}

    def read(self, loss_type: Any = None) -> None:
        autograd_hacks.compute_grad1(self.model, loss_type)

    def jacobian(self, output: Any, **options: Any) -> PerSampleGrads:
        return autograd_hacks.per_sample_jacobian(self.model, output, **options)

    def hess(self, *given: Any, **options: Any) -> None:
        autograd_hacks.backprop_hess(self.out)
        autograd_hacks.compute_hess(self.model, *given, **options)

    def during(self, *what: Any, **options: Any) -> None:
        with autograd_hacks.during_backward(self.model, *what, **options):
            self.losses.mean().backward()

    def over(self, verb: Callable[..., Any] = PerSampleGrads.norms, size: int = 3, **options: Any) -> Any:
        batches = self.x.split(size)
        return autograd_hacks.over(self.model, batches, lambda m, x: squares(m(x)), verb, **options)

    def other(self, *between: nn.Module, **options: Any) -> nn.Module:
        """Another model, hooked."""
        model = nn.Sequential(nn.Linear(3, 4), *between, nn.Linear(4, 2)).double()
        autograd_hacks.add_hooks(model, **options)
        return model

    def within(self, context: AbstractContextManager[Any], *calls: Callable[[], Any]) -> None:
        with context:
            for call in calls:
                call()


Row = tuple[Any, Any, str, Callable[[Given], Any]]
"""The error; the section that it names: ... for that of the error's class, None for none; words of its message, as a
pattern; and what is called."""


def of(kind: Any, section: Any, rows: list[tuple[str, Callable[[Given], Any]]]) -> list[Row]:
    return [(kind, section, words, call) for words, call in rows]


def check_each(*rows: tuple[Any, str, Callable[[], Any]]) -> None:
    """Each call is refused.  rows: the error, words of its message, as a pattern, and the call"""
    for kind, words, call in rows:
        with pytest.raises(kind, match=f"(?s){words}"):
            pytest.fail(f"{call()}, and no refusal: {words}")


def said(row: Row) -> str:
    """The name of a row's test."""
    kind, _, words, _ = row
    return f"{kind.__name__ if isinstance(kind, type) else kind}: {words}"


def check_refused(row: Row, goes_on: bool = False) -> Given:
    """The call is refused in these words.  goes_on: and then the model's next step is right"""
    kind, section, words, call = row
    given = Given()
    with pytest.raises(kind, match=f"(?s){words}") as raised:
        call(given)
    named = POINTER.findall(str(raised.value))
    title = raised.type.explained[0] if section is ... else section
    assert [explained(name).split("\n")[0] for name in named] == [title] * (title is not None), named
    if not goes_on:
        return given
    autograd_hacks.enable_hooks()
    given.model.requires_grad_()
    check(given.model, batch(6, 9)[0])
    return given
