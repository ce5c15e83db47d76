"""What the examples share: the digits, the command line, a place for the picture."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

try:
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
    from tqdm import tqdm as tqdm
except ImportError as missing:
    print(f"the demo needs {missing.name}: pip install 'autograd-hacks[demo]'", file=sys.stderr)
    sys.exit(2)

torch.set_num_threads(1)  # for networks as small as these, more threads mostly wait for each other


def handwritten_digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 images, N 1 8 8, from 0 to 1; and their labels, N."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


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


def command_line(description: str, **numbers: tuple[int, str]) -> argparse.ArgumentParser:
    """numbers: {option: (default, what it says)}, each at least 1"""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo-output"), metavar="DIR", help="where the picture goes")
    for name, (default, says) in numbers.items():
        parser.add_argument("--" + name.replace("_", "-"), type=positive, default=default, metavar="N", help=says)
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    return parser


def save(figure: Figure, options: argparse.Namespace, name: str) -> None:
    """Writes the picture, and says where; in the gallery, which keeps it by itself, nothing."""
    if "DEMO_IN_GALLERY" in os.environ:
        return
    options.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output / name, dpi=110)
    print(f"\nthe picture: {options.output / name}")
