"""Clipped steps whose batch comes in parts, or by chance: each equals one clip of the whole batch, done by hand."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn as nn
from nets import bare_matrix, with_spare
from oracle import assert_rows, clipped, one_backward_per_sample, squares
from rarely import crossed
from refused import check_each
from steps import assert_right, batch, mlp, raises, rows_of, step
from torch import Tensor
from torch.amp import GradScaler
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import NothingRecorded

BOUND = 0.5
Micro = Sequence[tuple[Tensor, Tensor]]


def clipped_sum(plain: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Of the whole batch, from a plain backward pass for each sample."""
    return (
        [*clipped(rows_of(plain, x, y), BOUND)[1].values()] if len(x) else [torch.zeros_like(p) for p in plain.parameters()]
    )


def appended(model: nn.Module, micro: Micro, divides: bool) -> None:
    """As a trainer's callbacks do it."""
    autograd_hacks.accumulate(model).start()
    for x, y in micro:
        squares(model(x), y).mean().backward()
    autograd_hacks.accumulate(model).stop()
    autograd_hacks.clip_grad1_norm_(model, BOUND)


def added(model: nn.Module, micro: Micro, divides: bool) -> None:
    """divides: whether losses are divided by the number of micro-batches"""
    for x, y in micro:
        (squares(model(x), y).mean() / (len(micro) if divides else 1)).backward()
        size = None if divides else sum(len(x) for x, _ in micro)
        autograd_hacks.clip_grad1_norm_(model, BOUND / len(micro) if divides else BOUND, add=True, batch_size=size)


MODELS = {"layers": mlp, "run again": lambda: nn.Sequential(bare_matrix(3), nn.Linear(3, 2)).double()}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    ("kind", "divides", "sizes", "param_grad"),
    [
        (appended, False, (3, 1, 2), True),
        (appended, False, (3, 1, 2), False),
        (added, False, (3, 1, 2), False),
        (added, False, (5,), False),
        (added, True, (2, 2, 2), False),
    ],
)
def test_a_training_loop_of_micro_batches(
    kind: Callable[..., None], divides: bool, sizes: Sequence[int], param_grad: bool, build: Callable[[], nn.Module]
) -> None:
    model = build()
    plain = copy.deepcopy(model)
    ours, by_hand = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for seed in range(4):
            x, y = batch(sum(sizes), seed)
            kind(model, list(zip(x.split(sizes), y.split(sizes))), divides)
            ours.step()
            ours.zero_grad()
            for p, total in zip(plain.parameters(), clipped_sum(plain, x, y)):
                p.grad = total / len(x)
            by_hand.step()
            assert_close(list(model.parameters()), list(plain.parameters()))


def test_what_the_loss_did_not_reach_keeps_its_gradient() -> None:
    model = with_spare(mlp()).double()
    model.spare.weight.grad = kept = torch.ones(2, 2).double()
    with autograd_hacks.add_hooks(model, param_grad=False):
        step(model, *batch())
        autograd_hacks.clip_grad1_norm_(model, BOUND, add=True)
    assert model.spare.weight.grad is kept
    assert model.spare.bias.grad is None


def test_adding_is_refused_where_grad_holds_some_of_it() -> None:
    model = mlp()

    def add() -> None:
        autograd_hacks.clip_grad1_norm_(model, BOUND, add=True)

    autograd_hacks.add_hooks(model)
    step(model, *batch())
    grads = [p.grad.clone() for p in model.parameters()]
    check_each((ValueError, r"unclipped.*param_grad=False", add))
    autograd_hacks.add_hooks(model, param_grad=False)  # too late for that pass
    check_each((ValueError, "unclipped", add))
    assert_close([p.grad for p in model.parameters()], grads)
    model.zero_grad()
    squares(model[2](torch.ones(2, 4).double())).mean().backward()  # a layer by itself, with an ordinary gradient
    check_each((ValueError, "unclipped", add))


@pytest.mark.parametrize(
    "put",
    [
        lambda m: autograd_hacks.clip_grad1_norm_(m, BOUND, add=True, batch_size=5),
        lambda m: autograd_hacks.clip_grad1_norm_(m, BOUND),
        lambda m: autograd_hacks.compute_grad1(m, set_grad=True),
    ],
)
def test_no_pass_is_added_twice(put: Callable[[nn.Module], object]) -> None:
    model = mlp()
    with autograd_hacks.add_hooks(model, param_grad=False):
        step(model, *batch())
        put(model)
        grads = [p.grad for p in model.parameters()]
        with pytest.raises(NothingRecorded, match="a second time"):
            autograd_hacks.clip_grad1_norm_(model, BOUND, add=True, batch_size=5)
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads))


# Passes that nobody has read, where .grad can't tell


@pytest.mark.parametrize(
    "read", [lambda m: autograd_hacks.clip_grad1_norm_(m, BOUND), lambda m: autograd_hacks.compute_grad1(m, set_grad=True)]
)
def test_an_earlier_micro_batch_that_nobody_has_read(read: Callable[[nn.Module], object]) -> None:
    model = mlp()
    with autograd_hacks.add_hooks(model, param_grad=False):
        for clears in (True, False):  # a refused pass isn't in the way of the next one
            for seed in range(2):
                step(model, *batch(3, seed))
            with pytest.raises(NothingRecorded, match=r"discarded.*accumulate.*add=True"):
                read(model)
            assert all(p.grad is None for p in model.parameters())
            if clears:
                autograd_hacks.clear_backprops(model)
        step(model, *batch())
        read(model)


def test_reading_some_steps_alone_is_no_mistake() -> None:
    model = mlp()
    with autograd_hacks.add_hooks(model, param_grad=False):
        for seed in range(6):
            step(model, *batch(3, seed))
            if seed % 3 == 2:
                assert autograd_hacks.per_sample_grads(model).norms().shape == (3,)


def test_a_pass_of_another_loss_before_grad_is_cleared_is_no_mistake() -> None:
    """A generator's step goes through the discriminator, whose gradients are thrown away."""
    critic, maker = mlp(), nn.Linear(2, 3).double()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, maker))
    with autograd_hacks.add_hooks(critic, param_grad=False):
        for seed in range(3):
            critic.zero_grad()
            step(critic, *batch(3, seed))
            autograd_hacks.clip_grad1_norm_(critic, BOUND)
            ours.step()
            maker.zero_grad()
            critic(maker(torch.randn(4, 2).double())).sum(1).mean().backward()
            theirs.step()


# Clipping a scaled loss's gradients: a GradScaler's steps after it are those without a scale


MAX_NORM = 1.0


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "fused Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
}


def stepped_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """By the mean of the clipped gradients, from one backward pass for each sample.  Returns the norms."""
    norms, grads = clipped(rows_of(model, x, y), MAX_NORM, len(x))
    for name, p in model.named_parameters():
        p.grad = grads[name]
    optimizer.step()
    return norms


@crossed(optimizer=OPTIMIZERS, unscales=[False, True], param_grad=[True, False])
@pytest.mark.parametrize("options", [{"init_scale": 2.0**10}, {"init_scale": 2.0**127}, {"enabled": False}])
def test_steps_are_those_without_a_scale(
    options: dict[str, float], optimizer: str, unscales: bool, param_grad: bool
) -> None:
    model = mlp().float()
    plain = copy.deepcopy(model)
    scaler = GradScaler("cpu", growth_interval=3, **options)
    ours, theirs = OPTIMIZERS[optimizer](model), OPTIMIZERS[optimizer](plain)
    skipped = 0
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(12):
            x, y = torch.randn(6, 3), torch.randn(6, 2)
            ours.zero_grad()
            scaler.scale(squares(model(x), y).mean()).backward()
            norms = autograd_hacks.clip_grad1_norm_(model, MAX_NORM, scaler=scaler)
            if unscales:
                scaler.unscale_(ours)
            before = scaler.get_scale()
            scaler.step(ours)
            scaler.update()
            if scaler.get_scale() < before:
                assert not norms.isfinite().all()
                skipped += 1
            else:
                assert_close(norms, stepped_by_hand(plain, theirs, x, y))
            assert_close(list(model.parameters()), list(plain.parameters()))
    assert 0 < skipped < 9 if options.get("init_scale") == 2.0**127 else not skipped


def test_one_overflow_skips_the_steps_of_all_optimizers() -> None:
    model, x = mlp().float(), torch.randn(6, 3)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    scaler = GradScaler("cpu", init_scale=2.0)
    before = [p.detach().clone() for p in model.parameters()]
    with autograd_hacks.add_hooks(model):
        out = model(x)
        out.register_hook(lambda g: g.index_fill(0, torch.tensor(2), torch.inf))
        scaler.scale(out.sum(1).mean()).backward()
        norms = autograd_hacks.clip_grad1_norm_(model, MAX_NORM, scaler=scaler)
        assert (~norms.isfinite()).nonzero().tolist() == [[2]]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1.0
    assert all(map(torch.equal, model.parameters(), before))


def stepped(model: nn.Module, scaler: GradScaler) -> None:
    scaler.scale(squares(model(torch.randn(6, 3))).mean()).backward()


def test_clipping_after_unscaling_is_refused() -> None:
    model, other = mlp().float(), mlp().float()
    mine, theirs = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, other))
    scaler = GradScaler("cpu", init_scale=8.0)
    with autograd_hacks.add_hooks(model):
        stepped(model, scaler)
        scaler.unscale_(mine)
        grads = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match=r"after scaler\.unscale_\(optimizer\)"):
            autograd_hacks.clip_grad1_norm_(model, MAX_NORM, scaler=scaler)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads))
        scaler.step(mine)
        scaler.update()
        stepped(other, scaler)
        scaler.unscale_(theirs)
        scaler.step(theirs)  # of another model, and done with
        mine.zero_grad()
        stepped(model, scaler)
        autograd_hacks.clip_grad1_norm_(model, MAX_NORM, scaler=scaler)
        scaler.step(mine)
        scaler.update()


def test_a_number_is_refused_where_grad_is_set() -> None:
    model, scaler = mlp().float(), GradScaler("cpu", init_scale=8.0)
    with autograd_hacks.add_hooks(model):
        stepped(model, scaler)
        kept = [p.grad for p in model.parameters()]
        for scale in (8.0, torch.tensor(8.0)):
            with pytest.raises(ValueError, match="Leave scale out"):
                autograd_hacks.compute_grad1(model, scale=scale, set_grad=True)
        check_each((TypeError, "GradScaler", lambda: autograd_hacks.clip_grad1_norm_(model, MAX_NORM, scaler=8.0)))
        assert all(p.grad is grad for p, grad in zip(model.parameters(), kept))
        autograd_hacks.compute_grad1(model, scale=8.0)
        norms = torch.stack([p.grad1.flatten(1).norm(dim=1) for p in model.parameters()]).norm(dim=0)
        assert_close(autograd_hacks.clip_grad1_norm_(model, MAX_NORM, scaler=scaler), norms)


def test_grad_as_backward_would_have_left_it() -> None:
    model, scaler = mlp().float(), GradScaler("cpu", init_scale=8.0)
    plain = copy.deepcopy(model)
    mine, theirs = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, plain))
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(3):
            x, y = torch.randn(6, 3), torch.randn(6, 2)
            scaler.scale(squares(model(x), y).mean()).backward()
            autograd_hacks.compute_grad1(model, set_grad=True)
            scaler.step(mine)
            scaler.update()
            theirs.zero_grad()
            squares(plain(x), y).mean().backward()
            theirs.step()
            assert_close(list(model.parameters()), list(plain.parameters()))


# Micro-batches: one backward pass after another, whose rows are appended


@pytest.mark.parametrize("sizes", [(2, 3), (3, 1, 0)])
def test_accumulate_appends_rows(model: nn.Module, sizes: tuple[int, ...]) -> None:
    x, y = batch(sum(sizes))
    step(model, *batch(7, 1))  # an earlier record is no part of it
    with autograd_hacks.accumulate(model):
        for part_x, part_y in zip(x.split(sizes), y.split(sizes)):
            step(model, part_x, part_y)
    assert_right(model, x, y)
    step(model, *batch(7, 1))
    assert_right(model, *batch(7, 1))


def test_accumulate_fills_in_zeros_for_parts_that_were_not_reached(model: nn.Sequential) -> None:
    x, y = batch(3)
    with autograd_hacks.accumulate(model):
        step(model, x, y)
        squares(model[2](torch.ones(2, 4, dtype=torch.float64)), y[:2]).mean().backward()
    autograd_hacks.compute_grad1(model)
    assert model[0].weight.grad1.shape == (5, 4, 3)
    assert not model[0].weight.grad1[3:].any()
    assert model[2].weight.grad1[3:].any()


def test_micro_batches_of_one_whose_gradient_a_parameter_takes_as_its_own() -> None:
    """A class token gets a view of the gradient at its use for its .grad, and the next pass adds to that memory."""
    model = Bare(
        lambda m, x: m.layer(torch.cat([m.token.expand(len(x), -1, -1), x], 1).tanh()),
        token=torch.randn(1, 1, 3),
        layer=nn.Linear(3, 2),
    ).double()
    x = torch.randn(4, 5, 3).double()
    expected = one_backward_per_sample(model, squares, x)
    with autograd_hacks.add_hooks(model):
        with autograd_hacks.accumulate(model):
            for part in x.split(1):
                squares(model(part)).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert_rows(model, expected)


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


def test_started_twice_stopped_without_a_start_or_without_hooks(model: nn.Module) -> None:
    rows = autograd_hacks.accumulate(model)
    with pytest.raises(RuntimeError, match=r"not accumulating.*start\(\)"):
        rows.stop()
    rows.start()
    step(model, *batch())
    for other in (rows, autograd_hacks.accumulate(model)):
        with pytest.raises(RuntimeError, match=r"accumulating already.*stop\(\)"):
            other.start()
        with pytest.raises(RuntimeError, match="accumulating already"), other:
            pass
    rows.stop()
    assert_right(model, *batch())
    with pytest.raises(RuntimeError, match="not accumulating"):
        rows.stop()
    for act in ("start", "stop"):
        with pytest.raises(NothingRecorded, match="has no hooks"):
            getattr(autograd_hacks.accumulate(mlp()), act)()


def test_stopped_inside_its_block_and_left_by_an_error(model: nn.Module) -> None:
    with autograd_hacks.accumulate(model) as rows:
        step(model, *batch())
        rows.stop()
        assert_right(model, *batch())
    with pytest.raises(KeyError), autograd_hacks.accumulate(model):
        raise KeyError(step(model, *batch()))
    with raises(model, NothingRecorded, "accumulate(model): KeyError left the context"):
        autograd_hacks.compute_grad1(model)
    with autograd_hacks.accumulate(model):  # the one that failed is over
        step(model, *batch())
    model.zero_grad()
    assert_right(model, *batch())
