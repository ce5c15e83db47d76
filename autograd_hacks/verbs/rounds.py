"""How a verb is asked of the forms of a whole model: in rounds, and added up over the parameters."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce

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
    for name, _, form in _rounds(forms, samples, budget):
        parts[name].append(verb(name, form))
    return {name: torch.cat(found) if len(found) > 1 else found[0] for name, found in parts.items()}


def summed(forms: Forms, samples: int, verb: Verb, budget: int, *shape: int) -> Tensor:
    """(N, *shape): what a verb says, added up over all forms."""
    like = next((form.new_sums(0) for form in forms.values()), torch.zeros(0, device="cpu"))
    total = like.new_zeros(samples, *shape)
    for name, piece, form in _rounds(forms, samples, budget):
        part = verb(name, form).to(total.device)
        total = total.to(torch.promote_types(total.dtype, part.dtype))
        total[piece] += part
    return total


def second_moments(
    forms: Forms, samples: int, w: Tensor | None, about: Mapping[str, Tensor], budget: int
) -> dict[str, Tensor]:
    """{name: shape}: Σₙ wₙ (gₙ - about)², elementwise.  w: N, ones unless told    about: {name: shape}, else zero"""
    totals: dict[str, Tensor] = {}
    for name, piece, form in _rounds(forms, samples, budget):
        weights = form.new_sums(form.samples).abs() + 1 if w is None else w[piece].to(form.like.device)
        found = form.second_moment(weights, about.get(name), budget)
        totals[name] = totals[name] + found if name in totals else found
    return {name: totals[name] for name in forms}


def unit_products(form: Form, other: Form, n: Tensor, m: Tensor, budget: int) -> Tensor:
    """(N, M): inner products of the rows over their lengths, which are divided by first.  n: N, m: M, the lengths"""
    total, share = form.new_sums(form.samples, other.samples), form.samples / max(1, form.samples + other.samples)
    for rows, block in form.blocks(int(budget * share) // 3):
        theirs = other if block is form else other.block(rows)
        mine, yours = block.wide().matrix(), theirs.wide().matrix()
        total += (mine / n.to(mine)[:, None].real) @ (yours / m.to(yours)[:, None].real).mH
    return total


def _rounds(forms: Forms, samples: int, budget: int) -> Iterator[tuple[str, slice, Form]]:
    """Parameters with the samples to ask them for and these samples' form.

    Those whose rows come of the same module that is run again go together, some samples at a time, so that it is run once
    for these and not once for each parameter.
    """
    together: dict[frozenset[Source], list[str]] = {}
    for name, form in forms.items():
        together.setdefault(frozenset(form.sources), []).append(name)
    for sources, names in together.items():
        sizes = [forms[name].like.element_size() * sum(source.row_size for source in sources) for name in names if sources]
        for piece in stretches(samples, budget // max(1, *sizes) if sources else samples):
            for name in names:
                yield name, piece, forms[name] if piece == slice(0, samples) else forms[name][piece]


def joint_norms(norms: Sequence[Tensor], samples: int) -> Tensor:
    """The norms of rows that are cut over parameters, N.  norms: of the parts, N each"""
    if not norms:
        return torch.zeros(samples, device="cpu")
    # Those of a model may differ in dtype and device.
    dtype = reduce(torch.promote_types, (part.dtype for part in norms))
    return row_norms(torch.stack([part.to(norms[0].device, dtype) for part in norms], dim=1))


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
    return torch.zeros(shape, device="cpu") if total is None else total
