"""Private steps of models whose forwards are not one sequence of layers equal the steps by hand."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from private_steps import (
    LR,
    STEPS,
    Loss,
    Reader,
    by_hand,
    data,
    dataset,
    losses,
    losses_of_text,
    net,
    text,
    training,
)
from rarely import crossed
from steps import check_batches
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from twin import Bare

from autograd_hacks.errors import UnseenGradient
from autograd_hacks.private import without_batch_norm

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
    private, optimizer = training(), torch.optim.SGD(model.parameters(), lr=LR)
    with private.attach(model, optimizer):
        for x, y in private.loader(TensorDataset(*given()), **options):
            private.backward(loss(model, x, y))
            if private.step() is not None:
                optimizer.step()
                optimizer.zero_grad()
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
