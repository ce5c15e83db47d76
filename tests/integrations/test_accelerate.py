"""Steps under an Accelerator: those of single samples, however they are split."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from needed import needed
from rarely import crossed
from torch.utils.data import DataLoader, TensorDataset
from trained import LR, MAX_NORM, N, check, data, net, same_in_parts

needed("accelerate")  # or the file is skipped, before what it imports

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

from autograd_hacks.integrations.accelerate import AcceleratedSteps  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def trained(
    model: nn.Module,
    max_norm: float | None,
    parts: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    clips: bool = False,
    **options: Any,
) -> AcceleratedSteps:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts, **options)
    accelerator.scaler = scaler
    loader = DataLoader(TensorDataset(*data()), batch_size=N // parts)
    prepared, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR), loader)
    found = []
    with AcceleratedSteps(accelerator, prepared, max_norm=max_norm) as steps:
        for x, y in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(F.cross_entropy(prepared(x), y))
                if clips and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 1e9)
                found.append(steps.step_begins())
                optimizer.step()
                optimizer.zero_grad()
    assert [own for own in found if own is not None] == steps.history
    return steps


@crossed(scales=[None, "scaled", "clipped"], max_norm=[MAX_NORM, None], parts=[4, 1])
def test_steps_are_those_of_single_samples(scales: str | None, max_norm: float | None, parts: int) -> None:
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if scales else None
    steps = trained(after := copy.deepcopy(model), max_norm, parts, scaler, scales == "clipped")
    check(model, after, steps.history, steps.norms, max_norm)


def test_mixed_precision() -> None:
    same_in_parts(lambda model, parts: trained(model, MAX_NORM, parts, mixed_precision="bf16"), 1e-2)


def test_a_sibling_would_be_stepped_unclipped() -> None:
    accelerator, model, head = Accelerator(cpu=True), net(), nn.Linear(3, 3)
    model, head, _ = accelerator.prepare(model, head, torch.optim.SGD([*model.parameters(), *head.parameters()], lr=LR))
    with pytest.raises(ValueError, match="not be clipped"), AcceleratedSteps(accelerator, model, max_norm=MAX_NORM):
        pass
