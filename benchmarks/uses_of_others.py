"""The same uses by the systems that are trusted with them, each at its own best settings."""

from __future__ import annotations

import logging
import tempfile
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from given import (
    BATCH,
    BOUND,
    DIM,
    NOISE,
    RATE,
    Given,
    Run,
    checksums,
    losses,
    poisson,
    positions,
    private_net,
    sequence_losses,
    texts,
    weights,
)  # fmt: skip
from torch import Tensor


def torchjd_grams(of: Given) -> Run:
    from torchjd.autogram import Engine

    def run() -> Tensor:
        model = of.model()
        engine = Engine(model, batch_dim=0)
        return torch.cat([engine.compute_gramian(losses(model, batch)).sum(0) for batch in of.loader(batch=64)])

    return run


def opacus_private(of: Given, ghost: bool = False) -> Run:
    from opacus import grad_sample, optimizers
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    def run() -> Tensor:
        model, noise = private_net(), torch.Generator().manual_seed(3)
        kind = grad_sample.GradSampleModuleFastGradientClipping if ghost else grad_sample.GradSampleModule
        wrapped = kind(model, max_grad_norm=BOUND, use_ghost_clipping=True) if ghost else kind(model)
        step = optimizers.DPOptimizerFastGradientClipping if ghost else optimizers.DPOptimizer
        optimizer = step(
            torch.optim.SGD(model.parameters(), RATE), noise_multiplier=NOISE, max_grad_norm=BOUND,
            expected_batch_size=BATCH, generator=noise,
        )  # fmt: skip
        criterion: Any = nn.CrossEntropyLoss()
        if ghost:
            criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion)
        for x, y in poisson(of):
            optimizer.zero_grad()
            criterion(wrapped(x), y).backward()
            optimizer.step()
        return weights(model)

    return run


def captum(of: Given, last: bool = False, itself: bool = False) -> Run:
    from captum.influence import TracInCP, TracInCPFast

    def load(model: nn.Module, state: Any) -> float:
        model.load_state_dict(state[0])
        return float(state[1])

    def run() -> Tensor:
        model = of.model()
        kind = partial(TracInCPFast, final_fc_layer=model[-1]) if last else TracInCP
        more = {} if last else {"sample_wise_grads_per_batch": True}
        loss = nn.CrossEntropyLoss(reduction="sum")
        scores = kind(
            model=model, train_dataset=of.train, checkpoints=of.checkpoints, checkpoints_load_func=load, loss_fn=loss,
            batch_size=of.batch, **more,
        )  # fmt: skip
        found: Tensor = scores.self_influence() if itself else scores.influence(of.test.tensors).T
        return found

    return run


def traker(of: Given) -> Run:
    """With the map drawn once, in one block."""
    from trak import TRAKer
    from trak.projectors import BasicProjector, ProjectionType

    def run() -> Tensor:
        model = of.model().eval()
        count = sum(p.numel() for p in model.parameters())
        projector = BasicProjector(count, DIM, 0, ProjectionType.rademacher, torch.device("cpu"), block_size=DIM)
        with tempfile.TemporaryDirectory() as folder:
            made = TRAKer(
                model, "image_classification", len(of.train), save_dir=folder, device="cpu", projector=projector,
                proj_dim=DIM, use_half_precision=False, logging_level=logging.ERROR,
            )  # fmt: skip
            made.load_checkpoint(model.state_dict(), model_id=0)
            for batch in of.loader():
                made.featurize(batch=batch, num_samples=len(batch[1]))
            rows = torch.as_tensor(made.saver.current_store["grads"][:])
            return rows * (count / DIM) ** 0.5  # it divides by the root of how many parameters there are

    return run


def bergson(of: Given) -> Run:
    """Its collector for callbacks, which keeps a batch's rows."""
    from bergson.collector.gradient_collectors import StreamingGradientCollector

    def run() -> Tensor:
        model = positions()
        vars(model)["device"], vars(model)["dtype"] = torch.device("cpu"), torch.float32  # as models of transformers say
        collector, found = StreamingGradientCollector(model=model, dtype=torch.float32), []
        for x in texts(of):
            with collector:
                sequence_losses(model, x).sum().backward()
            found.append(checksums(dict(collector.mod_grads)))
            model.zero_grad()
        return torch.cat(found)

    return run


def kronfluence(of: Given) -> Run:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.task import Task

    class Images(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            output = model(batch[0])
            drawn = torch.multinomial(output.detach().softmax(1), 1).flatten()
            return F.cross_entropy(output, drawn if sample else batch[1], reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    def run() -> Tensor:
        torch.manual_seed(0)
        task = Images()
        with tempfile.TemporaryDirectory() as folder:
            prepared = prepare_model(of.model(), task)
            analyzer = Analyzer("images", prepared, task, cpu=True, output_dir=folder, disable_tqdm=True)
            analyzer.fit_all_factors("factors", of.train, of.batch)
            analyzer.compute_self_scores("scores", "factors", of.train, of.batch)
            found: Tensor = analyzer.load_self_scores("scores")["all_modules"]
            return found

    return run


def posterior(of: Given, own: bool = False) -> Run:
    """laplace-torch's, with its own backend or ours."""
    from laplace import Laplace
    from laplace.curvature import CurvlinopsGGN

    from autograd_hacks.integrations.laplace import AutogradHacksGGN

    def run() -> Tensor:
        torch.manual_seed(1)
        made = Laplace(
            private_net(), "classification", subset_of_weights="all", hessian_structure="kron",
            backend=AutogradHacksGGN if own else CurvlinopsGGN,
        )  # fmt: skip
        made.fit(of.loader())
        found: Tensor = made(of.test.tensors[0], link_approx="probit").detach()
        return found

    return run
