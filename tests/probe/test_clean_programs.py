"""What doesn't mix samples is read and right, in every precision; and what mixes is refused there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from mixing import SIZES, check_right, data, zeroed
from oracle import squares
from steps import check
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import PerSampleGradientError

# Clean programs, in every dtype


def clean(forward: Callable[..., Any], **layers: nn.Module) -> nn.Module:
    """A forward of a few layers, given from outside."""
    return Bare(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2), **layers)


def by_codes(model: nn.Module, x: Tensor) -> Tensor:
    return model.b(model.emb(x[:, 0].long()) * x[:, 1:2])


def packed(model: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    inside = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=True)
    return model.b(model.rnn(inside)[1][-1])


def experts(model: nn.Module, x: Tensor) -> Tensor:
    h = model.a(x).tanh()
    chosen, out = (h[:, 0] > 0).long(), h.new_zeros(len(x), 2)
    for n, expert in enumerate((model.b, model.c)):
        rows = (chosen == n).nonzero()[:, 0]
        out = out.index_add(0, rows, expert(h[rows]))
    return out


def masked(model: nn.Module, h: Tensor, there: Tensor) -> Tensor:
    return h.new_zeros(len(h), 3).index_put((there,), model.one(h[there])).index_put((~there,), model.two(h[~there]))


def routed_losses(model: nn.Module, x: Tensor) -> Tensor:
    return experts(model, x.flatten(0, 1)).square().sum(1).unflatten(0, x.shape[:2]).mean(1)


def likelihood(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    shape = model.b(model.a(x)).exp()
    return -torch.distributions.Beta(shape[:, 0], shape[:, 1], validate_args=True).log_prob(y)


def clamped(model: nn.Module, x: Tensor) -> Tensor:
    h = model.a(x)
    if h.requires_grad:
        h.register_hook(lambda g: -2 * g)
    return model.b(h.tanh())


def keeps(model: nn.Module, x: Tensor) -> Tensor:
    """Attributes that are used inside, in places that no layout tells."""
    model.features = model.a(x).tanh().permute(1, 2, 0).reshape(-1, 2 * len(x))
    model.logged = model.features.mean()
    return model.b(model.features.reshape(x.shape[1], 4, len(x)).permute(2, 0, 1))


CLEAN: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "codes as floats": (
        lambda: clean(by_codes, emb=nn.Embedding(5, 4)),
        lambda n: (torch.cat([torch.randint(5, (n, 1)).double(), data(n, 2)], 1),),
    ),
    "a validated distribution": (lambda: clean(likelihood), lambda n: (data(n), 0.1 + 0.8 * torch.rand(n).double())),
    "sorted lengths": (
        lambda: clean(packed, rnn=nn.GRU(3, 4, batch_first=True)),
        lambda n: (data(n, 6, 3), torch.randint(1, 7, (n,)).sort(descending=True).values),
    ),
    "key padding": (
        lambda: clean(
            lambda m, x, k: m.b(m.att(m.a(x), m.a(x), m.a(x), key_padding_mask=k)[0]),
            att=nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        lambda n: (data(n, n, 3), torch.arange(n)[None] > torch.randint(1, n + 1, (n, 1))),
    ),
    "hooks on gradients": (lambda: clean(clamped), lambda n: (data(n),)),
    "experts": (lambda: clean(experts, c=nn.Linear(4, 2)), lambda n: (data(n),)),
    "rows that a mask routes, as many as there are features": (
        lambda: Bare(
            lambda m, x: masked(m, x + m.shift, x[:, 2] > 0.5),
            shift=torch.ones(3),
            one=nn.Linear(3, 3),
            two=nn.Linear(3, 3),
        ),
        lambda n: (torch.cat([data(n, 2), torch.arange(n)[:, None] % 3 == 1], 1),),
    ),
    "a token that nobody gets": (
        lambda: Bare(
            lambda m, x: m.b(m.a(x).tanh().index_put((x[:, 0] > 9,), m.token * 1)),
            a=nn.Linear(3, 4),
            b=nn.Linear(4, 2),
            token=torch.ones(4),
        ),
        lambda n: (data(n),),
    ),
    "losses of routed tokens": (lambda: clean(routed_losses, c=nn.Linear(4, 2)), lambda n: (data(n, 5, 3),)),
    "attributes": (lambda: clean(keeps), lambda n: (data(n, 6, 3),)),
    "labels that count up": (
        lambda: clean(lambda m, x, y: m.b(m.a(x) + m.emb(y)), emb=nn.Embedding(64, 4)),
        lambda n: (data(n), torch.arange(n)),
    ),
    # Arguments that are views of one tensor, overlap, or lie otherwise in memory.
    "inputs and targets of one buffer": (
        lambda: clean(
            lambda m, i, t: m.b(m.a(m.emb(i)).tanh().sum(1) * m.emb(t).sum((1, 2))[:, None]), emb=nn.Embedding(9, 3)
        ),
        lambda n: (lambda buffer: (buffer[:-1].view(n, 6), buffer[1:].view(n, 6)))(torch.randint(9, (6 * n + 1,))),
    ),
    "columns": (
        lambda: clean(
            lambda m, u, i: m.b(m.users(u).tanh() * m.items(i)), users=nn.Embedding(9, 4), items=nn.Embedding(9, 4)
        ),
        lambda n: torch.randint(9, (n, 2)).unbind(1),
    ),
    "a state and the next one": (
        lambda: clean(lambda m, x, y: m.b(m.a(x).tanh() - m.a(y))),
        lambda n: (lambda states: (states[:-1], states[1:]))(data(n + 1)),
    ),
    "windows": (lambda: clean(lambda m, x: m.b(m.a(x).tanh())), lambda n: (data(n + 2, 1)[:, 0].unfold(0, 3, 1),)),
    "features first": (lambda: clean(lambda m, x: m.b(m.a(x).tanh())), lambda n: (data(3, 2 * n + 1)[:, :n].t(),)),
    "square rows": (lambda: nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 2)), lambda n: (data(n, 17),)),
    "a zero head": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), zeroed(nn.Linear(4, 2))), lambda n: (data(n),)),
    "dead units": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Threshold(99.0, 0.0), nn.Linear(4, 2)), lambda n: (data(n),)),
}


@pytest.mark.parametrize("what", CLEAN)
def test_clean_programs_are_read(what: str) -> None:
    build, arguments = CLEAN[what]
    model = build().double()
    model(*arguments(3))
    check_right(model, *map(arguments, (*SIZES, 2, 1, 5)), losses=lambda out: out if out.ndim == 1 else squares(out))


def act_norm(m: nn.Module, x: Tensor) -> Tensor:
    """Takes its shift and scale from its first batch, which mixes the samples of that."""
    if not m.is_set:
        with torch.no_grad():
            m.shift.copy_(-x.mean(0))
            m.scale.copy_(1 / x.std(0))
            m.is_set.fill_(True)
    return (x + m.shift) * m.scale


def test_what_mixes_in_its_first_step_alone() -> None:
    for samples in SIZES:
        norm = Bare(act_norm, shift=torch.zeros(4), scale=torch.ones(4))
        norm.register_buffer("is_set", torch.tensor(False))
        model = nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 2)).double()
        with autograd_hacks.add_hooks(model, independent=True):
            with pytest.raises(PerSampleGradientError):
                check(model, data(samples))
            for _ in range(4):
                check(model, data(samples))
