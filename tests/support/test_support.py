"""Values by tensor, the modules of a model, and the leaves of a tree."""

import gc
from collections import OrderedDict, deque

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves

from autograd_hacks.support.by_tensor import ByTensor
from autograd_hacks.support.trees import leaves_of, modules_of


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


def test_leaves_are_those_that_torch_finds() -> None:
    x = torch.ones(2)
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    trees = [
        x,
        None,
        (),
        [x, (x, 3)],
        {"b": x, "a": [None]},
        OrderedDict(a=x),
        deque([x]),
        torch.Size((2,)),
        x.max(0),
        packed,
    ]
    assert all(a is b for a, b in zip(leaves_of((trees, {"k": trees})), tree_leaves((trees, {"k": trees})), strict=True))
