"""Notes gradient that the loss brings around the uses: through outputs that mix samples, or of parameters alone."""

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.capture.backward import Backward
from autograd_hacks.capture.ran import Ran
from autograd_hacks.support.graph import Graph, Value
from autograd_hacks.support.layout import differs, rounding_of
from autograd_hacks.support.switch import current_task


def watch_outputs(backward: Backward, outputs: Iterable[Tensor], why: str, ran: Ran) -> None:
    """Notes gradients that come through tensors from outside of the forward, as from a loss that reads them.

    why: the reason to refuse these gradients
    ran: the forward; what its own nodes bring is no gradient from outside
    """
    takers = Graph([x.grad_fn for x in ran.outputs if x.grad_fn is not None], ran.ends).takers
    for x in outputs:
        if x.grad_fn is not None:
            own, at = list[Tensor](), Value(x.grad_fn, x.output_nr)
            for taker in takers.get(at, ()):
                taker.node.register_hook(partial(_note_brought, own, taker.place))
            x.grad_fn.register_prehook(partial(_note_mixed, backward, why, own, at.number))


def _note_brought(own: list[Tensor], place: int, brought: Sequence[Tensor | None], _: object) -> None:
    """own: what has come to a value so far"""
    grad = brought[place]
    own += [] if grad is None else [grad]


def _note_mixed(backward: Backward, why: str, own: list[Tensor], number: int, grads: tuple[Tensor | None, ...]) -> None:
    brought, grad = list(own), grads[number]
    own.clear()
    if grad is None or not backward.hears():
        return
    if not brought or bool(differs(grad, torch.stack(brought).sum(0), rounding_of(grad)).any()):
        backward.refuse(why)


def watch_penalty(backward: Backward, node: Node, names: Collection[str]) -> None:
    """Notes gradients that come through an output of parameters alone, which belongs to no sample.  names: theirs"""

    def note(grads: tuple[Tensor | None, ...]) -> None:
        if backward.hears() and any(grad is not None for grad in grads):
            backward.enter(current_task()).beside.update(names)

    node.register_prehook(note)
