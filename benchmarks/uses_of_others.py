"""The same uses by the systems that are trusted with them, each at its own best settings."""

from __future__ import annotations

import tempfile
from typing import Any

import given
import torch
import torch.nn as nn
import torch.nn.functional as F
from given import Given
from torch import Tensor


def torchjd_grams(of: Given) -> Tensor:
    from torchjd.autogram import Engine

    model = of.model()
    engine = Engine(model, batch_dim=0)
    return torch.cat([engine.compute_gramian(given.losses(model, batch)).sum(0) for batch in of.loader(batch=64)])


def opacus_private(of: Given, ghost: bool = False) -> Tensor:
    from opacus import grad_sample, optimizers
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model, noise = given.private_net(), torch.Generator().manual_seed(3)
    kind = grad_sample.GradSampleModuleFastGradientClipping if ghost else grad_sample.GradSampleModule
    wrapped = kind(model, max_grad_norm=given.BOUND, use_ghost_clipping=True) if ghost else kind(model)
    step = optimizers.DPOptimizerFastGradientClipping if ghost else optimizers.DPOptimizer
    optimizer = step(
        torch.optim.SGD(model.parameters(), given.RATE), noise_multiplier=given.NOISE, max_grad_norm=given.BOUND,
        expected_batch_size=given.BATCH, generator=noise,
    )  # fmt: skip
    criterion: Any = nn.CrossEntropyLoss()
    if ghost:
        criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion)
    for x, y in given.poisson(of):
        optimizer.zero_grad()
        criterion(wrapped(x), y).backward()
        optimizer.step()
    return given.weights(model)


def captum(of: Given) -> Tensor:
    from captum.influence import TracInCP

    def load(model: nn.Module, state: Any) -> float:
        model.load_state_dict(state[0])
        return float(state[1])

    model = of.model()
    loss = nn.CrossEntropyLoss(reduction="sum")
    scores = TracInCP(
        model=model, train_dataset=of.train, checkpoints=of.checkpoints, checkpoints_load_func=load, loss_fn=loss,
        batch_size=of.batch, sample_wise_grads_per_batch=True,
    )  # fmt: skip
    found: Tensor = scores.influence(of.test.tensors).T
    return found


def kronfluence(of: Given) -> Tensor:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.task import Task

    class Images(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            output = model(batch[0])
            drawn = torch.multinomial(output.detach().softmax(1), 1).flatten()
            return F.cross_entropy(output, drawn if sample else batch[1], reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    torch.manual_seed(0)
    task = Images()
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_model(of.model(), task)
        analyzer = Analyzer("images", prepared, task, cpu=True, output_dir=folder, disable_tqdm=True)
        analyzer.fit_all_factors("factors", of.train, of.batch)
        analyzer.compute_self_scores("scores", "factors", of.train, of.batch)
        found: Tensor = analyzer.load_self_scores("scores")["all_modules"]
        return found
