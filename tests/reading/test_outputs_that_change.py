"""Outputs that begin in a later step, that have no samples, or that have as many features as samples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mixing import data
from oracle import squares
from rarely import crossed
from steps import check, check_batches, check_losses
from torch import Tensor
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from twin import Bare, check_right

import autograd_hacks
from autograd_hacks.errors import SamplesMixed
from autograd_hacks.graph.label import At, Entries, entries
from autograd_hacks.graph.roots import label_of
from autograd_hacks.reading.reader import layout_of


def two_layers(how: Callable[..., Any], features: int = 4, **more: Any) -> Bare:
    return Bare(how, first=nn.Linear(4, features), last=nn.Linear(features, features), **more).double()


def second(of: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """A model that returns more from some step on.  of: what it then makes of the first layer's output"""

    def run(m: Any, x: Tensor) -> Any:
        h = m.first(x)
        return (m.last(h), of(h)) if getattr(m, "begun", False) else (m.last(h),)

    return run


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "with samples": lambda h: h - h.mean(0),
    "a loss": lambda h: (h - h.mean(0)).square().mean(),
    "rows that an index picked": lambda h: (h - h.mean(0))[torch.tensor([2, 0])],
    "without samples": lambda h: h.mean(0),
}


@crossed(kind=MIXING, param_grad=[True, False])
def test_an_output_that_begins_in_a_later_step_is_refused_if_samples_mix(kind: str, param_grad: bool) -> None:
    model = two_layers(second(MIXING[kind]), features=5)
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(3):
            check(model, data(3, 4), "sum")
        model.begun = True
        losses, more = model(data(3, 4))
        (losses.square().sum() + more.sin().sum()).backward()
        with pytest.raises(SamplesMixed, match="output number 1"):
            autograd_hacks.compute_grad1(model, "sum")
        model(data(3, 4))[0].square().sum().backward()  # no loss reads it
        autograd_hacks.compute_grad1(model, "sum")


WEIGHTS: dict[str, Callable[[], nn.Module]] = {
    "kept, normalised": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4)),
    "kept, divided by a buffer's product": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4)),
    "kept, pruned, in a checkpoint": lambda: Bare(
        lambda m, x: checkpoint(m.inner, x[:, None].expand(-1, 4, -1), use_reentrant=False).sum(1),
        inner=nn.Sequential(nn.Linear(4, 4), prune.random_unstructured(nn.Linear(4, 4), "weight", amount=.3))),
    "returned": lambda: Bare(
        lambda m, x: (m.first(x) @ (w := F.normalize(m.w, dim=1)).t(), w), first=nn.Linear(4, 4), w=torch.randn(4, 4)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning", "ignore:.*spectral_norm:FutureWarning")
@crossed(kind=WEIGHTS, param_grad=[True, False], doubles=[False, True])
def test_a_weight_of_as_many_rows_as_samples_is_no_output_of_samples(kind: str, param_grad: bool, doubles: bool) -> None:
    model = WEIGHTS[kind]().double().eval()

    def run(x: Tensor) -> Tensor:
        out = model(2 * x if doubles else x)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first

    check_batches(model, *(data(samples, 4) for samples in (4, 3, 1, 4, 4)), run=run, param_grad=param_grad)


@pytest.mark.parametrize("param_grad", [True, False])
def test_a_parameter_that_is_expanded_to_one_sample(param_grad: bool) -> None:
    model = Bare(
        lambda m, x: (mean := m.first(x), m.log_std.exp().expand_as(mean)), first=nn.Linear(4, 4), log_std=torch.randn(4)
    )
    model.double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for samples in (3, 1, 1, 4):
            check_losses(model, lambda samples=samples: squares(model(torch.ones(samples, 4, dtype=torch.float64))))


@pytest.mark.parametrize("param_grad", [True, False])
def test_a_scale_that_is_used_and_returned_in_a_batch_of_one(param_grad: bool) -> None:
    """It is expanded to the batch's size.  Of one sample it looks like a parameter's own, to which the loss adds."""
    model = Bare(
        lambda m, x: (m.layer(x) * (scale := m.scale.expand(len(x), 4)), scale), layer=nn.Linear(4, 4), scale=torch.ones(4)
    ).double()

    def losses(x: Tensor) -> Tensor:
        out, scale = model(x)
        return out.square().sum(1) + scale.sin().sum(1)

    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for samples in (4, 3, 1, 1, 4, 1):
            x = data(samples, 4)
            if samples > 1:
                check_losses(model, lambda x=x: losses(x))
                continue
            losses(x).sum().backward()
            with pytest.raises(SamplesMixed, match="output number 1"):
                autograd_hacks.compute_grad1(model, "sum")


@crossed(first=[torch.sin, lambda x: x - x.mean(2, keepdim=True)], begins=[0, 2], param_grad=[True, False])
def test_what_is_believed_does_not_depend_on_earlier_forwards(first: Any, begins: int, param_grad: bool) -> None:
    """Positions on axis 0 of the outputs, until these have as many classes as there are samples."""

    def run(m: Any, x: Tensor, pools: bool) -> Tensor:
        y: Tensor = m.last(m.first(first(x)).tanh())
        return y.mean(1) if pools else y.transpose(0, 1)

    def losses(model: nn.Module, x: Tensor, pools: bool) -> Tensor:
        found: Tensor = model(x, pools).square()
        return found.sum(1 if pools else (0, 2))

    model = two_layers(run, features=3)

    check_right(model, *[(data(3, 5, 4), n >= begins) for n in range(5)], run=losses, total="each", param_grad=param_grad)


@pytest.mark.parametrize("label", [At(0), At(1), At(0, 1, 5), At(1, 5, 1), At(0, 5, 2)])
def test_a_layout_has_the_samples_where_its_label_has_them(label: At) -> None:
    shape = [label.outer * 3 * label.inner if axis == label.dim else 2 for axis in (0, 1)]
    layout, whose = layout_of(label), entries(label, shape, 3).expand(shape)
    if min(label.outer, label.inner) > 1:
        assert layout is None
        return
    assert layout is not None
    assert label_of(layout, shape, 3) == label
    assert [set(own.flatten().tolist()) for own in layout.samples_first(whose, 3)] == [{0}, {1}, {2}]
    assert layout_of(Entries(whose)) is None
