"""skorch and accelerate, trained privately: against a loop by hand, and what is refused."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from needed import needed
from private_steps import BOUND, EXPECTED, LR, NOISE, SEED, STEPS, by_hand, data, losses, net
from rarely import crossed
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from autograd_hacks.private import PrivateTraining

skorch = needed("skorch", "skorch.callbacks", "accelerate", "opacus")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

from autograd_hacks.integrations.skorch import PrivateCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def private(**options: Any) -> PrivateTraining:
    given: dict[str, Any] = {"max_norm": BOUND, "noise_multiplier": NOISE, "delta": 1e-3, "seed": SEED}
    return PrivateTraining(**(given | options))


def fitted(model: nn.Module, callback: PrivateCallback, **options: Any) -> Any:
    given: dict[str, Any] = {
        "criterion": nn.CrossEntropyLoss, "lr": LR, "max_epochs": 2, "batch_size": EXPECTED, "train_split": None,
        "callbacks": [callback], "iterator_train": callback.loader, "verbose": 0,
    }  # fmt: skip
    made = skorch.NeuralNetClassifier(model, **(given | options))
    x, y = data()
    return made.fit(x.numpy(), y.numpy())


def test_a_net_trains_as_a_loop_by_hand() -> None:
    own = private(loss_type="mean")
    made = fitted(net(), callback := PrivateCallback(own))
    assert_close(made.module_.state_dict(), by_hand(net(), *data()).state_dict())
    assert own.history == [(NOISE, EXPECTED / 30, 2 * STEPS)]
    assert made.history[-1]["epsilon"] == own.epsilon()
    assert callback.last_step is not None
    assert not any(layer._forward_hooks for layer in made.module_.modules())


class Clips(skorch.callbacks.Callback):  # type: ignore[misc, name-defined]
    def on_grad_computed(self, net: Any, named_parameters: Any, **_: Any) -> None:
        torch.nn.utils.clip_grad_norm_([p for _, p in named_parameters], 0.1)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"iterator_train": torch.utils.data.DataLoader}, ValueError, "iterator_train=callback"),
        ({"criterion__weight": torch.ones(3)}, ValueError, "without class weights"),
        ({"criterion__ignore_index": 0}, ValueError, r"ignored targets \(0\)"),
        ({"loss_type": "sum"}, ValueError, "loss_type='sum'"),
        ({"beside": skorch.callbacks.GradientNormClipping(0.1)}, ValueError,
         "GradientNormClipping, which would clip the noisy gradient"),
        ({"beside": Clips()}, RuntimeError, "not the one of private step 0"),  # within the optimizer's closure
    ],
)  # fmt: skip
def test_what_would_break_a_nets_guarantee_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    own = PrivateCallback(private(loss_type=options.pop("loss_type", "mean")))
    beside = {"callbacks": [own, options.pop("beside")]} if "beside" in options else {}
    with pytest.raises(error, match=words):
        fitted(net(), own, **options, **beside)


def fresh(**options: Any) -> Accelerator:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


@pytest.fixture(autouse=True)
def _fresh_afterwards() -> Iterator[None]:
    yield
    fresh()


@pytest.mark.parametrize("scales", [False, True])
def test_accelerate_trains_as_a_loop_by_hand_and_goes_on(scales: bool, tmp_path: Path) -> None:
    def run(seed: int, epochs: int, resume: bool = False, save: bool = False) -> tuple[nn.Module, PrivateTraining]:
        accelerator, own, plain = fresh(), private(seed=seed, expected_batch_size=EXPECTED), net()
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scales else None
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=LR))
        accelerator.register_for_checkpointing(own)
        if resume:
            accelerator.load_state(tmp_path / "kept")
        with own.attach(model, optimizer):
            for _ in range(epochs):
                for x, y in own.loader(TensorDataset(*data()), micro_batch_size=4):
                    own.backward(losses(model, x, y), accelerator.scaler)
                    if own.step(scaler=accelerator.scaler):
                        optimizer.step()
                        optimizer.zero_grad()
        if save:
            accelerator.save_state(tmp_path / "kept")
        return plain, own

    whole, own = run(SEED, 2)
    assert_close(whole.state_dict(), by_hand(net(), *data()).state_dict())
    assert own.steps == 2 * STEPS
    run(SEED, 1, save=True)
    rest, own = run(99, 1, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rest.parameters()))
    assert own.steps == 2 * STEPS


@crossed(way=["clips", "clips and divides", "skips"], scales=[False, True])
def test_what_accelerate_would_do_to_the_noisy_gradient_is_refused(way: str, scales: bool) -> None:
    accelerator, model = fresh(gradient_accumulation_steps=1 if way == "clips" else 2), net()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scales else None
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
    own = private(expected_batch_size=EXPECTED, loss_type="mean" if way == "clips and divides" else None)
    told = {
        "clips": "not the one of private step 0",
        "clips and divides": r"accelerator\.backward divides the loss by gradient_accumulation_steps=2",
        "skips": r"optimizer\.step\(\) does nothing",
    }

    def train() -> None:
        for x, y in own.loader(TensorDataset(*data())):
            with accelerator.accumulate(model) if way == "skips" else nullcontext():
                if way == "clips and divides":
                    accelerator.backward(losses(model, x, y).mean())
                else:
                    own.backward(losses(model, x, y), accelerator.scaler)
                if own.step(scaler=accelerator.scaler):
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()

    with own.attach(model, optimizer), pytest.raises((RuntimeError, ValueError), match=told[way]):
        train()
