"""Operations of devices, on a CPU: by others, which is enough for the nodes that devices make."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _lstm_cell(x: Tensor, h: Tensor, c: Tensor, *biases: Tensor | None) -> tuple[Tensor, ...]:
    gates = sum([b for b in biases if b is not None], x + h)
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c, gates


def _rnn(x: Tensor, weights: Any, _: Any, __: Any, h: Tensor, *more: Any) -> tuple[Tensor, ...]:
    return x.new_zeros(*x.shape[:-1], more[2]), h.clone(), h.clone(), x.new_empty(0), x.new_empty(0)


def _rms_norm(x: Tensor, shape: Sequence[int], w: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    root = (x.square().mean(_last(shape), keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    return x * root if w is None else x * root * w, root


def _rms_norm_backward(
    g: Tensor, x: Tensor, shape: Sequence[int], root: Tensor, w: Tensor | None, _: Any
) -> tuple[Tensor, Tensor]:
    h, own = x * root, g if w is None else g * w
    return root * (own - h * (own * h).mean(_last(shape), keepdim=True)), (g * h).flatten(0, -len(shape) - 1).sum(0)


def _last(shape: Sequence[int]) -> list[int]:
    return [-k - 1 for k in range(len(shape))]


ON_CPUS = torch.library.Library("aten", "IMPL")
for name, computed in {
    "cudnn_batch_norm": lambda *own: (*aten.native_batch_norm(*own), own[0].new_empty(0, dtype=torch.uint8)),
    "miopen_batch_norm": aten.native_batch_norm.default,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_gru_cell": lambda x, h, hx, *biases: (hx * (x + h)[:, : hx.shape[1]], x.repeat(1, 5)),
    "_cudnn_rnn": _rnn,
    "_fused_rms_norm_backward": _rms_norm_backward,
}.items():
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
