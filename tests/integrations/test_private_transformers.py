"""Hugging Face's Trainer, trained privately: against a loop by hand, whole, cut, resumed, with LoRA."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from nets import Around
from private_steps import BOUND, EXPECTED, LR, NOISE, SEED, STEPS, by_hand, data, net
from processes import WORLD, in_both
from rarely import rarely
from torch import Tensor
from torch.testing import assert_close
from trained import needed

import autograd_hacks
from autograd_hacks.private import PrivateTraining

transformers = needed("transformers", "transformers.trainer", "accelerate", "opacus", "peft")

from accelerate.state import AcceleratorState  # noqa: E402
from transformers.modeling_outputs import SequenceClassifierOutput  # noqa: E402

from autograd_hacks.integrations.transformers import STATE, PrivateTrainer, _is_shifted, sample_losses  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Classifier(Around):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        return SequenceClassifierOutput(logits=self.own(x))


def private(**options: Any) -> PrivateTraining:
    given = {"max_norm": BOUND, "noise_multiplier": NOISE, "delta": 1e-3, "seed": SEED, **options}
    return PrivateTraining(**given)  # type: ignore[arg-type]


def trainer(model: nn.Module, folder: Path, own: PrivateTraining, rows: Any = None, **options: Any) -> Any:
    given: dict[str, Any] = {
        "per_device_train_batch_size": EXPECTED, "num_train_epochs": 2, "learning_rate": LR, "optim": "sgd",
        "lr_scheduler_type": "constant", "logging_steps": 5, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "no",
    }  # fmt: skip
    loss, kind = options.pop("loss", None), options.pop("kind", PrivateTrainer)
    arguments = transformers.TrainingArguments(str(folder), **(given | options))
    rows = [{"x": x, "labels": y} for x, y in zip(*data())] if rows is None else rows
    return kind(model, arguments, train_dataset=rows, private=own, compute_loss_func=loss)


@pytest.mark.parametrize("parts", [2, *rarely(1, 3)])
def test_it_trains_as_a_loop_by_hand(parts: int, tmp_path: Path) -> None:
    """Also where a draw is larger than the trainer's batch, and is cut once more."""
    model, own = net(), private()
    made = trainer(
        Classifier(model),
        tmp_path,
        own,
        per_device_train_batch_size=EXPECTED // parts,
        gradient_accumulation_steps=parts,
        disable_tqdm=False,
    )
    made.train()
    assert_close(model.state_dict(), by_hand(net(), *data()).state_dict(), rtol=1e-4, atol=1e-4)
    assert own.history == [(NOISE, EXPECTED / 30, 2 * STEPS)]
    logged = [entry["epsilon"] for entry in made.state.log_history if "epsilon" in entry]
    assert logged[0] < logged[-1] == own.epsilon()
    assert made.last_step.bound == BOUND
    assert not any(layer._forward_hooks for layer in model.modules())


@pytest.mark.parametrize("given", [{}, {"max_grad_norm": 0.05}])
def test_the_trainers_own_clipping_is_off_and_it_says_so_if_someone_set_it(
    given: dict[str, float], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its default is 1, which is shorter than the noise.  Afterwards the arguments are as they were."""
    model = net()
    made = trainer(Classifier(model), tmp_path, private(), **given)
    made.train()
    assert_close(model.state_dict(), by_hand(net(), *data()).state_dict(), rtol=1e-4, atol=1e-4)
    clips = given.get("max_grad_norm", 1.0)
    said = [line for line in capfd.readouterr().err.splitlines() if "max_grad_norm" in line]
    assert len(said) == len(given)
    assert all(f"PrivateTrainer ignores max_grad_norm={clips}" in line for line in said)
    assert made.args.max_grad_norm == clips


def test_a_trainer_that_clips_in_some_way_of_its_own_is_refused(tmp_path: Path) -> None:
    class Clips(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)

    made = trainer(Classifier(net()), tmp_path, private())
    made.add_callback(Clips())
    with pytest.raises(RuntimeError, match="not the one of private step 0"):
        made.train()


@pytest.mark.parametrize("parts", [1, 2])
def test_users_train_as_by_hand(parts: int, tmp_path: Path) -> None:
    """Also where the samples of the drawn users are more than the trainer's batch, and are cut between users."""
    users = [n % 9 if n % 2 else n % 5 for n in range(30)]
    model, count = net(), len(set(users))
    own = private(groups=users, expected_batch_size=4)
    given: dict[str, Any] = {"per_device_train_batch_size": 7, "gradient_accumulation_steps": parts, "max_steps": STEPS}
    trainer(Classifier(model), tmp_path, own, **given).train()
    expected = by_hand(net(), *data(), STEPS, expected=4, groups=users)
    assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-4)
    assert own.history == [(NOISE, 4 / count, STEPS)]
    with pytest.raises(ValueError, match="expected the mean number of users in a batch"):
        trainer(Classifier(net()), tmp_path, private(groups=users))
    few = private(groups=users, expected_batch_size=4)
    with pytest.raises(ValueError, match="but a user has 5 samples, which must be in one micro-batch"):
        trainer(Classifier(net()), tmp_path, few, per_device_train_batch_size=1).train()


class OfLists(Around):
    """Its inputs are in a list of numbers, one entry a sample, in a dictionary, and in one row for all samples."""

    def forward(self, factors: list[float], more: dict[str, Tensor], labels: Any = None, pixels: Any = None) -> Any:
        return SequenceClassifierOutput(logits=self.own(more["x"] * torch.tensor(factors)[:, None]))


def collated(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    factors = [float(row["x"].norm()) for row in rows]
    x = torch.stack([row["x"] for row in rows]) / torch.tensor(factors)[:, None]
    return {"factors": factors, "more": {"x": x}, "labels": torch.stack([row["labels"] for row in rows])}


def test_inputs_may_be_collated_in_any_way(tmp_path: Path) -> None:
    model, rows = net(), [{"x": x, "labels": y} for x, y in zip(*data())]
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "remove_unused_columns": False}
    made = trainer(OfLists(model), tmp_path, private(), rows, **options)
    made.data_collator = lambda own: collated(own) | {"pixels": torch.zeros(3 * len(own), 2)}
    made.train()
    assert_close(model.state_dict(), by_hand(net(), *data()).state_dict(), rtol=1e-4, atol=1e-4)


def test_it_goes_on_from_a_checkpoint_bit_by_bit(tmp_path: Path) -> None:
    def made(folder: str, seed: int = SEED) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        saves = {"save_strategy": "steps", "save_steps": 7, "optim": "adamw_torch", "lr_scheduler_type": "linear"}
        return trainer(
            Classifier(model), tmp_path / folder, private(seed=seed), gradient_accumulation_steps=2,
            per_device_train_batch_size=3, **saves,
        )  # fmt: skip

    whole = made("whole")
    whole.train()
    kept = tmp_path / "whole" / "checkpoint-7"
    assert json.loads((kept / STATE).read_text())["history"] == [[NOISE, EXPECTED / 30, 7]]
    rest = made("rest", seed=SEED + 99)
    rest.train(resume_from_checkpoint=str(kept))
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), rest.model.parameters()))
    assert rest.private.history == whole.private.history
    before = rest.private.steps
    rest.train()  # once more: other batches and noise, counted on
    assert rest.private.steps == 2 * before
    (kept / STATE).unlink()
    with pytest.raises(ValueError, match="epsilon would be too small"):
        made("none").train(resume_from_checkpoint=str(kept))


def causal() -> Any:
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def texts() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(2)
    ids = torch.randint(11, (30, 6), generator=draws)
    lengths = torch.randint(2, 7, (30, 1), generator=draws)
    return ids, ids.masked_fill(torch.arange(6) >= lengths, -100)


def of_sequence(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The mean over a sequence's own tokens, which no other's length changes."""
    logits, targets = model(ids).logits[0, :-1], labels[0, 1:]
    kept = targets != -100
    return nn.functional.cross_entropy(logits[kept], targets[kept])


def test_a_language_model_has_a_loss_of_each_sequence(tmp_path: Path) -> None:
    model, (ids, labels) = causal(), texts()
    rows = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels)]
    trainer(model, tmp_path, private(), rows, num_train_epochs=1).train()
    with torch.random.fork_rng():
        expected = by_hand(causal(), ids, labels, STEPS, of_sequence)
    assert_close(model.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-4)


def test_lora_in_bfloat16(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(causal(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    before = {name: p.clone() for name, p in model.named_parameters()}
    rows = [{"input_ids": i, "labels": y} for i, y in zip(*texts())]
    own = private(noise_multiplier=None, epsilon=4.0)
    made = trainer(model, tmp_path, own, rows, bf16=True)
    made.train()
    assert 3.9 < own.epsilon() <= 4.0
    assert own.planned == 2 * STEPS
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad


def test_samples_that_overflow_have_no_part_and_lower_the_scale(tmp_path: Path) -> None:
    model, own, scales = net(), private(), []

    class Watched(PrivateTrainer):
        def training_step(self, *args: Any, **options: Any) -> Tensor:
            scales.append(self.accelerator.scaler.get_scale())
            return super().training_step(*args, **options)

    made = trainer(Classifier(model), tmp_path, own, num_train_epochs=1, kind=Watched)
    made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**128 * 0.99)  # infinite in single precision
    made.train()
    assert scales[0] > scales[1] > scales[2]
    assert own.steps == STEPS  # all have had their noise
    assert all(p.isfinite().all() for p in model.parameters())
    again = net()
    made = trainer(Classifier(again), tmp_path, private())
    made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    made.train()
    assert_close(again.state_dict(), by_hand(net(), *data()).state_dict(), rtol=1e-4, atol=1e-4)


def test_losses_of_samples() -> None:
    torch.manual_seed(0)
    logits, classes = torch.randn(5, 4), torch.randint(4, (5,))
    assert_close(sample_losses(logits, classes), nn.functional.cross_entropy(logits, classes, reduction="none"))
    targets = torch.rand(5, 4)
    single = [nn.functional.binary_cross_entropy_with_logits(x, y) for x, y in zip(logits, targets)]
    assert_close(sample_losses(logits, targets), torch.stack(single))
    assert_close(sample_losses(logits[:, :1], targets[:, 0]), (logits[:, 0] - targets[:, 0]).square())
    squares = (logits - targets).square()
    assert_close(sample_losses(logits, targets, problem="regression"), squares.mean(1))
    for problem in (None, "regression"):
        assert_close(sample_losses(logits[:, :1], targets[:, :1], problem=problem), squares[:, 0])
        assert_close(sample_losses(logits[:, 0], targets[:, 0], problem=problem), squares[:, 0])
    one = nn.functional.binary_cross_entropy_with_logits(logits[:, 0], targets[:, 0], reduction="none")
    assert_close(sample_losses(logits[:, :1], targets[:, :1], problem="multi_label_classification"), one)
    tokens, labels = torch.randn(2, 3, 4), torch.tensor([[1, -100, 2], [-100, -100, -100]])
    found = sample_losses(tokens, labels, shifted=False)
    assert_close(found[0], nn.functional.cross_entropy(tokens[0][[0, 2]], torch.tensor([1, 2])))
    assert found[1] == 0
    assert_close(sample_losses(tokens, labels, shifted=True)[0], nn.functional.cross_entropy(tokens[0, 1], labels[0, 2]))
    wrong = (logits, classes, None, "regression"), (logits, targets, None, "single_label_classification")
    for given in (logits, None), (tokens, labels), (logits[:, :1], classes), *wrong:  # shifts aren't known of any model
        with pytest.raises(ValueError, match="Give compute_loss_func"):
            sample_losses(*given)


def test_whether_tokens_are_shifted_is_as_the_models_own_loss_has_it() -> None:
    ids = torch.randint(11, (1, 6))
    sizes: dict[str, Any] = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = transformers.LlamaConfig(**sizes, intermediate_size=8)
    bert = transformers.BertConfig(**sizes, intermediate_size=8)
    t5 = transformers.T5Config(vocab_size=11, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, decoder_start_token_id=0)
    for model in (
        causal(), transformers.LlamaForCausalLM(llama), transformers.BertForMaskedLM(bert),
        transformers.BertForTokenClassification(bert), transformers.T5ForConditionalGeneration(t5),
    ):  # fmt: skip
        labels = ids % 2 if "Token" in type(model).__name__ else ids
        out = model.eval()(input_ids=ids, labels=labels)
        assert_close(sample_losses(out.logits, labels, _is_shifted(model))[0], out.loss, rtol=1e-4, atol=1e-5)
    assert _is_shifted(nn.Linear(2, 2)) is None


def mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, labels)


class Other(Classifier):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return {"start": self.own(x)}


def test_what_would_break_the_guarantee_is_refused(tmp_path: Path) -> None:
    rows = [{"input_ids": i, "labels": y} for i, y in zip(*texts())]
    mixing = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    refused: list[tuple[nn.Module, Any, dict[str, Any], type[Exception], str]] = [
        (Classifier(net()), None, {"loss": mean}, ValueError, "loss depends on the others"),
        (Other(net()), None, {}, ValueError, r"Other returned \['start'\]"),
        (causal(), rows, {"label_smoothing_factor": 0.1}, ValueError, "label_smoothing_factor"),
        (Classifier(net()), None, {"auto_find_batch_size": True}, ValueError, "auto_find_batch_size"),
        (Classifier(mixing), None, {}, autograd_hacks.errors.PerSampleGradientError, "samples"),
        (Classifier(net()), iter([]), {"max_steps": 3}, TypeError, "which can't be sampled at random"),
    ]
    for model, own, options, error, words in refused:
        with pytest.raises(error, match=words):
            trainer(model, tmp_path, private(), own, **options).train()


@pytest.mark.slow
@in_both
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    place = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": str(WORLD),
             "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # fmt: skip
    os.environ.update(place)

    def trained(folder: str, size: int, parts: int, resume: Path | None = None) -> tuple[nn.Module, PrivateTraining, Any]:
        model, own = net(), private(seed=SEED + dist.get_rank())
        made = trainer(
            Classifier(model), tmp_path / folder, own, per_device_train_batch_size=size, gradient_accumulation_steps=parts,
            save_strategy="steps", save_steps=7, max_grad_norm=0.0, ddp_backend="gloo",
        )  # fmt: skip
        made.train(resume_from_checkpoint=resume and str(resume))
        return model, own, made

    try:
        expected = by_hand(net(), *data()).state_dict()
        for size, parts in ((EXPECTED // WORLD, 1), (1, EXPECTED // WORLD)):
            model, own, made = trained(str(size), size, parts)
            assert_close(model.state_dict(), expected, rtol=1e-4, atol=1e-4)
            assert own.history == [(NOISE, EXPECTED / 30, 2 * STEPS)]
            assert made.model_wrapped is not made.model
        kept = tmp_path / "1" / "checkpoint-7"
        assert (kept / STATE).is_file()
        again, own, _ = trained("rest", 1, EXPECTED // WORLD, kept)
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters()))
        assert own.steps == 2 * STEPS
    finally:
        AcceleratorState._reset_state(True)
        for key in place:
            del os.environ[key]
