"""
DP-SGD: private digits, by image and by user
============================================

A network learns 1,797 handwritten digits with differential privacy: each sample's gradient is clipped, the clipped
gradients are summed, and noise is added to the sum.  If each user gave four of the images, then users must be clipped and
not images.  Opacus trains from the same weights, on the same batches and with the same noise.  It must reach the same
weights, and its accountant the same epsilon. ::

    pip install opacus matplotlib scikit-learn tqdm
    python private_digits.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/private_digits.png'

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import opacus
import torch
import torch.nn as nn
import torch.nn.functional as F
from opacus.accountants import RDPAccountant
from opacus.data_loader import DPDataLoader
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import autograd_hacks
from autograd_hacks.integrations.opacus import PrivacyEngine

torch.set_num_threads(1)  # a network this small is slower with more threads
warnings.filterwarnings("ignore")  # what Opacus says about its own defaults and hooks
BATCH, OF_A_USER = 64, 4  # samples expected in a batch, images or users; images of a user
NOISE, MAX_NORM, DELTA = 1.0, 1.0, 1e-3
parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--epochs", type=int, default=12, help="rounds through the images")
options = parser.parse_args()

# %%
# Images, and users with four images each
# ---------------------------------------
# The data do not say who wrote what.  Here four consecutive images are a user.

digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
test, train = slice(0, 357), slice(357, None)
by_image = TensorDataset(images[train], labels[train])
by_user = TensorDataset(*(x.unflatten(0, (-1, OF_A_USER)) for x in by_image.tensors))


def start(data: TensorDataset) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], torch.Generator]:
    """The same weights, batches and noise for each training, to compare them.  A seed that others know protects nobody."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))
    draws, noise = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    loader = DataLoader(data, batch_size=BATCH, generator=draws)
    return model, torch.optim.SGD(model.parameters(), lr=0.5), loader, noise


# %%
# By an engine, Opacus' or ours
# -----------------------------
# Only the import differs.  Opacus' engine can train by users, too: a sample is then a user, and a layer takes its four
# images at once.  That works for ``Linear``, which sums over a sample's positions.


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
# By user, for any model
# ----------------------
# ``groups`` says which user each image belongs to.  The accountant and the batches are Opacus', the loop is your own.


def by_groups(data: TensorDataset) -> tuple[Any, ...]:
    model, optimizer, plain, noise = start(data)
    loader, accountant, rate = DPDataLoader.from_data_loader(plain), RDPAccountant(), 1 / len(plain)
    autograd_hacks.add_hooks(model, param_grad=False, independent=True)

    def step(x: Tensor, y: Tensor) -> None:
        users = torch.arange(len(x)).repeat_interleave(OF_A_USER)
        F.cross_entropy(model(x.flatten(0, 1)), y.flatten(), reduction="sum").backward()
        autograd_hacks.private.clip_and_noise_(model, MAX_NORM, NOISE, int(rate * len(data)), users, noise, loss_type="sum")
        optimizer.step()
        accountant.step(noise_multiplier=NOISE, sample_rate=rate)

    return model, loader, step, accountant


# %%
# Accuracy for epsilon
# --------------------

trained: dict[tuple[str, str], list[Tensor]] = {}


def train_by(unit: str, who: str, model: nn.Module, loader: Any, step: Callable[..., object], accountant: Any) -> None:
    curve = []
    for _ in tqdm(range(options.epochs), desc=f"{unit}, {who}", unit="epoch"):
        for x, y in loader:
            step(x, y)
        with torch.no_grad():
            right = model(images[test]).argmax(1) == labels[test]
        curve.append((accountant.get_epsilon(DELTA), float(right.float().mean())))
    trained[unit, who] = [p.detach().clone() for p in model.parameters()]
    apart = max(float((a - b).abs().max()) for a, b in zip(trained[unit, who], trained[unit, "Opacus"]))
    print(f"{unit:10}{who:18}{curve[-1][0]:10.4f}{curve[-1][1]:10.3f}{apart:16.1e}")
    torch.testing.assert_close(trained[unit, who], trained[unit, "Opacus"], rtol=1e-3, atol=1e-5)
    wide: dict[str, Any] = {"lw": 7, "alpha": 0.3} if who == "Opacus" else {}
    axes.plot(*zip(*curve), color="C0" if unit == "by image" else "C1", label=f"{unit}, {who}", **wide)


plt.rc("font", size=12)
figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
print(f"{'':28}{'epsilon':>10}{'accuracy':>10}{'weights apart':>16}")
train_by("by image", "Opacus", *by_engine(opacus.PrivacyEngine, by_image))
train_by("by image", "autograd_hacks", *by_engine(PrivacyEngine, by_image))
train_by("by user", "Opacus", *by_engine(opacus.PrivacyEngine, by_user))
train_by("by user", "autograd_hacks", *by_groups(by_user))
axes.set(xlabel=f"epsilon, for delta = {DELTA}", ylabel="accuracy on images not trained on")
axes.legend()
plt.show()
