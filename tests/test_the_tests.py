"""Law 7: each of these mistakes fails the suite.  They are made on purpose here, and the suite's own tests are run."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, assert_same, squares
from steps import check, check_batches, check_losses
from strategies import Case, mixed_pair, permuted_fold, swapped
from test_form_laws import test_every_verb_equals_its_definition as verbs_law
from test_rule_laws import test_rule_equals_one_backward_per_sample as rows_law
from torch import Tensor

import autograd_hacks
from autograd_hacks.forms import Concatenation, Convolution, Dense, Form, Outer, Scaled, Sum, group
from autograd_hacks.formulas import RULES, Call
from autograd_hacks.reading import forwards, gate


def off_by_a_ten_thousandth(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return x, 1.0001 * g


def wrong_bias(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(x), g


def none(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return x, g


LINEAR = Case(nn.Linear(3, 2).double(), torch.arange(60.0).view(4, 5, 3).sin().double())
CONV = Case(nn.Conv2d(2, 4, 3, groups=2).double(), torch.arange(200.0).view(4, 2, 5, 5).sin().double())


def without_own_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes away the library's own checks, which come first."""
    monkeypatch.setattr(gate.Certificate, "check", lambda _: None)
    monkeypatch.setattr(forwards, "check_rules", lambda *_: {})


@pytest.mark.parametrize("mistake", [off_by_a_ten_thousandth, swapped, permuted_fold, mixed_pair, wrong_bias])
@pytest.mark.parametrize("case", [LINEAR, CONV], ids=["Linear", "Conv2d"])
@pytest.mark.parametrize("loss_type", ["mean", "sum"])
def test_a_wrong_rule_fails(
    mistake: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], case: Case, loss_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = RULES[type(case.layer)]

    def sabotage(how: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        def wrong(layer: nn.Module, call: Call) -> dict[str, Form]:
            x, g = how(call.args[0], call.grads[0])
            return rule.formula(layer, replace(call, args=(x,), grads=(g,)))

        monkeypatch.setitem(RULES, type(case.layer), replace(rule, formula=wrong))

    without_own_checks(monkeypatch)
    sabotage(none)
    rows_law.hypothesis.inner_test(case, loss_type, True, 2**20)
    sabotage(mistake)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        rows_law.hypothesis.inner_test(case, loss_type, True, 2**20)


def by_check(model: nn.Module, x: Tensor) -> None:
    with autograd_hacks.add_hooks(model):
        check(model, x)


def by_losses(model: nn.Module, x: Tensor) -> None:
    with autograd_hacks.add_hooks(model):
        check_losses(model, lambda: squares(model(x)))


@pytest.mark.parametrize("way", [by_check, by_losses, check_batches])
def test_every_check_of_a_step_fails_a_wrong_rule(
    way: Callable[[nn.Module, Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), LINEAR.layer), LINEAR.x
    way(model.double(), x)
    rule = RULES[nn.Linear]

    def wrong(layer: nn.Module, call: Call) -> dict[str, Form]:
        if layer is not LINEAR.layer:
            return rule.formula(layer, call)
        return rule.formula(layer, replace(call, grads=(1.0001 * call.grads[0],)))

    without_own_checks(monkeypatch)
    monkeypatch.setitem(RULES, nn.Linear, replace(rule, formula=wrong))
    with pytest.raises(AssertionError, match=r"2\.weight: Tensor-likes are not close"):
        way(model, x)


def test_rows_where_there_are_none_fail() -> None:
    rows, model = torch.zeros(3, 2), nn.Linear(2, 1, bias=False)
    for found, expected in (({"a": rows}, {"a": None}), ({"a": None}, {"a": rows}), ({"a": rows}, {}), ({}, {"a": rows})):
        with pytest.raises(AssertionError):
            assert_same(found, expected)
    with pytest.raises(AssertionError):
        assert_rows(model, {"weight": rows[:, None]})


X, G = torch.randn(3, 2, 6).double(), torch.randn(3, 4, 4).double()
SHAPE = torch.Size((4, 2, 3))


@pytest.mark.parametrize("verb", ["dot", "weighted_sum", "gram", "norms"])
@pytest.mark.parametrize(
    "form",
    [
        Outer(G.mT, torch.randn(3, 4, 6).double(), SHAPE),
        Outer(G[:, :, 0], X[:, 0], SHAPE),
        Convolution(X, G, SHAPE, [1], [0], [1], 1),
        Dense(torch.randn(3, *SHAPE).double()),
        group(Dense(torch.randn(2, *SHAPE).double()), torch.tensor([0, 2]), 3),
        Scaled(Outer(G[:, :, 0], X[:, 0], SHAPE), 3.0),
        Scaled(Outer(G[:, :, 0], X[:, 0], SHAPE), torch.tensor([3.0, -1.0, 0.5]).double()),
        Sum([Outer(G[:, :, 0], X[:, 0], SHAPE), Dense(torch.randn(3, *SHAPE).double())]),
        Concatenation([Outer(G[:, :, 0], X[:, 0], SHAPE), Dense(torch.randn(3, *SHAPE).double())]),
    ],
    ids=["Outer", "Outer of one position", "Convolution", "Dense", "Grouping", "Scaled", "Weighted", "Sum", "Concatenation"],
)  # fmt: skip
def test_a_wrong_verb_fails(form: Form, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verbs_law.hypothesis.inner_test((form, form), False)
    right = getattr(type(form), verb)
    monkeypatch.setattr(type(form), verb, lambda self, *args: 1.0001 * right(self, *args))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        verbs_law.hypothesis.inner_test((form, form), False)
