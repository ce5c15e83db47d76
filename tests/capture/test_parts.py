"""Parts of a hooked model that are called by themselves."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import squares
from rarely import crossed
from steps import check
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import SamplesMixed, UnseenGradient


class Tokens(nn.Module):
    """A class token in front."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.layer = nn.Parameter(torch.randn(1, 1, 4)), nn.Linear(3, 4)
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), self.layer(x)], 1)
        return self.attention(h)[:, 0]


class Scaled(nn.Module):
    """A bare scale, its own, and one in a part of it."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.scale, self.layer, self.inner, self.mixes = (
            nn.Parameter(torch.randn(4)),
            nn.Linear(3, 4),
            Bare(lambda m, x: (m.layer(x) + m.shift).tanh(), shift=torch.randn(4), layer=nn.Linear(4, 4)),
            mixes,
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(self.layer(x) * self.scale).mean(1)
        return h - h.mean(0) if self.mixes else h


def whole_net(encoder: nn.Module) -> nn.Module:
    return Bare(lambda m, x: m.head(m.encoder(x)), encoder=encoder, head=nn.Linear(4, 2))


@crossed(probe=[False, True], param_grad=[False, True], encoder=[Tokens, Scaled])
def test_a_part_with_a_bare_parameter(encoder: type[nn.Module], param_grad: bool, probe: bool) -> None:
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


def test_a_part_of_a_part() -> None:
    model = whole_net(Scaled()).double()
    with autograd_hacks.add_hooks(model):
        for n in (4, 3, 1):
            check(model, torch.randn(n, 4).double(), "sum", run=lambda x: model.encoder.inner(x))


def test_a_part_after_one_that_failed() -> None:
    model, x = whole_net(Tokens()).double(), torch.randn(4, 5, 3).double()
    with autograd_hacks.add_hooks(model):
        for call in (model.encoder, model):
            with pytest.raises(RuntimeError):
                call(torch.randn(4, 5, 2).double())
            check(model, x, run=lambda x: model.encoder(x))
            check(model, x[:, 0, :3].repeat(1, 2)[:, :4], run=lambda x: model.head(x))


def test_a_part_that_mixes_samples() -> None:
    model = whole_net(Scaled(mixes=True)).double()
    with autograd_hacks.add_hooks(model):
        squares(model.encoder(torch.randn(4, 5, 3).double())).mean().backward()
        with pytest.raises(SamplesMixed, match=r"reaches other samples"):
            autograd_hacks.compute_grad1(model)


def test_a_part_with_time_first() -> None:
    model = whole_net(Bare(lambda m, x: m.layer(x)[0] * m.scale, scale=torch.randn(4), layer=nn.GRU(3, 4))).double()
    with autograd_hacks.add_hooks(model):
        check(model, torch.randn(4, 5, 3).double(), run=lambda x: model.encoder(x.transpose(0, 1)).transpose(0, 1))


def test_a_part_that_reads_a_weight_twice() -> None:
    model = whole_net(Bare(lambda m, x: F.linear(m.layer(x), m.layer.weight), layer=nn.Linear(3, 3))).double()
    with autograd_hacks.add_hooks(model):
        squares(model.encoder(torch.randn(4, 3).double())).mean().backward()
        with pytest.raises(UnseenGradient):
            autograd_hacks.compute_grad1(model)
