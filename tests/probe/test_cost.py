"""What a trace does not do: import the compiler, be compiled, or keep what no backward pass asks for; kinds of forwards."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import Between
from oracle import squares
from processes import run_script
from steps import check, count_forwards
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from twin import Bare

import autograd_hacks
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.kinds import MOST
from autograd_hacks.probe.batch import kept_samples

FIRST_STEP = """
import sys, torch, autograd_hacks
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
for independent in (False, True):
    with autograd_hacks.add_hooks(model, independent=independent):
        model(torch.randn(4, 3)).square().mean().backward()
        autograd_hacks.compute_grad1(model)
        model.zero_grad()
sys.exit("torch._dynamo" in sys.modules)
"""


def test_a_first_step_imports_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(FIRST_STEP)
    run_script(tmp_path / "first.py", tmp_path)


class Counting(torch.autograd.Function):
    """y = x, which counts how often its backward runs: in a tensor, since proofs put numbers of Python's back."""

    runs = torch.zeros((), dtype=torch.long)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        Counting.runs += 1
        return g


@pytest.mark.parametrize("param_grad", [True, False])
def test_how_often_a_model_is_run(param_grad: bool) -> None:
    """Its forward as often as the user runs it; a Function without a law is asked in each forward."""
    model, x = nn.Sequential(Between(Counting.apply), nn.Linear(3, 2)), torch.randn(5, 3)
    forwards, backwards = count_forwards(model), []
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(20):
            Counting.runs.zero_()
            squares(model(x)).mean().backward()
            autograd_hacks.compute_grad1(model)
            backwards.append(int(Counting.runs))
    assert forwards.number == 20
    assert len(set(backwards)) == 1
    assert backwards[0] <= 1 + 2 * 3 + 2  # the pass, halves for each bit of a sample's number, and the whole twice


class Tanhs(TorchDispatchMode):
    """How often tanh is computed: what the model itself counts would be put back."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += func is torch.ops.aten.tanh.default
        return func(*args, **(kwargs or {}))


class Asked(nn.Tanh):
    """What looks at a value, which tensors without values haven't."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.detach().sum()) < 1e9 else x


@pytest.mark.parametrize("is_traced", [True, False])
def test_independence_runs_a_model_a_few_times_more(is_traced: bool) -> None:
    middle = nn.Tanh() if is_traced else Asked()
    model, x, counts = nn.Sequential(nn.Linear(3, 4), middle, nn.Linear(4, 2)), torch.randn(5, 3), []
    with autograd_hacks.add_hooks(model, independent=True):
        for _ in range(20):
            with Tanhs() as tanhs:
                squares(model(x)).mean().backward()
                autograd_hacks.compute_grad1(model)
            counts.append(tanhs.number)
    # By labels, two runs: for half of the samples and for all.  A later forward with the same operations is known.
    assert counts[0] == 3 if is_traced else 1 < counts[0] <= 14
    assert counts[1:] == [1] * 19


def test_another_probe_is_refused() -> None:
    with pytest.raises(ValueError, match="probe='twice'; expected True or False"):
        autograd_hacks.add_hooks(nn.Linear(2, 2), probe="twice")


def heads(m: nn.Module, x: Tensor) -> Tensor:
    """Of as many heads as some batches have samples: a mask then looks as if it had a row for each pair of samples."""
    keep = (x > -0.5).to(x.dtype).transpose(1, 2)[..., None]  # N heads T 1
    values = (m.scale * m.heads(x)).transpose(1, 2)[..., None] * keep
    return m.out(values[..., 0].transpose(1, 2)).mean(1)


def test_sizes_that_come_again_are_walked_once() -> None:
    """As with batches of private training, each of another size."""
    model = Bare(heads, heads=nn.Linear(5, 5), out=nn.Linear(5, 2), scale=torch.rand(5)).double()
    autograd_hacks.add_hooks(model)
    for number in range(24):
        check(model, torch.randn(5 + number % 2, 3, 5).double())
    assert recorder_of(model).kinds.memo.misses <= 4  # forwards and losses of two sizes


# What is one kind of forward


def test_the_number_of_kinds_is_bounded() -> None:
    """Names of files as dictionary keys, and lists of any length, make each forward another kind."""
    model = Bare(lambda m, x, *_: m.body(x), body=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))).double()
    with autograd_hacks.add_hooks(model):
        kinds = recorder_of(model).kinds.seen
        for n in range(100):
            notes: list[Any] = [{f"file {n}": n}, list(range(n)), ["a"] * n, {"file": {str(n): None}}]
            check(model, torch.randn(4, 3).double(), run=lambda x, own=notes[n % 4]: model(x, own))
        assert len(kinds) <= MOST


def test_a_model_whose_dtype_changes_and_changes_back() -> None:
    """torch makes a new node for a parameter each time, also if nothing runs between two changes."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with autograd_hacks.add_hooks(model):
        for n in range(8):
            model.to(torch.float32 if n % 3 else torch.float64)
            if n % 2:
                model.to(torch.float16).to(torch.float32)
            for _ in range(2):
                check(model, torch.randn(4, 3).to(model[0].weight))


@pytest.mark.parametrize("samples", [2, 3, 7, 4100])
def test_of_any_two_samples_a_run_keeps_the_first_and_replaces_the_second(samples: int) -> None:
    kept = torch.stack(kept_samples(samples, torch.Generator())).float()
    assert torch.equal(kept.T @ (1 - kept) == 0, torch.eye(samples, dtype=torch.bool))
