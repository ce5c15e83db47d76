"""accelerate, whose loops need no callback: steps, and private training, against loops by hand."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import trained as whole
from private_steps import BOUND, EXPECTED, LR, NOISE, SEED, STEPS, by_hand, data, losses, net
from rarely import crossed
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset
from trained import needed

import autograd_hacks
from autograd_hacks.integrations.steps import Steps
from autograd_hacks.private import PrivateTraining

needed("accelerate", "opacus")  # or the file is skipped, before what it imports

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def private(**options: Any) -> PrivateTraining:
    return PrivateTraining(BOUND, NOISE, delta=1e-3, expected_batch_size=EXPECTED, **options)


def fresh(**options: Any) -> Accelerator:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


@pytest.fixture(autouse=True)
def _fresh_afterwards() -> Iterator[None]:
    yield
    fresh()


@crossed(scales=[False, True], max_norm=[whole.MAX_NORM, None], parts=[4, 1])
def test_steps_are_those_of_single_samples(scales: bool, max_norm: float | None, parts: int) -> None:
    """The hooks are on the model that was prepared."""
    accelerator, model = fresh(gradient_accumulation_steps=parts), whole.net()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if scales else None
    loader = DataLoader(TensorDataset(*whole.data()), batch_size=whole.N // parts)
    optimizer = torch.optim.SGD((after := copy.deepcopy(model)).parameters(), lr=whole.LR)
    prepared, optimizer, loader = accelerator.prepare(after, optimizer, loader)
    steps = Steps(max_norm, loss_type="mean")
    steps.attach(accelerator.unwrap_model(prepared), optimizer)
    for x, y in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(F.cross_entropy(prepared(x), y))
            if accelerator.sync_gradients:
                steps.read(accelerator.scaler)
            optimizer.step()
            optimizer.zero_grad()
    steps.detach()
    whole.check(model, after, steps.history, steps.norms, max_norm)


def test_rows_in_mixed_precision() -> None:
    model, (x, y) = whole.net(), whole.data()
    prepared = fresh(mixed_precision="bf16").prepare(model)
    autograd_hacks.add_hooks(model)
    autograd_hacks.backward(F.cross_entropy(prepared(x), y, reduction="none"))
    norms = autograd_hacks.per_sample_grads(model).norms()
    assert_close(norms, whole.rows_of(model, x, y).norm(dim=1), rtol=0.05, atol=0.01)


@pytest.mark.parametrize("scales", [False, True])
def test_accelerate_trains_as_a_loop_by_hand_and_goes_on(scales: bool, tmp_path: Path) -> None:
    def run(seed: int, epochs: int, resume: bool = False, save: bool = False) -> tuple[nn.Module, PrivateTraining]:
        accelerator, own, plain = fresh(), private(seed=seed), net()
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
    own = private(seed=SEED, loss_type="mean" if way == "clips and divides" else None)
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
