"""skorch: a callback that measures steps, and clips them."""

from collections.abc import Iterable
from typing import Any

import torch

from autograd_hacks.errors import needed
from autograd_hacks.integrations.steps import Steps

with needed("skorch"):
    from skorch.callbacks import Callback


class GradsCallback(Callback):
    """A callback for nets: norms, the noise scale and clipping of each step.

    It takes what `Steps` takes, and scaler, the ``torch.amp.GradScaler`` of a net that scales its losses.  What it finds
    goes into ``steps_.history``, and into ``net.history`` for each batch.  A net that accumulates gradients notifies of
    ``on_grad_computed`` once a step, as skorch's own recipe does.
    """

    def __init__(
        self,
        max_norm: float | None = None,
        noise_scale: bool = True,
        per_parameter: bool = False,
        smoothing: float = 0.9,
        loss_type: str = "mean",
        batch_dim: int = 0,
        scaler: torch.amp.GradScaler | None = None,
        every: int = 1,
        only: str | Iterable[str] | None = None,
    ) -> None:
        # Parameters as they were given, which skorch sets and clones.
        self.max_norm, self.noise_scale, self.per_parameter = max_norm, noise_scale, per_parameter
        self.smoothing, self.loss_type, self.batch_dim, self.scaler = smoothing, loss_type, batch_dim, scaler
        self.every, self.only = every, only

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **_: Any) -> None:
        if isinstance(before := vars(self).get("steps_"), Steps):
            before.detach()  # a training that was interrupted
        self.steps_ = Steps(
            self.max_norm, self.noise_scale, self.per_parameter, self.smoothing, self.loss_type, self.batch_dim, self.every,
            self.only,
        )  # fmt: skip
        self.steps_.attach(net.module_, *([net.optimizer_] if hasattr(net, "optimizer_") else []))

    def on_grad_computed(self, net: Any, named_parameters: Any, training: bool = False, **_: Any) -> None:
        for key, value in self.steps_.read(self.scaler).items():
            net.history.record_batch(key, value)

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **_: Any) -> None:
        self.steps_.detach()
