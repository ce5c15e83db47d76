"""Private training from the batches to epsilon: against a loop by hand, whole, cut and resumed."""

import copy
from collections import Counter
from collections.abc import Callable
from math import inf, isfinite
from typing import Any

import pytest
import torch
import torch.nn as nn
from private_steps import (
    BOUND,
    EXPECTED,
    LR,
    NOISE,
    SEED,
    SIZE,
    STEPS,
    Loss,
    Reader,
    assert_by_hand,
    by_hand,
    data,
    dataset,
    losses,
    losses_of_text,
    net,
    secret,
    text,
    train,
    training,
    uniforms,
)  # fmt: skip
from rarely import crossed
from refused import check_each
from steps import check_batches
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import UnseenGradient
from autograd_hacks.private import QuantileClip, without_batch_norm
from autograd_hacks.private.accounting import noise_for, spent

pytestmark = pytest.mark.usefixtures("double")


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in three parts": {"parts": 3},
    "of two samples at most": {"micro_batch_size": 2},
    "all of one shape": {"micro_batch_size": 4, "padded": True},
    "fetched by workers": {"num_workers": 2, "parts": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_a_loop_by_hand(way: str) -> None:
    private, model = training(), net()
    done = train(private, model, epochs=2, **WAYS[way])
    assert_by_hand(model, 2 * STEPS)
    assert private.steps == len(done) == 2 * STEPS
    assert private.history == [(NOISE, EXPECTED / SIZE, 2 * STEPS)]
    sizes = [sum(u < EXPECTED / SIZE for u in uniforms(secret(SEED, "batch", t), SIZE)) for t in range(2 * STEPS)]
    assert [len(step.norms) for step in done] == sizes  # padding is not among them
    assert not hasattr(model[0].weight, "grad1")


def test_every_sample_is_drawn_with_its_probability() -> None:
    private = training()
    batches = private.loader(dataset()).batches
    drawn = [batches.drawn(t) for t in range(4000)]
    count = Counter(n for batch in drawn for n in batch)
    expected, deviation = 4000 * EXPECTED / SIZE, (4000 * 0.2 * 0.8) ** 0.5
    assert all(abs(count[n] - expected) < 5 * deviation for n in range(SIZE))
    sizes = torch.tensor([float(len(batch)) for batch in drawn])
    assert sizes.var().item() == pytest.approx(SIZE * 0.2 * 0.8, rel=0.1)  # each by itself


@crossed(options=[{}, {"micro_batch_size": 2}], clip=["flat", "a quantile"])
def test_it_goes_on_from_a_checkpoint_bit_by_bit(options: dict[str, Any], clip: str) -> None:
    whole, expected = training(clip=clip), net()
    train(whole, expected, epochs=2, **options)
    before, model = training(clip=clip), net()
    train(before, model, epochs=2, upto=7, **options)
    after = training(seed=SEED + 99, clip=clip)  # the seed comes from the checkpoint
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert len(train(after, model, **options)) == 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters()))
    assert after.epsilon() == whole.epsilon()
    assert after.history == whole.history
    if isinstance(whole.clip, QuantileClip) and isinstance(after.clip, QuantileClip):
        assert after.clip.bound == whole.clip.bound != BOUND


@pytest.mark.parametrize(
    "options",
    [{"max_norm": {"0.*": 0.3, "2.*": 0.2}}, {"clip": "per_parameter"}, {"clip": "automatic"}, {"clip": "a quantile"}],
)
def test_other_ways_to_clip_are_the_same_of_micro_batches(options: dict[str, Any]) -> None:
    states, steps = [], []
    for parts in (1, 3):
        model = net()
        steps.append(train(training(**options), model, epochs=2, parts=parts))
        states.append(model.state_dict())
    assert_close(states[0], states[1])
    for whole, cut in zip(*steps):
        assert whole.bound == pytest.approx(cut.bound)
        assert_close(whole.norms.sort().values, cut.norms.sort().values)
        if isinstance(whole.weights, dict):
            assert whole.weights.keys() == cut.weights.keys()
            for key, w in whole.weights.items():
                assert_close(w.sort().values, cut.weights[key].sort().values)


def test_secure_noise_is_another_each_time() -> None:
    models = [net(), net()]
    for model in models:
        train(training(secure=True), model)
    assert not torch.equal(models[0][0].weight, models[1][0].weight)  # type: ignore[arg-type, index]


def test_empty_batches_are_steps_too() -> None:
    private, model, noisy = training(expected_batch_size=0.2), net(), list[bool]()
    steps = train(
        private, model, between=lambda: noisy.append(all(p.grad.any() for p in model.parameters())), steps=8, parts=2
    )
    assert private.steps == len(noisy) == 8
    assert any(not len(step.norms) for step in steps)
    for step, has_noise in zip(steps, noisy):
        assert len(step.norms) or (has_noise and step.clipped_fraction == 0)


def test_a_step_that_was_left_amid_is_not_added_to_the_next() -> None:
    private, model, expected = training(), net(), net()
    with private.attach(model):
        for x, y in private.loader(dataset(), parts=3):
            private.backward(losses(model, x, y))
            assert private.step() is None
            with pytest.raises(RuntimeError, match="between the micro-batches of a step"):
                private.state_dict()
            break  # as after an interrupt
    train(private, model)
    train(training(), expected)
    assert_close(model.state_dict(), expected.state_dict())


def accountants() -> dict[str, Callable[[], Any]]:
    dp_accounting = pytest.importorskip("dp_accounting")
    opacus = pytest.importorskip("opacus.accountants")
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    assert dp_accounting.GaussianDpEvent
    return {"rdp": opacus.RDPAccountant, "prv": opacus.PRVAccountant, "pld": PLDAccountant, "google rdp": RdpAccountant}


@pytest.mark.filterwarnings("ignore")
def test_epsilon_by_all_accountants() -> None:
    history = [(1.1, 0.01, 400), (1.3, 0.01, 200)]
    by = {name: spent(history, 1e-5, made) for name, made in accountants().items()}
    assert spent(history, 1e-5) == by["rdp"]
    assert by["rdp"] == pytest.approx(by["google rdp"], rel=0.05)
    assert by["pld"] == pytest.approx(by["prv"], rel=0.05)
    assert by["pld"] < by["rdp"]
    assert spent([], 1e-5) == 0
    assert spent([(0.0, 0.01, 1)], 1e-5) == inf
    with pytest.raises(TypeError, match=r"accountant\(\) returned int"):
        spent(history, 1e-5, int)


@pytest.mark.filterwarnings("ignore")
def test_noise_for_an_epsilon() -> None:
    private = training(noise_multiplier=None, epsilon=3.0, steps=2 * STEPS)
    train(private, net(), epochs=2)
    ((multiplier, rate, steps),) = private.history
    assert private.epsilon() <= 3.0 < spent([(0.99 * multiplier, rate, steps)], 1e-3)
    assert isfinite(private.epsilon(1e-6))
    with pytest.raises(ValueError, match="with any noise"):
        noise_for(1e-9, 1e-5, 1.0, 10**9)


def test_what_would_break_the_guarantee_is_refused() -> None:
    private, model, data_of_more = training(), net(), TensorDataset(*(part[:29] for part in data()))
    stranger = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(7))], lr=LR)
    check_each(
        (RuntimeError, "no model is attached", private.step),
        (ValueError, r"steps 1 parameters .* of shapes \[\(7,\)\]", lambda: private.attach(model, stranger)),
    )
    with private.attach(model):
        loader, (batch, *_) = private.loader(dataset()), DataLoader(dataset(), batch_size=6, shuffle=True)
        private.backward(losses(model, *batch))
        check_each((RuntimeError, "computed for Poisson-sampled batches", private.step))
        batches = iter(loader)
        private.backward(losses(model, *next(batches)))
        private.step()
        next(batches)
        private.backward(losses(model, *next(batches)))  # a batch was left out
        check_each(((RuntimeError, ValueError), "booleans|expected one call for each, in order", private.step))
        losses(model, *next(iter(loader))).mean().backward()
        check_each((ValueError, "doesn't know each sample's loss", private.step))
    check_each((ValueError, "began with 30", lambda: private.loader(data_of_more)))


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


def test_settings_that_would_break_the_guarantee_are_refused() -> None:
    begun, other = training(), training()
    begun.loader(dataset())
    other.loader(TensorDataset(*(part[:20] for part in data())))
    state, quantile = begun.state_dict(), training(clip=QuantileClip())
    check_each(
        *[(ValueError, words, lambda wrong=wrong: training(**wrong).loader(dataset()))
          for wrong, words in [
             ({"expected_batch_size": None}, "expected_batch_size=None"), ({"expected_batch_size": 31}, "and at most "),
             ({"delta": 0.1}, "less than 1 / 30")]],
        (TypeError, "which can't be sampled at random", lambda: training().loader(Stream())),
        (TypeError, "batch_size, shuffle", lambda: training().loader(dataset(), batch_size=3, shuffle=True)),
        (ValueError, "without micro_batch_size", lambda: training().loader(dataset(), padded=True)),
        (ValueError, "expected how many steps", lambda: train(training(noise_multiplier=None, epsilon=1.0), net())),
        *[(ValueError, words, lambda wrong=wrong: training(**wrong))
          for wrong, words in [
             ({"epsilon": 1.0}, "expected exactly one"), ({"noise_multiplier": -1}, "noise_multiplier=-1"),
             ({"clip": QuantileClip(), "max_norm": {"*": 1.0}}, "expected a single bound to start from"),
             ({"delta": 1}, "delta=1")]],
        (ValueError, "the training began with 20", lambda: other.load_state_dict(state)),
        *[(ValueError, "seed is ", lambda seed=seed: training().load_state_dict(training().state_dict() | {"seed": seed}))
          for seed in (None, "0", 1.5)],
        (ValueError, r"of another kind of clip than .*QuantileClip", lambda: quantile.load_state_dict(state)),
        (ValueError, r"of another kind of clip than 'flat'", lambda: training().load_state_dict(quantile.state_dict())),
    )  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True])
def test_batch_statistics_are_refused(frozen: bool) -> None:
    """In training mode samples mix, also where the layer's own parameters don't train."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    if frozen:
        model[1].requires_grad_(False)
    with pytest.raises(autograd_hacks.errors.PerSampleGradientError, match=r"BatchNorm|samples"):
        train(training(), model)


# Models whose forwards are not one sequence of layers


Sets = tuple[Tensor, Tensor]


def adapted() -> nn.Module:
    """A frozen layer with an addition of low rank, as LoRA has it, between layers that are trained."""
    model = Bare(
        lambda m, x: m.net[1:](m.net[0](x) + 2.0 * m.up(m.down(x))),
        net=net(), down=nn.Linear(4, 2, bias=False), up=nn.Linear(2, 8, bias=False),
    )  # fmt: skip
    model.net[0].requires_grad_(False)
    return model


def checkpointed(use_reentrant: bool) -> nn.Module:
    return Bare(lambda m, x: checkpoint(m.net, m.first(x), use_reentrant=use_reentrant), first=nn.Linear(4, 4), net=net())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Sets], Loss]] = {
    "an adapter": (adapted, data, losses),
    "a checkpoint": (lambda: checkpointed(False), data, losses),
    "texts of other lengths in each step": (Reader, text, losses_of_text),
}


@crossed(options=[{}, {"micro_batch_size": 2}], name=MODELS)
def test_steps_equal_those_by_hand(name: str, options: dict[str, int]) -> None:
    make, given, loss = MODELS[name]
    model = make()
    expected = by_hand(copy.deepcopy(model), *given(), STEPS, loss)
    train(private := training(), model, given=given(), loss=loss, **options)
    assert private.steps == STEPS
    assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)


def test_a_reentrant_checkpoint_is_refused_in_the_first_step() -> None:
    """What it runs again, in the backward pass, is on no tape."""
    private, model = training(), checkpointed(True)
    with private.attach(model):
        x, y = next(iter(private.loader(dataset())))
        private.backward(losses(model, x, y))
        with pytest.raises(UnseenGradient, match="use_reentrant=False"):
            private.step()
    assert private.steps == 0


def normalised(twice: nn.Module, second: nn.Module, flat: nn.Module) -> nn.Sequential:
    images = nn.Conv2d(1, 6, 3), twice, nn.ReLU(), nn.Conv2d(6, 6, 3), twice, second
    return nn.Sequential(*images, nn.Flatten(), nn.Linear(24, 4), flat, nn.Tanh(), nn.Linear(4, 2)).double()


def test_group_norms_have_the_parameters_of_the_batch_norms_that_they_replace() -> None:
    model = normalised(nn.BatchNorm2d(6, eps=0.1).eval(), nn.BatchNorm2d(6, affine=False), nn.BatchNorm1d(4))
    expected = normalised(nn.GroupNorm(2, 6, eps=0.1).eval(), nn.GroupNorm(2, 6, affine=False), nn.GroupNorm(1, 4))
    nn.init.normal_(model[8].weight.requires_grad_(False))
    model[8].register_forward_hook(lambda *given: 2 * given[-1])
    made, x = without_batch_norm(model), torch.randn(5, 1, 6, 6).double()
    assert repr(made) == repr(expected)
    assert [m.training for m in made.modules()] == [m.training for m in model.modules()]
    assert [p.requires_grad for p in made.parameters()] == [p.requires_grad for p in model.parameters()]
    expected.load_state_dict(model.state_dict(), strict=False)
    assert_close(made[:9](x), 2 * expected[:9](x))
    assert made[1] is made[4]
    assert made[1].weight is not model[1].weight
    check_batches(made, x, independent=True)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize(
    "make",
    [
        lambda: type("Activated", (nn.BatchNorm2d,), {})(3),
        nn.LazyBatchNorm2d,
        lambda: torch.jit.script(nn.BatchNorm2d(3)),
        lambda: nn.BatchNorm1d(1),
    ],
)
def test_what_no_group_norm_replaces_is_refused_by_its_path(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(TypeError, match=r"without_batch_norm: layer '0\.1'"):
        without_batch_norm(nn.Sequential(nn.Sequential(nn.ReLU(), make())))
