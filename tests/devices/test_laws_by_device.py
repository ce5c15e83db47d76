"""The laws of models on each device: sums of rows, permuted samples, a program that isn't touched; positions that cancel in
single precision; random bits; and warnings of torch's, which fail no test on a GPU."""

import subprocess
import sys

import pytest
import torch
import torch.nn as nn
from by_device import FAMILIES, grad1_of, losses, rows_of
from rarely import rarely
from test_on_devices import Split
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.forms import Convolution, Form, Outer, SparseMap
from autograd_hacks.forms.composite import magnitudes
from autograd_hacks.support.philox import Stream, key_of, noise, normal, packed_signs

ROUTED = "routed experts"


def step(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    losses(out).mean().backward()
    return out.detach()


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_add_up_to_the_gradient(device: torch.device, name: str) -> None:
    model, x = FAMILIES[name].on(device)
    with autograd_hacks.add_hooks(model):
        step(model, x)
        autograd_hacks.compute_grad1(model)
        assert_close(
            {n: rows.mean(0) for n, rows in grad1_of(model).items()}, {n: p.grad for n, p in model.named_parameters()}
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_permuted_samples_have_permuted_rows(device: torch.device, name: str) -> None:
    """And a sample that is replaced changes its own row alone."""
    model, x = FAMILIES[name].on(device)
    order = torch.tensor([3, 0, 5, 1, 4, 2], device=device)
    other = torch.cat([x[1:2], x[1:]])
    with autograd_hacks.add_hooks(model):
        found = []
        for batch in (x, x[order], other):
            step(model, batch)
            autograd_hacks.compute_grad1(model)
            found.append({n: rows.clone() for n, rows in grad1_of(model).items()})
    first, permuted, replaced = found
    assert_close(permuted, {n: rows[order] for n, rows in first.items()})
    assert_close({n: rows[1:] for n, rows in replaced.items()}, {n: rows[1:] for n, rows in first.items()})
    assert any(not torch.allclose(replaced[n][0], rows[0]) for n, rows in first.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_keep_their_bits(device: torch.device, name: str) -> None:
    """In proven steps and others.  On a GPU torch's own sums by index come in any order, unless it is told otherwise."""
    model, x = FAMILIES[name].on(device, torch.float32)
    has_sums_by_index = device.type == "cuda" and name in ("causal language model", "embedding bag", ROUTED)
    plain = step(model, x), {n: p.grad.clone() for n, p in model.named_parameters()}
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            model.zero_grad()
            out = step(model, x)
            grads = {n: p.grad for n, p in model.named_parameters()}
            if has_sums_by_index:
                assert_close((out, grads), plain)
                continue
            assert torch.equal(out, plain[0])
            assert all(torch.equal(g, plain[1][n]) for n, g in grads.items())


def cancelling(kind: str, device: torch.device) -> Form:
    """Rows in single precision that are 10⁻⁴ of what they are sums of."""
    torch.manual_seed(0)
    half, x = torch.randn(4, 32, 8), torch.randn(4, 32, 6)
    g = torch.cat([half, -half + 1e-4 * torch.randn(4, 32, 8)], 1).to(device)
    x = torch.cat([x, x], 1).to(device)
    if kind == "outer":
        return Outer(g, x)
    return Convolution(x.mT.contiguous(), g.mT.contiguous(), torch.Size((8, 6, 1)), [1], [0], [1], 1)


@pytest.mark.parametrize("kind", ["outer", "convolution"])
def test_positions_that_cancel_in_single_precision(device: torch.device, kind: str) -> None:
    form = cancelling(kind, device)
    exact = form.to(torch.float64).dense().flatten(1)
    for found, right in [
        (form.norms(), exact.norm(dim=1)),
        (form.gram(form), exact @ exact.mT),
        (form.dense().flatten(1), exact),
    ]:
        error = (found.double() - right).abs().amax() / right.abs().amax()
        assert error < 2e-2  # 10⁻⁷ of the terms is 10⁻³ of the rows
    assert exact.norm() < 1e-2 * magnitudes(form).to(torch.float64).dense().norm()


def test_random_bits_are_those_of_the_cpu(device: torch.device) -> None:
    """Written down, so that no version and no device has others."""
    key, cpu = key_of("bits", 1), torch.device("cpu")
    signs = packed_signs(key, slice(0, 300), slice(0, 1000), device)
    assert signs.device.type == device.type
    assert torch.equal(signs.cpu(), packed_signs(key, slice(0, 300), slice(0, 1000), cpu))
    assert signs[0, :4].tolist() == BITS
    assert torch.equal(noise((70, 999), key, device).cpu(), noise((70, 999), key, cpu))
    streams, counts = [Stream.of("bits", n) for n in range(3)], [5, 70_000, 257]
    both = [normal(streams, counts, 0.7, where, torch.float64) for where in (device, cpu)]
    assert all(torch.equal(one.cpu(), other) for one, other in zip(*both))
    found, right = (SparseMap("p", torch.Size((70, 999)), 64, 1, 2).hashes(where) for where in (device, cpu))
    for one, other in zip(found, right):
        for field in ("row_place", "column_place", "row_sign", "column_sign"):
            assert torch.equal(getattr(one, field).cpu(), getattr(other, field))


BITS = [167, 233, 0, 67]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than two GPUs")
def test_two_gpus() -> None:
    torch.manual_seed(0)
    model, x = Split(torch.device("cuda:0"), torch.device("cuda:1")).double(), torch.randn(6, 5, dtype=torch.float64)
    expected = rows_of(model, x)
    matrix = torch.cat([own.flatten(1).cpu() for own in expected.values()], 1)
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            model.zero_grad()
            step(model, x)
            autograd_hacks.compute_grad1(model)
        assert_close(grad1_of(model), expected)
        grads = autograd_hacks.per_sample_grads(model)
        assert_close(grads.norms().cpu(), matrix.norm(dim=1))
        assert_close(grads.gram().cpu(), matrix @ matrix.mT)
        v = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        assert_close(grads.dot(v).cpu(), matrix.sum(1))
        autograd_hacks.clip_grad1_norm_(model, 0.1)
        assert {p.grad.device for p in model.parameters()} == {p.device for p in model.parameters()}


@pytest.mark.parametrize("has_gpu", [True, *rarely(False)])
def test_warnings_fail_no_test_on_a_gpu(has_gpu: bool, tmp_path: pytest.TempPathFactory) -> None:
    source = f"""
import warnings, conftest
def pytest_collection_modifyitems(items):
    conftest.let_warn(items, {has_gpu})
"""
    (tmp_path / "plugin_of_this.py").write_text(source)
    (tmp_path / "test_it.py").write_text("import warnings\ndef test_it(): warnings.warn('kernel not used')")
    here = str(__file__).rpartition("/")[0]
    told = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "plugin_of_this", "--rootdir", str(tmp_path)]
    ran = subprocess.run(
        [*told, str(tmp_path)],
        env={"PYTHONPATH": f"{tmp_path}:{here}", "PATH": ""},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (ran.returncode == 0) == has_gpu, ran.stdout + ran.stderr
