"""Callbacks in Lightning: the steps of single samples, however they are split, and private steps, as by hand."""

import copy
from pathlib import Path
from typing import Any

import private_steps as hand
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from private_steps import BOUND, EXPECTED, NOISE, SEED, STEPS, by_hand
from rarely import crossed
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset
from trained import LR, MAX_NORM, N, check, data, needed, net, same_in_parts

from autograd_hacks.errors import NothingRecorded
from autograd_hacks.private import PrivateTraining

pl = needed("lightning.pytorch", "opacus")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from autograd_hacks.integrations.lightning import GradsCallback, PrivateCallback  # noqa: E402

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


# Trained privately: against a loop by hand, resumed, and what is refused


class Clips(pl.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: pl.LightningModule, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 0.1)


class Classified(pl.LightningModule):
    def __init__(self, own: nn.Module, reduction: str = "none", extra: bool = False) -> None:
        super().__init__()
        self.own, self.reduction = own, reduction
        self.other = nn.Linear(2, 2) if extra else None

    def training_step(self, batch: Any, number: int) -> Tensor:
        return F.cross_entropy(self.own(batch[0]), batch[1], reduction=self.reduction)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=hand.LR)


def private(**options: Any) -> PrivateTraining:
    given = {"max_norm": BOUND, "noise_multiplier": NOISE, "delta": 1e-3, "seed": SEED, "expected_batch_size": EXPECTED}
    return PrivateTraining(**(given | options))  # type: ignore[arg-type]


def fitted(model: nn.Module, callback: PrivateCallback, loader: Any = None, resume: Any = None, **options: Any) -> Any:
    parts = options.get("accumulate_grad_batches", 1)
    loader = callback.private.loader(TensorDataset(*hand.data()), parts=parts) if loader is None else loader
    given: dict[str, Any] = {
        "max_epochs": 2, "accelerator": "cpu", "callbacks": [callback], "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    trainer = pl.Trainer(**(given | options))
    trainer.fit(model, loader, ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("scales", [False, True])
def test_it_trains_as_a_loop_by_hand(parts: int, scales: bool) -> None:
    model, own = hand.net(), private()
    options: dict[str, Any] = {}
    if scales:
        options["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))
    callback = PrivateCallback(own, "own")
    trainer = fitted(module := Classified(model), callback, accumulate_grad_batches=parts, **options)
    rough = 0.02 if scales else 1e-5  # half precision
    assert_close(model.state_dict(), by_hand(hand.net(), *hand.data()).state_dict(), rtol=rough, atol=rough)
    assert own.history == [(NOISE, EXPECTED / 30, 2 * STEPS)]
    assert trainer.logged_metrics["epsilon"] == pytest.approx(own.epsilon())
    assert callback.last_step is not None
    assert "backward" not in vars(module)
    assert not any(layer._forward_hooks for layer in model.modules())


def test_it_goes_on_from_a_checkpoint_bit_by_bit(tmp_path: Path) -> None:
    whole = hand.net()
    fitted(Classified(whole), PrivateCallback(private(), "own"))
    first = fitted(Classified(hand.net()), PrivateCallback(private(), "own"), max_epochs=1)
    first.save_checkpoint(tmp_path / "kept.ckpt", weights_only=False)
    rest = hand.net()
    callback = PrivateCallback(private(seed=SEED + 99), "own")
    fitted(Classified(rest), callback, resume=tmp_path / "kept.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rest.parameters()))
    assert callback.private.steps == 2 * STEPS


def test_what_would_break_the_guarantee_is_refused() -> None:
    plain = DataLoader(TensorDataset(*hand.data()), batch_size=6, shuffle=True)
    whole, clips = private(), PrivateCallback(private(), "own")
    of_whole = whole.loader(TensorDataset(*hand.data()))
    refused: list[tuple[Any, Any, Any, dict[str, Any], str]] = [
        (Classified(hand.net()), private(), plain, {}, "Poisson-sampled"),
        (Classified(hand.net()), whole, of_whole, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        (Classified(hand.net()), private(), None, {"gradient_clip_val": 0.5},
         r"gradient_clip_val=0\.5, which would clip the noisy gradient"),
        (Classified(hand.net(), "mean"), private(), None, {}, "expected N losses"),
        (Classified(hand.net(), extra=True), private(), None, {}, "steps 2 parameters"),
    ]  # fmt: skip
    for model, own, loader, options, words in refused:
        with pytest.raises(ValueError, match=words):
            fitted(model, PrivateCallback(own, "own"), loader, **options)
    with pytest.raises(RuntimeError, match="not the one of private step 0"):  # within the optimizer's closure
        fitted(Classified(hand.net()), clips, callbacks=[clips, Clips()])
