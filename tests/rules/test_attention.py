"""Attention in every configuration: rows against a backward pass for each sample's loss."""

import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from oracle import squares
from steps import check_batches, check_hooked
from torch import Tensor
from twin import Bare


@st.composite
def attentions(draw: st.DrawFn) -> nn.MultiheadAttention:
    torch.manual_seed(draw(st.integers(0, 999)))
    heads = draw(st.integers(1, 2))
    layer = nn.MultiheadAttention(
        2 * heads, heads, bias=draw(st.booleans()), batch_first=draw(st.booleans()), add_bias_kv=draw(st.booleans()),
        add_zero_attn=draw(st.booleans()), dropout=draw(st.sampled_from([0.0, 0.4])),
        kdim=draw(st.sampled_from([None, 3])), vdim=draw(st.sampled_from([None, 5])),
    )  # fmt: skip
    for p in layer.parameters():
        nn.init.normal_(p)
    return layer.double().train(draw(st.booleans()))


@given(attentions(), st.data())
def test_attention(layer: nn.MultiheadAttention, data: st.DataObject) -> None:
    samples, targets, sources = (data.draw(st.integers(1, 3)) for _ in range(3))
    size = layer.embed_dim
    inputs = data.draw(st.sampled_from(["self", "memory", "three"] if layer._qkv_same_embed_dim else ["three"]))
    sources = targets if inputs == "self" else sources
    query = torch.randn(samples, targets, size).double()
    key = query if inputs == "self" else torch.randn(samples, sources, layer.kdim).double()
    value = torch.randn(samples, sources, layer.vdim).double() if inputs == "three" else key
    need_weights, average = data.draw(st.booleans()), data.draw(st.booleans())
    mask = data.draw(st.sampled_from([None, "bool", "float", "causal", "each"]))
    masks = {
        "bool": torch.rand(targets, sources) < 0.3,
        "float": torch.randn(targets, sources).double(),
        "causal": torch.ones(targets, sources).triu(1).bool(),
        "each": torch.randn(samples * layer.num_heads, targets, sources).double(),
    }
    attn_mask = masks.get(mask)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask[..., 0] = False  # something to look at
    padding = None
    if data.draw(st.booleans()):
        padding = torch.rand(samples, sources) < 0.3
        padding[:, 0] = False
        if attn_mask is not None and attn_mask.dtype != torch.bool:  # torch wants both of one kind
            padding = padding.double().masked_fill(padding, -torch.inf)
    seen = torch.ones(samples, targets, sources, dtype=torch.bool)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen &= ~attn_mask
    if padding is not None:
        seen &= (padding == 0)[:, None]
    # The weights of one source are 1 and have no gradient, which could tell where samples are in them.
    need_weights = need_weights and bool((seen.sum(2) > 1).any(1).all())

    def losses() -> Tensor:
        order = (lambda x: x) if layer.batch_first else (lambda x: x.transpose(0, 1))
        q = order(query)
        k = q if key is query else order(key)
        v = k if value is key else order(value)
        out, weights = layer(
            q, k, v, key_padding_mask=padding, need_weights=need_weights, attn_mask=attn_mask,
            average_attn_weights=average, is_causal=mask == "causal",
        )  # fmt: skip
        return squares(order(out) if weights is None else (order(out), weights))

    check_hooked(layer, losses)


def test_an_appended_key_without_ordinary_gradients() -> None:
    model = Bare(
        lambda m, x: m.out(m.inner(x, x, x, need_weights=False)[0]),
        inner=nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True),
        out=nn.Linear(4, 2),
    ).double()
    check_batches(model, *(torch.randn(4, 5, 4).double() for _ in range(3)), param_grad=False)
