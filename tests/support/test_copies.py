"""Checks run a copy of the model: what a program can reach is afterwards as it was, or is refused by name."""

import copy
import gc
import io
import random
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from nets import Between, Hiding
from oracle import one_backward_per_sample, squares
from steps import at_most
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import ProbeFailed, VerificationFailed
from autograd_hacks.support.copies import Copy

CALLS: list[str] = []
COUNT = 0


def count_globally(h: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006  # users do this
    global COUNT
    COUNT += 1
    CALLS.append("called")
    seen.append(len(h))
    return h


class Net(nn.Module):
    """Its forward reads a value, so no analysis shows that samples are independent, and a check has to run it."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.tanh, before: Callable[..., None] | None = None) -> None:
        super().__init__()
        self.first, self.last, self.act, self.before = nn.Linear(3, 3), nn.Linear(3, 2), act, before

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        if self.before is not None:
            self.before(self, x, *more)
        h = self.act(self.first(x))
        return self.last(h if h.detach().abs().sum() < 1e9 else h.relu())


# A model, and a function that returns what it has changed so far.
Program = tuple[nn.Module, Callable[[], Any]]


class Queue:
    """A user's own object, with memory."""

    def __init__(self) -> None:
        self.keys, self.at, self.log = torch.zeros(8, 3), 0, {"lengths": [0]}

    def put(self, layer: nn.Module, args: Any, keys: Tensor) -> None:
        self.keys[: len(keys)] += keys.detach()
        self.at += len(keys)
        self.log["lengths"].append(len(keys))


def note(store: list[Tensor], *given: Any) -> None:
    store.append(given[-1])


def hooks() -> Program:
    model, features, parts, count, queue = Net(), dict[str, Tensor](), list[Any](), 0, Queue()

    def keep(layer: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal count
        count += 1
        features["h"] = output

    model.first.register_forward_hook(keep)
    model.first.register_forward_hook(queue.put, prepend=True)
    model.last.register_forward_hook(partial(note, parts))
    model.last.register_forward_pre_hook(lambda layer, args: parts.append(args[0]))
    return model, lambda: (count, features["h"].tolist(), [h.tolist() for h in parts], vars(queue))


def names_of_a_function() -> Program:
    def calls() -> list[int]:
        return [COUNT, len(CALLS), len(count_globally.__defaults__[0])]  # type: ignore[index]

    before = calls()
    return Net(count_globally), lambda: [now - then for then, now in zip(before, calls())]


def attributes_of_a_class() -> Program:
    class Counting(Net):
        runs, log = 0, list[int]()

        def forward(self, x: Tensor) -> Tensor:
            type(self).runs += 1
            self.log.append(len(x))
            return super().forward(x)

    return Counting(), lambda: (Counting.runs, Counting.log)


def methods_and_weak_references() -> Program:
    class Child(nn.Module):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.parent, self.others = weakref.ref(parent), [weakref.proxy(parent)]

        def act(self, h: Tensor) -> Tensor:
            self.parent().runs += 1  # type: ignore[union-attr,operator]
            self.others[0].note(len(h))
            return h.tanh()

    model, log = Net(), list[int]()
    model.runs, model.log, model.note, model.child = 0, log, log.append, Child(model)
    model.annotations = {"x": int | None, "y": list[int]}  # as a wrapped forward has them
    model.act = model.child.act
    return model, lambda: (model.runs, model.log)


def random_numbers() -> Program:
    own = torch.Generator().manual_seed(1), numpy.random.default_rng(1), random.Random(1), iter([*range(99)])

    def drawing(m: nn.Module, h: Tensor) -> Tensor:
        a, b, c, d = m.generators
        shared = float(torch.rand(())) + random.random() + float(numpy.random.rand())
        return F.dropout(h) * (float(torch.rand((), generator=a)) + b.random() + c.random() + next(d) + shared)

    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)
    return Net(Bare(drawing, generators=own)), lambda: (
        *(own[0].get_state().tolist(), own[1].bit_generator.state, own[2].getstate(), own[3].__length_hint__()),
        *(torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()),
    )


def files_and_locks() -> Program:
    file, lock = io.StringIO("1\n" * 100), threading.Lock()

    def act(h: Tensor) -> Tensor:
        with lock:
            return h + float(file.readline())

    return Net(act), lambda: (file.tell(), lock.locked())


def buffers_and_objects() -> Program:
    class Keeping(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.lazy = torch.ones(3) if self.lazy is None else self.lazy
            self.kept = self.kept + self.lazy
            self.mean.add_(1)
            self.queue.put(self, (), x)
            with torch.no_grad():
                self.norm(x)
            return super().forward(x) + self.kept.sum().detach() + self.norm.mean.sum()

    model = Keeping()
    model.kept, model.queue, model.norm = torch.zeros(3, requires_grad=True) * 1, Queue(), nn.BatchNorm1d(3)
    model.lazy = None
    model.register_buffer("mean", torch.zeros(3))
    model.norm.register_buffer("mean", model.mean)  # two modules share it
    return model, lambda: (
        *(model.kept.tolist(), model.lazy, vars(model.queue)),
        *(model.norm.mean is model.mean, model.norm.num_batches_tracked.item()),
    )


def parameters_that_are_written() -> Program:
    def clamp(m: Net, x: Tensor) -> None:
        with torch.no_grad():
            m.first.weight.mul_(0.9)
        m.first.bias.data[:2].add_(1)
        torch.mul(m.last.bias.data, 0.5, out=m.last.bias.data)
        m.last.weight.data = m.last.weight.data + 1

    model = Net(before=clamp)
    return model, lambda: [(p.tolist(), p._version) for p in model.parameters()]


PROGRAMS = [
    *(hooks, names_of_a_function, attributes_of_a_class, methods_and_weak_references, random_numbers),
    *(files_and_locks, buffers_and_objects, parameters_that_are_written),
]


def known(model: nn.Module) -> Any:
    """What a check must not change."""
    return (
        [(id(x), x._version, x.tolist()) for x in (*model.parameters(), *model.buffers())],
        [None if p.grad is None else (id(p.grad), p.grad.tolist()) for p in model.parameters()],
    )


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("check", ["verify", "check_rows"])
def test_a_check_changes_nothing(program: Callable[[], Program], check: str) -> None:
    (model, state), x = program(), torch.randn(4, 3)
    rows = {name: torch.zeros(4, *p.shape) for name, p in model.named_parameters()}
    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        before = repr(state()), known(model)
        if check == "verify":
            autograd_hacks.verify(model, args=(x,), rows=1)
        else:
            with pytest.raises(VerificationFailed):
                autograd_hacks.check.check_rows(model, (x,), lambda model, x: squares(model(x)), rows)
        assert (repr(state()), known(model)) == before


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_check_of_independence_changes_nothing(program: Callable[[], Program]) -> None:
    found = []
    for independent in (False, True):
        torch.manual_seed(1)
        model, state = program()
        model.eval()
        torch.manual_seed(2)
        x = torch.randn(4, 3)
        with autograd_hacks.add_hooks(model, independent=independent):
            squares(model(x)).mean().backward()
            autograd_hacks.compute_grad1(model)
            found.append((repr(state()), [p.grad1 if p.grad1 is None else p.grad1.tolist() for p in model.parameters()]))
    assert found[0] == found[1]


class Single:
    """An object of which there can be no second one."""

    def __deepcopy__(self, memo: object) -> None:
        raise TypeError("there is but one")


@pytest.mark.parametrize("what", [Single, lambda: (n for n in range(9))])
@pytest.mark.parametrize("check", ["verify", "check_rows", "independent"])
def test_what_can_not_be_copied_is_refused_by_name(what: Callable[[], Any], check: str) -> None:
    model, x, runs = Net(), torch.randn(4, 3), []
    model.first.register_forward_hook(lambda *_: runs.append(1))
    model.first.held = [what()]
    rows = {name: torch.zeros(4, *p.shape) for name, p in model.named_parameters()}
    with autograd_hacks.add_hooks(model, independent=check == "independent"):
        checks: dict[str, Callable[[], object]] = {
            "verify": lambda: (model(x), autograd_hacks.verify(model, args=(x,))),
            "check_rows": lambda: autograd_hacks.check.check_rows(model, (x,), lambda model, x: squares(model(x)), rows),
            "independent": lambda: model(x),
        }
        with pytest.raises(ProbeFailed, match=r"the model\.first\.held, of type .*can't be copied.*copy\.deepcopy accepts"):
            checks[check]()
        assert len(runs) == (check == "verify")


def test_a_model_that_fails_with_other_samples() -> None:
    x = torch.randn(4, 3)
    model = Net(before=lambda m, given: {True: given}[torch.equal(given, x)])
    asked = autograd_hacks.add_hooks(model, independent=True)
    with asked, pytest.raises(ProbeFailed, match=r"KeyError: False.*independent=False"):
        model(x.clone())


def test_arguments_that_hide_their_tensors() -> None:
    """What can't be replaced shows nothing of independence."""
    model, x = Between(lambda h: h), torch.randn(4, 3)
    model.forward = lambda batch: model.last(model.first(batch.x))
    refused = pytest.raises(ProbeFailed, match="reads a tensor that is not an argument")
    with autograd_hacks.add_hooks(model, independent=True), refused:
        model(Hiding(x))


def test_a_loss_may_name_the_model_but_not_keep_it() -> None:
    """A function's names hold the copy meanwhile; a method runs its own object's model, of which nothing is compared."""
    model, x = Net(), torch.randn(4, 3)
    rows = one_backward_per_sample(model, squares, x)

    class Trainer:
        def __init__(self) -> None:
            self.model = model

        def loss(self, given: nn.Module, x: Tensor) -> Tensor:
            return squares(self.model(x))

    autograd_hacks.check.check_rows(model, (x,), lambda _, x: squares(model(x)), rows, coverage=1.0)
    with pytest.raises(ProbeFailed, match="used a parameter of the model itself"):
        autograd_hacks.check.check_rows(model, (x,), Trainer().loss, rows)


class Holding(torch.utils.data.Dataset[Tensor]):
    """Copies share data sets."""


def test_a_copy_that_reaches_the_model_itself_is_refused() -> None:
    # All of its rows and gradients would be zero, which agree.
    model, inner, data = Net(), nn.Linear(3, 3), Holding()
    model.inner, data.model, model.act = inner, inner, lambda h: data.model(h)
    with autograd_hacks.add_hooks(model), pytest.raises(ProbeFailed, match="used a parameter of the model itself"):
        autograd_hacks.verify(model, args=(torch.randn(4, 3),))


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_hooked_model_fails_with_its_own_error(is_copied: bool) -> None:
    model = Net(act=lambda h: h[:, :1])
    autograd_hacks.add_hooks(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        (copy.deepcopy(model) if is_copied else model)(torch.randn(4, 3))


def test_an_object_among_the_arguments_is_copied() -> None:
    model, x, queue = Net(before=lambda m, x, queue: queue.put(m, (), x)), torch.randn(4, 3), Queue()
    with autograd_hacks.add_hooks(model):
        autograd_hacks.verify(model, args=(x, queue))
    assert (queue.at, queue.log, float(queue.keys.sum())) == (0, {"lengths": [0]}, 0.0)


def test_a_copy_is_freed_after_the_check() -> None:
    model, x = nn.Sequential(nn.Linear(13, 17), nn.Tanh(), nn.Linear(17, 2)), torch.randn(4, 13)
    with autograd_hacks.add_hooks(model, independent=True):
        squares(model(x)).mean().backward()
        autograd_hacks.verify(model)
        gc.collect()
        assert sum(isinstance(p, nn.Parameter) and p.shape == (17, 13) for p in gc.get_objects()) == 1


class Weight(nn.Parameter):
    """A user's own class of parameters."""


def test_copies_share_the_memory_of_parameters() -> None:
    # The frozen layer has 4 MB.
    model = nn.Sequential(nn.Linear(3, 1000), nn.Linear(1000, 1000).requires_grad_(False), nn.Linear(1000, 3), Net())
    model[0].bias, x = Weight(torch.zeros(1000)), torch.randn(4, 3)
    rows = one_backward_per_sample(model, squares, x)
    with autograd_hacks.add_hooks(model), at_most(2_000_000):
        autograd_hacks.verify(model, args=(x,))
        autograd_hacks.check.check_rows(model, (x,), lambda model, x: squares(model(x)), rows)
    for p, q in zip(model.parameters(), Copy(model).again(()).model.parameters()):
        assert p is not q
        assert type(p) is type(q)
        assert p.data_ptr() == q.data_ptr()
