"""
Three ways to find wrong labels
===============================

Who is responsible for what a network says of an image?  For one whose label is wrong, mostly that image alone: nothing
else says the same.  So images are ranked by their influence on their own loss, in three ways, from cheap to thorough:
the square of the gradient's length, TracIn's sum of that over training, and influence by EK-FAC, gᵀ (G + λ)⁻¹ g.  Captum
has TracIn, kronfluence EK-FAC; both run here on the same network. ::

    python docs/examples/find_wrong_labels.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/find_wrong_labels.png'

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from common import command_line, handwritten_digits, peer, save, seconds_of, sheet, train, with_wrong_labels

# isort: split
import matplotlib.pyplot as plt
import theirs
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import autograd_hacks

PLANTED, RATE = 0.1, 0.1  # the share of labels that are made wrong; the learning rate

options = command_line(
    images=(1797, "of the digits"),
    epochs=(12, "rounds through them; TracIn looks at the weights after each third"),
)
torch.manual_seed(options.seed)

# %%
# Plant wrong labels, train, and keep some checkpoints
# ----------------------------------------------------

images, true = (x[: options.images] for x in handwritten_digits())
given = with_wrong_labels(true, PLANTED, options.seed)
wrong = given != true

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
visited: list[tuple[dict[str, Tensor], float]] = []
train(model, optimizer, images, given, options.epochs, batch_size=100,
      after=lambda epoch: visited.append((copy.deepcopy(model.state_dict()), RATE)))  # fmt: skip
checkpoints = visited[::-3]

# %%
# Three scores
# ------------
# ``over`` reads them batch by batch, and never writes out more gradients than a batch has.

hooked = copy.deepcopy(model)
autograd_hacks.add_hooks(hooked, param_grad=False)
data = TensorDataset(images, given)
loader = DataLoader(data, batch_size=200)


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def by_ekfac(grads: autograd_hacks.PerSampleGrads) -> Tensor:
    """gᵀ (EKFAC + λ)⁻¹ g of each sample."""
    rows, solved = grads.dense(), autograd_hacks.ekfac_solve(hooked, grads).dense()
    return torch.stack([(rows[name] * solved[name]).flatten(1).sum(1) for name in rows]).sum(0)


def ekfac() -> Tensor:
    autograd_hacks.compute_hess_over(hooked, loader, kind="ekfac", kfac_bias="joint")
    return score(by_ekfac)


score = partial(autograd_hacks.over, hooked, loader, losses)
ways: dict[str, Callable[[], Tensor]] = {
    "gradient's length²": lambda: score(lambda grads: grads.norms() ** 2),
    "TracIn": lambda: score(lambda grads: grads.norms() ** 2, checkpoints=checkpoints),
    "EK-FAC": ekfac,
}

# %%
# Held to captum and kronfluence
# ------------------------------
# TracIn is captum's to rounding.  Kronfluence draws labels from the network where ours takes all of them, so its scores
# are noisier ones of the same: their ranks agree.

if peer("captum.influence", "--no-deps captum"):
    ways["captum's TracIn"] = lambda: theirs.captum_tracin(model, data, checkpoints)
if peer("kronfluence.analyzer", "--no-deps kronfluence accelerate"):
    ways["kronfluence's EK-FAC"] = lambda: theirs.kronfluence_ekfac(model, data)
scores = {name: way().double() for name, way in ways.items()}
seconds = seconds_of(ways, rounds=1)  # after a first run of each
areas = {name: roc_auc_score(wrong, own) for name, own in scores.items()}
print(f"{int(wrong.sum())} of {len(images)} labels were made wrong{'':9}area under ROC{'seconds':>12}")
for name, area in areas.items():
    print(f"{name:44}{area:14.4f}{seconds[name]:12.2f}")
if "captum's TracIn" in scores:
    apart = (scores["TracIn"] / scores["captum's TracIn"] - 1).abs().max()
    print(f"TracIn is captum's to {apart:.0e} of each score")
    torch.testing.assert_close(scores["TracIn"], scores["captum's TracIn"], rtol=1e-3, atol=1e-6)
if "kronfluence's EK-FAC" in scores:
    ranks = spearmanr(scores["EK-FAC"], scores["kronfluence's EK-FAC"]).statistic
    print(f"EK-FAC: rank correlation with kronfluence's {ranks:.4f}")

# %%
# Which of them find the wrong labels?
# ------------------------------------
# Below, the images with the highest scores by EK-FAC, in red those whose label was made wrong.

figure = plt.figure(figsize=(11, 7), layout="constrained")
parts: Any = figure.subfigures(2, height_ratios=(3, 2))
above, below = parts
left, right = above.subplots(1, 2)
looks = (("gray", "-", 1.5), ("C0", "-", 1.5), ("C1", "-", 1.5), ("C0", ":", 3), ("C1", ":", 3))
for (name, own), (color, line, width) in zip(scores.items(), looks):
    left.plot(*roc_curve(wrong, own)[:2], color=color, ls=line, lw=width, label=f"{name}: {areas[name]:.4f}")
    right.bar_label(right.barh(name, seconds[name], color=color, alpha=1 if line == "-" else 0.5), fmt=" %.2f")
left.set(xlabel="share of right labels looked at", ylabel="share of wrong labels found", xlim=(-0.005, 0.15))
left.legend(title="area under the curve")
left.grid(alpha=0.3)
right.set(xlabel="seconds", xlim=(0, 1.15 * max(seconds.values())))
right.invert_yaxis()
sheet(below.subplots(2, 12), scores["EK-FAC"].argsort(descending=True), images, given, true)
save(figure, options, "find_wrong_labels.png")
