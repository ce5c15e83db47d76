"""Lightning, trained privately: against a loop by hand, cut, resumed, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from needed import needed
from private_steps import BOUND, EXPECTED, LR, NOISE, SEED, STEPS, by_hand, data, net
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from autograd_hacks.private import PrivateTraining

pl = needed("lightning.pytorch", "opacus")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402  # behind the check that it is installed

from autograd_hacks.integrations.lightning import PrivateCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Clips(pl.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: pl.LightningModule, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 0.1)


class Classifier(pl.LightningModule):
    def __init__(self, own: nn.Module, reduction: str = "none", extra: bool = False) -> None:
        super().__init__()
        self.own, self.reduction = own, reduction
        self.other = nn.Linear(2, 2) if extra else None

    def training_step(self, batch: Any, number: int) -> Tensor:
        return F.cross_entropy(self.own(batch[0]), batch[1], reduction=self.reduction)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def private(**options: Any) -> PrivateTraining:
    given = {"max_norm": BOUND, "noise_multiplier": NOISE, "delta": 1e-3, "seed": SEED, "expected_batch_size": EXPECTED}
    return PrivateTraining(**(given | options))  # type: ignore[arg-type]


def trained(model: nn.Module, callback: PrivateCallback, loader: Any = None, resume: Any = None, **options: Any) -> Any:
    parts = options.get("accumulate_grad_batches", 1)
    loader = callback.private.loader(TensorDataset(*data()), parts=parts) if loader is None else loader
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
    model, own = net(), private()
    options: dict[str, Any] = {}
    if scales:
        options["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))
    callback = PrivateCallback(own, "own")
    trainer = trained(module := Classifier(model), callback, accumulate_grad_batches=parts, **options)
    rough = 0.02 if scales else 1e-5  # half precision
    assert_close(model.state_dict(), by_hand(net(), *data()).state_dict(), rtol=rough, atol=rough)
    assert own.history == [(NOISE, EXPECTED / 30, 2 * STEPS)]
    assert trainer.logged_metrics["epsilon"] == pytest.approx(own.epsilon())
    assert callback.last_step is not None
    assert "backward" not in vars(module)
    assert not any(layer._forward_hooks for layer in model.modules())


def test_it_goes_on_from_a_checkpoint_bit_by_bit(tmp_path: Path) -> None:
    whole = net()
    trained(Classifier(whole), PrivateCallback(private(), "own"))
    first = trained(Classifier(net()), PrivateCallback(private(), "own"), max_epochs=1)
    first.save_checkpoint(tmp_path / "kept.ckpt", weights_only=False)
    rest = net()
    callback = PrivateCallback(private(seed=SEED + 99), "own")
    trained(Classifier(rest), callback, resume=tmp_path / "kept.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rest.parameters()))
    assert callback.private.steps == 2 * STEPS


def test_what_would_break_the_guarantee_is_refused() -> None:
    plain = DataLoader(TensorDataset(*data()), batch_size=6, shuffle=True)
    whole, clips = private(), PrivateCallback(private(), "own")
    of_whole = whole.loader(TensorDataset(*data()))
    refused: list[tuple[Any, Any, Any, dict[str, Any], str]] = [
        (Classifier(net()), private(), plain, {}, "Poisson-sampled"),
        (Classifier(net()), whole, of_whole, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        (Classifier(net()), private(), None, {"gradient_clip_val": 0.5},
         r"gradient_clip_val=0\.5, which would clip the noisy gradient"),
        (Classifier(net(), "mean"), private(), None, {}, "expected N losses"),
        (Classifier(net(), extra=True), private(), None, {}, "steps 2 parameters"),
    ]  # fmt: skip
    for model, own, loader, options, words in refused:
        with pytest.raises(ValueError, match=words):
            trained(model, PrivateCallback(own, "own"), loader, **options)
    with pytest.raises(RuntimeError, match="not the one of private step 0"):  # within the optimizer's closure
        trained(Classifier(net()), clips, callbacks=[clips, Clips()])
