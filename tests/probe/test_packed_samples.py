"""Private steps on samples that are packed along the arguments: graphs, bags, patches; and what laws say of operations."""

from collections.abc import Callable, Sequence
from typing import Any

import oracle
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks import private
from autograd_hacks.capture.above import ABOVE
from autograd_hacks.errors import PerSampleGradientError, ProbeFailed, SamplesMixed
from autograd_hacks.graph import tape_laws
from autograd_hacks.reading import independence

SIZES, WIDTH = (7, 5, 6, 8), 4
N = len(SIZES)


class Net(nn.Module):
    """A layer, what a function makes of its output, and another layer."""

    def __init__(self, what: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.what = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), what
        self.register_buffer("places", torch.randn(60, WIDTH))

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return self.last(self.what(self, self.first(x), *more))


def packed(graphs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, int]:
    """Nodes, edges, and each node's graph."""
    sizes = torch.tensor([len(x) for x, _ in graphs])
    starts = (sizes.cumsum(0) - sizes).tolist()
    edges = torch.cat([own + start for (_, own), start in zip(graphs, starts)], 1)
    return torch.cat([x for x, _ in graphs]), edges, torch.arange(len(graphs)).repeat_interleave(sizes), len(graphs)


def graphs_of(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(n, WIDTH, dtype=torch.float64), torch.randint(n, (2, 2 * n))) for n in sizes]


def pooled(h: Tensor, g: Tensor, n: int) -> Tensor:
    return h.new_zeros(n, h.shape[1]).index_add(0, g, h)


def mean_of(h: Tensor, g: Tensor, n: int) -> Tensor:
    return pooled(h, g, n) / torch.bincount(g, minlength=n)[:, None]


def passed(h: Tensor, e: Tensor, weights: Tensor | None = None) -> Tensor:
    """What neighbours send."""
    sent = h[e[0]] if weights is None else h[e[0]] * weights[:, None]
    return torch.zeros_like(h).index_add(0, e[1], sent)


def softmax_of_neighbours(h: Tensor, e: Tensor) -> Tensor:
    a = (h[e[0]] * h[e[1]]).sum(1)
    most = h.new_full((len(h),), -1e9).scatter_reduce(0, e[1], a, "amax")
    a = (a - most[e[1]]).exp()
    return a / h.new_zeros(len(h)).index_add(0, e[1], a)[e[1]]


def by_degree(h: Tensor, e: Tensor) -> Tensor:
    root = h.new_zeros(len(h)).scatter_add(0, e[1], h.new_ones(e.shape[1])).clamp(min=1).rsqrt()
    return root[e[0]] * root[e[1]]


def by_count(h: Tensor, e: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.bincount(e[1], minlength=len(h)))


def above(h: Tensor) -> Tensor:
    return (h[:, 0] > 0).nonzero()[:, 0]


APART: dict[str, Callable[..., Tensor]] = {
    "sums": lambda m, h, e, g, n: pooled(h, g, n),
    "means of neighbours": lambda m, h, e, g, n: mean_of(h + passed(h, e).relu(), g, n),
    "neighbours by degree": lambda m, h, e, g, n: mean_of(passed(h, e, by_degree(h, e)), g, n),
    "attention to neighbours": lambda m, h, e, g, n: mean_of(passed(h, e, softmax_of_neighbours(h, e)), g, n),
    "a node among its neighbours": lambda m, h, e, g, n: mean_of(
        passed(h, torch.cat([e, torch.arange(len(h)).expand(2, -1)], 1)), g, n
    ),
    "chosen nodes": lambda m, h, e, g, n: pooled(h, g, n) + pooled(h[at := above(h)], g[at], n),
    "sizes": lambda m, h, e, g, n: pooled(h, torch.repeat_interleave(own := torch.bincount(g)), n) / own[:, None],
    "the largest": lambda m, h, e, g, n: h.new_full((n, WIDTH), -1e9).scatter_reduce(0, g[:, None].expand(-1, 4), h, "amax"),
    "a norm of each graph": lambda m, h, e, g, n: mean_of((h - mean_of(h, g, n)[g]).square(), g, n),
    "a norm of nodes": lambda m, h, e, g, n: mean_of(F.layer_norm(h, (WIDTH,)), g, n),
    "neighbours without a gradient": lambda m, h, e, g, n: mean_of(h * passed(h.detach(), e), g, n),
    "nodes as often as they have neighbours": lambda m, h, e, g, n: pooled(h[by_count(h, e)], g[by_count(h, e)], n),
    "nodes in another shape": lambda m, h, e, g, n: mean_of(
        F.pad(h.detach().view(len(h), 2, 2).flatten(1), (0, 1))[:, 1:] * h, g, n
    ),
}
MIXED: dict[str, Callable[..., Tensor]] = {
    "a mean of all nodes": lambda m, h, e, g, n: mean_of(h - h.detach().mean(0), g, n),
    "nodes turned": lambda m, h, e, g, n: pooled(h + h.detach().roll(1, 0), g, n),
    "the first nodes": lambda m, h, e, g, n: pooled(h[:20], g[:20], n),
    "a table of places": lambda m, h, e, g, n: pooled(h + m.places[: len(h)], g, n),
    "a table by an index": lambda m, h, e, g, n: pooled(h + F.embedding(torch.arange(len(h)), m.places), g, n),
    "the number of nodes": lambda m, h, e, g, n: pooled(h / len(h), g, n),
    "a function of the number of edges": lambda m, h, e, g, n: pooled(h * e.shape[1] ** 0.5, g, n),
    "the number of nodes as a tensor": lambda m, h, e, g, n: pooled(h * torch.tensor(float(len(h))), g, n),
    "places between 0 and 1": lambda m, h, e, g, n: pooled(h * torch.linspace(0, 1, len(h))[:, None], g, n),
    "the first node for all": lambda m, h, e, g, n: pooled(h + h.detach()[0], g, n),
    "given nodes": lambda m, h, e, g, n: pooled(h, g, n) + h.detach()[torch.tensor([0, 7, 12, 18])],
    "given nodes along axis 1": lambda m, h, e, g, n: pooled(h, g, n) + h.detach().T[:, torch.tensor([0, 7, 12, 18])].T,
    "graphs in another order": lambda m, h, e, g, n: pooled(h, n - 1 - g, n),
    "what an index points to": lambda m, h, e, g, n: pooled(h, g, n) + pooled(e[0, :, None] * h.new_ones(4), g[e[0]], n),
    "which graph it is": lambda m, h, e, g, n: pooled(h * (1 - 2 * (g % 2))[:, None], g, n),
    "the same, by a scatter": lambda m, h, e, g, n: h.new_zeros(4, n).scatter_add(1, g.expand(4, -1), (h * g[:, None]).T).T,
    "a table by graphs": lambda m, h, e, g, n: pooled(h + F.embedding(g, m.places[:n]), g, n),
    "numbers of nodes": lambda m, h, e, g, n: pooled(h + passed(h, e, by_count(h, e)), g, n),
    "numbers of chosen nodes": lambda m, h, e, g, n: pooled(h[at := above(h)] * at[:, None], g[at], n),
    "which graph a counted node is of": lambda m, h, e, g, n: mean_of(
        h * (own := torch.repeat_interleave(torch.bincount(g)))[:, None], own, n
    ),
    "statistics of the batch": lambda m, h, e, g, n: pooled(h * F.batch_norm(h.detach(), None, None, training=True), g, n),
    "sorted graphs": lambda m, h, e, g, n: pooled(h, g, n) + pooled(h, g, n).detach().sort(0).values,
}


def private_step(model: nn.Module, losses: Callable[[], Tensor], n: int = N, **settings: Any) -> dict[str, Any]:
    with autograd_hacks.add_hooks(model, **{"batch_dim": None, "independent": True, **settings}):
        autograd_hacks.backward(losses(), "sum")
        private.clip_and_noise_(model, max_norm=0.5, noise_multiplier=0.0, expected_batch_size=n)
        independence = autograd_hacks.describe(model).independence
    return {"independence": independence, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def clipped(model: nn.Module, loss: Callable[[int], Tensor], n: int = N) -> dict[str, Tensor]:
    rows = [torch.autograd.grad(loss(k), [*model.parameters()], allow_unused=True) for k in range(n)]
    named = {name: own for (name, _), own in zip(model.named_parameters(), zip(*rows)) if own[0] is not None}
    return oracle.clipped({name: torch.stack(own) for name, own in named.items()}, 0.5, n)[1]


@pytest.mark.parametrize("name", APART)
def test_graphs_are_shown_to_be_independent_in_batches_of_all_sizes(name: str) -> None:
    torch.manual_seed(0)
    model, y, graphs = Net(APART[name]).double(), torch.tensor([0, 1, 2, 1]), list[tuple[Tensor, Tensor]]()
    for sizes in (SIZES, (9, 4, 11, 6), (1, 2, 1, 13)):
        graphs[:] = graphs_of(sizes)
        got = private_step(model, lambda: F.cross_entropy(model(*packed(graphs)), y, reduction="none"))
        want = clipped(model, lambda k: F.cross_entropy(model(*packed(graphs[k : k + 1])), y[k : k + 1]))
        assert got.pop("independence").startswith("Independent by analysis")
        torch.testing.assert_close(got, want)


def test_few_edges_after_a_batch_with_more() -> None:
    """One edge, no edge, and edges in one graph alone, of as many nodes as N divides."""
    model, y = Net(APART["means of neighbours"]).double(), torch.tensor([0, 1, 2, 1])
    with autograd_hacks.add_hooks(model, batch_dim=None, independent=True):
        for counts in (4, 2, 3, 5), (0, 1, 0, 0), (0, 0, 0, 0), (3, 0, 0, 0):
            graphs = [(x, e[:, :count]) for (x, e), count in zip(graphs_of((3, 5, 2, 6)), counts)]
            model.zero_grad()
            autograd_hacks.backward(F.cross_entropy(model(*packed(graphs)), y, reduction="none"), "sum")
            private.clip_and_noise_(model, max_norm=0.5, noise_multiplier=0.0, expected_batch_size=N)
            each = [F.cross_entropy(model(*packed(graphs[k : k + 1])), y[k : k + 1]) for k in range(N)]
            assert all(
                torch.allclose(model.get_parameter(name).grad, g) for name, g in clipped(model, each.__getitem__).items()
            )


@pytest.mark.parametrize("name", MIXED)
def test_graphs_that_mix_are_refused(name: str) -> None:
    model = Net(MIXED[name]).double()
    with pytest.raises(PerSampleGradientError):
        private_step(model, lambda: model(*packed(graphs_of(SIZES))).square().sum(1))


def test_a_number_that_changes_with_the_sizes_is_refused_when_it_changes() -> None:
    model = Net(lambda m, h, e, g, n: pooled(h / (len(h) + 1), g, n)).double()
    with autograd_hacks.add_hooks(model, batch_dim=None, independent=True):
        for step in range(2):
            with pytest.raises(ProbeFailed, match="number") if step else pytest.MonkeyPatch.context():
                autograd_hacks.backward(model(*packed(graphs_of((5 + step, 6, 7, 8)))).sum(1), "sum")
                autograd_hacks.per_sample_grads(model, "sum").norms()


def test_entries_that_an_index_takes_may_all_be_of_one_sample() -> None:
    """What it leaves is of the others."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        at = (x[:, 0] > x[:, 1]).nonzero()[:, 0]
        return m.last(m.first(x).index_add(0, at, m.more(x.index_select(0, at)) + m.more(x[at])))

    model = Bare(forward, first=nn.Linear(WIDTH, 6), more=nn.Linear(WIDTH, 6), last=nn.Linear(6, 3))
    for where in (0, 2):
        x = torch.rand(4, WIDTH)
        x[:, 0], x[where, 0] = -1, 2
        assert independence.BY_VALUES in private_step(model, lambda x=x: model(x).sum(1), batch_dim=0)["independence"]


class Patches(nn.Module):
    """Attention within images that are packed.  leaks: whether a mean of all patches is taken away"""

    def __init__(self, leaks: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.qkv, self.last, self.leaks = nn.Linear(WIDTH, 6), nn.Linear(6, 18), nn.Linear(6, 3), leaks
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, image: Tensor, count: int) -> Tensor:
        h = self.dropout(self.first(x))
        q, k, v = self.qkv(h).chunk(3, -1)
        h = h + (q @ k.T).masked_fill(image[:, None] != image, -torch.inf).softmax(-1) @ v
        return self.last(pooled(h - h.detach().mean(0) if self.leaks else h, image, count))


def images_of(xs: Sequence[Tensor]) -> tuple[Tensor, Tensor, int]:
    return torch.cat([*xs]), torch.arange(len(xs)).repeat_interleave(torch.tensor([len(x) for x in xs])), len(xs)


def alone(keep: Tensor, x: Tensor, image: Tensor, count: int) -> tuple[Tensor, Tensor, int]:
    return images_of([x[image == n] for n in keep])


def test_packed_attention_needs_the_arguments_for_some_samples_alone() -> None:
    xs = [torch.randn(n, WIDTH) for n in SIZES]
    model = Patches()
    loss = lambda: model(*images_of(xs)).square().sum(1)  # noqa: E731  it is called three times
    with pytest.raises(ProbeFailed, match=r"replace=") as refused:
        private_step(model, loss)
    assert "test_packed_samples.py:" in str(refused.value)  # the line of the softmax
    got = private_step(model, loss, replace=alone)
    want = clipped(model, lambda k: model(*images_of(xs[k : k + 1])).square().sum())
    assert got.pop("independence").startswith("Independent: ")
    torch.testing.assert_close(got, want)
    model = Patches(leaks=True)
    with pytest.raises(SamplesMixed, match="left out"):
        private_step(model, loss, replace=alone)
    model = Patches(dropout=0.5)
    private_step(model, loss, replace=alone)
    with pytest.raises(ValueError, match="without independent"):
        autograd_hacks.add_hooks(model, replace=alone)


def test_packed_inside_the_model_other_samples_keep_their_sizes() -> None:
    class Inside(Patches):
        def forward(self, xs: list[Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(*images_of(xs))

    model, xs = Inside(), [torch.randn(n, WIDTH) for n in SIZES]
    assert private_step(model, lambda: model(xs).sum(1))["independence"].startswith("Independent: ")


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_with_offsets(mode: str) -> None:
    model, bags = nn.Sequential(nn.EmbeddingBag(20, 6, mode=mode), nn.Linear(6, 3)), [torch.randint(20, (n,)) for n in SIZES]
    bag = model[0]
    model.forward = lambda x, at: model[1](bag(x, at))  # type: ignore[method-assign]
    ends = torch.tensor(SIZES).cumsum(0)
    got = private_step(model, lambda: model(torch.cat(bags), ends - torch.tensor(SIZES)).square().sum(1))
    want = clipped(model, lambda k: model(bags[k], torch.tensor([0])).square().sum())
    assert got.pop("independence").startswith("Independent by analysis")
    torch.testing.assert_close(got, want)


# Laws against values: what is shown doesn't change if other samples do.

KEEPING: dict[str, Callable[[Tensor], Tensor]] = {
    "a norm": lambda h: F.layer_norm(h, (WIDTH,)), "a softmax": lambda h: h.softmax(-1),
    "turned along features": lambda h: h.roll(1, 1), "chosen": lambda h: h * (h[:, :1] > 0),
    "turned twice": lambda h: h.flip(0).flip(0), "parts": lambda h: torch.cat([h[:2], h[2:]]),
    "written": lambda h: h.new_zeros(h.shape).index_copy(0, torch.arange(len(h)), h),
    "in memory": lambda h: h.clone().t().mul_(2).t(),
    "columns into memory": lambda h: _put(h, lambda o: o[:, 0].copy_(h[:, 1])),
    "by a mask": lambda h: h.masked_fill(h.isnan(), 0.0),
    "a product of features": lambda h: (h[:, :, None] * h[:, None]).sum(2), "windows": lambda h: h.unfold(0, 1, 1)[..., 0],
    "a loop": lambda h: torch.stack([*h]), "strided": lambda h: h.contiguous().as_strided((6, WIDTH), (WIDTH, 1)),
    "losses of classes": lambda h: F.nll_loss(h, torch.arange(6) % WIDTH, reduction="none")[:, None] * h,
    "routed": lambda h: h.new_zeros(h.shape).index_add(0, above(h), h[above(h)]),
}  # fmt: skip
MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "a mean": lambda h: h - h.mean(0), "turned": lambda h: h.roll(1, 0), "sorted samples": lambda h: h.sort(0).values,
    "parts in another order": lambda h: torch.cat([h[1:], h[:1]]),
    "written elsewhere": lambda h: h.new_zeros(h.shape).index_copy(0, torch.arange(len(h)).flip(0), h),
    "a row into memory": lambda h: _put(h, lambda o: o[0].copy_(h[1])), "the largest": lambda h: h / h.abs().amax(),
    "a product of samples": lambda h: h @ h.T @ h, "ranks": lambda h: h[h[:, 0].argsort().argsort()],
    "the first of those routed": lambda h: h + h[above(h)][:1].sum(0), "how many were routed": lambda h: h * len(above(h)),
    "one for all": lambda h: h[:1].expand_as(h) + h,
    "the first, strided": lambda h: h.contiguous().as_strided((6, WIDTH), (0, 1)),
    "a loss of all": lambda h: F.nll_loss(h, torch.arange(6) % WIDTH) * h,
}  # fmt: skip


def _put(h: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    out = h.clone()
    write(out)
    return out


def shown(steps: Sequence[Callable[[Tensor], Tensor]]) -> tuple[list[bool], Net]:
    """Whether laws show independence without a gradient, and the model.  Numbers are taken for known."""

    def what(own: Net, h: Tensor) -> Tensor:
        x = h.detach()
        for step in steps:
            x = step(x)
        return h + x

    model, found = Net(what), list[bool]()
    with pytest.MonkeyPatch.context() as patched, autograd_hacks.add_hooks(model, independent=True):
        own = independence._is_by_tape
        patched.setattr(independence, "_is_by_tape", lambda *given: [found.append(own(*given)), *found][-1])
        patched.setattr(ABOVE, "show", lambda *_: None)
        model(torch.randn(6, WIDTH))
    return found, model


@pytest.mark.parametrize("name", [*KEEPING, *MIXING])
def test_what_laws_show_of_operations(name: str) -> None:
    torch.manual_seed(0)
    found, _ = shown([(KEEPING | MIXING)[name]])
    assert found == [name in KEEPING and name != "routed"]  # the numbers beside a length that values say are not known


@given(st.lists(st.sampled_from(sorted(KEEPING | MIXING)), min_size=1, max_size=4), st.integers(0, 2**16))
def test_what_laws_show_is_independent_in_value(names: list[str], seed: int) -> None:
    torch.manual_seed(seed)
    found, model = shown([(KEEPING | MIXING)[name] for name in names])
    x = torch.randn(6, WIDTH)
    other = torch.cat([x[:3], torch.randn(3, WIDTH)])
    with torch.no_grad():
        is_same = torch.equal(model(x)[:3], model(other)[:3])
    assert is_same or found != [True]


def test_a_law_that_fails_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tape_laws._BY_VALUES, "gather", lambda *_: {}["a case that is lacking"])
    found, _ = shown([lambda h: h.gather(1, h.argsort(1))])
    assert found == [False]
