"""Kronecker factors of what is no product of inputs and gradients, and of what is too large for a matrix, against the dense
block of one backward pass for each output of each sample."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from parts_of_models import expected_block, rows_of
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks import Metric
from autograd_hacks.errors import BlockTooLarge, UnsupportedLayer

pytestmark = pytest.mark.usefixtures("double")
WORDS = torch.tensor([[0, 1, 2], [3, 3, 0], [5, 4, 1]])
BY_ROWS = {"table.weight": (6, 4), "places": (3, 4), "wpe.weight": (5, 4)}


class Language(nn.Module):
    """A table that is the head too, positions for one sample that are added to all, and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.wpe, self.places = nn.Embedding(6, 4), nn.Embedding(5, 4), nn.Parameter(torch.randn(1, 3, 4))
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 7)

    def forward(self, words: Tensor) -> Tensor:
        x = self.inner(torch.tanh(self.table(words) + self.places + self.wpe(torch.arange(words.shape[1])[None])))
        return torch.cat([F.linear(x, self.table.weight), self.head(x.sin())], -1)


def case() -> tuple[Language, dict[str, Tensor]]:
    """The model with hooks, and its rows."""
    model = Language()
    rows = rows_of(model, WORDS)
    autograd_hacks.add_hooks(model)
    return model, rows


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_factors_by_rows_have_the_partial_traces_of_the_block(approximation: str) -> None:
    model, rows = case()
    for batches in ([WORDS], [WORDS[:2], WORDS[2:]]):
        table = autograd_hacks.compute_hess_over(model, batches, "kfac", "Jacobian", kfac_approx=approximation)
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


@pytest.mark.parametrize("limit", [2**30, 48 * 8])
def test_ekfac_of_all_of_it(limit: int) -> None:
    model, rows = case()
    table = autograd_hacks.compute_hess_over(model, [WORDS[:2], WORDS[2:]], "ekfac", "Jacobian", limit=limit)
    assert table.share == 1
    assert ("B diagonal, 7" in table.kinds["head.weight"]) == (limit < 2**30)
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    solved = autograd_hacks.ekfac_solve(model, v, 0.3)
    model(WORDS).square().flatten(1).sum(1).mean().backward()
    grads = autograd_hacks.per_sample_grads(model)
    lazily = grads.preconditioned(Metric.from_ekfac(model, 0.3))
    for name, p in model.named_parameters():
        block = expected_block(rows[name], p.kfac, name in BY_ROWS, len(WORDS))
        inverse = torch.linalg.inv(block + 0.3 * torch.eye(p.numel()))
        assert_close(solved[name].flatten(), inverse @ v[name].flatten())
        assert_close(lazily[name].dense().flatten(1), grads[name].dense().flatten(1) @ inverse)


@pytest.mark.parametrize("limit", [2**30, 48 * 8])
def test_the_metric_of_damped_factors(limit: int) -> None:
    model, _ = case()
    autograd_hacks.compute_hess_over(model, [WORDS], "kfac", "Jacobian", limit=limit)
    model(WORDS).square().flatten(1).sum(1).mean().backward()
    grads = autograd_hacks.per_sample_grads(model)
    found = grads.preconditioned(Metric.from_kfac(model, 0.3))
    for name in (*BY_ROWS, "head.weight", "head.bias"):
        a, b = (x.diag() if x.ndim == 1 else x for x in model.get_parameter(name).kfac)
        pi = (a.diagonal().mean() / b.diagonal().mean()).sqrt()
        left, right = torch.linalg.inv(b + 0.3**0.5 / pi * torch.eye(len(b))), a + 0.3**0.5 * pi * torch.eye(len(a))
        pair = (torch.linalg.inv(right), left) if name in BY_ROWS else (left, torch.linalg.inv(right))
        assert_close(found[name].dense().flatten(1), grads[name].dense().flatten(1) @ torch.kron(*pair))


@pytest.mark.parametrize("bias", ["exact", "shared"])
@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_a_factor_beyond_the_limit_is_its_diagonal(approximation: str, bias: str) -> None:
    whole, _ = case()
    options = {"kind": "kfac", "hess_type": "Jacobian", "kfac_approx": approximation, "kfac_bias": bias}
    autograd_hacks.compute_hess_over(whole, [WORDS], **options)
    expected = {name: [x.clone() for x in whole.get_parameter(name).kfac] for name in ("head.weight", "head.bias")}
    for name, (a, b) in expected.items():
        autograd_hacks.compute_hess_over(whole, [WORDS[:2], WORDS[2:]], **options, limit=48 * 8)
        found = whole.get_parameter(name).kfac
        assert_close(found[0], a)
        assert_close(found[1], b.diagonal())
    with pytest.raises(BlockTooLarge, match="A of"):
        autograd_hacks.compute_hess_over(whole, [WORDS], **options, limit=15 * 8)


def test_sums_of_uses_are_close_to_the_block() -> None:
    model, rows = case()
    autograd_hacks.compute_hess_over(model, [WORDS], "ekfac", "Jacobian")
    own = rows["table.weight"].flatten(1)
    block = own.T @ own / len(WORDS)
    p = model.table.weight
    far = {"kfac": torch.kron(p.kfac[0].diag(), p.kfac[1]), "ekfac": p.ekfac.matvec(torch.eye(24).view(-1, 6, 4)).flatten(1)}
    apart = {kind: float((block - found).norm() / block.norm()) for kind, found in far.items()}
    assert apart["ekfac"] < apart["kfac"] < 0.9
    assert_close(far["ekfac"].trace(), block.trace())


class Otherwise(Language):
    """Looks positions up in a batch of one sample only."""

    def forward(self, words: Tensor) -> Tensor:
        count = words.shape[1]
        at = torch.arange(count)
        places = self.wpe(at[None]) if len(words) == 1 else self.wpe.weight[at].sin()
        return self.head(torch.tanh(self.table(words) + places))


def test_what_is_read_otherwise_in_the_first_batch_is_refused() -> None:
    model = Otherwise()
    autograd_hacks.add_hooks(model)
    with pytest.raises(UnsupportedLayer, match=r"wpe\.weight.*in other ways in some batches"):
        autograd_hacks.compute_hess_over(model, [WORDS[:1], WORDS[1:]], "kfac", "Jacobian")
