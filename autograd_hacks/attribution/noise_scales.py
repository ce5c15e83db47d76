"""Noise and signal over training: exponential means of each, whose ratio is the noise scale."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal, overload

import torch

from autograd_hacks import PerSampleGrads
from autograd_hacks.errors import ON_NOISE
from autograd_hacks.extending import NoiseScale, check_kind, check_state
from autograd_hacks.forms import BUDGET
from autograd_hacks.support.display import Shown, Table
from autograd_hacks.support.ranges import check_word, checked


class NoiseScales(Shown):
    """Averages the noise and the signal of gradients over training, exponentially, for every parameter::

        scales = autograd_hacks.attribution.NoiseScales(smoothing=0.99)
        for x, y in loader:
            loss_fn(model(x), y).backward()
            scales.update(autograd_hacks.per_sample_grads(model))
            optimizer.step()
        scales.noise_scale().scale               # a number of samples

    One batch's ratio is noisy and has no mean, because its signal may be near or below zero.  So noise and signal, each
    unbiased, are averaged separately and then divided.

    smoothing: β in [0, 1), the share of the past.  Mₜ = β Mₜ₋₁ + (1 - β) xₜ from M₀ = 0, and Mₜ / (1 - βᵗ) is the mean, as
    in Adam; t counts the steps that had the parameter

    Source: McCandlish et al. 2018, "An empirical model of large-batch training" (arXiv:1812.06162), appendix A.1.
    """

    __repr__ = Shown.__str__

    @checked(ON_NOISE)
    def __init__(self, smoothing: float = 0.95) -> None:
        self.smoothing = smoothing
        # For each parameter the sums of noise and signal, and the sum of their weights, 1 - βᵗ.
        self._means: dict[str, tuple[float, ...]] = {}

    @checked(ON_NOISE)
    def update(self, grads: PerSampleGrads, max_bytes: int = BUDGET) -> None:
        """Adds a step's gradients.  All processes must call it at once.  max_bytes: bytes to use beside the result

        Raises what ``grads.noise_scale`` raises, for example for fewer than two samples, and ValueError if gradients are not
        finite, as in a step that a GradScaler skips.  The means don't change then.
        """
        check_kind("NoiseScales.update", ON_NOISE, PerSampleGrads, "per_sample_grads(model)", grads=grads)
        scales = grads.noise_scale(per_parameter=True, max_bytes=max_bytes)
        self._take({name: (own.noise.item(), own.signal.item()) for name, own in scales.items()})

    def _take(self, found: Mapping[str, tuple[float, float]]) -> None:
        """Adds a step's noise and signal, {parameter's name: both}."""
        if wrong := [name for name, own in found.items() if not all(map(isfinite, own))]:
            raise ValueError(
                f"NoiseScales: the gradients of {wrong[0]!r} are not finite (noise and signal {found[wrong[0]]}). Skip "
                "update() in steps that the optimizer skips." + ON_NOISE
            )
        beta = self.smoothing
        for name, (noise, signal) in found.items():
            before = self._means.get(name, (0.0, 0.0, 0.0))
            self._means[name] = tuple(beta * old + (1 - beta) * new for old, new in zip(before, (noise, signal, 1.0)))

    @overload
    def noise_scale(self, per: Literal["model"] = "model") -> NoiseScale: ...
    @overload
    def noise_scale(self, per: Literal["layer", "parameter"]) -> dict[str, NoiseScale]: ...
    def noise_scale(self, per: Literal["model", "layer", "parameter"] = "model") -> NoiseScale | dict[str, NoiseScale]:
        """The means of noise and signal, with their ratio as ``.scale``, infinite while the mean signal is not above 0.

        per: 'layer' returns {path of a layer: for its parameters together}, 'parameter' returns {name: for this parameter}
        Raises ValueError before the first `update`, and for another ``per``.
        """
        check_word("noise_scale", ON_NOISE, ("model", "layer", "parameter"), per=per)
        if not self._means:
            raise ValueError("NoiseScales has seen no step; call update(per_sample_grads(model)) after one" + ON_NOISE)
        sums: dict[str, list[tuple[float, float]]] = {}
        for name, (noise, signal, weight) in self._means.items():
            place = {"model": "", "layer": name.rpartition(".")[0], "parameter": name}[per]
            sums.setdefault(place, []).append((noise / weight, signal / weight))
        found = {
            place: NoiseScale(*(torch.tensor(sum(own), dtype=torch.float64, device="cpu") for own in zip(*parts)))
            for place, parts in sums.items()
        }
        return found[""] if per == "model" else found

    def state_dict(self) -> dict[str, Any]:
        """The state to save in a checkpoint."""
        return {"means": dict(self._means)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        check_state("NoiseScales", state, self.state_dict(), ON_NOISE)
        self._means = dict(state["means"])

    def _table(self) -> Table:
        title = f"NoiseScales of {len(self._means)} parameters, smoothing {self.smoothing}"
        if not self._means:
            return Table(title + ", no step yet")
        rows = [("layer", "noise", "signal", "noise scale")]
        for place, own in [*self.noise_scale("layer").items(), ("all", self.noise_scale())]:
            # In early steps the mean signal, which is unbiased, may be below 0: it is lost in the noise.
            is_seen = own.signal > 0 or own.noise == 0
            scale = f"{own.scale.item():.4g}" if is_seen else "signal not seen yet"
            rows.append((place, f"{own.noise.item():.4g}", f"{own.signal.item():.4g}", scale))
        return Table(title, rows)
