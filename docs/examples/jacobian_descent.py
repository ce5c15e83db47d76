"""
Jacobian descent: a step that is against no class
=================================================

Of five digits there are plenty of images, of five others few.  The mean loss hears those who are many, and where classes
pull against each other the few lose.  UPGrad, of Jacobian descent, takes a step that is against none of them.  It needs
the classes' inner products only, which come from what the layers saw; TorchJD writes the Jacobian out, and takes the same
steps.  (They are longer than those of a mean, too: what is left of ten gradients is no mean in which they cancel.) ::

    python docs/examples/jacobian_descent.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/jacobian_descent.png'

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from common import command_line, handwritten_digits, needs, save  # before the others: it tells what to install

needs("torchjd", "torchjd")
needs("quadprog", "torchjd")

# isort: split
import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torchjd import autojac
from torchjd.aggregation import UPGrad
from tqdm import tqdm

import autograd_hacks
from autograd_hacks.integrations.torchjd import jacobian_descent

RARE = 12  # images of each of the digits 5 to 9
SHOWN = 12  # images of each class in the picture of inner products
COMPARED = 20  # steps that TorchJD takes, too

parser = command_line(
    "Trains on scikit-learn's handwritten digits, five of them rare, by the mean and by UPGrad of the classes' losses.",
    steps=(150, "of each way"),
)
options = parser.parse_args()

# %%
# Five digits are rare
# --------------------

images, labels = handwritten_digits()
rank = torch.stack([(labels[: n + 1] == label).sum() for n, label in enumerate(labels)])  # of its class
chosen = rank <= torch.where(labels < 5, 100, RARE)
x, y = images[chosen], labels[chosen]
share = F.one_hot(y, 10) / y.bincount()  # of each image in its class' mean loss, N 10


def beginning() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


# %%
# Four ways to take a step
# ------------------------
# ``group`` adds the rows of each class up: ten rows, and no gradient of an image is written out.


def by_mean(model: nn.Module) -> None:
    F.cross_entropy(model(x), y).backward()


def by_mean_of_classes(model: nn.Module) -> None:
    (F.cross_entropy(model(x), y, reduction="none") @ share).mean().backward()


def by_torchjd(model: nn.Module) -> None:
    autojac.backward(F.cross_entropy(model(x), y, reduction="none") @ share)
    autojac.jac_to_grad(model.parameters(), UPGrad())


def by_ours(model: nn.Module) -> None:
    F.cross_entropy(model(x), y).backward()
    weights = share.sum(1)  # one over the number of images of its class
    classes = autograd_hacks.per_sample_grads(model).scaled(weights).group(y)
    jacobian_descent(model, UPGrad(), classes)


# %%
# Train
# -----


@torch.no_grad()
def class_losses(model: nn.Module) -> Tensor:
    with autograd_hacks.pause_hooks():
        return F.cross_entropy(model(x), y, reduction="none") @ share


curves: dict[str, list[Tensor]] = {}
seconds: dict[str, list[float]] = {}
reached: dict[str, list[Tensor]] = {}  # the weights after the steps that TorchJD takes, too
compared = min(COMPARED, options.steps)


def train_by(name: str, way: Callable[[nn.Module], None], steps: int) -> None:
    model, optimizer = beginning()
    if way is by_ours:
        autograd_hacks.add_hooks(model, param_grad=False)
    curves[name], seconds[name] = [class_losses(model)], []
    for step in tqdm(range(steps), desc=name, unit="step"):
        start = time.perf_counter()
        optimizer.zero_grad()
        way(model)
        optimizer.step()
        seconds[name].append(time.perf_counter() - start)
        curves[name].append(class_losses(model))
        if step + 1 == compared:
            reached[name] = [p.detach().clone() for p in model.parameters()]


train_by("mean of images", by_mean, options.steps)
train_by("mean of classes", by_mean_of_classes, options.steps)
train_by("UPGrad, by TorchJD", by_torchjd, compared)
train_by("UPGrad, by autograd_hacks", by_ours, options.steps)
theirs = reached["UPGrad, by TorchJD"]
print(f"{'':28}{'mean loss':>10}{'worst class':>13}{'ms a step':>11}{'from TorchJD':>14}, after {compared} steps")
for name, curve in curves.items():
    apart = max(float((a - b).abs().max()) for a, b in zip(reached[name], theirs))
    losses, time_ = curve[compared], 1e3 * statistics.median(seconds[name])
    print(f"{name:28}{losses.mean():10.3f}{losses.max():13.3f}{time_:11.1f}{apart:14.1e}")
torch.testing.assert_close(reached["UPGrad, by autograd_hacks"], theirs, rtol=1e-3, atol=1e-4)

# %%
# Who is against whom
# -------------------
# The cosines of images' gradients, sorted by class, when training begins.  Below zero, a step for one is against the other.

model, _ = beginning()
few = torch.cat([(y == digit).nonzero()[:SHOWN, 0] for digit in range(10)])
with autograd_hacks.add_hooks(model, param_grad=False):
    F.cross_entropy(model(x[few]), y[few]).backward()
    cosines = autograd_hacks.per_sample_grads(model).cosine()
same = y[few][:, None] == y[few]
print(f"against each other: {(cosines[~same] < 0).float().mean():.0%} of pairs of two classes, ", end="")
print(f"{(cosines[same] < 0).float().mean():.0%} of pairs of one")

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
heat = left.imshow(cosines, cmap="RdBu_r", vmin=-0.3, vmax=0.3)
middles = [float((y[few] == digit).nonzero().float().mean()) for digit in range(10)]
left.set_xticks(middles, range(10))
left.set_yticks(middles, range(10))
left.set(xlabel="class of an image", ylabel="class of another", title="cosines of gradients")
figure.colorbar(heat, ax=left, shrink=0.8, extend="both")
for color, (name, own) in zip(("C1", "C2", "C0", "C0"), curves.items()):
    wide = {"linewidth": 8, "alpha": 0.3} if "TorchJD" in name else {}
    right.semilogy(torch.stack(own).amax(1), color=color, label=name, **wide)
    if not wide:
        right.semilogy(torch.stack(own).mean(1), color=color, linestyle="--")
right.set(xlabel="steps", ylabel="loss", title="the worst class; dashed: the mean of classes")
right.legend(fontsize=8)
right.grid(alpha=0.3)
save(figure, options, "jacobian_descent.png")
