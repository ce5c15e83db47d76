"""Whatever a program did before: rows belong to the forward that the last backward passes came through."""

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from oracle import squares
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x).relu_()
        return self.left(h), self.right(h)


def loss(out: Tensor) -> Tensor:
    return squares(out).mean()


def run(model: Heads, way: str, samples: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, 3, dtype=torch.float64, requires_grad=True)
    if way == "model":
        return model(x)
    if way == "cell":  # the trunk three times
        h = model.trunk(x).tanh()
        x = model.trunk(h[:, :3])[:, :3]
    h = model.trunk(x).tanh()
    return model.left(h), model.right(h)


WAYS = st.sampled_from(["model", "parts", "cell"])
DISTRACTIONS = ["forward", "no_grad", "input gradient", "weight gradient", "paused", "backward", "kept", "read", "fail"]


def distract(model: Heads, what: str, way: str, samples: int, kept: list[Tensor]) -> None:
    """Something that has nothing to do with the step that comes after it."""
    left, right = run(model, way, samples)
    match what:
        case "no_grad":
            with torch.no_grad():
                run(model, way, samples)
        case "input gradient":
            x = torch.randn(samples, 3, dtype=torch.float64, requires_grad=True)
            torch.autograd.grad(loss(model(x)[0]), x)
        case "weight gradient":
            torch.autograd.grad(loss(right), model.trunk.weight)
        case "paused":
            with autograd_hacks.pause_hooks():
                loss(right).backward()
        case "backward":
            loss(left).backward()
        case "kept":
            kept.append(loss(left) + loss(right))
            kept[-1].backward(retain_graph=True)
        case "read":
            model.zero_grad()  # or its rows would be a part of what is in .grad, which is an error
            loss(left).backward()
            autograd_hacks.compute_grad1(model)
        case "fail":
            left.register_hook(lambda g: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss(left).backward()


@given(st.data())
def test_rows_add_up_to_grad_whatever_ran_before(data: st.DataObject) -> None:
    torch.manual_seed(0)
    model, kept = Heads().double(), list[Tensor]()
    sizes = st.integers(1, 4)
    with autograd_hacks.add_hooks(model):
        for _ in range(data.draw(st.integers(1, 3))):
            for what in data.draw(st.lists(st.sampled_from(DISTRACTIONS), max_size=3)):
                distract(model, what, data.draw(WAYS), data.draw(sizes), kept)
            samples, outs = data.draw(sizes), ()
            outs = run(model, data.draw(WAYS), samples)
            early = data.draw(st.booleans())  # another forward between this one and its backward passes
            if early:
                run(model, data.draw(WAYS), data.draw(sizes))
            model.zero_grad()
            passes = data.draw(st.lists(st.sampled_from([(0,), (1,), (0, 1)]), min_size=1, max_size=3))
            for heads in passes:
                sum(loss(outs[head]) for head in heads).backward(retain_graph=True)
            autograd_hacks.compute_grad1(model)
            with autograd_hacks.pause_hooks():
                each = sum(squares(outs[head]) for heads in passes for head in heads)
                rows = [torch.autograd.grad(x, [*model.parameters()], retain_graph=True, allow_unused=True) for x in each]
            for p, own in zip(model.parameters(), zip(*rows)):
                assert (p.grad1 is None) == (p.grad is None) == (own[0] is None)
                if p.grad is not None:
                    assert_close(p.grad1, torch.stack(own))
                    assert_close(p.grad1.mean(0), p.grad)
