"""Reference counts alone free each step: no tensor of an earlier step is alive, though Python collects no garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from derivatives import gradient_penalty
from nets import routed_net
from oracle import squares
from rarely import rarely
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from twin import Bare, of_squares

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


def tokens(m: nn.Module, x: Tensor) -> Tensor:
    """A class token, positions and a scale beside layers, as in a ViT."""
    x = torch.cat([m.token.expand(len(x), -1, -1), m.embed(x)], 1) + m.positions
    return (m.scale * m.block(x))[:, 0]


def of_tokens() -> nn.Module:
    bare = {"token": torch.randn(1, 1, D), "positions": torch.randn(1, 4, D), "scale": torch.ones(D)}
    block = nn.TransformerEncoderLayer(D, 2, 2 * D, batch_first=True, dropout=0.0)
    return Bare(tokens, embed=nn.Linear(D, D), block=block, **bare)


def low_rank() -> nn.Module:
    return Bare(
        lambda m, x: torch.tanh(m.layer(x) + F.linear(x, m.up @ m.down)),
        layer=nn.Linear(D, D).requires_grad_(False), down=torch.randn(2, D), up=torch.randn(D, 2),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "class tokens": (of_tokens, of_squares),
    "experts": (routed_net, of_squares),
    "checkpoints": (
        lambda: Bare(
            lambda m, x: checkpoint(lambda x: m.scale * m.body(x), x, use_reentrant=False),
            body=nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)),
            scale=torch.ones(D),
        ),
        of_squares,
    ),
    "penalties": (
        lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), low_rank()),
        lambda model, x: gradient_penalty(model, x.requires_grad_()),
    ),
}
OFTEN = ["class tokens", "experts", "checkpoints", *rarely("penalties")]


Losses = Callable[[], Tensor]


def _read(verb: Callable[[autograd_hacks.PerSampleGrads], object]) -> Callable[[nn.Module, Losses], None]:
    def run(model: nn.Module, losses: Losses) -> None:
        autograd_hacks.backward(losses())
        verb(autograd_hacks.per_sample_grads(model))

    return run


def _during(model: nn.Module, losses: Losses) -> None:
    with autograd_hacks.during_backward(model, "norms"):
        autograd_hacks.backward(losses())


def _accumulated(model: nn.Module, losses: Losses) -> None:
    with autograd_hacks.accumulate(model):
        for _ in range(2):
            autograd_hacks.backward(losses())
        autograd_hacks.compute_grad1(model)


def _of_rows(model: nn.Module, losses: Losses) -> None:
    autograd_hacks.backward(losses())
    autograd_hacks.compute_grad1(model)
    for p in model.parameters():
        if hasattr(p, "grad1"):
            del p.grad1


def _clipped(model: nn.Module, losses: Losses) -> None:
    autograd_hacks.backward(losses())
    autograd_hacks.clip_grad1_norm_(model, 1.0)


VERBS: list[Callable[[nn.Module, Losses], object]] = [
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
    _read(lambda grads: grads.dot({name: torch.ones(rows.shape[1:]) for name, rows in grads.dense().items()})),
    lambda model, losses: autograd_hacks.per_sample_jacobian(model, losses()[:, None]).norms(),
    lambda model, losses: losses().mean().backward(),  # not read
    lambda model, losses: losses(),  # not even a backward pass
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
