"""accelerate: measures and clips the steps of a loop with an Accelerator."""

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

    accelerator: the Accelerator, with prepared optimizers    model: the prepared model
    options: as in `Steps`
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
        """`Steps.read`, if the optimizer is about to step; None before the step's last micro-batch."""
        return self.read(self.accelerator.scaler) if self.accelerator.sync_gradients else None
