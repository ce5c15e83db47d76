"""Memory of ``grad1``: used again from step to step, and never what someone else holds; and rows of some parameters."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from nets import MODELS
from oracle import one_loss_at_a_time, squares
from rarely import crossed
from steps import batch, check, step
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.capture.hooks import Hook
from autograd_hacks.errors import NothingRecorded
from autograd_hacks.support import memory
from autograd_hacks.verbs import per_sample


def address(model: nn.Sequential) -> int:
    return model[0].weight.grad1.data_ptr()


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SMALL", 0)


@pytest.mark.usefixtures("nothing_is_small")
def test_grad1_is_written_into_the_last_steps_memory(model: nn.Sequential) -> None:
    step(model, *batch())
    autograd_hacks.compute_grad1(model)
    before = address(model)
    for samples in (5, 3, 4, 5):  # also if a batch is smaller
        check(model, batch(samples, seed=samples)[0])
        assert address(model) == before
    check(model, batch(6)[0])


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize(
    "hold",
    [
        lambda rows: rows,
        lambda rows: [rows],
        lambda rows: rows[0],
        lambda rows: rows.detach(),
        lambda rows: rows.numpy(),
        torch.from_dlpack,
        lambda rows: rows * torch.ones((), dtype=rows.dtype, requires_grad=True),
    ],
    ids=["a name", "a list", "a view", "detach", "numpy", "DLPack", "a graph"],
)
def test_grad1_that_someone_holds_is_never_overwritten(model: nn.Sequential, hold: Callable[[Tensor], Any]) -> None:
    step(model, *batch())
    autograd_hacks.compute_grad1(model)
    expected, before = model[0].weight.grad1.clone(), address(model)
    held = hold(model[0].weight.grad1)
    check(model, batch(seed=1)[0])
    assert address(model) != before
    if isinstance(held, Tensor) and held.grad_fn is not None:
        (saved,) = torch.autograd.grad(held.sum(), [held.grad_fn.next_functions[1][0].variable])
        assert_close(saved, expected.sum())
    else:
        rows = torch.as_tensor(held[0] if isinstance(held, list) else held)
        assert_close(rows, expected[0] if rows.shape == expected.shape[1:] else expected)


@pytest.mark.usefixtures("nothing_is_small")
def test_rows_that_the_user_has_changed_are_not_written_into(model: nn.Sequential) -> None:
    """Of another dtype, with a graph, with an attribute."""
    step(model, *batch())
    autograd_hacks.compute_grad1(model)
    model[0].weight.grad1 = model[0].weight.grad1.float()
    model[2].weight.grad1.requires_grad_()
    model[0].bias.grad1.cached = model[0].bias.grad1.norm()
    check(model, batch(seed=1)[0])
    assert not model[2].weight.grad1.requires_grad
    assert not hasattr(model[0].bias.grad1, "cached")


def test_an_exception_while_rows_are_written_leaves_none(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    step(model, *batch())
    autograd_hacks.compute_grad1(model)
    step(model, *batch(seed=1))
    right, written = per_sample.write_rows, []

    def out_of_memory(*arguments: Any) -> Tensor | None:
        written.append(arguments)
        if len(written) == 2:
            raise MemoryError
        return right(*arguments)

    for p in model.parameters():
        p.grad += 1  # so that it would be another if it were set
    monkeypatch.setattr(per_sample, "write_rows", out_of_memory)
    kept = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(MemoryError):
        autograd_hacks.compute_grad1(model, set_grad=True)
    assert not any(hasattr(p, "grad1") for p in model.parameters())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), kept))


@pytest.mark.parametrize("samples", [41, 55])
def test_a_mean_keeps_all_digits(samples: int) -> None:
    model, x = nn.Linear(3, 2).double(), torch.randn(samples, 3, dtype=torch.float64)
    with autograd_hacks.add_hooks(model, param_grad=False):
        autograd_hacks.backward(model(x).square().sum(1))
        autograd_hacks.compute_grad1(model, set_grad=True)
        assert_close(model.weight.grad, model.weight.grad1.mean(0), rtol=1e-13, atol=0)  # type: ignore[attr-defined]


def test_memory_of_the_users_is_never_written_into(model: nn.Sequential) -> None:
    def next_step() -> None:
        step(model, *batch(seed=1))
        autograd_hacks.compute_grad1(model)

    step(model, *batch())
    autograd_hacks.compute_grad1(model)
    storage = model[0].weight.grad1.untyped_storage()
    model[2].weight.grad1.share_memory_()
    shared, kept = model[2].weight.grad1.data_ptr(), storage.tolist()
    next_step()
    assert storage.tolist() == kept
    assert model[2].weight.grad1.data_ptr() != shared
    mine = torch.zeros_like(model[0].weight.grad1).numpy()
    model[0].weight.grad1 = torch.from_numpy(mine)
    next_step()
    assert not mine.any()


@pytest.mark.parametrize("drop", ["delete", "set None", "freeze", "refuse"])
def test_grad1_that_has_gone_comes_back(model: nn.Sequential, drop: str) -> None:
    x, y = batch()
    for _ in range(3):
        check(model, x)
        if drop == "refuse":
            autograd_hacks.clear_backprops(model)
            with pytest.raises(NothingRecorded):
                autograd_hacks.compute_grad1(model)
        if drop == "freeze":
            model[0].requires_grad_(False)
            step(model, x, y)
            autograd_hacks.compute_grad1(model)
            model[0].requires_grad_(True)
        for p in model.parameters():
            if drop == "delete":
                del p.grad1
            if drop == "set None":
                p.grad1 = None


@pytest.mark.parametrize(("layer", "arguments"), [(nn.Linear(3, 2), 1), (nn.Bilinear(3, 3, 2), 2)])
def test_small_rows_are_contiguous_and_own_their_memory(layer: nn.Module, arguments: int) -> None:
    with autograd_hacks.add_hooks(layer):
        out = layer(*[torch.randn(5, 3)] * arguments)
        (out.mT * torch.randn(2, 5)).sum().backward()  # a gradient whose samples are its last axis in memory
        autograd_hacks.compute_grad1(layer, "sum")
        assert all(p.grad1.is_contiguous() and p.grad1._base is None for p in layer.parameters())


# Per-sample gradients of some parameters alone; the others train as ever


def tower() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6), nn.Unflatten(1, (2, 3)), nn.GroupNorm(2, 2), nn.Flatten(), nn.Linear(6, 3)
    ).double()


@pytest.mark.filterwarnings("ignore:None of the inputs")
@crossed(name=MODELS, every=[1, 2, 3])
def test_rows_of_some_are_those_of_each_loss(name: str, every: int) -> None:
    build, batch = MODELS[name]
    model = build().double()
    twin = copy.deepcopy(model)
    asked = [name for n, (name, p) in enumerate(model.named_parameters()) if p.requires_grad and n % every == 0]
    if not asked:
        pytest.skip("none of these train")
    with autograd_hacks.add_hooks(model, only=asked):
        for _ in range(4):
            x = batch()
            with autograd_hacks.pause_hooks():
                expected = one_loss_at_a_time(model, lambda x=x: squares(model(x)))
            for own in (model, twin):
                own.zero_grad()
                torch.manual_seed(3)
                squares(own(x)).mean().backward()
            assert autograd_hacks.per_sample_grads(model).keys() == set(asked)
            autograd_hacks.compute_grad1(model)
            for (n, p), other in zip(model.named_parameters(), twin.parameters()):
                assert hasattr(p, "grad1") == (n in asked)
                if n in asked:
                    assert_close(p.grad1, expected[n])
                assert_close(p.grad, other.grad)


def test_norm_layers_and_biases() -> None:
    model = tower()
    with autograd_hacks.add_hooks(model, only="norms") as hooks:
        assert "left out" in str(hooks)
        assert not any(isinstance(hook, Hook) for m in model for hook in m._forward_hooks.values())  # read at nodes
        squares(model(torch.randn(5, 4).double())).mean().backward()
        names = ["0.bias", "1.weight", "1.bias", "3.weight", "3.bias", "5.bias"]
        assert list(autograd_hacks.per_sample_grads(model)) == names
        assert "left out by only=" in str(autograd_hacks.describe(model))
    autograd_hacks.add_hooks(model)
    squares(model(torch.randn(5, 4).double())).mean().backward()
    assert list(autograd_hacks.per_sample_grads(model, only="norms")) == names
    assert len(autograd_hacks.per_sample_grads(model)) == 8


def stem(m: Any, x: Tensor) -> Tensor:
    """Norm layers behind a convolution of what has no graph, and in front of one."""
    x = m.norm(m.stem(F.pad(x, (1, 1, 1, 1))))
    return m.last(m.gain(F.relu6(x).transpose(1, -1)).transpose(1, -1)).mean((2, 3))


@pytest.mark.parametrize(
    "only", ["norms", "norm.*", ["norm.weight", "gain.*"], "gain.weight", "last.bias", ["stem.bias", "last.*"]]
)
def test_what_lies_before_is_of_the_batch(only: str | list[str]) -> None:
    model = Bare(
        stem, stem=nn.Conv2d(2, 4, 3), norm=nn.BatchNorm2d(4).eval(), last=nn.Conv2d(4, 3, 3), gain=nn.RMSNorm(4)
    ).double()
    model.norm.running_mean.normal_()
    with autograd_hacks.add_hooks(model, only=only):
        for size in (3, 6, 1, 3):
            x = torch.randn(size, 2, 6, 6).double()
            with autograd_hacks.pause_hooks():
                expected = one_loss_at_a_time(model, lambda x=x: squares(model(x)))
            squares(model(x)).mean().backward()
            autograd_hacks.compute_grad1(model)
            asked = list(autograd_hacks.per_sample_grads(model))
            assert asked
            for name in asked:
                assert_close(model.get_parameter(name).grad1, expected[name])


def test_settings_come_back() -> None:
    model, x = tower(), torch.randn(5, 4).double()
    autograd_hacks.add_hooks(model)
    squares(model(x)).mean().backward()
    autograd_hacks.compute_grad1(model)
    with autograd_hacks.add_hooks(model, only="0.*"):
        assert not hasattr(model[5].weight, "grad1")  # of another step
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert not hasattr(model[5].weight, "grad1")
    squares(model(x)).mean().backward()
    assert len(autograd_hacks.per_sample_grads(model)) == 8
    autograd_hacks.remove_hooks(model)
    with autograd_hacks.add_hooks(model, only="0.*"):
        assert not any(isinstance(hook, Hook) for hook in model[5]._forward_hooks.values())
        autograd_hacks.add_hooks(model)
        assert any(isinstance(hook, Hook) for hook in model[5]._forward_hooks.values())
        squares(model(x)).mean().backward()
        assert len(autograd_hacks.per_sample_grads(model)) == 8
