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

from collections.abc import Callable

from common import command_line, furthest, handwritten_digits, save, seconds_of, sheet, small_cnn, train, with_wrong_labels

# isort: split
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

import autograd_hacks

PLANTED = 0.05  # the share of labels that are made wrong
Rows = dict[str, Tensor]

options = command_line(
    batch_size=(64, "images in a batch"),
    epochs=(5, "rounds through the images"),
)

# %%
# Plant wrong labels, and train
# -----------------------------

images, true = handwritten_digits()
given = with_wrong_labels(true, PLANTED, options.seed)
wrong = given != true

model = small_cnn(options.seed)
train(model, torch.optim.Adam(model.parameters()), images, given, options.epochs, options.batch_size)

# %%
# Rank by the length of the gradients
# -----------------------------------
# ``norms`` needs no gradient written out: a pass with hooks takes little longer than one without.

parts: list[Tensor] = []
with autograd_hacks.add_hooks(model, param_grad=False):
    for x, y in zip(images.split(options.batch_size), given.split(options.batch_size)):
        F.cross_entropy(model(x), y).backward()
        parts.append(autograd_hacks.per_sample_grads(model).norms())
ranking = torch.cat(parts).argsort(descending=True)

print(f"{int(wrong.sum())} of {len(images)} labels were made wrong. Ranked by the length of their gradients:")
for share in (0.05, 0.10):
    top = ranking[: round(share * len(ranking))]
    chance = share * wrong.sum()
    print(f"  top {share:4.0%} ({len(top):3} images): {wrong[top].sum():3} wrong labels, by chance {chance:.1f}")

# %%
# The images with the longest gradients
# -------------------------------------
# In red those whose label was made wrong.

figure, places = plt.subplots(3, 10, figsize=(12, 4.8), layout="constrained")
sheet(places, ranking, images, given, true)
save(figure, options, "wrong_labels.png")

# %%
# The same gradients, in three ways
# ---------------------------------
# One batch: by a backward pass for each image, by ``torch.func``, and by this library, in turn.

x, y = images[: options.batch_size], given[: options.batch_size]
weights = {name: p.detach() for name, p in model.named_parameters()}


def loop() -> Rows:
    losses = [F.cross_entropy(model(image), label) for image, label in zip(x.split(1), y.split(1))]
    rows = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    return dict(zip(weights, map(torch.stack, zip(*rows))))


def torch_func() -> Rows:
    def one_loss(weights: Rows, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, image[None]), label[None])

    return vmap(grad(one_loss), (None, 0, 0))(weights, x, y)


def hooks() -> Rows:
    F.cross_entropy(model(x), y).backward()
    autograd_hacks.compute_grad1(model)
    return {name: p.grad1 for name, p in model.named_parameters()}


ways: dict[str, Callable[[], Rows]]
ways = {"one backward per image": loop, "torch.func.vmap(grad)": torch_func, "autograd_hacks": hooks}
with autograd_hacks.add_hooks(model):
    print(f"the gradients of {len(x)} images, each on its own:\n{'':24}{'ms':>8}{'furthest from the loop':>26}")
    for name, seconds in seconds_of(ways).items():
        rows, expected = ways[name](), loop()
        print(f"{name:24}{1e3 * seconds:8.1f}{furthest(rows.values(), expected.values()):26.1e}")
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)
