"""What people see of forms, gradients and hooks: as a table, with nothing computed, changed or raised."""

import copy
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import Scale
from torch._subclasses.fake_tensor import FakeTensorMode

import autograd_hacks
from autograd_hacks import forms
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.forms import Dense, Form, Outer


def stepped(model: nn.Module, *args: Any) -> autograd_hacks.PerSampleGrads:
    model(*args).square().sum().backward()
    return autograd_hacks.per_sample_grads(model)


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))


def test_hooks_as_a_context_give_their_handle(model: nn.Module) -> None:
    with autograd_hacks.add_hooks(model) as handle:
        assert "4 parameters, 47 numbers" in str(handle)
    assert "removed" in repr(handle)


def test_gradients_are_a_table(model: nn.Module) -> None:
    with autograd_hacks.add_hooks(model):
        grads = stepped(model, torch.randn(5, 1, 4, 4))
    title, header, _, *lines, total = repr(grads).split("\n")
    assert title == "PerSampleGrads of 5 samples for 4 parameters, 47 numbers each"
    assert re.split("  +", header) == ["parameter", "form", "shape", "holds", "written out"]
    assert [line.split()[0] for line in lines] == list(grads)
    for line, (name, form) in zip(lines, grads.items()):
        cells = re.split("  +", line)
        assert cells[2] == str(tuple(form.dense().shape))
        assert cells[4] == f"{form.dense().nbytes} B"
        assert cells[1] == {"0.weight": "Convolution", "2.weight": "Outer"}.get(name, "Dense")
    # Of the linear layer x and g, 5 × (8 + 3) numbers; its bias has g once more, which counts once.
    assert re.split("  +", lines[2])[3] == "220 B"
    assert re.split("  +", total) == ["all", "740 B", "940 B"]  # 320 and 160 of the convolution, 40 of its bias
    html = grads._repr_html_()
    assert html.count("<tr>") == 1 + 4 + 1
    assert title in html


def test_a_form_is_a_line_and_a_table(model: nn.Module) -> None:
    with autograd_hacks.add_hooks(model):
        form = stepped(model, torch.randn(5, 1, 4, 4))["2.weight"]
    assert repr(form) == "Scaled of Outer: 5 rows of shape (3, 8), holds 220 B, 480 B written out"
    assert str(form).split("\n")[0] == repr(form)
    assert "  Outer" in str(form)
    assert "(5, 1, 3), (5, 1, 8)" in str(form)
    assert "(5, 1, 3), (5, 1, 8)" in form._repr_html_()


def test_what_the_loss_did_not_reach() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model.forward = lambda x: model["a"](x)
    with autograd_hacks.add_hooks(model):
        grads = stepped(model, torch.randn(3, 2))
    assert "Zero, not reached" in repr(grads)


def test_rows_of_outputs(model: nn.Module) -> None:
    with autograd_hacks.add_hooks(model):
        rows = autograd_hacks.per_sample_jacobian(model, model(torch.randn(5, 1, 4, 4)))
    assert "5 samples, 3 entries of an output each" in repr(rows)
    assert str(tuple(rows.dense()["2.weight"].shape)) == "(5, 3, 3, 8)"
    assert "(5, 3, 3, 8)" in repr(rows)


def test_many_parameters_are_shortened() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(100)])
    with autograd_hacks.add_hooks(model, probe=False):
        grads = stepped(model, torch.randn(3, 2))
    assert len(repr(grads).split("\n")) < 35
    assert "... 177 more" in repr(grads)
    assert repr(grads).split("\n")[-1].startswith("all")


def test_a_handle_says_what_is_recorded(model: nn.Module) -> None:
    frozen = sum(p.numel() for p in model[0].requires_grad_(False).parameters())
    handle = autograd_hacks.add_hooks(model)
    assert "\n" not in repr(handle)
    assert "no forward pass yet" in str(handle)
    assert re.search(r"trained +2 parameters, 27 numbers", str(handle))
    assert re.search(rf"frozen +2 parameters, {frozen} numbers", str(handle))
    output = model(torch.randn(5, 1, 4, 4))
    assert "no backward pass yet" in str(handle)
    output.square().sum().backward()
    assert re.search(r"recorded +5 samples, 1 backward pass\n", str(handle) + "\n")
    assert re.search(r"holds +220 B", str(handle))
    assert handle._repr_html_().count("<tr>") == str(handle).count("\n") - 1
    autograd_hacks.clear_backprops(model)
    assert "cleared" in str(handle)
    autograd_hacks.remove_hooks(model)
    assert str(handle) == repr(handle) == "<hooks of a Sequential, removed>"


def test_a_handle_of_layers_without_sizes() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    assert "of unknown size" in str(autograd_hacks.add_hooks(model))


def verbs_of(form: type[Form]) -> list[str]:
    names = ["dense", "matrix", "dot", "weighted_sum", "second_moment", "gram", "norms", "project", "cross", "block", "to"]
    return [name for name in [*names, "__getitem__", "written", "release"] if hasattr(form, name)]


def test_nothing_is_computed(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner, self.scale = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=True), Scale(4).float()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.scale(self.inner(self.embed(tokens))[0])

    model = Odd()
    handle = autograd_hacks.add_hooks(model)
    grads = stepped(model, torch.randint(9, (5, 3)))
    grouped = grads.group(torch.tensor([0, 0, 1, 1, 1])).select(torch.tensor([1, 1, 0])).scaled(torch.ones(3))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("rows were computed")

    kinds = [Form, *(kind for kind in vars(forms).values() if isinstance(kind, type) and issubclass(kind, Form))]
    for kind in kinds:
        for name in verbs_of(kind):
            if name in vars(kind):
                monkeypatch.setattr(kind, name, refuse)
    random, record = torch.get_rng_state(), copy.copy(vars(recorder_of(model).record))
    for thing in (handle, grads, grouped, *grads.values(), *grouped.values()):
        for says in (repr(thing), str(thing), thing._repr_html_()):
            assert "can't be shown" not in says, says
    assert torch.equal(random, torch.get_rng_state())
    assert vars(recorder_of(model).record) == record


FORMS: dict[str, Callable[[], Form]] = {
    "empty": lambda: Outer(torch.zeros(0, 1, 3), torch.zeros(0, 1, 2)),
    "without numbers": lambda: Dense(torch.zeros(3, 0)),
    "of a scalar": lambda: Dense(torch.zeros(3)),
    "meta": lambda: Outer(torch.zeros(2, 1, 3, device="meta"), torch.zeros(2, 1, 2, device="meta")),
    "complex": lambda: Dense(torch.zeros(3, 2, dtype=torch.complex64)),
    "scaled by a tensor": lambda: forms.scale(Dense(torch.zeros(3, 2)), torch.zeros(3)),
    "sum": lambda: forms.Sum([Dense(torch.zeros(3, 2, 2)), Outer(torch.zeros(3, 1, 2), torch.zeros(3, 1, 2))]),
    "below each other": lambda: forms.Concatenation([Dense(torch.zeros(3, 2))] * 100),
}


@pytest.mark.parametrize("name", FORMS)
def test_any_form_can_be_shown(name: str) -> None:
    form = FORMS[name]()
    for says in (repr(form), str(form), form._repr_html_()):
        assert "can't be shown" not in says, says
        assert type(form).__name__ in says
    assert len(str(form).split("\n")) < 35


def test_inside_of_transforms() -> None:
    said: list[str] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        said.append(repr(Dense(x)))
        return x.sum()

    torch.func.vmap(torch.func.grad(loss))(torch.zeros(5, 3, 2))
    with FakeTensorMode():
        said.append(repr(Dense(torch.zeros(3, 2))))
    assert said == ["Dense: 3 rows of shape (2,), holds 24 B, 24 B written out"] * 2


def test_a_form_of_ones_own_that_is_half_made() -> None:
    class Own(Dense):
        def __init__(self) -> None:
            pass

    for says in (repr(Own()), str(Own()), Own()._repr_html_()):
        assert "Own" in says


def test_gradients_whose_model_is_gone(model: nn.Module) -> None:
    grads = stepped_of_a_copy(model)
    assert "0.weight" in repr(grads)


def stepped_of_a_copy(model: nn.Module) -> autograd_hacks.PerSampleGrads:
    own = copy.deepcopy(model)
    autograd_hacks.add_hooks(own)
    grads, gone = stepped(own, torch.randn(5, 1, 4, 4)), weakref.ref(own)
    autograd_hacks.remove_hooks(own)
    del own
    assert gone is not None
    return grads


def test_gradients_that_were_overwritten(model: nn.Module) -> None:
    x = torch.randn(5, 1, 4, 4)
    with autograd_hacks.add_hooks(model):
        grads = stepped(model, x)
    x.zero_()
    assert "0.weight" in repr(grads)


def test_other_things_that_users_get(model: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(5, 1, 4, 4)
    autograd_hacks.add_hooks(model)
    accumulation = autograd_hacks.accumulate(model)
    assert repr(accumulation) == "<accumulate of a Sequential, not begun>"
    with accumulation:
        model(x).sum().backward()
        assert "1 forward so far" in repr(accumulation)
    assert "ended" in repr(accumulation)
    with autograd_hacks.during_backward(model, "norms") as streamed:
        assert "nothing yet" in repr(streamed)
        model(x).sum().backward()
    assert "norms of shape (5,)" in repr(streamed)
    autograd_hacks.backprop_hess(model(x))
    autograd_hacks.compute_hess(model, kind="ekfac")
    ekfac = model[2].weight.ekfac
    assert repr(ekfac) == "EKFAC of 2.weight: 3 × 8, 388 B"
    assert "eigenvectors" in str(ekfac)
    assert "(8, 8)" in ekfac._repr_html_()
    autograd_hacks.remove_hooks(model)
    assert "removed" in repr(accumulation)
