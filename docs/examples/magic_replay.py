"""
MAGIC: predict training without an image
========================================

MAGIC (Ilyas and Engstrom 2025, arXiv:2504.16430) goes back through a training, step by step.  It computes the exact
derivative of the trained network's losses with respect to the weight of each training image.  This derivative predicts
trainings on other subsets.  Here 50 networks are trained, each without 5 % of the images, to check the prediction. ::

    pip install matplotlib scikit-learn tqdm
    python magic_replay.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/magic_replay.png'

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from torch import Tensor
from torch.func import functional_call, grad, vmap
from tqdm import tqdm

from autograd_hacks import PerSampleGrads, add_hooks, over, pause_hooks, per_sample_grads

torch.set_num_threads(1)  # a network this small is slower with more threads
RATE, BATCH, EPOCHS, SUBSETS = 0.5, 100, 30, 50

# %%
# The recipe
# ----------
# This is for plain SGD, θ - rate · mean wₙ gₙ.  Momentum and Adam need their own step back.  Each step back takes one pass
# for the samples' gradients.  For each query it takes their inner products with λ, and one Hessian product.


def magic(
    model: nn.Module,
    queries: Sequence[Any],
    steps: Sequence[tuple[Mapping[str, Any], Any, Tensor]],
    losses: Callable[[nn.Module, Any], Tensor],
    rate: float,
) -> Tensor:
    """-∂L′/∂wₙ, D E, for the losses L′ of E queries by the model's weights, the last ones of a training.

    steps: [(weights before the step, its batch, its samples' numbers), ...]
    """
    last, parameters = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    directions = over(model, queries, losses, PerSampleGrads.dense)  # λ, {name: E, *shape}
    like = next(iter(directions.values()))
    count = len(like)
    scores = like.new_zeros(1 + max(int(numbers.max()) for _, _, numbers in steps), count)
    for weights, batch, numbers in tqdm(steps[::-1], desc="steps back", leave=False):
        model.load_state_dict(weights)
        torch.autograd.grad(losses(model, batch).mean(), list(parameters.values()), create_graph=True)
        grads = per_sample_grads(model)
        for e in range(count):
            along = grads.dot({name: direction[e] for name, direction in directions.items()})
            scores[numbers, e] += rate / len(numbers) * along.detach()
            with pause_hooks():  # the derivative of their mean is Hλ
                products = torch.autograd.grad(along.mean(), list(parameters.values()), retain_graph=True)
            for direction, product in zip(directions.values(), products):
                direction[e] -= rate * product
    model.load_state_dict(last)
    return scores


# %%
# A training that keeps its steps, and the scores
# -----------------------------------------------

digits, draws = load_digits(), torch.Generator().manual_seed(0)
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
x, y, asked, answers = images[:500], labels[:500], images[-10:], labels[-10:]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
initial, chosen = copy.deepcopy(model.state_dict()), []
for _ in range(EPOCHS):
    chosen += torch.randperm(len(x), generator=draws).split(BATCH)


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


steps, optimizer = [], torch.optim.SGD(model.parameters(), lr=RATE)
for numbers in tqdm(chosen, desc="training", unit="step"):
    batch = (x[numbers], y[numbers])
    steps.append((copy.deepcopy(model.state_dict()), batch, numbers))
    optimizer.zero_grad()
    losses(model, batch).mean().backward()
    optimizer.step()
with add_hooks(model):
    scores = magic(model, [(asked, answers)], steps, losses, RATE)

# %%
# The same training, without some of the images
# ---------------------------------------------
# All networks at once, by ``torch.func.vmap``.

kept = torch.stack([torch.randperm(len(x), generator=draws) for _ in range(SUBSETS)]) >= round(0.05 * len(x))
weights = {name: p.expand(SUBSETS, *p.shape).clone() for name, p in initial.items()}


def loss(weights: dict[str, Tensor], kept: Tensor, numbers: Tensor) -> Tensor:
    own = F.cross_entropy(functional_call(model, weights, x[numbers]), y[numbers], reduction="none")
    return (kept[numbers] * own).mean()


for numbers in tqdm(chosen, desc=f"{SUBSETS} networks", unit="step"):
    for name, slope in vmap(grad(loss), (0, 0, None))(weights, kept.float(), numbers).items():
        weights[name] -= RATE * slope
said = vmap(lambda own: F.cross_entropy(functional_call(model, own, (asked,)), answers, reduction="none"))(weights)
with torch.no_grad():
    actual = said - losses(model, (asked, answers))  # K E
predicted = (~kept).float() @ scores
ranks = torch.tensor([spearmanr(a, b).statistic for a, b in zip(predicted.mT, actual.mT)])
print(f"LDS, the rank correlation over {SUBSETS} subsets, mean of {len(asked)} images: {ranks.mean():.3f}")

# %%
# Predicted and actual changes of the loss
# ----------------------------------------

plt.rc("font", size=12)
figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
for e in range(3):
    axes.plot(predicted[:, e], actual[:, e], "o", alpha=0.7, label=f"a {answers[e]}: ρ = {ranks[e]:.2f}")
ends = [float(predicted[:, :3].min()), float(predicted[:, :3].max())]
axes.plot(ends, ends, ":", color="gray")
axes.set(xlabel="loss, change predicted", ylabel="change by training again")
axes.legend()
axes.grid(alpha=0.3)
plt.show()
