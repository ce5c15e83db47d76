"""The face: adding, removing and switching hooks, their handle, and what they leave on the model."""

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_loss_at_a_time, squares
from steps import assert_right, batch, check, mlp, step

import autograd_hacks
from autograd_hacks.capture.above import ABOVE, Above
from autograd_hacks.errors import NothingRecorded


def traces(model: nn.Module) -> dict[str, Any]:
    """All that a library could leave on a model."""
    return {
        **{f"{path}.{key}": dict(value) if isinstance(value, dict) else value
           for path, layer in model.named_modules() for key, value in vars(layer).items()},
        **{f"{name}.*": dict(vars(p)) for name, p in model.named_parameters()},
    }  # fmt: skip


def removed_within(model: nn.Module, handle: Any) -> None:
    with handle:
        handle.remove()


def left_by_an_error(model: nn.Module, handle: Any) -> None:
    with pytest.raises(KeyError), handle:
        raise KeyError


@pytest.mark.parametrize(
    "remove",
    [
        lambda model, handle: autograd_hacks.remove_hooks(model),
        lambda model, handle: handle.remove(),
        lambda model, handle: (handle.remove(), handle.remove()),
        lambda model, handle: (handle.off(), handle.remove()),
        removed_within,
        left_by_an_error,
    ],
)
def test_removing_leaves_the_model_as_it_was(remove: Callable[[nn.Module, Any], Any]) -> None:
    model = mlp()
    before = traces(model)
    handle = autograd_hacks.add_hooks(model)
    step(model, *batch())
    autograd_hacks.compute_grad1(model)
    assert traces(model) != before
    remove(model, handle)
    assert traces(model) == before
    for gone in (handle.on, lambda: autograd_hacks.compute_grad1(model)):
        with pytest.raises(NothingRecorded):
            gone()


def test_remove_hooks_warns_where_there_are_none(model: nn.Module) -> None:
    with pytest.warns(UserWarning, match="Sequential has no hooks"):
        autograd_hacks.remove_hooks(mlp())


def test_remove_hooks_reaches_layers_that_left_the_model(model: nn.Sequential) -> None:
    old, model[2] = model[2], nn.Linear(4, 2).double()
    autograd_hacks.remove_hooks(model)
    autograd_hacks.add_hooks(model)
    assert not old._forward_hooks


def test_a_graph_that_outlives_the_hooks_records_nothing(model: nn.Module) -> None:
    loss = squares(model(batch()[0]), batch()[1]).mean()
    autograd_hacks.remove_hooks(model)
    autograd_hacks.add_hooks(model)
    loss.backward()
    with pytest.raises(autograd_hacks.errors.UnseenGradient, match=r"0\.weight"):
        autograd_hacks.compute_grad1(model)


def test_adding_hooks_again_records_once_and_picks_up_new_layers(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2).double())
    autograd_hacks.add_hooks(model)
    with autograd_hacks.add_hooks(model):
        step(model, *batch())
    assert_right(model, *batch())


def test_pausing_nests_and_restores(model: nn.Module) -> None:
    step(model, *batch())
    with autograd_hacks.pause_hooks():
        step(model, *batch(7))
        with pytest.raises(KeyError), autograd_hacks.pause_hooks():
            raise KeyError
        step(model, *batch(8))
    with autograd_hacks.add_hooks(model).pause():
        step(model, *batch(7))
    assert_right(model, *batch())
    autograd_hacks.disable_hooks()
    with autograd_hacks.pause_hooks():
        pass
    step(model, *batch(7))
    autograd_hacks.enable_hooks()
    assert_right(model, *batch())


def test_pauses_that_overlap_in_two_threads(model: nn.Module) -> None:
    inside, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with autograd_hacks.pause_hooks():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=pause)
    thread.start()
    inside.wait()
    with autograd_hacks.pause_hooks():
        leave.set()
        thread.join()
    check(model, batch()[0])


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)  # fmt: skip
def test_a_copy_of_a_hooked_model_is_unhooked(model: nn.Sequential, duplicate: Callable[[nn.Module], nn.Module]) -> None:
    step(model, *batch())
    twin = duplicate(model)
    step(twin, *batch(7))
    with pytest.raises(autograd_hacks.errors.NothingRecorded, match="no hooks"):
        autograd_hacks.compute_grad1(twin)
    for layer in twin.modules():
        around = layer._forward_hooks_with_kwargs, layer._forward_hooks_always_called
        assert not any((layer._forward_hooks, layer._forward_pre_hooks, *around))
    assert not any(p._backward_hooks for p in twin.parameters())
    assert_right(model, *batch())
    with autograd_hacks.add_hooks(twin):
        step(twin, *batch(3))
        step(model, *batch(4))
        assert_right(twin, *batch(3))
    assert_right(model, *batch(4))


def test_state_dict_does_not_know_of_hooks(model: nn.Module) -> None:
    step(model, *batch())
    autograd_hacks.compute_grad1(model)
    plain = mlp()
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    assert not any(hasattr(p, "grad1") for p in plain.parameters())


def test_floors_above_have_registered_all_that_capture_asks_of_them() -> None:
    assert vars(ABOVE).keys() == Above.__annotations__.keys()


def test_describe_is_that_of_the_model() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    handle = autograd_hacks.add_hooks(model)
    step(model, *batch())
    assert handle.describe() == autograd_hacks.describe(model)
    assert [row.parameter for row in handle.describe(trained=True).rows] == ["0.bias", "2.weight", "2.bias"]
    names = {n for n in dir(handle) if not n.startswith("_")}
    assert names == {"remove", "pause", "clear", "accumulate", "describe", "on", "off"}


@pytest.mark.parametrize("param_grad", [True, False])
def test_hooks_that_are_off_cost_and_record_nothing(param_grad: bool) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    hooked = autograd_hacks.add_hooks(model, param_grad=param_grad)
    model(x).square().sum().backward()
    hooked.off()
    hooked.off()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    model.zero_grad()
    model(x).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(NothingRecorded):
        autograd_hacks.compute_grad1(model)
    model.append(nn.Linear(2, 2))
    hooked.on()
    hooked.on()
    model[0].bias = nn.Parameter(torch.randn(4))
    autograd_hacks.backward(model(x).square().sum(1))
    hooked.off()
    hooked.on()
    for _ in range(3):
        model.zero_grad()
        model(x).square().sum().backward()
        autograd_hacks.compute_grad1(model, "sum", set_grad=True)
    with autograd_hacks.pause_hooks():
        rows = one_loss_at_a_time(model, lambda: model(x).square().sum(1))
    assert_rows(model, rows)
    hooked.off()
    with hooked:
        pass
    autograd_hacks.add_hooks(model).__exit__()
    with pytest.raises(NothingRecorded):
        hooked.on()
