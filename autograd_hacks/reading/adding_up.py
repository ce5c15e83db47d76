"""Checks that rows with random weights add up to what a weighted backward pass brings to each parameter."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.capture.off_graph import OffGraph, Ran
from autograd_hacks.capture.uses import OutputGrads, Use
from autograd_hacks.forms import Form, add
from autograd_hacks.probe.documents import NOT_INSIDE, Documents
from autograd_hacks.probe.plan import AXES, ROWS, Plan
from autograd_hacks.reading.certificate import agree, received_by, rounded_by
from autograd_hacks.reading.labelling import Found, Key, Passes
from autograd_hacks.rules.table import rule_for
from autograd_hacks.support.contexts import without_autocast
from autograd_hacks.support.graph import Value, made
from autograd_hacks.support.parts import undivided
from autograd_hacks.support.philox import random_like
from autograd_hacks.support.sweep import Grads, sweep

LEAKING = "documents mix"
"""The beginning of messages that say so."""


def check_totals(plan: Plan, ran: Ran, found: Found, passes: Passes) -> None:
    """Records the parameters whose weighted rows don't add up to the gradient of the weighted pass."""
    # A layer that ends in a loss may contain the tensors at which the passes began.
    begun = {at.node for at in found.hypothesis.places if isinstance(at, Value)}
    losses = [noted for noted in ran.noted if (rule := rule_for(noted.call.layer)) is not None and rule.by_input]
    inside = [noted.call for noted in losses if begun and not begun.isdisjoint(ran.inside(noted))]
    unseen = {edge.name for call in inside for edge in call.edges.values()}
    plan.disproven, plan.shown = {}, set()
    try:
        for name, is_zero, agrees, where in _compared(
            plan, ran, found, passes.grads, passes.arrived, passes.weights.of_pass(0)
        ):
            if agrees is None or name in unseen:
                plan.unsure |= not is_zero
                continue
            plan.unsure |= is_zero
            if not agrees:
                plan.disproven[name] = (
                    f"with random weights, the rows of {name} don't add up to the gradient that arrives at it. Its rule is "
                    f"wrong ({where}), or some gradient arrives without passing through the hooks"
                )
            elif not is_zero:
                plan.shown.add(name)
    except Exception:  # reading raises a rule's error again
        plan.unsure = True


def check_documents(plan: Plan, ran: Ran, found: Found, draws: torch.Generator) -> None:
    """Records the parameters whose weighted rows of documents don't add up to the gradient of a pass with these weights.

    If they don't, gradient went from one document's outputs to another's positions."""
    documents, plan.untold = ran.documents, ""
    if documents is None or documents.most >= plan.packed:  # fewer documents show less
        plan.leaks = {}
    if documents is not None and ran.checkpoints:
        plan.leaks |= dict.fromkeys(ran.parameters, NOT_INSIDE)
    if documents is None or documents.is_of_tokens or not documents.count or ran.checkpoints:
        return
    # Powers of two: multiplying by them does not change what rounding leaves of a zero.
    order = torch.randperm(documents.count, generator=draws, device="cpu")
    w = 2.0 ** (order % 8 - 4) * (1 - 2 * (order // 8 % 2))
    given: dict[Value, list[Tensor]] = {}
    for at in found.hypothesis.places:
        value = ran.value(at) if isinstance(at, int) else at
        like: Any = ran.outputs[at] if isinstance(at, int) else made(at.node)[at.number]
        g = random_like(like, draws)
        weights = documents.over(g, w)
        if weights is not None:
            own = [g * (weights != 0), g * weights]  # padding gets none
            given[value] = [x + y for x, y in zip(given[value], own)] if value in given else own
        elif isinstance(at, int):
            plan.mixed_outputs = (*plan.mixed_outputs, at)
            plan.untold = _untold(tuple(like.shape), documents)
    if not given:
        plan.untold = plan.untold or _untold(tuple(ran.outputs[0].shape), documents)
        plan.leaks |= dict.fromkeys(ran.parameters, plan.untold)
        return
    grads, arrived = _passes(ran, found, given)
    try:
        for name, _, agrees, where in _compared(plan, ran, found, grads, arrived, w, documents):
            if agrees is False:
                plan.leaks[name] = (
                    f"{LEAKING}: one document's loss depends on another document's tokens in the same sample, so {name} has "
                    f"no gradients of single documents ({where}). Mask attention by document: give the model position_ids, "
                    "a block mask or cu_seqlens, and use an attention that reads it."
                )
    except Exception as error:  # reading raises a rule's error again
        plan.leaks |= dict.fromkeys(ran.parameters, str(error))


def _untold(shape: tuple[int, ...], documents: Documents) -> str:
    return (
        f"{LEAKING}: the model returned shape {shape}, but the documents cover {tuple(documents.ids.shape)} positions, so "
        "output entries can't be assigned to documents. Compute the loss from an output with an entry for each position."
    )


def _passes(ran: Ran, found: Found, given: Mapping[Value, list[Tensor]]) -> tuple[dict[Key, Tensor], dict[str, Tensor]]:
    """Runs two passes at once.  Returns what the first brings to calls and nodes, and the second to parameters."""
    grads, arrived, leaves = dict[Key, Tensor](), dict[str, Tensor](), ran.leaves
    watched: dict[Node, list[tuple[Key, int, torch.Size | None]]] = {}
    for noted in ran.noted:
        for node, hook in noted.hooks:
            watched.setdefault(node, []).append(((noted.call, hook.slot), hook.number, hook.shape))
    for node in found.nodes:
        watched.setdefault(node, []).extend(((node, number), number, None) for number in range(len(made(node))))

    def arrive(node: Node, passes: list[Grads]) -> None:
        if node in leaves and (grad := passes[1][0]) is not None:
            arrived[leaves[node]] = grad.detach()
        for key, number, shape in watched.get(node, ()):
            if (x := passes[0][number]) is not None:
                grads[key] = x if shape is None else x.reshape(shape)

    with torch.no_grad(), without_autocast(ran.outputs):
        sweep(given, arrive, ran.ends, to_leaves=1)
    return grads, arrived


def _compared(
    plan: Plan,
    ran: Ran,
    found: Found,
    grads: Mapping[Key, Tensor],
    arrived: dict[str, Tensor],
    w: Tensor,
    documents: Documents | None = None,
) -> Iterator[tuple[str, bool, bool | None, str]]:
    """For each parameter: its name, whether its gradient is zero, whether its rows agree (None without rows), where it is.

    grads: gradients of a pass, at calls and nodes
    arrived: gradients of the same pass with weights w at the outputs, at parameters
    documents: the documents, if rows are per document
    """
    samples, scale = found.hypothesis.samples, float(w.abs().max())
    forms: dict[str, list[Form]] = {}
    terms: dict[str, list[tuple[Use, OutputGrads, float]]] = {}

    def note(use: Use, own: OutputGrads) -> None:
        for local, form in use.forms(own).items():
            forms.setdefault(use.edges[local].name, []).append(form)
            terms.setdefault(use.edges[local].name, []).append((use, own, scale))

    with torch.no_grad(), without_autocast(ran.parameters.values()):
        for noted in ran.noted:
            place = found.calls[noted.call]
            at = [grads.get((noted.call, slot)) for slot in range(noted.call.slots)]
            if place.kind in (AXES, ROWS) and not noted.is_empty and any(g is not None for g in at):
                call = noted.call.at_place(samples, place.layouts, ran.labels.get(noted.call), documents)
                call.is_unseen = place.is_unseen  # the previous plan may have said otherwise
                note(call, OutputGrads(at, [0] * len(at), tuple(call.edges)))
        off = OffGraph(ran, plan, samples)
        off.documents = documents
        for node, use in off.find().uses(ran.edge_of, 0):
            own = [grads.get((node, n)) for n in range(use.slots)]
            if any(g is not None for g in own):
                received = OutputGrads(own, [0] * len(own), tuple(use.edges))
                received.kept = use.take(node, own, received.reached)
                note(use, received)
        for name in list(arrived):
            grad = arrived.pop(name)  # it is no longer needed
            if name not in forms:
                yield name, not bool(grad.any()), None, ""
                continue
            grad, form = undivided(grad).to_dense(), add(forms[name])
            used = [use.precision for use, _, _ in terms[name]]
            weights = w.to(form.like.device, form.sum_dtype.to_real())
            rounded = rounded_by((use for use, _, _ in terms[name]), grad)
            agrees = agree(form, weights, grad, used, partial(received_by, [form], terms[name]), rounded)
            yield name, not bool(grad.any()), agrees, ", ".join(dict.fromkeys(use.place for use, _, _ in terms[name]))
