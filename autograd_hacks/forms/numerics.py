"""Norms that overflow only if they must, sums in sufficient precision, and pieces of tensors."""

from collections.abc import Iterator

import torch
from torch import Tensor

SMALL = 2**14
"""Up to this size a CPU squares float32 in float64, where no square overflows.  Above, that takes four times as long."""


def looks_free(tensor: Tensor) -> bool:
    """Whether the host may read a tensor's numbers: it needn't wait for a queue of kernels, or the device has no float64."""
    return not tensor.is_cuda


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums of numbers of a dtype: single precision for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def row_norms(rows: Tensor) -> Tensor:
    """The 2-norms of a matrix's rows, (N, P) -> N.  They overflow only if the true norm does."""
    if not rows.shape[1]:
        return rows.new_zeros(rows.shape[0]).abs()
    if rows.dtype == torch.float32 and not rows.is_mps and (rows.numel() <= SMALL or not looks_free(rows)):
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).to(rows.dtype)
    norms = torch.linalg.vector_norm(rows, dim=1)
    if rows.is_meta or not rows.shape[0]:
        return norms
    # Squares may have overflowed to ∞, or be so small that they have lost digits.
    info, found = torch.finfo(norms.dtype), norms.detach()
    least = smallest(norms.dtype) ** 0.5
    low, high = found.aminmax()
    if least <= float(low) and float(high) < info.max:  # and not NaN
        return norms
    again = (~(found < info.max) | (found < least)).nonzero()[:, 0]
    if (
        rows.dtype == torch.float32 and not rows.is_mps
    ):  # a tenth of the time of the other way: layers that begin with zeros have rows of zeros
        return norms.index_put((again,), torch.linalg.vector_norm(rows[again], dim=1, dtype=torch.float64).to(norms.dtype))
    scale = divisors(torch.linalg.vector_norm(rows[again].detach(), torch.inf, dim=1))
    return norms.index_put((again,), torch.linalg.vector_norm(rows[again] / scale[:, None], dim=1) * scale)


def smallest(dtype: torch.dtype) -> float:
    """The magnitude above which a sum has all its digits."""
    return torch.finfo(dtype).tiny / torch.finfo(dtype).eps


def clip_weights(norms: Tensor, bound: float) -> Tensor:
    """Weights that bring every sample's gradient to norm at most ``bound``: min(1, C / ‖gₙ‖), N.

    norms: N    bound: C, above 0
    Source: Abadi et al. 2016, "Deep learning with differential privacy" (arXiv:1607.00133), algorithm 1.
    """
    return (bound / norms).clamp(max=1)  # 1 for a gradient of zeros


def divisors(largest: Tensor) -> Tensor:
    """Largest magnitudes as divisors: 1 instead of 0, ∞ and NaN."""
    return torch.where(largest.isfinite() & (largest > 0), largest, torch.ones_like(largest))


def slices_of(length: int, step: int) -> list[slice]:
    """[0, length) in slices of at most `step`; one empty slice if the length is 0."""
    step = max(1, step)
    if length <= step:  # asked at once: a length that compiled code knows by a symbol stays one
        return [slice(0, length)]
    return [slice(start, min(length, start + step)) for start in range(0, length, step)]


def members(owners: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of some owners: their numbers, and for each of them its owner's place among those wanted.

    owners: M integers    wanted: some of these, repeats allowed"""
    ordered, order = owners.sort(stable=True)
    starts = torch.searchsorted(ordered, wanted)
    counts = torch.searchsorted(ordered, wanted, right=True) - starts
    place = torch.arange(len(wanted), device=wanted.device).repeat_interleave(counts)
    return order[torch.arange(len(place), device=place.device) + (starts - counts.cumsum(0) + counts)[place]], place


def pairs_of(total: Tensor, w: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each sum of a weighted sum, as a view, together with its weights, N."""
    yield from ((total[k], w[k]) for k in range(len(w))) if w.ndim == 2 else [(total, w)]


def put(rows: Tensor, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """factor · rows, written into ``out`` if given, as `Form.dense` returns them; ``rows`` itself if that is all."""
    return torch.mul(rows, factor, out=out) if factor != 1 else rows if out is None else out.copy_(rows)
