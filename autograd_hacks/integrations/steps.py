"""The common part of trainers' callbacks: reads a step's per-sample gradients, of all micro-batches, before the step."""

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks import PerSampleGrads, accumulate, add_hooks, per_sample_grads
from autograd_hacks.attribution.noise_scales import NoiseScales
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

    max_norm: the norm to clip each sample's gradient to; ``.grad`` is then their mean (or sum). None for no clipping
    noise_scale: estimate the gradient noise scale    per_parameter: also estimate the noise scale of each parameter
    smoothing: the weight of the past in the running means of noise and signal, in [0, 1), as in `NoiseScales`
    loss_type: how the loss is reduced over a step's samples, 'mean' or 'sum'    batch_dim: as in `add_hooks`
    every: measure one step out of this many; the others run without hooks, at the cost of plain steps
    only: as in `add_hooks`. 'norms' measures only norm layers and biases, which is cheap and predicts the noise scale

    Raises ValueError for numbers out of range and for arguments that don't go together, TypeError for other arguments.
    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1, for the noise scale.
    """

    @checked(ON_STEPS)
    def __init__(
        self,
        max_norm: float | None = None,
        noise_scale: bool = True,
        per_parameter: bool = False,
        smoothing: float = 0.9,
        loss_type: str = "mean",
        batch_dim: BatchDim = 0,
        every: int = 1,
        only: str | Iterable[str] | None = None,
    ) -> None:
        check_word("Steps", ON_STEPS, LOSS_TYPES, loss_type=loss_type)
        if max_norm is not None and (every > 1 or only is not None):
            given = f"max_norm={max_norm} was given with every={every} and only={only!r}"
            raise ValueError(f"{given}, but what isn't measured can't be clipped. Leave these out to clip." + ON_STEPS)
        self.every, self.only, self._count = every, only, 0
        self.max_norm, self.noise_scale, self.per_parameter = max_norm, noise_scale, per_parameter
        self.loss_type, self.batch_dim, self._scales = loss_type, batch_dim, NoiseScales(smoothing)
        self.norms: Tensor | None = None
        """The norms of the last step's samples before clipping, N, in the order of the micro-batches."""
        self.history: list[dict[str, float]] = []
        """The results of `read` for each measured step."""
        self._model: nn.Module | None = None
        self._hooked: Hooked | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None, "_hooked": None}

    def attach(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Hooks a model with these optimizers and begins its first step.

        Raises ValueError if ``max_norm`` is given and an optimizer also steps other parameters, because they would not be
        clipped.
        """
        check_module("attach", model, ON_STEPS)
        self._check_covers(model, optimizers)
        self.detach()
        hooked = add_hooks(model, batch_dim=self.batch_dim, independent=self.max_norm is not None, only=self.only)
        self._hooked, self._model = hooked, model
        self._count = 0
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
            hooked.on()
            record = recorder_of(model).record
            record.accumulating = False
            record.clear()
            hooked.__exit__()

    def read(self, scaler: torch.amp.GradScaler | None = None) -> dict[str, float]:
        """Measures and clips the step's gradients, and begins the next step.  Call it just before the optimizer's step.

        scaler: the GradScaler of the losses; ``.grad`` may be unscaled or not

        Returns ``grads/samples``; ``grads/norm_mean`` and ``grads/norm_max`` of the norms before clipping;
        ``grads/clipped``, the share of clipped samples; and for two samples or more ``grads/noise``, ``grads/signal`` and
        ``grads/noise_scale`` in samples, infinite while the signal is unknown.  Returns {} for a step that isn't measured.

        Raises RuntimeError before `attach`, NothingRecorded without a backward pass, NotImplementedError if several
        processes share the batch, and what `per_sample_grads` raises.
        """
        if self._model is None or self._hooked is None:
            raise RuntimeError("read(): no model is attached. Call it between attach(model) and detach()" + ON_STEPS)
        model, is_measured, measures = self._model, self._count % self.every == 0, {}
        self._count += 1
        if is_measured:
            accumulate(model).stop()
        scale = 1.0 if scaler is None else scaler.get_scale()
        try:
            if is_measured:
                has_lost_scale = scaler is None or not scaler.is_enabled() or is_unscaled(scaler)
                with torch.no_grad():
                    measures = self._read(model, scale, has_lost_scale)
                self.history.append(measures)
        finally:
            if self._count % self.every:
                self._hooked.off()
            else:
                self._hooked.on()
                accumulate(model).start()
        return measures

    def _read(self, model: nn.Module, scale: float, unscaled: bool) -> dict[str, float]:
        parts = _parts(model, scale)
        check_alone(parts, "a step's gradients", "Read per_sample_grads(model) and clip in a loop of your own.")
        factor = parts.samples if self.loss_type == "mean" else 1
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


def _parts(model: nn.Module, scale: float) -> PerSampleGrads:
    """Each sample's contribution to ``.grad``."""
    segments = recorder_of(model).record.segments
    told = {recorded.losses.loss_type for segment in segments for recorded in segment.passes if recorded.losses}
    if "mean" not in told:
        return per_sample_grads(model, "sum", scale)
    sizes = [segment.batch_size() for segment in segments]  # rows of backward(losses) are not divided by N
    share = torch.cat([torch.full((size,), 1 / max(1, size), device="cpu") for size in sizes])
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
