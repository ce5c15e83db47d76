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
from steps import at_most, check
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import ProbeFailed


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
    """Draws from a generator of its own and from all others, counts in a buffer that two parts share, has statistics,
    keeps lists and numbers, and has a frozen part that follows the trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.generator, self.norm = torch.Generator().manual_seed(3), nn.BatchNorm1d(3, affine=False)
        self.first, self.last = nn.Module(), nn.Module()
        for part in (self.first, self.last):
            part.register_buffer("count", torch.zeros(()) if part is self.first else self.first.count)
        self.seen, self.deep, self.mean = {"n": [0]}, [torch.zeros(3)], 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.first.count += 1
        self.seen["n"].append(self.seen["n"][-1] + len(x))
        self.deep[0] += x.sum(0)
        self.mean = x.mean().item()
        with torch.no_grad():
            for p, q in zip(self.teacher.parameters(), self.student.parameters()):
                p.mul_(0.9).add_(q, alpha=0.1)
            self.teacher.bias.data = self.teacher.bias.data + 1
            self.norm(x)
        noise = torch.rand((), generator=self.generator) + torch.rand(()) + random.random() + float(numpy.random.rand())
        return F.dropout(self.student(x)) - self.teacher(x) + noise + self.last.count


@pytest.mark.parametrize("param_grad", [True, False])
def test_a_state_of_many_kinds_is_as_if_nothing_had_run(param_grad: bool) -> None:
    hooked = Teacher()
    plain = copy.deepcopy(hooked)
    plain.generator = torch.Generator().manual_seed(3)
    with autograd_hacks.add_hooks(hooked, param_grad=param_grad):
        for step in range(3):
            x, drawn = torch.randn(4, 3), []
            for model in (hooked, plain):
                torch.manual_seed(step)
                random.seed(step)
                numpy.random.seed(step)
                drawn.append((model(x), torch.rand(3), model.generator.get_state()))
            for one, other in zip(*drawn):
                assert torch.equal(one, other)
            assert hooked.last.count is hooked.first.count
            assert (hooked.seen, hooked.mean) == (plain.seen, plain.mean)
            assert torch.equal(hooked.deep[0], plain.deep[0])
            for name, value in plain.state_dict().items():
                assert torch.equal(hooked.state_dict()[name], value), name
            for out, *_ in drawn:
                out.sum().backward()
            for p, q in zip(hooked.student.parameters(), plain.student.parameters()):
                assert torch.equal(p.grad, q.grad) if param_grad else p.grad is None


def test_frozen_parameters_are_not_copied() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000).requires_grad_(False), nn.Linear(1000, 2))
    x = torch.randn(8, 1000)
    with autograd_hacks.add_hooks(model), at_most(1000 * 1000):
        squares(model(x)).mean().backward()
