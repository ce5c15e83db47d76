"""Tensors of other kinds: the user's own classes, sparse ones, nested ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mixing import check_refused, data
from oracle import squares
from rarely import crossed
from steps import check, check_batches, check_losses
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import SamplesMixed, UnseenGradient


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


def net(bare: bool, mixes: bool = False, kind: type[Tensor] = Tensor) -> nn.Module:
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
    model = net(bare, kind=kind)
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
    check_refused(net(bare, mixes=True), (data(4).as_subclass(kind),), error=SamplesMixed)


def twice_net() -> nn.Module:
    """Its first weight is read past its layer, too."""
    return Bare(lambda m, x: m.b(F.linear(m.a(x).tanh(), m.a.weight)), a=nn.Linear(3, 3), b=nn.Linear(3, 2)).double()


class OwnParameter(nn.Parameter):
    pass


@crossed(kind=[Kept, Image, OwnParameter], made=[twice_net, lambda: net(True)])
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
    model = Bare(lambda m, x: m.inner(x).to_sparse(), inner=net(bare))
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
