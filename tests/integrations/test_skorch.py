"""A callback in skorch: the steps of single samples, however they are split."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn as nn
from needed import needed
from rarely import crossed
from torch.testing import assert_close
from trained import LR, MAX_NORM, N, check, data, net, same_in_parts

skorch = needed("skorch", "skorch.callbacks")

from sklearn.base import clone  # noqa: E402

from autograd_hacks.integrations.skorch import GradsCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Accumulating(skorch.NeuralNetClassifier):
    """skorch's own recipe, from its FAQ, with loss scaling and autocast."""

    def __init__(self, *args: Any, parts: int = 1, scaler: Any = None, autocast: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parts, self.scaler, self.autocast = parts, scaler, autocast

    def infer(self, x: Any, **options: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return super().infer(x, **options)

    def get_loss(self, y_pred: Any, y_true: Any, *args: Any, **options: Any) -> Any:
        loss = self.criterion_(y_pred.float(), y_true) / (self.parts if self.module_.training else 1)
        return loss if self.scaler is None or not self.module_.training else self.scaler.scale(loss)

    def train_step(self, batch: Any, **options: Any) -> Any:
        if self.history[-1]["batches"] == [{}]:
            self.optimizer_.zero_grad()
        self.module_.train()
        step = self.train_step_single(batch, **options)
        if len(self.history[-1, "batches"]) % self.parts == 0:
            self.notify(
                "on_grad_computed", named_parameters=list(self.module_.named_parameters()), batch=batch, training=True
            )
            if self.scaler is None:
                self.optimizer_.step()
            else:
                self.scaler.step(self.optimizer_)
                self.scaler.update()
            self.optimizer_.zero_grad()
        return step


def trained(model: nn.Module, callback: GradsCallback, parts: int = 1, **options: Any) -> Any:
    kind = Accumulating if parts > 1 or options else skorch.NeuralNetClassifier
    more = {"parts": parts, **options} if kind is Accumulating else {}
    wrapped = kind(
        model,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        lr=LR,
        max_epochs=1,
        batch_size=N // parts,
        train_split=None,
        callbacks=[("grads", callback)],
        verbose=0,
        **more,
    )
    x, y = data()
    return wrapped.fit(x.numpy(), y.numpy())


@crossed(scales=[False, True], max_norm=[MAX_NORM, None], parts=[4, 1])
def test_steps_are_those_of_single_samples(scales: bool, max_norm: float | None, parts: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if scales else None
    model, callback = net(), GradsCallback(max_norm, scaler=scaler)
    wrapped = trained(after := copy.deepcopy(model), callback, parts, **({"scaler": scaler} if scales else {}))
    callback = dict(wrapped.callbacks_)["grads"]
    check(model, after, callback.steps_.history, callback.steps_.norms, max_norm)
    rows = [row for row in wrapped.history[-1, "batches"] if "grads/norm_mean" in row]
    assert [row["grads/norm_mean"] for row in rows] == [step["grads/norm_mean"] for step in callback.steps_.history]


def test_mixed_precision() -> None:
    same_in_parts(lambda model, parts: trained(model, GradsCallback(MAX_NORM), parts, autocast=True), 1e-2)


def test_it_is_pickled_cloned_and_set() -> None:
    wrapped = trained(net(), GradsCallback(MAX_NORM))
    again = pickle.loads(pickle.dumps(wrapped))
    assert dict(again.callbacks_)["grads"].steps_.history == dict(wrapped.callbacks_)["grads"].steps_.history
    x, y = data()
    assert_close(again.predict_proba(x.numpy()), wrapped.predict_proba(x.numpy()))
    other = clone(wrapped).set_params(callbacks__grads__max_norm=0.25)
    other.fit(x.numpy(), y.numpy())
    assert dict(other.callbacks_)["grads"].steps_.max_norm == 0.25


def test_a_second_fit_goes_on() -> None:
    wrapped = trained(net(), GradsCallback(MAX_NORM))
    x, y = data()
    wrapped.partial_fit(x.numpy(), y.numpy())
    assert len(wrapped.history) == 2
    assert "grads/norm_mean" in wrapped.history[-1, "batches"][-1]


def test_a_criterion_would_be_stepped_unclipped() -> None:
    class Weighted(nn.CrossEntropyLoss):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

    x, y = data()
    wrapped = skorch.NeuralNetClassifier(
        net(), criterion=Weighted, train_split=None, callbacks=[("grads", GradsCallback(MAX_NORM))], verbose=0
    )
    with pytest.raises(ValueError, match="not be clipped"):
        wrapped.fit(x.numpy(), y.numpy())
