"""The blocks of a model's Gauss-Newton matrix, their diagonals, and their Kronecker factors, next to ``param.grad``."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.curvature.backprop import backprop_hess
from autograd_hacks.curvature.coverage import Coverage
from autograd_hacks.curvature.ekfac import Eigenvalues
from autograd_hacks.curvature.kronecker import (
    APPROXIMATIONS,
    BIASES,
    KFAC,
    Factors,
    Lay,
    adds_to_outputs,
    factors_of,
    is_empty,
    lay_of,
    otherwise,
    weight_of,
    weights_by_bias,
)
from autograd_hacks.distributed.cut import refuse_curvature
from autograd_hacks.distributed.spread import spread_of
from autograd_hacks.errors import ON_CURVATURE, ON_PASSES, NothingRecorded, UnsupportedLayer, where
from autograd_hacks.forms import Form
from autograd_hacks.forms.numerics import accumulation_dtype
from autograd_hacks.support.display import progress, with_unit
from autograd_hacks.verbs.arguments import LIMIT, check_limit, check_size, kind_of, names_matching
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.per_sample import grads_of

ATTRIBUTES = {"full": "hess", "diag": "hess_diag", "kfac": "kfac", "ekfac": "kfac"}
"""What parameters get, by kind; for 'ekfac' ``ekfac`` besides."""


def compute_hess(
    model: nn.Module,
    kind: str = "full",
    kfac_approx: str = "expand",
    parameters: str | Collection[str] | None = None,
    limit: float = LIMIT,
    kfac_bias: str = "exact",
    skip: bool = False,
) -> Coverage:
    """Sets the curvature of the batch's mean loss on every parameter that trains, from the passes of `backprop_hess`.

    It is the generalised Gauss-Newton matrix.  For the weight and bias of a layer that is used once, between piecewise
    linear activations (ReLU), a parameter's own block is the exact Hessian.

    kind: which of these

    * ``'full'``: ``param.hess``, of shape ``(*shape, *shape)``
    * ``'diag'``: ``param.hess_diag``, its diagonal, of shape ``shape``
    * ``'kfac'``: ``param.kfac``, a pair (A, B), an `autograd_hacks.curvature.kronecker.KFAC`: A of the inputs, I × I, and B
      of the gradients at outputs, O × O, whichever way the weight lies.  The block of ``param.flatten()`` is approximated by
      ``torch.kron(B, A)`` for weights (O, I), as of Linear, and (O, C·K), of convolutions; and by ``torch.kron(A, B)``
      where ``param.kfac.is_turned``: (I, O), as of transformers' Conv1D and of tables, whose A is the diagonal, I numbers.
      The groups of a convolution and the experts of a stack are G blocks with factors each, (G, I, I) and (G, O, O).
      Vectors have A = 1 and their own block for B; biases what ``kfac_bias`` says
    * ``'ekfac'``: ``param.ekfac`` too, an `autograd_hacks.curvature.ekfac.EKFAC`: their eigenvectors with better eigenvalues

    kfac_approx: how positions that share a weight, as in a convolution, are treated, 'expand' or 'reduce'
    kfac_bias: what a bias's B is: 'exact', its block itself, or 'shared', the B of its layer's weight, as in curvlinops;
    they differ for positions and 'expand'. For 'joint' the bias has no factors of its own, and is one more column of its
    layer's weight, behind the others, whose input is 1, as in kronfluence: A is (I + 1) × (I + 1)
    parameters: names of some, or patterns, '*.attn.*' say; all unless told
    limit: bytes that the largest tensor of 'full' or 'kfac' may have
    skip: whether to leave out parameters that have no Kronecker factors, or larger ones than ``limit``; an error otherwise

    Returns a table of all parameters that train, what each has or why it has none: a `Coverage`.

    The attributes are detached, of the parameter's dtype (single precision for half), and None where the loss did not reach
    the parameter.  Where processes share a batch, or a loader's batches, they are of all samples, and whole on each.

    Raises NothingRecorded after an ordinary backward pass, BlockTooLarge for more than ``limit``, UnsupportedLayer for
    'kfac' of what has no Kronecker factors, ValueError for other kinds, names and patterns, and what reading raises.

    Source: Botev et al. 2017 (arXiv:1706.03662) for Hessian blocks of piecewise linear networks; for KFAC see
    `autograd_hacks.curvature.kronecker`.
    """
    accumulator = _Accumulator(model, kind, kfac_approx, parameters, limit, kfac_bias, skip)
    accumulator.end(accumulator.add)
    if kind == "ekfac":
        values = Eigenvalues(model, accumulator.names, accumulator.joint, accumulator.spread)
        values.end(values.add)
    return accumulator.coverage()


def compute_hess_over(
    model: nn.Module,
    loader: Iterable[Any],
    kind: str = "full",
    hess_type: str = "CrossEntropy",
    samples: int | None = None,
    generator: torch.Generator | None = None,
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
    kfac_approx: str = "expand",
    parameters: str | Collection[str] | None = None,
    limit: float = LIMIT,
    kfac_bias: str = "exact",
    skip: bool = False,
) -> Coverage:
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
    accumulator = _Accumulator(model, kind, kfac_approx, parameters, limit, kfac_bias, skip)
    record.clear()

    def sweep(into: _Accumulator | Eigenvalues) -> None:
        for batch in progress(loader, "curvature", "batch"):
            with torch.enable_grad():
                given = batch[0] if forward is None and isinstance(batch, tuple | list) else batch
                output = _output(model, given) if forward is None else forward(model, given)
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
    return accumulator.coverage()


def _output(model: nn.Module, given: Any) -> Tensor:
    """The model's output, a tensor.  Raises TypeError where ``forward`` has to say how to get it."""
    example = "forward=lambda model, batch: model(**batch).logits, say"
    try:
        output: Any = model(given)
    except Exception as error:  # whatever a model raises that takes tensors by name
        if not isinstance(given, Mapping):
            raise
        raise TypeError(
            f"compute_hess_over was given a batch that is a {kind_of(given)}, and model(batch) has raised "
            f"{type(error).__name__}; expected {example}" + ON_CURVATURE
        ) from error
    if not isinstance(output, Tensor):
        raise TypeError(
            f"compute_hess_over: the model returned a {kind_of(output)}; expected a tensor, or a function that returns one, "
            f"{example}" + ON_CURVATURE
        )
    return output


class _Accumulator:
    """Adds batches up, and leaves their means on the parameters at its end; nothing before."""

    def __init__(
        self,
        model: nn.Module,
        kind: str,
        kfac_approx: str,
        parameters: str | Collection[str] | None,
        limit: float,
        kfac_bias: str,
        skip: bool,
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
        self.model, self.kfac_approx, self.limit, self.skip = model, kfac_approx, limit, skip
        self.asked, self.kind = kind, "kfac" if kind == "ekfac" else kind
        every = recorder_of(model).record.parameters_of(model)
        self.trained = [name for name, p in every.items() if p.requires_grad]
        self.names = self.trained
        if parameters is not None:
            self.names = names_matching(parameters, model, self.names, "compute_hess: parameters", ON_CURVATURE)
        self.joint = weights_by_bias(model, self.names) if kfac_bias == "joint" and self.kind == "kfac" else {}
        # By parameter: what was added up, how it lies, and why it has none.
        self.sums, self.lays, self.skipped = dict[str, list[Tensor]](), dict[str, Lay](), dict[str, str]()
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
            _, (batch, *counts) = self.spread.agreed(last, lambda _: self._counts(), 1 + 4 * len(self.names))
        each = dict(zip(self.names, zip(*[iter(map(int, counts))] * 4)))
        for name, (*_, refused) in each.items():
            if refused and name not in self.skipped:
                self._refuse({name: "it has none on another process"})
        reached = {
            name: _uncoded(code // n, fan_in // n) for name, (n, code, fan_in, refused) in each.items() if n > 0 == refused
        }
        if self.kind == "kfac":
            self.lays |= {name: lay for name, lay in reached.items() if name not in self.lays}
        sums = {f"{k} {name}": x for name in reached for k, x in enumerate(self.sums.get(name) or self._zeros(name))}
        total = self.spread.summed(sums)
        for name in self.names:
            value: Any = None
            if name in reached and self.kind == "kfac":
                lay, positions = self.lays[name], total[f"2 {name}"].clamp(min=1)
                a, b = (total[f"{k} {name}"] for k in range(2))
                a.div_(positions.view(-1, *[1] * (a.ndim - 1)) if lay.blocks > 1 else positions[0])
                value = KFAC.of(a, b.div_(max(1, batch)), lay.is_turned)
            elif name in reached:
                value = total[f"0 {name}"].div_(max(1, batch))
            vars(self.model.get_parameter(name))[ATTRIBUTES[self.kind]] = value

    def coverage(self) -> Coverage:
        """What every parameter has in the end."""
        had, skipped, sizes = dict[str, str](), dict[str, str](), dict[str, int]()
        for name in self.trained:
            p = self.model.get_parameter(name)
            sizes[name] = p.numel()
            size = "" if not p.ndim else " × ".join([f"{p.numel():,}"] * (1 if self.kind == "diag" else 2))
            if name not in self.names:
                skipped[name] = "it is not among parameters="
            elif (weight := self.joint.get(name)) is not None:
                others = had if vars(self.model.get_parameter(weight)).get("kfac") is not None else skipped
                others[name] = f"in one block with {weight}" + ("" if others is had else ", which has none")
            elif vars(p).get(ATTRIBUTES[self.kind]) is None:
                skipped[name] = self.skipped.get(name, "the loss did not reach it")
            elif self.kind == "kfac" and p.ndim > 1:
                had[name] = str(self.lays[name])
            else:
                had[name] = "its diagonal" if self.kind == "diag" else f"its block, {size or 1}"
        return Coverage(self.asked, had, skipped, sizes)

    def _counts(self) -> list[int]:
        """How many samples there were; and of each parameter whether they reached it, how it lies, whether it is refused."""
        found = [self.batch]
        for name in self.names:
            has = name in self.sums
            found += [
                int(has),
                *(_coded(self.lays[name]) if has and name in self.lays else (0, 0)),
                int(name in self.skipped),
            ]
        return found

    def _zeros(self, name: str) -> list[Tensor]:
        """The sums of a parameter that only other processes' samples have reached."""
        p = self.model.get_parameter(name)
        zeros = torch.zeros((), dtype=accumulation_dtype(p.dtype), device=p.device)
        if self.kind != "kfac":
            return [zeros.new_zeros(p.shape if self.kind == "diag" else (*p.shape, *p.shape))]
        lay = self.lays[name]
        lay = self.lays[name] = lay._replace(
            fan_out=(p.numel() // lay.blocks) // (lay.fan_in - (name in self.joint.values()))
        )
        counts = torch.zeros(lay.blocks, dtype=torch.int64, device=p.device)
        return [*(zeros.new_zeros(shape) for shape in lay.factors), counts]

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
        with grads.reading():
            for name in self._checked(grads, reached):
                now = self._sums_of(name, grads)
                self.sums[name] = [x.add_(y) for x, y in zip(self.sums[name], now)] if name in self.sums else now
        self.batch += grads.batch

    def _sums_of(self, name: str, grads: PerSampleGrads) -> list[Tensor]:
        form = grads[name]
        if self.kind == "diag":
            return [form.second_moment(form.new_sums(form.samples) + 1)]
        if self.kind == "full":
            return [form.cross(form).view(*form.shape, *form.shape)]

        def memory(shape: tuple[int, ...], like: Tensor) -> Tensor:
            return self._pool.take(f"A of {name}", shape, like)

        lay, of = self.lays[name], self._shared_by(name, grads)
        if of is not None:
            found = self._lay(of, grads)
            assert isinstance(found, Lay)  # or its bias had been refused
            factors = factors_of(grads[of], found, self.kfac_approx, grads.batches)
            ones = factors.b.new_ones(lay.factors[0])
            factors = Factors(ones, factors.b, torch.ones_like(factors.positions))
        else:
            joint, is_matrix = name in self.joint.values(), len(form.shape) > 1
            factors = factors_of(form, lay, self.kfac_approx, grads.batches, joint, memory if is_matrix else None)
        return [*factors]

    def _shared_by(self, name: str, grads: PerSampleGrads) -> str | None:
        """The weight whose B a bias has."""
        return weight_of(self.model, name, grads.reached) if self.shares and len(grads[name].shape) == 1 else None

    def _lay(self, name: str, grads: PerSampleGrads) -> Lay | str | None:
        """How a parameter lies; or why it has no factors; None where no sample of these has read it."""
        if (of := self._shared_by(name, grads)) is not None:
            lay = self._lay(of, grads)
            if isinstance(lay, Lay) and not self._is_bias(name, of, grads):
                return f"it is not what is added to the outputs of {of}; take kfac_bias='exact'"
            return Lay(1, lay.fan_out, lay.blocks) if isinstance(lay, Lay) else lay and f"its weight {of} has none: {lay}"
        bias = next((bias for bias, weight in self.joint.items() if weight == name), None)
        parts = _parts(grads, name)
        found = [lay_of(part, bias is not None) for part in parts if not is_empty(part)]
        if bias is not None and all(isinstance(lay, Lay) for lay in found) and not self._is_bias(bias, name, grads):
            found.append(f"{bias} is not what is added to its outputs; take kfac_bias='exact'")
        found += [self.lays[name]] if name in self.sums else []
        if len(set(found)) > 1:
            return next((x for x in found if isinstance(x, str)), "it is read in other ways in some batches")
        return found[0] if found else None

    def _is_bias(self, name: str, of: str, grads: PerSampleGrads) -> bool:
        """Whether a bias is what is added to a weight's outputs."""
        if name not in grads.reached:
            return False
        pairs = zip(_parts(grads, name), _parts(grads, of), grads.batches)
        return all(is_empty(weight) or adds_to_outputs(bias, weight, samples) for bias, weight, samples in pairs)

    def _checked(self, grads: PerSampleGrads, reached: Sequence[str]) -> list[str]:
        """The parameters that these passes are added up for.  Raises for what has no curvature, or is too large."""
        if any(grads[name].like.is_complex() for name in reached):
            raise TypeError(
                "compute_hess: parameters are complex; curvature is there for real parameters alone" + ON_CURVATURE
            )
        if self.kind == "diag":
            return [*reached]
        if self.kind == "full":
            sizes = {name: {f"of {name}": grads[name].shape.numel() ** 2} for name in reached}
        else:
            found = {name: self._lay(name, grads) for name in reached if name not in self.joint and name not in self.skipped}
            self._refuse({name: why for name, why in found.items() if isinstance(why, str)})
            self.lays |= {name: lay for name, lay in found.items() if isinstance(lay, Lay)}
            sizes = {
                name: {f"{what} of {name}": torch.Size(shape).numel() for what, shape in zip("AB", lay.factors)}
                for name, lay in found.items()
                if isinstance(lay, Lay)
            }
        return self._small(grads, sizes)

    def _refuse(self, reasons: Mapping[str, str]) -> None:
        """Leaves parameters out, or raises for them."""
        if self.skip:
            for name, why in reasons.items():
                self.sums.pop(name, None)
                self.skipped[name] = why
        elif reasons:
            listing = "; ".join(f"{name} of {_place(self.model, name)}: {why}" for name, why in reasons.items())
            raise UnsupportedLayer(f"these parameters have no Kronecker factors: {listing}. {otherwise(self.asked)}")

    def _small(self, grads: PerSampleGrads, sizes: Mapping[str, Mapping[str, int]]) -> list[str]:
        """Those whose tensors are within the limit.  sizes: {name: {a tensor, for people: its numbers}}"""
        if not self.skip:
            if every := {what: size for own in sizes.values() for what, size in own.items()}:
                check_size(every, grads[next(iter(sizes))], self.limit)
            return [*sizes]
        for name, own in sizes.items():
            what, size = max(own.items(), key=lambda pair: pair[1])
            if (held := size * grads[name].sum_dtype.itemsize) > self.limit:
                self._refuse(
                    {name: f"the block {what} would take {with_unit(held)}, and limit is {with_unit(int(self.limit))}"}
                )
        return [name for name in sizes if name not in self.skipped]


def _parts(grads: PerSampleGrads, name: str) -> Sequence[Form]:
    """The rows of each micro-batch."""
    return grads[name].parts if len(grads.batches) > 1 else [grads[name]]


def _place(model: nn.Module, name: str) -> str:
    """The layer that has a parameter, for people."""
    parameter = model.get_parameter(name)
    owners = (where(path, m) for path, m in model.named_modules() if any(p is parameter for p in m._parameters.values()))
    return next(owners)


def _coded(lay: Lay) -> tuple[int, int]:
    """How a parameter lies, as two numbers that processes add up."""
    return 4 * lay.blocks + 2 * lay.is_turned + lay.is_table, lay.fan_in


def _uncoded(code: int, fan_in: int) -> Lay:
    """What `_coded` says, but for fan_out, which follows from the parameter's shape."""
    return Lay(fan_in, 0, code // 4, bool(code & 2), bool(code & 1))
