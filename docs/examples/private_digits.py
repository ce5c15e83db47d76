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

import warnings
from collections.abc import Callable
from typing import Any

from common import command_line, furthest, handwritten_digits, needs, panels, save, seconds_of, tqdm

needs("opacus", "opacus")

import opacus
import torch
import torch.nn as nn
import torch.nn.functional as F
from opacus.accountants import RDPAccountant
from opacus.data_loader import DPDataLoader
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import autograd_hacks
from autograd_hacks.integrations.opacus import PrivacyEngine

OF_A_USER, NOISE, MAX_NORM, DELTA = 4, 1.0, 1.0, 1e-3  # images of a user, and what privacy asks for
warnings.filterwarnings("ignore")  # what Opacus says of its own defaults and hooks

options = command_line(
    batch_size=(64, "samples expected in a batch, images or users"),
    epochs=(12, "rounds through the images"),
)

# %%
# Images, and users of four images each
# -------------------------------------
# The data don't say who wrote what; here a user is four images that follow each other.

images, labels = handwritten_digits()
images = images.flatten(1)  # a pixel is an input
test, train = slice(0, 357), slice(357, None)
by_image = TensorDataset(images[train], labels[train])
by_user = TensorDataset(*(x.unflatten(0, (-1, OF_A_USER)) for x in by_image.tensors))


def start(data: TensorDataset) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], torch.Generator]:
    """The same weights, draws and noise for everyone."""
    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))
    draws, noise = (torch.Generator().manual_seed(options.seed + k) for k in (1, 2))
    loader = DataLoader(data, batch_size=options.batch_size, generator=draws)
    return model, torch.optim.SGD(model.parameters(), lr=0.5), loader, noise


def train_by(unit: str, who: str, model: nn.Module, loader: Any, step: Callable[..., object], accountant: Any) -> None:
    curve: list[tuple[float, float]] = []
    for _ in tqdm(range(options.epochs), desc=f"{unit}, {who}", unit="epoch"):
        for x, y in loader:
            step(x, y)
        with torch.no_grad():
            right = model(images[test]).argmax(1) == labels[test]
        curve.append((accountant.get_epsilon(DELTA), float(right.float().mean())))
    weights = [p.detach().clone() for p in model.parameters()]
    trained[unit, who] = curve, weights, lambda: step(x, y)


# %%
# An engine, Opacus' or ours
# --------------------------
# A change of one import.  Opacus' own trains by users, too, where a sample is a user and layers take four images at
# once: that works for ``Linear``, which adds a sample's positions up.


def by_engine(engine: Any, data: TensorDataset) -> tuple[Any, ...]:
    model, optimizer, loader, noise = start(data)
    private = engine(accountant="rdp")
    settings = {"noise_multiplier": NOISE, "max_grad_norm": MAX_NORM, "noise_generator": noise}
    model, optimizer, loader = private.make_private(module=model, optimizer=optimizer, data_loader=loader, **settings)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        total = F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum")
        (total / max(1, len(x))).backward()  # a batch may be empty
        optimizer.step()

    return model, loader, step, private


# %%
# By user, of any model
# ---------------------
# ``groups`` says whose each image is.  The accountant and the draws are Opacus', the loop is one's own.


def by_groups(data: TensorDataset) -> tuple[Any, ...]:
    model, optimizer, plain, noise = start(data)
    loader, accountant, rate = DPDataLoader.from_data_loader(plain), RDPAccountant(), 1 / len(plain)
    autograd_hacks.add_hooks(model, param_grad=False, independent=True)

    def step(x: Tensor, y: Tensor) -> None:
        users = torch.arange(len(x)).repeat_interleave(OF_A_USER)
        F.cross_entropy(model(x.flatten(0, 1)), y.flatten(), reduction="sum").backward()
        autograd_hacks.clip_and_noise_(model, MAX_NORM, NOISE, int(rate * len(data)), users, noise, loss_type="sum")
        optimizer.step()
        accountant.step(noise_multiplier=NOISE, sample_rate=rate)

    return model, loader, step, accountant


# %%
# Accuracy for epsilon, and what a step takes
# -------------------------------------------

trained: dict[tuple[str, str], tuple[Any, list[Tensor], Callable[[], object]]] = {}
train_by("by image", "Opacus", *by_engine(opacus.PrivacyEngine, by_image))
train_by("by image", "autograd_hacks", *by_engine(PrivacyEngine, by_image))
train_by("by user", "Opacus", *by_engine(opacus.PrivacyEngine, by_user))
train_by("by user", "autograd_hacks", *by_groups(by_user))
seconds = seconds_of({way: step for way, (_, _, step) in trained.items()}, rounds=20)
figure, (left, right) = panels(figsize=(10, 4), width_ratios=(3, 2))
print(f"{'':28}{'epsilon':>10}{'accuracy':>10}{'ms a step':>11}{'weights apart':>16}")
for (unit, who), (curve, weights, _) in trained.items():
    (epsilon, accuracy), ms, theirs = curve[-1], 1e3 * seconds[unit, who], trained[unit, "Opacus"][1]
    print(f"{unit:10}{who:18}{epsilon:10.4f}{accuracy:10.3f}{ms:11.2f}{furthest(weights, theirs):16.1e}")
    torch.testing.assert_close(weights, theirs, rtol=1e-3, atol=1e-5)
    color = "C0" if unit == "by image" else "C1"
    wide: dict[str, Any] = {"lw": 7, "alpha": 0.3} if who == "Opacus" else {}
    left.plot(*zip(*curve), color=color, label=f"{unit}, {who}", **wide)
    right.bar_label(right.bar(f"{unit}\n{who}", ms, color=color, alpha=wide.get("alpha", 1)), fmt="%.1f")
left.set(xlabel=f"epsilon, for delta = {DELTA}", ylabel="accuracy on images not trained on")
left.legend()
right.set(ylabel="milliseconds a step")
right.tick_params("x", labelsize=8)
right.margins(y=0.1)
save(figure, options, "private_digits.png")
