"""Lightning: a callback that measures steps, and clips them."""

from typing import Any

from autograd_hacks.errors import ON_STEPS, needed
from autograd_hacks.integrations.steps import Steps

with needed("lightning"):
    import lightning.pytorch as pl


class GradsCallback(Steps, pl.Callback):
    """A callback for ``Trainer``: norms, the noise scale and clipping of each step, over all its micro-batches.

    part: the path of the module that ``training_step`` calls, 'net' for ``self.net(x)``; the LightningModule itself, called
    by ``self(x)``, unless told    the others: as `Steps` takes them

    What it finds goes into ``history``, step by step, and to the trainer's loggers.  A ``gradient_clip_val`` of the
    trainer's clips what this has left.  Raises NotImplementedError for manual optimization and for several optimizers, and
    ValueError where ``max_norm`` was given and the optimizer steps parameters outside of the part, which nothing would clip.
    """

    def __init__(self, part: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.part = part

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
            raise NotImplementedError(
                f"GradsCallback was given {len(trainer.optimizers)} optimizers, automatic_optimization="
                f"{pl_module.automatic_optimization}; expected one, stepped by the trainer. Otherwise use "
                "autograd_hacks.integrations.steps.Steps in training_step: attach, read before each step." + ON_STEPS
            )
        self.attach(pl_module.get_submodule(self.part), *trainer.optimizers)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        found = self.read(getattr(trainer.precision_plugin, "scaler", None))
        pl_module.log_dict(found)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.detach()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.detach()
