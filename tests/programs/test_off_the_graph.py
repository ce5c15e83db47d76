"""Programs whose parameters are read off autograd's graph, against one backward pass from each loss of the same forward."""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from one_graph import check, data
from oracle import assert_rows, squares
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import autograd_hacks

# What the batch meets


def test_a_parameter_times_noise_of_the_batch() -> None:
    class Slots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mu, self.sigma, self.q = nn.Parameter(torch.randn(4)), nn.Parameter(torch.rand(4)), nn.Linear(4, 4)
            self.k = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            slots = self.mu + self.sigma * torch.randn(len(x), 2, 4, dtype=x.dtype)
            return (self.q(slots) @ self.k(x).mT).softmax(1) @ self.k(x)

    model, x = Slots().double(), data(4, 5, 3)
    check(model, lambda: squares(model(x)))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("layers", [True, False])
def test_a_checkpointed_function_with_a_bare_parameter(reentrant: bool, layers: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.scale = nn.Linear(3, 4), nn.Linear(4, 4), nn.Parameter(torch.randn(4))

        def inside(self, h: Tensor) -> Tensor:
            return ((self.inner(h) if layers else h) * self.scale).tanh()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inside, self.first(x), use_reentrant=reentrant)

    model, x = Checkpointed().double(), data(4, 3)
    if not reentrant:
        check(model, lambda: squares(model(x)))
        return
    with autograd_hacks.add_hooks(model):  # autograd.grad doesn't go through these
        for _ in range(3):
            model.zero_grad()
            squares(model(x)).mean().backward()
            autograd_hacks.compute_grad1(model)
            found = {name: p.grad1 for name, p in model.named_parameters()}
            with autograd_hacks.pause_hooks():
                for n in range(4):
                    model.zero_grad()
                    squares(model(x))[n].backward()
                    for name, p in model.named_parameters():
                        expected = torch.zeros_like(p) if p.grad is None else p.grad
                        if found[name] is None:
                            assert not expected.any()
                        else:
                            torch.testing.assert_close(found[name][n], expected)


class Freeing(torch.autograd.Function):
    """Frees what it kept as its backward runs, which can't run twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.kept = [x, w]
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        w, x = ctx.kept.pop(), ctx.kept.pop()
        return g * w, (g * x).sum(0)


def test_a_function_whose_backward_frees_what_it_kept() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale, self.last = nn.Linear(3, 4), nn.Parameter(torch.randn(4)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(Freeing.apply(self.first(x), self.scale).tanh())

    model, x = Model().double(), data(4, 3)
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            model.zero_grad()
            squares(model(x)).mean().backward()
            autograd_hacks.compute_grad1(model)
            plain = Model().double()
            plain.load_state_dict(model.state_dict())
            grads: dict[str, list[Tensor]] = {name: [] for name, _ in plain.named_parameters()}
            for n in range(4):
                found = torch.autograd.grad(squares(plain(x))[n], list(plain.parameters()))
                for own, grad in zip(grads.values(), found):
                    own.append(grad)
            assert_rows(model, {name: torch.stack(own) for name, own in grads.items()})


def test_hypernetworks() -> None:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of_sample, self.of_all, self.code = nn.Linear(3, 8), nn.Linear(2, 8), nn.Parameter(torch.randn(2))

        def forward(self, x: Tensor) -> Tensor:
            own = torch.einsum("nij,nj->ni", self.of_sample(x).view(-1, 4, 2), x[:, :2])
            return own @ self.of_all(self.code).view(4, 2)

    model, x = Hyper().double(), data(4, 3)
    check(model, lambda: squares(model(x)))


def _parametrised() -> nn.Module:
    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).mT

    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(
        layer, nn.Tanh(), parametrizations.weight_norm(nn.Linear(3, 3)), parametrizations.orthogonal(nn.Linear(3, 3))
    )


class Merged(nn.Module):
    """Products of two low ranks, added to a weight; the same weight backwards; a slice of it; several in one stack."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a, self.b = (
            nn.Parameter(torch.randn(3, 3)),
            nn.Parameter(torch.randn(3, 1)),
            nn.Parameter(torch.randn(1, 3)),
        )
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        merged = self.w + self.a @ self.b
        h = F.linear(x, merged).tanh()
        h = F.linear(h, merged.T) + F.linear(h[:, :2], self.w[:, :2])
        both = torch.stack([self.one.weight, self.two.weight]).mean(0)
        return F.linear(self.one(h), both, torch.cat([self.one.bias[:1], self.two.bias[1:]]))


@pytest.mark.parametrize("build", [_parametrised, Merged])
def test_parameters_that_are_made_of_others(build: Callable[[], nn.Module]) -> None:
    model, x = build().double(), data(4, 3)
    check(model, lambda: squares(model(x)))


def test_another_networks_weights_between_steps() -> None:
    online, target, x = Merged().double(), Merged().double(), data(4, 3)

    def losses() -> Tensor:
        for p, q in zip(target.parameters(), online.parameters()):
            p.data = 0.9 * p.data + 0.1 * q.data
        with torch.no_grad():
            y = target(x)
        return squares(online(x), y)

    check(online, losses)


def test_gradients_in_the_range_of_denormals() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Merged0(), nn.Linear(4, 2)), torch.randn(4, 3)
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            model.zero_grad()
            (squares(model(x)) * 1e-38).sum().backward()
            autograd_hacks.compute_grad1(model, loss_type="sum")
            found = {name: p.grad1 for name, p in model.named_parameters()}
            model.zero_grad()
            with autograd_hacks.pause_hooks():
                for n in range(4):
                    rows = torch.autograd.grad(squares(model(x))[n] * 1e-38, list(model.parameters()))
                    for (name, _), row in zip(model.named_parameters(), rows):
                        torch.testing.assert_close(found[name][n], row, rtol=1e-5, atol=1e-43)


class Merged0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


# Control flow


def test_experts_that_are_first_called_later() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
            self.scales = nn.ParameterList(nn.Parameter(torch.randn(3)) for _ in range(3))
            self.step = 0

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            out = torch.zeros_like(x)
            for n, (expert, scale) in enumerate(zip(self.experts, self.scales)):
                rows = (torch.arange(len(x)) % min(3, self.step) == n).nonzero()[:, 0]
                out = out.index_add(0, rows, expert(x[rows]) * scale) if len(rows) else out
            return out

    model = Experts().double()
    check(model, lambda: squares(model(data(5, 3))), steps=5)


def test_branches_in_threads() -> None:
    class Threads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Merged0()) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            done: queue.Queue[tuple[int, Tensor]] = queue.Queue()
            threads = [
                threading.Thread(target=lambda n=n, b=b: done.put((n, b(x))))
                for n, b in enumerate(self.branches)  # type: ignore[misc]
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return sum(y for _, y in sorted((done.get() for _ in threads), key=lambda pair: pair[0]))  # type: ignore[return-value]

    model, x = Threads().double(), data(4, 3)
    check(model, lambda: squares(model(x)))


@pytest.mark.parametrize("kind", ["generator", "iterator", "hidden module", "numpy"])
def test_things_that_a_model_holds_go_on_as_they_would(kind: str) -> None:
    hidden = [nn.Linear(3, 3).double()]

    def numbers() -> Iterator[float]:
        yield from itertools.count(1)

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
            self.numbers: Any = numbers() if kind == "generator" else itertools.cycle([1.0, 2.0, 5.0])
            self.seen: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            if kind == "hidden module":
                return hidden[0](self.first(x)) * self.scale
            if kind == "numpy":
                import numpy as np

                factor = float(np.random.default_rng(len(self.seen)).random())
            else:
                factor = next(self.numbers)
            self.seen.append(factor)
            return self.first(x) * self.scale * factor

    model, x = Holds().double(), data(4, 3)
    check(model, lambda: squares(model(x)))
    if kind in ("generator", "iterator"):
        assert model.seen == ([1, 2, 3] if kind == "generator" else [1, 2, 5])


def test_early_exit_and_adaptive_computation() -> None:
    class Ponder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.halt, self.scale = nn.Linear(3, 3), nn.Linear(3, 1), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            h, out, alive = x, torch.zeros_like(x), torch.ones(len(x), dtype=torch.bool)
            for _ in range(5):
                rows = alive.nonzero()[:, 0]
                if not len(rows):
                    break
                own = (self.cell(h[rows]) * self.scale).tanh()
                h = h.index_copy(0, rows, own)
                stop = self.halt(own)[:, 0] > 0.2
                out = out.index_add(0, rows, own * self.halt(own).sigmoid())
                alive = alive.index_put((rows[stop],), torch.tensor(False))
            return out

    torch.manual_seed(3)
    model = Ponder().double()
    check(model, lambda: squares(model(data(6, 3))), steps=5)


def test_a_hand_written_solver_of_an_ode() -> None:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.rate = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), nn.Parameter(torch.tensor(0.3))

        def slope(self, t: Tensor, x: Tensor) -> Tensor:
            return self.net(torch.cat([x, t.expand(len(x), 1)], 1)) * self.rate

        def forward(self, x: Tensor) -> Tensor:
            t, h = torch.zeros(1, 1, dtype=x.dtype), 0.25
            for _ in range(3):
                one = self.slope(t, x)
                two = self.slope(t + h / 2, x + h / 2 * one)
                x, t = x + h * two, t + h
            return x

    model, x = Field().double(), data(4, 3)
    check(model, lambda: squares(model(x)))


# Hooks


@pytest.mark.parametrize("where", ["tensor", "module", "parameter"])
def test_backward_hooks_of_the_users(where: str) -> None:
    calls: list[int] = []

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale, self.last = nn.Linear(3, 4), nn.Parameter(torch.randn(4)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).tanh()
            if where == "tensor" and h.requires_grad:
                h.register_hook(lambda g: calls.append(1) or 2 * g)
            return self.last(h * self.scale)

    model, x = Hooked().double(), data(4, 3)
    if where == "module":
        x.requires_grad_()
        model.first.register_full_backward_hook(lambda module, gi, go: calls.append(1))
    if where == "parameter":
        model.scale.register_hook(lambda g: calls.append(1))
    check(model, lambda: squares(model(x)))


# Models of transformers


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kinds", [[], ["c2p"], ["p2c"], ["c2p", "p2c"]], ids=str)
def test_deberta(kinds: list[str], shared: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DebertaV2Config(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
        relative_attention=True, pos_att_type=kinds, share_att_key=shared, position_buckets=4, norm_rel_ebd="layer_norm",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pooler_dropout=0.0, position_biased_input=False,
        max_position_embeddings=16,
    )  # fmt: skip
    model, x = transformers.DebertaV2Model(config).double(), torch.randint(20, (3, 6))
    check(model, lambda: squares(model(x).last_hidden_state))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_inside_under_autocast_with_ignored_labels(dtype: torch.dtype) -> None:
    """All samples' labels are means over those that count: the rows are those of each sample's share of the loss."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model, x = transformers.GPT2LMHeadModel(config), torch.randint(20, (4, 6))
    labels = x.clone()
    labels[0, 3:], labels[2, :4] = -100, -100
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            model.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = model(x, labels=labels).loss
            loss.backward()
            autograd_hacks.compute_grad1(model, loss_type="sum")
            found = {name: p.grad1 for name, p in model.named_parameters()}
            for name, p in model.named_parameters():
                torch.testing.assert_close(found[name].sum(0), p.grad, rtol=0.05, atol=0.02 * float(p.grad.abs().max()))
            count = int((labels[:, 1:] != -100).sum())
            with autograd_hacks.pause_hooks():
                for n in range(4):
                    with torch.autocast("cpu", dtype):
                        own = model(x[n : n + 1], labels=labels[n : n + 1]).loss
                    share = int((labels[n, 1:] != -100).sum()) / count
                    rows = torch.autograd.grad(own * share, list(model.parameters()))
                    for (name, _), row in zip(model.named_parameters(), rows):
                        torch.testing.assert_close(found[name][n], row, rtol=0.05, atol=0.05 * float(row.abs().max()))


def test_a_loss_inside_with_two_denominators() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(4, 2)

        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x).tanh()
            first = F.cross_entropy(self.one(h), y, ignore_index=-100)
            second = F.cross_entropy(self.two(h), z, ignore_index=-100)
            return first + second, h

    model, x = Two().double(), data(4, 3)
    y, z = torch.tensor([1, -100, 2, 0]), torch.tensor([1, -100, -100, 0])
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            model.zero_grad()
            model(x, y, z)[0].backward()
            autograd_hacks.compute_grad1(model, loss_type="sum")
            found = {name: p.grad1 for name, p in model.named_parameters()}
            with autograd_hacks.pause_hooks():
                for n in range(4):
                    h = model.body(x).tanh()
                    own = F.cross_entropy(model.one(h[n]), y[n], ignore_index=-100, reduction="sum") / 3
                    own = own + F.cross_entropy(model.two(h[n]), z[n], ignore_index=-100, reduction="sum") / 2
                    rows = torch.autograd.grad(own, list(model.parameters()))
                    for (name, _), row in zip(model.named_parameters(), rows):
                        torch.testing.assert_close(found[name][n], row)
