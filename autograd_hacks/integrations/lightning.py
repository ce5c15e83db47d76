"""Lightning: callbacks that measure and clip steps, or train privately."""

from typing import Any

from torch import Tensor

from autograd_hacks.errors import ON_PRIVATE, ON_STEPS, needed
from autograd_hacks.integrations.steps import Steps
from autograd_hacks.private import PrivateStep, PrivateTraining
from autograd_hacks.private.poisson import N_LOSSES, OF_POISSON, WOULD_CLIP, PrivateLoader

with needed("lightning"):
    import lightning.pytorch as pl


def _check_optimizers(who: str, trainer: pl.Trainer, pl_module: pl.LightningModule, page: str) -> None:
    """Raises NotImplementedError unless the trainer steps one optimizer."""
    if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
        given = f"{len(trainer.optimizers)} optimizers, automatic_optimization={pl_module.automatic_optimization}"
        raise NotImplementedError(f"{who} was given {given}; expected one optimizer, stepped by the trainer" + page)


class GradsCallback(Steps, pl.Callback):
    """A callback for ``Trainer``: norms, the noise scale and clipping of each step, over all its micro-batches.

    The results go into ``history``, step by step, and to the trainer's loggers.  A ``gradient_clip_val`` of the trainer is
    applied afterwards.

    part: the path of the module that ``training_step`` calls, 'net' for ``self.net(x)``; by default the LightningModule
    itself, for ``self(x)``
    options: as in `Steps`

    Raises NotImplementedError for manual optimization and for several optimizers, and ValueError if ``max_norm`` is given
    and the optimizer also steps parameters outside of the part, because they would not be clipped.
    """

    def __init__(self, part: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.part = part

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        mend = ". Otherwise use autograd_hacks.integrations.steps.Steps in training_step" + ON_STEPS
        _check_optimizers("GradsCallback", trainer, pl_module, mend)
        self.attach(pl_module.get_submodule(self.part), *trainer.optimizers)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        found = self.read(getattr(trainer.precision_plugin, "scaler", None))
        pl_module.log_dict(found)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.detach()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.detach()


class PrivateCallback(pl.Callback):
    """A callback for ``Trainer`` that trains privately.  ``training_step`` returns N losses, one for each sample::

        private = PrivateTraining(max_norm=1.0, noise_multiplier=1.1, expected_batch_size=64, delta=1e-5)
        trainer = pl.Trainer(callbacks=[PrivateCallback(private)])
        trainer.fit(module, private.loader(data))

    With ``accumulate_grad_batches=k`` use ``private.loader(data, parts=k)``.  ``epsilon`` is logged and shown in the
    progress bar.  Checkpoints contain the training's state, which is as secret as the data.  ``last_step`` is the last
    step's `PrivateStep`.

    private: the `PrivateTraining`    part: as in `GradsCallback`

    Raises NotImplementedError for manual optimization and several optimizers; ValueError for another loader, for a trainer
    with ``gradient_clip_val``, for losses that are not a vector, and if the optimizer steps parameters outside of the part.
    """

    def __init__(self, private: PrivateTraining, part: str = "") -> None:
        self.private, self.part = private, part
        self.last_step: PrivateStep | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loader = trainer.train_dataloader
        _check_optimizers("PrivateCallback", trainer, pl_module, ON_PRIVATE)
        wrong = ""
        if not isinstance(loader, PrivateLoader):
            wrong = f"a {type(loader).__name__}; expected private.loader(data), because {OF_POISSON}"
        elif loader.batches.parts != (parts := trainer.accumulate_grad_batches):
            has = f"a loader with {loader.batches.parts} micro-batches per step"
            wrong = f"accumulate_grad_batches={parts}, and {has}; expected as many: private.loader(data, parts=...)"
        elif trainer.gradient_clip_val:
            wrong = f"a trainer with gradient_clip_val={trainer.gradient_clip_val}, {WOULD_CLIP}"
        if wrong:
            raise ValueError(f"PrivateCallback was given {wrong}" + ON_PRIVATE)
        self.private.attach(pl_module.get_submodule(self.part), *trainer.optimizers)
        vars(pl_module)["backward"] = self._backward

    def _backward(self, losses: Tensor, *_: Any, **__: Any) -> None:
        if losses.ndim != 1:
            raise ValueError(f"training_step returned a loss of shape {tuple(losses.shape)}; {N_LOSSES}" + ON_PRIVATE)
        self.private.backward(losses)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        self.last_step = self.private.step(scale / trainer.accumulate_grad_batches, scaler)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self.last_step is None:
            raise RuntimeError("the trainer steps before the private step: it counts other micro-batches" + ON_PRIVATE)
        pl_module.log("epsilon", self.private.epsilon(), prog_bar=True)

    def state_dict(self) -> dict[str, Any]:
        return self.private.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.private.load_state_dict(state_dict)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        vars(pl_module).pop("backward", None)
        self.private.detach()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)
