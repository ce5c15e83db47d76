"""Recurrent layers and attention in every configuration: rows against a backward pass for each sample's loss."""

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from oracle import squares
from steps import assert_means, check_batches, check_hooked
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from twin import Bare

import autograd_hacks


@st.composite
def recurrents(draw: st.DrawFn) -> nn.RNNBase:
    torch.manual_seed(draw(st.integers(0, 999)))
    kind = draw(st.sampled_from([nn.RNN, nn.LSTM, nn.GRU]))
    hidden = draw(st.integers(2, 3))
    more = {"nonlinearity": draw(st.sampled_from(["tanh", "relu"]))} if kind is nn.RNN else {}
    if kind is nn.LSTM:
        more["proj_size"] = draw(st.integers(0, hidden - 1))
    depth = draw(st.integers(1, 3))
    layer = kind(
        2, hidden, depth, bias=draw(st.booleans()), batch_first=draw(st.booleans()), bidirectional=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.5])) if depth > 1 else 0.0, **more,
    )  # fmt: skip
    return layer.double().train(draw(st.booleans()))


def given_states(layer: nn.RNNBase, samples: int) -> Tensor | tuple[Tensor, Tensor]:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    h, c = (torch.randn(count, samples, size).double() for size in (layer.proj_size or layer.hidden_size, layer.hidden_size))
    return (h, c) if isinstance(layer, nn.LSTM) else h


@given(recurrents(), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.sampled_from(["all", "sequence", "last"]))
def test_recurrent_layers(layer: nn.RNNBase, samples: int, steps: int, with_states: bool, used: str) -> None:
    x = torch.randn(samples, steps, 2).double()
    states = given_states(layer, samples) if with_states else None

    def losses() -> Tensor:
        out, last = layer(x if layer.batch_first else x.transpose(0, 1), states)
        out = out if layer.batch_first else out.transpose(0, 1)
        ends = [part.transpose(0, 1) for part in (last if isinstance(last, tuple) else (last,))]
        return squares({"all": (out, *ends), "sequence": out, "last": ends[-1]}[used])

    check_hooked(layer, losses)


@given(recurrents(), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_packed_sequences(layer: nn.RNNBase, lengths: list[int], is_sorted: bool, with_states: bool) -> None:
    lengths = sorted(lengths, reverse=True) if is_sorted else lengths
    sequences = [torch.randn(length, 2).double() for length in lengths]
    states = given_states(layer, len(lengths)) if with_states else None

    def losses() -> Tensor:
        out, last = layer(pack_sequence(sequences, enforce_sorted=is_sorted), states)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        return squares((padded, *(part.transpose(0, 1) for part in (last if isinstance(last, tuple) else (last,)))))

    check_hooked(layer, losses)


@pytest.mark.parametrize("lengths", [[2, 2, 2, 1, 1], [3, 3, 2, 1, 1]])
def test_a_model_that_returns_a_packed_sequence(lengths: list[int]) -> None:
    """Its rows may be a multiple of the samples in number, or not."""
    model = Bare(lambda m, p: p._replace(data=m.out(m.layer(p)[0].data)), layer=nn.GRU(4, 3), out=nn.Linear(3, 2)).double()
    sequences = pack_sequence([torch.randn(length, 4).double() for length in lengths])
    check_hooked(model, lambda: squares(pad_packed_sequence(model(sequences), batch_first=True)[0]))


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("used", ["sequence", "last"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_several_packed_sequences_a_sample(kind: type[nn.RNNBase], used: str, samples: int) -> None:
    """As sentences of documents: rows are those of the documents."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        sentences = x.flatten(0, 1)
        lengths = torch.arange(len(sentences)) % 2 + x.shape[2] - 1
        out, last = m.layer(pack_padded_sequence(sentences, lengths, batch_first=True, enforce_sorted=False))
        found = last[0] if isinstance(last, tuple) else last
        padded, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[2])
        return m.out(padded.sum(1) if used == "sequence" else found[0]).unflatten(0, x.shape[:2])

    model = Bare(forward, layer=kind(4, 3, batch_first=True), out=nn.Linear(3, 2)).double()
    x = torch.randn(samples, 3, 5, 4).double()
    check_hooked(model, lambda: squares(model(x)))


def test_truncated_backpropagation_through_time() -> None:
    layer, x = nn.LSTM(2, 3).double(), torch.randn(6, 4, 2).double()
    with autograd_hacks.add_hooks(layer):
        state = None
        for chunk in x.split(2):
            out, state = layer(chunk, state)
            out.mul_(0.5)  # the user's to overwrite
            squares(out.transpose(0, 1)).mean().backward()
            autograd_hacks.compute_grad1(layer)
            assert_means(layer)
            layer.zero_grad()
            for part in state:
                part.detach_()


# Attention


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
