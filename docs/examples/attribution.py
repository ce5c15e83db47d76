"""
Which attribution is right?
===========================

Ten ways to score training images, all by this library's verbs, and held to networks that were trained without some of
the images.  A score predicts: its sum over a subset says how sure a network is that was trained on this subset.  The rank
correlation of what is predicted with what comes out, over subsets, is the linear datamodeling score (LDS) of Park et al.
2023 (arXiv:2303.14186). ::

    python docs/examples/attribution.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/attribution.png'

import copy
import time
from collections.abc import Callable
from typing import Any

from common import command_line, handwritten_digits, panels, save, tqdm

# isort: split
import recipes
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor
from torch.func import functional_call, grad, vmap

import autograd_hacks
from autograd_hacks import Metric

BATCH, RATE, ADAM_RATE = 100, 0.5, 0.01
HALF, MOST = 0.5, 0.95  # the shares of images in a subset
PLANTED, NOISE = 25, 0.05  # near-duplicates, and how far their pixels are, white being 1

options = command_line(
    images=(500, "of the digits, to train on"),
    queries=(25, "others, whose labels the networks are asked for"),
    subsets=(50, "networks that the scores are held to, of each size of subsets"),
    epochs=(30, "rounds through the images"),
    retrained=(6, "networks for each half of the images, whose mean answer counts"),
    models=(3, "networks that the scores are made from"),
)
DIMS = [dim for dim in (32, 256) if dim < options.images]  # of TRAK's projections
images, labels = handwritten_digits()
drawn = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))
own, held_out = drawn[: options.images], drawn[-options.queries :]
x, y = images[own].flatten(1), labels[own]
asked, answers = images[held_out].flatten(1), labels[held_out]


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def batches(seed: int) -> list[Tensor]:
    """The samples' numbers, for each step of a training."""
    draws = torch.Generator().manual_seed(seed)
    return [batch for _ in range(options.epochs) for batch in torch.randperm(len(x), generator=draws).split(BATCH)]


# %%
# The truth
# ---------
# A network is trained on each subset, all of them at once by ``torch.func.vmap``, and asked for log p / (1 - p) of the
# held-out images' labels.  There are two sizes.  On halves of the images the answer is the mean over several initial
# weights and orders of batches, as Park et al. have it.  On 95 % of them initial weights and order are those of the first
# network that scores are made from: what this very training would have given without the images.

Stacked = dict[str, Tensor]


def subsets(share: float) -> Tensor:
    """1 for those within.  Returns K D"""
    draws = torch.Generator().manual_seed(options.seed + 1)
    drawn = [torch.randperm(len(x), generator=draws)[: round(share * len(x))] for _ in range(options.subsets)]
    return torch.stack([torch.zeros(len(x)).index_fill(0, own, 1) for own in drawn])


def retrained(within: Tensor, seed: int) -> Tensor:
    """Margins of the held-out images, by networks trained on subsets.  within: K D.  Returns K E"""
    model = network(seed)

    def loss(weights: Stacked, w: Tensor, batch: Tensor) -> Tensor:
        return (w[batch] * F.cross_entropy(functional_call(model, weights, x[batch]), y[batch], reduction="none")).mean()

    def margins(weights: Stacked) -> Tensor:
        return recipes.margins(lambda x: functional_call(model, weights, x), (asked, answers))

    slopes, shares = vmap(grad(loss), (0, 0, None)), within.mean(1, keepdim=True)
    weights = {name: p.detach().expand(len(within), *p.shape).clone() for name, p in model.named_parameters()}
    for batch in batches(seed):
        for name, slope in slopes(weights, within / shares, batch).items():
            weights[name] -= RATE * slope
    return vmap(margins)(weights)


halves, most = subsets(HALF), subsets(MOST)
seeds = range(1000, 1000 + options.retrained)
rounds = [retrained(halves, seed) for seed in tqdm(seeds, desc="networks on halves", unit="round")]
by_halves, by_most = torch.stack(rounds).mean(0), retrained(most, 0)


def agreement(first: Tensor, second: Tensor) -> float:
    """The rank correlation over subsets, its mean over held-out images.  first, second: K E"""
    return sum(float(spearmanr(a, b).statistic) for a, b in zip(first.mT, second.mT)) / len(answers)


# %%
# The networks that scores are made from
# --------------------------------------
# They are trained by SGD, with the weights before each step kept, which MAGIC goes back through; and others by Adam, whose
# second moments LESS and TrackStar need.


def by_sgd(seed: int) -> tuple[nn.Module, list[tuple[recipes.State, Tensor]]]:
    model, steps = network(seed), list[tuple[recipes.State, Tensor]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in batches(seed):
        steps.append((copy.deepcopy(model.state_dict()), batch))
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model, steps


def by_adam(seed: int) -> tuple[nn.Module, list[tuple[recipes.State, Metric, float]]]:
    model, steps, visited = network(seed), batches(seed), list[tuple[recipes.State, Metric, float]]()
    optimizer = torch.optim.Adam(model.parameters(), lr=ADAM_RATE)
    for step, batch in enumerate(steps, 1):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        if 4 * step // len(steps) > 4 * (step - 1) // len(steps):  # at each quarter, and the end
            visited.append((copy.deepcopy(model.state_dict()), Metric.from_optimizer(optimizer), ADAM_RATE))
    return model, visited


# %%
# The scores
# ----------
# Most of them are about five lines: ``docs/examples/recipes.py``, which :doc:`/integrations/recipes` shows with what each
# costs.

train, queries = list(zip(x.split(250), y.split(250))), [(asked, answers)]
scores: dict[str, list[Tensor]] = {}
seconds: dict[str, float] = {}


def score(name: str, recipe: Callable[..., Tensor], *arguments: Any) -> None:
    start = time.perf_counter()
    scores.setdefault(name, []).append(recipe(*arguments))
    seconds[name] = min(seconds.get(name, float("inf")), time.perf_counter() - start)


states: list[recipes.State] = []
for seed in tqdm(range(options.models), desc="scores", unit="network"):
    (model, steps), (adam_model, visited) = by_sgd(seed), by_adam(seed)
    autograd_hacks.add_hooks(model)
    autograd_hacks.add_hooks(adam_model)
    states.append(copy.deepcopy(model.state_dict()))
    checkpoints = [(weights, RATE) for weights, _ in steps[:: -(-len(steps) // 4)][1:]] + [(states[-1], RATE)]
    score("gradients' dot", recipes.dots, model, train, queries)
    score("gradients' cosine", recipes.cosines, model, train, queries)
    score("TracIn", recipes.tracin, model, train, queries, checkpoints)
    score("in-run Shapley", recipes.in_run, model, (x, y), queries, steps, RATE)
    score("LESS", recipes.less, adam_model, train, queries, visited)
    score("TrackStar", recipes.trackstar, adam_model, train, queries, visited[-1][1])
    for dim in DIMS:
        score(f"TRAK, dim {dim}", recipes.trak, model, train, queries, states[-1:], dim)
    score("LoGra, rank 8", recipes.logra, model, train, queries)
    score("EK-FAC", recipes.ekfac, model, train, queries)
    score("MAGIC", recipes.magic, model, (x, y), queries, steps, RATE)

# %%
# Which are right?
# ----------------
# By one network's scores, and by the mean of several; TRAK takes means of its two factors.  With the default options MAGIC
# predicts the same training by 0.98, being its derivative; EK-FAC predicts halves by 0.78, LoGra by 0.67 without curvature's
# two passes.  TRAK depends much on its number of coordinates, which has to be far below that of samples.  LESS and TrackStar
# divide by the gradients' lengths: they are made to choose samples and to find them, and not for sums.

means = {name: torch.stack(each).mean(0) for name, each in scores.items()}
means |= {f"TRAK, dim {dim}": recipes.trak(model, train, queries, states, dim) for dim in DIMS}
found = {}
for name, each in scores.items():
    predictions = ((halves, each[0], by_halves), (halves, means[name], by_halves), (most, each[0], by_most))
    found[name] = [agreement(within @ values, said) for within, values, said in predictions]
print(f"LDS over {options.subsets} subsets of {len(x)} images, mean of {len(answers)} held-out images")
print(f"{'':20}{'halves, 1 network':>20}{f'of {options.models}':>8}{'95 %, the same network':>26}{'seconds':>10}")
for name, (one, mean, same) in found.items():
    print(f"{name:20}{one:20.3f}{mean:8.3f}{same:26.3f}{seconds[name]:10.2f}")
if len(rounds) > 1:
    with_others = agreement(torch.stack(rounds[::2]).mean(0), torch.stack(rounds[1::2]).mean(0))
    print(f"every other of the {len(rounds)} rounds on halves with the rest: {with_others:.3f}")

figure, (left, right) = panels(2, figsize=(11, 4.6), sharey=True)
for place, (one, mean, same) in enumerate(found.values()):
    left.barh(place - 0.2, one, 0.38, color="C0", alpha=0.5)
    left.bar_label(left.barh(place + 0.2, mean, 0.38, color="C0"), fmt=" %.2f")
    right.bar_label(right.barh(place, same, 0.7, color="C1"), fmt=" %.2f")
left.set_yticks(range(len(found)), found)
left.set(title=f"halves: scores of one network, and of {options.models}", xlabel="LDS", xlim=(0, 1.08))
right.set(title="95 %, trained as the network itself was", xlabel="LDS", xlim=(0, 1.08))
left.invert_yaxis()
save(figure, options, "attribution.png")

# %%
# Near-duplicates
# ---------------
# Copies of some images, with noise, have nearly the gradients of these, by projections to 512 coordinates too.  For small
# images the cosine of pixels would do as well; gradients do for whatever a model reads, and tell labels apart.

copies = (
    x[:PLANTED] + NOISE * torch.randn(len(x[:PLANTED]), 64, generator=torch.Generator().manual_seed(options.seed))
).clamp(0, 1)
planted = {(n, len(x) + n) for n in range(len(copies))}
pairs = recipes.duplicates(model, [(torch.cat([x, copies]), torch.cat([y, y[:PLANTED]]))], above=0.9)
hits = sum(tuple(pair) in planted for pair in pairs[: len(planted)].tolist())
print(f"near-duplicates: {hits} of {len(planted)} among the {len(planted)} pairs of the most alike gradients")
