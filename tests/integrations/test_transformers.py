"""A callback in Hugging Face's Trainer: the steps of single samples, however they are split."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from nets import Around
from oracle import one_loss_at_a_time
from rarely import crossed
from torch.testing import assert_close
from trained import LR, MAX_NORM, STEPS, N, check, data, expected, needed, net, same_in_parts

import autograd_hacks

transformers = needed("transformers", "transformers.trainer", "accelerate")

from autograd_hacks.integrations.transformers import CompiledCallback, GradsCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Classifier(Around):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.own(x), labels)}


def trained(
    model: nn.Module,
    folder: Path,
    callback: Any,
    parts: int = 1,
    rows: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    loss: Any = None,
    **options: Any,
) -> Any:
    """A trainer that has run, in the order of the data."""
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=N // parts,
        gradient_accumulation_steps=parts,
        num_train_epochs=1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        optim="sgd",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        **{"max_grad_norm": 0.0, **options},
    )
    rows = [{"x": x, "labels": y} for x, y in zip(*data())] if rows is None else rows
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback], compute_loss_func=loss)
    if scaler is not None:
        trainer.accelerator.scaler = scaler
    trainer.train()
    return trainer


@crossed(scales=[False, True], max_norm=[MAX_NORM, None], parts=[4, 1])
def test_steps_are_those_of_single_samples(scales: bool, max_norm: float | None, parts: int, tmp_path: Path) -> None:
    model, callback = net(), GradsCallback(max_norm)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if scales else None
    trainer = trained(Classifier(after := copy.deepcopy(model)), tmp_path, callback, parts, scaler=scaler)
    assert scaler is None or scaler._growth_tracker == STEPS  # it has been used
    check(model, after, callback.history, callback.norms, max_norm)
    logged = [entry for entry in trainer.state.log_history if "grads/norm_mean" in entry]
    assert [entry["grads/norm_mean"] for entry in logged] == [step["grads/norm_mean"] for step in callback.history]


def test_mixed_precision(tmp_path: Path) -> None:
    same_in_parts(lambda own, parts: trained(Classifier(own), tmp_path, GradsCallback(MAX_NORM), parts, bf16=True), 1e-2)


class Language(nn.Module):
    """A loss that divides by the step's tokens, as Hugging Face's causal models do where they are told their number."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9))

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        scores = self.own(ids).transpose(1, 2)
        total = F.cross_entropy(scores, labels, ignore_index=-100, reduction="sum")
        return {"loss": total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)}


def test_tokens_that_are_counted_over_the_step(tmp_path: Path) -> None:
    ids = torch.randint(9, (N, 6))
    labels = ids.masked_fill(torch.arange(6) > torch.randint(1, 6, (N, 1)), -100)
    rows = [{"ids": i, "labels": y} for i, y in zip(ids, labels)]
    model = Language()
    by_name = one_loss_at_a_time(model, lambda: torch.stack([model(i[None], y[None], (labels != -100).sum())["loss"]
                                                             for i, y in zip(ids, labels)]))  # fmt: skip
    norms = N * torch.cat([own.flatten(1) for own in by_name.values() if own is not None], 1).norm(dim=1)

    def run(own: nn.Module, parts: int) -> None:
        callback = GradsCallback(max_norm=5.0)
        trained(own, tmp_path, callback, parts, rows)
        assert_close(callback.norms, norms, rtol=1e-4, atol=1e-5)

    same_in_parts(run, model=model)


def test_gpt2_with_checkpoints(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    rows = [{"input_ids": i, "labels": i} for i in torch.randint(11, (8, 6))] * 2

    def run(own: nn.Module, parts: int) -> None:
        callback = GradsCallback(max_norm=1.0)
        trained(own, tmp_path, callback, parts, rows, gradient_checkpointing=True)
        assert callback.history[0]["grads/clipped"] > 0

    same_in_parts(run, 1e-4, transformers.GPT2LMHeadModel(config))


def mean_loss(outputs: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return F.cross_entropy(outputs, labels)


class Scores(Around):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x)


def test_compiled_steps_are_those_of_single_samples(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model, callback = net(), CompiledCallback("clip", max_norm=MAX_NORM, backend=None)
    kept: dict[str, Any] = {"remove_unused_columns": False, "label_names": ["labels"]}
    after = Scores(copy.deepcopy(model))
    trainer = trained(after, tmp_path, callback, loss=mean_loss, **kept)
    weights, norms, _ = expected(model)
    assert_close([p.detach() for p in after.parameters()], weights, rtol=1e-4, atol=1e-4)
    assert_close(callback.step.norms, norms[-1], rtol=1e-4, atol=1e-4, check_dtype=False)
    logged = [entry["grads/norm_mean"] for entry in trainer.state.log_history if "grads/norm_mean" in entry]
    assert logged[-1] == pytest.approx(float(callback.step.norms.mean()))
    assert "_compiled_call_impl" not in vars(after)
    assert_close(after(torch.ones(2, 4)), after.own(torch.ones(2, 4)))
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        trained(after, tmp_path, callback, 4, loss=mean_loss, **kept)


def test_the_trainers_own_clipping_is_not_lost(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_grad_norm=0"):
        trained(Classifier(net()), tmp_path, GradsCallback(MAX_NORM), max_grad_norm=MAX_NORM / 2)
    model = Classifier(net())
    trained(model, tmp_path, GradsCallback(), max_grad_norm=MAX_NORM / 2)
    with pytest.raises(autograd_hacks.errors.NothingRecorded):
        autograd_hacks.per_sample_grads(model)
