"""Checks rules that were registered: with random weights, their rows must add up to what the layer's own graph gives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.capture.kinds import Whose
from autograd_hacks.capture.log import Noted
from autograd_hacks.capture.ran import Ran
from autograd_hacks.capture.uses import OutputGrads
from autograd_hacks.formulas.table import is_given
from autograd_hacks.reading.certificate import agree, received_by, rounded_by
from autograd_hacks.support.contexts import without_autocast
from autograd_hacks.support.graph import Value, made
from autograd_hacks.support.parts import undivided
from autograd_hacks.support.sweep import Grads, sweep


def check_rules(ran: Ran, places: Sequence[Whose | None], samples: int) -> dict[str, str]:
    """{parameter: why its rows are wrong}, for the layers of a finished forward whose rules a user has registered.

    places: whose the entries of the calls' outputs are
    samples: N
    """
    wrong: dict[str, str] = {}
    for noted, place in zip(ran.noted, places):
        if place is not None and is_given(noted.call.layer) and noted.call.edges and not place.is_unseen:
            wrong |= _compared(ran, noted, place, samples)
    return wrong


def _compared(ran: Ran, noted: Noted, place: Whose, samples: int) -> dict[str, str]:
    draws = torch.Generator().manual_seed(samples)
    # Powers of two: multiplying by them does not change what rounding leaves of a zero.
    w = 2.0 ** (torch.randperm(samples, generator=draws, device="cpu") % 8 - 4)
    given: dict[Value, list[Tensor | None]] = {}
    grads: list[Tensor | None] = [None] * noted.call.slots
    for node, hook in noted.hooks:
        layout, like = place.layouts[hook.slot], made(node)[hook.number]
        if layout is None and place.labels is None:
            return {}
        g = torch.randn(like.shape, generator=draws, dtype=like.dtype, device="cpu").to(like.device).reshape(hook.shape)
        each = w[place.labels].view(-1, *[1] * (g.ndim - 1)).to(g) if layout is None else layout.over(g, w.to(g))
        grads[hook.slot] = g
        given[Value(node, hook.number)] = [(each * g).reshape(tuple(like.shape))]
    leaves, arrived = {edge.node: name for name, edge in noted.call.edges.items()}, dict[str, Tensor]()

    def arrive(node: Node, passes: list[Grads]) -> None:
        if node in leaves and passes[0][0] is not None:
            arrived[leaves[node]] = passes[0][0].detach()

    with torch.no_grad(), without_autocast(ran.outputs):
        sweep(given, arrive, noted.inputs)
        received = OutputGrads(grads, [0] * len(grads), tuple(noted.call.edges))
        try:
            forms = noted.call.forms(received)
        except Exception:  # reading raises a rule's error again
            return {}
    terms = [(noted.call, received, float(w.max()))]
    return {
        (name := noted.call.edges[local].name): (
            f"with random weights, the rows of {name} don't add up to the gradient that its layer gives. Its rule is wrong "
            f"({noted.call.place})"
        )
        for local, form in forms.items()
        if local in arrived
        and not agree(
            form,
            w.to(form.like.device, form.sum_dtype.to_real()),
            undivided(arrived[local]).to_dense(),
            [noted.call.precision],
            partial(received_by, [form], terms),
            rounded_by([noted.call], arrived[local]),
        )
    }
