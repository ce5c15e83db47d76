"""Losses that a model makes itself, or that are made of what it returns, and gates that are zero at first."""

import contextlib
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from mixing import MIXING, SIZES, AsLoss, How, check_refused, check_right, data, steps_of, zeroed
from nets import Between, Multiply
from oracle import assert_rows, one_loss_at_a_time
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import SamplesMixed
from autograd_hacks.reading import beyond

# Losses made inside the model


def contrast(z: Tensor) -> Tensor:
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z @ z.T - 1e9 * torch.eye(len(z), dtype=z.dtype), torch.arange(len(z)).roll(1))


LOSSES: dict[str, How] = {
    "SimCLR": contrast,
    "VICReg": lambda z: z.var(0).sqrt().mean() + z.square().mean(),
    "the mean's square": lambda z: z.mean(0).square().sum(),
    "a set's distance": lambda z: torch.cdist(z, z).square().mean(),
    "normed": lambda z: (z / z.norm()).sum(),
    "a root beside a mean": lambda z: z.square().mean().sqrt() + z.square().mean(),
    "a product": lambda z: z.square().mean() * z.exp().mean(),
    "one pair": lambda z: -F.logsigmoid(z[0, 0] - z[-1, 0]),
    "a mean's square": lambda z: z.mean().square(),
    "each other's target": lambda z: F.mse_loss(z, z.flip(0)),
    "each other's probabilities": lambda z: F.binary_cross_entropy_with_logits(z, z.roll(1, 0).sigmoid()),
    "a dot product": lambda z: z[:, 0] @ z[:, 0].roll(1),
    "one by one": lambda z: sum((row.relu().square().sum() for row in z.split(1)), z.var()),
}
DETACHED: dict[str, How] = {
    "load balancing": lambda z: (F.one_hot(z.argmax(1), z.shape[1]).to(z).mean(0) * z.softmax(1).mean(0)).sum(),
    "the largest alone": lambda z: z.square().sum(1).max(),
    "centred": lambda z: (z - z.mean(0).detach()).square().sum(),
}


@pytest.mark.parametrize("what", [*LOSSES, *DETACHED])
def test_losses_made_inside_that_mix(what: str) -> None:
    for samples in SIZES:
        model = AsLoss({**LOSSES, **DETACHED}[what]).double()
        nn.init.zeros_(model.first.bias)  # or all samples may choose one expert
        nn.init.zeros_(model.last.bias)
        check_refused(model, *[(data(samples),)] * 2, independent=what in DETACHED)


# Losses made inside, of random operations: each sample's row is its own part's gradient, or is refused.


def weights(h: Tensor) -> Tensor:
    return torch.linspace(0, 2, h.numel(), dtype=h.dtype).view(h.shape) + 1e-3


STEPS: dict[str, How] = {
    "square": torch.square,
    "root": lambda h: (h.square() + 1 if h.ndim else h.detach().abs() + 1 + h - h.detach()).sqrt(),
    "scale": lambda h: 3 * h - 1,
    "weigh": lambda h: h * weights(h) / 2.5,
    "divide": lambda h: h / torch.tensor(7.0),
    "invert": lambda h: 2 / (h.square() + 1),
    "sum of the first axis": lambda h: h.sum(0) if h.ndim else h,
    "mean of the first axis": lambda h: h.mean(0) if h.ndim else h,
    "sum of the last axis": lambda h: h.sum(-1) if h.ndim else h,
    "mean": torch.mean,
    "norm": torch.linalg.vector_norm,
    "variance": lambda h: h.var(0) if h.ndim and len(h) > 1 else h,
    "logsumexp": lambda h: h.logsumexp(0) if h.ndim else h,
    "largest": lambda h: h.amax(0) if h.ndim else h,
    "log_softmax": lambda h: h.log_softmax(-1) if h.ndim else h,
    "softmax of the first axis": lambda h: h.softmax(0) if h.ndim else h,
    "centre": lambda h: h - h.mean(0) if h.ndim else h,
    "flatten": lambda h: h.flatten(0, 1) if h.ndim > 1 else h,
    "transpose": lambda h: h.transpose(0, -1) if h.ndim else h,
    "mask": lambda h: h[torch.arange(len(h)) * 7 % 3 > 0] if h.ndim and len(h) > 1 else h,
    "first": lambda h: h[0] if h.ndim > 1 else h,
    "loop": lambda h: torch.stack([row.square().sum() for row in h]) if h.ndim else h,
    "loop that adds": lambda h: sum((row.square().mean() for row in h), torch.zeros(())) if h.ndim else h,
    "loop of roots": lambda h: sum(((row.square().mean() + 1).sqrt() for row in h), torch.zeros(())) if h.ndim else h,
    "add its square": lambda h: h + h.square(),
    "add its mean": lambda h: h + h.square().mean(),
    "multiply by its mean": lambda h: h * h.square().mean(),
    "squared error": lambda h: F.mse_loss(h, torch.ones_like(h)),
    "cross entropy": lambda h: F.cross_entropy(h, torch.arange(len(h)) % h.shape[1]) if h.ndim == 2 else h,
    "smoothed cross entropy": lambda h: (
        F.cross_entropy(h, torch.arange(len(h)) % h.shape[1], label_smoothing=0.1, reduction="sum") if h.ndim == 2 else h
    ),
    "mean of what counts": lambda h: (h * weights(h)).sum() / weights(h).sum(),
    "binary cross entropy": lambda h: F.binary_cross_entropy_with_logits(h, torch.full_like(h, 0.5)),
}


class Composed(nn.Module):
    """Returns a loss that it makes of N T D numbers.  With ``only`` gradient reaches that sample's numbers alone."""

    only: int | None = None

    def __init__(self, positions: int, features: int, steps: Sequence[str], hides: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 3).double(), nn.Linear(3, positions * features).double()
        self.sizes, self.steps, self.hides = (positions, features), steps, hides

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(self.body(2 * x if self.hides else x).tanh()).unflatten(1, self.sizes)
        if self.only is not None:
            h = torch.where(torch.arange(len(h))[:, None, None] == self.only, h, h.detach())
        h = h.squeeze(1)
        for step in self.steps:
            h = STEPS[step](h)
        return h.sum()


def own_parts(model: Composed, x: Tensor) -> Tensor:
    """The gradient by the body's weight that comes through each sample's numbers, N ..."""
    rows = []
    for model.only in range(len(x)):
        rows += torch.autograd.grad(model(x), model.body.weight, materialize_grads=True)
    model.only = None
    return torch.stack(rows)


def check_rows_or_refused(model: Composed, x: Tensor) -> bool:
    """Returns whether there are rows."""
    with autograd_hacks.add_hooks(model):
        model(x).backward()
        try:
            autograd_hacks.compute_grad1(model, loss_type="sum")
        except SamplesMixed:
            return False
        rows, is_scaled = model.body.weight.grad1, "scaled by the batch" in str(autograd_hacks.describe(model))
    torch.testing.assert_close(rows, own_parts(model, x))
    # Rows belong to samples only if other samples don't change them, but for one factor.
    for n in range(len(x)) if "largest" not in model.steps else ():  # they may change which is the largest
        others = torch.where(torch.arange(len(x))[:, None] == n, x, x.flip(1) + 0.3)
        again = own_parts(model, others)[n]
        factor = 1.0 if not is_scaled else (again * rows[n]).sum() / rows[n].square().sum().clamp(min=1e-300)
        torch.testing.assert_close(again, factor * rows[n])
    return True


MIX = ["variance", "logsumexp", "largest", "softmax of the first axis", "centre", "add its mean", "multiply by its mean"]
FURTHER = {name for name, step in STEPS.items() if not step(torch.ones(5, 2, 3)).ndim or name[-10:] == "first axis"}
"""Sums over samples: followed, unless something that isn't linear comes next."""


@pytest.mark.parametrize("step", STEPS)
def test_what_is_followed(step: str) -> None:
    x = torch.randn(5, 2).double()
    for steps, refused in (([step], MIX), (["square", step, "mean", "root"], MIX), ([step, "square"], {*MIX, *FURTHER})):
        assert check_rows_or_refused(Composed(2, 3, steps, False), x) is (step not in refused), steps


@pytest.mark.parametrize("features", [3, 5])
def test_features_are_not_taken_for_samples_of_a_loss(features: int) -> None:
    """No layer meets the argument itself, so sizes alone say where the samples are."""
    x = torch.randn(features, 2).double()
    assert check_rows_or_refused(Composed(1, features, ["mean of the first axis"], True), x)
    for sizes in ((1, features), (features, 2)):
        assert not check_rows_or_refused(Composed(*sizes, ["mean of the first axis", "square"], True), x)


def test_outputs_beside_a_loss_show_the_samples() -> None:
    """No parameter meets the argument itself, and einsum puts the samples on another axis, as in XLNet."""
    model = AsLoss(lambda z: torch.einsum("nti,oi->nto", 2 * z, model.last.weight))
    model.forward = lambda x: (model.how(x).square().mean(), model.how(x))
    x = torch.randn(5, 4, 3)
    with autograd_hacks.add_hooks(model):
        model(x)[0].backward()
        autograd_hacks.compute_grad1(model)
        with autograd_hacks.pause_hooks():
            for n in range(5):
                row = torch.autograd.grad(model.how(x[n : n + 1]).square().mean(), model.last.weight)
                torch.testing.assert_close((model.last.weight.grad1[n],), row)


def test_the_message_names_the_node_and_its_line() -> None:
    says = r"VarBackward0 .*test_losses.py.*\(3,\).*backward\(losses\)"
    with torch.autograd.set_detect_anomaly(True):
        check_refused(Composed(1, 3, ["variance"], False), (data(5, 2),), error=SamplesMixed, match=says)


@given(
    st.integers(2, 5),
    st.integers(1, 3),
    st.integers(1, 5),
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    st.booleans(),
)
def test_random_reductions(samples: int, positions: int, features: int, steps: list[str], hides: bool) -> None:
    torch.manual_seed(samples)
    check_rows_or_refused(Composed(positions, features, steps, hides), torch.randn(samples, 2).double())


# Losses made of what a model returns: whether they add up losses of samples


Loss = Callable[[Any, Tensor, Tensor], Tensor]  # a model, N T 3 numbers and N targets -> a number


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def of_each(loss: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """A loss of one vector for each sample."""
    return lambda m, x, y: loss(m(x[:, 0]), y)


def of_tokens(loss: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    return lambda m, x, y: loss(m(x), (y[:, None] + torch.arange(x.shape[1])) % 4)


def normed(z: Tensor) -> Tensor:
    return F.batch_norm(z, None, None, training=True)


OTHER = net()  # another hooked model, which gets other samples, and more of them
OUTSIDE: dict[str, Loss] = {
    "a product of two models": lambda m, x, y: m(x[:, 0]).square().mean() * OTHER(x.flatten(0, 1)).exp().mean(),
    "each with each": lambda m, x, y: F.softplus(m(x[:, 0])[:, :1] - OTHER(x.flatten(0, 1))[:, 0]).mean(),
    **{name: of_each(lambda z, y, loss=loss: loss(z)) for name, loss in LOSSES.items() if name != "one by one"},
    "CLIP": lambda m, x, y: F.cross_entropy(m(x[:, 0]) @ m(x[:, 1]).T, torch.arange(len(x))),
    "a triplet within the batch": of_each(lambda z, y: F.triplet_margin_loss(z, z + 0.1, z.roll(1, 0))),
    "pairs": of_each(lambda z, y: -F.logsigmoid(z[:-1:2] - z[1::2]).mean()),
    "Barlow twins": lambda m, x, y: (normed(m(x[:, 0])).T @ normed(m(x[:, 1])) - torch.eye(4).double()).square().sum(),
    "a little beside": of_each(lambda z, y: F.cross_entropy(z, y) + 1e-4 * z.std(0).sum()),
}


def ctc(z: Tensor, y: Tensor) -> Tensor:
    lengths = torch.full((len(z),), z.shape[1])
    return F.ctc_loss(z.log_softmax(2).transpose(0, 1), y[:, :1] % 3 + 1, lengths, torch.ones_like(lengths))


def slope(m: Any, x: Tensor) -> Tensor:
    return torch.autograd.grad(m(x.requires_grad_()).sum(), x, create_graph=True)[0].norm(dim=1)


def packed(z: Tensor, lengths: Tensor) -> Tensor:
    return pack_padded_sequence(z, lengths, batch_first=True, enforce_sorted=False).data


W, TEACHER = torch.zeros((), dtype=torch.float64, requires_grad=True), net()
OWN: dict[str, Loss] = {
    "weighted": of_each(
        lambda z, y: F.cross_entropy(z, y, torch.arange(1, 5).double(), ignore_index=2, label_smoothing=0.1)
    ),
    "tokens": of_tokens(lambda z, y: F.cross_entropy(z.view(-1, 4), y.view(-1))),
    "the next token": of_tokens(lambda z, y: F.cross_entropy(z[:, :-1].reshape(-1, 4), y[:, 1:].reshape(-1))),
    "time first": of_tokens(lambda z, y: F.cross_entropy(z.transpose(0, 1).reshape(-1, 4), y.T.reshape(-1))),
    "some tokens": of_tokens(lambda z, y: F.cross_entropy(z[y > 1], y[y > 1])),
    "their root": of_each(lambda z, y: F.mse_loss(z[:, 0], y.double()).sqrt() + W.square()),
    "binary": of_each(lambda z, y: F.binary_cross_entropy_with_logits(z, z.detach().sigmoid(), pos_weight=torch.ones(4))),
    "divergence": of_each(lambda z, y: F.kl_div(z.log_softmax(1), z.detach().softmax(1), reduction="batchmean")),
    "ctc": of_tokens(ctc),
    "learned weights": of_each(lambda z, y: W.exp() * F.cross_entropy(z * W.exp(), y) + W),
    "a teacher": lambda m, x, y: F.mse_loss(m(x[:, 0]), TEACHER(x[:, 0])) + TEACHER(x[:, 1]).std(),
    "a head behind": of_each(lambda z, y: F.cross_entropy(TEACHER[2](F.pad(z, (0, 2))), y)),
    "two views": lambda m, x, y: -F.cosine_similarity(m(x[:, 0]), m(x[:, 1])).mean(),
    "three": lambda m, x, y: F.triplet_margin_loss(m(x[:, 0]), m(x[:, 1]), m(x[:, 2])),
    "preferences": lambda m, x, y: -F.logsigmoid(m(x[:, 0])[:, 0] - m(x[:, 1])[:, 0]).mean(),
    "a gradient penalty": lambda m, x, y: (m(x[:, 0]) - m(x[:, 1])).mean() + (slope(m, x[:, 2]) - 1).square().mean(),
    "fused": of_each(lambda z, y: F.linear_cross_entropy(z, TEACHER[0].weight.new_ones(5, 4), y)),
    "one by one": of_each(lambda z, y: torch.stack([F.cross_entropy(*own) for own in zip(z, y)]).mean()),
    "packed": lambda m, x, y: F.cross_entropy(packed(m(x), y + 1), packed((x[..., 0] > 0).long(), y + 1)),
    "in another order": of_each(lambda z, y: F.cross_entropy(z.flip(0)[torch.arange(len(z)).roll(2)], y)),
    "means of the batch": of_each(lambda z, y: (z.mean(0) * torch.arange(4)).sum() + z.cumsum(0).mean()),
    "the worst": of_each(lambda z, y: F.cross_entropy(z, y, reduction="none").sort()[0][-2:].mean() + z.max()),
    "a Function": of_each(lambda z, y: Multiply.apply(z, z).mean()),
    "two models": lambda m, x, y: F.softplus(torch.cat([m(x[:, 0]), OTHER(x.flatten(0, 1))])).mean() + m(x[:, 1]).mean(),
    "two denominators": of_each(lambda z, y: F.cross_entropy(z, y) + F.cross_entropy(z, y, ignore_index=0)),
    "a term that is off": of_each(lambda z, y: 0.0 * z.var(0, correction=0).sum() + F.cross_entropy(z, y)),
    "a dot product": of_each(lambda z, y: z[:, 0] @ z[:, 1].square()),
    "their own targets": of_each(lambda z, y: F.mse_loss(z, z.square()) ** 0.5),
    "a checkpoint": of_each(lambda z, y: checkpoint(F.cross_entropy, z, y, use_reentrant=False)),
}


def check_rows(model: nn.Module, loss: Loss, samples: int) -> None:
    """Row n is the gradient that comes through sample n's entries of the outputs."""
    x, y = torch.randn(samples, 4, 3).double(), torch.arange(samples) * 3 % 4

    def through(n: int, x: Tensor) -> Tensor:
        out = model(x)
        return torch.where((torch.arange(samples) == n).view(-1, *[1] * (out.ndim - 1)), out, out.detach())

    model.zero_grad()
    loss(model, x, y).backward()
    autograd_hacks.compute_grad1(model, loss_type="sum")
    parts = [lambda z, n=n: through(n, z) for n in range(samples)]
    with autograd_hacks.pause_hooks():
        assert_rows(model, one_loss_at_a_time(model, lambda: torch.stack([loss(own, x.detach(), y) for own in parts])))


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("samples", [4, 5])
def test_losses_that_mix_are_refused_from_the_step_on_in_which_they_begin(name: str, samples: int) -> None:
    judging = patch.object(beyond, "judged", wraps=beyond.judged)
    with autograd_hacks.add_hooks(model := net()), autograd_hacks.add_hooks(OTHER), judging as judged:
        for _ in range(2):
            check_rows(model, OWN["weighted"], samples)
        for _ in range(2):
            OUTSIDE[name](model, torch.randn(samples, 4, 3).double(), torch.arange(samples) % 4).backward()
            with pytest.raises(SamplesMixed, match=r"samples mix in the loss.*Samples mix at \w+.*backward\(losses\)"):
                autograd_hacks.compute_grad1(model)
    assert judged.call_count == 2 or name != "pairs"  # a refusal is kept, too


@pytest.mark.parametrize("name", OWN)
def test_losses_of_single_samples_have_rows(name: str) -> None:
    with autograd_hacks.add_hooks(model := net()), autograd_hacks.add_hooks(OTHER):
        for samples in (4, 5, 5, 1):
            check_rows(model, OWN[name], samples)


def test_what_a_number_in_a_loss_turns_on() -> None:
    with autograd_hacks.add_hooks(model := net()):
        losses = [lambda z, t: t * z.std(0).sum(), lambda z, t: (z.square().mean() + 1) ** (0.5 + t)]
        for t, loss in product((0.0, 0.1, 0.0), losses):
            loss(model(torch.randn(5, 3).double()), t).backward()
            with pytest.raises(SamplesMixed) if t else contextlib.nullcontext():
                autograd_hacks.compute_grad1(model)


# Gates that are zero at first


class Gated(Between):
    def __init__(self, how: How, gate: nn.Parameter | nn.Module) -> None:
        super().__init__(how)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        inner = self.how(h)
        return self.last(h + (self.gate(inner) if isinstance(self.gate, nn.Module) else self.gate * inner))


class Modulated(Between):
    """adaLN-zero: gate, scale and shift come from the input, by a layer that is zero."""

    def __init__(self, how: How) -> None:
        super().__init__(how)
        self.ada = zeroed(nn.Linear(3, 9))

    def forward(self, x: Tensor) -> Tensor:
        h, (shift, slope, gate) = self.first(x).tanh(), self.ada(x).chunk(3, 1)
        return self.last(h + gate * (self.how(h) * (1 + slope) + shift))


GATES: dict[str, Callable[[How], nn.Module]] = {
    "one number": lambda how: Gated(how, nn.Parameter(torch.zeros(()))),
    "a layer": lambda how: Gated(how, zeroed(nn.Linear(3, 3))),
    "a norm": lambda how: Gated(how, zeroed(nn.LayerNorm(3))),
    "adaLN": Modulated,
}


@pytest.mark.parametrize("gate", GATES)
def test_gates_of_zero_hide_no_mixing(gate: str) -> None:
    """Behind a gate of zero rows are derivatives, or refused already; as it opens, what mixes is refused."""
    for samples in SIZES:
        for what in ("swapped halves", "attention"):
            model = GATES[gate](MIXING[what]).double()
            with contextlib.suppress(SamplesMixed):
                check_right(model, (data(samples),))
            for n, _ in enumerate(steps_of(model, [(data(samples),)] * 4)):
                if n:
                    with pytest.raises(SamplesMixed):
                        autograd_hacks.compute_grad1(model)
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
        check_right(GATES[gate](torch.sin).double(), *[(data(samples),)] * 2)


class Balanced(torch.autograd.Function):
    """Hands its input on, and has a loss's gradient come along, as mixtures of experts do it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return g, torch.ones((), dtype=g.dtype)


@pytest.mark.parametrize("samples", [3, 8, 32])
def test_a_loss_that_comes_along_in_the_backward_pass(samples: int) -> None:
    def experts(m: nn.Module, x: Tensor) -> Tensor:
        p = m.gate(x).softmax(1)
        return m.out(Balanced.apply(p, ((p.mean(0) if m.mixes else p) ** 2).sum()))

    for mixes in (True, False):  # it comes once a pass, whatever the losses are: it belongs to no sample's
        model = Bare(experts, gate=nn.Linear(3, 4), out=nn.Linear(4, 2), mixes=mixes).double()
        x = torch.randn(samples, 3).double()
        with autograd_hacks.add_hooks(model):
            for _ in range(3):
                model.zero_grad()
                autograd_hacks.backward(model(x).square().sum(1), "sum")
                with pytest.raises(SamplesMixed):
                    autograd_hacks.compute_grad1(model)
