"""Parts of a hooked model that are called by themselves, and losses that read what a model keeps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from nets import choosy
from oracle import squares
from rarely import crossed
from steps import assert_right, batch, check, check_batches, check_hooked, check_losses, step
from torch import Tensor
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from twin import Bare, check_right

import autograd_hacks
from autograd_hacks.errors import UnseenGradient


def tokens() -> nn.Module:
    """A class token in front."""
    return Bare(
        lambda m, x: m.attention(torch.cat([m.token.expand(len(x), -1, -1), m.layer(x)], 1))[:, 0],
        token=torch.randn(1, 1, 4), layer=nn.Linear(3, 4),
        attention=nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
    )  # fmt: skip


def scaled(mixes: bool = False) -> nn.Module:
    """A bare scale, its own, and one in a part of it."""
    inner = Bare(lambda m, x: (m.layer(x) + m.shift).tanh(), shift=torch.randn(4), layer=nn.Linear(4, 4))
    return Bare(
        lambda m, x: (h := m.inner(m.layer(x) * m.scale).mean(1)) - (h.mean(0) if mixes else 0),
        scale=torch.randn(4), layer=nn.Linear(3, 4), inner=inner,
    )  # fmt: skip


def whole_net(encoder: nn.Module) -> nn.Module:
    return Bare(lambda m, x: m.head(m.encoder(x)), encoder=encoder, head=nn.Linear(4, 2))


@crossed(probe=[False, True], param_grad=[False, True], encoder=[tokens, scaled])
def test_a_part_with_a_bare_parameter(encoder: Callable[[], nn.Module], param_grad: bool, probe: bool) -> None:
    """Alone, with another part, beside the whole, and again after it."""
    model = whole_net(encoder()).double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad, probe=probe):
        for n in (4, 3):
            x = torch.randn(n, 5, 3).double()
            check(model, x, run=lambda x: model.encoder(x))
            check(model, x, run=lambda x: model.head(model.encoder(x)))
            check(model, x)
            check(model, x, run=lambda x: model.head(model.encoder(x)) * model(x))
            check(model, x, run=lambda x: model.encoder(x) + model.encoder(2 * x))


def test_a_part_with_time_first() -> None:
    model = whole_net(Bare(lambda m, x: m.layer(x)[0] * m.scale, scale=torch.randn(4), layer=nn.GRU(3, 4))).double()
    check_batches(model, torch.randn(4, 5, 3).double(), run=lambda x: model.encoder(x.transpose(0, 1)).transpose(0, 1))


def test_a_part_that_reads_a_weight_twice() -> None:
    model = whole_net(Bare(lambda m, x: F.linear(m.layer(x), m.layer.weight), layer=nn.Linear(3, 3))).double()
    with autograd_hacks.add_hooks(model):
        squares(model.encoder(torch.randn(4, 3).double())).mean().backward()
        with pytest.raises(UnseenGradient):
            autograd_hacks.compute_grad1(model)


# A loss that reads what the model keeps, past its outputs


def keep(m: nn.Module, x: Tensor) -> Tensor:
    """Keeps the features, in an attribute, in a list in a dictionary, and the output."""
    h = m.first(x).tanh()
    m.aux, m.kept = h, {"features": [h * 2]}
    m.out = m.last(h)
    return m.out


def keeping(how: Callable[[nn.Module, Tensor], Tensor] = keep, **own: Any) -> nn.Module:
    return Bare(how, first=nn.Linear(3, 4), last=nn.Linear(4, 2), **own).double()


DOORS: dict[str, Callable[[Any], Tensor]] = {
    "an attribute": lambda model: model.aux,
    "of a list in a dictionary": lambda model: model.kept["features"][0],
    "a global": lambda model: SEEN[-1],
}
SEEN: list[Tensor] = []


@crossed(door=DOORS, param_grad=[True, False], begins=[0, 1, 3])
def test_a_loss_that_reads_what_the_model_keeps(door: str, param_grad: bool, begins: int) -> None:
    """The graph of the outputs shows whose the values inside are."""
    model = keeping()
    model.first.register_forward_hook(lambda layer, args, out: SEEN.append(out))

    def losses(model: nn.Module, x: Tensor, read: bool) -> Tensor:
        out = model(x)
        return squares(out) + DOORS[door](model).pow(3).sum(1) if read else squares(out)

    batches = [(torch.randn(5, 3).double(), n >= begins and n != 4) for n in range(5)]
    check_right(model, *batches, run=losses, total="each", param_grad=param_grad)
    SEEN.clear()


@pytest.mark.parametrize("param_grad", [True, False])
def test_a_loss_that_reads_a_layer_whose_output_is_not_returned(param_grad: bool) -> None:
    def aside(m: nn.Module, x: Tensor) -> Tensor:
        out = keep(m, x)
        m.scored, m.scaled = m.side(m.aux), m.aux * m.scale
        return out

    def losses(model: nn.Module, x: Tensor, what: str) -> Tensor:
        out = squares(model(x))
        return out + getattr(model, what).square().mean(1) if what else out

    model = keeping(aside, side=nn.Linear(4, 1), scale=torch.ones(4))
    batches = [(torch.randn(5, 3).double(), what) for what in ("", "scored", "scaled", "", "scaled", "scored")]
    check_right(model, *batches, run=losses, total="each", param_grad=param_grad)


def test_the_output_may_be_taken_from_where_it_is_kept() -> None:
    model = keeping()
    check_batches(model, *(torch.randn(5, 3).double() for _ in range(3)), run=lambda x: (model(x), model.out)[1])


# Ways by which a gradient escapes the hooks, or memory is shared: each is right, or an error that says so


def test_created_graphs_that_the_loss_does_not_use_harm_nothing(model: nn.Module) -> None:
    x, y = batch()
    x.requires_grad_()
    loss = squares(model(x), y).mean()
    torch.autograd.grad(loss, x, create_graph=True)
    loss.backward()
    assert_right(model, x, y)
    torch.autograd.grad(squares(model(x), y).mean(), list(model.parameters()), create_graph=True)
    assert_right(model, x, y)


def test_a_penalty_on_weights_in_the_loss() -> None:
    for model in (nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 3), choosy())):
        x = torch.randn(4, 3)
        with autograd_hacks.add_hooks(model):
            for _ in range(3):  # and every time
                loss = squares(model(x)).mean() + sum(p.pow(2).sum() for p in model.parameters())
                loss.backward()
                with pytest.raises(UnseenGradient, match=r"a penalty on the weight .*pause_hooks\(\)"):
                    autograd_hacks.compute_grad1(model)
            model.zero_grad()
            squares(model(x)).mean().backward()
            with autograd_hacks.pause_hooks():
                sum(p.pow(2).sum() for p in model.parameters()).backward()
            assert_right(model, x)


@pytest.mark.filterwarnings("ignore")  # the compiler's own, which change with its version
def test_a_compiled_function_of_layers_after_an_ordinary_step(model: nn.Sequential) -> None:
    x, y = batch()
    step(model, x, y)
    autograd_hacks.compute_grad1(model)
    squares(torch.compile(lambda x: model[2](model[0](x)), backend="aot_eager")(3 * x), y).mean().backward()
    with pytest.raises(UnseenGradient, match=r"torch\.compile"):
        autograd_hacks.compute_grad1(model)


def test_a_forward_hook_that_gets_ahead(model: nn.Sequential) -> None:
    x, _ = batch()
    model[0].register_forward_hook(lambda layer, args, out: 2 * out, prepend=True)
    for _ in range(3):
        check(model, x)


def test_a_stray_gradient_is_remembered_when_passes_are_put_together() -> None:
    parts = nn.ModuleDict({"trunk": nn.Linear(3, 4), "left": nn.Linear(4, 2), "right": nn.Linear(4, 2)})
    with autograd_hacks.add_hooks(parts):
        h = parts["trunk"](torch.randn(5, 3)).tanh()
        (parts["left"](h).pow(2).mean() + parts["right"].weight.square().sum()).backward(retain_graph=True)
        parts["right"](h).pow(2).mean().backward()
        with pytest.raises(UnseenGradient, match=r"right\.weight"):
            autograd_hacks.compute_grad1(parts)


# Parameters that no layer's rule covers, read where they meet the batch: rows are those of each loss alone


Body = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Two layers, bare parameters, and what a test does with them between the layers: N T 4 in and out."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.into, self.out, self.body = nn.Linear(3, 4), nn.Linear(4, 2), body
        self.token, self.scale, self.weight = (nn.Parameter(torch.randn(*s)) for s in ((1, 1, 4), (4,), (4, 4)))
        self.stack, self.table = nn.Parameter(torch.randn(3, 4, 4)), nn.Parameter(torch.randn(9, 4))
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self, self.into(x)).tanh())


def positions(net: Net, h: Tensor) -> Tensor:
    ids = torch.arange(h.shape[1], device=h.device).expand(len(h), -1)
    return h + net.table[ids] + F.embedding(ids[:1], net.table)


def normalised(net: Net, h: Tensor) -> Tensor:
    h = F.layer_norm(h, (4,), net.scale, net.table[0])
    return F.rms_norm(h, (4,), net.table[1]) + (1 + net.scale) * h


def broadcast(net: Net, h: Tensor) -> Tensor:
    h = torch.where(h > 0, h, net.scale * 2) + torch.maximum(h, net.table[3])
    return torch.addcmul(h, net.scale, h).lerp(net.token.expand_as(h), 0.3) / (net.scale.square() + 1)


def in_place(net: Net, h: Tensor) -> Tensor:
    h = h.clone()
    h *= net.scale
    h += net.token
    return h.mul_(net.table[2])


def time_first(net: Net, h: Tensor) -> Tensor:
    h = h.transpose(0, 1)
    return (h * net.scale + net.token.transpose(0, 1) + net.table[: len(h), None]).transpose(0, 1)


def folded(net: Net, h: Tensor) -> Tensor:
    rows = (h.flatten(0, 1) * net.scale) @ net.weight + net.table[0]
    others = (h.transpose(0, 1).flatten(0, 1) * net.table[1]).unflatten(0, (h.shape[1], len(h))).transpose(0, 1)
    return rows.view_as(h) + others


def repeated(net: Net, h: Tensor) -> Tensor:
    heads = net.stack.repeat(len(h), 1, 1)  # (N · 3) 4 4
    queries = h[:, None].expand(-1, 3, -1, -1).flatten(0, 1)
    return torch.bmm(queries, heads).unflatten(0, (len(h), 3)).sum(1)


def attending(net: Net, h: Tensor) -> Tensor:
    h = h.transpose(0, 1)
    found, _ = F.multi_head_attention_forward(
        h, h, h, 4, 2, net.table[:3].repeat(4, 1), None, net.token, net.token, False, 0.0, net.weight, net.scale,
    )  # fmt: skip
    return found.transpose(0, 1)


def routed(net: Net, h: Tensor) -> Tensor:
    """Three experts, one for each position."""
    rows = h.reshape(-1, 4)
    chosen, out = (rows[:, :3] @ net.table[:3, :3]).argmax(1), torch.zeros_like(rows)
    for expert in range(3):
        places = (chosen == expert).nonzero()[:, 0]
        out = out.index_add(0, places, F.silu(F.linear(rows[places], net.stack[expert])) * net.table[expert])
    return out.view_as(h)


BODIES: dict[str, Body] = {
    "a token": lambda net, h: torch.cat([net.token.expand(len(h), -1, -1), h], 1),
    "positions": positions,
    "merged": lambda net, h: F.linear(h, net.stack[0] @ net.weight + net.stack[2]) + h @ net.stack[1].mT,
    "a table read by what is in the batch": lambda net, h: h * net.table[(h[..., 0].detach() > 0).long()],
    "normalised": normalised,
    "broadcast": broadcast,
    "in place": in_place,
    "contracted": lambda net, h: (
        torch.bmm((h := torch.einsum("ntd,de->nte", h, net.weight)), net.weight.expand(len(h), 4, 4))
        + torch.tensordot(h, net.stack[0], 1)
    ),
    "weight-normed": lambda net, h: (
        net.normed(h) + F.linear(h, net.into.weight.new_ones(4, 1) * net.out.weight[0], net.out.weight[1])
    ),
    "dropped": lambda net, h: F.linear(h, F.dropout(net.weight, 0.5)) + F.dropout(h * net.scale, 0.3),
    "time first": time_first,
    "folded": folded,
    "repeated": repeated,
    "drawn": lambda net, h: h + F.linear(torch.randn(len(h), 4).to(h), net.weight, net.scale)[:, None],
    "attending": attending,
    # A module that is made anew in each forward: its path is unknown, and its parameters are the net's.
    "checkpointed": lambda net, h: checkpoint(Bare(lambda m, h: h @ m.held[0].weight, held=[net]), h, use_reentrant=False),
    "routed": routed,
}


@crossed(body=BODIES, param_grad=[True, False])
def test_rows(body: str, param_grad: bool) -> None:
    model = Net(BODIES[body]).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for samples, length in ((4, 5), (4, 5), (3, 6), (5, 5), (2, 3), (1, 3)):
            x = torch.randn(samples, length, 3).double()
            check_losses(model, lambda x=x: squares(model(x)))
            for parameter in model.parameters():
                parameter.grad = None if parameter.grad1 is None else parameter.grad1.sum(0)
            optimizer.step()


def test_one_position_first_and_as_many_as_samples_later() -> None:
    for body in ("positions", "folded", "time first", "merged"):
        shapes = (4, 1), (4, 4), (4, 2), (2, 4), (8, 4)
        check_right(Net(BODIES[body]).double(), *[(torch.randn(*own, 3).double(),) for own in shapes], total="each")


# Values that follow from parameters alone, and the way back from their rows


def conjugated() -> nn.Module:
    """A view of its weight whose numbers are others."""
    return Bare(
        lambda m, x: torch.view_as_real(x * m.weight.conj() + x * x * m.weight).flatten(1),
        weight=torch.randn(4, dtype=torch.complex128),
    )


def counted() -> nn.Module:
    """A lookup without a batch whose gradient is no sum over positions."""
    return Bare(
        lambda m, x: x * F.embedding(torch.tensor([0, 1, 1, 0, 1]), m.table, scale_grad_by_freq=True),
        table=torch.randn(3, 4).double(),
    )


@pytest.mark.parametrize(
    ("model", "x"), [(conjugated(), torch.randn(3, 4, dtype=torch.complex128)), (counted(), torch.randn(4, 5, 4).double())]
)
def test_what_looks_like_the_parameter_and_is_not(model: nn.Module, x: Tensor) -> None:
    check_right(model, (x,), (x,), total="each")


@pytest.mark.parametrize("more", [1, 2])
def test_an_index_that_leaves_entries_beside_samples(more: int) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.cat([x, x.new_ones(more, 4)]) + m.places[: len(x) + more, None]
        return h.gather(1, torch.tensor([[3, 2, 1, 0]]).expand(len(x), 4)).tanh()

    model: Any = Bare(forward)
    model.places = nn.Parameter(torch.randn(8, dtype=torch.float64))
    batches = torch.randn(2, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    check_hooked(model, *[partial(lambda x: squares(model(x)), x) for x in batches])
