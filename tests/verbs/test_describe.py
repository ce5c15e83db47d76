"""The table of how each parameter's per-sample gradients are known."""

import pytest
import torch
import torch.nn as nn
from nets import Scale
from torch import Tensor

import autograd_hacks
from autograd_hacks.rules import RULES, Rule


class Everything(nn.Module):
    """Parameters of every fate."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(10, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.decode, self.unused = nn.LayerNorm(4), nn.Linear(4, 10, bias=False), nn.Linear(2, 2)
        self.decode.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.decode(self.norm(self.attend(x, x, x)[0]))


def test_before_and_after_a_step() -> None:
    model = Everything()
    before = {row.parameter: row for row in autograd_hacks.describe(model).rows}
    assert list(before) == [name for name, _ in model.named_parameters()]
    assert before["embed.weight"].how == "rule embedding, shared with decode.weight"
    assert before["attend.out_proj.weight"].layer == "NonDynamicallyQuantizableLinear"
    assert before["norm.bias"].how == "frozen"
    assert all(row.form == "" and row.samples is None for row in before.values())
    with autograd_hacks.add_hooks(model):
        model(torch.randint(10, (3, 5))).sum().backward()
        description = autograd_hacks.describe(model)
        after = {row.parameter: row for row in description.rows}
        autograd_hacks.compute_grad1(model)
        for name, p in model.named_parameters():
            if getattr(p, "grad1", None) is not None:
                assert (after[name].samples, after[name].bytes) == (3, p.grad1.nbytes)
    assert after["norm.weight"].form == "Dense"
    assert after["attend.in_proj_weight"].form == "Outer"
    assert after["attend.in_proj_weight"].how == "graph: MmBackward0 at the input of 'norm'"
    assert after["unused.weight"].how == "rule linear, not reached by the last backward pass"
    assert description.note == ""


def test_it_prints_in_a_terminal_and_in_a_notebook() -> None:
    description = autograd_hacks.describe(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    text = str(description)
    assert text == repr(description)
    assert text.startswith("parameter  layer        how its rows are computed  form  samples  written out\n---")
    assert "No forms to show: this Sequential has no hooks" in text
    html = description._repr_html_()
    assert html.count("<tr>") == 5
    assert ">BatchNorm1d</td>" in html


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


def test_every_listed_layer_says_rule() -> None:
    arguments = {
        nn.AdaptiveLogSoftmaxWithLoss: (16, 8, [2, 4]),
        nn.Bilinear: (2, 2, 2),
        nn.PReLU: (),
        nn.GroupNorm: (1, 2),
        nn.LayerNorm: (2,),
        nn.RMSNorm: (2,),
    }
    for kind in RULES:
        sizes = (2,) if "Norm" in kind.__name__ else (2, 2, 1) if "Conv" in kind.__name__ else (2, 2)
        more = {"affine": True} if "Instance" in kind.__name__ else {}
        layer = kind(*arguments.get(kind, sizes), **more)
        rows = autograd_hacks.describe(layer).rows
        assert rows
        assert all(row.how.startswith("rule ") for row in rows), kind


def test_sizes_have_units() -> None:
    for features, expected in ((10, "120 B"), (1000, "12 kB"), (10**6, "12 MB")):
        model = nn.Linear(features, 1, bias=False)
        with autograd_hacks.add_hooks(model):
            model(torch.ones(3, features)).sum().backward()
            assert autograd_hacks.describe(model).rows[0].cells()[-1] == expected


def test_describe_survives_a_rule_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Scale(2))
    monkeypatch.setitem(RULES, Scale, Rule(lambda layer, call: None))
    with autograd_hacks.add_hooks(model):
        model(torch.ones(3, 2)).sum().backward()
        assert "returned None" in str(autograd_hacks.describe(model))


def test_trained_parameters_alone() -> None:
    model = Everything()
    model.embed.requires_grad_(False)
    rows = autograd_hacks.describe(model).rows
    trained = autograd_hacks.describe(model, trained=True).rows
    assert trained == [row for row in rows if not row.how.startswith("frozen")]
    assert len(trained) == len(rows) - 2
