"""What would add up one process's samples alone is refused."""

import pytest
import torch.nn.functional as F
from processes import Both, both
from torch.nn.parallel import DistributedDataParallel
from trained import data, net

from autograd_hacks.integrations.steps import Steps

__all__ = ["both"]  # a fixture


def test_processes_are_refused(both: Both) -> None:
    both(refused)


def refused() -> None:
    model, steps, (x, y) = DistributedDataParallel(net()), Steps(), data()
    steps.attach(model)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(NotImplementedError, match="a step's gradients: the model shares its batches"):
        steps.read()
    steps.detach()
