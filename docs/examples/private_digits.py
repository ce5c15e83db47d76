"""
Private digits, by image and by user
====================================

A network learns 1,797 handwritten digits with differential privacy: each sample's gradient is clipped, the clipped ones
are added up, and noise is added to the sum.  If a user gave four of the images, it is users that are to be clipped, and
not images.  Opacus trains from the same weights, on the same draws, with the same noise: it arrives at the same weights,
and its accountant at the same epsilon.  (Its steps are those of its default, gradients written out.) ::

    python docs/examples/private_digits.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/private_digits.png'

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from common import command_line, handwritten_digits, needs, save  # before the others: it tells what to install

needs("opacus", "opacus")

# isort: split
import matplotlib.pyplot as plt
import opacus
import torch
import torch.nn as nn
import torch.nn.functional as F
from opacus.accountants import RDPAccountant
from opacus.data_loader import DPDataLoader
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import autograd_hacks
from autograd_hacks.integrations.opacus import PrivacyEngine

OF_A_USER = 4  # images
NOISE, MAX_NORM, DELTA = 1.0, 1.0, 1e-3
warnings.filterwarnings("ignore")  # what Opacus says of its own defaults and hooks

parser = command_line(
    "Trains on scikit-learn's handwritten digits with differential privacy, by image and by user, as Opacus does.",
    batch_size=(64, "samples expected in a batch, images or users"),
    epochs=(12, "rounds through the images"),
)
options = parser.parse_args()

# %%
# Images, and users of four images each
# -------------------------------------
# The data don't say who wrote what; here a user is four images that follow each other.

images, labels = handwritten_digits()
images = images.flatten(1)  # a pixel is an input
test, train = slice(0, 357), slice(357, None)
by_image = TensorDataset(images[train], labels[train])
by_user = TensorDataset(images[train].unflatten(0, (-1, OF_A_USER)), labels[train].unflatten(0, (-1, OF_A_USER)))


class Epoch(NamedTuple):
    epsilon: float
    accuracy: float
    seconds: list[float]
    """of each step"""
    weights: list[Tensor]


def beginning(data: TensorDataset) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], torch.Generator]:
    """The same weights, draws and noise for everyone."""
    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))
    draws, noise = (torch.Generator().manual_seed(options.seed + k) for k in (1, 2))
    loader = DataLoader(data, batch_size=options.batch_size, generator=draws)
    return model, torch.optim.SGD(model.parameters(), lr=0.5), loader, noise


# %%
# An engine, Opacus' or ours
# --------------------------
# A change of one import.  Opacus' own trains by users, too, where a sample is a user and layers take four images at
# once: that works for ``Linear``, which adds a sample's positions up.


def by_engine(engine: Any, data: TensorDataset) -> Iterator[Epoch]:
    model, sgd, loader, noise = beginning(data)
    private = engine(accountant="rdp")
    settings = {"noise_multiplier": NOISE, "max_grad_norm": MAX_NORM, "noise_generator": noise}
    model, optimizer, loader = private.make_private(module=model, optimizer=sgd, data_loader=loader, **settings)
    while True:
        seconds = []
        for x, y in loader:
            start = time.perf_counter()
            optimizer.zero_grad()
            total = F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum")
            (total / max(1, len(x))).backward()  # a batch may be empty
            optimizer.step()
            seconds.append(time.perf_counter() - start)
        yield reached(model, private.get_epsilon(DELTA), seconds)


# %%
# By user, of any model
# ---------------------
# ``groups`` says whose each image is.  The accountant and the draws are Opacus', the loop is one's own.


def by_groups(data: TensorDataset) -> Iterator[Epoch]:
    model, sgd, plain, noise = beginning(data)
    loader, accountant, rate = DPDataLoader.from_data_loader(plain), RDPAccountant(), 1 / len(plain)
    autograd_hacks.add_hooks(model, param_grad=False)
    while True:
        seconds = []
        for x, y in loader:
            start = time.perf_counter()
            users = torch.arange(len(x)).repeat_interleave(OF_A_USER)
            F.cross_entropy(model(x.flatten(0, 1)), y.flatten(), reduction="sum").backward()
            autograd_hacks.clip_and_noise_(model, MAX_NORM, NOISE, int(rate * len(data)), users, noise, loss_type="sum")
            sgd.step()
            seconds.append(time.perf_counter() - start)
            accountant.step(noise_multiplier=NOISE, sample_rate=rate)
        yield reached(model, accountant.get_epsilon(DELTA), seconds)


@torch.no_grad()
def reached(model: nn.Module, epsilon: float, seconds: list[float]) -> Epoch:
    hits = model(images[test]).argmax(1) == labels[test]
    return Epoch(epsilon, float(hits.float().mean()), seconds, [p.clone() for p in model.parameters()])


# %%
# Train, in turn
# --------------

ways = {
    ("by image", "Opacus"): by_engine(opacus.PrivacyEngine, by_image),
    ("by image", "autograd_hacks"): by_engine(PrivacyEngine, by_image),
    ("by user", "Opacus"): by_engine(opacus.PrivacyEngine, by_user),
    ("by user", "autograd_hacks"): by_groups(by_user),
}
curves: dict[tuple[str, str], list[Epoch]] = {way: [] for way in ways}
for _ in tqdm(range(options.epochs), desc="training", unit="epoch"):
    for way, epochs in ways.items():
        curves[way].append(next(epochs))
milliseconds = {way: 1e3 * statistics.median(s for epoch in curve for s in epoch.seconds) for way, curve in curves.items()}
print(f"{'':28}{'epsilon':>10}{'accuracy':>10}{'ms a step':>11}{'weights apart':>16}")
for (unit, who), curve in curves.items():
    last, theirs = curve[-1], curves[unit, "Opacus"][-1]
    apart = max(float((a - b).abs().max()) for a, b in zip(last.weights, theirs.weights))
    print(f"{unit:10}{who:18}{last.epsilon:10.4f}{last.accuracy:10.3f}{milliseconds[unit, who]:11.2f}{apart:16.1e}")
    torch.testing.assert_close(last.weights, theirs.weights, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(last.epsilon, theirs.epsilon)

# %%
# Accuracy for epsilon, and what a step takes
# -------------------------------------------

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", width_ratios=(3, 2))
for (unit, who), curve in curves.items():
    style: dict[str, Any] = {"linewidth": 7, "alpha": 0.3} if who == "Opacus" else {"linewidth": 1.5, "marker": "."}
    style |= {"color": "C0" if unit == "by image" else "C1", "label": f"{unit}, {who}"}
    left.plot([epoch.epsilon for epoch in curve], [epoch.accuracy for epoch in curve], **style)
left.set(xlabel=f"epsilon, for delta = {DELTA}", ylabel="accuracy on images not trained on")
left.legend()
left.grid(alpha=0.3)
names = [f"{unit}\n{who}" for unit, who in ways]
right.bar_label(right.bar(names, list(milliseconds.values()), color=["#a4c6df", "C0", "#ffca9b", "C1"]), fmt="%.1f")
right.set(ylabel="ms a step")
right.tick_params("x", labelsize=8)
save(figure, options, "private_digits.png")
