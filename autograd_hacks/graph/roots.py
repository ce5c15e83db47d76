"""Where a walk begins: the outputs of a model, and on which of their axes the samples are.

An output's axis is a hypothesis: a walk from it must arrive at the memory of the arguments with each sample's entries in
their order.  A scalar output, such as the loss that a model returns itself, is no root: it is followed, through sums and
means alone, to the values that are added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.graph.label import At, Label, One, Owned, Shape, entries
from autograd_hacks.graph.laws import node_name
from autograd_hacks.graph.trace import Trace
from autograd_hacks.graph.walk import Memory, Walk, walked
from autograd_hacks.support.graph import Leaf, operands_of

_SUMS = """sum mean nansum nll_loss nll_loss_forward nll_loss2d mse_loss smooth_l1_loss huber_loss binary_cross_entropy
binary_cross_entropy_with_logits"""
_LINEAR, _PRODUCTS = "add sub neg mul div _to_copy clone view squeeze unsqueeze alias rsub", "mm addmm linear convolution"
_ADD_UP, _GO_ON, _BY_ROWS = ({node_name(name) for name in names.split()} for names in (_SUMS, _LINEAR, _PRODUCTS))


def frontier(roots: Iterable[tuple[Any, int]]) -> list[tuple[Any, int]] | None:
    """The values that are added up to scalars; None if samples come together otherwise.

    Returns values with axes as they are.
    """
    found: dict[tuple[Any, int], None] = {}
    waiting = list(roots)
    while waiting:
        node, number = waiting.pop()
        if type(node) is Leaf or prod(node._input_metadata[number].shape) != 1:
            found[node, number] = None
            continue
        name = node.name().split("Backward")[0]
        if name not in _ADD_UP and name not in _GO_ON:
            return None
        ahead = [edge for edge in node.next_functions if edge[0] is not None]
        if name in ("Mul", "Div") and len(ahead) > 1:
            return None  # a product of two scalars is linear in neither sum alone
        waiting += ahead
    return list(found)


def candidates(shape: Shape, samples: int, first: int = 0) -> list[Label]:
    """Where the samples may be in a value, the likeliest first.

    first: the axis on which the arguments have them
    """
    if samples == 1:
        return [One(0)]
    axes = sorted(range(len(shape)), key=lambda d: d != first)
    plain: list[Label] = [At(d) for d in axes if shape[d] == samples]
    folds = [(d, shape[d] // samples) for d in axes if shape[d] != samples and shape[d] and shape[d] % samples == 0]
    return [*plain, *(at for d, times in folds for at in (At(d, 1, times), At(d, times, 1)))]


def rooted(
    trace: Trace, given: Mapping[int, tuple[Tensor, int]], samples: int, memory: Memory, first: int = 0
) -> tuple[dict[int, Label], Walk] | None:
    """The roots' labels under which the arguments' samples stay in order, and the walk from there; None without any.

    given: {address of an argument's memory: the argument, and the axis of its samples}
    """
    shapes = [trace.shapes[k][number] or () for k, number in trace.roots]
    likeliest: tuple[dict[int, Label], Walk] | None = None
    for labels in product(*(candidates(shape, samples, first) for shape in shapes)):
        roots = dict(enumerate(labels))
        walk = walked(trace, roots, samples, memory)
        verdict = fits(trace, walk, given, samples)
        if verdict:
            return roots, walk
        if verdict is None and likeliest is None:
            likeliest = roots, walk
    return likeliest


def fits(
    trace: Trace, walk: Walk, given: Mapping[int, tuple[Tensor, int]], samples: int, nodes: Iterable[int] | None = None
) -> bool | None:
    """Whether labels agree with the arguments' samples where these meet parameters; None if none of them is seen there.

    nodes: the nodes to look at; those of all uses by default"""
    seen = None
    for k in (use.node for use in walk.uses if use.node >= 0) if nodes is None else nodes:
        label, out = walk.labels[k][0], trace.shapes[k][0] or ()
        for own in _orders(trace.nodes[k], given, samples):
            if isinstance(label, Owned) and samples > 1:
                if not _agree(trace.kinds[k].name, entries(label, out, samples, own.device), own, out):
                    return False
                seen = True
    return seen


def _orders(node: Any, given: Mapping[int, tuple[Tensor, int]], samples: int) -> Iterator[Tensor]:
    """Of the operands that are an argument's memory, the sample of each entry."""
    for x in operands_of(node):
        if x.layout == torch.strided and (known := given.get(x.untyped_storage().data_ptr())) is not None:
            whole, axis = known
            start = x.storage_offset() - whole.storage_offset() * whole.element_size() // x.element_size()
            place = torch.tensor(start, device="cpu")
            for d, (size, stride) in enumerate(zip(x.shape, x.stride())):
                place = place + (torch.arange(size, device="cpu") * stride).view(
                    [-1 if k == d else 1 for k in range(x.ndim)]
                )
            # A part of complex numbers has a stride of its own.
            yield place * x.element_size() // (max(1, whole.stride(axis)) * whole.element_size()) % samples


def _agree(name: str, at: Tensor, own: Tensor, out: Shape) -> bool:
    kind = name.split("Backward")[0]
    if not own.numel() or not prod(out):
        return True
    if kind in _BY_ROWS and own.ndim and out and own.shape[0] == out[0]:
        rows = own.flatten(1)
        return bool((rows == at.expand(*out).flatten(1)[:, :1]).all())
    if kind == node_name("embedding") and list(own.shape) == list(out[:-1]):
        return bool((own == at.expand(*out)[..., 0]).all())
    return True
