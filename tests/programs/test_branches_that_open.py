"""Branches of a model that bring no gradient when it is proven, and one later: behind a factor of zero, or for samples that
none are left of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import squares
from rarely import crossed
from torch import Tensor
from twin import Bare, check_right

import autograd_hacks

Branch = Callable[[Any, Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("double")


def by_token(m: Any, x: Tensor) -> Tensor:
    """Rows of the tokens that are chosen, so many for each sample."""
    chosen = x > -0.3
    chosen[:, 0] = True
    h = m.inner(m.token(x[chosen][:, None]).tanh())
    return torch.zeros(len(x), 4).index_add(0, torch.where(chosen)[0], h)


def time_first(m: Any, x: Tensor) -> Tensor:
    return m.inner(m.token(x.t().reshape(-1, 1)).tanh()).view(6, len(x), 4).sum(0)


def sorted_samples(m: Any, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    h = m.inner(m.token(x[order].reshape(-1, 1)).tanh()).view(len(x), 6, 4).sum(1)
    return h[order.argsort()]


def at_a_node(m: Any, x: Tensor) -> Tensor:
    return (x.t().reshape(-1, 1) * m.scale).tanh().view(6, len(x), 4).sum(0)


@crossed(branch=[by_token, time_first, sorted_samples, at_a_node], opens=[2, 3, 5])
def test_a_gate_that_opens_is_never_read_by_guess(branch: Branch, opens: int) -> None:
    def run(model: Any, x: Tensor, gate: float) -> Tensor:
        model.gate = gate
        return squares(model(x))

    model = Bare(
        lambda m, x: m.base(x) + m.gate * branch(m, x),
        token=nn.Linear(1, 4), inner=nn.Linear(4, 4), base=nn.Linear(6, 4), scale=torch.randn(4),
    )  # fmt: skip
    check_right(model, *[(torch.randn(5, 6), float(step >= opens)) for step in range(1, 8)], run=run)


@pytest.mark.parametrize("sure", [0.2, 0.4, 0.6, 0.8])
def test_exits_at_which_nobody_leaves(sure: float) -> None:
    """Samples leave at the first exit that is sure of them."""

    def leaving(m: Any, x: Tensor) -> Tensor:
        out, left = torch.zeros(len(x), 3), torch.arange(len(x))
        for n, (layer, leave) in enumerate(zip(m.layers, m.exits)):
            x = layer(x).tanh()
            y = leave(x)
            done = (y.detach().amax(1) > sure) | (n == 3)
            out = out.index_copy(0, left[done], y[done])
            x, left = x[~done], left[~done]
            if not len(left):
                break
        return out

    layers, exits = (nn.ModuleList([nn.Linear(6, size) for _ in range(4)]) for size in (6, 3))
    check_right(Bare(leaving, layers=layers, exits=exits), *[(torch.randn(5, 6),) for _ in range(6)])


@pytest.mark.parametrize("picked", [([0, 3], [], [2], [0, 1, 2, 3, 4], []), ([],)])
def test_attention_for_which_no_sample_is_picked(picked: tuple[list[int], ...]) -> None:
    """Attention for the samples that a router picks.  Without rows torch adds up its parts to a number."""

    def attends(m: Any, x: Tensor, picked: Tensor) -> Tensor:
        x = m.first(x).unflatten(1, (3, 4))
        own = x[picked]
        return m.last(x.index_put((picked,), m.attention(own, own, own, need_weights=False)[0]).mean(1))

    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    model = Bare(attends, first=nn.Linear(6, 12), last=nn.Linear(4, 2), attention=attention)
    check_right(model, *[(torch.randn(5, 6), torch.tensor(rows, dtype=torch.long)) for rows in picked])


def test_a_layer_whose_weight_alone_is_replaced_without_ordinary_gradients() -> None:
    """Its bias has rows by the layer's rule, and its weight by the node, and both hooks are on the same one."""

    def replaced(m: Any, x: Tensor) -> Tensor:
        own = {"weight": m.layer.weight * m.gain, "bias": m.layer.bias}
        return torch.func.functional_call(m.layer, own, (x,))  # type: ignore[no-any-return]

    check_right(
        Bare(replaced, layer=nn.Linear(6, 3), gain=torch.randn(3, 1)),
        *[(torch.randn(5, 6),) for _ in range(4)],
        total="each",
        param_grad=False,
    )


@pytest.mark.parametrize("sizes", [(1,), (5, 5, 1), (5, 1, 3)])
def test_weights_that_a_layer_makes_of_parameters_meet_one_sample(sizes: tuple[int, ...]) -> None:
    model = Bare(lambda m, x: x @ m.make(m.code).view(6, 3), make=nn.Linear(2, 18), code=torch.randn(2))
    check_right(model, *[(torch.randn(n, 6),) for n in sizes])


@pytest.mark.parametrize("how", ["overwritten", "by a hook"])
def test_samples_of_arguments_that_change_are_independent(how: str) -> None:
    model = Bare(lambda m, x: m.layer(x.sub_(0.5) if how == "overwritten" else x), layer=nn.Linear(6, 3))
    if how == "by a hook":
        model.register_forward_pre_hook(lambda _, given: (given[0] * 0.5,))
    with autograd_hacks.add_hooks(model, independent=True):
        for _ in range(3):
            squares(model(torch.randn(5, 6))).mean().backward()
            autograd_hacks.compute_grad1(model)
            torch.testing.assert_close(model.layer.weight.grad1.mean(0), model.layer.weight.grad)
            model.zero_grad()
