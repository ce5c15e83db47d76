"""What trainers' callbacks share: a step's per-sample gradients, of all its micro-batches, just before the step."""

from collections.abc import Iterable, Sequence
from math import inf, isfinite
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.amp.grad_scaler import OptState

from autograd_hacks.capture.accumulate import accumulate
from autograd_hacks.capture.hooks import Hooked, recorder_of
from autograd_hacks.errors import ON_STEPS
from autograd_hacks.probe.batch import BatchDim
from autograd_hacks.reading.scale import check_loss_type
from autograd_hacks.verbs.arguments import check_count
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.hooking import add_hooks
from autograd_hacks.verbs.noise_scales import NoiseScales
from autograd_hacks.verbs.per_sample import check_alone, per_sample_grads, set_grads


class Steps:
    """Measures the steps of a model that a trainer trains, and clips them, if told to.

    max_norm: each sample's gradient is clipped to it, and ``.grad`` set to their mean (or sum); None for no clipping
    noise_scale: whether to estimate the gradient noise scale    per_parameter: also of each parameter
    smoothing: share of the past in the means of noise and signal, of which it is the ratio, as in `NoiseScales`; in [0, 1)
    loss_type: how the loss was reduced over a step's samples, 'mean' or 'sum'    batch_dim: as in `add_hooks`
    only: as in `add_hooks`: 'norms' measures norm layers and biases alone, which are cheap and tell the noise scale
    every: measures the first of so many steps; the others run without hooks, and cost what they cost without the library

    A *row* is what a sample brings to the step's gradient, times the number of samples for a mean.  However the trainer
    divides and scales the losses of micro-batches, the rows' mean (or sum) is the gradient that it would step by.

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1, for the noise scale.
    """

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
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}; expected a number larger than 0, or None" + ON_STEPS)
        check_loss_type(loss_type)
        check_count("Steps: every", every, "steps", ON_STEPS)
        if every > 1 and max_norm is not None:
            raise ValueError(
                f"every={every} was given with max_norm={max_norm}: steps that aren't measured would not be clipped. Leave "
                "every out to clip, or max_norm to measure." + ON_STEPS
            )
        if only is not None and max_norm is not None:
            raise ValueError(
                f"only={only!r} was given with max_norm={max_norm}: other parameters would not be clipped. Leave only out "
                "to clip, or max_norm to measure." + ON_STEPS
            )
        self.every, self.only, self._count = every, only, 0
        self.max_norm, self.noise_scale, self.per_parameter = max_norm, noise_scale, per_parameter
        self.loss_type, self.batch_dim, self._scales = loss_type, batch_dim, NoiseScales(smoothing)
        self.norms: Tensor | None = None
        """Of the last step's samples before clipping, N, in the order of the micro-batches."""
        self.history: list[dict[str, float]] = []
        """What `read` has returned of each step that was measured."""
        self._model: nn.Module | None = None
        self._hooked: Hooked | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None, "_hooked": None}

    def attach(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Hooks a model, and begins its first step.

        optimizers: that step it. Raises ValueError where one of them steps other parameters too, which ``max_norm`` would
        leave as they are
        """
        self._check_covers(model, optimizers)
        self.detach()
        hooked = add_hooks(model, batch_dim=self.batch_dim, independent=self.max_norm is not None, only=self.only)
        self._hooked, self._model = hooked, model
        self._count = 0
        accumulate(model).start()

    def _check_covers(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        ours = {id(p) for p in model.parameters()}
        for optimizer in optimizers if self.max_norm is not None else ():
            trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            others = [p for p in trained if id(p) not in ours]
            if others and (len(optimizers) == 1 or len(others) < len(trained)):
                shapes = ", ".join(str(tuple(p.shape)) for p in others[:5])
                raise ValueError(
                    f"max_norm={self.max_norm} was given for a {type(model).__name__}, and its optimizer also steps "
                    f"{len(others)} parameters that are not that model's, of shapes {shapes}: they would be stepped "
                    "unclipped. Hook the model that has all of them (of a LightningModule no part: self(x) in "
                    "training_step), freeze the others, or measure without max_norm." + ON_STEPS
                )

    def detach(self) -> None:
        """Ends: the model is as it was, also in the middle of a step."""
        model, hooked, self._model, self._hooked = self._model, self._hooked, None, None
        if model is not None and hooked is not None:
            hooked.on()
            record = recorder_of(model).record
            record.accumulating = False
            record.clear()
            hooked.__exit__()

    def read(self, scaler: torch.amp.GradScaler | None = None) -> dict[str, float]:
        """What the step's gradients say, just before the optimizer's step; clips them, and begins the next step.

        scaler: what has scaled the losses, whether ``.grad`` was unscaled since or not

        Returns ``grads/samples``, ``grads/norm_mean`` and ``grads/norm_max`` of the norms before clipping,
        ``grads/clipped``, the share of the samples that were, and of at least two samples ``grads/noise``, ``grads/signal``
        and ``grads/noise_scale``, in samples, which is infinite while no signal is known; nothing of a step that isn't
        measured.

        Raises NothingRecorded before `attach` and without a backward pass, NotImplementedError where several processes share
        the batch, and what `per_sample_grads` raises.
        """
        if self._model is None or self._hooked is None:
            raise RuntimeError("no model is attached: read() comes between attach(model) and detach()" + ON_STEPS)
        model, is_measured, measures = self._model, self._count % self.every == 0, {}
        self._count += 1
        if is_measured:
            accumulate(model).stop()
        scale = 1.0 if scaler is None else scaler.get_scale()
        try:
            if is_measured:
                with torch.no_grad():
                    measures = self._read(model, scale, _is_unscaled(scaler))
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
        check_alone(parts, "a step's gradients", "Read per_sample_grads(model), and clip, in a loop of your own.")
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
            weights = (self.max_norm / norms).clamp(max=1)
            if scale != 1:  # what overflowed is to be skipped, whichever parameter it was in
                weights = weights.where(norms.isfinite(), torch.nan)
            sums = parts.weighted_sum(weights if unscaled else weights * scale)
            set_grads(model, sums, parts.reached, recorder=recorder_of(model))
        return {f"grads/{key}": float(value) for key, value in measures.items()}

    def _noise(self, parts: PerSampleGrads, factor: float) -> dict[str, float]:
        """Noise and signal, and the ratio of their means over steps."""
        scales = parts.noise_scale(per_parameter=True)
        assert isinstance(scales, dict)
        each = {name: (x.noise.item() * factor**2, x.signal.item() * factor**2) for name, x in scales.items()}
        self._scales._take(each)
        measures = {"noise": sum(noise for noise, _ in each.values()), "signal": sum(signal for _, signal in each.values())}
        means = {"noise_scale": self._scales.noise_scale()}
        if self.per_parameter:
            means |= {f"noise_scale/{name}": own for name, own in self._scales.noise_scale("parameter").items()}
        return measures | {name: own.scale.item() if own.signal > 0 else inf for name, own in means.items()}


def _parts(model: nn.Module, scale: float) -> PerSampleGrads:
    """What each sample brings to ``.grad``."""
    segments = recorder_of(model).record.segments
    told = {recorded.losses.loss_type for segment in segments for recorded in segment.passes if recorded.losses}
    if "mean" not in told:
        return per_sample_grads(model, "sum", scale)
    sizes = [segment.batch_size() for segment in segments]  # of backward(losses), whose rows know no share
    share = torch.cat([torch.full((size,), 1 / max(1, size), device="cpu") for size in sizes])
    return per_sample_grads(model, None, scale).scaled(share)


def mean_of(steps: list[dict[str, float]]) -> dict[str, float]:
    """What several steps' `Steps.read` say together: means, the last noise scales, the largest norm; for a logger."""
    keys = dict.fromkeys(key for step in steps for key in step)
    means = {}
    for key in keys:
        values = [step[key] for step in steps if key in step]
        is_last = "/noise_scale" in key
        finite = [value for value in values if isfinite(value)]
        means[key] = (
            values[-1] if is_last or not finite else max(values) if key.endswith("max") else sum(finite) / len(finite)
        )
    return means


def _is_unscaled(scaler: torch.amp.GradScaler | None) -> bool:
    """Whether ``.grad`` has no scale in it any more."""
    if scaler is None or not scaler.is_enabled():
        return True
    return any(state["stage"] is OptState.UNSCALED for state in scaler._per_optimizer_states.values())
