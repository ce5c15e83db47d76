"""What mixes samples is refused at every step: by gradients, and where it is asked for by values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mixing import (
    MIXING,
    SIZES,
    WITHOUT_GRADIENT,
    AtEnd,
    How,
    InFront,
    centred,
    check_refused,
    check_refused_or_right,
    check_right,
    data,
    mixes,
    pairs,
    zeroed,
)
from nets import Between
from oracle import squares
from rarely import rarely
from steps import check
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import PerSampleGradientError, SamplesMixed


@pytest.mark.parametrize("place", [Between, *rarely(AtEnd, InFront)])
@pytest.mark.parametrize("what", MIXING)
def test_samples_that_mix_are_refused_at_every_step(what: str, place: type[Between]) -> None:
    for samples in SIZES:
        model = place(MIXING[what]).double()
        assert mixes(model, data(samples)), samples
        if place is InFront or what in WITHOUT_GRADIENT:
            check_right(model, (data(samples),), (data(samples),))
        else:
            check_refused(model, (data(samples),), (data(samples),))
        check_refused(model, (data(samples),), (data(samples),), independent=True)


@pytest.mark.parametrize(("how", "checks"), [(torch.tanh, check_right), (lambda h: h - h.mean(0), check_refused)])
@pytest.mark.parametrize("kind", ["a layer", "lazy layers", "bags"])
def test_every_kind_of_model_is_read_from_its_first_step_on(kind: str, how: How, checks: Callable[..., None]) -> None:
    lazy, given = nn.LazyLinear(2, dtype=torch.float64), (data(4),)
    first: nn.Module = {"a layer": nn.Linear(3, 2).double(), "bags": nn.EmbeddingBag(9, 3).double()}.get(kind, lazy)
    first.register_forward_hook(lambda *called: how(called[-1]))
    model = Bare(lambda own, *args: own.last(own.first(*args)), first=first, last=nn.LazyLinear(3, dtype=torch.float64))
    if kind == "bags":
        given = torch.arange(9), torch.tensor([0, 2, 3, 7])
    checks(first if kind == "a layer" else model, given, given)
    if kind == "a layer" and checks is check_right:  # and now they mix without gradient
        first.register_forward_hook(lambda *called: called[-1] - called[-1].mean(0).detach())
        check_refused(first, given, given, independent=True)
    if kind == "bags":  # only the outputs show how many there are
        inside = Bare(lambda own, *args: own.model(*args).square().mean(), model=model)
        check_refused(inside, given, given, match="how many")


@pytest.mark.parametrize("samples", SIZES)
def test_mixup_by_a_random_permutation(samples: int) -> None:
    def mixup(x: Tensor) -> Tensor:
        return 0.7 * x + 0.3 * x[torch.randperm(samples).roll(1)]

    torch.manual_seed(1)
    check_refused(InFront(mixup).double(), *[(data(samples),)] * 3, independent=True)
    torch.manual_seed(1)
    check_refused_or_right(Between(mixup).double(), *[(data(samples),)] * 9)


# Several arguments, several outputs


def towers(items: nn.Module) -> nn.Module:
    return Bare(lambda m, x, items: m.first(x) @ m.items(items).T, first=nn.Linear(3, 4), items=items)


@pytest.mark.parametrize("samples", SIZES)
def test_two_towers(samples: int) -> None:
    """A second argument of integers, or a square matrix, has samples too."""
    ids, square = torch.randint(50, (samples,)), data(samples, samples)
    for independent in (False, True):
        check_refused(towers(nn.Embedding(50, 4)).double(), *[(data(samples), ids)] * 2, independent=independent)
        check_refused(towers(nn.Linear(samples, 4)).double(), *[(data(samples), square)] * 2, independent=independent)


@pytest.mark.parametrize("samples", SIZES)
def test_labels_that_are_taken_back(samples: int) -> None:
    for place in (Between, AtEnd, InFront):
        labels = torch.arange(samples) % 2
        check_refused(place(centred).double(), *[(data(samples), labels)] * 2, independent=place is InFront)
        check_right(place(lambda h, y: h * (1 + y[:, None])).double(), *[(data(samples), torch.arange(samples) % 3)] * 2)


class Aux(Between):
    """Keeps what a loss is to read later."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        self.aux = self.how(h)
        return self.last(h)


@pytest.mark.parametrize("how", [pairs, MIXING["detached"], lambda h: h - h.mean(0), lambda h: h.mean(0).square().sum()])
def test_a_loss_that_reads_what_the_model_keeps(how: How) -> None:
    for samples in SIZES:
        model = Aux(how).double()
        reads = lambda out, model=model: squares(out) + (squares(model.aux) if model.aux.ndim else model.aux)  # noqa: E731
        check_refused(model, *[(data(samples),)] * 2, losses=reads, independent=how is MIXING["detached"])
        check_right(model, *[(data(samples),)] * 2)


# In any order along the batch, by any way, behind a gate


HOW: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda h: h.sub_(h.mean(0)),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
    "where gradients are on": lambda h: h - h.mean(0) if torch.is_grad_enabled() else h,
    "where it has a gradient": lambda h: h - h.mean(0) if h.requires_grad else h,
}


@pytest.mark.parametrize("param_grad", [True, False])
@pytest.mark.parametrize("how", HOW)
def test_what_is_said_of_samples_that_mix(how: str, param_grad: bool) -> None:
    for first in (nn.Linear(3, 4), torch.randn(3, 4)):  # a layer, or a parameter that no layer has
        model = Bare(
            lambda m, x: m.last(HOW[how](m.first(x) if callable(m.first) else x @ m.first)),
            first=first,
            last=nn.Linear(4, 2),
        )
        says = r"samples mix: .* reaches other samples at .*, before first.* batch_dim"
        check_refused(model, *[(torch.randn(6, 3),)] * 3, error=SamplesMixed, match=says, param_grad=param_grad)


def test_samples_that_mix_at_the_very_end() -> None:
    """Also where every forward writes its outputs to the same place."""
    memory, words = torch.empty(6, 4), {"error": SamplesMixed, "match": "output number 0"}
    model = Bare(lambda m, x: (z := m.tower(x)) @ z.T, tower=nn.Linear(3, 4))
    losses = lambda z: F.cross_entropy(z, torch.arange(6), reduction="none")  # noqa: E731
    check_refused(model, (torch.randn(6, 3),), losses=losses, **words)
    model = Bare(lambda m, x: memory.detach_().copy_((z := m.tower(x)) - z.mean(0)), tower=nn.Linear(3, 4))
    check_refused(model, (torch.randn(6, 3),), **words)


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_mixing_in_a_part_that_is_called_by_itself(batch_dim: int) -> None:
    """The samples of a part are on axis 0 of its input, whatever the axis of the model's."""
    # Only the gradient depends on other samples.
    centred = Bare(lambda m, x: x * m.scale + (m.scale - m.scale.detach()) * x.detach().mean(0), scale=torch.ones(3))
    model = nn.Sequential(centred, nn.Linear(3, 2))
    with autograd_hacks.add_hooks(model, batch_dim=batch_dim, independent=True):
        squares(model[0](torch.randn(4, 5, 3))).mean().backward()
        with pytest.raises(SamplesMixed, match=r"by the laws of operations .* at add "):
            autograd_hacks.compute_grad1(model)


def centred_body(before: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Layers that meet no argument itself don't show on which axis the samples are."""
    body = nn.Sequential(nn.Linear(6, 6), Bare(lambda m, h: h.tanh() - h.tanh().mean(0)), nn.Linear(6, 6))
    return Bare(lambda m, x: m.body(before(x)), body=body.to(dtype))


SQUARE: dict[str, Callable[[], nn.Module]] = {
    "centred": lambda: centred_body(lambda x: x),
    "centred, computed from": lambda: centred_body(lambda x: x * 2),
    "centred, cast": lambda: centred_body(Tensor.bfloat16, torch.bfloat16),
    "softmax": lambda: Bare(lambda m, x: (x * m.w).softmax(0), w=torch.randn(6)),
    "a part of the columns": lambda: Bare(lambda m, x: (x[:, :6] * m.w).softmax(0), w=torch.randn(6)),
    "turned": lambda: Bare(lambda m, x: (x.t()[:6] * m.w).softmax(1), w=torch.randn(6, 1)),
    "batch norm": lambda: nn.Sequential(nn.PReLU(6), nn.BatchNorm1d(6, affine=False)),
    "linear": lambda: nn.Sequential(nn.Linear(6, 6), nn.Softmax(0)),
}


@pytest.mark.parametrize("what", SQUARE)
def test_as_many_features_as_samples_make_no_samples_of_columns(what: str) -> None:
    """Where nothing else shows which axis has the samples, it is the batch's."""
    model = SQUARE[what]()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            squares(model(torch.randn(6, 6))).sum().backward()
            with pytest.raises(SamplesMixed):
                autograd_hacks.compute_grad1(model, "sum")


# What doesn't mix samples is read and right; and what mixes in its first step alone


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
            lambda m, x: masked(m, x + m.shift, x[:, 2] > 0.5), shift=torch.ones(3), one=nn.Linear(3, 3), two=nn.Linear(3, 3)
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
