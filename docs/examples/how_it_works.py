"""
How it works: the library in one file
=====================================

The library from scratch, on one small model.  Hooks record what a layer saw.  Autograd's graph shows where any other
parameter meets the batch.  A second backward pass shows which sample each gradient belongs to.  Norms and clipped sums are
computed without writing the gradients out.  At the end the library itself runs, and everything is compared with one
backward pass for each sample. ::

    pip install matplotlib tqdm
    python how_it_works.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/how_it_works.png'

from collections.abc import Callable
from functools import partial
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
# Where parameters meet the batch
# -------------------------------
# Autograd's graph records what the forward did.  A node is one operation.  Its ``next_functions`` lead to the nodes that
# made its inputs, and end at the leaves, which are parameters.  From a leaf towards the output, the first node that also
# depends on the batch is a *meeting*: it keeps x, and g arrives there.  Between leaf and meeting are functions of parameters
# only, such as a transposition or ``1 + gain``.  They do not depend on any sample.


class Use(NamedTuple):
    """A place where a parameter meets the batch."""

    name: str
    leaf: Any  # where the parameter ends the graph
    value: Any  # the node that computed the value that is used; the leaf if that is the parameter itself
    node: Any  # the meeting
    place: int  # the value's place among the meeting's inputs


def takers_in(output: Tensor) -> dict[Any, list[tuple[Any, int]]]:
    """For each node, the nodes that take its result, and as which input.  (Here each node makes one tensor.)"""
    takers, waiting = dict[Any, list[tuple[Any, int]]](), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        for place, (behind, _) in enumerate(() if node is None else node.next_functions):
            waiting += [behind] if behind not in takers else []
            takers.setdefault(behind, []).append((node, place))
    return takers


def follows(node: Any, batch: Tensor) -> bool:
    """Whether a node depends on the batch: it keeps a part of the batch, or a node behind it does."""
    kept = (getattr(node, name) for name in dir(type(node)) if name.startswith("_saved_"))
    memory = {x.untyped_storage().data_ptr() for x in kept if isinstance(x, Tensor)}
    behind = (other for other, _ in node.next_functions if other is not None)
    return batch.untyped_storage().data_ptr() in memory or any(follows(other, batch) for other in behind)


def uses_in(model: nn.Module, output: Tensor, batch: Tensor) -> list[Use]:
    """Climbs from each parameter's leaf to its meetings."""
    takers, names = takers_in(output), {p: name for name, p in model.named_parameters()}
    found, waiting = [], [(leaf, leaf) for leaf in takers if getattr(leaf, "variable", None) in names]
    while waiting:
        leaf, value = waiting.pop()
        for node, place in takers[value]:
            if follows(node, batch):
                found.append(Use(names[leaf.variable], leaf, value, node, place))
            else:
                waiting.append((leaf, node))
    return found


uses = uses_in(model, output, ids)
for use in uses:
    between = "" if use.value is use.leaf else f", behind {use.value.name()}"
    print(f"{use.name:12} meets the batch at {use.node.name()}{between}")

# %%
# Which sample does each entry belong to?
# ---------------------------------------
# One pass starts at the output with random numbers G, another with w ∘ G, where each sample n has a different power of two
# wₙ.  A backward pass is linear, and multiplying by a power of two loses no digit.  So an entry that depends only on sample
# n is wₙ times as large in the second pass, *to the last bit*.  If it is wₙ times as large for no n, samples mix in it.
# (The library calls the nodes itself, without running other hooks.  It distinguishes more than 32 samples by the digits of
# their numbers, with a pass for each digit.)

NOBODY, SEVERAL = -2, -1
w, G = 2.0 ** (torch.arange(N) - N // 2), torch.randn(N, 11)


def owners(x: Tensor, y: Tensor) -> Tensor:
    """The sample that each entry belongs to.  x: from G    y: from w ∘ G"""
    whose = torch.full(x.shape, SEVERAL)
    for n in range(N):
        whose[y == w[n] * x] = n
    return whose.masked_fill(x == 0, NOBODY)


def labels_of(output: Tensor, uses: list[Use]) -> dict[Use, Tensor]:
    """The owners of the gradients at the meetings."""
    found: list[list[Tensor]] = [[] for _ in uses]
    hooks = [use.node.register_prehook(lambda grads, own=own: own.append(grads[0])) for use, own in zip(uses, found)]
    for given in (G, w[:, None] * G):
        torch.autograd.grad(output, [use.leaf.variable for use in uses], given, retain_graph=True)
    for hook in hooks:
        hook.remove()
    return {use: owners(x, y) for use, (x, y) in zip(uses, found)}


mixing = Model(mixes=True)
output_of_mixing = mixing(ids)
labels, labels_of_mixing = labels_of(output, uses), labels_of(output_of_mixing, uses_in(mixing, output_of_mixing, ids))
mixed = [{use.name for use, whose in own.items() if (whose == SEVERAL).any()} for own in (labels, labels_of_mixing)]
print(f"\nwith h - h.mean(0) samples mix at {', '.join(sorted(mixed[1]))}")
if mixed != [set(), {"table.weight", "place", "first.weight", "first.bias", "gain"}]:
    raise RuntimeError("the labels are wrong")

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
# Rows at a meeting
# -----------------
# A formula for each kind of node computes a form from what the node keeps and from g.  A node without a formula, here the
# layer norm, is called with one sample's part of g at a time, which the labels identify.  (For layers the library uses hooks
# instead.)


def product(x: Tensor, g: Tensor) -> Form:
    """y = x W.  x: N·T I    g: N·T O"""
    return Outer(x.reshape(N, -1, x.shape[1]), g.reshape(N, -1, g.shape[1]))


def broadcast(x: Tensor, shape: torch.Size) -> Form:
    """x: N *T *shape, the gradient at each copy of the value, which was broadcast."""
    return Dense(x.reshape(N, -1, *shape).sum(1))


def embedding(node: Any, g: Tensor, place: int, shape: torch.Size) -> Form:
    """y[n, t] = W[ids[n, t]]"""
    sample = torch.arange(N)[:, None].expand_as(node._saved_indices)
    return Dense(torch.zeros(N, *shape).index_put((sample, node._saved_indices), g, accumulate=True))


FORMULAS: dict[str, Callable[[Any, Tensor, int, torch.Size], Form]] = {
    "AddmmBackward0": lambda node, g, place, shape: product(node._saved_mat1, g) if place else broadcast(g, shape),
    "MmBackward0": lambda node, g, place, shape: product(node._saved_self, g),
    "MulBackward0": lambda node, g, place, shape: broadcast(g * (node._saved_self if place else node._saved_other), shape),
    "AddBackward0": lambda node, g, place, shape: broadcast(g, shape),
    "EmbeddingBackward0": embedding,
}


def form_of(use: Use, g: Tensor, whose: Tensor) -> Form:
    order = torch.arange(len(g)) // (len(g) // N)  # axis 0: the samples in order, each with T entries or with one
    in_order = bool(((whose == order.view(-1, *[1] * (g.ndim - 1))) | (whose == NOBODY)).all())
    if in_order and use.node.name() in FORMULAS:
        shape = use.leaf.variable.shape if use.value is use.leaf else use.value._input_metadata[0].shape
        form = FORMULAS[use.node.name()](use.node, g, use.place, torch.Size(shape))
    else:
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
# A hook at each meeting computes the form as soon as g arrives, because the pass frees what nodes keep.  The table is used
# twice, and its rows are the sums of both uses.  Then the rows are checked: weighted by w, their sum must be what autograd
# computes for w.

names = dict(model.named_parameters())
forms, sums_by_autograd = dict[str, Form](), torch.autograd.grad(losses, list(names.values()), w, retain_graph=True)


def take(use: Use, whose: Tensor, grads: tuple[Tensor, ...]) -> None:
    form, before = form_of(use, grads[0], whose), forms.get(use.name)
    forms[use.name] = form if before is None else Dense(before.dense() + form.dense())


for use, whose in labels.items():
    use.node.register_prehook(partial(take, use, whose))
losses.sum().backward()
check_same(tuple(forms[name].weighted_sum(w) for name in names), sums_by_autograd)  # swapped rows would fail here

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
# The gradient where ``first.weight`` meets the batch has a row for each token.  Each sample has a color, zeros are white,
# and entries where samples mix are black.  On the right is the model with ``h - h.mean(0)``.

plt.rc("font", size=12)
figure, axes = plt.subplots(1, 2, figsize=(6, 4.4), sharey=True, layout="constrained")
colors = colormaps["Set2"].with_extremes(under="black", bad="white")
for axis, title, by_use in zip(axes, ("samples apart", "samples mixed"), (labels, labels_of_mixing)):
    whose = next(entries for use, entries in by_use.items() if use.name == "first.weight").float()
    axis.imshow(whose.masked_fill(whose == NOBODY, torch.nan), cmap=colors, vmin=0, vmax=7, aspect="auto")
    axis.set(title=title, xlabel="outputs of the first layer")
axes[0].set_ylabel("tokens, sample after sample")
plt.show()
