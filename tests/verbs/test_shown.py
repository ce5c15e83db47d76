"""What people see of forms, gradients and hooks: as a table, with nothing computed, changed or raised."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import Scale
from twin import Bare

import autograd_hacks
from autograd_hacks import forms
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.forms import Form
from autograd_hacks.formulas import RULES, Rule


def stepped(model: nn.Module, *args: Any) -> autograd_hacks.PerSampleGrads:
    model(*args).square().sum().backward()
    return autograd_hacks.per_sample_grads(model)


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))


def test_gradients_are_a_table(model: nn.Module) -> None:
    with autograd_hacks.add_hooks(model) as handle:
        assert "4 parameters, 47 numbers" in str(handle)
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


def test_a_handle_says_what_is_recorded(model: nn.Module) -> None:
    frozen = sum(p.numel() for p in model[0].requires_grad_(False).parameters())
    handle = autograd_hacks.add_hooks(model)
    assert repr(handle) == "<hooks of a Sequential: 4 modules, batch_dim=0, param_grad=True>"
    assert "no forward pass yet" in str(handle)
    assert re.search(r"trained +2 parameters, 27 numbers", str(handle))
    assert re.search(rf"frozen +2 parameters, {frozen} numbers", str(handle))
    output = model(torch.randn(5, 1, 4, 4))
    assert "no backward pass yet" in str(handle)
    output.square().sum().backward()
    assert re.search(r"recorded +5 samples, 1 backward pass\n", str(handle) + "\n")
    assert re.search(r"holds +220 B", str(handle))
    autograd_hacks.clear_backprops(model)
    assert "cleared" in str(handle)
    autograd_hacks.remove_hooks(model)
    assert str(handle) == repr(handle) == "<hooks of a Sequential, removed>"


def verbs_of(form: type[Form]) -> list[str]:
    names = ["dense", "matrix", "dot", "weighted_sum", "second_moment", "gram", "norms", "project", "block", "to"]
    return [name for name in [*names, "__getitem__", "written", "release"] if hasattr(form, name)]


def test_nothing_is_computed(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Bare(
        lambda m, tokens: m.scale(m.inner(m.embed(tokens))[0]),
        embed=nn.Embedding(9, 4),
        inner=nn.LSTM(4, 4, batch_first=True),
        scale=Scale(4).float(),
    )
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


def test_other_things_that_users_get(model: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(5, 1, 4, 4)
    autograd_hacks.add_hooks(model)
    with autograd_hacks.during_backward(model, "norms") as streamed:
        assert "nothing yet" in repr(streamed)
        model(x).sum().backward()
    assert "norms of shape (5,)" in repr(streamed)
    autograd_hacks.backprop_hess(model(x))
    autograd_hacks.compute_hess(model, kind="ekfac")
    ekfac = model[2].weight.ekfac
    assert repr(ekfac) == "EKFAC of 2.weight: 3 × 8, 388 B"
    assert "eigenvectors" in str(ekfac)


# The table of how each parameter's per-sample gradients are known


def everything() -> nn.Module:
    """Parameters of every fate."""
    model = Bare(
        lambda m, tokens: m.decode(m.norm(m.attend(*[m.embed(tokens)] * 3)[0])),
        embed=nn.Embedding(10, 4), attend=nn.MultiheadAttention(4, 2, batch_first=True), norm=nn.LayerNorm(4),
        decode=nn.Linear(4, 10, bias=False), unused=nn.Linear(2, 2),
    )  # fmt: skip
    model.decode.weight = model.embed.weight
    model.norm.bias.requires_grad_(False)
    return model


def test_before_and_after_a_step() -> None:
    model = everything()
    before = {row.parameter: row for row in autograd_hacks.describe(model).rows}
    trained = [row for name, row in before.items() if name != "norm.bias"]
    assert autograd_hacks.describe(model, trained=True).rows == trained
    assert list(before) == [name for name, _ in model.named_parameters()]
    assert before["embed.weight"].how == "rule embedding, shared with decode.weight"
    assert before["attend.out_proj.weight"].layer == "NonDynamicallyQuantizableLinear"
    assert before["norm.bias"].how == "frozen"
    assert all(row.form == "" and row.samples is None for row in before.values())
    with autograd_hacks.add_hooks(model):
        model(torch.randint(10, (3, 5))).sum().backward()
        description = autograd_hacks.describe(model)
        after = {row.parameter: row for row in description.rows}
        assert "Zero, not reached" in repr(autograd_hacks.per_sample_grads(model))
        autograd_hacks.compute_grad1(model)
        for name, p in model.named_parameters():
            if getattr(p, "grad1", None) is not None:
                assert (after[name].samples, after[name].bytes) == (3, p.grad1.nbytes)
    assert after["norm.weight"].form == "Dense"
    assert after["attend.in_proj_weight"].form == "Outer"
    assert after["attend.in_proj_weight"].how == "graph: MmBackward0 at the input of 'norm'"
    assert after["unused.weight"].how == "rule linear, not reached by the last backward pass"
    assert description.note == ""


def test_it_says_what_is_refused_and_why() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Scale(2).float())
    with autograd_hacks.add_hooks(model):
        model(torch.ones(3, 2)).sum().backward()
        read = autograd_hacks.describe(model).rows[2]
        model[1].forward = lambda x: (x - x.mean(0)) * model[1].scale
        model(torch.randn(3, 2)[:, None]).sum().backward()
        refused = autograd_hacks.describe(model)
    assert read.how == "graph: MulBackward0 at the outputs"
    assert (read.form, read.samples) == ("Dense", 3)
    assert refused.rows[0].how.startswith("refused: samples mix")
    assert refused.rows[2].how == read.how  # behind where they mix
    assert "samples mix" in refused.note


@pytest.mark.parametrize("independent", [True, False])
def test_it_says_whether_samples_are_independent(independent: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Scale(2).float())
    assert autograd_hacks.describe(model).independence == ""
    with autograd_hacks.add_hooks(model, independent=independent):
        assert autograd_hacks.describe(model).independence == ""
        model(torch.randn(3, 2)).sum().backward()
        told = "Independent by analysis: " if independent else "Independent along gradients"
        description = autograd_hacks.describe(model)
        assert description.independence.startswith(told)
        assert description.independence in str(description)
        model[1].forward = lambda x: (x - x.mean(0).detach()) * model[1].scale
        model.train(not model.training)
        model(torch.randn(3, 2)).sum().backward()
        told = "Not independent: samples mix" if independent else told
        assert autograd_hacks.describe(model).independence.startswith(told)


def test_describe_survives_a_rule_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Scale(2))
    monkeypatch.setitem(RULES, Scale, Rule(lambda layer, call: None))
    with autograd_hacks.add_hooks(model):
        model(torch.ones(3, 2)).sum().backward()
        assert "returned None" in str(autograd_hacks.describe(model))
