"""Programs in which autograd's graph, or one batch of labels, says too little, or something else in the next step."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mixing import data
from nets import Scale
from oracle import squares
from rarely import crossed
from steps import check_batches
from torch import Tensor
from torch.testing import assert_close
from twin import Bare, check_refused, check_right

import autograd_hacks
from autograd_hacks.errors import UnseenGradient

pytestmark = pytest.mark.usefixtures("double")


def weights() -> dict[str, Any]:
    return {
        "a": torch.randn(3, 4), "b": torch.randn(4, 1), "c": torch.randn(1, 4), "scale": torch.randn(4),
        "w": torch.randn(4, 2),
    }  # fmt: skip


@pytest.mark.parametrize("layers", [True, False])
def test_an_expert_that_one_sample_reaches(layers: bool) -> None:
    def how(m: Bare, x: Tensor) -> Tensor:
        h, out = x @ m.a, x.new_zeros(len(x), 2)
        chosen = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        for n in range(3):
            rows = (chosen == n).nonzero()[:, 0]
            if len(rows):
                own = m.experts[n](h[rows]) if layers else h[rows].tanh() @ (m.stack[n] + m.b @ m.c @ m.w * 0.1)
                out = out.index_add(0, rows, own * m.scale[n])
        return out

    experts = {"experts": nn.ModuleList(nn.Linear(4, 2) for _ in range(3))} if layers else {"stack": torch.randn(3, 4, 2)}
    own = {name: x for name, x in weights().items() if name in ("a", "scale") or not layers}
    few = torch.tensor([[1.0, 1, 0], [-1, -1, 0], [-1, -1, 2]])  # one for the last expert, none for that in the middle
    check_right(Bare(how, **own, **experts), (few + 0.1 * torch.randn(3, 3),), *[(torch.randn(6, 3),) for _ in range(4)])


def test_experts_in_one_stack_by_index() -> None:
    def how(m: Bare, x: Tensor) -> Tensor:
        chosen = (x @ m.router).argmax(1)
        return torch.einsum("ni,nio->no", x, m.stack[chosen]) + m.biases[chosen]

    model = Bare(how, stack=torch.randn(4, 3, 2), biases=torch.randn(4, 2), router=torch.randn(3, 4))
    check_right(model, (torch.randn(1, 3).expand(4, 3).clone(),), *[(torch.randn(6, 3),) for _ in range(2)])


@pytest.mark.parametrize("given", [True, False])
def test_a_grid_of_as_many_points_as_samples(given: bool) -> None:
    """SIREN's: the same for all samples."""

    def how(m: Bare, x: Tensor) -> Tensor:
        grid = m.grid if given else torch.linspace(-1, 1, 4)[:, None]
        field = (grid @ m.c).sin() @ m.w  # T 2
        return torch.einsum("ni,to->nto", x @ m.a, field) * (m.mask if given else torch.ones(4, 2).tril())

    model = Bare(how, a=torch.randn(3, 1), c=torch.randn(1, 4), w=torch.randn(4, 2))
    model.register_buffer("grid", torch.linspace(-1, 1, 4)[:, None])
    model.register_buffer("mask", torch.ones(4, 2).tril())
    check_right(model, *[(torch.randn(n, 3),) for n in (4, 4, 3, 4, 1, 8)])


DATA: dict[str, tuple[Callable[[Bare, Tensor, Tensor], Tensor], dict[str, Any]]] = {
    "one-hot": (lambda m, x, ids: F.one_hot(ids, 5).double() @ m.table * m.scale, {}),
    "one-hot of words": (lambda m, x, ids: F.one_hot(ids, 5).double().unsqueeze(1) @ m.table * m.scale, {}),
    "detached": (lambda m, x, ids: (m.layer(x).detach() @ m.table[:4]) * m.scale, {"layer": True}),
    "under no_grad": (lambda m, x, ids: (_no_grad(m, x) @ m.table[:4]) * m.scale, {"layer": True}),
    "by ids": (lambda m, x, ids: m.table[ids] * m.scale, {}),
    "embedded": (lambda m, x, ids: F.embedding(ids, m.table) * m.scale, {}),
    "where": (lambda m, x, ids: torch.where(x[:, :1] > 0, m.table[0], m.table[1]) * m.scale, {}),
    "mask": (lambda m, x, ids: (m.table[0] * (x[:, :1] > 0)) @ m.table[1:].mT, {}),
    "filled": (lambda m, x, ids: m.table[:1].expand(len(x), 4).masked_fill(x[:, :1] > 0, 0.5) * m.scale, {}),
    "one after the other": (lambda m, x, ids: torch.stack([m.table[int(n)] for n in ids]) * m.scale, {}),
    "bag": (lambda m, x, ids: F.embedding_bag(ids[:, None].expand(-1, 2), m.table, mode="sum") * m.scale, {}),
    "lerp": (lambda m, x, ids: torch.lerp(m.table[0], m.table[1], x[:, :1].sigmoid()) * m.scale, {}),
    "padding": (lambda m, x, ids: torch.cat([x, m.table[:1].expand(len(x), 4)], 1)[:, 2:6] * m.scale, {}),
    "power": (lambda m, x, ids: m.scale.exp() ** x[:, :1] + m.table[0], {}),
}


def _no_grad(m: Bare, x: Tensor) -> Tensor:
    with torch.no_grad():
        return m.layer(x)


@crossed(samples=[1, 4, 5], what=DATA)
def test_data_without_a_gradient(what: str, samples: int) -> None:
    """Five rows of a table, and five samples."""
    how, own = DATA[what]
    model = Bare(how, table=torch.randn(5, 4), scale=torch.randn(4), **({"layer": nn.Linear(3, 4)} if own else {}))
    batches = [(torch.randn(n, 3), torch.randint(5, (n,))) for n in (samples, samples, 3, samples)]
    if what == "one after the other" and samples == 1:  # the graph has no sign of a sample
        check_refused(model, *batches, may_be_right=True)
    else:
        check_right(model, *batches)


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


@pytest.mark.parametrize("turned", [lambda p: p.roll(1), lambda p: p.flip(0), lambda p: p.sort()[0]])
def test_a_parameter_whose_entries_are_turned(turned: Callable[[Tensor], Tensor]) -> None:
    check_right(Bare(lambda m, x: (x * turned(m.p)).sin(), p=torch.randn(4)), (torch.randn(5, 4),), (torch.randn(3, 4),))


@pytest.mark.parametrize("param_grad", [True, False])
def test_parameters_that_exchange_their_names(param_grad: bool) -> None:
    model = Bare(lambda m, x: (x * m.a).sin() * m.b, a=torch.randn(4), b=torch.randn(4))
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for step in range(4):
            if step == 2:
                model.a, model.b = model.b, model.a
            x, own = torch.randn(3, 4), (model.a, model.b)
            autograd_hacks.backward(model(x).sum(1))
            autograd_hacks.compute_grad1(model)
            rows = torch.autograd.functional.jacobian(lambda a, b, x=x: ((x * a).sin() * b).sum(1), own)
            assert_close([p.grad1 for p in own], [*rows])
            model.zero_grad()


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


def test_branches_in_threads() -> None:
    def threads(m: nn.Module, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(3) as pool:
            return sum(pool.map(lambda branch: branch(x), m.branches))

    branches = nn.ModuleList(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Scale(4)) for _ in range(3))
    check_right(Bare(threads, branches=branches), *[(data(4, 3),)] * 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_inside_under_autocast_with_ignored_labels(dtype: torch.dtype) -> None:
    """Each row is that sample's own mean times its share of all that counts."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model, x = transformers.GPT2LMHeadModel(config), torch.randint(20, (4, 6))
    labels = x.clone()
    labels[0, 3:], labels[2, :4] = -100, -100
    count = (labels[:, 1:] != -100).sum(1)

    def near(own: Tensor, right: Tensor, of: float) -> None:
        torch.testing.assert_close(own, right, rtol=0.05, atol=of * float(right.abs().max()))

    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            model.zero_grad()
            with torch.autocast("cpu", dtype):
                whole = model(x, labels=labels).loss
            whole.backward()
            autograd_hacks.compute_grad1(model, loss_type="sum")
            for p in model.parameters():
                near(p.grad1.sum(0), p.grad, 0.02)
            for n, share in enumerate(count / count.sum()):
                with autograd_hacks.pause_hooks(), torch.autocast("cpu", dtype):
                    own = model(x[n : n + 1], labels=labels[n : n + 1]).loss * share
                for p, row in zip(model.parameters(), torch.autograd.grad(own, list(model.parameters()))):
                    near(p.grad1[n], row, 0.05)


# Batches of other things than one tensor, and what models return, read off autograd's graph


def scaled(given: Callable[[Any], Tensor] = lambda x: x, then: Callable[..., Any] = lambda h: h) -> nn.Module:
    """A layer and a bare parameter.  given: makes a tensor of the batch    then: makes the output"""
    return Bare(
        lambda m, x, *more: then(m.first(given(x)).tanh() * m.scale, *more), first=nn.Linear(3, 4), scale=torch.ones(4)
    ).double()


@pytest.mark.parametrize("batch_dim", [None, (None,)])
def test_a_batch_of_indices_that_are_no_tensor(batch_dim: Any) -> None:
    stored = data(9, 3)
    model = scaled(lambda own: stored[own.start : own.stop])
    check_right(model, *[(rows,) for rows in (range(3), range(3, 7), range(2, 6))], batch_dim=batch_dim)


# What is returned


def test_a_parameter_that_is_returned() -> None:
    model = Bare(lambda m, x: (m.mean(x), m.log_std), mean=nn.Linear(3, 2), log_std=torch.randn(2))
    x, a = data(4, 3), data(4, 2)

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        mean, log_std = model(x)
        return -torch.distributions.Normal(mean, log_std.exp()).log_prob(a).sum(1)

    check_right(model, *[(x,)] * 3, run=losses, total="each")
    check_right(model, *[(x,)] * 3, run=lambda model, x: squares(model(x)[0]))
    with autograd_hacks.add_hooks(model):
        losses(model, x).mean().backward()
        with pytest.raises(UnseenGradient, match=r"log_std.*output that depends on parameters only.*backward\(losses\)"):
            autograd_hacks.compute_grad1(model)


PICKS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rows, some of them twice": lambda h, rows, at: h[rows],
    "an index on one axis": lambda h, rows, at: h.index_select(0, rows).tanh(),
    "positions of a view": lambda h, rows, at: h.flatten(0, 1)[rows * 5 + at],
    "rows and positions": lambda h, rows, at: h[rows, at],
    "positions, then some of them": lambda h, rows, at: h[rows, at][2:],
    "windows of a sample": lambda h, rows, at: h[rows[:, None].expand(-1, 2), torch.stack([at, at], 1)],
    "parts of what was selected": lambda h, rows, at: h[rows].split([3, len(rows) - 3])[1],
    "pairs, after a view": lambda h, rows, at: h[rows.repeat_interleave(2)].view(len(rows), 2, 5, 4),
}


@pytest.mark.parametrize("name", PICKS)
def test_outputs_that_an_index_picked(name: str) -> None:
    def losses(model: nn.Module, x: Tensor, rows: Tensor, at: Tensor) -> Tensor:
        chosen = model(x, rows, at)
        return torch.zeros(4, dtype=x.dtype).index_add(0, rows[len(rows) - len(chosen) :], squares(chosen))

    batches = [(data(4, 5, 3), torch.randint(4, (n,)), torch.randint(5, (n,))) for n in (11, 9, 13)]
    check_right(scaled(then=PICKS[name]), *batches, run=losses)


# Batches of one sample, in which a value of parameters has the same size as one for each sample


def learnt(how: Callable[[Any, Tensor, Tensor], Any], **layers: nn.Module) -> nn.Module:
    """Has a learnt query, or first state, for every sample."""
    own = {"query": torch.randn(1, 2, 4), "u": torch.randn(4, 4), **layers}
    return Bare(lambda m, x: how(m, x, m.query.expand(len(x), -1, -1)), **own).double()


def weights_too(m: Any, x: Tensor, query: Tensor) -> Tensor:
    """The layer's second output depends on parameters only."""
    out, weights = m.attend(query, (m.query.mean(1, keepdim=True) * m.u).expand(len(x), -1, -1), x[:, :4])
    return out + weights @ x[:, :4]


def called_before(m: Any, x: Tensor, query: Tensor) -> Tensor:
    """The same layer is first called on parameters only."""
    return m.attend(query + m.attend(query, query, query)[0], x, x)[0]


def first_state(m: Any, x: Tensor, query: Tensor) -> Tensor:
    state = query.transpose(0, 1).contiguous()
    return m.run(x, (state, state.sin()) if isinstance(m.run, nn.LSTM) else state)[0]


def of_its_own_weight(m: Any, x: Tensor, query: Tensor) -> Tensor:
    """A weight of the layer also makes its first state."""
    state = m.run.weight_hh_l0[:4].view(2, 2, 4).sum(1, keepdim=True).expand(-1, len(x), -1)
    return m.run(x, state.contiguous())[0]


def tied(m: Any, x: Tensor, query: Tensor) -> Tensor:
    """A weight of the layer is also used behind it: with the batch, and with a parameter whose product meets the batch."""
    out = first_state(m, x, query)
    return out @ m.run.weight_hh_l0[:4] + out * (m.query[:, :1] @ m.run.weight_hh_l0[:4])


def by_steps(m: Any, x: Tensor, query: Tensor) -> Tensor:
    """No layer: the weight is used with the first state, and later with states of the batch."""
    state = query[:, 0]
    for t in range(x.shape[1]):
        state = (x[:, t] + state @ m.u).tanh()
    return state


LEARNT: dict[str, Callable[[], nn.Module]] = {
    "weights too": lambda: learnt(weights_too, attend=nn.MultiheadAttention(4, 2, batch_first=True)),
    "called before": lambda: learnt(called_before, attend=nn.MultiheadAttention(4, 2, batch_first=True)),
    "GRU": lambda: learnt(first_state, run=nn.GRU(4, 4, 2, batch_first=True)),
    "of its own weight": lambda: learnt(of_its_own_weight, run=nn.GRU(4, 4, 2, batch_first=True)),
    "tied": lambda: learnt(tied, run=nn.GRU(4, 4, 2, batch_first=True)),
    "by steps": lambda: learnt(by_steps),
}


@crossed(what=LEARNT, param_grad=[True, False], sizes=[(1, 1, 1), (3, 1, 3, 1)])
def test_one_sample_and_a_learnt_query(what: str, param_grad: bool, sizes: tuple[int, ...]) -> None:
    check_batches(LEARNT[what](), *[data(samples, 5, 4) for samples in sizes], param_grad=param_grad)
