"""Trains a small network on handwritten digits by natural gradient, and by SGD.

python docs/examples/natural_gradient.py --output demo-output
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from wrong_labels import command_line, handwritten_digits  # before the others: it tells what to install

# isort: split
from matplotlib.figure import Figure
from tqdm import tqdm

import autograd_hacks

HELD_OUT = 360  # images, a fifth


@dataclass
class Digits:
    """images: N 1 8 8    labels: N"""

    images: Tensor
    labels: Tensor


@dataclass
class Curve:
    """What was seen before each epoch, and after the last: the loss on all training images, and the share of held-out images
    that were told right."""

    losses: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def digits(seed: int) -> tuple[Digits, Digits]:
    """To train with, and to be held out."""
    images, labels = handwritten_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], labels[order]
    return Digits(images[HELD_OUT:], labels[HELD_OUT:]), Digits(images[:HELD_OUT], labels[:HELD_OUT])


def small_cnn(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def sgd_step(model: nn.Module, rate: float) -> Callable[[Tensor, Tensor], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def natural_step(model: nn.Module, rate: float, damping: float) -> Callable[[Tensor, Tensor], None]:
    """A step along (G + λ)⁻¹ g, with G the batch's Gauss-Newton matrix, which is the Fisher matrix here."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    autograd_hacks.add_hooks(model)

    def step(images: Tensor, labels: Tensor) -> None:
        output = model(images)
        autograd_hacks.backprop_hess(output, "CrossEntropy")
        curvature = autograd_hacks.per_sample_grads(model)
        optimizer.zero_grad()
        with autograd_hacks.pause_hooks():
            F.cross_entropy(output, labels).backward()
        gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for name, direction in curvature.natural_gradient(gradient, damping).items():
            model.get_parameter(name).grad = direction
        optimizer.step()

    return step


@torch.no_grad()
def look(model: nn.Module, train: Digits, held_out: Digits, seconds: float, curve: Curve) -> None:
    with autograd_hacks.pause_hooks():
        curve.losses.append(float(F.cross_entropy(model(train.images), train.labels)))
        curve.right.append(float((model(held_out.images).argmax(1) == held_out.labels).float().mean()))
    curve.seconds.append(seconds)


def train_by(name: str, step: Callable[[Tensor, Tensor], None], model: nn.Module, options: argparse.Namespace) -> Curve:
    train, held_out = digits(options.seed)
    curve, seconds = Curve(), 0.0
    torch.manual_seed(options.seed)
    look(model, train, held_out, seconds, curve)
    for _ in tqdm(range(options.epochs), desc=name, unit="epoch"):
        for batch in torch.randperm(len(train.images)).split(options.batch_size):
            start = time.perf_counter()
            step(train.images[batch], train.labels[batch])
            seconds += time.perf_counter() - start
        look(model, train, held_out, seconds, curve)
    return curve


def draw(curves: dict[str, Curve], path: Path) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    by_epoch, by_second = figure.subplots(1, 2, sharey=True)
    for name, curve in curves.items():
        by_epoch.semilogy(curve.losses, marker="o", label=name)
        by_second.semilogy(curve.seconds, curve.losses, marker="o", label=name)
    by_epoch.set_xlabel("epochs")
    by_second.set_xlabel("seconds of steps")
    by_epoch.set_ylabel("training loss")
    by_epoch.legend()
    figure.suptitle("A small CNN on handwritten digits")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = command_line(
        "Trains a small network on scikit-learn's handwritten digits, by natural gradient with the exact Gauss-Newton "
        "matrix of each batch, and by SGD with momentum, from the same weights and on the same batches.",
        batch_size=128,
        epochs=10,
    )
    parser.add_argument("--sgd-rate", type=float, default=0.1, metavar="R", help="learning rate of SGD, momentum 0.9")
    parser.add_argument("--rate", type=float, default=0.2, metavar="R", help="learning rate of natural gradient")
    parser.add_argument("--damping", type=float, default=0.1, metavar="D", help="what is added to the matrix's diagonal")
    options = parser.parse_args()

    models = {name: small_cnn(options.seed) for name in ("SGD with momentum", "natural gradient")}
    sgd, natural = models.values()
    steps = sgd_step(sgd, options.sgd_rate), natural_step(natural, options.rate, options.damping)
    curves = {name: train_by(name, step, model, options) for (name, model), step in zip(models.items(), steps)}
    print(f"\n{'':20}{'training loss':>15}{'held-out right':>16}{'seconds':>10}")
    for name, curve in curves.items():
        print(f"{name:20}{curve.losses[-1]:15.4f}{curve.right[-1]:16.1%}{curve.seconds[-1]:10.1f}")
    options.output.mkdir(parents=True, exist_ok=True)
    picture = options.output / "natural-gradient.png"
    draw(curves, picture)
    print(f"\nthe losses: {picture}")


if __name__ == "__main__":
    main()
