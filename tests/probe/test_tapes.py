"""Every forward whose samples must be independent is known or proven: mixing that begins is found in that step."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from twin import Bare

import autograd_hacks
from autograd_hacks.capture.above import ABOVE
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.errors import PerSampleGradientError, ProbeFailed
from autograd_hacks.private import PrivateTraining

BEGINS = 3
"""The step in which a program changes."""


class Program(nn.Module):
    """Two layers, and between them what a function makes of the first one's output.  ``step`` counts its forwards."""

    def __init__(self, what: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.what = nn.Linear(5, 8), nn.Linear(8, 3), what
        self.centred = nn.Parameter(torch.randn(8, 5))
        self.register_buffer("centre", torch.zeros(8))
        self.step, self.epoch, self.kept = -1, 0, torch.zeros(8)

    @property
    def on(self) -> bool:
        return self.step >= BEGINS

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        h = self.first(x) + nn.functional.linear(x, self.centred - self.centred.mean(0))
        return self.last(self.what(self, h).tanh())


def steps(model: nn.Module) -> Iterator[int]:
    """A private training's steps, by their numbers."""
    data = TensorDataset(torch.randn(60, 5), torch.randint(3, (60,)))
    private = PrivateTraining(0.3, 1.0, 12, 1e-3, seed=2**64 + 4)
    with private.attach(model):
        for x, y in private.loader(data, steps=8):
            yield private.steps
            private.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
            private.step()
    yield private.steps


def accepted(model: nn.Module) -> int:
    """How many steps were counted before one was refused."""
    count = 0
    try:
        for number in steps(model):
            count = number
    except PerSampleGradientError:
        pass
    return count


def in_place(own: Program, h: Tensor) -> Tensor:
    h = h * 1
    h.detach().sub_(h.detach().mean(0)) if own.on else h.detach().sub_(0.0)
    return h


def from_before(own: Program, h: Tensor) -> Tensor:
    h, own.kept = h - own.kept, h.detach().mean(0) if own.step == BEGINS - 1 else own.kept
    return h


def as_text(own: Any, h: Tensor) -> Tensor:
    now, own.text = float(own.text) if own.step else 0.0, str(float(h.detach().max()) if own.on else 0)
    return h + now


MIXING: dict[str, Callable[[Program, Tensor], Tensor]] = {
    "a mean with a gradient": lambda own, h: h - h.mean(0) if own.on else h,
    "a mean without": lambda own, h: h - h.detach().mean(0) if own.on else h,
    "a mean in the place of a buffer": lambda own, h: h - (h.detach().mean(0) if own.on else own.centre),
    "a mean in the place of an attribute": lambda own, h: h - (h.detach().mean(0) if own.on else own.kept),
    "a mean that is computed in all steps": lambda own, h: h - (own.centre, h.detach().mean(0))[own.on],
    "statistics of the batch": lambda own, h: nn.functional.batch_norm(h, own.centre.clone(), own.kept + 1, training=own.on),
    "in place": in_place,
    "an order by values": lambda own, h: (
        h + 0.1 * h.detach()[h.detach()[:, 0].argsort() if own.on else torch.arange(len(h))]
    ),
    "what is written into its data": lambda own, h: (
        h + 0 * own.first.bias.data.add_(h.detach().mean(0) if own.on else own.centre)
    ),
    "dropout, then a mean": lambda own, h: (
        h - nn.functional.dropout(h.detach(), 0.5).mean(0) if own.on else nn.functional.dropout(h, 0.5)
    ),
    "what the last step has kept": from_before,
    "a string": as_text,
    "a number": lambda own, h: h * (1 + float(h.detach().mean()) if own.on else 1.0),
    "a mean that fills": lambda own, h: h + torch.zeros_like(h).fill_(h.detach().mean() if own.on else own.centre[0]),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_begins_to_mix_is_refused_in_that_step(name: str) -> None:
    torch.manual_seed(0)
    assert accepted(Program(MIXING[name])) == BEGINS


@pytest.mark.parametrize(
    "hold", [lambda x: lambda: x, lambda x: lambda own=x: own, lambda x: partial(torch.add, x, other=x)]
)
def test_what_functions_have_kept_is_refused_in_the_second_step(hold: Callable[[Tensor], Callable[[], Tensor]]) -> None:
    def what(own: Any, h: Tensor) -> Tensor:
        now, own.hold = own.hold() if own.step else own.centre, hold(h.detach().mean(0))
        return h - now

    assert accepted(Program(what)) == 1


def test_methods_of_tensors_that_others_replaced_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    own, mine = Tensor.tolist, lambda x: own(x)
    monkeypatch.setattr(Tensor, "tolist", mine)
    assert accepted(Program(lambda _, h: h)) == 8
    assert vars(Tensor)["tolist"] is mine


def noisy(own: Program, h: Tensor) -> Tensor:
    return nn.functional.dropout(h, 0.1 + 0.1 * own.on) + torch.randn_like(h)


def skipped(own: Program, h: Tensor) -> Tensor:
    return h if torch.rand(()) < 0.5 else nn.functional.gelu(h) * 2


APART: dict[str, Callable[[Program, Tensor], Tensor]] = {
    "dropout that grows, and noise": noisy,
    "layers skipped by chance": skipped,
    "a scheduled number": lambda own, h: h / (1 + own.step),
    "another function": lambda own, h: h.relu_() if own.on else h.sigmoid(),
    "a constant of Python's numbers": lambda own, h: h * torch.tensor([1.0, 2.0] * 4),
    "a checkpoint": lambda own, h: checkpoint(torch.tanh, h, use_reentrant=False) if own.on else h,
    "a buffer that counts": lambda own, h: h * own.centre.add_(1),
    "a constant's values": lambda own, h: h * float(own.kept.numpy().sum() + own.centred.detach()[0, 0].tolist()),
    "parts written into memory": lambda own, h: torch.zeros_like(h).copy_(h),
    "what a buffer's number fills": lambda own, h: h + h.detach().clone().fill_(own.centre[0]),
}


@pytest.mark.parametrize("name", APART)
def test_what_keeps_samples_apart_is_accepted(name: str) -> None:
    assert accepted(Program(APART[name])) == 8


@pytest.mark.parametrize("reads", [False, True])
def test_batches_of_other_sizes_need_no_further_check(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    checks, own = list[Any](), ABOVE.show
    monkeypatch.setattr(ABOVE, "show", lambda *given: [checks.append(given), own(*given)][-1])
    masked = lambda own, h: h.relu() if (h > 0).all() else h.relu() * (h > 0)  # noqa: E731
    for _ in steps(Program(masked if reads else lambda own, h: nn.functional.dropout(h, 0.1))):
        pass
    assert len(checks) == 1


@torch.library.custom_op("test_tapes::centred", mutates_args=())
def centred(h: Tensor) -> Tensor:
    return h - h.mean(0)


def replaced(h: Tensor) -> Tensor:
    h.data = h.detach() - h.detach().mean(0)
    return h


OPEN: dict[str, Callable[[Tensor], Any]] = {
    "numpy()": lambda h: h + torch.from_numpy(h.detach().numpy() - h.detach().numpy().mean(0)),
    "asarray": lambda h: h + torch.from_numpy(np.asarray(h.detach()) * 2),
    "tolist()": lambda h: h + torch.tensor(h.detach().tolist()),
    "dlpack": lambda h: h + torch.from_dlpack(h.detach()),
    ".data =": replaced,
    "test_tapes::centred, at": lambda h: h + centred(h.detach()),
}
"""By words of what is said."""


@pytest.mark.parametrize("name", OPEN)
def test_what_no_tape_sees_is_refused_by_name(name: str) -> None:
    with pytest.raises(ProbeFailed, match=rf"independence.*{Path(__file__).name}:\d+") as refused:
        list(steps(Program(lambda own, h: OPEN[name](h * 1))))
    assert name in str(refused.value)
    assert "register_operation" in str(refused.value) or "::" not in name


def test_outputs_and_graphs_keep_their_bits() -> None:
    def kinds(x: Tensor) -> list[str]:
        nodes = [x.grad_fn]
        for node in nodes:
            nodes += [ahead for ahead, _ in node.next_functions if ahead is not None and ahead not in nodes]  # type: ignore
        return [type(node).__name__.replace("ReshapeAlias", "View") for node in nodes]

    model = nn.Sequential(nn.Linear(5, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.LSTM(8, 8))
    x = torch.randn(4, 3, 5)
    for context in (torch.autocast("cpu", enabled=False), torch.autocast("cpu", torch.bfloat16)):
        found = []
        for independent in (False, True):
            with autograd_hacks.add_hooks(model, independent=independent, batch_dim=0), context:
                for _ in range(2):
                    torch.manual_seed(0)
                    out = model(x)[0]
            found.append((out.tolist(), kinds(out)))
        assert found[0] == found[1]


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def test_modes_of_the_user_stay_on_and_see_everything() -> None:
    inside = Counting()

    def enters(*_: Any) -> None:
        inside.__enter__()

    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh())
    with Counting() as plain:
        model(torch.randn(4, 5))
    with autograd_hacks.add_hooks(model, independent=True), Counting() as around:
        model(torch.randn(4, 5))
        before = around.count
        model.register_forward_pre_hook(enters)  # the mode is still on when the forward has ended
        out = model(torch.randn(4, 5))
        assert recorder_of(model).tape is not None
        count = inside.count
        out = out * 2
        assert inside.count == count + 1
        inside.__exit__(None, None, None)
    assert inside.count > plain.count
    assert around.count > before
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_an_interrupted_forward_leaves_no_mode_and_no_watch_behind() -> None:
    numpy = Tensor.numpy

    class Stopped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    for kind in (Stopped, nn.Linear):
        model = nn.Sequential(nn.Linear(5, 3), kind(3, 2))
        stopped = pytest.raises(KeyboardInterrupt if kind is Stopped else RuntimeError)
        with autograd_hacks.add_hooks(model, independent=True), stopped:
            model(torch.randn(4, 5 if kind is Stopped else 6))
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        assert Tensor.numpy is numpy


def test_compiled_functions_run_as_they_are_written_and_compiled_again_afterwards() -> None:
    calls: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        def run(*given: Any) -> Any:
            calls.append(1)
            return graph(*given)

        return run

    def centred(h: Tensor, on: bool) -> Tensor:
        return h - h.detach().mean(0) if on else h * 2

    own = torch.compile(centred, backend=backend)
    own(torch.randn(4, 8), False)
    before = len(calls)
    assert before
    assert accepted(Program(lambda model, h: own(h, model.on))) == BEGINS
    assert len(calls) == before
    own(torch.randn(4, 8), False)
    assert len(calls) == before + 1


# What analysis shows of whole models


ANALYSED = "Independent by analysis"


def written(what: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A layer, and then what a function makes of its output."""
    model = Bare(lambda m, x: what(m, m.layer(x)), layer=nn.Linear(4, 4))
    model.register_buffer("mean", torch.zeros(4))
    model.register_buffer("steps", torch.zeros(()))
    return model


def counted(model: Any, h: Tensor) -> Tensor:
    model.steps += 1
    return h * model.steps


def within(independent_of: nn.Module, x: Tensor) -> str:
    with autograd_hacks.add_hooks(independent_of, independent=True):
        out = independent_of(x)
        (out if isinstance(out, Tensor) else out[0]).square().sum().backward()
        autograd_hacks.compute_grad1(independent_of)
        return autograd_hacks.describe(independent_of).independence


SHOWN = {
    "convolutions": lambda: (nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()), (5, 2, 6, 6)),
    "attention, dropout": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (5, 3, 8)),
    "an LSTM": lambda: (nn.Sequential(nn.Linear(4, 8), nn.LSTM(8, 8, 2, batch_first=True)), (5, 3, 4)),
    "a norm in evaluation": lambda: (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), (5, 4)),
    "a count in a buffer": lambda: (written(counted), (5, 4)),
    "a checkpoint": lambda: (written(lambda own, h: checkpoint(torch.tanh, h, use_reentrant=False)), (5, 4)),
    "sorted features": lambda: (written(lambda own, h: h.sort(1).values * h.detach().amax(1, keepdim=True)), (5, 4)),
    "noise": lambda: (written(lambda own, h: h + torch.randn_like(h)), (5, 4)),
    "a product of three": lambda: (Bare(lambda m, x: m.layer(x, x.tanh()), layer=nn.Bilinear(4, 4, 3)), (5, 4)),
    "a normed weight": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), (4, 4)),
    "a circle": lambda: (nn.Sequential(nn.Conv1d(2, 4, 3, padding=1, padding_mode="circular"), nn.ReLU()), (5, 2, 6)),
    "slopes that are drawn": lambda: (nn.Sequential(nn.Linear(4, 4), nn.RReLU()), (5, 4)),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_analysis_shows(name: str) -> None:
    model, shape = SHOWN[name]()
    buffers = {key: x.clone() for key, x in model.named_buffers()}
    drawn = torch.get_rng_state()
    assert within(model, torch.randn(shape)).startswith(ANALYSED)
    for key, x in model.named_buffers():
        assert type(x) is Tensor
        assert torch.equal(x, buffers[key] + 1 if name == "a count in a buffer" and key == "steps" else buffers[key])
    assert not torch.equal(drawn, torch.get_rng_state())
