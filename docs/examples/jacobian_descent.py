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

from collections.abc import Callable

from common import command_line, follow, furthest, handwritten_digits, needs, panels, save

needs("torchjd", "torchjd")
needs("quadprog", "torchjd")

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torchjd import autojac
from torchjd.aggregation import UPGrad

import autograd_hacks
from autograd_hacks.integrations.torchjd import jacobian_descent

RARE, SHOWN = 12, 12  # images of each of the digits 5 to 9; of each class in the picture of inner products
COMPARED = 20  # steps that TorchJD takes, too

options = command_line(steps=(150, "of each way"))

# %%
# Five digits are rare
# --------------------

images, labels = handwritten_digits()
rank = torch.stack([(labels[: n + 1] == label).sum() for n, label in enumerate(labels)])  # of its class
chosen = rank <= torch.where(labels < 5, 100, RARE)
x, y = images[chosen], labels[chosen]
share = F.one_hot(y, 10) / y.bincount()  # of each image in its class' mean loss, N 10


def mlp() -> nn.Module:
    torch.manual_seed(options.seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def class_losses(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none") @ share


# %%
# Two ways to take a step that is against no class
# ------------------------------------------------
# ``group`` adds the rows of each class up: ten rows, and no gradient of an image is written out.


def by_torchjd(model: nn.Module) -> None:
    autojac.backward(class_losses(model))
    autojac.jac_to_grad(model.parameters(), UPGrad())


def by_ours(model: nn.Module) -> None:
    F.cross_entropy(model(x), y).backward()
    weights = share.sum(1)  # one over the number of images of its class
    classes = autograd_hacks.per_sample_grads(model).scaled(weights).group(y)
    jacobian_descent(model, UPGrad(), classes)


# %%
# Train
# -----
# The means of images and of classes take one backward pass.

compared = min(COMPARED, options.steps)


def train_by(name: str, way: Callable[[nn.Module], None], steps: int, color: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way is by_ours:
        autograd_hacks.add_hooks(model, param_grad=False)

    def step() -> None:
        optimizer.zero_grad()
        way(model)
        optimizer.step()

    @torch.no_grad()
    def look() -> tuple[Tensor, list[Tensor]]:
        with autograd_hacks.pause_hooks():
            return class_losses(model), [p.clone() for p in model.parameters()]

    seconds, seen = follow(name, step, steps, look)
    losses, weights[name] = torch.stack([losses for losses, _ in seen]), seen[compared][1]
    ms, apart = 1e3 * torch.tensor(seconds).diff().median(), furthest(weights[name], weights["UPGrad, by TorchJD"])
    print(f"{name:28}{losses[compared].mean():10.3f}{losses[compared].max():13.3f}{ms:11.1f}{apart:14.1e}")
    wide = {"linewidth": 8, "alpha": 0.3} if way is by_torchjd else {}
    right.semilogy(losses.amax(1), color=color, label=name, **wide)
    right.semilogy(losses.mean(1), color=color, linestyle="--", **wide)


# %%
# Who is against whom, and who gains
# ----------------------------------
# On the left the cosines of images' gradients, sorted by class, when training begins.  Below zero, a step for one is against
# the other.

figure, (left, right) = panels(figsize=(11, 4.4))
weights: dict[str, list[Tensor]] = {}  # after the steps that TorchJD takes, too
print(f"{'':28}{'mean loss':>10}{'worst class':>13}{'ms a step':>11}{'from TorchJD':>14}, after {compared} steps")
train_by("UPGrad, by TorchJD", by_torchjd, compared, "C0")
train_by("UPGrad, by autograd_hacks", by_ours, options.steps, "C0")
train_by("mean of images", lambda model: F.cross_entropy(model(x), y).backward(), options.steps, "C1")
train_by("mean of classes", lambda model: class_losses(model).mean().backward(), options.steps, "C2")
torch.testing.assert_close(weights["UPGrad, by autograd_hacks"], weights["UPGrad, by TorchJD"], rtol=1e-3, atol=1e-4)

model = mlp()
few = torch.cat([(y == digit).nonzero()[:SHOWN, 0] for digit in range(10)])
with autograd_hacks.add_hooks(model, param_grad=False):
    F.cross_entropy(model(x[few]), y[few]).backward()
    cosines = autograd_hacks.per_sample_grads(model).cosine()
against = cosines[y[few][:, None] != y[few]] < 0
print(f"against each other: {against.float().mean():.0%} of pairs of images of two classes")

heat = left.imshow(cosines, cmap="RdBu_r", vmin=-0.3, vmax=0.3)
for axis in (left.xaxis, left.yaxis):
    axis.set_ticks([float((y[few] == digit).nonzero().float().mean()) for digit in range(10)], range(10))
left.grid(False)
left.set(xlabel="class of an image", ylabel="class of another", title="cosines of gradients")
figure.colorbar(heat, ax=left, shrink=0.8, extend="both")
right.set(xlabel="steps", ylabel="loss", title="the worst class; dashed: the mean of classes")
right.legend(fontsize=8)
save(figure, options, "jacobian_descent.png")
