"""Hugging Face's private trainer over processes: what one process gives on whole batches."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from needed import needed
from private_steps import BOUND, EXPECTED, LR, NOISE, SEED, STEPS, by_hand, data, net
from processes import WORLD, Both, both
from torch.testing import assert_close

from autograd_hacks.private import PrivateTraining

transformers = needed("transformers", "transformers.trainer", "accelerate", "opacus")

from accelerate.state import AcceleratorState  # noqa: E402
from test_private_transformers import Classifier  # noqa: E402  # it needs them, too

from autograd_hacks.integrations.transformers import STATE, PrivateTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
__all__ = ["both"]  # a fixture


def trained(folder: str, size: int, parts: int, resume: str | None = None) -> tuple[nn.Module, PrivateTraining, Any]:
    model, own = net(), PrivateTraining(BOUND, NOISE, delta=1e-3, seed=SEED + dist.get_rank())
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=size, gradient_accumulation_steps=parts, num_train_epochs=2, learning_rate=LR,
        optim="sgd", lr_scheduler_type="constant", logging_steps=5, report_to="none", use_cpu=True, disable_tqdm=True,
        save_strategy="steps", save_steps=7, max_grad_norm=0.0, ddp_backend="gloo",
    )  # fmt: skip
    rows = [{"x": x, "labels": y} for x, y in zip(*data())]
    made = PrivateTrainer(Classifier(model), arguments, train_dataset=rows, private=own)
    made.train(resume_from_checkpoint=resume)
    return model, own, made


def as_one(folder: str) -> None:
    place = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": str(WORLD),
             "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # fmt: skip
    os.environ.update(place)
    try:
        expected = by_hand(net(), *data()).state_dict()
        for size, parts in ((EXPECTED // WORLD, 1), (1, EXPECTED // WORLD)):
            model, own, made = trained(f"{folder}/{size}", size, parts)
            assert_close(model.state_dict(), expected, rtol=1e-4, atol=1e-4)
            assert own.history == [(NOISE, EXPECTED / 30, 2 * STEPS)]
            assert made.model_wrapped is not made.model
        kept = Path(folder) / "1" / "checkpoint-7"
        assert (kept / STATE).is_file()
        again, own, _ = trained(f"{folder}/rest", 1, EXPECTED // WORLD, str(kept))
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters()))
        assert own.steps == 2 * STEPS
    finally:
        AcceleratorState._reset_state(True)
        for key in place:
            del os.environ[key]


@pytest.mark.slow
def test_two_processes_train_as_one(both: Both, tmp_path: Path) -> None:
    both(as_one, str(tmp_path))
