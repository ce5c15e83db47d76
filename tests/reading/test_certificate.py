"""In every step that is read, rows add up to the gradient that arrived, or the reading of that step says that they don't."""

import dataclasses
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mixing import check_refused
from nets import Multiply, Product
from oracle import assert_rows, one_backward_per_sample, squares
from steps import at_most, batch, check, check_batches, mlp
from strategies import pull_along
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.errors import PerSampleGradientError, SamplesMixed, UnseenGradient
from autograd_hacks.forms import Chained, Dense, Form, Outer, Scaled
from autograd_hacks.formulas import RULES, Call
from autograd_hacks.reading.certificate import agree

MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "checkpoint": lambda: Bare(
        lambda m, x: m.last(checkpoint(m.inside, x, use_reentrant=False)),
        inside=nn.Sequential(nn.Linear(3, 4), nn.Tanh()),
        last=nn.Linear(4, 2),
    ),
    "words": lambda: nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(12, 2)),
    "pictures": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(8, 2)
    ),
    "recurrent": lambda: Bare(lambda m, x: m.inside(x[:, :, None])[0][:, -1], inside=nn.LSTM(1, 4, batch_first=True)),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)),
}


def data(model: nn.Module, samples: int = 5) -> Tensor:
    is_words = any(isinstance(layer, nn.Embedding) for layer in model.modules())
    return torch.randint(7, (samples, 3)) if is_words else torch.randn(samples, 3).double()


READ: dict[str, Callable[[nn.Module], Any]] = {
    "compute_grad1": autograd_hacks.compute_grad1,
    "per_sample_grads": autograd_hacks.per_sample_grads,
    "clip": lambda model: autograd_hacks.clip_grad1_norm_(model, 1.0),
}


def refused(wrong: Any, match: str, error: type[Exception] = UnseenGradient) -> Any:
    """The error, if something is wrong."""
    return pytest.raises(error, match=match) if wrong else nullcontext()


def step(model: nn.Module, x: Tensor, penalty: Tensor | float, verb: str) -> None:
    model.zero_grad()
    loss = squares(model(x)).mean() + penalty
    if verb == "during_backward":
        with autograd_hacks.during_backward(model, "norms"):
            loss.backward()
        return
    loss.backward()
    READ[verb](model)


@pytest.mark.parametrize("verb", [*READ, "during_backward"])
@pytest.mark.parametrize("param_grad", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_a_penalty_is_told_in_the_step_in_which_it_begins(kind: str, param_grad: bool, verb: str) -> None:
    model = MODELS[kind]().double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for at in [None, None, None, *range(len(list(model.parameters()))), None]:
            x = data(model)
            name, parameter = list(model.named_parameters())[at or 0]
            penalty = 0.0 if at is None else 0.01 * (parameter - 0.5).square().sum()
            with refused(at is not None, re.escape(name)):
                step(model, x, penalty, verb)


@pytest.mark.parametrize("place", [0, 1])
def test_a_penalty_on_what_a_weight_was_made_of(place: int) -> None:
    def kept(m: nn.Module, x: Tensor) -> Tensor:
        """Its weight is made of a parameter."""
        half = F.softplus(m.raw)
        weight = half.exp()
        m.extra = [lambda: (half, weight)]  # where nothing looks for tensors
        return m.last(torch.tanh(x @ weight.t()))

    model = Bare(kept, raw=torch.randn(4, 3), last=nn.Linear(4, 2)).double()
    with autograd_hacks.add_hooks(model):
        for n in range(6):
            model.zero_grad()
            loss = squares(model(data(model))).mean()
            (loss + 0.1 * model.extra[0]()[place].square().sum() if n in (0, 4) else loss).backward()
            with refused(n in (0, 4), "raw: the rows don't add up"):
                autograd_hacks.compute_grad1(model)


def test_a_penalty_on_a_cast_that_autocast_keeps() -> None:
    model, eye = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.eye(3)
    with autograd_hacks.add_hooks(model):
        for n in range(6):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = squares(model(torch.randn(5, 3)).float()).mean()
                if n == 4:
                    loss = loss + F.linear(eye, model[0].weight).float().square().sum()
            loss.backward()
            with refused(n == 4, r"0\.weight"):
                autograd_hacks.compute_grad1(model)
                arrived = [own.along for own in recorder_of(model).record.passes]
                assert n < 2 or not any(arrived), "what one use brings is compared again"


class Normed(Product):
    """x wᵀ, whose backward divides large gradients by their norm over the batch."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return Product.backward(ctx, g / g.norm().clamp(min=1))


@pytest.mark.parametrize("param_grad", [True, False])
def test_a_function_that_begins_to_normalise_gradient(param_grad: bool) -> None:
    model = Bare(lambda m, x: Normed.apply(x, m.w), w=torch.randn(4, 3)).double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for n in range(6):
            (squares(model(data(model))).sum() * (1e-6 if n < 3 else 10)).backward()
            with refused(n >= 3, "not linear in the gradient", SamplesMixed):
                autograd_hacks.compute_grad1(model, "sum")


def test_a_function_in_whose_gradient_terms_cancel() -> None:
    """What a norm layer is given may be scaled by any number: that number's gradient is rounding."""
    model = Bare(lambda m, x: m.norm(Multiply.apply(x, m.s)), s=torch.tensor(0.3), norm=nn.LayerNorm(3, eps=1e-12)).double()
    check_batches(model, torch.randn(8, 3).double())


def _double(p: Tensor) -> None:
    p.grad.mul_(2)


def test_what_is_in_grad_already_and_what_others_do_to_it_is_no_difference() -> None:
    model = mlp()
    with autograd_hacks.add_hooks(model):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(_double)
        for _ in range(4):
            squares(model(data(model))).mean().backward()  # .grad grows
            autograd_hacks.compute_grad1(model)


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16, torch.half])
def test_gradient_that_cancels_is_no_difference(dtype: torch.dtype) -> None:
    """A bias before a norm has none but rounding; and half of the samples undo the other half."""
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    x = torch.randn(32, 3, dtype=dtype)
    with autograd_hacks.add_hooks(model):
        for _ in range(4):
            out = model(torch.cat([x, x]))
            signs = torch.cat([torch.ones(32), -torch.ones(32)]).to(dtype)
            (out.square().sum(1) * signs).sum().backward()
            autograd_hacks.compute_grad1(model, "sum")


@pytest.mark.parametrize("param_grad", [True, False])
@pytest.mark.parametrize("first", ["during_backward", "zeros"])
def test_rows_that_are_wrong_stay_refused_after_a_refusal_and_after_zeros(first: str, param_grad: bool) -> None:
    """A parameter counts as compared only once its own rows agreed with gradient that was there."""
    model, x = mlp(), data(mlp())

    def run(penalty: float) -> None:
        (squares(model(x)).mean() * (penalty != 0) + penalty * (model[0].weight - 0.5).square().sum()).backward()

    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        if first == "zeros":
            run(0)
            autograd_hacks.compute_grad1(model)
        else:
            with pytest.raises(UnseenGradient), autograd_hacks.during_backward(model, "norms"):
                run(0.1)
        for _ in range(3):
            run(0.1)
            with pytest.raises(UnseenGradient):
                autograd_hacks.compute_grad1(model)


def test_sums_of_many_terms_are_read() -> None:
    """torch adds up 80,000 gradients of a filter in float32, and loses more digits than of a few."""
    for seed in (5, 23, 43, 46):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.Tanh(), nn.Conv2d(32, 16, 3))
        x = torch.randn(800, 8, 12, 12)
        with autograd_hacks.add_hooks(model):
            for _ in range(4):  # each pass is compared along other directions
                model(x).square().sum((1, 2, 3)).mean().backward()
                autograd_hacks.per_sample_grads(model)


@pytest.mark.parametrize("samples", [2000, 20001])
def test_sums_of_equal_terms_are_read(samples: int) -> None:
    """Products of thin matrices add them up one by one, and round each to the same side."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    with autograd_hacks.add_hooks(model):
        autograd_hacks.backward(model(torch.full((samples, 4), 0.3)).square().sum(1), "sum")
        autograd_hacks.compute_grad1(model)


def test_a_small_part_more_is_noticed_in_sums_of_many_terms() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4096, 8)
    grad = torch.autograd.grad(model(x).square().sum(), model.weight)[0]
    with autograd_hacks.add_hooks(model):
        (model(x).square().sum() + 2e-4 * (model.weight * grad).sum()).backward()
        with pytest.raises(UnseenGradient):
            autograd_hacks.compute_grad1(model, "sum")


@pytest.mark.parametrize("width", [4, 160])
def test_the_parameter_that_gets_a_penalty_is_named_among_many_like_it_whenever_it_is_asked(width: int) -> None:
    layers = [nn.Linear(width, width, dtype=torch.float64) for _ in range(6)]
    model = nn.Sequential(*layers)
    autograd_hacks.add_hooks(model)
    check(model, torch.randn(3, width).double())
    (squares(model(torch.randn(3, width).double()), torch.zeros(3, width)).mean() + layers[3].weight[1, 2] ** 2).backward()
    for _ in range(2):
        with pytest.raises(UnseenGradient, match=r"^3\.weight: the rows don't add up"):
            autograd_hacks.compute_grad1(model)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_gradients_without_numbers_are_no_difference_and_hide_none(bad: float) -> None:
    model = mlp()
    autograd_hacks.add_hooks(model)
    (squares(model(torch.randn(3, 3).double()), torch.zeros(3, 2)).mean() * bad).backward()
    autograd_hacks.compute_grad1(model)  # what isn't finite is the loss's own

    first, last = nn.Linear(3, 2, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.float64)
    both = Bare(lambda m, x: m.first(x) + m.last(x), first=first, last=last)
    autograd_hacks.add_hooks(both)
    loss = squares(both(torch.randn(3, 3).double()), torch.zeros(3, 2)).mean()
    first.weight.register_hook(lambda grad: grad * bad)
    (loss + last.weight[0, 0] * 3).backward()
    with pytest.raises(UnseenGradient, match=r"last\.weight"):
        autograd_hacks.compute_grad1(both)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half, torch.float])
@pytest.mark.parametrize("sizes", [(8, 150), (4, 5, 150)])
def test_large_parameters_of_any_precision(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(150, 150), nn.LayerNorm(150), nn.Linear(150, 150)).to(dtype)
    autograd_hacks.add_hooks(model)
    x = torch.randn(sizes).to(dtype)
    model(x).float().square().sum().backward()
    autograd_hacks.compute_grad1(model, "sum")
    (model(x).float().square().sum() + 100 * model[2].weight.float().sum()).backward()
    with pytest.raises(UnseenGradient, match=r"^2\.weight"):
        autograd_hacks.compute_grad1(model, "sum")


# Rows add up to the gradients that arrive, relative to their terms: at first, again later, and streamed


@pytest.mark.parametrize("kind", [nn.Linear, nn.LayerNorm, nn.Embedding, nn.Conv1d, nn.GroupNorm])
@pytest.mark.parametrize(("dtype", "factor"), [(torch.double, 1.0009), (torch.double, 1 + 1e-9), (torch.float, 1.0009)])
def test_a_rule_that_is_off_by_little_is_refused(
    kind: type[nn.Module], dtype: torch.dtype, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = RULES[kind]

    def wrong(layer: nn.Module, call: Call) -> dict[str, Form]:
        return {name: Scaled(form, factor) for name, form in rule.formula(layer, call).items()}

    monkeypatch.setitem(RULES, kind, dataclasses.replace(rule, formula=wrong))
    across = nn.Sequential(nn.Conv1d(4, 4, 1), nn.GroupNorm(2, 4))
    turned = Bare(lambda m, x: m.across(x.mT).mT, across=across)
    model = nn.Sequential(nn.Embedding(7, 4), turned, nn.LayerNorm(4), nn.Linear(4, 2)).to(dtype)
    x = torch.randint(7, (8, 5))
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            model.zero_grad()
            squares(model(x)).mean().backward()
            with pytest.raises(PerSampleGradientError, match="rule is wrong"):
                autograd_hacks.compute_grad1(model)
        with pytest.raises(PerSampleGradientError):
            autograd_hacks.verify(model)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
def test_a_converged_model_on_raw_features_is_read(size: float, bias: bool) -> None:
    """Its gradients all but cancel over the batch, and their terms are as large as the features."""
    x = size * (1 + torch.rand(64, 3, dtype=torch.double))
    design = torch.cat([x, torch.ones(64, 1, dtype=torch.double)], 1) if bias else x
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.double) / size + 0.1 * torch.randn(64, dtype=torch.double)
    best = torch.linalg.lstsq(design, y[:, None]).solution[:, 0]
    model = nn.Sequential(nn.Linear(3, 1, bias=bias))
    with torch.no_grad():
        model[0].weight.copy_(best[None, :3])
        if bias:
            model[0].bias.copy_(best[3:])
    x, y = x.float(), y.float()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            model.zero_grad()
            (model(x)[:, 0] - y).square().mean().backward()
            autograd_hacks.compute_grad1(model)
        with autograd_hacks.pause_hooks():
            alone = one_backward_per_sample(model, lambda out, y: (out[:, 0] - y).square(), x, y)
        assert_rows(model, alone)
        autograd_hacks.verify(model)


# Streamed


def test_streaming_of_a_layer_that_checkpoints_share() -> None:
    """Its rows are complete when the second checkpoint has been run again: cross terms are not lost."""

    def twice(m: nn.Module, x: Tensor) -> Tensor:
        h = m.first(x)
        for _ in range(2):
            h = checkpoint(lambda z: m.shared(z).tanh(), h, use_reentrant=False)
        return m.last(h)

    x, layers = torch.randn(5, 3).double(), {"first": (3, 4), "shared": (4, 4), "last": (4, 2)}
    model = Bare(twice, **{name: nn.Linear(*sizes) for name, sizes in layers.items()}).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            model.zero_grad()
            squares(model(x)).mean().backward()
            expected = autograd_hacks.per_sample_grads(model).norms()
            model.zero_grad()
            with autograd_hacks.during_backward(model, "norms") as streamed:
                autograd_hacks.backward(squares(model(x)))
            torch.testing.assert_close(streamed.norms, expected)


def test_a_number_that_is_none_hides_no_wrong_one() -> None:
    """Entries that overflow can't be compared; the others are."""
    rows = torch.tensor([[1.0, float("inf")], [2.0, 1.0]])
    assert agree(Dense(rows), torch.ones(2), torch.tensor([3.0, float("inf")]), (), lambda: 0.0)
    assert not agree(Dense(rows), torch.ones(2), torch.tensor([3.1, float("inf")]), (), lambda: 0.0)


def test_the_way_back_from_a_value_is_a_sum_that_may_cancel() -> None:
    theta = torch.randn(2, 1, requires_grad=True)
    inner = Outer(torch.ones(3, 1, 2), torch.ones(3, 1, 2))
    form = Chained(inner, pull_along(theta @ torch.tensor([[1e4, -1e4]]), theta), theta.shape, theta)
    expected = torch.full((2, 1), 1e-3)  # of terms of 1e4
    assert agree(form, torch.ones(3), expected, (), lambda: 1e4)
    assert not agree(form, torch.ones(3), expected, (), lambda: 1.0)


# They are compared as gradients arrive, and none is kept for that; what is wrong is told when rows are read


@pytest.mark.parametrize("param_grad", [True, False])
def test_first_steps_hold_no_second_set_of_gradients(param_grad: bool) -> None:
    """Gradients that arrived are compared one parameter at a time, and later ones are what ``.grad`` gets, not copies."""
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())))
    x, size = torch.randn(4, 256), sum(4 * p.numel() for p in model.parameters())
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for n in range(4):
            with at_most(int(1.5 * size), f"step {n + 1}"):
                squares(model(x)).mean().backward()
                autograd_hacks.per_sample_grads(model).norms()
                model.zero_grad()


@pytest.mark.parametrize("penalised", [0, 1, 2])
@pytest.mark.parametrize("accumulated", [True, False])
def test_a_penalty_in_one_of_several_passes_is_told_at_reading(penalised: int, accumulated: bool) -> None:
    model, (x, _) = mlp(), batch()
    with autograd_hacks.add_hooks(model):
        with autograd_hacks.accumulate(model):
            losses = squares(model(x))
            for n in range(3):
                losses = squares(model(x)) if accumulated else losses
                penalty = model[2].weight.square().sum() if n == penalised else 0.0
                (losses.mean() + penalty).backward(retain_graph=True)
        with pytest.raises(UnseenGradient, match=r"2\.weight: the rows don't add up"):
            autograd_hacks.compute_grad1(model)
        check(model, x)


@pytest.mark.parametrize("param_grad", [True, False])
def test_what_a_rule_raises_is_raised_at_reading(param_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(layer: nn.Module, call: Call) -> dict[str, Form]:
        raise ZeroDivisionError("no such form")

    monkeypatch.setitem(RULES, nn.Linear, dataclasses.replace(RULES[nn.Linear], formula=fails))
    model, (x, _) = mlp(), batch()
    check_refused(model, (x,), error=ZeroDivisionError, match="no such form", param_grad=param_grad)
