"""Ctrl-C at any line of the library leaves a model that trains, and all else that can be seen as it was; what is freed."""

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import bare_vector, checkpointed, within
from oracle import squares
from rarely import crossed, rarely
from steps import alive, assert_right, batch, mlp
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.testing import assert_close
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from twin import Bare

import autograd_hacks
from autograd_hacks.capture.calls import Layer, LayerCall
from autograd_hacks.reading.reader import Read
from autograd_hacks.support.switch import Switch

LIBRARY = (str(Path(autograd_hacks.__file__).parent), str(Path(nn.Linear.forward.__code__.co_filename).parent))
"""The library's files, and those of torch's layers, but for the registration of hooks."""

AT_MOST = 5
"""About so many interrupts a case."""

Line = tuple[str, int]


def watched() -> nn.Module:
    """With users' hooks that store, and with a part that is run again."""
    model = Bare(lambda m, x: m.last(m.inside(x).tanh()), inside=bare_vector(), last=nn.Linear(4, 2), stored=[])
    model.inside.inside.register_forward_hook(lambda layer, args, out: model.stored.append(out.detach()))
    return model


ZOO: dict[str, Callable[[], nn.Module]] = {
    "cnn": lambda: nn.Sequential(
        nn.Conv1d(5, 3, 2), nn.BatchNorm1d(3).eval(), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(3, 2)
    ),
    "spectral": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2)),
    "parametrized": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2)),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 6, batch_first=True),
    "lstm": lambda: within(nn.LSTM(4, 3, 2, batch_first=True, dropout=0.5), itemgetter(0)),
    "checkpointed": lambda: checkpointed(False),
    "watched": watched,
}
CASES = [(name, param_grad) for name in ZOO for param_grad in (True, False)]
X = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(5))


def fresh(name: str) -> nn.Module:
    torch.manual_seed(7)
    return ZOO[name]()


def plain_step(model: nn.Module) -> None:
    torch.manual_seed(11)
    squares(model(X)).mean().backward()


def program(model: nn.Module, param_grad: bool) -> None:
    """Two steps, of which the second is the first that goes without ordinary gradients."""
    autograd_hacks.add_hooks(model, param_grad=param_grad)
    for _ in range(2):
        model.zero_grad()
        plain_step(model)
        autograd_hacks.compute_grad1(model)


class Interrupt:
    """Raises KeyboardInterrupt at a line of the library, its n-th, or counts the lines."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.lines = at, list[Line]()

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        is_ours = frame.f_code.co_filename.startswith(LIBRARY) and not frame.f_code.co_name.startswith("register_")
        return self.line if is_ours else None

    def line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) - 1 == self.at:
                raise KeyboardInterrupt
        return self.line

    def run(self, function: Callable[[], None]) -> KeyboardInterrupt | None:
        """Runs a function.  Returns what came of it, with its traceback, which notebooks keep."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            function()
        except KeyboardInterrupt as interrupt:
            return interrupt
        finally:
            sys.settrace(before)
        return None


def moments(name: str, param_grad: bool) -> list[int]:
    """For each line that runs, when it does so first, and when last."""
    counter = Interrupt()
    assert counter.run(lambda: program(fresh(name), param_grad)) is None
    first = {line: n for n, line in reversed(list(enumerate(counter.lines)))}
    last = {line: n for n, line in enumerate(counter.lines)}
    return sorted({*first.values(), *last.values()})


def everywhere() -> dict[str, Any]:
    """torch's switches and caches."""
    return {
        "gradients": torch.is_grad_enabled(),
        "fast": torch.backends.mha.get_fastpath_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "modes": (len(_get_current_function_mode_stack()), len(_get_current_dispatch_mode_stack())),
        "saves": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "weights": dict(parametrize._cache),
        "records": Switch.on(),
        "inference": torch.is_inference_mode_enabled(),
    }


def users_hooks(model: nn.Module) -> list[Any]:
    hooks = [hook for part in model.modules() for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values())]
    return [hook for hook in hooks if not type(hook).__module__.startswith("autograd_hacks")]


def check_after(
    model: nn.Module, name: str, param_grad: bool, before: dict[str, Any], hooks: list[Any], where: Line
) -> None:
    plain = fresh(name)
    assert everywhere() == before, where
    assert [hook for hook in users_hooks(model) if hook not in hooks] == [], where
    assert len(users_hooks(model)) == len(hooks), where
    parameters, expected = dict(model.named_parameters()), dict(plain.named_parameters())
    assert list(parameters) == list(expected), where
    for key, p in expected.items():
        assert parameters[key].requires_grad == p.requires_grad, (where, key)
        assert torch.equal(parameters[key], p), (where, key)
    twin = copy.deepcopy(model)
    assert all(p.requires_grad for p in twin.parameters()), where
    for trained in (twin, model):
        trained.load_state_dict(plain.state_dict())
        trained.zero_grad()
    reference = copy.deepcopy(plain)
    plain_step(reference)
    plain_step(twin)
    for (key, p), q in zip(twin.named_parameters(), reference.parameters()):
        assert torch.equal(p.grad, q.grad), (where, key)
    program(model, param_grad)
    model.zero_grad()
    rows = {key: p.grad1.mean(0) for key, p in model.named_parameters()}
    plain_step(plain)
    plain.zero_grad()
    plain_step(plain)
    for key, p in plain.named_parameters():
        torch.testing.assert_close(rows[key], p.grad, msg=lambda m, key=key: f"{where} {key}: {m}")
    autograd_hacks.remove_hooks(model)
    found = [hook for part in model.modules() for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values())]
    assert len(found) == len(hooks), where
    assert not any(part._compiled_call_impl for part in model.modules()), where


def interrupt_at(name: str, param_grad: bool, at: int) -> None:
    model = fresh(name)
    hooks, before = users_hooks(model), everywhere()
    interrupt = Interrupt(at)
    error = interrupt.run(lambda: program(model, param_grad))  # held, with the frames that it came through
    where = interrupt.lines[at] if at < len(interrupt.lines) else ("", 0)
    check_after(model, name, param_grad, before, hooks, where)
    del error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "param_grad"), [*CASES[::3], *rarely(*(case for n, case in enumerate(CASES) if n % 3))])
def test_an_interrupt_at_any_line(name: str, param_grad: bool) -> None:
    """A sample of the lines, another in each case; AT_MOST may be raised to look at all of them."""
    lines, case = moments(name, param_grad), CASES.index((name, param_grad))
    for at in lines[case * 7 % (len(lines) // AT_MOST) :: len(lines) // AT_MOST]:
        interrupt_at(name, param_grad, at)


@pytest.mark.filterwarnings("ignore")
def test_interrupts_leave_no_memory_behind() -> None:
    held, lines = [], moments("watched", True)
    model = fresh("watched")
    autograd_hacks.add_hooks(model)
    program(model, True)
    expected = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
    for at in lines[:: len(lines) // 8]:
        Interrupt(at).run(lambda: program(model, True))
        model.stored.clear()
        model.zero_grad()
        program(model, True)
        held.append(alive(Tensor))
    now = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
    assert now <= expected
    assert max(held[-3:]) <= max(held[:6])


# What is freed, and when: records, activations, models, and nothing that piles up


def test_what_was_read_is_freed_when_the_next_forward_begins(model: nn.Module) -> None:
    x, y = batch()
    loss = squares(model(x), y).mean()
    loss.backward()
    del loss
    (record,) = (hook.recorder.record for hook in model._forward_pre_hooks.values() if hasattr(hook, "recorder"))
    with torch.no_grad():
        model(x)
    model(x)  # not read yet
    autograd_hacks.compute_grad1(model)
    with torch.no_grad():
        model(x)
    autograd_hacks.compute_grad1(model)  # read, but no backward pass can come after a forward like that
    activation = weakref.ref(record.segments[0])
    output = model(x)
    assert activation() is None
    with pytest.raises(autograd_hacks.errors.NothingRecorded, match="was read already"):
        autograd_hacks.compute_grad1(model)
    squares(output, y).mean().backward()
    autograd_hacks.compute_grad1(model)


def test_what_was_read_is_kept_where_another_pass_may_add_to_it(model: nn.Module) -> None:
    x, y = batch()
    output = model(x)
    squares(output, y).mean().backward(retain_graph=True)
    autograd_hacks.compute_grad1(model)
    twice = [2 * p.grad1 for p in model.parameters()]
    model(x)
    squares(output, y).mean().backward()
    autograd_hacks.compute_grad1(model)
    assert_close([p.grad1 for p in model.parameters()], twice)


@crossed(read=["nothing", "grad1", "clip", "hess"], param_grad=[True, False])
def test_a_hooked_model_that_is_dropped_is_freed(read: str, param_grad: bool) -> None:
    """Also with a record that nobody has read, and without remove_hooks."""
    model = mlp()
    autograd_hacks.add_hooks(model, param_grad=param_grad)
    for _ in range(2):
        output = model(batch()[0])
        if read == "hess":
            autograd_hacks.backprop_hess(output)
            autograd_hacks.compute_hess(model)
        else:
            output.sum().backward()
        if read == "grad1":
            autograd_hacks.compute_grad1(model)
        if read == "clip":
            autograd_hacks.clip_grad1_norm_(model, 1.0)
    gone = [weakref.ref(own) for own in (model, *model.parameters())]
    del model, output
    gc.collect()
    assert not any(own() is not None for own in gone)


def test_losses_that_are_kept_do_not_keep_the_inputs() -> None:
    model, kept, before = mlp(), [], alive(LayerCall)
    with autograd_hacks.add_hooks(model):
        for seed in range(4):
            x, y = batch(seed=seed)
            kept.append(squares(model(x), y).mean())
            kept[-1].backward()
            assert_right(model, x, y)
        assert alive(LayerCall) <= before + 2  # the last step's two layers


def test_hooks_that_come_and_go_keep_no_more_than_before() -> None:
    model, x = mlp(), torch.randn(5, 3).double()
    handle, found = autograd_hacks.add_hooks(model), []
    for n in range(12):
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        handle.off()
        handle.on()
        if n in (6, 11):
            found.append((alive(Read), alive(Layer)))
    assert found[0] == found[1]
