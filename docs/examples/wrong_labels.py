"""Finds wrong labels among handwritten digits: images that a network has to be told twice have long gradients.

python docs/examples/wrong_labels.py --output demo-output
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

import autograd_hacks

try:
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError as missing:
    print(f"the demo needs {missing.name}: pip install 'autograd-hacks[demo]'", file=sys.stderr)
    sys.exit(2)

PLANTED = 0.05  # the share of labels that are made wrong
Rows = dict[str, Tensor]


@dataclass
class Digits:
    """Handwritten digits, some of them under a wrong label."""

    images: Tensor  # N 1 8 8
    true: Tensor  # N
    given: Tensor  # N

    @property
    def wrong(self) -> Tensor:
        return self.given != self.true


def handwritten_digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 images, N 1 8 8, from 0 to 1; and their labels, N."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


def plant_wrong_labels(seed: int) -> Digits:
    """The digits, 5 % of them under another digit's label."""
    images, true = handwritten_digits()
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(true), generator=generator)[: round(PLANTED * len(true))]
    given = true.clone()
    given[chosen] = (true[chosen] + torch.randint(1, 10, (len(chosen),), generator=generator)) % 10
    return Digits(images, true, given)


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def train(model: nn.Module, digits: Digits, epochs: int, batch_size: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = [epoch_batch for _ in range(epochs) for epoch_batch in torch.randperm(len(digits.images)).split(batch_size)]
    with tqdm(batches, desc="training", unit="batch") as progress:
        for batch in progress:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(digits.images[batch]), digits.given[batch])
            loss.backward()
            optimizer.step()
            progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def gradient_norms(model: nn.Module, digits: Digits, batch_size: int) -> Tensor:
    """N, the length of every image's own gradient over all parameters."""
    norms = []
    with autograd_hacks.add_hooks(model):
        for images, labels in zip(digits.images.split(batch_size), digits.given.split(batch_size)):
            model.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            autograd_hacks.compute_grad1(model)
            squares = [p.grad1.flatten(1).square().sum(1) for p in model.parameters()]
            norms.append(torch.stack(squares).sum(0).sqrt())
    return torch.cat(norms)


def three_ways(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Callable[[], Rows]]:
    """{name: function that returns every image's gradient}"""
    names = [name for name, _ in model.named_parameters()]

    def loop() -> Rows:
        rows = [
            torch.autograd.grad(F.cross_entropy(model(image), label), list(model.parameters()))
            for image, label in zip(images.split(1), labels.split(1))
        ]
        return dict(zip(names, map(torch.stack, zip(*rows))))

    def one_loss(weights: Rows, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, image[None]), label[None])

    def torch_func() -> Rows:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        return vmap(grad(one_loss), (None, 0, 0))(weights, images, labels)

    def hooks() -> Rows:
        F.cross_entropy(model(images), labels).backward()
        autograd_hacks.compute_grad1(model)
        return {name: p.grad1 for name, p in model.named_parameters()}

    return {"one backward per image": loop, "torch.func.vmap(grad)": torch_func, "autograd_hacks": hooks}


def compare(model: nn.Module, images: Tensor, labels: Tensor, rounds: int = 10) -> None:
    """Prints how far the ways are from the loop, and their times, measured in turn."""
    with autograd_hacks.add_hooks(model):
        ways = three_ways(model, images, labels)
        expected = ways["one backward per image"]()
        print(f"\nthe gradients of {len(images)} images, each on its own:")
        print(f"{'':24}{'ms':>8}{'furthest from the loop':>26}")
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - start)
        for name, way in ways.items():
            furthest = max((rows - expected[key]).abs().max().item() for key, rows in way().items())
            print(f"{name:24}{1e3 * statistics.median(seconds[name]):8.1f}{furthest:26.1e}")
        for key, rows in ways["autograd_hacks"]().items():
            torch.testing.assert_close(rows, expected[key], rtol=1e-4, atol=1e-5)


def report(digits: Digits, ranking: Tensor) -> None:
    """Prints how many of the planted errors stand at the top of the ranking."""
    planted = int(digits.wrong.sum())
    print(f"\n{planted} of {len(digits.images)} labels were made wrong. Ranked by the length of their gradients:")
    for share in (0.05, 0.10):
        top = ranking[: round(share * len(ranking))]
        found, chance = int(digits.wrong[top].sum()), share * planted
        print(f"  top {share:4.0%} ({len(top):3} images): {found:3} wrong labels, by chance {chance:.1f}")


def draw(digits: Digits, ranking: Tensor, norms: Tensor, path: Path) -> None:
    """A sheet of the images with the longest gradients."""
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    for place, index in zip(figure.subplots(5, 10).flat, ranking.tolist()):
        given, true, is_wrong = digits.given[index].item(), digits.true[index].item(), digits.wrong[index].item()
        place.imshow(digits.images[index, 0], cmap="gray_r")
        place.set_title(f"given {given}\ntrue {true}", color="crimson" if is_wrong else "black", fontsize=10)
        place.set_xlabel(f"norm {norms[index]:.1f}", fontsize=8)
        place.set_xticks([])
        place.set_yticks([])
    figure.suptitle("The images with the longest gradients; in red those whose label was made wrong")
    figure.savefig(path, dpi=110)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def command_line(description: str, batch_size: int, epochs: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo-output"), metavar="DIR", help="where the picture goes")
    parser.add_argument("--batch-size", type=positive, default=batch_size, metavar="N", help="images in a batch")
    parser.add_argument("--epochs", type=positive, default=epochs, metavar="N", help="rounds through the images")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    return parser


def main() -> None:
    options = command_line(
        "Plants wrong labels among scikit-learn's handwritten digits, trains a small network on them, and finds them again "
        "by the length of each image's own gradient.",
        batch_size=64,
        epochs=5,
    ).parse_args()
    torch.manual_seed(options.seed)
    digits, model = plant_wrong_labels(options.seed), small_cnn()
    train(model, digits, options.epochs, options.batch_size)
    norms = gradient_norms(model, digits, options.batch_size)
    ranking = norms.argsort(descending=True)
    report(digits, ranking)
    compare(model, digits.images[: options.batch_size], digits.given[: options.batch_size])
    options.output.mkdir(parents=True, exist_ok=True)
    picture = options.output / "longest-gradients.png"
    draw(digits, ranking, norms, picture)
    print(f"\nthe images with the longest gradients: {picture}")


if __name__ == "__main__":
    main()
