"""Kronecker factors and corrected eigenvalues against their definitions."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from curvature_nets import curve
from parts_of_models import assert_solves, expected_block, rows_of
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.attribution import Metric
from autograd_hacks.forms import Dense

pytestmark = pytest.mark.usefixtures("double")

Pair = tuple[Tensor, Tensor]


def by_definition(a: Tensor, b: Tensor) -> Pair:
    """a: N T I, the inputs    b: N K T O, the gradients of each pass, by a loop over samples and positions"""
    samples, positions = a.shape[:2]
    first, second = torch.zeros(a.shape[2], a.shape[2]), torch.zeros(b.shape[3], b.shape[3])
    for own, passes in zip(a, b):
        for x in own:
            first += torch.outer(x, x) / (samples * positions)
        for g in passes.flatten(0, 1):
            second += torch.outer(g, g) / samples
    return first, second


def assert_factors(p: nn.Parameter, expected: Pair) -> None:
    assert_close(tuple(p.kfac), expected)


def roots(z: Tensor) -> Tensor:
    """A square root of the cross-entropy's Hessian by autograd and a decomposition, N C K."""
    hessians = [
        torch.autograd.functional.hessian(lambda z: F.cross_entropy(z[None], torch.zeros(1).long()), own) for own in z
    ]
    values, vectors = torch.linalg.eigh(torch.stack(hessians))
    return vectors * values.clamp(min=0).sqrt()[:, None]


def test_a_linear_layer() -> None:
    layer, x = nn.Linear(3, 4), torch.randn(5, 3)
    autograd_hacks.add_hooks(layer)
    output = layer(x)
    curve(layer, output, kind="kfac")
    gradients = roots(output.detach()).mT[:, :, None]
    assert_factors(layer.weight, by_definition(x[:, None], gradients))
    assert_factors(layer.bias, by_definition(torch.ones(5, 1, 1), gradients))


@pytest.mark.parametrize("folded", [False, True])
def test_folded_positions(folded: bool) -> None:
    """Positions that are folded into the batch in front of a layer count as positions."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = torch.tanh(m.first(x))
        return m.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]) if folded else m.layer(x)

    model, x = Bare(forward, first=nn.Linear(3, 3), layer=nn.Linear(3, 2)), torch.randn(5, 4, 3)
    autograd_hacks.add_hooks(model)
    curve(model, model(x), "LeastSquares", kind="kfac")
    inputs = torch.tanh(F.linear(x, model.first.weight, model.first.bias)).detach()
    gradients = torch.eye(8).view(8, 4, 2).expand(5, 8, 4, 2) / 4**0.5
    assert_factors(model.layer.weight, by_definition(inputs, gradients))


@pytest.mark.parametrize("padding", ["same", 1])
def test_a_convolution(padding: str | int) -> None:
    conv = nn.Conv2d(2, 3, 3, padding=padding, stride=1 if padding == "same" else 2)
    model, x = nn.Sequential(conv, nn.Flatten()), torch.randn(4, 2, 5, 5)
    autograd_hacks.add_hooks(model)
    output = model(x)
    curve(model, output, "LeastSquares", kind="kfac")
    windows = F.unfold(x, 3, padding=1, stride=conv.stride).mT  # N L (C K)
    size = output.shape[1]
    gradients = torch.eye(size).view(size, 3, -1).mT.expand(4, size, -1, 3)  # N K L O
    assert_factors(conv.weight, by_definition(windows, gradients))


def test_the_product_is_that_of_the_flattened_weight() -> None:
    """For a single sample the block is a Kronecker product: B ⊗ A, as weights lie in memory row by row."""
    layer, x = nn.Linear(3, 4), torch.randn(1, 3)
    autograd_hacks.add_hooks(layer)
    curve(layer, layer(x))
    autograd_hacks.compute_hess(layer, kind="kfac")
    for p in layer.parameters():
        a, b = p.kfac
        assert_close(torch.kron(b, a), p.hess.reshape(p.numel(), p.numel()))
    a, b = layer.weight.kfac
    v = torch.randn(4, 3)
    assert_close(b @ v @ a, torch.einsum("oipq,pq->oi", layer.weight.hess, v))


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Unflatten(1, (4, 1)), nn.ConvTranspose1d(4, 4, 1), nn.Flatten()),
        lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.LayerNorm((2, 2)), nn.Flatten()),
        lambda: nn.Sequential(nn.ReLU(), layer := nn.Linear(4, 4), nn.ReLU(), layer),  # called twice
    ],
)
def test_what_has_no_products_is_taken_by_its_rows(build: Callable[[], nn.Sequential]) -> None:
    model, x = build(), torch.randn(3, 4)
    autograd_hacks.add_hooks(model)
    autograd_hacks.curvature.compute_hess_over(model, [x], "full", "Jacobian")
    table = autograd_hacks.curvature.compute_hess_over(model, [x], "kfac", "Jacobian")
    assert table.kinds["1.weight"].startswith("by its rows")
    weight = model[1].weight
    a, b = weight.kfac
    block = weight.hess.view(len(a), len(b), len(a), len(b))
    assert_close(a * b.trace(), torch.einsum("vdvd->v", block))
    assert_close(b, torch.einsum("vdve->de", block))


def test_numbers_that_were_none_do_not_stay_in_memory_that_is_used_again() -> None:
    for layer, x in [
        (nn.Linear(200, 2), torch.randn(3, 200)),
        (nn.Sequential(nn.Conv1d(20, 2, 10), nn.Flatten()), torch.randn(3, 20, 12)),
    ]:
        autograd_hacks.add_hooks(layer)
        for batch in (x / 0, x):
            curve(layer, layer(batch), "LeastSquares", kind="kfac")
        weight = next(layer.parameters())
        assert weight.kfac[0].nbytes > 2**16
        assert bool(weight.kfac[0].isfinite().all())


# Kronecker factors of what is no product of inputs and gradients, and of what is too large for a matrix, against the
# dense block of one backward pass for each output of each sample


WORDS = torch.tensor([[0, 1, 2], [3, 3, 0], [5, 4, 1]])
BY_ROWS = {"table.weight": (6, 4), "places": (3, 4), "wpe.weight": (5, 4)}


def language(m: nn.Module, words: Tensor) -> Tensor:
    """A table that is the head too, positions for one sample that are added to all, and a head of its own."""
    x = m.inner(torch.tanh(m.table(words) + m.places + m.wpe(torch.arange(words.shape[1])[None])))
    return torch.cat([F.linear(x, m.table.weight), m.head(x.sin())], -1)


def of_words(how: Callable[[nn.Module, Tensor], Tensor] = language) -> nn.Module:
    return Bare(
        how, table=nn.Embedding(6, 4), wpe=nn.Embedding(5, 4), places=torch.randn(1, 3, 4), inner=nn.Linear(4, 4),
        head=nn.Linear(4, 7),
    )  # fmt: skip


def case() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model with hooks, and its rows."""
    model = of_words()
    rows = rows_of(model, WORDS)
    autograd_hacks.add_hooks(model)
    return model, rows


def test_factors_by_rows_have_the_partial_traces_of_the_block() -> None:
    model, rows = case()
    for batches in ([WORDS], [WORDS[:2], WORDS[2:]]):
        table = autograd_hacks.curvature.compute_hess_over(model, batches, "kfac", "Jacobian")
        assert table.share == 1
        assert table.kinds["wpe.weight"] == "A diagonal, 5, B 4 × 4"  # looked up
        for name in ("table.weight", "places"):
            entries, width = BY_ROWS[name]
            a, b = model.get_parameter(name).kfac
            assert table.kinds[name] == f"by its rows: A diagonal, {entries}, B {width} × {width}"
            block = rows[name].flatten(1).T @ rows[name].flatten(1) / len(WORDS)
            dense = block.view(entries, width, entries, width)
            assert_close(b, torch.einsum("vdve->de", dense))
            assert_close(a * block.trace(), torch.einsum("vdvd->v", dense))


def test_ekfac_of_all_of_it() -> None:
    model, rows = case()
    table = autograd_hacks.curvature.compute_hess_over(model, [WORDS[:2], WORDS[2:]], "ekfac", "Jacobian")
    assert table.share == 1
    assert_solves(model, WORDS, rows, BY_ROWS)


# Corrected eigenvalues against the formula, on rows of plain backward passes


def dense_net() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(9, 3)


def conv_net() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(nn.Conv2d(1, 2, 2, stride=2), nn.Tanh(), nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 3))
    return net, torch.randn(9, 1, 4, 4)


NETS = {"dense": dense_net, "convolutions": conv_net}


def written(p: nn.Parameter) -> Tensor:
    """The block that ``param.ekfac`` multiplies by, P P."""
    unit = torch.eye(p.numel()).view(-1, *p.shape)
    return p.ekfac.matvec(unit).flatten(1)


@pytest.fixture(params=list(NETS))
def net_and_data(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, Tensor]]:
    model, x = NETS[request.param]()
    with autograd_hacks.add_hooks(model):
        yield model, x


def test_blocks_equal_the_formula(net_and_data: tuple[nn.Module, Tensor]) -> None:
    model, x = net_and_data
    curve(model, model(x), "Jacobian", kind="ekfac")
    with autograd_hacks.pause_hooks():
        rows = rows_of(model, x)
    for name, p in model.named_parameters():
        expected = expected_block(rows[name], p.kfac, False, len(x))
        assert_close(written(p), expected, msg=lambda told, name=name: f"{name}: {told}")


def test_a_loader_gives_what_its_batches_together_do(net_and_data: tuple[nn.Module, Tensor]) -> None:
    model, x = net_and_data
    curve(model, model(x), kind="ekfac")
    once = [written(p) for p in model.parameters()]
    autograd_hacks.curvature.compute_hess_over(model, x.split(4), kind="ekfac")
    for p, expected in zip(model.parameters(), once):
        assert_close(written(p), expected)
    with autograd_hacks.accumulate(model):
        for part in x.split(4):
            autograd_hacks.backprop_hess(model(part))
    autograd_hacks.compute_hess(model, kind="ekfac")
    for p, expected in zip(model.parameters(), once):
        assert_close(written(p), expected)
    with pytest.raises(ValueError, match="runs all batches twice"):
        autograd_hacks.curvature.compute_hess_over(model, iter(x.split(4)), kind="ekfac")


@pytest.mark.parametrize("damping", [None, 0.3])
def test_solving(net_and_data: tuple[nn.Module, Tensor], damping: float | None) -> None:
    model, x = net_and_data
    autograd_hacks.curvature.compute_hess_over(model, [x], kind="ekfac")
    model(x).square().sum(1).mean().backward()
    grads = autograd_hacks.per_sample_grads(model)
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    metric = Metric.from_ekfac(model, damping)
    solved, rows = metric(v), grads.preconditioned(metric)
    products = torch.zeros(len(x), len(x))
    for name, p in model.named_parameters():
        block = written(p)
        block += torch.eye(p.numel()) * (0.1 * block.trace() / p.numel() if damping is None else damping)
        assert_close(solved[name].flatten(), torch.linalg.solve(block, v[name].flatten()))
        own = grads[name].dense().flatten(1)
        assert_close(rows[name].dense().flatten(1), torch.linalg.solve(block, own.T).T)
        products += own @ torch.linalg.solve(block, own.T)
    assert_close(grads.gram(rows), products)
    assert not any(isinstance(form, Dense) for form in rows.values())


# Curvature layer by layer: the numbers are those of all at once, which
# other tests hold to one backward pass for each output


def deep() -> tuple[nn.Sequential, Tensor]:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(6, 3)
    autograd_hacks.add_hooks(model)
    return model, x


def found(model: nn.Module, kind: str) -> dict[str, list[Tensor]]:
    attribute = {"full": "hess", "diag": "hess_diag"}.get(kind, kind)
    held = {name: getattr(p, attribute) for name, p in model.named_parameters()}
    if kind == "ekfac":
        return {name: [own.matvec(torch.eye(own.values.numel()).view(-1, *own.values.shape))] for name, own in held.items()}
    return {name: [x.clone() for x in own] if kind == "kfac" else [own.clone()] for name, own in held.items()}


@pytest.mark.parametrize("kind", ["full", "diag", "kfac", "ekfac"])
def test_layer_by_layer_is_all_at_once(kind: str) -> None:
    model, x = deep()
    autograd_hacks.curvature.compute_hess_over(model, [x[:2], x[2:]], kind)
    attribute, expected = {"full": "hess", "diag": "hess_diag"}.get(kind, kind), found(model, kind)
    for over in (True, False):
        if not over:
            autograd_hacks.backprop_hess(model(x))
        kept = dict[nn.Parameter, object]()
        for k in (0, 2, 4):
            settings = {"parameters": f"{k}.*"}
            if over:
                table = autograd_hacks.curvature.compute_hess_over(model, [x[:2], x[2:]], kind, **settings)
            else:
                table = autograd_hacks.compute_hess(model, kind, **settings)
            assert table.covered == [f"{k}.weight", f"{k}.bias"]
            assert [name for name, p in model.named_parameters() if getattr(p, attribute, None) is not None] == table.covered
            kept |= {p: getattr(p, attribute) for p in model[k].parameters()}
        for p, own in kept.items():
            setattr(p, attribute, own)
        assert_close(found(model, kind), expected)
