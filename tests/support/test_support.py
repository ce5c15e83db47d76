"""Values by tensor, and the modules of a model."""

import gc

import torch
import torch.nn as nn

from autograd_hacks.support.by_tensor import ByTensor
from autograd_hacks.support.trees import modules_of


def test_values_by_tensor_go_with_the_tensor_and_are_of_the_very_object() -> None:
    values: ByTensor[str] = ByTensor()
    x = torch.ones(2)
    values[x] = "first"
    values[x] = "second"
    assert x in values
    assert values.get(x) == "second"
    assert x.clone() not in values
    assert values.get(x[:]) is None
    del x
    gc.collect()
    assert list(values.values()) == []


def test_modules_of_a_model_are_those_that_it_names() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), shared, nn.Sequential(nn.Tanh(), nn.Sequential(shared)))
    model.register_module("none", None)
    assert modules_of(model) == list(model.modules())
