"""A model with BatchNorm becomes one whose samples don't mix, with the same parameters."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from steps import check
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.privacy import without_batch_norm


class Activated(nn.BatchNorm2d):
    """As timm's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def net(twice: nn.Module) -> nn.Sequential:
    images = nn.Conv2d(1, 6, 3), twice, nn.ReLU(), nn.Conv2d(6, 6, 3), twice, nn.BatchNorm2d(6, affine=False)
    return nn.Sequential(*images, nn.Flatten(), nn.Linear(24, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


def test_a_copy_has_the_parameters_and_rows() -> None:
    model = net(nn.BatchNorm2d(6, eps=0.1).eval())
    for p in model.parameters():
        nn.init.normal_(p)
    model[8].weight.requires_grad_(False)
    model[8].register_forward_hook(lambda *given: 2 * given[-1])
    made = without_batch_norm(model)
    expected = net(nn.GroupNorm(2, 6, eps=0.1).eval())
    x = torch.randn(5, 1, 6, 6).double()
    expected[5], expected[8] = nn.GroupNorm(2, 6, affine=False), nn.GroupNorm(1, 4)
    assert repr(made) == repr(expected.double())
    assert [m.training for m in made.modules()] == [m.training for m in model.modules()]
    expected.load_state_dict(made.state_dict())
    assert_close(made[:9](x), 2 * expected[:9](x))
    own, given = dict(made.named_parameters()), dict(model.named_parameters())
    assert_close(own, given)
    assert all(p.requires_grad == given[name].requires_grad and p is not given[name] for name, p in own.items())
    assert made[1] is made[4]
    assert isinstance(model[1], nn.BatchNorm2d)
    with autograd_hacks.add_hooks(made, independent=True):
        check(made, x)
    assert isinstance(without_batch_norm(model[1]), nn.GroupNorm)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize(
    "make",
    [lambda: Activated(3), nn.LazyBatchNorm2d, lambda: torch.jit.script(nn.BatchNorm2d(3)), lambda: nn.BatchNorm1d(1)],
)
def test_what_can_not_be_replaced_is_refused_by_its_path(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(TypeError, match=r"without_batch_norm: layer '0\.1'"):
        without_batch_norm(nn.Sequential(nn.Sequential(nn.ReLU(), make())))
