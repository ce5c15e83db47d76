"""Tensors of other kinds: the user's own classes, sparse ones, nested ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import squares
from rarely import crossed
from steps import check, check_losses
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


class Net(nn.Module):
    def __init__(self, bare: bool, mixes: bool = False, kind: type[Tensor] = Tensor) -> None:
        super().__init__()
        self.a, self.b, self.mixes, self.kind = nn.Linear(3, 4), nn.Linear(4, 2), mixes, kind
        self.scale = nn.Parameter(torch.randn(4)) if bare else None

    def forward(self, x: Any) -> Tensor:
        if self.kind is not Tensor and (type(x) is not self.kind or x.factor != 2):
            raise TypeError("the model was given another kind of tensor")
        h = self.a(x * 2).tanh()
        h = self.b(h if self.scale is None else h * self.scale)
        return h - h.mean(0) if self.mixes else h


def of_kind(x: Tensor, kind: type[Tensor]) -> Tensor:
    x = x.as_subclass(kind)
    x.factor = 2  # type: ignore[attr-defined]
    return x


@crossed(kind=[Kept, Image], bare=[False, True], options=[{}, {"param_grad": False}, {"probe": False}])
def test_inputs_of_the_users_own_kind(kind: type[Tensor], bare: bool, options: dict[str, bool]) -> None:
    model = Net(bare, kind=kind).double()
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
    model = Net(bare, mixes=True).double()
    with autograd_hacks.add_hooks(model):
        squares(model(torch.randn(4, 3).double().as_subclass(kind))).mean().backward()
        with pytest.raises(SamplesMixed):
            autograd_hacks.compute_grad1(model)


def twice_net() -> nn.Module:
    """Its first weight is read past its layer, too."""
    return Bare(lambda m, x: m.b(F.linear(m.a(x).tanh(), m.a.weight)), a=nn.Linear(3, 3), b=nn.Linear(3, 2))


class OwnParameter(nn.Parameter):
    pass


@crossed(kind=[Kept, Image, OwnParameter], net=[twice_net, lambda: Net(True)])
def test_parameters_of_the_users_own_kind(kind: type[Tensor], net: Callable[[], nn.Module]) -> None:
    model = net().double()
    for module, name in ((model.a, "weight"), (model, "scale")):
        if hasattr(module, name):
            old = getattr(module, name).detach()
            setattr(module, name, kind(old) if kind is OwnParameter else nn.Parameter(old.as_subclass(kind)))
    with autograd_hacks.add_hooks(model):
        for n in (4, 3):
            check(model, torch.randn(n, 3).double(), run=lambda x: model(x).as_subclass(Tensor))


# Sparse ones


class Spread(nn.Module):
    """A bare weight times a sparse input."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.weight, self.out, self.mixes = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 2), mixes

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sparse.mm(x, self.weight)
        return self.out((h - h.mean(0) if self.mixes else h).tanh())


def written() -> nn.Module:
    return Bare(lambda m, x: m.layer(x.to_dense()) * m.scale, layer=nn.Linear(3, 2), scale=torch.randn(2))


LAID_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda x: x.to_sparse(),
    "hybrid": lambda x: x.to_sparse(1),
    "csr": lambda x: x.to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    ("layout", "net"), [("hybrid", written), *((x, y) for x in ("coo", "csr") for y in (Spread, written, twice_net))]
)  # torch multiplies no hybrid tensor by a matrix
def test_sparse_inputs(layout: str, net: type[nn.Module]) -> None:
    model = net().double()
    with autograd_hacks.add_hooks(model):
        for n in (4, 5):
            x = torch.randn(n, 3).double().relu()
            check_losses(model, lambda x=x: squares(model(LAID_OUT[layout](x))))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_mixing_behind_a_sparse_input(layout: str) -> None:
    model, x = Spread(mixes=True).double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        squares(model(LAID_OUT[layout](x))).mean().backward()
        with pytest.raises(SamplesMixed):
            autograd_hacks.compute_grad1(model)


@pytest.mark.parametrize("bare", [False, True])
def test_sparse_outputs(bare: bool) -> None:
    class Thinned(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).to_sparse()

    model, x = Thinned(bare).double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        check(model, x, run=lambda x: model(x).to_dense())


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

    model, x = Bare(ragged, layer=nn.Linear(3, 4), out=nn.Linear(4, 2)).double(), torch.randn(4, 3, 3).double()
    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        with pytest.raises(UnseenGradient, match=r"nested tensor.*to_padded_tensor.*mask"):
            autograd_hacks.compute_grad1(model)
