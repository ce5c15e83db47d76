"""How a verb is asked of the forms of a whole model: in rounds, and added up over the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from autograd_hacks.forms import Form
from autograd_hacks.forms.numerics import row_norms, stretches
from autograd_hacks.forms.source import Source

Forms = Mapping[str, Form]
"""Of the same N samples, by the parameter's name."""

Verb = Callable[[str, Form], Tensor]
"""``verb(name, form)`` returns something for each of the form's samples."""


def by_rows(forms: Forms, samples: int, verb: Verb, budget: int) -> dict[str, Tensor]:
    """{name: N ...}, what a verb says of every form."""
    parts: dict[str, list[Tensor]] = {name: [] for name in forms}
    for names, piece in _rounds(forms, samples, budget):
        for name in names:
            parts[name].append(verb(name, forms[name] if piece is None else forms[name][piece]))
    return {name: torch.cat(found) for name, found in parts.items()}


def summed(forms: Forms, samples: int, verb: Verb, budget: int, *shape: int) -> Tensor:
    """(N, *shape): what a verb says, added up over all forms."""
    like = next((form.new_sums(0) for form in forms.values()), torch.zeros(0))
    total = like.new_zeros(samples, *shape)
    for names, piece in _rounds(forms, samples, budget):
        for name in names:
            part = verb(name, forms[name] if piece is None else forms[name][piece]).to(total.device)
            total = total.to(torch.promote_types(total.dtype, part.dtype))
            total[slice(None) if piece is None else piece] += part
    return total


def second_moments(
    forms: Forms, samples: int, w: Tensor | None, about: Mapping[str, Tensor], budget: int
) -> dict[str, Tensor]:
    """{name: shape}: Σₙ wₙ (gₙ - about)², elementwise.  w: N, ones unless told    about: {name: shape}, else zero"""
    totals: dict[str, Tensor] = {}
    for names, piece in _rounds(forms, samples, budget):
        for name in names:
            form = forms[name] if piece is None else forms[name][piece]
            weights = form.new_sums(form.samples) + 1 if w is None else w.to(form.like.device)
            weights = weights if w is None or piece is None else weights[piece]
            found = form.second_moment(weights.abs() if w is None else weights, about.get(name), budget)
            totals[name] = totals[name] + found if name in totals else found
    return {name: totals[name] for name in forms}


def _rounds(forms: Forms, samples: int, budget: int) -> Iterator[tuple[list[str], slice | None]]:
    """Names of parameters with the samples to ask them for; None for all.

    Those whose rows come of the same module that is run again go together, some samples at a time, so that it is run once
    for these and not once for each parameter.
    """
    together: dict[frozenset[Source], list[str]] = {}
    for name, form in forms.items():
        together.setdefault(frozenset(form.sources), []).append(name)
    for sources, names in together.items():
        if not sources:
            yield names, None
            continue
        each = sum(source.row_size for source in sources) * max(forms[name].like.element_size() for name in names)
        for piece in stretches(samples, budget // max(1, each)):
            yield names, None if piece == slice(0, samples) else piece


def joint_norms(norms: Sequence[Tensor], samples: int) -> Tensor:
    """The norms of rows that are cut over parameters, N.  norms: of the parts, N each"""
    return row_norms(torch.stack(_alike(norms), dim=1)) if norms else torch.zeros(samples)


def added(found: Iterable[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The sum over parameters, which may differ in dtype and device."""
    total: Tensor | None = None
    for part in found:
        if total is None:
            total = part
        elif total.requires_grad or part.requires_grad or total.dtype != part.dtype:
            total = total + part.to(total.device)
        else:
            total += part.to(total.device)
    return torch.zeros(shape) if total is None else total


def _alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """In one dtype, on one device: those of a model may differ."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(tensors[0].device, dtype) for tensor in tensors]
