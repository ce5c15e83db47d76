"""Private names of torch's compiler, each with the releases that it was seen in: where one is gone, its test says so."""

import ast
import pkgutil
from pathlib import Path

import pytest
import torch

from autograd_hacks.compiled import torch_names

DESCRIPTORS = "torch._functorch._aot_autograd.descriptors"
SEEN = {
    "2.11 2.12 2.13 2.14": f"""torch._dynamo torch._dynamo.backends.common.aot_autograd
        torch._dynamo.exc.BackendCompilerFailed
        torch._dynamo.exc.TorchDynamoException torch._dynamo.exc.FailOnRecompileLimitHit torch._dynamo.config.allow_rnn
        torch._dynamo.config.recompile_limit torch._dynamo.config.accumulated_recompile_limit
        torch._decomp.core_aten_decompositions torch._functorch.partitioners.min_cut_rematerialization_partition
        torch._guards.detect_fake_mode torch._inductor.compile_fx.compile_fx_inner
        torch._inductor.decomposition.select_decomp_table torch._inductor.fx_passes.joint_graph.early_patterns
        torch._inductor.fx_passes.post_grad.remove_noop_ops torch._inductor.virtualized.V
        torch._inductor.fx_passes.replace_random.replace_random_passes torch.fx.experimental.proxy_tensor.make_fx
        torch._C._set_mkldnn_enabled torch._C._get_mkldnn_enabled torch.nn.Module._call_impl
        torch.nn.Module._compiled_call_impl {DESCRIPTORS} {DESCRIPTORS}.TangentAOTInput {DESCRIPTORS}.PlainAOTInput
        {DESCRIPTORS}.ParamAOTInput {DESCRIPTORS}.BufferAOTInput {DESCRIPTORS}.PlainAOTOutput {DESCRIPTORS}.GradAOTOutput
        {DESCRIPTORS}.InputMutationAOTOutput""",
}
"""{releases: names}.  2.13 and 2.14 ran all tests of compiled steps; of 2.11 and 2.12 the sources were read."""
RELEASES = {name: releases for releases, names in SEEN.items() for name in names.split()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RELEASES)
def test_the_installed_torch_has(name: str) -> None:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"torch {torch.__version__} lacks {name}, which was seen in {RELEASES[name]}: {error}")


def test_each_private_name_is_listed() -> None:
    nodes = [*ast.walk(ast.parse(Path(torch_names.__file__).read_text()))]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch.")]
    imported = {f"{node.module}.{own.name}" for node in froms for own in node.names}
    kinds = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    kinds = {f"{DESCRIPTORS}.{kind.partition('.')[2]}" for kind in kinds if kind.startswith("descriptors.")}
    assert imported | kinds <= RELEASES.keys()
