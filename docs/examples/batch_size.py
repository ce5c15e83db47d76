"""
How large a batch?
==================

A batch's mean gradient is the gradient that one is after, and noise, which falls as one over the batch size.  They are
equal at the *gradient noise scale*: batches much smaller are noise in the main, much larger ones hardly better
(McCandlish et al. 2018).  It grows as training goes on, and layers differ.  A callback measures it on the way. ::

    python docs/examples/batch_size.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/batch_size.png'

from __future__ import annotations

import copy
import importlib
import math
import statistics
import warnings

from common import command_line, handwritten_digits, peer, save  # before the others: it tells what to install

# isort: split
import matplotlib.pyplot as plt
import torch
import torch.nn as nn
from tqdm import tqdm

import autograd_hacks
from autograd_hacks.integrations.steps import Steps

warnings.filterwarnings("ignore", "Full backward hook")  # of BackPACK's

parser = command_line(
    "Trains a network on scikit-learn's handwritten digits, and measures how large a batch should be.",
    batch_size=(64, "images in a batch"),
    epochs=(12, "rounds through the images"),
    draws=(3200, "images for each point of the picture, at least 20 batches"),
)
options = parser.parse_args()
torch.manual_seed(options.seed)

# %%
# Train, with the callback
# ------------------------
# `Steps` is what the callbacks for Hugging Face's Trainer, Lightning, accelerate and skorch are made of.

images, labels = handwritten_digits()
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
loss = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
steps = Steps(per_parameter=True, smoothing=0.95)
whole = len(images) // options.batch_size * options.batch_size  # a small last batch would blur the running means
batches = [batch for _ in range(options.epochs) for batch in torch.randperm(len(images))[:whole].split(options.batch_size)]
wanted = {round(len(batches) * share) - 1 for share in (0.1, 0.4, 1)}
moments: dict[int, nn.Module] = {}  # what the model was after some steps, to look at again
steps.attach(model)
for number, batch in enumerate(tqdm(batches, desc="training", unit="batch")):
    optimizer.zero_grad()
    loss(model(images[batch]), labels[batch]).backward()
    steps.read()
    optimizer.step()
    if number in wanted:
        moments[number] = copy.deepcopy(model)
steps.detach()

# %%
# Held to BackPACK, and to batches themselves
# -------------------------------------------
# BackPACK has the variance of each number's gradient, whose sum is the noise.  And the squared length of the gradients of
# drawn batches, by autograd, falls with their size as noise and signal say.

backpack = peer("backpack", "backpack-for-pytorch")


def square(model: nn.Module, size: int) -> float:
    """|g|², by autograd, of the mean gradients of drawn batches; its mean."""
    draws = [torch.randint(len(images), (size,)) for _ in range(20 + options.draws // size)]
    found = [torch.autograd.grad(loss(model(images[own]), labels[own]), list(model.parameters())) for own in draws]
    return statistics.mean(sum(float(g.square().sum()) for g in own) for own in found)


def backpack_noise(model: nn.Module) -> float:
    if backpack is None:
        return math.nan
    extended, criterion = backpack.extend(copy.deepcopy(model)), backpack.extend(nn.CrossEntropyLoss())
    with backpack.backpack(importlib.import_module("backpack.extensions").Variance()):
        criterion(extended(images), labels).backward()
    n = len(images)  # its gradients are over N, and its mean square is over N, and not N - 1
    return float(sum(p.variance.sum() for p in extended.parameters())) * n**2 * n / (n - 1)


def our_noise(model: nn.Module) -> tuple[float, float]:
    with autograd_hacks.add_hooks(model, param_grad=False):
        loss(model(images), labels).backward()
        noise, signal = autograd_hacks.per_sample_grads(model).noise_scale()
    return float(noise), float(signal)


sizes = [2**k for k in range(2, 10)]
measured: dict[int, list[float]] = {}
scales: dict[int, tuple[float, float]] = {}
print(f"{'after steps':>12}{'tr Σ, ours':>13}{'BackPACK':>13}{'apart':>10}{'noise scale':>13}{'the run said':>14}")
for number, then in moments.items():
    measured[number] = [square(then, size) for size in sizes]
    noise, signal = scales[number] = our_noise(then)
    theirs = backpack_noise(then)
    said = steps.history[number]["grads/noise_scale"]
    print(f"{number + 1:12}{noise:13.5g}{theirs:13.5g}{abs(noise / theirs - 1):10.1e}{noise / signal:13.1f}{said:14.1f}")
    assert math.isnan(theirs) or abs(noise / theirs - 1) < 1e-4

# %%
# The noise scale over training
# -----------------------------

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
for name, p in model.named_parameters():
    if p.ndim > 1:  # weights, each a layer's
        left.semilogy([step[f"grads/noise_scale/{name}"] for step in steps.history], linewidth=1, label=f"layer {name}")
left.semilogy([step["grads/noise_scale"] for step in steps.history], color="black", linewidth=2, label="all")
left.axhline(options.batch_size, color="gray", linestyle=":", label="this run's batch size")
left.set(xlabel="steps", ylabel="noise scale, in images")
left.legend(fontsize=8)
for color, (number, (noise, signal)) in zip(("C0", "C1", "C2"), scales.items()):
    right.loglog(sizes, measured[number], "o", color=color, label=f"after {number + 1} steps, by autograd")
    right.loglog(sizes, [signal + noise / size for size in sizes], color=color, label="|G|² + tr Σ / B")
    right.axvline(noise / signal, color=color, linestyle=":")
right.set(xlabel="batch size B (dotted: the noise scale)", ylabel="squared length of a batch's gradient")
right.legend(fontsize=8, loc="lower left")
for axes in (left, right):
    axes.grid(alpha=0.3)
save(figure, options, "batch_size.png")
