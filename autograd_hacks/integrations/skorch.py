"""skorch: callbacks that measure and clip steps, or train privately."""

from inspect import signature
from typing import Any

import torch

from autograd_hacks.errors import ON_PRIVATE, needed
from autograd_hacks.integrations.steps import Steps
from autograd_hacks.private.clip_and_noise import PrivateStep
from autograd_hacks.private.poisson import OF_POISSON, WOULD_CLIP, PrivateLoader
from autograd_hacks.private.training import PrivateTraining

with needed("skorch"):
    from skorch.callbacks import Callback, GradientNormClipping

SETTINGS = {name: argument.default for name, argument in signature(Steps).parameters.items()}
"""The arguments of `Steps`, with their defaults."""


class GradsCallback(Callback):
    """A callback for nets: norms, the noise scale and clipping of each step.

    It takes the arguments of `Steps`, and ``scaler``, the ``torch.amp.GradScaler`` of a net that scales its losses.  The
    results go into ``steps_.history``, and into ``net.history`` for each batch.  A net that accumulates gradients must
    notify ``on_grad_computed`` once per step, as skorch's own recipe does.
    """

    def __init__(self, max_norm: float | None = None, scaler: torch.amp.GradScaler | None = None, **options: Any) -> None:
        Steps(max_norm, **options)  # raises for options that it doesn't take
        # The arguments are attributes, unchanged, because skorch sets and clones them.
        self.scaler = scaler
        self.__dict__.update(SETTINGS, max_norm=max_norm, **options)

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **_: Any) -> None:
        if isinstance(before := vars(self).get("steps_"), Steps):
            before.detach()  # an interrupted training
        self.steps_ = Steps(**{name: vars(self)[name] for name in SETTINGS})
        self.steps_.attach(net.module_, *([net.optimizer_] if hasattr(net, "optimizer_") else []))

    def on_grad_computed(self, net: Any, named_parameters: Any, training: bool = False, **_: Any) -> None:
        for key, value in self.steps_.read(self.scaler).items():
            net.history.record_batch(key, value)

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **_: Any) -> None:
        self.steps_.detach()


class PrivateCallback(Callback):
    """A callback that trains a net privately::

        callback = PrivateCallback(PrivateTraining(max_norm=1.0, noise_multiplier=1.1, delta=1e-5, loss_type="mean"))
        net = NeuralNetClassifier(Module, criterion=nn.CrossEntropyLoss, callbacks=[callback],
        iterator_train=callback.loader)

    ``epsilon`` is in ``net.history`` for each batch and epoch; ``last_step`` is the last step's `PrivateStep`.

    private: the `PrivateTraining`. Its expected batch size is the net's ``batch_size`` by default. Its loss_type must equal
    the criterion's ``reduction``

    Raises ValueError for an ``iterator_train`` that isn't `loader`, for a net with ``GradientNormClipping``, and for a
    criterion with class weights or ignored targets, because it divides by more than the batch's size.
    """

    def __init__(self, private: PrivateTraining) -> None:
        self.private = private
        self.last_step: PrivateStep | None = None

    def loader(self, data: Any, batch_size: int = 1, **options: Any) -> PrivateLoader:
        """The function for ``iterator_train``."""
        self.private._expect(batch_size)
        return self.private.loader(data, **options)

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **_: Any) -> None:
        criterion, told = net.criterion_, self.private.loss_type
        wrong = ""
        if net.iterator_train != self.loader:
            wrong = f"a net without iterator_train=callback.loader, but {OF_POISSON}"
        elif getattr(criterion, "reduction", None) != told or getattr(criterion, "weight", None) is not None:
            wrong = f"{criterion} and loss_type={told!r}; expected a criterion of that reduction without class weights"
        elif any(isinstance(callback, GradientNormClipping) for _, callback in net.callbacks_):
            wrong = f"a net with GradientNormClipping, {WOULD_CLIP}"
        if wrong:
            raise ValueError(f"PrivateCallback was given {wrong}" + ON_PRIVATE)
        self.private.attach(net.module_, net.optimizer_)

    def on_batch_begin(self, net: Any, batch: Any = None, training: bool = False, **_: Any) -> None:
        ignored = getattr(net.criterion_, "ignore_index", None)
        y = batch[1] if training and isinstance(batch, (tuple, list)) and len(batch) == 2 else None
        if ignored is not None and isinstance(y, torch.Tensor) and bool((y == ignored).any()):
            why = f"a batch has ignored targets ({ignored}), so a mean divides the other losses by a smaller number"
            raise ValueError(f"PrivateCallback: {why}. Leave such samples out." + ON_PRIVATE)

    def on_grad_computed(self, net: Any, named_parameters: Any, training: bool = False, **_: Any) -> None:
        self.last_step = self.private.step()
        net.history.record_batch("epsilon", self.private.epsilon())

    def on_epoch_end(self, net: Any, **_: Any) -> None:
        net.history.record("epsilon", self.private.epsilon())

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **_: Any) -> None:
        self.private.detach()
