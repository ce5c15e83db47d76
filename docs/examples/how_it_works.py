"""
How it works: the library in one file
=====================================

The library from scratch, on one small model.  Hooks note what a layer saw.  Autograd's graph shows what the forward did, and
a law for each kind of node says which sample each gradient belongs to.  A formula makes each sample's gradient of what was
noted.  Norms and clipped sums are computed without writing the gradients out.  At the end the library itself runs, and
everything is compared with one backward pass for each sample. ::

    pip install matplotlib tqdm
    python how_it_works.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/how_it_works.png'

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib import colormaps
from torch import Tensor
from torch.autograd.graph import GradientEdge
from tqdm import tqdm

import autograd_hacks

torch.manual_seed(0)
check_same = torch.testing.assert_close  # raises where tensors differ

# %%
# One layer, by hooks
# -------------------
# The gradient of a linear layer's weight is Σₙ gₙ ⊗ xₙ, where x is the layer's input and g the gradient of the loss at its
# output.  The gradient of each sample's own loss is the same product without the sum.  So it is enough to keep x and g: a
# forward hook records x, and a hook on the node that made the output records g during the backward pass.

layer, seen = nn.Linear(3, 2), dict[str, Any]()


def record(layer: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
    seen["x"] = args[0].detach()
    output.grad_fn.register_prehook(lambda grads: seen.update(g=grads[0]))


layer.register_forward_hook(record)
layer(torch.randn(5, 3)).square().sum().backward()
check_same(torch.einsum("no,ni->oi", seen["g"], seen["x"]), layer.weight.grad)  # what autograd computes
one_each = torch.einsum("no,ni->noi", seen["g"], seen["x"])  # without the sum: five gradients

# %%
# A model that is more than layers
# --------------------------------
# Its table of tokens is also the weight of the last product.  Its positions and its gain belong to no layer.

N, T = 6, 5  # samples, tokens


class Model(nn.Module):
    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(11, 8), nn.Parameter(torch.randn(T, 8))
        self.first, self.gain = nn.Linear(8, 16), nn.Parameter(torch.zeros(16))
        self.norm, self.last, self.mixes = nn.LayerNorm(16), nn.Linear(16, 8), mixes

    def forward(self, ids: Tensor) -> Tensor:
        h = self.first(self.table(ids) + self.place).relu() * (1 + self.gain)
        if self.mixes:
            h = h - h.mean(0)  # makes each sample's output depend on all samples
        return F.linear(self.last(self.norm(h)).mean(1), self.table.weight)


model, ids, targets = Model(), torch.randint(11, (N, T)), torch.randint(11, (N,))
output = model(ids)
losses = F.cross_entropy(output, targets, reduction="none")

# %%
# Labels: whose is a gradient?
# ----------------------------
# Autograd's graph records what the forward did.  A node is one operation.  Its ``next_functions`` lead to the nodes that
# made its inputs, and end at the leaves, which are parameters.  In the backward pass a gradient of the output's shape
# arrives at each node.  A *label* says which sample each of its entries belongs to.


class At(NamedTuple):
    """Entry i along the axis belongs to sample i // each."""

    axis: int
    each: int = 1


SUM = "several samples contribute to each entry"
Label = At | str


def owners(x: Tensor, at: At) -> Tensor:
    """The sample of each entry."""
    samples = torch.arange(x.shape[at.axis]) // at.each
    return samples.view(-1, *[1] * (x.ndim - at.axis - 1)).expand_as(x)


# %%
# A law for each kind of node
# ---------------------------
# A law takes the label of the gradient at a node's output, and gives the label at one of its inputs.  It reads sizes and
# a few numbers that the node keeps, and no values.  A sum over the axis that has the samples gives SUM.


def shape_of(node: Any) -> torch.Size:
    return torch.Size(node._input_metadata[0].shape)  # here each node makes one tensor


def elementwise(node: Any, at: At, place: int) -> Label:
    """The input is broadcast: what it lacks in axes, or repeats, is summed over."""
    shape, given = shape_of(node), shape_of(node.next_functions[place][0])
    axis = at.axis - len(shape) + len(given)
    return At(axis, at.each) if axis >= 0 and given[axis] == shape[at.axis] else SUM


def view(node: Any, at: At, place: int) -> Label:
    """Each sample keeps its stretch of memory."""
    entries, row = at.each * prod(shape_of(node)[1:]), prod(node._saved_self_sym_sizes[1:])
    return At(0, entries // row) if at.axis == 0 and entries % row == 0 else SUM


def mean(node: Any, at: At, place: int) -> Label:
    """The reduced axes return."""
    axis = at.axis
    for reduced in sorted(node._saved_dim):
        axis += reduced <= axis
    return At(axis, at.each)


def product(node: Any, at: At, place: int) -> Label:
    """y = x W: x has the rows of y, W the columns."""
    return at if at.axis == place else SUM


def layer_norm(node: Any, at: At, place: int) -> Label:
    return elementwise(node, at, place) if at.axis < len(shape_of(node)) - len(node._saved_normalized_shape) else SUM


LAWS: dict[str, Callable[[Any, At, int], Label]] = {
    "AddBackward0": elementwise,
    "SubBackward0": elementwise,
    "MulBackward0": elementwise,
    "ReluBackward0": elementwise,
    "ViewBackward0": view,
    "MeanBackward1": mean,
    "MmBackward0": product,
    "AddmmBackward0": lambda node, at, place: product(node, at, place - 1) if place else elementwise(node, at, 0),
    "NativeLayerNormBackward0": layer_norm,
    "EmbeddingBackward0": lambda node, at, place: SUM,  # each row of the table is summed over all its readers
}

# %%
# From the output down
# --------------------
# The walk begins at the output, whose axis 0 has the samples, and applies the laws node by node.  It meets two kinds of
# SUM.  If the value behind it is made of parameters alone (a parameter, or one behind a transposition or ``1 + gain``), this
# is a *use*: here the parameter meets the batch, and each sample's part of the sum is a row.  Otherwise samples mix.
#
# The library finds the output's axis by trying: the labels must arrive at the arguments in their order.  It has laws for
# operations that move entries by a saved tensor, such as an index, and asks the node itself if there is no law.  It walks
# a graph once: a graph with equal nodes, sizes and saved values has equal labels, so they are looked up.


class Use(NamedTuple):
    """A place where a parameter meets the batch."""

    name: str
    leaf: Any  # where the parameter ends the graph
    value: Any  # the node that computed the value that is used; the leaf if that is the parameter itself
    node: Any  # the node that takes it
    place: int  # the value's place among the node's inputs
    at: At  # the label of the gradient at the node's output


def is_fixed(node: Any) -> bool:
    """Whether a value is made of parameters alone: no node behind it keeps a tensor."""
    kept = (getattr(node, name) for name in dir(type(node)) if name.startswith("_saved_"))
    return not any(isinstance(x, Tensor) for x in kept) and all(is_fixed(own) for own, _ in node.next_functions if own)


def in_order(node: Any, found: dict[Any, None]) -> dict[Any, None]:
    """All nodes, each behind those that it leads to."""
    for behind, _ in node.next_functions:
        if behind is not None and behind not in found:
            in_order(behind, found)
    found[node] = None
    return found


def walk(model: nn.Module, output: Tensor) -> tuple[list[Use], set[str]]:
    """The uses, and the parameters behind a place where samples mix."""
    names = {p: name for name, p in model.named_parameters()}
    labels, uses, mixed = dict[Any, Label]({output.grad_fn: At(0)}), list[Use](), set[str]()
    for node in reversed(in_order(output.grad_fn, {})):
        at = labels.get(node)
        if at is None or is_fixed(node):
            continue
        for place, (behind, _) in enumerate(node.next_functions):
            if behind is None:
                continue
            label = LAWS[node.name()](node, at, place) if isinstance(at, At) else SUM
            if label == SUM:
                below = [own for own in in_order(behind, {}) if getattr(own, "variable", None) in names]
                if isinstance(at, At) and is_fixed(behind):
                    uses += [Use(names[leaf.variable], leaf, behind, node, place, at) for leaf in below]
                else:
                    mixed |= {names[leaf.variable] for leaf in below}
            labels[behind] = label if labels.get(behind, label) == label else SUM
    return uses, mixed


uses, mixed = walk(model, output)
for use in uses:
    between = "" if use.value is use.leaf else f", behind {use.value.name()}"
    print(f"{use.name:12} meets the batch at {use.node.name()}{between}")

mixing = Model(mixes=True)
_, mixed_here = walk(mixing, mixing(ids))
print(f"\nwith h - h.mean(0) samples mix at {', '.join(sorted(mixed_here))}")
if (mixed, mixed_here) != (set(), {"table.weight", "place", "first.weight", "first.bias", "gain"}):
    raise RuntimeError("the labels are wrong")

# %%
# Are the labels right?
# ---------------------
# One backward pass from each sample's own output shows it: gradient may arrive only at that sample's entries.

measured = {use: torch.full(shape_of(use.node), -1) for use in uses}


def note(whose: Tensor, n: int, grads: tuple[Tensor, ...]) -> None:
    whose[grads[0] != 0] = n


for n in range(N):
    hooks = [use.node.register_prehook(partial(note, whose, n)) for use, whose in measured.items()]
    torch.autograd.grad(output[n].square().sum(), list(model.parameters()), retain_graph=True)
    for hook in hooks:
        hook.remove()
for use, whose in measured.items():
    check_same(whose, owners(whose, use.at).masked_fill(whose < 0, -1))

# %%
# Forms: gradients that are not written out
# -----------------------------------------
# The samples' gradients of one parameter are the rows of a matrix J.  A form keeps the factors of J, and has a few methods.
# For sums of outer products, ‖Σₜ lₜ ⊗ rₜ‖² = Σₛₜ (lₛ · lₜ)(rₛ · rₜ) needs two T by T matrices for each sample, and Σₙ wₙ Jₙ
# is one product.


class Dense(NamedTuple):
    """J itself.  rows: (N, *shape)"""

    rows: Tensor

    def dense(self) -> Tensor:
        return self.rows

    def norms(self) -> Tensor:
        return self.rows.flatten(1).norm(dim=1)

    def weighted_sum(self, w: Tensor) -> Tensor:
        return torch.einsum("n,n...->...", w, self.rows)


class Outer(NamedTuple):
    """Row n is Σₜ left[n, t] ⊗ right[n, t].  left: N T O    right: N T I"""

    left: Tensor
    right: Tensor

    def dense(self) -> Tensor:
        return torch.einsum("nto,nti->noi", self.left, self.right)

    def norms(self) -> Tensor:
        return (self.left @ self.left.mT * (self.right @ self.right.mT)).sum((1, 2)).clamp(min=0).sqrt()

    def weighted_sum(self, w: Tensor) -> Tensor:
        return torch.einsum("n,nto,nti->oi", w, self.left, self.right)


Form = Dense | Outer

# %%
# A formula for each kind of use
# ------------------------------
# It computes a form from what the node keeps and from g.  A node without a formula, here the layer norm, is called with one
# sample's part of g at a time, which the label identifies.  (For layers the library notes x and g by hooks on the layer
# instead.)


def outer(x: Tensor, g: Tensor, at: At) -> Form:
    """y = x W.  x: N·T I    g: N·T O"""
    return Outer(x.unflatten(0, (N, at.each)), g.unflatten(0, (N, at.each)))


def broadcast(x: Tensor, at: At, shape: torch.Size) -> Form:
    """x: N *T *shape, the gradient at each copy of the value, which was broadcast."""
    return Dense(x.movedim(at.axis, 0).reshape(N, -1, *shape).sum(1))


def lookup(node: Any, g: Tensor, shape: torch.Size) -> Form:
    """y[n, t] = W[ids[n, t]]"""
    sample = torch.arange(N)[:, None].expand_as(node._saved_indices)
    return Dense(torch.zeros(N, *shape).index_put((sample, node._saved_indices), g, accumulate=True))


FORMULAS: dict[str, Callable[[Any, Tensor, At, int, torch.Size], Form]] = {
    "AddmmBackward0": lambda node, g, at, place, shape: outer(node._saved_mat1, g, at) if place else broadcast(g, at, shape),
    "MmBackward0": lambda node, g, at, place, shape: outer(node._saved_self, g, at),
    "MulBackward0": lambda node, g, at, place, shape: broadcast(
        g * (node._saved_self if place else node._saved_other), at, shape
    ),
    "AddBackward0": lambda node, g, at, place, shape: broadcast(g, at, shape),
    "EmbeddingBackward0": lambda node, g, at, place, shape: lookup(node, g, shape),
}


def form_of(use: Use, g: Tensor) -> Form:
    if use.node.name() in FORMULAS:
        form = FORMULAS[use.node.name()](use.node, g, use.at, use.place, shape_of(use.value))
    else:
        whose = owners(g, use.at)
        form = Dense(torch.stack([use.node(g.where(whose == n, 0))[use.place] for n in range(N)]))
    if use.value is use.leaf:
        return form
    if use.value.name() == "TBackward0" and isinstance(form, Outer):
        return Outer(form.right, form.left)  # the parameter is the transposed value
    edge, p = GradientEdge(use.value, 0), use.leaf.variable  # from there to the parameter, row by row
    return Dense(torch.stack([torch.autograd.grad(edge, p, row, retain_graph=True)[0] for row in form.dense()]))


# %%
# The user's own backward pass
# ----------------------------
# A hook at each use computes the form as soon as g arrives, because the pass frees what nodes keep.  The table is used
# twice, and its rows are the sums of both uses.  At the end a check that costs no row: along random directions u and v, the
# rows must add up to the gradient that arrived.  Gradient from elsewhere, such as a penalty, would fail here.

forms = dict[str, Form]()


def take(use: Use, grads: tuple[Tensor, ...]) -> None:
    form, before = form_of(use, grads[0]), forms.get(use.name)
    forms[use.name] = form if before is None else Dense(before.dense() + form.dense())


for use in uses:
    use.node.register_prehook(partial(take, use))
losses.sum().backward()

names = dict(model.named_parameters())
for name, p in names.items():
    form = forms[name]
    if isinstance(form, Outer) and p.grad is not None:  # Σₙₜ (lₙₜ · u)(rₙₜ · v)
        u, v = torch.randn(form.left.shape[-1]), torch.randn(form.right.shape[-1])
        check_same(((form.left @ u) * (form.right @ v)).sum(), u @ p.grad @ v, rtol=1e-4, atol=1e-5)

norms = torch.stack([form.norms() for form in forms.values()]).norm(dim=0)
weights = (1 / norms).clamp(max=1)  # clips each sample's gradient to length 1
clipped = {name: form.weighted_sum(weights) for name, form in forms.items()}

# %%
# The same by the library, and one sample at a time
# -------------------------------------------------

alone = list[tuple[Tensor, ...]]()
for n in tqdm(range(N), desc="one backward pass for each sample"):
    loss = F.cross_entropy(model(ids[n : n + 1]), targets[n : n + 1])
    alone.append(torch.autograd.grad(loss, list(names.values())))
rows = {name: torch.stack(own) for name, own in zip(names, zip(*alone))}

autograd_hacks.add_hooks(model)
F.cross_entropy(model(ids), targets, reduction="sum").backward()
grads = autograd_hacks.per_sample_grads(model, loss_type="sum")
print(f"\n{autograd_hacks.describe(model)}")

lengths = torch.cat([own.flatten(1) for own in rows.values()], 1).norm(dim=1)
sums = {name: torch.einsum("n,n...->...", weights, own) for name, own in rows.items()}
here = ({name: form.dense() for name, form in forms.items()}, norms, clipped)
for found in (here, (grads.dense(), grads.norms(), grads.weighted_sum(weights))):
    check_same(found, (rows, lengths, sums))
print("\nThis file, the library and one backward pass for each sample agree.")

autograd_hacks.add_hooks(mixing)
mixing(ids).square().sum().backward()
try:
    autograd_hacks.compute_grad1(mixing)
    raise RuntimeError("rows of samples that mix were returned")
except autograd_hacks.errors.SamplesMixed as refused:
    print(refused)

# %%
# The labels in a picture
# -----------------------
# The gradient where ``first.weight`` meets the batch has a row for each token.  Each sample has a color.  On the left is
# what the laws say, on the right what one backward pass for each sample shows, where zeros are white.

plt.rc("font", size=12)
figure, axes = plt.subplots(1, 2, figsize=(6, 4.4), sharey=True, layout="constrained")
colors = colormaps["Set2"].with_extremes(bad="white")
use = next(use for use in uses if use.name == "first.weight")
pictures = owners(measured[use], use.at), measured[use]
for axis, title, whose in zip(axes, ("by laws", "by N backward passes"), pictures):
    axis.imshow(whose.float().masked_fill(whose < 0, torch.nan), cmap=colors, vmin=0, vmax=7, aspect="auto")
    axis.set(title=title, xlabel="outputs of the first layer")
axes[0].set_ylabel("tokens, sample after sample")
plt.show()
