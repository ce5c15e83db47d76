"""What whole uses are about: made images and texts, networks, and their losses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

CLASSES, SIDE, RATE = 10, 8, 0.1
BOUND, NOISE, BATCH = 1.0, 1.0, 32
SEED = 5

Use = Callable[["Given"], Tensor]
"""Makes everything anew, and returns its numbers."""


@dataclass(frozen=True)
class Given:
    """Images in classes, N 1 8 8, some of them as queries; a network, and its weights as it was trained."""

    train: TensorDataset
    test: TensorDataset
    checkpoints: list[tuple[dict[str, Tensor], float]]
    net: nn.Sequential
    batch: int
    probe: bool = True  # whether forwards are read by their graphs, by this library

    def model(self) -> nn.Sequential:
        return copy.deepcopy(self.net)

    def loader(self, data: TensorDataset | None = None, batch: int | None = None) -> DataLoader[Any]:
        return DataLoader(self.train if data is None else data, batch_size=batch or self.batch)


def given(samples: int = 6400, queries: int = 200, batch: int = 200) -> Given:
    draws = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, 1, SIDE, SIDE, generator=draws)
    y = torch.randint(CLASSES, (samples + queries,), generator=draws)
    x = centres[y] + 1.5 * torch.randn(len(y), 1, SIDE, SIDE, generator=draws)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, CLASSES),
    )  # fmt: skip
    optimizer, checkpoints = torch.optim.SGD(net.parameters(), RATE), []
    for _ in range(4):
        for own in torch.arange(samples).split(50):
            optimizer.zero_grad()
            F.cross_entropy(net(x[own]), y[own]).backward()
            optimizer.step()
        checkpoints.append(({name: p.clone() for name, p in net.state_dict().items()}, RATE))
    train, test = (TensorDataset(a, b) for a, b in zip(x.split([samples, queries]), y.split([samples, queries])))
    return Given(train, test, checkpoints, net, batch)


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def private_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE * SIDE, 100), nn.Tanh(), nn.Linear(100, 20), nn.Tanh(), nn.Linear(20, CLASSES)
    )


def poisson(of: Given) -> Iterator[tuple[Tensor, Tensor]]:
    """Two epochs, in which each sample is drawn with the same probability."""
    draws, (x, y) = torch.Generator().manual_seed(2), of.train.tensors
    for _ in range(2 * len(x) // BATCH):
        own = torch.rand(len(x), generator=draws) < BATCH / len(x)
        if own.any():  # opacus' own loss is a mean
            yield x[own], y[own]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
