"""The common part of trainers' callbacks: reads a step's per-sample gradients, of all micro-batches, before the step."""

import sys
from collections.abc import Sequence
from math import isfinite

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks import PerSampleGrads, accumulate, add_hooks, per_sample_grads
from autograd_hacks.attribution import NoiseScales
from autograd_hacks.errors import ON_STEPS
from autograd_hacks.extending import (
    LOSS_TYPES,
    BatchDim,
    Hooked,
    check_alone,
    check_module,
    clip_weights,
    is_unscaled,
    recorder_of,
    set_grads,
)
from autograd_hacks.support.ranges import check_word, checked
from autograd_hacks.support.trees import stepped_outside


class Steps:
    """Measures, and optionally clips, the steps of a model in a trainer.

    A *row* is a sample's contribution to the step's gradient, times the number of samples for a mean.  However the trainer
    divides and scales the losses of micro-batches, the mean (or sum) of the rows is the gradient that it would step by.
    A row is the sample's own gradient if losses are means over micro-batches of one size, each divided by their number.

    max_norm: the norm to clip each sample's gradient to; ``.grad`` is then their mean (or sum). None for no clipping
    noise_scale: estimate the gradient noise scale    per_parameter: also estimate the noise scale of each parameter
    smoothing: the weight of the past in the running means of noise and signal, in [0, 1), as in `NoiseScales`
    loss_type: how the loss is reduced over a step's samples, 'mean' or 'sum'. By default 'mean' is assumed, and a line on
    stderr says so when a run's first step is read, unless the step is a single ``backward(losses)``
    batch_dim: as in `add_hooks`

    Raises ValueError for numbers out of range, TypeError for other arguments.
    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1, for the noise scale.
    """

    @checked(ON_STEPS)
    def __init__(
        self,
        max_norm: float | None = None,
        noise_scale: bool = True,
        per_parameter: bool = False,
        smoothing: float = 0.9,
        loss_type: str | None = None,
        batch_dim: BatchDim = 0,
    ) -> None:
        check_word("Steps", ON_STEPS, (*LOSS_TYPES, None), loss_type=loss_type)
        self.max_norm, self.noise_scale, self.per_parameter = max_norm, noise_scale, per_parameter
        self.loss_type, self.batch_dim, self._scales = loss_type, batch_dim, NoiseScales(smoothing)
        self.norms: Tensor | None = None
        """The norms of the last step's samples before clipping, N, in the order of the micro-batches."""
        self.history: list[dict[str, float]] = []
        """The results of `read` for each step."""
        self._model: nn.Module | None = None
        self._hooked: Hooked | None = None

    def attach(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Hooks a model with these optimizers and begins its first step.

        Raises ValueError if ``max_norm`` is given and an optimizer also steps other parameters, because they would not be
        clipped.
        """
        check_module("attach", model, ON_STEPS)
        self._check_covers(model, optimizers)
        self.detach()
        self._hooked = add_hooks(model, batch_dim=self.batch_dim, independent=self.max_norm is not None)
        self._model, self._is_said = model, self.loss_type is not None
        accumulate(model).start()

    def _check_covers(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers if self.max_norm is not None else ():
            others = stepped_outside(model, optimizer)
            trained = sum(p.requires_grad for group in optimizer.param_groups for p in group["params"])
            if others and (len(optimizers) == 1 or len(others) < trained):
                shapes = ", ".join(str(tuple(p.shape)) for p in others[:5])
                raise ValueError(
                    f"max_norm={self.max_norm} was given for a {type(model).__name__}, but its optimizer also steps "
                    f"{len(others)} parameters outside of that model, of shapes {shapes}, which would not be clipped. Hook "
                    "the model that has all (a LightningModule: call self(x)), freeze them, or measure without max_norm."
                    + ON_STEPS
                )

    def detach(self) -> None:
        """Removes the hooks and restores the model, also in the middle of a step."""
        model, hooked, self._model, self._hooked = self._model, self._hooked, None, None
        if model is not None and hooked is not None:
            record = recorder_of(model).record
            record.accumulating = False
            record.clear()
            hooked.__exit__()

    def read(self, scaler: torch.amp.GradScaler | None = None) -> dict[str, float]:
        """Measures and clips the step's gradients, and begins the next step.  Call it just before the optimizer's step.

        scaler: the GradScaler of the losses; ``.grad`` may be unscaled or not

        Returns ``grads/samples``; ``grads/norm_mean`` and ``grads/norm_max`` of the norms before clipping;
        ``grads/clipped``, the share of clipped samples; and for two samples or more ``grads/noise``, ``grads/signal`` and
        ``grads/noise_scale`` in samples, infinite while the signal is unknown.

        Raises RuntimeError before `attach`, NothingRecorded without a backward pass, NotImplementedError if several
        processes share the batch, and what `per_sample_grads` raises.
        """
        if self._model is None:
            raise RuntimeError("read(): no model is attached. Call it between attach(model) and detach()" + ON_STEPS)
        model = self._model
        accumulate(model).stop()
        try:
            with torch.no_grad():
                self.history.append(self._read(model, scaler))
        finally:
            accumulate(model).start()
        return self.history[-1]

    def _read(self, model: nn.Module, scaler: torch.amp.GradScaler | None) -> dict[str, float]:
        scale = 1.0 if scaler is None else scaler.get_scale()
        parts = self._parts(model, scale)
        check_alone(parts, "a step's gradients", "Read per_sample_grads(model) and clip in a loop of your own.")
        factor = 1 if self.loss_type == "sum" else parts.samples
        norms = self.norms = parts.norms() * factor
        is_finite = bool(norms.isfinite().all())
        measures: dict[str, float] = {"samples": len(norms)}
        if len(norms):
            measures |= {"norm_mean": norms.mean().item(), "norm_max": norms.max().item()}
        if self.noise_scale and len(norms) > 1 and is_finite:
            measures |= self._noise(parts, factor)
        if self.max_norm is not None:
            measures["clipped"] = (norms > self.max_norm).float().mean().item() if len(norms) else 0.0
            weights = clip_weights(norms, self.max_norm)
            if scale != 1:  # the scaler must skip the step, whichever parameter overflowed
                weights = weights.where(norms.isfinite(), torch.nan)
            unscaled = scaler is None or not scaler.is_enabled() or is_unscaled(scaler)
            sums = parts.weighted_sum(weights if unscaled else weights * scale)
            set_grads(parts.spread.parameters, sums, parts.reached, recorder=recorder_of(model))
        return {f"grads/{key}": float(value) for key, value in measures.items()}

    def _noise(self, parts: PerSampleGrads, factor: float) -> dict[str, float]:
        """Noise and signal, and the ratio of their means over steps."""
        scales = parts.noise_scale(per_parameter=True)
        each = {name: (x.noise.item() * factor**2, x.signal.item() * factor**2) for name, x in scales.items()}
        self._scales._take(each)
        measures = {"noise": sum(noise for noise, _ in each.values()), "signal": sum(signal for _, signal in each.values())}
        means = {"noise_scale": self._scales.noise_scale()}
        if self.per_parameter:
            means |= {f"noise_scale/{name}": own for name, own in self._scales.noise_scale("parameter").items()}
        return measures | {name: own.scale.item() for name, own in means.items()}

    def _parts(self, model: nn.Module, scale: float) -> PerSampleGrads:
        """Each sample's contribution to ``.grad``."""
        segments = recorder_of(model).record.segments
        told = {own.losses.loss_type for segment in segments for own in segment.passes if own.losses}
        if segments and not self._is_said and (len(segments) > 1 or told != {"mean"}):
            self._is_said = True
            print(
                "autograd_hacks: no loss_type was given, so a row is a sample's part in the step's gradient times the "
                "number of samples. That is its own gradient where losses are means over equal micro-batches, each divided "
                "by their number. loss_type='mean' hides this line; for sums give loss_type='sum'"
                + ON_STEPS.replace("\nM", ". M"),
                file=sys.stderr,
            )
        if "mean" not in told:
            return per_sample_grads(model, "sum", scale)
        sizes = [segment.batch_size() for segment in segments]  # rows of backward(losses) are not divided by N
        share = torch.cat([torch.full((size,), 1 / max(1, size), dtype=torch.float64, device="cpu") for size in sizes])
        return per_sample_grads(model, None, scale).scaled(share)


def mean_of(steps: list[dict[str, float]]) -> dict[str, float]:
    """Combines several steps' `Steps.read` for a logger: means, the last noise scales, the largest norm."""
    means = {}
    for key in dict.fromkeys(key for step in steps for key in step):
        values = [step[key] for step in steps if key in step]
        finite = [value for value in values if isfinite(value)]
        mean = max(values) if key.endswith("max") else sum(finite) / max(1, len(finite))
        means[key] = values[-1] if "/noise_scale" in key or not finite else mean
    return means
