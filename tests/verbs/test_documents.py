"""Rows of documents that are packed into one sample, against one backward pass for each document by itself."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from of_devices import fused_norms
from oracle import Rows, assert_rows, joined
from packed import Packed, batch, hooked, losses, rows_of
from refused import check_each
from steps import assert_means, check_hooked
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import BatchSizeError, NothingRecorded, SamplesMixed, UnseenGradient, UnsupportedLayer


@pytest.mark.parametrize("norms", [nullcontext, fused_norms])
@pytest.mark.parametrize("settings", [{}, {"param_grad": False}])
@pytest.mark.parametrize(
    ("samples", "lengths"), [(2, [3, 2, 4]), (1, [3, 2, 4]), (1, [5]), (3, [1, 1, 1]), (1, [9, 1, 1, 1, 1])]
)
def test_rows_are_those_of_documents_alone(samples: int, lengths: list[int], settings: dict[str, bool], norms: Any) -> None:
    model = hooked("position_ids", **settings)
    for _ in range(3):  # proven, steady
        given = batch(samples, lengths)
        with norms():
            losses(model, *given).sum().backward()
        grads = autograd_hacks.per_sample_grads(model, "sum")
        rows = rows_of(model, lengths, losses, *given)
        assert_close(grads.dense(), rows)
        flat = joined(rows)
        assert_close(grads.norms(), flat.norm(dim=1))
        assert_close(grads.gram(), flat @ flat.mT)
        autograd_hacks.clear_backprops(model)


def test_documents_of_other_lengths_in_each_step_and_a_mean_over_their_losses() -> None:
    model = hooked("position_ids")
    for lengths in ([3, 2, 4], [6, 3], [1, 1, 7], [9], [2, 2, 2, 3]):
        given = batch(2, lengths)
        each = losses(model, *given)
        whose = ((given[1] == 0).flatten().cumsum(0) - 1).to(torch.long)
        of_documents = torch.zeros(int(whose.max()) + 1).double().index_add(0, whose, each.flatten())
        model.zero_grad()
        autograd_hacks.backward(of_documents)
        autograd_hacks.compute_grad1(model)
        rows = rows_of(model, lengths, losses, *given)
        assert_rows(model, rows)
        assert_means(model)
        autograd_hacks.clip_grad1_norm_(model, 0.5)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad


def as_ids(ids: Tensor, position_ids: Tensor, **_: Any) -> Tensor:
    return (position_ids == 0).cumsum(1)


def test_every_way_to_tell_documents_says_the_same() -> None:
    lengths, samples = [3, 2, 4], 2
    given = batch(samples, lengths)
    ends = torch.tensor([0, 3, 5, 9, 12, 14, 18])
    found = []
    for segments in (
        "position_ids",
        as_ids,
        as_ids(*given[:2]),
        lambda *args, **kwargs: as_ids(*args, **kwargs) + 7,
        "document_ids",
        "cu_seqlens",
    ):
        torch.manual_seed(0)
        model = Packed().double()
        own = model.forward
        model.forward = lambda *a, cu_seqlens=None, own=own, **k: own(*a, **k)  # type: ignore[method-assign]
        autograd_hacks.add_hooks(model, segments=segments)
        more = {"document_ids": as_ids(*given[:2])} if segments == "document_ids" else {}
        more |= {"cu_seqlens": ends} if segments == "cu_seqlens" else {}
        losses(model, *given, **more).sum().backward()
        found.append(autograd_hacks.per_sample_grads(model, "sum").dense())
    assert_close(found, found[:1] * len(found))


@pytest.mark.parametrize("lengths", [[0, 7, 0], [7, 0, 7], [5, 0, 5]])
def test_padding_belongs_to_no_document(lengths: list[int]) -> None:
    """Of some positions, of none, and of all, so that there are no documents."""
    model = hooked(lambda ids, position_ids: (position_ids == 0).cumsum(1).where(ids != 0, -1))
    for length in lengths:
        given = batch(2, [3, 4])
        given[0].clamp_(min=1)[:, length:] = 0
        model.zero_grad()
        (losses(model, *given) * (given[0] != 0)).sum().backward()
        grads = autograd_hacks.per_sample_grads(model, "sum")
        rows = rows_of(model, [3, length - 3], losses, *(x[:, :length] for x in given)) if length else {}
        expected = {name: rows.get(name, p.new_zeros(0, *p.shape)) for name, p in model.named_parameters()}
        assert_close(grads.dense(), expected)
        assert grads.norms().shape == (4 if length else 0,)
    given[0].fill_(0)
    losses(model, *given).sum().backward()
    with pytest.raises(UnseenGradient, match="gradient at padding"):
        autograd_hacks.compute_grad1(model, "sum")


def test_verify_finds_values_that_leak_without_a_gradient() -> None:
    model, given = hooked("position_ids", "value"), batch(2, [3, 2, 4])
    losses(model, *given).sum().backward()
    with pytest.raises(SamplesMixed, match="changed at the positions of others"):
        autograd_hacks.verify(model)
    right = hooked("position_ids")
    losses(right, *given).sum().backward()
    autograd_hacks.verify(right, rows=4)


def test_over_a_loader_of_packed_batches() -> None:
    model = hooked("position_ids")
    batches = [batch(2, [3, 2]), batch(1, [1, 4, 2])]

    def of_documents(model: nn.Module, given: Any) -> Tensor:
        whose = (given[1] == 0).flatten().cumsum(0) - 1
        return torch.zeros(int(whose.max()) + 1).double().index_add(0, whose, losses(model, *given).flatten())

    norms = autograd_hacks.over(model, batches, of_documents, autograd_hacks.PerSampleGrads.norms)
    rows = [rows_of(model, [3, 2], losses, *batches[0]), rows_of(model, [1, 4, 2], losses, *batches[1])]
    assert_close(norms, torch.cat([joined(own).norm(dim=1) for own in rows]))


def test_a_loss_of_what_has_no_positions_is_refused() -> None:
    given = batch(2, [3, 2, 4])
    model = Bare(lambda m, *args, **named: ((y := m.net(*args, **named)), y.mean(1)), net=Packed()).double()
    autograd_hacks.add_hooks(model, segments="position_ids")
    model(given[0], position_ids=given[1])[0].sum().backward()
    autograd_hacks.per_sample_grads(model)
    model(given[0], position_ids=given[1])[1].sum().backward()
    with pytest.raises(SamplesMixed, match="can't be assigned to documents"):
        autograd_hacks.per_sample_grads(model)


def test_what_does_not_cover_the_batch_is_refused() -> None:
    given = batch(2, [3, 2])
    other, bare = Packed(), Packed()
    other.forward = lambda ids, cu_seqlens: other.head(other.words(ids))  # type: ignore[method-assign]
    autograd_hacks.add_hooks(other, segments="cu_seqlens")
    check_each(
        *[(ValueError, words, lambda segments=segments: losses(hooked(segments), *given))
          for segments, words in [
             ("documents", "no argument of this name"),
             (lambda ids, position_ids: position_ids[:, :3], r"expected whole numbers of shape \(2, 5\)"),
             (lambda ids, position_ids: position_ids.double(), "float64"),
             (lambda ids, position_ids: None, "NoneType")]],
        (ValueError, "has 2 at the start of a document",
         lambda: losses(hooked("position_ids"), given[0], given[1] + 2, given[2])),
        (ValueError, r"the tensor that .* as segments is .* \(2, 5\); expected .* \(2, 6\)",
         lambda: losses(hooked(torch.tensor([[0, 0, 0, 1, 1]]).expand(2, 5)), *batch(2, [3, 3]))),
        (ValueError, "ascending from 0 to 10", lambda: other(given[0], cu_seqlens=torch.tensor([0, 3, 9]))),
        *[(TypeError, "^add_hooks was given segments", lambda wrong=wrong: autograd_hacks.add_hooks(bare, segments=wrong))
          for wrong in (3, [[0, 0, 1]], torch.rand(2, 5), torch.zeros(5, dtype=torch.long))],
        (ValueError, "segments", lambda: autograd_hacks.add_hooks(other, segments="position_ids", independent=True)),
    )  # fmt: skip


# Tokens.


def contributions(model: nn.Module, layer: nn.Linear, given: Sequence[Tensor]) -> Tensor:
    """What each position adds to the gradient of a Linear's weight, N T O I, by plain hooks."""
    seen: dict[str, Tensor] = {}
    handles = [
        layer.register_forward_hook(lambda m, args, y: seen.update(x=args[0].detach())),
        layer.register_full_backward_hook(lambda m, before, after: seen.update(g=after[0].detach())),
    ]
    with autograd_hacks.pause_hooks():
        losses(model, *given).sum().backward()
    for handle in handles:
        handle.remove()
    return torch.einsum("nto,nti->ntoi", seen["g"], seen["x"])


def test_tokens_are_what_positions_add() -> None:
    torch.manual_seed(0)
    model, given = Packed().double(), batch(3, [4])
    autograd_hacks.add_hooks(model)
    losses(model, *given).sum().backward()
    expected = autograd_hacks.per_sample_grads(model, "sum").dense()
    autograd_hacks.add_hooks(model, segments="tokens")
    losses(model, *given).sum().backward()
    tokens = autograd_hacks.per_sample_grads(model, "sum")
    rows = tokens.dense()
    assert tokens.norms().shape == (3, 4)
    assert_close({name: x.sum(1) for name, x in rows.items()}, expected)
    for path in ("first.qkv", "head"):
        assert_close(rows[f"{path}.weight"], contributions(model, model.get_submodule(path), given))
    words = rows["words.weight"]
    for n, t in [(0, 0), (2, 3)]:
        assert words[n, t].abs().sum(1).nonzero()[:, 0].tolist() == [int(given[0][n, t])]
    assert tokens.gram().shape == (3, 4, 3, 4)
    with pytest.raises(ValueError, match="tokens"):
        autograd_hacks.verify(model, args=given[:1])


def test_layers_without_positions_have_no_tokens() -> None:
    torch.manual_seed(0)
    for model in (nn.GRU(3, 4, batch_first=True), nn.Sequential(nn.Conv1d(6, 4, 1), nn.Flatten(), nn.Linear(12, 2))):
        autograd_hacks.add_hooks(model, segments="tokens")
        out = model(torch.randn(5, 6, 3))
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        with pytest.raises((BatchSizeError, UnsupportedLayer)):
            autograd_hacks.per_sample_grads(model)


def test_two_axes_as_long_as_the_tokens_are_refused() -> None:
    model = Bare(
        lambda m, x: m.each(x.unflatten(2, (4, 2)).transpose(1, 2)).transpose(1, 2).flatten(2), each=nn.Linear(2, 2)
    )
    autograd_hacks.add_hooks(model, segments="tokens")
    model(torch.randn(3, 4, 8)).square().sum().backward()
    with pytest.raises(BatchSizeError, match="be assigned to documents"):
        autograd_hacks.per_sample_grads(model)


def test_rows_of_tokens_are_read_by_per_sample_grads_alone() -> None:
    model = hooked("tokens")
    with pytest.raises(ValueError, match="no during_backward"), autograd_hacks.during_backward(model, "norms"):
        losses(model, *batch(2, [4])).sum().backward()
    for read in (autograd_hacks.compute_grad1, lambda model: autograd_hacks.clip_grad1_norm_(model, 1.0)):
        losses(model, *batch(2, [4])).sum().backward()
        with pytest.raises(ValueError, match="rows of tokens"):
            read(model)
        model.zero_grad()
    with autograd_hacks.accumulate(model):
        for _ in range(2):
            losses(model, *batch(2, [4])).sum().backward()
        with pytest.raises(NothingRecorded, match="need one batch, not 2"):
            autograd_hacks.per_sample_grads(model)


# Documents whose positions sizes alone would put on a wrong axis, or that values keep apart


def attention(m: Any, ids: Tensor, doc: Tensor) -> Tensor:
    """With as many heads as there are positions, and eager masks of blocks."""
    mask = doc[:, None, :, None] == doc[:, None, None]
    q, k, v = m.qkv(m.table(ids)).unflatten(2, (3, m.gain.shape[0], -1)).permute(2, 0, 3, 1, 4)
    q = q * m.gain if m.gain.requires_grad else q
    scores = (q @ k.mT).masked_fill(~mask, float("-inf")).softmax(-1)
    return m.last((scores @ v).transpose(1, 2).flatten(2))


def net(gain: bool) -> nn.Module:
    layers = {"table": nn.Embedding(11, 8), "qkv": nn.Linear(8, 24), "last": nn.Linear(8, 11)}
    model = Bare(attention, gain=torch.rand(4, 1, 1), **layers).double()
    model.gain.requires_grad_(gain)
    return model


def losses_at(model: nn.Module, ids: Tensor, doc: Tensor) -> Tensor:
    return F.cross_entropy(model(ids, doc=doc).mT, ids, reduction="none")


def test_heads_are_not_taken_for_positions() -> None:
    model, ids = net(gain=True), torch.randint(11, (2, 4))
    with autograd_hacks.add_hooks(model, segments="doc"):
        losses_at(model, ids, torch.tensor([[0, 0, 0, 1], [2, 3, 3, 3]])).sum().backward()
        with pytest.raises(SamplesMixed, match="can't be assigned to documents"):
            autograd_hacks.compute_grad1(model, "sum")


@pytest.mark.parametrize("doc", [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 2, 3]])
def test_documents_of_equal_lengths_behind_a_mask(doc: list[int]) -> None:
    model, ids, at = net(gain=False), torch.randint(11, (1, 4)), torch.tensor([doc])
    each, rows = losses_at(model, ids, at), Rows()
    for name, p in model.named_parameters():
        if p.requires_grad:
            parts = [torch.autograd.grad(each[at == n].sum(), p, retain_graph=True)[0] for n in range(max(doc) + 1)]
            rows[name] = torch.stack(parts)
    with autograd_hacks.add_hooks(model, segments="doc"):
        losses_at(model, ids, at).sum().backward()
        autograd_hacks.compute_grad1(model, "sum")
        assert_rows(model, rows)


@pytest.mark.parametrize("lengths", [[3, 1], [3, 2, 1], [5, 3, 2, 2]])
def test_padded_text_that_is_packed(lengths: list[int]) -> None:
    def read(m: Any, ids: Tensor) -> Tensor:
        packed = m.run(pack_padded_sequence(m.table(ids), torch.tensor(lengths), batch_first=True))[0]
        return m.last(pad_packed_sequence(packed, batch_first=True)[0]).sum(1)  # type: ignore[no-any-return]

    model = Bare(read, table=nn.Embedding(11, 4), run=nn.GRU(4, 5, batch_first=True), last=nn.Linear(5, 3)).double()
    ids = torch.randint(11, (len(lengths), max(lengths)))
    check_hooked(model, *[lambda: model(ids).square().sum(1)] * 2)
