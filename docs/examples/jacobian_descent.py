"""
Jacobian descent: no class loses
================================

Of five digits there are many images, of the other five only a few.  The mean loss is mostly the loss of the many, and where
classes conflict the rare ones lose.  UPGrad, a kind of Jacobian descent, takes a step that conflicts with no class.  It
needs only the classes' inner products, which this library computes from what the layers saw.  TorchJD writes the Jacobian
out, and takes the same steps.  (They are also longer than the steps of a mean, in which ten gradients partly cancel.) ::

    pip install 'torchjd[quadprog_projector]' matplotlib scikit-learn tqdm
    python jacobian_descent.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/jacobian_descent.png'

import argparse
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from torchjd import autojac
from torchjd.aggregation import UPGrad
from tqdm import tqdm

import autograd_hacks
from autograd_hacks.integrations.torchjd import jacobian_descent

torch.set_num_threads(1)  # a network this small is slower with more threads
RARE, COMPARED = 12, 20  # images of each digit from 5 to 9; steps that TorchJD takes, too
parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--steps", type=int, default=150, help="of each method")
options = parser.parse_args()
compared = min(COMPARED, options.steps)

# %%
# Five digits are rare
# --------------------

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
rank = torch.stack([(labels[: n + 1] == label).sum() for n, label in enumerate(labels)])  # within its class
chosen = rank <= torch.where(labels < 5, 100, RARE)
x, y = images[chosen], labels[chosen]
share = F.one_hot(y, 10) / y.bincount()  # each image's share of its class's mean loss, N 10


def class_losses(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none") @ share


# %%
# Four kinds of step
# ------------------
# ``group`` sums the rows of each class, to ten rows.  It writes no image's gradient out.


def by_torchjd(model: nn.Module) -> None:
    autojac.backward(class_losses(model))
    autojac.jac_to_grad(model.parameters(), UPGrad())


def by_ours(model: nn.Module) -> None:
    autograd_hacks.backward(F.cross_entropy(model(x), y, reduction="none"))
    weights = share.sum(1)  # one over the number of images in the class
    classes = autograd_hacks.per_sample_grads(model).scaled(weights).group(y)
    jacobian_descent(model, UPGrad(), classes)


def of_images(model: nn.Module) -> None:
    F.cross_entropy(model(x), y).backward()


def of_classes(model: nn.Module) -> None:
    class_losses(model).mean().backward()


# %%
# Train
# -----
# The weights after 20 steps are compared with TorchJD's.

weights: dict[str, list[Tensor]] = {}
losses: dict[str, Tensor] = {}


def train_by(name: str, way: Callable[[nn.Module], None], steps: int) -> None:
    torch.manual_seed(0)
    hidden = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, 10))
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    if way is by_ours:
        autograd_hacks.add_hooks(model, param_grad=False)
    for step in tqdm(range(steps + 1), desc=name):
        with torch.no_grad(), autograd_hacks.pause_hooks():
            seen.append(class_losses(model))
        if step == compared:
            weights[name] = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        way(model)
        optimizer.step()
    losses[name] = torch.stack(seen)
    apart = max(float((a - b).abs().max()) for a, b in zip(weights[name], weights["UPGrad, by TorchJD"]))
    print(f"{name:28}{seen[compared].mean():10.3f}{seen[compared].max():13.3f}{apart:14.1e}")


print(f"{'':28}{'mean loss':>10}{'worst class':>13}{'from TorchJD':>14}, after {compared} steps")
train_by("UPGrad, by TorchJD", by_torchjd, compared)
train_by("UPGrad, by autograd_hacks", by_ours, options.steps)
train_by("mean of images", of_images, options.steps)
train_by("mean of classes", of_classes, options.steps)
torch.testing.assert_close(weights["UPGrad, by autograd_hacks"], weights["UPGrad, by TorchJD"], rtol=1e-3, atol=1e-4)

# %%
# The worst class, and the mean of classes
# ----------------------------------------

plt.rc("font", size=12)
figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
for color, (name, own) in zip(("C0", "C0", "C1", "C2"), losses.items()):
    wide = {"linewidth": 8, "alpha": 0.3} if name == "UPGrad, by TorchJD" else {}
    axes.semilogy(own.amax(1), color=color, label=name, **wide)
    axes.semilogy(own.mean(1), color=color, linestyle="--", **wide)
axes.set(xlabel="steps", ylabel="loss of the worst class (dashed: mean)")
axes.legend(fontsize=10)
plt.show()
