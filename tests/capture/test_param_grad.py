"""`add_hooks(param_grad=False)`: autograd computes no ordinary gradients of parameters."""

import gc
from functools import partial

import pytest
import torch
import torch.nn as nn
from nets import MODELS
from oracle import assert_rows, joined, one_backward_per_sample, squares
from rarely import crossed
from steps import assert_means, assert_right, check, check_losses
from torch import Tensor
from torch.func import functional_call
from torch.optim import optimizer
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import ParamGradSkipped, UnseenGradient


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))


def with_zeros() -> nn.Sequential:
    """As classifiers begin: the first layer's gradient is zero."""
    model = two_layers()
    nn.init.zeros_(model[1].weight)
    return model


@pytest.mark.filterwarnings("ignore:None of the inputs")
@crossed(name=MODELS, training=[True, False])
def test_rows_and_no_gradients(name: str, training: bool) -> None:
    build, batch = MODELS[name]
    model = build().double().train(training)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for step in range(3):
            x = batch()
            squares(model(x)).mean().backward()
            assert all(p.grad is None and p.requires_grad for p in model.parameters())
            autograd_hacks.compute_grad1(model, set_grad=step == 2)
            grads = autograd_hacks.per_sample_grads(model)
            with autograd_hacks.pause_hooks():
                rows = one_backward_per_sample(model, squares, x)
            assert_rows(model, rows)
            assert_close(grads.norms(), joined(rows).norm(dim=1))
        assert_means(model)
        assert autograd_hacks.clip_grad1_norm_(model, 1e9).shape == (3,)
        assert_means(model)
        autograd_hacks.verify(model)
    model.zero_grad()
    squares(model(x)).mean().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize(
    "model",
    [
        two_layers(),
        with_zeros(),
        # A layer that meets no batch: rows come from where the product of its output does.
        Bare(
            lambda m, x: m.out(x + m.inside(m.table) @ torch.ones(5, 4)),
            table=torch.ones(1, 4),
            inside=nn.Linear(4, 5),
            out=nn.Linear(4, 2),
        ),
    ],
)
def test_autograd_computes_none(model: nn.Module) -> None:
    """The weight's gradient is a product that doesn't run, and the input is not kept for it by the graph.

    So it is also in a step of other sizes, as by Poisson sampling."""
    counts = []
    for param_grad in (True, False):
        with autograd_hacks.add_hooks(model, param_grad=param_grad):
            for samples in (3, 5):
                loss = squares(model(torch.randn(samples, 4))).mean()
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                    loss.backward()
                autograd_hacks.compute_grad1(model)  # from now on rows are known to agree with gradients
            counts.append(sum(event.count for event in profile.key_averages() if event.key == "aten::mm"))
    assert counts[1] == 1  # the gradient at the second layer's input
    assert counts[0] >= 3


def test_a_gradient_that_was_there_stays() -> None:
    model, x = two_layers(), torch.randn(3, 4)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(3):
            squares(model(x)).mean().backward()
            assert all((p.grad == 1).all() for p in model.parameters())


def test_attention_keeps_to_the_way_with_gradients() -> None:
    layer, x = nn.MultiheadAttention(4, 2, batch_first=True).eval(), torch.randn(3, 5, 4)
    with autograd_hacks.add_hooks(layer, param_grad=False):
        for _ in range(3):
            assert layer(x, x, x)[0].grad_fn is not None
            assert torch.backends.mha.get_fastpath_enabled()


def test_a_context_gives_the_contract_back() -> None:
    model, x = two_layers(), torch.randn(3, 4)
    hooks = autograd_hacks.add_hooks(model)
    with autograd_hacks.add_hooks(model, param_grad=False, batch_dim=(0,)):
        for _ in range(2):
            squares(model(x)).mean().backward()
    assert "batch_dim=0, param_grad=True" in repr(hooks)
    assert model[0].weight.grad is None
    squares(model(x)).mean().backward()
    assert model[0].weight.grad is not None


# Steps without a gradient


def small(**options: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = two_layers()
    autograd_hacks.add_hooks(model, **options)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def test_a_step_that_moves_nothing() -> None:
    model, optimizer = small(param_grad=False)
    optimizer.step()  # before any pass, as warm-ups do
    for read in (lambda: None, lambda: autograd_hacks.per_sample_grads(model).norms()):
        for _ in range(2):
            squares(model(torch.randn(3, 4))).mean().backward()
            read()
            with pytest.raises(ParamGradSkipped, match=r"Adam\.step\(\) moved nothing.*0\.weight.*clip_grad1_norm_"):
                optimizer.step()
    for put in (
        lambda: autograd_hacks.clip_grad1_norm_(model, 1.0),
        lambda: autograd_hacks.compute_grad1(model, set_grad=True),
        lambda: setattr(model[1].bias, "grad", torch.ones(2)),
    ):
        optimizer.zero_grad()
        autograd_hacks.clear_backprops(model)
        before = model[1].bias.detach().clone()
        squares(model(torch.randn(3, 4))).mean().backward()
        put()
        optimizer.step()
        assert bool((model[1].bias != before).any())


class FromRows(torch.optim.Optimizer):
    """Takes no .grad at all."""

    def step(self, closure: object = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data -= p.grad1.mean(0)


def test_steps_that_are_no_mistake() -> None:
    model, _ = small(param_grad=False)
    other = nn.Linear(2, 4)
    theirs, own = torch.optim.SGD(other.parameters(), lr=0.1), FromRows(model.parameters(), {})
    squares(model(other(torch.randn(3, 2)))).mean().backward()
    theirs.step()  # of a model in front
    autograd_hacks.compute_grad1(model)
    own.step()
    plain, optimizer = small()
    squares(plain(torch.randn(3, 4))).mean().backward()
    optimizer.zero_grad()
    optimizer.step()  # as torch has it
    squares(model(torch.randn(3, 4))).mean().backward()
    autograd_hacks.remove_hooks(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_model_may_be_collected_while_an_optimizer_steps() -> None:
    """torch goes through its hooks just then."""
    gone, stepping = small(param_grad=False)
    held = [gone]
    held.append(held)  # type: ignore[arg-type]  # no list of models: a circle, that only a collection ends
    handle = optimizer.register_optimizer_step_post_hook(lambda *_: gc.collect() and None)
    _, other = small(param_grad=False)
    del gone, held, stepping
    other.step()
    handle.remove()


# Who gets ordinary gradients all the same, and which ways to them are refused


def test_gradients_of_parameters_by_autograd_grad_are_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(3, 4, requires_grad=True)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(3):
            with pytest.raises(ParamGradSkipped, match=r"weighted_sum"):
                torch.autograd.grad(squares(model(x)).mean(), list(model.parameters()))
            (by_input,) = torch.autograd.grad(model(x).square().sum(), x)
            assert_close(by_input, 2 * model(x) @ model[1].weight @ model[0].weight)
            squares(model(x)).mean().backward()
            assert_right(model, x.detach())


@pytest.mark.parametrize("param_grad", [True, False])
def test_functional_call_with_other_tensors(param_grad: bool) -> None:
    model, x = two_layers(), torch.randn(3, 4)
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(3):
            others = {name: p * 2 for name, p in model.named_parameters()}
            squares(functional_call(model, others, (x,))).mean().backward()
            assert all(p.grad is not None for p in model.parameters())
            with pytest.raises(UnseenGradient):
                autograd_hacks.compute_grad1(model)
            leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
            own = torch.autograd.grad(squares(functional_call(model, leaves, (x,))).mean(), list(leaves.values()))
            squares(functional_call(model, leaves, (x,))).mean().backward()
            assert all(torch.equal(p.grad, g) for p, g in zip(leaves.values(), own))
            check(model, x, run=lambda x: functional_call(model, dict(model.named_parameters()), (x,)))
            autograd_hacks.clip_grad1_norm_(model, 1.0)


@pytest.mark.parametrize("param_grad", [True, False])
def test_parameters_that_change_after_the_hooks(param_grad: bool) -> None:
    """One is replaced, others are frozen as the model is hooked again, and a penalty comes later."""
    model, x = two_layers().double(), torch.randn(3, 4, dtype=torch.float64)

    def losses(has_penalty: bool) -> Tensor:
        own = squares(model(points := x.clone().requires_grad_()).tanh())
        (slopes,) = torch.autograd.grad(own.sum(), points, create_graph=has_penalty, retain_graph=True)
        return own + squares(slopes) if has_penalty else own

    autograd_hacks.add_hooks(model)
    model[1].requires_grad_(False)
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        model[0].weight = nn.Parameter(model[0].weight.detach() + 1)
        for step in range(5):
            model[1].requires_grad_(step > 0)
            check_losses(model, partial(losses, step > 2))
            assert all((p.grad is not None) == (param_grad and p.requires_grad) for p in model.parameters())


def test_hooks_of_the_users_on_parameters_see_gradients() -> None:
    model, x, seen = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(3, 4), list[Tensor]()
    model[0].weight.register_hook(seen.append)
    model[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(3):
            squares(model(x)).mean().backward()
            autograd_hacks.compute_grad1(model)
            assert_close(model[0].weight.grad1.mean(0), seen[-1] if seen[-1].shape == (5, 4) else seen[-2])
            assert model[0].weight.grad is None
    assert len(seen) == 6


@pytest.mark.parametrize("other_hooked", [False, True])
def test_a_layer_that_another_model_trains_keeps_its_gradient(other_hooked: bool) -> None:
    shared = nn.Linear(3, 3)
    skipped, other = nn.Sequential(shared, nn.Linear(3, 2)), nn.Sequential(shared, nn.Linear(3, 2))
    autograd_hacks.add_hooks(skipped, param_grad=False)
    if other_hooked:
        autograd_hacks.add_hooks(other)
    x = torch.randn(4, 3)
    for _ in range(2):
        for run, has_gradient in ((other, True), (shared, True), (skipped, False)):
            shared.weight.grad = None
            run(x).sum().backward()
            assert (shared.weight.grad is not None) == has_gradient
        autograd_hacks.compute_grad1(skipped, "sum")
