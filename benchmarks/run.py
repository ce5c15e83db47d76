"""Times per-sample gradients on the network that PyTorch's own tutorial on them times.

    python benchmarks/run.py --output bench

Every round runs each system once, in an order of its own, so that a busy machine slows all of them alike; the table shows
medians, and ratios to the plain forward and backward pass of the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap
from tqdm import tqdm

import autograd_hacks

AIM = 2.0  # times the plain step, for this library


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


Grads = dict[str, Tensor]


def systems(x: Tensor, y: Tensor) -> dict[str, Callable[[], Grads]]:
    """{name: function that runs one step and returns what it left}; each has a copy of the model of its own."""
    torch.manual_seed(0)
    plain_model, hooked = TutorialNet(), TutorialNet()
    hooked.load_state_dict(plain_model.state_dict())
    autograd_hacks.add_hooks(hooked)
    parameters = dict(plain_model.named_parameters())
    buffers = [torch.empty(len(x), *p.shape) for p in parameters.values()]

    def plain() -> Grads:
        plain_model.zero_grad()
        F.nll_loss(plain_model(x), y).backward()
        return {}

    def write_once() -> Grads:
        for buffer in buffers:
            buffer.fill_(0.0)
        return {}

    def loop() -> Grads:
        rows = []
        for sample, target in zip(x.split(1), y.split(1)):
            rows.append(torch.autograd.grad(F.nll_loss(plain_model(sample), target), list(parameters.values())))
        return dict(zip(parameters, map(torch.stack, zip(*rows))))

    def sample_loss(weights: Grads, sample: Tensor, target: Tensor) -> Tensor:
        return F.nll_loss(functional_call(plain_model, weights, sample[None]), target[None])

    detached = {name: p.detach() for name, p in parameters.items()}
    per_sample = vmap(grad(sample_loss), (None, 0, 0))

    def torch_func() -> Grads:
        return per_sample(detached, x, y)

    def hooks() -> Grads:
        hooked.zero_grad()
        F.nll_loss(hooked(x), y).backward()
        autograd_hacks.compute_grad1(hooked)
        return {name: p.grad1 for name, p in hooked.named_parameters()}

    return {
        "plain forward and backward": plain,
        "writing the result once": write_once,
        "one backward per sample": loop,
        "torch.func.vmap(grad)": torch_func,
        "autograd_hacks": hooks,
    }


def measure(steps: dict[str, Callable[[], Grads]], rounds: int) -> dict[str, list[float]]:
    """{name: seconds of each round}, after a check of every result against the loop's."""
    expected = steps["one backward per sample"]()
    for name, step in steps.items():
        for parameter, rows in step().items():
            torch.testing.assert_close(
                rows, expected[parameter], rtol=1e-4, atol=1e-5, msg=f"{name} is wrong on {parameter}"
            )
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    shuffler = random.Random(0)
    for _ in tqdm(range(rounds), desc="rounds", unit="round"):
        # In another order each time: what ran before leaves the allocator and the caches as it likes.
        for name in shuffler.sample(list(steps), len(steps)):
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="folder for the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    torch.manual_seed(0)
    x, y = torch.randn(options.batch_size, 1, 28, 28), torch.randint(10, (options.batch_size,))
    seconds = measure(systems(x, y), options.rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base = medians["plain forward and backward"]

    print(f"tutorial network, batch {options.batch_size}, {options.threads} threads, torch {torch.__version__}")
    print(f"{'':28}{'ms':>9}{'x plain':>9}{'aim':>9}")
    for name, median in medians.items():
        aim = f"<= {AIM:.2f}" if name == "autograd_hacks" else ""
        print(f"{name:28}{1e3 * median:9.1f}{median / base:9.2f}{aim:>9}")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        about = {"torch": torch.__version__, "machine": platform.machine(), **vars(options), "output": None}
        (options.output / "tutorial.json").write_text(json.dumps({"about": about, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
