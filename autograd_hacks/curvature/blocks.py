"""The blocks of a model's Gauss-Newton matrix, their diagonals, and their Kronecker factors, next to ``param.grad``."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.curvature.backprop import backprop_hess
from autograd_hacks.curvature.ekfac import Eigenvalues
from autograd_hacks.curvature.kronecker import (
    APPROXIMATIONS,
    BIASES,
    check_layers,
    factors_of,
    otherwise,
    weight_of,
    weights_by_bias,
)
from autograd_hacks.distributed.cut import refuse_curvature
from autograd_hacks.distributed.spread import spread_of
from autograd_hacks.errors import ON_CURVATURE, ON_PASSES, NothingRecorded, UnsupportedLayer
from autograd_hacks.forms.numerics import accumulation_dtype
from autograd_hacks.support.display import progress
from autograd_hacks.verbs.arguments import LIMIT, check_limit, check_size
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.per_sample import grads_of

ATTRIBUTES = {"full": "hess", "diag": "hess_diag", "kfac": "kfac", "ekfac": "kfac"}
"""What parameters get, by kind; for 'ekfac' ``ekfac`` besides."""


def compute_hess(
    model: nn.Module,
    kind: str = "full",
    kfac_approx: str = "expand",
    parameters: Collection[str] | None = None,
    limit: float = LIMIT,
    kfac_bias: str = "exact",
) -> None:
    """Sets the curvature of the batch's mean loss on every parameter that trains, from the passes of `backprop_hess`.

    It is the generalised Gauss-Newton matrix.  For the weight and bias of a layer that is used once, between piecewise
    linear activations (ReLU), a parameter's own block is the exact Hessian.

    kind: which of these

    * ``'full'``: ``param.hess``, of shape ``(*shape, *shape)``
    * ``'diag'``: ``param.hess_diag``, its diagonal, of shape ``shape``
    * ``'kfac'``: ``param.kfac``, a pair (A, B), ``torch.kron(B, A)`` being an approximation of the block of
      ``param.flatten()``: for the weights of Linear (O, I) and of convolutions (O, C·K), A of the inputs, I × I, and B of
      the outputs, O × O; for biases A is 1 and B as ``kfac_bias`` says
    * ``'ekfac'``: ``param.ekfac`` too, an `autograd_hacks.curvature.ekfac.EKFAC`: their eigenvectors with better eigenvalues

    kfac_approx: how positions that share a weight, as in a convolution, are treated, 'expand' or 'reduce'
    kfac_bias: what a bias's B is: 'exact', its block itself, or 'shared', the B of its layer's weight, as in curvlinops;
    they differ for positions and 'expand'. For 'joint' the bias has no factors of its own, and is one more column of its
    layer's weight, behind the others, whose input is 1, as in kronfluence: A is (I + 1) × (I + 1)
    parameters: names of some, all unless told    limit: bytes that the largest tensor of 'full' or 'kfac' may have

    The attributes are detached, of the parameter's dtype (single precision for half), and None where the loss did not reach
    the parameter.  Where processes share a batch, or a loader's batches, they are of all samples, and whole on each.

    Raises NothingRecorded after an ordinary backward pass, BlockTooLarge for more than ``limit``, UnsupportedLayer for
    'kfac' of what has no Kronecker factors, ValueError for other kinds and names, and what reading raises.

    Source: Botev et al. 2017 (arXiv:1706.03662) for Hessian blocks of piecewise linear networks; for KFAC see
    `autograd_hacks.curvature.kronecker`.
    """
    accumulator = _Accumulator(model, kind, kfac_approx, parameters, limit, kfac_bias)
    accumulator.end(accumulator.add)
    if kind == "ekfac":
        values = Eigenvalues(model, accumulator.names, accumulator.joint, accumulator.spread)
        values.end(values.add)


def compute_hess_over(
    model: nn.Module,
    loader: Iterable[Any],
    kind: str = "full",
    hess_type: str = "CrossEntropy",
    samples: int | None = None,
    generator: torch.Generator | None = None,
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
    kfac_approx: str = "expand",
    parameters: Collection[str] | None = None,
    limit: float = LIMIT,
    kfac_bias: str = "exact",
) -> None:
    """`compute_hess` for all batches of a loader, as if they were one; every sample counts alike, however large its batch.

    loader: batches    forward: ``forward(model, batch)`` returns the output for `backprop_hess`; unless told it is
    ``model(batch)``, or ``model(batch[0])`` for a tuple or list
    hess_type, samples, generator: as in `backprop_hess`    the others: as in `compute_hess`

    'ekfac' takes the loader twice, the second time with the eigenvectors of the first.
    Raises as they do, ValueError for a loader without batches, or one to be taken twice that can't be, and RuntimeError
    inside `accumulate`.
    """
    record = recorder_of(model).record
    if record.accumulating:
        raise RuntimeError("compute_hess_over accumulates by itself; leave accumulate(model) first" + ON_PASSES)
    if kind == "ekfac" and isinstance(loader, Iterator):
        raise ValueError(
            "compute_hess_over(kind='ekfac') takes all batches twice; expected a DataLoader or a list, no iterator"
            + ON_CURVATURE
        )
    accumulator = _Accumulator(model, kind, kfac_approx, parameters, limit, kfac_bias)
    record.clear()

    def sweep(into: _Accumulator | Eigenvalues) -> None:
        for batch in progress(loader, "curvature", "batch"):
            with torch.enable_grad():
                given = batch[0] if forward is None and isinstance(batch, tuple | list) else batch
                output = model(given) if forward is None else forward(model, given)
            backprop_hess(output, hess_type, samples, generator)
            into.spread = spread_of(model, recorder_of(model))
            into.add()

    sweep(accumulator)
    if not accumulator.batch:
        raise ValueError("compute_hess_over was given a loader without samples; expected some batches" + ON_CURVATURE)
    accumulator.end()
    if kind == "ekfac":
        values = Eigenvalues(model, accumulator.names, accumulator.joint, accumulator.spread)
        sweep(values)
        values.end()


def _chosen(model: nn.Module, trained: Collection[str], parameters: Iterable[str]) -> list[str]:
    """The names of those that are meant, some of them by other names of the same parameters."""
    wanted = [parameters] if isinstance(parameters, str) else list(parameters)
    by_alias = dict(model.named_parameters(remove_duplicate=False))
    first = {id(model.get_parameter(name)): name for name in trained}
    unknown = [name for name in wanted if name not in by_alias or id(by_alias[name]) not in first]
    if unknown:
        raise ValueError(
            f"compute_hess was given parameters {unknown}; expected some of those that train: {list(trained)}" + ON_CURVATURE
        )
    chosen = {first[id(by_alias[name])] for name in wanted}
    return [name for name in trained if name in chosen]


class _Accumulator:
    """Adds batches up, and leaves their means on the parameters at its end; nothing before."""

    def __init__(
        self, model: nn.Module, kind: str, kfac_approx: str, parameters: Collection[str] | None, limit: float, kfac_bias: str
    ) -> None:
        for what, given, expected in (
            ("kind", kind, list(ATTRIBUTES)),
            ("kfac_approx", kfac_approx, APPROXIMATIONS),
            ("kfac_bias", kfac_bias, BIASES),
        ):
            if given not in expected:
                listing = ", ".join(map(repr, expected))
                raise ValueError(f"compute_hess was given {what}={given!r}; expected one of {listing}" + ON_CURVATURE)
        check_limit(limit)
        self.shares = kfac_bias == "shared"
        self.model, self.kfac_approx, self.limit = model, kfac_approx, limit
        self.asked, self.kind = kind, "kfac" if kind == "ekfac" else kind
        every = recorder_of(model).record.parameters_of(model)
        trained = [name for name, p in every.items() if p.requires_grad]
        self.names = trained if parameters is None else _chosen(model, trained, parameters)
        self.joint = weights_by_bias(model, self.names) if kfac_bias == "joint" and self.kind == "kfac" else {}
        # By parameter: A and B, or the block alone; and how many positions A was added up over.
        self.sums, self.positions = dict[str, list[Tensor]](), dict.fromkeys(self.names, 0)
        self.batch, self.spread = 0, spread_of(model, recorder_of(model))
        refuse_curvature(bool(self.spread.cuts))
        self._pool = recorder_of(model).pool
        for name, parameter in model.named_parameters():  # an earlier curvature must not be taken for this one
            old = vars(parameter).pop(ATTRIBUTES[kind], None)
            vars(parameter).pop(kind, None)
            if self.kind == "kfac" and old is not None and name in self.names:
                self._pool.give_back(f"A of {name}", old[0])

    @torch.no_grad()
    def end(self, last: Callable[[], None] = lambda: None) -> None:
        """last: what there is to add"""
        with self.spread.weights():
            _, (batch, *counts) = self.spread.agreed(last, lambda _: self._counts(), 1 + 2 * len(self.names))
        reached = {name: positions for name, count, positions in zip(self.names, counts, counts[len(self.names) :]) if count}
        sums = {f"{k} {name}": x for name in reached for k, x in enumerate(self.sums.get(name) or self._zeros(name))}
        total = self.spread.summed(sums)
        for name in self.names:
            value: Any = None
            if name in reached and self.kind == "kfac":
                value = total[f"0 {name}"].div_(max(1, reached[name])), total[f"1 {name}"].div_(max(1, batch))
            elif name in reached:
                value = total[f"0 {name}"].div_(max(1, batch))
            vars(self.model.get_parameter(name))[ATTRIBUTES[self.kind]] = value

    def _counts(self) -> list[int]:
        """How many samples there were, which parameters they have reached, and at how many positions."""
        return [self.batch, *(name in self.sums for name in self.names), *self.positions.values()]

    def _zeros(self, name: str) -> list[Tensor]:
        """The sums of a parameter that only other processes' samples have reached."""
        p = self.model.get_parameter(name)
        rows, columns = (p.shape[0] if p.ndim else 1), p.shape[1:].numel() + (name in self.joint.values())
        kfac, block = [(columns, columns), (rows, rows)], [p.shape if self.kind == "diag" else (*p.shape, *p.shape)]
        dtype = accumulation_dtype(p.dtype)
        return [torch.zeros(shape, dtype=dtype, device=p.device) for shape in (kfac if self.kind == "kfac" else block)]

    @torch.no_grad()
    def add(self) -> None:
        """The passes of `backprop_hess` that are in the record."""
        grads = grads_of(self.model, recorder_of(self.model), self.spread)
        if grads.hess_type is None:
            raise NothingRecorded(
                "the record holds an ordinary backward pass. Run backprop_hess(output) in its place; or take the empirical "
                "Fisher matrix of its gradients, per_sample_grads(model).block(name)."
            )
        reached = [name for name in self.names if name in grads.reached]
        self._check(grads, reached)
        with grads.reading():
            for name in reached:
                if name not in self.joint:
                    now = self._sums_of(name, grads)
                    self.sums[name] = [x.add_(y) for x, y in zip(self.sums[name], now)] if name in self.sums else now
        self.batch += grads.batch

    def _sums_of(self, name: str, grads: PerSampleGrads) -> list[Tensor]:
        form = grads[name]
        if self.kind == "diag":
            return [form.second_moment(form.new_sums(form.samples) + 1)]
        if self.kind == "full":
            return [form.cross(form).view(*form.shape, *form.shape)]
        fan_in = form.shape[1:].numel() + (name in self.joint.values())
        is_matrix = len(form.shape) > 1 and len(grads.batches) == 1
        memory = self._pool.take(f"A of {name}", (fan_in, fan_in), form.new_sums(0)) if is_matrix else None
        if self.shares and len(form.shape) == 1:
            factors = factors_of(grads[weight_of(self.model, name, grads.reached)], self.kfac_approx, grads.batches)
            factors = None if factors is None else factors._replace(a=factors.a.new_ones(1, 1), positions=1)
        else:
            factors = factors_of(form, self.kfac_approx, grads.batches, memory, name in self.joint.values())
        if factors is None:
            raise UnsupportedLayer(
                f"{name} has no Kronecker factors: its layer was called several times in a forward, or was run again for "
                f"its rows. {otherwise(self.asked)}"
            )
        self.positions[name] += factors.positions
        return [factors.a, factors.b]

    def _check(self, grads: PerSampleGrads, reached: Sequence[str]) -> None:
        if not reached:
            return
        if any(grads[name].like.is_complex() for name in reached):
            raise TypeError(
                "compute_hess: parameters are complex; curvature is there for real parameters alone" + ON_CURVATURE
            )
        sizes, shapes = {}, {name: grads[name].shape for name in reached}
        if self.kind == "full":
            sizes = {f"of {name}": shape.numel() ** 2 for name, shape in shapes.items()}
        elif self.kind == "kfac":
            check_layers(self.model, reached, self.asked)
            sizes = {f"A of {name}": shape[1:].numel() ** 2 for name, shape in shapes.items()}
            sizes |= {f"B of {name}": shape[0] ** 2 for name, shape in shapes.items()}
        if sizes:
            check_size(sizes, grads[reached[0]], self.limit)
