"""
Train by natural gradient
=========================

The natural gradient step is (G + λ)⁻¹ g, with g the batch's gradient and G its Gauss-Newton matrix, which for cross
entropy is the Fisher matrix of the network's own predictions.  G has a row and a column for each of the 9,858
parameters, and never stands in memory: the rows of its root J are gradients of logits, and J Jᵀ is small
(:doc:`/curvature`).  A small network is trained on handwritten digits by it, and by SGD with momentum, from the same
weights and on the same batches. ::

    python docs/examples/natural_gradient.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/natural_gradient.png'

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from common import command_line, handwritten_digits, save  # before the others: it tells what to install

# isort: split
import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import autograd_hacks

parser = command_line(
    "Trains a small network on scikit-learn's handwritten digits, by natural gradient with the exact Gauss-Newton "
    "matrix of each batch, and by SGD with momentum, from the same weights and on the same batches.",
    batch_size=(64, "images in a batch"),
    epochs=(6, "rounds through the images"),
)
parser.add_argument("--sgd-rate", type=float, default=0.1, metavar="R", help="learning rate of SGD, momentum 0.9")
parser.add_argument("--rate", type=float, default=0.2, metavar="R", help="learning rate of natural gradient")
parser.add_argument("--damping", type=float, default=0.1, metavar="D", help="what is added to the matrix's diagonal")
options = parser.parse_args()

images, labels = handwritten_digits()
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(options.seed))
held_out, train = order.split([360, len(labels) - 360])  # a fifth


def small_cnn() -> nn.Module:
    torch.manual_seed(options.seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


# %%
# Two ways to take a step
# -----------------------
# ``backprop_hess`` runs a backward pass for each class, whose rows are J, and ``natural_gradient`` solves with J Jᵀ.

Step = Callable[[nn.Module, Tensor, Tensor], None]


def sgd(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def natural(model: nn.Module, x: Tensor, y: Tensor) -> None:
    output = model(x)
    autograd_hacks.backprop_hess(output, "CrossEntropy")
    curvature = autograd_hacks.per_sample_grads(model)
    with autograd_hacks.pause_hooks():
        F.cross_entropy(output, y).backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, direction in curvature.natural_gradient(gradient, options.damping).items():
        model.get_parameter(name).grad = direction


# %%
# Train by both
# -------------


@dataclass
class Curve:
    """What was seen before each epoch, and after the last."""

    losses: list[float] = field(default_factory=list)  # on all training images
    right: list[float] = field(default_factory=list)  # the share of held-out images that were told right
    seconds: list[float] = field(default_factory=list)  # of steps


def look(model: nn.Module, seconds: float, curve: Curve) -> None:
    with torch.no_grad(), autograd_hacks.pause_hooks():
        curve.losses.append(float(F.cross_entropy(model(images[train]), labels[train])))
        curve.right.append(float((model(images[held_out]).argmax(1) == labels[held_out]).float().mean()))
    curve.seconds.append(seconds)


def train_by(name: str, step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> Curve:
    curve, seconds = Curve(), 0.0
    torch.manual_seed(options.seed)
    look(model, seconds, curve)
    for _ in tqdm(range(options.epochs), desc=name, unit="epoch"):
        for batch in train[torch.randperm(len(train))].split(options.batch_size):
            start = time.perf_counter()
            optimizer.zero_grad()
            step(model, images[batch], labels[batch])
            optimizer.step()
            seconds += time.perf_counter() - start
        look(model, seconds, curve)
    return curve


curves, model = {}, small_cnn()
momentum = torch.optim.SGD(model.parameters(), lr=options.sgd_rate, momentum=0.9)
curves["SGD with momentum"] = train_by("SGD with momentum", sgd, model, momentum)
model = small_cnn()
with autograd_hacks.add_hooks(model):
    plain = torch.optim.SGD(model.parameters(), lr=options.rate)
    curves["natural gradient"] = train_by("natural gradient", natural, model, plain)
print(f"{'':20}{'training loss':>15}{'held-out right':>16}{'seconds':>10}")
for name, curve in curves.items():
    print(f"{name:20}{curve.losses[-1]:15.4f}{curve.right[-1]:16.1%}{curve.seconds[-1]:10.1f}")

# %%
# The losses
# ----------

figure, (by_epoch, by_second) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for name, curve in curves.items():
    by_epoch.semilogy(curve.losses, marker="o", label=name)
    by_second.semilogy(curve.seconds, curve.losses, marker="o", label=name)
by_epoch.set(xlabel="epochs", ylabel="training loss")
by_second.set(xlabel="seconds of steps")
by_epoch.legend()
for axes in (by_epoch, by_second):
    axes.grid(alpha=0.3)
save(figure, options, "natural_gradient.png")
