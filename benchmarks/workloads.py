"""What is timed: models, batches, and the losses of their samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

Batch = dict[str, Tensor]
Model = Callable[..., Any]
Alone = Callable[[Callable[[Tensor], Tensor], Batch], Tensor]
"""A sample's loss, of what makes a number of its x, and of the sample."""


@dataclass(frozen=True)
class Workload:
    """model: makes one    batch: of a step's number    losses: N, of the model and a batch
    drawn: whether the model draws random numbers, by which a sample's loss differs from that of the sample alone
    dtype: in which this library is compared with one backward pass per sample
    alone: a sample's loss as ``torch.func`` wants it, where it can't take `losses`
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    losses: Callable[[Model, Batch], Tensor]
    drawn: bool = False
    dtype: torch.dtype = torch.float64
    alone: Alone | None = None


class TutorialNet(nn.Module):
    """https://docs.pytorch.org/tutorials/intermediate/per_sample_grads.html"""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


class Classifier(nn.Module):
    """A Transformer on vectors, pooled over the positions."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.GroupNorm(8, out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.GroupNorm(8, out)
        self.short = nn.Sequential()
        if stride > 1 or into != out:
            self.short = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.GroupNorm(8, out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


def resnet18(width: int) -> nn.Module:
    """ResNet-18 for images of 32 x 32, with GroupNorm in the place of BatchNorm."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.GroupNorm(8, width), nn.ReLU()]
    into = width
    for stage in range(4):
        out = width * 2**stage
        layers += [Block(into, out, 1 if stage == 0 else 2), Block(out, out, 1)]
        into = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 10))


def depthwise(width: int) -> nn.Module:
    """Convolutions of one channel each, and of one pixel each, as MobileNet has them."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Conv2d(width, width, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class LastState(nn.Module):
    """An LSTM whose last output is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Bag(nn.Module):
    """The mean of a sentence's word vectors, classified."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).mean(1))


class UNet(nn.Module):
    """Denoises images.  Returns each sample's loss; noise and times are drawn inside, unless they are given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, 2 * width))
        self.into, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, 2 * width), nn.GroupNorm(4, width)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.out = nn.Conv2d(2 * width, 3, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: Tensor, time: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        time = torch.rand_like(x[:, 0, 0, 0]) if time is None else time
        noise = torch.randn_like(x) if noise is None else noise
        t = time[:, None, None, None]
        angles = time[:, None] * torch.arange(1, 9, device=x.device, dtype=x.dtype)
        h = self.into((1 - t) * x + t * noise)
        low = self.down(F.silu(h)) + self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        low = low + self.middle(F.silu(self.norm1(low)))
        found = self.out(torch.cat([h, F.silu(self.norm2(self.up(low)))], 1)) * self.scale
        return (found - noise).square().flatten(1).mean(1)


def classification(model: Model, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def next_token(model: Model, batch: Batch) -> Tensor:
    logits = model(**batch).logits
    targets = batch.get("decoder_input_ids", batch["input_ids"])
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), targets[:, 1:], reduction="none").mean(1)


def vectors(samples: int, width: int) -> Callable[[int], Batch]:
    """A new length at each step."""
    return lambda step: {
        "x": torch.randn(samples, 48 + 7 * (step % 9), width),
        "y": torch.randint(10, (samples,)),
    }


def tokens(samples: int, length: int, words: int) -> Callable[[int], Batch]:
    return lambda step: {"input_ids": torch.randint(3, words, (samples, length))}


def pictures(samples: int, size: int) -> Callable[[int], Batch]:
    return lambda step: {"pixel_values": torch.randn(samples, 3, size, size)}


def of_shape(samples: int, *shape: int) -> Callable[[int], Batch]:
    return lambda step: {"x": torch.randn(samples, *shape), "y": torch.randint(10, (samples,))}


def sentences(samples: int, length: int, words: int) -> Callable[[int], Batch]:
    return lambda step: {"x": torch.randint(words, (samples, length)), "y": torch.randint(10, (samples,))}


def hugging_face(model: str, config: str, training: bool = False, **arguments: Any) -> Callable[[], nn.Module]:
    """A randomly initialised model of the transformers library, in eval mode, which draws no dropout.

    training: in training mode, which Opacus wants, without dropout
    """

    def build() -> nn.Module:
        import transformers

        own = getattr(transformers, config)(**arguments)
        for name in [name for name in own.to_dict() if "drop" in name] if training else ():
            setattr(own, name, 0.0)
        net: nn.Module = getattr(transformers, model)(own)
        return net.train(training)

    return build


def multilayer(*widths: int, between: Callable[[], nn.Module] = nn.ReLU) -> Callable[[], nn.Module]:
    """Linear layers of these widths with ReLU, or something else, between."""

    def build() -> nn.Module:
        layers = [layer for into, out in pairwise(widths) for layer in (nn.Linear(into, out), between())]
        return nn.Sequential(*layers[:-1])

    return build


def three_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def stack(count: int, width: int, samples: int) -> Workload:
    """So many linear layers of one width; classes are the last one's outputs."""
    return Workload(multilayer(*[width] * (count + 1)), of_shape(samples, width), classification)


MODELS = {
    "tutorial CNN, N 64": Workload(TutorialNet, of_shape(64, 1, 28, 28), classification),
    "MLP 784-512-512-10, N 256": Workload(multilayer(784, 512, 512, 10), of_shape(256, 784), classification),
    "ResNet-18 GroupNorm width 32, N 16": Workload(lambda: resnet18(32), of_shape(16, 3, 32, 32), classification),
    "depthwise CNN width 64, N 32": Workload(lambda: depthwise(64), of_shape(32, 3, 32, 32), classification),
    "Transformer d 256, 4 layers, T 128, N 16": Workload(
        lambda: Classifier(256, 4), of_shape(16, 128, 256), classification
    ),
    "LSTM 64-128, T 64, N 64": Workload(LastState, of_shape(64, 64, 64), classification),
    "Embedding 10,000 x 64, T 32, N 32": Workload(lambda: Bag(10_000, 64), sentences(32, 32, 10_000), classification),
    "50 linear layers of width 16, N 8": stack(50, 16, 8),
    "Transformer d 128, a new length each step, N 16": Workload(
        lambda: Classifier(128, 2), vectors(16, 128), classification
    ),
}  # fmt: skip
CONVOLUTIONS = {"three convolutions, N 16": Workload(three_convolutions, of_shape(16, 3, 32, 32), classification)}
STACKS = {
    f"{count} layers of {width}, N 4": stack(count, width, 4) for width in (16, 512) for count in (10, 50, 200)
}  # fmt: skip
