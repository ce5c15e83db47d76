"""All private names of torch's compiler that the package uses.  Run with torch 2.13 and 2.14; 2.11 and 2.12 have them, too.

`support/internals.py` has those that the package needs without a compiler, and the releases that these were seen in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

import torch
import torch.nn as nn
from torch import Tensor, fx

from autograd_hacks.errors import ON_COMPILING
from autograd_hacks.support.restored import restored

try:
    with catch_warnings():
        simplefilter("ignore", DeprecationWarning)  # inductor imports torch.jit
        import torch._dynamo as dynamo
        from torch._decomp import core_aten_decompositions
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
        from torch._dynamo.exc import FailOnRecompileLimitHit as RecompileLimit
        from torch._functorch._aot_autograd import descriptors
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._guards import detect_fake_mode
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.fx_passes.joint_graph import early_patterns
        from torch._inductor.fx_passes.post_grad import remove_noop_ops
        from torch._inductor.fx_passes.replace_random import replace_random_passes
        from torch._inductor.virtualized import V
        from torch.fx.experimental.proxy_tensor import make_fx
except ImportError as error:
    raise ImportError(
        f"autograd_hacks.compile needs parts of torch's compiler that torch {torch.__version__} lacks or has renamed "
        f"({error}). It was tested with torch 2.13 and 2.14. Use add_hooks(model) instead." + ON_COMPILING
    ) from error

_aten: Any = torch.ops.aten
MOST = 256
"""The largest number of recompilations of a step, for other sizes, kinds of arguments or trainable parameters."""
MOST_FIXED = 16
"""The same if each is for fixed sizes."""
KEPT_WHOLE = (
    "aten._scaled_dot_product_flash_attention_for_cpu", "aten.embedding_dense_backward", "aten.reflection_pad",
)  # fmt: skip
"""Operations that aren't decomposed.  Attention's forward would become an operation whose logsumexp its backward can't use;
the others would become indices, in which samples are hard to find."""


def decompositions() -> dict[Any, Any]:
    """Decompositions of operations into pointwise ones, or a product and a sum, before labelling."""
    own = {op: made_of for op, made_of in dict(core_aten_decompositions()).items() if not str(op).startswith(KEPT_WHOLE)}
    return own | {_aten.index_put.default: _masked_put, _aten._trilinear.default: _trilinear}


def _masked_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """x[mask] = a value that is the same wherever the mask is true, as an operation entry by entry."""
    mask = indices[0]
    if len(indices) > 1 or mask is None or mask.dtype != torch.bool or accumulate:
        return NotImplemented
    rest = x.ndim - mask.ndim
    if values.ndim > rest and any(s != 1 for s in values.shape[: values.ndim - rest]):
        return NotImplemented
    own = values.reshape(values.shape[max(0, values.ndim - rest) :])
    return torch.where(mask.view(*mask.shape, *[1] * rest), own.to(x.dtype), x)


def _trilinear(a: Tensor, b: Tensor, c: Tensor, *given: Any, unroll_dim: int = 1) -> Tensor:
    """The operation of Bilinear: the sum of a product of three tensors with new axes.

    given: the new axes of each tensor, the axes of the sum, and how torch computes it
    """
    product: Any = 1
    for x, axes in zip((a, b, c), given):
        for axis in axes:
            x = x.unsqueeze(axis)
        product = product * x
    return product.sum(given[3]) if given[3] else product


def lowered() -> dict[Any, Any]:
    """Inductor's own decompositions, for a graph that it compiles."""
    return {op: made_of for op, made_of in dict(select_decomp_table()).items() if not str(op).startswith(KEPT_WHOLE[0])}


def compiling(most: int) -> Any:
    """A context for calls: recurrent layers are traced step by step, and a step may be compiled ``most`` times."""
    limits: dict[str, Any] = {"recompile_limit": most, "accumulated_recompile_limit": MOST}
    return dynamo.config.patch(allow_rnn=True, **limits)


class Ends(NamedTuple):
    """The placeholders and outputs of a joint graph."""

    inputs: dict[fx.Node, int]  # {placeholder: its number among the arguments}
    others: dict[fx.Node, str]  # placeholders that are no arguments, parameters, buffers or gradients: what torch calls them
    tangents: dict[fx.Node, fx.Node]  # {placeholder of an output's gradient: the output}
    outputs: dict[int, fx.Node]  # {number among the forward's outputs: node}
    gradients: dict[int, tuple[Any, fx.Node]]  # {place among all outputs: argument or parameter, and its gradient}
    written: dict[Any, fx.Node]  # {argument or buffer: its new value}


def ends_of(graph: fx.Graph) -> Ends:
    """A graph's placeholders and outputs, by their kinds.  Arguments have numbers; parameters and buffers have names."""
    ends, last = Ends({}, {}, {}, {}, {}, {}), graph.output_node()
    for place, (node, kind) in enumerate(zip(last.args[0], last.meta["desc"])):  # type: ignore[arg-type]
        if isinstance(node, fx.Node) and isinstance(kind, descriptors.PlainAOTOutput):
            ends.outputs[kind.idx] = node
        elif isinstance(node, fx.Node) and isinstance(kind, descriptors.GradAOTOutput):
            ends.gradients[place] = _name_of(kind.grad_of), node
        elif isinstance(node, fx.Node) and isinstance(kind, descriptors.InputMutationAOTOutput):
            ends.written[_name_of(kind.mutated_input)] = node
    for node in graph.find_nodes(op="placeholder"):
        kind = node.meta["desc"]
        if isinstance(kind, descriptors.TangentAOTInput):
            ends.tangents[node] = ends.outputs[getattr(kind.output, "idx", 0)]
        elif isinstance(kind, descriptors.PlainAOTInput):
            ends.inputs[node] = kind.idx
        elif not isinstance(kind, descriptors.ParamAOTInput | descriptors.BufferAOTInput):
            ends.others[node] = str(kind)
    return ends


def _name_of(kind: Any) -> Any:
    """The number of an argument, or the name of a parameter or buffer."""
    return kind.idx if isinstance(kind, descriptors.PlainAOTInput) else getattr(kind, "target", str(kind))


def describe_more(graph: fx.Graph, kinds: Sequence[Any]) -> None:
    """Sets the kinds of a graph's outputs.  Those beyond ``kinds`` are further outputs of the forward."""
    last = graph.output_node()
    more = range(len(last.args[0]) - len(kinds))  # type: ignore[arg-type]
    last.meta["desc"] = [*kinds, *(descriptors.PlainAOTOutput(idx=10**6 + n) for n in more)]


def is_symbolic(x: Any) -> bool:
    """Whether an input of a graph is a size that is a symbol, or has one."""
    return isinstance(x, torch.SymInt) or (isinstance(x, Tensor) and any(isinstance(s, torch.SymInt) for s in x.shape))


def lost(graph: fx.Graph, examples: Sequence[Any]) -> list[str]:
    """The inputs that torch.compile (2.13) takes for Python numbers, so that it drops the operations that write to them."""
    given = dict(zip(graph.find_nodes(op="placeholder"), examples))
    return [
        source_of(node.args[0])
        for node in graph.nodes
        if node.op == "call_method" and node.target[-1] == "_" != node.target[-2]
        if isinstance(x := given.get(node.args[0]), Tensor) and not x.ndim and x.dtype == torch.float64
    ]


def source_of(node: fx.Node) -> str:
    """The Python expression for an input of a graph, for messages."""
    return str(getattr(getattr(node, "_dynamo_source", None), "name", node.name))


def boxed(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Marks a function that takes its arguments as a list, and empties it."""
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def without_idle_views(graph: fx.Graph) -> None:
    """Removes operations without effect: views of the same shape, and permutations that cancel."""
    remove_noop_ops(graph)
    early_patterns.apply(graph)


def with_random_numbers_of_inductor(traced: fx.GraphModule) -> fx.GraphModule:
    """The graph with torch's random operations, which inductor doesn't compile, replaced by inductor's own."""
    with V.set_fake_mode(detect_fake_mode([node.meta.get("val") for node in traced.graph.find_nodes(op="placeholder")])):
        replace_random_passes(traced)
    return traced


CALL = "_compiled_call_impl"
"""The attribute of a module that its call runs instead of its forward, if it is set."""
plain_call: Callable[..., Any] = nn.Module._call_impl


@contextmanager
def recurrent_layers_unrolled() -> Iterator[None]:
    """A context in which recurrent layers are traced as their basic operations.

    Use it only for models with such layers: without mkldnn, tracing assumes a wrong memory layout of convolutions' outputs.
    """
    with restored(partial(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())):
        torch._C._set_mkldnn_enabled(False)
        yield


__all__ = [
    "CALL", "BackendCompilerFailed", "RecompileLimit", "TorchDynamoException", "aot_autograd", "compile_fx_inner", "make_fx",
    "min_cut_rematerialization_partition",
]  # fmt: skip
