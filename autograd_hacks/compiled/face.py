"""`compile`.  It imports torch's compiler only when it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import ON_COMPILING, ON_REDUCTION
from autograd_hacks.extending import LOSS_TYPES, BatchDim, check_module
from autograd_hacks.support.draws import Noise, check_noise
from autograd_hacks.support.ranges import check_bound, check_word, checked

if TYPE_CHECKING:
    from autograd_hacks.compiled.step import CompiledStep

NUMBERS: Mapping[str, Sequence[str]] = {
    "rows": (), "norms": (), "clip": ("max_norm",),
    "clip_and_noise": ("noise_multiplier", "max_norm", "expected_batch_size"),
}  # fmt: skip
"""{what a compiled step can compute: the numbers that it needs}"""


@checked(ON_COMPILING)
def compile(
    model: nn.Module,
    verb: str,
    batch: BatchDim = 0,
    *,
    loss_type: str | None = None,
    param_grad: bool = True,
    max_norm: float | None = None,
    noise_multiplier: float | None = None,
    expected_batch_size: float | None = None,
    noise: Noise = None,
    max_bytes: int = 2**28,
    backend: str | None = "inductor",
    dynamic: bool | None = None,
) -> CompiledStep:
    """A compiled training step of a model, whose backward pass also computes rows, norms or clipped gradients::

        step = autograd_hacks.compile(model, "clip", max_norm=1.0, loss_type="mean")
        F.cross_entropy(step(x), y).backward()
        step.norms, model.weight.grad                  # before clipping; the mean of clipped gradients

    Forward and backward become one graph.  An analysis of the graph shows that samples don't mix, for all values.
    Operations that sum over samples are split.  No hooks are needed, and a model with the hooks of `add_hooks` is refused.

    verb: the quantity to compute

    * 'rows' sets ``param.grad1``, ``(N, *shape)``
    * 'norms' sets ``step.norms``, N
    * 'clip' sets ``.grad`` to the mean, or the sum, of the gradients, each clipped to ``max_norm``
    * 'clip_and_noise' sets ``.grad`` for private training, as `clip_and_noise_` does

    batch: the axis of the samples in all arguments; or a tree of axes as in `add_hooks`, None for an argument without
    samples
    loss_type: 'sum' or 'mean', how the losses are reduced. By default 'sum' is assumed, and a line on stderr says so, once
    param_grad: also fill ``.grad``, for 'rows' and 'norms'
    max_norm, noise_multiplier, expected_batch_size, noise: as in `clip_and_noise_`
    max_bytes: bytes of rows that 'clip' and 'norms' keep for norms and sums, which saves time, 256 MiB by default
    backend: 'inductor', or None to run the graph without a compiler
    dynamic: as in ``torch.compile``: None makes the sizes that change dynamic, True all, False none

    Returns a module that is called like the model and holds it as ``.model``.

    Calling it raises SamplesMixed; UnsupportedOperation if an operation has no rule, or if the model can't be captured as
    one graph (for example because of an ``if`` on values); and ValueError if an argument's samples are not on the given
    axis, or if `backward` reduces losses otherwise.  Backward passes are checked in steps 1, 2, 16, 128, ... of each
    compilation and raise VerificationFailed if a check fails.
    """
    check_module("compile", model, ON_COMPILING)
    check_word("compile", ON_REDUCTION, (*LOSS_TYPES, None), loss_type=loss_type)
    check_word("compile", ON_COMPILING, NUMBERS, verb=verb)
    if backend not in (None, "inductor"):
        raise ValueError(f"compile was given backend={backend!r}; expected 'inductor' or None" + ON_COMPILING)
    numbers = {
        "max_norm": max_norm, "noise_multiplier": noise_multiplier, "expected_batch_size": expected_batch_size,
    }  # fmt: skip
    check_noise("compile", noise)
    for name, number in list(numbers.items()):
        if (name in NUMBERS[verb]) != (number is not None):
            raise TypeError(
                f"compile(model, {verb!r}) was given {name}={number!r}; "
                f"expected {'a number' if name in NUMBERS[verb] else 'None'}" + ON_COMPILING
            )
        numbers[name] = number.item() if isinstance(number, Tensor) else number
    check_bound("compile", max_norm, noise_multiplier, ON_COMPILING)
    from autograd_hacks.compiled.step import CompiledStep  # torch's compiler takes a second to import

    settings = {**numbers, "noise": noise, "max_bytes": max_bytes}
    return CompiledStep(model, verb, batch, loss_type, param_grad, settings, backend, dynamic)
