"""The plan of each forward of a model: `plan_for` makes one, `Planner` keeps them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.nn.parameter import is_lazy

from autograd_hacks.errors import ProbeFailed
from autograd_hacks.probe.batch import Batch, BatchDim
from autograd_hacks.probe.compare import Gather
from autograd_hacks.probe.meetings import Follow
from autograd_hacks.probe.plan import EXPAND, HOOKS, UNTRACED, Plan, is_milestone, is_second_try, static_units
from autograd_hacks.probe.propose import Proposal
from autograd_hacks.probe.trace import Trace, Tracer
from autograd_hacks.rules.table import rule_for
from autograd_hacks.support.trees import is_packed, modules_of, tensors_of

_FEW = 4
"""So many values of the numbers among the arguments have plans of their own."""


def plan_for(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: Batch,
    axes: Sequence[int | None],
    seed: int = 0,
    opened: Collection[str] = (),
    before: Follow | None = None,
    mode: str = HOOKS,
    gather: Gather = lambda x: [x],
) -> Plan:
    """The plan of a forward, from traces: of the batch, and of the batch with samples replaced.

    It changes nothing, neither in the model nor in the arguments.

    batch: the arguments'    axes: of these where the samples may be; None for where the user has said they are
    seed: which samples are replaced, and by which    opened: parameters by name that are zero, and hide what is behind them:
    they are tried with noise in their place too    before: what an earlier plan of the signature has followed    mode: see
    `add_hooks`    gather: from the processes that have parts of the model's tensors, and run it together
    Returns a plan that refuses everything where the model can't run its own arguments, as the forward will say.
    Raises ProbeFailed where it can't run them with samples replaced.
    """
    tracer, decisions = Tracer(model, mode), []
    follow = tracer.first
    if before is not None:
        follow = replace(before, names=before.names & tracer.trained | follow.names, unruled=follow.unruled)
    wholes: dict[tuple[bool, ...], Trace] = {}  # by which arguments carry samples
    for axis in axes:
        samples, told_by = batch.samples(axis), None
        assert samples is not None  # or there would be nothing to plan
        carrying = tuple([at is not None for at in batch.carried(axis, samples)])
        whole = wholes.get(carrying)
        try:
            whole = whole or tracer.trace((args, kwargs), batch, axis, samples, follow)
        except ProbeFailed:
            raise
        except Exception as error:  # whatever the model's own code raises
            why = (
                f"{UNTRACED} ({type(error).__name__}: {error}). Let it run twice on the same arguments; or do without the "
                "probe, and take axis 0 of every layer's input for the batch: add_hooks(model, probe=False)."
            )
            unplaced, refused = set(tracer.paths.values()), dict.fromkeys(tracer.names.values(), why)
            return Plan(mode, unplaced=unplaced, refused=refused, incomplete=True)
        if (told_by := batch.told_otherwise(axis, whole.output_size())) is not None:
            samples = whole.output_size()
            whole = tracer.trace((args, kwargs), batch, axis, samples, follow)
        elif len(axes) > 1:
            wholes[carrying] = whole
        lengths = {len(x) for x in (*args, *kwargs.values()) if isinstance(x, list)}
        if batch.axes is None and samples == 1 and whole.output_size() in lengths - {1}:
            raise ProbeFailed(
                f"the model was given a list of {whole.output_size()} tensors with one entry each on axis {axis}, and "
                "returns as many entries. If each is a sample, give the model one tensor of all, padded, with a mask "
                "(torch.nn.utils.rnn.pad_sequence), or a packed sequence (pack_sequence); if all are of one sample, say so: "
                "add_hooks(model, batch_dim=(0,))."
            )
        proposal = Proposal(tracer, (args, kwargs), batch, axis, samples, seed, gather)
        decisions.append(proposal.decision(whole, opened, told_by))
    return min(decisions, key=lambda decision: decision.cost).plan()


NESTED = (
    "the model was given a nested tensor, and rules are for tensors of one shape. Give it a padded one, "
    "x.to_padded_tensor(0.0), and a mask of what is padding."
)


UNPLACED = (
    'with add_hooks(mode="expand") each sample reads copies of its own, and here no probe could tell where the samples are: '
    "in bags, a model that isn't whole yet, arguments without samples. Use another mode."
)


@dataclass(frozen=True)
class Asked:
    """A forward whose plan is to be made."""

    signature: object
    batch: Batch
    axis: int | None  # of the samples in the arguments
    samples: int


class Planner:
    """The plans of one hooked model, by signature.

    batch_dim, mode: see `add_hooks`    probes: whether new signatures are traced
    """

    def __init__(self, model: nn.Module, batch_dim: BatchDim, probes: bool, mode: str = HOOKS) -> None:
        self.batch_dim, self.probes, self.mode = batch_dim, probes, mode
        self.static = Plan(
            mode, units=static_units(model)
        )  # of layers that are called by themselves, and where nothing is traced
        self.plans: dict[object, Plan] = {}
        self._numbers: dict[object, set[tuple[int | float, ...]]] = {}  # among the arguments, by signature
        self._learnt: int | None = None  # the axis that a model with time-first layers turned out to have
        self.doubts = False  # whether the next forward is traced anew, whatever is known
        self._seed = 0  # others are replaced each time
        self.make_room: Callable[[], None] = lambda: None  # before traces, which need memory
        self.gather: Gather = lambda x: [x]  # see there
        # agree(signature, plan, samples): the plan that all processes take
        self.agree: Callable[[object, Plan, int], Plan] = lambda signature, plan, samples: plan

    def plan(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], again: bool = False
    ) -> tuple[Plan, int | None]:
        """The plan of a forward that begins, and its number of samples, None where that isn't known.

        again: whether checkpointing runs a forward that has been before
        """
        known = self.look(model, args, kwargs, again)
        return self.make(model, args, kwargs, known) if isinstance(known, Asked) else known

    def look(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], again: bool = False
    ) -> Asked | tuple[Plan, int | None]:
        """What `plan` returns, or what `make` needs to know where a plan is to be made."""
        if any(x.is_nested for x in tensors_of((args, kwargs))):
            return Plan(
                self.mode, units=self.static.units, refused=dict.fromkeys((n for n, _ in model.named_parameters()), NESTED)
            ), None
        if not self.probes or (rule_for(model) and self.batch_dim == 0 and self.mode == HOOKS):
            return self._without_probe(model), None  # a layer alone mixes nothing that its rule doesn't know
        batch = Batch.of(args, kwargs, self.batch_dim)
        axis = self.batch_dim if isinstance(self.batch_dim, int) else None
        axis = self._learnt if axis == 0 and self._learnt is not None else axis
        samples, modules = batch.samples(axis), modules_of(model)
        if any(p is not None and is_lazy(p) for module in modules for p in module._parameters.values()) or _is_ragged(
            model, batch
        ):
            return self._without_probe(model), None  # a model that isn't whole yet, or samples that no axis tells apart
        if samples is None and self.batch_dim is not None and (kinds := batch.opaque()):
            raise ProbeFailed(
                f"the model was given {', '.join(kinds)}, in which the library can't look for the samples. Give it "
                "tensors, in tuples, dictionaries or dataclasses if need be; or say that axis 0 of every layer's input is "
                "the batch and that samples don't mix: add_hooks(model, probe=False)."
            )
        if samples is None or any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in batch.leaves):
            return self._without_probe(model), None
        # Which parameters train decides what is read as copies.
        trained = () if self.mode == HOOKS else tuple([p.requires_grad for p in model.parameters()])
        kind = batch.signature(), samples == 1, tuple([module.training for module in modules]), trained
        signature = kind, self._choosing(kind, batch.numbers())
        known = self.plans.get(signature)
        if known is not None:
            known.forwards += not again
            known.pending |= known.unsure and is_second_try(known.forwards)
            is_due, self.doubts = self.doubts or known.is_due(samples), False
            if again or not samples or (not is_due and (not known.unproven or batch.is_alike(known.axis, known.told_by))):
                return known, batch.samples(known.axis, known.told_by)
        if not samples or (axis == 0 and self._learnt is None and batch.samples(1) == 0 and _has_time_first(model)):
            return self.static, 0
        return Asked(signature, batch, axis, samples)

    def make(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked) -> tuple[Plan, int | None]:
        """Makes a plan that `look` has asked for."""
        batch, axis, known = asked.batch, asked.axis, self.plans.get(asked.signature)
        batch = batch if known is None else replace(batch, shared=known.shared)
        axes = [axis, 1] if axis == 0 and self._learnt is None and _may_be_time_first(model, batch) else [axis]
        self.make_room()
        zeros, self._seed = _zeros(model), self._seed + 1
        before = None if known is None else known.followed
        plan = plan_for(model, args, kwargs, batch, axes, self._seed, zeros, before, self.mode, self.gather)
        plan.opened = zeros
        if len(axes) > 1 and not plan.refused and not plan.unproven:
            self._learnt = plan.axis
        if known is not None:
            plan.follow(known)
        plan.shared = batch.without_samples(plan.axis, batch.samples(plan.axis, plan.told_by) or 0)
        plan.largest = max(plan.largest, asked.samples)
        self.plans[asked.signature] = plan = self.agree(asked.signature, plan, asked.samples)
        return plan, batch.samples(plan.axis, plan.told_by)

    def _without_probe(self, model: nn.Module) -> Plan:
        if self.mode == EXPAND:
            return Plan(self.mode, refused=dict.fromkeys((n for n, _ in model.named_parameters()), UNPLACED))
        self.static.forwards += 1
        if is_milestone(self.static.forwards):
            self.static.summed.clear()
        return self.static

    def _choosing(self, signature: object, numbers: tuple[int | float, ...]) -> tuple[int | float, ...]:
        """The numbers, as a part of the signature: a few may choose what the model does; many don't, steps say.

        signature: without them
        """
        known = self._numbers.setdefault(signature, set()) if numbers else set()
        if numbers not in known and len(known) == _FEW:
            return ()
        known.add(numbers)
        return numbers


def _zeros(model: nn.Module) -> frozenset[str]:
    """The parameters that train and are all zero, so that what is behind them has no effect yet, by name.

    But for those of layers with a rule whose other parameters aren't: a bias hides nothing.
    """
    found = set()
    for path, module in model.named_modules():
        own = {name: p for name, p in module._parameters.items() if p is not None and not (is_lazy(p) or p.is_meta)}
        zero = {name for name, p in own.items() if not p.detach().any()}
        if zero and (rule_for(module) is None or len(zero) == len(own)):
            found |= {f"{path}.{name}" if path else name for name in zero if own[name].requires_grad}
    return frozenset(found)


def _is_ragged(model: nn.Module, batch: Batch) -> bool:
    """Whether the model is given bags as a vector of entries and a vector of the bags' beginnings."""
    vectors = [x for x in batch.leaves if isinstance(x, Tensor) and x.ndim == 1 and not x.is_floating_point()]
    return len(vectors) > 1 and batch.axes is None and any(isinstance(module, nn.EmbeddingBag) for module in model.modules())


def _may_be_time_first(model: nn.Module, batch: Batch) -> bool:
    """Whether some layer itself takes axis 1 for the batch, so that the model may."""
    return not any(map(is_packed, batch.leaves)) and (batch.samples(1) or 0) > 1 and _has_time_first(model)


def _has_time_first(model: nn.Module) -> bool:
    return any(getattr(module, "batch_first", True) is False for module in model.modules())
