"""Documents whose positions sizes alone would put on a wrong axis, or that values keep apart."""

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import Rows, assert_rows
from steps import check_hooked
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import SamplesMixed


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


def losses(model: nn.Module, ids: Tensor, doc: Tensor) -> Tensor:
    return F.cross_entropy(model(ids, doc=doc).mT, ids, reduction="none")


def test_heads_are_not_taken_for_positions() -> None:
    model, ids = net(gain=True), torch.randint(11, (2, 4))
    with autograd_hacks.add_hooks(model, segments="doc"):
        losses(model, ids, torch.tensor([[0, 0, 0, 1], [2, 3, 3, 3]])).sum().backward()
        with pytest.raises(SamplesMixed, match="can't be assigned to documents"):
            autograd_hacks.compute_grad1(model, "sum")


@pytest.mark.parametrize("doc", [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 2, 3]])
def test_documents_of_equal_lengths_behind_a_mask(doc: list[int]) -> None:
    model, ids, at = net(gain=False), torch.randint(11, (1, 4)), torch.tensor([doc])
    each, rows = losses(model, ids, at), Rows()
    for name, p in model.named_parameters():
        if p.requires_grad:
            parts = [torch.autograd.grad(each[at == n].sum(), p, retain_graph=True)[0] for n in range(max(doc) + 1)]
            rows[name] = torch.stack(parts)
    with autograd_hacks.add_hooks(model, segments="doc"):
        losses(model, ids, at).sum().backward()
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
