"""
LoGra: influence with small curvature
=====================================

The influence of a training sample, gᵀ H⁻¹ g′, needs the inverse of a matrix with a row for each parameter.  LoGra (Choe et
al. 2024, arXiv:2405.13954) projects each weight's gradient to a small matrix Pᵀ G Q, and inverts the second moment of these.
Here scores by several ranks are compared with those of whole gradients in double precision. ::

    pip install matplotlib scikit-learn tqdm
    python logra.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/logra.png'

import time
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from torch.func import functional_call, grad, vmap
from tqdm import tqdm

from autograd_hacks import add_hooks, over
from autograd_hacks.attribution import Metric

torch.set_num_threads(1)  # a network this small is slower with more threads

# %%
# The recipe
# ----------
# The damping is a share of each parameter's mean eigenvalue.  So a parameter whose gradients are zero except for rounding
# errors, such as the bias of an attention's keys, adds noise as large as the other parameters' scores: freeze it.


def damped(rows: Tensor, damping: float) -> Tensor:
    """Σₙ gₙ gₙᵀ / N + λ, K K, with λ of its mean eigenvalue.  rows: N K"""
    second = rows.mT @ rows / len(rows)
    return second + damping * second.diagonal().mean() * torch.eye(len(second)).to(second)


def logra(
    model: nn.Module,
    train: Sequence[Any],
    queries: Sequence[Any],
    losses: Callable[[nn.Module, Any], Tensor],
    rank: int = 8,
    damping: float = 0.1,
) -> Tensor:
    """Σ ⟨G, (H + λ)⁻¹ G′⟩ over parameters, D E, for G = PᵀgQ and its second moment H."""
    low = Metric.low_rank(model, rank)
    own, others = (over(model, data, losses, lambda grads: grads.preconditioned(low).dense()) for data in (train, queries))
    scores = []
    for name, g in own.items():
        solved = torch.linalg.solve(damped(g.flatten(1), damping), others[name].flatten(1).mT)
        scores.append(g.flatten(1) @ solved)
    return torch.stack(scores).sum(0)


# %%
# A network, and scores by several ranks
# --------------------------------------


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
x, y, asked, answers = images[:1200], labels[:1200], images[1500:], labels[1500:]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in tqdm(range(15), desc="training", unit="epoch"):
    for batch in torch.randperm(len(x)).split(100):
        optimizer.zero_grad()
        losses(model, (x[batch], y[batch])).mean().backward()
        optimizer.step()

train, queries, ranks = list(zip(x.split(400), y.split(400))), [(asked, answers)], (2, 4, 8, 16, 32, 64)
scores, seconds = {}, {}
with add_hooks(model, param_grad=False):
    for rank in tqdm(ranks, desc="scores", unit="rank"):
        start = time.perf_counter()
        scores[rank] = logra(model, train, queries, losses, rank)
        seconds[rank] = time.perf_counter() - start

# %%
# Compared with whole gradients
# -----------------------------
# A rank of 64 keeps everything here, and gives the scores of the definition.


def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, weights, x[None]), y[None])


weights = {name: p.detach().double() for name, p in model.named_parameters()}
exact = torch.zeros(len(x), len(asked)).double()
for rows in vmap(grad(loss), (None, 0, 0))(weights, torch.cat([x, asked]).double(), torch.cat([y, answers])).values():
    g, of_others = rows.flatten(1).split([len(x), len(asked)])
    exact += g @ torch.linalg.solve(damped(g, 0.1), of_others.mT)
correlation = {rank: float(torch.stack([s.flatten(), exact.flatten()]).corrcoef()[0, 1]) for rank, s in scores.items()}
for rank in ranks:
    print(f"rank {rank:3}: correlation {correlation[rank]:.3f}, {seconds[rank]:.2f} s")
print(f"rank 64: the furthest {(scores[64] - exact).abs().max() / exact.abs().max():.0e} of the largest score")

plt.rc("font", size=12)
figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
axes.plot([f"{rank}" for rank in ranks], list(correlation.values()), "o-", linewidth=2.5, markersize=9)
axes.set(xlabel="rank of P and Q", ylabel="correlation with whole gradients", ylim=(0, 1.05))
axes.grid(alpha=0.3)
plt.show()
