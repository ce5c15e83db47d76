"""Losses of several calls of one model, whose graphs lead into each other: by arguments, and by what modules keep."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import Rows, assert_rows, joined, one_backward_per_sample, squares
from rarely import crossed
from steps import check, check_batches, check_losses
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import SamplesMixed

Program = Callable[["Net", Tensor], Tensor]


HELD: dict[str, Tensor] = {}  # where calls keep a state that no module holds


class Net(nn.Module):
    """Layers, and a state that calls keep."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.unhooked = [nn.Linear(4, 8).double()]
        self.state: Tensor | None = None
        self.weight: Tensor | None = None
        self.seen: list[Tensor] = []
        self.before: Callable[[Tensor], Tensor] = lambda h: h

    def forward(self, *xs: Tensor, what: str) -> Tensor | tuple[Tensor, Tensor]:
        if what == "encode":
            return self.first(xs[0]).tanh()
        if what == "two":
            h = self.first(xs[0]).tanh()
            return self.second(h), h
        if what == "decode":
            return self.last(sum(self.before(x) * (k + 1) for k, x in enumerate(xs)).tanh())
        if what == "hold":
            HELD["state"] = h = self.first(xs[0]).tanh() + self.second(HELD.get("state", xs[0])) / 2
            return self.last(h.sin())
        if what == "weights":  # a weight that calls keep, with a state
            if self.weight is None:
                self.weight, self.state = self.first.weight / self.first.weight.norm(), None
            self.state = (xs[0] if self.state is None else xs[0] + self.state) @ self.weight
            return self.last(self.state.tanh())
        self.seen.append(self.first(xs[0]))  # a cache of keys
        keys = torch.stack(self.seen, 1)
        scores = (self.second(xs[0])[:, None] * keys).sum(2).softmax(1)
        return self.last((scores[:, :, None] * keys).sum(1))


def one_node(net: Net, x: Tensor) -> Tensor:
    """Both arguments are outputs of one node."""
    h = net(x, what="encode").repeat(1, 2)
    return squares(net(*h.chunk(2, 1), what="decode"))


def unhooked(net: Net, x: Tensor) -> Tensor:
    return squares(net(*net.unhooked[0](x).chunk(2, 1), what="decode"))


def one_of_another(net: Net, x: Tensor) -> Tensor:
    z = net(x, what="encode")
    return squares(net(z, z.tanh() * z.sum(1, keepdim=True), what="decode"))


def views(net: Net, x: Tensor) -> Tensor:
    return squares(net(x, what="encode") - net(x + 1, what="encode").cos())


def cycle(net: Net, x: Tensor) -> Tensor:
    z = net(x, what="encode").tanh()
    y = net(z, what="decode")
    return squares(y - x) + squares(net(y, what="encode") - z)


def held(net: Net, x: Tensor, *reads: int) -> Tensor:
    """The state is elsewhere, the loop replaces it, and the loss reads these calls."""
    HELD.clear()
    found = []
    for t in range(3):
        found.append(squares(net(x + t, what="hold")))
        HELD["state"] = HELD["state"] * (x > 0)
    return sum((found[t] for t in reads), x.new_zeros(len(x)))


def of_a_thread(net: Net, x: Tensor, *reads: int) -> Tensor:
    """The state comes from another thread, which numbers its nodes by itself."""
    HELD.clear()

    def first() -> Tensor:
        for _ in range(1000):
            x.detach().requires_grad_().sum()
        return squares(net(x, what="hold"))

    with ThreadPoolExecutor(1) as thread:
        found = [thread.submit(first).result(), squares(net(x + 1, what="hold"))]
    return sum((found[t] for t in reads), x.new_zeros(len(x)))


def cached(net: Net, x: Tensor) -> Tensor:
    net.seen = []
    return sum((squares(net(x + t, what="attend")) for t in range(3)), x.new_zeros(len(x)))


def kept_weight(net: Net, x: Tensor) -> Tensor:
    net.weight = None
    return squares(net(x, what="weights")) + squares(net(x + 1, what="weights"))


PROGRAMS = (
    {own.__name__: own for own in (one_node, unhooked, one_of_another, views, cycle, cached, kept_weight)}
    | {f"held {reads}": partial(lambda net, x, reads: held(net, x, *reads), reads=reads) for reads in [(0,), (1,), (0, 2)]}
    | {
        f"of a thread {reads}": partial(lambda net, x, reads: of_a_thread(net, x, *reads), reads=reads)
        for reads in [(1,), (0, 1)]
    }
)


def rows_of(net: Net, program: Program, x: Tensor) -> Rows:
    return one_backward_per_sample(net, Tensor.flatten, x, run=partial(program, net))


@pytest.mark.parametrize("param_grad", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_and_sums_while_the_pass_runs(name: str, param_grad: bool) -> None:
    program, net = PROGRAMS[name], Net().double()
    with autograd_hacks.add_hooks(net, param_grad=param_grad):
        # What modules keep is refused where it may be samples' and weights' by its sizes.
        for step, samples in enumerate((3, 3, 3, 3) if name == "kept_weight" else (3, 3, 1, 4, 4, 4)):
            x = torch.randn(samples, 4, dtype=torch.float64)
            with autograd_hacks.pause_hooks():
                rows, of_other = rows_of(net, program, x), net.unhooked[0].weight
                (other,) = torch.autograd.grad(program(net, x).mean(), of_other, allow_unused=True)
            net.unhooked[0].zero_grad()
            if step % 2:
                w = torch.rand(samples, dtype=torch.float64)
                with autograd_hacks.during_backward(net, "norms", weights=w) as found:
                    autograd_hacks.backward(program(net, x))
                assert_close(found.norms, joined(rows).norm(dim=1))
                for key, p in net.named_parameters():
                    own = rows[key]
                    assert_close(p.grad, None if own is None else torch.tensordot(w, own, 1))
            else:
                autograd_hacks.backward(program(net, x))
                autograd_hacks.compute_grad1(net)
                assert_rows(net, rows)
            assert_close(of_other.grad, other)


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "flipped": lambda h: h.flip(0),
    "sorted": lambda h: h[h.detach().norm(dim=1).argsort(descending=True)],
    "centred": lambda h: h - h.mean(0),
    "attention": lambda h: (h @ h.T).softmax(1) @ h,
    "batch norm": lambda h: nn.functional.batch_norm(h, None, None, training=True),
}
Own = Callable[[Tensor], Tensor]


def slopes(net: Net, other: nn.Module, x: Tensor, mix: Own) -> Tensor:
    points = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(points, what="encode").square().sum(), points, create_graph=True)
    return net(x + mix(slope), what="encode")


def in_a_forward(net: Net, other: nn.Module, x: Tensor, mix: Own) -> Tensor:
    """A single call's rows are right in any order."""
    net.before = lambda h: mix(h).sin()
    return net(net(x, what="encode"), what="decode")


def held_state(net: Net, other: nn.Module, x: Tensor, mix: Own) -> Tensor:
    HELD.clear()
    net(x, what="hold")
    HELD["state"] = mix(HELD["state"])
    return net(x, what="hold")


CHAINS: dict[str, Callable[[Net, nn.Module, Tensor, Own], Tensor]] = {
    "twice": lambda net, other, x, mix: net(mix(net(x, what="encode")), what="decode"),
    "two models": lambda net, other, x, mix: other(mix(net(x, what="encode"))),
    "beside another argument": lambda net, other, x, mix: net(x, mix(net(x, what="encode")), what="decode"),
    "layers": lambda net, other, x, mix: net.second(mix(net.first(x)).tanh()),
    "to a model and back": lambda net, other, x, mix: net(mix(other(net(x, what="encode"))), what="decode"),
    **{own.__name__: own for own in (slopes, in_a_forward, held_state)},
}


@crossed(chain=CHAINS, mix=MIXES, begins=[0, 2], param_grad=[True, False], total=["each", "sum"])
def test_samples_that_mix_between_two_calls(chain: str, mix: str, begins: int, param_grad: bool, total: str) -> None:
    net, other, run = Net().double(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), CHAINS[chain]
    with autograd_hacks.add_hooks(net, param_grad=param_grad), autograd_hacks.add_hooks(other):
        for n in range(4):
            x = torch.randn(4 + n % 2, 4, dtype=torch.float64)
            if n < begins:
                check_losses(net, lambda x=x: squares(run(net, other, x, torch.tanh)))
                continue
            losses = squares(run(net, other, x, MIXES[mix]))
            begin = partial(autograd_hacks.backward, losses, "sum") if total == "each" else losses.sum().backward
            with pytest.raises(SamplesMixed):
                (begin(), autograd_hacks.compute_grad1(net, "sum"))


CHOSEN = torch.tensor([3, 1, 4])
STRETCHES: dict[str, tuple[Own, Own | None]] = {  # of 6 samples; and which sample each of the others is made of, if one is
    **{name: (own, own) for name, own in {
        "some": lambda h: h[2:5], "every other": lambda h: h[1::2], "chosen": lambda h: h[CHOSEN],
        "one": lambda h: h[4:5], "twice each": lambda h: h.repeat_interleave(2, 0), "twice": lambda h: h.repeat(2, 1),
    }.items()},
    "positions": (lambda h: h.view(24, 1).expand(24, 4), lambda own: own.repeat_interleave(4, 0)),
    "centred": (lambda h: (h - h.mean(0))[:4], None),
    "pairs": (lambda h: h[:3] * h[3:], None),
    "one of all": (lambda h: h.mean(0, keepdim=True), None),
    "features": (lambda h: h.T.repeat(1, 1)[:, :4], None),
    "as it is": (lambda h: h.view(2, 3, 4), None),
}  # fmt: skip


@crossed(how=STRETCHES, begins=[0, 2])
def test_another_number_of_samples_after_a_call(how: str, begins: int) -> None:
    first, last = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(2))
    with autograd_hacks.add_hooks(first), autograd_hacks.add_hooks(last):
        for n in range(4):
            x, (stretch, source) = torch.randn(6, 4).double(), STRETCHES[how if n >= begins else "chosen"]
            losses = squares(last(stretch(first(x))))
            losses.sum().backward(retain_graph=True)
            if source is None:
                with pytest.raises(SamplesMixed):
                    autograd_hacks.compute_grad1(first, "sum")
                continue
            of = source(torch.arange(6)[:, None]).flatten()
            for model, own in (first, [losses[of == k].sum() for k in range(6)]), (last, losses):
                autograd_hacks.compute_grad1(model, "sum")
                with autograd_hacks.pause_hooks():
                    rows = [torch.autograd.grad(loss, model[0].weight, retain_graph=True)[0] for loss in own]
                assert_close(model[0].weight.grad1, torch.stack(rows))


@pytest.mark.parametrize("param_grad", [True, False])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("how", [lambda e: 1 + e, lambda e: e.exp() + 1, lambda e: (1 - e)[None], lambda e: e * e])
def test_numbers_behind_additions(how: Callable[[Tensor], Tensor], samples: int, param_grad: bool) -> None:
    model = Bare(lambda m, x: m.last((how(m.eps) * m.first(x)).tanh()),
                 eps=torch.tensor(0.1), first=nn.Linear(4, 4), last=nn.Linear(4, 3)).double()  # fmt: skip
    check_batches(model, *(torch.randn(samples, 4, dtype=torch.float64) for _ in range(3)), param_grad=param_grad)


def test_gradients_of_an_output_at_another() -> None:
    """Outputs stay functions of each other, as saliency maps and gradients that are kept need it."""
    net, found = Net().double(), list[Tensor]()
    x = torch.randn(3, 4, dtype=torch.float64)
    for param_grad in (True, False):
        with autograd_hacks.add_hooks(net, param_grad=param_grad):
            for _ in range(3):
                out, h = net(x, what="two")
                h.retain_grad()
                found += torch.autograd.grad(out.sum(), h, retain_graph=True)
                squares(out).sum().backward()
                found.append(h.grad)
    for n, other in enumerate(found):
        assert_close(other, found[n % 2])


def test_other_ways_to_begin_a_pass() -> None:
    """Whatever begins a pass, ``.grad`` stays, and torch's own function is back after the hooks."""
    net, x, plain = Net().double(), torch.randn(3, 4, dtype=torch.float64), torch.autograd.backward
    with autograd_hacks.add_hooks(net, param_grad=False):
        for begin in (
            lambda loss: loss.backward(),
            lambda loss: plain(loss),
            lambda loss: plain([loss], retain_graph=True),
        ) * 2:
            losses = views(net, x)
            begin(losses.mean())
            assert all(p.grad is None for p in net.parameters())
            autograd_hacks.compute_grad1(net, loss_type="mean")
            with autograd_hacks.pause_hooks():
                assert_rows(net, rows_of(net, views, x))
        g = torch.randn(3, 4, dtype=torch.float64)
        for _ in range(3):  # the root is a use's node
            net(x, what="decode").backward(g)
            autograd_hacks.compute_grad1(net, loss_type="sum")
            with autograd_hacks.pause_hooks():
                found = torch.autograd.grad(net(x, what="decode"), net.last.weight, g)
            assert_close(net.last.weight.grad1.sum(0), *found)
    assert torch.autograd.backward is plain


# Models whose forward takes a derivative itself: forces, continuous flows


D = 4
Kind = Callable[[Any, Tensor], Any]


def _slope(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def energy(m: Any, x: Tensor) -> Tensor:
    """Of N D numbers, N."""
    return m.body(x).flatten(1).sum(1)


def forces(m: Any, x: Tensor, energy: Callable[[Any, Tensor], Tensor] = energy) -> tuple[Tensor, Tensor]:
    """Energy and forces."""
    own = energy(m, x)
    return own, -_slope(own, x)


def bare(m: Any, x: Tensor) -> Tensor:
    """With a parameter of its own, inside the derivative and outside."""
    return _slope(energy(m, x * m.scale), x) * m.scale.exp()


def flow(m: Any, x: Tensor) -> Tensor:
    """Four steps along a field, with the divergence by Hutchinson's estimate."""
    v, at, divergence = torch.linspace(-1, 1, D, dtype=x.dtype), x, torch.zeros_like(x[:, 0])
    for _ in range(3):
        field = m.scale * torch.tanh(_slope(energy(m, at).sin(), at))
        divergence = divergence + _slope(field @ v, at) @ v
        at = at + field / 4
    return torch.cat([at, divergence[:, None]], 1)


KINDS = (forces, bare, flow)
"""What a model returns of an energy's derivatives."""


def attending(m: Any, x: Tensor) -> Tensor:
    """Self-attention between the numbers of a sample."""
    x = m.up(x[..., None])
    return m.attend(x, x, x)[0]


def recurrent(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 3)
    for n in range(D):
        h = m.cell(x[:, n : n + 1], h)
    return h


def tied(m: Any, x: Tensor) -> Tensor:
    """A layer called twice, and its weight used without it."""
    return torch.tanh(m.layer(torch.tanh(m.layer(x)))) @ m.layer.weight


BODIES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 3), nn.Softplus(), nn.Linear(3, 1)),
    "positions": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Linear(2, 5), nn.SiLU(), nn.LayerNorm(5), nn.Linear(5, 2, bias=False), nn.Tanh()
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, D)), nn.Conv1d(1, 4, 3, padding=1), nn.Tanh(), nn.GroupNorm(2, 4), nn.Conv1d(4, 2, 2), nn.Tanh()
    ),
    "attention": lambda: nn.Sequential(
        Bare(attending, up=nn.Linear(1, 4), attend=nn.MultiheadAttention(4, 2, batch_first=True)), nn.Tanh()
    ),
    "recurrent": lambda: nn.Sequential(Bare(recurrent, cell=nn.GRUCell(1, 3)), nn.Linear(3, 2), nn.Tanh()),
    "tied": lambda: Bare(tied, layer=nn.Linear(D, D)),
    "one apart": lambda: Bare(lambda m, x: torch.cat([m.layer(x[:1]), m.layer(x[1:])]).tanh(), layer=nn.Linear(D, D)),
    "each": lambda: Bare(lambda m, x: torch.stack([m.layer(own) for own in x]).tanh(), layer=nn.Linear(D, D)),
}


def _made(kind: Kind, body: str) -> nn.Module:
    model = Bare(lambda m, x: kind(m, x.detach().requires_grad_()), body=BODIES[body](), scale=torch.ones(D))
    return model.double()


@pytest.fixture
def twice_differentiable_attention() -> object:
    with sdpa_kernel(SDPBackend.MATH):
        yield


DOUBLY = pytest.mark.usefixtures("twice_differentiable_attention")
QUICK = [(kind, "mlp") for kind in KINDS] + [(forces, body) for body in BODIES if body != "mlp"]
OTHERS = [(kind, body) for kind in KINDS for body in BODIES if (kind, body) not in QUICK]


@DOUBLY
@pytest.mark.parametrize(("kind", "body"), [*QUICK, *[pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS]])
def test_rows_are_those_of_each_sample(kind: Kind, body: str) -> None:
    model = _made(kind, body)
    xs = [torch.randn(n, D, dtype=torch.float64) for n in (3, 3, D, 1, 6)]
    check_batches(model, *xs)


@DOUBLY
@pytest.mark.parametrize("kind", KINDS)
def test_without_param_grad(kind: Kind) -> None:
    check_batches(_made(kind, "attention"), *[torch.randn(n, D, dtype=torch.float64) for n in (3, 3, 4)], param_grad=False)


def test_samples_that_mix_in_the_derivative() -> None:
    """Of the batch's mean energy, from some step on: the same for each sample."""

    def mean(m: Any, x: Tensor) -> Tensor:
        own = energy(m, x)
        return own * own.mean() if m.mixes else own

    model, x = _made(lambda m, x: forces(m, x, mean), "mlp"), torch.randn(3, D, dtype=torch.float64)
    with autograd_hacks.add_hooks(model):
        model.mixes = False
        check(model, x)
        model.mixes = True
        autograd_hacks.backward(squares(model(x)))
        with pytest.raises(SamplesMixed):
            autograd_hacks.compute_grad1(model)
