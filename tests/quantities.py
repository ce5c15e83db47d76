"""What `PerSampleGrads` must say, from rows that were written out by one backward pass per sample."""

import torch
import torch.nn as nn
from oracle import joined
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.forms import RandomMap, SparseMap

Rows = dict[str, Tensor | None]


def matrix(rows: Rows, model: nn.Module) -> Tensor:
    """J, (N, P), zeros where no loss arrived."""
    samples, dtype = next(len(x) for x in rows.values() if x is not None), next(model.parameters()).dtype
    own = {name: model.get_parameter(name) for name in rows}
    return joined(
        {name: p.new_zeros(samples, *p.shape) if rows[name] is None else rows[name] for name, p in own.items()}
    ).to(dtype)


def assert_quantities(
    model: nn.Module, rows: Rows, loss_type: str = "mean", max_bytes: int = 2**26, **tolerance: float
) -> None:
    """Every verb of the whole model against algebra on the rows, before anything else changes."""
    grads = autograd_hacks.per_sample_grads(model, loss_type)
    written, device = matrix(rows, model), next(model.parameters()).device
    samples = len(written)
    assert list(grads) == list(rows)
    assert grads.samples == samples
    v, w = {name: torch.randn_like(p) for name, p in model.named_parameters() if name in rows}, torch.randn(2, samples)
    flat, w = torch.cat([v[name].flatten() for name in rows]), w.to(written)

    def split(vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split([v[name].numel() for name in rows], dim=-1)
        return {name: part.view(*part.shape[:-1], *v[name].shape) for name, part in zip(rows, parts)}

    def same(got: Tensor | dict[str, Tensor], expected: Tensor | dict[str, Tensor], what: str) -> None:
        if isinstance(got, dict):
            assert isinstance(expected, dict)
            assert list(got) == list(expected)
            for name in got:
                same(got[name], expected[name], f"{what} of {name}")
            return
        assert isinstance(expected, Tensor)
        size = float(expected.abs().max()) if expected.numel() else 1.0
        close = {"rtol": 1e-5, "atol": 1e-7 * max(1.0, size)} | tolerance
        assert_close(got, expected.to(got), msg=lambda m: f"{what}: {m}", **close)

    same(grads.norms(max_bytes=max_bytes), written.norm(dim=1), "norms")
    same(
        grads.norms(True, max_bytes), {n: p.flatten(1).norm(dim=1) for n, p in split(written).items()}, "norms by parameter"
    )
    same(grads.weighted_sum(w[0], max_bytes), split(w[0] @ written), "weighted_sum")
    same(grads.weighted_sum(w, max_bytes), split(w @ written), "weighted sums")
    same(grads.dot(v, max_bytes), written @ flat, "dot")
    same(grads.gram(max_bytes=max_bytes), written @ written.mT, "gram")
    same(grads.gram(grads.select(slice(1)), max_bytes), written @ written[:1].mT, "gram with some")
    same(grads.second_moment(max_bytes=max_bytes), split(written.square().sum(0)), "second_moment")
    same(grads.second_moment(w[1], max_bytes), split(w[1] @ written.square()), "weighted second_moment")
    same(grads.reduce(torch.tanh, max_bytes), split(written.tanh().sum(0)), "reduce")
    same(grads.second_moment(None, max_bytes, about=v), split((written - flat).square().sum(0)), "second_moment about v")
    maps = [RandomMap(name, v[name].shape, 3, 7) for name in rows]
    columns = [torch.cat([(u[:, :, None] * r[:, None]).flatten(1).mT for _, u, r in m.columns(written)], 1) for m in maps]
    same(grads.project(3, seed=7, max_bytes=max_bytes), written @ torch.cat(columns), "project")
    ids = torch.arange(samples, device=device) % 2
    grouped = torch.zeros(2, written.shape[1]).to(written).index_add(0, ids, written)
    same(grads.group(ids, 2).norms(), grouped.norm(dim=1), "group")
    same(grads.group(ids, 2).reduce(torch.abs, max_bytes), split(grouped.abs().sum(0)), "reduce of groups")
    picked = torch.arange(samples, device=device).flip(0)[:2]
    same(grads.select(picked).dense(), split(written[picked]), "select")
    clip = float(written.norm(dim=1).median()) if samples else 0.0
    clip = clip or 1.0
    kept = {name: p.grad for name, p in model.named_parameters()}
    same(
        autograd_hacks.clip_grad1_norm_(model, clip, loss_type, max_bytes=max_bytes),
        written.norm(dim=1),
        "norms of clip_grad1_norm_",
    )
    weights = (clip / written.norm(dim=1)).clamp(max=1) / (samples if loss_type == "mean" else 1)
    for name, expected in split(weights @ written).items():
        grad = model.get_parameter(name).grad
        assert (grad is None) == (rows[name] is None)
        if grad is not None:
            same(grad, expected, f"clipped gradient of {name}")
    for name, p in model.named_parameters():
        p.grad = kept[name]


def assert_rows_of_passes(model: nn.Module, output: Tensor, **tolerance: float) -> None:
    """The rows of `backprop_hess`: their weighted sums are one backward pass from the weighted vectors, and J v is adjoint.

    output: of the model, N first
    """
    z = output.flatten(1)
    autograd_hacks.backprop_hess(z, "Jacobian", draws=2, generator=torch.Generator().manual_seed(0))
    grads = autograd_hacks.per_sample_grads(model)
    draws = torch.Generator().manual_seed(0)
    vectors = [torch.randn(z.shape, dtype=z.dtype, generator=draws) / 2**0.5 for _ in range(2)]
    w = torch.randn(2, len(z), dtype=z.dtype)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with autograd_hacks.pause_hooks():
        pulled = sum(own[:, None] * s for own, s in zip(w, vectors))
        expected = torch.autograd.grad(z, list(parameters.values()), pulled, materialize_grads=True, allow_unused=True)
    found = grads.weighted_sum(w.flatten())
    for name, right in zip(parameters, expected):
        size = float(right.abs().max()) if right.numel() else 1.0
        close = {"rtol": 1e-5, "atol": 1e-7 * max(1.0, size)} | tolerance
        assert_close(found[name], right, msg=lambda m, name=name: f"rows of passes, {name}: {m}", **close)
    v = {name: torch.randn_like(p) for name, p in parameters.items()}
    along = grads.dot(v).to(w) @ w.flatten()
    close = {"rtol": 1e-5, "atol": 1e-6} | tolerance
    assert_close(along, sum((v[name] * right).sum().to(w) for name, right in zip(parameters, expected)), **close)


def map_of(random: SparseMap) -> Tensor:
    """R, (P, dim), number by number."""
    (fan_out, fan_in), own = random.fans, random.hashes(torch.device("cpu"))
    written = torch.zeros(fan_out * fan_in, random.dim, dtype=torch.float64)
    for o in range(fan_out):
        for i in range(fan_in):
            place = (int(own.row_place[o]) + int(own.column_place[i])) % random.dim
            written[o * fan_in + i, place] += int(own.row_sign[o]) * int(own.column_sign[i])
    return written
