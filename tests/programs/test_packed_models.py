"""Documents that are packed into one row of a language model of transformers', against each document by itself."""

from collections.abc import Callable
from typing import Any

import packed
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from flexible import Flexible, quiet
from rarely import crossed, rarely
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import SamplesMixed

transformers = pytest.importorskip("transformers")

WORDS, LENGTHS = 20, (5, 3, 6)
SMALL = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def llama(attention: str) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, attn_implementation=attention))


def qwen3(attention: str) -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=8, attn_implementation=attention))


def gpt2(attention: str) -> nn.Module:
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    chances = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **chances, attn_implementation=attention))


def batch(samples: int) -> tuple[Tensor, Tensor]:
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand(samples, -1)
    return torch.randint(WORDS, positions.shape), positions


def loss(model: nn.Module, ids: Tensor, positions: Tensor, **more: Any) -> Tensor:
    """The sum over all tokens whose next one is of the same document."""
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **more).logits
    each = F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
    return (each * (positions[:, 1:] != 0)).sum()


def assert_rows(model: nn.Module, grads: autograd_hacks.PerSampleGrads, ids: Tensor, positions: Tensor) -> None:
    assert_close(grads.dense(), packed.rows_of(model, LENGTHS, loss, ids, positions))


@pytest.fixture
def exact_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' eager attention rounds to float32 in its softmax, also in models of double precision."""
    softmax = F.softmax
    monkeypatch.setattr(F, "softmax", lambda x, dim, dtype=None: softmax(x, dim))


@crossed(make=[llama, qwen3, gpt2], attention=["eager", "sdpa"], samples=[1, 2])
@pytest.mark.usefixtures("exact_softmax")
def test_position_ids_tell_documents(make: Callable[[str], nn.Module], attention: str, samples: int) -> None:
    torch.manual_seed(0)
    model = make(attention).double()
    autograd_hacks.add_hooks(model, segments="position_ids")
    given = batch(samples)
    loss(model, *given).backward()
    assert_rows(model, autograd_hacks.per_sample_grads(model, "sum"), *given)


def test_a_cache_that_is_returned_and_a_mask_that_is_given_first() -> None:
    torch.manual_seed(0)
    model = llama("sdpa").double()
    ids, positions = batch(2)
    document = (positions == 0).cumsum(1)
    mask = (document[:, None, :, None] == document[:, None, None]) & torch.ones(14, 14, dtype=torch.bool).tril()
    autograd_hacks.add_hooks(model, segments=lambda **_: document)
    logits = model(attention_mask=mask, position_ids=positions, input_ids=ids, use_cache=True).logits
    each = F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
    (each * (positions[:, 1:] != 0)).sum().backward()
    assert_rows(model, autograd_hacks.per_sample_grads(model, "sum"), ids, positions)


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes flex_attention's gradient on a CPU, too, but refuses to be asked."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


@pytest.mark.parametrize("samples", [2, *rarely(1)])
@quiet
@pytest.mark.usefixtures("flex_on_cpu")
def test_documents_by_a_block_mask_of_flex_attention(samples: int) -> None:
    torch.manual_seed(0)
    model = Flexible()
    autograd_hacks.add_hooks(model, segments="position_ids")
    given = packed.batch(samples, LENGTHS)
    for _ in range(2):
        packed.losses(model, *given).sum().backward()
        grads = autograd_hacks.per_sample_grads(model, "sum")
        exact = packed.rows_of(model, LENGTHS, packed.losses, *given)
        assert_close(grads.dense(), exact, rtol=1e-6, atol=1e-6 * max(float(x.abs().max()) for x in exact.values()))


@quiet
@pytest.mark.usefixtures("flex_on_cpu")
def test_a_block_mask_that_forgets_documents_is_refused() -> None:
    torch.manual_seed(0)
    model = Flexible(leak=True)
    autograd_hacks.add_hooks(model, segments="position_ids")
    packed.losses(model, *packed.batch(2, LENGTHS)).sum().backward()
    with pytest.raises(SamplesMixed, match="documents mix"):
        autograd_hacks.per_sample_grads(model)
