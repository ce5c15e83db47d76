"""Hugging Face's Trainer: callbacks that measure steps, and clip them, by hooks or in compiled steps."""

from collections.abc import Mapping
from typing import Any

from autograd_hacks.compiled.face import compile
from autograd_hacks.errors import ON_STEPS, needed
from autograd_hacks.integrations.steps import Steps, mean_of

with needed("transformers"):
    from transformers import TrainerCallback


class GradsCallback(Steps, TrainerCallback):
    """A callback for ``Trainer``: norms, the noise scale and clipping of each step, over all its micro-batches.

    It takes what `Steps` takes.  What it finds goes into ``history``, step by step, and means into the trainer's logs;
    callbacks that stand behind it see them too: ``trainer.callback_handler.callbacks.insert(0, callback)``.

    Raises ValueError as training begins where ``max_norm`` was given and the trainer itself clips to less than that:
    say ``TrainingArguments(max_grad_norm=0)``.
    """

    _logged = 0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        if self.max_norm is not None and args.max_grad_norm and args.max_grad_norm < self.max_norm:
            raise ValueError(
                f"GradsCallback was given max_norm={self.max_norm}, and the trainer max_grad_norm={args.max_grad_norm}, "
                "whose clipping comes before and would be lost. Say TrainingArguments(max_grad_norm=0)." + ON_STEPS
            )
        self._logged = len(self.history)
        self.attach(model, *([] if optimizer is None else [optimizer]))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.read(getattr(optimizer, "scaler", None))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        new, self._logged = self.history[self._logged :], len(self.history)
        _log(mean_of(new), state, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.detach()


class CompiledCallback(TrainerCallback):
    """A callback for ``Trainer`` with which the model trains by a compiled step: see `autograd_hacks.compile`::

        def losses(outputs, labels, num_items_in_batch=None):
            return F.cross_entropy(outputs.logits, labels)

        Trainer(model, args, train_dataset=..., compute_loss_func=losses, callbacks=[CompiledCallback("clip", max_norm=1.0)])

    The loss is computed outside of the model, by ``compute_loss_func``.  It is a mean over samples, or say ``loss_type``.
    ``callback.step`` is the compiled step, after training, too; the mean of its norms goes into the trainer's logs.

    verb, settings: as in `autograd_hacks.compile`
    Raises ValueError as training begins where the trainer adds up several passes in a step, or clips after them.
    """

    def __init__(self, verb: str, loss_type: str = "mean", **settings: Any) -> None:
        self.verb, self.settings = verb, {"loss_type": loss_type, **settings}
        self.step: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if args.gradient_accumulation_steps > 1 or args.max_grad_norm:
            raise ValueError(
                f"CompiledCallback was given gradient_accumulation_steps={args.gradient_accumulation_steps} and "
                f"max_grad_norm={args.max_grad_norm}; expected 1 and 0: a compiled step is one pass, and clips by itself."
                + ON_STEPS
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
