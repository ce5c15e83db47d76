"""A callback in Lightning: the steps of single samples, however they are split."""

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from needed import needed
from rarely import crossed
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset
from trained import LR, MAX_NORM, N, check, data, net, same_in_parts

from autograd_hacks.errors import NothingRecorded

pl = needed("lightning.pytorch")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from autograd_hacks.integrations.lightning import GradsCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Classifier(pl.LightningModule):
    def __init__(self, own: nn.Module, whole: bool = False) -> None:
        super().__init__()
        self.own, self.whole = own, whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy((self if self.whole else self.own)(x), y)

    def validation_step(self, batch: Any, number: int) -> None:
        self.own(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def trained(model: nn.Module, callback: GradsCallback, parts: int = 1, **options: Any) -> Any:
    loader = DataLoader(TensorDataset(*data()), batch_size=N // parts)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[callback],
        accumulate_grad_batches=parts,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=parts,
        limit_val_batches=1,
        **options,
    )
    trainer.fit(model, loader, loader)
    return trainer


@crossed(whole=[False, True], scales=[False, True], max_norm=[MAX_NORM, None], parts=[4, 1])
def test_steps_are_those_of_single_samples(whole: bool, scales: bool, max_norm: float | None, parts: int) -> None:
    model, callback = net(), GradsCallback("" if whole else "own", max_norm=max_norm)
    after, options = copy.deepcopy(model), {}
    if scales:  # without half precision, whose digits a test can't see past
        options["plugins"] = Scaled(torch.amp.GradScaler("cpu", init_scale=2.0**12))
    trainer = trained(Classifier(after, whole), callback, parts, **options)
    check(model, after, callback.history, callback.norms, max_norm)
    assert_close(trainer.callback_metrics["grads/norm_mean"].item(), callback.history[-1]["grads/norm_mean"])


class Scaled(MixedPrecision):
    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        super().__init__("16-mixed", "cpu", scaler)

    def autocast_context_manager(self) -> Any:
        return torch.autocast("cpu", enabled=False)


def clipping() -> GradsCallback:
    return GradsCallback("own", max_norm=MAX_NORM)


def test_mixed_precision() -> None:
    same_in_parts(lambda own, parts: trained(Classifier(own), clipping(), parts, precision="bf16-mixed"), 1e-2)


def test_the_trainers_own_clipping_comes_after() -> None:
    model = net()
    after = same_in_parts(
        lambda own, parts: trained(Classifier(own), clipping(), parts, gradient_clip_val=1e-3), model=model
    )
    moved = torch.stack([(a - b).norm() for a, b in zip(after.parameters(), model.parameters())]).norm()
    assert 0 < moved < 3.01e-3 * LR


def test_what_is_refused() -> None:
    class Two(Classifier):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=LR) for _ in range(2)]

    for kind in (Classifier, Two):
        model = kind(net())
        model.automatic_optimization = False
        with pytest.raises(NotImplementedError, match="expected one"):
            trained(model, GradsCallback())


def test_an_error_in_the_middle_leaves_no_hooks() -> None:
    class Failing(Classifier):
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            if number:
                raise NothingRecorded("enough")
            return super().training_step(batch, number)

    model = net()
    with pytest.raises(NothingRecorded, match="enough"):
        trained(Failing(model), GradsCallback("own"))
    assert not any(layer._forward_hooks for layer in model.modules())


def test_a_sibling_would_be_stepped_unclipped() -> None:
    class WithHead(Classifier):
        def __init__(self) -> None:
            super().__init__(net())
            self.head = nn.Linear(3, 3)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return F.cross_entropy(self.head(self.own(batch[0])), batch[1])

    model = WithHead()
    before = copy.deepcopy(model.head.weight.detach())
    with pytest.raises(ValueError, match="not be clipped"):
        trained(model, GradsCallback("own", max_norm=MAX_NORM))
    assert_close(model.head.weight.detach(), before)
    callback = GradsCallback("own")
    trained(model, callback)
    assert len(callback.history) == 3
