"""Tensors in objects, and of other kinds: what a model is given, and what it or a module inside returns."""

from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mixing import check_refused, data
from nets import Hiding, Slotted
from oracle import squares
from rarely import crossed
from steps import check, check_batches, check_losses
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import SamplesMixed, UnseenGradient


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


class Kept(Tensor):
    """Every operation's result is one, too."""


class Image(Tensor):
    """As torchvision's: a copy is one, another operation's result is none."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        is_copy = func in (Tensor.clone, Tensor.to, Tensor.detach, Tensor.requires_grad_)
        return out.as_subclass(cls) if is_copy and isinstance(args[0], cls) and type(out) is Tensor else out


def net_of_kinds(bare: bool, mixes: bool = False, kind: type[Tensor] = Tensor) -> nn.Module:
    def run(m: nn.Module, x: Any) -> Tensor:
        if kind is not Tensor and (type(x) is not kind or x.factor != 2):
            raise TypeError("the model was given another kind of tensor")
        h = m.a(x * 2).tanh()
        h = m.b(h * m.scale if bare else h)
        return h - h.mean(0) if mixes else h

    return Bare(run, a=nn.Linear(3, 4), b=nn.Linear(4, 2), **({"scale": torch.randn(4)} if bare else {})).double()


def of_kind(x: Tensor, kind: type[Tensor]) -> Tensor:
    x = x.as_subclass(kind)
    x.factor = 2  # type: ignore[attr-defined]
    return x


@crossed(kind=[Kept, Image], bare=[False, True], options=[{}, {"param_grad": False}, {"probe": False}])
def test_inputs_of_the_users_own_kind(kind: type[Tensor], bare: bool, options: dict[str, bool]) -> None:
    model = net_of_kinds(bare, kind=kind)
    with autograd_hacks.add_hooks(model, **options):
        for n in (4, 3):
            check(model, torch.randn(n, 3).double(), run=lambda x: model(of_kind(x, kind)).as_subclass(Tensor))
            assert all(type(p.grad1) is Tensor for p in model.parameters())
        autograd_hacks.verify(model, args=(of_kind(torch.randn(3, 3).double(), kind),))


@pytest.mark.parametrize("kind", [Kept, Image])
def test_layers_given_the_users_own_kind(kind: type[Tensor]) -> None:
    images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).double()
    words = nn.Sequential(nn.Embedding(9, 4), nn.GRU(4, 3, batch_first=True)).double()
    with autograd_hacks.add_hooks(images), autograd_hacks.add_hooks(words):
        check(images, torch.randn(4, 3, 4, 4).double(), run=lambda x: images(x.as_subclass(kind)).as_subclass(Tensor))
        check(words, torch.randint(9, (4, 5)), run=lambda x: words(x.as_subclass(kind))[0].as_subclass(Tensor))


@pytest.mark.parametrize("kind", [Kept, Image])
@pytest.mark.parametrize("bare", [False, True])
def test_mixing_in_the_users_own_kind(kind: type[Tensor], bare: bool) -> None:
    check_refused(net_of_kinds(bare, mixes=True), (data(4).as_subclass(kind),), error=SamplesMixed)


def twice_net() -> nn.Module:
    """Its first weight is read past its layer, too."""
    return Bare(lambda m, x: m.b(F.linear(m.a(x).tanh(), m.a.weight)), a=nn.Linear(3, 3), b=nn.Linear(3, 2)).double()


class OwnParameter(nn.Parameter):
    pass


@crossed(kind=[Kept, Image, OwnParameter], made=[twice_net, lambda: net_of_kinds(True)])
def test_parameters_of_the_users_own_kind(kind: type[Tensor], made: Callable[[], nn.Module]) -> None:
    model = made()
    for module, name in ((model.a, "weight"), (model, "scale")):
        if hasattr(module, name):
            old = getattr(module, name).detach()
            setattr(module, name, kind(old) if kind is OwnParameter else nn.Parameter(old.as_subclass(kind)))
    check_batches(model, *(torch.randn(n, 3).double() for n in (4, 3)), run=lambda x: model(x).as_subclass(Tensor))


# Sparse ones


def spread(mixes: bool = False) -> nn.Module:
    """A bare weight times a sparse input."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        h = torch.sparse.mm(x, m.weight)
        return m.out((h - h.mean(0) if mixes else h).tanh())

    return Bare(run, weight=torch.randn(3, 4), out=nn.Linear(4, 2)).double()


def written() -> nn.Module:
    return Bare(lambda m, x: m.layer(x.to_dense()) * m.scale, layer=nn.Linear(3, 2), scale=torch.randn(2)).double()


LAID_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda x: x.to_sparse(),
    "hybrid": lambda x: x.to_sparse(1),
    "csr": lambda x: x.to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    ("layout", "made"), [("hybrid", written), *((x, y) for x in ("coo", "csr") for y in (spread, written, twice_net))]
)  # torch multiplies no hybrid tensor by a matrix
def test_sparse_inputs(layout: str, made: Callable[[], nn.Module]) -> None:
    model = made()
    with autograd_hacks.add_hooks(model):
        for n in (4, 5):
            x = torch.randn(n, 3).double().relu()
            check_losses(model, lambda x=x: squares(model(LAID_OUT[layout](x))))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_mixing_behind_a_sparse_input(layout: str) -> None:
    check_refused(spread(mixes=True), (LAID_OUT[layout](data(4)),), error=SamplesMixed)


@pytest.mark.parametrize("bare", [False, True])
def test_sparse_outputs(bare: bool) -> None:
    model = Bare(lambda m, x: m.inner(x).to_sparse(), inner=net_of_kinds(bare))
    check_batches(model, data(4), run=lambda x: model(x).to_dense())


# Nested ones


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@crossed(layout=[torch.strided, torch.jagged], options=[{}, {"probe": False}, {"param_grad": False}])
def test_nested_inputs_run_and_are_refused(layout: torch.layout, options: dict[str, bool]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)
    with autograd_hacks.add_hooks(model, **options):
        torch.stack([part.square().sum() for part in model(x).unbind()]).mean().backward()
        with pytest.raises(UnseenGradient, match=r"nested tensor.*to_padded_tensor.*mask"):
            autograd_hacks.compute_grad1(model)
        model.zero_grad()
        check(model.double(), torch.randn(4, 3).double())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_inside_is_refused(layout: torch.layout) -> None:
    def ragged(m: nn.Module, x: Tensor) -> Tensor:
        parts = torch.nested.as_nested_tensor([part[: 1 + int(part[0, 0] > 0)] for part in x], layout=layout)
        return m.out(torch.nested.to_padded_tensor(m.layer(parts), 0.0).sum(1))

    model = Bare(ragged, layer=nn.Linear(3, 4), out=nn.Linear(4, 2)).double()
    check_refused(model, (data(4, 3, 3),), error=UnseenGradient, match=r"nested tensor.*to_padded_tensor.*mask")
