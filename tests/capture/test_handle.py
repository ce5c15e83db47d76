"""What `add_hooks` returns: the handle of a model's hooks."""

import pytest
import torch
import torch.nn as nn
from test_hooks import traces

import autograd_hacks
from autograd_hacks.errors import NothingRecorded


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def losses(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x).square().sum(1)
    return out


X = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)


def test_remove_leaves_the_model_as_it_was() -> None:
    model = net()
    before = traces(model)
    handle = autograd_hacks.add_hooks(model)
    losses(model, X).mean().backward()
    autograd_hacks.compute_grad1(model)
    handle.remove()
    model.zero_grad()
    assert traces(model) == before
    handle.remove()  # nothing happens
    with pytest.raises(NothingRecorded):
        _ = handle.settings
    with pytest.raises(NothingRecorded):
        autograd_hacks.compute_grad1(model)


def test_remove_takes_hooks_off_that_rest() -> None:
    model = net()
    before = traces(model)
    handle = autograd_hacks.add_hooks(model)
    handle.off()
    handle.remove()
    assert traces(model) == before
    with pytest.raises(NothingRecorded):
        handle.on()


def test_remove_inside_the_context_is_enough() -> None:
    model = net()
    before = traces(model)
    with autograd_hacks.add_hooks(model) as handle:
        handle.remove()
    assert traces(model) == before


def test_pause_keeps_what_was_recorded() -> None:
    model = net()
    handle = autograd_hacks.add_hooks(model)
    losses(model, X).mean().backward()
    with handle.pause():
        losses(model, X[:2]).sum().backward()
    autograd_hacks.compute_grad1(model)
    weights = list(model.parameters())
    for n in range(len(X)):
        own = torch.autograd.grad(losses(model, X)[n], weights)
        for p, g in zip(weights, own):
            torch.testing.assert_close(p.grad1[n], g)  # type: ignore[attr-defined]


def test_settings_are_what_it_was_told() -> None:
    model = net()
    default = {"batch_dim": 0, "probe": True, "param_grad": True, "reuse": True, "independent": False, "segments": None}
    assert autograd_hacks.add_hooks(model).settings == {**default, "left_out": []}
    told = autograd_hacks.add_hooks(model, batch_dim=1, probe="once", reuse=False, independent=True, only="0.*")
    own = {"batch_dim": 1, "probe": "once", "reuse": False, "independent": True, "left_out": ["2.bias", "2.weight"]}
    assert told.settings == {**default, **own}
    told.off()
    assert told.settings == {**default, **own}
    assert not autograd_hacks.add_hooks(net(), param_grad=False).settings["param_grad"]


def test_describe_is_that_of_the_model() -> None:
    model = net()
    model[0].weight.requires_grad_(False)  # type: ignore[union-attr, index]
    handle = autograd_hacks.add_hooks(model)
    losses(model, X).mean().backward()
    assert handle.describe() == autograd_hacks.describe(model)
    assert [row.parameter for row in handle.describe(trained=True).rows] == ["0.bias", "2.weight", "2.bias"]
    assert {"remove", "pause", "settings", "describe", "on", "off"} == {n for n in dir(handle) if not n.startswith("_")}
