"""The face: adding, removing and switching hooks, and what they leave on the model."""

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import squares
from steps import assert_right, batch, mlp, step
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.support import memory
from autograd_hacks.verbs import grad1


def traces(model: nn.Module) -> dict[str, Any]:
    """All that a library could leave on a model."""
    return {
        **{f"{path}.{key}": dict(value) if isinstance(value, dict) else value
           for path, layer in model.named_modules() for key, value in vars(layer).items()},
        **{f"{name}.*": dict(vars(p)) for name, p in model.named_parameters()},
    }  # fmt: skip


def test_remove_hooks_leaves_the_model_as_it_was() -> None:
    model = mlp()
    before = traces(model)
    autograd_hacks.add_hooks(model)
    step(model, *batch())
    autograd_hacks.compute_grad1(model)
    assert traces(model) != before
    autograd_hacks.remove_hooks(model)
    assert traces(model) == before


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


def test_adding_hooks_twice_records_once(model: nn.Module) -> None:
    autograd_hacks.add_hooks(model)
    step(model, *batch())
    assert_right(model, *batch())


def test_adding_hooks_again_picks_up_new_layers(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2).double())
    autograd_hacks.add_hooks(model)
    step(model, *batch())
    assert_right(model, *batch())


def test_a_context_in_a_hooked_model_leaves_its_hooks(model: nn.Module) -> None:
    with autograd_hacks.add_hooks(model):
        step(model, *batch())
    assert_right(model, *batch())


def test_the_context_removes_hooks_after_an_exception_too() -> None:
    model = mlp()
    with pytest.raises(KeyError), autograd_hacks.add_hooks(model):
        raise KeyError
    assert not model._forward_pre_hooks
    assert not model[0]._forward_hooks


def test_the_context_allows_removing_inside_it() -> None:
    model = mlp()
    with autograd_hacks.add_hooks(model):
        autograd_hacks.remove_hooks(model)


def test_pausing_nests_and_restores(model: nn.Module) -> None:
    step(model, *batch())
    with autograd_hacks.pause_hooks():
        step(model, *batch(7))
        with autograd_hacks.pause_hooks():
            pass
        step(model, *batch(8))
    assert_right(model, *batch())
    autograd_hacks.disable_hooks()
    with autograd_hacks.pause_hooks():
        pass
    step(model, *batch(7))
    autograd_hacks.enable_hooks()
    assert_right(model, *batch())


def test_hooks_are_paused_after_an_exception_in_the_pause_no_more(model: nn.Module) -> None:
    with pytest.raises(KeyError), autograd_hacks.pause_hooks():
        raise KeyError
    step(model, *batch())
    assert_right(model, *batch())


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
    assert not twin._forward_pre_hooks
    assert not twin[0]._forward_hooks
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
    for p in plain.parameters():
        assert not hasattr(p, "grad1")


def test_the_users_hooks_keep_working_and_the_rows_follow_them(model: nn.Sequential) -> None:
    """A forward hook that changes the output, and one on the output that changes the gradient, before and after ours."""
    early = mlp()
    early[0].register_forward_hook(lambda layer, args, out: 3 * out)
    with autograd_hacks.add_hooks(early):
        early[2].register_forward_hook(lambda layer, args, out: out**2)
        early[2].register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
        early[0].register_forward_hook(lambda layer, args, out: out.register_hook(lambda g: g.clamp(-0.1, 0.1)) and None)
        step(early, *batch())
        autograd_hacks.compute_grad1(early)
        for p in early.parameters():
            assert_close(p.grad1.mean(0), p.grad)


def test_in_place_operations_after_a_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()
    with autograd_hacks.add_hooks(model):
        step(model, *batch())
        assert_right(model, *batch())


def test_keyword_calls() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x)

    model = Keyword()
    with autograd_hacks.add_hooks(model):
        step(model, *batch())
        assert_right(model, *batch())


def test_lazy_layers_once_materialised() -> None:
    model = nn.Sequential(nn.LazyConv1d(2, 2), nn.Flatten(), nn.LazyLinear(2)).double()
    with autograd_hacks.add_hooks(model):
        x, y = torch.randn(4, 3, 5, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
        step(model, x, y)
        assert_right(model, x, y)


def test_layers_used_at_two_paths_are_one() -> None:
    layer = nn.Linear(3, 3).double()
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(3, 2).double())
    with autograd_hacks.add_hooks(model):
        step(model, *batch())
        assert_right(model, *batch())


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
    assert not hook.recorder.memory


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
    right, written = grad1._write, []

    def out_of_memory(*arguments: Any) -> Tensor:
        written.append(arguments)
        if len(written) == 2:
            raise MemoryError
        return right(*arguments)

    for p in model.parameters():
        p.grad += 1  # so that it would be another if it were set
    monkeypatch.setattr(grad1, "_write", out_of_memory)
    kept = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(MemoryError):
        autograd_hacks.compute_grad1(model, set_grad=True)
    assert not any(hasattr(p, "grad1") for p in model.parameters())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), kept))


def test_verify_after_clipping(model: nn.Sequential) -> None:
    """Which has put something else into ``.grad``."""
    step(model, *batch())
    autograd_hacks.clip_grad1_norm_(model, 1e-3)
    autograd_hacks.verify(model)
