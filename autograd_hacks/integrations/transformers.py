"""Hugging Face's Trainer: callbacks that measure or clip steps, by hooks or compiled, and a private trainer."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.compiled import compile
from autograd_hacks.errors import ON_PRIVATE, ON_STEPS, needed
from autograd_hacks.extending import assumed, kind_of
from autograd_hacks.integrations.steps import Steps, mean_of
from autograd_hacks.private import PrivateStep, PrivateTraining
from autograd_hacks.private.poisson import N_LOSSES, WOULD_CLIP

with needed("transformers"):
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

STATE = "private_training.json"
"""The file of a checkpoint that holds the state of private training."""
IGNORED = -100
"""Marks targets without a loss."""
_OR_OVERRIDE = "Give compute_loss_func=, which returns N losses, or override per_sample_losses."


class GradsCallback(Steps, TrainerCallback):
    """A callback for ``Trainer``: norms, the noise scale and clipping of each step, over all its micro-batches.

    It takes the arguments of `Steps`.  The results go into ``history``, step by step, and their means into the trainer's
    logs.  Callbacks after it see them, too.  The loggers of ``report_to`` come first, unless this callback is added by
    ``trainer.callback_handler.callbacks.insert(0, callback)``.

    Raises ValueError when training begins if ``max_norm`` is given and the trainer itself clips to a smaller norm; use
    ``TrainingArguments(max_grad_norm=0)``.
    """

    _logged = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.max_norm is not None and args.max_grad_norm and args.max_grad_norm < self.max_norm:
            raise ValueError(
                f"GradsCallback was given max_norm={self.max_norm}, and the trainer max_grad_norm={args.max_grad_norm}. The "
                "trainer clips first, and that would be lost. Use TrainingArguments(max_grad_norm=0)." + ON_STEPS
            )
        self._logged = len(self.history)
        self.attach(given["model"], *[own for own in [given.get("optimizer")] if own is not None])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.read(getattr(optimizer, "scaler", None))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        new, self._logged = self.history[self._logged :], len(self.history)
        _log(mean_of(new), state, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.detach()


class CompiledCallback(TrainerCallback):
    """A callback that makes a ``Trainer`` use a compiled step: see `autograd_hacks.compile`::

        def losses(outputs, labels, num_items_in_batch=None):
            return F.cross_entropy(outputs.logits, labels)

        Trainer(model, args, train_dataset=..., compute_loss_func=losses, callbacks=[CompiledCallback("clip", max_norm=1.0)])

    ``compute_loss_func`` must compute the loss outside of the model.  ``callback.step`` is the compiled step, also after
    training.  The mean of its norms goes into the trainer's logs.

    verb: as in `autograd_hacks.compile`
    loss_type, settings: as in `autograd_hacks.compile`. By default the loss is assumed to be a mean, as a trainer's is, and
    a line on stderr says so

    Raises ValueError when training begins if the trainer accumulates gradients or clips them itself.
    """

    def __init__(self, verb: str, loss_type: str | None = None, **settings: Any) -> None:
        self.verb, self.settings = verb, {"loss_type": loss_type or assumed("mean", set()), **settings}
        self.step: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if args.gradient_accumulation_steps > 1 or args.max_grad_norm:
            raise ValueError(
                f"CompiledCallback was given gradient_accumulation_steps={args.gradient_accumulation_steps} and "
                f"max_grad_norm={args.max_grad_norm}; expected 1 and 0, because a compiled step clips itself." + ON_STEPS
            )
        self.step = compile(model, self.verb, **self.settings)
        self.step.install()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if "norms" in self.step.results:
            _log({"grads/norm_mean": float(self.step.norms.mean())}, state, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step.uninstall()


def _log(found: Mapping[str, float], state: Any, logs: dict[str, float] | None) -> None:
    for target in (logs, state.log_history[-1] if state.log_history else None):
        if target is not None:
            target.update(found)


# mypy needs the base class of the mixin; it rejects a class that is chosen by an expression.
class PrivateMixin(Trainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """Makes a ``Trainer``, or a subclass of it, train privately: ``class PrivateSFT(PrivateMixin, SFTTrainer): ...``

    Batches are Poisson-sampled from ``train_dataset``; the model never sees more than ``per_device_train_batch_size``
    samples at once.  Each sample has its own loss, see `per_sample_losses`.  Steps are clipped and get noise, and
    ``epsilon`` is in the logs.  Checkpoints hold the state of private training, so a resumed training has the same bits.
    Their file private_training.json is as secret as the data: never publish it.  The trainer's ``max_grad_norm`` is turned
    off, because it would clip the noisy gradient; a line on stderr says so if it isn't the default.

    private: a `PrivateTraining`. Its expected batch size is by default the trainer's own,
    ``per_device_train_batch_size`` · ``gradient_accumulation_steps`` · processes. The steps that may spend its
    ``epsilon`` are by default the trainer's

    Raises NotImplementedError for ``DataParallel`` and DeepSpeed; ValueError for label smoothing without
    ``compute_loss_func``, for ``auto_find_batch_size``, and for checkpoints without private_training.json.
    """

    def __init__(self, *args: Any, private: PrivateTraining, **options: Any) -> None:
        super().__init__(*args, **options)
        self.private = private
        self.last_step: PrivateStep | None = None
        self._first_step = 0
        self._overflowed = False
        given, wrong = self.args, ""
        if given.n_gpu > 1 or self.is_deepspeed_enabled:
            wrong = "DataParallel or DeepSpeed; expected one device, or torchrun with DistributedDataParallel or FSDP2"
            raise NotImplementedError(f"PrivateTrainer was given {wrong}" + ON_PRIVATE)
        if given.label_smoothing_factor and self.compute_loss_func is None:
            wrong = f"label_smoothing_factor={given.label_smoothing_factor}; expected compute_loss_func=, N losses with it"
        elif given.auto_find_batch_size:
            wrong = "auto_find_batch_size=True, which spends privacy and restarts; expected per_device_train_batch_size"
        if wrong:
            raise ValueError(f"PrivateTrainer was given {wrong}" + ON_PRIVATE)
        private._expect(given.per_device_train_batch_size * given.gradient_accumulation_steps * given.world_size)

    def per_sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """N losses, each from one sample's outputs and labels.  Override it for losses other than these:

        * ``compute_loss_func(outputs, labels, num_items_in_batch=None)``, if it was given
        * the mean cross-entropy over a sample's own tokens, shifted for causal language models
        * the cross-entropy of classes
        * the square, for floating-point labels and one logit, or ``config.problem_type="regression"``; the mean over logits
        * the mean binary cross-entropy, for other floating-point labels of the logits' shape
        """
        inputs = dict(inputs)
        labels, plain = inputs.pop("labels", None), self.accelerator.unwrap_model(model)
        shift = getattr(plain, "prepare_decoder_input_ids_from_labels", None)  # needed because the model gets no labels
        if shift is not None and labels is not None and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = shift(labels=labels)
        outputs = model(**inputs)
        if self.compute_loss_func is not None:
            losses = self.compute_loss_func(outputs, labels, num_items_in_batch=None)
        else:
            logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs[0]
            if not isinstance(logits, Tensor):
                raise ValueError(
                    f"{type(plain).__name__} returned {list(outputs)}; expected logits. {_OR_OVERRIDE}" + ON_PRIVATE
                )
            problem = getattr(getattr(plain, "config", None), "problem_type", None)
            losses = sample_losses(logits, labels, _is_shifted(plain), problem)
        if not isinstance(losses, Tensor) or losses.ndim != 1:
            raise ValueError(f"compute_loss_func returned {kind_of(losses)}; {N_LOSSES}" + ON_PRIVATE)
        return losses

    def get_train_dataloader(self) -> Any:
        if self.train_dataset is None:
            raise ValueError("PrivateTrainer was given no train_dataset; expected a data set with a length" + ON_PRIVATE)
        data, collate, given = self.train_dataset, self.data_collator, self.args
        if hasattr(data, "column_names"):
            data = self._remove_unused_columns(data, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        parts, workers = given.gradient_accumulation_steps, given.dataloader_num_workers
        options = {"collate_fn": collate, "num_workers": workers, "pin_memory": given.dataloader_pin_memory}
        loader = self.private.loader(data, None, parts, given.per_device_train_batch_size, first=self._first_step, **options)
        loader.keeps_marks, self._arrived = True, loader.arrived
        return loader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """inputs: micro-batches, each with its mark"""
        model.train()
        scaler = self.accelerator.scaler
        if self._overflowed and scaler is not None:
            # Samples that overflowed were left out of the step, so the scaler itself has not noticed them.
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
            self._overflowed = False
        total = torch.zeros((), device=self.args.device)
        for mark, batch in inputs:
            self._arrived(mark)
            with self.compute_loss_context_manager():
                losses = self.per_sample_losses(model, self._prepare_inputs(batch))
            self.private.backward(losses, scaler)
            total += losses[: mark.samples].detach().sum()
            self.last_step = self.private.step(scaler=scaler)
        if self.last_step is not None and not self.last_step.norms.isfinite().all():
            self._overflowed = True
        return total / max(1, sum(mark.samples for mark, _ in inputs)) / self.current_gradient_accumulation_steps

    def floating_point_ops(self, inputs: Any) -> int:
        return sum(super(PrivateMixin, self).floating_point_ops(batch) for _, batch in inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for _, batch in inputs:
            super()._track_num_input_tokens(batch)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        epsilon = self.private.epsilon()
        if isfinite(epsilon):
            logs["epsilon"] = epsilon
        if self.last_step is not None:
            logs["private/clipped"] = float(self.last_step.clipped_fraction)
        super().log(logs, start_time)

    def create_scheduler(self, num_training_steps: int, *args: Any, **options: Any) -> Any:
        if self.private.planned is None:
            self.private.planned = num_training_steps
        return super().create_scheduler(num_training_steps, *args, **options)

    def _inner_training_loop(
        self, batch_size: Any = None, args: Any = None, resume_from_checkpoint: Any = None, *others: Any, **options: Any
    ) -> Any:
        self._first_step = self.private.steps
        if resume_from_checkpoint is not None:
            path = Path(resume_from_checkpoint) / STATE
            if not path.is_file():
                raise ValueError(
                    f"there is no {path}, and without the earlier steps epsilon would be too small. Resume from a "
                    "checkpoint of PrivateTrainer, which saves it." + ON_PRIVATE
                )
            state = json.loads(path.read_text())
            self._first_step = state["first_step"]
            self.private.load_state_dict(state)
        given, clips = self.args, self.args.max_grad_norm
        if clips not in (0, None, TrainingArguments.max_grad_norm):  # the default is nobody's wish
            told = f"autograd_hacks: PrivateTrainer ignores max_grad_norm={clips}, {WOULD_CLIP}"
            print(told, file=sys.stderr)
        given.max_grad_norm = 0.0
        try:
            return super()._inner_training_loop(batch_size, args, resume_from_checkpoint, *others, **options)
        finally:
            given.max_grad_norm = clips
            self.private.detach()

    def _prepare_for_training(self, *args: Any, **options: Any) -> Any:
        found = super()._prepare_for_training(*args, **options)
        self.private.attach(found[0], self.optimizer)
        return found

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save and not self.args.save_only_model:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            state = {**self.private.state_dict(), "first_step": self._first_step}
            (folder / STATE).write_text(json.dumps(state))


class PrivateTrainer(PrivateMixin, Trainer):
    """Hugging Face's ``Trainer``, trained privately::

        private = PrivateTraining(max_norm=1.0, epsilon=8.0, delta=1e-5)
        trainer = PrivateTrainer(model, arguments, train_dataset=data, private=private)
        trainer.train()
        private.epsilon(), trainer.last_step

    See `PrivateMixin`.
    """


def _is_shifted(model: Any) -> bool | None:
    """Whether a language model's own loss compares token t with the logits at t - 1; None if that is unknown."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft's
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    if type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return True
    kind = getattr(model, "loss_type", None)
    return None if kind is None else kind == "ForCausalLM"


def sample_losses(logits: Tensor, labels: Tensor | None, shifted: bool | None = None, problem: str | None = None) -> Tensor:
    """N losses from logits and labels, each from one sample.

    logits: N C, N T C, or N
    labels: N classes; N T tokens, -100 for tokens without a loss; or numbers, of the logits' shape or N
    shifted: whether token t is predicted at t - 1. None if that is unknown; token labels then raise ValueError
    problem: the ``problem_type`` of a model's configuration

    Raises ValueError for other shapes.
    """
    if labels is not None and logits.ndim == 3 and labels.ndim == 2 and shifted is not None:
        logits, labels = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
        tokens = F.cross_entropy(logits.mT.float(), labels, reduction="none", ignore_index=IGNORED)  # N T
        return tokens.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)
    if labels is not None and logits.ndim <= 2 and len(logits) == len(labels):
        is_number, shape = labels.is_floating_point(), logits.shape
        if not is_number and labels.ndim == 1 and shape[1:] > (1,) and problem in (None, "single_label_classification"):
            return F.cross_entropy(logits.float(), labels, reduction="none")
        if is_number and labels.numel() == len(labels) == shape.numel() and problem in (None, "regression"):
            return (logits.float().flatten() - labels.flatten()).square()
        if is_number and labels.shape == shape and problem == "regression":
            return (logits.float() - labels).square().mean(1)
        if is_number and labels.shape == shape and logits.ndim == 2 and problem in (None, "multi_label_classification"):
            return F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none").mean(1)
    raise ValueError(
        f"the model's logits are {kind_of(logits)} and the labels {kind_of(labels)}, for problem_type={problem}; expected "
        f"labels that are classes, tokens or numbers. {_OR_OVERRIDE}" + ON_PRIVATE
    )
