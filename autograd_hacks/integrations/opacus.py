"""Opacus: its loader, noise and accountants, with norms and clipped sums from what layers saw: nothing of size N × P."""

from collections.abc import Callable
from importlib.util import find_spec
from math import inf
from typing import Any

import torch
import torch.nn as nn

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.distributed.spread import spread_of
from autograd_hacks.errors import ON_OPACUS, ON_PRIVATE, ON_PROCESSES, needed
from autograd_hacks.support.kinds import is_number
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.hooking import add_hooks
from autograd_hacks.verbs.per_sample import check_alone, check_may_set, mark_set, per_sample_grads
from autograd_hacks.verbs.verify import ask_independent

with needed("opacus"):
    from opacus import PrivacyEngine as _PrivacyEngine
    from opacus.optimizers import DPOptimizer as _DPOptimizer
    from opacus.optimizers.optimizer import _check_processed_flag, _generate_noise, _mark_as_processed


class DPOptimizer(_DPOptimizer):
    """Opacus' ``DPOptimizer`` for a model of `autograd_hacks.add_hooks`, best with ``param_grad=False``.

    model: the hooked model, with all of the optimizer's parameters    the others: as in Opacus; its loader, accountants,
    ``BatchMemoryManager`` and schedulers take this optimizer for their own

    A sample whose gradient is not finite adds nothing, and its step counts like any other.  A parameter that no sample
    reached gets its noise.

    ``step`` raises NothingRecorded for a backward pass that was added already, ValueError for several at once
    (`accumulate`), whose samples may be the same; and what `per_sample_grads` and Opacus raise.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        model: nn.Module,
        noise_multiplier: float,
        max_grad_norm: float,
        **options: Any,
    ) -> None:
        if not is_number(max_grad_norm) or not max_grad_norm > 0 or (max_grad_norm == inf and noise_multiplier):
            raise ValueError(
                f"DPOptimizer was given max_grad_norm={max_grad_norm!r}; expected a number larger than 0, finite with noise"
                + ON_OPACUS
            )
        self.model = model
        recorder_of(model)  # raises where it has no hooks
        super().__init__(optimizer, noise_multiplier=noise_multiplier, max_grad_norm=float(max_grad_norm), **options)
        if not {id(p) for p in self.params} <= {id(p) for p in model.parameters()}:
            raise ValueError("DPOptimizer was given an optimizer of parameters that the model doesn't have" + ON_OPACUS)

    @property
    def accumulated_iterations(self) -> int:
        return 1

    @torch.no_grad()
    def clip_and_accumulate(self) -> None:
        """Adds the clipped gradients' sum to ``p.summed_grad``."""
        grads = self._grads()
        norms = grads.norms()
        assert isinstance(norms, torch.Tensor)
        finite = norms.isfinite()
        grads, norms = (grads, norms) if finite.all() else (grads.select(finite), norms[finite])
        sums = grads.weighted_sum((self.max_grad_norm / (norms + 1e-6)).clamp(max=1))
        names = {id(p): name for name, p in self.model.named_parameters()}
        for p in self.params:
            total = sums[names[id(p)]].to(p.dtype)
            p.summed_grad = total if p.summed_grad is None else p.summed_grad.add_(total)

    def _grads(self) -> PerSampleGrads:
        """The rows of the optimizer's own parameters, which are not handed out twice."""
        recorder = recorder_of(self.model)
        ask_independent(self.model, recorder, spread_of(self.model, recorder), "DPOptimizer.step")
        check_may_set(recorder, "DPOptimizer.step", once=True)
        passes = (recorded for segment in recorder.record.segments for recorded in segment.passes)
        is_told = any(recorded.losses for recorded in passes)  # by backward(losses)
        grads = per_sample_grads(self.model, None if is_told else self.loss_reduction)
        instead = "Take clip_and_noise_(model, max_norm, noise_multiplier, expected_batch_size), which knows of the others."
        check_alone(grads, "DPOptimizer.step", instead)
        if len(grads.batches) > 1:
            raise ValueError(
                f"DPOptimizer.step was given {len(grads.batches)} batches accumulated. Each may have drawn the same sample, "
                "which would count twice. Split one batch instead, by Opacus' BatchMemoryManager." + ON_OPACUS
            )
        mark_set(recorder)
        ours = {id(p) for p in self.params}
        chosen = {name: grads[name] for name, p in self.model.named_parameters() if id(p) in ours}
        return grads if len(chosen) == len(grads) else grads.with_forms(chosen, grads.samples)

    @torch.no_grad()
    def add_noise(self) -> None:
        """Opacus' noise; of complex numbers to both parts, since norms are over both, and torch.normal shares it out."""
        if not any(p.is_complex() for p in self.params):
            super().add_noise()
            return
        for p in self.params:
            _check_processed_flag(p.summed_grad)
            like = torch.view_as_real(p.summed_grad) if p.is_complex() else p.summed_grad
            noise = _generate_noise(self.noise_multiplier * self.max_grad_norm, like, self.generator, self.secure_mode)
            p.grad = (p.summed_grad + (torch.view_as_complex(noise) if p.is_complex() else noise)).view_as(p)
            _mark_as_processed(p.summed_grad)

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        self.clip_and_accumulate()
        self._is_last_step_skipped = self._check_skip_next_step()
        if self._is_last_step_skipped:
            return False
        self.add_noise()
        self.scale_grad()
        if self.step_hook:
            self.step_hook(self)
        return True


class _Unwrapped:
    """What Opacus' engine asks of a wrapped model."""

    def forbid_grad_accumulation(self) -> None:
        """`DPOptimizer` does."""


class PrivacyEngine(_PrivacyEngine):
    """Opacus' ``PrivacyEngine``, whose ``make_private`` hooks the model by `add_hooks` and leaves it unwrapped.

    So layers need no support of Opacus', and a model that mixes samples is refused by what it does, in its first step.
    ``make_private`` and ``make_private_with_epsilon`` take what Opacus' take, but for other kinds of clipping than 'flat'
    and other ``grad_sample_mode`` (ValueError); for a distributed model they raise NotImplementedError.
    """

    def __init__(self, *, secure_mode: bool = False, **options: Any) -> None:
        if secure_mode and find_spec("torchcsprng") is None:
            raise ModuleNotFoundError(
                "PrivacyEngine was given secure_mode=True, for which Opacus needs torchcsprng, which is not installed. Take "
                "autograd_hacks.PrivateTraining(secure=True), or clip_and_noise_(..., noise=autograd_hacks.SecureNoise()), "
                "which draw from the operating system's random bits and need nothing else." + ON_PRIVATE,
                name="torchcsprng",
            )
        super().__init__(secure_mode=secure_mode, **options)

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: Any,
        noise_multiplier: float,
        max_grad_norm: float,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        noise_generator: torch.Generator | None = None,
        **options: Any,
    ) -> tuple[nn.Module, DPOptimizer, Any]:
        """Hooks a model for private training, and returns it, the optimizer and the loader.

        module: trains from then on with hooks (``param_grad=False``, ``independent=True``); it is returned as it is, not
        wrapped
        optimizer: of the model; returned as a `DPOptimizer` of ours, which clips and adds noise in ``step()``
        data_loader: returned as Opacus' loader of Poisson-sampled batches, unless ``poisson_sampling`` is False
        noise_multiplier, max_grad_norm, loss_reduction, noise_generator: as in Opacus
        batch_first: False where samples are on axis 1
        options: what else Opacus takes; ``criterion`` has no meaning here, as there is no wrapped one

        Raises ValueError for other clipping than 'flat' and another ``grad_sample_mode``, NotImplementedError for a model of
        several processes.  Samples that mix are refused in the first step.
        """
        if (mode := options.get("grad_sample_mode", "hooks")) != "hooks":
            raise ValueError(
                f"PrivacyEngine.make_private was given grad_sample_mode={mode!r}, which is not needed here: clipping never "
                "stores per-sample gradients, as with Opacus' 'ghost', and nothing is wrapped. Leave it out, and criterion, "
                "too." + ON_OPACUS
            )
        if (clipping := options.get("clipping", "flat")) != "flat":
            raise ValueError(
                f"PrivacyEngine.make_private was given clipping={clipping!r}; expected 'flat'. Take "
                "autograd_hacks.PrivateTraining(clip=...), whose clip may be 'per_parameter', 'automatic', 'psac' or a "
                "QuantileClip; or Opacus' own engine." + ON_OPACUS
            )
        self._module = module
        _, private, loader = super().make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            noise_generator=noise_generator,
            **options,
        )
        return module, private, loader

    def make_private_with_epsilon(self, *, module: nn.Module, **options: Any) -> tuple[nn.Module, DPOptimizer, Any]:
        """`make_private`, with the noise by which ``epochs`` rounds spend ``target_epsilon`` at most, for ``target_delta``.

        target_epsilon, target_delta, epochs: of the whole training; the others as in `make_private`, without
        noise_multiplier
        """
        found: tuple[nn.Module, DPOptimizer, Any] = super().make_private_with_epsilon(module=module, **options)
        return found

    def _prepare_model(self, module: nn.Module, *, batch_first: bool = True, **_: Any) -> _Unwrapped:
        add_hooks(module, batch_dim=0 if batch_first else 1, param_grad=False, independent=True)
        return _Unwrapped()

    def _prepare_optimizer(
        self,
        *,
        optimizer: torch.optim.Optimizer,
        distributed: bool = False,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        **options: Any,
    ) -> DPOptimizer:
        if distributed:
            raise NotImplementedError(
                "PrivacyEngine was given a distributed model. Take clip_and_noise_(model, max_norm, noise_multiplier, "
                "expected_batch_size), which adds up over processes, in a loop of your own." + ON_PROCESSES
            )
        optimizer = optimizer.original_optimizer if isinstance(optimizer, _DPOptimizer) else optimizer
        generator = self.secure_rng if self.secure_mode else noise_generator
        return DPOptimizer(optimizer, model=self._module, generator=generator, secure_mode=self.secure_mode, **options)
