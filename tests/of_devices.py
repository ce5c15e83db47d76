"""Operations of devices, on a CPU: by others, which is enough for the nodes that devices make."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _rms_norm(x: Tensor, shape: Sequence[int], w: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    root = (x.square().mean([*range(-len(shape), 0)], keepdim=True) + eps).rsqrt()
    return x * root if w is None else x * root * w, root


def _rms_norm_backward(
    g: Tensor, x: Tensor, shape: Sequence[int], root: Tensor, w: Tensor | None, _: Any
) -> tuple[Tensor, Tensor]:
    h, own = x * root, g if w is None else g * w
    along = (own * h).mean([*range(-len(shape), 0)], keepdim=True)
    return root * (own - h * along), (g * h).flatten(0, -len(shape) - 1).sum(0)


ON_CPUS = torch.library.Library("aten", "IMPL")
for name, computed in {
    "cudnn_batch_norm": lambda *own: (*aten.native_batch_norm(*own), own[0].new_empty(0, dtype=torch.uint8)),
    "miopen_batch_norm": aten.native_batch_norm.default,
    # No more than an output.
    "_thnn_fused_lstm_cell": lambda x, h, c, *biases: (c.clone(), c.clone(), x.clone()),
    "_thnn_fused_gru_cell": lambda x, h, state, *biases: (state.clone(), x.clone()),
    "_cudnn_rnn": lambda x, w, n, b, h, c, mode, size, *more: (
        x.new_zeros(*x.shape[:-1], size), h.clone(), h.clone(), x.new_empty(0), x.new_empty(0)),
    "_fused_rms_norm_backward": _rms_norm_backward,
}.items():  # fmt: skip
    ON_CPUS.impl(name, computed, "CPU")


@contextmanager
def fused_norms() -> Iterator[None]:
    """RMSNorm is one node, as on devices."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm", _rms_norm, "CPU")
        yield


def first_of(operation: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda *args: found[0] if isinstance(found := operation(*args), tuple) else found


def batch_norm_by(operation: Callable[..., Any]) -> Callable[..., Tensor]:
    """In place of ``F.batch_norm``."""
    return lambda x, mean, var, w, b, *more: first_of(operation)(x, w, b, mean, var, *more)


BATCH_NORMS = {own.__name__: own for own in (torch.cudnn_batch_norm, torch.miopen_batch_norm)}
