"""The probe leaves model, arguments and generators as they are, and says where it can't."""

import copy
import random

import numpy
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from nets import Between
from oracle import squares
from steps import at_most, check, check_batches
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import ProbeFailed


class Stateful(nn.Module):
    """Draws random numbers, counts, keeps a list, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("total", torch.zeros(3))
        self.seen, self.last = [0], None

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.seen[-1] + 1)
        self.last = x.sum().item()
        self.total += self.layer(x).detach().sum(0)
        with torch.no_grad():
            self.norm(x)
        return F.dropout(self.layer(x)) + torch.rand(())


def test_it_leaves_no_trace() -> None:
    hooked, plain = Stateful(), Stateful()
    plain.load_state_dict(hooked.state_dict())
    with autograd_hacks.add_hooks(hooked):
        for step in range(3):
            x, outs = torch.randn(4, 3), []
            for model in (hooked, plain):
                torch.manual_seed(step)
                outs.append(model(x))
                outs.append(torch.rand(3))
            assert torch.equal(outs[0], outs[2])
            assert torch.equal(outs[1], outs[3])
            assert (hooked.seen, hooked.last) == (plain.seen, plain.last)
            for name, value in hooked.state_dict().items():
                assert torch.equal(value, plain.state_dict()[name])
            outs[0].sum().backward()
            outs[2].sum().backward()
            for p, q in zip(hooked.parameters(), plain.parameters()):
                assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


def test_a_model_that_takes_gradients_inside() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                at = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(at.pow(3).sum(), at)
            h = self.layer(x)
            h.register_hook(lambda g: g)  # which needs a graph
            return h * slope

    check_batches(Force().double(), torch.randn(4, 3).double(), verify=1)


def test_a_model_that_can_not_run_the_probe() -> None:
    class Fussy(nn.Module):
        def __init__(self, x: Tensor) -> None:
            super().__init__()
            self.layer, self.x = nn.Linear(3, 2), x

        def forward(self, x: Tensor) -> Tensor:
            if not torch.equal(x, self.x):
                raise KeyError("never seen")
            return self.layer(x)

    x = torch.randn(4, 3).double()
    model = Fussy(x).double()
    asked = autograd_hacks.add_hooks(model, independent=True)
    with asked, pytest.raises(ProbeFailed, match=r"KeyError: 'never seen'.*independent=False"):
        model(x)
    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert model.layer.weight.grad1.shape == (4, 2, 3)


def test_parameters_and_containers_that_the_forward_changes() -> None:
    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
            self.mean, self.seen, self.deep = torch.zeros(3), {"n": []}, [torch.zeros(3)]

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for p, q in zip(self.online.parameters(), self.target.parameters()):
                    q.mul_(0.9).add_(p, alpha=0.1)
                self.target.bias.data = self.target.bias.data + 1
                self.mean.mul_(0.5).add_(x.mean(0))
            self.seen["n"].append(len(x))
            self.deep[0] += 1
            return self.online(x) * self.target(x) + random.random() + float(numpy.random.rand())

    torch.manual_seed(0)
    hooked = Momentum()
    plain = copy.deepcopy(hooked)
    with autograd_hacks.add_hooks(hooked):
        for step in range(2):
            x, outs = torch.randn(4, 3), []
            for model in (hooked, plain):
                random.seed(step)
                numpy.random.seed(step)
                outs.append(model(x))
            assert torch.equal(outs[0], outs[1])
            assert all(torch.equal(p, q) for p, q in zip(hooked.parameters(), plain.parameters()))
            assert torch.equal(hooked.mean, plain.mean)
            assert hooked.seen == plain.seen
            assert torch.equal(hooked.deep[0], plain.deep[0])


class Hiding:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_arguments_that_hide_their_tensors() -> None:
    """What can't be replaced shows nothing of independence."""
    model, x = Between(lambda h: h), torch.randn(4, 3)
    model.forward = lambda batch: model.last(model.first(batch.x))
    with autograd_hacks.add_hooks(model, independent=True):
        squares(model(Hiding(x))).mean().backward()
        with pytest.raises(ProbeFailed, match="no argument had samples to replace"):
            autograd_hacks.compute_grad1(model)
    with autograd_hacks.add_hooks(model):
        check(model, x, run=lambda x: model(Hiding(x)))


class Cache:
    """A user's own object, which the model changes."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None

    def update(self, keys: Tensor) -> Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        return self.keys


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        keys = cache.update(self.key(x))
        return self.out((self.query(x) @ keys.mT).softmax(-1) @ keys)


def test_the_probe_leaves_a_cache_as_it_is() -> None:
    model, x = Cached().double(), torch.randn(3, 5, 4).double()
    expected = model(x, Cache())
    with autograd_hacks.add_hooks(model):
        cache = Cache()
        assert torch.equal(model(x, cache), expected)
        assert cache.keys is not None
        assert cache.keys.shape == (3, 5, 4)
        check(model, x, "sum", lambda x: model(x, Cache()))


def test_an_object_that_cannot_be_copied_is_put_back() -> None:
    class Held(Cache):
        def __deepcopy__(self, memo: object) -> None:
            raise TypeError("there is but one")

    model, held = Cached(), Held()
    for times in (1, 2):
        with autograd_hacks.add_hooks(model, independent=True):  # the first forward of its kind
            model(torch.randn(3, 5, 4), held)
            assert held.keys is not None
            assert held.keys.shape == (3, 5 * times, 4)


def test_what_can_not_be_put_back_is_refused_before_anything_is_run() -> None:
    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.numbers, self.runs = nn.Linear(4, 2), (n for n in range(100)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            return self.layer(x) * next(self.numbers)

    model = Numbered()
    asked = autograd_hacks.add_hooks(model, independent=True)
    with asked, pytest.raises(ProbeFailed, match=r"the model\.numbers, of type generator"):
        model(torch.randn(3, 4))
    assert (model.runs, next(model.numbers)) == (0, 0)
    with autograd_hacks.add_hooks(model):
        check(model, torch.randn(3, 4), run=lambda x: model.layer(x))
        model(torch.randn(3, 4))
    assert (model.runs, next(model.numbers)) == (1, 2)


def test_a_model_that_fails_says_so_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(5, 2))
    autograd_hacks.add_hooks(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.randn(3, 4))


class Named(nn.Module):
    """A module under two names, and a bare parameter for which the model is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
        self.alias, self.tied = self.base, nn.Linear(3, 3)
        self.tied.weight = self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(torch.tanh(self.alias(x) * self.scale))


def test_a_module_under_two_names_keeps_its_parameters() -> None:
    model, x = Named().double(), torch.randn(4, 3).double()
    slots = {(path, n): p for path, m in model.named_modules(remove_duplicate=False) for n, p in m._parameters.items()}
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            check(model, x)
            autograd_hacks.verify(model, samples=2)
            str(autograd_hacks.describe(model))
    now = {(path, n): p for path, m in model.named_modules(remove_duplicate=False) for n, p in m._parameters.items()}
    assert now.keys() == slots.keys()
    assert all(now[place] is p for place, p in slots.items())


class Teacher(nn.Module):
    """Draws from a generator of its own, counts in a buffer that two parts share, and has a frozen part that follows the
    trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.generator = torch.Generator().manual_seed(3)
        self.first, self.last = nn.Module(), nn.Module()
        for part in (self.first, self.last):
            part.register_buffer("count", torch.zeros(()) if part is self.first else self.first.count)

    def forward(self, x: Tensor) -> Tensor:
        self.first.count += 1
        with torch.no_grad():
            for p, q in zip(self.teacher.parameters(), self.student.parameters()):
                p.mul_(0.9).add_(q, alpha=0.1)
        noise = torch.rand((), generator=self.generator)
        return self.student(x) - self.teacher(x) + noise + self.last.count


@pytest.mark.parametrize("param_grad", [True, False])
def test_a_state_of_many_kinds_is_as_if_nothing_had_run(param_grad: bool) -> None:
    hooked, plain = Teacher(), Teacher()
    plain.load_state_dict(hooked.state_dict())
    with autograd_hacks.add_hooks(hooked, param_grad=param_grad):
        for _ in range(3):
            x = torch.randn(4, 3)
            assert torch.equal(hooked(x), plain(x))
            assert torch.equal(hooked.generator.get_state(), plain.generator.get_state())
            assert hooked.last.count is hooked.first.count
            for name, value in plain.state_dict().items():
                assert torch.equal(hooked.state_dict()[name], value), name


def test_frozen_parameters_are_not_copied() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000).requires_grad_(False), nn.Linear(1000, 2))
    x = torch.randn(8, 1000)
    with autograd_hacks.add_hooks(model), at_most(1000 * 1000):
        squares(model(x)).mean().backward()
