"""Quantities taken while a backward pass runs."""

import pytest
import torch
import torch.nn as nn
from nets import MODELS, Tied
from oracle import squares
from steps import alive, at_most
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import autograd_hacks
from autograd_hacks.capture.uses import LayerCall
from autograd_hacks.errors import BatchSizeError, HigherOrderError, NothingRecorded, SamplesMixed, UnseenGradient


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("param_grad", [True, False])
@pytest.mark.parametrize("loss_type", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_as_afterwards(name: str, loss_type: str, param_grad: bool) -> None:
    build, batch = MODELS[name]
    model = build().double()
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def loss(x: Tensor) -> Tensor:
        each = squares(model(x))
        return each.mean() if loss_type == "mean" else each.sum()

    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(3):
            x = batch()
            loss(x).backward()
            grads = autograd_hacks.per_sample_grads(model, loss_type)
            norms, along, gram, projection = grads.norms(), grads.dot(v), grads.gram(), grads.project(5, 2)
            kept = [p.grad for p in model.parameters()]
            model.zero_grad()
            with autograd_hacks.during_backward(
                model, "norms", "gram", dot=v, project=5, seed=2, loss_type=loss_type
            ) as streamed:
                loss(x).backward()
            assert_close(streamed.norms, norms)
            assert_close(streamed.dot, along)
            assert_close(streamed.gram, gram)
            assert_close(streamed.projection, projection)
            for p, g in zip(model.parameters(), kept):
                assert_close(p.grad, g)
            with pytest.raises(NothingRecorded, match="read during the backward pass"):
                autograd_hacks.compute_grad1(model)
            model.zero_grad()


def test_clipping_by_a_second_backward_pass() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(6, 4)
    with autograd_hacks.add_hooks(model):
        losses = squares(model(x))
        with autograd_hacks.during_backward(model, "norms") as streamed:
            autograd_hacks.backward(losses, retain_graph=True)
        model.zero_grad()
        with autograd_hacks.pause_hooks():
            (losses * (0.5 / streamed.norms).clamp(max=1)).mean().backward()
        clipped = [p.grad for p in model.parameters()]
        model.zero_grad()
        squares(model(x)).mean().backward()
        autograd_hacks.clip_grad1_norm_(model, 0.5)
        for p, g in zip(model.parameters(), clipped):
            assert_close(p.grad, g)


def test_records_are_freed_as_the_pass_goes_on() -> None:
    layers, others = 20, alive(LayerCall)
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(layers))), torch.randn(256, 256)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(2):
            squares(model(x)).sum().backward()
        one = 256 * 256 * 4
        loss = squares(model(x)).sum()
        with at_most(6 * one), autograd_hacks.during_backward(model, "norms", loss_type="sum", budget=one):
            loss.backward()
            assert alive(LayerCall) <= others  # nor are the layers' inputs kept
        loss = squares(model(x)).sum()
        with pytest.raises(AssertionError, match="held"), at_most(layers * one // 2):
            loss.backward()


def test_what_it_refuses() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(6, 4)
    with pytest.raises(NothingRecorded), autograd_hacks.during_backward(model, "norms"):
        pass
    with autograd_hacks.add_hooks(model):
        with (
            pytest.raises(ValueError, match=r"no entry for '0\.weight'"),
            autograd_hacks.during_backward(model, "norms", dot={}),
        ):
            pass
        with pytest.raises(ValueError, match="project=0"), autograd_hacks.during_backward(model, "norms", project=0):
            pass
        inside = autograd_hacks.accumulate(model), autograd_hacks.during_backward(model, "norms")
        with pytest.raises(RuntimeError, match="accumulating"), inside[0], inside[1]:
            pass
        with pytest.raises(NothingRecorded), autograd_hacks.during_backward(model, "norms") as streamed:
            pass
        with pytest.raises(NothingRecorded, match=r"no .norms"):
            _ = streamed.norms
        with autograd_hacks.during_backward(model, "norms") as streamed:
            squares(model(x)).sum().backward()
        with pytest.raises(NothingRecorded, match=r"no .gram"):
            _ = streamed.gram

        def twice() -> None:
            with autograd_hacks.during_backward(model, "norms"):
                for _ in range(2):
                    squares(model(x)).sum().backward()

        with pytest.raises(RuntimeError, match="second backward"):
            twice()
        with pytest.raises(HigherOrderError), autograd_hacks.during_backward(model, "norms"):
            squares(model(x)).sum().backward(create_graph=True)
        model.zero_grad()
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert_close(model[0].weight.grad1.mean(0), model[0].weight.grad)


def test_a_penalty_in_the_loss() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(6, 4)
    with autograd_hacks.add_hooks(model), pytest.raises(UnseenGradient), autograd_hacks.during_backward(model, "norms"):
        (squares(model(x)).sum() + model[0].weight.square().sum()).backward()


def test_samples_that_mix_or_disagree() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.into(x)
            return self.out(h - h.mean(0))

    model = Mixes()
    with autograd_hacks.add_hooks(model), pytest.raises(SamplesMixed), autograd_hacks.during_backward(model, "norms"):
        squares(model(torch.randn(5, 4))).sum().backward()
    model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
    with autograd_hacks.add_hooks(model), pytest.raises(BatchSizeError), autograd_hacks.during_backward(model, "norms"):
        (model[0](torch.randn(5, 4)).sum() + model[1](torch.randn(3, 4)).sum()).backward()


def test_a_parameter_of_several_calls_waits_for_all() -> None:
    model, x = Tied().double(), torch.randint(7, (4, 5))
    with autograd_hacks.add_hooks(model):
        with autograd_hacks.during_backward(model, "norms") as streamed:
            squares(model(x)).mean().backward()
        squares(model(x)).mean().backward()
        assert_close(streamed.norms, autograd_hacks.per_sample_grads(model).norms())


def test_a_layer_in_two_checkpoints_that_run_inside_of_the_pass() -> None:
    """The pass comes to the second of its calls before the first is run again."""
    inner, out, x = nn.Linear(4, 4).double(), nn.Linear(4, 2).double(), torch.randn(5, 4).double()
    model = nn.ModuleList([inner, out])

    def losses() -> Tensor:
        h = x.clone().requires_grad_()
        for _ in range(2):
            h = checkpoint(lambda h: inner(h).tanh(), h, use_reentrant=True)
        return squares(out(h))

    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            loss = losses().mean()
            with pytest.raises(RuntimeError, match="checkpoints share"), autograd_hacks.during_backward(model, "norms"):
                loss.backward()


def test_reading_inside() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(6, 4)
    with autograd_hacks.add_hooks(model), autograd_hacks.during_backward(model, "norms"):
        squares(model(x)).sum().backward()
        for read in (autograd_hacks.compute_grad1, autograd_hacks.per_sample_grads):
            with pytest.raises(NothingRecorded, match="Read after that context"):
                read(model)
        with pytest.raises(RuntimeError, match="already open"), autograd_hacks.during_backward(model, "norms"):
            pass
