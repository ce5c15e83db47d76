"""What examples are held to, where it takes more than a line: captum's TracIn, kronfluence's EK-FAC, BackPACK's variance."""

from __future__ import annotations

import copy
import tempfile
import warnings
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset


def captum_tracin(model: nn.Module, data: TensorDataset, checkpoints: list[tuple[dict[str, Tensor], float]]) -> Tensor:
    """Self-influence, with captum's own way to take the gradients of a whole batch at once.  Returns N."""
    from captum.influence import TracInCP

    def load(model: nn.Module, checkpoint: Any) -> float:
        model.load_state_dict(checkpoint[0])
        return float(checkpoint[1])

    total = nn.CrossEntropyLoss(reduction="sum")
    best: dict[str, Any] = {"loss_fn": total, "batch_size": 200, "sample_wise_grads_per_batch": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        return TracInCP(copy.deepcopy(model), data, checkpoints, load, **best).self_influence()


def kronfluence_ekfac(model: nn.Module, data: TensorDataset) -> Tensor:
    """Self-influence, N."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.task import Task

    class Digits(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            output = model(batch[0])
            drawn = torch.multinomial(output.detach().softmax(1), 1).flatten()
            return F.cross_entropy(output, drawn if sample else batch[1], reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    task = Digits()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        own = prepare_model(copy.deepcopy(model), task)
        analyzer = Analyzer("digits", own, task, cpu=True, output_dir=folder, disable_tqdm=True)
        analyzer.fit_all_factors("factors", data, 200)
        analyzer.compute_self_scores("scores", "factors", data, 200)
        return analyzer.load_self_scores("scores")["all_modules"]


def backpack_noise(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The variance of the samples' gradients, summed over all parameters."""
    import backpack
    from backpack.extensions import Variance

    warnings.filterwarnings("ignore", "Full backward hook")  # of BackPACK's
    extended, criterion = backpack.extend(copy.deepcopy(model)), backpack.extend(nn.CrossEntropyLoss())
    with backpack.backpack(Variance()):
        criterion(extended(images), labels).backward()
    n = len(images)  # its gradients are over N, and its mean square is over N, and not N - 1
    return float(sum(p.variance.sum() for p in extended.parameters())) * n**2 * n / (n - 1)
