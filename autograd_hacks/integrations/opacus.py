"""Opacus: its loader, noise and accountants, with norms and clipped sums from hooks.  Nothing of size N × P is stored."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn

from autograd_hacks import PerSampleGrads, add_hooks, per_sample_grads
from autograd_hacks.errors import ON_OPACUS, ON_PROCESSES, needed
from autograd_hacks.extending import (
    ask_independent,
    check_alone,
    check_may_set,
    clip_weights,
    mark_set,
    recorder_of,
    spread_of,
)
from autograd_hacks.support.ranges import check_bound, checked

with needed("opacus"):
    from opacus import PrivacyEngine as _PrivacyEngine
    from opacus.optimizers import DPOptimizer as _DPOptimizer


_INSTEAD = "Use clip_and_noise_(model, max_norm, noise_multiplier, expected_batch_size)."


class DPOptimizer(_DPOptimizer):
    """Opacus' ``DPOptimizer`` for a model with `autograd_hacks.add_hooks`, preferably with ``param_grad=False``.

    Opacus' loader, accountants, ``BatchMemoryManager`` and schedulers work with it.  A sample whose gradient is not finite
    adds nothing; its step counts like any other.  A parameter that no sample reached still gets noise.

    optimizer: the optimizer to wrap
    model: the hooked model, with all of the optimizer's parameters
    noise_multiplier, max_grad_norm, options: as in Opacus

    ``step`` raises NothingRecorded if the backward pass was already used; ValueError for several accumulated batches
    (`accumulate`), because they may contain the same sample; and what `per_sample_grads` and Opacus raise.
    """

    @checked(ON_OPACUS)
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        model: nn.Module,
        noise_multiplier: float,
        max_grad_norm: float,
        **options: Any,
    ) -> None:
        check_bound("DPOptimizer", max_grad_norm, noise_multiplier, ON_OPACUS, "max_grad_norm")
        self.model = model
        recorder_of(model)  # raises if the model has no hooks
        super().__init__(optimizer, noise_multiplier=noise_multiplier, max_grad_norm=float(max_grad_norm), **options)
        if not {id(p) for p in self.params} <= {id(p) for p in model.parameters()}:
            raise ValueError("DPOptimizer was given an optimizer of parameters that the model doesn't have" + ON_OPACUS)
        if any(p.is_complex() for p in self.params):  # Opacus' noise would be divided between both parts
            raise ValueError(
                f"DPOptimizer was given complex parameters, whose noise would be too small. {_INSTEAD}" + ON_OPACUS
            )

    @property
    def accumulated_iterations(self) -> int:
        return 1

    @property
    def grad_samples(self) -> list[nn.Parameter]:
        return self.params  # Opacus asks only whether there are any

    @torch.no_grad()
    def clip_and_accumulate(self) -> None:
        """Adds the sum of the clipped gradients to ``p.summed_grad``."""
        grads = self._grads()
        norms = grads.norms()
        finite = norms.isfinite()
        grads, norms = (grads, norms) if finite.all() else (grads.select(finite), norms[finite])
        sums = grads.weighted_sum(clip_weights(norms + 1e-6, self.max_grad_norm))
        names = {id(p): name for name, p in self.model.named_parameters()}
        for p in self.params:
            total = sums[names[id(p)]].to(p.dtype)
            p.summed_grad = total if p.summed_grad is None else p.summed_grad.add_(total)

    def _grads(self) -> PerSampleGrads:
        """The rows of the optimizer's parameters.  Raises NothingRecorded the second time."""
        recorder = recorder_of(self.model)
        ask_independent(self.model, recorder, spread_of(self.model, recorder), "DPOptimizer.step")
        check_may_set(recorder, "DPOptimizer.step", once=True)
        is_told = any(recorded.losses for recorded in recorder.record.passes)  # backward(losses) has recorded the reduction
        grads = per_sample_grads(self.model, None if is_told else self.loss_reduction)
        check_alone(grads, "DPOptimizer.step", _INSTEAD)
        if len(grads.batches) > 1:
            raise ValueError(
                f"DPOptimizer.step was given {len(grads.batches)} accumulated batches. They may contain the same sample, "
                "which would count twice. Split a single batch instead, by Opacus' BatchMemoryManager." + ON_OPACUS
            )
        mark_set(recorder)
        ours = {id(p) for p in self.params}
        forms = {name: grads[name] for name, p in self.model.named_parameters() if id(p) in ours}
        return grads if len(forms) == len(grads) else grads.with_forms(forms, grads.samples)


class PrivacyEngine(_PrivacyEngine):
    """Opacus' ``PrivacyEngine`` with hooks of this library.  ``make_private`` hooks the model and doesn't wrap it.

    Layers need no support by Opacus.  A model that mixes samples is refused in its first step.  ``make_private`` and
    ``make_private_with_epsilon`` take Opacus' arguments.  They raise ValueError for clipping other than 'flat' and for
    another ``grad_sample_mode``, and NotImplementedError for a distributed model.
    """

    @checked(ON_OPACUS)
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: Any,
        noise_multiplier: float,
        max_grad_norm: float,
        **options: Any,
    ) -> tuple[nn.Module, DPOptimizer, Any]:
        """Hooks a model for private training.  Returns the model, the optimizer and the loader.

        module: the model. It trains with hooks from then on (``param_grad=False``, ``independent=True``), and is returned
        without a wrapper
        optimizer: the model's; returned as a `DPOptimizer`, which clips and adds noise in ``step()``
        data_loader: returned as Opacus' loader of Poisson-sampled batches, unless ``poisson_sampling`` is False
        noise_multiplier, max_grad_norm: as in Opacus
        options: Opacus' other arguments: ``loss_reduction``, ``poisson_sampling``, ``noise_generator``, and ``batch_first``,
        False if samples are on axis 1. ``criterion`` has no effect here

        Raises ValueError for clipping other than 'flat' and for another ``grad_sample_mode``, NotImplementedError for a
        distributed model.  A model that mixes samples raises in the first step.
        """
        if (mode := options.get("grad_sample_mode", "hooks")) != "hooks":
            raise ValueError(
                f"PrivacyEngine.make_private was given grad_sample_mode={mode!r}, which is not needed here: clipping never "
                "stores per-sample gradients. Leave it and criterion out." + ON_OPACUS
            )
        if (clipping := options.get("clipping", "flat")) != "flat":
            raise ValueError(
                f"PrivacyEngine.make_private was given clipping={clipping!r}; expected 'flat'. For others use "
                "autograd_hacks.private.PrivateTraining, clip= or several bounds, max_norm={'0.*': 0.5, '2.*': 1.0}"
                + ON_OPACUS
            )
        self._module = module
        given = {"optimizer": optimizer, "data_loader": data_loader, "max_grad_norm": max_grad_norm, **options}
        _, private, loader = super().make_private(module=module, noise_multiplier=noise_multiplier, **given)
        return module, private, loader

    def _prepare_model(self, module: nn.Module, *, batch_first: bool = True, **_: Any) -> SimpleNamespace:
        add_hooks(module, batch_dim=0 if batch_first else 1, param_grad=False, independent=True)
        return SimpleNamespace(forbid_grad_accumulation=lambda: None)  # `DPOptimizer` forbids it

    def _prepare_optimizer(
        self, *, optimizer: torch.optim.Optimizer, distributed: bool = False, noise_generator: Any = None, **options: Any
    ) -> DPOptimizer:
        options = {name: x for name, x in options.items() if name not in ("clipping", "grad_sample_mode")}  # checked before
        if distributed:
            raise NotImplementedError(f"PrivacyEngine does not support distributed models. {_INSTEAD}" + ON_PROCESSES)
        optimizer = optimizer.original_optimizer if isinstance(optimizer, _DPOptimizer) else optimizer
        generator = self.secure_rng if self.secure_mode else noise_generator
        return DPOptimizer(optimizer, model=self._module, generator=generator, secure_mode=self.secure_mode, **options)
