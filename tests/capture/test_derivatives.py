"""Law 8: losses with derivatives in them, of any order: rows are those of each loss alone."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from derivatives import LOSSES, Loss, gradient_penalty, rows_of, step, third
from nets import Scale, choosy, routed_net
from oracle import assert_same, one_loss_at_a_time, squares
from quantities import assert_quantities
from rarely import crossed, rarely
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import HigherOrderError, SamplesMixed


def attending(m: nn.Module, x: Tensor) -> Tensor:
    """Attention with a class token, a layer scale, and a weight that is read twice past its layer."""
    x = torch.cat([m.token.expand(len(x), -1, -1), x], 1) * m.scale
    x = x @ m.weight + F.linear(x, m.weight.t(), m.scale)
    with sdpa_kernel(SDPBackend.MATH):
        x = x + m.attend(x, x, x, need_weights=False)[0]
    return m.out(x.tanh())


def tied() -> nn.Module:
    """One layer twice, its weight turned round, and one shared with a layer that stores it so."""
    model = Bare(
        lambda m, x: m.out(h := m.two(m.one(m.one(x).tanh()).tanh()).sigmoid()) + F.linear(h, m.out.weight.t()),
        **{name: nn.Linear(3, 3) for name in ("one", "two", "out")},
    )
    model.two.weight = model.one.weight
    return model


def normed(m: nn.Module, x: Tensor) -> Tensor:
    """Parametrisations, a lookup, time first, and an operation in place on what a layer was given."""
    h = (x + m.table(torch.arange(x.shape[1]))).transpose(0, 1)
    g = m.normed(h.clone())
    return m.bilinear(m.mix(h.clone().add_(1)).tanh(), g).transpose(0, 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Softplus(), nn.Linear(5, 2)), (4, 3)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.Softplus(), nn.Conv2d(4, 4, 3, stride=2, groups=2),
            nn.Tanh(), nn.ConvTranspose2d(4, 2, 2), nn.Flatten(), nn.Linear(18, 2),
        ), (4, 2, 6, 6)),
    "norms": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6), nn.RMSNorm(6), nn.PReLU(5), nn.Linear(6, 2)
        ), (4, 5, 4)),
    "norms by channel": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.BatchNorm1d(4).eval(), nn.PReLU(),
            nn.Conv1d(4, 4, 1, bias=False), nn.InstanceNorm1d(4, affine=True), nn.Flatten(), nn.Linear(16, 2),
        ), (4, 2, 6)),
    "attention": (
        lambda: Bare(
            attending, attend=nn.MultiheadAttention(4, 2, batch_first=True), out=nn.Linear(4, 2),
            token=torch.randn(1, 1, 4), scale=torch.randn(4), weight=torch.randn(4, 4),
        ), (4, 3, 4)),
    "tied": (tied, (4, 3)),
    "recurrent": (
        lambda: Bare(
            lambda m, x: m.out(m.recur(x)[0][:, -1]),
            recur=nn.LSTM(3, 4, batch_first=True, bidirectional=True), out=nn.Linear(8, 2),
        ), (3, 4, 3)),
    "routed": (routed_net, (4, 3, 4)),
    "normed": (
        lambda: Bare(
            normed, normed=parametrizations.weight_norm(nn.Linear(4, 4)), table=nn.Embedding(5, 4), mix=nn.Linear(4, 4),
            bilinear=nn.Bilinear(4, 4, 2),
        ), (4, 3, 4)),
    "checkpointed": (
        lambda: Bare(
            lambda m, x: m.out(checkpoint(m.inner, m.into(x).sigmoid(), use_reentrant=False)),
            into=nn.Linear(3, 4), inner=nn.Sequential(nn.Linear(4, 4), nn.Tanh()), out=nn.Linear(4, 2),
        ), (4, 3)),
    "choosy": (choosy, (4, 3)),
    "scale": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Scale(3)), (4, 3)),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, Tensor]:
    model, shape = MODELS[name]
    torch.manual_seed(0)
    return model().double(), torch.randn(*shape, dtype=torch.float64)


def found(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad1 for name, p in model.named_parameters() if p.requires_grad}


def check_step(model: nn.Module, losses: Callable[[], Tensor]) -> None:
    """A step of a hooked model from the sum of its losses: rows are those of each loss alone."""
    model.zero_grad()
    losses().sum().backward()
    autograd_hacks.compute_grad1(model, "sum")
    with autograd_hacks.pause_hooks():
        assert_same(found(model), one_loss_at_a_time(model, losses))


@crossed(name=MODELS, loss=LOSSES)
def test_rows_are_those_of_each_loss_alone(name: str, loss: Loss) -> None:
    check(name, loss, param_grad=True)


SLOW = "recurrent", "attention", "routed", "norms by channel", "normed"


@pytest.mark.parametrize("name", [*(name for name in MODELS if name not in SLOW), *rarely(*SLOW)])
def test_rows_without_ordinary_gradients(name: str) -> None:
    check(name, third, param_grad=False)


def check_loss(model: nn.Module, loss: Loss, x: Tensor) -> None:
    """As `check_step`, of a loss of `derivatives`; the random numbers are the same."""
    state = torch.get_rng_state()
    step(model, loss, x)
    autograd_hacks.compute_grad1(model, "sum")
    torch.set_rng_state(state)
    with autograd_hacks.pause_hooks():
        assert_same(found(model), rows_of(model, loss, x))


def check(name: str, loss: Loss, param_grad: bool) -> None:
    model, x = made(name)
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for batch in (x, x[:2], x + 0.1)[: 2 if param_grad else 3]:  # the first step of a kind is compared
            check_loss(model, loss, batch)


@pytest.mark.parametrize("name", MODELS)
def test_every_verb(name: str) -> None:
    model, x = made(name)
    with autograd_hacks.add_hooks(model):
        step(model, gradient_penalty, x)
        autograd_hacks.compute_grad1(model, "sum")
        assert_quantities(model, {key: rows for key, rows in found(model).items() if rows is not None}, loss_type="sum")


# Rows that are differentiated themselves: penalties on their norms, sums with weights that learn, a step within a step


DIFFERENTIATED_RARELY = ("norms by channel", "attention", "tied", "recurrent")
"""What only tox -e full differentiates."""

Rows = dict[str, Tensor]


def by_autograd(model: nn.Module, x: Tensor) -> list[Rows]:
    """Each sample's gradient, in a graph."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    each = [torch.autograd.grad(squares(model(x[n : n + 1])).sum(), list(parameters.values()), create_graph=True,
                                allow_unused=True) for n in range(len(x))]  # fmt: skip
    return [{n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), own)} for own in each]


def penalty_of(rows: list[Rows]) -> Tensor:
    """The mean square of the rows' norms, less what they should be."""
    norms = torch.stack([sum(g.square().sum() for g in own.values()) for own in rows])  # type: ignore[misc]  # of tensors
    return (norms.sqrt() - 1).square()


@pytest.mark.parametrize(
    "name", ["mlp", "convolutions", "norms", "routed", "normed", "scale", *rarely(*DIFFERENTIATED_RARELY)]
)
def test_a_penalty_on_the_norms(name: str) -> None:
    """Its gradients, and its own rows."""
    model, x = made(name)
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            model.zero_grad()
            parameters = [p for p in model.parameters() if p.requires_grad]
            torch.autograd.grad(squares(model(x)).sum(), parameters, create_graph=True, allow_unused=True)
            norms = autograd_hacks.per_sample_grads(model, "sum").norms()
            penalty = (norms - 1).square().sum()
            penalty.backward()
            mine = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
            # Of what is made of a weight before it meets the batch, the penalty's own rows aren't known.
            with pytest.raises(HigherOrderError, match="original0") if name == "normed" else nullcontext():
                autograd_hacks.compute_grad1(model, "sum")
            with autograd_hacks.pause_hooks():
                rows = one_loss_at_a_time(model, lambda: penalty_of(by_autograd(model, x)))
            assert_same(mine, {key: None if own is None else own.sum(0) for key, own in rows.items()})
            if name != "normed":
                assert_same(found(model), rows)


def test_weights_that_learn_through_several_steps() -> None:
    """As in learning to reweight: the weights' gradients come through the updates."""
    model, x = made("mlp")
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    w = torch.linspace(0.5, 1, len(x), dtype=torch.float64, requires_grad=True)

    def outer(update: Callable[[Tensor], Rows]) -> Tensor:
        values = {name: p - 0.1 * g for (name, p), g in zip(start.items(), update(w).values())}
        return squares(functional_call(model, values, (x + 1,))).sum()

    def ours(w: Tensor) -> Rows:
        torch.autograd.grad(squares(model(x)).sum(), list(model.parameters()), create_graph=True)
        return autograd_hacks.per_sample_grads(model, "sum").weighted_sum(w)

    def theirs(w: Tensor) -> Rows:
        rows = by_autograd(model, x)
        return {name: sum(w[n] * own[name] for n, own in enumerate(rows)) for name in rows[0]}  # type: ignore[misc]  # of tensors

    with autograd_hacks.add_hooks(model):
        (mine,) = torch.autograd.grad(outer(ours), w)
    (expected,) = torch.autograd.grad(outer(theirs), w)
    torch.testing.assert_close(mine, expected)


def test_what_is_written_out_has_no_graph() -> None:
    model, x = made("mlp")
    with autograd_hacks.add_hooks(model):
        torch.autograd.grad(squares(model(x)).sum(), list(model.parameters()), create_graph=True)
        autograd_hacks.compute_grad1(model, "sum")
        assert not any(p.grad1.requires_grad for p in model.parameters())
        assert autograd_hacks.per_sample_grads(model, "sum").norms().requires_grad


@pytest.mark.parametrize("name", ["mlp", "norms", "attention"])
def test_a_loss_of_the_batchs_own_gradient_is_refused(name: str) -> None:
    """It is a sum over the samples, of which none has a part of its own, though rows would add up."""
    model, x = made(name)
    with autograd_hacks.add_hooks(model):
        grads = torch.autograd.grad(squares(model(x)).sum(), list(model.parameters()), create_graph=True)
        sum(g.square().sum() for g in grads).backward()  # type: ignore[union-attr]  # of tensors
        with pytest.raises(SamplesMixed, match="of the whole batch"):
            autograd_hacks.compute_grad1(model, "sum")
        step(model, lambda net, x: squares(net(x)), x)
        autograd_hacks.compute_grad1(model, "sum")


@pytest.mark.parametrize("mixes", [False, True])
def test_a_derivative_back_through_a_place_where_samples_mix(mixes: bool) -> None:
    """No parameter is behind it, so the rows of a loss without the derivative exist."""
    axes = (5, 3) if mixes else (3,)
    model = Bare(lambda m, x: m.out(F.layer_norm(x, axes)), out=nn.Linear(3, 2)).double()
    with autograd_hacks.add_hooks(model):
        for with_penalty in (False, True, True):
            x = torch.randn(5, 3).double().requires_grad_()
            losses = squares(model(x))
            if with_penalty:
                (grad,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
                losses = (grad.norm(dim=1) - 1).square()
            losses.sum().backward()
            with pytest.raises(SamplesMixed, match="a derivative") if mixes and with_penalty else nullcontext():
                autograd_hacks.compute_grad1(model, "sum")
