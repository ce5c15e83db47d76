"""Where a walk begins: the outputs of a model, and on which of their axes the samples are.

An output's axis is a hypothesis: a walk from it must arrive at the memory of the arguments with each sample's entries in
their order.  A number, such as a loss, is no root: it is followed, through what is linear alone, to the values that it adds
up.  What isn't linear in several samples mixes them.  Of a loss that a model makes itself these values are roots; of one
that is made of models' outputs, `Total` judges each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from autograd_hacks.graph.label import At, Entries, Label, One, Owned, Several, Shape, entries, scattered
from autograd_hacks.graph.laws import Kind, node_name
from autograd_hacks.graph.memo import holds
from autograd_hacks.graph.trace import Plan, Trace
from autograd_hacks.graph.values import Indexed
from autograd_hacks.graph.walk import ORDERS, ZEROS, Memory, Walk, walked
from autograd_hacks.support.graph import IDENTITIES, Leaf, Value, inputs_of, kept_by, made, number_of, operands_of, shape_of
from autograd_hacks.support.layout import Layout, candidates

_SUMS = "sum mean nansum trace nll_loss nll_loss_forward nll_loss2d nll_loss2d_forward"
_ENTRIES = """mse_loss smooth_l1_loss huber_loss soft_margin_loss multi_margin_loss multilabel_margin_loss
binary_cross_entropy binary_cross_entropy_with_logits dot"""
_MOVES = """view unsafe_view reshape_alias permute transpose t squeeze unsqueeze expand repeat flip slice select unbind split
split_with_sizes unsafe_split unsafe_split_with_sizes diagonal index unsafe_index index_select index_copy gather topk sort
masked_select masked_fill where cat stack clone copy alias _to_copy add sub rsub neg cumsum roll constant_pad_nd tril triu
index_add index_put scatter scatter_add unfold"""
_VIEWS, _SPLITS = "view unsafe_view reshape_alias", "split split_with_sizes unsafe_split unsafe_split_with_sizes"
_SUM, _LOSS, _LINEAR, _BILINEAR, _NORM, _BY_ROWS, _PRODUCTS, _RESHAPE, _SPLIT = (
    {node_name(name) for name in names.split()}
    for names in (
        _SUMS, _ENTRIES, _MOVES, "mul div dot mv mm bmm", "norm linalg_vector_norm",
        "mm addmm mv linear convolution", "mm addmm", _VIEWS,
        _SPLITS,
    )
)  # fmt: skip


Together = tuple[Value, ...]
"""Values of which the entries at each place are taken together, as a loss takes predictions and targets."""


class Added(NamedTuple):
    """What numbers add up."""

    values: Sequence[Together]
    is_scaled: bool  # whether it is the root of their sum
    read: Sequence[tuple[Any, Callable[[Any], Any], Any]]  # what that rests on: nodes, and what was seen there


Where = Layout | Tensor | Label
"""Where samples are in a value: a layout, the sample of each entry on axis 0, or a label."""
Given = Mapping[int, Sequence[tuple[Tensor, int]]]
"""The arguments by their memory, each with the axis on which it has the samples."""


def frontier(
    roots: Sequence[Value], counts: Collection[int], ends: Collection[Node], within: Collection[Node] | None = None,
    is_apart: Callable[[Together], bool] = lambda _: True,
) -> Added:  # fmt: skip
    """The values that numbers add up.

    Each has an axis that may be the samples', or is the result of an operation that isn't linear.  Only a root may be
    applied to the whole: it divides the gradients of all samples alike.  Any other function of a sum mixes its samples.

    counts: how many samples there may be
    ends: nodes at which to stop
    within: the nodes that lead there, if anything else is a constant
    is_apart: whether a value with such an axis keeps samples apart; if it doesn't, it is followed further
    """
    found, waiting, is_whole, is_scaled, read = (
        dict[Together, None](),
        [*roots],
        True,
        False,
        list[tuple[Any, Callable[[Any], Any], Any]](),
    )
    if within is None and any(shape_of(own).numel() != 1 for own in roots):  # no loss
        return Added([(own,) for own in roots], False, ())
    while waiting:
        is_whole &= len(waiting) == 1
        value, is_special = waiting.pop(), False
        node: Any = value.node
        if (value,) in found or node in ends or type(node) is Leaf:
            continue
        name, shape, ahead = _name(node), shape_of(value), [x for x in inputs_of(node) if within is None or x.node in within]
        is_one, first, is_bilinear = shape.numel() == 1, node.next_functions[:1], name in _BILINEAR and len(ahead) == 1
        has_axis = not is_one and any(candidates(shape, n, range(len(shape))) for n in counts)
        if (is_bilinear and name == "Mul") or (name == "Pow" and is_one and is_whole):
            look = partial(_is_special, is_first=ahead[0] in first)
            read.append((node, look, is_special := look(node)))
        if name in _SUM or node.name() in IDENTITIES:
            waiting += ahead
        elif is_bilinear and is_special:  # as of a term to be warmed up
            continue
        elif has_axis and is_apart((value,)):
            found[(value,)] = None
        elif name in _LINEAR or (is_bilinear and (name != "Div" or first[0] in ahead)):
            waiting += ahead  # and it doesn't divide by them
        elif is_one and ahead and (name in _LOSS or (name in _NORM and is_whole)):
            found[tuple(ahead)] = None
            is_scaled |= name in _NORM
        elif is_one and "crossentropy" in node.name().replace("_", "").lower():  # fused, and its weight is no sample's
            found |= dict.fromkeys((x,) for x in ahead if x in first)
        elif is_one and is_whole and len(ahead) == 1 and shape_of(ahead[0]).numel() == 1 and (name == "Sqrt" or is_special):
            waiting, is_scaled = ahead, True
        else:
            found[(value,)] = None
    return Added([*found], is_scaled, read)


def _is_special(node: Any, is_first: bool) -> bool:
    """Whether a power is a root, or a product's factor is the number 0.  is_first: whether that isn't the first one"""
    is_power = _name(node) == "Pow"
    x = kept_by(node, "exponent" if is_power else "other" if is_first else "self")
    is_read = not isinstance(x, Tensor) or not (is_power or x.ndim or x.device.type != "cpu")  # a GPU isn't waited for
    return is_read and bool(x == (0.5 if is_power else 0))


def reduction_of(node: Any) -> Any:
    return getattr(node, "_saved_reduction", None)


class Total(NamedTuple):
    """Whether numbers add up what they read of models sample by sample.  It holds no node."""

    plan: Plan  # of their graph
    shows: Sequence[tuple[Walk, int]]  # what shows it: walks without labels, and numbers of classes
    mixed: Mapping[int, int]  # by the number of what is read, the node at which its samples seem to mix
    read: Sequence[tuple[int, Callable[[Any], Any], Any]]  # what else it rests on, see `Added`
    reduced: frozenset[Any]  # how they become numbers: the kinds of the last nodes, and the reductions that these save

    def holds(self, trace: Trace) -> bool:
        """Whether this is so of an equal graph, too."""
        is_alike = all(look(trace.nodes[k]) == known for k, look, known in self.read)
        return is_alike and all(holds(walk, trace, count, NO_MEMORY) for walk, count in self.shows)


def judged(trace: Trace, read: Sequence[tuple[int, Value, Label]]) -> Total:
    """Judges what numbers add up.

    trace: their graph    read: N, a value of a model's, and the label of a gradient there, for each that is read"""
    judge, shows, mixed = cache(partial(_judge, trace, read)), list[tuple[Walk, int]](), dict[int, int]()
    counts, ends = {own[0] for own in read}, {own[1].node for own in read}
    within = {trace.nodes[k] for k in trace.above([trace.number[node] for node in ends])}
    roots = [Value(trace.nodes[k], number) for k, number in trace.roots]
    added = frontier([own for own in roots if own.node in within], counts, ends, within, lambda values: not judge(values)[1])
    for values in added.values:
        if len(mixed) < len(read):  # else nothing more can be found
            more, wrong = judge(values)
            shows += more
            mixed |= wrong
    numbers = [node for node, shapes in zip(trace.nodes, trace.shapes) if () in shapes]
    looks = [*added.read, *((node, reduction_of, reduction_of(node)) for node in numbers)]
    reduced = frozenset([(node.name(), reduction_of(node)) for node in numbers])
    return Total(trace.plan, shows, mixed, [(trace.number[node], *own) for node, *own in looks], reduced)


def _judge(
    whole: Trace, every: Sequence[tuple[int, Value, Label]], values: Together
) -> tuple[list[tuple[Walk, int]], dict[int, int]]:
    """What shows whether values keep samples apart, and if they don't, the node where what is read of them seems to mix.

    Their entries are sorted into classes, as an axis may do it, and labels of these are walked down to the models.  If each
    class comes to one sample's entries there, it is a part of that sample's loss, in whatever order the loss has them.

    whole, every: see `judged`"""
    trace, shows, at = Trace(values, (), whole.ends), list[tuple[Walk, int]](), list[int]()
    number = [whole.number[node] for node in trace.nodes]
    read = {n: own for n, own in enumerate(every) if own[1].node in trace.number}
    classes = [*_classes(values[0], {own[0] for own in read.values()}, {own[1].node for own in read.values()})]
    for mode, (label, count) in product(("", ORDERS, ZEROS), classes):  # first, no node is asked for more
        walk = walked(trace, dict.fromkeys(range(len(values)), label), count, NO_MEMORY, (mode,))
        origins = {number[k]: origin for k, origin in walk.origins.items()}
        asked = {number[k]: own for k, own in walk.asked.items()}
        shows.append((Walk([], read=[(number[k], *own) for k, *own in walk.read], asked=asked, origins=origins), count))
        if _are_apart(walk, trace, [*read.values()], count):
            return shows[-1:], {}
        at += [number[mix.node] for mix in walk.mixes if mix.node >= 0] or [whole.number[values[0].node]]
    return shows, dict.fromkeys(read, at[0])


def _classes(value: Value, counts: Collection[int], ends: Collection[Node]) -> Iterator[tuple[Label, int]]:
    """Classes to which the entries of a value may belong, the likeliest first, with their number."""
    shape = shape_of(value)
    for samples in counts:
        for layout in candidates(shape, samples, range(len(shape))):
            yield label_of(layout, shape, samples), samples
        if (found := picked(value, samples, ends if shape[:1] == (samples,) else ())) is not None:
            yield label_of(found[0], shape, samples), samples
    yield from ((At(dim), size) for dim, size in enumerate(shape) if size not in (1, *counts))
    yield One(0), 2  # as in a loop over samples


NO_MEMORY = Memory(lambda _: False)


def _are_apart(walk: Walk, trace: Trace, read: Sequence[tuple[int, Value, Label]], count: int) -> bool:
    """Whether each class comes to one sample's entries, of the models that had as many samples."""
    pairs, counts = [torch.zeros(2, 0, dtype=torch.long, device="cpu")], [own[0] for own in read]
    for samples, value, own in read:
        label, shape = walk.labels[trace.number[value.node]][value.number], shape_of(value)
        if isinstance(label, Several) and 0 not in shape:
            return False
        if isinstance(label, Owned) and isinstance(own, Owned) and 0 not in shape:
            both = entries(label, shape, count, "cpu"), entries(own, shape, samples, "cpu")
            pairs.append(torch.stack(torch.broadcast_tensors(*both)).flatten(1))
            pairs[-1][0] += (pairs[-1][0] >= 0) * count * counts.index(samples)  # classes of models with as many samples
    index, of = (joint := torch.cat(pairs, 1))[:, (joint >= 0).all(0)]
    return scattered(of, index, count * len(read)) is not None


def label_of(at: Where, shape: Sequence[int], samples: int) -> Label:
    """A place of samples as a label.  Of rows that are all one sample's, every entry is."""
    if samples < 2:
        return One(0)
    if isinstance(at, Tensor):
        return Entries(at.view([-1, *[1] * (len(shape) - 1)]))
    if not isinstance(at, Layout):
        return at
    size = shape[at.axis] // samples
    outer, inner = {"": (1, 1), "N·T": (1, size), "T·N": (size, 1)}[at.fold]
    return At(at.axis, outer, inner)


def _name(node: Any) -> str:
    return str(node.name().split("Backward")[0].rpartition("::")[2])


def picked(root: Value, samples: int, ends: Collection[Node] = ()) -> tuple[Tensor | One, Value] | None:
    """The sample of each entry on axis 0 of a value, if values picked the entries, as in h[mask]; None if nothing shows it.
    `One` if it is that of all.

    Each entry is followed to the entries from which it was taken, down to the nearest value with N of them on axis 0; to the
    nearest at some ends, if there are any.
    Those are assumed to be the samples in order, so a walk has to confirm the answer.  A number is its own only row.
    Returns that value, too.
    """
    shape = shape_of(root)
    own = torch.arange(shape[0] if shape else 1, device="cpu")[:, None]
    seen, in_order, by_values = {tuple(root)}, deque([(*root, own)]), deque[tuple[Any, int, Tensor]]()
    while in_order or by_values:  # what an index picked comes last, since tables are read by an index too
        node, number, rows = (in_order or by_values).popleft()
        shape = shape_of(Value(node, number))
        if shape and shape[0] == samples and (not ends or node in ends):
            if not (rows.shape[1] == 1 or bool((rows == rows[:, :1]).all())):
                return None
            is_one = rows.numel() > 0 and bool((rows == rows[0, 0]).all())
            return One(int(rows[0, 0])) if is_one else rows[:, 0], Value(node, number)
        other: Any
        for other, at in node.next_functions:
            is_parameter = type(other) is Leaf and isinstance(other.variable, Parameter)
            if other is None or is_parameter or (other, at) in seen:
                continue
            seen.add((other, at))
            below, are_picked = _taken_from(node, number, rows, shape_of(Value(other, at)))
            if below is not None:
                (by_values if are_picked else in_order).append((other, at, below))
    return None


def _taken_from(node: Any, number: int, rows: Tensor, own: Shape) -> tuple[Tensor | None, bool]:
    """The entries on axis 0 of a node's input that entries of its output were taken from, and whether values picked them.

    rows: M K, the output's entries that are asked for    own: the input's shape
    """
    name, out = _name(node), made(node)[number].shape
    if not own:
        return (None if out else rows), False
    if name in ("Select", "Unbind") and not (number_of(node, "dim") or 0) % len(own):
        return torch.full_like(rows, number if name == "Unbind" else number_of(node, "index") or 0) % own[0], False
    if not out:  # made of all entries
        return torch.arange(own[0], device="cpu")[None], False
    if name in ("Index", "UnsafeIndex"):
        by = Indexed(kept_by(node, "indices"), own)
        if by.start:  # axis 0 is left as it is
            return rows, False
        index = by.indices[0].flatten(1) if by.axes > 1 else by.indices[0][:, None]
        return (index[rows.to(index.device)].flatten(1) % own[0], True) if by.dims[0] == 0 else (None, True)
    if name in ("IndexSelect", "Slice") or name in _SPLIT:
        if (number_of(node, "dim") or 0) % len(own):
            return rows, False
        if name == "IndexSelect":
            index = kept_by(node, "index").view(-1)
            return index[rows.to(index.device)], True
        if name == "Slice":
            start, _, step = slice(*(number_of(node, key) for key in ("start", "end", "step"))).indices(own[0])
            return rows * step + start, False
        return rows + sum(part.shape[0] for part in made(node)[:number]), False
    if own[0] == out[0]:
        return rows, False
    if name in _RESHAPE and own[0] and own[0] % out[0] == 0:
        times = own[0] // out[0]
        return (rows[..., None] * times + torch.arange(times, device=rows.device)).flatten(1), False
    is_finer = name in _RESHAPE and own[0] and out[0] % own[0] == 0
    return rows // (out[0] // own[0]) if is_finer else None, False


def fits(trace: Trace, walk: Walk, given: Given, samples: int, nodes: Iterable[int] | None = None) -> bool | None:
    """Whether labels agree with the arguments' samples where these meet parameters; None if none of them is seen there.

    Only nodes that keep memory of an argument are looked at: of ``linear(sin(x))`` nothing is seen.

    nodes: the nodes to look at; those of all uses by default"""
    seen = None
    for k in dict.fromkeys([use.node for use in walk.uses if use.node >= 0]) if nodes is None else nodes:
        label, kind = walk.labels[k][0], trace.kinds[k]
        if not isinstance(label, Owned) or samples == 1 or (kind.keeps_sizes and None not in trace.edges[k]):
            continue  # it has no masks or indices, so all of its operands have a graph then
        is_second = _name(trace.nodes[k]) in _PRODUCTS and trace.edges[k][-1] is None  # then columns are compared
        for orders in _orders(trace.nodes[k], given, samples):
            out = made(trace.nodes[k])[0].shape
            at = [(own, entries(label, out, samples, own.device).expand(*out)) for own in orders]
            found = {_agree(kind, *(x.mT if is_second else x for x in pair)) for pair in at}
            if found == {False}:
                return False
            seen = True if True in found else seen
    return seen


def _orders(node: Any, given: Given, samples: int) -> Iterator[Sequence[Tensor]]:
    """Of each operand that is memory of arguments, the sample of each entry: in each argument that may be meant."""
    for x in operands_of(node):
        if x.layout == torch.strided and (wholes := given.get(x.untyped_storage().data_ptr())) is not None:
            places = [(whole.storage_offset(), whole.shape, whole.stride(), whole.dtype) for whole, _ in wholes]
            itself = [own for own, at in zip(wholes, places) if at == (x.storage_offset(), x.shape, x.stride(), x.dtype)]
            orders = [_order(x, whole, axis, samples) for whole, axis in itself[:1] or wholes]
            if found := [own for own in orders if own is not None]:
                yield found


def _order(x: Tensor, whole: Tensor, axis: int, samples: int) -> Tensor | None:
    """The sample of each entry of x in an argument; None if x is no part of it, or addresses don't show the sample.

    axis: the samples' in the argument"""
    if (x.storage_offset(), x.shape, x.stride()) == (whole.storage_offset(), whole.shape, whole.stride()):
        return torch.arange(samples, device="cpu").view([-1 if d == axis else 1 for d in range(x.ndim)]).expand(x.shape)
    step, others = whole.stride(axis), [(n, s) for d, (n, s) in enumerate(zip(whole.shape, whole.stride())) if d != axis]
    within = sum((n - 1) * stride for n, stride in others if stride < step)
    if within >= step or any(stride % (step * samples) for n, stride in others if n > 1 and stride >= step):
        return None
    # A part of complex numbers has a stride of its own.
    unit, of_whole = x.element_size(), whole.element_size()
    start = x.storage_offset() * unit - whole.storage_offset() * of_whole
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) * unit
    if start < 0 or start + last >= of_whole * (1 + sum((n - 1) * s for n, s in zip(whole.shape, whole.stride()))):
        return None
    place = torch.tensor(start, device="cpu")
    for d, (size, stride) in enumerate(zip(x.shape, x.stride())):
        place = place + (torch.arange(size, device="cpu") * (stride * unit)).view(
            [-1 if k == d else 1 for k in range(x.ndim)]
        )
    return place // (step * of_whole) % samples


def _agree(kind: Kind, own: Tensor, found: Tensor) -> bool | None:
    """Whether labels at a node's output are those of an argument that it took; None if nothing shows it.

    own, found: the sample of each entry of the argument, and of the output"""
    name = kind.name.split("Backward")[0]
    if not (own.numel() and found.numel()):
        return True
    if bool((found < 0).all()):
        return None
    if name in _BY_ROWS and own.ndim and found.shape[:1] == own.shape[:1]:
        own, found = own.reshape(len(own), -1), found.reshape(len(own), -1)
        return bool((own == own[:, :1]).all() and ((found == own[:, :1]) | (found < 0)).all())
    if name == node_name("embedding") and own.shape == found.shape[:-1]:
        found = found[..., 0]
    elif not (kind.is_entrywise or name == node_name("native_layer_norm")) or own.shape != found.shape:
        return None
    return bool(((found == own) | (found < 0)).all())
