"""The names of torch's compiler that aren't public, in one place.  Seen in torch 2.13."""

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
        simplefilter("ignore", DeprecationWarning)  # of torch.jit, which inductor imports
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
        f"autograd_hacks.compile needs parts of the compiler that torch {torch.__version__} has not, or has under other "
        f"names ({error}); they were seen in torch 2.13. Use add_hooks(model) instead." + ON_COMPILING
    ) from error

MOST = 256
"""So often a step may be compiled anew: for other sizes, kinds of arguments, and parameters that train."""
KEPT_WHOLE = (
    "aten._scaled_dot_product_flash_attention_for_cpu", "aten.embedding_dense_backward", "aten.reflection_pad",
)  # fmt: skip
"""Operations that aren't decomposed.  Attention's forward becomes one whose logsumexp its backward can't use; the others
become indices among which samples are hard to find."""


def decompositions(table: Callable[[], Any] = core_aten_decompositions) -> dict[Any, Any]:
    return {op: made_of for op, made_of in dict(table()).items() if not str(op).startswith(KEPT_WHOLE)} | DECOMPOSED


def lowered() -> dict[Any, Any]:
    """Inductor's own decompositions, for a graph that it compiles."""
    return {op: made_of for op, made_of in dict(select_decomp_table()).items() if not str(op).startswith(KEPT_WHOLE[0])}


def compiling(options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Contexts in which recurrent layers are traced, step by step, and inductor has other options; for each call again."""
    limits: dict[str, Any] = {"recompile_limit": MOST, "accumulated_recompile_limit": MOST}
    return dynamo.config.patch(allow_rnn=True, **limits), inductor.config.patch(dict(options))


@contextmanager
def _said_to_compile() -> Iterator[None]:
    """A context in which libraries that ask whether they are being compiled leave out what looks at values."""
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
    """Takes away what hands its tensor on as it is: views of the same shape, axes put in another order and back."""
    remove_noop_ops(graph)
    early_patterns.apply(graph)


def with_random_numbers_of_inductor(traced: fx.GraphModule) -> fx.GraphModule:
    """The graph with inductor's own operations in the place of torch's random ones, which it doesn't compile."""
    with V.set_fake_mode(detect_fake_mode([node.meta.get("val") for node in traced.graph.find_nodes(op="placeholder")])):
        replace_random_passes(traced)
    return traced


CALL = "_compiled_call_impl"
"""What a module's call runs in the place of its forward, if there is such a thing."""


def plain_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


@contextmanager
def recurrent_layers_unrolled() -> Iterator[None]:
    """A context in which recurrent layers become the operations that they are made of.

    For models that have some: without mkldnn convolutions are taken to lay their outputs out in another way than they do.
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
