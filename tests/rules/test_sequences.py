"""Recurrent layers and attention, in every configuration; rows against a backward pass for each sample's loss."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_rows, one_loss_at_a_time, squares
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import BatchSizeError, StaleRecord


def check(model: nn.Module, losses: Callable[[], Tensor]) -> None:
    state = torch.get_rng_state()
    with autograd_hacks.add_hooks(model):
        autograd_hacks.backward(losses())
        autograd_hacks.compute_grad1(model)
        torch.set_rng_state(state)
        with autograd_hacks.pause_hooks():
            assert_rows(model, one_loss_at_a_time(model, losses))


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

    check(layer, losses)


@given(recurrents(), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_packed_sequences(layer: nn.RNNBase, lengths: list[int], is_sorted: bool, with_states: bool) -> None:
    lengths = sorted(lengths, reverse=True) if is_sorted else lengths
    sequences = [torch.randn(length, 2).double() for length in lengths]
    states = given_states(layer, len(lengths)) if with_states else None

    def losses() -> Tensor:
        out, last = layer(pack_sequence(sequences, enforce_sorted=is_sorted), states)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        return squares((padded, *(part.transpose(0, 1) for part in (last if isinstance(last, tuple) else (last,)))))

    check(layer, losses)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("given_state", [True, False])
def test_cells(kind: type[nn.RNNCellBase], bias: bool, given_state: bool) -> None:
    cell, x = kind(2, 3, bias=bias).double(), torch.randn(4, 3, 2).double()
    h = torch.randn(4, 3).double()

    def losses() -> Tensor:
        state = ((h, h.cos()) if kind is nn.LSTMCell else h) if given_state else None
        for t in range(3):  # used at several steps, whose rows add
            state = cell(x[:, t], state)
        return squares(state)

    check(cell, losses)


def test_a_relu_cell() -> None:
    cell, x = nn.RNNCell(2, 3, nonlinearity="relu").double(), torch.randn(4, 2).double()
    check(cell, lambda: squares(cell(x)))


def test_a_sequence_classifier_in_a_training_loop() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(7, 3), nn.LSTM(3, 4, 2, batch_first=True, dropout=0.3)
            self.out = nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.lstm(self.embed(tokens))[0][:, -1])

    model = Classifier().double()
    for length in (3, 5):
        tokens = torch.randint(7, (4, length))
        check(model, lambda tokens=tokens: squares(model(tokens)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.MultiheadAttention])
def test_a_dropout_that_can_not_be_repeated_is_refused(kind: type[nn.Module], dtype: torch.dtype) -> None:
    recurrent = kind is nn.LSTM
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, add_bias_kv=True)  # without these nothing is recomputed
    layer = (nn.LSTM(8, 3, 2, dropout=0.5) if recurrent else attention).to(dtype)
    x = torch.randn(4, 5, 8, dtype=dtype)
    with autograd_hacks.add_hooks(layer):
        layer.register_forward_pre_hook(lambda layer, args: torch.rand(1) and None)  # draws after our look at the generator
        (layer(x)[0] if recurrent else layer(x, x, x)[0]).sum().backward()
        with pytest.raises(StaleRecord, match=r"the model itself \(\w+\) could not be recomputed .*\(set its dropout to 0"):
            autograd_hacks.compute_grad1(layer, "sum")


def test_a_dropout_that_is_set_after_add_hooks() -> None:
    layer, x = nn.MultiheadAttention(4, 2, dropout=0, batch_first=True).double(), torch.randn(3, 5, 4).double()
    with autograd_hacks.add_hooks(layer):
        layer.dropout = 0.5
        check(layer, lambda: squares(layer(x, x, x)[0]))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.MultiheadAttention])
def test_weights_changed_behind_autograds_back(kind: type[nn.Module]) -> None:
    layer, x = kind(4, 2, **({} if kind is nn.LSTM else {"add_bias_kv": True})), torch.randn(3, 5, 4)
    with autograd_hacks.add_hooks(layer):
        (layer(x)[0] if kind is nn.LSTM else layer(x, x, x)[0]).pow(2).sum().backward()
        for p in layer.parameters():
            p.data.add_(p.grad, alpha=-0.1)
        with pytest.raises(StaleRecord, match="before the update"):
            autograd_hacks.compute_grad1(layer, "sum")


def test_truncated_backpropagation_through_time() -> None:
    layer, x = nn.LSTM(2, 3).double(), torch.randn(6, 4, 2).double()
    with autograd_hacks.add_hooks(layer):
        state = None
        for chunk in x.split(2):
            out, state = layer(chunk, state)
            out.mul_(0.5)  # the user's to overwrite
            squares(out.transpose(0, 1)).mean().backward()
            autograd_hacks.compute_grad1(layer)
            for p in layer.parameters():
                assert_close(p.grad1.mean(0), p.grad)
            layer.zero_grad()
            for part in state:
                part.detach_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [nn.GRU, nn.MultiheadAttention, nn.Linear])
def test_reading_within_autocast_and_after_it(kind: type[nn.Module], dtype: torch.dtype) -> None:
    more = {"dropout": 0.2, "num_layers": 2} if kind is nn.GRU else {}
    layer, x = kind(8, 4, **more), torch.randn(3, 5, 8)
    with autograd_hacks.add_hooks(layer):
        for within in (True, False):
            layer.zero_grad()
            with torch.autocast("cpu", dtype):
                out = layer(x, x, x) if kind is nn.MultiheadAttention else layer(x)
                (out[0] if isinstance(out, tuple) else out).float().pow(2).sum().backward()
                if within:
                    autograd_hacks.compute_grad1(layer, "sum")
            autograd_hacks.compute_grad1(layer, "sum")
            for p in layer.parameters():
                assert p.grad1.dtype == torch.float32
                assert_close(p.grad1.sum(0), p.grad, rtol=0.1, atol=0.1 * p.grad.abs().max().item() + 1e-3)


def test_recomputing_leaves_the_generator_alone() -> None:
    layer, x = nn.GRU(2, 3, 2, dropout=0.5), torch.randn(4, 5, 2)
    with autograd_hacks.add_hooks(layer):
        layer(x)[0].sum().backward()
        before = torch.get_rng_state()
        autograd_hacks.compute_grad1(layer, "sum")
        assert torch.equal(before, torch.get_rng_state())


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

    check(layer, losses)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_layers(batch_first: bool, norm_first: bool) -> None:
    """Through their children."""
    encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True, norm_first=norm_first)
    decoder = nn.TransformerDecoderLayer(4, 2, 6, dropout=0.1, batch_first=True, norm_first=norm_first)
    x, memory = torch.randn(3, 5, 4).double(), torch.randn(3, 2, 4).double()
    model = nn.ModuleList([encoder, decoder]).double()
    if batch_first:
        check(model, lambda: squares(decoder(encoder(x), encoder(memory))))
    else:
        layer = nn.TransformerEncoderLayer(4, 2, 6, norm_first=norm_first).double()
        check(layer, lambda: squares(layer(torch.arange(60.0).sin().view(5, 3, 4).double()).transpose(0, 1)))


@pytest.mark.parametrize(
    "layer", [nn.LSTM(2, 3), nn.GRUCell(2, 3), nn.MultiheadAttention(2, 1)], ids=lambda x: type(x).__name__
)
def test_unbatched_inputs(layer: nn.Module) -> None:
    x = torch.randn(2) if isinstance(layer, nn.GRUCell) else torch.randn(4, 2)
    with autograd_hacks.add_hooks(layer):
        out = layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else layer(x)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        with pytest.raises(BatchSizeError, match="without a batch axis"):
            autograd_hacks.compute_grad1(layer)


def test_weights_that_the_optimizer_has_moved_since() -> None:
    layer, x = nn.LSTM(2, 3), torch.randn(4, 5, 2)
    with autograd_hacks.add_hooks(layer):
        layer(x)[0].sum().backward()
        torch.optim.SGD(layer.parameters(), 0.1).step()
        with pytest.raises(StaleRecord, match=r"'weight_ih_l0' .* before optimizer.step\(\)"):
            autograd_hacks.compute_grad1(layer)


def test_a_packed_batch_padded_by_length() -> None:
    layer, x = nn.GRU(2, 3, batch_first=True).double(), torch.randn(3, 4, 2).double()
    lengths = torch.tensor([2, 4, 1])

    def losses() -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return squares(layer(packed)[1].transpose(0, 1))

    check(layer, losses)
