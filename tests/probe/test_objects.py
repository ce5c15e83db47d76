"""Tensors in objects: what a model is given, and what it or a module inside returns."""

from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from mixing import check_refused, data
from oracle import squares
from rarely import crossed
from steps import check, check_batches
from torch import Tensor
from twin import Bare

import autograd_hacks


@dataclass
class Plain:
    x: Tensor
    more: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    name: str = "frozen"


@dataclass
class Deep:
    parts: dict[str, list[Plain]]

    @property
    def x(self) -> Tensor:
        return self.parts["a"][0].x


class Hiding:
    """An object of any kind."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.itself = x, self


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Named(OrderedDict):  # type: ignore[type-arg]
    """As the outputs of the transformers library, unregistered."""

    @property
    def x(self) -> Tensor:
        return self["x"]


RECORDS: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": Plain,
    "frozen": Frozen,
    "deep": lambda x: Deep({"a": [Plain(x)]}),
    "namespace": lambda x: SimpleNamespace(x=x, n=3),
    "own dictionary": lambda x: Named(x=x),
}
OBJECTS = {
    **RECORDS,
    "any object": Hiding,
    "slots": Slotted,
    "inside another": lambda x: Hiding([{"x": Plain(x)}]),
    "a distribution": lambda x: torch.distributions.Normal(x, 1.0),
    "a dictionary of one's own": lambda x: UserDict(x=x),
}


def read(x: Any) -> Tensor:
    while not isinstance(x, Tensor):
        x = x[0] if isinstance(x, list) else x["x"] if isinstance(x, dict | UserDict) else x.x if hasattr(x, "x") else x.loc
    return x


def net(wrap: Callable[[Tensor], Any], mixes: Any = None, bare: bool = True) -> nn.Module:
    """Maybe with a bare parameter, and maybe mixing."""

    def run(m: nn.Module, x: Any) -> Any:
        h = m.a(x if isinstance(x, Tensor) else read(x)).tanh()
        h = m.b(h * m.scale if bare else h)
        return wrap(h - mixes(h.mean(0)) if mixes else h)

    return Bare(run, a=nn.Linear(3, 4), b=nn.Linear(4, 2), **({"scale": torch.randn(4)} if bare else {})).double()


@crossed(kind=OBJECTS, bare=[False, True], param_grad=[False, True])
def test_an_object_that_the_model_returns(kind: str, bare: bool, param_grad: bool) -> None:
    model = net(OBJECTS[kind], bare=bare)
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for n in (4, 3):
            x = data(n)
            assert type(model(x)) is type(OBJECTS[kind](x))
            check(model, x, run=lambda x: read(model(x)))


@crossed(kind=OBJECTS, bare=[False, True])
def test_mixing_in_an_object_that_the_model_returns(kind: str, bare: bool) -> None:
    check_refused(net(lambda h: h, mixes=Tensor.clone), (Plain(data(4)),))  # or that it is given
    for independent, mixes in enumerate((Tensor.clone, Tensor.detach)):
        model = net(OBJECTS[kind], mixes=mixes, bare=bare)
        check_refused(model, *[(data(4),)] * 2, losses=lambda out: squares(read(out)), independent=bool(independent))


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_between_modules(kind: str) -> None:
    model = Bare(
        lambda m, x: m.head(m.encoder(x)),
        encoder=net(OBJECTS[kind]),
        head=Bare(lambda m, x: m.out(read(x) + m.shift).tanh(), out=nn.Linear(2, 2), shift=torch.randn(2)),
    ).double()
    check_batches(model, *(torch.randn(n, 3).double() for n in (4, 5)))


@crossed(kind=RECORDS, bare=[False, True], axes=[0, "tree"])
def test_an_object_that_the_model_is_given(kind: str, bare: bool, axes: Any) -> None:
    model = net(lambda h: h, bare=bare)
    with autograd_hacks.add_hooks(model, batch_dim=(0,) if axes == "tree" else 0):
        for n in (4, 3):
            given = RECORDS[kind](x := torch.randn(n, 3).double())
            check(model, x, run=lambda x: model(RECORDS[kind](x)))
            assert read(given) is x
            model(given)
            autograd_hacks.verify(model, rows=2)


def test_axes_in_an_object() -> None:
    def positions(m: nn.Module, given: Plain) -> Tensor:
        assert given.more is not None
        return m.layer(given.x + given.more * m.shift).tanh()

    model, more = Bare(positions, layer=nn.Linear(3, 2), shift=torch.randn(3)).double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model, batch_dim=(Plain(0, None),)):  # type: ignore[arg-type]
        check(model, torch.randn(4, 4, 3).double(), run=lambda x: model(Plain(x, more)))
