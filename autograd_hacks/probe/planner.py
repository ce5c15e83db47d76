"""Which plan each forward of a model follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.nn.parameter import is_lazy

from autograd_hacks.capture.forward import Recorder
from autograd_hacks.errors import ProbeFailed
from autograd_hacks.probe.batch import Batch, BatchDim, Hypothesis, kept_samples
from autograd_hacks.probe.decide import plan_of
from autograd_hacks.probe.plan import Plan, static_units
from autograd_hacks.probe.trace import Arguments, Survey
from autograd_hacks.rules.table import rule_for
from autograd_hacks.support.trees import map_tensors, modules_of, tensors_of
from autograd_hacks.support.untouched import cuda_devices_of, random_state


class Planner:
    """The plans of one hooked model, by signature.

    batch_dim: see `add_hooks`    probes: whether new signatures are probed    hook_unit: has the calls of a module, by path,
    kept to be run again
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        batch_dim: BatchDim,
        probes: bool,
        hook_unit: Callable[[str, nn.Module], None],
    ) -> None:
        self.recorder, self.batch_dim, self.probes, self._hook_unit = recorder, batch_dim, probes, hook_unit
        self.static = Plan(units=static_units(model))
        self._hook(model, self.static)
        self.plans: dict[object, Plan] = {}
        self._surveyed: tuple[object, Survey] | None = None
        self._told_by: int | None = None  # of the forward that is surveyed
        self._learnt: int | None = None  # the axis that a model with time-first layers turned out to have
        recorder.plan = recorder.static = self.static

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Finds the plan of a forward that begins; where there is none, runs the probe."""
        recorder = self.recorder
        recorder.plan, recorder.samples, self._surveyed = self.static, None, None
        state = random_state(cuda_devices_of(model))
        recorder.arguments = map_tensors(Tensor.detach, args), map_tensors(Tensor.detach, kwargs), state
        if not self.probes or (rule_for(model) and self.batch_dim == 0):
            return  # a layer alone mixes nothing that its rule doesn't know
        batch = Batch.of(args, kwargs, self.batch_dim)
        axis = self.batch_dim if isinstance(self.batch_dim, int) else None
        axis = self._learnt if axis == 0 and self._learnt is not None else axis
        samples = batch.samples(axis)
        modules = modules_of(model)
        if any(p is not None and is_lazy(p) for module in modules for p in module._parameters.values()) or _is_ragged(
            model, batch
        ):
            return  # a model that isn't whole yet, or samples that no axis tells apart
        if samples is None and self.batch_dim is not None and (kinds := batch.opaque()):
            raise ProbeFailed(
                f"the model was given {', '.join(kinds)}, in which the library can't look for the samples. Give it "
                "tensors, in tuples and dictionaries if need be; or say that axis 0 of every layer's input is the batch "
                "and that samples don't mix: add_hooks(model, probe=False)."
            )
        if samples is None or any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in batch.leaves):
            return
        signature = batch.signature(), samples == 1, tuple([module.training for module in modules])
        plan = self.plans.get(signature)
        if plan is not None and not plan.stale and not plan.assumed:
            recorder.plan, recorder.samples = plan, batch.samples(plan.axis, plan.told_by)
            return
        if not samples:
            return
        told_by = self._survey(model, batch, axis, samples, plan, signature, args, kwargs, None)
        if told_by is not None:
            others = batch.samples(axis, told_by)
            assert others is not None  # it is a size there
            self._survey(model, batch, axis, others, plan, signature, args, kwargs, told_by)

    def _survey(
        self,
        model: nn.Module,
        batch: Batch,
        axis: int | None,
        samples: int,
        plan: Plan | None,
        signature: object,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        told_by: int | None,
    ) -> int | None:
        """Runs the probe for a forward that begins.  Returns which argument tells the number of samples, if it must be run
        anew for that."""
        recorder = self.recorder
        hypotheses = [Hypothesis(axis, kept_samples(samples, seed=0))]
        if axis == 0 and self._learnt is None and (others := batch.samples(1) or 0) > 1 and _has_time_first(model):
            kept = hypotheses[0].kept if others == samples else kept_samples(others, seed=1)
            hypotheses.append(Hypothesis(1, [~half for half in kept]))
        probes = max(len(hypothesis.kept) for hypothesis in hypotheses)
        hypotheses = [Hypothesis(h.axis, [h.kept[min(n, len(h.kept) - 1)] for n in range(probes)]) for h in hypotheses]
        replacements = [found for n in range(probes) if (found := batch.replaced(hypotheses, n)) is not None]
        alike = len(replacements) < probes
        if plan is not None and plan.assumed and alike:
            recorder.plan, recorder.samples = plan, samples
            return None
        survey = Survey(model, recorder, batch, hypotheses)
        if not self._probe(survey, [(args, kwargs)] * probes if alike else replacements, (args, kwargs)):
            return None
        if told_by is None and (told_by := batch.told_otherwise(axis, survey.output_size())) is not None:
            return told_by
        recorder.plan = Plan(spread=frozenset(survey.lookups), assumed=alike and samples > 1, told_by=told_by)
        recorder.samples, self._surveyed = samples, (signature, survey)
        survey.begin(args, kwargs)
        return None

    def _probe(self, survey: Survey, replacements: Sequence[Arguments], arguments: Arguments) -> bool:
        """Returns whether the probe has run; not where the model fails on its own arguments too, and will say so."""
        try:
            survey.probe(replacements, with_gradients=False)
        except ProbeFailed:
            raise
        except Exception:
            # Once more with gradients, which the model may need inside.
            try:
                survey.probe(replacements, with_gradients=True)
            except Exception as error:
                if survey.fails_on(arguments):
                    return False
                raise ProbeFailed(
                    f"a forward with some samples of the batch in the place of others has failed ({type(error).__name__}: "
                    f"{error}). The library runs one before the first of each kind, to find out where the samples are and "
                    "whether they mix. If the model's input has no batch on axis 0, say where: add_hooks(model, "
                    "batch_dim=...); to do without, and take axis 0 of every layer's input for the batch: "
                    "add_hooks(model, probe=False)."
                ) from error
        return True

    def end(self, model: nn.Module, output: Any) -> None:
        """Keeps the plan that a new signature's first forward has given.  output: of the model; None where it has failed"""
        if self._surveyed is not None:
            (signature, survey), self._surveyed = self._surveyed, None
            survey.close()
            if output is not None:
                self.recorder.plan = plan_of(survey)
                if len(survey.hypotheses) > 1 and not self.recorder.plan.refused and not self.recorder.plan.assumed:
                    self._learnt = self.recorder.plan.axis
                if signature in self.plans and not self.plans[signature].assumed:
                    self.recorder.plan.inherit(self.plans[signature])
                self.plans[signature] = self.recorder.plan
                self._hook(model, self.recorder.plan)
        outputs = [x for x in tensors_of(output) if not x.is_nested]
        self.recorder.returned = list(zip([x.shape for x in outputs], self.recorder.plan.layouts_of_model(model, outputs)))
        if self.recorder.plan.blind and self.recorder.records():
            self.recorder.watch_outputs(output)

    def _hook(self, model: nn.Module, plan: Plan) -> None:
        for path in plan.units:
            self._hook_unit(path, model.get_submodule(path))


def _is_ragged(model: nn.Module, batch: Batch) -> bool:
    """Whether the model is given bags as a vector of entries and a vector of the bags' beginnings."""
    vectors = [x for x in batch.leaves if isinstance(x, Tensor) and x.ndim == 1 and not x.is_floating_point()]
    return len(vectors) > 1 and batch.axes is None and any(isinstance(module, nn.EmbeddingBag) for module in model.modules())


def _has_time_first(model: nn.Module) -> bool:
    """Whether some layer itself takes axis 1 for the batch, so that the model may."""
    return any(getattr(module, "batch_first", True) is False for module in model.modules())
