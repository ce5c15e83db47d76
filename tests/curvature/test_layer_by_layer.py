"""Curvature layer by layer, and passes that go to the chosen layers alone: the numbers are those of all at
once, which other tests hold to one backward pass for each output."""

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.forms import Dense

pytestmark = pytest.mark.usefixtures("double")


def case() -> tuple[nn.Sequential, Tensor]:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(6, 3)
    autograd_hacks.add_hooks(model)
    return model, x


def found(model: nn.Module, kind: str) -> dict[str, list[Tensor]]:
    attribute = {"full": "hess", "diag": "hess_diag"}.get(kind, kind)
    held = {name: getattr(p, attribute) for name, p in model.named_parameters()}
    if kind == "ekfac":
        return {name: [own.matvec(torch.eye(own.values.numel()).view(-1, *own.values.shape))] for name, own in held.items()}
    return {name: [x.clone() for x in own] if kind == "kfac" else [own.clone()] for name, own in held.items()}


@pytest.mark.parametrize("bias", ["exact", "joint"])
@pytest.mark.parametrize("kind", ["full", "diag", "kfac", "ekfac"])
def test_layer_by_layer_is_all_at_once(kind: str, bias: str) -> None:
    if bias == "joint" and kind != "ekfac":  # the same there
        return
    model, x = case()
    autograd_hacks.compute_hess_over(model, [x[:2], x[2:]], kind, kfac_bias=bias)
    attribute, expected = {"full": "hess", "diag": "hess_diag"}.get(kind, kind), found(model, kind)
    for over in (True, False):
        if not over:
            autograd_hacks.backprop_hess(model(x))
        kept = dict[nn.Parameter, object]()
        for k in (0, 2, 4):
            settings = {"kfac_bias": bias, "parameters": f"{k}.*"}
            if over:
                table = autograd_hacks.compute_hess_over(model, [x[:2], x[2:]], kind, **settings)
            else:
                table = autograd_hacks.compute_hess(model, kind, **settings)
            assert table.covered == [f"{k}.weight", f"{k}.bias"]
            assert [name for name, p in model.named_parameters() if getattr(p, attribute, None) is not None] == table.covered
            kept |= {p: getattr(p, attribute) for p in model[k].parameters()}
        for p, own in kept.items():
            setattr(p, attribute, own)
        assert_close(found(model, kind), expected)


def test_batches_that_can_be_taken_once() -> None:
    model, x = case()
    with pytest.raises(ValueError, match="runs all batches twice"):
        autograd_hacks.compute_hess_over(model, iter([x]), "ekfac")


def test_passes_go_to_the_chosen_layers_alone() -> None:
    model, x = case()
    autograd_hacks.compute_hess_over(model, [x], "ekfac")  # proven
    expected, seen = found(model, "ekfac"), list[int]()

    def watched(model: nn.Module, batch: Tensor) -> Tensor:
        between = model[:2](batch)
        between.register_hook(lambda _: seen.append(1))
        return model[2:](between)

    model_with = nn.Sequential(model)
    model_with.forward = lambda batch: watched(model, batch)
    autograd_hacks.remove_hooks(model)
    autograd_hacks.add_hooks(model_with)
    autograd_hacks.compute_hess_over(model_with, [x], "kfac")
    seen.clear()
    table = autograd_hacks.compute_hess_over(model_with, [x], "ekfac", parameters=["0.4.*"])
    assert not seen
    assert table.covered == ["0.4.weight", "0.4.bias"]
    own = model[4].weight.ekfac
    assert_close(own.matvec(torch.eye(10).view(-1, 2, 5)), expected["4.weight"][0])
    autograd_hacks.compute_hess_over(model_with, [x], "ekfac", parameters=["0.0.*"])
    assert seen


def test_solved_rows_are_not_written_out() -> None:
    model, x = case()
    autograd_hacks.compute_hess_over(model, [x], "ekfac")
    model(x).square().sum(1).mean().backward()
    grads = autograd_hacks.per_sample_grads(model)
    rows = autograd_hacks.ekfac_solve(model, grads)
    assert not any(isinstance(form, Dense) for form in rows.values())
    solved = autograd_hacks.ekfac_solve(model, grads.dense())
    flat = torch.cat([own.flatten(1) for own in solved.values()], 1)
    assert_close(rows.gram(), flat @ flat.T, rtol=1e-7, atol=0)
