"""Kronecker factors of language models' parts, and EK-FAC, against inputs and gradients of one sample at a time."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn as nn
from curvature_nets import curve
from parts_of_models import CASES, IS_TURNED, Use, assert_solves, hooked, rows_of
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks

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
