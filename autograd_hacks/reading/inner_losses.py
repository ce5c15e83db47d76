"""Losses that a model computes itself: from which tensors with samples, and whether they are sums over samples."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.support.graph import Graph, Leaf, Value, inputs_of, shape_of
from autograd_hacks.support.layout import Layout, candidates
from autograd_hacks.support.philox import random_like
from autograd_hacks.support.sweep import Grads, sweep

SLACK = 1e3
"""How far second derivatives may differ from those of a sum of samples' losses, in units in the last place."""


class Weights:
    """Gives each sample a number.  A pass uses one digit of it, and weights the sample by a power of two for that digit.

    samples: N
    draws: assigns the numbers at random
    dtypes: the dtypes of the gradients
    """

    def __init__(self, samples: int, draws: torch.Generator, dtypes: Collection[torch.dtype]) -> None:
        self.base, self.passes = 8 if torch.float16 in dtypes else 32, 1  # powers that fit the dtypes, with a margin
        while self.base**self.passes < samples:
            self.passes += 1
        # Widely spread numbers make small mixtures visible.
        spread = torch.arange(samples, device="cpu") * (self.base**self.passes - 1) // max(1, samples - 1)
        self.numbers = spread[torch.randperm(samples, generator=draws, device="cpu")]

    def of_pass(self, number: int) -> Tensor:
        """The weights of one pass, N."""
        digits = self.numbers // self.base**number % self.base
        return torch.pow(2.0, digits - self.base // 2)


def frontier(roots: Iterable[Node], samples: int, ends: Collection[Node]) -> list[Value]:
    """The tensors from which losses are computed: on each way back, the first tensor that may have N samples on an axis.

    ends: nodes at which the search stops
    """
    found: dict[Value, None] = {}
    waiting, seen = list(roots), set[Node]()
    while waiting:
        node = waiting.pop()
        if node in seen or node in ends:
            continue
        seen.add(node)
        for value in inputs_of(node):
            if type(value.node) is Leaf or value.node in ends:
                continue
            shape = shape_of(value)
            if shape.numel() > 1 and candidates(shape, samples, range(len(shape))):
                found[value] = None
            else:
                waiting.append(value.node)
    return list(found)


def sums_samples(
    loss: Tensor, behind: Mapping[Value, Layout], weights: Weights, draws: torch.Generator
) -> tuple[bool | None, bool]:
    """Whether a loss is a sum of the samples' own losses: then its second derivatives between samples are zero.

    A function f of such a sum L is also accepted, for example the root of a mean.  Then H v has an additional term that is a
    multiple of the gradient, with the same factor for all samples: f″ ⟨∇L, v⟩ ∇L.

    behind: the tensors from which the loss is computed, with the places of their samples
    Returns whether it is a sum (None if torch has no second derivatives), and whether f differs from the identity.
    """
    assert loss.grad_fn is not None
    with torch.enable_grad():
        (first,) = _down({Value(loss.grad_fn, loss.output_nr): [torch.ones_like(loss)]}, behind)
    used = [(value, at, g) for (value, at), g in zip(behind.items(), first) if g is not None]
    curved = [(at, g) for _, at, g in used if g.requires_grad]
    if not curved:
        return bool(used), False

    each = [weights.of_pass(number) for number in range(weights.passes)]
    given: dict[Value, list[Tensor]] = {}
    for at, g in curved:
        v = random_like(g, draws)
        assert g.grad_fn is not None
        given[Value(g.grad_fn, g.output_nr)] = [v, *(v * at.over(g, w.to(g)) for w in each)]
    try:
        with torch.no_grad():
            found = _down(given, [value for value, _, _ in used])
    except RuntimeError:  # a function without a second derivative
        return None, False
    plain, *others = ([torch.zeros_like(g) if h is None else h for (_, _, g), h in zip(used, own)] for own in found)
    is_scaled = False
    for w, weighted in zip(each, others):
        apart, scaled = _is_apart([(at, g.detach()) for _, at, g in used], plain, weighted, w)
        is_scaled |= scaled
        if not apart:
            return False, is_scaled
    return True, is_scaled


def _down(given: Mapping[Value, Sequence[Tensor]], to: Collection[Value]) -> list[list[Tensor | None]]:
    """The gradients that passes bring from some values to others, pass by pass.  Calls no hooks: wrappers may use them."""
    ends, arrived = {value.node for value in to}, dict[Node, list[Grads]]()
    above = Graph([value.node for value in given], ends).above(ends)
    sweep(given, arrived.__setitem__, ends, above)
    passes = range(len(next(iter(given.values()))))
    return [[arrived[v.node][k][v.number] if v.node in arrived else None for v in to] for k in passes]


def _is_apart(
    first: Sequence[tuple[Layout, Tensor]], plain: Sequence[Tensor], weighted: Sequence[Tensor], w: Tensor
) -> tuple[bool, bool]:
    """Whether H (w ∘ v) is w ∘ (H v), except for a multiple of the gradient; and whether there is such a multiple."""
    samples, eps = len(w), max(torch.finfo(g.dtype).eps for _, g in first)
    rows = [
        [at.samples_first(x, samples).reshape(samples, -1).double() for x in (g, h, k)]
        for (at, g), h, k in zip(first, plain, weighted)
    ]
    g, h, k = (torch.cat(parts, 1) for parts in zip(*rows))
    factors = w.to(g)[:, None]
    rest = k - factors * h
    length = (factors * h).norm(dim=1) + k.norm(dim=1)
    if bool((rest.norm(dim=1) <= SLACK * eps * length + 1e-300).all()):
        return True, False
    # rest = (a - b w) g for two numbers a, b
    both = torch.stack([g.flatten(), (-factors * g).flatten()])
    both = both / both.norm(dim=1, keepdim=True).clamp(min=1e-300)
    solved = torch.linalg.pinv(both @ both.mT) @ (both @ rest.flatten())
    left = rest - (solved @ both).view_as(rest)
    most = (SLACK * eps) * (length + rest.norm(dim=1))
    return bool((left.norm(dim=1) <= most + 1e-300).all()), True
