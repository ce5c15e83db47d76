"""A backend of torch.compile whose backward graph also computes rows, norms or weighted sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor, fx

from autograd_hacks.compiled import torch_names as compiler
from autograd_hacks.compiled.labels import Joint, Labels, after, size
from autograd_hacks.compiled.operations import labelled
from autograd_hacks.compiled.proofs import Certificate
from autograd_hacks.compiled.taken_apart import TakenApart
from autograd_hacks.errors import ON_COMPILING, SamplesMixed, UnsupportedOperation
from autograd_hacks.probe.batch import Batch, BatchDim
from autograd_hacks.support.trees import tensors_of


@dataclass
class Made:
    """A verb's results in a graph.

    gradients: new gradients for ``.grad`` of some parameters; None for no gradient. Others keep the ordinary ones
    results: other results of the backward, by a parameter's name or the result's own
    """

    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    results: dict[str, Tensor] = field(default_factory=dict)


def compiled(step: Any, module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """What torch.compile calls with the whole graph of a model.  step: the `CompiledStep`"""
    step._compilations += 1
    step._is_symbolic = any(compiler.is_symbolic(x) for x in examples)
    for name in compiler.lost(module.graph, examples):
        raise UnsupportedOperation(
            f"the forward writes in place to {name}, one number in float64, and torch's compiler loses what is written. "
            "Keep it in float32, or as a tensor of shape (1,)." + ON_COMPILING
        )
    one = Compilation(step, list(examples), [compiler.source_of(node) for node in module.graph.find_nodes(op="placeholder")])
    made = compiler.aot_autograd(
        fw_compiler=one.forward,
        bw_compiler=one.backward,
        partition_fn=one.partition,
        decompositions=compiler.decompositions(),
    )
    recurrent = (module for module in step.model.modules() if isinstance(module, nn.RNNBase))
    with compiler.recurrent_layers_unrolled() if any(recurrent) else nullcontext():
        run: Callable[..., Any] = made(module, examples)
    if step._failed is not None:  # which torch would tell in the backward pass, when the forward has changed buffers
        raise step._failed
    if not step._is_private:
        return run

    def watched(*args: Any) -> Any:
        found = run(*args)
        step._made_of_samples = [found[n] for n in one.made_of_samples]
        return found

    return watched


def axes_of(batch: Batch, batch_dim: BatchDim) -> dict[int, int]:
    """The samples' axes in the tensors among a forward's arguments, by id.  Raises ValueError if their sizes differ."""
    axes = batch.axes
    if axes is None:
        axes = [batch_dim if isinstance(x, Tensor) and x.ndim else None for x in batch.leaves]  # type: ignore[misc]  # callers give a number
    there = [(x, axis % x.ndim) for x, axis in zip(batch.leaves, axes) if axis is not None and isinstance(x, Tensor)]
    if len({x.shape[axis] for x, axis in there}) > 1:
        raise ValueError(
            f"compile was given batch={batch_dim!r}, but arguments of shapes {[tuple(x.shape) for x, _ in there]} have "
            "different sizes on that axis. Give a tree of axes, None for an argument without samples: batch=(0, None), or "
            "{'input_ids': 0, 'table': None}." + ON_COMPILING
        )
    return {id(x): axis for x, axis in there}


def check_kept(made: Sequence[Any], found: Any) -> None:
    """Raises SamplesMixed if the model of a private step keeps a tensor that depends on samples for later steps.

    made: what the forward made of samples    found: what it returned"""
    returned = {id(x) for x in tensors_of(found)}
    if kept := [x for x in made if isinstance(x, Tensor) and id(x) not in returned]:
        raise SamplesMixed(
            f"the forward keeps a tensor of shape {tuple(kept[0].shape)} that depends on samples, in an attribute or a "
            "list. Later steps could use it, which private training must exclude. Return it, or don't keep it."
            + ON_COMPILING
        )


class Compilation:
    """The compilation of one graph."""

    def __init__(self, step: Any, examples: list[Any], names: list[str]) -> None:
        self.step, self.examples, self.names = step, examples, names
        first = {id(p): name for name, p in reversed(list(step.model.named_parameters(remove_duplicate=False)))}
        self.parameters = {n: first[id(x)] for n, x in enumerate(examples) if id(x) in first}
        buffers = {id(b) for b in step.model.buffers()}
        self.is_buffer = {n for n, x in enumerate(examples) if id(x) in buffers}
        self.axes = step._axes
        self.full: fx.GraphModule | None = None  # the backward with all results
        self.results: list[str] = []
        self.places: dict[str, int] = {}  # the places of parameters' gradients in the backward's outputs
        self.certificate: Certificate | None = None
        self.made_of_samples: list[int] = []  # outputs of the graph by number

    # 1. The joint graph.

    def _joint(self, graph: fx.Graph, first: int) -> Joint:
        """The joint graph, of which the output number ``first`` is the first gradient."""
        ends, samples, gradients = compiler.ends_of(graph), self._samples(), dict[str, fx.Node]()
        for kind in ends.others.values():
            raise UnsupportedOperation(
                f"the graph has an unsupported input, {kind}, from an operation that checks values, such as "
                "torch.linalg.inv. Use a variant that doesn't, such as inv_ex, or add_hooks(model)." + ON_COMPILING
            )
        axes = {node: axis for node, place in ends.inputs.items() if (axis := self._axis(place, samples)) is not None}
        for place, (of, node) in ends.gradients.items():
            if of in self.parameters:
                if (name := self.parameters[of]) in gradients:
                    raise UnsupportedOperation(f"the graph contains the parameter {name} several times." + ON_COMPILING)
                gradients[name], self.places[name] = node, place - first
        flat: Any = graph.output_node().args[0]
        others = [node for node in flat if isinstance(node, fx.Node) and node not in gradients.values()]
        left = None
        if self.step._is_private:
            left = {self.names[n]: node for n, node in ends.written.items() if id(self.examples[n]) not in self.axes}
            of_samples = after(axes)
            self.made_of_samples = [idx for idx, node in ends.outputs.items() if node in of_samples]
            if samples < 2 and (wrong := [name for name, node in left.items() if node in of_samples]):
                raise SamplesMixed(
                    f"the forward writes a value to {wrong[0]} that depends on a sample, and later steps could use it."
                    + ON_COMPILING
                )
        return Joint(graph, samples, axes, ends.tangents, gradients, others, left)

    def _samples(self) -> int:
        sizes = {size(x.shape[self.axes[id(x)]]) for x in self.examples if id(x) in self.axes}
        if len(sizes) != 1:
            raise UnsupportedOperation(
                "the graph has no argument with samples: the model's outputs don't depend on its arguments, or only on "
                "arguments that batch= gives no axis." + ON_COMPILING
            )
        return sizes.pop()

    def _axis(self, place: int, samples: int) -> int | None:
        """The axis of the samples in an input of the graph; None if it is the same for all samples."""
        x = self.examples[place]
        if id(x) in self.axes:
            return self.axes[id(x)]
        name = self.names[place]
        if (
            isinstance(x, Tensor)
            and x.ndim
            and id(x) not in self.step._given
            and ("['args']" in name or "['kwargs']" in name)
        ):
            raise UnsupportedOperation(
                f"the model's argument {name} is an array and not a tensor, so it is unknown whether it has samples. Give "
                "it as a tensor, named in batch=." + ON_COMPILING
            )
        is_state = place in self.parameters or place in self.is_buffer or not isinstance(x, Tensor)
        if not is_state and "['args']" not in name and "['kwargs']" not in name and samples in x.shape and samples > 1:
            raise UnsupportedOperation(
                f"the model reads the tensor {name} of shape {tuple(x.shape)}, which is not an argument, a parameter or a "
                "buffer, so it is unknown whether it has samples. Give it as an argument, named in batch=, or register it "
                "as a buffer." + ON_COMPILING
            )
        return None

    # 2. The joint graph with the additional results, split in two.

    def partition(
        self, module: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint = self._joint(module.graph, num_fwd_outputs)
        labels = labelled(joint) if joint.samples > 1 else None
        placeholders, kinds = module.graph.find_nodes(op="placeholder"), module.graph.output_node().meta["desc"]
        traced = compiler.make_fx(
            torch.func.functionalize(partial(self._run, joint, labels, num_fwd_outputs)),  # partitions support no writing
            tracing_mode="symbolic" if self.step._is_symbolic else "fake",
            _allow_non_fake_inputs=True,
            decomposition_table=compiler.lowered() if self.step._compiles else {},
        )(*(node.meta["val"] for node in placeholders))
        for own, before in zip(traced.graph.find_nodes(op="placeholder"), placeholders):
            own.target = own.name = before.target
            own.meta["desc"] = before.meta["desc"]
        compiler.without_idle_views(traced.graph)
        if self.step._compiles:
            traced = compiler.with_random_numbers_of_inductor(traced)
        traced.graph.eliminate_dead_code()
        traced.recompile()
        last = traced.graph.output_node()
        last.args = (tuple(last.args[0]),)  # type: ignore[arg-type]
        compiler.describe_more(traced.graph, kinds)
        for node in traced.graph.nodes:
            node.meta.pop("partitioner_tag", None)
        if labels is not None:
            self.certificate = Certificate(joint, labels)
        forward, self.full = compiler.min_cut_rematerialization_partition(
            traced, inputs, num_fwd_outputs=num_fwd_outputs, **options
        )
        return forward, self._without_results(self.full)

    def _run(self, joint: Joint, labels: Labels | None, first: int, *values: Any) -> list[Any]:
        """The joint graph's outputs, of which number ``first`` is the first gradient, and the verb's results."""
        flat: Any = joint.graph.output_node().args[0]
        with torch.no_grad():
            apart = TakenApart(joint, labels, values)
            made = self.step._make(apart, joint.gradients)
            places = {first + place: name for name, place in self.places.items()}
            others = {n: node for n, node in enumerate(flat) if isinstance(node, fx.Node) and n not in places}
            is_summed = joint.gradients.keys() - made.gradients or any(node in apart.forms for node in others.values())
            sums = apart.weighted() if is_summed else {}
            found: list[Any] = [None] * len(flat)
            for n, node in others.items():
                found[n] = sums[node] if node in apart.forms else apart.env[node]
            for n, name in places.items():
                found[n] = made.gradients[name] if name in made.gradients else sums.get(joint.gradients[name])
        self.results = list(made.results)
        return [*found, *made.results.values()]

    def _without_results(self, backward: fx.GraphModule) -> fx.GraphModule:
        """The backward for AOTAutograd, which checks the number of outputs."""
        if not self.results:
            return backward
        graph = deepcopy(backward.graph)
        last, kept = graph.output_node(), slice(-len(self.results))
        last.args = (last.args[0][kept],)  # type: ignore[index]
        if "desc" in last.meta:
            last.meta["desc"] = last.meta["desc"][kept]
        return fx.GraphModule(backward, graph)

    # 3. Both compiled.

    def forward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        compiled = self._compiled(graph, inputs, is_backward=False)

        def call(args: list[Any]) -> Any:
            return compiled(args) if self.certificate is None else self.certificate.run_forward(compiled, args)

        return compiler.boxed(call)

    def backward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        full = graph if self.full is None else self.full
        try:
            compiled = self._compiled(full, inputs, is_backward=True)
        except Exception as error:  # torch's compiler raises anything
            self.step._failed = error
            raise
        count = len(self.results)

        def call(args: list[Any]) -> Any:
            certificate = self.certificate
            check = certificate.begin_backward(full if self.step._compiles else None, args) if certificate else None
            self.step._begin()
            found = list(compiled(args))
            if check is not None:
                check(found)
            results, found = dict(zip(self.results, found[len(found) - count :])), found[: len(found) - count]
            gradients = {name: found[n] for name, n in self.places.items() if found[n] is not None}
            for name, gradient in self.step._deliver(results, gradients).items():
                found[self.places[name]] = gradient
            return found

        return compiler.boxed(call)

    def _compiled(self, graph: fx.GraphModule, inputs: Sequence[Any], is_backward: bool) -> Callable[[list[Any]], Any]:
        if self.step._compiles:
            compiled: Callable[[list[Any]], Any] = compiler.compile_fx_inner(graph, inputs, is_backward=is_backward)
            return compiled

        for node in graph.graph.nodes:  # whose tensors may have other strides than those that were traced
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
        graph.recompile()

        def run(args: list[Any]) -> Any:
            given = list(args)
            args.clear()  # lets the graph free tensors that it no longer needs
            return graph.forward(*given)

        return run
