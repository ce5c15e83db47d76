"""
Find the wrong labels
=====================

A network learns what most labels say.  An image whose label says something else goes on pulling at the weights: its
own gradient is long.  Here 5 % of the labels of 1,797 handwritten digits are made wrong, a small network is trained
on them, and the images are ranked by the length of their gradients.  With the default seed 74 of the 90 wrong labels
stand among the 90 longest, where chance would put 4.5 there. ::

    python docs/examples/wrong_labels.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/wrong_labels.png'

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from common import command_line, handwritten_digits, save  # before the others: it tells what to install

# isort: split
import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap
from tqdm import tqdm

import autograd_hacks

PLANTED = 0.05  # the share of labels that are made wrong
Rows = dict[str, Tensor]

parser = command_line(
    "Plants wrong labels among scikit-learn's handwritten digits, trains a small network on them, and finds them again "
    "by the length of each image's own gradient.",
    batch_size=(64, "images in a batch"),
    epochs=(5, "rounds through the images"),
)
options = parser.parse_args()
torch.manual_seed(options.seed)

# %%
# Plant wrong labels, and train
# -----------------------------

images, true = handwritten_digits()
draws = torch.Generator().manual_seed(options.seed)
chosen = torch.randperm(len(true), generator=draws)[: round(PLANTED * len(true))]
given = true.clone()
given[chosen] = (true[chosen] + torch.randint(1, 10, (len(chosen),), generator=draws)) % 10
wrong = given != true

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
batches = [batch for _ in range(options.epochs) for batch in torch.randperm(len(images)).split(options.batch_size)]
for batch in tqdm(batches, desc="training", unit="batch"):
    optimizer.zero_grad()
    F.cross_entropy(model(images[batch]), given[batch]).backward()
    optimizer.step()

# %%
# Rank by the length of the gradients
# -----------------------------------
# ``norms`` needs no gradient written out: a pass with hooks takes little longer than one without.

parts: list[Any] = []
with autograd_hacks.add_hooks(model, param_grad=False):
    for x, y in zip(images.split(options.batch_size), given.split(options.batch_size)):
        F.cross_entropy(model(x), y).backward()
        parts.append(autograd_hacks.per_sample_grads(model).norms())
norms = torch.cat(parts)
ranking = norms.argsort(descending=True)

print(f"{int(wrong.sum())} of {len(images)} labels were made wrong. Ranked by the length of their gradients:")
for share in (0.05, 0.10):
    top = ranking[: round(share * len(ranking))]
    print(
        f"  top {share:4.0%} ({len(top):3} images): {wrong[top].sum():3} wrong labels, by chance {share * wrong.sum():.1f}"
    )

# %%
# The images with the longest gradients
# -------------------------------------
# In red those whose label was made wrong.

figure, places = plt.subplots(3, 10, figsize=(12, 4.8))
figure.set_layout_engine("constrained", h_pad=0.1, hspace=0.05)
for place, index in zip(places.flat, ranking.tolist()):
    place.imshow(images[index, 0], cmap="gray_r")
    place.set_title(f"given {given[index]}\ntrue {true[index]}", color="crimson" if wrong[index] else "black", fontsize=11)
    place.set(xticks=[], yticks=[])
save(figure, options, "wrong_labels.png")

# %%
# The same gradients, in three ways
# ---------------------------------
# One batch: by a backward pass for each image, by ``torch.func``, and by this library, in turn.

x, y = images[: options.batch_size], given[: options.batch_size]
names = [name for name, _ in model.named_parameters()]
weights = {name: p.detach() for name, p in model.named_parameters()}


def loop() -> Rows:
    losses = [F.cross_entropy(model(image), label) for image, label in zip(x.split(1), y.split(1))]
    rows = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    return dict(zip(names, map(torch.stack, zip(*rows))))


def torch_func() -> Rows:
    def one_loss(weights: Rows, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, image[None]), label[None])

    return vmap(grad(one_loss), (None, 0, 0))(weights, x, y)


def hooks() -> Rows:
    F.cross_entropy(model(x), y).backward()
    autograd_hacks.compute_grad1(model)
    return {name: p.grad1 for name, p in model.named_parameters()}


ways: dict[str, Callable[[], Rows]] = {
    "one backward per image": loop, "torch.func.vmap(grad)": torch_func, "autograd_hacks": hooks
}  # fmt: skip
seconds: dict[str, list[float]] = {name: [] for name in ways}
with autograd_hacks.add_hooks(model):
    expected = loop()
    print(f"the gradients of {len(x)} images, each on its own:\n{'':24}{'ms':>8}{'furthest from the loop':>26}")
    for name, way in 10 * list(ways.items()):
        start = time.perf_counter()
        way()
        seconds[name].append(time.perf_counter() - start)
    for name, way in ways.items():
        rows = way()
        furthest = max(float((rows[key] - expected[key]).abs().max()) for key in names)
        print(f"{name:24}{1e3 * statistics.median(seconds[name]):8.1f}{furthest:26.1e}")
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)
