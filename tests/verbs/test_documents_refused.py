"""Documents whose rows can't be known: leaks that begin late, padding with a loss, parts by themselves."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from packed import WIDTH, Packed, batch, hooked, losses, rows_of
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import autograd_hacks
from autograd_hacks.errors import BatchSizeError, PerSampleGradientError, SamplesMixed


def leaks() -> Any:
    return pytest.raises(SamplesMixed, match="documents mix")


@pytest.mark.parametrize(("samples", "alone"), [(1, 0), (2, 0), (2, 1), (2, 2), (2, 5)])
def test_documents_that_see_each_other_are_refused_also_after_forwards_in_which_each_was_alone(
    samples: int, alone: int
) -> None:
    """Of rows with one document each nothing is shown about leaks."""
    model = hooked("position_ids", "mask")
    for _ in range(alone):
        losses(model, *batch(samples, [9])).sum().backward()
        assert autograd_hacks.per_sample_grads(model, "sum").samples == samples
    losses(model, *batch(samples, [3, 2, 4])).sum().backward()
    with leaks():
        autograd_hacks.per_sample_grads(model)


def test_a_leak_is_refused_while_backward_runs_and_in_an_earlier_one_of_accumulated_batches() -> None:
    model = hooked("position_ids", "mask")
    with leaks(), autograd_hacks.during_backward(model, "norms"):
        losses(model, *batch(2, [3, 2])).sum().backward()
    with autograd_hacks.accumulate(model):
        losses(model, *batch(2, [3, 2])).sum().backward()
        losses(model, *batch(2, [4])).sum().backward()
        with leaks():
            autograd_hacks.per_sample_grads(model)


def test_a_loss_for_each_sample_in_place_of_each_document_is_refused() -> None:
    model = hooked("position_ids")
    for given in (lambda each: each.sum(1), lambda each: each.flatten()):  # of samples, of tokens
        own = given(losses(model, *batch(2, [3, 2, 4])))
        with pytest.raises(BatchSizeError, match=rf"given {len(own)} losses, but the batch packs 6 documents; expected 6"):
            autograd_hacks.backward(own, "sum")


def test_ids_may_be_large_and_in_any_order() -> None:
    class Told(Packed):
        def forward(self, ids: Tensor, document_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            return self.head(self.first(self.norm(self.words(ids)), document_ids))

    told = torch.tensor([[2**62, 3, 2**62, 3, -5], [3, 3, 2**61, -(2**60), 2**62]])
    torch.manual_seed(0)
    model, (ids, _, targets) = Told().double(), batch(2, [5])
    for part in (model.places, model.second):
        part.requires_grad_(False)
    autograd_hacks.add_hooks(model, segments="document_ids")

    def of_documents() -> Tensor:
        return F.cross_entropy(model(ids, document_ids=told).mT, targets, reduction="none") * (told >= 0)

    of_documents().sum().backward()
    grads = autograd_hacks.per_sample_grads(model, "sum").dense()["words.weight"]
    each = [(n, d) for n, documents in enumerate([[3, 2**62], [3, 2**61, 2**62]]) for d in documents]
    with autograd_hacks.pause_hooks():
        for row, (n, d) in zip(grads, each):
            alone = (of_documents() * (told == d))[n].sum()
            assert_close(row, torch.autograd.grad(alone, model.words.weight)[0])
    assert len(grads) == len(each)
    autograd_hacks.verify(model)


def test_parts_that_are_called_by_themselves_are_refused() -> None:
    model, (ids, positions, _) = hooked("position_ids"), batch(2, [3, 2])
    model.head(model.words(ids)).sum().backward()
    with pytest.raises(BatchSizeError, match="ran by itself"):
        autograd_hacks.per_sample_grads(model, "sum")
    empty = positions[:, :0]
    model(empty, position_ids=empty).sum().backward()
    assert autograd_hacks.per_sample_grads(model, "sum").samples == 0


def test_what_is_of_samples_entries_or_private_is_refused() -> None:
    # Two documents in the first of two samples, and none in the other: as many as samples.
    def ids_of(ids: Tensor, position_ids: Tensor) -> Tensor:
        return torch.tensor([[0, 0, 1, 1], [-1, -1, -1, -1]])

    model, given = hooked(ids_of), batch(2, [2, 2])
    each = losses(model, *given)[:, :2] * torch.tensor([[1.0], [0.0]])
    with pytest.raises(BatchSizeError, match="per_sample_jacobian gives rows of samples' entries"):
        autograd_hacks.per_sample_jacobian(model, each)
    each = losses(model, *given)[0].sum()
    each.backward()
    with pytest.raises(ValueError, match="hooked with segments"):
        autograd_hacks.private.clip_and_noise_(model, 1.0, 1.0, 2, loss_type="sum")


@pytest.mark.parametrize("trains", [True, False])
def test_reentrant_checkpoints_are_refused_and_others_read(trains: bool) -> None:
    class Checkpointed(Packed):
        is_reentrant = False

        def forward(self, ids: Tensor, position_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
            x, document = self.norm(self.words(ids)), (position_ids == 0).cumsum(1)
            return self.head(checkpoint(self.first, x, document, use_reentrant=self.is_reentrant))

    torch.manual_seed(0)
    model, given = Checkpointed().double(), batch(2, [3, 2])
    for part in (model.places, model.second):
        part.requires_grad_(False)
    model.first.requires_grad_(trains)
    autograd_hacks.add_hooks(model, segments="position_ids")
    losses(model, *given).sum().backward()
    grads = autograd_hacks.per_sample_grads(model, "sum")
    for n in range(2):
        with autograd_hacks.pause_hooks():
            alone = losses(model, *(x[n : n + 1, :3] for x in given)).sum()
        assert_close(grads["words.weight"].dense()[2 * n], torch.autograd.grad(alone, model.words.weight)[0])
    model.is_reentrant = True
    losses(model, *given).sum().backward()
    with pytest.raises(PerSampleGradientError, match="use_reentrant=False"):
        autograd_hacks.per_sample_grads(model)


def test_products_of_positions_laid_end_to_end() -> None:
    class Products(Packed):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH))
            nn.utils.parametrizations.weight_norm(self.head)

        def forward(self, ids: Tensor, position_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
            document = (position_ids == 0).cumsum(1)
            return self.head(self.second(self.first(self.norm(self.words(ids)) @ self.turn, document), document))

    torch.manual_seed(0)
    model = Products().double()
    model.places.requires_grad_(False)
    autograd_hacks.add_hooks(model, segments="position_ids")
    given = batch(2, [3, 2])
    losses(model, *given).sum().backward()
    grads = autograd_hacks.per_sample_grads(model, "sum").dense()
    model.places.requires_grad_()
    rows = rows_of(model, [3, 2], losses, *given)
    assert_close(grads, {name: rows[name] for name in grads})


def test_a_mask_that_forgets_documents_in_some_steps() -> None:
    """A mask is data: what earlier forwards showed says nothing about it."""

    class Masked(Packed):
        def forward(self, ids: Tensor, position_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
            assert document_ids is not None
            return self.head(self.second(self.first(self.norm(self.words(ids)), document_ids), document_ids))

    torch.manual_seed(0)
    model, (ids, positions, targets) = Masked().double(), batch(2, [3, 2, 4])
    model.places.requires_grad_(False)
    autograd_hacks.add_hooks(model, segments="position_ids")
    for leaks in (False, False, True, False, True):
        document = torch.zeros_like(positions) if leaks else (positions == 0).cumsum(1)
        losses(model, ids, positions, targets, document_ids=document).sum().backward()
        with pytest.raises(SamplesMixed) if leaks else nullcontext():
            autograd_hacks.per_sample_grads(model, "sum")
