"""Ways by which a gradient escapes the hooks, or a record is misread: each is right, or an error that says so."""

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import assert_rows, one_backward_per_sample
from test_records import assert_right, batch, mlp, squares, step
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import autograd_hacks
from autograd_hacks.errors import HigherOrderError, NothingRecorded, UnseenGradient
from autograd_hacks.forms import Dense
from autograd_hacks.record import Visit
from autograd_hacks.rules import RULES


@pytest.fixture
def model() -> Iterator[nn.Sequential]:
    model = mlp()
    with autograd_hacks.add_hooks(model):
        yield model


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(3, 2), (4, 3)),
        (nn.Linear(3, 2), (4, 5, 3)),
        (nn.Conv2d(2, 3, 2), (4, 2, 5, 5)),
        (nn.Conv2d(20, 3, 2), (4, 20, 2, 2)),
        (nn.Conv1d(4, 2, 1, groups=2), (4, 4, 3)),
        (nn.ConvTranspose1d(2, 3, 2), (4, 2, 5)),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_complex_layers(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer, x = layer.to(torch.complex128), torch.randn(shape, dtype=torch.complex128)

    def losses(out: Tensor, y: Tensor) -> Tensor:
        return (out.abs() ** 2).flatten(1).sum(1)

    with autograd_hacks.add_hooks(layer):
        losses(layer(x), x).mean().backward()
        autograd_hacks.compute_grad1(layer)
        assert_rows(layer, one_backward_per_sample(layer, losses, x, x))


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

    model = Functional()
    with autograd_hacks.add_hooks(model):
        model(torch.randn(4, 3)).sum().backward()
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
    with pytest.raises(NothingRecorded, match=r"since add_hooks: layer '2' \(Linear\)"):
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
    model = nn.Sequential(nn.Linear(3, 4), torch.jit.script(nn.Linear(4, 2)))
    with autograd_hacks.add_hooks(model):
        model(torch.randn(5, 3)).sum().backward()
        with pytest.raises(autograd_hacks.errors.PerSampleGradientError, match="layer '1'"):
            autograd_hacks.compute_grad1(model)
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


def test_autograd_grad_before_the_training_step_is_not_added_to_it(model: nn.Sequential) -> None:
    x, y = batch()
    loss = squares(model(x), y).mean()
    torch.autograd.grad(loss, model[2].weight, retain_graph=True)
    loss.backward()
    assert_right(model, x, y)
    for p in model.parameters():
        assert_close(p.grad1.mean(0), p.grad)


class Whole(nn.Module):
    """A model that runs in checkpoints and nothing else, one within the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(3, 3), mlp()

    def inner(self, x: Tensor) -> Tensor:
        return checkpoint(self.rest, self.first(x), use_reentrant=True)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_checkpoints_within_checkpoints_in_a_loop() -> None:
    model = Whole().double()
    plain = nn.Sequential(model.first, *model.rest)
    with autograd_hacks.add_hooks(model):
        for seed in range(3):
            for loss_type in ("mean", "sum"):
                x, y = batch(4, seed)
                model.zero_grad()
                with torch.no_grad():
                    model(x)
                autograd_hacks.backward(squares(model(x.clone().requires_grad_()), y), loss_type)
                autograd_hacks.compute_grad1(model)
                with autograd_hacks.pause_hooks():
                    expected = one_backward_per_sample(plain, squares, x, y)
                    assert_rows(plain, expected)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_checkpoints_of_several_forwards_can_not_be_told_apart() -> None:
    model = Whole().double()
    with autograd_hacks.add_hooks(model):
        losses = [squares(model(batch(4, seed)[0].requires_grad_()), batch(4, seed)[1]).mean() for seed in (0, 1)]
        for loss in losses:
            loss.backward()
            with pytest.raises(NothingRecorded, match="use_reentrant=False"):
                autograd_hacks.compute_grad1(model)
        x, y = batch(5)
        squares(model(x.requires_grad_()), y).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert_close(model.first.weight.grad1.shape, (5, 3, 3))


def test_a_failure_after_a_checkpoint_inside_a_backward() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h.register_hook(lambda g: 1 / 0)
            return checkpoint(self.last, h, use_reentrant=True)

    model = Fails()
    with autograd_hacks.add_hooks(model):
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(4, 3)).sum().backward()
        with pytest.raises(NothingRecorded, match="not run to its end"):
            autograd_hacks.compute_grad1(model)


class Methods(nn.Module):
    """Run through a method of its own, never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def encode(self, x: Tensor) -> Tensor:
        return self.layers[2](torch.tanh(self.layers[0](x)))


def test_forwards_and_backwards_of_a_model_that_is_run_through_methods() -> None:
    model = Methods()
    (x, y), (z, t) = batch(4), batch(4, 1)
    with autograd_hacks.add_hooks(model):
        first, second = squares(model.encode(x), y).mean(), squares(model.encode(z), t).mean()
        first.backward()
        second.backward()
        autograd_hacks.compute_grad1(model)
        with autograd_hacks.pause_hooks():
            assert_rows(model, one_backward_per_sample(model, squares, z, t, model.encode))
        with autograd_hacks.accumulate(model):
            first, second = squares(model.encode(x), y).mean(), squares(model.encode(z), t).mean()
            first.backward()
            second.backward()
        autograd_hacks.compute_grad1(model)
        both = torch.cat([x, z]), torch.cat([y, t])
        with autograd_hacks.pause_hooks():
            assert_rows(model, one_backward_per_sample(model, squares, *both, model.encode))


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


def test_channels_last_where_every_axis_has_length_one() -> None:
    layer = nn.Conv2d(3, 1, 2, padding=1).double()
    x = torch.randn(3, 3, 1, 1).double().to(memory_format=torch.channels_last)
    with autograd_hacks.add_hooks(layer):
        layer(x).pow(2).sum().backward()
        autograd_hacks.compute_grad1(layer, "sum")
        assert_rows(layer, one_backward_per_sample(layer, lambda out, y: out.pow(2).flatten(1).sum(1), x, x))


def test_inference_mode_around_reading_and_around_the_backward(model: nn.Module) -> None:
    x, y = batch()
    step(model, x, y)
    with torch.inference_mode():
        autograd_hacks.compute_grad1(model)
    loss = squares(model(x), y).mean()
    with torch.inference_mode():
        loss.backward()
    assert_right(model, x, y)


def test_batched_gradients_are_no_record(model: nn.Module) -> None:
    x, y = batch(4)
    parameters = list(model.parameters())
    losses = squares(model(x), y)
    torch.autograd.grad(losses, parameters, torch.eye(4, dtype=torch.float64), is_grads_batched=True)
    step(model, x, y)
    assert_right(model, x, y)


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


class Offset(nn.Module):
    """A bare parameter, handed out as a view of some kind."""

    def __init__(self, view: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.offset, self.view = nn.Parameter(torch.randn(3, dtype=torch.float64)), view

    def forward(self, x: Tensor) -> Tensor:
        return self.view(self.offset * 2, len(x))


class Reverse(torch.autograd.Function):
    """A view whose backward is not a view's."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> Tensor:
        return -3 * g


@pytest.mark.parametrize(
    ("view", "slope"),
    [
        (lambda y, n: y.expand(n, 3), lambda g: 2 * g),
        (lambda y, n: y.repeat(n, 1).T.contiguous().T, lambda g: 2 * g),
        (lambda y, n: Reverse.apply(y.repeat(n, 1)), lambda g: -6 * g),
        (lambda y, n: y.repeat(n, 2)[:, :3], lambda g: 2 * g),
    ],
    ids=["expand", "transpose", "a Function's", "a slice"],
)
def test_views_of_every_kind_from_a_layer_of_ones_own(
    view: Callable[[Tensor, int], Tensor], slope: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Offset(view), torch.randn(4, 3, dtype=torch.float64)
    monkeypatch.setitem(RULES, Offset, lambda layer, call: {"offset": Dense(slope(call.grad))})
    with autograd_hacks.add_hooks(model):
        out = model(x)
        ((out * x).sum(1) + out.pow(2).sum(1)).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert_close(model.offset.grad1.mean(0), model.offset.grad)
        assert_close(model.offset.grad1, slope(x + 2 * out.detach()))


def linear_on_positions() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 5).double(), torch.randn(3, 6, 4).double()


def test_in_place_operations_on_an_output_that_is_a_view() -> None:
    """They give the view another node in the graph."""

    def once(out: Tensor) -> Tensor:
        early = out.exp().mean((1, 2))
        out.mul_(2)
        out[:, 0] = 0
        return early + out.pow(2).mean((1, 2))

    layer, x = linear_on_positions()
    with autograd_hacks.add_hooks(layer):
        autograd_hacks.backward(once(layer(x)) + layer(x + 1).relu_().sum((1, 2)))
        autograd_hacks.compute_grad1(layer)

        def run(x: Tensor) -> Tensor:
            return once(layer(x)) + layer(x + 1).relu_().sum((1, 2))

        with autograd_hacks.pause_hooks():
            assert_rows(layer, one_backward_per_sample(layer, lambda out, y: out, x, x, run))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.InstanceNorm2d(4, affine=True), (3, 4, 5, 5)),
        (nn.InstanceNorm1d(4, affine=True, track_running_stats=True).eval(), (3, 4, 5)),
        (nn.Conv2d(4, 2, 3), (3, 4, 5, 5)),
        (nn.Linear(4, 2), (3, 2, 2, 4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_in_place_activations_after_any_layer(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model, x = nn.Sequential(layer, nn.ReLU(inplace=True)).double(), torch.randn(shape, dtype=torch.float64)

    def losses(out: Tensor, y: Tensor) -> Tensor:
        return out.pow(2).flatten(1).sum(1)

    for memory_format in (torch.contiguous_format, torch.channels_last) if len(shape) == 4 else (torch.contiguous_format,):
        x = x.to(memory_format=memory_format)
        with autograd_hacks.add_hooks(model):
            losses(model(x), x).mean().backward()
            autograd_hacks.compute_grad1(model)
            assert_rows(model, one_backward_per_sample(model, losses, x, x))


@pytest.mark.parametrize("which", ["out", "state", "both"])
def test_in_place_operations_on_one_of_several_outputs(which: str) -> None:
    layer, x = nn.LSTM(2, 3, batch_first=True).double(), torch.randn(4, 5, 2).double()

    def run(x: Tensor) -> Tensor:
        out, (h, _) = layer(x)
        if which != "out":
            h.mul_(2)
        if which != "state":
            out += 1
        return out.pow(2).sum((1, 2)) + h[0].pow(2).sum(1)

    with autograd_hacks.add_hooks(layer):
        autograd_hacks.backward(run(x))
        autograd_hacks.compute_grad1(layer)
        with autograd_hacks.pause_hooks():
            assert_rows(layer, one_backward_per_sample(layer, lambda out, y: out, x, x, run))


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


def test_checkpoints_of_several_forwards_behind_other_layers() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.middle, self.first(x), use_reentrant=True))

    model = Between().double()
    with autograd_hacks.add_hooks(model):
        for x, y in (batch(4), batch(4, 1)):
            step(model, x, y)
            assert_right(model, x, y)
        losses = [squares(model(batch(4, seed)[0]), batch(4, seed)[1]).mean() for seed in (0, 1)]
        for loss in losses:
            loss.backward()
        with pytest.raises(NothingRecorded, match="use_reentrant=False"):
            autograd_hacks.compute_grad1(model)


def test_heads_with_backward_passes_of_their_own() -> None:
    """Each is called after the backward of the one before; all come through the same trunk."""
    model = nn.ModuleDict({"trunk": nn.Linear(3, 4), "left": nn.Linear(4, 2), "right": nn.Linear(4, 2)}).double()
    for seed in range(2):
        x, _ = batch(5, seed)
        model.zero_grad()
        with autograd_hacks.add_hooks(model):
            features = model["trunk"](x).tanh()
            for head in (model["left"], model["right"]):
                head(features).pow(2).sum(1).mean().backward(retain_graph=True)
            autograd_hacks.compute_grad1(model)
            for p in model.parameters():
                assert_close(p.grad1.mean(0), p.grad)


@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
def test_losses_at_several_steps_of_an_unrolled_cell(order: tuple[int, int]) -> None:
    cell, x = nn.GRUCell(2, 3).double(), torch.randn(4, 3, 2).double()
    with autograd_hacks.add_hooks(cell):
        h, losses = None, []
        for t in range(3):
            h = cell(x[:, t], h)
            losses.append(h.pow(2).sum(1).mean())
        for t in order:
            losses[t].backward(retain_graph=True)
        autograd_hacks.compute_grad1(cell)
        for p in cell.parameters():
            assert_close(p.grad1.mean(0), p.grad)


def test_a_loss_and_then_the_sum_of_it_and_a_later_ones(model: nn.Module) -> None:
    (x, y), (z, t) = batch(), batch(seed=1)
    first = squares(model(x), y).mean()
    first.backward(retain_graph=True)
    (first + squares(model(z), t).mean()).backward()
    autograd_hacks.compute_grad1(model)
    for p in model.parameters():
        assert_close(p.grad1.mean(0), p.grad)


def test_micro_batches_with_two_losses_each_in_any_order(model: nn.Module) -> None:
    (x, y), (z, t) = batch(4), batch(3, 1)
    with autograd_hacks.accumulate(model):
        one, other = squares(model(x), y), squares(model(z), t)
        autograd_hacks.backward(one, retain_graph=True)
        autograd_hacks.backward(other)
        autograd_hacks.backward(one)
    autograd_hacks.compute_grad1(model)
    twice = torch.cat([torch.full((4, 1), 2.0), torch.ones(3, 1)]).double()
    with autograd_hacks.pause_hooks():
        expected = one_backward_per_sample(
            model,
            lambda out, y: squares(out, y[:, :2]) * y[:, 2],
            torch.cat([x, z]),
            torch.cat([torch.cat([y, t]), twice], 1),
        )
    assert_rows(model, expected)


def test_two_hooked_models_that_share_layers() -> None:
    encoder = mlp()
    actor, critic = nn.Sequential(encoder, nn.Linear(2, 3).double()), nn.Sequential(encoder, nn.Linear(2, 1).double())
    autograd_hacks.add_hooks(actor)
    autograd_hacks.add_hooks(critic)
    x, _ = batch()
    for model in (actor, critic, actor):
        model.zero_grad()
        model(x).pow(2).sum(1).mean().backward()
        autograd_hacks.compute_grad1(model)
        for p in model.parameters():
            assert_close(p.grad1.mean(0), p.grad)


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


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_checkpointed_steps_free_their_memory_at_once() -> None:
    model = Whole().double()
    x, y = batch(4)

    def live() -> int:
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    with autograd_hacks.add_hooks(model):
        counts = []
        gc.disable()
        try:
            for _ in range(6):
                squares(model(x.clone().requires_grad_()), y).mean().backward()
                counts.append(live())
        finally:
            gc.enable()
    assert counts[-1] <= counts[2]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.GRUCell, nn.MultiheadAttention])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_sample_that_is_not_finite_stays_in_its_row_when_its_layer_is_recomputed(
    kind: type[nn.Module], value: float
) -> None:
    layer, x = kind(4, 2, **({} if kind is nn.GRUCell else {"batch_first": True})), torch.randn(3, 5, 4)
    x[1] = value
    with autograd_hacks.add_hooks(layer):
        out = layer(x[:, 0]) if kind is nn.GRUCell else layer(x, x, x) if kind is nn.MultiheadAttention else layer(x)
        (out[0] if isinstance(out, tuple) else out).flatten(1).sum(1).mean().backward()
        autograd_hacks.compute_grad1(layer)
        for p in layer.parameters():
            assert p.grad1[[0, 2]].isfinite().all()
            assert torch.equal(p.grad1.isfinite().all(), p.grad.isfinite().all())


def test_unrelated_forwards_of_layers_that_are_called_by_themselves() -> None:
    parts = nn.ModuleDict({"encode": nn.Linear(4, 5), "read": nn.Linear(5, 2), "other": nn.Linear(5, 2)}).double()

    def loss(out: Tensor) -> Tensor:
        return out.square().sum(1).mean()

    with autograd_hacks.add_hooks(parts):
        hidden = [parts["encode"](torch.randn(n, 4).double()) for n in (6, 3)]
        outs = [parts["read"](h) for h in hidden]
        late = parts["other"](hidden[0])
        loss(outs[0]).backward(retain_graph=True)
        for out, samples in ((outs[1], 3), (late, 6)):
            parts.zero_grad()
            loss(out).backward()
            autograd_hacks.compute_grad1(parts)
            for p in parts.parameters():
                assert (p.grad1 is None) == (p.grad is None)
                if p.grad is not None:
                    assert p.grad1.shape[0] == samples
                    assert_close(p.grad1.mean(0), p.grad)


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


def test_losses_that_are_kept_do_not_keep_the_inputs() -> None:
    def visits() -> int:
        gc.collect()
        return sum(type(thing) is Visit for thing in gc.get_objects())

    model, kept, before = mlp(), [], visits()
    with autograd_hacks.add_hooks(model):
        for seed in range(4):
            x, y = batch(seed=seed)
            kept.append(squares(model(x), y).mean())
            kept[-1].backward()
            assert_right(model, x, y)
        assert visits() == before + 2  # the last step's two layers


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_run_and_are_refused() -> None:
    layer = nn.Linear(3, 2)
    with autograd_hacks.add_hooks(layer):
        out = layer(torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]))
        out.to_padded_tensor(0.0).sum().backward()
        with pytest.raises(UnseenGradient):
            autograd_hacks.compute_grad1(layer)


def test_describe_survives_a_rule_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Offset(lambda y, n: y.repeat(n, 1))
    monkeypatch.setitem(RULES, Offset, lambda layer, call: None)
    with autograd_hacks.add_hooks(model):
        model(torch.ones(2, 3)).sum().backward()
        assert "returned None" in str(autograd_hacks.describe(model))
