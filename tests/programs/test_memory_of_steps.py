"""Reference counts alone free each step: no tensor of an earlier step is alive, though Python collects no garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import squares
from rarely import rarely
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import autograd_hacks
from autograd_hacks.graph.memo import WITH_TENSORS

D = 4


class Made(TorchDispatchMode):
    """The memory of the tensors that are made inside, held weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _storages((args, kwargs))
        out = func(*args, **(kwargs or {}))
        self.storages += [weakref.ref(storage) for at, storage in _storages(out).items() if at not in given]
        return out

    def alive(self) -> list[int]:
        """The sizes of the memory that is still held, in bytes."""
        self.storages = [own for own in self.storages if own() is not None]
        return [storage.nbytes() for own in self.storages if (storage := own()) is not None]


def _storages(tree: Any) -> dict[int, Any]:
    """The tensors' memory, by address."""
    storages = [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, Tensor)]
    return {storage.data_ptr(): storage for storage in storages}


class Tokens(nn.Module):
    """A class token, positions and a scale beside layers, as in a ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.token = nn.Linear(D, D), nn.Parameter(torch.randn(1, 1, D))
        self.positions, self.scale = nn.Parameter(torch.randn(1, 4, D)), nn.Parameter(torch.ones(D))
        self.block = nn.TransformerEncoderLayer(D, 2, 2 * D, batch_first=True, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1) + self.positions
        return (self.scale * self.block(x))[:, 0]


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.layer.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, D)), nn.Parameter(torch.randn(D, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) + F.linear(x, self.up @ self.down))


class Experts(nn.Module):
    """Routed by values: each row goes through one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.experts = nn.Linear(D, 2), nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])

    def forward(self, x: Tensor) -> Tensor:
        rows, out = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        weights = self.route(rows).softmax(1)
        for n, expert in enumerate(self.experts):
            (own,) = torch.where(weights.argmax(1) == n)
            out = out.index_add(0, own, expert(rows[own]) * weights[own, n, None])
        return out.view_as(x)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)), nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.scale * self.body(x), x, use_reentrant=False)


def _losses(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model(x))


def _penalised(model: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    out = squares(torch.tanh(model(x)))
    return out + torch.autograd.grad(out.sum(), x, create_graph=True)[0].square().sum((1, 2))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "class tokens": (Tokens, _losses),
    "layers": (lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.LayerNorm(D)), _losses),
    "low rank": (LowRank, _losses),
    "experts": (Experts, _losses),
    "checkpoints": (Checkpointed, _losses),
    "penalties": (lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), LowRank()), _penalised),
}
OFTEN = ["class tokens", "experts", "checkpoints", *rarely("layers", "low rank", "penalties")]


def _read(verb: Callable[[autograd_hacks.PerSampleGrads], object]) -> Callable[[nn.Module, Callable[[], Tensor]], None]:
    def run(model: nn.Module, losses: Callable[[], Tensor]) -> None:
        autograd_hacks.backward(losses())
        verb(autograd_hacks.per_sample_grads(model))

    return run


def _during(model: nn.Module, losses: Callable[[], Tensor]) -> None:
    with autograd_hacks.during_backward(model, "norms"):
        autograd_hacks.backward(losses())


def _accumulated(model: nn.Module, losses: Callable[[], Tensor]) -> None:
    with autograd_hacks.accumulate(model):
        for _ in range(2):
            autograd_hacks.backward(losses())
        autograd_hacks.compute_grad1(model)


def _unread(model: nn.Module, losses: Callable[[], Tensor]) -> None:
    losses().mean().backward()


def _forward_alone(model: nn.Module, losses: Callable[[], Tensor]) -> None:
    losses()


def _of_rows(model: nn.Module, losses: Callable[[], Tensor]) -> None:
    autograd_hacks.backward(losses())
    autograd_hacks.compute_grad1(model)
    for p in model.parameters():
        if hasattr(p, "grad1"):
            del p.grad1


def _clipped(model: nn.Module, losses: Callable[[], Tensor]) -> None:
    autograd_hacks.backward(losses())
    autograd_hacks.clip_grad1_norm_(model, 1.0)


def _jacobian(model: nn.Module, losses: Callable[[], Tensor]) -> None:
    autograd_hacks.per_sample_jacobian(model, losses()[:, None]).norms()


def _along(grads: autograd_hacks.PerSampleGrads) -> None:
    grads.dot({name: torch.ones(rows.shape[1:]) for name, rows in grads.dense().items()})


VERBS: list[Callable[[nn.Module, Callable[[], Tensor]], None]] = [
    _of_rows,
    _clipped,
    _during,
    _accumulated,
    _read(lambda grads: grads.norms()),
    _read(lambda grads: grads.gram_of_all()),
    _read(lambda grads: grads.project(3)),
    _read(lambda grads: grads.weighted_sum(torch.ones(3))),
    _read(lambda grads: grads.second_moment()),
    _read(lambda grads: grads.gram()),
    _read(_along),
    _jacobian,
    _unread,
    _forward_alone,
]


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _steps(model: nn.Module, step: Callable[[int], None], kinds: int) -> None:
    """Runs steps of so many kinds by turns.  The memory that one has made must be gone when the next has ended.

    Excepted are constants, which the first steps make, and what the memo of walks keeps: whose entries are whose.
    """
    made: list[Made] = []
    for number in range(10 + 3 * kinds):
        with Made() as own:
            step(number)
        made.append(own)
        model.zero_grad()
        for p in model.parameters():
            p.grad1 = None
        later = enumerate(made[4 + 2 * kinds : -2], 4 + 2 * kinds)
        holding = {before: len(old.alive()) for before, old in later if old.alive()}
        assert len(holding) <= WITH_TENSORS, f"after step {number}, earlier ones hold so many tensors: {holding}"


@pytest.mark.parametrize("name", OFTEN)
@pytest.mark.parametrize("param_grad", [False, *rarely(True)])
def test_a_step_is_freed_when_the_next_has_ended(name: str, param_grad: bool, no_collection: None) -> None:
    torch.manual_seed(0)
    make, losses = MODELS[name]
    model = make()
    autograd_hacks.add_hooks(model, param_grad=param_grad)
    _steps(model, lambda n: VERBS[n % len(VERBS)](model, lambda: losses(model, torch.randn(3, 3, D))), len(VERBS))


class Stopped(Exception):
    """What an interrupt raises in the middle of a step."""


def _stop(*_: object) -> None:
    raise Stopped


def _in_forward(model: nn.Module, losses: Callable[[], Tensor]) -> None:
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    with last.register_forward_hook(_stop):
        losses()


def _in_backward(model: nn.Module, losses: Callable[[], Tensor]) -> None:
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    with last.register_forward_hook(lambda layer, args, out: out.register_hook(_stop) and None):
        losses().mean().backward()


def _in_reading(model: nn.Module, losses: Callable[[], Tensor]) -> None:
    autograd_hacks.backward(losses())
    with autograd_hacks.accumulate(model):
        raise Stopped


@pytest.mark.parametrize("name", OFTEN)
def test_an_interrupted_step_is_freed(name: str, no_collection: None) -> None:
    torch.manual_seed(0)
    make, losses = MODELS[name]
    model = make()
    autograd_hacks.add_hooks(model)

    def step(number: int) -> None:
        kinds = [_in_forward, _of_rows, _in_backward, _in_reading]
        with suppress(Stopped):
            kinds[number % len(kinds)](model, lambda: losses(model, torch.randn(3, 3, D, requires_grad=True)))

    _steps(model, step, 4)


def _mixed(model: nn.Module, x: Tensor) -> Tensor:
    """Samples mix in the loss."""
    out = squares(model(x))
    return out * out.mean()


@pytest.mark.parametrize("name", OFTEN)
def test_a_refused_step_is_freed(name: str, no_collection: None) -> None:
    torch.manual_seed(0)
    make, losses = MODELS[name]
    model, errors = make(), []
    autograd_hacks.add_hooks(model)

    def step(number: int) -> None:
        own = losses if number % 2 else _mixed
        try:
            autograd_hacks.backward(own(model, torch.randn(3, 3, D)))
            autograd_hacks.compute_grad1(model)
        except autograd_hacks.errors.PerSampleGradientError as error:
            errors.append(type(error))

    _steps(model, step, 2)
    assert errors


def test_a_model_that_mixes_samples_is_freed(no_collection: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.Flatten(0, 1), nn.BatchNorm1d(D), LowRank())
    autograd_hacks.add_hooks(model)

    def step(number: int) -> None:
        autograd_hacks.backward(squares(model(torch.randn(3, 3, D)).view(3, 3, D)))
        with pytest.raises(autograd_hacks.errors.SamplesMixed):
            autograd_hacks.compute_grad1(model)

    _steps(model, step, 1)
