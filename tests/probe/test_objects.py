"""Tensors in objects: what a model is given, and what it or a module inside returns."""

from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import squares
from steps import check
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import SamplesMixed
from autograd_hacks.support.trees import map_tensors, tensors_of


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
OBJECTS = {**RECORDS, "any object": Hiding, "slots": Slotted, "inside another": lambda x: Hiding(Plain(x))}


def read(x: Any) -> Tensor:
    return x.x if isinstance(x.x, Tensor) else x.x.x


class Net(nn.Module):
    """A bare parameter, for which the whole is run again, and maybe mixing."""

    def __init__(self, wrap: Callable[[Tensor], Any], mixes: bool = False, bare: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.wrap, self.mixes = nn.Linear(3, 4), nn.Linear(4, 2), wrap, mixes
        self.scale = nn.Parameter(torch.randn(4)) if bare else None

    def forward(self, x: Any) -> Any:
        h = self.a(x if isinstance(x, Tensor) else read(x)).tanh()
        h = self.b(h if self.scale is None else h * self.scale)
        return self.wrap(h - h.mean(0) if self.mixes else h)


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("param_grad", [False, True])
def test_an_object_that_the_model_returns(kind: str, bare: bool, param_grad: bool) -> None:
    model = Net(OBJECTS[kind], bare=bare).double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for n in (4, 3):
            x = torch.randn(n, 3).double()
            out = model(x)
            assert type(out) is type(OBJECTS[kind](x))
            check(model, x, run=lambda x: read(model(x)))


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("bare", [False, True])
def test_mixing_in_an_object_that_the_model_returns(kind: str, bare: bool) -> None:
    model = Net(OBJECTS[kind], mixes=True, bare=bare).double()
    with autograd_hacks.add_hooks(model):
        squares(read(model(torch.randn(4, 3).double()))).mean().backward()
        with pytest.raises(SamplesMixed):
            autograd_hacks.compute_grad1(model)


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_between_modules(kind: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = Net(OBJECTS[kind]), Head()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x))

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.shift = nn.Linear(2, 2), nn.Parameter(torch.randn(2))

        def forward(self, x: Any) -> Tensor:
            return self.out(read(x) + self.shift).tanh()

    model = Outer().double()
    with autograd_hacks.add_hooks(model):
        for n in (4, 5):
            check(model, torch.randn(n, 3).double())


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("axes", [0, "tree"])
def test_an_object_that_the_model_is_given(kind: str, bare: bool, axes: Any) -> None:
    model = Net(lambda h: h, bare=bare).double()
    with autograd_hacks.add_hooks(model, batch_dim=(0,) if axes == "tree" else 0):
        for n in (4, 3):
            given = RECORDS[kind](x := torch.randn(n, 3).double())
            check(model, x, run=lambda x: model(RECORDS[kind](x)))
            assert read(given) is x
            model(given)
            autograd_hacks.verify(model, samples=2)


def test_axes_in_an_object() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.shift = nn.Linear(3, 2), nn.Parameter(torch.randn(3))

        def forward(self, given: Plain) -> Tensor:
            assert given.more is not None
            return self.layer(given.x + given.more * self.shift).tanh()

    model, more = Positions().double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model, batch_dim=(Plain(0, None),)):  # type: ignore[arg-type]
        check(model, torch.randn(4, 4, 3).double(), run=lambda x: model(Plain(x, more)))


def test_mixing_by_an_object_that_the_model_is_given() -> None:
    model = Net(lambda h: h, mixes=True).double()
    with autograd_hacks.add_hooks(model):
        squares(model(Plain(torch.randn(4, 3).double()))).mean().backward()
        with pytest.raises(SamplesMixed):
            autograd_hacks.compute_grad1(model)


def test_other_objects_that_the_model_is_given() -> None:
    """What they hold is not seen, and has no need to be."""
    model = Net(lambda h: h).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            check(model, torch.randn(4, 3).double(), run=lambda x: model(Hiding(x)))


def test_the_user_s_own_objects_stay() -> None:
    """What the model is given keeps its tensors, and what a model keeps of what it returned is what it returned."""

    @dataclass
    class State:
        x: Tensor
        seen: list[int] = field(default_factory=list)

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, state: State) -> Tensor:
            state.seen.append(1)
            state.x = state.x * 2
            return self.layer(state.x)

    model, x = Counting().double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        model(state := State(x))
        assert state.seen == [1]
        assert torch.equal(state.x, 2 * x)


def test_trees_of_objects() -> None:
    x = torch.ones(2)
    tree = [Plain(x, x + 1), {"a": Hiding(x)}, UserDict(b=x), 3, None]
    assert len(tensors_of(tree)) == 4
    doubled = map_tensors(lambda x: 2 * x, tree)
    assert torch.equal(doubled[0].more, 2 * (x + 1))
    assert type(doubled[1]["a"]) is Hiding
    assert doubled[2]["b"][0] == 2
    assert tree[1]["a"].x is x
    assert doubled[3:] == [3, None]
    assert map_tensors(lambda x: x, nn.Linear) is nn.Linear
    nothing = Hiding(3)  # type: ignore[arg-type]
    assert map_tensors(lambda x: 2 * x, nothing) is nothing
    assert tensors_of(nothing) == []
