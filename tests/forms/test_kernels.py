"""The package's kernels, on a GPU or in Triton's interpreter: what they return is what torch's make of the same factors."""

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from oracle import one_backward_per_sample
from rarely import crossed
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.forms import Form, Lookup, Outer, cost, scale
from autograd_hacks.forms.terms import of_experts

pytest.importorskip("triton")

SIZES = [(3, 5, 70, 9), (1, 33, 64, 65), (4, 1, 3, 130), (2, 40, 1, 1)]
"""N T O I: parts of tiles, whole ones, several across."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Kernels that Triton compiled can't take the CPU's tensors: without a GPU, conftest.py has them interpreted."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Makes tensors on `DEVICE`, has kernels cost nothing there, and fails a test that took none."""
    cpu = torch.device("cpu")
    free = replace(cost.costs_of(cpu), fused=0.0)
    monkeypatch.setattr(cost, "costs_of", lambda device: free)
    taken: list[str] = []
    takes = cost.takes_kernel

    def noting(*given: object) -> bool:
        is_taken = takes(*given)
        taken.extend(["taken"] if is_taken else [])
        return is_taken

    for name in ("outer", "lookup"):
        monkeypatch.setattr(f"autograd_hacks.forms.{name}.takes_kernel", noting)
    monkeypatch.setattr("autograd_hacks.formulas.norms.takes_kernel", noting)
    with torch.device(DEVICE):
        yield taken
    assert taken


def written(form: Form) -> Tensor:
    """Its rows in double precision, from factors in double precision."""
    return form.to(torch.float64).dense().flatten(1)


def outer(n: int, t: int, o: int, i: int, dtype: torch.dtype = torch.float32) -> Outer:
    torch.manual_seed(n + t)
    return Outer(torch.randn(n, t, o).to(dtype), torch.randn(n, t, i).to(dtype))


@crossed(sizes=SIZES[:2], dtype=DTYPES)
def test_norms_of_outer_products(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    form = outer(*sizes, dtype)
    assert_close(form.norms().double(), written(form).norm(dim=1), rtol=1e-5, atol=0)


def test_norms_of_positions_that_cancel() -> None:
    left, right = torch.randn(2, 1, 20).expand(-1, 8, -1), torch.randn(2, 1, 30) + 1e-3 * torch.randn(2, 8, 30)
    form = Outer(left * (1 - 2 * (torch.arange(8)[:, None] % 2)), right)
    assert_close(form.norms().double(), written(form).norm(dim=1), rtol=1e-4, atol=0)


def test_norms_whose_squares_leave_the_range_and_norms_of_no_number() -> None:
    form = Outer(1e15 * torch.ones(3, 2, 8), torch.tensor([1e15, 1e-37, torch.nan]).view(3, 1, 1) * torch.ones(3, 2, 8))
    found = form.norms()
    assert_close(found[:2], torch.tensor([16e30, 16e-22]), rtol=1e-5, atol=0)
    assert found[2].isnan()


@crossed(sizes=SIZES, dtype=DTYPES)
def test_sum_and_dot(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    form, rows = outer(*sizes, dtype), written(outer(*sizes, dtype))
    v, w = torch.randn(form.shape), torch.rand(form.samples)
    for factor in (1.0, 3.0):
        total, along = scale(form, factor).sum_and_dot(w, v)
        assert_close(total.double(), factor * (w.double() @ rows).view(form.shape), rtol=1e-5, atol=1e-4)
        assert_close(along.double(), factor * rows @ v.double().flatten(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_entries_that_are_read_several_times(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    form = Lookup(torch.randint(4, (5, 9)), torch.randn(5, 9, 33).to(dtype), 6)
    assert_close(form.norms().double(), written(form).norm(dim=1), rtol=1e-5, atol=0)
    large = Lookup(form.index, torch.full((5, 9, 33), 1e30), 6)
    assert_close(large.norms().double(), written(large).norm(dim=1), rtol=1e-5, atol=0)


def test_norms_of_experts() -> None:
    torch.manual_seed(0)
    ends, owners = torch.tensor([7, 7, 12, 20]), torch.randint(3, (20,))
    form = of_experts(torch.randn(20, 9), torch.randn(20, 70), ends, owners, 3)
    assert_close(form.norms().double(), written(form).norm(dim=1), rtol=1e-5, atol=0)


@crossed(layer=[nn.LayerNorm(33), nn.LayerNorm((3, 11), bias=False), nn.RMSNorm(33, eps=1e-2)], dtype=DTYPES)
def test_rows_of_normalisations(layer: nn.Module, dtype: torch.dtype) -> None:
    """Against one backward pass for each sample, in double precision."""
    torch.manual_seed(0)
    layer = copy.deepcopy(layer).to(DEVICE, dtype)
    x, g = torch.randn(2, 4, 5, *layer.normalized_shape).to(dtype)
    double = copy.deepcopy(layer).double()
    autograd_hacks.add_hooks(layer, probe=False)
    layer(x).backward(g)
    autograd_hacks.compute_grad1(layer, loss_type="sum")
    for n in range(4):
        expected = torch.autograd.grad(double(x[n].double()), [*double.parameters()], g[n].double())
        for p, own in zip(layer.parameters(), expected):
            assert_close(p.grad1[n].double(), own, rtol=0, atol=4 * torch.finfo(dtype).eps * own.abs().max().item())


def test_during_backward_takes_sum_and_dot_in_one_pass() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.Linear(70, 3)), torch.randn(6, 4, 5)
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    w = torch.rand(6)
    rows = one_backward_per_sample(model, torch.square, x)
    autograd_hacks.add_hooks(model)
    for _ in range(2):
        losses = model(x).square().sum((1, 2))
        with autograd_hacks.during_backward(model, dot=v, weights=w, loss_type="sum") as found:
            losses.sum().backward()
        along = sum((rows[name] * own).flatten(1).sum(1) for name, own in v.items())
        assert_close(found.dot, along, rtol=1e-4, atol=1e-4)
        for name, p in model.named_parameters():
            assert_close(p.grad, torch.tensordot(w, rows[name], 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["double", "leads back", "tracer's"])
def test_what_kernels_do_not_take(kind: str, kernels: list[str]) -> None:
    form = outer(2, 3, 4, 5)
    if kind == "double":
        form = form.to(torch.float64)
    elif kind == "leads back":
        form = Outer(form.left.requires_grad_(), form.right)
    else:
        with torch._subclasses.FakeTensorMode() as mode:
            form = Outer(mode.from_tensor(form.left), mode.from_tensor(form.right))
            assert form.norms().shape == (2,)
    if kind != "tracer's":
        assert_close(form.norms(), form.dense().flatten(1).norm(dim=1))
    assert not kernels
    kernels.append("none, as expected")


COMPILES = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from autograd_hacks.kernels import tiles

def compiled(kernel, constants, *types):
    names = kernel.arg_names
    constants |= {name: None for name, kind in zip(names, types) if kind is None}
    signature = {name: "constexpr" if name in constants else kind for name, kind in zip(names, [*types, *[""] * 9])}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32)).asm["cubin"]

sizes = ["i32"] * 5
for kind in ("*fp32", "*bf16"):
    blocks = dict(exact=kind == "*fp32", WIDEN=False, BLOCK=tiles.BLOCK, POSITIONS=32)
    assert compiled(tiles._tiles, dict(blocks), kind, kind, "*i64", None, None, "*fp32", None, None, *sizes)
    some = kind, kind, "*i64", "*fp32", "*fp32", None, "*fp32", "*fp32"
    assert compiled(tiles._tiles, dict(blocks), *some, *sizes)
    for is_rms in (False, True):
        block = dict(IS_RMS=is_rms, BLOCK=1024)
        assert compiled(tiles._affine, block, kind, kind, "*fp32", "*fp32", "i32", "i32", "fp32", "i32")
    assert compiled(tiles._norms, dict(BLOCK=1024), "*i64", "*i64", "*i64", kind, "*fp32", "i32")
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_cards(capability: int, kernels: list[str], tmp_path: Path) -> None:
    """Which the interpreter doesn't show: it knows neither types nor shared memory.  The compiler needs no card."""
    kernels.append("none: they are compiled")
    own = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILES, str(capability)], env=own, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
