"""What the examples share: the digits, the command line, plain training, clocks, a place for the picture."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

try:
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
    from tqdm import tqdm as tqdm
except ImportError as missing:
    print(f"the demo needs {missing.name}: pip install 'autograd-hacks[demo]'", file=sys.stderr)
    sys.exit(2)

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

Name = TypeVar("Name")
torch.set_num_threads(1)  # for networks as small as these, more threads mostly wait for each other


def handwritten_digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 images, N 1 8 8, from 0 to 1; and their labels, N."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


def rotated(images: Tensor, angle: float) -> Tensor:
    """The images, N 1 H W, turned by an angle in degrees."""
    a = math.radians(angle)
    turn = torch.tensor([[math.cos(a), -math.sin(a), 0], [math.sin(a), math.cos(a), 0]])
    return F.grid_sample(
        images, F.affine_grid(turn.expand(len(images), 2, 3), list(images.shape), False), align_corners=False
    )


def with_wrong_labels(true: Tensor, share: float, seed: int) -> Tensor:
    """The labels, of which a share is drawn anew among the nine others.  true: N"""
    draws, given = torch.Generator().manual_seed(seed), true.clone()
    chosen = torch.randperm(len(true), generator=draws)[: round(share * len(true))]
    given[chosen] = (true[chosen] + torch.randint(1, 10, (len(chosen),), generator=draws)) % 10
    return given


def small_cnn(seed: int) -> nn.Module:
    """For the digits: two convolutions and two linear layers; the same weights for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    epochs: int,
    batch_size: int,
    after: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Trains plainly, with cross entropy.  after: called after each epoch, with the number of epochs done"""
    for epoch in tqdm(range(epochs), desc="training", unit="epoch"):
        for batch in torch.randperm(len(images)).split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        after(epoch + 1)


def follow(name: str, step: Callable[[], object], steps: int, look: Callable[[], Any]) -> tuple[list[float], list[Any]]:
    """Takes steps.  Returns, of before the first and after each, the seconds that they took and what ``look`` saw."""
    seconds, seen = [0.0], [look()]
    for _ in tqdm(range(steps), desc=name):
        start = time.perf_counter()
        step()
        seconds.append(seconds[-1] + time.perf_counter() - start)
        seen.append(look())
    return seconds, seen


def seconds_of(ways: dict[Name, Callable[[], Any]], rounds: int = 10) -> dict[Name, float]:
    """What each way takes at least, of some rounds in which they take turns."""
    taken: dict[Name, list[float]] = {name: [] for name in ways}
    for name, way in rounds * list(ways.items()):
        start = time.perf_counter()
        way()
        taken[name].append(time.perf_counter() - start)
    return {name: min(own) for name, own in taken.items()}


def furthest(ours: Any, theirs: Any) -> float:
    """The largest distance between numbers of two lists of tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs))


def peer(name: str, install: str) -> ModuleType | None:
    """A system to compare with; where it is not installed, a line that says so, and None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own
            return importlib.import_module(name)
    except ImportError as missing:
        print(f"not compared with {name}, for want of {missing.name}: pip install {install}")
        return None


def needs(name: str, extra: str) -> None:
    """Ends the example, with a line that says what to install, where there is no such package."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    except ImportError as missing:
        print(f"the demo needs {missing.name}: pip install 'autograd-hacks[demo,{extra}]'", file=sys.stderr)
        sys.exit(2)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def command_line(**numbers: tuple[float, str]) -> argparse.Namespace:
    """What was chosen.  numbers: {option: (default, what it says)}; those that count something are at least 1"""
    about = (sys.modules["__main__"].__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(description="".join(about[1:2]), formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo-output"), metavar="DIR", help="where the picture goes")
    for name, (default, says) in numbers.items():
        kind, letter = (positive, "N") if isinstance(default, int) else (float, "R")
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=default, metavar=letter, help=says)
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    return parser.parse_args()


def reliability(p: Tensor, labels: Tensor, count: int = 6) -> tuple[Tensor, float]:
    """Confidence and accuracy in bins of equally many samples, 2 count; and their mean distance, the calibration error."""
    confidence, guess = p.max(1)
    both = torch.stack([confidence, (guess == labels).float()])
    bins = torch.stack([both[:, own].mean(1) for own in confidence.argsort().tensor_split(count)], 1)
    return bins, float((bins[0] - bins[1]).abs().mean())


def panels(count: int = 2, **settings: Any) -> tuple[Figure, Any]:
    """A figure and its axes, beside each other, on a light grid.  settings: of ``plt.subplots``"""
    settings = {"figsize": (11, 4.2), "layout": "constrained", **settings}
    figure, axes = plt.subplots(1, count, **settings)
    for own in figure.axes:
        own.grid(alpha=0.3)
    return figure, axes


def sheet(places: Any, indices: Tensor, images: Tensor, given: Tensor, true: Tensor) -> None:
    """Draws some images with their labels, in red where these were made wrong."""
    for place, index in zip(places.flat, indices.tolist()):
        place.imshow(images[index, 0], cmap="gray_r")
        color = "black" if given[index] == true[index] else "crimson"
        place.set_title(f"given {given[index]}\ntrue {true[index]}", color=color, fontsize=11)
        place.set(xticks=[], yticks=[])


def save(figure: Figure, options: argparse.Namespace, name: str) -> None:
    """Writes the picture, and says where; in the gallery, which keeps by itself what a block draws, nothing."""
    if "DEMO_IN_GALLERY" in os.environ:
        return
    options.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output / name, dpi=110)
    print(f"\nthe picture: {options.output / name}")
