"""Metrics: a linear map of each parameter's gradients, from optimizers, Kronecker factors or projections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks import forms
from autograd_hacks.errors import ON_METRICS, NothingRecorded
from autograd_hacks.extending import check_kind, kind_of, some
from autograd_hacks.forms import Dense, Elementwise, LinearMap, Sides
from autograd_hacks.support.display import Shown, Table
from autograd_hacks.support.parts import whole_of
from autograd_hacks.support.patterns import unwrapped
from autograd_hacks.support.philox import by_byte, key_of, packed_signs, unpacked
from autograd_hacks.support.ranges import checked

MapLike: TypeAlias = "LinearMap | Tensor | tuple[Tensor | None, Tensor | None] | None"
"""A map, a factor for each number, a pair (L, R), or None for the identity."""
SHARE = 0.1
"""The default damping of Kronecker factors, as a share of the mean eigenvalue.
Source: Grosse et al. 2023 (arXiv:2308.03296), section 3.2."""


class Metric(Shown, dict["str | nn.Parameter", LinearMap]):
    """A linear map of each parameter's gradients, for ``grads.preconditioned(metric)``.

    maps: {name or pattern, or the parameter itself: map}, where a map is

    * a tensor D of the parameter's shape: G ↦ D ∘ G
    * a pair (L, R): G ↦ L G R, for the parameter seen as a matrix O I (a vector as O 1).  L is (O', O), R is (I, I').  A
      vector means a diagonal matrix, None the identity.  Gradients that are products stay products
    * None: G ↦ G
    * an `autograd_hacks.forms.LinearMap`

    The tensors are not copied.  If one of them is overwritten, verbs of rows that it has preconditioned raise StaleRecord.
    Raises TypeError for any other map.
    """

    def __init__(self, maps: Mapping[str | nn.Parameter, MapLike]) -> None:
        super().__init__({key: _map_of(key, given) for key, given in maps.items()})

    def __call__(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """M v, for a direction such as a gradient, where maps go by the parameters' names, as those of `from_ekfac` do.

        v: {name: shape}, for some of the parameters

        Raises ValueError for a name without a map, and for a tensor that its map doesn't fit.
        """
        check_kind("Metric", ON_METRICS, Mapping, "a direction, {name: tensor}", v=v)
        found: dict[str, Tensor] = {}
        for name, x in v.items():
            if name not in self:
                raise ValueError(
                    f"Metric has no map for {name!r}; expected names such as {some([*map(str, self)])}" + ON_METRICS
                )
            try:
                found[name] = forms.mapped(Dense(x[None]), self[name]).dense()[0].to(x.dtype)
            except ValueError as error:
                raise ValueError(f"Metric, at {name!r}: {error}" + ON_METRICS) from error
        return found

    def _table(self) -> Table:
        return Table(f"Metric of {len(self)} parameters")

    @classmethod
    def from_optimizer(cls, optimizer: torch.optim.Optimizer) -> Metric:
        """The scaling that an optimizer applies to gradients, from its current state, without momentum and learning rate.

        * Adam, AdamW, NAdam: g / (√v̂ + eps), with v̂ corrected for bias; with amsgrad from the largest v so far
        * RMSprop: g / (√v + eps).  Adagrad: g / (√Σg² + eps)

        A parameter that no step has changed has no map: leave it out by ``per_sample_grads(model, only=...)``.

        optimizer: one of these, also as wrapped by accelerate

        Raises TypeError for other optimizers, and for complex parameters, because optimizers scale real and imaginary parts
        separately; NothingRecorded if no parameter has a state yet.
        Source: Xia et al. 2024, "LESS" (arXiv:2402.04333), section 3, for Adam's. LESS' own Γ is not linear in g: it adds g
        to the momentum and g² to v, and divides the one by the root of the other. That is left out here; compare
        docs/examples/less.py, which has Γ by the paper's formula.
        """
        inner = getattr(optimizer, "optimizer", optimizer)  # of accelerate's wrapper
        kind = type(inner)
        scaling = next((of for names, of in _SCALINGS.items() if kind.__name__ in names), None)
        # A subclass of torch's classes may divide by something else.
        if scaling is None or kind.__module__.partition(".")[0] != "torch":
            known = ", ".join(name for names in _SCALINGS for name in names)
            raise TypeError(
                f"Metric.from_optimizer was given {type(inner).__name__}; expected one of {known}. Or give the maps, also "
                "Shampoo's or SOAP's factors: Metric({name: factor, ...})" + ON_METRICS
            )
        maps: dict[str | nn.Parameter, MapLike] = {}
        for group in inner.param_groups:
            for p in group["params"]:
                state = inner.state.get(p, {})
                if not state or float(state.get("step", 1)) == 0:
                    continue  # no step has changed it
                if p.is_complex():
                    raise TypeError(
                        f"Metric.from_optimizer was given {type(inner).__name__} with a complex parameter of shape "
                        f"{tuple(p.shape)}, whose two parts it scales separately. Store them as real parameters."
                        + ON_METRICS
                    )
                with torch.no_grad():
                    maps[p] = scaling({name: whole_of(x) for name, x in state.items()}, group)
        if not maps:
            raise NothingRecorded(
                f"Metric.from_optimizer: {type(inner).__name__} has no state. Take a step first, or load_state_dict of a "
                "checkpoint."
            )
        return cls(maps)

    @classmethod
    @checked(ON_METRICS)
    def from_ekfac(cls, model: nn.Module, damping: float | None = None) -> Metric:
        """The inverse (EKFAC + λ)⁻¹ of parameters that have ``ekfac``, by their names.

        ``train.gram(test.preconditioned(metric))`` gives influences, ``metric(gradient)`` a step.  Rows are written out some
        at a time, and not at all for ``dot``.

        model: the model whose parameters have ``ekfac``
        damping: λ > 0; by default a tenth of each parameter's mean eigenvalue, but at least that share of the largest mean's
        rounding error: a gradient that is zero up to rounding, such as that of an attention's key bias, has eigenvalues of
        ε² times the largest, and a damping in proportion to them would scale it up to the size of all others

        Raises NothingRecorded if no parameter has ``ekfac``; ValueError for a damping that is not above 0, and for curvature
        of another model's parameters.
        Source: Grosse et al. 2023, "Studying large language model generalization with influence functions"
        (arXiv:2308.03296).
        """
        parameters = dict(model.named_parameters())
        found = {name: vars(p)["ekfac"] for name, p in parameters.items() if vars(p).get("ekfac") is not None}
        if not found:
            raise NothingRecorded(
                "Metric.from_ekfac: no parameter of the model has ekfac. Run compute_hess_over(model, loader, kind='ekfac')."
            )
        means = {name: block.values.mean() for name, block in found.items()}
        largest, maps = max(map(float, means.values())), dict[str | nn.Parameter, MapLike]()
        for name, block in found.items():
            p, numbers = parameters[name], block.values.numel()
            if numbers != p.numel():
                raise ValueError(
                    f"Metric.from_ekfac: the ekfac of {block.name} has {numbers:,} numbers, but this model's {name} "
                    f"{p.numel():,}. Run compute_hess(model, kind='ekfac') again" + ON_METRICS
                )
            least = largest * torch.finfo(p.dtype).eps ** 1.25
            own = (SHARE * means[name].clamp(min=least) if largest else 1.0) if damping is None else damping
            maps[name] = block.map(1 / (block.values + own), p.shape)
        return cls(maps)

    @classmethod
    @checked(ON_METRICS)
    def low_rank(cls, model: nn.Module, rank: int, seed: int = 0) -> Metric:
        """The projection G ↦ Pᵀ G Q with P (O, rank) and Q (I, rank), to rank² numbers for a matrix.

        A vector's gradient becomes at most rank² numbers.  A side of at most ``rank`` entries is left as it is.

        model: the model    rank: the number of columns of P and Q
        seed: the seed of P and Q, random signs over √rank, which keep inner products in expectation:
        E ⟨PᵀGQ, PᵀHQ⟩ = ⟨G, H⟩

        Raises ValueError for a rank below 1.
        Source: Choe et al. 2024, "LoGra" (arXiv:2405.13954), section 3.
        """
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return cls({p: _random(name, p.shape, rank, seed, p.device) for name, p in trained})


def _of_adam(state: Mapping[str, Any], group: Mapping[str, Any]) -> MapLike:
    v = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    unbiased = v / (1 - group["betas"][1] ** float(state["step"]))
    return 1 / (unbiased.sqrt() + group["eps"])


def _of_rmsprop(state: Mapping[str, Any], group: Mapping[str, Any]) -> MapLike:
    v = state["square_avg"]
    v = v - state["grad_avg"].square() if group.get("centered") else v
    return 1 / (v.sqrt() + group["eps"])


_SCALINGS: dict[tuple[str, ...], Callable[[Mapping[str, Any], Mapping[str, Any]], MapLike]] = {
    ("Adam", "AdamW", "NAdam"): _of_adam,
    ("RMSprop",): _of_rmsprop,
    ("Adagrad",): lambda state, group: 1 / (state["sum"].sqrt() + group["eps"]),
}
"""{names of torch's classes: the scaling, from a parameter's state and its group's settings}"""


def _map_of(key: object, given: MapLike) -> LinearMap:
    if isinstance(given, LinearMap):
        return given
    if given is None:
        return Sides()
    what = key if isinstance(key, str) else "a parameter"
    for x in given if isinstance(given, tuple) else (given,):
        if isinstance(x, Tensor) and (x.layout != torch.strided or x.is_meta or x.is_nested):
            kind = "meta" if x.is_meta else "nested" if x.is_nested else x.layout
            raise TypeError(f"Metric was given a {kind} tensor for {what}; expected a dense one: to_dense()" + ON_METRICS)
    if isinstance(given, Tensor):
        return Elementwise(given)
    if isinstance(given, tuple) and len(given) == 2 and all(x is None or isinstance(x, Tensor) for x in given):
        return Sides(*given)
    raise TypeError(
        f"Metric was given {kind_of(given)} for {what}; expected a tensor, a pair (L, R) of tensors or None, a LinearMap, "
        "or None" + ON_METRICS
    )


def _random(name: str, shape: torch.Size, rank: int, seed: int, device: torch.device) -> Sides:
    """Pᵀ and Q with random signs.  They depend only on the parameter's name and shape, the rank and the seed."""
    if len(shape) < 2:  # as many numbers as a matrix has
        return Sides(_signs(name, "left", shape[:1].numel(), rank * rank, seed, device))
    sizes = {"left": shape[0], "right": shape[1:].numel()}
    left, right = (_signs(name, side, size, rank, seed, device) for side, size in sizes.items())
    return Sides(left, None if right is None else right.mT)


def _signs(name: str, side: str, size: int, rank: int, seed: int, device: torch.device) -> Tensor | None:
    """(rank, size) of ±1/√rank; None for the identity."""
    if size <= rank:
        return None
    bits = packed_signs(key_of(seed, unwrapped(name), side, size, rank), slice(0, rank), slice(0, size), device)
    return unpacked(bits, slice(0, size), by_byte(torch.empty(0, dtype=torch.float32, device=device), rank**-0.5))
