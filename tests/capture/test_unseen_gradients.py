"""Ways by which a gradient escapes the hooks, or memory is shared: each is right, or an error that says so."""

import pytest
import torch
import torch.nn as nn
from nets import Choosy
from oracle import squares
from steps import assert_right, batch, check, step

import autograd_hacks
from autograd_hacks.errors import UnseenGradient


def test_created_graphs_that_the_loss_does_not_use_harm_nothing(model: nn.Module) -> None:
    x, y = batch()
    x.requires_grad_()
    loss = squares(model(x), y).mean()
    torch.autograd.grad(loss, x, create_graph=True)
    loss.backward()
    assert_right(model, x, y)
    torch.autograd.grad(squares(model(x), y).mean(), list(model.parameters()), create_graph=True)
    assert_right(model, x, y)


def test_a_penalty_on_weights_in_the_loss() -> None:
    for model in (nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 3), Choosy())):
        x = torch.randn(4, 3)
        with autograd_hacks.add_hooks(model):
            for _ in range(3):  # and every time
                loss = squares(model(x)).mean() + sum(p.pow(2).sum() for p in model.parameters())
                loss.backward()
                with pytest.raises(UnseenGradient, match=r"a penalty on the weight .*pause_hooks\(\)"):
                    autograd_hacks.compute_grad1(model)
            model.zero_grad()
            squares(model(x)).mean().backward()
            with autograd_hacks.pause_hooks():
                sum(p.pow(2).sum() for p in model.parameters()).backward()
            assert_right(model, x)


@pytest.mark.filterwarnings("ignore")  # the compiler's own, which change with its version
def test_a_compiled_function_of_layers_after_an_ordinary_step(model: nn.Sequential) -> None:
    x, y = batch()
    step(model, x, y)
    autograd_hacks.compute_grad1(model)
    squares(torch.compile(lambda x: model[2](model[0](x)), backend="aot_eager")(3 * x), y).mean().backward()
    with pytest.raises(UnseenGradient, match=r"torch\.compile"):
        autograd_hacks.compute_grad1(model)


def test_a_forward_hook_that_gets_ahead(model: nn.Sequential) -> None:
    x, _ = batch()
    model[0].register_forward_hook(lambda layer, args, out: 2 * out, prepend=True)
    for _ in range(3):
        check(model, x)


def test_a_stray_gradient_is_remembered_when_passes_are_put_together() -> None:
    parts = nn.ModuleDict({"trunk": nn.Linear(3, 4), "left": nn.Linear(4, 2), "right": nn.Linear(4, 2)})
    with autograd_hacks.add_hooks(parts):
        h = parts["trunk"](torch.randn(5, 3)).tanh()
        (parts["left"](h).pow(2).mean() + parts["right"].weight.square().sum()).backward(retain_graph=True)
        parts["right"](h).pow(2).mean().backward()
        with pytest.raises(UnseenGradient, match=r"right\.weight"):
            autograd_hacks.compute_grad1(parts)
