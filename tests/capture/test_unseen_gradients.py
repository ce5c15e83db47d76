"""Ways by which a gradient escapes the hooks, or memory is shared: each is right, or an error that says so."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import squares
from steps import assert_right, batch, step
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import HigherOrderError, NothingRecorded, UnseenGradient


@pytest.mark.parametrize("critic", [nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))])
@pytest.mark.parametrize("together", [True, False])
def test_a_gradient_penalty(critic: nn.Module, together: bool) -> None:
    """Its graph leads to the weights past the layers, whether or not the layers' own nodes are run too."""
    x, mixed = torch.randn(4, 3), torch.randn(4, 3, requires_grad=True)
    with autograd_hacks.add_hooks(critic):
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        losses = critic(x).flatten()
        penalty = (slope.norm(dim=1) - 1) ** 2
        if together:
            autograd_hacks.backward(losses + penalty)
        else:
            losses.mean().backward()
            penalty.mean().backward()
        with pytest.raises((HigherOrderError, UnseenGradient), match="pause_hooks"):
            autograd_hacks.compute_grad1(critic)
        critic.zero_grad()
        critic(x).flatten().pow(2).mean().backward()
        autograd_hacks.compute_grad1(critic)
        for p in critic.parameters():
            assert_close(p.grad1.mean(0), p.grad)


def test_a_created_graph_that_the_loss_does_not_use_harms_nothing(model: nn.Module) -> None:
    x, y = batch()
    x.requires_grad_()
    loss = squares(model(x), y).mean()
    torch.autograd.grad(loss, x, create_graph=True)
    loss.backward()
    assert_right(model, x, y)


def test_a_penalty_run_by_itself_is_noticed_unless_hooks_are_paused(model: nn.Module) -> None:
    x, y = batch()
    step(model, x, y)
    model[0].weight.square().sum().backward()
    with pytest.raises(UnseenGradient, match=r"0\.weight by a way"):
        autograd_hacks.compute_grad1(model)
    step(model, x, y)
    with autograd_hacks.pause_hooks():
        model[0].weight.square().sum().backward()
    assert_right(model, x, y)


def test_a_weight_used_past_its_layer() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.layer.weight, self.layer.bias)

    model, x, y = Functional().double(), torch.randn(4, 3).double(), torch.randn(4, 2).double()
    with autograd_hacks.add_hooks(model):
        step(model, x, y)
        assert_right(model, x, y)
    with autograd_hacks.add_hooks(model, probe=False):
        step(model, x, y)
        with pytest.raises(UnseenGradient, match=r"layer\.weight, layer\.bias"):
            autograd_hacks.compute_grad1(model)


def test_a_weight_used_past_its_layer_behind_layers_that_are_hooked(model: nn.Sequential) -> None:
    x, _ = batch()
    F.linear(torch.tanh(model[0](x)), model[2].weight).sum().backward()
    with pytest.raises(UnseenGradient, match=r"2\.weight by"):
        autograd_hacks.compute_grad1(model)


def test_functional_call_with_weights_of_its_own(model: nn.Module) -> None:
    x, y = batch()
    step(model, x, y)
    moved = {name: p * 1.5 for name, p in model.named_parameters()}
    squares(torch.func.functional_call(model, moved, x), y).mean().backward()
    with pytest.raises(UnseenGradient):
        autograd_hacks.compute_grad1(model)


def test_a_forward_that_calls_forward_itself(model: nn.Sequential) -> None:
    x, y = batch()
    squares(model[2](model[0].forward(x)), y).mean().backward()
    with pytest.raises(UnseenGradient, match=r"0\.weight, 0\.bias"):
        autograd_hacks.compute_grad1(model)


@pytest.mark.filterwarnings("ignore")  # the compiler's own, which change with its version
def test_a_compiled_model_after_an_ordinary_step(model: nn.Module) -> None:
    x, y = batch()
    step(model, x, y)
    autograd_hacks.compute_grad1(model)
    squares(torch.compile(model, backend="aot_eager")(3 * x), y).mean().backward()
    with pytest.raises(UnseenGradient, match=r"torch\.compile"):
        autograd_hacks.compute_grad1(model)


def test_a_layer_put_in_after_add_hooks(model: nn.Sequential) -> None:
    x, y = batch()
    model[2] = nn.Linear(4, 2).double()
    step(model, x, y)
    with pytest.raises(NothingRecorded, match=r"at add_hooks, .*: layer '2' \(Linear\)"):
        autograd_hacks.compute_grad1(model)
    autograd_hacks.add_hooks(model)
    step(model, x, y)
    assert_right(model, x, y)


def test_attention_of_which_only_the_output_projection_trains() -> None:
    layer, x = nn.MultiheadAttention(4, 2, batch_first=True).double(), torch.randn(3, 5, 4).double()
    layer.in_proj_weight.requires_grad_(False)
    layer.in_proj_bias.requires_grad_(False)
    with autograd_hacks.add_hooks(layer):
        layer(x, x, x)[0].pow(2).sum().backward()
        autograd_hacks.compute_grad1(layer, "sum")
        assert_close(layer.out_proj.weight.grad1.sum(0), layer.out_proj.weight.grad)
        assert not hasattr(layer.in_proj_weight, "grad1")


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_scripted_child() -> None:
    model = nn.Sequential(nn.Linear(3, 4), torch.jit.script(nn.Linear(4, 2))).double()
    x, y = batch()
    with autograd_hacks.add_hooks(model):
        step(model, x, y)
        assert_right(model, x, y)
    with pytest.raises(TypeError, match="scripted"):
        autograd_hacks.add_hooks(model[1])


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_tracing_a_hooked_model(model: nn.Module) -> None:
    traced = torch.jit.trace(model, batch()[0])
    assert torch.equal(traced(batch()[0]), model(batch()[0]))


def test_a_forward_hook_that_gets_ahead(model: nn.Sequential) -> None:
    x, y = batch()
    model[0].register_forward_hook(lambda layer, args, out: 2 * out, prepend=True)
    step(model, x, y)
    with pytest.raises(UnseenGradient, match=r"before the library's on layer '0' \(Linear\)"):
        autograd_hacks.compute_grad1(model)
    autograd_hacks.remove_hooks(model)
    autograd_hacks.add_hooks(model)
    step(model, x, y)
    assert_right(model, x, y)


def test_a_refusal_leaves_no_older_rows_behind(model: nn.Module) -> None:
    x, y = batch()
    step(model, x, y)
    autograd_hacks.compute_grad1(model)
    step(model, x, y)
    x.zero_()
    with pytest.raises(autograd_hacks.errors.StaleRecord):
        autograd_hacks.compute_grad1(model)
    for p in model.parameters():
        assert not hasattr(p, "grad1")


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


def test_a_copys_dead_hooks_leave_no_key_behind(model: nn.Sequential) -> None:
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(batch()[0])
        for layer in twin.modules():
            assert not layer._forward_hooks
            assert not layer._forward_pre_hooks
            assert not layer._forward_hooks_with_kwargs
            assert not layer._forward_hooks_always_called
        for p in twin.parameters():
            assert not p._backward_hooks


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
    step(model, *batch())
    assert_right(model, *batch())


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


def test_a_gradient_that_is_nothing_but_rounding_is_not_taken_for_a_difference() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(24, 1))
    x = torch.randn(4, 2, 8, requires_grad=True)
    with autograd_hacks.add_hooks(model):
        out = model(x)
        torch.autograd.grad(out.sum(), x, create_graph=True)
        F.softplus(out).mean().backward()
        autograd_hacks.compute_grad1(model)


def test_strays_do_not_pile_up(model: nn.Sequential) -> None:
    (recorder,) = [hook.recorder for hook in model._forward_pre_hooks.values()]
    for _ in range(20):
        F.linear(batch()[0], model[0].weight).sum().backward()
    assert len(recorder.strays) == 1


def test_a_stray_gradient_is_remembered_when_passes_are_put_together() -> None:
    parts = nn.ModuleDict({"trunk": nn.Linear(3, 4), "left": nn.Linear(4, 2), "right": nn.Linear(4, 2)})
    with autograd_hacks.add_hooks(parts):
        h = parts["trunk"](torch.randn(5, 3)).tanh()
        (parts["left"](h).pow(2).mean() + parts["right"].weight.square().sum()).backward(retain_graph=True)
        parts["right"](h).pow(2).mean().backward()
        with pytest.raises(UnseenGradient, match=r"right\.weight"):
            autograd_hacks.compute_grad1(parts)


def test_saliency_under_autocast_is_no_difference() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    x, y = torch.randn(32, 64, requires_grad=True), torch.randint(10, (32,))
    with autograd_hacks.add_hooks(model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        torch.autograd.grad(loss, x, create_graph=True)
        loss.backward()
        autograd_hacks.compute_grad1(model)


def test_dead_units_where_samples_and_positions_are_as_many() -> None:
    """Nothing tells the axes apart: an error, and none for another size."""
    for samples in (3, 5):
        x = torch.full((samples, 3, 1), -1.0)
        x[1, 1] = 1.2  # the only one that is alive
        model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2))
        nn.init.ones_(model[0].weight)
        nn.init.constant_(model[0].bias, -1.0)
        autograd_hacks.add_hooks(model)
        model(x).sum().backward()
        if samples == 3:
            with pytest.raises(autograd_hacks.errors.SamplesMixed, match="another size"):
                autograd_hacks.compute_grad1(model, "sum")
        else:
            autograd_hacks.compute_grad1(model, "sum")
            assert model[2].weight.grad1[:, 0, 0].tolist() == pytest.approx([0, 0.2, 0, 0, 0])
