"""A layer's rows are of what its node saves: whatever a program makes of the layer's argument, from any step on."""

import contextlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from of_devices import BATCH_NORMS, batch_norm_by
from oracle import squares
from rarely import crossed
from steps import check, check_batches
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import PerSampleGradientError, UnseenGradient
from autograd_hacks.forms import Dense
from autograd_hacks.formulas import Call, Rule
from autograd_hacks.formulas.table import RULES

K = [1.0]
"""By how much the argument is changed in this step: 1 for not at all."""


def bent(x: Tensor) -> Tensor:
    return x * K[0] + (K[0] - 1) * x.square() if x.is_floating_point() else (x + int(K[0]) - 1) % 4


def same(x: Tensor) -> Tensor:
    return x


def noisy(x: Tensor) -> Tensor:
    return x + (K[0] - 1) * torch.rand_like(x) if x.is_floating_point() else x


class Bending(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*((bent(args[0]), *args[1:]) if function is F.linear else args), **(kwargs or {}))


class Computing(TorchDispatchMode):
    """Bends what products are made of."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*(map(bent, args) if function is torch.ops.aten.mm.default else args), **(kwargs or {}))


class Bent(Tensor):
    """Bends itself for linear layers."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [x.as_subclass(Tensor) if isinstance(x, Bent) else x for x in args]
        return function(*((bent(args[0]), *args[1:]) if function is F.linear else args), **(kwargs or {}))


def first(f: Any) -> Any:
    return lambda x, *more, **named: f(bent(x), *more, **named)


def of_layer(f: Any) -> Any:
    return lambda layer, x, *more: f(layer, bent(x), *more)


def within(f: Any) -> Any:
    def changed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with saved_tensors_hooks(bent, same):
            return f(x, w, b)

    return changed


def model(own: nn.Module, how: Callable[[nn.Module, Tensor], Tensor] = lambda m, x: m(x)) -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        if isinstance(own, nn.Embedding | nn.EmbeddingBag):
            x = x.argsort(2)[:, 0, :2]
        return m.last(how(m.own, x).flatten(1).tanh())

    size = 8 if isinstance(own, nn.Embedding) else 4 if isinstance(own, nn.EmbeddingBag) else 16
    return Bare(forward, own=own, last=nn.Linear(size, 2)).double()


def under(context: Callable[[], Any]) -> Callable[[nn.Module, Tensor], Tensor]:
    def run(own: nn.Module, x: Tensor) -> Tensor:
        with context():
            return own(x)

    return run


def linear() -> nn.Module:
    return nn.Linear(4, 4)


WAYS: dict[str, tuple[Callable[[], nn.Module], Any, str, Callable[[Any], Any]]] = {
    "F.linear": (lambda: model(linear()), F, "linear", first),
    "its weight": (lambda: model(linear()), F, "linear", lambda f: lambda x, w, b: f(x, w * K[0], b)),
    "its bias": (lambda: model(linear()), F, "linear", lambda f: lambda x, w, b: f(x, w, b / K[0])),
    "its output": (lambda: model(linear()), F, "linear", lambda f: lambda x, w, b: f(x, w, b) * K[0]),
    "its kind": (
        lambda: model(linear()), F, "linear",
        lambda f: lambda x, w, b: torch.addmm(b, x.flatten(0, -2), w.t(), alpha=K[0]).view(*x.shape[:-1], len(b)),
    ),
    "its order": (lambda: model(linear()), F, "linear", lambda f: lambda x, w, b: f(x if K[0] == 1 else x.mT, w, b)
                  if x.ndim == 3 else f(x, w, b)),
    "Linear.forward": (lambda: model(linear()), nn.Linear, "forward", of_layer),
    "convolution": (lambda: model(nn.Conv1d(4, 4, 3, padding=1)), nn.Conv1d, "_conv_forward", of_layer),
    "dilation": (
        lambda: model(nn.Conv1d(4, 4, 3, padding=1)), F, "conv1d",
        lambda f: lambda x, w, b, s, p, *more: f(x, w, b, s, int(K[0]), int(K[0])),
    ),
    "layer norm": (lambda: model(nn.LayerNorm(4)), F, "layer_norm", first),
    "group norm": (lambda: model(nn.GroupNorm(2, 4)), F, "group_norm", first),
    "rms norm": (lambda: model(nn.RMSNorm(4)), F, "rms_norm", first),
    "batch norm": (lambda: model(nn.BatchNorm1d(4).eval()), F, "batch_norm", first),
    "statistics": (
        lambda: model(nn.BatchNorm1d(4).eval()), F, "batch_norm", lambda f: lambda x, m, v, *more: f(x, m, v * K[0], *more)
    ),
    **{
        name: (lambda: model(nn.BatchNorm1d(4).eval()), F, "batch_norm", lambda _, own=own: first(batch_norm_by(own)))
        for name, own in BATCH_NORMS.items()
    },
    "embedding": (lambda: model(nn.Embedding(4, 4)), F, "embedding", first),
    "bags": (lambda: model(nn.EmbeddingBag(4, 4)), F, "embedding_bag", first),
    "bilinear": (lambda: model(nn.Bilinear(4, 4, 4), lambda m, x: m(x, x)), F, "bilinear", first),
    "cell": (
        lambda: model(nn.GRUCell(4, 4), lambda m, x: m(x.flatten(0, 1)).view(len(x), -1)), nn.GRUCell, "forward", of_layer,
    ),
    "a mode": (lambda: model(linear(), under(Bending)), None, "", same),
    "a class": (lambda: model(linear(), lambda m, x: m(x.as_subclass(Bent)).as_subclass(Tensor)), None, "", same),
    "packing": (lambda: model(linear(), under(lambda: saved_tensors_hooks(bent, same))), None, "", same),
    "unpacking": (lambda: model(linear(), under(lambda: saved_tensors_hooks(same, bent))), None, "", same),
    "packing a norm": (lambda: model(nn.LayerNorm(4), under(lambda: saved_tensors_hooks(bent, same))), None, "", same),
    "packing inside": (lambda: model(linear()), F, "linear", within),
    "packing a product": (
        lambda: model(linear(), under(lambda: saved_tensors_hooks(bent, same))), nn.Linear, "forward",
        lambda f: lambda layer, x: x @ layer.weight.mT,
    ),
}  # fmt: skip
"""A model, and what is patched: of an object, a name, and what becomes of it."""
REFUSED = {"dilation", "bags", "bilinear", "cell"}


class Summed(nn.Linear):
    def forward(self, xs: list[Tensor]) -> Tensor:
        return F.linear(xs[0] + xs[1], self.weight, self.bias)


def of_sum(layer: Summed, call: Call) -> dict[str, Dense]:
    return {"weight": Dense(call.grad.mT @ sum(call.args[0])), "bias": Dense(call.grad.sum(1))}


def test_a_registered_rule_of_a_layer_that_takes_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, Summed, Rule(of_sum))
    check_batches(model(Summed(4, 4), lambda m, x: m([x, x.sin()])), *[torch.rand(5, 4, 4).double()] * 3)


DROPS = nn.Dropout()
RANDOM: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a checkpoint": lambda own, x: checkpoint(lambda x: own(DROPS(x)), x, use_reentrant=False, preserve_rng_state=False),
    "packing": under(lambda: saved_tensors_hooks(noisy, same)),
    "unpacking": under(lambda: saved_tensors_hooks(same, noisy)),
    "a mode": lambda own, x: own(x),
}


@crossed(way=WAYS, param_grad=[True, False])
def test_a_call_that_begins_to_change_its_argument(way: str, param_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    build, owner, name, changed = WAYS[way]
    if owner is not None:
        monkeypatch.setattr(owner, name, changed(getattr(owner, name)))
    own, x = build(), torch.rand(5, 4, 4).double() + 0.1
    with autograd_hacks.add_hooks(own, param_grad=param_grad):
        for K[0] in (1, 1, 1, 2, 3, 1):
            is_refused = way in REFUSED and K[0] != 1
            with pytest.raises(PerSampleGradientError) if is_refused else nullcontext():
                check(own, x)
    K[0] = 1


@crossed(way=RANDOM, layer=["Linear", "LSTM", "GroupNorm"], param_grad=[True, False])
def test_a_pass_that_begins_to_compute_with_other_numbers(way: str, layer: str, param_grad: bool) -> None:
    """Rows add up to the gradient that autograd computes with the same random numbers, or are refused."""
    layers = {"Linear": linear, "LSTM": lambda: nn.LSTM(4, 4, batch_first=True), "GroupNorm": lambda: nn.GroupNorm(2, 4)}

    def run(m: nn.Module, x: Tensor) -> Tensor:
        out = RANDOM[way](m, x)
        return out[0] if isinstance(out, tuple) else out

    def step() -> None:
        torch.manual_seed(0)
        loss = squares(own(x)).mean()
        with Computing() if way == "a mode" else nullcontext():
            loss.backward()

    own, x = model(layers[layer](), run), torch.rand(5, 4, 4).double()
    with autograd_hacks.add_hooks(own, param_grad=param_grad):
        for K[0] in (1, 1, 1, 2, 3):
            DROPS.p = 0.5 * (K[0] > 1)
            own.zero_grad()
            with autograd_hacks.pause_hooks():
                step()
            expected = [p.grad for p in own.parameters()]
            own.zero_grad()
            step()
            with contextlib.suppress(*[UnseenGradient] * (K[0] > 1)):
                autograd_hacks.compute_grad1(own)
                assert_close([p.grad1.mean(0) for p in own.parameters()], expected)
