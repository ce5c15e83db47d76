"""Precisions, autocast, scalers, inference mode, and devices without memory."""

import copy

import pytest
import torch
import torch.nn as nn
from mixing import steps_of
from nets import choosy, noisy
from oracle import assert_rows, one_backward_per_sample, squares
from torch.testing import assert_close
from twin import Bare

import autograd_hacks


def scaled() -> nn.Module:
    """A layer, a bare parameter and a lookup."""
    return Bare(
        lambda m, x: m.layer(x + m.positions(torch.arange(x.shape[1]))) * m.scale,
        layer=nn.Linear(3, 4), scale=torch.randn(4), positions=nn.Embedding(5, 3),
    )  # fmt: skip


# A node that is asked, of what autocast makes of a parameter; a parameter in half precision that meets complex numbers.
CAST = {
    "scaled": scaled,
    "solved": lambda: Bare(lambda m, x: torch.linalg.solve(m.a @ m.a.T + torch.eye(3), x.mean(1).T).T, a=torch.randn(3, 3)),
    "filtered": lambda: Bare(
        lambda m, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * m.f, n=5, dim=1), f=torch.randn(3, 3).bfloat16()
    ),
}


@pytest.mark.parametrize(("name", "dtype"), [("scaled", torch.float16), *((name, torch.bfloat16) for name in CAST)])
def test_autocast_around_rules_and_replays(name: str, dtype: torch.dtype) -> None:
    model, context = CAST[name](), torch.autocast("cpu", dtype)
    for _ in steps_of(model, [(torch.randn(4, 5, 3),)] * 2, context=context):
        autograd_hacks.compute_grad1(model)
        for p in model.parameters():
            assert p.grad1.dtype == p.dtype
            assert_close(p.grad1.mean(0), p.grad, rtol=0.05, atol=0.05 * float(p.grad.abs().max()))
    with context:  # the probe must not leave weights without gradients in autocast's memory
        fresh = CAST[name]()
        with autograd_hacks.add_hooks(fresh):
            squares(fresh(torch.randn(4, 5, 3)).float()).mean().backward()
            assert all(p.grad is not None for p in fresh.parameters())


def test_the_scale_of_a_grad_scaler_is_divided_out() -> None:
    for model, shape in ((scaled().double(), (4, 5, 3)), (nn.Sequential(nn.Linear(3, 3), choosy()).double(), (4, 3))):
        x = torch.randn(shape).double()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with autograd_hacks.add_hooks(model):
            for kind in (float, torch.tensor):
                model.zero_grad()
                scaler.scale(squares(model(x)).mean()).backward()
                autograd_hacks.compute_grad1(model, scale=kind(scaler.get_scale()))
                with autograd_hacks.pause_hooks():
                    assert_rows(model, one_backward_per_sample(model, squares, x))


def test_meta_tensors_have_shapes() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(3, 4), noisy(4), nn.LayerNorm(4), nn.Linear(4, 2)), torch.randn(5, 6, 3)
    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        for p in model.parameters():
            assert p.grad1.is_meta
            assert p.grad1.shape == (5, *p.shape)


@pytest.mark.parametrize("positions", [128, 1024])
@pytest.mark.parametrize("last", [nn.LayerNorm(16), nn.Conv1d(16, 16, 1)], ids=["norm", "convolution"])
def test_sums_over_many_equal_positions_are_no_unseen_gradient(last: nn.Module, positions: int) -> None:
    """torch adds gradients of biases up one after the other, in single precision: what arrives is a little off."""
    torch.manual_seed(0)
    is_norm = isinstance(last, nn.LayerNorm)
    first, size = (nn.Linear(3, 16), (32, positions, 3)) if is_norm else (nn.Conv1d(3, 16, 1), (32, 3, positions))
    model, x = nn.Sequential(first, last), torch.randn(size)
    weights, axis = torch.randn(16), 1 if is_norm else 2
    exact = copy.deepcopy(model).double()
    (exact(x.double()).mean(axis) @ weights.double()).mean().backward()
    autograd_hacks.add_hooks(model)
    (model(x).mean(axis) @ weights).mean().backward()
    autograd_hacks.compute_grad1(model)
    for p, right in zip(model.parameters(), exact.parameters()):
        assert_close(p.grad1.mean(0).double(), right.grad, rtol=1e-4, atol=1e-4 * float(right.grad.abs().max()) + 1e-6)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.LayerNorm(1), (2, 1)),
        (nn.LayerNorm(8), (6, 8)),
        (nn.GroupNorm(2, 8), (6, 8, 3)),
        (nn.InstanceNorm1d(4, affine=True), (6, 4, 5)),
    ],
    ids=lambda value: str(value),
)
def test_norms_of_what_hardly_varies_around_a_large_mean(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """Rounding of the input is then as large as what is normalised."""
    for dtype in (torch.float32, torch.float64):
        model = copy.deepcopy(layer).to(dtype)
        x = 1000 * torch.randn(shape[0], *[1] * (len(shape) - 1), dtype=dtype) + torch.randn(shape, dtype=dtype)
        net = nn.Sequential(model, nn.Flatten())
        for _ in steps_of(net, [(x,)] * 3):
            autograd_hacks.compute_grad1(net)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_token_many_times_in_half_precision_is_not_refused(dtype: torch.dtype) -> None:
    """torch adds its gradients one after the other there, and loses most of their digits."""
    for samples in (1, 4):
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)).to(dtype)
        autograd_hacks.add_hooks(model)
        tokens = torch.zeros(samples, 200, dtype=torch.long)
        tokens[:, 0] = torch.randint(5, (samples,))
        model(tokens).float().square().sum((1, 2)).mean().backward()
        autograd_hacks.compute_grad1(model)
        with torch.no_grad():
            g = 2 * model(tokens).float() @ model[1].weight.float()
        expected = torch.zeros(samples, 5, 4).index_put_((torch.arange(samples)[:, None], tokens), g, accumulate=True)
        assert_close(model[0].weight.grad1.float(), expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
