"""Rows of outputs, against one plain backward pass from each entry of each sample's output."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn as nn
from nets import MODELS, LossesInside, Patched, SequenceFirst, language, perceptron
from oracle import Rows, assert_rows, one_backward_per_sample, vector
from rarely import crossed
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks import per_sample_jacobian
from autograd_hacks.curvature import matvec, natural_gradient
from autograd_hacks.errors import BatchSizeError, NothingRecorded, SamplesMixed

pytestmark = pytest.mark.usefixtures("double")

SMALL = MODELS | {
    "reads": (Patched, lambda: torch.randint(7, (3, 2))),
    "folded": (SequenceFirst, lambda: torch.randint(9, (3, 4))),
    "language": (lambda: language(5, 3), lambda: torch.randint(5, (3, 2))),
    "lstm": (MODELS["lstm"][0], lambda: torch.randn(3, 2, 4)),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    """The same numbers each time."""
    torch.manual_seed(0)
    build, data = SMALL[name]
    return build().double(), data()


@cache
def expected_of(name: str) -> Rows:
    return jacobian_of(*made(name), lambda out: out)


def jacobian_of(
    model: nn.Module, x: Tensor, entries: Callable[..., Tensor], run: Callable[[Tensor], Tensor] | None = None
) -> Rows:
    """{name: (N, *entries, *shape)}: a backward pass for each entry of each sample alone.

    entries: of what the model returns for a batch of one, the samples first
    """
    with autograd_hacks.pause_hooks():
        shape = entries((run or model)(x[:1])).shape[1:]
        rows = [
            one_backward_per_sample(model, lambda out, e=e: entries(out).reshape(1, -1)[:, e], x, run=run)
            for e in range(shape.numel())
        ]
    parameters = dict(model.named_parameters())
    return {
        name: torch.stack([row[name] if row[name] is not None else p.new_zeros(len(x), *p.shape) for row in rows], 1).view(
            len(x), *shape, *p.shape
        )
        for name, p in parameters.items()
    }


def check(rows: autograd_hacks.PerSampleGrads, expected: Rows) -> None:
    """Every verb against algebra on the oracle's rows."""
    assert_close(rows.dense(), expected)
    axes = rows.norms().shape
    assert axes == (rows.samples, *rows.entries)
    flat = torch.cat([own.reshape(axes.numel(), -1) for own in expected.values()], 1)
    assert_close(rows.norms(), flat.norm(dim=1).view(axes))
    for name, own in rows.norms(per_parameter=True).items():
        assert_close(own, expected[name].reshape(*axes, -1).norm(dim=-1))
    assert_close(rows.gram(), (flat @ flat.T).view(*axes, *axes))
    w = torch.randn(2, *axes)
    for weights, sums in ((w[0], rows.weighted_sum(w[0])), (w[1], {n: s[1] for n, s in rows.weighted_sum(w).items()})):
        assert_close(vector(sums), weights.flatten() @ flat)
    assert_close(vector(rows.second_moment(w[0].abs())), w[0].abs().flatten() @ flat**2)
    v = {name: torch.randn(form.shape) for name, form in rows.items()}
    assert_close(rows.dot(v), (flat @ vector(v)).view(axes))
    assert_close(vector(matvec(rows, v)), flat.T @ (flat @ vector(v)) / rows.batch)
    natural = torch.linalg.solve(flat.T @ flat / rows.batch + 0.1 * torch.eye(flat.shape[1]), vector(v))
    assert_close(vector(natural_gradient(rows, v, damping=0.1)), natural)
    assert rows.project(7).shape == (*axes, 7)
    some = torch.tensor([2, 0])
    assert_close(rows.select(some).dense(), {name: own[some] for name, own in expected.items()})
    users = rows.group(torch.tensor([5, 7, 5])).dense()
    assert_close(users, {name: torch.stack([own[0] + own[2], own[1]]) for name, own in expected.items()})


@crossed(name=SMALL, param_grad=[True, False])
def test_every_verb_for_every_entry(name: str, param_grad: bool) -> None:
    model, x = made(name)
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(2):  # the second step's parameters are switched off
            rows = per_sample_jacobian(model, model(x))
            assert all(p.grad is None for p in model.parameters())
        check(rows, expected_of(name))


@pytest.mark.parametrize("positions", [2, 3])  # as many as samples
def test_samples_on_another_axis(positions: int) -> None:
    model = Bare(lambda m, x: m.out(m.rnn(x)[0]), rnn=nn.LSTM(4, 3), out=nn.Linear(3, 2))
    x = torch.randn(3, positions, 4)

    def run(batch_first: Tensor) -> Tensor:
        return model(batch_first.transpose(0, 1)).transpose(0, 1)

    expected = jacobian_of(model, x, lambda out: out, run)
    with autograd_hacks.add_hooks(model, batch_dim=1):
        check(per_sample_jacobian(model, model(x.transpose(0, 1))), expected)
        check(per_sample_jacobian(model, run(x)), expected)  # what follows from it has samples first
        out = model(x.transpose(0, 1))
        with pytest.raises((BatchSizeError, SamplesMixed), match="axis"):
            per_sample_jacobian(model, 2 * out)


@pytest.mark.parametrize("kind", ["flat", "tokens", "samples"])
def test_losses_made_inside_the_model(kind: str) -> None:
    model, tokens, targets = LossesInside(kind), torch.randint(7, (3, 4)), torch.randint(7, (3, 4))
    both = torch.stack([tokens, targets], 1)

    def entries(out: dict[str, Tensor]) -> Tensor:
        return out["losses"] if kind == "samples" else out["losses"].view(1, -1)

    with autograd_hacks.add_hooks(model):
        rows = per_sample_jacobian(model, model(tokens, targets)["losses"])
        check(rows, jacobian_of(model, both, entries, lambda b: model(b[:, 0], b[:, 1])))


def test_the_tangent_kernel_of_two_batches() -> None:
    model, x, y = perceptron(), torch.randn(4, 4), torch.randn(2, 4)
    dense = [jacobian_of(model, batch, lambda out: out) for batch in (x, y)]
    j, k = (torch.cat([own.flatten(2) for own in each.values()], 2) for each in dense)
    with autograd_hacks.add_hooks(model):
        first, second = (per_sample_jacobian(model, model(batch)) for batch in (x, y))
        assert_close(first.gram(second), torch.einsum("ncp,mdp->ncmd", j, k))
        model(x).square().sum().backward()
        ordinary = autograd_hacks.per_sample_grads(model, "sum")
        assert_close(first.gram(ordinary), torch.einsum("ncp,mdp,md->ncm", j, j, 2 * model(x).detach()))
        assert_close(ordinary.gram(first), first.gram(ordinary).movedim(2, 0))
    assert "4 samples, 3 entries" in repr(first)


def test_whichever_gradient_mode_and_an_output_that_was_overwritten() -> None:
    model, x = perceptron(), torch.randn(3, 4)
    with autograd_hacks.add_hooks(model):
        expected = jacobian_of(model, x, lambda out: out)
        for mode in (torch.no_grad, torch.inference_mode):
            out = model(x)
            with mode():
                rows = per_sample_jacobian(model, out)
            check(rows, expected)
        check(per_sample_jacobian(model, model(x).add_(1)), expected)
        for change in (lambda out: out.t_(), lambda out: out.copy_(out.flip(0))):
            with pytest.raises(SamplesMixed, match="axis 0"):
                per_sample_jacobian(model, change(model(x)))


@pytest.mark.parametrize("samples", [0, 1])
def test_few_samples(samples: int) -> None:
    model = perceptron()
    with autograd_hacks.add_hooks(model):
        model(torch.randn(3, 4))
        for change in (lambda out: out, torch.tanh):
            rows = per_sample_jacobian(model, change(model(torch.randn(samples, 4))))
            assert rows.norms().shape == (samples, 3)
            assert rows.gram().shape == (samples, 3, samples, 3)
            assert rows.dense()["0.weight"].shape == (samples, 3, 5, 4)
            assert rows.weighted_sum(torch.ones(samples, 3))["0.weight"].shape == (5, 4)


# What it leaves alone.


@pytest.mark.parametrize("param_grad", [True, False])
def test_gradients_and_the_record_stay_as_they_are(param_grad: bool) -> None:
    model, x = perceptron(), torch.randn(3, 4)
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        out = model(x)
        out.square().sum().backward(retain_graph=True)
        before = {name: p.grad for name, p in model.named_parameters()}
        rows = per_sample_jacobian(model, out, retain_graph=True)
        assert all(p.grad is before[name] for name, p in model.named_parameters())
        autograd_hacks.compute_grad1(model, "sum")  # of the pass before
        own = rows.dense()
        assert_rows(model, {name: torch.einsum("nc,nc...->n...", 2 * out.detach(), x) for name, x in own.items()})
        autograd_hacks.clear_backprops(model)
        out.sum().backward()  # and of one after
        autograd_hacks.compute_grad1(model, "sum")
        assert_rows(model, {name: x.sum(1) for name, x in own.items()})
        with pytest.raises(NothingRecorded, match="freed"):
            per_sample_jacobian(model, out)


def test_within_accumulate_and_streaming() -> None:
    model, x = perceptron(), torch.randn(3, 4)
    expected = jacobian_of(model, x, lambda out: out)
    with autograd_hacks.add_hooks(model):
        with autograd_hacks.accumulate(model):
            model(x).sum().backward()
            check(per_sample_jacobian(model, model(x)), expected)
            model(x).sum().backward()
        autograd_hacks.compute_grad1(model, "sum")
        assert_close(model[0].weight.grad1, expected["0.weight"].sum(1).repeat(2, 1, 1))
        with autograd_hacks.during_backward(model, "norms", loss_type="sum") as streamed:
            check(per_sample_jacobian(model, model(x)), expected)
            model(x).sum().backward()
        assert_close(streamed.norms, torch.cat([own.sum(1).flatten(1) for own in expected.values()], 1).norm(dim=1))


def test_a_hooked_model_behind_another_and_one_inside() -> None:
    first, second, x = perceptron(), nn.Linear(3, 2), torch.randn(3, 4)
    whole = nn.Sequential(first, second)
    with autograd_hacks.add_hooks(first), autograd_hacks.add_hooks(second):
        out = second(first(x))
        rows = [per_sample_jacobian(model, out, retain_graph=True).dense() for model in (second, first)]
    expected = jacobian_of(whole, x, lambda out: out)
    assert_close(rows[0]["weight"], expected["1.weight"])
    assert_close(rows[1]["0.weight"], expected["0.0.weight"])


def test_a_parameter_that_no_entry_reaches_or_that_is_frozen() -> None:
    model, x = perceptron(), torch.randn(3, 4)
    model.spare, model[2].bias.requires_grad = nn.Linear(2, 2), False
    model.forward = lambda x: nn.Sequential.forward(model[:3], x)  # type: ignore[method-assign]  # past the spare one
    with autograd_hacks.add_hooks(model):
        rows = per_sample_jacobian(model, model(x))
    assert not rows.norms(per_parameter=True)["spare.weight"].any()
    assert rows.reached == {"0.weight", "0.bias", "2.weight"}
    assert "2.bias" not in rows


def test_complex_outputs_as_real_numbers() -> None:
    model, x = Bare(lambda m, x: torch.fft.fft(m.inner(x).tanh()), inner=nn.Linear(4, 4)), torch.randn(3, 4)
    with autograd_hacks.add_hooks(model):
        rows = per_sample_jacobian(model, torch.view_as_real(model(x)))
        check(rows, jacobian_of(model, x, torch.view_as_real))
