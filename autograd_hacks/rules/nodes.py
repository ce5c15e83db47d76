"""The J of nodes of autograd's graph at which parameters meet the batch: {node name: formula of its saved tensors and the
arriving gradient}.  For a node without a formula, `by_node` calls the node itself, once for each sample."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import SamplesMixed
from autograd_hacks.forms import Dense, Form, gathered
from autograd_hacks.forms.experts import of_experts
from autograd_hacks.rules.conv import convolution, transposed_convolution
from autograd_hacks.rules.embedding import lookup, refuse_scaling_by_frequency
from autograd_hacks.rules.linear import added, product
from autograd_hacks.support.graph import Value, kept_by, put_back_by
from autograd_hacks.support.layout import POSITIONS, Layout
from autograd_hacks.support.sweep import Grads, call_node, outside_passes, sweep
from autograd_hacks.support.switch import NO_TASK, current_task


class Kept:
    """The saved values of a node, by name.  ready: applied to its tensors before they are used"""

    def __init__(self, node: Any, ready: Callable[[Tensor], Tensor] = Tensor.detach) -> None:
        self._node, self._ready = node, ready

    def __getitem__(self, name: str) -> Any:
        value = kept_by(self._node, name)
        return self._ready(value) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Met:
    """One use of a value of parameters, as a formula gets it.

    kept: the node's saved values, by name
    grad: the gradient at the node's only output
    layout: where the samples are in the gradient
    samples: N
    place: the number of the node's input that is the value
    shape: the value's shape
    """

    kept: Kept
    grad: Tensor
    layout: Layout
    samples: int
    place: int
    shape: torch.Size

    def grad_times(self, name: str) -> Tensor:
        """The gradient times the number by which the value was multiplied, which is usually 1."""
        factor = self.kept[name].conjugate()  # as in gradients
        return self.grad if factor == 1 else self.grad * factor

    def first(self, x: Tensor) -> Tensor:
        """A tensor with the gradient's layout, with samples first: N ..."""
        return self.layout.samples_first(x, self.samples)

    def summed(self, x: Tensor) -> Form | None:
        """x: of the gradient's shape.  Each entry is added to the entry of the value that was broadcast there."""
        sizes = [1] * (x.ndim - len(self.shape)) + list(self.shape)
        taken = 2 if self.layout.fold == POSITIONS else 1  # how many axes the samples take
        if any(size != 1 for size in sizes[self.layout.axis : self.layout.axis + taken]):
            return None  # the value has an entry for each sample
        rows = self.first(x)
        if self.layout.fold in ("", POSITIONS):  # else the positions are where the folded axis was
            del sizes[self.layout.axis : self.layout.axis + taken]
        over = [n + 1 for n, size in enumerate(sizes) if size == 1 and rows.shape[n + 1] != 1]
        return Dense((rows.sum(over) if over else rows).reshape(self.samples, *self.shape))


Formula = Callable[[Met], Form | None]
"""The value's form; None if the case isn't covered."""


def matrix_product(met: Met, names: Sequence[str | None]) -> Form | None:
    """y = x W or y = W x for two matrices, possibly with an addend.

    names: for each input of the node, the name under which it is saved; None for the addend
    """
    name = names[met.place]
    if name is None:
        return met.summed(met.grad_times("beta"))
    on_right = met.place == len(names) - 1
    if met.layout.axis != (0 if on_right else 1):
        return None
    other = met.kept[next(n for n in names if n not in (None, name))]
    x, g = met.first(other).conj(), met.first(met.grad_times("alpha") if len(names) > 2 else met.grad)
    if on_right:
        return product(x, g, met.shape, gradient=1)
    x, g = (y.mT if y.ndim > 2 else y for y in (x, g))
    return product(g, x, met.shape)


def batched_product(met: Met) -> Form | None:
    """y[b] = x[b] W[b] or W[b] x[b], with the samples on an axis of the other matrix."""
    on_right = met.place == 1
    if met.layout.axis != (1 if on_right else 2):
        return None
    x, g = met.first(met.kept["self" if on_right else "mat2"]).conj(), met.first(met.grad)
    if met.layout.fold:  # (N, B, T, ·), or (N, B, ·, T)
        return Dense(x.mT @ g if on_right else g @ x.mT)
    return Dense(x[..., :, None] * g[..., None, :] if on_right else g[..., :, None] * x[..., None, :])


def matrix_vector(met: Met) -> Form | None:
    """y = x v."""
    if met.place == 0:
        return None
    x, g = met.first(met.kept["self"]).conj(), met.first(met.grad)[..., None]
    return Dense(x * g if x.ndim == 2 else (x * g).sum(1))


def table(met: Met, index: Tensor, padding_idx: int | None = None) -> Form | None:
    """Rows of a table."""
    if met.place or met.layout.axis >= index.ndim or index.dtype not in (torch.int64, torch.int32):
        return None
    entries = met.shape[0]
    return lookup(met.first(index) % entries, met.first(met.grad), met.shape, padding_idx)


def embedding(met: Met) -> Form | None:
    refuse_scaling_by_frequency(met.kept["scale_grad_by_freq"])
    padding = met.kept["padding_idx"]  # unsigned: -1 means that there is none
    return table(met, met.kept["indices"], padding if padding < met.shape[0] else None)


def indexed(met: Met) -> Form | None:
    """Entries selected on the first axes: the indices are combined to one index of these axes, flattened."""
    given = list(met.kept["indices"])
    while given and given[-1] is None:
        given.pop()
    if not given or any(x is None or x.dtype not in (torch.int64, torch.int32) for x in given):
        return None
    sizes = met.shape[: len(given)]
    index = torch.zeros((), dtype=torch.int64, device=met.grad.device)
    for x, size in zip(given, sizes):
        index = index * size + x % size
    flat = torch.Size((sizes.numel(), *met.shape[len(given) :]))
    form = table(replace(met, shape=flat), index)
    return None if form is None else form if len(given) == 1 else Dense(form.dense().reshape(met.samples, *met.shape))


def index_select(met: Met) -> Form | None:
    return table(met, met.kept["index"]) if met.kept["dim"] == 0 else None


def product_of(x: Tensor, *factors: Tensor, is_new: bool = True) -> Tensor:
    """A product of tensors of one shape, written into x if nothing else uses x and no gradient is needed.

    is_new: whether x was made for this product
    """
    for factor in factors:
        in_place = is_new and not torch.is_grad_enabled() and torch.result_type(x, factor) == x.dtype
        x, is_new = (x.mul_(factor) if in_place else x * factor), True
    return x


def layer_norm(met: Met, mean: str | None, scale: str) -> Form | None:
    """y = x̂ · weight + bias, on the last axes.  mean, scale: names of the saved mean and scale of the normalisation"""
    last = len(met.kept["normalized_shape"])
    if met.layout.axis + (met.layout.fold == POSITIONS) >= met.grad.ndim - last:
        return None
    if met.place == 2:
        return added(met.first(met.grad), last)
    x = met.kept["input"] if mean is None else met.kept["input"] - met.kept[mean]
    return added(met.first(product_of(x, met.kept[scale], met.grad, is_new=mean is not None)), last)


def group_norm(met: Met) -> Form | None:
    """y = x̂ · weight + bias, by channel, which is axis 1."""
    if met.layout.axis:
        return None
    x, g = met.kept["input"], met.grad
    if met.place == 1:
        groups = x.reshape(len(x), met.kept["group"], -1)
        normal = groups - met.kept["result1"][..., None]
        g = product_of(product_of(normal, met.kept["result2"][..., None]).reshape(x.shape), g)
    return _by_sample(met, added(g))


def batch_norm(met: Met) -> Form | None:
    if met.layout.axis or (met.kept["training"] and met.samples == 1):
        return None
    if met.kept["training"]:
        raise SamplesMixed(
            "normalises with statistics of the batch (training=True), so its samples have no gradients of their own. "
            "Use training=False, or group_norm."
        )
    g, x = met.grad, met.kept["input"]
    if met.place == 1:
        mean, var = met.kept["running_mean"], met.kept["running_var"]
        centred = product_of(x - mean.view(1, -1, *[1] * (x.ndim - 2)), g)
        return _by_sample(met, Dense(added(centred).dense() * (var + met.kept["eps"]).rsqrt()))
    return _by_sample(met, added(g))


def _by_sample(met: Met, form: Form) -> Form:
    """form: of M rows, where M is N·T, T·N or N."""
    if not met.layout.fold:
        return form
    return gathered(form, met.layout.rows(form.samples, met.samples, met.grad.device), met.samples)


def convolved(met: Met) -> Form | None:
    if met.layout.axis:
        return None
    if met.place == 2:
        return _by_sample(met, added(met.grad))
    axes = len(met.shape) - 2
    settings = [(tuple(met.kept[name]) * axes)[:axes] for name in ("stride", "padding", "dilation")]  # some have one number
    make = transposed_convolution if met.kept["transposed"] else convolution
    return _by_sample(met, make(met.kept["input"].conj(), met.grad, met.shape, (*settings, met.kept["groups"])))


def prelu(met: Met) -> Form | None:
    x = met.kept["self"]
    return met.summed(torch.where(x > 0, 0, met.grad * x)) if met.place == 1 else None


def repeat(met: Met) -> Form | None:
    """The value, repeated along each axis."""
    times = list(met.kept["repeats"])
    sizes = [1] * (len(times) - len(met.shape)) + list(met.shape)
    if met.layout.fold or sizes[met.layout.axis] != 1:
        return None
    split = met.grad.reshape([n for pair in zip(times, sizes) for n in pair])
    axis = 2 * met.layout.axis
    rows = split.movedim(axis, 0)
    over = [n + 1 if n < axis else n for n in range(0, split.ndim, 2) if n != axis]
    return Dense((rows.sum(over) if over else rows).reshape(met.samples, *met.shape))


def grouped_product(met: Met, owners: Tensor) -> Form | None:
    """y = x W[e], where expert e has the rows from offs[e - 1] to offs[e].  x: M I    W: E I O"""
    x, g, ends = met.kept["self"].conj(), met.grad, met.kept["offs"]
    if met.place != 1 or x.ndim != 2 or len(met.shape) != 3 or ends is None:
        return None
    return of_experts(x, g, ends, owners, met.samples)


def divided(met: Met) -> Form | None:
    other = met.kept["other"].conj()
    return met.summed(met.grad / other if met.place == 0 else -met.grad * met.kept["self"].conj() / other.square())


NODES: dict[str, Formula] = {
    "AddmmBackward0": partial(matrix_product, names=(None, "mat1", "mat2")),
    "MmBackward0": partial(matrix_product, names=("self", "mat2")),
    "BmmBackward0": batched_product,
    "MvBackward0": matrix_vector,
    "MulBackward0": lambda met: met.summed(met.grad * met.kept["self" if met.place else "other"].conj()),
    "AddBackward0": lambda met: met.summed(met.grad_times("alpha") if met.place else met.grad),
    "SubBackward0": lambda met: met.summed(-met.grad_times("alpha") if met.place else met.grad),
    "DivBackward0": divided,
    "ExpandBackward0": lambda met: met.summed(met.grad),
    "RepeatBackward0": repeat,
    "EmbeddingBackward0": embedding,
    "IndexBackward0": indexed,
    "IndexSelectBackward0": index_select,
    "NativeLayerNormBackward0": partial(layer_norm, mean="result1", scale="result2"),
    "FusedRmsNormBackward0": partial(layer_norm, mean=None, scale="result1"),
    "NativeGroupNormBackward0": group_norm,
    "NativeBatchNormBackward0": batch_norm,
    "ConvolutionBackward0": convolved,
    "PreluKernelBackward0": prelu,
}
"""{node name: formula}"""

BY_POSITION = frozenset(
    (
        "MulBackward0", "AddBackward0", "SubBackward0", "DivBackward0", "ExpandBackward0", "EmbeddingBackward0",
        "NativeLayerNormBackward0", "FusedRmsNormBackward0",
    )
)  # fmt: skip
"""Nodes whose formula also works if each position is a row, on two axes."""

OF_NODES = frozenset(
    (
        nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d,
        nn.BatchNorm3d,
    )
)  # fmt: skip
"""Layers that are a single node with a formula here."""

BY_OWNERS: dict[str, Callable[[Met, Tensor], Form | None]] = {"GroupedMmBackward0": grouped_product}
"""Formulas that get the sample of each row of the gradient, M, and return rows by sample."""


def by_node(
    node: Any, place: int, grads: Sequence[Tensor | None], owners: Sequence[Tensor | None], samples: int, shape: torch.Size
) -> Tensor:
    """The rows of any value, ``(N, *shape)``, from the node's own derivative for each sample's part of the gradients.

    grads: at each output of the node
    owners: the sample of each entry
    place: the number of the node's input that is the value
    """

    def rows() -> list[Tensor | None]:
        found, put_back = list[Tensor | None](), put_back_by(node)
        for n in range(samples):
            parts = [None if g is None or own is None else g.where(own == n, 0) for g, own in zip(grads, owners)]
            made = call_node(node, parts)
            found.append(None if made is None else made[place])
            put_back()
        return found

    found = rows()
    if any(row is None for row in found) and current_task() != NO_TASK:  # the pass doesn't need the value's gradient
        found = outside_passes(rows)
    like = next(g for g in grads if g is not None)
    return torch.stack([like.new_zeros(shape) if row is None else row.to_dense().sum_to_size(shape) for row in found])


def carried_back(value: Value, rows: Tensor, leaves: Mapping[Any, str]) -> dict[str, Tensor]:
    """The parameters' rows, by name, from the rows of a value computed from them: row by row through the nodes between.

    leaves: the parameters' names, by the node at which each ends the graph
    """
    found: dict[str, Tensor] = {}

    def arrive(node: Any, passes: list[Grads]) -> None:
        if node in leaves:
            like = node.variable
            found[leaves[node]] = torch.stack([torch.zeros_like(like) if own is None else own for (own,) in passes])

    def run() -> None:
        sweep({value: list(rows)}, arrive)

    if current_task() == NO_TASK:
        run()
    else:  # the running pass may not need some gradients on the way
        outside_passes(run)
    return {name: found.get(name, rows.new_zeros(len(rows), *leaf.variable.shape)) for leaf, name in leaves.items()}
