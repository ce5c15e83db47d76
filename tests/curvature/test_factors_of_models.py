"""Kronecker factors of language models' parts, and EK-FAC, against inputs and gradients of one sample at a time."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from curvature_nets import curve
from parts_of_models import CASES, IS_TURNED, Turned, Use, assert_solves, hooked, rows_of
from refused import check_each
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.attribution import Metric
from autograd_hacks.errors import BlockTooLarge, UnsupportedLayer

pytestmark = pytest.mark.usefixtures("double")


def uses_of(model: nn.Module, x: Tensor) -> list[dict[str, list[tuple[int, Tensor, Tensor]]]]:
    """For each sample, run alone, and parameter: the block, its inputs, T I, and the gradients of each output, K T O."""
    found = []
    for own in x:
        seen: dict[str, list[Use]] = {}
        out = model(own[None], seen)
        passes = [s.view(out.shape) for s in torch.eye(out.numel())]
        found.append({})
        for name, uses in seen.items():
            found[-1][name] = []
            for block, inputs, y, view in uses:
                gradients = [view(torch.autograd.grad(out, y, s, retain_graph=True)[0]) for s in passes]
                found[-1][name].append((block, inputs.detach(), torch.stack(gradients)))
    return found


def by_hand(uses: Sequence[tuple[Tensor, Tensor]], samples: int) -> tuple[Tensor, Tensor]:
    """A and B of a block.  uses: of each sample that has one the inputs, T I, and gradients, K T O"""
    a = torch.cat([inputs for inputs, _ in uses])
    b = torch.cat([gradients.flatten(0, 1) for _, gradients in uses])
    return a.T @ a / len(a), b.T @ b / samples


@pytest.mark.parametrize("case", list(CASES))
def test_factors(case: str) -> None:
    model, x = hooked(case)
    with autograd_hacks.pause_hooks():
        uses = uses_of(model, x)
    for batches in ([x], [x[:1], x[1:]]):
        autograd_hacks.curvature.compute_hess_over(model, batches, "kfac", "Jacobian")
        for name in uses[0]:
            p = model.get_parameter(name)
            a, b = p.kfac
            assert p.kfac.is_turned == (name in IS_TURNED)
            blocks = dict.fromkeys(range(1), (a, b)) if b.ndim == 2 else {k: (a[k], b[k]) for k in range(len(b))}
            for block, (mine, theirs) in blocks.items():
                own = [(i, g) for sample in uses for k, i, g in sample[name] if k == block and len(i)]
                expected = by_hand(own, len(x)) if own else (torch.zeros_like(mine), torch.zeros_like(theirs))
                assert_close(mine, expected[0].diagonal() if mine.ndim == 1 else expected[0])
                assert_close(theirs, expected[1])


def test_vectors_have_their_own_block() -> None:
    model, x = hooked("words")
    curve(model, model(x), "Jacobian", kind="kfac")
    with autograd_hacks.pause_hooks():
        rows = rows_of(model, x)
    for name in ("norm.weight", "norm.bias", "turned.bias"):
        a, b = model.get_parameter(name).kfac
        assert_close(torch.kron(b, a), rows[name].T @ rows[name] / len(x))


@pytest.mark.parametrize("case", list(CASES))
def test_ekfac_and_its_inverse(case: str) -> None:
    model, x = hooked(case)
    with autograd_hacks.pause_hooks():
        rows = rows_of(model, x)
    table = autograd_hacks.curvature.compute_hess_over(
        model, [x[:2], x[2:]], "ekfac", "Jacobian", forward=lambda m, batch: m(batch)
    )
    assert table.share == 1
    assert_solves(model, x, rows, IS_TURNED)


@pytest.mark.parametrize(
    ("family", "way"), [("MixtralForCausalLM", "eager"), ("GptOssForCausalLM", "grouped_mm"), ("GPT2LMHeadModel", None)]
)
def test_language_models(family: str, way: str | None) -> None:
    """The trace of each parameter's curvature is the mean of squared gradients."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
    routed = {"intermediate_size": 8, "num_local_experts": 3, "num_experts_per_tok": 2, "num_key_value_heads": 1}
    kind = getattr(transformers, family)
    config = kind.config_class(**sizes, **(routed if way else {}), bos_token_id=0, eos_token_id=0)
    config._experts_implementation = way
    inner = kind(config).to(torch.float32 if way == "grouped_mm" else torch.float64).eval()  # which that is there for

    def forward(model: nn.Module, words: Tensor) -> Tensor:
        found: Tensor = model(input_ids=words).logits
        return found

    words = torch.randint(1, 12, (3, 3))
    with autograd_hacks.pause_hooks():
        rows: dict[str, Tensor] = {name: torch.zeros(()) for name, _ in inner.named_parameters()}
        for own in words:
            out = forward(inner, own[None]).flatten()
            for k in range(len(out)):
                grads = torch.autograd.grad(out[k], list(inner.parameters()), retain_graph=True, allow_unused=True)
                for name, grad in zip(rows, grads):
                    rows[name] = rows[name] + (0 if grad is None else grad.square().sum() / len(words))
    autograd_hacks.add_hooks(inner)
    table = autograd_hacks.curvature.compute_hess_over(inner, [words], "ekfac", "Jacobian", forward=forward, skip=True)
    assert table.share == 1
    by_rows = {name for name, has in table.kinds.items() if has.startswith("by its rows")}
    assert by_rows == ({"transformer.wte.weight"} if way is None else set())
    for name in table.covered:
        found = inner.get_parameter(name).ekfac.values.sum()
        assert_close(found, rows[name].to(found), msg=lambda told, name=name: f"{name}: {told}")
    if way:
        assert inner.get_parameter("model.layers.0.mlp.experts.down_proj").kfac[1].shape == (3, 16, 16)


# What a curvature is of, and what is said of the rest


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
def test_what_is_skipped_is_said(kind: str) -> None:
    """What is not asked for, and what is too large."""
    # A table that is read again at the end, with a bias, and a matrix.
    model = Bare(
        lambda m, words: F.linear(m.turned(torch.tanh(m.table(words))), m.table.weight, m.table.bias),
        table=Bare(lambda m, words: F.embedding(words, m.weight), weight=torch.randn(6, 4), bias=torch.randn(6)),
        turned=Turned(4, 4),
    )
    autograd_hacks.add_hooks(model)
    words = torch.tensor([[0, 1, 2], [3, 4, 5]])
    only = autograd_hacks.curvature.compute_hess_over(model, [words[:1], words[1:]], kind, parameters=["turned.*"])
    assert only.skipped == dict.fromkeys(["table.weight", "table.bias"], "it is not among parameters=")
    assert only.covered == ["turned.weight", "turned.bias"]
    assert only.share == pytest.approx(20 / 50)
    text = str(only)
    assert f"{kind}: 2 of 4 tensors; attributed: 40 % of 50 parameters" in text
    assert "A 4 × 4, B 4 × 4, stored as (I, O)" in text
    assert repr(only).count("\n") == 0
    autograd_hacks.backprop_hess(model(words))
    with pytest.raises(ValueError, match=r"compute_hess: parameters: 'turnt\.\*' matches no parameter"):
        autograd_hacks.compute_hess(model, kind, parameters=["turnt.*"])
    with pytest.raises(BlockTooLarge, match=r"A of turned\.weight"):
        autograd_hacks.compute_hess(model, kind, parameters="turned.*", max_bytes=100)
    table = autograd_hacks.compute_hess(model, kind, parameters="turned.*", max_bytes=100, skip=True)
    assert table.covered == []
    assert "would take 128 B, and max_bytes is 100 B" in table.skipped["turned.weight"]


@pytest.mark.parametrize("rows", [[0, 1], [1, 2]])
def test_positions_that_fill_up_are_not_counted(rows: list[int]) -> None:
    """Samples send unequal numbers of positions to an expert, and a padded word is none."""
    model, x = hooked("words")
    curve(model, model(x[rows]), "Jacobian", kind="kfac")
    words = x[rows][x[rows] != 2]
    assert_close(model.table.weight.kfac[0], words.bincount(minlength=6) / len(words))


@pytest.mark.parametrize("kind", ["full", "diag", "kfac", "ekfac"])
def test_parameters_of_one_number_and_of_none(kind: str) -> None:
    model: Any = Bare(lambda m, x: m.a(x + m.none.sum(0)) * m.scale, a=nn.Linear(3, 2))
    model.scale, model.none = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 3))
    autograd_hacks.add_hooks(model)
    out = model(torch.randn(4, 3))
    curve(model, out, "Jacobian", kind=kind, skip=True)
    if kind == "full":
        assert_close(model.scale.hess, (out / model.scale).square().sum().detach() / 4)


def test_a_parameter_that_is_read_otherwise_later_is_left_out() -> None:
    def sometimes(m: Any, words: Tensor) -> Tensor:
        """Reads its matrix twice where a word is 0."""
        y = m.turned(m.table(words))
        return y @ m.turned.weight if bool((words == 0).any()) else y

    model = Bare(sometimes, table=nn.Embedding(3, 3), turned=Turned(3, 3))
    autograd_hacks.add_hooks(model)
    batches = [torch.tensor([[1, 2], [2, 2]]), torch.tensor([[0, 1], [1, 1]])]
    table = autograd_hacks.curvature.compute_hess_over(model, batches, "kfac", skip=True)
    assert [*table.skipped] == ["turned.weight"]
    assert "in other ways" in table.skipped["turned.weight"]
    assert model.turned.weight.kfac is None
    with pytest.raises(UnsupportedLayer, match=r"turned\.weight of layer 'turned' \(Turned\): it is read in other ways"):
        autograd_hacks.curvature.compute_hess_over(model, batches, "kfac")


def test_factors_that_do_not_fit_are_refused() -> None:
    model, other = Turned(3, 3), nn.Linear(4, 3)
    for m, x in ((model, torch.randn(5, 1, 3)), (other, torch.randn(5, 4))):
        autograd_hacks.add_hooks(m)
        autograd_hacks.curvature.compute_hess_over(m, [x], "ekfac")
    other(torch.randn(2, 4)).sum().backward()
    rows, metric = autograd_hacks.per_sample_grads(other, "sum"), Metric.from_ekfac(model)
    check_each(
        (ValueError, "'weight': the metric has L and R of shapes", lambda: rows.preconditioned(metric)),
        (ValueError, "'head'; expected names such as 'weight'", lambda: metric({"head": torch.zeros(3)})),
    )
    model.weight.ekfac = other.weight.ekfac
    check_each((ValueError, "has 12 numbers, but this model's weight 9", lambda: Metric.from_ekfac(model)))


@pytest.mark.parametrize("kind", ["kfac", "diag"])
def test_all_that_trains_is_counted(kind: str) -> None:
    """Also what ``add_hooks(only=...)`` leaves out, which has no curvature; what is frozen is said."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Linear(2, 2)), torch.randn(5, 3)
    model[3].weight.requires_grad_(False)
    autograd_hacks.add_hooks(model, only=["0.*"])
    table = autograd_hacks.curvature.compute_hess_over(model, [x], kind)
    assert table.covered == ["0.weight", "0.bias"]
    assert table.skipped == dict.fromkeys(["2.weight", "2.bias", "3.bias"], "it was left out by add_hooks(only=...)")
    assert table.share == 16 / 28
    assert f"{kind}: 2 of 5 tensors; attributed: 57.1 % of 28 parameters that train; 4 are frozen" in str(table)
    with pytest.raises(ValueError, match=r"parameters: '2\.\*' was left out by add_hooks\(only="):
        autograd_hacks.curvature.compute_hess_over(model, [x], kind, parameters=["0.*", "2.*"])
    with pytest.raises(ValueError, match="matches only frozen parameters"):
        autograd_hacks.curvature.compute_hess_over(model, [x], kind, parameters="3.weight")
