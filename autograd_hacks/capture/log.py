"""The log of the running forward: its layer calls, as they come.  No mathematics, and nothing is decided here."""

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.capture.arrivals import NO_NODES, AtOutput, attach, keeps_its_node, own_hook, put_on, reach_of
from autograd_hacks.capture.backward import Backward
from autograd_hacks.capture.calls import Layer, LayerCall, packed_into
from autograd_hacks.capture.kinds import Whose, Within
from autograd_hacks.capture.records import Pass, Record
from autograd_hacks.formulas.norms import STATISTICS
from autograd_hacks.formulas.table import rule_for
from autograd_hacks.support.contexts import RandomState, autocast_dtype, cuda_devices_of, random_state
from autograd_hacks.support.graph import node_of, saved_by
from autograd_hacks.support.internals import is_any_autocast_on, is_traced, is_transformed
from autograd_hacks.support.layout import Layout, Layouts, likeliest
from autograd_hacks.support.switch import NO_TASK, Switch, current_task
from autograd_hacks.support.trees import made_by, map_tensors, plain, tensors_in, tensors_of, versions_among, versions_of

_NONE: dict[str, Any] = {}

INSIDE_PASS = (
    "a backward pass runs a part of the forward again, in a reentrant checkpoint or in a Function's backward, which can't "
    "be followed. Call checkpoint(..., use_reentrant=False); in transformers "
    "gradient_checkpointing_enable({'use_reentrant': False}). Give a Function what it needs as arguments, and compute in "
    "its backward without modules."
)
"""Why there are no rows of what a backward pass runs again."""
TRANSFORMED = (
    "got gradient through a forward inside torch.func (grad, vmap, jacrev, jvp). Its tensors end with the transform, so its "
    "rows would be missing. Compute derivatives by torch.autograd.grad(create_graph=True), and rows of outputs by "
    "per_sample_jacobian."
)
"""The same of what torch.func runs."""


class Noted(NamedTuple):
    """A layer call of the running forward, with its place in the graph.

    Where its samples are is found when the forward has ended."""

    call: LayerCall
    hooks: Sequence[tuple[Node, AtOutput]]  # on its outputs' nodes
    inputs: frozenset[Node]  # the nodes that made its arguments

    @property
    def is_batched(self) -> bool:
        """Whether the outputs have an axis for the batch, judging by the number of their axes."""
        rule, ndim = rule_for(self.call.layer), len(self.hooks[0][1].shape)
        single = None if rule is None else rule.features or rule.single
        return single is None or packed_into(self.call) is not None or ndim > single(self.call.layer)

    def usual_layouts(self, samples: int) -> Layouts:
        """Where samples are in the outputs, judging by sizes."""
        layer, rule, found = self.call.layer, rule_for(self.call.layer), dict[int, Layout | None]()
        for _, hook in self.hooks:
            if hook.slot or packed_into(self.call) is None:  # no layout gives the samples of packed rows
                axes = (0,) if rule is None else rule.axes_of(layer, len(hook.shape))
                found[hook.slot] = likeliest(hook.shape, samples, axes)
        return tuple([found.get(slot) for slot in range(self.call.slots)])


_WITH_STATISTICS = {getattr(torch._C._functions, name, None) for name in STATISTICS}


def place_by_sizes(calls: Iterable[Noted], samples: int | None) -> None:
    """Tells calls where their samples are, if nothing but sizes shows it."""
    for noted in calls if samples else ():
        noted.call.whose = Whose(noted.usual_layouts(samples or 0))


class Forward:
    """The running forward of a hooked model, call by call."""

    def __init__(self, record: Record, backward: Backward) -> None:
        self.record, self.backward = record, backward
        self.running: str | None = None  # the path of the module whose forward runs
        self.noted: list[Noted] = []
        self.layers: dict[str, Layer] = {}  # by path; whoever gives other names to parameters clears it
        self._random_states: dict[nn.Module, RandomState] = {}  # of the layers that run
        self.within = Within()  # the forward, or the last one

    def records(self) -> bool:
        if is_transformed():  # inside torch.func's transforms tensors belong to one transform, and end with it
            self.record.why_unseen = TRANSFORMED
            return False
        return torch.is_grad_enabled() and Switch.on() and not is_traced() and not self.backward.is_silent

    def begin(self) -> None:
        """Gives a forward its number."""
        record, backward = self.record, self.backward
        self.noted, self._random_states = [], {}  # also what an interrupted forward has left
        backward.running = None  # left over from a pass that failed
        if backward.answered:
            record.comparing, record.why_unseen, backward.answered = False, "", False
        record.forwards += 1
        if torch.is_grad_enabled() and not record.accumulating and record.segments:
            record.free_what_was_read()
        self.within = Within(record.forwards, record.last.kind, self.within.samples)

    def begin_layer(self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before a layer.  Keeps the random state if the layer has dropout, because its rule will run it again."""
        if self.records() and layer.training and getattr(layer, "dropout", None):
            self._random_states[layer] = random_state(cuda_devices_of(layer))

    def end_layer(
        self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, is_first: bool
    ) -> Any:
        """Called after a layer with a rule.  Returns the output for the caller.  output: None if the layer has failed"""
        drew = self._random_states.pop(layer, None) if self._random_states else None
        if output is None or not self.records():
            return output
        # 1. Is there anything to record: trainable parameters, and a graph that leads to them?
        known, is_inside = self._known(path, layer), current_task() != NO_TASK
        if known is None or not known.wanted:
            return output
        is_usual = known.is_plain and self.running is not None and len(args) == 1 and not (kwargs or is_inside or drew)
        if is_usual and self._note_plainly(known, args, output, is_first):
            return output
        outputs = tensors_of(output)
        if not [x for x in outputs if x.grad_fn is not None] or [x for x in outputs if x.is_nested]:
            return output
        if is_inside:
            self.refuse_inside(outputs, [p for _, p, _ in known.wanted])
            return output
        # 2. Record everything that the rule will read, in its present state, and put hooks on the graph.
        live = args, kwargs
        if self.running is None:  # the layer is called by itself: a forward of its own
            self.begin()
            self.record.last = self.within = Within(self.record.forwards, self.backward.owner().kinds.static)
        made_of = made_by(tensors_in(args, kwargs))
        args, kwargs = map_tensors(plain, args), map_tensors(plain, kwargs) if kwargs else {}
        call = LayerCall(
            known=known,
            number=len(self.noted),
            within=self.within,
            overwritten=(0, *versions_among(*known.tensors)),
            args=args,
            kwargs=kwargs,
            training=layer.training,
            random_state=drew,
            outputs=tuple([x.detach() for x in outputs]) if known.rule.recomputes else (),
            precision=autocast_dtype(outputs[0].device),
            slots=len(outputs),
            is_own=self.running is not None,
            versions=versions_of(tensors_in(args, kwargs)),
            is_first=is_first,
        )
        output, hooks = attach(call, output, self.backward, live, made_of)
        if self.running is not None:
            self.noted.append(Noted(call, hooks, made_of))
        elif made_of:
            self.backward.owner().compare(layer, self.within, made_of, live)
        return output

    def _note_plainly(self, known: Layer, args: tuple[Any, ...], output: Any, is_first: bool) -> bool:
        """Notes the usual call, of one tensor that gives one.  Returns whether it is that."""
        x = args[0]
        if type(x) is not Tensor or type(output) is not Tensor or x.is_nested or x.layout is not torch.strided:
            return False
        node, base = output.grad_fn, output._base
        if base is not None and node is not None:
            node = base.grad_fn if keeps_its_node(output) else None
        if node is None:
            return False
        saved = None
        if known.rule.is_node and is_first and base is None and type(node) in _WITH_STATISTICS:
            saved = saved_by(node, STATISTICS)
        precision = autocast_dtype(output.device) if is_any_autocast_on() else None
        versions = versions_among(x, *known.tensors)
        call = LayerCall(
            known=known,
            number=len(self.noted),
            within=self.within,
            overwritten=versions,
            args=(x.detach(),),
            training=known.layer.training,
            precision=precision,
            saved=saved,
            is_first=is_first,
            is_plain=True,
        )
        inputs = NO_NODES if x.grad_fn is None else frozenset((x.grad_fn,))
        hook = AtOutput(call, self.backward, 0, output, (args, _NONE), inputs)
        if self.backward.owner().tape is not None:
            _ = call.edges  # to find them later would be a step of the tape
        put_on(node, hook)
        self.noted.append(Noted(call, ((node, hook),), inputs))
        return True

    def _known(self, path: str, layer: nn.Module) -> Layer | None:
        """The layer as it is now; None if it has no rule."""
        known = self.layers.get(path)
        if known is not None and known.holds(layer):
            return known
        if (rule := rule_for(layer)) is None:
            return None
        own = [(local, p) for local, p in layer._parameters.items() if p is not None and p.requires_grad]
        named = [(local, p, self.record.name_of(p, path, local)) for local, p in own]
        wanted = [one for one in named if one[2] not in self.record.left_out]
        for _, p, _ in wanted:
            self.backward.watch(p)
        known = self.layers[path] = Layer(path, layer, rule, wanted)
        return known

    def refuse_inside(self, outputs: Iterable[Tensor], parameters: Sequence[Tensor]) -> None:
        """Refuses gradient that comes to parameters through outputs of what a backward pass runs again.

        A checkpoint that isn't reentrant brings none: it only recomputes what the forward saved."""
        if self.running is not None:  # the graph of that forward shows it
            return
        note = partial(_note_inside, weakref.ref(self.backward), self.backward.enter(current_task()), parameters)
        for x in outputs:
            if x.grad_fn is not None:
                own_hook(x.grad_fn.register_prehook(note))


def _note_inside(backward: "weakref.ref[Backward]", outer: Pass, parameters: Sequence[Tensor], _: object) -> None:
    own = backward()
    if own is not None and own.hears() and any(reach_of(node_of(p)) for p in parameters):
        own.answered, outer.refused, own.record.why_unseen = True, INSIDE_PASS, INSIDE_PASS
