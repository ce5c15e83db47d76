"""What `PerSampleGrads` and `clip_grad1_norm_` refuse."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import perceptron
from steps import stepped
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import NothingRecorded, StaleRecord


class Written(nn.Module):
    """Its scale is written into another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x)
        h[:, :2] = self.scale
        return self.layer(x) * h


class Normalised(Written):
    """Its scale meets the batch by way of another value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[:, :2] * (self.scale / self.scale.norm())


def test_weights_that_are_none() -> None:
    grads = stepped(perceptron(), torch.randn(6, 4))
    for verb in (grads.weighted_sum, grads.second_moment):
        with pytest.raises(ValueError, match=r"\(5,\).*N = 6"):
            verb(torch.ones(5))
        for wrong in (torch.ones(6, dtype=torch.long), torch.ones(6, dtype=torch.bool), [1.0] * 6):
            with pytest.raises(TypeError, match="expected a floating-point tensor"):
                verb(wrong)
    with pytest.raises(ValueError, match=r"\(2, 6\); expected \(N,\)"):
        grads.second_moment(torch.ones(2, 6))
    with pytest.raises(ValueError, match=r"\(\)"):
        grads.weighted_sum(torch.tensor(1.0))


def test_directions_that_do_not_fit() -> None:
    grads = stepped(perceptron(), torch.randn(6, 4))
    v = {name: torch.zeros(form.shape) for name, form in grads.items()}
    with pytest.raises(ValueError, match=r"^dot: the direction has no entry for '0\.bias'; expected one for each of the 4"):
        grads.dot({name: x for name, x in v.items() if name != "0.bias"})
    with pytest.raises(ValueError, match=r"^dot: the direction has an entry for 'more', which is not a trainable parameter"):
        grads.dot(v | {"more": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"entry for '2\.weight' is .*\(5, 3\); expected.*\(3, 5\)"):
        grads.dot(v | {"2.weight": torch.zeros(5, 3)})
    with pytest.raises(TypeError, match="dictionary"):
        grads.dot(torch.zeros(3))


def test_gradients_of_two_models() -> None:
    one, other = (stepped(perceptron(), torch.randn(6, 4)) for _ in range(2))
    with pytest.raises(ValueError, match="another model"):
        one.gram(other)
    model, x = perceptron(), torch.randn(6, 4)
    whole = stepped(model, x)
    model(x).square().sum(1).mean().backward()
    with pytest.raises(ValueError, match=r"the other gradients are without '0\.weight', '0\.bias'; expected two batches"):
        whole.gram(autograd_hacks.per_sample_grads(model, only="2.*"))
    with pytest.raises(TypeError, match="expected the PerSampleGrads"):
        one.gram(one.dense())


@pytest.mark.parametrize("max_norm", [0, -1, float("nan")])
def test_a_norm_that_is_none(max_norm: float) -> None:
    model = perceptron()
    stepped(model, torch.randn(6, 4))
    with pytest.raises(ValueError, match="max_norm"):
        autograd_hacks.clip_grad1_norm_(model, max_norm)


def test_ids_and_samples_that_are_none() -> None:
    grads = stepped(perceptron(), torch.randn(6, 4))
    with pytest.raises(TypeError, match="N integers"):
        grads.group(torch.ones(6))
    with pytest.raises(ValueError, match=r"\(5,\); expected \(6,\)"):
        grads.group(torch.ones(5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\[0, 2\)"):
        grads.group(torch.arange(6), 2)
    for numbers in ([0, 6], [-7, 2]):
        with pytest.raises(IndexError, match=rf"go from {min(numbers)} to {max(numbers)}; expected \[-6, 6\)"):
            grads.select(torch.tensor(numbers))
    with pytest.raises(IndexError, match="the mask has 5 entries; expected 6, one for each sample"):
        grads.select(torch.ones(5, dtype=torch.bool))
    for wrong in (torch.ones(6, dtype=torch.uint8), torch.zeros(2), torch.zeros(0)):  # the first may be a mask, or numbers
        with pytest.raises(TypeError, match="expected booleans or integers"):
            grads.select(wrong)
    with pytest.raises(ValueError, match="dim=0"):
        grads.project(0)
    with pytest.raises(ValueError, match="needs two samples"):
        grads.select(slice(1)).variance()


def test_reading_too_late() -> None:
    x = torch.randn(6, 4)
    for model in (Written(), Normalised()):  # whose rows need their scale no more
        norms = stepped(model, x).norms()
        with torch.no_grad():
            model.scale.copy_(torch.tensor([3.0, -1.0]))
        assert_close(autograd_hacks.per_sample_grads(model).norms(), norms)
    model = perceptron()
    grads = stepped(model, x)
    x.zero_()
    with pytest.raises(StaleRecord, match=r"'0\.weight'.*overwritten"):
        grads.norms()
    autograd_hacks.clear_backprops(model)
    with pytest.raises(NothingRecorded, match="cleared"):
        autograd_hacks.per_sample_grads(model)
    with pytest.raises(NothingRecorded, match="cleared"):
        autograd_hacks.clip_grad1_norm_(model, 1.0)


def test_copies_are_refused() -> None:
    grads = stepped(perceptron(), torch.randn(6, 4))
    for copies in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"take dense\(\)"):
            copies(grads)


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda m, g: g.select(0), TypeError),
        (lambda m, g: g.select(torch.tensor([[0, 1]])), TypeError),
        (lambda m, g: g.project(1.5), TypeError),
        (lambda m, g: g.group(torch.zeros(6, dtype=torch.long), 2.5), TypeError),
        (lambda m, g: autograd_hacks.clip_grad1_norm_(m, "1"), TypeError),
        (lambda m, g: autograd_hacks.per_sample_grads(m, scale=0), ValueError),
        (lambda m, g: autograd_hacks.per_sample_grads(m, scale=float("nan")), ValueError),
        (lambda m, g: autograd_hacks.per_sample_grads(m, scale=torch.ones(2)), TypeError),
        (lambda m, g: autograd_hacks.per_sample_grads(3), TypeError),
        (lambda m, g: g.dot({name: torch.ones(form.shape, dtype=torch.long) for name, form in g.items()}), ValueError),
    ],
)
def test_arguments_that_are_none(read: Callable[..., Any], error: type[Exception]) -> None:
    model = perceptron()
    grads = stepped(model, torch.randn(6, 4))
    with pytest.raises(error, match="expected"):
        read(model, grads)
    assert_close(grads.select(slice(None, None, -1)).norms(), grads.norms().flip(0))


def test_forms_by_name_and_by_parameter() -> None:
    model = perceptron()
    model[2].bias.requires_grad_(False)
    grads = stepped(model, torch.randn(6, 4))
    for name, p in model.named_parameters():
        assert (p in grads) == (name in grads) == p.requires_grad
        if p.requires_grad:
            assert grads[p] is grads[name]
            assert grads.get(p) is grads[name]
    for given, words in [
        ("weight", "there is no trainable parameter 'weight'.*'0.weight', '2.weight'"),
        ("0.wieght", "expected a trainable parameter.*: '0.weight'"),
        (model[2].bias, "'2.bias' is frozen; expected"),
        (nn.Parameter(torch.ones(2)), r"tensor of shape \(2,\) is not a parameter of the model"),
        (0, r"select\(index\)"),
        ("nowhere", "'0.weight', '0.bias', '2.weight'"),
    ]:
        with pytest.raises(KeyError, match=words):
            grads[given]  # type: ignore[index]


def test_names_of_a_shared_parameter() -> None:
    model = nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    model["other"].weight = model["one"].weight
    model.forward = lambda x: model["other"](model["one"](x))  # type: ignore[method-assign]  # the model of this test
    grads = stepped(model, torch.randn(6, 4))
    assert grads["other.weight"] is grads["one.weight"] is grads[model["other"].weight]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("norm", "norms"),
        ("cpu", r"dense\(\)"),
        ("mean", "weighted_sum"),
        ("gramm", "gram"),
        ("nothing_like_it", "$"),
    ],
)
def test_what_tensors_have_and_gradients_do_not(name: str, words: str) -> None:
    grads = stepped(perceptron(), torch.randn(6, 4))
    for thing in (grads, grads["0.weight"], grads.select(slice(2))["0.bias"]):
        assert not hasattr(thing, name)
        with pytest.raises(AttributeError, match=f"{type(thing).__name__}.*'{name}'.*{words}"):
            getattr(thing, name)


def test_forms_say_what_they_are() -> None:
    grads = stepped(perceptron(), torch.randn(6, 4))
    weight, bias = grads["0.weight"], grads["0.bias"]
    assert repr(weight) == f"Scaled of Outer: 6 rows of shape {tuple(weight.shape)}, holds 216 B, 480 B written out"
    assert repr(bias[:2]) == f"Scaled of Dense: 2 rows of shape {tuple(bias.shape)}, holds 40 B, 40 B written out"
    dense = autograd_hacks.forms.Dense(torch.ones(3, 4, 5))
    assert repr(dense) == "Dense: 3 rows of shape (4, 5), holds 240 B, 240 B written out"
    for form in grads.values():
        for leaf in form.leaves():
            assert repr(leaf).startswith(f"{type(leaf).__name__}: 6 rows")
