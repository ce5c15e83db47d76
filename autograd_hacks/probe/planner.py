"""The plans of one hooked model, by kind of forward, and the number of samples in a forward's arguments."""

import inspect
from dataclasses import replace
from typing import Any, NamedTuple

import torch.nn as nn
from torch import Tensor
from torch.nn.parameter import is_lazy

from autograd_hacks.formulas.table import rule_for
from autograd_hacks.probe.batch import Batch, BatchDim
from autograd_hacks.probe.plan import Plan
from autograd_hacks.support.parts import has_parts
from autograd_hacks.support.trees import is_packed, modules_of, tensors_of
from autograd_hacks.support.untouched import Aside

NESTED = (
    "the model was given a nested tensor or makes one, but rules need tensors of one shape. Give it a padded tensor, "
    "x.to_padded_tensor(0.0), and a mask for the padding."
)


FEW = 4
"""For how many values of the numbers among the arguments there are separate plans."""
MOST = 32
"""How many plans a model has.  Dictionary keys and lengths of lists may make another kind of each forward."""


class Known(NamedTuple):
    """The facts that are known when a forward begins."""

    plan: Plan
    samples: int | None  # N, if the arguments show it
    batch: Batch | None = None  # the arguments; None if no graph is to be read
    axes: tuple[int | None, ...] = ()  # possible axes of the samples in the arguments, the likeliest first
    aside: Aside | None = None  # everything the forward can reach, if it is to be run again


class Planner:
    """The plans of one hooked model, by kind of forward.

    batch_dim, independent: see `add_hooks`
    probes: whether forwards are read by their graphs
    """

    def __init__(self, model: nn.Module, batch_dim: BatchDim, probes: bool, independent: bool = False) -> None:
        self.batch_dim, self.probes, self.independent = batch_dim, probes, independent
        self.is_covered = not uncovered(model)  # whether layers with rules cover all its parameters
        self.static = Plan(pending=False)  # for layers called by themselves, and if no graph is read
        self.plans: dict[tuple[object, tuple[int | float, ...]], Plan] = {}
        self.memo: Any = None  # of the laws' walks; set by `plan_by`
        self._is_whole = False  # whether lazy layers have their parameters

    def doubt(self) -> None:
        """Makes the next forward of each kind show that its samples are independent, if that is asked."""
        for plan in self.plans.values():
            plan.pending = True

    def look(self, model: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], again: bool = False) -> Known:
        """The plan of a forward that begins.  path: of the called module    again: whether checkpointing repeats it"""
        if any(x.is_nested for x in tensors_of((args, kwargs))):
            return Known(Plan(pending=False, refused={n: NESTED for n, _ in model.named_parameters()}), None)
        # A layer by itself mixes nothing that its rule doesn't know.  If no rule covers it, samples are searched anyway.
        reads = self.probes or self.independent
        if (self.is_covered and not reads) or (rule_for(model) and self.batch_dim == 0):
            return Known(self.static, None)
        names = list(inspect.signature(model.forward).parameters) if isinstance(self.batch_dim, dict) else ()
        batch = Batch.of(args, kwargs, self.batch_dim if not path else 0, names)
        axis = self.batch_dim if isinstance(self.batch_dim, int) and not path else None if not path else 0
        modules = modules_of(model)
        if not self._is_whole:
            self._is_whole = not any(p is not None and is_lazy(p) for m in modules for p in m._parameters.values())
        if not self._is_whole:
            return Known(self.static, None)
        if _is_ragged(model, batch) or any(isinstance(x, Tensor) and x.is_meta for x in batch.leaves):
            return Known(self.static, None)  # samples without an axis
        samples = batch.samples(axis)
        signature = path, batch.signature(), samples == 1, tuple([module.training for module in modules])
        key = signature, self._few(signature, batch.numbers())
        plan = self.plans[key] = self.plans.pop(key) if key in self.plans else Plan()  # the last one is the last used
        if len(self.plans) > MOST:
            del self.plans[next(iter(self.plans))]
        plan.forwards += not again
        time_first = any(map(is_time_first, modules)) and not any(map(is_packed, batch.leaves))
        # A layer by itself declares its own input's axis.  Nothing declares it for a whole model.
        order = (1, axis) if is_time_first(model) else (axis, 1)
        axes = order if axis == 0 and time_first else (axis,)
        if samples == 0 or (len(axes) > 1 and batch.samples(1) == 0):
            return Known(self.static, 0)
        batch = replace(batch, shared=plan.shared)
        if plan.outputs:
            samples = batch.samples(plan.axis, plan.counted_leaf)
        is_shown = plan.is_independent or bool(plan.mixing) or not self.independent
        plan.pending |= not again and not is_shown
        # Parts of parameters are gathered when the forward has ended, and copied then.
        is_kept = self.independent and plan.pending and not has_parts(model)
        aside = Aside(model, (args, kwargs), keeps=True) if is_kept else None
        return Known(plan, samples, batch, axes, aside)

    def _few(self, signature: object, numbers: tuple[int | float, ...]) -> tuple[int | float, ...]:
        """The numbers among the arguments, if they distinguish kinds of forwards.  Empty if they change in each step.

        signature: the signature without the numbers
        """
        if not numbers or (signature, numbers) in self.plans:
            return numbers
        return numbers if sum(other == signature for other, own in self.plans if own) < FEW else ()


def uncovered(model: nn.Module) -> set[nn.Module]:
    """The modules with parameters of their own for which no layer rule gives rows."""
    rules = ((layer, rule_for(layer)) for layer in model.modules())
    by_rule = {id(p) for layer, rule in rules if rule is not None for p in rule.parameters_of(layer).values()}
    return {m for m in model.modules() if any(p is not None and id(p) not in by_rule for p in m._parameters.values())}


def _is_ragged(model: nn.Module, batch: Batch) -> bool:
    """Whether the model gets bags as a vector of entries and a vector of the bags' starts."""
    vectors = [x for x in batch.leaves if isinstance(x, Tensor) and x.ndim == 1 and not x.is_floating_point()]
    return len(vectors) > 1 and batch.axes is None and any(isinstance(module, nn.EmbeddingBag) for module in model.modules())


def is_time_first(module: nn.Module) -> bool:
    """Whether a layer uses axis 1 as the batch, so that its model may too."""
    # Check where the attribute is first: torch takes long to find that a module has no such attribute.
    has = "batch_first" in vars(module) or hasattr(type(module), "batch_first")
    return has and getattr(module, "batch_first", True) is False
