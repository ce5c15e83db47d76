"""
Private training over processes
===============================

Under ``fully_shard``: the same numbers with one, two and four processes.

A network learns handwritten digits by DP-SGD (Abadi et al. 2016, arXiv:1607.00133): batches are drawn at random, each
sample's gradient is clipped, noise is added to the sum, and the result is divided by the expected size of a batch.  Each
process holds a part of the weights and of each batch, but the loop is the same as for one process::

    torchrun --nproc-per-node 2 docs/examples/private_processes.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.fsdp import fully_shard

import autograd_hacks

EXPECTED, BOUND, NOISE, RATE = 256, 1.0, 1.0, 2.0


def digits(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, 1797 × 64, and their labels."""
    found = load_digits()
    images = torch.tensor(found.data / 16, dtype=torch.float64, device=device)
    return images, torch.tensor(found.target, device=device)


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 10)).to(device, torch.float64)
    for layer in (model[0], model[3]):
        fully_shard(layer)
    fully_shard(model)
    return model


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(images).argmax(1) == labels).double().mean())


def train(steps: int) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    images, labels = digits(device)
    test, images, labels = (images[1500:], labels[1500:]), images[:1500], labels[:1500]
    # The same on all processes, and in all runs, to compare them.  Where the weights are published, leave noise= out.
    model, draws = network(device), torch.Generator().manual_seed(1)
    autograd_hacks.add_hooks(model, param_grad=False, independent=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    for step in range(1, steps + 1):
        drawn = (torch.rand(len(images), generator=draws) < EXPECTED / len(images)).nonzero()[:, 0]
        mine = drawn[dist.get_rank() :: dist.get_world_size()].to(device)  # this process's samples, perhaps none
        losses = F.cross_entropy(model(images[mine]), labels[mine], reduction="none")
        autograd_hacks.backward(losses, "sum")
        norms = autograd_hacks.private.clip_and_noise_(model, BOUND, NOISE, EXPECTED, noise=draws).norms
        optimizer.step()
        if step % 10 == 0:
            totals = torch.stack([losses.detach().sum(), (norms > BOUND).double().sum()])
            dist.all_reduce(totals)
            score = accuracy(model, *test)
            if dist.get_rank() == 0:
                loss, clipped = (totals / len(drawn)).tolist()
                print(f"step {step:3}: {len(drawn)} samples, loss {loss:.6f}, clipped {clipped:.3f}, accuracy {score:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[1])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    if "RANK" in os.environ:  # torchrun says which process this is
        dist.init_process_group()
    else:
        os.environ.update(alone)
        dist.init_process_group(init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        train(steps)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
