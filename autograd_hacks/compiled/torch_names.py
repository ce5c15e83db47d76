"""All uses of private names of torch's compiler.  Tested with torch 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
import torch.nn as nn
from torch import Tensor, fx

from autograd_hacks.compiled.decomposed import DECOMPOSED
from autograd_hacks.errors import ON_COMPILING

try:
    with catch_warnings():
        simplefilter("ignore", DeprecationWarning)  # inductor imports torch.jit
        import torch._dynamo as dynamo
        import torch._inductor as inductor
        from torch._decomp import core_aten_decompositions
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
        from torch._functorch._aot_autograd.descriptors import (
            GradAOTOutput,
            InputMutationAOTOutput,
            ParamAOTInput,
            PlainAOTInput,
            PlainAOTOutput,
            TangentAOTInput,
        )
        from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
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
        f"({error}). It was tested with torch 2.13. Use add_hooks(model) instead." + ON_COMPILING
    ) from error

MOST = 256
"""The largest number of recompilations of a step, for other sizes, kinds of arguments or trainable parameters."""
KEPT_WHOLE = (
    "aten._scaled_dot_product_flash_attention_for_cpu", "aten.embedding_dense_backward", "aten.reflection_pad",
)  # fmt: skip
"""Operations that aren't decomposed.  Attention's forward would become an operation whose logsumexp its backward can't use;
the others would become indices, in which samples are hard to find."""


def decompositions(table: Callable[[], Any] = core_aten_decompositions) -> dict[Any, Any]:
    return {op: made_of for op, made_of in dict(table()).items() if not str(op).startswith(KEPT_WHOLE)} | DECOMPOSED


def lowered() -> dict[Any, Any]:
    """Inductor's own decompositions, for a graph that it compiles."""
    return {op: made_of for op, made_of in dict(select_decomp_table()).items() if not str(op).startswith(KEPT_WHOLE[0])}


def compiling(options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Contexts for a call: recurrent layers are traced step by step, and inductor has the given options."""
    limits: dict[str, Any] = {"recompile_limit": MOST, "accumulated_recompile_limit": MOST}
    return dynamo.config.patch(allow_rnn=True, **limits), inductor.config.patch(dict(options))


@contextmanager
def _said_to_compile() -> Iterator[None]:
    """A context in which libraries see that they are being compiled, and skip code that depends on values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def joint_graph(
    stack: ExitStack, module: nn.Module, args: Sequence[Tensor], decompositions: Mapping[Any, Any]
) -> fx.GraphModule:
    """The graph of a module's forward and backward, traced without values."""
    stack.enter_context(_said_to_compile())
    found = aot_export_joint_with_descriptors(stack, module, tuple(args), decompositions=dict(decompositions))
    traced: fx.GraphModule = found.graph_module
    traced.graph.eliminate_dead_code()
    return traced


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


def plain_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


@contextmanager
def recurrent_layers_unrolled() -> Iterator[None]:
    """A context in which recurrent layers are traced as their basic operations.

    Use it only for models with such layers: without mkldnn, tracing assumes a wrong memory layout of convolutions' outputs.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


__all__ = [
    "CALL", "BackendCompilerFailed", "GradAOTOutput", "InputMutationAOTOutput", "ParamAOTInput", "PlainAOTInput",
    "PlainAOTOutput", "TangentAOTInput", "TorchDynamoException", "aot_autograd", "compiling", "compile_fx_inner",
    "decompositions", "joint_graph", "lowered", "make_fx", "min_cut_rematerialization_partition", "plain_call",
    "recurrent_layers_unrolled", "with_random_numbers_of_inductor", "without_idle_views",
]  # fmt: skip
