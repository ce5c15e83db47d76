"""One property of all rules: what is accepted has the rows of samples run alone, and what mixes is refused by analysis."""

import ast
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import one_loss_at_a_time
from rarely import rarely
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.compiled import torch_names
from autograd_hacks.compiled.labels import RULES
from autograd_hacks.errors import SamplesMixed, UnsupportedOperation

N = 6
"""Samples, positions and features: no size tells an axis."""

Inner = Callable[[Any, Tensor], Tensor]


pytestmark = [pytest.mark.usefixtures("compiled_anew"), pytest.mark.filterwarnings("ignore")]  # of torch's compiler


def around(inner: Inner) -> nn.Module:
    """A function between two layers.  x: N T D -> N"""
    conv, table = nn.Conv1d(N, N, 3, padding=1), nn.Embedding(N, N)
    layers = {"first": nn.Linear(N, N), "last": nn.Linear(N, N), "conv": conv, "table": table}
    return Bare(lambda m, x: ended(m, inner(m, m.first(x))).sum(1), **layers, bare=torch.randn(N)).double()


def ended(model: Any, y: Tensor) -> Tensor:
    """N *S"""
    y = model.last(y) if y.shape[-1] == N else y
    return y.reshape(N, -1).tanh()


def plain(function: Callable[[Tensor], Tensor]) -> Inner:
    return lambda _, h: function(h)


def with_negatives_overwritten(h: Tensor) -> Tensor:
    h = h.clone()
    h[h < 0] = 0.5
    h[h.detach().sum(2) > 0] = 0.1
    return h


def with_first_overwritten(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, 0] = 1.0
    return h


RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "mean over positions": lambda h: h - h.mean(1, keepdim=True),
    "transposed and back": lambda h: h.transpose(0, 1).contiguous().tanh().permute(1, 0, 2),
    "folded with positions": lambda h: h.reshape(N * N, N).sigmoid().view(N, N, N),
    "folded time first": lambda h: h.transpose(0, 1).reshape(N * N, N).sigmoid().view(N, N, N).transpose(0, 1),
    "softmax": lambda h: h.softmax(1),
    "the largest": lambda h: h.topk(2, 1).values,
    "the second smallest": lambda h: h.kthvalue(2).values + h.kthvalue(2, 1, True).values[:, 0],
    "deviation": lambda h: h.var(1) + h.std(1),
    "rolled positions": lambda h: h + h.roll(1, 1),
    "flipped": lambda h: h + h.flip(2),
    "padded": lambda h: F.pad(h, (1, 2))[..., 1:-2],
    "sliced": lambda h: h[:, 1:4],
    "selected": lambda h: h[:, 2] + h[:, -1],
    "concatenated": lambda h: torch.cat([h, 2 * h], 1),
    "beside constants": lambda h: torch.cat([h, torch.ones_like(h)], 1),
    "written into parts": lambda h: h.slice_scatter(2 * h[:, 1:3], 1, 0, 2).select_scatter(h[:, 0], 2, 1),
    "stacked": lambda h: torch.stack([h, h.tanh()], 0).sum(0),
    "two views behind each other": lambda h: (lambda a, b: a * b)(*torch.cat([h, 2 * h]).tanh().chunk(2)),
    "split": lambda h: (lambda a, b, c: a * b + c)(*h.split(2, 1)),
    "unbound": lambda h: torch.stack([part.tanh() for part in h.unbind(1)], 1),
    "repeated": lambda h: h.repeat(1, 2, 1),
    "expanded": lambda h: h.unsqueeze(2).expand(N, N, 2, N).tanh().sum(2),
    "written": with_first_overwritten,
    "written by masks": with_negatives_overwritten,
    "by sample and index": lambda h: h[torch.arange(N), (h[..., 0] > 0).sum(1).clamp(max=N - 1)],
    "gathered": lambda h: h.gather(1, h.argsort(1)),
    "scattered": lambda h: torch.zeros_like(h).scatter(1, h.argsort(1), h),
    "products of positions": lambda h: torch.bmm(h, h.mT).softmax(-1) @ h,
    "attention": lambda h: F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0],
    "layer norm": lambda h: F.layer_norm(h, (N,)),
    "group norm": lambda h: F.group_norm(h, 2),
    "max pooling": lambda h: F.max_pool2d(h[:, None], 2).flatten(1),
    "upsampled": lambda h: F.interpolate(h[:, None], scale_factor=2, mode="bilinear").flatten(1),
    "unfolded": lambda h: h.unfold(1, 3, 1).mean(-1),
    "Fourier": lambda h: torch.fft.rfft(h, dim=1).abs(),
    "complex": lambda h: torch.view_as_real(torch.complex(h, h.tanh()) * torch.complex(h.cos(), h)).sum(-1),
    "the sample's own number": lambda h: h * (1 + torch.arange(N)).view(N, 1, 1),
    "a table of positions": lambda h: h + torch.linspace(0, 1, N)[:, None],
    "instance norm": lambda h: F.instance_norm(h),
    "sampled on a grid": lambda h: F.grid_sample(h[:, None], h[..., :2, None].tanh().transpose(2, 3)).flatten(1),
    "distances": lambda h: torch.cdist(h, h.flip(1) + 1),
    "singular values": lambda h: torch.linalg.svdvals(h),
    "dropout that keeps all": lambda h: F.dropout(h, 0.0, training=True),
}  # fmt: skip
MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "detached mean": lambda h: h - h.mean(0).detach(),
    "a millionth of the mean": lambda h: h - 1e-6 * h.mean(0),
    "cumulated": lambda h: h.cumsum(0),
    "sorted": lambda h: h.sort(0).values,
    "rolled": lambda h: h + h.roll(1, 0),
    "rolled as one": lambda h: h + h.roll(1),
    "flipped": lambda h: h + h.flip(0),
    "permuted": lambda h: h[torch.tensor([5, 4, 3, 2, 1, 0])],
    "the first": lambda h: h + h[:1],
    "half": lambda h: torch.cat([h[3:], h[:3]]),
    "padded": lambda h: F.pad(h, (0, 0, 0, 0, 1, 0))[:-1] + h,
    "exchanged axes": lambda h: h.transpose(0, 1) + h,
    "products of samples": lambda h: (h[:, 0] @ h[:, 0].T).softmax(-1)[:, None] * h,
    "batched over positions": lambda h: torch.bmm(h.transpose(0, 1), h.permute(1, 2, 0)).permute(1, 0, 2) + h,
    "convolved": lambda h: F.conv1d(h.permute(1, 2, 0), torch.ones(N, N, 3).double(), padding=1).permute(2, 0, 1),
    "singular values": lambda h: torch.linalg.svdvals(h.transpose(0, 1)).sum() * h,
    "reflected": lambda h: F.pad(h.permute(1, 2, 0), (1, 0), mode="reflect")[..., 1:].permute(2, 0, 1) + h,
    "a layer norm's weight": lambda h: F.layer_norm(h, (N,), h[:, 0, 0]),
    "a group norm's weight": lambda h: F.group_norm(h, 2, h[:, 0, 0]),
    "a batch norm's statistics": lambda h: F.batch_norm(h, h[:, 0, 0].detach(), h[:, 0, 1].detach().square() + 1),
    "attention's mask": lambda h: F.scaled_dot_product_attention(*[h[:, None]] * 3, attn_mask=h[:, :, 0] > 0)[:, 0],
    "distances to all": lambda h: torch.cdist(h, h[:, None].expand(N, N, N, N)).sum(1),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
    "group norm of one": lambda h: F.group_norm(h.transpose(0, 1), 1).transpose(0, 1),
    "looked up": lambda h: h[h[:, 0, 0].argsort()],
    "gathered": lambda h: h.gather(0, h.argsort(0)),
    "unfolded": lambda h: h.unfold(0, 3, 1).mean(-1).sum(0, keepdim=True) + h,
    "chosen by a mask": lambda h: h * h[h > 0].mean(),
    "Fourier over all": lambda h: torch.fft.fftn(h).abs(),
    # As many rows of padding as samples fit this batch, and no other.
    "beside constants": lambda h: torch.cat([h, torch.ones_like(h)])[:N],
    "behind padding": lambda h: F.pad(h, (0, 0, 0, 0, N, 0))[N:],
    "written into parts": lambda h: torch.zeros(2 * N, N, N).double().slice_scatter(h, 0, 0, N)[:N],
    "reinterpreted": lambda h: h.reshape(N // 2, 2, N, N).mean(1).repeat(2, 1, 1),
}  # fmt: skip


def rows_alone(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Each sample by a run of its own; the batch's other samples are copies of it, since the sizes are fixed."""
    found = []
    for n in range(N):
        losses = model(x[n : n + 1].expand_as(x).clone() if n else torch.cat([x[:1]] * N))
        found.append(torch.autograd.grad(losses[n], list(model.parameters()), allow_unused=True, materialize_grads=True))
    return {name: torch.stack(rows) for (name, _), rows in zip(model.named_parameters(), zip(*found))}


def all_of_them(model: Any, h: Tensor) -> Tensor:
    """What is made of what each function returns, added up.  N 1"""
    return sum(ended(model, function(h)).sum(1, keepdim=True) for function in RIGHT.values())


def test_rows_are_those_of_samples_run_alone() -> None:
    """Of all functions in one graph, which is compiled as fast as few: each adds its own part to each row."""
    model, x = around(all_of_them), torch.randn(N, N, N).double()
    step = autograd_hacks.compile(model, "rows", backend=None, loss_type="sum")
    step(x).sum().backward()
    for key, rows in rows_alone(model, x).items():
        p = model.get_parameter(key)
        assert_close(torch.zeros_like(rows) if p.grad1 is None else p.grad1, rows)
        assert_close(torch.zeros_like(rows[0]) if p.grad is None else p.grad, rows.sum(0))


OFTEN = "a millionth of the mean", "detached mean", "sorted", "permuted", "products of samples", "batch norm", "looked up"


@pytest.mark.parametrize("name", [*OFTEN, *rarely(*(name for name in MIXED if name not in OFTEN))])
def test_samples_that_mix_are_refused_before_anything_runs(name: str) -> None:
    model, x = around(plain(MIXED[name])), torch.randn(N, N, N).double()
    with pytest.raises((SamplesMixed, UnsupportedOperation)) as error:
        autograd_hacks.compile(model, "rows", backend=None, loss_type="sum")(x)
    assert "test_operations.py" in str(error.value) or "functional.py" in str(error.value)  # the line is named


def bags(model: Any, h: Tensor) -> Tensor:
    tokens = (h.detach()[..., 0] * 3).long().abs() % N
    weights, table = h.detach()[..., 1].tanh(), model.table.weight
    found = F.embedding_bag(tokens, table, mode="mean", padding_idx=2) + F.embedding_bag(tokens, table, mode="sum")
    return h * (found + F.embedding_bag(tokens, table, mode="sum", per_sample_weights=weights))[:, None]


def bilinear(model: Any, h: Tensor) -> Tensor:
    return F.bilinear(h, h.tanh(), model.conv.weight.mT.reshape(3 * N, N, 1).expand(3 * N, N, N), None)[..., :N]


def parameters_alone(model: Any, h: Tensor) -> Tensor:
    table, square = model.table.weight, model.conv.weight[..., 1]
    return (
        F.scaled_dot_product_attention(table[None, None], square[None, None], table[None, None])[0, 0]
        * torch.linalg.slogdet(square)[1]
        + torch.linalg.solve_ex(square, table)[0]
        + torch.linalg.qr(square)[0] * table.sort(0).values * square.max(0).values
        + torch.fft.irfft(torch.fft.rfft(h) * torch.fft.rfft(model.bare), n=N)
    )


def uses(model: Any, h: Tensor) -> Tensor:
    tokens = (h.detach()[..., 0] * 3).long().abs() % N
    y = h * model.bare + model.table(tokens) + model.table(torch.arange(N))[:, None]
    y = model.conv(y) + y.index_add(1, torch.tensor([0, 0, 1]), model.bare.expand(N, 3, N))
    y = y + F.scaled_dot_product_attention(h[:, None], h[:, None], model.last(h)[:, None])[:, 0]
    return y + F.linear(y, model.table.weight) + model.bare


@pytest.mark.parametrize("inner", [uses, bags, bilinear, parameters_alone])
def test_uses_of_parameters(inner: Inner) -> None:
    model, x = around(inner), torch.randn(N, N, N).double()
    step = autograd_hacks.compile(model, "rows", backend=None, loss_type="sum")
    step(x).sum().backward()
    for name, rows in one_loss_at_a_time(model, lambda: model(x)).items():
        assert_close(model.get_parameter(name).grad1, rows)


def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = around(plain(MIXED["cumulated"]))
    monkeypatch.setitem(RULES, "cumsum", lambda labels, node, x, dim: labels[x])
    step = autograd_hacks.compile(model, "rows", backend=None, loss_type="sum")
    with pytest.raises((autograd_hacks.errors.VerificationFailed, SamplesMixed)):
        step(torch.randn(N, N, N).double()).sum().backward()


# Private names of torch's compiler, each with the releases that it was seen in: where one is gone, its test says so


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
        {DESCRIPTORS}.InputMutationAOTOutput"""
}
"""{releases: names}.  2.13 and 2.14 ran all tests of compiled steps; of 2.11 and 2.12 the sources were read."""
RELEASES = {name: releases for releases, names in SEEN.items() for name in names.split()}


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
