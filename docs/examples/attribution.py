"""
Attribution: ten methods compared
=================================

Ten ways to score training images, all with this library's functions, are compared with networks that were trained without
some of the images.  A score is a prediction: its sum over a subset predicts how sure a network is that was trained on this
subset.  The rank correlation of predicted and actual values over subsets is the linear datamodeling score (LDS) of Park et
al. 2023 (arXiv:2303.14186). ::

    pip install matplotlib scikit-learn tqdm
    python attribution.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/attribution.png'

import argparse
import copy
import csv
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
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
from autograd_hacks.attribution import Metric, trak_scores
from autograd_hacks.curvature import compute_hess_over

torch.set_num_threads(1)  # a network this small is slower with more threads
BATCH, RATE, ADAM_RATE = 100, 0.5, 0.01
HALF, MOST = 0.5, 0.95  # the shares of images in a subset

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
for name, default, says in (
    ("images", 500, "of the digits, to train on"),
    ("queries", 25, "others, whose labels the networks are asked for"),
    ("subsets", 50, "networks that the scores are held to, of each size of subsets"),
    ("epochs", 30, "rounds through the images"),
    ("retrained", 6, "networks for each half of the images, whose mean answer counts"),
    ("models", 3, "networks that the scores are made from"),
    ("seed", 0, "of all that is drawn"),
):
    parser.add_argument(f"--{name}", type=int, default=default, help=says)
parser.add_argument("--table", type=Path, help="a .csv file to write the scores to")
options = parser.parse_args()
DIMS = [dim for dim in (32, 256) if dim < options.images]  # of TRAK's projections
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
drawn = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))
own, held_out = drawn[: options.images], drawn[-options.queries :]
x, y, asked, answers = images[own], labels[own], images[held_out], labels[held_out]


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def batches(seed: int) -> list[Tensor]:
    """The samples' numbers, for each step of a training."""
    draws = torch.Generator().manual_seed(seed)
    return [batch for _ in range(options.epochs) for batch in torch.randperm(len(x), generator=draws).split(BATCH)]


# %%
# The recipes
# -----------
# Each has a page that explains it and compares it with its definition: :doc:`trak_scores`, :doc:`logra`, :doc:`less`,
# :doc:`trackstar`, :doc:`magic_replay` and :doc:`in_run_shapley`, which here is computed after the training.


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def margins(model: Callable[..., Tensor], batch: Any) -> Tensor:
    logits, label = model(batch[0]), batch[1][:, None]
    return logits.gather(1, label)[:, 0] - logits.scatter(1, label, -torch.inf).logsumexp(1)


def tracin(
    model: nn.Module,
    train: Sequence[Any],
    queries: Sequence[Any],
    checkpoints: Sequence[tuple[Mapping[str, Any], float]],
    losses: Callable[[nn.Module, Any], Tensor],
) -> Tensor:
    """Σ η ⟨g, g′⟩ over checkpoints, D E.  Source: Pruthi et al. 2020 (arXiv:2002.08484)."""
    before, found = copy.deepcopy(model.state_dict()), []
    for state, rate in checkpoints:
        model.load_state_dict(state)
        found.append(rate * over(model, train, losses, PerSampleGrads.gram, against=queries))
    model.load_state_dict(before)
    return torch.stack(found).sum(0)


def trak(
    model: nn.Module,
    train: Sequence[Any],
    queries: Sequence[Any],
    states: Sequence[Mapping[str, Any]],
    margins: Callable[..., Tensor],
    project: Callable[..., Tensor],
) -> Tensor:
    """(1 - p) φ (ΦᵀΦ)⁻¹ φ′ᵀ, D E, of projected gradients φ of the margins; both factors are means over models.

    states: of trained models    project: ``project(grads, seed=)``, to far fewer coordinates than there are samples
    """
    before, phi, about, odds = copy.deepcopy(model.state_dict()), list[Tensor](), list[Tensor](), list[Tensor]()
    for seed, state in enumerate(states):
        model.load_state_dict(state)
        for rows, data in ((phi, train), (about, queries)):
            rows.append(over(model, data, margins, partial(project, seed=seed)))
        with torch.no_grad(), pause_hooks():
            odds.append(torch.cat([margins(model, batch) for batch in train]))
    model.load_state_dict(before)
    return trak_scores(phi, about, odds)


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


def whitening(own: Tensor, others: Tensor, mix: float, damping: float) -> Tensor:
    """R^-½, K K, for R = (1 - mix) × the second moment of ours + mix × that of others, both damped.  own: N K"""
    moments = [rows.mT @ rows / len(rows) for rows in (own, others)]
    eye = torch.eye(own.shape[1]).to(own)
    first, second = (moment + damping * moment.diagonal().mean() * eye for moment in moments)
    values, vectors = torch.linalg.eigh((1 - mix) * first + mix * second)
    return (vectors / values.sqrt()) @ vectors.mT


def trackstar(
    model: nn.Module,
    train: Sequence[Any],
    queries: Sequence[Any],
    adam: Metric,
    losses: Callable[[nn.Module, Any], Tensor],
    rank: int = 8,
    mix: float = 0.5,
    damping: float = 0.1,
    only: Sequence[str] | None = None,
) -> Tensor:
    """cos(R^-½ G, R^-½ G′), D E, for G = Pᵀ A g Q of each parameter, with Adam's A = 1 / (√v̂ + eps)."""
    low = Metric.low_rank(model, rank)

    def projected(grads: PerSampleGrads) -> dict[str, Tensor]:
        rows = grads.preconditioned(adam).preconditioned(low).dense()
        return {name: own.flatten(1) for name, own in rows.items()}

    own, others = (over(model, data, losses, projected, only=only) for data in (train, queries))
    roots = {name: whitening(own[name], others[name], mix, damping) for name in own}
    units = [F.normalize(torch.cat([rows[name] @ roots[name] for name in roots], 1)) for rows in (own, others)]
    return units[0] @ units[1].mT


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


def in_run(
    model: nn.Module,
    queries: Sequence[Any],
    steps: Sequence[tuple[Mapping[str, Any], Any, Tensor]],
    losses: Callable[[nn.Module, Any], Tensor],
    rate: float,
) -> Tensor:
    """Σ η ⟨g, g′⟩ / B over the steps of B samples that a sample was in, D E: in-run data Shapley, of first order.

    steps: as in `magic`    Source: Wang et al. 2024 (arXiv:2406.11011).
    """
    before, products = copy.deepcopy(model.state_dict()), []
    for weights, batch, numbers in steps:
        model.load_state_dict(weights)
        found = over(model, [batch], losses, PerSampleGrads.gram, against=queries)
        products.append(rate / len(numbers) * found)
    model.load_state_dict(before)
    own, values = torch.cat([numbers for *_, numbers in steps]), torch.cat(products)
    return values.new_zeros(1 + int(own.max()), values.shape[1]).index_add(0, own, values)


def ekfac(model: nn.Module, train: Sequence[Any], queries: Sequence[Any]) -> Tensor:
    """⟨g, (EKFAC + λ)⁻¹ g′⟩.  Source: Grosse et al. 2023 (arXiv:2308.03296)."""
    compute_hess_over(model, train, kind="ekfac")
    inverse = Metric.from_ekfac(model)
    return over(model, train, losses, lambda own, others: own.gram(others.preconditioned(inverse)), against=queries)


# %%
# The truth
# ---------
# A network is trained on each subset, all of them at once by ``torch.func.vmap``.  The answer is log p / (1 - p) of the
# held-out images' labels.  There are two sizes of subsets.  For halves of the images the answer is the mean over several
# initial weights and orders of batches, as in Park et al.  For 95 % of the images the initial weights and the order are
# those of the first network that scores are computed from: this is the same training without some images.

Stacked = dict[str, Tensor]


def subsets(share: float) -> Tensor:
    """1 for the images in a subset, 0 for the others.  Returns K D"""
    draws = torch.Generator().manual_seed(options.seed + 1)
    drawn = [torch.randperm(len(x), generator=draws)[: round(share * len(x))] for _ in range(options.subsets)]
    return torch.stack([torch.zeros(len(x)).index_fill(0, own, 1) for own in drawn])


def retrained(within: Tensor, seed: int) -> Tensor:
    """Margins of the held-out images, by networks trained on subsets.  within: K D.  Returns K E"""
    model = network(seed)

    def loss(weights: Stacked, w: Tensor, batch: Tensor) -> Tensor:
        return (w[batch] * F.cross_entropy(functional_call(model, weights, x[batch]), y[batch], reduction="none")).mean()

    def said(weights: Stacked) -> Tensor:
        return margins(partial(functional_call, model, weights), (asked, answers))

    slopes, shares = vmap(grad(loss), (0, 0, None)), within.mean(1, keepdim=True)
    weights = {name: p.detach().expand(len(within), *p.shape).clone() for name, p in model.named_parameters()}
    for batch in batches(seed):
        for name, slope in slopes(weights, within / shares, batch).items():
            weights[name] -= RATE * slope
    return vmap(said)(weights)


halves, most = subsets(HALF), subsets(MOST)
seeds = range(1000, 1000 + options.retrained)
rounds = [retrained(halves, seed) for seed in tqdm(seeds, desc="networks on halves", unit="round")]
by_halves, by_most = torch.stack(rounds).mean(0), retrained(most, 0)


def agreement(first: Tensor, second: Tensor) -> float:
    """The rank correlation over subsets, its mean over held-out images.  first, second: K E"""
    return sum(float(spearmanr(a, b).statistic) for a, b in zip(first.mT, second.mT)) / len(answers)


# %%
# The networks that scores are computed from
# ------------------------------------------
# Some are trained by SGD, and keep the weights before each step for MAGIC.  Others are trained by Adam, because LESS and
# TrackStar need its second moments.


def by_sgd(seed: int) -> tuple[nn.Module, list[tuple[Mapping[str, Any], Any, Tensor]]]:
    model, steps = network(seed), list[tuple[Mapping[str, Any], Any, Tensor]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in batches(seed):
        steps.append((copy.deepcopy(model.state_dict()), (x[batch], y[batch]), batch))
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model, steps


def by_adam(seed: int) -> tuple[nn.Module, list[tuple[Mapping[str, Any], Metric, float]]]:
    model, steps, visited = network(seed), batches(seed), list[tuple[Mapping[str, Any], Metric, float]]()
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
# Each network gives scores.

train, queries = list(zip(x.split(250), y.split(250))), [(asked, answers)]
scores: dict[str, list[Tensor]] = {}
seconds: dict[str, float] = {}


def score(name: str, recipe: Callable[..., Tensor], *arguments: Any) -> None:
    start = time.perf_counter()
    scores.setdefault(name, []).append(recipe(*arguments))
    seconds[name] = min(seconds.get(name, float("inf")), time.perf_counter() - start)


def cosines(grads: PerSampleGrads, others: PerSampleGrads) -> Tensor:
    return grads.gram(others) / grads.norms()[:, None] / others.norms()


states: list[Mapping[str, Any]] = []
for seed in tqdm(range(options.models), desc="scores", unit="network"):
    (model, steps), (adam_model, visited) = by_sgd(seed), by_adam(seed)
    add_hooks(model)
    add_hooks(adam_model)
    states.append(copy.deepcopy(model.state_dict()))
    checkpoints = [(weights, RATE) for weights, *_ in steps[:: -(-len(steps) // 4)][1:]] + [(states[-1], RATE)]
    along, cosine = (partial(over, model, train, losses, verb) for verb in (PerSampleGrads.gram, cosines))
    score("gradients' dot", partial(along, against=queries))
    score("gradients' cosine", partial(cosine, against=queries))
    score("TracIn", tracin, model, train, queries, checkpoints, losses)
    score("in-run Shapley", in_run, model, queries, steps, losses, RATE)
    score("LESS", less, adam_model, train, queries, visited, losses)
    score("TrackStar", trackstar, adam_model, train, queries, visited[-1][1], losses)
    for dim in DIMS:
        project = partial(PerSampleGrads.project, dim=dim)
        score(f"TRAK, dim {dim}", trak, model, train, queries, states[-1:], margins, project)
    score("LoGra, rank 8", logra, model, train, queries, losses)
    score("EK-FAC", ekfac, model, train, queries)
    score("MAGIC", magic, model, queries, steps, losses, RATE)

# %%
# Which are right?
# ----------------
# For one network's scores, and for the mean of several.  TRAK takes means of its two factors.  :doc:`/integrations/recipes`
# has the figures, and discusses them.

means = {name: torch.stack(each).mean(0) for name, each in scores.items()}
for dim in DIMS:
    project = partial(PerSampleGrads.project, dim=dim)
    means[f"TRAK, dim {dim}"] = trak(model, train, queries, states, margins, project)
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

if options.table:
    with options.table.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["Scores", "halves, by one network", f"by {options.models}", "95 %, the same network"])
        rows.writerows([name, *(f"{value:.2f}" for value in values)] for name, values in found.items())

plt.rc("font", size=12)
figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
for place, (_, mean, same) in enumerate(found.values()):
    axes.barh(place - 0.2, mean, 0.38, color="C0", label="half of the images" if not place else None)
    axes.barh(place + 0.2, same, 0.38, color="C1", label="95 %, the same network" if not place else None)
axes.set_yticks(range(len(found)), list(found))
axes.set_xlim(0, 1)
axes.set_xlabel("LDS")
axes.invert_yaxis()
figure.legend(loc="outside upper center", ncols=2)
plt.show()
