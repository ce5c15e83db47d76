"""Tables whose rows are selected by index: Embedding, EmbeddingBag, and indexed values."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.errors import SamplesMixed
from autograd_hacks.forms import Bags, Dense, Form, Lookup
from autograd_hacks.formulas.call import Call
from autograd_hacks.formulas.met import Met
from autograd_hacks.support.layout import POSITIONS


def lookup(index: Tensor, g: Tensor, shape: torch.Size, padding_idx: int | None = None) -> Form:
    """index: N *T    g: N *T *D    shape: the table's, K *D.  Sample n's gradient has g[n, t] added at row index[n, t]."""
    rows = index.reshape(index.shape[0], index.shape[1:].numel()).long()
    g = g.reshape(*rows.shape, shape[1:].numel())
    if padding_idx is None:
        return Lookup(rows, g, shape[0], shape)
    present = rows != padding_idx
    g = g.masked_fill(~present[..., None], 0)  # not multiplied by 0, since 0 · NaN is NaN
    return Lookup(rows, g, shape[0], shape, present)


def table(met: Met, index: Tensor, padding_idx: int | None = None) -> Form | None:
    """Rows of a table."""
    is_lost = met.layout.axis + (met.layout.fold == POSITIONS) >= index.ndim
    return None if is_lost else lookup(met.first(index), met.first(met.grad), met.shape, padding_idx)


def embedding(met: Met) -> Form | None:
    """index: N *T    g: N *T D.  Sample n's gradient has g[n, t] added at row index[n, t]."""
    refuse_scaling_by_frequency(met.kept("scale_grad_by_freq"))
    padding = met.kept("padding_idx")  # a node's is unsigned: -1 means that there is none
    return table(met, met.kept("indices"), None if padding is None or padding >= met.shape[0] else padding)


def indexed(met: Met) -> Form | None:
    """Entries selected on the first axes."""
    if (found := entry_of(met.kept("indices"), met.shape)) is None:
        return None
    form = table(replace(met, shape=found[1]), found[0].to(met.grad.device))
    return form if form is None or form.shape == met.shape else Dense(form.dense().reshape(form.samples, *met.shape))


def entry_of(indices: Sequence[Tensor | None], shape: torch.Size) -> tuple[Tensor, torch.Size] | None:
    """One index of a table's first axes together, from one of each, and the table's shape with these axes as one.

    shape: the table's.  None if one of the first axes has no index, or a mask."""
    given = [x for x in indices if x is not None]
    is_first = all(x is None for x in indices[len(given) :])
    if not given or not is_first or any(x.dtype not in (torch.int64, torch.int32) for x in given):
        return None
    device = next((x.device for x in given if not x.is_cpu), None)
    index, *more = [(x.long() if device is None else x.to(device, torch.int64)) % size for x, size in zip(given, shape)]
    for x, size in zip(more, shape[1:]):
        index = index * size + x
    return index, torch.Size((shape[: len(given)].numel(), *shape[len(given) :]))


def embedding_bag(layer: nn.EmbeddingBag, call: Call) -> Mapping[str, Form]:
    """N bags    g: N D.  Each entry of a bag gets the bag's g.

    For 'sum' g is multiplied by the entry's weight.  For 'mean' it is divided by the number of entries.  For 'max' an entry
    gets only the features in which it is the largest."""
    refuse_scaling_by_frequency(layer.scale_grad_by_freq)
    index, offsets, g = call.argument(0, "input"), call.argument(1, "offsets"), call.grad
    weights = call.argument(2, "per_sample_weights")
    if index.ndim == 2:
        offsets = index.shape[1] * torch.arange(len(index), device=index.device)
    elif layer.include_last_offset:
        offsets = offsets[:-1]
    index, weights = index.flatten().long(), None if weights is None else weights.flatten()
    ends = F.pad(offsets[1:], (0, min(1, len(offsets))), value=len(index))
    bags = torch.arange(len(offsets), device=index.device)
    bags = bags.repeat_interleave(ends - offsets, output_size=len(index) if len(offsets) else 0)
    is_counted = torch.ones_like(index) if layer.padding_idx is None else (index != layer.padding_idx).long()
    sizes = torch.zeros(len(offsets), dtype=torch.long, device=index.device).index_add(0, bags, is_counted)
    g = g.masked_fill((sizes == 0)[:, None], 0)
    if layer.mode == "max":
        return {"weight": _largest(layer, call, index, offsets, g)}
    scale = g.new_ones(len(index)) if weights is None else weights
    if layer.padding_idx is not None:  # entries whose g isn't multiplied by 0, since 0 · NaN is NaN
        counted = is_counted.nonzero()[:, 0]
        index, bags, scale = index[counted], bags[counted], scale[counted]
    if layer.mode == "mean":
        scale = scale / sizes[bags]
    return {"weight": Bags(g, scale, index, bags, layer.num_embeddings)}


def _largest(layer: nn.EmbeddingBag, call: Call, index: Tensor, offsets: Tensor, g: Tensor) -> Form:
    """Each feature's gradient goes to the entry with the largest value there; torch's operation returns which one it is."""
    largest = 2  # torch's number for the mode
    weight = call.read("weight")
    out, *_, entries = torch.embedding_bag(weight, index, offsets, False, largest, False, None, False, layer.padding_idx)
    call.check_same(call.outputs, [out])
    features = torch.arange(g.shape[1], device=g.device)
    return Lookup(entries.long().clamp(min=0) * g.shape[1] + features, g[..., None], weight.numel(), weight.shape)


def refuse_scaling_by_frequency(scale_grad_by_freq: bool) -> None:
    if scale_grad_by_freq:
        raise SamplesMixed(
            "divides gradients by how often the whole batch reads an entry (scale_grad_by_freq), so a sample's gradient "
            "depends on the other samples. Build it with scale_grad_by_freq=False."
        )
