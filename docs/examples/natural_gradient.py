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

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import command_line, follow, handwritten_digits, panels, save
from torch import Tensor

import autograd_hacks

options = command_line(
    batch_size=(64, "images in a batch"),
    epochs=(6, "rounds through the images"),
    sgd_rate=(0.1, "learning rate of SGD, momentum 0.9"),
    rate=(0.2, "learning rate of natural gradient"),
    damping=(0.1, "what is added to the matrix's diagonal"),
)
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

figure, (by_epoch, by_second) = panels(2, figsize=(9, 3.6), sharey=True)
print(f"{'':20}{'training loss':>15}{'held-out right':>16}{'seconds':>10}")


def train_by(name: str, step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def epoch() -> None:
        for batch in train[torch.randperm(len(train))].split(options.batch_size):
            optimizer.zero_grad()
            step(model, images[batch], labels[batch])
            optimizer.step()

    @torch.no_grad()
    def look() -> tuple[float, float]:
        """The loss on all training images; the share of held-out images that are told right."""
        with autograd_hacks.pause_hooks():
            right = model(images[held_out]).argmax(1) == labels[held_out]
            return float(F.cross_entropy(model(images[train]), labels[train])), float(right.float().mean())

    torch.manual_seed(options.seed)
    seconds, seen = follow(name, epoch, options.epochs, look)
    losses = [loss for loss, _ in seen]
    print(f"{name:20}{losses[-1]:15.4f}{seen[-1][1]:16.1%}{seconds[-1]:10.1f}")
    by_epoch.semilogy(losses, marker="o", label=name)
    by_second.semilogy(seconds, losses, marker="o", label=name)


model = small_cnn()
train_by("SGD with momentum", sgd, model, torch.optim.SGD(model.parameters(), lr=options.sgd_rate, momentum=0.9))
model = small_cnn()
with autograd_hacks.add_hooks(model):
    train_by("natural gradient", natural, model, torch.optim.SGD(model.parameters(), lr=options.rate))

by_epoch.set(xlabel="epochs", ylabel="training loss")
by_second.set(xlabel="seconds of steps")
by_epoch.legend()
save(figure, options, "natural_gradient.png")
