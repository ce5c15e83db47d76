"""Memory of ``grad1``: used again from step to step, and never what someone else holds."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from steps import assert_right, batch, step
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
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
    step(model, *batch(seed=1))
    assert_right(model, *batch(seed=1))
    assert address(model) == before
    step(model, *batch(6))
    assert_right(model, *batch(6))


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
    step(model, *batch(seed=1))
    assert_right(model, *batch(seed=1))
    assert address(model) != before
    if isinstance(held, Tensor) and held.grad_fn is not None:
        (saved,) = torch.autograd.grad(held.sum(), [held.grad_fn.next_functions[1][0].variable])
        assert_close(saved, expected.sum())
    else:
        rows = torch.as_tensor(held[0] if isinstance(held, list) else held)
        assert_close(rows, expected[0] if rows.shape == expected.shape[1:] else expected)


@pytest.mark.usefixtures("nothing_is_small")
def test_memory_is_not_reused_where_that_is_turned_off(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    autograd_hacks.add_hooks(model, reuse=False)
    step(model, *batch())
    autograd_hacks.compute_grad1(model)
    before = weakref.ref(model[0].weight.grad1)
    with monkeypatch.context() as patched:  # what would be written into it
        patched.setattr(memory, "_holders", lambda alone: pytest.fail("the old rows were looked at"))
        step(model, *batch(seed=1))
        autograd_hacks.compute_grad1(model)
    assert before() is None
    assert_right(model, *batch(seed=1))
    autograd_hacks.clip_grad1_norm_(model, 1.0)
    (hook,) = (hook for hook in model._forward_pre_hooks.values() if hasattr(hook, "recorder"))
    assert not hook.recorder.pool._held


@pytest.mark.usefixtures("nothing_is_small")
def test_grad1_of_another_dtype_or_that_needs_grad_is_not_written_into(model: nn.Sequential) -> None:
    step(model, *batch())
    autograd_hacks.compute_grad1(model)
    model[0].weight.grad1 = model[0].weight.grad1.float()
    model[2].weight.grad1.requires_grad_()
    step(model, *batch())
    assert_right(model, *batch())
    assert not model[2].weight.grad1.requires_grad


@pytest.mark.usefixtures("nothing_is_small")
def test_rows_with_the_users_own_attributes_are_not_written_into(model: nn.Sequential) -> None:
    step(model, *batch())
    autograd_hacks.compute_grad1(model)
    model[0].weight.grad1.cached = model[0].weight.grad1.norm()
    step(model, *batch(seed=1))
    assert_right(model, *batch(seed=1))
    assert not hasattr(model[0].weight.grad1, "cached")


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


def test_memory_of_the_users_is_never_written_into(model: nn.Sequential) -> None:
    def next_step() -> None:
        step(model, *batch(seed=1))
        autograd_hacks.compute_grad1(model)

    step(model, *batch())
    autograd_hacks.compute_grad1(model)
    storage = model[0].weight.grad1.untyped_storage()
    model[2].weight.grad1.share_memory_()
    shared = model[2].weight.grad1.data_ptr()
    kept = storage.tolist()
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
        step(model, x, y)
        assert_right(model, x, y)
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
