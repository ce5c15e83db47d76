"""What would add up one process's samples alone is refused."""

import pytest
import torch
import torch.nn.functional as F
from processes import Both
from torch.nn.parallel import DistributedDataParallel
from trained import data, net

import autograd_hacks
from autograd_hacks.integrations.steps import Steps


@pytest.mark.slow
def test_processes_are_refused(both: Both) -> None:
    both(refused)


def test_losses_in_several_tasks_are_refused(both: Both) -> None:
    pytest.importorskip("torchjd")
    both(losses_refused)


def losses_refused() -> None:
    from torchjd.aggregation import Mean

    from autograd_hacks.integrations.torchjd import jacobian_descent

    model, (x, y) = DistributedDataParallel(net()), data()
    autograd_hacks.add_hooks(model)
    losses = F.cross_entropy(model(x), y, reduction="none")
    with pytest.raises(NotImplementedError, match="jacobian_descent: the sum would cover one process"):
        jacobian_descent(model, Mean(), losses=torch.stack([losses, 2 * losses], 1))


def refused() -> None:
    model, steps, (x, y) = DistributedDataParallel(net()), Steps(), data()
    steps.attach(model)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(NotImplementedError, match="a step's gradients: the sum would cover one process"):
        steps.read()
    steps.detach()
