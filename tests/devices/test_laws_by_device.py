"""The laws of models on each device: sums of rows, permuted samples, a program that isn't touched; positions that cancel in
single precision; random bits; and warnings of torch's, which fail no test on a GPU."""

import re
import subprocess
import sys

import pytest
import torch
import torch.nn as nn
from by_device import FAMILIES, losses
from hypothesis import given, settings
from hypothesis import strategies as st
from rarely import rarely
from strategies import forms
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.forms import Convolution, Form, Outer, RandomMap, SparseMap
from autograd_hacks.forms.composite import magnitudes
from autograd_hacks.support.draws import Secret, normal
from autograd_hacks.support.philox import key_of, noise, packed_signs

ROUTED = "routed experts"


def step(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    losses(out).mean().backward()
    return out.detach()


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
    found, right = (SparseMap("p", torch.Size((70, 999)), 64, 1, 2).hashes(where) for where in (device, cpu))
    for one, other in zip(found, right):
        for field in ("row_place", "column_place", "row_sign", "column_sign"):
            assert torch.equal(getattr(one, field).cpu(), getattr(other, field))


def test_a_secrets_numbers_are_drawn_on_the_device(device: torch.device) -> None:
    one, same, other = (normal(Secret.of(n), 70_000, 0.7, device, torch.float32) for n in (1, 1, 2))
    assert one.device.type == device.type
    assert torch.equal(one, same)
    assert not (one == other).any()
    assert float(one.std()) == pytest.approx(0.7, rel=0.02)


BITS = [167, 233, 0, 67]


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


# The laws of forms on each device, and shapes of all verbs on the meta device, where a tensor of the CPU is noticed


shapes = st.lists(st.integers(1, 3), min_size=2, max_size=3).map(tuple)


def drawn(data: st.DataObject, device: torch.device | str) -> Form:
    torch.manual_seed(data.draw(st.integers(0, 999)))
    with torch.device(device):
        return data.draw(forms(data.draw(st.integers(0, 4)), data.draw(shapes)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="tests/forms has the laws on the CPU")
@settings(max_examples=200)
@given(st.data())
def test_every_verb_equals_its_definition(data: st.DataObject) -> None:
    form = drawn(data, "cuda")
    double = {"dtype": torch.float64, "device": form.like.device}
    v, w = torch.randn(form.shape, **double), torch.randn(form.samples, **double)
    random, written = RandomMap("p", form.shape, 40, 3), form.dense().reshape(form.samples, form.shape.numel())
    columns = [(a[:, :, None] * b[:, None]).flatten(1).mT for _, a, b in random.columns(torch.zeros(0, **double))]
    for got, by_hand in [
        (form.norms(), written.norm(dim=1)),
        (form.dot(v), written @ v.flatten()),
        (form.weighted_sum(w), (w @ written).view(form.shape)),
        (form.gram(form), written @ written.mT),
        (form.second_moment(w), (w @ written.square()).view(form.shape)),
        (form.project(random), written @ torch.cat(columns, 1)),
        (form.cross(form), written.mT @ written),
        (form[: form.samples // 2].dense().flatten(1), written[: form.samples // 2]),
        (form.norms(100), written.norm(dim=1)),
    ]:
        assert_close(got, by_hand)


@settings(max_examples=40)
@given(st.data())
def test_shapes_on_the_meta_device(data: st.DataObject) -> None:
    """Each verb returns a meta tensor of the right shape, or torch says which operation wants values."""
    with refused_at_most_for_values():
        form = drawn(data, "meta")
        samples, shape = form.samples, tuple(form.shape)
        double = {"dtype": torch.float64, "device": "meta"}
        v, w = torch.randn(shape, **double), torch.randn(samples, **double)
        for verb, expected in [
            (form.dense, (samples, *shape)),
            (form.norms, (samples,)),
            (lambda: form.dot(v), (samples,)),
            (lambda: form.weighted_sum(w), shape),
            (lambda: form.gram(form), (samples, samples)),
            (lambda: form.second_moment(w), shape),
            (lambda: form.project(RandomMap("p", form.shape, 40, 3)), (samples, 40)),
            (lambda: form[:1].dense(), (min(samples, 1), *shape)),
        ]:
            with refused_at_most_for_values():
                found: Tensor = verb()
                assert found.is_meta
                assert tuple(found.shape) == expected


class refused_at_most_for_values:
    """Errors that torch raises because meta tensors have no values are passed over, and no others."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if error is None or not issubclass(kind or object, NotImplementedError | RuntimeError):
            return False
        assert not re.search("(same|expected) device", str(error)), error
        return "meta" in str(error).lower()


def test_a_tensor_of_the_cpu_is_noticed() -> None:
    with pytest.raises(AssertionError, match="expected device"), refused_at_most_for_values():
        torch.ones(3, 3, device="meta") @ torch.ones(3)
    with pytest.raises(AssertionError), refused_at_most_for_values():
        assert torch.ones(3).is_meta
