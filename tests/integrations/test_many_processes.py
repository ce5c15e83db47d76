"""What would add up one process's samples alone is refused."""

import pytest
import torch
from needed import needed
from processes import Both, both
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from trained import data, net

import autograd_hacks
from autograd_hacks.integrations.steps import Steps

__all__ = ["both"]  # a fixture

needed("opacus", "torchjd.aggregation", "quadprog", "qpsolvers")


def test_processes_are_refused(both: Both) -> None:
    both(refused)


def refused() -> None:
    needed("opacus", "torchjd.aggregation")
    from torchjd.aggregation import UPGrad

    from autograd_hacks.integrations.opacus import DPOptimizer, PrivacyEngine
    from autograd_hacks.integrations.torchjd import jacobian_descent

    model, steps = DistributedDataParallel(net()), Steps()
    sgd = torch.optim.SGD(model.parameters())
    options = {
        "data_loader": DataLoader(TensorDataset(*data()), batch_size=4),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    }
    with pytest.raises(NotImplementedError, match="distributed model"):
        PrivacyEngine().make_private(module=model, optimizer=sgd, **options)
    autograd_hacks.add_hooks(model)
    optimizer = DPOptimizer(sgd, model=model, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)
    model(data()[0]).square().sum(1).mean().backward()
    for read in (optimizer.step, lambda: jacobian_descent(model, UPGrad())):
        with pytest.raises(NotImplementedError, match="one process alone"):
            read()
    steps.attach(model)
    model(data()[0]).square().sum(1).mean().backward()
    with pytest.raises(NotImplementedError, match="one process alone"):
        steps.read()
