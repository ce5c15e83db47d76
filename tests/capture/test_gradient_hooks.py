"""The user's hooks on gradients: those that only look do so, and those that move samples are refused by name."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import squares
from rarely import crossed
from steps import check, check_batches
from torch import Tensor
from torch.nn.modules.module import register_module_full_backward_hook, register_module_full_backward_pre_hook
from torch.nn.utils.parametrizations import orthogonal
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.capture import arrivals, gradient_hooks, lean
from autograd_hacks.errors import SamplesMixed, UnseenGradient

Change = Callable[[Tensor], Tensor]
MOVE: dict[str, Change] = {
    "flip": lambda g: g.flip(0),
    "roll": lambda g: g.roll(1, 0),
    "centre": lambda g: g - g.mean(0),
    "norm of the batch": lambda g: g / g.norm(),
    "replace": lambda g: torch.randn(g.shape, dtype=g.dtype),
}
KEEP: dict[str, Change] = {
    "scale": lambda g: -3 * g,
    "own norm": lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=1e-30),
    "copy": lambda g: g.clone(),
    "itself": lambda g: g,
}


class Hooked(nn.Module):
    """Has a hook in the middle.  how: where it is registered, see `WAYS`"""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.middle, self.last, self.how = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), how
        self.change: Change | None = None  # what it does; None for no hook
        self.seen: list[Tensor] = []
        self.double()

    def hook(self, g: Tensor) -> Tensor | None:
        assert self.change is not None
        self.seen.append(g)
        return self.change(g)

    def inside(self, x: Tensor) -> Tensor:
        h = self.middle(self.first(x))
        if self.change is not None and self.how in WAYS:
            WAYS[self.how](self, h)
        return self.last(h)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False) if self.how == "in a checkpoint" else self.inside(x)


def of_tuple(model: Hooked) -> Callable[..., tuple[Tensor, ...] | None]:
    def hook(grads: tuple[Tensor, ...], *_: Any) -> tuple[Tensor, ...] | None:
        found = model.hook(grads[0])
        return None if found is None else (found,)

    return hook


def node_of(h: Tensor) -> Any:
    return h.grad_fn


def layer_of(h: Tensor) -> Any:
    """The node of the layer before the hidden one, which has a hook of the library's own."""
    return h.grad_fn.next_functions[0][0]  # type: ignore[union-attr]


WAYS: dict[str, Callable[[Hooked, Tensor], Any]] = {
    "of a tensor": lambda model, h: h.register_hook(model.hook),
    "before a node": lambda model, h: node_of(h).register_prehook(of_tuple(model)),
    "after a node": lambda model, h: node_of(h).register_hook(of_tuple(model)),
    "before a layer's node": lambda model, h: layer_of(h).register_prehook(of_tuple(model)),
    "in a checkpoint": lambda model, h: h.register_hook(model.hook),
}


@contextmanager
def hooking(model: Hooked, how: str) -> Iterator[None]:
    """A context with a hook of a module, or of all modules."""
    pre = lambda module, out: of_tuple(model)(out) if module is model.middle else None  # noqa: E731
    full = lambda module, into, out: of_tuple(model)(into) if module is model.middle else None  # noqa: E731
    handle = {
        "of a module": lambda: model.middle.register_full_backward_hook(full),
        "before a module": lambda: model.middle.register_full_backward_pre_hook(pre),
        "of all modules": lambda: register_module_full_backward_hook(full),
        "before all modules": lambda: register_module_full_backward_pre_hook(pre),
    }[how]()
    try:
        yield
    finally:
        handle.remove()


OF_MODULES = ("of a module", "before a module", "of all modules", "before all modules")


@crossed(how=WAYS, what=MOVE, begins=[0, 3])
def test_a_hook_that_moves_samples_is_refused_by_name(how: str, what: str, begins: int) -> None:
    model = Hooked(how)
    with autograd_hacks.add_hooks(model):
        for n in range(5):
            x = torch.randn(5, 3).double()
            if n < begins:
                check(model, x)
                continue
            model.change = MOVE[what]
            squares(model(x)).mean().backward()
            with pytest.raises(SamplesMixed, match=r"the backward hook .*hook .*test_gradient_hooks\.py:\d+"):
                autograd_hacks.compute_grad1(model)
            model.change = None


@pytest.mark.parametrize("most", [1, 1000])
@pytest.mark.parametrize("model", [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.LSTM(3, 3)])
def test_hooks_are_noted_while_gone_ones_are_forgotten(monkeypatch: Any, model: nn.Module, most: int) -> None:
    """Also of a layer that is the model; of an LSTM whose samples are on axis 1."""
    axis, own = int(isinstance(model, nn.LSTM)), copy.deepcopy(model).double()
    with autograd_hacks.add_hooks(own):
        for _ in range(3):
            out, *_ = own(torch.randn(2, 5, 3).double()) if axis else [own(torch.randn(5, 3).double())]
            monkeypatch.setattr(arrivals, "MANY", most)
            out.register_hook(lambda g: g.flip(axis))
            out.square().sum().backward()
            with pytest.raises(SamplesMixed, match="lambda"):
                autograd_hacks.compute_grad1(own, "sum")


@crossed(how=WAYS, what=KEEP, param_grad=[True, False])
def test_a_hook_that_works_sample_by_sample_is_followed(how: str, what: str, param_grad: bool) -> None:
    model = Hooked(how)
    model.change = KEEP[what]
    check_batches(model, *(torch.randn(5, 3).double() for _ in range(4)), loss_type="sum", param_grad=param_grad)


@pytest.mark.parametrize("param_grad", [True, False])
@pytest.mark.parametrize("begins", [0, 3])
def test_a_hook_that_changes_what_a_layer_makes_for_its_weight_is_refused(begins: int, param_grad: bool) -> None:
    model = Hooked("nowhere")

    def twice(layer: nn.Module, args: object, out: Tensor) -> None:
        if model.change is not None and out.grad_fn is not None:
            out.grad_fn.register_hook(lambda made, given: tuple(None if g is None else 2 * g for g in made))

    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        model.first.register_forward_hook(twice)
        for n in range(6):
            if n < begins:
                check(model, torch.randn(5, 3).double())
                continue
            model.change = KEEP["scale"]
            squares(model(torch.randn(5, 3).double())).mean().backward()
            with pytest.raises(SamplesMixed, match="twice"):
                autograd_hacks.compute_grad1(model)
            model.change = None


def test_a_hook_that_is_registered_where_the_pass_begins() -> None:
    """It changes the gradient of its layer before that is taken."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with autograd_hacks.add_hooks(model):
        for n in range(5):
            x = torch.randn(5, 3).double()
            if n < 3:
                check(model, x)
                continue
            model.zero_grad()
            out = model(x)
            out.grad_fn.register_prehook(lambda grads, looks=n == 3: None if looks else (2 * grads[0],))
            squares(out).mean().backward()
            autograd_hacks.compute_grad1(model)
            for p in model.parameters():
                assert_close(p.grad1.mean(0), p.grad)


@crossed(where=["inner", "first", "out", "loss"], others=[0, 1], is_scalar=[True, False], goes_on=[0, 1])
def test_a_hook_that_is_registered_after_the_forward_may_look_and_not_permute_samples(
    where: str, others: int, is_scalar: bool, goes_on: int
) -> None:
    """Another hooked model in the pass watches it, too.  goes_on: whether another forward follows before the pass"""
    model, other = (
        Bare(lambda m, x: m.own(x), own=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))).double()
        for _ in range(2)
    )
    kept: dict[str, Tensor] = {}
    model.own[1].register_forward_hook(lambda layer, args, out: kept.update(inner=out, first=args[0]))
    x = torch.randn(5, 3).double()
    with autograd_hacks.add_hooks(other), autograd_hacks.add_hooks(model):
        for flips in (True, False, True):
            losses = squares(other(x)) if others else 0
            kept["out"] = model(x)
            kept["loss"] = kept["out"] * 2
            kept[where].register_hook((lambda g: g.flip(0)) if flips else lambda g: None)
            total = squares(kept["loss"]) + losses + (squares(model(x)) if goes_on else 0)
            (total.sum().backward() if is_scalar else autograd_hacks.backward(total, "sum"))
            said = r"the backward hook .*lambda.*not sample by sample"
            with pytest.raises(SamplesMixed, match=said) if flips else nullcontext():
                autograd_hacks.compute_grad1(model, "sum")


@pytest.mark.parametrize("at", ["loss", "out"])
@pytest.mark.parametrize("where", ["middle", "first", "out", "at a node"])
def test_a_hook_that_another_registers_while_the_pass_runs(where: str, at: str) -> None:
    """On a tensor that the pass has yet to reach, or at the node where the rows' gradient is taken, before or after that."""
    model, kept = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), dict[str, Tensor]()
    model[1].register_forward_hook(lambda layer, args, out: kept.update(middle=out, first=args[0]))

    def register(g: Tensor) -> None:
        if where == "at a node":
            node_of(kept["out"]).register_prehook(lambda grads: (grads[0].flip(0),))
        else:
            kept[where].register_hook(lambda g: g.flip(0))

    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            kept["out"] = model(torch.randn(5, 3).double())
            loss = squares(kept["out"]).sum()
            (loss if at == "loss" else kept[at]).register_hook(register)
            loss.backward()
            with pytest.raises(SamplesMixed, match="lambda"):
                autograd_hacks.compute_grad1(model, "sum")


def test_the_librarys_own_hooks_are_no_new_ones_for_other_hooked_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are those on modules and leaves."""
    models = [nn.Sequential(orthogonal(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)).double() for _ in range(3)]
    handles = [autograd_hacks.add_hooks(model, param_grad=n != 1) for n, model in enumerate(models)]
    looked: list[int] = []
    for module in (lean, gradient_hooks):
        monkeypatch.setattr(module, "since", lambda first: looked.append(first) or [])
    for _ in range(5):
        looked.clear()
        for model in models:
            _ = model[0].register_forward_hook(lambda *_: None), model[2].weight.register_hook(lambda _: None)
            check(model, torch.randn(5, 3).double())
    assert not looked
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("how", WAYS)
def test_a_hook_that_looks_runs_once(how: str) -> None:
    model = Hooked(how)
    model.change = lambda g: None  # type: ignore[assignment,return-value]
    with autograd_hacks.add_hooks(model):
        for n in range(4):
            model.seen.clear()
            squares(model(torch.randn(5, 3).double())).mean().backward()
            autograd_hacks.compute_grad1(model)
            assert len(model.seen) == 1, n


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed with respect to module outputs")
@pytest.mark.parametrize("how", OF_MODULES)
def test_hooks_of_modules(how: str) -> None:
    model, x = Hooked("of modules alone"), torch.randn(5, 3).double()
    with autograd_hacks.add_hooks(model):
        with hooking(model, how):
            model.change = MOVE["flip"]
            squares(model(x)).mean().backward()
            assert model.seen
            with pytest.raises(SamplesMixed, match=r"the backward hook .*of a Tanh"):
                autograd_hacks.compute_grad1(model)
            model.change = lambda g: None  # type: ignore[assignment,return-value]
            for _ in range(3):
                squares(model(x)).mean().backward()
                autograd_hacks.compute_grad1(model)
        model.change = None
        check(model, x)


def test_a_hook_that_overwrites_gradient_is_refused() -> None:
    model = Hooked("of a tensor")
    model.change = lambda g: [None, g.mul_(2)][0]  # type: ignore[assignment,return-value]
    with autograd_hacks.add_hooks(model):
        squares(model(torch.randn(5, 3).double())).mean().backward()
        with pytest.raises(SamplesMixed, match="overwrites gradient"):
            autograd_hacks.compute_grad1(model)


def registers(m: nn.Module, x: Tensor) -> Tensor:
    """Registers a hook of each kind on the layers as it runs."""
    kinds = "forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "state_dict_pre_hook"
    for register in (getattr(layer, f"register_{kind}") for layer in (m.first, m.last) for kind in kinds):
        register(lambda *_: None)
    return m.last(m.first(x).tanh())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed with respect to module outputs")
def test_a_model_may_register_hooks_on_its_layers_as_it_runs() -> None:
    hooked, plain = (Bare(registers, first=nn.Linear(3, 4), last=nn.Linear(4, 2)).double() for _ in range(2))
    plain.load_state_dict(hooked.state_dict())
    autograd_hacks.add_hooks(hooked)
    x = torch.randn(2, 3).double()
    for _ in range(2):
        check(hooked, x)
        squares(plain(x), torch.zeros(2, 2)).mean().backward()
        copy.deepcopy(hooked).state_dict()


@crossed(begins=[-1, 0, 3], what=["looks", "copy", "roll", "overwrite"], param_grad=[True, False])
def test_a_hook_of_a_parameter_may_not_change_gradient(begins: float, what: str, param_grad: bool) -> None:
    """begins: the step after whose forward it is registered, -1 before `add_hooks`"""
    model, overwrite = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), lambda g: [None, g.mul_(2)][0]
    hook = {**MOVE, **KEEP, "looks": lambda g: None, "overwrite": overwrite}[what]
    register, changes = lambda: model[0].weight.register_hook(hook), what in ("roll", "overwrite")
    _ = register() if begins < 0 else None
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for n in range(5):
            losses = squares(model(torch.randn(5, 3).double()))
            _ = register() if begins == n else None
            losses.mean().backward()
            with pytest.raises(UnseenGradient, match=r"0\.weight") if changes and begins <= n else nullcontext():
                autograd_hacks.compute_grad1(model)
