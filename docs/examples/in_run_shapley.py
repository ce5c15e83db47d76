"""
In-run Shapley: what was each image worth?
==========================================

Each training step changes the loss of held-out images.  The Shapley value of an image says how much of that change it
caused.  In-run data Shapley (Wang et al. 2024, arXiv:2406.11011) computes it to first and second order from inner products
of gradients, during the training.  Some labels are wrong, and their images are worth the least. ::

    pip install matplotlib scikit-learn tqdm
    python in_run_shapley.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/in_run_shapley.png'

import argparse
from collections.abc import Callable
from itertools import combinations
from math import comb

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from torch.func import functional_call, grad, jvp
from tqdm import tqdm

import autograd_hacks

torch.set_num_threads(1)  # a network this small is slower with more threads
BATCH, RATE, WRONG, HELD = 64, 0.2, 0.15, 16  # images in a step; its size; share of wrong labels; held-out images in a step
parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--epochs", type=int, default=20, help="rounds through the images")
options = parser.parse_args()

# %%
# A step that says what its samples were worth
# --------------------------------------------
# A step θ - r Σ gₙ over samples S changes the held-out loss by U(S) = -r ⟨Σ gₙ, h⟩ + r²/2 (Σ gₙ)ᵀ H (Σ gₙ) + ..., where h
# and H are that loss's gradient and Hessian.  The first term is a sum over samples, and each sample's Shapley value is its
# own part.  The second is a sum over pairs, and each sample gets half of its pairs: r²/2 gₙᵀ H Σ gₘ.  Values here are -U:
# how far the loss goes *down*.  Training samples and held-out samples share one forward.

Loss = Callable[[Tensor, Tensor], Tensor]  # a loss for each sample, from outputs and targets


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def step(
    model: nn.Module, x: Tensor, y: Tensor, held_x: Tensor, held_y: Tensor, rate: float, held: Loss = loss_of
) -> Tensor:
    """A step by rate · Σ gₙ.  Returns what each sample was worth, to first order and to second, 2 N.  held: losses"""
    n, parameters, out = len(x), dict(model.named_parameters()), model(torch.cat([x, held_x]))
    autograd_hacks.backward(torch.cat([loss_of(out[:n], y), held(out[n:], held_y)]), "sum")
    rows = autograd_hacks.per_sample_grads(model)
    batch, others = rows.select(slice(n)), rows.select(slice(n, None))
    total, h = batch.weighted_sum(out.new_ones(n)), others.weighted_sum(out.new_ones(len(held_x)) / len(held_x))
    with autograd_hacks.pause_hooks():  # H Σ gₘ is the derivative of h along Σ gₘ
        slopes = grad(lambda own: held(functional_call(model, own, (held_x,)), held_y).mean())
        bent = jvp(slopes, ({name: p.detach() for name, p in parameters.items()},), (total,))[1]
    first = rate * batch.dot(h)
    with torch.no_grad():
        for name, p in parameters.items():
            p.sub_(rate * total[name])
    return torch.stack([first, first - rate**2 / 2 * batch.dot(bent)])


# %%
# Compared with the definition
# ----------------------------
# The Shapley value is the mean of what a sample adds to each subset of the others, and each subset makes a step of its own.
# First order is exact if the held-out loss is linear in the weights, second order if it is quadratic.  For cross entropy
# both are approximations.

torch.manual_seed(0)
x, y, held_x, c = torch.randn(5, 4).double(), torch.randint(3, (5,)), torch.randn(3, 4).double(), torch.randn(3, 3).double()
flat, deep = nn.Linear(4, 3).double(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
subsets = [chosen for size in range(6) for chosen in combinations(range(5), size)]
print("furthest from all subsets of a step, of the largest value     first order   second order")
for kind, model, held, to in [
    ("a linear loss, a linear model", flat, lambda out, c: (out * c).sum(1), c),
    ("a quadratic loss, a linear model", flat, lambda out, c: (out - c).square().sum(1), c),
    ("cross entropy, a network", deep, loss_of, y[:3]),
]:
    g = [torch.autograd.grad(loss_of(model(x[k : k + 1]), y[k : k + 1])[0], list(model.parameters())) for k in range(5)]
    after = {}
    for chosen in subsets:
        moved = {m: p - RATE * sum(g[k][i] for k in chosen) for i, (m, p) in enumerate(model.named_parameters())}
        after[chosen] = held(functional_call(model, moved, (held_x,)), to).mean().item()
    expected = torch.zeros(5).double()
    for k, chosen in [(k, chosen) for k in range(5) for chosen in subsets if k not in chosen]:
        expected[k] += (after[chosen] - after[tuple(sorted((*chosen, k)))]) / (5 * comb(4, len(chosen)))
    with autograd_hacks.add_hooks(model, param_grad=False):
        errors = (step(model, x, y, held_x, to, RATE, held) - expected).abs().amax(1) / expected.abs().max()
    print(f"{kind:56}{errors[0]:16.1e}{errors[1]:15.1e}")

# %%
# Sum the values over a training
# ------------------------------
# If first order is enough, ``during_backward`` computes it within the backward pass, and frees each layer's tensors early.

digits, draws = load_digits(), torch.Generator().manual_seed(0)
images, true = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
held_out, learnt = torch.randperm(len(images), generator=draws).split([100, len(images) - 100])
labels, drawn = true[learnt].clone(), torch.Generator().manual_seed(0)
spoilt = torch.randperm(len(learnt), generator=drawn)[: round(WRONG * len(learnt))]
labels[spoilt] = (labels[spoilt] + torch.randint(1, 10, (len(spoilt),), generator=drawn)) % 10
is_wrong, worth = labels != true[learnt], torch.zeros(2, len(learnt))

torch.manual_seed(0)
convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
network = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
with autograd_hacks.add_hooks(network, param_grad=False):
    for _ in tqdm(range(options.epochs), desc="training", unit="epoch"):
        for own in torch.randperm(len(learnt), generator=draws).split(BATCH):
            seen = held_out[torch.randperm(len(held_out), generator=draws)[:HELD]]
            given = images[learnt[own]], labels[own], images[seen], true[seen], RATE / len(own)
            worth[:, own] += step(network, *given)

    is_held = torch.arange(len(own) + len(seen)) >= len(own)
    with autograd_hacks.during_backward(network, dot=is_held / len(seen), weights=(~is_held).float()) as found:
        autograd_hacks.backward(loss_of(network(torch.cat([given[0], given[2]])), torch.cat([given[1], given[3]])), "sum")
    ours = found.dot[: len(own)] * given[4]  # and .grad is the batch's, without the held-out images
    apart = (ours - step(network, *given)[0]).abs().max() / ours.abs().max()
print(f"\nfirst order by during_backward is the same to {apart:.1e}")

# %%
# Wrong labels are worth the least
# --------------------------------

print(f"{is_wrong.sum()} of {len(learnt)} labels are wrong; of as many images that are worth least")
for name, values in {"first order": worth[0], "second order": worth[1]}.items():
    hits, sums = is_wrong[values.argsort()[: is_wrong.sum()]].sum(), (values[is_wrong].sum(), values[~is_wrong].sum())
    print(f"{name:13}{hits:4} have one; the wrong add up to {sums[0]:+.2f}, the right to {sums[1]:+.2f}")

plt.rc("font", size=12)
figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
low, high = worth[1].quantile(torch.tensor([0.005, 0.995])).tolist()
for group, color, label in ((~is_wrong, "C0", "right labels"), (is_wrong, "crimson", "wrong labels")):
    axes.hist(worth[1][group].clamp(low, high), bins=60, range=(low, high), color=color, alpha=0.7, label=label)
axes.set(xlabel="how far the image brought the held-out loss down", ylabel="images", yscale="symlog")
axes.legend()
plt.show()
