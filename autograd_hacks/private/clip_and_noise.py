"""A step of differentially private training: clipped gradients with noise, and the guarantee that it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import nan, sqrt
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks import PerSampleGrads
from autograd_hacks.errors import ON_CLIPPING
from autograd_hacks.extending import (
    CLIPPING_BUDGET,
    Spread,
    Where,
    ask_independent,
    check_kind,
    check_may_set,
    drop_grads,
    give_back,
    grads_of,
    kind_of,
    recorder_of,
    set_grads,
    spread_of,
    write_where_it_saves,
)
from autograd_hacks.private.bounds import RULES, Bounded, QuantileClip, bounded_apart, weights_of
from autograd_hacks.support.display import Shown, Table
from autograd_hacks.support.draws import Noise, check_noise, drawn
from autograd_hacks.support.internals import tree_map
from autograd_hacks.support.parts import sharded_as
from autograd_hacks.support.ranges import check, check_bound, check_word, checked
from autograd_hacks.support.trees import map_tensors, overwritten_in, version_of

RELATIONS = {"add_remove": 1, "zero_out": 1, "replace_one": 2}
"""{relation of two neighbouring data sets: the distance of their sums, in bounds}"""


@dataclass(frozen=True, repr=False)
class PrivateStep(Shown):
    """The result of `clip_and_noise_`.  Only ``.grad`` is private: norms, weights and shares are not.

    norms: norms before clipping, N, or of each group in the order of the ids; NaN for those that didn't enter the sum
    weights: the factor of each gradient in the sum, N, or {pattern: N} if parameters are bounded separately; 0 for those
    that didn't enter the sum
    bound: the largest norm of one sample's (or group's) contribution to the sum
    expected_batch_size: the divisor of the sum    deviation: the standard deviation of the noise in ``.grad``
    unit: 'sample' or 'group', the unit that is protected
    """

    norms: Tensor
    weights: Tensor | Mapping[str, Tensor]
    bound: float
    expected_batch_size: float
    deviation: float
    unit: str
    _sums: Mapping[str, Any] = field(default_factory=dict)  # without noise, each with its version, for further micro-batches

    def __post_init__(self) -> None:
        numbers = {"bound": self.bound, "expected_batch_size": self.expected_batch_size, "deviation": self.deviation}
        check("PrivateStep", ON_CLIPPING, **numbers)

    @property
    def clipped_fraction(self) -> Tensor:
        """The share of samples in the sum that were clipped, a 0-dim tensor."""
        parts = self.weights.values() if isinstance(self.weights, Mapping) else [self.weights]
        taken = self.norms.isfinite()
        clipped = torch.stack([w < 1 for w in parts]).any(0) & taken if parts else taken
        return clipped.sum() / taken.sum().clamp(min=1)

    def sensitivity(self, relation: str = "add_remove") -> float:
        """The largest change of ``.grad`` between two neighbouring data sets, in the 2-norm.

        relation: 'add_remove', one sample (or group) is added or removed; 'zero_out', one is replaced by zero;
        'replace_one', one is replaced by another
        Raises ValueError for another relation.
        """
        check_word("sensitivity", ON_CLIPPING, RELATIONS, relation=relation)
        return RELATIONS[relation] * self.bound / self.expected_batch_size

    def _first(self, samples: int) -> PrivateStep:
        """The step of the first samples, without the padding at the end."""
        norms, weights = map_tensors(lambda x: x[:samples], (self.norms, self.weights))
        return replace(self, norms=norms, weights=weights)

    def _after(self, earlier: PrivateStep) -> PrivateStep:
        """One step of earlier micro-batches and this one."""
        each = [(own.norms, own.weights) for own in (earlier, self)]
        norms, weights = tree_map(lambda *parts: torch.cat(parts), *each)
        return replace(self, norms=norms, weights=weights)

    def _table(self) -> Table:
        multiplier = self.deviation / self.sensitivity()
        rows = [
            ("unit", self.unit),
            ("in the sum", f"{int(self.norms.isfinite().sum())} of {len(self.norms)}"),
            ("clipped", f"{float(self.clipped_fraction):.1%}"),
            ("bound", f"{self.bound:.6g}"),
            ("expected batch size", f"{self.expected_batch_size:.6g}"),
            ("sensitivity of .grad, add_remove", f"{self.sensitivity():.6g}"),
            ("sensitivity of .grad, replace_one", f"{self.sensitivity('replace_one'):.6g}"),
            ("deviation of the noise in .grad", f"{self.deviation:.6g}"),
        ]
        title = f"a private step of {len(self.norms)} {self.unit}s, bound {self.bound:.4g}, noise {multiplier:.4g} of it"
        return Table(title, [("", ""), *rows])


@checked(ON_CLIPPING)
@torch.no_grad()
def clip_and_noise_(
    model: nn.Module,
    max_norm: float | Mapping[str, float],
    noise_multiplier: float,
    expected_batch_size: float,
    groups: Tensor | None = None,
    noise: Noise = None,
    add: PrivateStep | None = None,
    loss_type: str | None = None,
    max_bytes: int = CLIPPING_BUDGET,
    process_group: Where = None,
    clip: str | QuantileClip | Callable[[Tensor], Tensor] = "flat",
    mask: Tensor | None = None,
    scale: float | Tensor = 1.0,
) -> PrivateStep:
    """Sets ``param.grad`` to (Σₙ clipped gₙ + noise) / expected_batch_size: a step of differentially private training.

    A sample's gradient gₙ over all parameters becomes gₙ · min(1, max_norm / ‖gₙ‖), so adding or removing one sample changes
    the sum by at most max_norm.  The noise is normal with standard deviation noise_multiplier · max_norm, in both parts of
    complex numbers.  All trainable parameters get noise, whether or not the loss reached them.  The divisor does not depend
    on the samples: if each of D samples is drawn with probability q (Poisson sampling), it is q · D.  For an empty batch
    still run a forward and a backward pass.  A sample with a NaN or infinite gradient or norm contributes nothing.

    No sample's outputs may depend on other samples' values, and this must be checked: hook the model by
    ``add_hooks(model, independent=True)``.  Otherwise a copy repeats the recorded forward once for that check, and later
    forwards are checked as they run.  Nor may outputs depend on the number of samples, as ``h / len(x)`` does: that is
    not checked.

    max_norm: the bound, above 0; inf only without noise. Or {pattern: bound} for parts of the parameters that are bounded
    separately; the bound of the whole is then the square root of the sum of their squares
    noise_multiplier: 0 or more    expected_batch_size: the divisor, above 0
    groups: N integers, each sample's user. A user's samples are summed and clipped together; ``expected_batch_size`` then
    counts users. All samples of a user must be in this batch
    noise: the source of the noise, by default Philox with 256 bits of the operating system's, which can't be repeated. Or a
    function (name, shape, deviation) that returns noise of that shape for a parameter and may keep a state: `SecureNoise`
    or your own. Its deviation must be the one that the accountant assumes. Or a generator, for tests and for
    noise that can be repeated: whoever guesses its seed can remove the noise, and torch's generator for the CPU keeps only
    32 bits of a seed, which can be tried. If processes share a batch, the noise of the first is used, so it is added once
    add: what this function returned for the step's earlier micro-batches, with noise_multiplier=0; ``.grad`` is then set for
    all of them, and so is what is returned. `PrivateTraining` does this
    loss_type, process_group: as in `per_sample_grads`    max_bytes: bytes to use beside the result
    clip: 'flat', as above. 'per_parameter' clips each of K parameters to max_norm / √K. 'automatic' is
    gₙ · max_norm / (‖gₙ‖ + 0.01), AUTO-S (Bu et al. 2023, arXiv:2206.07136). 'psac' is Xia et al. 2023
    (arXiv:2212.00328). A `QuantileClip` starts at max_norm and follows the norms. Or a function from N norms to N weights,
    with which no gradient is longer than max_norm
    mask: N booleans, False for samples that are padding and must not enter the sum. A mean loss is still over all N
    scale: the factor of scaled losses, ``GradScaler.get_scale()``; gradients are divided by it

    Returns a `PrivateStep` with norms, weights, the bound, the noise's deviation, and ``sensitivity()``.

    Raises SamplesMixed if samples are not independent, and ProbeFailed if that was not shown; ValueError for numbers out of
    range, for bounds that leave parameters out, for weights above the bound, for groups or a mask of the wrong shape, for
    groups that are spread over processes, and for ``add`` of another bound, with noise, or whose ``.grad`` was changed;
    NothingRecorded if ``.grad`` was already set from this pass; and what `compute_grad1` raises.

    Source: Abadi et al. 2016, "Deep learning with differential privacy" (arXiv:1607.00133), algorithm 1; per layer McMahan
    et al. 2018, arXiv:1710.06963, section 3.
    """
    recorder = recorder_of(model)
    check_noise("clip_and_noise_", noise)
    spread = spread_of(model, recorder, process_group)
    parts, multiplier = _bounds(model, max_norm, noise_multiplier, clip, add is not None)
    if isinstance(clip, QuantileClip) and spread.mesh is not None:
        raise NotImplementedError("QuantileClip supports one process only" + ON_CLIPPING)
    bound = sqrt(sum(part.bound**2 for part in parts))
    written: dict[str, Tensor] = {}
    ask_independent(model, recorder, spread, "clip_and_noise_")

    def read() -> tuple[_Taken, list[Tensor]]:
        check_may_set(recorder, "clip_and_noise_", add is not None, once=True)
        if add is not None and (add.bound != bound or add.deviation or overwritten_in(add._sums.values())):
            raise ValueError(
                f"clip_and_noise_ was given add=, micro-batches clipped to max_norm={add.bound} with noise of deviation "
                f"{add.deviation}; expected max_norm={bound}, no noise yet, and .grad as it was set. Change them between "
                "steps only" + ON_CLIPPING
            )
        own = grads_of(model, recorder, spread, loss_type, scale)
        grads = write_where_it_saves(own, max_bytes, recorder, written)
        found = _taken(grads, parts, groups, mask, max(1, max_bytes // 4))
        return found, [weights_of(clip, norms, part.bound) for norms, part in zip(found.by_part, parts)]

    with spread.weights():
        (taken, weights), (grouped, processes) = spread.agreed(read, lambda _: [groups is not None, 1], 2)
        _check_apart(spread, groups, grouped, processes)
        drop_grads(spread.parameters)
        sums: dict[str, Tensor] = {}
        for own, w in zip(taken.parts, weights):
            sums |= own.wide_sum(w / float(expected_batch_size), max(1, max_bytes // 4))
    give_back(written, recorder)
    deviation = multiplier * bound / float(expected_batch_size) if multiplier else 0.0  # the bound may be infinite
    if add is not None:
        sums = {name: x + add._sums.get(name, (0.0, 0))[0] for name, x in sums.items()}
    if multiplier:
        named = [(name, sums[name]) for name in spread.parameters if name in sums]
        for (_, x), found in zip(named, drawn(noise, named, deviation, spread.firsts)):
            x += sharded_as(found, x)
    set_grads(spread.parameters, sums, set(sums), recorder=recorder)
    if isinstance(clip, QuantileClip):
        clip._follow(taken.by_part[0], bound, float(expected_batch_size), noise_multiplier, noise)
    placed = [taken.placed(w) for w in weights]
    whole = placed[0] if len(parts) == 1 and not parts[0].pattern else {part.pattern: w for part, w in zip(parts, placed)}
    unit = "sample" if groups is None else "group"
    # Not .grad, which may be rounded: one sample could move a rounded sum by more than the bound.
    left = {} if multiplier else {name: (x, version_of(x)) for name, x in sums.items()}
    here = PrivateStep(taken.norms, whole, bound, float(expected_batch_size), deviation, unit, left)
    return here if add is None else here._after(add)


def _bounds(
    model: nn.Module, max_norm: float | Mapping[str, float], noise_multiplier: float, clip: Any, add: bool
) -> tuple[list[Bounded], float]:
    """The parts that are bounded separately, and the multiplier of the gradients' noise."""
    check_bound("clip_and_noise_", max_norm, noise_multiplier, ON_CLIPPING)
    if isinstance(clip, str):
        check_word("clip_and_noise_", ON_CLIPPING, RULES, clip=clip)
    check_kind("clip_and_noise_", ON_CLIPPING, (str, QuantileClip, Callable), "a name or a function", clip=clip)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    if not isinstance(clip, QuantileClip):
        return bounded_apart(model, names, max_norm, clip), float(noise_multiplier)
    if add or isinstance(max_norm, Mapping):
        given = "clip_and_noise_ was given a QuantileClip with add= or with several bounds"
        raise ValueError(f"{given}; expected whole steps and a single bound to start from" + ON_CLIPPING)
    bound = float(max_norm) if clip.bound is None else clip.bound
    return bounded_apart(model, names, bound, clip), clip.multiplier(float(noise_multiplier))


@dataclass(frozen=True)
class _Taken:
    """The M rows that enter the sum."""

    norms: Tensor  # of all samples or of all groups, NaN for those that don't enter the sum
    where: Tensor | None  # the places of the M rows among these; None if all enter
    parts: list[PerSampleGrads]  # the rows of each part that is bounded separately
    by_part: list[Tensor]  # their norms, M each

    def placed(self, x: Tensor) -> Tensor:
        """M numbers at their places, and zeros elsewhere."""
        if self.where is None:
            return x
        found = x.new_zeros(len(self.norms))
        found[self.where.to(x.device)] = x
        return found


def _taken(
    grads: PerSampleGrads, parts: list[Bounded], groups: Tensor | None, mask: Tensor | None, max_bytes: int
) -> _Taken:
    if groups is not None:
        grads.group(groups)  # checks them
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (grads.samples,) or mask.dtype != torch.bool):
        expected = f"{grads.samples} booleans, one for each sample, including padding"
        raise ValueError(f"clip_and_noise_ was given mask={kind_of(mask)}; expected {expected}" + ON_CLIPPING)

    def cut(whole: PerSampleGrads) -> list[PerSampleGrads]:
        own = [{n: whole[n] for n in part.names if n in whole} for part in parts]
        return [whole] if len(parts) == 1 else [whole.with_forms(forms, whole.samples) for forms in own]

    def lengths(whole: PerSampleGrads) -> tuple[Tensor, list[Tensor]]:
        by_part = [x.norms(max_bytes=max_bytes) for x in cut(whole)]
        return torch.stack(by_part).norm(dim=0), by_part

    norms, by_part = lengths(grads)
    finite = norms.isfinite() if mask is None else norms.isfinite() & mask.to(norms.device)
    where, kept = None, grads
    if not finite.all():  # 0 · NaN is NaN
        where, kept = finite.nonzero()[:, 0], grads.select(finite)
        norms, by_part = norms.masked_fill(~finite, nan), [x[finite] for x in by_part]
    if groups is not None:
        names, groups = groups.unique(), groups[finite.to(groups.device)]
        kept = kept.group(groups)
        own, by_part = lengths(kept)
        where = torch.isin(names, groups).nonzero()[:, 0].to(own.device)
        norms = own.new_full((len(names),), nan)
        norms[where] = own
    return _Taken(norms, where, cut(kept), by_part)


def _check_apart(spread: Spread, groups: Tensor | None, grouped: float, processes: float) -> None:
    """Raises ValueError, on all processes, if a group's samples are on several processes."""
    if grouped not in (0, processes):
        given = f"clip_and_noise_ was given groups on {grouped:.0f} of {processes:.0f} processes"
        raise ValueError(f"{given}; expected all or none" + ON_CLIPPING)
    if groups is None or spread.mesh is None:
        return
    names, counts = spread.everyones(groups.unique()).unique(return_counts=True)
    if (counts > 1).any():
        apart = f"the samples of groups {names[counts > 1].tolist()[:10]} are on several processes"
        raise ValueError(f"clip_and_noise_: {apart}. Send all samples of a group to one process." + ON_CLIPPING)
