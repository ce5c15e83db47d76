"""accelerate: steps of a loop under an Accelerator, measured and clipped."""

from __future__ import annotations

from typing import Any

import torch.nn as nn

from autograd_hacks.errors import needed
from autograd_hacks.integrations.steps import Steps

with needed("accelerate"):
    from accelerate import Accelerator


class AcceleratedSteps(Steps):
    """Norms, the noise scale and clipping of an Accelerator's steps, over all their micro-batches::

        with AcceleratedSteps(accelerator, model, max_norm=1.0) as steps:
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_fn(model(x), y))
                    steps.step_begins()
                    optimizer.step()
                    optimizer.zero_grad()

    accelerator, model: prepared    the others: as `Steps` takes them
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, **options: Any) -> None:
        super().__init__(**options)
        self.accelerator, self._prepared = accelerator, model

    def __enter__(self) -> AcceleratedSteps:
        self.attach(self._prepared, *self.accelerator._optimizers)
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def step_begins(self) -> dict[str, float] | None:
        """`Steps.read`, where the optimizer is about to step; None after a micro-batch that isn't the step's last."""
        return self.read(self.accelerator.scaler) if self.accelerator.sync_gradients else None
