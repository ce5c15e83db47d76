"""
LESS: choose training data for a task
=====================================

LESS (Xia et al. 2024, arXiv:2402.04333) chooses training samples whose update by Adam points along the gradients of a few
samples of the wanted task.  Here the task is digits that lie on their side.  Forty of them choose from 1,400 images, most of
which are upright.  The scores are compared with the paper's formula in double precision. ::

    pip install matplotlib scikit-learn tqdm
    python less.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/less.png'

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

from autograd_hacks import add_hooks, over
from autograd_hacks.attribution import Metric

torch.set_num_threads(1)  # a network this small is slower with more threads
RATE, TURNED, BETAS, EPS = 0.005, 0.15, (0.9, 0.999), 1e-8

# %%
# The recipe
# ----------
# `Metric.from_optimizer` keeps Adam's factor 1 / (√v̂ + eps) at a checkpoint.


def less(
    model: nn.Module,
    train: Sequence[Any],
    queries: Sequence[Any],
    visited: Sequence[tuple[Mapping[str, Any], Metric, float]],
    losses: Callable[[nn.Module, Any], Tensor],
    dim: int = 512,
) -> Tensor:
    """Σ η cos(R A g, R g′) over checkpoints, D E, for Adam's A = 1 / (√v̂ + eps) and projections R.

    visited: of training, [(state, Metric.from_optimizer(adam) there, learning rate), ...]
    """
    before, scores = copy.deepcopy(model.state_dict()), []
    for state, adam, rate in visited:
        model.load_state_dict(state)
        own = over(model, train, losses, lambda grads, by=adam: grads.preconditioned(by).project(dim))
        others = over(model, queries, losses, lambda grads: grads.project(dim))
        scores.append(rate * F.normalize(own) @ F.normalize(others).mT)
    model.load_state_dict(before)
    return torch.stack(scores).sum(0)


# %%
# Train by Adam, and keep checkpoints with its state
# --------------------------------------------------

digits, draws = load_digits(), torch.Generator().manual_seed(0)
images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
order = torch.randperm(len(images), generator=draws)
images, labels = images[order], labels[order]
is_turned = torch.rand(len(images), generator=draws) < TURNED
is_turned[1400:] = True
images[is_turned] = images[is_turned].rot90(1, (1, 2))
x, y, asked, answers = images[:1400].flatten(1), labels[:1400], images[1400:1440].flatten(1), labels[1400:1440]
held_x, held_y = images[1440:].flatten(1), labels[1440:]


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


model, visited, states = network(), [], []
optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=BETAS, eps=EPS)
for _ in tqdm(range(4), desc="training", unit="epoch"):
    for own in torch.randperm(len(x), generator=draws).split(50):
        optimizer.zero_grad()
        losses(model, (x[own], y[own])).mean().backward()
        optimizer.step()
    visited.append((copy.deepcopy(model.state_dict()), Metric.from_optimizer(optimizer), RATE))
    states.append([copy.deepcopy(optimizer.state[p]) for p in model.parameters()])
with add_hooks(model, param_grad=False):
    scores = less(model, [(x, y)], [(asked, answers)], visited, losses)

# %%
# Compared with the paper
# -----------------------
# The paper's update puts the sample's own gradient into Adam's moments, (β₁ m + (1 - β₁) g) / (√v̂ + eps), with its square in
# v.  The recipe uses v as it is, and leaves out m, which is the same for all samples.  Here are both, without projection.


def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, weights, x[None]), y[None])


dense, paper = torch.zeros(len(x), len(asked)).double(), torch.zeros(len(x), len(asked)).double()
for (weights, _, rate), adam in zip(visited, states):
    precise = {name: p.double() for name, p in weights.items()}
    rows = vmap(grad(loss), (None, 0, 0))(precise, torch.cat([x, asked]).double(), torch.cat([y, answers])).values()
    aims = F.normalize(torch.cat([g[len(x) :].flatten(1) for g in rows], 1))
    scaled, updates = [], []
    for g, state in zip([g[: len(x)] for g in rows], adam):
        m, v, step = state["exp_avg"].double(), state["exp_avg_sq"].double(), float(state["step"])
        scaled.append(g / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS))
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g**2
        updates.append(m / (1 - BETAS[0] ** (step + 1)) / ((v / (1 - BETAS[1] ** (step + 1))).sqrt() + EPS))
    dense += rate * F.normalize(torch.cat([g.flatten(1) for g in scaled], 1)) @ aims.mT
    paper += rate * F.normalize(torch.cat([g.flatten(1) for g in updates], 1)) @ aims.mT
for name, own in (("the recipe's formula, not projected", dense), ("the paper's update, not projected", paper)):
    print(f"rank correlation with {name}: {spearmanr(scores.flatten(), own.flatten()).statistic:.3f}")

# %%
# What it chooses
# ---------------
# A tenth of the images, those with the largest scores or random ones.  A new network is trained on them, and tested with
# other digits that lie on their side.

few = len(x) // 10
choices = {"all": torch.arange(len(x)), "drawn": torch.randperm(len(x), generator=draws)[:few]}
choices |= {"LESS": scores.amax(1).topk(few).indices, "the paper's": paper.amax(1).topk(few).indices}
accuracy = {}
for name, own in choices.items():
    learner = network()
    optimizer = torch.optim.Adam(learner.parameters(), lr=RATE)
    for _ in range(200):
        optimizer.zero_grad()
        losses(learner, (x[own], y[own])).mean().backward()
        optimizer.step()
    accuracy[name] = float((learner(held_x).argmax(1) == held_y).float().mean())
    print(f"{name:12}{len(own):5} images, {is_turned[own].float().mean():4.0%} on their side: accuracy {accuracy[name]:.3f}")

plt.rc("font", size=12)
figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
names = [f"{name}\n{len(choices[name])}" for name in accuracy]
axes.bar_label(axes.bar(names, list(accuracy.values()), color=["gray", "gray", "C0", "C1"]), fmt="%.2f")
axes.set_ylabel("accuracy on the task")
plt.show()
