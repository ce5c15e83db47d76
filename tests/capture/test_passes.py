"""Several losses, forwards and models: which backward passes belong together, and how long a record lives."""

import threading

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_rows, rows_of_one_graph, squares
from steps import assert_means, assert_right, batch, mlp, step
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import NothingRecorded


@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
def test_losses_at_several_steps_of_an_unrolled_cell(order: tuple[int, int]) -> None:
    cell, x = nn.GRUCell(2, 3).double(), torch.randn(4, 3, 2).double()
    with autograd_hacks.add_hooks(cell):
        h, losses = None, []
        for t in range(3):
            h = cell(x[:, t], h)
            losses.append(squares(h).mean())
        for t in order:
            losses[t].backward(retain_graph=True)
        autograd_hacks.compute_grad1(cell)
        assert_means(cell)


def test_unrelated_forwards_of_layers_that_are_called_by_themselves() -> None:
    parts = nn.ModuleDict({"encode": nn.Linear(4, 5), "read": nn.Linear(5, 2), "other": nn.Linear(5, 2)}).double()

    with autograd_hacks.add_hooks(parts):
        hidden = [parts["encode"](torch.randn(n, 4).double()) for n in (6, 3)]
        outs = [parts["read"](h) for h in hidden]
        late = parts["other"](hidden[0])
        squares(outs[0]).mean().backward(retain_graph=True)
        for out, samples in ((outs[1], 3), (late, 6)):
            parts.zero_grad()
            squares(out).mean().backward()
            autograd_hacks.compute_grad1(parts)
            assert_means(parts)
            assert {len(p.grad1) for p in parts.parameters() if p.grad1 is not None} == {samples}


def test_two_hooked_models_that_share_layers() -> None:
    encoder = mlp()
    actor, critic = nn.Sequential(encoder, nn.Linear(2, 3).double()), nn.Sequential(encoder, nn.Linear(2, 1).double())
    autograd_hacks.add_hooks(actor)
    autograd_hacks.add_hooks(critic)
    x, _ = batch()
    for model in (actor, critic, actor):
        model.zero_grad()
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert_means(model)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_passes_that_add_up_in_grad_and_not_in_rows_are_refused(model: nn.Module, set_to_none: bool, asks: bool) -> None:
    """As a trainer accumulates gradients, without ``accumulate``."""
    for read in (autograd_hacks.compute_grad1, lambda model: autograd_hacks.clip_grad1_norm_(model, 1.0)):
        model.zero_grad(set_to_none=set_to_none)
        for seed in range(3):
            step(model, *batch(seed=seed))
            if asks and seed < 2:  # which adds nothing to .grad
                torch.autograd.grad(model(batch()[0]).sum(), [*model.parameters()])
        with pytest.raises(NothingRecorded, match=r"an earlier backward pass was not read.*accumulate\(model\).*zero_grad"):
            read(model)
        model.zero_grad(set_to_none=set_to_none)
        step(model, *batch())
        assert_right(model, *batch())
    model.zero_grad(set_to_none=set_to_none)
    step(model, *batch())
    squares(model[0](batch(seed=1)[0])).mean().backward()  # of a part that is called by itself
    with pytest.raises(NothingRecorded, match="an earlier backward pass was not read"):
        autograd_hacks.compute_grad1(model)
    model.zero_grad(set_to_none=set_to_none)
    # Each pass was read, or thrown away, or both are of one forward.
    for seed in range(2):
        if asks:
            torch.autograd.grad(model(batch()[0]).sum(), [*model.parameters()])
        step(model, *batch(seed=seed))
        assert_right(model, *batch(seed=seed))
    step(model, *batch())
    autograd_hacks.clear_backprops(model)
    step(model, *batch(seed=1))
    assert_right(model, *batch(seed=1))
    with autograd_hacks.pause_hooks():
        model[0].weight.square().sum().backward()
    step(model, *batch())
    assert_right(model, *batch())


# What a record is and how long it lives: training loops of every kind read the rows they should


def test_two_models_in_two_threads() -> None:
    models, wrong = [mlp(), mlp()], []

    def train(model: nn.Module, offset: int) -> None:
        try:
            for seed in range(offset, offset + 20):
                x, y = torch.full((4, 3), seed, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
                model.zero_grad()
                step(model, x, y)
                autograd_hacks.compute_grad1(model)
                assert_means(model)
        except BaseException as error:
            wrong.append(error)
            raise

    for model in models:
        autograd_hacks.add_hooks(model)
    threads = [threading.Thread(target=train, args=(model, 100 * n)) for n, model in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_torch_func_on_a_hooked_model_is_no_record(model: nn.Module) -> None:
    x, y = batch()
    step(model, x, y)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return squares(torch.func.functional_call(model, parameters, x[None]), y[None]).sum()

    rows = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)
    assert_right(model, x, y)
    assert_rows(model, rows)


# Whatever a program did before: rows belong to the forward that the last backward passes came through


def two_heads() -> nn.Module:
    return Bare(
        lambda m, x: (m.left(h := m.trunk(x).relu_()), m.right(h)),
        trunk=nn.Linear(3, 4), left=nn.Linear(4, 2), right=nn.Linear(4, 2),
    ).double()  # fmt: skip


def loss(out: Tensor) -> Tensor:
    return squares(out).mean()


def run(model: nn.Module, way: str, samples: int) -> tuple[Tensor, Tensor]:
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


def distract(model: nn.Module, what: str, way: str, samples: int, kept: list[Tensor]) -> None:
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


@settings(max_examples=min(settings().max_examples, 300))  # 50 ms each
@given(st.data())
def test_rows_add_up_to_grad_whatever_ran_before(data: st.DataObject) -> None:
    torch.manual_seed(0)
    model, kept = two_heads(), list[Tensor]()
    sizes = st.integers(1, 4)
    with autograd_hacks.add_hooks(model):
        for _ in range(data.draw(st.integers(1, 3))):
            for what in data.draw(st.lists(st.sampled_from(DISTRACTIONS), max_size=3)):
                distract(model, what, data.draw(WAYS), data.draw(sizes), kept)
            samples = data.draw(sizes)
            outs = run(model, data.draw(WAYS), samples)
            if data.draw(st.booleans()):  # another forward between this one and its backward passes
                run(model, data.draw(WAYS), data.draw(sizes))
            model.zero_grad()
            passes = data.draw(st.lists(st.sampled_from([(0,), (1,), (0, 1)]), min_size=1, max_size=3))
            for heads in passes:
                sum(loss(outs[head]) for head in heads).backward(retain_graph=True)
            autograd_hacks.compute_grad1(model)
            with autograd_hacks.pause_hooks():
                each = sum(squares(outs[head]) for heads in passes for head in heads)
                rows = rows_of_one_graph(model, each)
            assert_means(model)
            assert_rows(model, rows)
