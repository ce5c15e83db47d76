"""What people see of forms, gradients and hooks: as a table, with nothing computed, changed or raised; and `verify`."""

import copy
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from mixing import MIXING
from nets import Between, Scale, noisy
from oracle import squares
from rarely import crossed, rarely
from steps import batch, mlp, step
from strategies import mixed_pair, permuted_fold, swapped
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks import forms
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.forms import Form
from autograd_hacks.formulas import RULES, Call, Rule
from autograd_hacks.reading import gate


def stepped(model: nn.Module, *args: Any) -> autograd_hacks.PerSampleGrads:
    model(*args).square().sum().backward()
    return autograd_hacks.per_sample_grads(model)


@pytest.fixture
def pictures() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))


def test_gradients_are_a_table(pictures: nn.Module) -> None:
    with autograd_hacks.add_hooks(pictures) as handle:
        assert "4 parameters, 47 numbers" in str(handle)
        grads = stepped(pictures, torch.randn(5, 1, 4, 4))
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


def test_a_handle_says_what_is_recorded(pictures: nn.Module) -> None:
    frozen = sum(p.numel() for p in pictures[0].requires_grad_(False).parameters())
    handle = autograd_hacks.add_hooks(pictures)
    assert repr(handle) == "<hooks of a Sequential: 4 modules, batch_dim=0, param_grad=True>"
    assert "no forward pass yet" in str(handle)
    assert re.search(r"trained +2 parameters, 27 numbers", str(handle))
    assert re.search(rf"frozen +2 parameters, {frozen} numbers", str(handle))
    output = pictures(torch.randn(5, 1, 4, 4))
    assert "no backward pass yet" in str(handle)
    output.square().sum().backward()
    assert re.search(r"recorded +5 samples, 1 backward pass\n", str(handle) + "\n")
    assert re.search(r"holds +220 B", str(handle))
    autograd_hacks.clear_backprops(pictures)
    assert "cleared" in str(handle)
    autograd_hacks.remove_hooks(pictures)
    assert str(handle) == repr(handle) == "<hooks of a Sequential, removed>"


def verbs_of(form: type[Form]) -> list[str]:
    names = ["dense", "matrix", "dot", "weighted_sum", "second_moment", "gram", "norms", "project", "block", "to"]
    return [name for name in [*names, "__getitem__", "written", "release"] if hasattr(form, name)]


def test_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_other_things_that_users_get(pictures: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(5, 1, 4, 4)
    autograd_hacks.add_hooks(pictures)
    with autograd_hacks.during_backward(pictures, "norms") as streamed:
        assert "nothing yet" in repr(streamed)
        pictures(x).sum().backward()
    assert "norms of shape (5,)" in repr(streamed)
    autograd_hacks.backprop_hess(pictures(x))
    autograd_hacks.compute_hess(pictures, kind="ekfac")
    ekfac = pictures[2].weight.ekfac
    assert repr(ekfac) == "EKFAC of 2.weight: 3 × 8, 388 B"


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


# `verify`: what it finds wrong, and what it must not


@pytest.mark.parametrize("mistake", [swapped, permuted_fold, mixed_pair])
def test_verify_fails_what_is_wrong(
    mistake: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = mlp(), torch.randn(4, 5, 3).double()
    formula = RULES[nn.Linear].formula

    def wrong(layer: nn.Module, call: Call) -> dict[str, Form]:
        inner, g = mistake(call.args[0], call.grads[0])
        return formula(layer, dataclasses.replace(call, args=(inner,), grads=(g,)))

    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        autograd_hacks.compute_grad1(model)
        rows = [p.grad1.clone() for p in model.parameters()]
        autograd_hacks.verify(model, rows=4)
        monkeypatch.setitem(vars(RULES[nn.Linear]), "formula", wrong)  # another rule would be refused
        monkeypatch.setattr(gate.Certificate, "check", lambda _: None)  # which comes first
        with pytest.raises(autograd_hacks.errors.VerificationFailed, match=r"(?s)wrong per-sample gradients.*0\.weight"):
            autograd_hacks.verify(model)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads))  # as they were
        assert all(torch.equal(p.grad1, own) for p, own in zip(model.parameters(), rows))


def test_verify_of_dropout_and_of_what_was_never_run() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), noisy(4)).double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        with pytest.raises(autograd_hacks.errors.NothingRecorded, match="needs the arguments"):
            autograd_hacks.verify(model)
        squares(model(x)).mean().backward()
        autograd_hacks.verify(model, rows=4)


def dropped(m: nn.Module, x: Tensor) -> Tensor:
    """Layers are skipped at random."""
    for layer in m.layers:
        x = x if torch.rand(()) < 0.5 else x + layer(x).relu()
    return m.out(x)


def test_verify_runs_the_step_that_was() -> None:
    torch.manual_seed(1)
    model = Bare(dropped, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), out=nn.Linear(8, 2)).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(8):
            model.zero_grad()
            x = torch.randn(16, 5, 8).double()
            model(x).square().sum().backward()
            state = torch.get_rng_state()
            autograd_hacks.verify(model)
            assert torch.equal(torch.get_rng_state(), state)


def test_verify_keeps_no_batch_and_takes_another(model: nn.Sequential) -> None:
    step(model, *batch())
    with pytest.raises(autograd_hacks.errors.NothingRecorded, match=r"no longer exist.*verify\(model, args=\(x,\)\)"):
        autograd_hacks.verify(model)
    x, _ = batch(seed=1)
    autograd_hacks.verify(model, rows=2, args=(x,))
    autograd_hacks.verify(model, rows=2, kwargs={"input": x})


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@crossed(dtype=DTYPES, under_autocast=[False, True])
def test_verify_passes_what_is_right_in_every_precision(dtype: torch.dtype, under_autocast: bool) -> None:
    for samples in (3, 17):
        model = nn.Sequential(
            nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU(), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        )
        auto = under_autocast and dtype in (torch.bfloat16, torch.float16)
        model, x = (
            model.to(torch.float32 if auto else dtype),
            torch.randn(samples, 5, 3).to(torch.float32 if auto else dtype),
        )
        with autograd_hacks.add_hooks(model), torch.autocast("cpu", dtype if auto else None, enabled=auto):
            model(x).float().square().mean().backward()
            autograd_hacks.verify(model, rows=2)
            autograd_hacks.verify(model)


@pytest.mark.parametrize("dtype", [DTYPES[0], *rarely(*DTYPES[1:])])
@pytest.mark.parametrize("what", ["detached", "attention", "norm"])
def test_verify_refuses_what_mixes_in_every_precision(what: str, dtype: torch.dtype) -> None:
    for samples in (3, 4, 17):
        for auto in (False, True) if dtype in DTYPES[2:] else (False,):
            used = torch.float32 if auto else dtype
            model, x = Between(MIXING[what]).to(used), torch.randn(samples, 3).to(used)
            with autograd_hacks.add_hooks(model), torch.autocast("cpu", dtype if auto else None, enabled=auto):
                model(x).float().square().mean().backward()
                with pytest.raises(autograd_hacks.errors.SamplesMixed):
                    autograd_hacks.verify(model, independent=what == "detached")
