"""Metrics: for each parameter a linear map of its gradients, as optimizers, Kronecker factors and projections have them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.distributed.spread import whole_of
from autograd_hacks.errors import ON_METRICS, NothingRecorded, UnsupportedLayer
from autograd_hacks.forms import Form
from autograd_hacks.forms.mapped import BlockSides, Elementwise, InTurn, LinearMap, Sides
from autograd_hacks.support.display import Shown, Table
from autograd_hacks.support.philox import by_byte, key_of, packed_signs, unpacked
from autograd_hacks.verbs.arguments import kind_of, parts_by, unwrapped
from autograd_hacks.verbs.optimizers import SCALINGS, is_one_of, of_sgd

Given: TypeAlias = "LinearMap | Tensor | tuple[Tensor | None, Tensor | None] | None"
"""A map, a factor for each number, a pair (L, R), or None for the identity."""
SHARE = 0.1
"""The damping of Kronecker factors unless told, of the mean eigenvalue.
Source: Grosse et al. 2023 (arXiv:2308.03296), section 3.2."""


K = TypeVar("K", bound=Hashable)


def dampings(means: Mapping[K, tuple[Tensor, torch.dtype]]) -> dict[K, Tensor]:
    """λ for each of several blocks: a share of its mean eigenvalue, or of what rounding makes of the largest one's.

    A gradient that is zero but for rounding, as of an attention's key bias, has eigenvalues of ε² times the largest, and a
    damping in proportion to them would bring it to the size of all others.

    means: the mean eigenvalue of each, with the dtype of its parameter
    """
    largest = max((float(mean) for mean, _ in means.values()), default=0.0)
    return {
        key: SHARE * mean.clamp(min=largest * torch.finfo(dtype).eps ** 1.25) if largest else mean + 1.0
        for key, (mean, dtype) in means.items()
    }


class Metric(Shown, Mapping["str | nn.Parameter", LinearMap]):
    """For each parameter a linear map of its gradients, for ``grads.preconditioned(metric)``.

    maps: {name or pattern, or the parameter itself: map}, where a map is

    * a tensor of the parameter's shape: G ↦ D ∘ G
    * a pair (L, R): G ↦ L G R, for the parameter seen as a matrix O I (a vector as O 1).  L is (O', O), R is (I, I'); a
      vector stands for a diagonal matrix, None for the identity.  Products stay products
    * None: G itself
    * an `autograd_hacks.forms.LinearMap`

    The tensors are not copied; where one of them is overwritten, verbs of what was preconditioned before raise StaleRecord.
    Raises TypeError for another map.
    """

    def __init__(self, maps: Mapping[str | nn.Parameter, Given]) -> None:
        self._maps: dict[str | nn.Parameter, LinearMap] = {key: _map_of(key, given) for key, given in maps.items()}

    def __getitem__(self, key: str | nn.Parameter) -> LinearMap:
        return self._maps[key]

    def __iter__(self) -> Iterator[str | nn.Parameter]:
        return iter(self._maps)

    def __len__(self) -> int:
        return len(self._maps)

    def _table(self) -> Table:
        rows = [("parameter", "map", "made of tensors of shape")]
        for key, by in self.items():
            name = key if isinstance(key, str) else f"of shape {tuple(key.shape)}"
            rows.append((name, type(by).__name__, ", ".join(str(tuple(x.shape)) for x in by.tensors())))
        return Table(f"Metric of {len(self)} parameters", rows)

    def of(self, named: Sequence[tuple[str, Tensor]], names: Sequence[str]) -> dict[str, LinearMap]:
        """{name: map} for all of some parameters.  named: all names of a model's parameters    names: the first ones of some

        Raises ValueError for a parameter without a map or with several, for a pattern that matches none, and where no
        parameter of the metric is the model's.
        """
        by_id = {id(key): by for key, by in self.items() if not isinstance(key, str)}
        found = {name: by_id[id(p)] for name, p in named if id(p) in by_id and name in names}
        if by_id and not any(id(p) in by_id for _, p in named):
            raise ValueError(
                f"preconditioned was given a metric of {len(by_id)} parameters, none of which is the model's: expected one "
                "that was made from the optimizer of this very model" + ON_METRICS
            )
        patterns = [key for key in self if isinstance(key, str)]
        for pattern, own in parts_by(patterns, names, "the metric") if patterns else ():
            found |= dict.fromkeys(own, self[pattern])
        if missing := [name for name in names if name not in found]:
            raise ValueError(
                f"preconditioned: the metric has no map for {', '.join(map(repr, missing[:5]))}"
                f"{' ...' if len(missing) > 5 else ''}. Give them one, None for their gradients as they are; or leave them "
                "out: per_sample_grads(model, only=...)." + ON_METRICS
            )
        return {name: found[name] for name in names}

    @classmethod
    def from_optimizer(cls, optimizer: torch.optim.Optimizer) -> Metric:
        """What an optimizer divides gradients by, from its state as it is now; without momentum and learning rates.

        * Adam, AdamW, NAdam: g / (√v̂ + eps), v̂ corrected for its bias; with amsgrad the largest v so far
        * RMSprop: g / (√v + eps).  Adagrad: g / (√Σg² + eps)
        * Adafactor, torch's and transformers': g / √v̂ with v̂ of rank one, so that products stay products, but for the
          update's clipping
        * Muon: (M Mᵀ)^-½ G, or G (Mᵀ M)^-½ on the smaller side, for the momentum M, whose orthogonal factor the update is:
          Newton and Schulz' iteration is taken for exact
        * SGD: g itself

        A parameter that no step has changed has no scaling: its rows must be zeros.

        Raises TypeError for other optimizers, and for complex parameters, whose real and imaginary parts are divided by
        numbers of their own; NothingRecorded where no parameter has a state yet.
        Source: Xia et al. 2024, "LESS" (arXiv:2402.04333), section 3, for Adam's.
        """
        inner = getattr(optimizer, "optimizer", optimizer)  # of accelerate's wrapper
        scaling = next((of for names, of in SCALINGS.items() if is_one_of(inner, names)), None)
        if scaling is None:
            raise TypeError(
                f"Metric.from_optimizer was given {type(inner).__name__}; expected one of "
                f"{', '.join(name for names in SCALINGS for name in names)}. Make its map yourself: "
                "Metric({name: factor, ...})" + ON_METRICS
            )
        maps: dict[str | nn.Parameter, Given] = {}
        for group in inner.param_groups:
            for p in group["params"]:
                state = inner.state.get(p, {})
                if scaling is not of_sgd and (not state or float(state.get("step", 1)) == 0):
                    maps[p] = _Unstepped(of=f"Metric.from_optimizer: {type(inner).__name__}")
                    continue
                if p.is_complex() and scaling is not of_sgd:
                    raise TypeError(
                        f"Metric.from_optimizer was given {type(inner).__name__} with a complex parameter of shape "
                        f"{tuple(p.shape)}: it divides real and imaginary parts by numbers of their own, which is no map of "
                        "complex numbers. Leave the parameter out of the model's, only=..., or keep its parts as real ones."
                        + ON_METRICS
                    )
                with torch.no_grad():
                    maps[p] = scaling({name: whole_of(x) for name, x in state.items() if isinstance(x, Tensor)} | {
                        name: x for name, x in state.items() if not isinstance(x, Tensor)
                    }, group)  # fmt: skip
        unstepped = [by for by in maps.values() if isinstance(by, _Unstepped)]
        if unstepped and len(unstepped) == len(maps):
            raise unstepped[0].error()
        return cls(maps)

    @classmethod
    def from_kfac(cls, model: nn.Module, damping: float | None = None) -> Metric:
        """(B + √λ/π)⁻¹ G (A + √λ π)⁻¹, for parameters that have ``kfac``, π² = (tr A / I) / (tr B / O).

        For a weight that lies as (I, O), as transformers' Conv1D's, it is (A + √λ π)⁻¹ G (B + √λ/π)⁻¹; of a parameter of
        several blocks, groups or experts, each has its own.

        damping: λ > 0; for each parameter a tenth of the mean eigenvalue of B ⊗ A unless told, but more than rounding
        Raises NothingRecorded where no parameter has ``kfac``, ValueError for another damping, and for
        ``kfac_bias='joint'``, by which a weight and its bias have one block.
        Source: Martens and Grosse 2015 (arXiv:1503.05671), section 6.3.
        """

        def inverse(p: nn.Parameter, kfac: Any) -> LinearMap:
            both = [x.double() for x in _sides_of(p, kfac)]
            means = [_mean(x, both[-1].ndim == 3) for x in both]  # of each block
            total = shifts[p] if damping is None else damping
            ratio = (means[1] / means[0]).sqrt()
            pi = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1)  # else nothing was sent to an expert
            left, right = (
                _damped_inverse(x, shift).to(kfac[1]) for x, shift in zip(both, (total**0.5 / pi, total**0.5 * pi))
            )
            return _sides(left, right, p)

        def mean(p: nn.Parameter, kfac: Any) -> Tensor:
            left, right = _sides_of(p, kfac)
            return (_mean(left.double(), right.ndim == 3) * _mean(right.double(), right.ndim == 3)).mean()

        shifts = cls._shifts(model, "kfac", mean)
        return cls._from(model, "kfac", damping, inverse)

    @classmethod
    def from_ekfac(cls, model: nn.Module, damping: float | None = None) -> Metric:
        """(EKFAC + λ)⁻¹, as `ekfac_solve`, but lazily: rows are written some at a time, and in ``dot`` none.

        damping: λ > 0; for each parameter a tenth of the mean of its eigenvalues unless told
        Raises NothingRecorded where no parameter has ``ekfac``, ValueError for another damping, and for
        ``kfac_bias='joint'``, by which a weight and its bias have one block.
        """

        def inverse(p: nn.Parameter, block: Any) -> LinearMap:
            if len(block.names) > 1:
                raise ValueError(
                    f"Metric.from_ekfac: {' and '.join(block.names)} have one block (kfac_bias='joint'), and a metric "
                    "one for each parameter. Use ekfac_solve(model, grads), or another kfac_bias." + ON_METRICS
                )
            shift = shifts[p] if damping is None else damping
            scale = 1 / (block.values + shift)
            left, right = block.sides
            if p.ndim < 2 and scale.ndim == 2:
                before, after = (None, None) if left is None else (left.mT, left)
                return InTurn([Sides(before), Elementwise(scale.view(p.shape)), Sides(after)])
            flat = _Flat(scale.reshape(p.shape[0], -1))
            turned = [None if x is None else x.mT for x in (left, right)]
            return InTurn([_sides(turned[0], right, p), flat, _sides(left, turned[1], p)])

        shifts = cls._shifts(model, "ekfac", lambda _, block: block.values.mean())
        return cls._from(model, "ekfac", damping, inverse)

    @staticmethod
    def _shifts(model: nn.Module, attribute: str, mean: Callable[[nn.Parameter, Any], Tensor]) -> dict[nn.Parameter, Tensor]:
        """The damping of each parameter that has curvature, unless told."""
        found = {p: vars(p)[attribute] for p in model.parameters() if vars(p).get(attribute) is not None}
        return dampings({p: (mean(p, block), p.dtype) for p, block in found.items()})

    @classmethod
    def _from(cls, model: nn.Module, attribute: str, damping: float | None, inverse: Any) -> Metric:
        if damping is not None and not damping > 0:
            raise ValueError(
                f"Metric.from_{attribute} was given damping={damping!r}; expected a number above 0" + ON_METRICS
            )
        found = {p: vars(p)[attribute] for p in model.parameters() if vars(p).get(attribute) is not None}
        if not found:
            raise NothingRecorded(
                f"Metric.from_{attribute}: no parameter of the model has {attribute}. Run backprop_hess(output) and "
                f"compute_hess(model, kind={attribute!r}), or compute_hess_over(model, loader, kind={attribute!r})."
            )
        return cls({p: inverse(p, block) for p, block in found.items()})

    @classmethod
    def low_rank(cls, model: nn.Module, rank: int, seed: int = 0, pca: bool = False) -> Metric:
        """G ↦ Pᵀ G Q with P (O, rank) and Q (I, rank), by which a matrix's gradient has rank² numbers, a vector's at most so
        many.

        seed: of random signs over √rank, which keep inner products in expectation: E ⟨PᵀGQ, PᵀHQ⟩ = ⟨G, H⟩
        pca: whether P and Q are the first eigenvectors of ``kfac``'s factors B and A instead
        A side with no more than ``rank`` numbers stays as it is.

        Raises ValueError for a rank below 1, NothingRecorded where ``pca`` has no factors.
        Source: Choe et al. 2024, "LoGra" (arXiv:2405.13954), section 3.
        """
        maps: dict[str | nn.Parameter, Given] = {}
        for name, p in model.named_parameters():
            if p.requires_grad:
                maps[p] = _principal(name, p, rank) if pca else random_sides(name, p.shape, rank, seed, p.device)
        return cls(maps)


def _sides(left: Tensor | None, right: Tensor | None, p: Tensor) -> LinearMap:
    """G ↦ L G R for a parameter that is one matrix, or several below each other."""
    if right is None or right.ndim < 3:
        if right is None or right.shape[0] == p.shape[1:].numel():
            return Sides(left, right)
        left, right = None if left is None else left[None], (right.diag() if right.ndim == 1 else right)[None]
    return BlockSides(left, right)  # of a matrix whose rows are several axes, one block


@dataclass(frozen=True, eq=False)
class _Unstepped(Sides):
    """Of a parameter that no step has changed, a frozen one say, or one that no loss has reached: of rows of zeros alone."""

    of: str = ""  # what has no state for it

    def error(self) -> NothingRecorded:
        return NothingRecorded(f"{self.of} has no state. Take a step first, or load_state_dict of a checkpoint.")

    def __call__(self, x: Tensor, shape: torch.Size) -> Tensor:
        raise self.error()

    def rows(self, form: Form) -> Form:
        raise self.error()

    def to(self, like: Tensor) -> _Unstepped:
        return self


class _Flat(Elementwise):
    """A factor for each entry of a parameter that is seen as a matrix O I."""

    def shape_of(self, shape: torch.Size) -> torch.Size:
        super().shape_of(torch.Size((shape[0], shape[1:].numel())))
        return shape

    def __call__(self, x: Tensor, shape: torch.Size) -> Tensor:
        return x * self.scale.view(shape)

    def transposed(self, v: Tensor, shape: torch.Size) -> Tensor:
        return v * self.scale.view(shape)

    def to(self, like: Tensor) -> _Flat:
        return _Flat(self.scale.to(like))

    def block(self, rows: slice) -> _Flat:
        return _Flat(self.scale[rows])


def _map_of(key: object, given: Given) -> LinearMap:
    if isinstance(given, LinearMap):
        return given
    if given is None:
        return Sides()
    what = key if isinstance(key, str) else "a parameter"
    for x in given if isinstance(given, tuple) else (given,):
        if isinstance(x, Tensor) and (x.layout != torch.strided or x.is_meta or x.is_nested):
            raise TypeError(
                f"Metric was given a {'meta' if x.is_meta else 'nested' if x.is_nested else x.layout} tensor for {what}; "
                "expected one that has all its numbers, to_dense() say" + ON_METRICS
            )
    if isinstance(given, Tensor):
        return Elementwise(given)
    if isinstance(given, tuple) and len(given) == 2 and all(x is None or isinstance(x, Tensor) for x in given):
        return Sides(*given)
    raise TypeError(
        f"Metric was given {kind_of(given)} for {what}; expected a tensor, a pair (L, R) of tensors or None, a LinearMap, "
        "or None" + ON_METRICS
    )


# Random and principal directions.


def random_sides(name: str, shape: torch.Size, rank: int, seed: int, device: torch.device) -> Sides:
    """Pᵀ and Q of random signs, a function of the parameter's name and shape, the rank and the seed."""
    if type(rank) is not int or rank < 1:
        raise ValueError(f"a projection was given rank={rank!r}; expected a number of directions, 1 or more" + ON_METRICS)
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


def _principal(name: str, p: nn.Parameter, rank: int) -> Sides:
    if vars(p).get("kfac") is None:
        raise NothingRecorded(
            f"Metric.low_rank(pca=True): {name} has no kfac, whose eigenvectors are the directions. Run "
            "compute_hess_over(model, loader, kind='kfac') first, or take random ones, pca=False."
        )
    sides = _sides_of(p, vars(p)["kfac"])
    if sides[1].ndim == 3:
        raise UnsupportedLayer(
            f"Metric.low_rank(pca=True): {name} has factors for each of {len(sides[1])} blocks (groups, or experts). Take "
            "random directions, pca=False, or leave it out: per_sample_grads(model, only=...)." + ON_METRICS
        )
    left, right = (None if len(x) <= rank else _first_eigenvectors(x, rank) for x in sides)
    return Sides(None if left is None else left.mT, right)


def _sides_of(p: Tensor, kfac: Any) -> tuple[Tensor, Tensor]:
    """The factors on the left and on the right of a parameter."""
    if not hasattr(kfac, "sides"):
        raise TypeError(
            f"param.kfac is {kind_of(kfac)}, which doesn't say whether the weight lies as (O, I), as Linear's, or as "
            "(I, O), as Conv1D's. Expected what compute_hess(model, kind='kfac') sets, or KFAC.of(a, b, is_turned), of "
            "autograd_hacks.curvature.kronecker" + ON_METRICS
        )
    found: tuple[Tensor, Tensor] = kfac.sides
    fans = p.shape[:1].numel(), p.shape[1:].numel()
    if p.ndim > 1 and any(x.ndim == 2 and len(x) == fan + 1 for x, fan in zip(found, fans)):
        raise ValueError(
            f"the weight of shape {tuple(p.shape)} and its bias have one Kronecker block (kfac_bias='joint'), and a metric "
            "has one for each parameter. Take another kfac_bias in compute_hess." + ON_METRICS
        )
    return found


def _first_eigenvectors(x: Tensor, rank: int) -> Tensor:
    """Those of the largest eigenvalues, in columns.  x: (F, F), or the diagonal of a diagonal matrix, F"""
    if x.ndim == 1:
        return F.one_hot(x.argsort()[-rank:], len(x)).to(x).mT
    return torch.linalg.eigh(x.double()).eigenvectors[:, -rank:].to(x)


def _mean(x: Tensor, has_blocks: bool) -> Tensor:
    """The mean eigenvalue, of each block.  x: a matrix, or a diagonal"""
    diagonals = x if x.ndim == 1 + has_blocks else x.diagonal(dim1=-2, dim2=-1)
    return diagonals.mean(-1)


def _damped_inverse(x: Tensor, shift: Tensor) -> Tensor:
    """(x + shift)⁻¹.  x: a matrix, or a diagonal, or one for each block    shift: a number, or one for each block"""
    if x.ndim == shift.ndim + 1:
        return 1 / (x + shift[..., None])
    return torch.linalg.inv(x + shift[..., None, None] * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))
