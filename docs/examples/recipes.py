"""Scores of training samples, D E: how far each of D training samples speaks for what the model says of each of E others.

model: with hooks, ``add_hooks(model)``    train, queries: batches of (inputs, labels), always in one order
A high score says that the training sample makes the other's loss smaller.  The model has its own weights again afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import autograd_hacks
from autograd_hacks import Metric, PerSampleGrads, over

Batches = Iterable[Any]
State = Mapping[str, Tensor]


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def margins(model: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    """log p / (1 - p) of the label: its logit less the logsumexp of the others, which is finite where p rounds to 1."""
    logits, own = model(batch[0]), batch[1][:, None]
    return logits.gather(1, own)[:, 0] - logits.scatter(1, own, float("-inf")).logsumexp(1)


def dots(model: nn.Module, train: Batches, queries: Batches) -> Tensor:
    """⟨g, g′⟩."""
    return over(model, train, losses, PerSampleGrads.gram, against=queries)


def cosines(model: nn.Module, train: Batches, queries: Batches) -> Tensor:
    """⟨g, g′⟩ / (‖g‖ ‖g′‖)."""
    return over(model, train, losses, PerSampleGrads.cosine, against=queries)


def tracin(model: nn.Module, train: Batches, queries: Batches, checkpoints: Sequence[tuple[State, float]]) -> Tensor:
    """Σ η ⟨g, g′⟩ over checkpoints.  checkpoints: of training, [(state, learning rate), ...]
    Source: Pruthi et al. 2020 (arXiv:2002.08484)."""
    return over(model, train, losses, PerSampleGrads.gram, against=queries, checkpoints=checkpoints)


def ekfac(model: nn.Module, train: Batches, queries: Batches) -> Tensor:
    """⟨g, (EKFAC + λ)⁻¹ g′⟩.  Source: Grosse et al. 2023 (arXiv:2308.03296)."""
    autograd_hacks.compute_hess_over(model, train, kind="ekfac")
    inverse = Metric.from_ekfac(model)
    return over(model, train, losses, lambda own, others: own.gram(others.preconditioned(inverse)), against=queries)


def trak(model: nn.Module, train: Batches, queries: Batches, states: Sequence[State], dim: int = 128) -> Tensor:
    """(1 - p) φᵀ (ΦᵀΦ)⁻¹ φ′ for projected gradients φ of the margins, both factors being means over models.
    states: of several trained models    dim: far fewer than there are training samples
    Source: Park et al. 2023 (arXiv:2303.14186)."""
    scores, doubts = [], []
    with brought_back(model):
        for seed, state in enumerate(states):
            model.load_state_dict(state)
            project = partial(PerSampleGrads.project, dim=dim, seed=seed)
            phi, about = (over(model, data, margins, project) for data in (train, queries))
            if dim > len(phi):
                raise ValueError(
                    f"trak was given dim={dim} for {len(phi)} samples, by which ΦᵀΦ has no inverse; expected fewer"
                )
            scores.append(phi @ torch.linalg.solve(phi.mT @ phi, about.mT))
            with torch.no_grad():
                doubts.append(torch.cat([torch.sigmoid(-margins(model, batch)) for batch in train]))
    return torch.stack(doubts).mean(0)[:, None] * torch.stack(scores).mean(0)


def logra(model: nn.Module, train: Batches, queries: Batches, rank: int = 8, damping: float = 0.1) -> Tensor:
    """Σ ⟨G, (H + λ)⁻¹ G′⟩ over parameters, for G = PᵀgQ and their second moment H.
    damping: λ, of H's mean eigenvalue    Source: Choe et al. 2024 (arXiv:2405.13954)."""
    own, others = (by_parameter(model, data, rank) for data in (train, queries))
    inverses = {name: torch.linalg.inv(moment(g, damping)) for name, g in own.items()}
    return torch.stack([own[name] @ inverses[name] @ others[name].mT for name in own]).sum(0)


def less(
    model: nn.Module, train: Batches, queries: Batches, visited: Sequence[tuple[State, Metric, float]], dim: int = 512
) -> Tensor:
    """Σ η cos(R A g, R g′) over checkpoints, for Adam's A = 1 / (√v̂ + eps) and projections R.
    visited: of training, [(state, Metric.from_optimizer(adam) there, learning rate), ...]
    LESS' own code takes the sample's gradient into Adam's moments first; this takes the moments as they are.
    Source: Xia et al. 2024 (arXiv:2402.04333)."""
    scores = []
    with brought_back(model):
        for state, adam, rate in visited:
            model.load_state_dict(state)
            own = over(model, train, losses, lambda grads, by=adam: grads.preconditioned(by).project(dim))
            others = over(model, queries, losses, lambda grads: grads.project(dim))
            scores.append(rate * F.normalize(own) @ F.normalize(others).mT)
    return torch.stack(scores).sum(0)


def trackstar(
    model: nn.Module, train: Batches, queries: Batches, adam: Metric, rank: int = 8, mix: float = 0.5, damping: float = 0.1
) -> Tensor:
    """cos(R^-½ G, R^-½ G′) for G = Pᵀ A g Q, R = (1 - mix) × their second moment + mix × the queries', of each parameter.
    Source: Chang et al. 2024 (arXiv:2410.17413)."""
    own, others = (by_parameter(model, data, rank, adam) for data in (train, queries))
    mixed = {name: (1 - mix) * moment(own[name], damping) + mix * moment(others[name], damping) for name in own}
    roots = {name: power(m, -0.5) for name, m in mixed.items()}
    units = [F.normalize(torch.cat([rows[name] @ roots[name] for name in roots], 1)) for rows in (own, others)]
    return units[0] @ units[1].mT


def in_run(
    model: nn.Module, data: tuple[Tensor, Tensor], queries: Batches, steps: Sequence[tuple[State, Tensor]], rate: float
) -> Tensor:
    """Σ η ⟨g, g′⟩ / B over the steps of B samples that a sample was in: in-run data Shapley, of first order.
    data: all inputs and labels    steps: [(weights before the step, numbers of its samples), ...]
    Here it is read afterwards; a training can take it in its own passes.  Source: Wang et al. 2024 (arXiv:2406.11011)."""
    scores = data[0].new_zeros(len(data[0]), sum(len(labels) for _, labels in queries))
    with brought_back(model):
        for state, chosen in steps:
            model.load_state_dict(state)
            products = over(model, [(data[0][chosen], data[1][chosen])], losses, PerSampleGrads.gram, against=queries)
            scores[chosen] += rate / len(chosen) * products
    return scores


def magic(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    queries: Batches,
    steps: Sequence[tuple[State, Tensor]],
    rate: float,
) -> Tensor:
    """-∂L′/∂wₙ, for training by SGD with steps θ - rate · mean wₙ gₙ, and the others' losses L′ at the last weights, the
    model's.

    data, steps: as in ``in_run``
    Exact.  Each step back takes one pass, and for each of E others ⟨gₙ, λ⟩ of its samples, and λ - rate · Hλ, where Hλ is
    the derivative of their mean.  A model with attention needs ``sdpa_kernel(SDPBackend.MATH)`` around this and around its
    training: fused kernels, flash attention on CPUs among them, have no second derivative.
    Source: Ilyas and Engstrom 2025, "MAGIC" (arXiv:2504.16430).
    """
    names, parameters = zip(*model.named_parameters())
    directions = over(model, queries, losses, PerSampleGrads.dense)  # λ, {name: E, *shape}
    count = len(directions[names[0]])
    scores = data[0].new_zeros(len(data[0]), count)
    with brought_back(model):
        for state, chosen in reversed(steps):
            model.load_state_dict(state)
            mean = losses(model, (data[0][chosen], data[1][chosen])).mean()
            torch.autograd.grad(mean, parameters, create_graph=True)
            grads = autograd_hacks.per_sample_grads(model)
            for e in range(count):
                along = grads.dot({name: directions[name][e] for name in names})
                with autograd_hacks.pause_hooks():
                    products = torch.autograd.grad(along.mean(), parameters, retain_graph=True)
                scores[chosen, e] += rate / len(chosen) * along.detach()
                for name, product in zip(names, products):
                    directions[name][e] -= rate * product
    return scores


def duplicates(model: nn.Module, batches: Batches, above: float, dim: int = 512) -> Tensor:
    """Pairs of samples whose projected gradients have a cosine above a bound, K 2, the most alike first."""
    rows = F.normalize(over(model, batches, losses, lambda grads: grads.project(dim)))
    alike = (rows @ rows.mT).triu(1)
    pairs = (alike > above).nonzero()
    return pairs[alike[pairs[:, 0], pairs[:, 1]].argsort(descending=True)]


# What several of them take.


@contextmanager
def brought_back(model: nn.Module) -> Iterator[None]:
    """The model has its own weights again afterwards."""
    before = copy.deepcopy(model.state_dict())
    try:
        yield
    finally:
        model.load_state_dict(before)


def by_parameter(model: nn.Module, batches: Batches, rank: int, metric: Metric | None = None) -> dict[str, Tensor]:
    """{name: D K}: Pᵀ G Q of each sample, of K ≤ rank² numbers."""

    def projected(grads: PerSampleGrads) -> dict[str, Tensor]:
        grads = grads if metric is None else grads.preconditioned(metric)
        return {name: x.flatten(1) for name, x in grads.project(rank=rank, per_parameter=True).items()}

    return over(model, batches, losses, projected)


def moment(rows: Tensor, damping: float) -> Tensor:
    """Σₙ gₙ gₙᵀ / N + λ, with λ of its mean eigenvalue.  rows: N K.  Returns K K"""
    second = rows.mT @ rows / len(rows)
    return second + damping * second.diagonal().mean() * torch.eye(len(second)).to(second)


def power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values**exponent) @ vectors.mT
