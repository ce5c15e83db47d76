"""Private training by hand: batches and noise by the same seeds, rows by one backward pass for each sample; and the
documentation's loop, with the same settings."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from math import cos, inf, log, pi, sin, sqrt
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from oracle import of_classes as losses
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from autograd_hacks.private import PrivateTraining, QuantileClip

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
SIZE, EXPECTED, BOUND, NOISE, LR = 30, 6, 0.5, 1.1, 0.3
SEED = 0x5EED_5EED_5EED_5EED_5EED_5EED_5EED_5EED
"""Too long to be guessed, if it weren't written here."""
STEPS = 5  # of an epoch


# Random numbers of a secret, in Python's own numbers and by nothing of the package: a hash, Philox, Box and Muller's formula


def words(counter: list[int], low: int, high: int) -> list[int]:
    """Philox 4x32 with 10 rounds.  low, high: the key's words"""
    a, b, c, d = counter
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = q >> 32 ^ b ^ low, q % 2**32, p >> 32 ^ d ^ high, p % 2**32
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def secret(*fields: object) -> bytes:
    return sha256(repr(fields).encode()).digest()


def integers(of: bytes, count: int) -> list[int]:
    """Of 64 bits, by Philox 4x64 with 10 rounds."""
    key, counter = (int.from_bytes(half, "big") for half in (of[:16], of[16:]))
    return [int(word) for word in np.random.Philox(key=key, counter=counter << 128).random_raw(count)]


def normals(of: bytes, count: int, width: int = 32) -> list[float]:
    """width: of the numbers, in bits. Those of R cos θ come first"""
    half = (count + 1) // 2
    wide = integers(of, half * width // 32)
    own = wide if width == 64 else [word >> shift & (2**32 - 1) for word in wide for shift in (0, 32)]
    signed = [(n + 2 ** (width - 1)) % 2**width - 2 ** (width - 1) for n in own]
    sizes = [sqrt(max(0, -2 * log(abs(u + 0.5) / 2 ** (width - 1)))) for u in signed[:half]]
    angles = [v * pi / 2 ** (width - 1) for v in signed[half:]]
    return [r * turn(v) for turn in (cos, sin) for r, v in zip(sizes, angles)][:count]


def uniforms(of: bytes, count: int) -> list[float]:
    return [(word >> 11) / 2**53 for word in integers(of, count)]


# Models and data


def data() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(5)
    return torch.randn(SIZE, 4, generator=draws), torch.randint(3, (SIZE,), generator=draws)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def text() -> tuple[Tensor, Tensor]:
    """Tokens above 0 and a padding of zeros, (30, 9), and targets."""
    draws = torch.Generator().manual_seed(6)
    lengths = torch.randint(1, 10, (SIZE, 1), generator=draws)
    tokens = torch.randint(1, 20, (SIZE, 9), generator=draws) * (torch.arange(9) < lengths)
    return tokens, torch.randint(3, (SIZE,), generator=draws)


class Reader(nn.Module):
    """Attention over the words of a text, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(20, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        is_word = x > 0
        h = self.layer(self.table(x), src_key_padding_mask=~is_word) * is_word[..., None]
        return self.last(h.sum(1) / is_word.sum(1, keepdim=True))


def losses_of_text(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Without the columns that are padding in the whole batch, so that its length is another in each step."""
    return losses(model, x[:, x.any(0)], y)


def by_hand(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    steps: int = 2 * STEPS,
    loss: Loss = losses,
    expected: int = EXPECTED,
    groups: Sequence[object] | None = None,
) -> nn.Module:
    """The model, trained by SGD.  groups: each sample's user, if users are drawn and clipped"""
    ids = range(len(x)) if groups is None else groups
    units = [[n for n, own in enumerate(ids) if own == user] for user in dict.fromkeys(ids)]
    for t in range(steps):
        drawn = torch.tensor(uniforms(secret(SEED, "batch", t), len(units)), dtype=torch.float64) < expected / len(units)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        total = {name: torch.zeros_like(p) for name, p in named.items()}
        for unit in drawn.nonzero()[:, 0].tolist():
            model.zero_grad()
            for n in units[unit]:
                loss(model, x[n : n + 1], y[n : n + 1]).sum().backward()
            grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}
            norm = torch.cat([g.flatten() for g in grads.values()]).norm()
            for name, g in grads.items():
                total[name] += g * min(1.0, BOUND / float(norm))
        width = 8 * min(p.element_size() for p in named.values())
        numbers = normals(secret(secret(SEED, "noise", t), 0), sum(p.numel() for p in named.values()), width)
        noise = torch.tensor(numbers, dtype=torch.float64)
        with torch.no_grad():
            for (name, p), own in zip(named.items(), noise.split([p.numel() for p in named.values()])):
                p -= LR * (total[name] / expected + NOISE * BOUND / expected * own.view(p.shape).to(p.dtype))
    model.zero_grad()
    return model


def dataset() -> TensorDataset:
    return TensorDataset(*data())


def training(**options: Any) -> PrivateTraining:
    """With the documentation's settings.  clip='a quantile': a bound that follows one"""
    if options.get("clip") == "a quantile":
        options["clip"] = QuantileClip(0.5, deviation=3.0)
    given = {"max_norm": BOUND, "noise_multiplier": NOISE, "expected_batch_size": EXPECTED, "delta": 1e-3, "seed": SEED}
    return PrivateTraining(**(given | options))


def train(
    private: PrivateTraining,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    epochs: int = 1,
    upto: float = inf,
    between: Callable[[], object] = lambda: None,
    given: Sequence[Tensor] = (),
    loss: Loss = losses,
    **options: Any,
) -> list[Any]:
    """The documentation's loop.

    upto: how many steps at the most    between: what is done before the optimizer's steps    given: samples, if not `data`
    """
    optimizer, done = torch.optim.SGD(model.parameters(), lr=LR) if optimizer is None else optimizer, list[Any]()
    with private.attach(model, optimizer):
        for _ in range(epochs):
            for x, y in private.loader(TensorDataset(*(given or data())), **options):
                private.backward(loss(model, x, y))
                if (found := private.step()) is not None:
                    between()
                    optimizer.step()
                    optimizer.zero_grad()
                    done.append(found)
                    if len(done) >= upto:
                        return done
    return done


def assert_by_hand(model: nn.Module, steps: int = STEPS, **tolerance: float) -> None:
    """It was trained as by hand."""
    assert_close(model.state_dict(), by_hand(net(), *data(), steps).state_dict(), **tolerance)
