"""Hugging Face's Trainer: a callback that measures steps, and clips them."""

from typing import Any

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
        found = mean_of(new)
        for target in (logs, state.log_history[-1] if state.log_history else None):
            if target is not None:
                target.update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.detach()
