"""
Natural gradient: train a small network
=======================================

A natural gradient step is (G + λ)⁻¹ g, where g is the batch's gradient and G its Gauss-Newton matrix.  For cross entropy G
is the Fisher matrix of the network's own predictions.  G has a row and a column for each of the 9,858 parameters, and is
never written out: the rows of its root J are gradients of logits, and J Jᵀ is small (:doc:`/curvature`).  The network is
also trained by SGD with momentum, from the same weights and on the same batches. ::

    pip install matplotlib scikit-learn tqdm
    python natural_gradient.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/natural_gradient.png'

import argparse
import copy
import time
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from tqdm import tqdm

import autograd_hacks

torch.set_num_threads(1)  # a network this small is slower with more threads
BATCH, SGD_RATE, RATE, DAMPING = 64, 0.1, 0.2, 0.1
parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--epochs", type=int, default=6, help="rounds through the images")
options = parser.parse_args()

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
held_out, train = order.split([360, len(labels) - 360])  # a fifth is held out
torch.manual_seed(0)
convolutions = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()]
start = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10))

# %%
# Two kinds of step
# -----------------
# ``backprop_hess`` runs a backward pass for each class, which gives the rows J.  ``natural_gradient`` solves with J Jᵀ.


def sgd(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def natural(model: nn.Module, x: Tensor, y: Tensor) -> None:
    output = model(x)
    autograd_hacks.backprop_hess(output, "CrossEntropy")
    rows = autograd_hacks.per_sample_grads(model)
    with autograd_hacks.pause_hooks():
        F.cross_entropy(output, y).backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, direction in autograd_hacks.curvature.natural_gradient(rows, gradient, DAMPING).items():
        model.get_parameter(name).grad = direction


# %%
# Compared with the matrix itself
# -------------------------------
# For three images and the last layer's bias G is small: the mean of diag(p) - p pᵀ over the predictions p.  The step must
# solve (G + λ) step = gradient, with all other parameters frozen.

model = copy.deepcopy(start)
for p in model.parameters():
    p.requires_grad_(p is model[-1].bias)
with autograd_hacks.add_hooks(model):
    natural(model, images[:3], labels[:3])
p = model(images[:3]).detach().softmax(1)
matrix = (torch.diag_embed(p) - p[:, :, None] * p[:, None]).mean(0) + DAMPING * torch.eye(10)
expected = torch.linalg.solve(matrix, (p - F.one_hot(labels[:3], 10)).mean(0))
off = (model[-1].bias.grad - expected).abs().max() / expected.abs().max()
torch.testing.assert_close(model[-1].bias.grad, expected, rtol=1e-4, atol=1e-6)
print(f"a step for the last bias: off from the matrix's by at most {off:.0e} of its largest entry\n")

# %%
# Train by both
# -------------


def train_by(step: Callable[[nn.Module, Tensor, Tensor], None], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    name = "natural gradient" if step is natural else "SGD with momentum"
    torch.manual_seed(0)
    losses, seconds = [], [0.0]
    for epoch in tqdm(range(options.epochs + 1), desc=name):
        with torch.no_grad(), autograd_hacks.pause_hooks():
            losses.append(float(F.cross_entropy(model(images[train]), labels[train])))
            right = float((model(images[held_out]).argmax(1) == labels[held_out]).float().mean())
        if epoch < options.epochs:
            begun = time.perf_counter()
            for batch in train[torch.randperm(len(train))].split(BATCH):
                optimizer.zero_grad()
                step(model, images[batch], labels[batch])
                optimizer.step()
            seconds.append(seconds[-1] + time.perf_counter() - begun)
    print(f"{name:20}{losses[-1]:15.4f}{right:16.1%}{seconds[-1]:10.1f}")
    by_epoch.semilogy(losses, marker="o", label=name)
    by_second.semilogy(seconds, losses, marker="o")


plt.rc("font", size=12)
figure, (by_epoch, by_second) = plt.subplots(1, 2, figsize=(6, 4.4), sharey=True, layout="constrained")
print(f"{'':20}{'training loss':>15}{'held-out right':>16}{'seconds':>10}")
model = copy.deepcopy(start)
train_by(sgd, model, torch.optim.SGD(model.parameters(), lr=SGD_RATE, momentum=0.9))
model = copy.deepcopy(start)
with autograd_hacks.add_hooks(model):
    train_by(natural, model, torch.optim.SGD(model.parameters(), lr=RATE))
by_epoch.set(xlabel="epochs", ylabel="training loss")
by_second.set(xlabel="seconds")
figure.legend(loc="outside upper center", ncols=2)
plt.show()
