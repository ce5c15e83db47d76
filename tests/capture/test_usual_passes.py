"""A pass of which nothing is left to decide gives the same rows, bit for bit, as one that is filed gradient by gradient."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import assert_same, one_backward_per_sample, squares
from torch import Tensor
from twin import of_squares

import autograd_hacks
from autograd_hacks.capture.backward import Backward
from autograd_hacks.errors import SamplesMixed, UnsupportedLayer
from autograd_hacks.forms import scale
from autograd_hacks.formulas.table import RULES, Rule

N = 6


ASIDE = list[Tensor]()
"""What a model gives to a loss without returning it."""


class Net(nn.Module):
    """Tables, norms, layers that a flag uses twice or skips, and a bare parameter."""

    def __init__(self, is_idle: bool) -> None:
        super().__init__()
        self.embed, self.norm, self.a, self.b = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain, self.head = nn.Parameter(torch.full((8,), 1.1)), nn.Linear(8, 3)
        self.flag, self.hook, self.is_idle = "", None, is_idle

    def forward(self, x: Tensor) -> Tensor:
        u = self.a(self.norm(self.embed(x)))
        if self.hook is not None:
            u.register_hook(self.hook)
        h = self.a(u.tanh()) if self.flag == "twice" else u.tanh()
        if self.flag == "aside":
            ASIDE.append(self.a(u))
        elif self.flag == "mix":
            h = h - h.mean(0)
        if self.flag != "skip":
            h = self.b(h) * self.gain + h + (0 * self.gain if self.is_idle else 0)  # whose rows are never compared
        return self.head(h.mean(1))


def step(model: Net, x: Tensor, **flags: Any) -> None:
    vars(model).update(flags)
    try:
        of_squares(model, x).mean().backward()
    finally:
        model.flag, model.hook = "", None


def twice(model: Net, x: Tensor) -> None:
    loss = of_squares(model, x).mean()
    loss.backward(retain_graph=True)
    loss.backward()


def both_and_one(model: Net, x: Tensor) -> None:
    model.flag = "skip"  # all uses are layers
    one, other = (of_squares(model, own).mean() for own in (x, x.roll(1, 0)))
    (one + other).backward(retain_graph=True)
    one.backward()
    model.flag = ""


def accumulated(model: Net, x: Tensor) -> None:
    with autograd_hacks.accumulate(model):
        step(model, x)
        step(model, x.roll(1, 0))


def failed(model: Net, x: Tensor) -> None:
    def fail(g: Tensor) -> None:
        raise KeyError("hook")

    with pytest.raises(KeyError):
        step(model, x, hook=fail)


def failed_before(model: Net, x: Tensor) -> None:
    failed(model, x)
    model.zero_grad()
    step(model, x)


def of_several(model: Net, x: Tensor) -> None:
    out = model(x)
    torch.autograd.grad(out, [model.a.weight], torch.randn(2, *out.shape), is_grads_batched=True)


def differentiated(model: Net, x: Tensor) -> None:
    of_squares(model, x).mean().backward(create_graph=True)
    autograd_hacks.per_sample_grads(model).norms().sum().backward()


def paused(model: Net, x: Tensor) -> None:
    step(model, x)
    loss = of_squares(model, x.roll(1, 0)).mean()
    with autograd_hacks.pause_hooks():
        loss.backward()


def frozen(model: Net, x: Tensor) -> None:
    loss = of_squares(model, x).mean()
    model.b.bias.requires_grad_(False)
    loss.backward()


def one_by_one(model: Net, x: Tensor) -> Tensor:
    with autograd_hacks.during_backward(model) as found:
        step(model, x)
    step(model, x)
    return found.norms


def while_off(model: Net, x: Tensor) -> None:
    step(model, x, hook=lambda g: autograd_hacks.disable_hooks())
    autograd_hacks.enable_hooks()


def ignored(model: Net, x: Tensor) -> None:
    model.norm.more = nn.Parameter(torch.ones(2))
    step(model, x)


def nested(model: Net, x: Tensor) -> None:
    def run(g: Tensor) -> None:
        if not inside:
            inside.append(True)
            loss.backward(retain_graph=True)

    inside = list[bool]()
    model.hook = run
    loss = of_squares(model, x).mean()
    model.hook = None
    loss.backward(retain_graph=True)


def read_aside(model: Net, x: Tensor) -> None:
    model.flag = "aside"
    loss = of_squares(model, x).mean()
    model.flag = ""
    (loss + ASIDE.pop().square().mean()).backward()


def mixed_before(model: Net, x: Tensor) -> None:
    with autograd_hacks.accumulate(model):
        step(model, x, flag="mix")
        step(model, x)


def hooked_first(model: Net, x: Tensor) -> None:
    handle = model.b.register_forward_hook(lambda layer, args, out: 2 * out, prepend=True)
    step(model, x)
    handle.remove()


def written(kept: str, model: Net, x: Tensor) -> None:
    """Overwrites what a layer was given, or the gradient at its output, after the pass."""
    found = list[Tensor]()
    handle = model.b.register_forward_pre_hook(lambda layer, args: found.append(args[0].detach()))
    step(model, x, hook=lambda g: found.append(g) if kept == "gradient" else None)
    handle.remove()
    found[-1].add_(1)


def ruled(model: Net, x: Tensor) -> None:
    """Another rule, from the pass to the read."""
    step(model, x)
    before = RULES[nn.LayerNorm]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, nn.LayerNorm, Rule(lambda *own: {n: scale(f, 2) for n, f in before.formula(*own).items()}))
        with pytest.raises(UnsupportedLayer, match=r"'norm'.*its rule was replaced"):
            autograd_hacks.per_sample_grads(model)


def set_later(model: Net, x: Tensor) -> None:
    step(model, x)
    model.embed.padding_idx = int(x[0, 0])  # its rows would be zeros


def in_half(model: Net, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        step(model, x)


PROGRAMS: dict[str, Callable[[Net, Tensor], object]] = {
    "one pass": step,
    "used twice": lambda model, x: step(model, x, flag="twice"),
    "skipped": lambda model, x: step(model, x, flag="skip"),
    "two passes of one forward": twice,
    "two forwards, one pass": lambda model, x: (of_squares(model, x) + of_squares(model, x.roll(1, 0))).mean().backward(),
    "two forwards, and the first again": both_and_one,
    "two forwards, two passes": lambda model, x: (step(model, x), step(model, x.roll(1, 0))),
    "accumulated": accumulated,
    "a hook doubles": lambda model, x: step(model, x, hook=lambda g: 2 * g),
    "failed": failed,
    "failed before": failed_before,
    "some parameters": lambda model, x: of_squares(model, x).mean().backward(inputs=[model.a.weight, model.head.bias]),
    "captured": lambda model, x: torch.autograd.grad(of_squares(model, x).mean(), list(model.parameters())),
    "rows with a graph": differentiated,
    "batched": of_several,
    "paused": paused,
    "frozen between": frozen,
    "a penalty": lambda model, x: (of_squares(model, x).mean() + model.a.weight.square().sum()).backward(),
    "losses": lambda model, x: autograd_hacks.backward(of_squares(model, x), "sum"),
    "other sizes": lambda model, x: (step(model, x[:4]), model.zero_grad(), step(model, x)),
    "during the pass": one_by_one,
    "off in the middle": while_off,
    "cleared in the middle": lambda model, x: step(model, x, hook=lambda g: autograd_hacks.clear_backprops(model)),
    "a parameter that its layer ignores": ignored,
    "a pass within a pass": nested,
    "read aside": read_aside,
    "mixed before": mixed_before,
    "another hook first": hooked_first,
    "input overwritten": lambda model, x: written("input", model, x),
    "gradient overwritten": lambda model, x: written("gradient", model, x),
    "another rule": ruled,
    "settings changed": set_later,
    "autocast": in_half,
    "a layer by itself": lambda model, x: (step(model, x), model.a(torch.ones(N, 8)).sum().backward()),
}


def outcome(program: Callable[[Net, Tensor], object], param_grad: bool, is_idle: bool) -> list[object]:
    """Rows, norms and ``.grad`` after a program that follows usual steps, or its errors."""
    torch.manual_seed(0)
    model, found = Net(is_idle), list[object]()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(3):
            model.zero_grad()
            step(model, torch.randint(11, (N, 5)))
            autograd_hacks.compute_grad1(model)
        model.zero_grad()
        try:
            returned = program(model, torch.randint(11, (N, 5)))
            autograd_hacks.compute_grad1(model)
            found = [returned] if isinstance(returned, Tensor) else []
            found += [vars(p).get("grad1") for p in model.parameters()]
            found.append(autograd_hacks.per_sample_grads(model).norms())
        except Exception as error:  # whatever it is, it must be the same
            found.append(f"{type(error).__name__}: {error}")
        finally:
            autograd_hacks.enable_hooks()
        return [*found, *(p.grad for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("way", [(True, False), (False, False), (False, True)], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_usual_passes_are_filed_as_all_others(program: str, way: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = list[bool](), Backward.take

    def counted(*given: Any) -> bool:
        taken.append(take(*given))
        return taken[-1]

    monkeypatch.setattr(Backward, "take", counted)
    found = outcome(PROGRAMS[program], *way)
    assert sum(taken) >= 2 * 5  # in usual steps, all that comes to layers
    monkeypatch.setattr(Backward, "take", lambda *given: False)
    expected = outcome(PROGRAMS[program], *way)
    assert len(found) == len(expected)
    for own, other in zip(found, expected):
        assert torch.equal(own, other) if isinstance(own, Tensor) and isinstance(other, Tensor) else own == other


class RunsWithin(nn.Module):
    """A model with a hook that asks for a derivative of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        u = self.second(h)
        out = u.tanh()
        if out.requires_grad:
            out.register_hook(lambda g: self.look(h, u))
        return self.head(out)

    def look(self, h: Tensor, u: Tensor) -> None:
        torch.autograd.grad(u, h, torch.ones_like(u), retain_graph=True)


@pytest.mark.parametrize("param_grad", [True, False])
def test_a_pass_of_a_hook_brings_nothing_to_the_rows_of_the_pass_around_it(param_grad: bool) -> None:
    model, x = RunsWithin().double(), torch.randn(4, 5, dtype=torch.double)
    expected = one_backward_per_sample(model, squares, x)
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(3):
            squares(model(x)).sum().backward()
            assert_same(autograd_hacks.per_sample_grads(model, "sum").dense(), expected)


def test_a_hook_that_asks_for_gradients_of_parameters_runs_its_pass_aside() -> None:
    model, x = RunsWithin(), torch.randn(4, 5)
    expected, is_aside = one_backward_per_sample(model, squares, x), [False]

    def look(h: Tensor, u: Tensor) -> None:
        with autograd_hacks.pause_hooks() if is_aside[0] else nullcontext():
            torch.autograd.grad(u, [model.second.weight], torch.ones_like(u), retain_graph=True)

    model.look = look
    with autograd_hacks.add_hooks(model):
        squares(model(x)).sum().backward()
        with pytest.raises(SamplesMixed, match=r"within the model's backward pass.*pause_hooks"):
            autograd_hacks.compute_grad1(model, "sum")
        is_aside[0] = True
        squares(model(x)).sum().backward()
        assert_same(autograd_hacks.per_sample_grads(model, "sum").dense(), expected)
