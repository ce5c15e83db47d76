"""Parts of a hooked model that are called by themselves, and losses that read what a model keeps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import squares
from rarely import crossed
from steps import check, check_batches
from torch import Tensor
from twin import Bare, check_right

import autograd_hacks
from autograd_hacks.errors import UnseenGradient


def tokens() -> nn.Module:
    """A class token in front."""
    return Bare(
        lambda m, x: m.attention(torch.cat([m.token.expand(len(x), -1, -1), m.layer(x)], 1))[:, 0],
        token=torch.randn(1, 1, 4), layer=nn.Linear(3, 4),
        attention=nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
    )  # fmt: skip


def scaled(mixes: bool = False) -> nn.Module:
    """A bare scale, its own, and one in a part of it."""
    inner = Bare(lambda m, x: (m.layer(x) + m.shift).tanh(), shift=torch.randn(4), layer=nn.Linear(4, 4))
    return Bare(
        lambda m, x: (h := m.inner(m.layer(x) * m.scale).mean(1)) - (h.mean(0) if mixes else 0),
        scale=torch.randn(4), layer=nn.Linear(3, 4), inner=inner,
    )  # fmt: skip


def whole_net(encoder: nn.Module) -> nn.Module:
    return Bare(lambda m, x: m.head(m.encoder(x)), encoder=encoder, head=nn.Linear(4, 2))


@crossed(probe=[False, True], param_grad=[False, True], encoder=[tokens, scaled])
def test_a_part_with_a_bare_parameter(encoder: Callable[[], nn.Module], param_grad: bool, probe: bool) -> None:
    """Alone, with another part, beside the whole, and again after it."""
    model = whole_net(encoder()).double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad, probe=probe):
        for n in (4, 3):
            x = torch.randn(n, 5, 3).double()
            check(model, x, run=lambda x: model.encoder(x))
            check(model, x, run=lambda x: model.head(model.encoder(x)))
            check(model, x)
            check(model, x, run=lambda x: model.head(model.encoder(x)) * model(x))
            check(model, x, run=lambda x: model.encoder(x) + model.encoder(2 * x))


def test_a_part_with_time_first() -> None:
    model = whole_net(Bare(lambda m, x: m.layer(x)[0] * m.scale, scale=torch.randn(4), layer=nn.GRU(3, 4))).double()
    check_batches(model, torch.randn(4, 5, 3).double(), run=lambda x: model.encoder(x.transpose(0, 1)).transpose(0, 1))


def test_a_part_that_reads_a_weight_twice() -> None:
    model = whole_net(Bare(lambda m, x: F.linear(m.layer(x), m.layer.weight), layer=nn.Linear(3, 3))).double()
    with autograd_hacks.add_hooks(model):
        squares(model.encoder(torch.randn(4, 3).double())).mean().backward()
        with pytest.raises(UnseenGradient):
            autograd_hacks.compute_grad1(model)


# A loss that reads what the model keeps, past its outputs


def keep(m: nn.Module, x: Tensor) -> Tensor:
    """Keeps the features, in an attribute, in a list in a dictionary, and the output."""
    h = m.first(x).tanh()
    m.aux, m.kept = h, {"features": [h * 2]}
    m.out = m.last(h)
    return m.out


def keeping(how: Callable[[nn.Module, Tensor], Tensor] = keep, **own: Any) -> nn.Module:
    return Bare(how, first=nn.Linear(3, 4), last=nn.Linear(4, 2), **own).double()


DOORS: dict[str, Callable[[Any], Tensor]] = {
    "an attribute": lambda model: model.aux,
    "of a list in a dictionary": lambda model: model.kept["features"][0],
    "a global": lambda model: SEEN[-1],
}
SEEN: list[Tensor] = []


@crossed(door=DOORS, param_grad=[True, False], begins=[0, 1, 3])
def test_a_loss_that_reads_what_the_model_keeps(door: str, param_grad: bool, begins: int) -> None:
    """The graph of the outputs shows whose the values inside are."""
    model = keeping()
    model.first.register_forward_hook(lambda layer, args, out: SEEN.append(out))

    def losses(model: nn.Module, x: Tensor, read: bool) -> Tensor:
        out = model(x)
        return squares(out) + DOORS[door](model).pow(3).sum(1) if read else squares(out)

    batches = [(torch.randn(5, 3).double(), n >= begins and n != 4) for n in range(5)]
    check_right(model, *batches, run=losses, total="each", param_grad=param_grad)
    SEEN.clear()


@pytest.mark.parametrize("param_grad", [True, False])
def test_a_loss_that_reads_a_layer_whose_output_is_not_returned(param_grad: bool) -> None:
    def aside(m: nn.Module, x: Tensor) -> Tensor:
        out = keep(m, x)
        m.scored, m.scaled = m.side(m.aux), m.aux * m.scale
        return out

    def losses(model: nn.Module, x: Tensor, what: str) -> Tensor:
        out = squares(model(x))
        return out + getattr(model, what).square().mean(1) if what else out

    model = keeping(aside, side=nn.Linear(4, 1), scale=torch.ones(4))
    batches = [(torch.randn(5, 3).double(), what) for what in ("", "scored", "scaled", "", "scaled", "scored")]
    check_right(model, *batches, run=losses, total="each", param_grad=param_grad)


def test_the_output_may_be_taken_from_where_it_is_kept() -> None:
    model = keeping()
    check_batches(model, *(torch.randn(5, 3).double() for _ in range(3)), run=lambda x: (model(x), model.out)[1])
